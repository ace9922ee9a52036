//! The servers and load balancers that take new connections, and how many connections each server has.

use std::collections::VecDeque;

use coreward_model::ServerId;
use coreward_model::rss::uniform_below;

use super::clock::Nanoseconds;
use super::imbalance::Imbalance;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Change {
    /// The server that has been out of the pool for longest joins.
    AddServer,
    /// A server leaves the pool, drawn at random. It is drained: it gets no new connections, and keeps those it has.
    RemoveServer,
    /// A load balancer starts, with nothing in its connection table.
    AddLoadBalancer,
    /// A load balancer stops, drawn at random.
    RemoveLoadBalancer,
}

/// Load balancers are bits of a 64-bit set.
pub const LOAD_BALANCERS_MAX: usize = 64;

/// Present servers and load balancers.
#[derive(Debug)]
pub struct Cluster {
    /// The moment.
    pub now: Nanoseconds,
    /// Servers of the pool, by number.
    members: Vec<u16>,
    is_member: Vec<bool>,
    spare_servers: VecDeque<u16>,
    open: Vec<u32>,
    total_of_members: u64,
    load_balancers: Vec<u8>,
    idle_load_balancers: VecDeque<u8>,
    /// Imbalance of the servers of the pool.
    pub imbalance: Imbalance,
}

impl Cluster {
    /// `servers` in the pool and `spare` outside, `load_balancers` running; imbalance counts from `start` on.
    pub fn new(servers: usize, spare: usize, load_balancers: usize, start: Nanoseconds) -> Self {
        let mut imbalance = Imbalance::from(start);
        (0..servers).for_each(|_| imbalance.add_server(0));
        Self {
            now: 0,
            members: (0..servers as u16).collect(),
            is_member: (0..servers + spare).map(|server| server < servers).collect(),
            spare_servers: (servers as u16..(servers + spare) as u16).collect(),
            open: vec![0; servers + spare],
            total_of_members: 0,
            load_balancers: (0..load_balancers as u8).collect(),
            idle_load_balancers: (load_balancers as u8..LOAD_BALANCERS_MAX as u8).collect(),
            imbalance,
        }
    }

    /// The servers of the pool, by number.
    pub fn members(&self) -> &[u16] {
        &self.members
    }

    pub fn is_member(&self, server: u16) -> bool {
        self.is_member[usize::from(server)]
    }

    pub fn server_count(&self) -> usize {
        self.open.len()
    }

    /// Number of connections of a server.
    pub fn open(&self, server: u16) -> u32 {
        self.open[usize::from(server)]
    }

    /// Mean connections of the servers of the pool.
    pub fn mean_open(&self) -> f64 {
        self.total_of_members as f64 / self.members.len() as f64
    }

    pub fn load_balancers(&self) -> &[u8] {
        &self.load_balancers
    }

    /// The load balancer to which the first tier sends a connection: equal-cost multi-path by hash modulo their number
    /// (RFC 2992 compares the ways; this one moves the most when the number changes).
    pub fn load_balancer(&self, identity: u64) -> u8 {
        self.load_balancers[(identity >> 32) as usize % self.load_balancers.len()]
    }

    /// Advances the time.
    pub fn advance(&mut self, now: Nanoseconds) {
        self.now = now;
        self.imbalance.advance(now);
    }

    /// A connection begins on a server.
    pub fn connection_opened(&mut self, server: u16) {
        let count = &mut self.open[usize::from(server)];
        if self.is_member[usize::from(server)] {
            self.imbalance.connection_opened(*count);
            self.total_of_members += 1;
        }
        *count += 1;
    }

    /// A connection ends.
    pub fn connection_closed(&mut self, server: u16) {
        let count = &mut self.open[usize::from(server)];
        if self.is_member[usize::from(server)] {
            self.imbalance.connection_closed(*count);
            self.total_of_members -= 1;
        }
        *count -= 1;
    }

