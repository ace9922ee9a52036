//! `coreward-lab sim pcc`: connections that a change of the pool breaks, and the imbalance of the servers' connections,
//! by method (Cheetah, NSDI'20, Sect. 2 and 5.3). docs/simulator.md describes the model.

mod arrivals;
mod balancer;
mod beamer;
mod buckets;
mod cheetah;
pub mod cli;
mod clock;
mod cluster;
mod connections;
mod engine;
mod hashed;
mod imbalance;
mod method;
mod mix;
mod outcome;
#[cfg(test)]
mod reference_tests;
mod schedule;
mod small_cookies;

pub use arrivals::{ArrivalProcess, ConnectionSource, RateWave};
use beamer::{Beamer, ThresholdControl};
use cheetah::Cheetah;
pub use cluster::{ClusterChange, LOAD_BALANCERS_MAX};
use coreward_model::placement::BucketCount;
use hashed::{StatefulHashing, StatelessHashing};
pub use method::{HashLayout, MAX_INDEX_BITS, MAX_TAG_BITS, Method, MethodError};
pub use mix::{ConnectionKind, ConnectionMix};
pub use outcome::{MethodOutcome, Outcome, SecondCounts, SeedOutcome};
pub use schedule::ClusterUpdates;
use small_cookies::{CookieFields, SmallCookies};

use crate::par_map_ordered;

/// Age of the load information of policies under `cheetah`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub enum LoadInfo {
    /// pow2 and least compare current counts; awrr, crossrss and crossrss-plus get reports
    Current,
    /// All policies get reports
    Reported,
}

/// Configuration of a simulation: the cluster, its load, and the methods to compare.
#[derive(Debug, Clone, PartialEq)]
pub struct Config {
    /// Nominal number of servers in the pool, 1 to 7000.
    pub servers: usize,
    /// Process by which connections arrive.
    pub arrivals: ArrivalProcess,
    /// Changes of servers and load balancers; random ones also happen during the warm-up.
    pub updates: ClusterUpdates,
    /// Measured time after the warm-up (minutes).
    pub minutes: f64,
    /// Nominal number of load balancers, 1 to 32.
    pub load_balancers: usize,
    /// Methods to compare, each with the same connections and changes.
    pub methods: Vec<Method>,
    /// Number of seeds, from 1.
    pub seeds: u64,
    /// Age of the load information that policies have.
    pub load_info: LoadInfo,
    /// Interval between two reports, and between the tables computed from them (ms), 10 to 60000.
    pub report_ms: u64,
    /// Minimum number of buckets per server for hash, consistent-hash and beamer, 1 to 1000. (maglev has published
    /// sizes.)
    pub buckets_per_server: u32,
    /// Number of buckets of placement tables.
    pub bucket_count: BucketCount,
    /// Number of cores of each server, 1 to 128; they matter for crossrss.
    pub cores: u16,
    /// Whether the results of each second are counted; the memory grows with the number of changes.
    pub has_second_counts: bool,
}

impl Default for Config {
    /// Returns the cluster of Cheetah's simulations (NSDI'20, Sect. 2.1): 70,000 connections, the most frequent
    /// updates.
    fn default() -> Self {
        Self {
            servers: 468,
            arrivals: ArrivalProcess::OpenLoop { mean_open_connections: 70_000.0 },
            updates: ClusterUpdates::PerMinute { servers: 80.0, load_balancers: 0.0 },
            minutes: 2.0,
            load_balancers: 1,
            methods: DEFAULT_METHODS.iter().map(|name| name.parse().expect("it exists")).collect(),
            seeds: 3,
            load_info: LoadInfo::Current,
            report_ms: 100,
            buckets_per_server: 100,
            bucket_count: BucketCount::new(2048).expect("a power of two"),
            cores: 1,
            has_second_counts: false,
        }
    }
}

