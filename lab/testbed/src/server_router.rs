//! Router in front of the servers, for load balancers that encapsulate.
//!
//! ```text
//!   switch: br0 (10.1.0.0/16)  --  cwX-server-router 10.1.4.1, 10.1.1.254  --  switch: br1 (10.1.1.0/24)  --  servers
//! ```
//!
//! IPv6 has the same topology, with each IPv4 address in the last bytes. Servers keep their addresses. Load balancers
//! and the controller have a route to the servers. The servers' default route leads to the client, so answers bypass
//! the load balancers.

use std::net::Ipv4Addr;

use crate::addresses::{DEFAULT_PREFIX, DEVICE, Prefix, SEGMENT_PREFIX_LENGTH};
use crate::namespace::ip_batch;
use crate::topology::{Testbed, make_namespaces};

const SERVER_ROUTER_ADDRESS: Ipv4Addr = Ipv4Addr::new(10, 1, 4, 1);
const ROUTER_ADDRESS_AT_SERVERS: Ipv4Addr = Ipv4Addr::new(10, 1, 1, 254);
const SERVERS_PREFIX: Prefix = (Ipv4Addr::new(10, 1, 1, 0), 24);
/// Name of the router's device in the servers' network.
const SERVER_LINK: &str = "servers";

impl Testbed {
    /// Creates the router in front of the servers and the servers' bridge, if the testbed has them.
    pub(crate) fn make_server_router(&self) -> anyhow::Result<()> {
        let Some(router) = self.server_router() else { return Ok(()) };
        make_namespaces(&[router])?;
        self.connect_to_switch(router, "srouter", 1, 1)?;
        let (router_name, switch) = (router.name(), self.switch().name());
        ip_batch(
            None,
            &format!("link add {SERVER_LINK} netns {router_name} type veth peer name srouter1 netns {switch}\n"),
        )?;
        ip_batch(
            Some(self.switch()),
            "link add br1 type bridge stp_state 0 forward_delay 0 mcast_snooping 0\nlink set br1 up\n\
             link set srouter1 master br1 up\n",
        )?;
        let addresses = self.address_lines(SERVER_ROUTER_ADDRESS, SEGMENT_PREFIX_LENGTH, DEVICE)
            + &self.address_lines(ROUTER_ADDRESS_AT_SERVERS, SERVERS_PREFIX.1, SERVER_LINK);
        ip_batch(Some(router), &format!("link set {SERVER_LINK} up\n{addresses}{}", self.client_route_lines()))?;
        self.enable_forwarding(router)
    }

    pub(crate) fn bridge_of_servers(&self) -> &'static str {
        if self.server_router().is_some() { "br1" } else { "br0" }
    }

    /// Returns `ip` commands for a server's address and routes.
    pub(crate) fn server_ip_commands(&self, address: Ipv4Addr) -> String {
        match self.server_router() {
            None => self.address_lines(address, SEGMENT_PREFIX_LENGTH, DEVICE) + &self.client_route_lines(),
            Some(_) => {
                self.address_lines(address, SERVERS_PREFIX.1, DEVICE)
                    + &self.route_lines(DEFAULT_PREFIX, ROUTER_ADDRESS_AT_SERVERS)
            }
        }
    }

    /// Returns `ip` commands for the route to the servers behind the router.
    pub(crate) fn route_to_servers(&self) -> String {
        match self.server_router() {
            None => String::new(),
            Some(_) => self.route_lines(SERVERS_PREFIX, SERVER_ROUTER_ADDRESS),
        }
    }
}
