//! Policies, which fill a [`PlacementTable`]. Each policy has a file, implements [`PlacementPolicy`] and is listed in
//! [`POLICY_REGISTRY`]. It is then available to the live controller, to the demo and to the simulator.
//!
//! A *table policy* (hash, consistent-hash, bounded-load, maglev, crossrss, crossrss-plus, least and its metrics)
//! decides by the table's contents. A *flow policy* (rr, wrr, awrr, pow2 and its metrics) decides by a rule of the data
//! plane with a little state.

mod awrr;
mod bounded_load;
mod bucket_loads;
mod consistent_hash;
mod crossrss;
mod crossrss_plus;
mod hash;
mod least;
mod least_loaded;
mod load_metric;
mod loads;
mod maglev;
mod normalized_load;
mod policy_cache;
mod pool;
mod pow2;
mod rack;
mod rack_aggregate;
mod rr;
mod rss_group;
mod static_policy;
mod weight;
mod wrr;
mod wrr_schedule;

pub use consistent_hash::ring_table;
pub use crossrss_plus::CrossRssPlusPolicy;
pub use hash::modulo_table;
pub use least::LeastPolicy;
pub use load_metric::{LoadMetric, TelemetryLevel};
pub use loads::{LoadHistogram, LoadHistogramBin, LoadHistogramBins, ServerLoadClass, ServerLoads};
pub use maglev::{MAGLEV_PAPER_TABLE_SIZE as MAGLEV_PAPER_SIZE, maglev_table};
pub use pool::{PoolServer, ServerPool, TrafficRates};
pub use rack::{BucketCandidateList, MAX_CANDIDATES, RackSummary, SummarizedServer};
pub use rss_group::{RssGroup, rss_groups, rss_key_count};
pub use weight::{ServerCapacity, ServerCapacityOutOfRange, ServerWeight, ServerWeightOutOfRange};

use std::borrow::Cow;

use coreward_intf as intf;

use crate::ServerId;
use crate::load::load_to_fixed_point;
use crate::placement::{
    BucketCount, CandidateCore, PlacementRule, PlacementTable, PlacementTableMember, ServerCore,
    weighted_rendezvous_table,
};
use crate::rss::{RssKey, seeded_rng};

/// Policy that computes the placement tables of one service.
pub trait PlacementPolicy: Send {
    /// Returns the name of the policy in configuration and output.
    fn name(&self) -> &'static str;

    /// Returns whether all tables of one pool of servers are the same, so that no load, counter or turn affects them.
    fn is_load_independent(&self) -> bool {
        false
    }

    /// Returns whether the table depends on loads or open connections, and not only on the set of servers.
    fn reads_loads(&self) -> bool {
        true
    }

    /// Returns whether a server with twice the capacity gets more connections. It does if its cores' loads are lower
    /// (default), or if the policy reads the configured capacity.
    fn depends_on_capacity(&self) -> bool {
        self.reads_loads()
    }

    /// Returns the telemetry about servers that the policy needs from load balancers.
    fn telemetry_level(&self) -> TelemetryLevel {
        TelemetryLevel::Nothing
    }

    /// Returns the pool with the loads as this policy uses them. Runs once per table, at the controller or, for servers
    /// in a rack, at the rack controller, where each core's load is known.
    fn preprocess_pool<'p>(&mut self, pool: &'p ServerPool) -> Cow<'p, ServerPool> {
        Cow::Borrowed(pool)
    }

    /// Returns the number of least loaded cores that a rack controller must send for each bucket, so that no
    /// information is lost.
    fn max_candidates_per_bucket(&self, _buckets: BucketCount) -> usize {
        0
    }

    /// Returns whether the table depends on connections or traffic, which load balancers count between two reports.
    fn reads_traffic(&self) -> bool {
        false
    }

    /// Returns the placement table for a pool, with this number of buckets and this generation number.
    fn compute_table(&mut self, pool: &ServerPool, bucket_count: BucketCount, generation: u64) -> PlacementTable;
}

type PlacementPolicyFactory = fn(u64) -> Box<dyn PlacementPolicy>;

