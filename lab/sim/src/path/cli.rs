//! The arguments of `coreward-lab sim path`.

use coreward_model::fleet::IndirectionTableFillRule;
use coreward_model::load::SmoothingWeight;
use coreward_model::placement::BucketCount;

use super::{PathSimulationConfig, ReportPhase, run};
use crate::lb::cli::{parse_bucket_count, parse_smoothing_weight};
use crate::output::{PrintableResult as _, SimulationResultFormat};
use crate::rpc::{CoreSelectionPolicy, ServiceTimeDistribution};

/// Arguments of `coreward-lab sim path`.
#[derive(Debug, clap::Args)]
pub struct PathSimulationArgs {
    /// Number of servers
    #[arg(long, default_value_t = 4)]
    servers: u16,
    /// Number of cores of each server
    #[arg(long, default_value_t = 4)]
    cores: u16,
    /// Policies of the load balancer, separated by commas
    #[arg(long, value_delimiter = ',', default_value = "hash,rr,pow2,crossrss,crossrss-plus")]
    policy: Vec<String>,
    /// Policies inside the servers, as in `coreward-lab sim rpc`; may be repeated
    #[arg(long, default_values = ["rss", "jsq"])]
    dispatch: Vec<CoreSelectionPolicy>,
    /// Service times: fixed, exp, lognormal:SIGMA, bimodal:FRACTION:FACTOR, trimodal:FRACTION:FACTOR:FRACTION:FACTOR
    #[arg(long, default_value = "exp")]
    service: ServiceTimeDistribution,
    /// Unit of service time (us): the service time of the shortest class, or the mean for fixed, exp and lognormal
    #[arg(long, default_value_t = 100.0)]
    unit_us: f64,
    /// Latency between NIC and cores, one way, in units of service time
    #[arg(long, default_value_t = 0.0)]
    latency: f64,
    /// Offered load as a fraction of what all cores could serve
    #[arg(long, default_value_t = 0.7)]
    load: f64,
    /// Mean number of requests per connection; with 1, each connection has exactly one
    #[arg(long, default_value_t = 100.0)]
    requests_per_connection: f64,
    /// Mean time between two requests of a connection, in units of service time
    #[arg(long, default_value_t = 50.0)]
    request_gap: f64,
    /// Spread of the request rates over the connections: sigma of their lognormally distributed mean gaps
    #[arg(long, default_value_t = 1.0)]
    rate_sigma: f64,
    /// Number of buckets of the placement table, and of entries of the servers' indirection tables
    #[arg(long, default_value = "128", value_parser = parse_bucket_count)]
    buckets: BucketCount,
    /// Interval between two reports (ms)
    #[arg(long, default_value_t = 100.0)]
    report_ms: f64,
    /// Weight of the newest report in the moving average of a core's load, above 0 and at most 1
    #[arg(long, default_value = "0.5", value_parser = parse_smoothing_weight)]
    alpha: SmoothingWeight,
    /// Time at which agents read their core loads: `aligned` (all when the table is made) or `random` (each at its own
    /// time)
    #[arg(long, value_enum, default_value_t = ReportPhase::Aligned)]
    report_phase: ReportPhase,
    /// Length of the windows for the variances between servers and between cores (ms)
    #[arg(long, default_value_t = 1_000.0)]
    window_ms: f64,
    /// Time during which connections arrive (s); the warm-up is the first tenth, or two mean connection lifetimes if
    /// longer
    #[arg(long, default_value_t = 20.0)]
    seconds: f64,
    /// Number of seeds; runs use the seeds 1 to SEEDS
    #[arg(long, default_value_t = 5)]
    seeds: u64,
    /// Format of the output
    #[arg(long, value_enum, default_value_t = SimulationResultFormat::Text)]
    format: SimulationResultFormat,
}

impl PathSimulationArgs {
    /// Runs the simulation and returns its result as text.
    pub(crate) fn run(self) -> anyhow::Result<String> {
        let config = PathSimulationConfig {
            server_count: self.servers,
            cores_per_server: self.cores,
            policies: self.policy,
            dispatch_policies: self.dispatch,
            service_times: self.service,
            unit_us: self.unit_us,
            interface_latency: self.latency,
            offered_load: self.load,
            requests_per_connection: self.requests_per_connection,
            mean_request_gap: self.request_gap,
            request_gap_sigma: self.rate_sigma,
            bucket_count: self.buckets,
            indirection_table_fill_rule: IndirectionTableFillRule::Balanced,
            report_interval_ms: self.report_ms,
            smoothing_weight: self.alpha,
            report_phase: self.report_phase,
            window_ms: self.window_ms,
            connection_arrival_seconds: self.seconds,
            seeds: (1..=self.seeds).collect(),
        };
        Ok(run(&config)?.render(self.format))
    }
}