impl Config {
    /// Returns the experiment of Cheetah's Fig. 9 (NSDI'20, Sect. 5.3): 24 servers, 1,500 to 2,500 requests per second
    /// over 40 s. Servers join while the load rises, and drain while it falls. In the text 7 join and 8 leave. The
    /// times follow the published counts of servers (`dynamic/BeamerNBSRV.csv` of github.com/cheetahlb/experiments), by
    /// which 6 joined.
    pub fn cheetah_figure_9() -> Self {
        let server_changes = [(5, 1), (6, 2), (7, 2), (13, 1), (16, -2), (20, -1), (21, -1), (22, -3), (23, -1)];
        let changes = server_changes.into_iter().flat_map(|(second, servers): (u32, i32)| {
            let change = if servers > 0 { ClusterChange::AddServer } else { ClusterChange::RemoveServer };
            // A count covers the preceding second.
            std::iter::repeat_n((f64::from(second) - 0.5, change), servers.unsigned_abs() as usize)
        });
        Self {
            servers: 24,
            arrivals: ArrivalProcess::ClosedLoop {
                // Four machines generated the load.
                clients: 4,
                request_rate: RateWave { base_per_s: 1_500.0, peak_per_s: 2_500.0, duration_s: 40.0 },
            },
            updates: ClusterUpdates::Scheduled(changes.collect()),
            minutes: 45.0 / 60.0,
            methods: ["hash", "consistent-hash", "beamer", "cheetah:awrr"]
                .map(|name| name.parse().expect("it exists"))
                .to_vec(),
            seeds: 10,
            has_second_counts: true,
            ..Self::default()
        }
    }
}

/// Methods that are compared by default.
pub const DEFAULT_METHODS: [&str; 8] =
    ["hash", "consistent-hash", "maglev", "beamer", "stateful-hash", "cheetah:rr", "cheetah:pow2", "cheetah:least"];

/// Invalid value of a configuration.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum Error {
    /// Number of servers out of range.
    #[error("{0} servers: expected 1 to {SERVERS_MAX}")]
    Servers(usize),
    /// Invalid number of connections.
    #[error("{0} connections: expected a number from 1 to {CONNECTIONS_MAX}")]
    Connections(f64),
    /// Invalid rate of requests.
    #[error("{0} requests per second: expected a number from 1 to 1000000")]
    Requests(f64),
    /// Number of clients out of range.
    #[error("{0} clients: expected 1 to 1000")]
    Clients(u32),
    /// Invalid rate of updates.
    #[error("{0} updates per minute: expected a number from 0 to {UPDATES_MAX}")]
    UpdateRate(f64),
    /// Time of a scheduled change that is outside the run, or before that of the preceding change.
    #[error("a change at second {0}: expected a number from 0 on, none before the one that it follows")]
    ChangeAt(f64),
    /// Invalid duration.
    #[error("{0} minutes: expected a number above 0, at most 1440")]
    Minutes(f64),
    /// Number of load balancers out of range.
    #[error("{0} load balancers: expected 1 to {max}", max = LOAD_BALANCERS_MAX / 2)]
    LoadBalancers(usize),
    /// No methods.
    #[error("no methods: expected at least one")]
    NoMethods,
    /// Number of seeds out of range.
    #[error("{0} seeds: expected 1 to 1000")]
    Seeds(u64),
    /// Invalid report interval.
    #[error("reports every {0} ms: expected 10 to 60000")]
    Report(u64),
    /// Number of buckets per server out of range.
    #[error("{0} buckets per server: expected 1 to 1000")]
    BucketsPerServer(u32),
    /// Number of cores out of range; an indirection table limits it.
    #[error("{0} cores: expected 1 to 128")]
    Cores(u16),
}

const SERVERS_MAX: usize = 7_000;
const CONNECTIONS_MAX: u32 = 10_000_000;
const UPDATES_MAX: u32 = 6_000;

/// Runs every method with every seed on all CPUs. Fails when a value is out of range.
pub fn run(config: &Config) -> Result<Outcome, Error> {
    check_config(config)?;
    let mix = ConnectionMix::web_server();
    let seeds = 1..=config.seeds;
    let inputs: Vec<(Method, u64)> =
        config.methods.iter().flat_map(|method| seeds.clone().map(|seed| (*method, seed))).collect();
    let seed_outcomes = par_map_ordered(&inputs, |(method, seed)| run_method(config, &mix, *method, *seed));
    let methods = config.methods.iter().zip(seed_outcomes.chunks(config.seeds as usize));
    Ok(Outcome { methods: methods.map(|(method, runs)| MethodOutcome::new(*method, runs.to_vec())).collect() })
}

