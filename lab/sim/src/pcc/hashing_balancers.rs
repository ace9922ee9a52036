//! Load balancers that hash connections to tables of buckets (`hash`, `consistent-hash`, `maglev`), or that first look
//! them up in a connection table (`stateful-hash`).

use coreward_model::ServerId;
use coreward_model::policy::{MAGLEV_PAPER_SIZE, maglev_table, modulo_table, ring_table};

use super::PccSimulationConfig;
use super::balancer::{LoadBalancerSet, PlacedConnection};
use super::buckets::BucketTable;
use super::cluster::{Cluster, server_id};
use super::connections::{OpenConnection, OpenConnectionSet};
use super::method::HashBucketLayout;
use super::simulated_nanoseconds::Nanoseconds;

/// Returns the smallest power of two that gives every server at least `buckets_per_server` buckets.
pub fn bucket_count_for_servers(servers: usize, buckets_per_server: u32) -> usize {
    (servers * buckets_per_server as usize).next_power_of_two()
}

/// Minimum number of buckets per server according to Maglev's paper (NSDI'16, Sect. 5.3).
const MAGLEV_BUCKETS_PER_SERVER: usize = 100;

/// Larger of the table sizes in Maglev's paper (NSDI'16, Sect. 5.3), for pools that are too large for the smaller one.
const MAGLEV_LARGE_TABLE_SIZE: usize = 655_373;

impl HashBucketLayout {
    /// Returns the number of buckets of a table with this layout.
    pub fn table_size(self, servers: usize, buckets_per_server: u32) -> usize {
        match self {
            HashBucketLayout::Striped | HashBucketLayout::Ring => bucket_count_for_servers(servers, buckets_per_server),
            HashBucketLayout::Maglev if servers * MAGLEV_BUCKETS_PER_SERVER <= MAGLEV_PAPER_SIZE => MAGLEV_PAPER_SIZE,
            HashBucketLayout::Maglev => MAGLEV_LARGE_TABLE_SIZE,
        }
    }

    /// Returns the server of each bucket, as an index into `servers`.
    pub fn server_index_by_bucket(self, servers: &[ServerId], table_size: usize) -> Vec<usize> {
        match self {
            HashBucketLayout::Striped => modulo_table(servers.len(), table_size),
            HashBucketLayout::Ring => ring_table(servers, table_size),
            HashBucketLayout::Maglev => maglev_table(servers, table_size),
        }
    }
}

/// Stateless hashing, which sends every packet to the server that currently has the bucket of the packet's hash.
#[derive(Debug)]
pub struct StatelessHashingBalancers {
    layout: HashBucketLayout,
    table: BucketTable,
}

impl StatelessHashingBalancers {
    pub fn new(layout: HashBucketLayout, config: &PccSimulationConfig) -> Self {
        let table_size = layout.table_size(config.server_count, config.buckets_per_server);
        Self { layout, table: BucketTable::new(table_size, false, config.keeps_per_second_counts) }
    }

    /// Returns the server to which the connection's packets currently go.
    pub fn server_for_connection(&self, identity: u64) -> u16 {
        self.table.current_server(self.table.bucket_of_connection(identity))
    }
}

impl LoadBalancerSet for StatelessHashingBalancers {
    fn place_connection(&mut self, identity: u64, _cluster: &Cluster) -> PlacedConnection {
        PlacedConnection {
            server: self.server_for_connection(identity),
            core: 0,
            stored_state: self.table.last_change_number(),
        }
    }

    fn on_servers_changed(&mut self, cluster: &Cluster) {
        let ids: Vec<ServerId> = cluster.pool_members().iter().copied().map(server_id).collect();
        self.table.begin_table_change(cluster.now);
        for (bucket, position) in self.layout.server_index_by_bucket(&ids, self.table.len()).into_iter().enumerate() {
            self.table.assign_bucket(bucket, cluster.pool_members()[position]);
        }
    }

    fn first_break_time(&self, connection: &OpenConnection, cluster: &Cluster) -> Option<Nanoseconds> {
        self.table.first_break_time(connection, cluster.now)
    }
}

/// Stateful hashing, as in Ananta, Maglev and Katran (Cheetah, NSDI'20, Sect. 2.2). Each load balancer stores the
/// server of every connection that it has processed, and hashes the packets of other connections. A connection's stored
/// state has a bit for each load balancer that stores the connection.
#[derive(Debug)]
pub struct StatefulHashingBalancers {
    fallback_hashing: StatelessHashingBalancers,
    load_balancer_mask: u64,
}

impl StatefulHashingBalancers {
    pub fn new(layout: HashBucketLayout, config: &PccSimulationConfig) -> Self {
        Self { fallback_hashing: StatelessHashingBalancers::new(layout, config), load_balancer_mask: 0 }
    }

    /// Returns the server to which a load balancer sends the connection's packets if it has no entry for the
    /// connection.
    #[cfg(test)]
    pub fn server_for_connection(&self, identity: u64) -> u16 {
        self.fallback_hashing.server_for_connection(identity)
    }
}

fn build_load_balancer_mask(load_balancers: &[u8]) -> u64 {
    load_balancers.iter().fold(0, |bits, load_balancer| bits | 1 << load_balancer)
}

impl LoadBalancerSet for StatefulHashingBalancers {
    fn place_connection(&mut self, identity: u64, cluster: &Cluster) -> PlacedConnection {
        PlacedConnection {
            stored_state: 1 << cluster.select_load_balancer_by_hash(identity),
            ..self.fallback_hashing.place_connection(identity, cluster)
        }
    }

    fn on_servers_changed(&mut self, cluster: &Cluster) {
        self.load_balancer_mask = build_load_balancer_mask(cluster.load_balancers());
        self.fallback_hashing.on_servers_changed(cluster);
    }

    /// Updates all connections, because their packets may now reach another load balancer. A connection keeps its
    /// server if the new load balancer also hashes it there.
    fn on_load_balancers_changed(&mut self, cluster: &Cluster, connections: &mut OpenConnectionSet) {
        // A load balancer that stops or restarts loses its connection table.
        let surviving_mask = self.load_balancer_mask & build_load_balancer_mask(cluster.load_balancers());
        self.load_balancer_mask = build_load_balancer_mask(cluster.load_balancers());
        let fallback = &self.fallback_hashing;
        for connection in connections.iter_mut().filter(|connection| connection.rerouted_at.is_none()) {
            connection.stored_state &= surviving_mask;
            let current_bit = 1 << cluster.select_load_balancer_by_hash(connection.identity);
            if connection.stored_state & current_bit == 0 {
                connection.stored_state |= current_bit;
                if fallback.server_for_connection(connection.identity) != connection.server {
                    connection.rerouted_at = Some(cluster.now);
                }
            }
        }
    }

    fn first_break_time(&self, connection: &OpenConnection, _cluster: &Cluster) -> Option<Nanoseconds> {
        connection.rerouted_at
    }
}
