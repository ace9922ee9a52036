//! Messages between coreward's processes: the types generated from
//! `proto/coreward.proto` ([`v1`]), and their conversion from and to types
//! that are always valid. A receiver parses a message here, once.
//!
//! * [`address`]: addresses of servers and services
//! * [`keys`]: the fleet's cookie keys
//! * [`mode`]: consistency modes
//! * [`rss`]: a server's RSS key and indirection table
//! * [`rack`]: summaries and configurations of racks
//! * [`report`]: reports of agents
//! * [`configuration`]: configurations of load balancers and agents
//! * [`change`]: changes of configurations
//! * [`rejected`]: rejected updates, as they are counted
//! * [`table`]: placement tables
//! * [`traffic`]: counts of load balancers for policies
//! * [`health`]: health checks and their results
//! * [`sockets`]: queries for the sockets of idle connections
//! * [`sanitize`]: foreign text for display

#![deny(missing_docs)]

pub mod address;
pub mod change;
pub mod configuration;
mod error;
pub mod health;
pub mod keys;
pub mod mode;
mod packed;
pub mod rack;
pub mod rejected;
pub mod report;
pub mod rss;
pub mod sanitize;
pub mod sockets;
pub mod table;
pub mod traffic;

pub use change::FleetChange;
pub use configuration::{
    AgentConfiguration, AgentService, FleetConfiguration, LOAD_BALANCER_TIMEOUT, Peer, PreviousServer, STATE_INTERVAL,
    Server, Service, ServiceIndex, UnusableService,
};
pub use error::{WireError, WireErrorContext};
pub use health::{HealthMessage, ServerCheckResult};
pub use rack::{RackConfiguration, RackMember, RackServer, RackService};
pub use report::{
    CountedConnections, MAX_AGENT_MESSAGE_BYTES, Report, ReportDetails, ReportError, reduce_oversized_report,
};
pub use rss::ReportedRss;
pub use sockets::{SocketAnswer, SocketQuery};
pub use traffic::{ServerTraffic, TrafficMessage};

/// Metadata key of an UNAVAILABLE: address and port of the leading controller, as in daemons' files.
pub const LEADER_HEADER: &str = "coreward-leader";

/// Metadata key at a stream's beginning: the term of the answering controller, in decimal. The term grows with every
/// leader; it is absent if the controller has a store of its own.
pub const TERM_HEADER: &str = "coreward-term";

/// Types generated from `proto/coreward.proto`; the comments there are the documentation.
#[allow(missing_docs, clippy::all)]
pub mod v1 {
    include!(concat!(env!("OUT_DIR"), "/coreward.v1.rs"));
}
