//! Arguments of `coreward-lab sim pcc`.

use coreward_model::placement::BucketCount;

use super::{
    BalancingMethod, ConnectionArrivalProcess, DEFAULT_BALANCING_METHOD_NAMES, LoadInfo, PccSimulationConfig,
    PlannedClusterChanges, run,
};
use crate::output::{PrintableResult as _, SimulationResultFormat};

/// Arguments of `coreward-lab sim pcc`.
#[derive(Debug, clap::Args)]
pub struct PccSimulationArgs {
    /// Methods to compare, separated by commas: hash, consistent-hash, maglev, beamer[:THRESHOLD],
    /// stateful-hash[:LAYOUT], history-tag:BITS[:LAYOUT], history-tag-kept:BITS[:LAYOUT],
    /// hash-index:BITS[+TAG_BITS][:LAYOUT], cheetah:POLICY
    #[arg(long = "method", value_name = "METHOD", value_delimiter = ',', default_values_t = default_methods())]
    methods: Vec<BalancingMethod>,
    /// Mean number of servers in the pool
    #[arg(long, default_value_t = 468)]
    servers: usize,
    /// Mean number of open connections
    #[arg(long, default_value_t = 70_000.0, allow_negative_numbers = true)]
    connections: f64,
    /// Servers added or removed per minute
    #[arg(long, default_value_t = 80.0, allow_negative_numbers = true)]
    updates_per_minute: f64,
    /// Length of each run (minutes), after a warm-up as long as the longest connection (150 s)
    #[arg(long, default_value_t = 2.0, allow_negative_numbers = true)]
    minutes: f64,
    /// Number of load balancers behind equal-cost multi-path
    #[arg(long, default_value_t = 1)]
    load_balancers: usize,
    /// Load balancers added or removed per minute
    #[arg(long, default_value_t = 0.0, allow_negative_numbers = true)]
    lb_updates_per_minute: f64,
    /// Number of seeds; every method runs once with each seed from 1 to SEEDS
    #[arg(long, default_value_t = 3)]
    seeds: u64,
    /// Age of the load information that policies use
    #[arg(long, value_enum, default_value_t = LoadInfo::Current)]
    load_info: LoadInfo,
    /// Interval of the servers' reports (ms)
    #[arg(long, default_value_t = 100)]
    report_ms: u64,
    /// Minimum number of buckets per server of hash, consistent-hash and beamer
    #[arg(long, default_value_t = 100)]
    buckets_per_server: u32,
    /// Number of buckets of placement tables: a power of two, at most 2048
    #[arg(long, default_value_t = 2048)]
    buckets: u64,
    /// Number of cores of each server, for crossrss and crossrss-plus
    #[arg(long, default_value_t = 1)]
    cores: u16,
    /// Format of the output
    #[arg(long, value_enum, default_value_t = SimulationResultFormat::Text)]
    format: SimulationResultFormat,
}

fn default_methods() -> Vec<BalancingMethod> {
    DEFAULT_BALANCING_METHOD_NAMES.iter().map(|name| name.parse().expect("it exists")).collect()
}

impl PccSimulationArgs {
    /// Runs the simulation and returns its result as text.
    pub(crate) fn run(self) -> anyhow::Result<String> {
        let outcome = run(&PccSimulationConfig {
            server_count: self.servers,
            arrivals: ConnectionArrivalProcess::OpenLoop { mean_open_connections: self.connections },
            updates: PlannedClusterChanges::PerMinute {
                servers: self.updates_per_minute,
                load_balancers: self.lb_updates_per_minute,
            },
            measured_minutes: self.minutes,
            load_balancer_count: self.load_balancers,
            methods: self.methods,
            seed_count: self.seeds,
            load_info: self.load_info,
            report_interval_ms: self.report_ms,
            buckets_per_server: self.buckets_per_server,
            bucket_count: BucketCount::new(self.buckets)?,
            cores_per_server: self.cores,
            keeps_per_second_counts: false,
        })?;
        Ok(outcome.render(self.format))
    }
}
