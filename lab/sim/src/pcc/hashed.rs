//! `hash`, `consistent-hash`, `maglev`: a table of buckets; and `stateful-hash`: the same behind connection tables.

use coreward_model::ServerId;
use coreward_model::policy::{MAGLEV_PUBLISHED_SIZE, maglev_table, modulo_table, ring_table};

use super::Config;
use super::balancer::{Balancer, Placed};
use super::buckets::BucketTable;
use super::clock::Nanoseconds;
use super::cluster::{Cluster, id_of};
use super::connections::{Connection, Connections};
use super::method::HashLayout;

/// A power of two that gives every server at least `per_server` buckets.
pub fn bucket_count(servers: usize, per_server: u32) -> usize {
    (servers * per_server as usize).next_power_of_two()
}

/// Maglev's paper (NSDI'16, Sect. 5.3) asks for a table of more than 100 times the servers.
const MAGLEV_BUCKETS_PER_SERVER: usize = 100;

/// Maglev's larger size (its paper's Sect. 5.3), for pools that the usual one is too small for.
const MAGLEV_LARGE_SIZE: usize = 655_373;

impl HashLayout {
    /// Buckets of a table.
    pub fn size(self, servers: usize, per_server: u32) -> usize {
        match self {
            HashLayout::Striped | HashLayout::Ring => bucket_count(servers, per_server),
            HashLayout::Maglev if servers * MAGLEV_BUCKETS_PER_SERVER <= MAGLEV_PUBLISHED_SIZE => MAGLEV_PUBLISHED_SIZE,
            HashLayout::Maglev => MAGLEV_LARGE_SIZE,
        }
    }

    /// By bucket, the position of its server among `servers`.
    pub fn positions(self, servers: &[ServerId], size: usize) -> Vec<usize> {
        match self {
            HashLayout::Striped => modulo_table(servers.len(), size),
            HashLayout::Ring => ring_table(servers, size),
            HashLayout::Maglev => maglev_table(servers, size),
        }
    }
}

/// Every packet goes where its bucket points at that moment.
#[derive(Debug)]
pub struct Hashed {
    layout: HashLayout,
    table: BucketTable,
}

impl Hashed {
    pub fn new(layout: HashLayout, config: &Config) -> Self {
        let size = layout.size(config.servers, config.buckets_per_server);
        Self { layout, table: BucketTable::new(size, false, config.by_second) }
    }

    /// Current server of packets.
    pub fn server_of(&self, identity: u64) -> u16 {
        self.table.server(self.table.bucket(identity))
    }
}

impl Balancer for Hashed {
    fn place(&mut self, identity: u64, _cluster: &Cluster) -> Placed {
        Placed { server: self.server_of(identity), core: 0, mark: self.table.mark() }
    }

    fn servers_changed(&mut self, cluster: &Cluster) {
        let ids: Vec<ServerId> = cluster.members().iter().copied().map(id_of).collect();
        self.table.begin_change(cluster.now);
        for (bucket, position) in self.layout.positions(&ids, self.table.len()).into_iter().enumerate() {
            self.table.assign(bucket, cluster.members()[position]);
        }
    }

    fn broken(&self, connection: &Connection, cluster: &Cluster) -> Option<Nanoseconds> {
        self.table.broken(connection, cluster.now)
    }
}

/// Each load balancer keeps the server of every connection that it has seen; one that it has not seen it hashes.
/// (Ananta, Maglev, Katran: Cheetah, NSDI'20, Sect. 2.2.) A connection's mark has the bit of every load balancer that
/// knows it.
#[derive(Debug)]
pub struct Stateful {
    hashed: Hashed,
    running_load_balancers: u64,
}

impl Stateful {
    pub fn new(layout: HashLayout, config: &Config) -> Self {
        Self { hashed: Hashed::new(layout, config), running_load_balancers: 0 }
    }

    /// Current server of packets at a load balancer that does not know the connection.
    #[cfg(test)]
    pub fn server_of(&self, identity: u64) -> u16 {
        self.hashed.server_of(identity)
    }
}

fn bits_of(load_balancers: &[u8]) -> u64 {
    load_balancers.iter().fold(0, |bits, load_balancer| bits | 1 << load_balancer)
}

impl Balancer for Stateful {
    fn place(&mut self, identity: u64, cluster: &Cluster) -> Placed {
        Placed { mark: 1 << cluster.load_balancer(identity), ..self.hashed.place(identity, cluster) }
    }

    fn servers_changed(&mut self, cluster: &Cluster) {
        self.running_load_balancers = bits_of(cluster.load_balancers());
        self.hashed.servers_changed(cluster);
    }

    /// Checks all connections, because each may reach another load balancer now. Hashed ones keep their server.
    fn load_balancers_changed(&mut self, cluster: &Cluster, connections: &mut Connections) {
        // A load balancer that stops or restarts loses its state.
        let kept = self.running_load_balancers & bits_of(cluster.load_balancers());
        self.running_load_balancers = bits_of(cluster.load_balancers());
        let hashed = &self.hashed;
        for connection in connections.iter_mut().filter(|connection| connection.rerouted.is_none()) {
            connection.mark &= kept;
            let reached = 1 << cluster.load_balancer(connection.identity);
            if connection.mark & reached == 0 {
                connection.mark |= reached;
                if hashed.server_of(connection.identity) != connection.server {
                    connection.rerouted = Some(cluster.now);
                }
            }
        }
    }

    fn broken(&self, connection: &Connection, _cluster: &Cluster) -> Option<Nanoseconds> {
        connection.rerouted
    }
}
