//! A service's servers, as policies see them.

use std::sync::{Arc, OnceLock};

use super::loads::{Class, Loads};
use super::{CandidateList, Capacity, RackSummary, Weight};
use crate::ServerId;
use crate::placement::mix;
use crate::rss::{Rss, RssKey};

/// A server of a pool, as far as a policy needs to know it.
#[derive(Debug, Clone, PartialEq)]
pub struct PoolServer {
    /// Its id.
    pub id: ServerId,
    /// Takes new connections (neither draining nor unhealthy).
    pub eligible: bool,
    /// `None`: no fresh report, the server counts as neutral.
    pub loads: Option<Loads>,
    /// Its NIC's key and table; `None`: not known, all its cores count as one.
    pub rss: Option<Rss>,
    /// Open connections, of all services.
    pub open_connections: u32,
    /// Its part of new connections, next to the others'. (One of weight 0 is not eligible.)
    pub weight: Weight,
    /// How much of its part it gets so far: 1 for all but servers that have joined a short time ago; above 0.
    pub ramp: f64,
    /// How much it can do, as the operator says; `None`: as much as it has cores.
    pub capacity: Option<Capacity>,
    /// What load balancers send to it; `None`: nobody has counted yet.
    pub traffic: Option<TrafficRates>,
    /// Whether what is known of its load is newer than the service's previous table. Without it connections assigned since
    /// then are not in it, and a state that follows reports has seen it already.
    pub fresh: bool,
}

/// What goes to a server, of all services and load balancers together.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct TrafficRates {
    /// Packets per second.
    pub packets: f64,
    /// Frame bytes per second.
    pub bytes: f64,
}

/// A server that reports more cores than this times the pool's median counts as this many, unless the operator states its capacity.
pub const MOST_TIMES_THE_MEDIAN: u32 = 8;

/// The pool of one service at the moment of a table.
#[derive(Debug, Clone)]
pub struct Pool {
    pub(super) servers: Vec<PoolServer>,
    pub(super) racks: Vec<Arc<RackSummary>>,
    pub(super) load_balancers: u32,
    pub(super) opened_connections: Option<u64>,
    pub(super) of_requests: bool,
    pub(super) new_interval: bool,
    /// Of each id its position in `servers`; empty until somebody looks for one.
    positions: Vec<Option<u16>>,
    /// Whether each server is in one rack's summary at most, and has its loads from there: what a rack passes up next then takes their
    /// place.
    in_one_rack: bool,
    totals: OnceLock<Totals>,
}

/// What is added up over all servers: once for a table, and not for all who ask.
#[derive(Debug, Clone, Copy)]
pub(super) struct Totals {
    /// See [`Pool::neutral_load`].
    neutral_load: f64,
    /// See [`Pool::has_loads`].
    has_loads: bool,
    /// Whether all eligible servers are of one class.
    pub alike: bool,
    /// Whether the loads of any server's cores are reported here.
    pub any_reports_here: bool,
}

impl Pool {
    /// `load_balancers`: how many of them share the service's new connections (0 counts as 1).
    pub fn new(mut servers: Vec<PoolServer>, load_balancers: u32) -> Self {
        servers.sort_by_key(|server| server.id);
        let load_balancers = load_balancers.max(1);
        Self {
            servers,
            racks: Vec::new(),
            load_balancers,
            opened_connections: None,
            of_requests: false,
            new_interval: true,
            positions: Vec::new(),
            in_one_rack: true,
            totals: OnceLock::new(),
        }
    }

    /// The same moment with these servers.
    pub fn of_servers(self, servers: Vec<PoolServer>) -> Self {
        let Self { load_balancers, opened_connections, of_requests, new_interval, racks, .. } = self;
        let pool = Self { opened_connections, of_requests, new_interval, ..Self::new(servers, load_balancers) };
        pool.behind_racks(racks)
    }

    /// The same servers at the moment of the next table, as [`Pool::new`] would have them.
    pub fn for_next_table(self, load_balancers: u32) -> Self {
        let load_balancers = load_balancers.max(1);
        Self { load_balancers, opened_connections: None, of_requests: false, new_interval: true, ..self }
    }

    /// This is what is known of one of its servers now, without what racks pass up; of one that is not in it nothing happens.
    pub fn renew(&mut self, server: PoolServer) {
        let Some(known) = self.position(server.id).map(|position| &mut self.servers[position]) else { return };
        let passed_up = match (&server.loads, &known.loads) {
            (None, Some(loads)) if !matches!(loads, Loads::Local(_)) => known.loads.take(),
            // Whether a rack passes its loads up is to be looked for.
            (None, Some(_)) => {
                self.in_one_rack = false;
                None
            }
            _ => None,
        };
        *known = PoolServer { loads: server.loads.or(passed_up), ..server };
        self.totals = OnceLock::new();
    }

