//! Command `coreward-lab sim lb`, which simulates a trace through the load balancer, packet by packet, under several
//! policies.
//!
//! * [`Config`] and [`run`]: configuration and execution
//! * [`Outcome`][]: results
//! * [`simulation`]: one policy and seed
//! * [`oracle`]: placement with knowledge that no load balancer has
//! * [`cores`]: packets at cores, with or without queues
//! * [`history`]: load of the cores before the first packet
//!
//! docs/simulator.md describes how each result is computed.

pub mod cli;
mod cores;
mod history;
mod oracle;
mod outcome;
mod run;
mod simulation;

use coreward_model::ServerId;
use coreward_model::fleet::IndirectionTableDraw;
use coreward_model::load::SmoothingWeight;
use coreward_model::placement::BucketCount;
use coreward_model::policy::MAX_CANDIDATES;

use crate::names::UnknownName;
use crate::range::OutOfRange;
use crate::trace::capture::ReadOptions;
use crate::trace::{TraceError, TraceSource};

pub use oracle::ORACLE;
pub use outcome::{Outcome, PolicyOutcome, SeedResult};
pub use run::run;

/// Configuration of a simulation. By default it replays `campus` on the paper's pool (CrossRSS, CoNEXT'20, Sect. 3).
#[derive(Debug, Clone, PartialEq)]
pub struct Config {
    /// Capture, arrival log or generator from which the traffic comes.
    pub trace: TraceSource,
    /// Number of servers, at least 1. All servers together have at most [`MAX_CORES`] cores.
    pub servers: u16,
    /// Number of cores of each server, at least 1.
    pub cores: u16,
    /// Number of buckets in the placement table, and also of entries in each server's indirection table.
    pub buckets: BucketCount,
    /// Interval between two reports, and between two placement tables (ms), from 1 to 10,000.
    pub report_ms: u32,
    /// Weight of the newest report in a core's smoothed load.
    pub alpha: SmoothingWeight,
    /// Names of the policies to compare, from [`coreward_model::policy`] or [`ORACLE`].
    pub policies: Vec<String>,
    /// Seeds of the runs. Each draws server ids (which determine the indirection tables), the RSS key and hash keys. If
    /// `campus` has no seed of its own, they also draw the traffic.
    pub seeds: Vec<u64>,
    pub read_options: ReadOptions,
    /// Number of simultaneous copies of the trace, at least 1. Each is shifted in time and has its own addresses.
    pub trace_copies: u32,
    /// Number of packets that a core serves per second, or `None` if unlimited. At most 128 packets wait at a core, and
    /// further ones are dropped.
    pub core_capacity: Option<f64>,
    /// How each server's indirection table assigns its entries to cores.
    pub indirection_table_draw: IndirectionTableDraw,
    /// Duration of the windows in which variance is measured (ms), from 1 to 3,600,000. The paper's windows last 1 s.
    pub window_ms: u32,
    /// Speed of the replay relative to the recording, above 0. With 1.1 the replay is 10 % faster.
    pub replay_speed: f64,
    /// Number of rack controllers, at most the number of servers. Each has an equal share (+-1) of the servers. If
    /// `None`, agents report directly to the controller.
    pub racks: Option<u16>,
    /// Maximum number of candidate cores that a rack reports per bucket, from 1 to 8. With 8, tables are the same as
    /// without racks.
    pub rack_candidates: u8,
    /// Delay from the reports until the load balancer uses the table computed from them (ms), below `report_ms`.
    pub table_delay_ms: u32,
}

impl Default for Config {
    fn default() -> Self {
        Self {
            trace: TraceSource::default(),
            servers: 4,
            cores: 4,
            buckets: BucketCount::PUBLISHED,
            report_ms: 100,
            alpha: SmoothingWeight::PUBLISHED,
            policies: ["hash", "rr", "pow2", "crossrss", "crossrss-plus"].map(str::to_owned).to_vec(),
            seeds: (1..=10).collect(),
            read_options: ReadOptions::default(),
            trace_copies: 1,
            core_capacity: None,
            indirection_table_draw: IndirectionTableDraw::Balanced,
            window_ms: 1_000,
            replay_speed: 1.0,
            racks: None,
            rack_candidates: MAX_CANDIDATES,
            table_delay_ms: 0,
        }
    }
}

