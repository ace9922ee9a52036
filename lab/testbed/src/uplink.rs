//! Client's side of the testbed: routing of VIPs to load balancers, and of answers to the client.
//!
//! ```text
//!   cwX-client 10.1.0.7 ..  --  switch                                     (the client's kernel has the route)
//!   cwX-client 10.2.0.7 ..  --  cwX-router 10.2.0.1, 10.1.0.3  --  switch  (the router's kernel has it)
//! ```
//!
//! The route to the VIPs has one next hop per announced load balancer. The kernel selects one by a hash of addresses,
//! ports and protocol (fib_multipath_hash_policy=1), so a connection keeps its load balancer while the next hops stay.
//! Real data centres use BGP and ECMP of their routers.
//!
//! The router's link has a small MTU in one direction only. The client's device has an MTU of 1500 bytes, so it offers
//! segments of 1460 bytes. The router must report by ICMP that the servers' packets are too long (RFC 1191). The ICMP
//! error goes to the VIP by the same route.

use std::net::{IpAddr, Ipv4Addr};

use anyhow::ensure;

use crate::addresses::{
    AddressFamily, DEFAULT_PREFIX, DEVICE, MTU_MAX, ROUTED_CLIENTS_PREFIX, ROUTER_ADDRESS, SEGMENT_PREFIX_LENGTH,
    VIP_PREFIX_IPV6, load_balancer_address,
};
use crate::namespace::{Namespace, ip_batch};
use crate::topology::{Testbed, make_namespaces};

const VIP_PREFIX_IPV4: &str = "10.200.0.0/24";
const ROUTER_ADDRESS_AT_CLIENT: Ipv4Addr = Ipv4Addr::new(10, 2, 0, 1);
/// Name of the router's device at the client's side.
pub const CLIENT_LINK: &str = "client";
const FIRST_CLIENT_ADDRESS: u8 = 7;

impl Testbed {
    /// Returns the client address with this index, counted from 0, in the address family of the services.
    pub fn client_address(&self, index: u16) -> IpAddr {
        self.options().family.address(self.client_ipv4_address(index))
    }

    /// Returns the client's IPv4 address with this index, counted from 0.
    pub fn client_ipv4_address(&self, index: u16) -> Ipv4Addr {
        let network = if self.router().is_some() { 2 } else { 1 };
        Ipv4Addr::new(10, network, 0, FIRST_CLIENT_ADDRESS + index as u8)
    }

    /// Returns the host whose kernel selects a load balancer for each connection: the router, or the client if there is
    /// none.
    pub fn ecmp_host(&self) -> &Namespace {
        self.router().unwrap_or(self.client())
    }

    /// Makes these load balancers the next hops of the VIPs. Fails when there are none, or the kernel rejects the
    /// route.
    pub fn route_vips_to_load_balancers(&self, load_balancers: &[u16]) -> anyhow::Result<()> {
        ensure!(!load_balancers.is_empty(), "no next hop of the VIPs: expected at least one load balancer");
        let hosts: Vec<Ipv4Addr> = load_balancers.iter().copied().map(load_balancer_address).collect();
        self.route_vips_to_hosts(&hosts)
    }

    /// Makes the hosts with these IPv4 addresses the next hops of the VIPs.
    pub(crate) fn route_vips_to_hosts(&self, hosts: &[Ipv4Addr]) -> anyhow::Result<()> {
        let route = |vips: &str, family: AddressFamily| {
            let hops = hosts.iter().map(|host| format!(" nexthop via {}", family.address(*host)));
            format!("route replace {vips}{}\n", hops.collect::<String>())
        };
        let mut routes = route(VIP_PREFIX_IPV4, AddressFamily::Ipv4);
        if self.options().family == AddressFamily::Ipv6 {
            routes += &route(VIP_PREFIX_IPV6, AddressFamily::Ipv6);
        }
        ip_batch(Some(self.ecmp_host()), &routes)
    }

    /// Creates the client's host and, if enabled, the router.
    pub(crate) fn make_client_side(&self) -> anyhow::Result<()> {
        make_namespaces(&[self.client()])?;
        match self.router() {
            None => self.connect_to_switch(self.client(), "client", 1, 1)?,
            Some(router) => self.make_router(router)?,
        }
        let mut client = String::new();
        for index in 0..self.options().client_addresses {
            client += &self.address_lines(self.client_ipv4_address(index), SEGMENT_PREFIX_LENGTH, DEVICE);
        }
        if self.router().is_some() {
            client += &self.route_lines(DEFAULT_PREFIX, ROUTER_ADDRESS_AT_CLIENT);
        }
        ip_batch(Some(self.client()), &client)?;
        let setting = "fib_multipath_hash_policy";
        self.ecmp_host().set_sysctls(&[(&format!("ipv4/{setting}"), "1"), (&format!("ipv6/{setting}"), "1")])
    }

    fn make_router(&self, router: &Namespace) -> anyhow::Result<()> {
        make_namespaces(&[router])?;
        self.enable_ipv6(self.client())?;
        self.connect_to_switch(router, "router", 1, 1)?;
        let mtu = self.options().router_mtu.unwrap_or(MTU_MAX);
        let (client_name, router_name) = (self.client().name(), router.name());
        ip_batch(
            None,
            &format!("link add {DEVICE} netns {client_name} type veth peer name {CLIENT_LINK} netns {router_name}\n"),
        )?;
        ip_batch(Some(self.client()), &format!("link set lo up\nlink set {DEVICE} up\n"))?;
        let addresses = self.address_lines(ROUTER_ADDRESS, SEGMENT_PREFIX_LENGTH, DEVICE)
            + &self.address_lines(ROUTER_ADDRESS_AT_CLIENT, ROUTED_CLIENTS_PREFIX.1, CLIENT_LINK);
        ip_batch(Some(router), &format!("link set {CLIENT_LINK} mtu {mtu} up\n{addresses}"))?;
        self.enable_forwarding(router)
    }

    /// Returns `ip` commands that add a server's route to the client.
    pub(crate) fn client_route_lines(&self) -> String {
        if self.options().routes_answers_via_load_balancer {
            return self.route_lines(DEFAULT_PREFIX, load_balancer_address(1));
        }
        self.router().map_or_else(String::new, |_| self.route_lines(ROUTED_CLIENTS_PREFIX, ROUTER_ADDRESS))
    }
}
