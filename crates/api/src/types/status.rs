//! Services, servers, load balancers, as the controller sees them.

use std::collections::BTreeMap;
use std::fmt;
use std::net::IpAddr;

use coreward_model::ServiceAddress;
use serde::{Deserialize, Serialize};
use utoipa::{IntoParams, ToSchema};

use super::{CountedConnections, Drained, Keys, serde_text};

/// How much is to be seen.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub struct StatusQuery {
    /// With whole RSS keys, for operators only: who knows one can aim at a core. Otherwise only their fingerprints.
    #[serde(default)]
    #[param(value_type = Option<bool>)]
    pub rss_keys: bool,
}

/// Everything there is to see.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct Status {
    /// Grows with every change of what parts of the fleet must know.
    pub configuration_generation: u64,
    /// Time between two reports of an agent, and between two tables.
    pub report_interval_ms: u32,
    /// Reports taken.
    pub accepted_reports: u64,
    /// Reports refused, by reason.
    pub refused_reports: BTreeMap<String, u64>,
    /// In the order of the fleet's document.
    pub services: Vec<Service>,
    /// Those in the fleet's document, and those that left but may still have connections.
    pub servers: Vec<Server>,
    /// Those that are connected or may come back.
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
    /// How long ago it was last heard of.
    pub age_ms: u32,
    /// Whose agents speak through it.
    pub servers: Vec<String>,
    /// For how many servers the fleet's document lets it speak.
    #[serde(default)]
    pub may_speak_for: u32,
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
    /// Those in the fleet's document, and those that left but may still have connections.
    pub servers: Vec<Server>,
}

/// All load balancers.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct LoadBalancers {
    /// Those that are connected or may come back.
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
    /// Where new connections go.
    pub policy: String,
    /// How packets find the server of their connection.
    pub consistency: String,
    /// Who stamps cookies: "server", "lb" or "off".
    pub timestamps: String,
    /// Number of its buckets.
    pub bucket_count: u32,
    /// Of the newest table; 0: none yet.
    pub table_generation: u64,
    /// How old that is.
    pub table_age_ms: u32,
    /// Names of its pool, and of those that left it.
    pub servers: Vec<String>,
    /// The same one by one.
    pub members: Vec<ServiceMember>,
    /// How they are checked: "tcp", "http", "https" or "agent"; null: not at all.
    pub check: Option<String>,
    /// What becomes of new connections when all are down: "fail-open" or "drop".
    pub when_all_down: String,
    /// Whether all are down, and get new connections all the same.
    pub failing_open: bool,
    /// Servers whose NICs hash alike.
    pub rss_groups: Vec<RssGroup>,
    /// What the operator should know, in words.
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
    /// Where it stands in this service.
    pub state: ServerState,
    /// Why, in words; empty: nothing is to be said.
    pub reason: String,
    /// How long it has stood there; null: since before this controller was started.
    pub state_for_ms: Option<u64>,
    /// What the checks of each load balancer say.
    pub checks: Vec<CheckedBy>,
}

/// What one load balancer's checks say of a server.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct CheckedBy {
    /// Whose.
    pub load_balancer: String,
    /// Whether it finds it up; null: not enough checks so far.
    pub up: Option<bool>,
    /// How long it has been so.
    pub since_ms: u64,
    /// Why the newest check failed; null: it did not.
    pub error: Option<String>,
    /// How long the newest answer took; 0: there was none.
    pub latency_us: u32,
    /// Since it checks this server.
    pub checks: u64,
    /// Those of them that failed.
    pub failures: u64,
}

/// Servers whose NICs hash alike.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct RssGroup {
    /// As `ethtool -x` prints it; null: not asked for.
    pub key: Option<String>,
    /// Tells keys apart, and tells nothing of them.
    pub key_fingerprint: String,
    /// Their names.
    pub servers: Vec<String>,
}

/// A server.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct Server {
    /// Its name.
    pub name: String,
    /// What cookies carry.
    pub id: u32,
    /// Where load balancers reach it.
    #[schema(value_type = String)]
    pub address: IpAddr,
    /// Where it stands: the best of where it stands in its services.
    pub state: ServerState,
    /// Why, in words; empty: nothing is to be said.
    pub state_reason: String,
    /// How long it has stood there; null: since before this controller was started.
    pub state_for_ms: Option<u64>,
    /// What its agent says.
    pub reports: Reports,
    /// Smoothed load of each core, in fractions of its capacity; empty: not known.
    pub core_load: Vec<f64>,
    /// Of its newest report.
    pub report_age_ms: u32,
    /// TCP connections of its services, as its agent last counted them.
    pub open_connections: u32,
    /// What its NIC says; null: not known.
    pub rss: Option<ServerRss>,
    /// SYNs that arrived on the predicted receive queue.
    pub rss_matched: u64,
    /// And on another one.
    pub rss_mismatched: u64,
    /// What the operator should know, in words.
    pub warnings: Vec<String>,
    /// Its part of new connections.
    pub weight: u32,
    /// What the configuration says, or cores that report; 0: not known.
    pub capacity: f64,
    /// Of the newest configuration that its agent has confirmed; 0: none.
    pub configuration_generation: u64,
    /// Of its programs, by name.
    pub counters: BTreeMap<String, u64>,
    /// UDP services whose requests are dispatched there.
    pub dispatch: Vec<DispatchedService>,
    /// Who says that it takes no new connections; null: nobody.
    #[serde(default)]
    pub drained: Option<Drained>,
    /// Its connections by service, as its agent last counted them; null: not known.
    #[serde(default)]
    pub connections: Option<CountedConnections>,
    /// The rack through which its agent speaks; null: it speaks by itself, or there is none.
    #[serde(default)]
    pub rack: Option<String>,
    /// The racks through which its agent may speak; null: any.
    #[serde(default)]
    pub racks: Option<Vec<String>>,
}

