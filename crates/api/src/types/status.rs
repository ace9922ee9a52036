//! Services, servers and load balancers in the controller's view.

use std::collections::BTreeMap;
use std::fmt;
use std::net::IpAddr;

use coreward_model::ServiceAddress;
use serde::{Deserialize, Serialize};
use utoipa::{IntoParams, ToSchema};

use super::{CountedConnections, Drained, Keys, serde_text};

/// Extent of the status.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub struct StatusQuery {
    /// With whole RSS keys, for operators only, because a key allows aiming at a core. Otherwise only their
    /// fingerprints.
    #[serde(default)]
    #[param(value_type = Option<bool>)]
    pub rss_keys: bool,
}

/// Full status.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct Status {
    /// Grows with every change of a configuration.
    pub configuration_generation: u64,
    /// Time between two reports of an agent, and between two tables.
    pub report_interval_ms: u32,
    /// Accepted reports.
    pub accepted_reports: u64,
    /// Rejected reports, by reason.
    pub refused_reports: BTreeMap<String, u64>,
    /// In the order of the fleet's document.
    pub services: Vec<Service>,
    /// Servers in the fleet's document, and those that left but may still have connections.
    pub servers: Vec<Server>,
    /// Load balancers that are connected or may return.
    pub load_balancers: Vec<LoadBalancer>,
    /// The cookie keys, without the secrets.
    pub keys: Keys,
    /// Rack controllers that are connected.
    #[serde(default)]
    pub racks: Vec<Rack>,
    /// Faults of the controller itself: of its store and its files.
    #[serde(default)]
    pub warnings: Vec<String>,
}

/// A rack controller.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Rack {
    /// Its name.
    pub name: String,
    /// Its version.
    pub version: String,
    /// Time since its last message.
    pub age_ms: u32,
    /// Servers whose agents are connected through it.
    pub servers: Vec<String>,
    /// Number of servers for which the fleet's document permits it.
    #[serde(default)]
    pub permitted_servers: u32,
}

/// All services.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct Services {
    /// In the order of the fleet's document.
    pub services: Vec<Service>,
}

/// All servers.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct Servers {
    /// Servers in the fleet's document, and those that left but may still have connections.
    pub servers: Vec<Server>,
}

/// All load balancers.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct LoadBalancers {
    /// Load balancers that are connected or may return.
    pub load_balancers: Vec<LoadBalancer>,
}

/// A service.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Service {
    /// Its name.
    pub name: String,
    /// VIP, port and protocol.
    #[serde(with = "serde_text")]
    #[schema(value_type = String, example = "10.200.0.1:80/tcp")]
    pub address: ServiceAddress,
    /// Policy that places new connections.
    pub policy: String,
    /// Consistency mode.
    pub consistency: String,
    /// Origin of cookies: "server", "lb" or "off".
    pub timestamps: String,
    /// Number of its buckets.
    pub bucket_count: u32,
    /// Generation of the newest table; 0: none yet.
    pub table_generation: u64,
    /// Its age.
    pub table_age_ms: u32,
    /// Names of its servers, and of those that left it.
    pub servers: Vec<String>,
    /// States of these servers in the service.
    pub members: Vec<ServiceMember>,
    /// Kind of health check: "tcp", "http", "https" or "agent"; null: none.
    pub check: Option<String>,
    /// Treatment of new connections when all servers are down: "fail-open" or "drop".
    pub when_all_down: String,
    /// Whether all are down and still get new connections.
    pub failing_open: bool,
    /// Servers whose NICs hash alike.
    pub rss_groups: Vec<RssGroup>,
    /// Warnings for the operator.
    pub warnings: Vec<String>,
}

impl Service {
    /// Returns the service with these members.
    pub fn with_members(self, members: Vec<ServiceMember>) -> Self {
        let servers = members.iter().map(|member| member.server.clone()).collect();
        Self { servers, members, ..self }
    }
}

/// A server as a member of a service.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct ServiceMember {
    /// Its name.
    pub server: String,
    /// State in this service.
    pub state: ServerState,
    /// Reason of the state; empty: none.
    pub reason: String,
    /// Duration of the state; null: since before this controller's start.
    pub state_for_ms: Option<u64>,
    /// Results of each load balancer's checks.
    pub checks: Vec<CheckedBy>,
}