    /// Whether what is known of the server's load is newer than the previous table.
    pub fn set_fresh(&mut self, id: ServerId, fresh: bool) {
        if let Some(position) = self.position(id) {
            self.servers[position].fresh = fresh;
        }
    }

    fn position(&mut self, id: ServerId) -> Option<usize> {
        if self.positions.is_empty()
            && let Some(last) = self.servers.last()
        {
            self.positions.resize(usize::from(last.id.get()) + 1, None);
            for (position, server) in (0..).zip(&self.servers) {
                self.positions[usize::from(server.id.get())] = Some(position);
            }
        }
        self.positions.get(usize::from(id.get())).copied().flatten().map(usize::from)
    }

    /// The same pool, in which the loads of the racks' servers are what the racks pass up, where none are known yet.
    /// In a pool that is behind racks already only what they pass up anew is looked at.
    pub fn behind_racks(mut self, racks: Vec<Arc<RackSummary>>) -> Self {
        let before = std::mem::replace(&mut self.racks, racks.clone());
        self.totals = OnceLock::new();
        if self.in_one_rack && before.len() == racks.len() {
            let changed = || before.iter().zip(&racks).filter(|(before, now)| !Arc::ptr_eq(before, now));
            changed().for_each(|(before, _)| self.forget(before));
            changed().for_each(|(_, now)| self.hear(now));
            if self.in_one_rack {
                return self;
            }
        }
        self.in_one_rack = true;
        for server in &mut self.servers {
            server.loads = server.loads.take().filter(|loads| matches!(loads, Loads::Local(_)));
        }
        racks.iter().for_each(|rack| self.hear(rack));
        self
    }

    /// Nothing holds of what the rack has passed up of its servers.
    fn forget(&mut self, rack: &RackSummary) {
        for reduced in &rack.servers {
            if let Some(position) = self.position(reduced.id) {
                let loads = &mut self.servers[position].loads;
                *loads = loads.take().filter(|loads| matches!(loads, Loads::Local(_)));
            }
        }
    }

    /// A rack passes that up: the first one that names a server is heard.
    fn hear(&mut self, rack: &RackSummary) {
        for reduced in &rack.servers {
            let Some(position) = self.position(reduced.id) else { continue };
            match &mut self.servers[position].loads {
                loads @ None => *loads = Some(reduced.loads.clone()),
                Some(Loads::Local(_)) => {}
                Some(_) => self.in_one_rack = false,
            }
        }
    }

    /// What racks pass up of servers with this RSS key.
    pub(super) fn lists(&self, key: &RssKey) -> impl Iterator<Item = &CandidateList> {
        self.racks.iter().flat_map(|rack| &rack.lists).filter(move |list| list.key == *key)
    }

    /// The same pool, in which so many connections were opened in the last whole report interval.
    pub fn with_opened_connections(self, connections: u64) -> Self {
        Self { opened_connections: Some(connections), ..self }
    }

    /// The same pool, within a report interval for which there was a table already.
    pub fn within_interval(self) -> Self {
        Self { new_interval: false, ..self }
    }

    /// The same pool, in which a "connection" is one request, as it is for UDP services whose every datagram is placed on its
    /// own: nothing of it is left when the next table is made.
    pub fn of_requests(self) -> Self {
        Self { of_requests: true, ..self }
    }

    /// All servers, by id.
    pub fn servers(&self) -> &[PoolServer] {
        &self.servers
    }

    /// The servers that take new connections, by id.
    pub fn eligible(&self) -> impl Iterator<Item = &PoolServer> + Clone {
        self.servers.iter().filter(|server| server.eligible)
    }

    /// The same pool with other loads of these servers.
    pub(super) fn with_servers(&self, servers: Vec<PoolServer>) -> Self {
        Self { servers, racks: self.racks.clone(), positions: Vec::new(), totals: OnceLock::new(), ..*self }
    }

    pub(super) fn totals(&self) -> &Totals {
        self.totals.get_or_init(|| {
            // From -0 on, as sums of iterators begin.
            let (mut cores, mut sum, mut alike, mut first) = (0u64, -0.0, true, None);
            for server in self.eligible() {
                if let Some(loads) = &server.loads {
                    cores += u64::from(loads.count());
                    sum += loads.sum();
                }
                let class = server.class();
                alike &= class == *first.get_or_insert(class);
            }
            Totals {
                neutral_load: if cores == 0 { 0.0 } else { sum / cores as f64 },
                has_loads: self.eligible().any(|server| server.loads.is_some()),
                alike,
                any_reports_here: self.servers.iter().any(|server| matches!(server.loads, Some(Loads::Local(_)))),
            }
        })
    }

