//! Router in front of the servers, which load balancers that encapsulate need.
//!
//! ```text
//!   switch: br0 (10.1.0.0/16)  --  cwX-server-router 10.1.4.1, 10.1.1.254  --  switch: br1 (10.1.1.0/24)  --  servers
//! ```
//!
//! IPv6 has the same topology, with each IPv4 address in the last bytes. Servers keep their addresses. Load balancers
//! and the controller have a route to the servers. The servers' default route leads to the client, so answers bypass
//! the load balancers.

use std::net::Ipv4Addr;

use crate::addresses::{DEFAULT_ROUTE_PREFIX, HOST_DEVICE, Ipv4Prefix, SEGMENT_PREFIX_LENGTH};
use crate::namespace::run_ip_batch;
use crate::topology::{Testbed, create_namespaces};

const SERVER_ROUTER_ADDRESS: Ipv4Addr = Ipv4Addr::new(10, 1, 4, 1);
const ROUTER_ADDRESS_AT_SERVERS: Ipv4Addr = Ipv4Addr::new(10, 1, 1, 254);
const SERVER_NETWORK_PREFIX: Ipv4Prefix = (Ipv4Addr::new(10, 1, 1, 0), 24);
/// Name of the router's network device on the servers' side.
const SERVER_SIDE_DEVICE: &str = "servers";

impl Testbed {
    /// If the testbed has a router in front of the servers, creates it and the bridge that connects the servers.
    pub(crate) fn create_server_router(&self) -> anyhow::Result<()> {
        let Some(router) = self.server_router() else { return Ok(()) };
        create_namespaces(&[router])?;
        self.connect_to_switch(router, "srouter", 1, 1)?;
        let (router_name, switch) = (router.name(), self.switch().name());
        run_ip_batch(
            None,
            &format!("link add {SERVER_SIDE_DEVICE} netns {router_name} type veth peer name srouter1 netns {switch}\n"),
        )?;
        run_ip_batch(
            Some(self.switch()),
            "link add br1 type bridge stp_state 0 forward_delay 0 mcast_snooping 0\nlink set br1 up\n\
             link set srouter1 master br1 up\n",
        )?;
        let router_commands = self.build_address_commands(SERVER_ROUTER_ADDRESS, SEGMENT_PREFIX_LENGTH, HOST_DEVICE)
            + &self.build_address_commands(ROUTER_ADDRESS_AT_SERVERS, SERVER_NETWORK_PREFIX.1, SERVER_SIDE_DEVICE);
        run_ip_batch(
            Some(router),
            &format!("link set {SERVER_SIDE_DEVICE} up\n{router_commands}{}", self.build_client_route_commands()),
        )?;
        self.enable_forwarding(router)
    }

    pub(crate) fn server_bridge_name(&self) -> &'static str {
        if self.server_router().is_some() { "br1" } else { "br0" }
    }

    /// Returns `ip` commands for a server's address and routes.
    pub(crate) fn build_server_ip_commands(&self, address: Ipv4Addr) -> String {
        match self.server_router() {
            None => {
                self.build_address_commands(address, SEGMENT_PREFIX_LENGTH, HOST_DEVICE)
                    + &self.build_client_route_commands()
            }
            Some(_) => {
                self.build_address_commands(address, SERVER_NETWORK_PREFIX.1, HOST_DEVICE)
                    + &self.build_route_commands(DEFAULT_ROUTE_PREFIX, ROUTER_ADDRESS_AT_SERVERS)
            }
        }
    }

    /// Returns `ip` commands that add the route to the servers behind the router.
    pub(crate) fn build_server_subnet_route_commands(&self) -> String {
        match self.server_router() {
            None => String::new(),
            Some(_) => self.build_route_commands(SERVER_NETWORK_PREFIX, SERVER_ROUTER_ADDRESS),
        }
    }
}