/// Result of one load balancer's checks of a server.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct CheckedBy {
    /// The load balancer.
    pub load_balancer: String,
    /// Whether it finds the server up; null: not enough checks so far.
    pub up: Option<bool>,
    /// Duration of the result.
    pub since_ms: u64,
    /// Error of the newest check; null: it passed.
    pub error: Option<String>,
    /// Duration of the newest answer; 0: there was none.
    pub latency_us: u32,
    /// Checks of this server so far.
    pub checks: u64,
    /// Failed checks.
    pub failures: u64,
}

/// Servers whose NICs hash alike.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct RssGroup {
    /// In the form of `ethtool -x`; null: not requested.
    pub key: Option<String>,
    /// Identifies the key without revealing it.
    pub key_fingerprint: String,
    /// Their names.
    pub servers: Vec<String>,
}

/// A server.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct Server {
    /// Its name.
    pub name: String,
    /// Id in cookies.
    pub id: u32,
    /// Address for load balancers.
    #[schema(value_type = String)]
    pub address: IpAddr,
    /// VLAN of its frames; null: untagged.
    #[serde(default)]
    pub vlan: Option<u16>,
    /// State: the best of its states in its services.
    pub state: ServerState,
    /// Reason of the state; empty: none.
    pub state_reason: String,
    /// Duration of the state; null: since before this controller's start.
    pub state_for_ms: Option<u64>,
    /// State of its agent's reports.
    pub reports: ReportState,
    /// Smoothed load of each core, in fractions of its capacity; empty: unknown.
    pub core_load: Vec<f64>,
    /// Age of its newest report.
    pub report_age_ms: u32,
    /// TCP connections of its services by its agent's last count.
    pub open_connections: u32,
    /// RSS of its NIC; null: unknown.
    pub rss: Option<ServerRss>,
    /// SYNs that arrived on the predicted receive queue.
    pub rss_matched: u64,
    /// SYNs that arrived on another one.
    pub rss_mismatched: u64,
    /// Warnings for the operator.
    pub warnings: Vec<String>,
    /// Its weight.
    pub weight: u32,
    /// Configured capacity, or number of cores; 0: unknown.
    pub capacity: f64,
    /// Generation of the newest configuration that its agent has confirmed; 0: none.
    pub configuration_generation: u64,
    /// Counters of its programs, by name.
    pub counters: BTreeMap<String, u64>,
    /// UDP services whose requests are dispatched there.
    pub dispatch: Vec<DispatchedService>,
    /// Its drain; null: it is not drained.
    #[serde(default)]
    pub drained: Option<Drained>,
    /// Its connections by service, by its agent's last count; null: unknown.
    #[serde(default)]
    pub connections: Option<CountedConnections>,
    /// Rack of its agent; null: connected directly, or no agent.
    #[serde(default)]
    pub rack: Option<String>,
    /// Racks that its agent may use; null: any.
    #[serde(default)]
    pub racks: Option<Vec<String>>,
}

/// State of a server, the best first.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "lowercase")]
pub enum ServerState {
    /// It takes new connections.
    Active,
    /// It takes a growing share of new connections (slow start).
    Joining,
    /// It is not eligible for new connections; established ones still reach it.
    Down,
    /// It is drained: no new connections; established ones still reach it.
    Draining,
    /// It has left the service or the fleet's document; established connections still reach it, and its id stays
    /// reserved, for `max_connection_lifetime`.
    Gone,
}

/// State of an agent's reports.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "lowercase")]
pub enum ReportState {
    /// Valid reports.
    Fresh,
    /// Its newest report has expired: it counts as average.
    Stale,
    /// No agent so far: it counts as average.
    None,
}

impl ReportState {
    /// Returns the name in output.
    pub fn name(self) -> &'static str {
        match self {
            Self::Fresh => "fresh",
            Self::Stale => "stale",
            Self::None => "none",
        }
    }
}

impl ServerState {
    /// All states.
    pub const ALL: [ServerState; 5] = [Self::Active, Self::Joining, Self::Down, Self::Draining, Self::Gone];

    /// Returns the name in output.
    pub fn name(self) -> &'static str {
        match self {
            Self::Active => "active",
            Self::Joining => "joining",
            Self::Down => "down",
            Self::Draining => "draining",
            Self::Gone => "gone",
        }
    }
}

