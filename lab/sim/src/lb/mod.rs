//! Command `coreward-lab sim lb`, which simulates a trace through the load balancer, packet by packet, under several
//! policies.
//!
//! * [`LbSimulationConfig`] and [`run`]: configuration and execution
//! * [`LbSimulationOutcome`][]: results
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
mod simulation;
mod trace_run;

use std::fmt;
use std::ops::RangeInclusive;

use coreward_model::ServerId;
use coreward_model::fleet::IndirectionTableFillRule;
use coreward_model::load::SmoothingWeight;
use coreward_model::placement::BucketCount;
use coreward_model::policy::MAX_CANDIDATES;

use crate::trace::capture::CaptureReadOptions;
use crate::trace::{TraceError, TraceSource};
use crate::unknown_name::UnknownName;
use crate::value_range::ValueOutOfRange;

pub use oracle::ORACLE_POLICY_NAME;
pub use outcome::{LbSeedResult, LbSimulationOutcome, PlacementPolicyOutcome};
pub use trace_run::run;

/// Configuration of a simulation. By default it replays `campus` on the paper's pool (CrossRSS, CoNEXT'20, Sect. 3).
#[derive(Debug, Clone, PartialEq)]
pub struct LbSimulationConfig {
    /// Capture, arrival log or generator from which the traffic comes.
    pub trace: TraceSource,
    /// Number of servers, at least 1. All servers together have at most [`MAX_TOTAL_CORES`] cores.
    pub server_count: u16,
    /// Number of cores of each server, at least 1.
    pub cores_per_server: u16,
    /// Number of buckets in the placement table, and also of entries in each server's indirection table.
    pub bucket_count: BucketCount,
    /// Interval between two reports, and between two placement tables (ms), from 1 to 10,000.
    pub report_interval_ms: u32,
    /// Weight of the newest report in the moving average of a core's load, above 0 and at most 1.
    pub smoothing_weight: SmoothingWeight,
    /// Names of the policies to compare, from [`coreward_model::policy`] or [`ORACLE_POLICY_NAME`].
    pub policies: Vec<String>,
    /// Seeds of the runs. Each determines the server ids (and so the indirection tables), the RSS key and the hash
    /// keys. If `campus` has no seed of its own, they also determine the traffic.
    pub seeds: Vec<u64>,
    pub read_options: CaptureReadOptions,
    /// Number of simultaneous copies of the trace, at least 1. Each is shifted in time and has its own addresses.
    pub trace_copy_count: u32,
    /// Number of packets that a core serves per second, or `None` if unlimited. At most 128 packets wait at a core, and
    /// further ones are dropped.
    pub core_capacity_pps: Option<f64>,
    /// Method by which the entries of each server's indirection table are assigned to its cores.
    pub indirection_table_fill_rule: IndirectionTableFillRule,
    /// Duration of the windows for the variances between servers and between cores (ms), from 1 to 3,600,000.
    /// CrossRSS's windows last 1 s.
    pub window_ms: u32,
    /// Speed of the replay relative to the recording, above 0. With 1.1 the replay is 10 % faster.
    pub replay_speed: f64,
    /// Number of rack controllers, at most the number of servers. Each has an equal share (+-1) of the servers. If
    /// `None`, agents report directly to the controller.
    pub rack_controller_count: Option<u16>,
    /// Maximum number of candidate cores that a rack reports per bucket, from 1 to 8. A table has at most 8 per bucket,
    /// so 8 gives the same tables as no racks.
    pub rack_candidates_per_bucket: u8,
    /// Delay from the reports until the load balancer uses the table computed from them (ms), below
    /// `report_interval_ms`.
    pub table_delay_ms: u32,
}

impl Default for LbSimulationConfig {
    fn default() -> Self {
        Self {
            trace: TraceSource::default(),
            server_count: 4,
            cores_per_server: 4,
            bucket_count: BucketCount::PAPER_VALUE,
            report_interval_ms: 100,
            smoothing_weight: SmoothingWeight::PAPER_VALUE,
            policies: ["hash", "rr", "pow2", "crossrss", "crossrss-plus"].map(str::to_owned).to_vec(),
            seeds: (1..=10).collect(),
            read_options: CaptureReadOptions::default(),
            trace_copy_count: 1,
            core_capacity_pps: None,
            indirection_table_fill_rule: IndirectionTableFillRule::Balanced,
            window_ms: 1_000,
            replay_speed: 1.0,
            rack_controller_count: None,
            rack_candidates_per_bucket: MAX_CANDIDATES,
            table_delay_ms: 0,
        }
    }
}

