//! Command `coreward-lab sim pcc`, which simulates connections while the pool changes (Cheetah, NSDI'20, Sect. 2 and
//! 5.3). It compares load-balancing methods by their share of broken connections and by the servers' imbalance. The
//! file docs/simulator.md describes the model.

mod arrivals;
mod balancer;
mod beamer;
mod buckets;
mod cheetah;
pub mod cli;
mod cluster;
mod connections;
mod hashing_balancers;
mod imbalance;
mod method;
mod mix;
mod outcome;
#[cfg(test)]
mod reference_tests;
mod schedule;
mod simulated_nanoseconds;
mod simulation_loop;
mod small_cookies;

pub use arrivals::{ConnectionArrivalProcess, ConnectionSource, RequestRateWave};
use beamer::{BeamerBalancers, SuspensionThresholdControl};
use cheetah::CheetahBalancers;
pub use cluster::{ClusterChange, MAX_LOAD_BALANCERS};
use coreward_model::placement::BucketCount;
use hashing_balancers::{StatefulHashingBalancers, StatelessHashingBalancers};
pub use method::{BalancingMethod, BalancingMethodError, HashBucketLayout, MAX_HASH_INDEX_BITS, MAX_HISTORY_TAG_BITS};
pub use mix::{ConnectionKind, ConnectionMix};
pub use outcome::{BalancingMethodOutcome, PccSeedResult, PccSimulationOutcome, PerSecondCounts};
pub use schedule::PlannedClusterChanges;
use small_cookies::{SmallCookieBalancers, SmallCookieFields};

use crate::par_map_ordered;

/// Age of the load information that the policies of `cheetah` use.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub enum LoadInfo {
    /// pow2 and least use current connection counts; awrr, crossrss and crossrss-plus use reports
    Current,
    /// All policies use the servers' periodic reports
    Reported,
}

/// Configuration of a simulation, with the cluster, its load, and the methods to compare.
#[derive(Debug, Clone, PartialEq)]
pub struct PccSimulationConfig {
    /// Nominal number of servers in the pool, from 1 to 7000.
    pub server_count: usize,
    /// Process by which clients open connections.
    pub arrivals: ConnectionArrivalProcess,
    /// Changes of servers and load balancers. Random ones also occur during the warm-up.
    pub updates: PlannedClusterChanges,
    /// Measured time after the warm-up (minutes).
    pub measured_minutes: f64,
    /// Nominal number of load balancers, from 1 to 32.
    pub load_balancer_count: usize,
    /// Methods to compare. All of them get the same connections and changes.
    pub methods: Vec<BalancingMethod>,
    /// Number of seeds, which are numbered from 1.
    pub seed_count: u64,
    /// Age of the load information that policies use.
    pub load_info: LoadInfo,
    /// Interval between two reports, and between the tables computed from them (ms), from 10 to 60000.
    pub report_interval_ms: u64,
    /// Minimum number of buckets per server for hash, consistent-hash and beamer, from 1 to 1000. (maglev uses its
    /// published sizes.)
    pub buckets_per_server: u32,
    /// Number of buckets in each placement table.
    pub bucket_count: BucketCount,
    /// Number of cores of each server, from 1 to 128, which only affects policies such as crossrss.
    pub cores_per_server: u16,
    /// Whether results are also counted for each second. If so, memory use grows with the number of changes.
    pub keeps_per_second_counts: bool,
}

impl Default for PccSimulationConfig {
    /// Returns the configuration of Cheetah's simulations (NSDI'20, Sect. 2.1), with 70,000 connections and the highest
    /// update rate.
    fn default() -> Self {
        Self {
            server_count: 468,
            arrivals: ConnectionArrivalProcess::OpenLoop { mean_open_connections: 70_000.0 },
            updates: PlannedClusterChanges::PerMinute { servers: 80.0, load_balancers: 0.0 },
            measured_minutes: 2.0,
            load_balancer_count: 1,
            methods: DEFAULT_BALANCING_METHOD_NAMES.iter().map(|name| name.parse().expect("it exists")).collect(),
            seed_count: 3,
            load_info: LoadInfo::Current,
            report_interval_ms: 100,
            buckets_per_server: 100,
            bucket_count: BucketCount::new(2048).expect("a power of two"),
            cores_per_server: 1,
            keeps_per_second_counts: false,
        }
    }
}

