//! JSON documents of the API, with addresses and keys in their usual text form.

mod acknowledgements;
mod audit;
mod drain;
mod events;
mod explain;
mod fleet;
mod keys;
mod loads;
mod serde_text;
mod serde_whole;
mod status;
mod tables;
mod wire;

pub use acknowledgements::{Acknowledgements, PeerGeneration, RejectedUpdate};
pub use audit::{Audit, AuditEntry, AuditQuery};
pub use drain::{ActiveDrain, ConnectionCounts, DrainOrigin, DrainServer, DrainStatus};
pub use events::{Event, EventId, Events, EventsQuery, Severity, SubjectKind};
pub use explain::{Explain, ExplainedServer, Explanation, PacketKind};
pub use fleet::{CheckRequest, CheckResult, DocumentMistake, Fleet, FleetApplied, FleetChange, NewFleet};
pub use keys::{KeyPhase, Keys, RotateKeys};
pub use loads::{
    LoadBalancerCounters, Loads, Overview, OverviewLoadBalancer, OverviewServer, OverviewService, ServerLoads,
};
pub use status::{
    DispatchedService, DispatchedWorker, HealthCheckResult, LoadBalancer, LoadBalancerState, LoadBalancers, Rack,
    ReportState, RssGroup, Server, ServerClock, ServerRss, ServerState, Servers, Service, ServiceMember, Services,
    StampedService, Status, StatusQuery,
};
pub use tables::{Candidate, Member, Table, TableSummary, Tables};

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// Largest integer that requests may contain, up to which all JSON implementations agree (RFC 8259, Sect. 6).
pub const MAX_SAFE_INTEGER: u64 = (1 << 53) - 1;

/// Versions of the controller's program and API.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Version {
    /// Version of the program.
    pub version: String,
    /// Version of the API.
    pub api: String,
}

/// Health of the controller.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Health {
    /// State of the controller.
    pub state: HealthState,
    /// Address at which daemons reach the leading controller, or null if this controller leads or none does.
    pub leader: Option<String>,
    /// URL of the leader's API (`https://HOST:PORT`), or null if that API listens only on the leader's own host.
    #[serde(default)]
    #[schema(format = "uri")]
    pub leader_api: Option<String>,
}

/// State of a controller.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "lowercase")]
pub enum HealthState {
    /// The controller has restarted and waits for agents, while load balancers keep their tables.
    Settling,
    /// The controller makes placement tables.
    Ready,
    /// The controller does not lead. Another controller leads, or none does.
    Following,
}
