//! Stable hashing with daisy chaining, method `beamer` (Olteanu et al., NSDI'18). Faild works the same way.
//!
//! Connections are hashed to a fixed number of buckets, and a pool change moves as few buckets as possible. A server
//! forwards an unknown packet to the bucket's previous server. One change of a bucket therefore breaks no connection,
//! but a second one may.
//!
//! With a threshold, Cheetah's extension (NSDI'20, Sect. 2.1) applies. A server whose load exceeds (1 + threshold) x
//! the mean is removed from the table. It gets its buckets back when its load falls below the mean.

use std::cmp::Reverse;
use std::collections::BinaryHeap;

use coreward_model::rss::{seeded_rng, uniform_below};
use rand::Rng as _;
use rand_xoshiro::Xoshiro256PlusPlus;

use super::PccSimulationConfig;
use super::balancer::{LoadBalancerSet, PlacedConnection};
use super::buckets::BucketTable;
use super::cluster::Cluster;
use super::connections::OpenConnection;
use super::hashing_balancers::bucket_count_for_servers;
use super::simulated_nanoseconds::Nanoseconds;

/// Random stream of [`seeded_rng`] that selects the buckets to move.
const RNG_STREAM_BUCKET_MOVES: u64 = 204;

/// State of a server, which determines whether it receives new connections.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum BeamerServerState {
    /// The server is outside the pool.
    NotInPool,
    /// The server is in the pool and receives new connections.
    Serving,
    /// The server is in the pool, but its load exceeds the threshold, so its buckets are lent to other servers.
    Suspended,
}

/// Load balancers that use stable hashing with daisy chaining, as in Beamer.
#[derive(Debug)]
pub struct BeamerBalancers {
    table: BucketTable,
    server_states: Vec<BeamerServerState>,
    /// Buckets that each server owns. A server uses its own buckets, unless it is suspended and they are lent to
    /// others.
    owned_buckets_by_server: Vec<Vec<u32>>,
    /// Buckets that each server has borrowed from suspended servers.
    borrowed_buckets_by_server: Vec<Vec<u32>>,
    threshold_control: Option<SuspensionThresholdControl>,
    rng: Xoshiro256PlusPlus,
}

#[derive(Debug, Clone, Copy)]
pub struct SuspensionThresholdControl {
    /// Allowed excess over the servers' mean load. With 0.1, a server's load may be 10 % above the mean.
    pub allowed_load_excess_fraction: f64,
    /// Time from which servers may be suspended. While the system fills, servers have only one or two connections, so
    /// their loads are not significant.
    pub suspension_start_time: Nanoseconds,
}

impl BeamerBalancers {
    pub fn new(threshold_control: Option<SuspensionThresholdControl>, config: &PccSimulationConfig, seed: u64) -> Self {
        let bucket_count = bucket_count_for_servers(config.server_count, config.buckets_per_server);
        let table = BucketTable::new(bucket_count, true, config.keeps_per_second_counts);
        let rng = seeded_rng(seed, RNG_STREAM_BUCKET_MOVES);
        Self {
            table,
            server_states: Vec::new(),
            owned_buckets_by_server: Vec::new(),
            borrowed_buckets_by_server: Vec::new(),
            threshold_control,
            rng,
        }
    }

    #[cfg(test)]
    pub fn bucket_table(&self) -> &BucketTable {
        &self.table
    }

    fn is_in_state(&self, server: u16, state: BeamerServerState) -> bool {
        self.server_states[usize::from(server)] == state
    }

    fn servers_in_states(&self, is_wanted_state: impl Fn(BeamerServerState) -> bool) -> Vec<u16> {
        (0..self.server_states.len() as u16)
            .filter(|server| is_wanted_state(self.server_states[usize::from(*server)]))
            .collect()
    }

    /// Returns a sort key for `server` that orders servers by their number of buckets, with ties in random order.
    fn bucket_sort_key(&mut self, bucket_count: usize, server: u16) -> (usize, u32, u16) {
        (bucket_count, self.rng.next_u32(), server)
    }

