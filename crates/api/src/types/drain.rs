//! Servers that take no new connections because somebody says so, and what remains there.

use std::collections::BTreeMap;
use std::fmt;

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use super::{Reports, ServerState};

/// Where a server is drained.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct DrainServer {
    /// Names of the services in which it is to take no new connections; empty: all of them, also those that it is put into later.
    #[serde(default)]
    #[schema(required = false)]
    pub services: Vec<String>,
    /// Also where no other server of a service takes new connections: nobody can connect there then.
    #[serde(default)]
    #[schema(required = false)]
    pub force: bool,
}

/// Who says that a server takes no new connections.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "lowercase")]
pub enum DrainedBy {
    /// `coreward drain`, until `coreward undrain`.
    Command,
    /// `state` or `weight` in the fleet's document.
    Document,
}

impl DrainedBy {
    /// As it is shown.
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

/// That a server is drained.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Drained {
    /// Who says so.
    pub by: DrainedBy,
    /// Since when (ms since 1970, by the controller's wall clock); null: not known, by the document.
    pub since_unix_ms: Option<u64>,
    /// In these services only; empty: in all of them.
    pub services: Vec<String>,
}

/// TCP connections that have a socket at a server: from half-open to the last FIN; neither listening nor in TIME-WAIT.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct CountedConnections {
    /// How long ago the count began.
    pub age_ms: u64,
    /// By the name of the service: those of TCP that the server is, or was, in.
    pub services: BTreeMap<String, u32>,
}

/// Whether a server is drained, and what remains there.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct DrainStatus {
    /// Its name.
    pub server: String,
    /// Where it stands: the best of where it stands in its services.
    pub state: ServerState,
    /// Why, in words; empty: nothing is to be said.
    pub state_reason: String,
    /// What its agent says.
    pub reports: Reports,
    /// Who drains it; null: nobody.
    pub drained: Option<Drained>,
    /// Connections that remain where it is drained, of a count that began after nobody sent new ones there; null: not known
    /// (`waits_for`), or it is not drained.
    pub remaining: Option<u64>,
    /// Why `remaining` is not known, in words.
    pub waits_for: Vec<String>,
    /// The newest count, whether it is newer or not; null: not known.
    pub connections: Option<CountedConnections>,
    /// Services where it is drained whose flows are not counted: those of UDP have no end that anybody sees.
    pub not_counted: Vec<String>,
}
