//! `beamer`: stable hashing with daisy chaining (Olteanu et al., NSDI'18; Faild does the same). The number of buckets
//! is fixed; a change of the pool moves as few as possible. A packet that the bucket's server does not know goes to the
//! bucket's previous server: one change of a bucket breaks nothing, a second one may.
//!
//! With a threshold, Cheetah's extension (NSDI'20, Sect. 2.1): a server whose load is above (1 + threshold) x the mean
//! is removed from the table, and added again when its load is below the mean. Its buckets then return to it.

use std::cmp::Reverse;
use std::collections::BinaryHeap;

use coreward_model::rss::{seeded_rng, uniform_below};
use rand::Rng as _;
use rand_xoshiro::Xoshiro256PlusPlus;

use super::Config;
use super::balancer::{Balancer, Placed};
use super::buckets::BucketTable;
use super::clock::Nanoseconds;
use super::cluster::Cluster;
use super::connections::Connection;
use super::hashed::bucket_count;

/// [`seeded_rng`]'s stream for which buckets move.
const RNG_STREAM_BUCKET_MOVES: u64 = 204;

/// State of a server in the table.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum EntryState {
    /// Not in the pool.
    Outside,
    /// Gets new connections.
    Serving,
    /// In the pool, above the threshold: its buckets are with others.
    Relieved,
}

/// Stable hashing with daisy chaining.
#[derive(Debug)]
pub struct Beamer {
    table: BucketTable,
    standing: Vec<EntryState>,
    /// By server, the buckets that are its own: with it while it serves, with others while it is relieved.
    own: Vec<Vec<u32>>,
    /// By server, the buckets that it has of relieved ones.
    borrowed: Vec<Vec<u32>>,
    control: Option<Control>,
    rng: Xoshiro256PlusPlus,
}

#[derive(Debug, Clone, Copy)]
pub struct Control {
    /// The imbalance that is allowed: 0.1 is 10 % above the mean.
    pub threshold: f64,
    /// While the system fills, loads of one or two connections mean nothing.
    pub starts: Nanoseconds,
}

impl Beamer {
    pub fn new(control: Option<Control>, config: &Config, seed: u64) -> Self {
        let buckets = bucket_count(config.servers, config.buckets_per_server);
        let table = BucketTable::new(buckets, true, config.by_second);
        let rng = seeded_rng(seed, RNG_STREAM_BUCKET_MOVES);
        Self { table, standing: Vec::new(), own: Vec::new(), borrowed: Vec::new(), control, rng }
    }

    #[cfg(test)]
    pub fn table(&self) -> &BucketTable {
        &self.table
    }

    fn is(&self, server: u16, standing: EntryState) -> bool {
        self.standing[usize::from(server)] == standing
    }

    fn servers_that_are(&self, matches: impl Fn(EntryState) -> bool) -> Vec<u16> {
        (0..self.standing.len() as u16).filter(|server| matches(self.standing[usize::from(*server)])).collect()
    }

    /// A number of buckets by which servers are compared, equals in random order.
    fn rank(&mut self, count: usize, server: u16) -> (usize, u32, u16) {
        (count, self.rng.next_u32(), server)
    }

    /// Lends the buckets to the serving servers that have fewest.
    fn lend(&mut self, buckets: Vec<u32>) {
        let count = |beamer: &Self, server: u16| {
            beamer.own[usize::from(server)].len() + beamer.borrowed[usize::from(server)].len()
        };
        let serving = self.servers_that_are(|standing| standing == EntryState::Serving);
        let mut fewest: BinaryHeap<_> =
            serving.into_iter().map(|server| Reverse(self.rank(count(self, server), server))).collect();
        for bucket in buckets {
            let Reverse((had, _, taker)) = fewest.pop().expect("one server always serves");
            self.borrowed[usize::from(taker)].push(bucket);
            self.table.assign(bucket as usize, taker);
            fewest.push(Reverse(self.rank(had + 1, taker)));
        }
    }

    fn relieve(&mut self, server: u16) {
        self.standing[usize::from(server)] = EntryState::Relieved;
        let mut buckets = std::mem::take(&mut self.borrowed[usize::from(server)]);
        buckets.extend_from_slice(&self.own[usize::from(server)]);
        self.lend(buckets);
    }

    fn resume(&mut self, server: u16) {
        self.standing[usize::from(server)] = EntryState::Serving;
        for position in 0..self.own[usize::from(server)].len() {
            let bucket = self.own[usize::from(server)][position];
            self.return_bucket(bucket);
            self.table.assign(bucket as usize, server);
        }
    }

    /// Returns a borrowed bucket to its owner.
    fn return_bucket(&mut self, bucket: u32) {
        let borrower = self.table.server(bucket as usize);
        let borrowed = &mut self.borrowed[usize::from(borrower)];
        let position =
            borrowed.iter().position(|other| *other == bucket).expect("a relieved server's buckets are lent");
        borrowed.swap_remove(position);
    }

