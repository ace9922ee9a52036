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
    /// Names of the services in which to drain the server, or empty for all services, including later ones.
    #[serde(default)]
    #[schema(required = false)]
    pub services: Vec<String>,
    /// Whether to drain the server even if one of its services then has no server that takes new connections.
    #[serde(default)]
    #[schema(required = false)]
    pub force: bool,
}

/// Origin of a server's drain: a command or the fleet document.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "lowercase")]
pub enum DrainOrigin {
    /// The server was drained by `coreward drain`, and remains drained until `coreward undrain`.
    Command,
    /// The server is drained by `state` or `weight` in the fleet document.
    Document,
}

impl DrainOrigin {
    /// Returns the origin's name, as it appears in output.
    pub fn name(self) -> &'static str {
        match self {
            Self::Command => "command",
            Self::Document => "document",
        }
    }
}

impl fmt::Display for DrainOrigin {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

/// Active drain of a server.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct ActiveDrain {
    /// Origin of the drain.
    pub origin: DrainOrigin,
    /// Start of the drain (ms since 1970, by the controller's wall clock). Null if the fleet document drains the
    /// server, because the start is then unknown.
    pub since_unix_ms: Option<u64>,
    /// Names of the drained services, or empty if the server is drained in all services.
    pub services: Vec<String>,
}

/// Counts of a server's TCP connections, from half-open to closing ones, without listening and TIME-WAIT sockets.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct ConnectionCounts {
    /// Time since the server's agent began this count (ms).
    pub age_ms: u64,
    /// Number of connections by service name, for the server's present and former TCP services.
    pub connections_by_service: BTreeMap<String, u32>,
}

/// State of a server's drain, with its remaining connections.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct DrainStatus {
    /// Name of the server.
    pub server: String,
    /// State of the server, which is the best of its states in its services.
    pub state: ServerState,
    /// Reason for the server's state, or empty if there is none.
    pub state_reason: String,
    /// State of the reports of the server's agent.
    pub report_state: ReportState,
    /// Drain of the server, or null if it is not drained.
    pub drain: Option<ActiveDrain>,
    /// Number of remaining connections of the drained services, counted after the last new connection. Null if the
    /// server is not drained, or if the number is unknown (see `unknown_count_reasons`).
    pub remaining_connections: Option<u64>,
    /// Reasons why `remaining_connections` is unknown.
    pub unknown_count_reasons: Vec<String>,
    /// The newest count of connections, even if it is too old for `remaining_connections`. Null if there is none.
    pub connection_counts: Option<ConnectionCounts>,
    /// Names of drained services whose flows are not counted, because UDP flows have no visible end.
    pub uncounted_services: Vec<String>,
}
