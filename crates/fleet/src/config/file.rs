//! The files: their keys, and what one value must be.

use std::net::{IpAddr, Ipv4Addr, SocketAddr};

use coreward_config::toml::de::DeValue;
use coreward_config::{
    Field, FromToml, HOUR, MILLISECOND, Name, Period, Reader, SECOND, Spanned, config_struct, parsed, serde_json,
    string_enum,
};
use coreward_model::ServerId;
use coreward_model::consistency::{Consistency, Timestamps};
use coreward_model::forwarding::Forwarding;
use coreward_model::health::WhenAllDown;
use coreward_model::load::Alpha;
use coreward_model::placement::{BucketCount, DEFAULT_TABLE_LIFETIME};
use coreward_model::policy::{self, Capacity, Weight};
use coreward_model::tuple::{Protocol, ServiceAddress};
use coreward_model::vlan::Vlan;
use serde_json::{Value, json};

use super::address::{is_host_ipv4, server_address_error, vip_error};
use super::health::Health;
use super::{DEFAULT_MAX_CONNECTION_LIFETIME, ServerState, TableTiming};

const IN_THE_CONTROLLERS_FILE: &str = "it in the controller's own file";

config_struct! {
    /// The fleet's.
    pub struct FleetFile {
        /// Time between two reports of an agent.
        pub report_interval: Option<Period<{ 10 * MILLISECOND }, SECOND>>,
        /// When placement tables are made: "on-change", as soon as a report changes what they are made of, or
        /// "interval", once per report_interval.
        pub table_updates: TableTiming = TableTiming::OnChange,
        /// Time for which load balancers use a table that depends on loads while no controller leads; then they place
        /// new connections by their own counts.
        pub table_lifetime: Period<SECOND, HOUR> = Period(DEFAULT_TABLE_LIFETIME),
        /// Weight of the newest report in a core's load.
        pub load_ewma_alpha: Alpha = Alpha::PUBLISHED,
        /// Buckets of a service that names none of its own.
        pub buckets: BucketCount = BucketCount::PUBLISHED,
        /// How long a cookie may live.
        pub max_connection_lifetime: Period<SECOND, { 8760 * HOUR }> = Period(DEFAULT_MAX_CONNECTION_LIFETIME),
        /// Interval of key rotations, at least max_connection_lifetime.
        pub key_rotation: Option<Spanned<Period<HOUR, { 8760 * HOUR }>>>,
        /// The racks there are, by name: no other one may connect. Without it any may.
        pub racks: Option<Vec<Spanned<Name>>>,
        /// The load balancers there are, by name: no other one may connect. Without it any may.
        pub load_balancers: Option<Vec<Spanned<Name>>>,
        /// One server each.
        pub servers as "server": Vec<Spanned<Server>>,
        /// One service each.
        pub services as "service": Vec<Spanned<Service>>,
    }
    elsewhere {
        "rss_key" => "`rss_key_file = \"FILE\"` in the controller's own file, with the key in FILE",
        "rss_key_file" => IN_THE_CONTROLLERS_FILE,
        "listen" => IN_THE_CONTROLLERS_FILE,
        "store" => IN_THE_CONTROLLERS_FILE,
    }
}

config_struct! {
    /// One `[[server]]`.
    pub struct Server {
        /// Unique name, as in the agent's file.
        pub name: Field<Name>,
        /// Address that load balancers reach: in their own network, or, if it is IPv4, behind routers; used once.
        pub address: Field<ServerAddress>,
        /// VLAN of load balancers' frames to it; without it they are untagged.
        pub vlan: Option<Vlan>,
        /// Id in cookies; drawn at random by default.
        pub id: Option<Spanned<ServerId>>,
        /// "draining": takes no new connections, established ones still reach it.
        pub state: ServerState = ServerState::Active,
        /// Its part of new connections next to the others'; 0: none, as when draining.
        pub weight: Weight = Weight::ONE,
        /// How much it can do, in cores of the usual speed; without it its cores.
        pub capacity: Option<Capacity>,
        /// Names of the racks through which its agent may speak; without it the fleet's, [] none: only by itself.
        pub racks: Option<Vec<Spanned<Name>>>,
    }
}

