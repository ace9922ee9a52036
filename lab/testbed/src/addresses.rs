//! Addresses and names of the testbed's hosts.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddrV4};

/// Name of the network device in every host's namespace.
pub const HOST_DEVICE: &str = "eth0";
/// First IPv4 VIP. Further IPv4 VIPs have consecutive addresses.
pub const FIRST_IPV4_VIP: Ipv4Addr = Ipv4Addr::new(10, 200, 0, 1);
/// Address and port of the service that the demo balances.
pub const SERVICE_ADDRESS: SocketAddrV4 = SocketAddrV4::new(FIRST_IPV4_VIP, 80);
/// IPv6 prefix that contains all IPv6 VIPs.
pub(crate) const IPV6_VIP_PREFIX: &str = "2001:db8:c8::/64";
/// First IPv6 VIP. Further IPv6 VIPs have consecutive addresses.
pub const FIRST_IPV6_VIP: Ipv6Addr = Ipv6Addr::new(0x2001, 0xdb8, 0xc8, 0, 0, 0, 0, 1);
pub const CONTROLLER_ADDRESS: Ipv4Addr = Ipv4Addr::new(10, 1, 0, 2);
/// Minimum MTU of an IPv4 link (RFC 791).
pub(crate) const MIN_IPV4_MTU: u16 = 68;
/// Minimum MTU of an IPv6 link (RFC 8200, Sect. 5).
pub(crate) const MIN_IPV6_MTU: u16 = 1280;
/// Prefix length of IPv4 addresses on the network segment that connects servers and load balancers.
pub(crate) const SEGMENT_PREFIX_LENGTH: u8 = 16;
/// MTU of Ethernet, which all devices of the testbed use.
pub(crate) const ETHERNET_MTU: u16 = 1500;
pub(crate) const ROUTER_ADDRESS: Ipv4Addr = Ipv4Addr::new(10, 1, 0, 3);

/// Address family of the testbed's VIPs. Every host has an IPv4 address with either family.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, clap::ValueEnum)]
pub enum AddressFamily {
    /// VIPs are IPv4 addresses, counted up from 10.200.0.1.
    #[default]
    #[value(name = "4")]
    Ipv4,
    /// VIPs are IPv6 addresses, counted up from 2001:db8:c8::1. Every host also has an IPv6 address in 2001:db8::/64.
    #[value(name = "6")]
    Ipv6,
}

impl AddressFamily {
    /// Returns the host's address in this family. `host` is the host's IPv4 address.
    pub fn host_address(self, host: Ipv4Addr) -> IpAddr {
        match self {
            AddressFamily::Ipv4 => host.into(),
            AddressFamily::Ipv6 => host_ipv6_address(host).into(),
        }
    }

    /// Returns the VIP with this index, counted from 0.
    pub fn nth_vip(self, index: u8) -> IpAddr {
        match self {
            AddressFamily::Ipv4 => Ipv4Addr::from_bits(FIRST_IPV4_VIP.to_bits() + u32::from(index)).into(),
            AddressFamily::Ipv6 => Ipv6Addr::from_bits(FIRST_IPV6_VIP.to_bits() + u128::from(index)).into(),
        }
    }
}

/// Returns a host's IPv6 address, which is in 2001:db8::/64 and has the host's IPv4 address in its last four bytes.
pub fn host_ipv6_address(host: Ipv4Addr) -> Ipv6Addr {
    let network = Ipv6Addr::new(0x2001, 0xdb8, 0, 0, 0, 0, 0, 0);
    Ipv6Addr::from_bits(network.to_bits() | u128::from(host.to_bits()))
}

/// Returns the address of server `number`, counted from 1.
pub fn server_address(number: u16) -> Ipv4Addr {
    Ipv4Addr::new(10, 1, 1, number as u8)
}

/// Returns the address of load balancer `number`, counted from 1.
pub fn load_balancer_address(number: u16) -> Ipv4Addr {
    Ipv4Addr::new(10, 1, 2, number as u8)
}

/// Returns the name of load balancer `number`, which is also the name of its namespace, switch port and daemon.
pub fn load_balancer_name(number: u16) -> String {
    format!("lb{number}")
}

/// Returns the address of rack controller `number`, counted from 1.
pub fn rack_controller_address(number: u16) -> Ipv4Addr {
    Ipv4Addr::new(10, 1, 3, number as u8)
}

/// Returns the name of rack controller `number`, which is also the name of its namespace, switch port and daemon.
pub fn rack_controller_name(number: u16) -> String {
    format!("rack{number}")
}

/// IPv4 prefix as (address, length in bits). [`to_ipv6_prefix_text`] returns the corresponding IPv6 prefix.
pub(crate) type Ipv4Prefix = (Ipv4Addr, u8);

/// Prefix that contains all IPv4 addresses, for a default route.
pub(crate) const DEFAULT_ROUTE_PREFIX: Ipv4Prefix = (Ipv4Addr::UNSPECIFIED, 0);
/// IPv4 prefix of the clients that reach the testbed through a router.
pub(crate) const ROUTED_CLIENTS_PREFIX: Ipv4Prefix = (Ipv4Addr::new(10, 2, 0, 0), 16);

/// Returns the prefix that contains the IPv6 addresses of the hosts in an IPv4 prefix, in the notation of the `ip`
/// command.
pub(crate) fn to_ipv6_prefix_text((network, length): Ipv4Prefix) -> String {
    match length {
        0 => "::/0".to_owned(),
        _ => format!("{}/{}", host_ipv6_address(network), 96 + length),
    }
}
