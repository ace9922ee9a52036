//! Measurement of how many new connections a server gets while an impostor reports idle cores for it.

use std::fmt;
use std::net::SocketAddr;
use std::time::{Duration, Instant};

use coreward_model::connection_allowance::MAX_FAIR_SHARE_MULTIPLE;
use serde::Serialize;

use crate::http::HttpConnection;
use crate::interrupt_flag;

/// Time during which the impostor reports idle cores (s).
const FALSE_REPORT_SECONDS: usize = 30;
/// Duration of the first measurement of the server's share (s). The share is still unlimited then, because the
/// controller must count connections before it limits a server.
const INITIAL_MEASUREMENT_SECONDS: usize = 5;
/// Duration of the last measurement of the server's share (s), during which the controller must limit it.
const FINAL_MEASUREMENT_SECONDS: usize = 10;
/// Delay until the controller has counted a connection (s). Until then the server's share may exceed the limit. The
/// controller counts four times a second, and load balancers report ten times a second.
const MAX_CONNECTION_COUNT_DELAY_SECONDS: f64 = 0.35;
const CONNECTION_INTERVAL: Duration = Duration::from_millis(8);
/// Number of standard deviations by which a server's share may exceed the limit by chance before the test fails.
const MAX_SHARE_STANDARD_DEVIATIONS: f64 = 5.0;

/// Shares of new connections that a server got while an impostor reported idle cores for it.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct ByzantineConnectionShare {
    /// Share of all new connections (0 to 1) that the server would get if its reports were true.
    pub fair_share: f64,
    pub seconds: Vec<[u64; 2]>,
}

impl ByzantineConnectionShare {
    /// Measures the server's share by opening connections while the impostor reports. Must be called in the client's
    /// namespace. `server_count` is the number of servers in the fleet. Fails when a connection breaks, or after a
    /// signal.
    pub fn measure_connection_share(
        service: SocketAddr,
        impostor_number: u16,
        server_count: u16,
    ) -> anyhow::Result<Self> {
        let start = Instant::now();
        let mut counts_by_second = vec![[0, 0]; FALSE_REPORT_SECONDS];
        while let Some([impostor_connections, all_connections]) =
            counts_by_second.get_mut(start.elapsed().as_secs() as usize)
        {
            interrupt_flag::ensure_not_interrupted()?;
            *impostor_connections +=
                u64::from(HttpConnection::open_to(service, None)?.query_worker()?.server_number == impostor_number);
            *all_connections += 1;
            std::thread::sleep(CONNECTION_INTERVAL);
        }
        Ok(Self { fair_share: 1.0 / f64::from(server_count), seconds: counts_by_second })
    }

    /// Returns the server's share of the connections (0 to 1), and the total number of connections.
    fn connection_share_and_count(seconds: &[[u64; 2]]) -> (f64, u64) {
        let [impostor_connections, all_connections] =
            seconds.iter().fold([0, 0], |sum, second| [sum[0] + second[0], sum[1] + second[1]]);
        (impostor_connections as f64 / all_connections.max(1) as f64, all_connections.max(1))
    }

    fn initial_connection_share(&self) -> f64 {
        Self::connection_share_and_count(&self.seconds[..INITIAL_MEASUREMENT_SECONDS]).0
    }

    fn final_connection_share_and_count(&self) -> (f64, u64) {
        Self::connection_share_and_count(&self.seconds[FALSE_REPORT_SECONDS - FINAL_MEASUREMENT_SECONDS..])
    }

    fn max_connection_share(&self) -> f64 {
        MAX_FAIR_SHARE_MULTIPLE * self.fair_share
    }

    /// Returns whether the server got significantly more new connections than the controller's limit allows.
    pub fn is_over_limit(&self) -> bool {
        let (limit, (share, connections)) = (self.max_connection_share(), self.final_connection_share_and_count());
        share
            > limit
                + MAX_CONNECTION_COUNT_DELAY_SECONDS / FINAL_MEASUREMENT_SECONDS as f64
                + MAX_SHARE_STANDARD_DEVIATIONS * (limit * (1.0 - limit) / connections as f64).sqrt()
    }
}

impl fmt::Display for ByzantineConnectionShare {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let percentages = [
            self.initial_connection_share(),
            self.final_connection_share_and_count().0,
            self.fair_share,
            self.max_connection_share(),
        ]
        .map(|share| 100.0 * share);
        let [initial_percentage, final_percentage, fair_share, limit] = percentages;
        write!(
            f,
            "{initial_percentage:.1} % of new connections in the first {INITIAL_MEASUREMENT_SECONDS} s, \
             {final_percentage:.1} % in the last {FINAL_MEASUREMENT_SECONDS} s; fair share {fair_share:.1} %, limit \
             {limit:.1} %"
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn random_shares_do_not_exceed_the_limit() {
        let share_in_last_seconds = |impostor_connections| ByzantineConnectionShare {
            fair_share: 0.25,
            seconds: [
                vec![[100, 100]; FALSE_REPORT_SECONDS - FINAL_MEASUREMENT_SECONDS],
                vec![[impostor_connections, 100]; FINAL_MEASUREMENT_SECONDS],
            ]
            .concat(),
        };
        assert!(!share_in_last_seconds(61).is_over_limit());
        assert!(share_in_last_seconds(62).is_over_limit());
    }
}
