//! Arrival logs, which list the start, the requests and the service times of a client's connections.
//!
//! A log is drawn once from a seed and then replayed under every policy, whether or not earlier requests were answered
//! (open loop). The demo replays it with real packets, the simulator in virtual time. The log has each connection's
//! source address and port, so that RSS and the load balancer's hash get the same 4-tuples in each run.
//!
//! The file is text with one line per connection, in the order of their starts:
//!
//! ```text
//! coreward-arrivals 1 seed=1 duration_us=38000000 source_addresses=2
//! start_us source_address source_port requests interval_us service_us
//! 5120 1 41233 1 10000 7500
//! ```

use std::collections::HashSet;
use std::fmt;
use std::net::Ipv4Addr;
use std::str::FromStr;

use rand::Rng as _;

use crate::FourTuple;
use crate::rss::{seeded_rng, uniform_below};

/// Number of the random-number stream ([`seeded_rng`]) from which arrival logs are drawn.
const ARRIVAL_LOG_RNG_STREAM: u64 = 2;

/// Range of the clients' source ports. It lies above the well-known ports and below the kernel's last ephemeral ports.
const CLIENT_SOURCE_PORT_RANGE: std::ops::RangeInclusive<u16> = 10_000..=59_999;

/// Address of the first client in the demo's network.
const FIRST_CLIENT_ADDRESS: Ipv4Addr = Ipv4Addr::new(10, 1, 0, 7);
const DEMO_VIP: Ipv4Addr = Ipv4Addr::new(10, 200, 0, 1);

/// Connection of an arrival log. Request `i` is due at `start_us + i * request_interval_us`, even if earlier ones are
/// unanswered.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ConnectionArrival {
    /// Start of the connection and of its first request (us after the log's start).
    pub start_us: u64,
    /// Index of the client's address, below [`ArrivalLog::source_address_count`].
    pub source_address_index: u16,
    /// Source port (1..=65535). The pair of address and port is unique in the log.
    pub source_port: u16,
    /// Number of requests of the connection, at least 1. The client closes the connection after the last answer.
    pub request_count: u32,
    /// Interval between two consecutive requests of the connection (us).
    pub request_interval_us: u32,
    /// Service time of each request (us), at least 1.
    pub service_us: u32,
}

impl ConnectionArrival {
    /// Returns the time at which request `index`, counted from 0, is due (us after the log's start).
    pub fn request_due_us(&self, index: u32) -> u64 {
        self.start_us + u64::from(index) * u64::from(self.request_interval_us)
    }

    /// Returns the time at which the last request is due (us after the log's start).
    pub fn last_request_due_us(&self) -> u64 {
        self.request_due_us(self.request_count - 1)
    }

    /// Returns the connection's 4-tuple in the demo's network, for runs without a real network.
    pub fn four_tuple(&self) -> FourTuple {
        let client_address = Ipv4Addr::from_bits(FIRST_CLIENT_ADDRESS.to_bits() + u32::from(self.source_address_index));
        FourTuple::ipv4((client_address, self.source_port), (DEMO_VIP, 80))
    }

    /// Returns the total service time of the connection's requests on one core (us).
    pub fn total_work_us(&self) -> u64 {
        u64::from(self.request_count) * u64::from(self.service_us)
    }
}

/// Log of the connections of one run, sorted by start time.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ArrivalLog {
    /// Seed from which the log was drawn.
    pub seed: u64,
    /// Duration of the log (us). All requests are due within it.
    pub duration_us: u64,
    /// Number of source addresses from which clients connect.
    pub source_address_count: u16,
    /// Connections, sorted by start time.
    pub arrivals: Vec<ConnectionArrival>,
}

