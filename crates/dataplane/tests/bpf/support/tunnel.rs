//! Kinds of encapsulation, and addresses of both address families.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};

use coreward_dataplane::lb::OuterSourceAddresses;
use coreward_model::ServerId;
use coreward_model::forwarding::ForwardingMode;

use super::AddressFamily;

pub const ETHERNET_HEADER_BYTES: usize = 14;
/// Source addresses of the load balancer's outer headers.
pub const LB_OUTER_SOURCE_ADDRESSES: OuterSourceAddresses =
    OuterSourceAddresses { ipv4: Ipv4Addr::new(10, 2, 0, 1), ipv6: Ipv6Addr::new(0x2001, 0xdb8, 2, 0, 0, 0, 0, 1) };

/// Kind of encapsulation, with the address families of the inner and the outer packet.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TunnelVariant {
    pub forwarding: ForwardingMode,
    pub inner_family: AddressFamily,
    pub outer_family: AddressFamily,
}

impl TunnelVariant {
    pub fn all() -> impl Iterator<Item = Self> {
        let families_with_inner = |inner| AddressFamily::BOTH.into_iter().map(move |outer| (inner, outer));
        let families = AddressFamily::BOTH.into_iter().flat_map(families_with_inner);
        families.flat_map(|(inner, outer)| {
            [ForwardingMode::Ipip, ForwardingMode::Gue].map(|forwarding| Self {
                forwarding,
                inner_family: inner,
                outer_family: outer,
            })
        })
    }

    pub fn overhead_bytes(self) -> usize {
        self.forwarding.encapsulation_overhead_bytes(own_outer_address(self.outer_family))
    }

    pub fn outer_protocol_number(self) -> u8 {
        match (self.forwarding, self.inner_family) {
            (ForwardingMode::Gue, _) => 17,
            (_, AddressFamily::Ipv4) => 4,
            (_, AddressFamily::Ipv6) => 41,
        }
    }
}

pub fn ip_header_bytes(family: AddressFamily) -> usize {
    if family == AddressFamily::Ipv4 { 20 } else { 40 }
}

pub fn service_vip(family: AddressFamily) -> SocketAddr {
    match family {
        AddressFamily::Ipv4 => ([10, 200, 0, 1], 80).into(),
        AddressFamily::Ipv6 => ([0x2001, 0xdb8, 0xc8, 0, 0, 0, 0, 1], 80).into(),
    }
}

pub fn client_socket_address(family: AddressFamily) -> SocketAddr {
    match family {
        AddressFamily::Ipv4 => ([192, 0, 2, 7], 40_000).into(),
        AddressFamily::Ipv6 => ([0x2001, 0xdb8, 7, 0, 0, 0, 0, 7], 40_000).into(),
    }
}

pub fn own_outer_address(family: AddressFamily) -> IpAddr {
    match family {
        AddressFamily::Ipv4 => LB_OUTER_SOURCE_ADDRESSES.ipv4.into(),
        AddressFamily::Ipv6 => LB_OUTER_SOURCE_ADDRESSES.ipv6.into(),
    }
}

/// Returns a server's address as the destination of outer headers.
pub fn server_outer_address(family: AddressFamily, server: ServerId) -> IpAddr {
    let [high, low] = server.get().to_be_bytes();
    match family {
        AddressFamily::Ipv4 => Ipv4Addr::new(10, 9, high, low).into(),
        AddressFamily::Ipv6 => Ipv6Addr::new(0x2001, 0xdb8, 9, 0, 0, 0, 0, server.get()).into(),
    }
}

pub fn address_octets(address: IpAddr) -> Vec<u8> {
    match address {
        IpAddr::V4(address) => address.octets().to_vec(),
        IpAddr::V6(address) => address.octets().to_vec(),
    }
}

/// Sets the traffic class (DSCP and ECN) in a frame without IP options, and corrects the IPv4 header checksum.
pub fn set_traffic_class(frame: &mut [u8], traffic_class: u8) {
    if super::is_ipv6(frame) {
        frame[ETHERNET_HEADER_BYTES] = 0x60 | traffic_class >> 4;
        frame[ETHERNET_HEADER_BYTES + 1] = frame[ETHERNET_HEADER_BYTES + 1] & 0xf | traffic_class << 4;
        return;
    }
    frame[ETHERNET_HEADER_BYTES + 1] = traffic_class;
    frame[ETHERNET_HEADER_BYTES + 10..ETHERNET_HEADER_BYTES + 12].fill(0);
    let checksum = !super::ones_complement_sum(&frame[ETHERNET_HEADER_BYTES..ETHERNET_HEADER_BYTES + 20]);
    frame[ETHERNET_HEADER_BYTES + 10..ETHERNET_HEADER_BYTES + 12].copy_from_slice(&checksum.to_be_bytes());
}
