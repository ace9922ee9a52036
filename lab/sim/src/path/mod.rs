//! Command `coreward-lab sim path`, which simulates the whole path of a request to compare the effects of both tiers.
//! The load balancer places connections on servers by reported loads, and in each server a policy assigns requests to
//! cores.
//!
//! * [`PathSimulationConfig`] and [`run`]: configuration and execution
//! * [`PathSimulationOutcome`][]: results
//! * [`traffic`]: connections and their requests
//! * [`simulation`]: one combination of policies and one seed
//!
//! docs/simulator.md describes the model.

pub mod cli;
mod outcome;
mod simulation;
mod traffic;

use coreward_model::ServerId;
use coreward_model::fleet::IndirectionTableFillRule;
use coreward_model::load::SmoothingWeight;
use coreward_model::placement::BucketCount;
use coreward_model::policy;

pub use outcome::{PathSeedResult, PathSimulationOutcome, PolicyCombinationOutcome};

use crate::par_map_ordered;
use crate::rpc::ticks::{Tick, time_units_to_ticks};
use crate::rpc::{self, CoreSelectionPolicy, ServiceTimeDistribution};
use crate::unknown_name::UnknownName;
use crate::value_range::ValueOutOfRange;
use simulation::PathSimulation;

/// Configuration of a simulation. Times whose name has no unit are in units of service time (see
/// [`ServiceTimeDistribution`]).
#[derive(Debug, Clone, PartialEq)]
pub struct PathSimulationConfig {
    /// Number of servers, at least 1.
    pub server_count: u16,
    /// Number of cores of each server, at least 1.
    pub cores_per_server: u16,
    /// Names of the load balancer's policies, from [`coreward_model::policy`].
    pub policies: Vec<String>,
    /// Policies inside the servers. Each is simulated with each of `policies`. [`CoreSelectionPolicy::Rss`] assigns a
    /// request to the core that the load balancer predicts.
    pub dispatch_policies: Vec<CoreSelectionPolicy>,
    pub service_times: ServiceTimeDistribution,
    /// Duration of the unit of service time (us), from 0.001 to 1,000,000,000. It relates requests to the report
    /// interval.
    pub unit_us: f64,
    /// One-way latency between NIC and cores, in units of service time.
    pub interface_latency: f64,
    /// Offered load as a fraction of the total capacity of all cores, below 1.
    pub offered_load: f64,
    /// Mean number of requests per connection (geometric), from 1 to 1,000,000,000. With 1, each has exactly one.
    pub requests_per_connection: f64,
    /// Mean time between two successive requests of a connection (exponential), in units of service time.
    pub mean_request_gap: f64,
    /// Spread of the mean gaps between requests over the connections: sigma (0 to 3) of their lognormal distribution.
    pub request_gap_sigma: f64,
    /// Number of buckets in the placement table, and also of entries in each server's indirection table.
    pub bucket_count: BucketCount,
    /// Method by which the entries of each server's indirection table are assigned to its cores.
    pub indirection_table_fill_rule: IndirectionTableFillRule,
    /// Interval between two reports, and between two placement tables (ms), from 0.001 to 10,000.
    pub report_interval_ms: f64,
    /// Weight of the newest report in the moving average of a core's load, above 0 and at most 1.
    pub smoothing_weight: SmoothingWeight,
    pub report_phase: ReportPhase,
    /// Duration of the windows for the variances between servers and between cores (ms), from 0.001 to 3,600,000.
    pub window_ms: f64,
    /// Time during which connections arrive (s). The warm-up is its first tenth, or two mean connection lifetimes if
    /// longer.
    pub connection_arrival_seconds: f64,
    /// Seeds of the runs. Each determines the traffic, server ids, indirection tables and keys. All combinations of
    /// policies get the same traffic.
    pub seeds: Vec<u64>,
}

/// Moment, within a report interval, at which agents read the loads of their cores.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum, serde::Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum ReportPhase {
    /// All agents read when the load balancer's table is computed.
    Aligned,
    /// Each agent reads at its own time, as in operation, so a table's loads are up to one report interval old.
    Random,
}

impl Default for PathSimulationConfig {
    fn default() -> Self {
        Self {
            server_count: 4,
            cores_per_server: 4,
            policies: ["hash", "rr", "pow2", "crossrss", "crossrss-plus"].map(str::to_owned).to_vec(),
            dispatch_policies: vec![CoreSelectionPolicy::Rss, CoreSelectionPolicy::ShortestQueue],
            service_times: ServiceTimeDistribution::Exponential,
            unit_us: 100.0,
            interface_latency: 0.0,
            offered_load: 0.7,
            requests_per_connection: 100.0,
            mean_request_gap: 50.0,
            request_gap_sigma: 1.0,
            bucket_count: BucketCount::PAPER_VALUE,
            indirection_table_fill_rule: IndirectionTableFillRule::Balanced,
            report_interval_ms: 100.0,
            smoothing_weight: SmoothingWeight::PAPER_VALUE,
            report_phase: ReportPhase::Aligned,
            window_ms: 1_000.0,
            connection_arrival_seconds: 20.0,
            seeds: (1..=5).collect(),
        }
    }
}