/// Parameters of a log of many short connections ("mice"), and long ones ("elephants") that carry most of the work.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct ConnectionWorkload {
    /// Duration of the log (us). All requests are due within it.
    pub duration_us: u64,
    /// Number of cores of the whole server pool.
    pub core_count: u32,
    /// Mean load of the pool's cores, in thousandths of their capacity.
    pub mean_load_permille: u32,
    /// Service time of each request (us), at least 1.
    pub service_us: u32,
    /// Fraction of the total work that elephants cause, in thousandths.
    pub elephant_work_permille: u32,
    /// Load that one elephant causes, in thousandths of a core's mean load.
    pub elephant_load_permille: u32,
    /// Shortest and longest lifetime of an elephant (us). Lifetimes are drawn uniformly between the two.
    pub elephant_lifetime_range_us: (u64, u64),
    /// Smallest and largest number of requests of a mouse. Numbers are drawn uniformly between the two.
    pub mouse_request_count_range: (u32, u32),
    /// Interval between two consecutive requests of a mouse (us).
    pub mouse_request_interval_us: u32,
    /// Duration of the ramp-up (us), in which the elephants of a long-running pool start. Afterwards, the load is
    /// stationary.
    pub ramp_up_us: u64,
    /// Number of source addresses from which clients connect.
    pub source_address_count: u16,
}

impl Default for ConnectionWorkload {
    /// Returns the demo's workload. The load of its 16 cores is 60 %, so that a core with a few connections too many is
    /// overloaded. A request takes 7.5 ms (80 requests per second and core), so that two CPUs can run five such pools
    /// at once. A core then has about eight elephants, each with 10 % of its mean load.
    fn default() -> Self {
        Self {
            duration_us: 38_000_000,
            core_count: 16,
            mean_load_permille: 600,
            service_us: 7_500,
            elephant_work_permille: 800,
            elephant_load_permille: 100,
            elephant_lifetime_range_us: (5_000_000, 10_000_000),
            mouse_request_count_range: (1, 2),
            mouse_request_interval_us: 10_000,
            ramp_up_us: 4_000_000,
            source_address_count: 2,
        }
    }
}

impl ConnectionWorkload {
    /// Returns the interval between two consecutive requests of an elephant (us).
    pub fn elephant_request_interval_us(&self) -> u32 {
        let elephant_load_ppm = u64::from(self.mean_load_permille) * u64::from(self.elephant_load_permille);
        (u64::from(self.service_us) * 1_000_000 / elephant_load_ppm.max(1)) as u32
    }

    /// Generates the arrival log of `seed`.
    ///
    /// Starts are uniform over the run, and their number is fixed (a Poisson process conditioned on its count). Uniform
    /// draws need no logarithm, so the log is the same on every machine. The elephants that a long-running pool would
    /// already have start within the ramp-up, each with the rest of its lifetime. Panics if the log needs more than
    /// half of all pairs of source address and port.
    pub fn generate(&self, seed: u64) -> ArrivalLog {
        let mut generator = ArrivalGenerator {
            rng: seeded_rng(seed, ARRIVAL_LOG_RNG_STREAM),
            used_address_port_pairs: HashSet::new(),
            workload: *self,
        };
        let work_us_per_s = u64::from(self.core_count) * u64::from(self.mean_load_permille) * 1_000;
        let elephant_work_us_per_s = work_us_per_s * u64::from(self.elephant_work_permille) / 1_000;
        let mouse_work_us_per_s = work_us_per_s - elephant_work_us_per_s;
        let elephant_request_interval_us = self.elephant_request_interval_us();
        let (min_lifetime_us, max_lifetime_us) = self.elephant_lifetime_range_us;
        let mean_lifetime_us = (min_lifetime_us + max_lifetime_us) / 2;

        let elephant_request_rate_per_s = elephant_work_us_per_s / u64::from(self.service_us.max(1));
        let live_elephant_count = elephant_request_rate_per_s * u64::from(elephant_request_interval_us) / 1_000_000;
        let new_elephant_count = live_elephant_count * self.duration_us / mean_lifetime_us.max(1);
        let (min_request_count, max_request_count) = self.mouse_request_count_range;
        let mean_mouse_work_us = u64::from(min_request_count + max_request_count) * u64::from(self.service_us) / 2;
        let mouse_count = mouse_work_us_per_s * (self.duration_us / 1_000) / 1_000 / mean_mouse_work_us.max(1);
        let mut arrivals = Vec::new();
        arrivals.extend((0..live_elephant_count).filter_map(|_| generator.draw_ongoing_elephant_connection()));
        arrivals.extend((0..new_elephant_count).filter_map(|_| generator.draw_new_elephant_connection()));
        arrivals.extend((0..mouse_count).filter_map(|_| generator.draw_mouse_connection()));
        arrivals.sort_by_key(|arrival| (arrival.start_us, arrival.source_address_index, arrival.source_port));
        ArrivalLog { seed, duration_us: self.duration_us, source_address_count: self.source_address_count, arrivals }
    }
}