impl PccSimulationConfig {
    /// Returns the configuration of the experiment in Cheetah's Fig. 9 (NSDI'20, Sect. 5.3), with 24 servers and 1,500
    /// to 2,500 requests per second over 40 s. Servers join while the load rises, and drain while it falls. According
    /// to the paper's text, 7 servers join and 8 leave. The times here follow the published server counts
    /// (`dynamic/BeamerNBSRV.csv` of github.com/cheetahlb/experiments), in which 6 join.
    pub fn for_cheetah_figure_9() -> Self {
        let server_changes = [(5, 1), (6, 2), (7, 2), (13, 1), (16, -2), (20, -1), (21, -1), (22, -3), (23, -1)];
        let changes = server_changes.into_iter().flat_map(|(second, servers): (u32, i32)| {
            let change = if servers > 0 { ClusterChange::AddServer } else { ClusterChange::RemoveServer };
            // A published count is for the preceding second.
            std::iter::repeat_n((f64::from(second) - 0.5, change), servers.unsigned_abs() as usize)
        });
        Self {
            server_count: 24,
            arrivals: ConnectionArrivalProcess::ClosedLoop {
                // Four machines generated the load.
                clients: 4,
                request_rate: RequestRateWave {
                    base_requests_per_s: 1_500.0,
                    peak_requests_per_s: 2_500.0,
                    duration_s: 40.0,
                },
            },
            updates: PlannedClusterChanges::Scheduled(changes.collect()),
            measured_minutes: 45.0 / 60.0,
            methods: ["hash", "consistent-hash", "beamer", "cheetah:awrr"]
                .map(|name| name.parse().expect("it exists"))
                .to_vec(),
            seed_count: 10,
            keeps_per_second_counts: true,
            ..Self::default()
        }
    }
}

/// Methods that are compared unless others are selected.
pub const DEFAULT_BALANCING_METHOD_NAMES: [&str; 8] =
    ["hash", "consistent-hash", "maglev", "beamer", "stateful-hash", "cheetah:rr", "cheetah:pow2", "cheetah:least"];

/// Error for an invalid value of a configuration.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum PccSimulationError {
    #[error("{0} servers: expected 1 to {MAX_POOL_SERVERS}")]
    InvalidServerCount(usize),
    #[error("{0} connections: expected a number from 1 to {MAX_OPEN_CONNECTIONS}")]
    InvalidConnectionCount(f64),
    #[error("{0} requests per second: expected a number from 1 to 1000000")]
    InvalidRequestRate(f64),
    #[error("{0} clients: expected 1 to 1000")]
    InvalidClientCount(u32),
    #[error("{0} updates per minute: expected a number from 0 to {MAX_CLUSTER_UPDATES_PER_MINUTE}")]
    InvalidUpdateRate(f64),
    /// A scheduled change is outside the run, or earlier than the change before it.
    #[error("a change at second {0}: expected a number from 0 on, none before the one that it follows")]
    InvalidChangeTime(f64),
    #[error("{0} minutes: expected a number above 0, at most 1440")]
    InvalidRunMinutes(f64),
    #[error("{0} load balancers: expected 1 to {max}", max = MAX_LOAD_BALANCERS / 2)]
    InvalidLoadBalancerCount(usize),
    #[error("no methods: expected at least one")]
    NoMethods,
    #[error("{0} seeds: expected 1 to 1000")]
    InvalidSeedCount(u64),
    #[error("reports every {0} ms: expected 10 to 60000")]
    InvalidReportInterval(u64),
    #[error("{0} buckets per server: expected 1 to 1000")]
    InvalidBucketsPerServer(u32),
    /// The number of cores is 0, or exceeds the size of an indirection table.
    #[error("{0} cores: expected 1 to 128")]
    InvalidCoreCount(u16),
}

const MAX_POOL_SERVERS: usize = 7_000;
const MAX_OPEN_CONNECTIONS: u32 = 10_000_000;
const MAX_CLUSTER_UPDATES_PER_MINUTE: u32 = 6_000;

/// Runs every method with every seed on all CPUs. Fails when a value of the configuration is out of range.
pub fn run(config: &PccSimulationConfig) -> Result<PccSimulationOutcome, PccSimulationError> {
    check_config(config)?;
    let mix = ConnectionMix::for_web_server();
    let seeds = 1..=config.seed_count;
    let inputs: Vec<(BalancingMethod, u64)> =
        config.methods.iter().flat_map(|method| seeds.clone().map(|seed| (*method, seed))).collect();
    let seed_results = par_map_ordered(&inputs, |(method, seed)| simulate_method(config, &mix, *method, *seed));
    let methods = config.methods.iter().zip(seed_results.chunks(config.seed_count as usize));
    Ok(PccSimulationOutcome {
        methods: methods.map(|(method, runs)| BalancingMethodOutcome::new(*method, runs.to_vec())).collect(),
    })
}

