//! Drained servers, and their remaining connections.

use std::collections::BTreeMap;
use std::fmt;

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use super::{ReportState, ServerState};

/// Request to drain a server.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct DrainServer {
    /// Names of the services in which the server takes no new connections; empty: all services, including later ones.
    #[serde(default)]
    #[schema(required = false)]
    pub services: Vec<String>,
    /// Drain the server even if no other server of a service takes new connections; the service then gets none.
    #[serde(default)]
    #[schema(required = false)]
    pub force: bool,
}

/// Origin of a drain.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "lowercase")]
pub enum DrainedBy {
    /// Drained by `coreward drain`, until `coreward undrain`.
    Command,
    /// Drained by `state` or `weight` in the fleet document.
    Document,
}

impl DrainedBy {
    /// Returns the origin's name in output.
    pub fn name(self) -> &'static str {
        match self {
            Self::Command => "command",
            Self::Document => "document",
        }
    }
}

impl fmt::Display for DrainedBy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

/// A drain of a server that is in force.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Drained {
    /// Origin of the drain.
    pub by: DrainedBy,
    /// Start of the drain (ms since 1970, by the controller's wall clock); null: unknown, because the document drains
    /// the server.
    pub since_unix_ms: Option<u64>,
    /// Names of the drained services; empty: all services.
    pub services: Vec<String>,
}

/// Counts of a server's TCP connections, from half-open to the last FIN, without listening and TIME-WAIT sockets.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct CountedConnections {
    /// Time since the count of connections began (ms).
    pub age_ms: u64,
    /// Number of connections by service name, for the server's present and former TCP services.
    pub services: BTreeMap<String, u32>,
}

/// State of a server's drain, with its remaining connections.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct DrainStatus {
    /// Name of the server.
    pub server: String,
    /// State of the server: the best of its states in its services.
    pub state: ServerState,
    /// Reason for the server's state; empty: none.
    pub state_reason: String,
    /// State of the reports of the server's agent.
    pub reports: ReportState,
    /// Drain of the server; null: not drained.
    pub drained: Option<Drained>,
    /// Number of remaining connections of the drained services, counted after the last new connection. Null: not
    /// drained, or unknown (`waits_for`).
    pub remaining: Option<u64>,
    /// Reasons for which `remaining` is unknown.
    pub waits_for: Vec<String>,
    /// The newest count of connections, even if it is too old for `remaining`; null: unknown.
    pub connections: Option<CountedConnections>,
    /// Names of drained services whose flows are not counted: UDP flows have no visible end.
    pub not_counted: Vec<String>,
}
