//! Changes to a load balancer's state, and differences between the BPF program and its reference model.

use std::fmt;

use coreward_model::connection_table::{ConnectionIndex, DecisecondTicks, TableOwnerNumber};
use coreward_model::consistency::ServiceSettings;
use coreward_model::cookie::FleetCookieKeys;
use coreward_model::lb::{ServerMapEntry, TableOwnerReachability, TokenBucketSelector};
use coreward_model::placement::PlacementTable;
use coreward_model::{ServerId, ServiceAddress};

/// Change to the load balancer's state that does not result from a packet.
#[derive(Debug, Clone)]
pub enum LoadBalancerStateChange {
    SetCookieKeys(FleetCookieKeys),
    /// Replaces all services by this list, whose addresses differ from each other.
    ReplaceServices(Vec<(ServiceAddress, ServiceSettings)>),
    /// Adds or changes a server (`Some`) in the service with this slot, or removes the server (`None`).
    SetServer(usize, ServerId, Option<ServerMapEntry>),
    /// Sets whether the load balancer's own health checks consider a server of a service down.
    SetServerMasked(usize, ServerId, bool),
    InstallPlacementTable(usize, PlacementTable),
    /// Sets whether a token bucket that limits broadcasts has tokens.
    SetHasBroadcastTokens(TokenBucketSelector, bool),
    /// Sets this load balancer's number among the owners of connection tables.
    SetLocalOwnerNumber(Option<TableOwnerNumber>),
    SetTableOwner(TableOwnerNumber, TableOwnerReachability),
    /// Limits the number of connection-table entries per source prefix, or removes the limit (`None`).
    LimitEntriesPerPrefix(Option<u32>),
    /// Sets the time that the BPF program reads as its clock.
    SetClock(DecisecondTicks),
    /// Scans the connection table for expired entries, as user space does regularly.
    SweepExpiredEntries,
    /// Frees these entries of the connection table, as user space does for ended connections.
    FreeConnectionEntries(Vec<ConnectionIndex>),
}

/// Difference between the reference model and the BPF program, in their handling of a packet or in their state.
#[derive(Debug, Clone)]
pub struct ModelDifference {
    pub compared_item: String,
    /// Result of the reference model, as text.
    pub reference_model_result: String,
    /// Result of the BPF program, as text.
    pub bpf_program_result: String,
}

impl fmt::Display for ModelDifference {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{}\n  reference model:\n    {}\n  BPF program:\n    {}",
            self.compared_item, self.reference_model_result, self.bpf_program_result
        )
    }
}