/// Reason why a configuration cannot be simulated.
#[derive(Debug, thiserror::Error)]
pub enum PathSimulationError {
    /// A value of the configuration is out of its range.
    #[error(transparent)]
    OutOfRange(#[from] ValueOutOfRange),
    /// No policy has the given name.
    #[error(transparent)]
    UnknownPolicy(#[from] UnknownName),
    /// The configuration of a server is invalid.
    #[error(transparent)]
    InvalidServerConfig(#[from] rpc::RpcSimulationError),
    /// The run is too short to measure anything after the warm-up.
    #[error(
        "{seconds} s: expected at least {min_seconds:.3}, twice the warm-up (which is two mean lives of a connection) \
         and two windows after it"
    )]
    RunTooShort { seconds: f64, min_seconds: f64 },
}

impl PathSimulationConfig {
    fn seconds_to_ticks(&self, seconds: f64) -> Tick {
        time_units_to_ticks(seconds * 1e6 / self.unit_us)
    }

    /// Returns the duration of the warm-up at the start of the run (s).
    fn warm_up_seconds(&self) -> f64 {
        let mean_connection_seconds = (self.requests_per_connection - 1.0) * self.mean_request_gap * self.unit_us / 1e6;
        (self.connection_arrival_seconds / 10.0).max(2.0 * mean_connection_seconds)
    }

    /// Checks the configuration. An error names the value that is out of range, and the allowed range.
    pub fn check(&self) -> Result<(), PathSimulationError> {
        let max_servers = ServerId::COUNT as f64;
        let allowed_ranges = [
            ("servers", f64::from(self.server_count), 1.0, max_servers),
            (
                "servers x cores",
                f64::from(self.server_count) * f64::from(self.cores_per_server),
                1.0,
                f64::from(crate::lb::MAX_TOTAL_CORES),
            ),
            ("unit-us", self.unit_us, 1e-3, 1e9),
            ("requests-per-connection", self.requests_per_connection, 1.0, 1e9),
            ("request-gap", self.mean_request_gap, 0.0, 1e6),
            ("rate-sigma", self.request_gap_sigma, 0.0, 3.0),
            ("report-ms", self.report_interval_ms, 1e-3, 1e4),
            ("window-ms", self.window_ms, 1e-3, 3.6e6),
            ("seconds", self.connection_arrival_seconds, 1e-6, 1e6),
            ("policies", self.policies.len() as f64, 1.0, 1e3),
            ("dispatch policies", self.dispatch_policies.len() as f64, 1.0, 1e3),
            ("seeds", self.seeds.len() as f64, 1.0, 1e4),
        ];
        if let Some((name, value, min, max)) =
            allowed_ranges.into_iter().find(|(_, value, min, max)| !(min..=max).contains(&value))
        {
            return Err(ValueOutOfRange { name, value: value.to_string(), expected: format!("{min} to {max}") }.into());
        }
        for dispatch in &self.dispatch_policies {
            self.check_server_config(dispatch)?;
        }
        let known_policies = policy::policy_names();
        if let Some(unknown_policy) = self.policies.iter().find(|name| !known_policies.contains(&name.as_str())) {
            return Err(UnknownName::new("policy", unknown_policy, known_policies).into());
        }
        let min_seconds = (2.0 * self.warm_up_seconds()).max(self.warm_up_seconds() + 2.0 * self.window_ms / 1e3);
        if self.connection_arrival_seconds < min_seconds {
            return Err(PathSimulationError::RunTooShort { seconds: self.connection_arrival_seconds, min_seconds });
        }
        Ok(())
    }

    fn check_server_config(&self, policy: &CoreSelectionPolicy) -> Result<(), PathSimulationError> {
        let Self { cores_per_server: cores, interface_latency: latency, offered_load: load, .. } = *self;
        let server_config = rpc::RpcSimulationConfig {
            policy: policy.clone(),
            cores,
            interface_latency: latency,
            offered_load: load,
            ..rpc::RpcSimulationConfig::default()
        };
        let server_config = rpc::RpcSimulationConfig { service_times: self.service_times.clone(), ..server_config };
        Ok(server_config.check_load_below_capacity(self.bucket_count.get())?)
    }
}

/// Simulates every combination of policies with every seed. Fails when the configuration is invalid.
pub fn run(config: &PathSimulationConfig) -> Result<PathSimulationOutcome, PathSimulationError> {
    config.check()?;
    let combinations: Vec<(&String, &CoreSelectionPolicy)> = config
        .policies
        .iter()
        .flat_map(|policy| config.dispatch_policies.iter().map(move |dispatch| (policy, dispatch)))
        .collect();
    let runs: Vec<(&String, &CoreSelectionPolicy, u64)> = combinations
        .iter()
        .flat_map(|(policy, dispatch)| config.seeds.iter().map(move |seed| (*policy, *dispatch, *seed)))
        .collect();
    let seed_outcomes = par_map_ordered(&runs, |(policy, dispatch, seed)| {
        Ok::<_, PathSimulationError>(PathSimulation::new(config, policy, dispatch, *seed)?.run())
    });
    let seed_results: Vec<PathSeedResult> = seed_outcomes.into_iter().collect::<Result<_, _>>()?;
    let build_combination_outcome =
        |((policy, dispatch), seeds): (&(&String, &CoreSelectionPolicy), &[PathSeedResult])| {
            PolicyCombinationOutcome::new(policy, &dispatch.to_string(), seeds)
        };
    let requests = seed_results.iter().map(|run| run.request_count).sum::<u64>() / seed_results.len() as u64;
    let combinations = combinations
        .iter()
        .zip(seed_results.chunks(config.seeds.len()))
        .filter_map(build_combination_outcome)
        .collect();
    Ok(PathSimulationOutcome { combinations, requests, unit_us: config.unit_us })
}