/// Where a server stands in its life, the best first.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "lowercase")]
pub enum ServerState {
    /// It takes new connections.
    Active,
    /// It takes new connections, and more and more of them (slow start).
    Joining,
    /// It is not fit for new connections; established ones still reach it.
    Down,
    /// It takes no new connections because somebody says so; established ones still reach it.
    Draining,
    /// It is in the service, or in the fleet's document, no more; established connections still reach it, and its id stays
    /// reserved, for `max_connection_lifetime`.
    Gone,
}

/// What a server's agent says.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "lowercase")]
pub enum Reports {
    /// Its reports come.
    Fresh,
    /// Its newest report is too old: it counts as average.
    Stale,
    /// It has no agent, or that has not come yet: it counts as average.
    None,
}

impl Reports {
    /// As it is shown.
    pub fn name(self) -> &'static str {
        match self {
            Self::Fresh => "fresh",
            Self::Stale => "stale",
            Self::None => "none",
        }
    }
}

impl ServerState {
    /// All of them.
    pub const ALL: [ServerState; 5] = [Self::Active, Self::Joining, Self::Down, Self::Draining, Self::Gone];

    /// As it is shown.
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
    /// As `ethtool -x` prints it; null: not known, or not asked for.
    pub key: Option<String>,
    /// Tells keys apart, and tells nothing of them; empty: not known.
    pub key_fingerprint: String,
    /// What the NIC does to addresses and ports before it hashes them: "none", "symmetric-xor" or "symmetric-or-xor".
    #[serde(default)]
    pub input_transform: String,
    /// Receive queue per entry.
    pub indirection_table: Vec<u32>,
}

/// What `coreward dispatch --status` says of a service; counts are absolute.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct DispatchedService {
    /// Address and port.
    pub listen: String,
    /// Who gets a request.
    pub policy: String,
    /// Its workers.
    pub workers: Vec<DispatchedWorker>,
    /// Of the whole service, by name.
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
    /// The work expected of them (us).
    pub outstanding_work_us: f64,
    /// Datagrams that waited in its queue at the last look.
    pub queued: u32,
    /// Requests that it got.
    pub dispatched: u64,
    /// Of these, answered.
    pub completed: u64,
    /// Of these, given up: without a response, dropped, or their worker died.
    pub repaired: u64,
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
    /// What it last said; null: nothing since it connected.
    pub state: Option<LoadBalancerState>,
    /// How long ago.
    pub state_age_ms: u32,
    /// Whether its stream is open.
    pub connected: bool,
    /// Whether it was heard of in the last two seconds.
    pub alive: bool,
    /// What cookies call its connection table; null: it has none.
    pub owner: Option<u32>,
    /// Where other load balancers reach it; null: nowhere.
    #[schema(value_type = Option<String>)]
    pub address: Option<IpAddr>,
}

/// What a load balancer says of itself.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct LoadBalancerState {
    /// Generation of the table in force, per service.
    pub table_generations: BTreeMap<String, u64>,
    /// Servers whose MAC address it does not know.
    pub unresolved_servers: Vec<String>,
    /// What became of packets (enum lb_counter).
    pub counters: BTreeMap<String, u64>,
    /// "native" or "generic".
    pub xdp_mode: String,
    /// Of the newest configuration that is in force; 0: none yet.
    pub configuration_generation: u64,
    /// What happened to packets beside that (enum lb_event).
    pub events: BTreeMap<String, u64>,
    /// Connections in its connection table.
    pub connections: u64,
    /// Load balancers whose MAC address it does not know.
    pub unresolved_load_balancers: Vec<String>,
    /// Of servers whose answers it stamps.
    pub server_clocks: Vec<ServerClock>,
    /// What is wrong with its machine, in words.
    pub warnings: Vec<String>,
}

/// What a load balancer that stamps has seen of a server's clock, since it knows the server's address.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct ServerClock {
    /// Name of the service.
    pub service: String,
    /// Name of the server.
    pub server: String,
    /// "known", "learning", "unseen", "no-timestamps" or "differs".
    pub state: String,
    /// SYN-ACKs seen.
    pub syn_acks: u64,
    /// Of these, with timestamps.
    pub with_timestamps: u64,
    /// Of these, those that did not show the clock of the one before.
    pub disagreed: u64,
    /// Why its connections are not stamped, and what was expected; null: they are, or it is too early to tell.
    pub problem: Option<String>,
}
