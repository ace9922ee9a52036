//! Interface that every load-balancing method implements.

use super::cluster::Cluster;
use super::connections::{OpenConnection, OpenConnectionSet};
use super::simulated_nanoseconds::Nanoseconds;

/// Server and core to which a new connection is assigned.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PlacedConnection {
    pub server: u16,
    /// Core of the server, which only matters if the method distinguishes cores.
    pub core: u16,
    /// State that the method stores for the connection, as in [`OpenConnection::stored_state`].
    pub stored_state: u64,
}

/// Set of all load balancers of a cluster. All of them process a server change at the same time.
pub trait LoadBalancerSet {
    fn place_connection(&mut self, identity: u64, cluster: &Cluster) -> PlacedConnection;

    /// Adds a newly opened connection to the count of its server. Does nothing by default.
    fn on_connection_opened(&mut self, _connection: &OpenConnection, _cluster: &Cluster) {}

    /// Subtracts a closed connection from the count of its server. Does nothing by default.
    fn on_connection_closed(&mut self, _connection: &OpenConnection, _cluster: &Cluster) {}

    /// Updates the tables after the server pool has changed. This function is also called before the first connection.
    fn on_servers_changed(&mut self, cluster: &Cluster);

    fn on_load_balancers_changed(&mut self, _cluster: &Cluster, _connections: &mut OpenConnectionSet) {}

    /// Returns whether the method uses [`LoadBalancerSet::process_reports`].
    fn uses_reports(&self) -> bool {
        false
    }

    /// Processes the reports of all servers and computes new tables from them. Does nothing by default.
    fn process_reports(&mut self, _cluster: &Cluster) {}

    /// Returns the time at which the connection's packets first went to another server than its own, or `None` if they
    /// never did. Without [`super::PccSimulationConfig::keeps_per_second_counts`], that time is not stored, and the
    /// current time is returned instead.
    fn first_break_time(&self, connection: &OpenConnection, cluster: &Cluster) -> Option<Nanoseconds>;
}
