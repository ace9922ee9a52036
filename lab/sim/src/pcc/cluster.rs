//! Servers and load balancers that receive new connections, with each server's number of connections.

use std::collections::VecDeque;

use coreward_model::ServerId;
use coreward_model::rss::uniform_below;

use super::imbalance::ServerImbalanceTracker;
use super::simulated_nanoseconds::Nanoseconds;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ClusterChange {
    /// The server that has been outside the pool for the longest time joins the pool.
    AddServer,
    /// A random server leaves the pool. It keeps its open connections but receives no new ones (draining).
    RemoveServer,
    /// A load balancer starts with an empty connection table.
    AddLoadBalancer,
    /// A random load balancer stops and loses its connection table.
    RemoveLoadBalancer,
}

/// Maximum number of load balancers. Sets of load balancers are stored as masks of 64 bits.
pub const MAX_LOAD_BALANCERS: usize = 64;

/// Servers and load balancers of a simulation, with their current state.
#[derive(Debug)]
pub struct Cluster {
    pub now: Nanoseconds,
    /// Numbers of the servers in the pool, in ascending order.
    pool_members: Vec<u16>,
    is_member_by_server: Vec<bool>,
    spare_servers: VecDeque<u16>,
    open_connection_counts_by_server: Vec<u32>,
    pool_connection_count: u64,
    load_balancers: Vec<u8>,
    idle_load_balancers: VecDeque<u8>,
    /// Tracker of the imbalance between the pool's servers.
    pub imbalance: ServerImbalanceTracker,
}

impl Cluster {
    /// Creates a cluster with these numbers of servers in the pool, servers outside it, and load balancers. Imbalance
    /// is measured from the time `start` on.
    pub fn new(servers: usize, spare_servers: usize, load_balancers: usize, start: Nanoseconds) -> Self {
        let mut imbalance = ServerImbalanceTracker::starting_at(start);
        (0..servers).for_each(|_| imbalance.add_server(0));
        Self {
            now: 0,
            pool_members: (0..servers as u16).collect(),
            is_member_by_server: (0..servers + spare_servers).map(|server| server < servers).collect(),
            spare_servers: (servers as u16..(servers + spare_servers) as u16).collect(),
            open_connection_counts_by_server: vec![0; servers + spare_servers],
            pool_connection_count: 0,
            load_balancers: (0..load_balancers as u8).collect(),
            idle_load_balancers: (load_balancers as u8..MAX_LOAD_BALANCERS as u8).collect(),
            imbalance,
        }
    }

    pub fn pool_members(&self) -> &[u16] {
        &self.pool_members
    }

    pub fn is_pool_member(&self, server: u16) -> bool {
        self.is_member_by_server[usize::from(server)]
    }

    pub fn total_server_count(&self) -> usize {
        self.open_connection_counts_by_server.len()
    }

    pub fn open_connection_count(&self, server: u16) -> u32 {
        self.open_connection_counts_by_server[usize::from(server)]
    }

    /// Returns the mean number of open connections per server in the pool.
    pub fn mean_connections_per_server(&self) -> f64 {
        self.pool_connection_count as f64 / self.pool_members.len() as f64
    }

    pub fn load_balancers(&self) -> &[u8] {
        &self.load_balancers
    }

    /// Returns the load balancer that an equal-cost multi-path router selects for a connection, by hash modulo the
    /// number of load balancers. Of the methods in RFC 2992, modulo moves the most connections when the number changes.
    pub fn select_load_balancer_by_hash(&self, identity: u64) -> u8 {
        self.load_balancers[(identity >> 32) as usize % self.load_balancers.len()]
    }

    pub fn advance_to(&mut self, now: Nanoseconds) {
        self.now = now;
        self.imbalance.advance_to(now);
    }

    pub fn add_connection(&mut self, server: u16) {
        let connection_count = &mut self.open_connection_counts_by_server[usize::from(server)];
        if self.is_member_by_server[usize::from(server)] {
            self.imbalance.add_connection(*connection_count);
            self.pool_connection_count += 1;
        }
        *connection_count += 1;
    }

    pub fn remove_connection(&mut self, server: u16) {
        let connection_count = &mut self.open_connection_counts_by_server[usize::from(server)];
        if self.is_member_by_server[usize::from(server)] {
            self.imbalance.remove_connection(*connection_count);
            self.pool_connection_count -= 1;
        }
        *connection_count -= 1;
    }

