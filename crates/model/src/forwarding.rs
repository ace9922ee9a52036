//! Methods by which a service's packets reach its servers.

use std::net::IpAddr;

use coreward_intf as intf;

use crate::connection_table::fold_client_address;
use crate::cookie::CookieKey;

/// Method by which a service's packets are forwarded to its servers (`enum forwarding` of `bpf/include/intf.h`).
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum ForwardingMode {
    /// Packets are sent to the server's MAC address, so the server must be on the load balancer's network segment.
    #[default]
    L2,
    /// Packets are encapsulated in IP (RFC 2003, RFC 2473, RFC 4213).
    Ipip,
    /// Packets are encapsulated in UDP (GUE variant 1).
    Gue,
}

impl ForwardingMode {
    /// All methods in the order of `enum forwarding`.
    pub const ALL: [ForwardingMode; intf::FORWARDING_COUNT as usize] =
        [ForwardingMode::L2, ForwardingMode::Ipip, ForwardingMode::Gue];

    /// Returns the method's value in `enum forwarding`.
    pub fn bpf_number(self) -> u32 {
        self as u32
    }

    /// Returns the name of the method in configuration and protobuf messages.
    pub fn name(self) -> &'static str {
        match self {
            ForwardingMode::L2 => "l2",
            ForwardingMode::Ipip => "ipip",
            ForwardingMode::Gue => "gue",
        }
    }

    /// Returns whether packets get an outer header, so that servers may be behind routers.
    pub fn encapsulates(self) -> bool {
        self != ForwardingMode::L2
    }

    /// Returns the length in bytes of the outer headers of packets to `server`.
    pub fn encapsulation_overhead_bytes(self, server: IpAddr) -> usize {
        let ip_header_bytes = if server.is_ipv4() { 20 } else { 40 };
        match self {
            ForwardingMode::L2 => 0,
            ForwardingMode::Ipip => ip_header_bytes,
            ForwardingMode::Gue => ip_header_bytes + 8,
        }
    }
}

/// Error returned for the name of an unknown forwarding method.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("forwarding {0:?} is not known: expected \"l2\", \"ipip\" or \"gue\"")]
pub struct UnknownForwardingMode(pub String);

impl std::str::FromStr for ForwardingMode {
    type Err = UnknownForwardingMode;

    fn from_str(name: &str) -> Result<Self, Self::Err> {
        let matching_forwarding = Self::ALL.into_iter().find(|forwarding| forwarding.name() == name);
        matching_forwarding.ok_or_else(|| UnknownForwardingMode(name.to_owned()))
    }
}

/// Returns the source port of GUE packets for a flow, as `flow_port()` of `bpf/lb/emit_gue.h` does. It is also the flow
/// label in an IPv6 outer header. `port_bytes` are in network byte order, or 0 if unknown (later fragments, ICMP).
pub fn gue_source_port(client: IpAddr, port_bytes: [u8; 4]) -> u16 {
    const FIRST_GUE_SOURCE_PORT: u16 = 0xc000;
    const GUE_PORT_HASH_FACTOR: u64 = 0x9e37_79b9_7f4a_7c15;
    let folded_client = fold_client_address(&CookieKey { k0: GUE_PORT_HASH_FACTOR, k1: GUE_PORT_HASH_FACTOR }, client);
    let hash_input = u64::from(folded_client) | u64::from(u32::from_ne_bytes(port_bytes)) << 32;
    FIRST_GUE_SOURCE_PORT | (hash_input.wrapping_mul(GUE_PORT_HASH_FACTOR) >> 50) as u16
}

#[cfg(test)]
mod tests {
    use std::net::{Ipv4Addr, Ipv6Addr};

    use super::*;

    #[test]
    fn forwarding_names_round_trip() {
        for forwarding in ForwardingMode::ALL {
            assert_eq!(forwarding.name().parse(), Ok(forwarding));
        }
        let error = "vxlan".parse::<ForwardingMode>().unwrap_err().to_string();
        assert_eq!(error, "forwarding \"vxlan\" is not known: expected \"l2\", \"ipip\" or \"gue\"");
    }

    #[test]
    fn gue_source_ports_are_spread_evenly() {
        let gue_port = |client: IpAddr, source_port: u16| {
            let [high_byte, low_byte] = source_port.to_be_bytes();
            gue_source_port(client, [high_byte, low_byte, 0, 80])
        };
        let ipv4_client = |client: u32| IpAddr::from(Ipv4Addr::from(0x0a00_0000 + client));
        let ipv6_prefix = Ipv6Addr::new(0x2001, 0xdb8, 0, 0, 0, 0, 0, 0).to_bits();
        let (ipv6_by_low_bits, ipv6_by_high_bits) = (
            |client: u32| IpAddr::from(Ipv6Addr::from_bits(ipv6_prefix + u128::from(client))),
            |client: u32| IpAddr::from(Ipv6Addr::from_bits(ipv6_prefix + (u128::from(client) << 64))),
        );
        let gue_ports_of_one_client =
            |client: IpAddr| (32_768..60_960).map(|source_port| gue_port(client, source_port)).collect::<Vec<u16>>();
        let gue_ports_of_many_clients = |client: &dyn Fn(u32) -> IpAddr| {
            (0..28_192).map(|number| gue_port(client(number), 40_000)).collect::<Vec<u16>>()
        };
        let gue_port_lists = [
            gue_ports_of_one_client(ipv4_client(1)),
            gue_ports_of_one_client(ipv6_by_low_bits(1)),
            gue_ports_of_many_clients(&ipv4_client),
            gue_ports_of_many_clients(&ipv6_by_low_bits),
            gue_ports_of_many_clients(&ipv6_by_high_bits),
        ];
        for ports in gue_port_lists {
            let mut port_count_by_remainder = [0u32; 16];
            ports.iter().for_each(|port| port_count_by_remainder[usize::from(port % 16)] += 1);
            assert!(ports.iter().all(|port| *port >= 0xc000));
            let mean_count = ports.len() as u32 / 16;
            assert!(
                port_count_by_remainder.iter().all(|count| count.abs_diff(mean_count) < mean_count / 5),
                "{port_count_by_remainder:?}"
            );
        }
    }
}
