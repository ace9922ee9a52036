//! Limit on the new connections that a server may take, kept as a token bucket. The bucket grows by
//! [`MAX_FAIR_SHARE_MULTIPLE`] times the server's fair share of opened connections. It shrinks by the connections that
//! the server gets. A server whose bucket is empty gets no new connection.

/// Maximum long-term ratio of a server's new connections to its fair share of the new connections.
pub const MAX_FAIR_SHARE_MULTIPLE: f64 = 2.0;
/// Time (s) in which an empty connection allowance becomes full. A server that joins starts with a full allowance.
const CONNECTION_ALLOWANCE_FILL_SECONDS: f64 = 10.0;
/// Minimum number of connections in a full allowance, because fewer would judge a server by chance.
const MIN_FULL_ALLOWANCE_CONNECTIONS: f64 = 64.0;
/// Weight of the newest second in the moving average of a server's fair share (connections per second).
const FAIR_SHARE_AVERAGE_WEIGHT: f64 = 0.1;

/// Number of new connections that one server may still take, which is the fill level of its token bucket.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct ConnectionAllowance {
    remaining_connections: f64,
    /// Moving average of the server's fair share of new connections per second.
    fair_share_per_second: f64,
    is_limited: bool,
}

impl ConnectionAllowance {
    /// Returns the full allowance of a server whose fair share is `fair_share_per_second` connections per second.
    pub fn full_for_fair_share(fair_share_per_second: f64) -> Self {
        Self {
            remaining_connections: Self::full_allowance_connections(fair_share_per_second),
            fair_share_per_second,
            is_limited: false,
        }
    }

    fn full_allowance_connections(fair_share_per_second: f64) -> f64 {
        (MAX_FAIR_SHARE_MULTIPLE * CONNECTION_ALLOWANCE_FILL_SECONDS * fair_share_per_second)
            .max(MIN_FULL_ALLOWANCE_CONNECTIONS)
    }

    /// Updates the allowance after an interval of `interval_seconds` (at most 10). `fair_share_connections` is the
    /// server's fair share of the interval's new connections, and `opened_connections` is the number that it got.
    pub fn update_after_interval(
        &mut self,
        fair_share_connections: f64,
        opened_connections: f64,
        interval_seconds: f64,
    ) {
        self.fair_share_per_second +=
            FAIR_SHARE_AVERAGE_WEIGHT * (fair_share_connections - self.fair_share_per_second * interval_seconds);
        let max_remaining_connections = Self::full_allowance_connections(self.fair_share_per_second);
        self.remaining_connections = (self.remaining_connections + MAX_FAIR_SHARE_MULTIPLE * fair_share_connections
            - opened_connections)
            .clamp(-max_remaining_connections, max_remaining_connections);
        self.is_limited =
            self.remaining_connections < if self.is_limited { max_remaining_connections / 2.0 } else { 0.0 };
    }

    /// Returns whether the allowance is exhausted, so that the server may take no new connection.
    pub fn is_spent(&self) -> bool {
        self.remaining_connections < 0.0
    }

    /// Returns whether the server is limited because its allowance was exhausted. The limit ends when half of the
    /// allowance is back.
    pub fn is_limited(&self) -> bool {
        self.is_limited
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn server_with_an_exhausted_allowance_is_limited_until_half_is_refilled() {
        let mut allowance = ConnectionAllowance::full_for_fair_share(100.0);
        let seconds_until_limit_state = |allowance: &mut ConnectionAllowance, opened_connections, is_limited| {
            (1..100).find(|_| {
                allowance.update_after_interval(100.0, opened_connections, 1.0);
                allowance.is_limited() == is_limited
            })
        };
        // The allowance is 2,000. It shrinks by 200 a second, then grows by 100 a second.
        assert_eq!(seconds_until_limit_state(&mut allowance, 400.0, true), Some(11));
        assert_eq!(seconds_until_limit_state(&mut allowance, 100.0, false), Some(12));
    }

    #[test]
    fn greedy_server_gets_twice_its_fair_share() {
        let mut allowance = ConnectionAllowance::full_for_fair_share(100.0);
        let mut connections_opened_in = |seconds: u32| {
            let connections_by_second = (0..seconds).map(|_| {
                let opened_connections = if allowance.is_spent() { 0.0 } else { 1_000.0 };
                allowance.update_after_interval(100.0, opened_connections, 1.0);
                opened_connections
            });
            connections_by_second.sum::<f64>()
        };
        connections_opened_in(60);
        assert_eq!(connections_opened_in(60), 60.0 * MAX_FAIR_SHARE_MULTIPLE * 100.0);
    }

    #[test]
    fn allowance_is_independent_of_the_update_interval() {
        let (mut full_second_allowance, mut quarter_second_allowance) =
            (ConnectionAllowance::full_for_fair_share(100.0), ConnectionAllowance::full_for_fair_share(100.0));
        for _ in 0..30 {
            full_second_allowance.update_after_interval(200.0, 300.0, 1.0);
            (0..4).for_each(|_| quarter_second_allowance.update_after_interval(50.0, 75.0, 0.25));
        }
        assert!(
            (full_second_allowance.fair_share_per_second / quarter_second_allowance.fair_share_per_second - 1.0).abs()
                < 0.01,
            "{full_second_allowance:?} {quarter_second_allowance:?}"
        );
        assert!(
            (full_second_allowance.remaining_connections / quarter_second_allowance.remaining_connections - 1.0).abs()
                < 0.01,
            "{full_second_allowance:?} {quarter_second_allowance:?}"
        );
    }

    #[test]
    fn server_with_twice_its_fair_share_is_never_limited() {
        let mut allowance = ConnectionAllowance::full_for_fair_share(100.0);
        for _ in 0..1_000 {
            allowance.update_after_interval(100.0, MAX_FAIR_SHARE_MULTIPLE * 100.0, 1.0);
            assert!(!allowance.is_limited());
        }
    }
}
