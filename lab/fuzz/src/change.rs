//! Changes of the state, and differences from the reference model.

use std::fmt;

use coreward_model::connection_table::{Clock, ConnectionIndex, OwnerNumber};
use coreward_model::consistency::ServiceMode;
use coreward_model::cookie::FleetKeys;
use coreward_model::lb::{Buckets, Owner, Server};
use coreward_model::placement::PlacementTable;
use coreward_model::{ServerId, ServiceAddress};

/// A change of the state, other than by a packet.
#[derive(Debug, Clone)]
pub enum Change {
    Keys(FleetKeys),
    /// Other services; all must be IPv4, no two the same.
    Services(Vec<(ServiceAddress, ServiceMode)>),
    /// A server is made known, changed, or forgotten.
    Server(usize, ServerId, Option<Server>),
    /// The load balancer's own checks find a server down, or up again.
    Masked(usize, ServerId, bool),
    Table(usize, PlacementTable),
    /// Whether there are tokens for deliveries to all servers.
    Tokens(Buckets, bool),
    /// This load balancer's number among those with a connection table.
    Number(Option<OwnerNumber>),
    Owner(OwnerNumber, Owner),
    /// Most entries of the connection table of one source prefix.
    LimitEntries(Option<u32>),
    /// The time as packets see it.
    Clock(Clock),
    /// User space searches the connection table for expired entries.
    Sweep,
    /// Entries of the connection table are freed.
    Free(Vec<ConnectionIndex>),
}

/// One packet or state that differs from the reference model.
#[derive(Debug, Clone)]
pub struct Difference {
    pub what: String,
    /// The reference model's.
    pub expected: String,
    /// The BPF program's.
    pub found: String,
}

impl fmt::Display for Difference {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}\n  reference model:\n    {}\n  BPF program:\n    {}", self.what, self.expected, self.found)
    }
}
