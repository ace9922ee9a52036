//! Changes of the state, and differences from the reference model.

use std::fmt;

use coreward_model::connection_table::{ClockTicks, ConnectionIndex, OwnerNumber};
use coreward_model::consistency::ServiceMode;
use coreward_model::cookie::FleetKeys;
use coreward_model::lb::{Owner, Server, TokenBucketSelector};
use coreward_model::placement::PlacementTable;
use coreward_model::{ServerId, ServiceAddress};

/// A change of the state, other than by a packet.
#[derive(Debug, Clone)]
pub enum Change {
    Keys(FleetKeys),
    /// Replaces the services; all are IPv4, no two the same.
    Services(Vec<(ServiceAddress, ServiceMode)>),
    /// Adds, changes (`Some`) or removes (`None`) a server.
    Server(usize, ServerId, Option<Server>),
    /// The load balancer's own health checks find a server down, or up again.
    Masked(usize, ServerId, bool),
    Table(usize, PlacementTable),
    /// Sets whether tokens for broadcasts are available.
    BroadcastTokens(TokenBucketSelector, bool),
    /// Sets the load balancer's number among the owners of connection tables.
    LocalOwnerNumber(Option<OwnerNumber>),
    Owner(OwnerNumber, Owner),
    /// Limits the connection-table entries of one source prefix.
    LimitEntries(Option<u32>),
    /// Sets the time that packets see.
    Clock(ClockTicks),
    /// User space scans the connection table for expired entries.
    Sweep,
    /// User space frees entries of the connection table.
    Free(Vec<ConnectionIndex>),
}

/// Packet or state for which program and reference model differ.
#[derive(Debug, Clone)]
pub struct Difference {
    pub subject: String,
    /// Result of the reference model.
    pub expected: String,
    /// Result of the BPF program.
    pub actual: String,
}

impl fmt::Display for Difference {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}\n  reference model:\n    {}\n  BPF program:\n    {}", self.subject, self.expected, self.actual)
    }
}
