//! Interface of all methods.

use super::clock::Nanoseconds;
use super::cluster::Cluster;
use super::connections::{Connection, Connections};

/// Decision on a first packet.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Placed {
    pub server: u16,
    /// Its core, where cores count.
    pub core: u16,
    /// See [`Connection::mark`].
    pub mark: u64,
}

/// The load balancers of a cluster. All of them learn of a change of the servers at the same moment.
pub trait Balancer {
    /// The server for a connection's first packet.
    fn place(&mut self, identity: u64, cluster: &Cluster) -> Placed;

    /// The connection now counts on its server.
    fn connection_opened(&mut self, _connection: &Connection, _cluster: &Cluster) {}

    /// The connection no longer counts on its server.
    fn connection_closed(&mut self, _connection: &Connection, _cluster: &Cluster) {}

    /// There are other servers in the pool than before. Called before the first packet, too.
    fn servers_changed(&mut self, cluster: &Cluster);

    fn load_balancers_changed(&mut self, _cluster: &Cluster, _connections: &mut Connections) {}

    /// Whether [`Balancer::report`] does anything.
    fn takes_reports(&self) -> bool {
        false
    }

    /// The servers report, and new tables are computed.
    fn report(&mut self, _cluster: &Cluster) {}

    /// First time at which packets of the connection went to another server than its own, from its start until now;
    /// `None`: never. Without [`super::Config::by_second`] no history is kept, and the time given is now.
    fn broken(&self, connection: &Connection, cluster: &Cluster) -> Option<Nanoseconds>;
}