impl fmt::Display for ServerState {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

/// A server's receive-side scaling.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct ServerRss {
    /// "ethtool" or "testbed emulation".
    pub source: String,
    /// In the form of `ethtool -x`; null: unknown, or not requested.
    pub key: Option<String>,
    /// Identifies the key without revealing it; empty: unknown.
    pub key_fingerprint: String,
    /// Transformation of addresses and ports before the NIC hashes them: "none", "symmetric-xor" or "symmetric-or-xor".
    #[serde(default)]
    pub input_transform: String,
    /// Receive queue per entry.
    pub indirection_table: Vec<u32>,
}

/// A service in `coreward dispatch --status`; counts are absolute.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct DispatchedService {
    /// Address and port.
    pub listen: String,
    /// Its policy.
    pub policy: String,
    /// Its workers.
    pub workers: Vec<DispatchedWorker>,
    /// Counters of the service, by name.
    pub counters: BTreeMap<String, u64>,
}

/// A worker of a dispatched service.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct DispatchedWorker {
    /// Its slot.
    pub worker: u32,
    /// Its process.
    pub pid: u32,
    /// Requests without a response so far.
    pub outstanding: u32,
    /// Expected work of these (us).
    pub outstanding_work_us: f64,
    /// Datagrams in its queue at the last poll.
    pub queued: u32,
    /// Requests sent to it.
    pub dispatched: u64,
    /// Requests with a response.
    pub completed: u64,
    /// Requests written off: without a response, dropped, or their worker died.
    pub abandoned: u64,
    /// Datagrams that its full receive buffer dropped.
    pub dropped: u64,
    /// Whether it gets requests.
    pub eligible: bool,
}

/// A load balancer.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct LoadBalancer {
    /// Its name.
    pub name: String,
    /// Its last state; null: none since it connected.
    pub state: Option<LoadBalancerState>,
    /// Age of that state.
    pub state_age_ms: u32,
    /// Whether its stream is open.
    pub connected: bool,
    /// Whether it sent a message in the last two seconds.
    pub alive: bool,
    /// Number of its connection table in cookies; null: it has none.
    pub owner: Option<u32>,
    /// Address for other load balancers; null: none.
    #[schema(value_type = Option<String>)]
    pub address: Option<IpAddr>,
}

/// State that a load balancer reports.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct LoadBalancerState {
    /// Generation of the table in force, per service.
    pub table_generations: BTreeMap<String, u64>,
    /// Servers with an unknown MAC address.
    pub unresolved_servers: Vec<String>,
    /// Outcomes of packets (enum lb_counter).
    pub counters: BTreeMap<String, u64>,
    /// "native" or "generic".
    pub xdp_mode: String,
    /// VLAN of the VIPs; null: untagged.
    #[serde(default)]
    pub vlan: Option<u16>,
    /// Generation of the newest configuration in force; 0: none yet.
    pub configuration_generation: u64,
    /// Packets by event (enum lb_event).
    pub events: BTreeMap<String, u64>,
    /// Connections in its connection table.
    pub connections: u64,
    /// Load balancers with an unknown MAC address.
    pub unresolved_load_balancers: Vec<String>,
    /// Clocks of servers with LB-side stamping.
    pub server_clocks: Vec<ServerClock>,
    /// Services with LB-side stamping.
    #[serde(default)]
    pub stamped_services: Vec<StampedService>,
    /// Faults of its machine.
    pub warnings: Vec<String>,
}

/// Packets of open connections to a service with LB-side stamping, at a load balancer.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct StampedService {
    /// Name of the service.
    pub service: String,
    /// Packets decided by the cookie.
    pub by_cookie: u64,
    /// Packets decided by the flow table.
    pub by_flow_table: u64,
}

impl StampedService {
    /// Returns the share decided by the cookie; `None`: no packet yet.
    pub fn cookie_share(&self) -> Option<f64> {
        let all = self.by_cookie.saturating_add(self.by_flow_table);
        (all > 0).then(|| self.by_cookie as f64 / all as f64)
    }
}

/// A server's clock by the SYN-ACKs at a load balancer, since it knows the server's address.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct ServerClock {
    /// Name of the service.
    pub service: String,
    /// Name of the server.
    pub server: String,
    /// "known", "per-connection", "learning", "unseen", "no-timestamps" or "differs".
    pub state: String,
    /// SYN-ACKs seen.
    pub syn_acks: u64,
    /// Those with timestamps.
    pub with_timestamps: u64,
    /// Answers whose clock differed from that of another connection.
    pub disagreed: u64,
    /// Reason for which its connections are not stamped, with the expectation; null: they are, or it is too early.
    pub problem: Option<String>,
}
