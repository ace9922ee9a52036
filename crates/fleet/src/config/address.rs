//! Addresses that a VIP or a server can have.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};

/// Returns the reason why no service can have this VIP and port, to follow the address in a sentence.
pub fn vip_error(vip: SocketAddr) -> Option<&'static str> {
    if vip.port() == 0 {
        return Some(" has port 0");
    }
    match (vip.ip(), vip) {
        (IpAddr::V4(address), _) => (!is_host_ipv4(address)).then_some(" is no address of one host"),
        (IpAddr::V6(_), SocketAddr::V6(scoped)) if scoped.scope_id() != 0 => Some(" has a zone"),
        (IpAddr::V6(address), _) => why_unusable_ipv6(address),
    }
}

/// Returns the reason why no server can have this address, to follow it in a sentence.
pub fn server_address_error(address: IpAddr) -> Option<&'static str> {
    match address {
        IpAddr::V4(address) => (!is_host_ipv4(address)).then_some(" is no address of one host"),
        IpAddr::V6(address) => why_unusable_ipv6(address),
    }
}

fn why_unusable_ipv6(address: Ipv6Addr) -> Option<&'static str> {
    let reasons = [
        (address.is_unspecified(), " is the unspecified address"),
        (address.is_loopback(), " is the loopback address"),
        (address.is_multicast(), " is a multicast address"),
        // Routers do not forward to it.
        (address.is_unicast_link_local(), " is a link-local address"),
        // No packet carries it: sockets use it for IPv4.
        (address.to_ipv4_mapped().is_some(), " is an IPv4-mapped address"),
    ];
    reasons.into_iter().find_map(|(applies, reason)| applies.then_some(reason))
}

pub fn is_host_ipv4(address: Ipv4Addr) -> bool {
    !(address.is_unspecified() || address.is_broadcast() || address.is_multicast())
}
