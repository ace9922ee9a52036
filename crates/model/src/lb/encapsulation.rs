//! Outer headers of packets to servers behind routers, as in `bpf/lb/encapsulate.h`.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use coreward_intf as intf;

use super::ip_packet::ETHERNET_HEADER_BYTES;
use super::packet::{self, ETHERTYPE_IPV4};
use super::packet_ipv6::{ETHERTYPE_IPV6, IPV6_HEADER_BYTES};
use super::{LoadBalancer, MacAddress};
use crate::ServerId;
use crate::forwarding::{ForwardingMode, gue_source_port};

/// TTL (IPv4) or hop limit (IPv6) of outer headers.
const OUTER_TTL: u8 = 64;
const DONT_FRAGMENT_FLAG: u8 = 0x40;
const PROTOCOL_IPV4: u8 = 4;
const PROTOCOL_IPV6: u8 = 41;
const PROTOCOL_UDP: u8 = 17;

/// Outer header fields that are specific to one server.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TunnelEndpoint {
    /// Destination address of the outer header, which decides its address family.
    pub address: IpAddr,
    /// Source port of GUE packets, or `None` if it is derived from the flow.
    pub source_port: Option<u16>,
}

/// Fields of outer headers that are the same for all servers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct OuterHeaderFields {
    /// Source address of IPv4 outer headers.
    pub source_ipv4: Ipv4Addr,
    /// Source address of IPv6 outer headers.
    pub source_ipv6: Ipv6Addr,
    /// Maximum length in bytes of an outgoing packet, with its outer header.
    pub mtu_bytes: usize,
}

/// Fields of an IP header that differ between packets.
pub(super) struct IpHeaderFields {
    /// Type of service (IPv4) or traffic class (IPv6).
    pub traffic_class: u8,
    /// Flow label (IPv6 only).
    pub flow_label: u16,
    /// Length of the packet in bytes, with this header.
    pub packet_bytes: usize,
    /// Protocol (IPv4) or next header (IPv6).
    pub protocol_number: u8,
}

impl LoadBalancer {
    /// Sets the server-specific outer header fields of packets to server `id`.
    pub fn set_tunnel_endpoint(&mut self, id: ServerId, endpoint: TunnelEndpoint) {
        self.tunnel_by_server.insert(id, endpoint);
    }

    /// Inserts an outer header before the packet in `frame`. Header and packet together must not exceed the MTU.
    pub(super) fn encapsulate_frame(&self, frame: &mut Vec<u8>, forwarding: ForwardingMode, endpoint: TunnelEndpoint) {
        let (client, ports) = packet::client_and_ports(frame);
        let flow_port = gue_source_port(client, ports);
        let inner_protocol = if client.is_ipv4() { PROTOCOL_IPV4 } else { PROTOCOL_IPV6 };
        let header = IpHeaderFields {
            traffic_class: packet::read_traffic_class(frame),
            flow_label: flow_port,
            packet_bytes: packet::ip_packet_bytes(frame) + forwarding.encapsulation_overhead_bytes(endpoint.address),
            protocol_number: if forwarding == ForwardingMode::Ipip { inner_protocol } else { PROTOCOL_UDP },
        };
        let shared_outer_header = self.settings.outer_header;
        let (ethertype, mut outer_header) = match endpoint.address {
            IpAddr::V4(address) => {
                (ETHERTYPE_IPV4, header.encode_ipv4_header(shared_outer_header.source_ipv4, address))
            }
            IpAddr::V6(address) => {
                (ETHERTYPE_IPV6, header.encode_ipv6_header(shared_outer_header.source_ipv6, address))
            }
        };
        if forwarding == ForwardingMode::Gue {
            let source_port = endpoint.source_port.unwrap_or(flow_port);
            for field in [source_port, intf::GUE_PORT as u16, (header.packet_bytes - outer_header.len()) as u16, 0] {
                outer_header.extend(field.to_be_bytes());
            }
        }
        frame.splice(
            ETHERNET_HEADER_BYTES - 2..ETHERNET_HEADER_BYTES,
            [&ethertype.to_be_bytes()[..], &outer_header].concat(),
        );
    }
}

impl IpHeaderFields {
    pub(super) fn encode_ipv4_header(&self, source: Ipv4Addr, destination: Ipv4Addr) -> Vec<u8> {
        let [high_byte, low_byte] = (self.packet_bytes as u16).to_be_bytes();
        let mut header = vec![
            0x45,
            self.traffic_class,
            high_byte,
            low_byte,
            0,
            0,
            DONT_FRAGMENT_FLAG,
            0,
            OUTER_TTL,
            self.protocol_number,
            0,
            0,
        ];
        header.extend(source.octets());
        header.extend(destination.octets());
        let checksum = packet::internet_checksum(&header);
        header[10..12].copy_from_slice(&checksum.to_be_bytes());
        header
    }

    pub(super) fn encode_ipv6_header(&self, source: Ipv6Addr, destination: Ipv6Addr) -> Vec<u8> {
        let first_word = 6 << 28 | u32::from(self.traffic_class) << 20 | u32::from(self.flow_label);
        let mut header = first_word.to_be_bytes().to_vec();
        header.extend(((self.packet_bytes - IPV6_HEADER_BYTES) as u16).to_be_bytes());
        header.extend([self.protocol_number, OUTER_TTL]);
        header.extend(source.octets());
        header.extend(destination.octets());
        header
    }
}

/// Default with unspecified addresses and without an MTU, for load balancers whose services do not encapsulate.
impl Default for OuterHeaderFields {
    fn default() -> Self {
        Self {
            source_ipv4: Ipv4Addr::UNSPECIFIED,
            source_ipv6: Ipv6Addr::UNSPECIFIED,
            mtu_bytes: usize::from(u16::MAX),
        }
    }
}

pub(super) fn set_frame_macs(frame: &mut [u8], destination: MacAddress, source: MacAddress) {
    frame[..6].copy_from_slice(&destination);
    frame[6..12].copy_from_slice(&source);
}

#[cfg(test)]
mod tests {
    use super::super::packet::IPV4_HEADER_BYTES;
    use super::*;

    #[test]
    fn encoded_ipv4_header_has_a_valid_checksum() {
        // The header of a captured packet: 10.0.0.1 to 10.9.0.2, 60 bytes of TCP in IP-in-IP.
        let header =
            IpHeaderFields { traffic_class: 0, flow_label: 0, packet_bytes: 80, protocol_number: PROTOCOL_IPV4 };
        let header = header.encode_ipv4_header(Ipv4Addr::new(10, 0, 0, 1), Ipv4Addr::new(10, 9, 0, 2));
        let word_sum: u32 =
            header.chunks(2).map(|word_bytes| u32::from(u16::from_be_bytes([word_bytes[0], word_bytes[1]]))).sum();
        assert_eq!((word_sum & 0xffff) + (word_sum >> 16), 0xffff);
        assert_eq!(header.len(), IPV4_HEADER_BYTES);
    }
}