    /// Whether any eligible server's loads are known.
    pub fn has_loads(&self) -> bool {
        self.totals().has_loads
    }

    /// Mean load of all cores whose load is known: what a server without a fresh report counts as.
    pub fn neutral_load(&self) -> f64 {
        self.totals().neutral_load
    }

    /// What every eligible server has of new connections, next to the others: weight x ramp.
    pub fn shares(&self) -> Vec<(ServerId, f64)> {
        self.eligible().map(|server| (server.id, f64::from(server.weight.get()) * server.ramp)).collect()
    }

    /// The capacity of each eligible server: what the operator says, or its number of cores, of which at most
    /// [`MOST_TIMES_THE_MEDIAN`] the pool's median count: nobody but the server itself says how many it has. One of which nothing is known
    /// counts as the mean of the others, and in a pool of such servers as 1.
    pub fn capacities(&self) -> Vec<f64> {
        let mut counts: Vec<u32> = self.eligible().filter_map(PoolServer::core_count).collect();
        counts.sort_unstable();
        let median = counts.get(counts.len().saturating_sub(1) / 2).copied().unwrap_or(0);
        let most = median.saturating_mul(MOST_TIMES_THE_MEDIAN);
        let of = |server: &PoolServer| {
            let cores = || server.core_count().map(|cores| f64::from(cores.min(most)));
            server.capacity.map(Capacity::get).or_else(cores)
        };
        let known: Vec<f64> = self.eligible().filter_map(of).collect();
        let mean = crate::statistics::mean(&known).map_or(1.0, f64::round).max(1.0);
        self.eligible().map(|server| of(server).unwrap_or(mean)).collect()
    }

    /// The fair part of each eligible server in new connections: by weight, and by capacity where `by_capacity`; 1 in all.
    pub fn fair_shares(&self, by_capacity: bool) -> Vec<(ServerId, f64)> {
        let weights = self.eligible().map(|server| f64::from(server.weight.get()));
        let parts: Vec<f64> = match by_capacity {
            true => weights.zip(self.capacities()).map(|(weight, capacity)| weight * capacity).collect(),
            false => weights.collect(),
        };
        let sum = parts.iter().sum::<f64>().max(f64::MIN_POSITIVE);
        self.eligible().zip(parts).map(|(server, part)| (server.id, part / sum)).collect()
    }

    /// Whether all servers take part in the bucket's connections, or which: one that has joined a short time ago in as many
    /// buckets as its ramp says, always the same ones.
    pub fn takes_part(&self, server: &PoolServer, bucket: u32) -> bool {
        server.ramp >= 1.0 || part_of(bucket, server.id) < server.ramp
    }

    /// Load that a connection brings, on average: all load over all open connections.
    pub fn load_per_connection(&self) -> f64 {
        let known = self.servers.iter().filter(|server| server.loads.is_some());
        let connections: u64 = known.map(|server| u64::from(server.open_connections)).sum();
        if connections == 0 { 0.0 } else { self.load() / connections as f64 }
    }

    /// The loads of all cores that are known, together.
    pub fn load(&self) -> f64 {
        self.servers.iter().filter_map(|server| server.loads.as_ref()).map(Loads::sum).sum()
    }
}

/// A number from 0 to 1 that is the bucket's and the server's own.
fn part_of(bucket: u32, server: ServerId) -> f64 {
    let bits = mix(bucket << 16 | u32::from(server.get())).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    (bits >> 11) as f64 / (1u64 << 53) as f64
}

impl PoolServer {
    /// An eligible server of which nothing more is known.
    pub fn new(id: ServerId) -> Self {
        Self {
            id,
            eligible: true,
            loads: None,
            rss: None,
            open_connections: 0,
            weight: Weight::ONE,
            ramp: 1.0,
            capacity: None,
            traffic: None,
            fresh: true,
        }
    }

    /// The load of core `core`; of a queue beyond the cores that report the mean of these, and `neutral` where none does.
    pub fn core_load(&self, core: u16, neutral: f64) -> f64 {
        let known = self.loads.as_ref().and_then(Loads::cores).and_then(|loads| loads.get(usize::from(core)));
        known.copied().unwrap_or_else(|| self.mean_load(neutral))
    }

    /// What its cores are compared by.
    pub(super) fn class(&self) -> Class {
        // How fast one core is: what the operator says of all of them, by their number.
        let speed = self.capacity.and_then(|capacity| Some(capacity.get() / f64::from(self.core_count()?.max(1))));
        Class { weight: self.weight, speed: speed.unwrap_or(1.0) }
    }

    /// How many cores it has, by its reports or by its NIC's table; `None` when neither is known.
    pub fn core_count(&self) -> Option<u32> {
        let by_table = |rss: &Rss| rss.indirection_table.queues().iter().max().map(|last| u32::from(*last) + 1);
        let reported = self.loads.as_ref().map(Loads::count);
        reported.or_else(|| self.rss.as_ref().and_then(by_table))
    }