struct ArrivalGenerator {
    rng: rand_xoshiro::Xoshiro256PlusPlus,
    used_address_port_pairs: HashSet<(u16, u16)>,
    workload: ConnectionWorkload,
}

impl ArrivalGenerator {
    /// Returns a uniform random number below `exclusive_bound` (0 for a bound of 0). The bias of a 64-bit remainder is
    /// below 2^-30 here.
    fn random_below(&mut self, exclusive_bound: u64) -> u64 {
        self.rng.next_u64() % exclusive_bound.max(1)
    }

    /// Returns a uniform random number from `min_value` to `max_value`, both included.
    fn random_between(&mut self, min_value: u64, max_value: u64) -> u64 {
        min_value + self.random_below(max_value - min_value + 1)
    }

    /// Draws an elephant that a long-running pool would already have, which starts within the ramp-up. Returns `None`
    /// if its lifetime ends before its start.
    fn draw_ongoing_elephant_connection(&mut self) -> Option<ConnectionArrival> {
        let (min_lifetime_us, max_lifetime_us) = self.workload.elephant_lifetime_range_us;
        // Elephants that live at a random time have longer lifetimes than the average. So a lifetime is drawn with a
        // probability in proportion to its length.
        let lifetime_us = loop {
            let lifetime_us = self.random_between(min_lifetime_us, max_lifetime_us);
            if self.random_below(max_lifetime_us) < lifetime_us {
                break lifetime_us;
            }
        };
        let (end_us, start_us) = (self.random_below(lifetime_us), self.random_below(self.workload.ramp_up_us));
        let remaining_lifetime_us = end_us.checked_sub(start_us).filter(|remaining_us| *remaining_us > 0)?;
        self.create_elephant_connection(start_us, remaining_lifetime_us)
    }

    fn draw_new_elephant_connection(&mut self) -> Option<ConnectionArrival> {
        let (min_lifetime_us, max_lifetime_us) = self.workload.elephant_lifetime_range_us;
        let start_us = self.random_below(self.workload.duration_us);
        let lifetime_us = self.random_between(min_lifetime_us, max_lifetime_us);
        self.create_elephant_connection(start_us, lifetime_us)
    }

    fn draw_mouse_connection(&mut self) -> Option<ConnectionArrival> {
        let (min_request_count, max_request_count) = self.workload.mouse_request_count_range;
        let start_us = self.random_below(self.workload.duration_us);
        let request_count = self.random_between(u64::from(min_request_count), u64::from(max_request_count)) as u32;
        self.create_connection_within_log(start_us, request_count, self.workload.mouse_request_interval_us)
    }

    fn create_elephant_connection(&mut self, start_us: u64, lifetime_us: u64) -> Option<ConnectionArrival> {
        let interval_us = self.workload.elephant_request_interval_us();
        self.create_connection_within_log(start_us, (lifetime_us / u64::from(interval_us)) as u32 + 1, interval_us)
    }

    /// Returns a connection whose requests are all due within the log, or `None` if it would start after the log's end.
    fn create_connection_within_log(
        &mut self,
        start_us: u64,
        request_count: u32,
        interval_us: u32,
    ) -> Option<ConnectionArrival> {
        let remaining_log_us = self.workload.duration_us.checked_sub(start_us + 1)?;
        let request_count = u64::from(request_count).min(remaining_log_us / u64::from(interval_us.max(1)) + 1) as u32;
        let (source_address_index, source_port) = self.draw_unused_address_and_port();
        let service_us = self.workload.service_us;
        Some(ConnectionArrival {
            start_us,
            source_address_index,
            source_port,
            request_count,
            request_interval_us: interval_us,
            service_us,
        })
    }

    fn draw_unused_address_and_port(&mut self) -> (u16, u16) {
        let (first_port, last_port) = (*CLIENT_SOURCE_PORT_RANGE.start(), *CLIENT_SOURCE_PORT_RANGE.end());
        let port_count = u32::from(last_port - first_port) + 1;
        let address_port_pair_count = port_count as usize * usize::from(self.workload.source_address_count);
        // The search for a free pair of address and port is slow if most pairs are used. No log needs that many.
        assert!(
            self.used_address_port_pairs.len() < address_port_pair_count / 2,
            "{} source addresses are too few for this log",
            address_port_pair_count / port_count as usize
        );
        loop {
            let address_index = uniform_below(&mut self.rng, u32::from(self.workload.source_address_count)) as u16;
            let source_port = first_port + uniform_below(&mut self.rng, port_count) as u16;
            if self.used_address_port_pairs.insert((address_index, source_port)) {
                return (address_index, source_port);
            }
        }
    }
}

