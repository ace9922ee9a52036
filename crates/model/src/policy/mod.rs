//! Policies: what fills a [`PlacementTable`]. One file each; a new one implements [`Policy`] and is listed in
//! [`REGISTRY`], and is at once available to the live controller, to the demo and to the simulator.
//!
//! A *table policy* (hash, consistent-hash, maglev, crossrss, crossrss-plus, least) decides by the table's contents, a
//! *flow policy* (rr, wrr, awrr, pow2) by a rule of the data plane that needs a little state of its own.

mod awrr;
mod consistent_hash;
mod crossrss;
mod crossrss_plus;
mod groups;
mod hash;
mod least;
mod maglev;
mod pow2;
mod rr;
mod turns;
mod wrr;

pub use consistent_hash::ring_table;
pub use crossrss_plus::CrossRssPlus;
pub use groups::{RssGroup, rss_groups};
pub use hash::striped_table;
pub use least::Least;
pub use maglev::{PUBLISHED_SIZE as MAGLEV_PUBLISHED_SIZE, maglev_table};

use coreward_intf as intf;

use crate::ServerId;
use crate::load::fixed_point;
use crate::placement::{BucketCount, Candidate, Core, Member, PlacementTable, Rule, rendezvous};
use crate::rss::{Rss, RssKey, seeded_rng};

/// A server of a pool, as far as a policy needs to know it.
#[derive(Debug, Clone, PartialEq)]
pub struct PoolServer {
    /// Its id.
    pub id: ServerId,
    /// Takes new connections (neither draining nor unhealthy).
    pub eligible: bool,
    /// Smoothed load per core in fractions of its capacity; `None`: no fresh report, the server counts as neutral.
    pub loads: Option<Vec<f64>>,
    /// Its NIC's key and table; `None`: not known, all its cores count as one.
    pub rss: Option<Rss>,
    /// Open connections, of all services.
    pub open_connections: u32,
}

/// The pool of one service at one tick.
#[derive(Debug, Clone, PartialEq)]
pub struct Pool {
    servers: Vec<PoolServer>,
    load_balancers: u32,
    opened_connections: Option<u64>,
}

impl Pool {
    /// `load_balancers`: how many of them share the service's new connections (0 counts as 1).
    pub fn new(mut servers: Vec<PoolServer>, load_balancers: u32) -> Self {
        servers.sort_by_key(|server| server.id);
        Self { servers, load_balancers: load_balancers.max(1), opened_connections: None }
    }

    /// The same pool, in which so many connections were opened since the previous tick.
    pub fn with_opened_connections(self, connections: u64) -> Self {
        Self { opened_connections: Some(connections), ..self }
    }

    /// All servers, by id.
    pub fn servers(&self) -> &[PoolServer] {
        &self.servers
    }

    /// The servers that take new connections, by id.
    pub fn eligible(&self) -> impl Iterator<Item = &PoolServer> + Clone {
        self.servers.iter().filter(|server| server.eligible)
    }

    /// Whether any eligible server's loads are known.
    pub fn has_loads(&self) -> bool {
        self.eligible().any(|server| server.loads.is_some())
    }

    /// Mean load of all cores whose load is known: what a server without a fresh report counts as.
    pub fn neutral_load(&self) -> f64 {
        let known: Vec<f64> = self.eligible().filter_map(|server| server.loads.as_ref()).flatten().copied().collect();
        crate::statistics::mean(&known).unwrap_or(0.0)
    }

    /// What is missing in all to bring every core below the mean load up to it.
    pub fn load_deficit(&self) -> f64 {
        let mean = self.neutral_load();
        let loads = self.eligible().filter_map(|server| server.loads.as_ref()).flatten();
        loads.map(|load| (mean - load).max(0.0)).sum()
    }

    /// Load that a connection brings, on average: all load over all open connections.
    pub fn load_per_connection(&self) -> f64 {
        let known = self.servers.iter().filter_map(|server| Some((server.loads.as_ref()?, server.open_connections)));
        let (load, connections) = known.fold((0.0, 0u64), |(load, count), (cores, open)| {
            (load + cores.iter().sum::<f64>(), count + u64::from(open))
        });
        if connections == 0 { 0.0 } else { load / connections as f64 }
    }
}

impl PoolServer {
    /// The load of core `core`, or `neutral` when it is not known.
    pub fn core_load(&self, core: u16, neutral: f64) -> f64 {
        self.loads.as_ref().and_then(|loads| loads.get(usize::from(core))).copied().unwrap_or(neutral)
    }

    /// How many cores it has, by its reports or by its NIC's table; `None` when neither is known.
    pub fn core_count(&self) -> Option<u32> {
        let by_table = |rss: &Rss| rss.indirection_table.queues().iter().max().map(|last| u32::from(*last) + 1);
        let reported = self.loads.as_ref().map(|loads| loads.len() as u32);
        reported.or_else(|| self.rss.as_ref().and_then(by_table))
    }

