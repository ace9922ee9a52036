//! Services, servers and load balancers as the controller sees them.

use std::collections::BTreeMap;
use std::fmt;
use std::net::IpAddr;

use coreward_model::ServiceAddress;
use serde::{Deserialize, Serialize};
use utoipa::{IntoParams, ToSchema};

use super::{ActiveDrain, ConnectionCounts, Keys, serde_text};

/// Query options of a request for the status.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub struct StatusQuery {
    /// Whether to include full RSS keys, not only their fingerprints. Only operators may request them, because a client
    /// that has a key can choose the core of its connections.
    #[serde(default)]
    #[param(value_type = Option<bool>)]
    pub rss_keys: bool,
}

/// Full status of services, servers and load balancers.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct Status {
    /// Generation of the configuration, which grows with every change.
    pub configuration_generation: u64,
    /// Time between two reports of an agent, and between two placement tables of a service (ms).
    pub report_interval_ms: u32,
    /// Number of reports by agents that the controller accepted.
    pub accepted_reports: u64,
    /// Number of reports by agents that the controller rejected, by reason.
    pub rejected_reports: BTreeMap<String, u64>,
    /// Services in the order of the fleet document.
    pub services: Vec<Service>,
    /// Servers in the fleet document, and former servers that may still have connections.
    pub servers: Vec<Server>,
    /// Load balancers that are connected or may return.
    pub load_balancers: Vec<LoadBalancer>,
    /// The cookie keys, without the secrets.
    pub keys: Keys,
    /// Connected rack controllers.
    #[serde(default)]
    pub racks: Vec<Rack>,
    /// Faults of the controller itself, in its store or its files.
    #[serde(default)]
    pub warnings: Vec<String>,
}

/// A connected rack controller.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Rack {
    /// Name of the rack.
    pub name: String,
    /// Version of the rack controller.
    pub version: String,
    /// Time since the rack controller's last message (ms).
    pub last_message_age_ms: u32,
    /// Names of servers whose agents are connected through the rack.
    pub servers: Vec<String>,
    /// Number of servers that may use the rack according to the fleet document.
    #[serde(default)]
    pub permitted_servers: u32,
}

/// List of all services.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct Services {
    /// Services in the order of the fleet document.
    pub services: Vec<Service>,
}

/// List of all servers.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct Servers {
    /// Servers in the fleet document, and former servers that may still have connections.
    pub servers: Vec<Server>,
}

/// List of all load balancers.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct LoadBalancers {
    /// Load balancers that are connected or may return.
    pub load_balancers: Vec<LoadBalancer>,
}

/// A service of the fleet.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Service {
    /// Name of the service.
    pub name: String,
    /// VIP, port and protocol of the service.
    #[serde(with = "serde_text")]
    #[schema(value_type = String, example = "10.200.0.1:80/tcp")]
    pub address: ServiceAddress,
    /// Policy that places new connections.
    pub policy: String,
    /// Consistency mode: "stateless", "stateful", "hash-table", "beamer" or "none".
    pub consistency: String,
    /// Party that stamps cookies into TCP timestamps: "server", "lb" or "off".
    pub timestamps: String,
    /// Number of the service's buckets.
    pub bucket_count: u32,
    /// Generation of the newest placement table, or 0 if there is none yet.
    pub table_generation: u64,
    /// Age of the newest placement table (ms).
    pub table_age_ms: u32,
    /// Names of the service's present and former servers.
    pub servers: Vec<String>,
    /// States of the service's servers.
    pub members: Vec<ServiceMember>,
    /// Kind of the service's health checks, "tcp", "http", "https" or "agent", or null if there are none.
    pub health_check_kind: Option<String>,
    /// Treatment of new connections when all servers are down: "fail-open" or "drop".
    pub when_all_down: String,
    /// Whether all servers are down but get new connections nevertheless.
    pub failing_open: bool,
    /// Groups of servers whose NICs compute the same RSS hash.
    pub rss_groups: Vec<RssGroup>,
    /// Warnings about the service, for the operator.
    pub warnings: Vec<String>,
}

impl Service {
    /// Returns the service with `members` in place of its previous members.
    pub fn with_members(self, members: Vec<ServiceMember>) -> Self {
        let servers = members.iter().map(|member| member.server.clone()).collect();
        Self { servers, members, ..self }
    }
}

/// A server as a member of a service.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct ServiceMember {
    /// Name of the server.
    pub server: String,
    /// State of the server in this service.
    pub state: ServerState,
    /// Reason for the state, or empty if there is none.
    pub state_reason: String,
    /// Time since the state began (ms), or null if it began before this controller's start.
    pub state_for_ms: Option<u64>,
    /// Results of the health checks by each load balancer.
    pub health_checks: Vec<HealthCheckResult>,
}

