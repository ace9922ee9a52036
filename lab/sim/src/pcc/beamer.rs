//! `beamer`: stable hashing with daisy chaining (Olteanu et al., NSDI'18; Faild does the same). The number of buckets
//! is fixed; a change of the pool moves as few as possible. A server forwards an unknown packet to the bucket's
//! previous server, so one change of a bucket breaks nothing, but a second one may.
//!
//! With a threshold, Cheetah's extension (NSDI'20, Sect. 2.1): a server with a load above (1 + threshold) x the mean is
//! removed from the table, and gets its buckets again when its load is below the mean.

use std::cmp::Reverse;
use std::collections::BinaryHeap;

use coreward_model::rss::{seeded_rng, uniform_below};
use rand::Rng as _;
use rand_xoshiro::Xoshiro256PlusPlus;

use super::Config;
use super::balancer::{Balancer, PlacedConnection};
use super::buckets::BucketTable;
use super::clock::Nanoseconds;
use super::cluster::Cluster;
use super::connections::Connection;
use super::hashed::bucket_count;

/// Stream of [`seeded_rng`] that selects the buckets to move.
const RNG_STREAM_BUCKET_MOVES: u64 = 204;

/// State of a server with regard to the table.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum EntryState {
    /// The server is not in the pool.
    Outside,
    /// The server gets new connections.
    Serving,
    /// The server is in the pool, but above the threshold: other servers have its buckets.
    Suspended,
}

/// Load balancers that use stable hashing with daisy chaining.
#[derive(Debug)]
pub struct Beamer {
    table: BucketTable,
    entry_states: Vec<EntryState>,
    /// Buckets that each server owns. A serving server uses them itself; those of a suspended one are lent to others.
    own_buckets: Vec<Vec<u32>>,
    /// Buckets of suspended servers that each server has borrowed.
    borrowed_buckets: Vec<Vec<u32>>,
    control: Option<ThresholdControl>,
    rng: Xoshiro256PlusPlus,
}

#[derive(Debug, Clone, Copy)]
pub struct ThresholdControl {
    /// Allowed imbalance: with 0.1, a server's load may be 10 % above the mean.
    pub threshold: f64,
    /// Time from which servers are suspended: while the system fills, loads of one or two connections are not
    /// significant.
    pub start: Nanoseconds,
}

impl Beamer {
    pub fn new(control: Option<ThresholdControl>, config: &Config, seed: u64) -> Self {
        let buckets = bucket_count(config.servers, config.buckets_per_server);
        let table = BucketTable::new(buckets, true, config.by_second);
        let rng = seeded_rng(seed, RNG_STREAM_BUCKET_MOVES);
        Self { table, entry_states: Vec::new(), own_buckets: Vec::new(), borrowed_buckets: Vec::new(), control, rng }
    }

    #[cfg(test)]
    pub fn table(&self) -> &BucketTable {
        &self.table
    }

    fn has_state(&self, server: u16, state: EntryState) -> bool {
        self.entry_states[usize::from(server)] == state
    }

    fn servers_in_state(&self, matches: impl Fn(EntryState) -> bool) -> Vec<u16> {
        (0..self.entry_states.len() as u16).filter(|server| matches(self.entry_states[usize::from(*server)])).collect()
    }

    /// Returns a key that orders servers by their number of buckets, with ties in random order.
    fn sort_key(&mut self, count: usize, server: u16) -> (usize, u32, u16) {
        (count, self.rng.next_u32(), server)
    }

    /// Lends the buckets to the serving servers with the fewest buckets.
    fn lend(&mut self, buckets: Vec<u32>) {
        let count = |beamer: &Self, server: u16| {
            beamer.own_buckets[usize::from(server)].len() + beamer.borrowed_buckets[usize::from(server)].len()
        };
        let serving = self.servers_in_state(|state| state == EntryState::Serving);
        let mut fewest: BinaryHeap<_> =
            serving.into_iter().map(|server| Reverse(self.sort_key(count(self, server), server))).collect();
        for bucket in buckets {
            let Reverse((had, _, taker)) = fewest.pop().expect("one server always serves");
            self.borrowed_buckets[usize::from(taker)].push(bucket);
            self.table.assign(bucket as usize, taker);
            fewest.push(Reverse(self.sort_key(had + 1, taker)));
        }
    }

    fn suspend(&mut self, server: u16) {
        self.entry_states[usize::from(server)] = EntryState::Suspended;
        let mut buckets = std::mem::take(&mut self.borrowed_buckets[usize::from(server)]);
        buckets.extend_from_slice(&self.own_buckets[usize::from(server)]);
        self.lend(buckets);
    }

    fn resume(&mut self, server: u16) {
        self.entry_states[usize::from(server)] = EntryState::Serving;
        for position in 0..self.own_buckets[usize::from(server)].len() {
            let bucket = self.own_buckets[usize::from(server)][position];
            self.return_bucket(bucket);
            self.table.assign(bucket as usize, server);
        }
    }

    /// Returns a borrowed bucket to its owner.
    fn return_bucket(&mut self, bucket: u32) {
        let borrower = self.table.server(bucket as usize);
        let borrowed = &mut self.borrowed_buckets[usize::from(borrower)];
        let position =
            borrowed.iter().position(|other| *other == bucket).expect("a suspended server's buckets are lent");
        borrowed.swap_remove(position);
    }

