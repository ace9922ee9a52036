//! Client's side of the testbed, with the routes from the client to load balancers and from servers to the client.
//!
//! ```text
//!   cwX-client 10.1.0.7 ..  --  switch                                     (the client's kernel has the route)
//!   cwX-client 10.2.0.7 ..  --  cwX-router 10.2.0.1, 10.1.0.3  --  switch  (the router's kernel has it)
//! ```
//!
//! The route to the VIPs has one next hop per announced load balancer. The kernel selects one by a hash of addresses,
//! ports and protocol (fib_multipath_hash_policy=1), so a connection keeps its load balancer while the next hops stay
//! the same. Real data centres use their routers' BGP and ECMP.
//!
//! The router's link has a small MTU in one direction only. The client's device has an MTU of 1500 bytes, so it offers
//! segments of 1460 bytes. The router must report by ICMP that the servers' packets are too long (RFC 1191). The ICMP
//! error goes to the VIP by the same route.

use std::net::{IpAddr, Ipv4Addr};

use anyhow::ensure;

use crate::addresses::{
    AddressFamily, DEFAULT_ROUTE_PREFIX, ETHERNET_MTU, HOST_DEVICE, IPV6_VIP_PREFIX, ROUTED_CLIENTS_PREFIX,
    ROUTER_ADDRESS, SEGMENT_PREFIX_LENGTH, load_balancer_address,
};
use crate::namespace::{NetworkNamespace, run_ip_batch};
use crate::topology::{Testbed, create_namespaces};

const IPV4_VIP_PREFIX: &str = "10.200.0.0/24";
const ROUTER_ADDRESS_AT_CLIENT: Ipv4Addr = Ipv4Addr::new(10, 2, 0, 1);
/// Name of the router's network device on the client's side.
pub const CLIENT_SIDE_DEVICE: &str = "client";
const FIRST_CLIENT_HOST_NUMBER: u8 = 7;

impl Testbed {
    /// Returns the client address with this index, counted from 0, in the address family of the services.
    pub fn client_address(&self, index: u16) -> IpAddr {
        self.options().family.host_address(self.client_ipv4_address(index))
    }

    /// Returns the client's IPv4 address with this index, counted from 0.
    pub fn client_ipv4_address(&self, index: u16) -> Ipv4Addr {
        let second_octet = if self.client_router().is_some() { 2 } else { 1 };
        Ipv4Addr::new(10, second_octet, 0, FIRST_CLIENT_HOST_NUMBER + index as u8)
    }

    /// Returns the host whose kernel selects a load balancer for each connection: the router, or the client if there is
    /// no router.
    pub fn ecmp_host(&self) -> &NetworkNamespace {
        self.client_router().unwrap_or(self.client())
    }

    /// Makes these load balancers the next hops for the VIPs. Fails when `load_balancers` is empty, or when the kernel
    /// rejects the route.
    pub fn route_vips_to_load_balancers(&self, load_balancers: &[u16]) -> anyhow::Result<()> {
        ensure!(!load_balancers.is_empty(), "no next hop of the VIPs: expected at least one load balancer");
        let host_addresses: Vec<Ipv4Addr> = load_balancers.iter().copied().map(load_balancer_address).collect();
        self.route_vips_to_hosts(&host_addresses)
    }

    /// Makes the hosts with these IPv4 addresses the next hops for the VIPs.
    pub(crate) fn route_vips_to_hosts(&self, hosts: &[Ipv4Addr]) -> anyhow::Result<()> {
        let build_route_command = |vips: &str, family: AddressFamily| {
            let next_hops = hosts.iter().map(|host| format!(" nexthop via {}", family.host_address(*host)));
            format!("route replace {vips}{}\n", next_hops.collect::<String>())
        };
        let mut route_commands = build_route_command(IPV4_VIP_PREFIX, AddressFamily::Ipv4);
        if self.options().family == AddressFamily::Ipv6 {
            route_commands += &build_route_command(IPV6_VIP_PREFIX, AddressFamily::Ipv6);
        }
        run_ip_batch(Some(self.ecmp_host()), &route_commands)
    }

    /// Creates the client's host, and the router in front of it if enabled.
    pub(crate) fn create_client_and_router(&self) -> anyhow::Result<()> {
        create_namespaces(&[self.client()])?;
        match self.client_router() {
            None => self.connect_to_switch(self.client(), "client", 1, 1)?,
            Some(router) => self.create_client_router(router)?,
        }
        let mut client_commands = String::new();
        for index in 0..self.options().client_address_count {
            client_commands +=
                &self.build_address_commands(self.client_ipv4_address(index), SEGMENT_PREFIX_LENGTH, HOST_DEVICE);
        }
        if self.client_router().is_some() {
            client_commands += &self.build_route_commands(DEFAULT_ROUTE_PREFIX, ROUTER_ADDRESS_AT_CLIENT);
        }
        run_ip_batch(Some(self.client()), &client_commands)?;
        let multipath_sysctl = "fib_multipath_hash_policy";
        self.ecmp_host()
            .set_sysctls(&[(&format!("ipv4/{multipath_sysctl}"), "1"), (&format!("ipv6/{multipath_sysctl}"), "1")])
    }

    fn create_client_router(&self, router: &NetworkNamespace) -> anyhow::Result<()> {
        create_namespaces(&[router])?;
        self.enable_ipv6(self.client())?;
        self.connect_to_switch(router, "router", 1, 1)?;
        let client_link_mtu = self.options().router_mtu.unwrap_or(ETHERNET_MTU);
        let (client_name, router_name) = (self.client().name(), router.name());
        run_ip_batch(
            None,
            &format!(
                "link add {HOST_DEVICE} netns {client_name} type veth peer name {CLIENT_SIDE_DEVICE} netns \
                 {router_name}\n"
            ),
        )?;
        run_ip_batch(Some(self.client()), &format!("link set lo up\nlink set {HOST_DEVICE} up\n"))?;
        let address_commands = self.build_address_commands(ROUTER_ADDRESS, SEGMENT_PREFIX_LENGTH, HOST_DEVICE)
            + &self.build_address_commands(ROUTER_ADDRESS_AT_CLIENT, ROUTED_CLIENTS_PREFIX.1, CLIENT_SIDE_DEVICE);
        run_ip_batch(
            Some(router),
            &format!("link set {CLIENT_SIDE_DEVICE} mtu {client_link_mtu} up\n{address_commands}"),
        )?;
        self.enable_forwarding(router)
    }

    /// Returns `ip` commands that add a server's route to the client.
    pub(crate) fn build_client_route_commands(&self) -> String {
        if self.options().routes_answers_via_load_balancer {
            return self.build_route_commands(DEFAULT_ROUTE_PREFIX, load_balancer_address(1));
        }
        self.client_router()
            .map_or_else(String::new, |_| self.build_route_commands(ROUTED_CLIENTS_PREFIX, ROUTER_ADDRESS))
    }
}
