//! The arguments of `coreward-lab sim lb`.

use coreward_model::fleet::IndirectionTableFillRule;
use coreward_model::load::{SmoothingWeight, SmoothingWeightOutOfRange};
use coreward_model::placement::{BucketCount, BucketCountError};

use super::{LbSimulationConfig, run};
use crate::output::{PrintableResult as _, SimulationResultFormat};
use crate::trace::TraceSource;
use crate::trace::capture::CaptureReadOptions;

/// Arguments of `coreward-lab sim lb`.
#[derive(Debug, clap::Args)]
pub struct LbSimulationArgs {
    /// Traffic: a capture (pcap, pcapng; also .gz, .xz, .zst), an arrival log of `coreward-lab demo`, or a generator:
    /// campus[:seed=1,flows=3000,seconds=10,history=300] or burst[:seed=1,connections=1000,seconds=5]
    #[arg(long, default_value = "campus")]
    trace: TraceSource,
    /// Number of servers
    #[arg(long, default_value_t = 4)]
    servers: u16,
    /// Number of cores of each server
    #[arg(long, default_value_t = 4)]
    cores: u16,
    /// Number of buckets of the placement table, and of entries of the servers' indirection tables
    #[arg(long, default_value = "128", value_parser = parse_bucket_count)]
    buckets: BucketCount,
    /// Interval between two reports (ms)
    #[arg(long, default_value_t = 100)]
    report_ms: u32,
    /// Weight of the newest report in the moving average of a core's load, above 0 and at most 1
    #[arg(long, default_value = "0.5", value_parser = parse_smoothing_weight)]
    alpha: SmoothingWeight,
    /// Policies, separated by commas; `oracle` knows the true rates of all flows
    #[arg(long, value_delimiter = ',', default_value = "hash,rr,pow2,crossrss,crossrss-plus")]
    policy: Vec<String>,
    /// Seeds: N for 1 to N, or FIRST-LAST
    #[arg(long, default_value = "10")]
    seeds: SeedRange,
    /// Idle time after which a flow of a capture has ended (s)
    #[arg(long, default_value_t = 60, value_parser = clap::value_parser!(u64).range(1..=86_400))]
    idle_timeout: u64,
    /// Number of simultaneous copies of the trace, shifted in time and with different addresses
    #[arg(long, default_value_t = 1)]
    overlay: u32,
    /// Packets per second that a core serves; 128 packets may wait, others are dropped [default: unlimited]
    #[arg(long, value_name = "PPS")]
    core_capacity: Option<f64>,
    /// Distribution of cores over the servers' indirection tables; CrossRSS's paper uses `independent`
    #[arg(long, value_enum, default_value_t = IndirectionTableFillArg::Balanced)]
    indirection_tables: IndirectionTableFillArg,
    /// Length of the windows for the variances between servers and between cores (ms)
    #[arg(long, default_value_t = 1_000)]
    window_ms: u32,
    /// Speed of the replay as a multiple of the recorded speed
    #[arg(long, default_value_t = 1.0)]
    replay_speed: f64,
    /// Number of rack controllers, each with an equal share of the servers [default: none]
    #[arg(long, value_name = "N")]
    racks: Option<u16>,
    /// Maximum number of candidate cores that a rack sends per bucket (1 to 8); 8 gives the same tables as no racks
    #[arg(long, value_name = "K", default_value_t = LbSimulationConfig::default().rack_candidates_per_bucket)]
    rack_candidates: u8,
    /// Delay from the reports until the load balancer uses the table made from them (ms)
    #[arg(long, value_name = "MS", default_value_t = 0)]
    table_delay_ms: u32,
    /// Format of the output
    #[arg(long, value_enum, default_value_t = SimulationResultFormat::Text)]
    format: SimulationResultFormat,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
enum IndirectionTableFillArg {
    /// Every core has the same number of entries
    Balanced,
    /// Every entry is drawn independently
    Independent,
}

pub(crate) fn parse_bucket_count(text: &str) -> Result<BucketCount, String> {
    let count = text.parse().map_err(|_| format!("{text:?} is no number of buckets: expected a power of two"))?;
    BucketCount::new(count).map_err(|error: BucketCountError| error.to_string())
}

pub(crate) fn parse_smoothing_weight(text: &str) -> Result<SmoothingWeight, String> {
    let value = text.parse().map_err(|_| format!("{text:?} is no number: expected one above 0, at most 1"))?;
    SmoothingWeight::new(value).map_err(|error: SmoothingWeightOutOfRange| error.to_string())
}

const MAX_SEED_COUNT: u64 = 10_000;

/// Seeds of the runs, written as `N` for 1 to N, or as `FIRST-LAST`.
#[derive(Debug, Clone, PartialEq)]
struct SeedRange(Vec<u64>);

impl std::str::FromStr for SeedRange {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let (first, last) = text.split_once('-').unwrap_or(("1", text));
        let parse_seed_range = || Some((first.parse::<u64>().ok()?, last.parse::<u64>().ok()?));
        let build_range_error =
            || format!("{text:?}: expected N or FIRST-LAST, at least 1 and at most {MAX_SEED_COUNT} seeds");
        let (first, last) = parse_seed_range().ok_or_else(build_range_error)?;
        if last < first || last - first >= MAX_SEED_COUNT || (last == 0) {
            return Err(build_range_error());
        }
        Ok(Self((first..=last).collect()))
    }
}

impl LbSimulationArgs {
    /// Runs the simulation and returns its result as text. An error names the invalid value and its position.
    pub fn run(self) -> anyhow::Result<String> {
        let config = LbSimulationConfig {
            trace: self.trace,
            server_count: self.servers,
            cores_per_server: self.cores,
            bucket_count: self.buckets,
            report_interval_ms: self.report_ms,
            smoothing_weight: self.alpha,
            policies: self.policy,
            seeds: self.seeds.0,
            read_options: CaptureReadOptions { flow_idle_timeout_ns: self.idle_timeout * 1_000_000_000 },
            trace_copy_count: self.overlay,
            core_capacity_pps: self.core_capacity,
            indirection_table_fill_rule: match self.indirection_tables {
                IndirectionTableFillArg::Balanced => IndirectionTableFillRule::Balanced,
                IndirectionTableFillArg::Independent => IndirectionTableFillRule::Independent,
            },
            window_ms: self.window_ms,
            replay_speed: self.replay_speed,
            rack_controller_count: self.racks,
            rack_candidates_per_bucket: self.rack_candidates,
            table_delay_ms: self.table_delay_ms,
        };
        Ok(run(&config)?.render(self.format))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn seeds_are_parsed_from_a_count_or_a_range() {
        assert_eq!("3".parse(), Ok(SeedRange(vec![1, 2, 3])));
        assert_eq!("11-13".parse(), Ok(SeedRange(vec![11, 12, 13])));
        assert!(["0", "5-4", "x", "1-100000"].iter().all(|text| text.parse::<SeedRange>().is_err()));
    }
}
