//! What coreward's processes say to each other: the generated gRPC types ([`v1`]), and their conversion from and to
//! types that cannot hold nonsense. Whoever receives a message parses it here, once.
//!
//! * [`address`]: addresses of servers and services
//! * [`keys`]: the fleet's cookie keys
//! * [`mode`]: how a service's packets find their server
//! * [`rss`]: a server's RSS key and indirection table
//! * [`rack`]: what racks pass up, and what they must know for that
//! * [`report`]: what an agent says of its cores
//! * [`configuration`]: what the controller tells load balancers and agents to know
//! * [`change`]: what of that is another than before
//! * [`rejected`]: what of that cannot be used
//! * [`table`]: placement tables
//! * [`traffic`]: what load balancers count for policies
//! * [`health`]: how servers are checked, and what the checks say
//! * [`sockets`]: whether idle connections still have a socket
//! * [`words`]: what others wrote and people read

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
    AgentConfiguration, FleetConfiguration, LOST_AFTER, Peer, STATE_INTERVAL, Server, ServerBefore, Service,
    ServiceIndex, StampedService,
};
pub use error::{Context, WireError};
pub use health::{CheckedServer, HealthMessage};
pub use rack::{RackConfiguration, RackMember, RackServer, RackService};
pub use rejected::RefusedService;
pub use report::{AGENT_MESSAGE_BYTES, CountedConnections, Report, ReportDetails, ReportError, limited_report};
pub use rss::ReportedRss;
pub use sockets::{SocketAnswer, SocketQuery};
pub use traffic::{ServerTraffic, TrafficMessage};

/// Metadata of an UNAVAILABLE: address and port of the controller that leads, as it stands in daemons' files.
pub const LEADER: &str = "coreward-leader";

/// Metadata of a stream's beginning: the term of the controller that answers, in decimal. Grows with every leader; there is none
/// where one controller has a store of its own.
pub const TERM: &str = "coreward-term";

/// Types generated from `proto/coreward.proto`; the comments there are the documentation.
#[allow(missing_docs, clippy::all)]
pub mod v1 {
    tonic::include_proto!("coreward.v1");
}