/// All policies, with their names and the functions that create them from a seed.
pub const POLICY_REGISTRY: [(&str, PlacementPolicyFactory); 17] = [
    (hash::POLICY_NAME, |seed| {
        Box::new(static_policy::StaticPolicy::new(hash::POLICY_NAME, hash::weighted_modulo_table, seed))
    }),
    (consistent_hash::POLICY_NAME, |seed| {
        Box::new(static_policy::StaticPolicy::new(
            consistent_hash::POLICY_NAME,
            consistent_hash::weighted_ring_table,
            seed,
        ))
    }),
    (maglev::POLICY_NAME, |seed| {
        Box::new(static_policy::StaticPolicy::new(maglev::POLICY_NAME, maglev::weighted_maglev_table, seed))
    }),
    (bounded_load::POLICY_NAME, |seed| Box::new(bounded_load::BoundedLoadPolicy::new(seed))),
    (rr::POLICY_NAME, |seed| Box::new(rr::RoundRobinPolicy::new(seed))),
    (wrr::POLICY_NAME, |seed| Box::new(wrr::WeightedRoundRobinPolicy::new(seed))),
    (awrr::POLICY_NAME, |seed| Box::new(awrr::AdaptiveWeightedRoundRobin::new(seed))),
    (pow2::POLICY_NAMES[0], |seed| Box::new(pow2::PowerOfTwoPolicy::new(LoadMetric::Cpu, seed))),
    (pow2::POLICY_NAMES[1], |seed| Box::new(pow2::PowerOfTwoPolicy::new(LoadMetric::Connections, seed))),
    (pow2::POLICY_NAMES[2], |seed| Box::new(pow2::PowerOfTwoPolicy::new(LoadMetric::Packets, seed))),
    (pow2::POLICY_NAMES[3], |seed| Box::new(pow2::PowerOfTwoPolicy::new(LoadMetric::Bytes, seed))),
    (least::POLICY_NAMES[0], |seed| Box::new(least::LeastPolicy::new(seed))),
    (least::POLICY_NAMES[1], |seed| Box::new(least::LeastPolicy::with_metric(LoadMetric::Packets, seed))),
    (least::POLICY_NAMES[2], |seed| Box::new(least::LeastPolicy::with_metric(LoadMetric::Bytes, seed))),
    (least::POLICY_NAMES[3], |seed| Box::new(least::LeastPolicy::with_metric(LoadMetric::Cpu, seed))),
    (crossrss::POLICY_NAME, |seed| Box::new(crossrss::CrossRssPolicy::new(seed))),
    (crossrss_plus::POLICY_NAME, |seed| Box::new(crossrss_plus::CrossRssPlusPolicy::new(seed))),
];

/// Name of the default policy of a service.
pub const DEFAULT_POLICY_NAME: &str = crossrss_plus::POLICY_NAME;

/// Error returned for the name of an unknown policy.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("policy {0:?} does not exist: expected one of {list}", list = policy_names().join(", "))]
pub struct UnknownPlacementPolicy(pub String);

/// Returns the names of all policies.
pub fn policy_names() -> Vec<&'static str> {
    POLICY_REGISTRY.iter().map(|(name, _)| *name).collect()
}

/// Returns the names of the policies whose tables depend only on the pool of servers, and not on loads.
pub fn load_independent_policy_names() -> Vec<&'static str> {
    POLICY_REGISTRY.iter().filter(|(_, make)| make(0).is_load_independent()).map(|(name, _)| *name).collect()
}

/// Returns the telemetry that a policy needs from load balancers, or `Nothing` for an unknown name. The result includes
/// the telemetry by which reports of agents are checked.
pub fn required_telemetry_level(name: &str) -> TelemetryLevel {
    let required_telemetry = |policy: Box<dyn PlacementPolicy>| {
        let telemetry_for_checks =
            if policy.reads_loads() { TelemetryLevel::Connections } else { TelemetryLevel::Nothing };
        policy.telemetry_level().max(telemetry_for_checks)
    };
    create_policy_by_name(name, 0).map(required_telemetry).unwrap_or_default()
}

/// Returns whether the policy's tables depend on loads or counts, and therefore expire. Returns false for an unknown
/// name.
pub fn policy_reads_loads(name: &str) -> bool {
    create_policy_by_name(name, 0).is_ok_and(|policy| policy.reads_loads())
}