    /// Lends each of `buckets` to the serving server that has the fewest buckets at that time.
    fn lend_buckets(&mut self, buckets: Vec<u32>) {
        let used_bucket_count = |beamer: &Self, server: u16| {
            beamer.owned_buckets_by_server[usize::from(server)].len()
                + beamer.borrowed_buckets_by_server[usize::from(server)].len()
        };
        let serving_servers = self.servers_in_states(|state| state == BeamerServerState::Serving);
        let mut servers_by_bucket_count: BinaryHeap<_> = serving_servers
            .into_iter()
            .map(|server| Reverse(self.bucket_sort_key(used_bucket_count(self, server), server)))
            .collect();
        for bucket in buckets {
            let Reverse((bucket_count, _, borrowing_server)) =
                servers_by_bucket_count.pop().expect("one server always serves");
            self.borrowed_buckets_by_server[usize::from(borrowing_server)].push(bucket);
            self.table.assign_bucket(bucket as usize, borrowing_server);
            servers_by_bucket_count.push(Reverse(self.bucket_sort_key(bucket_count + 1, borrowing_server)));
        }
    }

    fn suspend_server(&mut self, server: u16) {
        self.server_states[usize::from(server)] = BeamerServerState::Suspended;
        let mut buckets = std::mem::take(&mut self.borrowed_buckets_by_server[usize::from(server)]);
        buckets.extend_from_slice(&self.owned_buckets_by_server[usize::from(server)]);
        self.lend_buckets(buckets);
    }

    fn resume_server(&mut self, server: u16) {
        self.server_states[usize::from(server)] = BeamerServerState::Serving;
        for position in 0..self.owned_buckets_by_server[usize::from(server)].len() {
            let bucket = self.owned_buckets_by_server[usize::from(server)][position];
            self.take_back_bucket(bucket);
            self.table.assign_bucket(bucket as usize, server);
        }
    }

    /// Takes a borrowed bucket from the server that has borrowed it.
    fn take_back_bucket(&mut self, bucket: u32) {
        let borrowing_server = self.table.current_server(bucket as usize);
        let borrowed_buckets = &mut self.borrowed_buckets_by_server[usize::from(borrowing_server)];
        let position =
            borrowed_buckets.iter().position(|other| *other == bucket).expect("a suspended server's buckets are lent");
        borrowed_buckets.swap_remove(position);
    }

    /// Removes a server from the pool and gives its own buckets to the servers that own the fewest.
    fn remove_server(&mut self, server: u16) {
        if self.is_in_state(server, BeamerServerState::Serving)
            && self.servers_in_states(|other| other == BeamerServerState::Serving).len() == 1
        {
            // All other servers are suspended, so one of them must serve again.
            let suspended_servers = self.servers_in_states(|other| other == BeamerServerState::Suspended);
            let drawn_index = uniform_below(&mut self.rng, suspended_servers.len() as u32);
            self.resume_server(suspended_servers[drawn_index as usize]);
        }
        let was_suspended = self.is_in_state(server, BeamerServerState::Suspended);
        self.server_states[usize::from(server)] = BeamerServerState::NotInPool;
        let borrowed_buckets = std::mem::take(&mut self.borrowed_buckets_by_server[usize::from(server)]);
        self.lend_buckets(borrowed_buckets);
        let pool_servers = self.servers_in_states(|state| state != BeamerServerState::NotInPool);
        let mut servers_by_bucket_count: BinaryHeap<_> = pool_servers
            .into_iter()
            .map(|pool_server| {
                Reverse(self.bucket_sort_key(self.owned_buckets_by_server[usize::from(pool_server)].len(), pool_server))
            })
            .collect();
        for bucket in std::mem::take(&mut self.owned_buckets_by_server[usize::from(server)]) {
            let Reverse((bucket_count, _, new_owner)) =
                servers_by_bucket_count.pop().expect("the last server never leaves");
            if was_suspended && self.is_in_state(new_owner, BeamerServerState::Serving) {
                self.take_back_bucket(bucket);
            }
            self.owned_buckets_by_server[usize::from(new_owner)].push(bucket);
            match self.is_in_state(new_owner, BeamerServerState::Serving) {
                true => self.table.assign_bucket(bucket as usize, new_owner),
                false if was_suspended => (),
                false => self.lend_buckets(vec![bucket]),
            }
            servers_by_bucket_count.push(Reverse(self.bucket_sort_key(bucket_count + 1, new_owner)));
        }
    }