    /// The mean load of all its cores, or `neutral` when it is not known.
    pub fn mean_load(&self, neutral: f64) -> f64 {
        self.loads.as_deref().and_then(crate::statistics::mean).unwrap_or(neutral)
    }
}

/// What fills the tables of one service.
pub trait Policy: Send {
    /// The name in configuration and output.
    fn name(&self) -> &'static str;

    /// Whether the table depends on more than which servers there are: loads or open connections.
    fn reads_loads(&self) -> bool {
        true
    }

    /// The table for the pool as it is now.
    fn place(&mut self, pool: &Pool, buckets: BucketCount, generation: u64) -> PlacementTable;
}

/// Makes a policy; the seed gives it hash keys of its own.
type Make = fn(u64) -> Box<dyn Policy>;

/// Every policy by name.
pub const REGISTRY: [(&str, Make); 10] = [
    (hash::NAME, |seed| Box::new(hash::Hash::new(seed))),
    (consistent_hash::NAME, |seed| Box::new(consistent_hash::ConsistentHash::new(seed))),
    (maglev::NAME, |seed| Box::new(maglev::Maglev::new(seed))),
    (rr::NAME, |seed| Box::new(rr::RoundRobin::new(seed))),
    (wrr::NAME, |seed| Box::new(wrr::WeightedRoundRobin::new(seed))),
    (awrr::NAME, |seed| Box::new(awrr::AdaptiveWeightedRoundRobin::new(seed))),
    (pow2::NAME, |seed| Box::new(pow2::PowerOfTwo::new(seed))),
    (least::NAME, |seed| Box::new(least::Least::new(seed))),
    (crossrss::NAME, |seed| Box::new(crossrss::CrossRss::new(seed))),
    (crossrss_plus::NAME, |seed| Box::new(crossrss_plus::CrossRssPlus::new(seed))),
];

/// The policy that a service gets when its configuration names none.
pub const DEFAULT: &str = crossrss_plus::NAME;

/// A name that no policy has.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("policy {0:?} does not exist: expected one of {list}", list = names().join(", "))]
pub struct UnknownPolicy(pub String);

/// The names of all policies.
pub fn names() -> Vec<&'static str> {
    REGISTRY.iter().map(|(name, _)| *name).collect()
}

/// The policy with that name.
///
/// # Errors
/// When there is none.
pub fn named(name: &str, seed: u64) -> Result<Box<dyn Policy>, UnknownPolicy> {
    let found = REGISTRY.iter().find(|(known, _)| *known == name);
    found.map(|(_, make)| make(seed)).ok_or_else(|| UnknownPolicy(name.to_string()))
}

/// [`seeded_rng`]'s stream for hash keys that are independent of every NIC's.
const PURPOSE_INDEPENDENT_KEY: u64 = 2;

/// A hash key of the load balancer's own. A bucket taken from the hash that the servers' RSS uses would reach only some
/// cores of each server and make `hash` look twice as bad as it is.
fn independent_key(seed: u64) -> RssKey {
    RssKey::random(&mut seeded_rng(seed, PURPOSE_INDEPENDENT_KEY))
}

/// A table that has members and the consistent choice, and one group without candidates: what every policy starts from.
fn table_of(pool: &Pool, rule: Rule, buckets: BucketCount, generation: u64, key: RssKey) -> PlacementTable {
    let neutral = pool.neutral_load();
    let members: Vec<Member> = pool
        .eligible()
        .map(|server| Member { server: server.id, load: fixed_point(server.mean_load(neutral)) })
        .collect();
    let ids: Vec<ServerId> = members.iter().map(|member| member.server).collect();
    PlacementTable {
        generation,
        rule,
        bucket_count: buckets,
        groups: vec![key],
        candidates_per_bucket: 0,
        candidates: Vec::new(),
        assignment_cost: 0,
        core_slots: Vec::new(),
        members,
        consistent: rendezvous(&ids, buckets),
    }
}

/// Bucket i goes to member i mod n, by `key`: `hash` for ever, `crossrss` until the first report.
fn striped(pool: &Pool, buckets: BucketCount, generation: u64, key: RssKey) -> PlacementTable {
    by_bucket(pool, buckets, generation, key, &striped_table(pool.eligible().count(), buckets.get() as usize))
}

/// Each bucket goes to the eligible server at its entry in `positions` (by id), whatever the loads; no positions when no
/// server is eligible.
fn by_bucket(pool: &Pool, buckets: BucketCount, generation: u64, key: RssKey, positions: &[usize]) -> PlacementTable {
    let mut table = table_of(pool, Rule::Table, buckets, generation, key);
    if table.members.is_empty() {
        return table;
    }
    let of_bucket = |position: &usize| Candidate {
        server: table.members[*position].server,
        load: 0,
        core_slot: (*position).min(intf::MAX_CORE_SLOTS as usize - 1) as u16,
    };
    table.candidates = positions.iter().map(of_bucket).collect();
    table.candidates_per_bucket = 1;
    table.core_slots = table.members.iter().map(|member| Core { server: member.server, core: 0 }).collect();
    table.core_slots.truncate(intf::MAX_CORE_SLOTS as usize);
    table
}