fn simulate_method(
    config: &PccSimulationConfig,
    mix: &ConnectionMix,
    method: BalancingMethod,
    seed: u64,
) -> PccSeedResult {
    let server_count = simulation_loop::total_server_count(config);
    match method {
        BalancingMethod::Hashed(layout) => {
            simulation_loop::simulate_one_seed(config, mix, seed, StatelessHashingBalancers::new(layout, config))
        }
        BalancingMethod::Beamer { threshold } => {
            let suspends_from = arrivals::settling_time(&config.arrivals, mix) / 2;
            let threshold_control = threshold.map(|threshold| SuspensionThresholdControl {
                allowed_load_excess_fraction: threshold,
                suspension_start_time: suspends_from,
            });
            let beamer = BeamerBalancers::new(threshold_control, config, seed);
            simulation_loop::simulate_one_seed(config, mix, seed, beamer)
        }
        BalancingMethod::Stateful(layout) => {
            simulation_loop::simulate_one_seed(config, mix, seed, StatefulHashingBalancers::new(layout, config))
        }
        BalancingMethod::HistoryTag { tag_bits: bits, renews_tags, layout } => {
            let cookie_fields = SmallCookieFields { tag_bits: bits, renews_tags, index_bits: 0 };
            let cookies =
                SmallCookieBalancers::new(cookie_fields, layout, config, server_count, mix.longest_duration());
            simulation_loop::simulate_one_seed(config, mix, seed, cookies)
        }
        BalancingMethod::HashIndex { index_bits: bits, tag_bits, layout } => {
            let cookie_fields = SmallCookieFields { tag_bits, renews_tags: true, index_bits: bits };
            let cookies =
                SmallCookieBalancers::new(cookie_fields, layout, config, server_count, mix.longest_duration());
            simulation_loop::simulate_one_seed(config, mix, seed, cookies)
        }
        BalancingMethod::Cheetah { policy } => simulation_loop::simulate_one_seed(
            config,
            mix,
            seed,
            CheetahBalancers::new(policy, config, server_count, seed),
        ),
    }
}

fn check_config(config: &PccSimulationConfig) -> Result<(), PccSimulationError> {
    ensure_valid(
        (1..=MAX_POOL_SERVERS).contains(&config.server_count),
        PccSimulationError::InvalidServerCount(config.server_count),
    )?;
    check_arrival_process(&config.arrivals)?;
    check_cluster_updates(&config.updates)?;
    ensure_valid(
        config.measured_minutes > 0.0 && config.measured_minutes <= 1440.0,
        PccSimulationError::InvalidRunMinutes(config.measured_minutes),
    )?;
    ensure_valid(
        (1..=MAX_LOAD_BALANCERS / 2).contains(&config.load_balancer_count),
        PccSimulationError::InvalidLoadBalancerCount(config.load_balancer_count),
    )?;
    ensure_valid(!config.methods.is_empty(), PccSimulationError::NoMethods)?;
    ensure_valid((1..=1_000).contains(&config.seed_count), PccSimulationError::InvalidSeedCount(config.seed_count))?;
    ensure_valid(
        (10..=60_000).contains(&config.report_interval_ms),
        PccSimulationError::InvalidReportInterval(config.report_interval_ms),
    )?;
    ensure_valid(
        (1..=1_000).contains(&config.buckets_per_server),
        PccSimulationError::InvalidBucketsPerServer(config.buckets_per_server),
    )?;
    ensure_valid(
        (1..=128).contains(&config.cores_per_server),
        PccSimulationError::InvalidCoreCount(config.cores_per_server),
    )
}

/// Fails with `error` unless `is_valid` is true.
fn ensure_valid(is_valid: bool, error: PccSimulationError) -> Result<(), PccSimulationError> {
    if is_valid { Ok(()) } else { Err(error) }
}

fn check_arrival_process(arrivals: &ConnectionArrivalProcess) -> Result<(), PccSimulationError> {
    match *arrivals {
        ConnectionArrivalProcess::OpenLoop { mean_open_connections: connections } => ensure_valid(
            (1.0..=f64::from(MAX_OPEN_CONNECTIONS)).contains(&connections),
            PccSimulationError::InvalidConnectionCount(connections),
        ),
        ConnectionArrivalProcess::ClosedLoop { clients, request_rate } => {
            ensure_valid((1..=1_000).contains(&clients), PccSimulationError::InvalidClientCount(clients))?;
            [request_rate.base_requests_per_s, request_rate.peak_requests_per_s].into_iter().try_for_each(|rate| {
                ensure_valid((1.0..=1e6).contains(&rate), PccSimulationError::InvalidRequestRate(rate))
            })
        }
    }
}

fn check_cluster_updates(updates: &PlannedClusterChanges) -> Result<(), PccSimulationError> {
    match updates {
        PlannedClusterChanges::PerMinute { servers, load_balancers } => {
            [*servers, *load_balancers].into_iter().try_for_each(|rate| {
                ensure_valid(
                    (0.0..=f64::from(MAX_CLUSTER_UPDATES_PER_MINUTE)).contains(&rate),
                    PccSimulationError::InvalidUpdateRate(rate),
                )
            })
        }
        PlannedClusterChanges::Scheduled(changes) => {
            let mut previous_change_seconds = 0.0;
            for (at, _) in changes {
                ensure_valid(
                    (previous_change_seconds..=86_400.0).contains(at),
                    PccSimulationError::InvalidChangeTime(*at),
                )?;
                previous_change_seconds = *at;
            }
            Ok(())
        }
    }
}