    /// Adds a server to the pool. The new server takes an equal share of buckets from the servers that own the most.
    fn add_server(&mut self, server: u16) {
        let other_servers = self.servers_in_states(|state| state != BeamerServerState::NotInPool);
        self.server_states[usize::from(server)] = BeamerServerState::Serving;
        let fair_bucket_count = self.table.len() / (other_servers.len() + 1);
        let mut servers_by_bucket_count: BinaryHeap<_> = other_servers
            .into_iter()
            .map(|other| self.bucket_sort_key(self.owned_buckets_by_server[usize::from(other)].len(), other))
            .collect();
        for _ in 0..fair_bucket_count {
            let (bucket_count, _, previous_owner) = servers_by_bucket_count.pop().expect("there are other servers");
            let position = uniform_below(&mut self.rng, bucket_count as u32) as usize;
            let bucket = self.owned_buckets_by_server[usize::from(previous_owner)].swap_remove(position);
            if self.is_in_state(previous_owner, BeamerServerState::Suspended) {
                self.take_back_bucket(bucket);
            }
            self.owned_buckets_by_server[usize::from(server)].push(bucket);
            self.table.assign_bucket(bucket as usize, server);
            servers_by_bucket_count.push(self.bucket_sort_key(bucket_count - 1, previous_owner));
        }
    }

    fn assign_all_buckets(&mut self, cluster: &Cluster) {
        let server_count = cluster.total_server_count();
        let initial_state = |server: u16| {
            if cluster.is_pool_member(server) { BeamerServerState::Serving } else { BeamerServerState::NotInPool }
        };
        self.server_states = (0..server_count as u16).map(initial_state).collect();
        self.owned_buckets_by_server = vec![Vec::new(); server_count];
        self.borrowed_buckets_by_server = vec![Vec::new(); server_count];
        for bucket in 0..self.table.len() {
            let server = cluster.pool_members()[bucket % cluster.pool_members().len()];
            self.owned_buckets_by_server[usize::from(server)].push(bucket as u32);
            self.table.assign_bucket(bucket, server);
        }
    }
}

impl LoadBalancerSet for BeamerBalancers {
    fn place_connection(&mut self, identity: u64, _cluster: &Cluster) -> PlacedConnection {
        PlacedConnection {
            server: self.table.current_server(self.table.bucket_of_connection(identity)),
            core: 0,
            stored_state: self.table.last_change_number(),
        }
    }

    fn on_servers_changed(&mut self, cluster: &Cluster) {
        self.table.begin_table_change(cluster.now);
        if self.server_states.is_empty() {
            return self.assign_all_buckets(cluster);
        }
        for server in 0..self.server_states.len() as u16 {
            match (self.is_in_state(server, BeamerServerState::NotInPool), cluster.is_pool_member(server)) {
                (true, true) => self.add_server(server),
                (false, false) => self.remove_server(server),
                _ => (),
            }
        }
    }

    fn on_connection_opened(&mut self, connection: &OpenConnection, cluster: &Cluster) {
        let Some(threshold_control) =
            self.threshold_control.filter(|control| cluster.now >= control.suspension_start_time)
        else {
            return;
        };
        let server = connection.server;
        let open_connections = f64::from(cluster.open_connection_count(server));
        let another_server_serves = || self.servers_in_states(|state| state == BeamerServerState::Serving).len() > 1;
        if open_connections
            > (1.0 + threshold_control.allowed_load_excess_fraction) * cluster.mean_connections_per_server()
            && self.is_in_state(server, BeamerServerState::Serving)
            && another_server_serves()
        {
            self.table.begin_table_change(cluster.now);
            self.suspend_server(server);
        }
    }

    fn on_connection_closed(&mut self, connection: &OpenConnection, cluster: &Cluster) {
        let server = connection.server;
        if self.threshold_control.is_none() || !self.is_in_state(server, BeamerServerState::Suspended) {
            return;
        }
        let open_connections = cluster.open_connection_count(server);
        if open_connections == 0 || f64::from(open_connections) < cluster.mean_connections_per_server() {
            self.table.begin_table_change(cluster.now);
            self.resume_server(server);
        }
    }

    fn first_break_time(&self, connection: &OpenConnection, cluster: &Cluster) -> Option<Nanoseconds> {
        self.table.first_break_time(connection, cluster.now)
    }
}
