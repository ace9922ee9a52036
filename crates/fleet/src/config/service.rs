//! A service's keys, and the valid combinations of `protocol`, `consistency`, `timestamps`, `udp` and `policy`.

use coreward_config::{
    BoundedDuration, HOUR_NS, LocatedValue, PrintableName, Spanned, TomlReader, config_struct, string_enum,
};
use coreward_model::consistency::{ConsistencyMode, CookieStamper, ServiceSettings};
use coreward_model::forwarding::ForwardingMode;
use coreward_model::health::AllServersDownTreatment;
use coreward_model::placement::BucketCount;
use coreward_model::policy;
use coreward_model::tuple::TransportProtocol;

use super::address::{MigrationBalancerAddress, Vip};
use super::health::HealthCheckTable;

config_struct! {
    /// Keys of a `[[service]]` table in the fleet document.
    pub struct FleetServiceTable {
        /// Unique name of the service.
        pub name: LocatedValue<PrintableName>,
        /// Address (IPv4 or IPv6) and port to which clients connect; unique, and no server's own address.
        pub vip: LocatedValue<Vip>,
        /// Protocol of the service.
        pub protocol: LocatedValue<TransportProtocol> =
            LocatedValue { value: Some(TransportProtocol::Tcp), span: 0..0 },
        /// Method by which the packets of a TCP connection find its server.
        pub consistency: Option<Spanned<ConsistencyMode>>,
        /// Writer of the cookies in TCP timestamps: the server, the load balancer, or none.
        pub timestamps: Option<Spanned<CookieStamper>>,
        /// Method of forwarding packets to servers: by MAC address, or with an outer header across routers.
        pub forwarding: Option<Spanned<ForwardingMode>>,
        /// Unit of traffic for which a UDP service chooses a server: flow or packet.
        pub udp: Option<Spanned<UdpPlacementUnit>>,
        /// Address of the load balancer that had the service before, and gets packets of unknown connections.
        pub migrate_from: Option<Spanned<MigrationBalancerAddress>>,
        /// Address of the load balancer that gets new connections; established connections continue here.
        pub migrate_to: Option<Spanned<MigrationBalancerAddress>>,
        /// Placement policy for new connections.
        pub policy: LocatedValue<PlacementPolicyName> =
            LocatedValue { value: Some(PlacementPolicyName(policy::DEFAULT_POLICY_NAME)), span: 0..0 },
        /// Time in which a joining server's share of new connections grows linearly to its full value.
        pub slow_start: Option<BoundedDuration<0, HOUR_NS>>,
        /// Number of the service's hash buckets, a power of two; by default the fleet's `buckets`.
        pub buckets: Option<BucketCount>,
        /// Names of the service's servers; by default all servers.
        pub servers: Option<Vec<Spanned<String>>>,
        /// Health check of the service's servers; by default none.
        pub health: Option<Spanned<HealthCheckTable>>,
        /// Treatment of new connections when all servers are down.
        pub when_all_down: AllServersDownTreatment = AllServersDownTreatment::default(),
    }
}

/// Unit of traffic for which a UDP service chooses a server.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum UdpPlacementUnit {
    /// All datagrams from the same client address and port go to one server.
    Flow,
    /// A server is chosen for each datagram independently.
    Packet,
}

string_enum!(
    UdpPlacementUnit,
    "udp",
    [("flow", UdpPlacementUnit::Flow), ("packet", UdpPlacementUnit::Packet)]
        .map(|(name, mode)| (name.to_owned(), mode))
);

/// Name of a placement policy that exists.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PlacementPolicyName(pub &'static str);

string_enum!(
    PlacementPolicyName,
    "policy",
    policy::policy_names().into_iter().map(|name| (name.to_owned(), PlacementPolicyName(name)))
);

/// Returns the consistency, timestamps and forwarding of the service. Stores mistakes in the reader.
pub fn parse_service_settings(
    service: &FleetServiceTable,
    protocol: TransportProtocol,
    reader: &mut TomlReader<'_>,
) -> ServiceSettings {
    let settings_without_forwarding = match protocol {
        TransportProtocol::Tcp => parse_tcp_settings(service, reader),
        TransportProtocol::Udp => parse_udp_settings(service, reader),
    };
    let Some(forwarding_entry) = &service.forwarding else { return settings_without_forwarding };
    let forwarding = *forwarding_entry.get_ref();
    if forwarding.encapsulates() && settings_without_forwarding.timestamps == CookieStamper::LoadBalancer {
        let message = format!(
            "forwarding {:?} with timestamps by \"lb\", whose servers' answers must pass the load balancer: expected \
             \"l2\", or timestamps by \"server\" or \"off\"",
            forwarding.name()
        );
        reader.report_mistake(forwarding_entry.span(), message);
    }
    ServiceSettings { forwarding, ..settings_without_forwarding }
}

