//! `crossrss-plus`, ours: `crossrss` that also counts what was assigned since the last report.
//!
//! Between two reports every bucket of `crossrss` sends all its new connections to the core that was least loaded at the
//! last one; they pile up there. Here the data plane gets several candidates per bucket, and counts the connections it gives
//! to each core: a connection goes to the candidate of least load + assigned x cost. A core's count starts anew with the
//! table that has a new report of its server.
//!
//! What a new connection costs nobody knows when it starts: most are gone at the next report, and a few bring most of the load.
//! Nor need it be known. The cost is chosen so that the connections of one interval, all together, count half as much again
//! as the loads differ: two thirds of them fill the deficits in proportion, the others are spread evenly on top, so the least
//! loaded core gets the most but not all. A pool that is nearly even has a small cost, and one that a burst has just filled a
//! large one.
//!
//! Where a "connection" is one request (UDP, each datagram placed on its own), nothing that was there at the report is there
//! when the next one is made: all load is then what was assigned since. So each counts what it brings, the load over the
//! requests of an interval, and they come out even; the reported loads correct that by what they are apart.
//!
//! The load of a core is the mean of two: as it is now (smoothed as for every policy) and as it was over the last reports. A
//! core from which a heavy connection has just gone gets more than its share until it has caught up, and not only until it
//! is level: that evens out the work done, not the load of the moment.
//!
//! Until the first report all candidates are equal, and connections are spread evenly over cores.
//!
//! docs/policies.md says what else was tried, and what it gave.

use std::borrow::Cow;

use coreward_intf as intf;

use super::crossrss::core_aware;
use super::normalized_load::NormalizedLoad;
use super::policy_cache::PolicyCache;
use super::{Class, LoadSpread, Loads, Policy, Pool, TelemetryLevel, independent_key};
use crate::ServerId;
use crate::load::{CoreLoads, fixed_point};
use crate::placement::{BucketCount, PlacementTable, Rule};
use crate::rss::RssKey;

pub const NAME: &str = "crossrss-plus";

/// How often one interval's connections fill the deficits. Once would do if a load were still there when new connections
/// have come; where loads change fast, they then overshoot (docs/policies.md).
const FILL: f64 = 1.5;

/// Weight of the newest report in the load over the last reports: they are remembered about five reports long, half a second
/// at 10 Hz. 0.1 to 0.3 are alike (docs/policies.md).
const RECENT_ALPHA: f64 = 0.2;

/// Weight of the newest interval in the number of connections per interval. Small: that number should be what is to be
/// expected, not what happened to come.
const OPENED_ALPHA: f64 = 0.1;

/// Where the number of new connections is not known: how much of the load that a connection brings on average each one
/// counts. The next report shows half of it (the EWMA's published alpha).
const SHARE_OF_MEAN: f64 = 0.5;

/// How much an assigned connection counts.
enum Cost {
    /// By the deficits and the connections per interval, here smoothed.
    Deficit { opened: Option<f64> },
    /// This share of what an open connection brings on average.
    Share(f64),
}

/// `crossrss` that counts what it assigned since the last report.
pub struct CrossRssPlus {
    key: RssKey,
    cost: Cost,
    recent: RecentLoads,
    pub(super) kept: PolicyCache,
}

impl CrossRssPlus {
    /// The policy as the registry has it.
    pub fn new(seed: u64) -> Self {
        Self::with_cost(seed, Cost::Deficit { opened: None })
    }

    /// The policy with connections counted as `share` of what an open one brings on average: for comparing, 0 is `crossrss`.
    pub fn counting(seed: u64, share: f64) -> Self {
        Self::with_cost(seed, Cost::Share(share))
    }

    fn with_cost(seed: u64, cost: Cost) -> Self {
        Self { key: independent_key(seed), cost, recent: RecentLoads::default(), kept: PolicyCache::default() }
    }
}

impl Cost {
    /// What one connection counts, as a load.
    fn of_connection(&mut self, pool: &Pool, kept: &mut PolicyCache) -> f64 {
        match self {
            Cost::Share(share) => *share * pool.load_per_connection(),
            Cost::Deficit { opened } => {
                let Some(newest) = pool.opened_connections else {
                    return SHARE_OF_MEAN * pool.load_per_connection();
                };
                let newest = newest as f64;
                let smoothed = match *opened {
                    None => newest,
                    Some(old) if !pool.new_interval => old,
                    Some(old) => OPENED_ALPHA * newest + (1.0 - OPENED_ALPHA) * old,
                };
                *opened = Some(smoothed);
                let filled = if pool.of_requests { pool.load() } else { FILL * deficit(pool, kept) };
                filled / smoothed.max(1.0)
            }
        }
    }
}