    /// The mean load of all its cores, or `neutral` when it is not known.
    pub fn mean_load(&self, neutral: f64) -> f64 {
        self.loads.as_ref().and_then(Loads::mean).unwrap_or(neutral)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn a_server_that_joins_takes_part_in_more_and_more_buckets() {
        let mut server = PoolServer::new(ServerId::try_from(77).unwrap());
        let pool = Pool::new(vec![server.clone()], 1);
        let mut before: Vec<u32> = Vec::new();
        for ramp in [0.1, 0.5, 0.9, 1.0] {
            server.ramp = ramp;
            let buckets: Vec<u32> = (0..2048).filter(|bucket| pool.takes_part(&server, *bucket)).collect();
            assert!((buckets.len() as f64 / 2048.0 - ramp).abs() < 0.03, "{ramp}: {}", buckets.len());
            assert!(before.iter().all(|bucket| buckets.contains(bucket)));
            before = buckets;
        }
    }

    #[test]
    fn capacities_are_told_or_counted_or_the_mean() {
        let server = |id: u64, capacity: Option<f64>, cores: usize| PoolServer {
            capacity: capacity.map(|capacity| Capacity::new(capacity).unwrap()),
            loads: (cores > 0).then(|| vec![0.0; cores].into()),
            ..PoolServer::new(ServerId::try_from(id).unwrap())
        };
        let pool = |servers: &[PoolServer]| Pool::new(servers.to_vec(), 1).capacities();
        assert_eq!(pool(&[server(1, Some(2.5), 8), server(2, None, 4), server(3, None, 0)]), [2.5, 4.0, 3.0]);
        assert_eq!(pool(&[server(1, None, 0)]), [1.0]);
    }

    prop_compose! {
        /// Loads that are reported here, of some servers, and summaries of some racks, which may name the same server.
        fn step()(
            here in prop::collection::vec((0usize..10, prop::option::weighted(0.3, 1u32..9)), 0..4),
            racks in prop::collection::vec((0usize..5, prop::collection::vec((0u64..12, 1u32..9), 0..5)), 0..3),
            count in prop_oneof![4 => Just(4usize), 1 => 0usize..6],
        ) -> (Vec<(usize, Option<u32>)>, Vec<(usize, Vec<(u64, u32)>)>, usize) {
            (here, racks, count)
        }
    }

    fn id(number: u64) -> ServerId {
        ServerId::try_from(number * 7).unwrap()
    }

    fn summary(servers: &[(u64, u32)]) -> Arc<RackSummary> {
        let mut servers = servers.to_vec();
        servers.sort_unstable();
        servers.dedup_by_key(|(server, _)| *server);
        let of = |(server, tenths): &(u64, u32)| {
            let loads = match tenths {
                1 => Loads::Relayed(vec![0.5; 2].into()),
                _ => Loads::Aggregated { sum: f64::from(*tenths) / 10.0, cores: 3 },
            };
            crate::policy::ReducedServer { id: id(*server), loads }
        };
        Arc::new(RackSummary { servers: servers.iter().map(of).collect(), spreads: Vec::new(), lists: Vec::new() })
    }

    proptest! {
        /// A pool that goes on from table to table is the one that would be made anew.
        #[test]
        fn refreshed_pool_equals_a_new_one(steps in prop::collection::vec(step(), 1..10)) {
            let mut servers: Vec<PoolServer> = (0..10).map(|n| PoolServer::new(id(n))).collect();
            let mut racks: Vec<Arc<RackSummary>> = (0..6).map(|_| summary(&[])).collect();
            let mut pool = Pool::new(servers.clone(), 1);
            for (here, passed_up, count) in steps {
                for (server, tenths) in here {
                    let loads = tenths.map(|tenths| Loads::from(vec![f64::from(tenths) / 10.0; 2]));
                    servers[server] = PoolServer { loads, fresh: tenths != Some(1), ..servers[server].clone() };
                    pool.renew(servers[server].clone());
                }
                for (rack, of_rack) in passed_up {
                    racks[rack] = summary(&of_rack);
                }
                pool = pool.for_next_table(3).with_opened_connections(4).behind_racks(racks[..count].to_vec());
                let anew = Pool::new(servers.clone(), 3).with_opened_connections(4).behind_racks(racks[..count].to_vec());
                prop_assert_eq!(pool.servers(), anew.servers());
                prop_assert_eq!(pool.neutral_load(), anew.neutral_load());
                prop_assert_eq!(pool.has_loads(), anew.has_loads());
                prop_assert_eq!((pool.load_balancers, pool.opened_connections), (anew.load_balancers, anew.opened_connections));
            }
        }
    }
}