/// Maximum number of cores in all servers together, because a core's number has 16 bits.
pub const MAX_TOTAL_CORES: u32 = 65_536;

/// Reason why a configuration cannot be simulated.
#[derive(Debug, thiserror::Error)]
pub enum LbSimulationError {
    /// A value of the configuration is out of its range.
    #[error(transparent)]
    OutOfRange(#[from] ValueOutOfRange),
    /// No policy has the given name.
    #[error(transparent)]
    UnknownPolicy(#[from] UnknownName),
    /// The trace is invalid.
    #[error(transparent)]
    InvalidTrace(#[from] TraceError),
    /// The trace has no packet that the load balancer can place.
    #[error("the trace has no packets that can be placed{}", format_skip_counts(.0))]
    NoPackets(crate::trace::PacketSkipCounts),
    /// The trace is too short for one window to be measured.
    #[error(
        "the trace lasts {seconds:.3} s: variance is measured in windows of {window_ms} ms after the first, so it must \
         last at least {} ms; a shorter --window-ms helps", 2 * window_ms
    )]
    TraceTooShort { seconds: f64, window_ms: u32 },
    /// The oracle needs each flow's rate, which this kind of trace does not contain.
    #[error(
        "policy \"oracle\" needs to know each flow's rate when it starts: expected campus or an arrival log as trace"
    )]
    OracleNeedsRates,
}

fn format_skip_counts(skip_counts: &crate::trace::PacketSkipCounts) -> String {
    let reasons: Vec<String> = skip_counts.iter().map(|(reason, count)| format!("{count} {reason}")).collect();
    if reasons.is_empty() { String::new() } else { format!(" (left out: {})", reasons.join(", ")) }
}

impl LbSimulationConfig {
    /// Checks the configuration. An error names the value that is out of range, and the allowed range.
    pub fn check(&self) -> Result<(), LbSimulationError> {
        let core_count = u32::from(self.server_count) * u32::from(self.cores_per_server);
        require_within_range("servers", usize::from(self.server_count), 1..=ServerId::COUNT, "")?;
        require_in_range(self.cores_per_server > 0, "cores", self.cores_per_server, "at least 1")?;
        let expected_cores = format!("at most {MAX_TOTAL_CORES} cores in all");
        require_in_range(core_count <= MAX_TOTAL_CORES, "servers x cores", core_count, &expected_cores)?;
        require_within_range("report-ms", self.report_interval_ms, 1..=10_000, "")?;
        require_within_range("window-ms", self.window_ms, 1..=3_600_000, "")?;
        require_within_range("overlay", self.trace_copy_count, 1..=1_024, " copies")?;
        if let Some(capacity) = self.core_capacity_pps {
            require_within_range("core-capacity", capacity, 1.0..=1e9, " packets/s")?;
        }
        require_within_range("replay-speed", self.replay_speed, 0.001..=1_000.0, "")?;
        if let Some(racks) = self.rack_controller_count {
            require_within_range("racks", racks, 1..=self.server_count, ", the number of servers")?;
        }
        require_within_range("rack-candidates", self.rack_candidates_per_bucket, 1..=MAX_CANDIDATES, "")?;
        let expected_delay = format!("less than the {} ms between reports", self.report_interval_ms);
        require_in_range(
            self.table_delay_ms < self.report_interval_ms,
            "table-delay-ms",
            self.table_delay_ms,
            &expected_delay,
        )?;
        require_in_range(!self.seeds.is_empty(), "seeds", 0, "at least 1")?;
        require_in_range(!self.policies.is_empty(), "policies", 0, "at least 1")?;
        Ok(())
    }
}

/// Fails unless `is_in_range` is true. The error message shows `name`, `value` and the `expected` range.
fn require_in_range(
    is_in_range: bool,
    name: &'static str,
    value: impl fmt::Display,
    expected: &str,
) -> Result<(), ValueOutOfRange> {
    if is_in_range {
        return Ok(());
    }
    Err(ValueOutOfRange { name, value: value.to_string(), expected: expected.to_owned() })
}

/// Fails unless `value` is in `range`. The error message shows the range, followed by `suffix`.
fn require_within_range<T: PartialOrd + fmt::Display>(
    name: &'static str,
    value: T,
    range: RangeInclusive<T>,
    suffix: &str,
) -> Result<(), ValueOutOfRange> {
    let expected = format!("{} to {}{suffix}", range.start(), range.end());
    require_in_range(range.contains(&value), name, value, &expected)
}
