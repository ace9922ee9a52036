//! Policy `crossrss-plus`, our extension of `crossrss` that also counts assignments since the last report.
//!
//! Between two reports, every bucket of `crossrss` sends all its new connections to one core, the least loaded at the
//! last report, where they pile up. Here each bucket has several candidates, and the data plane counts the connections
//! that it assigns to each core. A connection goes to the candidate of least load + assigned x cost. A core's count
//! restarts with the table that has a new report of its server.
//!
//! The cost of a new connection is unknown at its start, because most connections end before the next report, and a few
//! bring most of the load. It need not be known. The policy chooses the cost so that one interval's connections
//! together count 1.5 times the differences between the loads. Two thirds of them fill the deficits in proportion, and
//! the rest is spread evenly. So the least loaded core gets the most but not all. A nearly even pool has a small cost,
//! and a pool after a burst a large one.
//!
//! For UDP with each datagram placed independently, no request in a report remains at the next report, so all load
//! comes from requests assigned since. Each datagram therefore counts its mean load, which is the load divided by the
//! requests of an interval, and the reported loads correct the differences.
//!
//! The load of a core is the mean of its current load (smoothed as for every policy) and its load over the last
//! reports. A core that has just lost a heavy connection gets more than its share until it has caught up. This evens
//! out the work done, and not only the present load.
//!
//! Until the first report all candidates are equal, and connections are spread evenly over cores. docs/policies.md has
//! the alternatives that were measured.

use std::borrow::Cow;

use coreward_intf as intf;

use super::crossrss::core_aware_table;
use super::normalized_load::NormalizedLoad;
use super::policy_cache::PolicyCache;
use super::{
    LoadHistogram, PlacementPolicy, ServerLoadClass, ServerLoads, ServerPool, TelemetryLevel,
    hash_key_independent_of_rss,
};
use crate::ServerId;
use crate::load::{CoreLoads, load_to_fixed_point};
use crate::placement::{BucketCount, PlacementRule, PlacementTable};
use crate::rss::RssKey;

pub const POLICY_NAME: &str = "crossrss-plus";

/// Load for which the connections of one interval count, as a multiple of the sum of the cores' deficits. A factor of 1
/// would suffice if loads stayed until new connections come, but loads that change fast then overshoot
/// (docs/policies.md).
const DEFICIT_FILL_FACTOR: f64 = 1.5;

/// Weight of the newest report in the average of recent loads. The average spans about five reports, or half a second
/// at 10 Hz. Values from 0.1 to 0.3 make little difference (docs/policies.md).
const RECENT_LOAD_WEIGHT: f64 = 0.2;

/// Weight of the newest interval in the average number of new connections per interval. The weight is small, because
/// the expected number is needed and not the last one.
const NEW_CONNECTION_COUNT_WEIGHT: f64 = 0.1;

/// Cost of a connection while the number of new connections is unknown, as a fraction of a connection's mean load. The
/// next report shows half of the load, because the paper's alpha of the moving average is one half.
const DEFAULT_CONNECTION_COST_FRACTION: f64 = 0.5;

/// Method by which the cost of an assigned connection is determined.
enum AssignedConnectionCost {
    /// The cost follows from the cores' deficits and the smoothed number of connections per interval.
    Deficit { smoothed_connection_count: Option<f64> },
    /// The cost is a fixed fraction of the mean load of an open connection.
    FractionOfMeanLoad(f64),
}

/// Policy `crossrss-plus`, which also counts the connections assigned to each core since the last report.
pub struct CrossRssPlusPolicy {
    hash_key: RssKey,
    connection_cost: AssignedConnectionCost,
    recent_loads: RecentCoreLoads,
    pub(super) cache: PolicyCache,
}

impl CrossRssPlusPolicy {
    /// Returns the policy whose connection cost follows from the deficits, as listed in the registry of policies.
    pub fn new(seed: u64) -> Self {
        Self::with_connection_cost(seed, AssignedConnectionCost::Deficit { smoothed_connection_count: None })
    }

    /// Returns the policy with a fixed connection cost, as the fraction `cost_fraction` of an open connection's mean
    /// load. With 0, it is the policy `crossrss`.
    pub fn with_fixed_cost_fraction(seed: u64, cost_fraction: f64) -> Self {
        Self::with_connection_cost(seed, AssignedConnectionCost::FractionOfMeanLoad(cost_fraction))
    }

    fn with_connection_cost(seed: u64, connection_cost: AssignedConnectionCost) -> Self {
        Self {
            hash_key: hash_key_independent_of_rss(seed),
            connection_cost,
            recent_loads: RecentCoreLoads::default(),
            cache: PolicyCache::default(),
        }
    }
}

impl AssignedConnectionCost {
    fn compute_cost(&mut self, pool: &ServerPool, cache: &mut PolicyCache) -> f64 {
        match self {
            AssignedConnectionCost::FractionOfMeanLoad(share) => *share * pool.mean_load_per_connection(),
            AssignedConnectionCost::Deficit { smoothed_connection_count: smoothed_opened_count } => {
                let Some(opened_connections) = pool.opened_connection_count else {
                    return DEFAULT_CONNECTION_COST_FRACTION * pool.mean_load_per_connection();
                };
                let newest_connection_count = opened_connections as f64;
                let new_smoothed_count = match *smoothed_opened_count {
                    None => newest_connection_count,
                    Some(old_count) if !pool.is_new_report_interval => old_count,
                    Some(old_count) => {
                        NEW_CONNECTION_COUNT_WEIGHT * newest_connection_count
                            + (1.0 - NEW_CONNECTION_COUNT_WEIGHT) * old_count
                    }
                };
                *smoothed_opened_count = Some(new_smoothed_count);
                let load_to_assign = if pool.counts_placements_as_requests {
                    pool.total_load()
                } else {
                    DEFICIT_FILL_FACTOR * total_load_deficit(pool, cache)
                };
                load_to_assign / new_smoothed_count.max(1.0)
            }
        }
    }
}