    /// Makes the change; `false` when it cannot be made: nothing is left to add, or the last one would go.
    pub fn change(&mut self, change: Change, rng: &mut impl rand::Rng) -> bool {
        match change {
            Change::AddServer => self.add_server(),
            Change::RemoveServer => self.remove_server(rng),
            Change::AddLoadBalancer => {
                let added = self.idle_load_balancers.pop_front();
                self.load_balancers.extend(added);
                added.is_some()
            }
            Change::RemoveLoadBalancer => {
                let count = self.load_balancers.len();
                if count > 1 {
                    let removed = self.load_balancers.swap_remove(uniform_below(rng, count as u32) as usize);
                    // It is the first to start again, as one that is rebooted.
                    self.idle_load_balancers.push_front(removed);
                }
                count > 1
            }
        }
    }

    fn add_server(&mut self) -> bool {
        let Some(server) = self.spare_servers.pop_front() else { return false };
        let position = self.members.partition_point(|member| *member < server);
        self.members.insert(position, server);
        self.is_member[usize::from(server)] = true;
        self.total_of_members += u64::from(self.open(server));
        self.imbalance.add_server(self.open(server));
        true
    }

    fn remove_server(&mut self, rng: &mut impl rand::Rng) -> bool {
        if self.members.len() < 2 {
            return false;
        }
        let server = self.members.remove(uniform_below(rng, self.members.len() as u32) as usize);
        self.is_member[usize::from(server)] = false;
        self.spare_servers.push_back(server);
        self.total_of_members -= u64::from(self.open(server));
        self.imbalance.remove_server(self.open(server));
        true
    }
}

/// The id under which a server is known to a policy and to a cookie.
pub fn id_of(server: u16) -> ServerId {
    ServerId::try_from(u64::from(server)).expect("a configuration has fewer servers than there are ids")
}

#[cfg(test)]
mod tests {
    use coreward_model::rss::seeded_rng;

    use super::*;

    #[test]
    fn drained_server_keeps_its_connections_and_leaves_the_mean() {
        let mut rng = seeded_rng(1, 0);
        let mut cluster = Cluster::new(3, 1, 2, 0);
        [0, 0, 1, 2, 2, 2].into_iter().for_each(|server| cluster.connection_opened(server));
        assert_eq!(cluster.mean_open(), 2.0);
        assert!(cluster.change(Change::RemoveServer, &mut rng));
        let gone = (0..3).find(|server| !cluster.is_member(*server)).unwrap();
        assert_eq!(cluster.mean_open(), f64::from(6 - cluster.open(gone)) / 2.0);
        let kept = cluster.open(gone);
        cluster.connection_closed(gone);
        assert_eq!(cluster.open(gone), kept - 1);
        // The spare one joins first, then the one that left.
        assert!(cluster.change(Change::AddServer, &mut rng) && cluster.is_member(3));
        assert!(cluster.change(Change::AddServer, &mut rng) && cluster.is_member(gone));
        assert!(!cluster.change(Change::AddServer, &mut rng));
        assert_eq!(cluster.mean_open(), 5.0 / 4.0);
        (0..3).for_each(|_| assert!(cluster.change(Change::RemoveServer, &mut rng)));
        assert!(!cluster.change(Change::RemoveServer, &mut rng));
    }

    #[test]
    fn load_balancers_join_and_leave() {
        let mut rng = seeded_rng(1, 0);
        let mut cluster = Cluster::new(1, 0, 1, 0);
        assert!(!cluster.change(Change::RemoveLoadBalancer, &mut rng));
        assert!(cluster.change(Change::AddLoadBalancer, &mut rng));
        let reached: std::collections::BTreeSet<u8> =
            (0..100u64).map(|identity| cluster.load_balancer(identity << 32)).collect();
        assert_eq!(reached.into_iter().collect::<Vec<_>>(), [0, 1]);
        assert!(cluster.change(Change::RemoveLoadBalancer, &mut rng));
        assert_eq!(cluster.load_balancers().len(), 1);
    }
}
