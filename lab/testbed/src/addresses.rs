//! Addresses and names of the testbed's hosts.

use std::net::{Ipv4Addr, SocketAddrV4};

/// The device of every host.
pub const DEVICE: &str = "eth0";
/// The first VIP; the others follow.
pub const VIP: Ipv4Addr = Ipv4Addr::new(10, 200, 0, 1);
/// The service that the demo balances.
pub const SERVICE: SocketAddrV4 = SocketAddrV4::new(VIP, 80);
pub const CONTROLLER_ADDRESS: Ipv4Addr = Ipv4Addr::new(10, 1, 0, 2);
/// Least MTU of an IPv4 link (RFC 791).
pub(crate) const MTU_MIN: u16 = 68;
/// MTU of Ethernet, and of all devices here.
pub(crate) const MTU_MAX: u16 = 1500;
pub(crate) const ROUTER_ADDRESS: Ipv4Addr = Ipv4Addr::new(10, 1, 0, 3);

/// The address of server `number`, counted from 1.
pub fn server_address(number: u16) -> Ipv4Addr {
    Ipv4Addr::new(10, 1, 1, number as u8)
}

/// The address of load balancer `number`, counted from 1.
pub fn load_balancer_address(number: u16) -> Ipv4Addr {
    Ipv4Addr::new(10, 1, 2, number as u8)
}

/// The name of load balancer `number`: of its namespace's role, its port, its daemon.
pub fn load_balancer_name(number: u16) -> String {
    format!("lb{number}")
}

/// The address of the host of rack controller `number`, counted from 1.
pub fn rack_address(number: u16) -> Ipv4Addr {
    Ipv4Addr::new(10, 1, 3, number as u8)
}

/// The name of rack controller `number`: of its namespace's role, its port, its daemon.
pub fn rack_name(number: u16) -> String {
    format!("rack{number}")
}

/// The direct way to a client behind a router, as a line for `ip`.
pub(crate) fn route_by_router() -> String {
    format!("route add 10.2.0.0/16 via {ROUTER_ADDRESS}\n")
}