/// Returns the sum of the loads that cores lack to their target load, in units of a core of mean speed.
fn total_load_deficit(pool: &ServerPool, cache: &mut PolicyCache) -> f64 {
    let normalized_load = NormalizedLoad::for_pool(pool);
    let class_load_deficit = |(class, histogram): (&ServerLoadClass, &LoadHistogram)| {
        let (level, speed) = normalized_load.target_load_and_relative_speed(*class);
        speed * histogram.load_deficit_to_target(level)
    };
    cache.core_load_histogram_by_class(pool).iter().map(class_load_deficit).sum()
}

/// Average loads of all servers' cores over recent reports.
#[derive(Default)]
struct RecentCoreLoads {
    servers: Vec<RecentServerLoads>,
}

struct RecentServerLoads {
    id: ServerId,
    recent_mean_loads: Vec<f64>,
    newest_loads: CoreLoads,
    smoothed_loads: CoreLoads,
}

impl RecentServerLoads {
    fn new(id: ServerId, loads: &CoreLoads) -> Self {
        Self { id, recent_mean_loads: loads.to_vec(), newest_loads: loads.clone(), smoothed_loads: loads.clone() }
    }

    /// Updates the averages. `has_new_load` is true if the loads are from a new report.
    fn update_recent_loads(&mut self, loads: &CoreLoads, has_new_load: bool) {
        if !has_new_load && self.newest_loads == *loads {
            return;
        }
        // Cores may have been added or removed.
        self.recent_mean_loads.resize(loads.len(), 0.0);
        let newest_weight = if has_new_load { RECENT_LOAD_WEIGHT } else { 0.0 };
        let smoothed_load = |(load, recent_mean_load): (&f64, &mut f64)| {
            *recent_mean_load += newest_weight * (*load - *recent_mean_load);
            (*load + *recent_mean_load) / 2.0
        };
        self.smoothed_loads = loads.iter().zip(&mut self.recent_mean_loads).map(smoothed_load).collect();
        self.newest_loads = loads.clone();
    }
}

impl RecentCoreLoads {
    /// Updates the averages, and returns the pool with each load replaced by the mean of newest load and average.
    fn smooth_pool_loads<'p>(&mut self, pool: &'p ServerPool) -> Cow<'p, ServerPool> {
        if !pool.pool_totals().has_local_reports {
            self.servers.clear();
            return Cow::Borrowed(pool);
        }
        let mut smoothed_servers = pool.servers.clone();
        let mut previous_servers = std::mem::take(&mut self.servers).into_iter().peekable();
        for server in &mut smoothed_servers {
            let Some(ServerLoads::Local(loads)) = &mut server.loads else { continue };
            // Servers that left or do not report are forgotten.
            while previous_servers.next_if(|previous_server| previous_server.id < server.id).is_some() {}
            let known_server = previous_servers.next_if(|previous_server| previous_server.id == server.id);
            let mut recent_server = known_server.unwrap_or_else(|| RecentServerLoads::new(server.id, loads));
            recent_server.update_recent_loads(loads, server.has_new_load);
            *loads = recent_server.smoothed_loads.clone();
            self.servers.push(recent_server);
        }
        Cow::Owned(pool.copy_with_server_loads(smoothed_servers))
    }
}

/// Returns the maximum number of candidates per bucket that the data plane and the table size allow.
fn max_candidates_for_table_size(bucket_count: BucketCount, group_count: usize) -> usize {
    let max_by_table_size = intf::MAX_TABLE_CANDIDATES as usize / (group_count * bucket_count.get() as usize);
    max_by_table_size.min(intf::MAX_CANDIDATES as usize)
}

impl PlacementPolicy for CrossRssPlusPolicy {
    fn name(&self) -> &'static str {
        POLICY_NAME
    }

    fn telemetry_level(&self) -> TelemetryLevel {
        TelemetryLevel::Connections
    }

    fn preprocess_pool<'p>(&mut self, pool: &'p ServerPool) -> Cow<'p, ServerPool> {
        self.recent_loads.smooth_pool_loads(pool)
    }

    fn max_candidates_per_bucket(&self, bucket_count: BucketCount) -> usize {
        max_candidates_for_table_size(bucket_count, 1)
    }

    fn compute_table(&mut self, pool: &ServerPool, bucket_count: BucketCount, generation: u64) -> PlacementTable {
        let pool = &*self.preprocess_pool(pool);
        let cache = &mut self.cache;
        let candidates_per_bucket = |server_count: usize, group_count: usize| {
            server_count.min(max_candidates_for_table_size(bucket_count, group_count)).max(1)
        };
        let mut table = core_aware_table(
            pool,
            bucket_count,
            generation,
            &self.hash_key,
            PlacementRule::LeastAssigned,
            candidates_per_bucket,
            cache,
        );
        // A load balancer counts only its own assignments, but the others assign about as many.
        let connection_cost = self.connection_cost.compute_cost(pool, cache) * f64::from(pool.load_balancer_count);
        // The cost is at least the smallest step. So a burst in a pool of equal cores is spread evenly and does not
        // pile up on the lowest id.
        table.assignment_cost = load_to_fixed_point(connection_cost).max(1);
        table
    }
}
