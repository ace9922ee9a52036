//! Changes of the state, and differences from the reference model.

use std::fmt;

use coreward_model::connection_table::{ClockTicks, ConnectionIndex, OwnerNumber};
use coreward_model::consistency::ServiceMode;
use coreward_model::cookie::FleetKeys;
use coreward_model::lb::{Owner, Server, TokenBucketSelector};
use coreward_model::placement::PlacementTable;
use coreward_model::{ServerId, ServiceAddress};

/// Change of the load balancer's state that no packet causes.
#[derive(Debug, Clone)]
pub enum Change {
    Keys(FleetKeys),
    /// Replaces all services by these, which are IPv4 services with different addresses.
    Services(Vec<(ServiceAddress, ServiceMode)>),
    /// Adds or changes a server of a service (`Some`), or removes it (`None`).
    Server(usize, ServerId, Option<Server>),
    /// Sets whether the load balancer's own health checks find a server of a service down.
    Masked(usize, ServerId, bool),
    Table(usize, PlacementTable),
    /// Sets whether a token bucket for broadcasts has tokens.
    BroadcastTokens(TokenBucketSelector, bool),
    /// Sets this load balancer's number among the owners of connection tables.
    LocalOwnerNumber(Option<OwnerNumber>),
    Owner(OwnerNumber, Owner),
    /// Limits the number of connection-table entries per source prefix; `None` removes the limit.
    LimitEntries(Option<u32>),
    /// Sets the time that the program reads from its clock.
    Clock(ClockTicks),
    /// Scans the connection table for expired entries, as user space does regularly.
    Sweep,
    /// Frees these entries of the connection table, as user space does.
    Free(Vec<ConnectionIndex>),
}

/// Difference between the reference model and the BPF program, in a packet or in a part of the state.
#[derive(Debug, Clone)]
pub struct Difference {
    pub subject: String,
    /// Result of the reference model, as text.
    pub expected: String,
    /// Result of the BPF program, as text.
    pub actual: String,
}

impl fmt::Display for Difference {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}\n  reference model:\n    {}\n  BPF program:\n    {}", self.subject, self.expected, self.actual)
    }
}