/// Maximum number of cores in all servers together. A core's number has 16 bits.
pub const MAX_CORES: u32 = 65_536;

/// Reason why a configuration cannot be simulated.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// A value of the configuration is out of its range.
    #[error(transparent)]
    OutOfRange(#[from] OutOfRange),
    /// No policy has the given name.
    #[error(transparent)]
    Policy(#[from] UnknownName),
    /// The trace is invalid.
    #[error(transparent)]
    Trace(#[from] TraceError),
    /// The trace has no packet that the load balancer can place.
    #[error("the trace has no packets that can be placed{}", format_skipped(.0))]
    NoPackets(crate::trace::SkipCounts),
    /// The trace is too short for one window to be measured.
    #[error(
        "the trace lasts {seconds:.3} s: variance is measured in windows of {window_ms} ms after the first, so it must \
         last at least {} ms; a shorter --window-ms helps", 2 * window_ms
    )]
    TooShort { seconds: f64, window_ms: u32 },
    /// The oracle needs each flow's rate, which this kind of trace does not contain.
    #[error(
        "policy \"oracle\" needs to know each flow's rate when it starts: expected campus or an arrival log as trace"
    )]
    OracleNeedsRates,
}

fn format_skipped(skip_counts: &crate::trace::SkipCounts) -> String {
    let reasons: Vec<String> = skip_counts.iter().map(|(reason, count)| format!("{count} {reason}")).collect();
    if reasons.is_empty() { String::new() } else { format!(" (left out: {})", reasons.join(", ")) }
}

impl Config {
    /// Checks the configuration. An error names the value that is out of range, and the allowed range.
    pub fn check(&self) -> Result<(), Error> {
        let core_count = u32::from(self.servers) * u32::from(self.cores);
        let range_checks = [
            (
                (1..=ServerId::COUNT).contains(&usize::from(self.servers)),
                ("servers", self.servers.to_string(), format!("1 to {}", ServerId::COUNT)),
            ),
            (self.cores > 0, ("cores", self.cores.to_string(), "at least 1".to_owned())),
            (
                core_count <= MAX_CORES,
                ("servers x cores", core_count.to_string(), format!("at most {MAX_CORES} cores in all")),
            ),
            (
                (1..=10_000).contains(&self.report_ms),
                ("report-ms", self.report_ms.to_string(), "1 to 10000".to_owned()),
            ),
            (
                (1..=3_600_000).contains(&self.window_ms),
                ("window-ms", self.window_ms.to_string(), "1 to 3600000".to_owned()),
            ),
            (
                (1..=1_024).contains(&self.trace_copies),
                ("overlay", self.trace_copies.to_string(), "1 to 1024 copies".to_owned()),
            ),
            (
                self.core_capacity.is_none_or(|capacity| (1.0..=1e9).contains(&capacity)),
                (
                    "core-capacity",
                    self.core_capacity.map_or(String::new(), |capacity| capacity.to_string()),
                    "1 to 1000000000 packets/s".to_owned(),
                ),
            ),
            (
                (0.001..=1_000.0).contains(&self.replay_speed),
                ("replay-speed", self.replay_speed.to_string(), "0.001 to 1000".to_owned()),
            ),
            (
                self.racks.is_none_or(|racks| (1..=self.servers).contains(&racks)),
                ("racks", self.racks.unwrap_or(0).to_string(), format!("1 to {}, the number of servers", self.servers)),
            ),
            (
                (1..=MAX_CANDIDATES).contains(&self.rack_candidates),
                ("rack-candidates", self.rack_candidates.to_string(), format!("1 to {MAX_CANDIDATES}")),
            ),
            (
                self.table_delay_ms < self.report_ms,
                (
                    "table-delay-ms",
                    self.table_delay_ms.to_string(),
                    format!("less than the {} ms between reports", self.report_ms),
                ),
            ),
            (!self.seeds.is_empty(), ("seeds", "0".to_owned(), "at least 1".to_owned())),
            (!self.policies.is_empty(), ("policies", "0".to_owned(), "at least 1".to_owned())),
        ];
        match range_checks.into_iter().find(|(is_in_range, _)| !is_in_range) {
            Some((_, (name, value, expected))) => Err(OutOfRange { name, value, expected }.into()),
            None => Ok(()),
        }
    }
}
