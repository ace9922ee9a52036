//! Parts of the status: values that change with every report, and values that change rarely.

use std::collections::BTreeMap;
use std::net::IpAddr;

use coreward_model::ServiceAddress;
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use super::{ActiveDrain, Keys, ReportState, ServerState, serde_text};

/// Loads of all servers' cores, and counters of all load balancers.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct Loads {
    /// Time of the loads by the controller's wall clock (ms since 1970).
    pub at_unix_ms: u64,
    /// Time since the controller's start (ms), by a clock that never goes back.
    pub uptime_ms: u64,
    /// Loads of the servers, sorted by id as in `status`.
    pub servers: Vec<ServerLoads>,
    /// Counters of the load balancers, sorted by name as in `status`.
    pub load_balancers: Vec<LoadBalancerCounters>,
}

/// Loads of one server's cores, and counts of its connections.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct ServerLoads {
    /// Name of the server.
    pub name: String,
    /// Load of each core in fractions of its capacity, to three decimals, or empty if unknown.
    pub core_loads: Vec<f64>,
    /// Number of TCP connections to the server's services at the agent's last count.
    pub open_connections: u32,
    /// Number of connections to the server's services at the agent's last count, or null if it is unknown. The count is
    /// up to 5 s old, or 1 s during a drain.
    #[serde(default)]
    pub service_connections: Option<u64>,
    /// Total number of SYNs that have arrived at the server.
    pub new_connections: u64,
}

/// Packet counters of one load balancer.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct LoadBalancerCounters {
    /// Name of the load balancer.
    pub name: String,
    /// Total number of packets by outcome. The keys are the names of enum lb_counter.
    pub counters: BTreeMap<String, u64>,
}

/// Part of the `status` that changes rarely. It omits all values that change with every report.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct Overview {
    /// Generation of the configuration, which grows with every change.
    pub configuration_generation: u64,
    /// Generation of the fleet document.
    pub fleet_generation: u64,
    /// Time between two reports of an agent, and between two placement tables of a service (ms).
    pub report_interval_ms: u32,
    /// Services in the order of the fleet document.
    pub services: Vec<OverviewService>,
    /// Servers, sorted by id.
    pub servers: Vec<OverviewServer>,
    /// Load balancers, sorted by name.
    pub load_balancers: Vec<OverviewLoadBalancer>,
    /// The cookie keys, without the secrets.
    pub keys: Keys,
}

/// A service, without values that change with every report.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct OverviewService {
    /// Name of the service.
    pub name: String,
    /// VIP, port and protocol of the service.
    #[serde(with = "serde_text")]
    #[schema(value_type = String, example = "10.200.0.1:80/tcp")]
    pub address: ServiceAddress,
    /// Policy that places new connections.
    pub policy: String,
    /// Consistency mode of the service.
    pub consistency: String,
    /// Names of the service's present and former servers.
    pub servers: Vec<String>,
    /// Warnings about the service, for the operator.
    pub warnings: Vec<String>,
}

/// A server, without values that change with every report.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct OverviewServer {
    /// Name of the server.
    pub name: String,
    /// Id of the server in cookies.
    pub id: u32,
    /// Address to which load balancers send packets.
    #[schema(value_type = String)]
    pub address: IpAddr,
    /// State of the server.
    pub state: ServerState,
    /// Reason for the state, or empty if there is none.
    pub state_reason: String,
    /// State of the reports of the server's agent.
    pub report_state: ReportState,
    /// Weight of the server.
    pub weight: u32,
    /// Drain of the server, or null if it is not drained.
    #[serde(default)]
    pub drain: Option<ActiveDrain>,
    /// Warnings about the server, for the operator.
    pub warnings: Vec<String>,
}

/// A load balancer, without values that change with every report.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct OverviewLoadBalancer {
    /// Name of the load balancer.
    pub name: String,
    /// Whether the load balancer's stream to the controller is open.
    pub connected: bool,
    /// Whether the load balancer sent a message in the last two seconds.
    pub alive: bool,
    /// XDP mode of the load balancer, "native" or "generic", or null if it is not reported.
    pub xdp_mode: Option<String>,
    /// Faults of the load balancer's machine.
    pub warnings: Vec<String>,
}