    /// Removes a server from the pool. Its own buckets go to the servers that own the fewest buckets.
    fn remove_server(&mut self, server: u16) {
        if self.has_state(server, EntryState::Serving)
            && self.servers_in_state(|other| other == EntryState::Serving).len() == 1
        {
            // If all other servers are above the threshold, one of them must serve.
            let suspended = self.servers_in_state(|other| other == EntryState::Suspended);
            let drawn = uniform_below(&mut self.rng, suspended.len() as u32);
            self.resume(suspended[drawn as usize]);
        }
        let was_suspended = self.has_state(server, EntryState::Suspended);
        self.entry_states[usize::from(server)] = EntryState::Outside;
        let borrowed = std::mem::take(&mut self.borrowed_buckets[usize::from(server)]);
        self.lend(borrowed);
        let heirs = self.servers_in_state(|state| state != EntryState::Outside);
        let mut fewest: BinaryHeap<_> = heirs
            .into_iter()
            .map(|heir| Reverse(self.sort_key(self.own_buckets[usize::from(heir)].len(), heir)))
            .collect();
        for bucket in std::mem::take(&mut self.own_buckets[usize::from(server)]) {
            let Reverse((had, _, heir)) = fewest.pop().expect("the last server never leaves");
            if was_suspended && self.has_state(heir, EntryState::Serving) {
                self.return_bucket(bucket);
            }
            self.own_buckets[usize::from(heir)].push(bucket);
            match self.has_state(heir, EntryState::Serving) {
                true => self.table.assign(bucket as usize, heir),
                false if was_suspended => (),
                false => self.lend(vec![bucket]),
            }
            fewest.push(Reverse(self.sort_key(had + 1, heir)));
        }
    }

    /// Adds a server to the pool, which gets its share of buckets from the servers that own the most.
    fn add_server(&mut self, server: u16) {
        let others = self.servers_in_state(|state| state != EntryState::Outside);
        self.entry_states[usize::from(server)] = EntryState::Serving;
        let share = self.table.len() / (others.len() + 1);
        let mut most: BinaryHeap<_> =
            others.into_iter().map(|other| self.sort_key(self.own_buckets[usize::from(other)].len(), other)).collect();
        for _ in 0..share {
            let (had, _, giver) = most.pop().expect("there are other servers");
            let position = uniform_below(&mut self.rng, had as u32) as usize;
            let bucket = self.own_buckets[usize::from(giver)].swap_remove(position);
            if self.has_state(giver, EntryState::Suspended) {
                self.return_bucket(bucket);
            }
            self.own_buckets[usize::from(server)].push(bucket);
            self.table.assign(bucket as usize, server);
            most.push(self.sort_key(had - 1, giver));
        }
    }

    fn fill(&mut self, cluster: &Cluster) {
        let count = cluster.server_count();
        let state = |server: u16| if cluster.is_member(server) { EntryState::Serving } else { EntryState::Outside };
        self.entry_states = (0..count as u16).map(state).collect();
        self.own_buckets = vec![Vec::new(); count];
        self.borrowed_buckets = vec![Vec::new(); count];
        for bucket in 0..self.table.len() {
            let server = cluster.members()[bucket % cluster.members().len()];
            self.own_buckets[usize::from(server)].push(bucket as u32);
            self.table.assign(bucket, server);
        }
    }
}

impl Balancer for Beamer {
    fn place(&mut self, identity: u64, _cluster: &Cluster) -> PlacedConnection {
        PlacedConnection {
            server: self.table.server(self.table.bucket(identity)),
            core: 0,
            stored_state: self.table.last_change_number(),
        }
    }

    fn servers_changed(&mut self, cluster: &Cluster) {
        self.table.begin_change(cluster.now);
        if self.entry_states.is_empty() {
            return self.fill(cluster);
        }
        for server in 0..self.entry_states.len() as u16 {
            match (self.has_state(server, EntryState::Outside), cluster.is_member(server)) {
                (true, true) => self.add_server(server),
                (false, false) => self.remove_server(server),
                _ => (),
            }
        }
    }

    fn connection_opened(&mut self, connection: &Connection, cluster: &Cluster) {
        let Some(control) = self.control.filter(|control| cluster.now >= control.start) else { return };
        let server = connection.server;
        let load = f64::from(cluster.open_connections(server));
        let others_serve = || self.servers_in_state(|state| state == EntryState::Serving).len() > 1;
        if load > (1.0 + control.threshold) * cluster.mean_open_connections()
            && self.has_state(server, EntryState::Serving)
            && others_serve()
        {
            self.table.begin_change(cluster.now);
            self.suspend(server);
        }
    }

    fn connection_closed(&mut self, connection: &Connection, cluster: &Cluster) {
        let server = connection.server;
        if self.control.is_none() || !self.has_state(server, EntryState::Suspended) {
            return;
        }
        let load = cluster.open_connections(server);
        if load == 0 || f64::from(load) < cluster.mean_open_connections() {
            self.table.begin_change(cluster.now);
            self.resume(server);
        }
    }

    fn first_break_time(&self, connection: &Connection, cluster: &Cluster) -> Option<Nanoseconds> {
        self.table.broken_at(connection, cluster.now)
    }
}