    /// Applies the change. Returns `false` if no server or load balancer is left to add, or if the last one would be
    /// removed.
    pub fn apply_change(&mut self, change: ClusterChange, rng: &mut impl rand::Rng) -> bool {
        match change {
            ClusterChange::AddServer => self.add_server(),
            ClusterChange::RemoveServer => self.remove_server(rng),
            ClusterChange::AddLoadBalancer => {
                let added_load_balancer = self.idle_load_balancers.pop_front();
                self.load_balancers.extend(added_load_balancer);
                added_load_balancer.is_some()
            }
            ClusterChange::RemoveLoadBalancer => {
                let load_balancer_count = self.load_balancers.len();
                if load_balancer_count > 1 {
                    let removed_load_balancer =
                        self.load_balancers.swap_remove(uniform_below(rng, load_balancer_count as u32) as usize);
                    // It is the first to start again, like a load balancer that reboots.
                    self.idle_load_balancers.push_front(removed_load_balancer);
                }
                load_balancer_count > 1
            }
        }
    }

    fn add_server(&mut self) -> bool {
        let Some(server) = self.spare_servers.pop_front() else { return false };
        let position = self.pool_members.partition_point(|member| *member < server);
        self.pool_members.insert(position, server);
        self.is_member_by_server[usize::from(server)] = true;
        self.pool_connection_count += u64::from(self.open_connection_count(server));
        self.imbalance.add_server(self.open_connection_count(server));
        true
    }

    fn remove_server(&mut self, rng: &mut impl rand::Rng) -> bool {
        if self.pool_members.len() < 2 {
            return false;
        }
        let server = self.pool_members.remove(uniform_below(rng, self.pool_members.len() as u32) as usize);
        self.is_member_by_server[usize::from(server)] = false;
        self.spare_servers.push_back(server);
        self.pool_connection_count -= u64::from(self.open_connection_count(server));
        self.imbalance.remove_server(self.open_connection_count(server));
        true
    }
}

/// Returns the id by which policies and cookies identify a server.
pub fn server_id(server: u16) -> ServerId {
    ServerId::try_from(u64::from(server)).expect("a configuration has fewer servers than there are ids")
}

#[cfg(test)]
mod tests {
    use coreward_model::rss::seeded_rng;

    use super::*;

    #[test]
    fn drained_server_keeps_connections_but_is_not_in_the_mean() {
        let mut rng = seeded_rng(1, 0);
        let mut cluster = Cluster::new(3, 1, 2, 0);
        [0, 0, 1, 2, 2, 2].into_iter().for_each(|server| cluster.add_connection(server));
        assert_eq!(cluster.mean_connections_per_server(), 2.0);
        assert!(cluster.apply_change(ClusterChange::RemoveServer, &mut rng));
        let drained_server = (0..3).find(|server| !cluster.is_pool_member(*server)).unwrap();
        assert_eq!(
            cluster.mean_connections_per_server(),
            f64::from(6 - cluster.open_connection_count(drained_server)) / 2.0
        );
        let previous_connection_count = cluster.open_connection_count(drained_server);
        cluster.remove_connection(drained_server);
        assert_eq!(cluster.open_connection_count(drained_server), previous_connection_count - 1);
        // The spare server joins before the drained one, which has been outside the pool for a shorter time.
        assert!(cluster.apply_change(ClusterChange::AddServer, &mut rng) && cluster.is_pool_member(3));
        assert!(cluster.apply_change(ClusterChange::AddServer, &mut rng) && cluster.is_pool_member(drained_server));
        assert!(!cluster.apply_change(ClusterChange::AddServer, &mut rng));
        assert_eq!(cluster.mean_connections_per_server(), 5.0 / 4.0);
        (0..3).for_each(|_| assert!(cluster.apply_change(ClusterChange::RemoveServer, &mut rng)));
        assert!(!cluster.apply_change(ClusterChange::RemoveServer, &mut rng));
    }

    #[test]
    fn load_balancers_can_be_added_and_removed() {
        let mut rng = seeded_rng(1, 0);
        let mut cluster = Cluster::new(1, 0, 1, 0);
        assert!(!cluster.apply_change(ClusterChange::RemoveLoadBalancer, &mut rng));
        assert!(cluster.apply_change(ClusterChange::AddLoadBalancer, &mut rng));
        let selected_load_balancers: std::collections::BTreeSet<u8> =
            (0..100u64).map(|identity| cluster.select_load_balancer_by_hash(identity << 32)).collect();
        assert_eq!(selected_load_balancers.into_iter().collect::<Vec<_>>(), [0, 1]);
        assert!(cluster.apply_change(ClusterChange::RemoveLoadBalancer, &mut rng));
        assert_eq!(cluster.load_balancers().len(), 1);
    }
}