/// Result of one load balancer's health checks of a server.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct HealthCheckResult {
    /// Name of the load balancer.
    pub load_balancer: String,
    /// Whether the load balancer considers the server up, or null after too few checks.
    pub is_up: Option<bool>,
    /// Time since `is_up` last changed (ms).
    pub result_age_ms: u64,
    /// Error of the newest check, or null if the check passed.
    pub error: Option<String>,
    /// Latency of the newest check (us), or 0 if there was no answer.
    pub latency_us: u32,
    /// Number of the load balancer's health checks of the server.
    pub check_count: u64,
    /// Number of the load balancer's failed health checks of the server.
    pub failure_count: u64,
}

/// A group of servers whose NICs compute the same RSS hash.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct RssGroup {
    /// RSS key in the form of `ethtool -x`, or null if it was not requested.
    pub key: Option<String>,
    /// Fingerprint that identifies the key without revealing it.
    pub key_fingerprint: String,
    /// Names of the servers in the group.
    pub servers: Vec<String>,
}

/// A server of the fleet.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct Server {
    /// Name of the server.
    pub name: String,
    /// Id of the server in cookies.
    pub id: u32,
    /// Address to which load balancers send packets.
    #[schema(value_type = String)]
    pub address: IpAddr,
    /// VLAN of frames to the server, or null if they are untagged.
    #[serde(default)]
    pub vlan: Option<u16>,
    /// State of the server, which is the best of its states in its services.
    pub state: ServerState,
    /// Reason for the server's state, or empty if there is none.
    pub state_reason: String,
    /// Time since the state began (ms), or null if it began before this controller's start.
    pub state_for_ms: Option<u64>,
    /// State of the reports of the server's agent.
    pub report_state: ReportState,
    /// Smoothed load of each core, in fractions of its capacity, or empty if it is unknown.
    pub core_loads: Vec<f64>,
    /// Age of the newest report by the server's agent (ms).
    pub report_age_ms: u32,
    /// Number of TCP connections to the server's services at the agent's last count.
    pub open_connections: u32,
    /// RSS configuration of the server's NIC, or null if it is unknown.
    pub rss: Option<ServerRss>,
    /// Number of SYNs that arrived on the predicted receive queue.
    pub rss_matched_syns: u64,
    /// Number of SYNs that arrived on another receive queue than predicted.
    pub rss_mismatched_syns: u64,
    /// Warnings about the server, for the operator.
    pub warnings: Vec<String>,
    /// Weight of the server.
    pub weight: u32,
    /// Capacity of the server in cores: the configured capacity, or else its number of cores. 0 if it is unknown.
    pub capacity: f64,
    /// Generation of the newest configuration that the server's agent has confirmed, or 0 if there is none.
    pub configuration_generation: u64,
    /// Counters of the server's BPF programs, by name.
    pub counters: BTreeMap<String, u64>,
    /// UDP services whose requests `coreward dispatch` distributes among workers on the server.
    pub dispatched_services: Vec<DispatchedService>,
    /// Drain of the server, or null if it is not drained.
    #[serde(default)]
    pub drain: Option<ActiveDrain>,
    /// Connections to the server by service, at the agent's last count, or null if they are unknown.
    #[serde(default)]
    pub connection_counts: Option<ConnectionCounts>,
    /// Rack of the server's agent, or null if the agent is connected directly or there is none.
    #[serde(default)]
    pub rack: Option<String>,
    /// Names of the racks that the server's agent may use, or null if it may use any.
    #[serde(default)]
    pub permitted_racks: Option<Vec<String>>,
}

/// State of a server. The variants are sorted from the best to the worst.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "lowercase")]
pub enum ServerState {
    /// The server takes new connections.
    Active,
    /// The server takes a growing share of new connections (slow start).
    Joining,
    /// The server is not eligible for new connections, but established connections still reach it.
    Down,
    /// The server is drained and takes no new connections, but established connections still reach it.
    Draining,
    /// The server has left the service or the fleet document, but established connections still reach it. Its id stays
    /// reserved for `max_connection_lifetime`.
    Gone,
}

/// State of the reports by a server's agent.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "lowercase")]
pub enum ReportState {
    /// The newest report is valid.
    Fresh,
    /// The newest report has expired, so the server's load counts as average.
    Stale,
    /// No agent has reported yet, so the server's load counts as average.
    None,
}

impl ReportState {
    /// Returns the report state's name, as it appears in output.
    pub fn name(self) -> &'static str {
        match self {
            Self::Fresh => "fresh",
            Self::Stale => "stale",
            Self::None => "none",
        }
    }
}

impl ServerState {
    /// All server states, from the best to the worst.
    pub const ALL: [ServerState; 5] = [Self::Active, Self::Joining, Self::Down, Self::Draining, Self::Gone];

    /// Returns the state's name, as it appears in output.
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

/// RSS configuration of a server's NIC.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct ServerRss {
    /// Source of the RSS configuration: "ethtool" or "testbed emulation".
    pub source: String,
    /// RSS key in the form of `ethtool -x`, or null if it is unknown or was not requested.
    pub key: Option<String>,
    /// Fingerprint that identifies the key without revealing it, or empty if it is unknown.
    pub key_fingerprint: String,
    /// Transform of addresses and ports before the NIC hashes them: "none", "symmetric-xor" or "symmetric-or-xor".
    #[serde(default)]
    pub input_transform: String,
    /// Receive queue of each entry of the indirection table.
    pub indirection_table: Vec<u32>,
}