    /// A server leaves the pool: its own buckets become those of the servers that own fewest.
    fn leave(&mut self, server: u16) {
        if self.is(server, EntryState::Serving)
            && self.servers_that_are(|other| other == EntryState::Serving).len() == 1
        {
            // All others are above the threshold: one must serve.
            let relieved = self.servers_that_are(|other| other == EntryState::Relieved);
            let drawn = uniform_below(&mut self.rng, relieved.len() as u32);
            self.resume(relieved[drawn as usize]);
        }
        let was_relieved = self.is(server, EntryState::Relieved);
        self.standing[usize::from(server)] = EntryState::Outside;
        let borrowed = std::mem::take(&mut self.borrowed[usize::from(server)]);
        self.lend(borrowed);
        let heirs = self.servers_that_are(|standing| standing != EntryState::Outside);
        let mut fewest: BinaryHeap<_> =
            heirs.into_iter().map(|heir| Reverse(self.rank(self.own[usize::from(heir)].len(), heir))).collect();
        for bucket in std::mem::take(&mut self.own[usize::from(server)]) {
            let Reverse((had, _, heir)) = fewest.pop().expect("the last server never leaves");
            if was_relieved && self.is(heir, EntryState::Serving) {
                self.return_bucket(bucket);
            }
            self.own[usize::from(heir)].push(bucket);
            match self.is(heir, EntryState::Serving) {
                true => self.table.assign(bucket as usize, heir),
                false if was_relieved => (),
                false => self.lend(vec![bucket]),
            }
            fewest.push(Reverse(self.rank(had + 1, heir)));
        }
    }

    /// Adds a server, which gets its share from the servers with most buckets.
    fn join(&mut self, server: u16) {
        let others = self.servers_that_are(|standing| standing != EntryState::Outside);
        self.standing[usize::from(server)] = EntryState::Serving;
        let share = self.table.len() / (others.len() + 1);
        let mut most: BinaryHeap<_> =
            others.into_iter().map(|other| self.rank(self.own[usize::from(other)].len(), other)).collect();
        for _ in 0..share {
            let (had, _, giver) = most.pop().expect("there are other servers");
            let position = uniform_below(&mut self.rng, had as u32) as usize;
            let bucket = self.own[usize::from(giver)].swap_remove(position);
            if self.is(giver, EntryState::Relieved) {
                self.return_bucket(bucket);
            }
            self.own[usize::from(server)].push(bucket);
            self.table.assign(bucket as usize, server);
            most.push(self.rank(had - 1, giver));
        }
    }

    fn fill(&mut self, cluster: &Cluster) {
        let count = cluster.server_count();
        let standing = |server: u16| if cluster.is_member(server) { EntryState::Serving } else { EntryState::Outside };
        self.standing = (0..count as u16).map(standing).collect();
        self.own = vec![Vec::new(); count];
        self.borrowed = vec![Vec::new(); count];
        for bucket in 0..self.table.len() {
            let server = cluster.members()[bucket % cluster.members().len()];
            self.own[usize::from(server)].push(bucket as u32);
            self.table.assign(bucket, server);
        }
    }
}

impl Balancer for Beamer {
    fn place(&mut self, identity: u64, _cluster: &Cluster) -> Placed {
        Placed { server: self.table.server(self.table.bucket(identity)), core: 0, mark: self.table.mark() }
    }

    fn servers_changed(&mut self, cluster: &Cluster) {
        self.table.begin_change(cluster.now);
        if self.standing.is_empty() {
            return self.fill(cluster);
        }
        for server in 0..self.standing.len() as u16 {
            match (self.is(server, EntryState::Outside), cluster.is_member(server)) {
                (true, true) => self.join(server),
                (false, false) => self.leave(server),
                _ => (),
            }
        }
    }

    fn opened(&mut self, connection: &Connection, cluster: &Cluster) {
        let Some(control) = self.control.filter(|control| cluster.now >= control.starts) else { return };
        let server = connection.server;
        let load = f64::from(cluster.open(server));
        let others_serve = || self.servers_that_are(|standing| standing == EntryState::Serving).len() > 1;
        if load > (1.0 + control.threshold) * cluster.mean_open()
            && self.is(server, EntryState::Serving)
            && others_serve()
        {
            self.table.begin_change(cluster.now);
            self.relieve(server);
        }
    }

    fn closed(&mut self, connection: &Connection, cluster: &Cluster) {
        let server = connection.server;
        if self.control.is_none() || !self.is(server, EntryState::Relieved) {
            return;
        }
        let load = cluster.open(server);
        if load == 0 || f64::from(load) < cluster.mean_open() {
            self.table.begin_change(cluster.now);
            self.resume(server);
        }
    }

    fn broken(&self, connection: &Connection, cluster: &Cluster) -> Option<Nanoseconds> {
        self.table.broken(connection, cluster.now)
    }
}
