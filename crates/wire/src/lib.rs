//! Messages between coreward's processes. This crate has the types generated from `proto/*.proto` ([`v1`]), and
//! converts them from and to types that are always valid. A receiver parses each message here, once.
//!
//! * [`address`]: addresses of servers and services
//! * [`keys`]: the fleet's cookie keys
//! * [`service_settings`]: consistency modes
//! * [`rss`]: a server's RSS key and indirection table
//! * [`rack`]: summaries and configurations of racks
//! * [`report`]: reports of agents
//! * [`configuration`]: configurations of load balancers and agents
//! * [`configuration_change`]: changes of configurations
//! * [`rejected_updates`]: counting and shortening of rejected updates
//! * [`table`]: placement tables
//! * [`traffic`]: traffic counts that load balancers send for policies
//! * [`health`]: health checks and their results
//! * [`sockets`]: queries for the sockets of idle connections
//! * [`sanitize`]: sanitizing of foreign text for display

#![deny(missing_docs)]

pub mod address;
pub mod configuration;
pub mod configuration_change;
mod error;
pub mod health;
pub mod keys;
mod packed_numbers;
pub mod rack;
pub mod rejected_updates;
pub mod report;
pub mod rss;
pub mod sanitize;
pub mod service_settings;
pub mod sockets;
pub mod table;
pub mod traffic;

pub use configuration::{
    AgentConfiguration, AgentService, FleetConfiguration, LB_STATE_MESSAGE_INTERVAL, LOAD_BALANCER_LOSS_TIMEOUT,
    PeerLoadBalancer, PreviousServer, Server, Service, ServiceIndex, UnusableService,
};
pub use configuration_change::FleetConfigurationChange;
pub use error::{WireError, WireErrorContext};
pub use health::{HealthCheckResultsMessage, ServerCheckResult};
pub use rack::{RackConfiguration, RackMember, RackServer, RackService};
pub use report::{
    AgentReport, AgentReportDetails, AgentReportError, CountedConnections, MAX_AGENT_MESSAGE_BYTES,
    shrink_oversized_report,
};
pub use rss::ReportedRss;
pub use sockets::{SocketAnswer, SocketQuery};
pub use traffic::{ServerTraffic, TrafficCountsMessage};

/// Metadata key of a gRPC status UNAVAILABLE. Its value is the leading controller's address and port, in the form of
/// the daemons' setting `controller`.
pub const LEADER_ADDRESS_METADATA_KEY: &str = "coreward-leader";

/// Metadata key at the beginning of a gRPC stream. Its value is the answering controller's term in decimal, which grows
/// with every new leader. The key is absent if the controllers elect no leader.
pub const CONTROLLER_TERM_METADATA_KEY: &str = "coreward-term";

/// Types generated from `proto/*.proto`. The comments in those files are their documentation.
#[allow(missing_docs, clippy::all)]
pub mod v1 {
    include!(concat!(env!("OUT_DIR"), "/coreward.v1.rs"));
}