/// What is missing in all to bring every core below its level up to it, in the work of a usual core.
fn deficit(pool: &Pool, kept: &mut PolicyCache) -> f64 {
    let levels = NormalizedLoad::of(pool);
    let of_class = |(class, spread): (&Class, &LoadSpread)| {
        let (level, speed) = levels.level(*class);
        speed * spread.missing(level)
    };
    kept.spreads(pool).iter().map(of_class).sum()
}

/// The cores' loads over the last reports.
#[derive(Default)]
struct RecentLoads {
    /// By id.
    of_servers: Vec<RecentServer>,
}

/// Of one server.
struct RecentServer {
    id: ServerId,
    recent: Vec<f64>,
    /// What was last taken in, and what came of it.
    newest: CoreLoads,
    evened: CoreLoads,
}

impl RecentServer {
    /// One that was not known: it has always been as it is now.
    fn new(id: ServerId, loads: &CoreLoads) -> Self {
        Self { id, recent: loads.to_vec(), newest: loads.clone(), evened: loads.clone() }
    }

    /// Takes in its loads: a new report of them, if they are fresh.
    fn update(&mut self, loads: &CoreLoads, fresh: bool) {
        if !fresh && self.newest == *loads {
            return;
        }
        // Cores may have been added or removed.
        self.recent.resize(loads.len(), 0.0);
        let alpha = if fresh { RECENT_ALPHA } else { 0.0 };
        let even = |(load, recent): (&f64, &mut f64)| {
            *recent += alpha * (*load - *recent);
            (*load + *recent) / 2.0
        };
        self.evened = loads.iter().zip(&mut self.recent).map(even).collect();
        self.newest = loads.clone();
    }
}

impl RecentLoads {
    /// Takes in the newest loads; the pool with the mean of newest and recent loads. What racks pass up is that already.
    fn evened<'p>(&mut self, pool: &'p Pool) -> Cow<'p, Pool> {
        if !pool.totals().any_reports_here {
            self.of_servers.clear();
            return Cow::Borrowed(pool);
        }
        let mut evened = pool.servers.clone();
        let mut before = std::mem::take(&mut self.of_servers).into_iter().peekable();
        for server in &mut evened {
            let Some(Loads::Local(loads)) = &mut server.loads else { continue };
            // Who is not there, or does not report, is forgotten.
            while before.next_if(|known| known.id < server.id).is_some() {}
            let known = before.next_if(|known| known.id == server.id);
            let mut known = known.unwrap_or_else(|| RecentServer::new(server.id, loads));
            known.update(loads, server.fresh);
            *loads = known.evened.clone();
            self.of_servers.push(known);
        }
        Cow::Owned(pool.with_servers(evened))
    }
}

/// As many candidates per bucket as the data plane looks at, and as fit into its table.
fn scale_to_fit(buckets: BucketCount, groups: usize) -> usize {
    let fits = intf::MAX_TABLE_CANDIDATES as usize / (groups * buckets.get() as usize);
    fits.min(intf::MAX_CANDIDATES as usize)
}

impl Policy for CrossRssPlus {
    fn name(&self) -> &'static str {
        NAME
    }

    fn telemetry_level(&self) -> TelemetryLevel {
        TelemetryLevel::Connections
    }

    fn read<'p>(&mut self, pool: &'p Pool) -> Cow<'p, Pool> {
        self.recent.evened(pool)
    }

    fn max_candidates_per_bucket(&self, buckets: BucketCount) -> usize {
        scale_to_fit(buckets, 1)
    }

    fn place(&mut self, pool: &Pool, buckets: BucketCount, generation: u64) -> PlacementTable {
        let pool = &*self.read(pool);
        let kept = &mut self.kept;
        let per_bucket = |servers: usize, groups: usize| servers.min(scale_to_fit(buckets, groups)).max(1);
        let mut table = core_aware(pool, buckets, generation, &self.key, Rule::LeastAssigned, per_bucket, kept);
        // Every load balancer sees only its own assignments; the others' are about as many.
        let cost = self.cost.of_connection(pool, kept) * f64::from(pool.load_balancers);
        // At least the smallest step: in a pool all of whose cores are equal, a burst is then spread evenly and does not
        // pile up on the lowest id.
        table.assignment_cost = fixed_point(cost).max(1);
        table
    }
}