/// Returns a policy with the name `name`, created from `seed`. Fails if the name is unknown.
pub fn create_policy_by_name(name: &str, seed: u64) -> Result<Box<dyn PlacementPolicy>, UnknownPlacementPolicy> {
    let registry_entry = POLICY_REGISTRY.iter().find(|(known_name, _)| *known_name == name);
    registry_entry.map(|(_, make)| make(seed)).ok_or_else(|| UnknownPlacementPolicy(name.to_string()))
}

/// Number of the random-number stream ([`seeded_rng`]) from which hash keys that no NIC has are drawn.
const INDEPENDENT_HASH_KEY_RNG_STREAM: u64 = 2;

/// Returns a hash key that only the load balancer uses. If the servers' RSS hash selected the buckets, the policy
/// `hash` would reach only some cores of each server, and seem twice as bad as it is.
fn hash_key_independent_of_rss(seed: u64) -> RssKey {
    RssKey::random(&mut seeded_rng(seed, INDEPENDENT_HASH_KEY_RNG_STREAM))
}

/// Returns a table with members and consistent servers, but without candidates. Every policy starts with such a table.
fn table_without_candidates(
    pool: &ServerPool,
    rule: PlacementRule,
    bucket_count: BucketCount,
    generation: u64,
    key: RssKey,
) -> PlacementTable {
    let server_weights: Vec<(ServerId, u32)> =
        pool.eligible_servers().map(|server| (server.id, server.weight.get())).collect();
    table_with_consistent_servers(
        pool,
        rule,
        bucket_count,
        generation,
        key,
        weighted_rendezvous_table(&server_weights, bucket_count),
    )
}

fn table_with_consistent_servers(
    pool: &ServerPool,
    rule: PlacementRule,
    bucket_count: BucketCount,
    generation: u64,
    key: RssKey,
    consistent_servers: Vec<ServerId>,
) -> PlacementTable {
    let neutral_load = pool.neutral_load();
    let members: Vec<PlacementTableMember> = pool
        .eligible_servers()
        .map(|server| PlacementTableMember {
            server: server.id,
            fixed_point_load: load_to_fixed_point(server.mean_load(neutral_load)),
        })
        .collect();
    PlacementTable {
        generation,
        rule,
        bucket_count,
        rss_key_by_group: vec![key],
        candidates_per_bucket: 0,
        candidates: Vec::new(),
        assignment_cost: 0,
        core_slots: Vec::new(),
        members,
        consistent_server_by_bucket: consistent_servers,
        previous_consistent_server_by_bucket: Vec::new(),
        down_servers: Vec::new(),
        load_age_by_core_slot: Vec::new(),
    }
}

/// Returns the table in which bucket i goes to member i mod n. It is for the policy `hash`, and for `crossrss` until
/// the first report.
fn modulo_placement_table(
    pool: &ServerPool,
    bucket_count: BucketCount,
    generation: u64,
    key: RssKey,
) -> PlacementTable {
    let positions = hash::weighted_modulo_table(&pool.new_connection_shares(), bucket_count.get() as usize);
    table_with_server_per_bucket(pool, bucket_count, generation, key, &positions)
}

/// Returns a table in which each bucket has one server, given by its position among the eligible servers.
/// `server_position_by_bucket` is empty if there are no eligible servers.
fn table_with_server_per_bucket(
    pool: &ServerPool,
    bucket_count: BucketCount,
    generation: u64,
    key: RssKey,
    server_position_by_bucket: &[usize],
) -> PlacementTable {
    let mut table = table_without_candidates(pool, PlacementRule::Table, bucket_count, generation, key);
    if table.members.is_empty() {
        return table;
    }
    let candidate_at_position = |position: &usize| CandidateCore {
        server: table.members[*position].server,
        fixed_point_load: 0,
        core_slot: (*position).min(intf::MAX_CORE_SLOTS as usize - 1) as u16,
    };
    table.candidates = server_position_by_bucket.iter().map(candidate_at_position).collect();
    table.candidates_per_bucket = 1;
    table.core_slots = table.members.iter().map(|member| ServerCore { server: member.server, core: 0 }).collect();
    table.core_slots.truncate(intf::MAX_CORE_SLOTS as usize);
    table
}