fn parse_udp_settings(service: &FleetServiceTable, reader: &mut TomlReader<'_>) -> ServiceSettings {
    let tcp_only_keys = [
        ("consistency", service.consistency.as_ref().map(Spanned::span)),
        ("timestamps", service.timestamps.as_ref().map(Spanned::span)),
    ];
    for (key, span) in tcp_only_keys {
        let Some(span) = span else { continue };
        let message = format!(
            "a UDP service has no `{key}`, as datagrams carry no cookie: expected `udp = \"flow\"` or `udp = \
             \"packet\"`"
        );
        reader.report_mistake(span, message);
    }
    let default_settings = ServiceSettings::default_for_protocol(TransportProtocol::Udp);
    match service.udp.as_ref().map(Spanned::get_ref) {
        None => default_settings,
        Some(UdpPlacementUnit::Flow) => ServiceSettings { consistency: ConsistencyMode::HashTable, ..default_settings },
        Some(UdpPlacementUnit::Packet) => ServiceSettings { consistency: ConsistencyMode::None, ..default_settings },
    }
}

fn parse_tcp_settings(service: &FleetServiceTable, reader: &mut TomlReader<'_>) -> ServiceSettings {
    if let Some(udp) = &service.udp {
        reader.report_mistake(udp.span(), "a TCP service has no `udp`: expected it with `protocol = \"udp\"` only");
    }
    let default_settings = ServiceSettings::default_for_protocol(TransportProtocol::Tcp);
    let consistency =
        service.consistency.as_ref().map_or(default_settings.consistency, |consistency| *consistency.get_ref());
    let uses_cookies = matches!(consistency, ConsistencyMode::Stateless | ConsistencyMode::Stateful);
    let timestamps = match &service.timestamps {
        None if uses_cookies => default_settings.timestamps,
        None => CookieStamper::Off,
        Some(timestamps) => {
            let requested_timestamps = *timestamps.get_ref();
            if let Some(message) = describe_timestamps_error(consistency, uses_cookies, requested_timestamps) {
                reader.report_mistake(timestamps.span(), message);
            }
            requested_timestamps
        }
    };
    if let (ConsistencyMode::None, Some(consistency_entry)) = (consistency, &service.consistency) {
        reject_unstable_policy(consistency_entry, service, reader);
    }
    ServiceSettings { consistency, timestamps, ..default_settings }
}

/// Returns the reason why the service cannot have the requested timestamps, or `None` if it can.
fn describe_timestamps_error(
    consistency: ConsistencyMode,
    uses_cookies: bool,
    requested: CookieStamper,
) -> Option<String> {
    let consistency_name = consistency.name();
    if !uses_cookies && requested != CookieStamper::Off {
        return Some(format!(
            "timestamps by {:?} with consistency {consistency_name:?}, which uses no cookie: expected \"off\"",
            requested.name()
        ));
    }
    // Only the server learns the connection's table index, from the SYN. In the cookie of LB-side stamping, 20 bits of
    // time leave no room for the index.
    (consistency == ConsistencyMode::Stateful && requested != CookieStamper::Server).then(|| {
        format!(
            "timestamps by {:?} with consistency {consistency_name:?}: expected \"server\", who stamps the index",
            requested.name()
        )
    })
}

/// Rejects policies that depend on loads. With consistency "none", each connection moves whenever its bucket moves.
fn reject_unstable_policy<T>(consistency: &Spanned<T>, service: &FleetServiceTable, reader: &mut TomlReader<'_>) {
    let Some(PlacementPolicyName(chosen)) = service.policy.value else { return };
    let stable_policies = policy::load_independent_policy_names();
    if stable_policies.contains(&chosen) {
        return;
    }
    let message = format!(
        "consistency \"none\" with policy {chosen:?}, which would send a connection's packets to several servers: \
         expected a policy whose choice depends on the pool alone: {}",
        stable_policies.join(", ")
    );
    reader.report_mistake(consistency.span(), message);
}