fn run_method(config: &Config, mix: &ConnectionMix, method: Method, seed: u64) -> SeedOutcome {
    let server_count = engine::server_count(config);
    match method {
        Method::Hashed(layout) => engine::simulate(config, mix, seed, StatelessHashing::new(layout, config)),
        Method::Beamer { threshold } => {
            let suspensions_start = arrivals::settling_time(&config.arrivals, mix) / 2;
            let threshold_control = threshold.map(|threshold| ThresholdControl { threshold, start: suspensions_start });
            let beamer = Beamer::new(threshold_control, config, seed);
            engine::simulate(config, mix, seed, beamer)
        }
        Method::Stateful(layout) => engine::simulate(config, mix, seed, StatefulHashing::new(layout, config)),
        Method::HistoryTag { tag_bits: bits, renews_tags, layout } => {
            let cookie_fields = CookieFields { tag_bits: bits, renews_tags, index_bits: 0 };
            let cookies = SmallCookies::new(cookie_fields, layout, config, server_count, mix.longest_duration());
            engine::simulate(config, mix, seed, cookies)
        }
        Method::HashIndex { index_bits: bits, tag_bits, layout } => {
            let cookie_fields = CookieFields { tag_bits, renews_tags: true, index_bits: bits };
            let cookies = SmallCookies::new(cookie_fields, layout, config, server_count, mix.longest_duration());
            engine::simulate(config, mix, seed, cookies)
        }
        Method::Cheetah { policy } => {
            engine::simulate(config, mix, seed, Cheetah::new(policy, config, server_count, seed))
        }
    }
}

fn check_config(config: &Config) -> Result<(), Error> {
    let is_within = |value: f64, low: f64, high: f64| value >= low && value <= high;
    if config.servers == 0 || config.servers > SERVERS_MAX {
        return Err(Error::Servers(config.servers));
    }
    match config.arrivals {
        ArrivalProcess::OpenLoop { mean_open_connections: connections }
            if !is_within(connections, 1.0, CONNECTIONS_MAX.into()) =>
        {
            return Err(Error::Connections(connections));
        }
        ArrivalProcess::ClosedLoop { clients, .. } if clients == 0 || clients > 1_000 => {
            return Err(Error::Clients(clients));
        }
        ArrivalProcess::ClosedLoop { request_rate: per_second, .. } => {
            let rates = [per_second.base_per_s, per_second.peak_per_s];
            rates
                .map(|rate| if is_within(rate, 1.0, 1e6) { Ok(()) } else { Err(Error::Requests(rate)) })
                .into_iter()
                .collect::<Result<(), Error>>()?;
        }
        ArrivalProcess::OpenLoop { .. } => (),
    }
    match &config.updates {
        ClusterUpdates::PerMinute { servers, load_balancers } => {
            for rate in [*servers, *load_balancers] {
                if !is_within(rate, 0.0, UPDATES_MAX.into()) {
                    return Err(Error::UpdateRate(rate));
                }
            }
        }
        ClusterUpdates::Scheduled(list) => {
            let mut previous_at = 0.0;
            for (at, _) in list {
                if !is_within(*at, previous_at, 86_400.0) {
                    return Err(Error::ChangeAt(*at));
                }
                previous_at = *at;
            }
        }
    }
    if !(config.minutes > 0.0 && config.minutes <= 1440.0) {
        return Err(Error::Minutes(config.minutes));
    }
    if config.load_balancers == 0 || config.load_balancers > LOAD_BALANCERS_MAX / 2 {
        return Err(Error::LoadBalancers(config.load_balancers));
    }
    if config.methods.is_empty() {
        return Err(Error::NoMethods);
    }
    if config.seeds == 0 || config.seeds > 1_000 {
        return Err(Error::Seeds(config.seeds));
    }
    if !(10..=60_000).contains(&config.report_ms) {
        return Err(Error::Report(config.report_ms));
    }
    if !(1..=1_000).contains(&config.buckets_per_server) {
        return Err(Error::BucketsPerServer(config.buckets_per_server));
    }
    if config.cores == 0 || config.cores > 128 {
        return Err(Error::Cores(config.cores));
    }
    Ok(())
}
