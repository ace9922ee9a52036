//! What changes all the time, and what changes now and then.

use std::collections::BTreeMap;
use std::net::IpAddr;

use coreward_model::ServiceAddress;
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use super::{Drained, Keys, Reports, ServerState, serde_text};

/// The load of every core, and counts to make rates of.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct Loads {
    /// When this was so, by the controller's wall clock (ms since 1970).
    pub at_unix_ms: u64,
    /// And since its start (ms): this never goes back.
    pub uptime_ms: u64,
    /// By id, as in `status`.
    pub servers: Vec<ServerLoads>,
    /// By name, as in `status`.
    pub load_balancers: Vec<LoadBalancerCounts>,
}

/// The load of a server's cores.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct ServerLoads {
    /// Its name.
    pub name: String,
    /// Load of each core in fractions of its capacity, to three decimals; empty: not known.
    pub cores: Vec<f64>,
    /// TCP connections of its services, as its agent last counted them.
    pub open_connections: u32,
    /// Connections of its services, as its agent last counted them (for up to 5 s, and while it drains 1 s); null: not known.
    #[serde(default)]
    pub service_connections: Option<u64>,
    /// First packets of connections (SYN) that have arrived there (absolute).
    pub new_connections: u64,
}

/// What a load balancer has counted.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct LoadBalancerCounts {
    /// Its name.
    pub name: String,
    /// What became of packets (enum lb_counter; absolute).
    pub counters: BTreeMap<String, u64>,
}

/// What changes now and then: as `status`, without what changes with every report.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct Overview {
    /// Grows with every change of what parts of the fleet must know.
    pub configuration_generation: u64,
    /// Of the fleet's document.
    pub fleet_generation: u64,
    /// Time between two reports of an agent, and between two tables.
    pub report_interval_ms: u32,
    /// In the order of the fleet's document.
    pub services: Vec<OverviewService>,
    /// By id.
    pub servers: Vec<OverviewServer>,
    /// By name.
    pub load_balancers: Vec<OverviewLoadBalancer>,
    /// The cookie keys, without the secrets.
    pub keys: Keys,
}

/// A service.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct OverviewService {
    /// Its name.
    pub name: String,
    /// VIP, port and protocol.
    #[serde(with = "serde_text")]
    #[schema(value_type = String, example = "10.200.0.1:80/tcp")]
    pub address: ServiceAddress,
    /// Where new connections go.
    pub policy: String,
    /// How packets find the server of their connection.
    pub consistency: String,
    /// Names of its pool, and of those that left it.
    pub servers: Vec<String>,
    /// What the operator should know, in words.
    pub warnings: Vec<String>,
}

/// A server.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct OverviewServer {
    /// Its name.
    pub name: String,
    /// What cookies carry.
    pub id: u32,
    /// Where load balancers reach it.
    #[schema(value_type = String)]
    pub address: IpAddr,
    /// Where it stands.
    pub state: ServerState,
    /// Why, in words; empty: nothing is to be said.
    pub state_reason: String,
    /// What its agent says.
    pub reports: Reports,
    /// Its part of new connections.
    pub weight: u32,
    /// Who says that it takes no new connections; null: nobody.
    #[serde(default)]
    pub drained: Option<Drained>,
    /// What the operator should know, in words.
    pub warnings: Vec<String>,
}

/// A load balancer.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct OverviewLoadBalancer {
    /// Its name.
    pub name: String,
    /// Whether its stream is open.
    pub connected: bool,
    /// Whether it was heard of in the last two seconds.
    pub alive: bool,
    /// "native" or "generic"; null: it has not said.
    pub xdp_mode: Option<String>,
    /// What is wrong with its machine, in words.
    pub warnings: Vec<String>,
}
