//! Addresses that a VIP, a server or another load balancer can have.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};

use coreward_config::toml::de::DeValue;
use coreward_config::{FromToml, Spanned, TomlReader, parse_toml_string, serde_json};
use coreward_model::tuple::{ServiceAddress, TransportProtocol};
use serde_json::{Value, json};

/// Returns the reason why no service can have this VIP and port, or `None` if one can. The reason continues a sentence
/// that begins with the address.
pub fn vip_error(vip: SocketAddr) -> Option<&'static str> {
    if vip.port() == 0 {
        return Some(" has port 0");
    }
    match (vip.ip(), vip) {
        (IpAddr::V4(address), _) => (!is_unicast_ipv4(address)).then_some(" is no address of one host"),
        (IpAddr::V6(_), SocketAddr::V6(scoped)) if scoped.scope_id() != 0 => Some(" has a zone"),
        (IpAddr::V6(address), _) => ipv6_address_error(address),
    }
}

/// Returns the reason why no server can have this address, or `None` if one can. The reason continues a sentence that
/// begins with the address.
pub fn server_address_error(address: IpAddr) -> Option<&'static str> {
    match address {
        IpAddr::V4(address) => (!is_unicast_ipv4(address)).then_some(" is no address of one host"),
        IpAddr::V6(address) => ipv6_address_error(address),
    }
}

fn ipv6_address_error(address: Ipv6Addr) -> Option<&'static str> {
    let rejected_kinds = [
        (address.is_unspecified(), " is the unspecified address"),
        (address.is_loopback(), " is the loopback address"),
        (address.is_multicast(), " is a multicast address"),
        // Routers do not forward packets to link-local addresses.
        (address.is_unicast_link_local(), " is a link-local address"),
        // No packet carries an IPv4-mapped address, because sockets use it for IPv4.
        (address.to_ipv4_mapped().is_some(), " is an IPv4-mapped address"),
    ];
    rejected_kinds.into_iter().find_map(|(is_rejected, reason)| is_rejected.then_some(reason))
}

pub fn is_unicast_ipv4(address: Ipv4Addr) -> bool {
    !(address.is_unspecified() || address.is_broadcast() || address.is_multicast())
}

/// VIP and port of a service.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Vip(pub SocketAddr);

impl Vip {
    /// Returns the address of the service with this VIP, this port and the given transport protocol.
    pub fn with_protocol(self, protocol: TransportProtocol) -> ServiceAddress {
        ServiceAddress { vip_and_port: self.0, protocol }
    }
}

impl FromToml for Vip {
    fn read(value: &Spanned<DeValue<'_>>, reader: &mut TomlReader<'_>) -> Option<Self> {
        parse_toml_string(value, reader, |text| {
            let parsed_vip = text.parse::<SocketAddr>().map_err(|_| "");
            let valid_vip = parsed_vip.and_then(|vip| vip_error(vip).map_or(Ok(vip), Err));
            valid_vip
                .map(Vip)
                .map_err(|reason| format!("VIP {text:?}{reason}: expected {}", Self::describe_valid_values()))
        })
    }

    fn describe_valid_values() -> String {
        "an address that one host can have and a port from 1 on, as \"10.200.0.1:80\" or \"[2001:db8::1]:80\""
            .to_owned()
    }

    fn schema() -> Value {
        json!({ "type": "string", "pattern": r"^([0-9]+(\.[0-9]+){3}|\[[0-9A-Fa-f:.]+\]):[0-9]+$" })
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ServerAddress(pub IpAddr);

impl FromToml for ServerAddress {
    fn read(value: &Spanned<DeValue<'_>>, reader: &mut TomlReader<'_>) -> Option<Self> {
        read_host_address("server address", value, reader).map(Self)
    }

    fn describe_valid_values() -> String {
        EXPECTED_HOST_ADDRESS.to_owned()
    }

    fn schema() -> Value {
        host_address_schema()
    }
}

/// Address of another load balancer, to or from which a service is migrated.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MigrationBalancerAddress(pub IpAddr);

impl FromToml for MigrationBalancerAddress {
    fn read(value: &Spanned<DeValue<'_>>, reader: &mut TomlReader<'_>) -> Option<Self> {
        read_host_address("load balancer's address", value, reader).map(Self)
    }

    fn describe_valid_values() -> String {
        EXPECTED_HOST_ADDRESS.to_owned()
    }

    fn schema() -> Value {
        host_address_schema()
    }
}

const EXPECTED_HOST_ADDRESS: &str = "an address that one host can have, as \"10.2.0.11\" or \"2001:db8::11\"";

/// Reads the address of a host. Diagnostics use the name `address_name` for it.
fn read_host_address(address_name: &str, value: &Spanned<DeValue<'_>>, reader: &mut TomlReader<'_>) -> Option<IpAddr> {
    parse_toml_string(value, reader, |text| {
        let parsed_address = text.parse::<IpAddr>().map_err(|_| "");
        let valid_address = parsed_address.and_then(|address| server_address_error(address).map_or(Ok(address), Err));
        valid_address.map_err(|reason| format!("{address_name} {text:?}{reason}: expected {EXPECTED_HOST_ADDRESS}"))
    })
}

fn host_address_schema() -> Value {
    json!({ "type": "string", "pattern": r"^([0-9]+(\.[0-9]+){3}|[0-9A-Fa-f:.]*:[0-9A-Fa-f:.]*)$" })
}
