//! Explanations of a packet's destination.

use std::borrow::Cow;
use std::net::SocketAddr;

use coreward_model::tuple::TransportProtocol;
use serde::{Deserialize, Serialize};
use utoipa::openapi::{ObjectBuilder, RefOr, Schema, Type};
use utoipa::{IntoParams, PartialSchema, ToSchema};

/// Kind of a packet, by its relation to its connection.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "kebab-case")]
pub enum PacketKind {
    /// The packet opens the connection.
    #[default]
    NewConnection,
    /// The packet belongs to an established connection.
    Established,
    /// The packet is a reset of an established connection.
    Reset,
}

/// Request to explain which server receives a given packet to a service.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub struct Explain {
    /// VIP and port of the service.
    #[param(value_type = SocketAddressSchema, inline, example = "10.200.0.1:80")]
    pub vip: SocketAddr,
    /// Protocol of the service.
    #[serde(default = "default_protocol", with = "super::serde_text")]
    #[param(value_type = Option<ProtocolName>, inline)]
    pub protocol: TransportProtocol,
    /// Address and port of the client.
    #[param(value_type = SocketAddressSchema, inline, example = "192.0.2.7:40312")]
    pub client: SocketAddr,
    /// Relation of the packet to its connection.
    #[serde(default)]
    #[param(value_type = Option<PacketKind>, inline)]
    pub packet: PacketKind,
    /// TSecr of an established connection's packet (`ecr` in tcpdump), or absent if the packet has no timestamps.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[param(value_type = Option<u32>, maximum = 4294967295_u32)]
    pub tsecr: Option<u32>,
}

fn default_protocol() -> TransportProtocol {
    TransportProtocol::Tcp
}

/// Schema of a socket address: an IPv4 address or a bracketed IPv6 address, with a port from 1 to 65535.
pub struct SocketAddressSchema;

impl PartialSchema for SocketAddressSchema {
    fn schema() -> RefOr<Schema> {
        let octet_pattern = "(25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])";
        let ipv4 = format!("({octet_pattern}\\.){{3}}{octet_pattern}");
        let port = "([1-9][0-9]{0,3}|[1-5][0-9]{4}|6[0-4][0-9]{3}|65[0-4][0-9]{2}|655[0-2][0-9]|6553[0-5])";
        let pattern = format!("^({ipv4}|\\[({})\\]):{port}$", ipv6_address_pattern());
        ObjectBuilder::new().schema_type(Type::String).pattern(Some(pattern)).into()
    }
}

/// Returns a regular expression for hexadecimal IPv6 addresses with eight groups, or fewer groups with "::".
fn ipv6_address_pattern() -> String {
    let group = "[0-9A-Fa-f]{1,4}";
    let full_or_compressed_at_end =
        [format!("({group}:){{7}}{group}"), format!("({group}:){{1,7}}:"), format!(":(:{group}){{1,7}}")];
    let compressed_in_the_middle =
        (1..=6).map(|groups_after| format!("({group}:){{1,{}}}(:{group}){{1,{groups_after}}}", 7 - groups_after));
    full_or_compressed_at_end.into_iter().chain(compressed_in_the_middle).collect::<Vec<_>>().join("|")
}

impl ToSchema for SocketAddressSchema {
    fn name() -> Cow<'static, str> {
        Cow::Borrowed("SocketAddress")
    }
}

/// Schema of a protocol name, which lists the names of all [`TransportProtocol`]s.
pub struct ProtocolName;

impl PartialSchema for ProtocolName {
    fn schema() -> RefOr<Schema> {
        let names = TransportProtocol::ALL.map(TransportProtocol::name);
        ObjectBuilder::new().schema_type(Type::String).enum_values(Some(names)).into()
    }
}

impl ToSchema for ProtocolName {
    fn name() -> Cow<'static, str> {
        Cow::Borrowed("Protocol")
    }
}

/// Explanation of a packet's destination.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct Explanation {
    /// Name of the service.
    pub service: String,
    /// Policy of the service.
    pub policy: String,
    /// Generation of the service's newest table.
    pub table_generation: u64,
    /// Servers of the service, with the values by which the policy chooses one.
    pub servers: Vec<ExplainedServer>,
    /// Name of the chosen server. Null if no server is eligible, or if a load balancer decides by its own state (see
    /// `reason`).
    pub chosen_server: Option<String>,
    /// Reason for the choice, in one sentence.
    pub reason: String,
    /// Method of forwarding packets to the servers: `l2`, `ipip` or `gue`.
    pub forwarding: String,
    /// Source port of the outer header that `gue` adds, or null if the packet gets no such header.
    pub outer_source_port: Option<u16>,
    /// Share of the service's packets on established connections that load balancers forward by cookie. Null if the
    /// service does not have `timestamps = "lb"`, or before the first packet.
    #[serde(default)]
    pub cookie_share: Option<f64>,
}

/// Server of a service, with the values by which the service's policy chooses one.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct ExplainedServer {
    /// Name of the server.
    pub name: String,
    /// Id of the server.
    pub id: u32,
    /// VLAN of frames to the server, or null if they are untagged.
    #[serde(default)]
    pub vlan: Option<u16>,
    /// Toeplitz hash of the packet under the server's RSS key, or null if the server's RSS configuration is unknown.
    pub hash: Option<u32>,
    /// Hash bucket of the packet for this server, or null if `hash` is null.
    pub bucket: Option<u32>,
    /// Receive queue of the core that the server's NIC selects, or null if it is unknown.
    pub core: Option<u32>,
    /// Current load of the core, in fractions of its capacity, or null if it is unknown.
    pub core_load: Option<f64>,
    /// Whether the server takes new connections.
    pub eligible: bool,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn socket_address_schema_accepts_exactly_the_parsable_addresses() {
        let schema = serde_json::to_value(SocketAddressSchema::schema()).unwrap();
        let schema = jsonschema::validator_for(&schema).unwrap();
        for text in [
            "10.200.0.1:80",
            "[2001:db8::1]:80",
            "[::1]:80",
            "[2001:db8::]:65535",
            "[1:2:3:4:5:6:7:8]:1",
            "[1:2:3:4:5:6::8]:1",
            "[1::3:4:5:6:7:8]:1",
            "2001:db8::1:80",
            "[1:2:3:4:5:6:7::8]:1",
            "[1:2:3:4:5:6:7:8:9]:1",
            "[1::2::3]:80",
            "[2001:db8::1]:65536",
            "[10.200.0.1]:80",
        ] {
            let is_accepted = schema.is_valid(&serde_json::Value::from(text));
            assert_eq!(is_accepted, text.parse::<SocketAddr>().is_ok(), "{text}");
        }
    }
}