config_struct! {
    /// One `[[service]]`.
    pub struct Service {
        /// Used once.
        pub name: Field<Name>,
        /// IPv4 or IPv6 address and port that clients connect to; used once, and no server's own address.
        pub vip: Field<Vip>,
        /// Protocol of the service.
        pub protocol: Field<Protocol> = Field { value: Some(Protocol::Tcp), span: 0..0 },
        /// TCP: how packets find the server of their connection.
        pub consistency: Option<Spanned<Consistency>>,
        /// Party that stamps the cookie into TCP timestamps.
        pub timestamps: Option<Spanned<Timestamps>>,
        /// How packets reach its servers: by MAC address, or with an outer header across routers.
        pub forwarding: Option<Spanned<Forwarding>>,
        /// UDP: what one decision is for.
        pub udp: Option<Spanned<UdpMode>>,
        /// Address of the load balancer that had the service before: what is not known here is sent on to it.
        pub migrate_from: Option<Spanned<BalancerAddress>>,
        /// Address of the load balancer that gets new connections; older ones continue here.
        pub migrate_to: Option<Spanned<BalancerAddress>>,
        /// Placement policy for new connections.
        pub policy: Field<PolicyName> = Field { value: Some(PolicyName(policy::DEFAULT)), span: 0..0 },
        /// So long the part of a server that joins grows, linearly.
        pub slow_start: Option<Period<0, HOUR>>,
        /// A power of two; without it the fleet's.
        pub buckets: Option<BucketCount>,
        /// Names of its servers; without it all.
        pub servers: Option<Vec<Spanned<String>>>,
        /// Whether and how its servers are checked; without it they are not.
        pub health: Option<Spanned<Health>>,
        /// Treatment of new connections when all servers are down.
        pub when_all_down: WhenAllDown = WhenAllDown::default(),
    }
}

string_enum!(
    ServerState,
    "state",
    [("active", ServerState::Active), ("draining", ServerState::Draining)]
        .map(|(name, state)| (name.to_owned(), state))
);

string_enum!(
    TableTiming,
    "tables",
    [("on-change", TableTiming::OnChange), ("interval", TableTiming::Interval)]
        .map(|(name, timing)| (name.to_owned(), timing))
);

/// Unit of decisions of a UDP service.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum UdpMode {
    /// All datagrams of one client's address and port.
    Flow,
    /// One datagram.
    Packet,
}

string_enum!(
    UdpMode,
    "udp",
    [("flow", UdpMode::Flow), ("packet", UdpMode::Packet)].map(|(name, mode)| (name.to_owned(), mode))
);

/// The name of a policy that exists.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PolicyName(pub &'static str);

string_enum!(PolicyName, "policy", policy::names().into_iter().map(|name| (name.to_owned(), PolicyName(name))));

/// VIP and port of a service.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Vip(pub SocketAddr);

impl Vip {
    /// With what it speaks.
    pub fn with(self, protocol: Protocol) -> ServiceAddress {
        ServiceAddress { socket: self.0, protocol }
    }
}

impl FromToml for Vip {
    fn read(value: &Spanned<DeValue<'_>>, reader: &mut Reader<'_>) -> Option<Self> {
        parsed(value, reader, |written| {
            let vip = written.parse::<SocketAddr>().map_err(|_| "");
            let usable = vip.and_then(|vip| vip_error(vip).map_or(Ok(vip), Err));
            usable.map(Vip).map_err(|reason| format!("VIP {written:?}{reason}: expected {}", Self::expected()))
        })
    }

    fn expected() -> String {
        "an address that one host can have and a port from 1 on, as \"10.200.0.1:80\" or \"[2001:db8::1]:80\""
            .to_owned()
    }

    fn schema() -> Value {
        json!({ "type": "string", "pattern": r"^([0-9]+(\.[0-9]+){3}|\[[0-9A-Fa-f:.]+\]):[0-9]+$" })
    }
}

/// Address of a server.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ServerAddress(pub IpAddr);

impl FromToml for ServerAddress {
    fn read(value: &Spanned<DeValue<'_>>, reader: &mut Reader<'_>) -> Option<Self> {
        parsed(value, reader, |written| {
            let address = written.parse::<IpAddr>().map_err(|_| "");
            let usable = address.and_then(|address| server_address_error(address).map_or(Ok(address), Err));
            let wrong = |reason| format!("server address {written:?}{reason}: expected {}", Self::expected());
            usable.map(ServerAddress).map_err(wrong)
        })
    }

    fn expected() -> String {
        "an address that one host can have, as \"10.2.0.11\" or \"2001:db8::11\"".to_owned()
    }

    fn schema() -> Value {
        json!({ "type": "string", "pattern": r"^([0-9]+(\.[0-9]+){3}|[0-9A-Fa-f:.]*:[0-9A-Fa-f:.]*)$" })
    }
}

/// Address of another load balancer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct BalancerAddress(pub IpAddr);

impl FromToml for BalancerAddress {
    fn read(value: &Spanned<DeValue<'_>>, reader: &mut Reader<'_>) -> Option<Self> {
        parsed(value, reader, |written| {
            let address = written.parse::<Ipv4Addr>().ok().filter(|address| is_host_ipv4(*address));
            let expected = || format!("load balancer's address {written:?}: expected {}", Self::expected());
            address.map(|v4| Self(v4.into())).ok_or_else(expected)
        })
    }

    fn expected() -> String {
        "an IPv4 address that one host can have, as \"10.2.0.11\"".to_owned()
    }

    fn schema() -> Value {
        Ipv4Addr::schema()
    }
}
