//! The audit log, which has each change and its author.

use serde::{Deserialize, Serialize};
use utoipa::{IntoParams, ToSchema};

/// Entry of the audit log, which describes one change and its author.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct AuditEntry {
    /// Id of the entry, which grows by one with every entry, even if another controller takes the lead.
    pub id: u64,
    /// Time of the change, by the wall clock of the controller that made it (ms since 1970).
    pub at_unix_ms: u64,
    /// Author of the change: the name in a certificate, the role and id of a token ("operator token 1a2b3c4d"),
    /// "SIGHUP", or "controller" for its own changes.
    pub actor: String,
    /// Address from which the request came, or empty if it came from the controller's own host.
    #[serde(rename = "from")]
    pub from_address: String,
    /// Kind of the change: "apply", "reload", "drain", "undrain", "rotate-keys" or "forget".
    pub action: String,
    /// Name of the changed server or load balancer, or empty if the change concerns the fleet.
    pub target: String,
    /// State of the target before the change.
    pub before: String,
    /// State of the target after the change.
    pub after: String,
}

/// Answer with entries of the audit log, the oldest first.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Audit {
    /// The newest entries, at most 1,000.
    pub entries: Vec<AuditEntry>,
}

/// Query that selects entries of the audit log.
#[derive(Debug, Clone, Copy, Default, Serialize, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub struct AuditQuery {
    /// Only entries with an id greater than this one are returned.
    #[serde(default)]
    #[param(value_type = Option<u64>, maximum = 9007199254740991_u64)]
    pub after: u64,
    /// Maximum number of entries to return. The newest entries are returned.
    #[serde(default)]
    #[param(minimum = 1, maximum = 1000)]
    pub limit: Option<u16>,
}