/// UDP service whose requests `coreward dispatch` distributes among workers. All counters are totals.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct DispatchedService {
    /// Address and port on which the service's workers listen.
    pub listen: String,
    /// Policy of the service.
    pub policy: String,
    /// Workers of the service.
    pub workers: Vec<DispatchedWorker>,
    /// Counters of the service, by name.
    pub counters: BTreeMap<String, u64>,
}

/// Worker process of a service of `coreward dispatch`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct DispatchedWorker {
    /// Slot number of the worker.
    pub worker: u32,
    /// Process id of the worker.
    pub pid: u32,
    /// Number of requests that have no response yet.
    pub outstanding: u32,
    /// Expected work of the outstanding requests (us).
    pub outstanding_work_us: f64,
    /// Number of datagrams in the worker's queue at the last poll.
    pub queued: u32,
    /// Number of requests sent to the worker.
    pub dispatched: u64,
    /// Number of requests that got a response.
    pub completed: u64,
    /// Number of requests written off because they were dropped or never answered, or because their worker died.
    pub abandoned: u64,
    /// Number of datagrams dropped because the worker's receive buffer was full.
    pub dropped: u64,
    /// Whether the worker gets requests.
    pub eligible: bool,
}

/// A load balancer of the fleet.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct LoadBalancer {
    /// Name of the load balancer.
    pub name: String,
    /// Last reported state, or null if the load balancer has not reported since it connected.
    pub state: Option<LoadBalancerState>,
    /// Age of the last reported state (ms).
    pub state_age_ms: u32,
    /// Whether the load balancer's stream to the controller is open.
    pub connected: bool,
    /// Whether the load balancer sent a message in the last two seconds.
    pub alive: bool,
    /// Number that identifies the load balancer's connection table in cookies, or null if it has no table.
    pub connection_table_owner: Option<u32>,
    /// Address at which other load balancers reach this one, or null if it is unknown.
    #[schema(value_type = Option<String>)]
    pub address: Option<IpAddr>,
}

/// State that a load balancer reports.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct LoadBalancerState {
    /// Generation of the active table, by service name.
    pub table_generations: BTreeMap<String, u64>,
    /// Names of servers whose MAC address is unknown.
    pub unresolved_servers: Vec<String>,
    /// Number of packets by outcome (enum lb_counter).
    pub counters: BTreeMap<String, u64>,
    /// XDP mode of the load balancer: "native" or "generic".
    pub xdp_mode: String,
    /// VLAN of the VIPs, or null if their frames are untagged.
    #[serde(default)]
    pub vlan: Option<u16>,
    /// Generation of the newest active configuration, or 0 if there is none yet.
    pub configuration_generation: u64,
    /// Number of packets by event (enum lb_event).
    pub event_counters: BTreeMap<String, u64>,
    /// Number of connections in the load balancer's connection table.
    pub connection_count: u64,
    /// Names of load balancers whose MAC address is unknown.
    pub unresolved_load_balancers: Vec<String>,
    /// Timestamp clocks of the servers whose connections the load balancer stamps with cookies.
    pub server_clocks: Vec<ServerClock>,
    /// Packet counts of the services whose connections the load balancer stamps with cookies.
    #[serde(default)]
    pub stamped_services: Vec<StampedService>,
    /// Faults of the load balancer's machine.
    pub warnings: Vec<String>,
}

/// One load balancer's packet counts for established connections to a service that it stamps with cookies.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct StampedService {
    /// Name of the service.
    pub service: String,
    /// Number of packets whose server the cookie decided.
    pub cookie_packets: u64,
    /// Number of packets whose server the flow table decided.
    pub flow_table_packets: u64,
}

impl StampedService {
    /// Returns the share of packets whose server the cookie decided, or `None` if there was no packet yet.
    pub fn cookie_share(&self) -> Option<f64> {
        let total_packets = self.cookie_packets.saturating_add(self.flow_table_packets);
        (total_packets > 0).then(|| self.cookie_packets as f64 / total_packets as f64)
    }
}

/// Timestamp clock of a server, as a load balancer measures it from SYN-ACKs.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct ServerClock {
    /// Name of the service.
    pub service: String,
    /// Name of the server.
    pub server: String,
    /// State of the clock: "known", "per-connection", "learning", "unseen", "no-timestamps" or "differs".
    pub clock_state: String,
    /// Number of SYN-ACKs from the server.
    pub syn_acks: u64,
    /// Number of SYN-ACKs with timestamps.
    pub syn_acks_with_timestamps: u64,
    /// Number of SYN-ACKs whose timestamp clock differed from the clock of another connection.
    pub disagreeing_syn_acks: u64,
    /// Reason why the server's connections are not stamped, and the remedy. Null if they are stamped, or if the clock
    /// is still being measured.
    pub problem: Option<String>,
}