const ARRIVAL_LOG_MAGIC: &str = "coreward-arrivals 1";
const ARRIVAL_COLUMN_NAMES: &str = "start_us source_address source_port requests interval_us service_us";

impl fmt::Display for ArrivalLog {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { seed, duration_us, source_address_count, arrivals } = self;
        writeln!(
            f,
            "{ARRIVAL_LOG_MAGIC} seed={seed} duration_us={duration_us} \
             source_addresses={source_address_count}\n{ARRIVAL_COLUMN_NAMES}"
        )?;
        for arrival in arrivals {
            let ConnectionArrival {
                start_us,
                source_address_index,
                source_port,
                request_count,
                request_interval_us: interval_us,
                service_us,
            } = arrival;
            writeln!(f, "{start_us} {source_address_index} {source_port} {request_count} {interval_us} {service_us}")?;
        }
        Ok(())
    }
}

/// Error for an invalid line of an arrival log.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("arrival log, line {line_number}: {found_text:?}: expected {expected}")]
pub struct ArrivalLogError {
    /// Number of the invalid line, counted from 1.
    pub line_number: usize,
    /// Text of the invalid line.
    pub found_text: String,
    /// Description of a valid line.
    pub expected: &'static str,
}

impl FromStr for ArrivalLog {
    type Err = ArrivalLogError;

    /// Parses an arrival log. Fails unless the text has the form in the module's documentation. Connections must be in
    /// the order of their starts and start before the log's end. Sources must be unique.
    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let mut lines = text.lines().enumerate();
        let (mut log, columns) = (parse_header(lines.next().map_or("", |(_, line)| line))?, lines.next());
        match columns {
            Some((_, line)) if line == ARRIVAL_COLUMN_NAMES => {}
            other_columns => {
                return Err(error_at_line(1, other_columns.map_or("", |(_, line)| line), ARRIVAL_COLUMN_NAMES));
            }
        }
        let (mut used_address_port_pairs, mut earliest_start_us) = (HashSet::new(), 0);
        for (index, line) in lines {
            let arrival = parse_arrival(line).ok_or_else(|| {
                error_at_line(index, line, "six numbers: start_us source_address ... (the second line)")
            })?;
            let requirements = [
                (arrival.start_us >= earliest_start_us, "connections in the order of their starts"),
                (arrival.start_us < log.duration_us, "a start before the end of the log"),
                (arrival.source_address_index < log.source_address_count, "a source address below source_addresses"),
                (arrival.source_port > 0, "a source port from 1 to 65535"),
                (arrival.request_count > 0, "at least one request"),
                (arrival.service_us > 0, "a service time of at least 1 us"),
                (
                    used_address_port_pairs.insert((arrival.source_address_index, arrival.source_port)),
                    "a source that no other line has",
                ),
            ];
            if let Some((_, expected)) = requirements.into_iter().find(|(is_met, _)| !is_met) {
                return Err(error_at_line(index, line, expected));
            }
            earliest_start_us = arrival.start_us;
            log.arrivals.push(arrival);
        }
        Ok(log)
    }
}

fn error_at_line(index: usize, line_text: &str, expected: &'static str) -> ArrivalLogError {
    ArrivalLogError { line_number: index + 1, found_text: line_text.to_owned(), expected }
}

fn parse_header(line: &str) -> Result<ArrivalLog, ArrivalLogError> {
    let parse = || {
        let mut fields = line.strip_prefix(ARRIVAL_LOG_MAGIC)?.split_whitespace();
        let log = ArrivalLog {
            seed: fields.next()?.strip_prefix("seed=")?.parse().ok()?,
            duration_us: fields.next()?.strip_prefix("duration_us=")?.parse().ok()?,
            source_address_count: fields.next()?.strip_prefix("source_addresses=")?.parse().ok()?,
            arrivals: Vec::new(),
        };
        fields.next().is_none().then_some(log)
    };
    parse().ok_or_else(|| error_at_line(0, line, "coreward-arrivals 1 seed=N duration_us=N source_addresses=N"))
}

