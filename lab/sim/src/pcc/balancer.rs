//! Interface of all methods.

use super::clock::Nanoseconds;
use super::cluster::Cluster;
use super::connections::{Connection, Connections};

/// Server and core that a new connection gets.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PlacedConnection {
    pub server: u16,
    /// Core of the server, if the method distinguishes cores.
    pub core: u16,
    /// See [`Connection::stored_state`].
    pub stored_state: u64,
}

/// Load balancers of a cluster. All of them receive a change of the servers at the same time.
pub trait Balancer {
    /// Assigns a new connection to a server.
    fn place_connection(&mut self, identity: u64, cluster: &Cluster) -> PlacedConnection;

    /// Counts a connection that was opened on its server.
    fn connection_opened(&mut self, _connection: &Connection, _cluster: &Cluster) {}

    /// Removes a closed connection from the count of its server.
    fn connection_closed(&mut self, _connection: &Connection, _cluster: &Cluster) {}

    /// Updates the tables to a changed pool; also called before the first connection.
    fn servers_changed(&mut self, cluster: &Cluster);

    fn load_balancers_changed(&mut self, _cluster: &Cluster, _connections: &mut Connections) {}

    /// Returns whether [`Balancer::process_reports`] has an effect.
    fn uses_reports(&self) -> bool {
        false
    }

    /// Processes the reports of all servers, and computes new tables from them.
    fn process_reports(&mut self, _cluster: &Cluster) {}

    /// Returns the first time at which packets of the connection went to another server than its own; `None` if never.
    /// Without [`super::Config::has_second_counts`] no history is stored, and the returned time is the current one.
    fn first_break_time(&self, connection: &Connection, cluster: &Cluster) -> Option<Nanoseconds>;
}