fn parse_arrival(line: &str) -> Option<ConnectionArrival> {
    let mut fields = line.split_whitespace();
    let arrival = ConnectionArrival {
        start_us: fields.next()?.parse().ok()?,
        source_address_index: fields.next()?.parse().ok()?,
        source_port: fields.next()?.parse().ok()?,
        request_count: fields.next()?.parse().ok()?,
        request_interval_us: fields.next()?.parse().ok()?,
        service_us: fields.next()?.parse().ok()?,
    };
    fields.next().is_none().then_some(arrival)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn equal_seeds_give_equal_logs_and_their_text_round_trips() {
        let workload = ConnectionWorkload { duration_us: 3_000_000, ..ConnectionWorkload::default() };
        let log = workload.generate(7);
        assert_eq!(log, workload.generate(7));
        assert_ne!(log, workload.generate(8));
        assert_eq!(log.to_string().parse(), Ok(log));
    }

    #[test]
    fn generated_load_matches_the_workload_after_the_ramp_up() {
        let workload = ConnectionWorkload::default();
        let log = workload.generate(1);
        let mut work_us_by_second = vec![0u64; (log.duration_us / 1_000_000) as usize];
        for arrival in &log.arrivals {
            for index in 0..arrival.request_count {
                work_us_by_second[(arrival.request_due_us(index) / 1_000_000) as usize] +=
                    u64::from(arrival.service_us);
            }
        }
        let stationary_work_us = &work_us_by_second[(workload.ramp_up_us / 1_000_000) as usize..];
        // 16 cores at 60 %.
        let expected_work_us_per_second = 9_600_000.0;
        let total_work_us: u64 = stationary_work_us.iter().sum();
        assert!(
            (total_work_us as f64 / (expected_work_us_per_second * stationary_work_us.len() as f64) - 1.0).abs() < 0.05,
            "{total_work_us}"
        );
        for (second, work_us) in stationary_work_us.iter().enumerate() {
            assert!((*work_us as f64 / expected_work_us_per_second - 1.0).abs() < 0.3, "second {second}: {work_us} us");
        }
        assert!(
            work_us_by_second[..2].iter().all(|work_us| (*work_us as f64) < 0.8 * expected_work_us_per_second),
            "a stampede: {work_us_by_second:?}"
        );
    }

    #[test]
    fn each_elephant_causes_at_most_a_tenth_of_core_load() {
        let workload = ConnectionWorkload::default();
        let core_work_us_per_s = u64::from(workload.mean_load_permille) * 1_000;
        assert_eq!(workload.elephant_request_interval_us(), 125_000);
        for arrival in workload.generate(3).arrivals.iter().filter(|arrival| arrival.request_count > 2) {
            let work_us_per_s = u64::from(arrival.service_us) * 1_000_000 / u64::from(arrival.request_interval_us);
            assert!(work_us_per_s * 10 <= core_work_us_per_s, "{arrival:?}");
        }
    }

    #[test]
    fn invalid_arrival_logs_are_rejected() {
        let header = "coreward-arrivals 1 seed=1 duration_us=1000 source_addresses=2\n\
                      start_us source_address source_port requests interval_us service_us\n";
        let invalid_cases = [
            ("10 0 5 1 100", "six numbers"),
            ("10 0 5 1 100 x", "six numbers"),
            ("1000 0 5 1 100 5", "before the end"),
            ("10 2 5 1 100 5", "below source_addresses"),
            ("10 0 5 0 100 5", "at least one request"),
            ("10 0 5 1 100 5\n9 0 6 1 100 5", "order of their starts"),
            ("10 0 5 1 100 5\n10 0 5 1 100 5", "no other line"),
        ];
        for (lines, expected) in invalid_cases {
            let error = format!("{header}{lines}\n").parse::<ArrivalLog>().unwrap_err();
            assert!(error.to_string().contains(expected), "{error}");
            assert_eq!(error.line_number, 2 + lines.lines().count());
        }
        assert_eq!("nonsense".parse::<ArrivalLog>().unwrap_err().line_number, 1);
        assert_eq!("".parse::<ArrivalLog>().unwrap_err().line_number, 1);
    }
}
