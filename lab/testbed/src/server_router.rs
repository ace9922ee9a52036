//! A router before the servers, for load balancers that encapsulate.
//!
//! ```text
//!   switch: br0 (10.1.0.0/16)  --  cwX-server-router 10.1.4.1, 10.1.1.254  --  switch: br1 (10.1.1.0/24)  --  servers
//! ```
//!
//! Servers keep their addresses. Load balancers and the controller have a route to them. The way back is the servers'
//! default route, so answers reach the client without passing a load balancer.

use std::net::Ipv4Addr;

use crate::addresses::DEVICE;
use crate::namespace::ip_batch;
use crate::topology::{Testbed, make_namespaces};

const ROUTER_ADDRESS: Ipv4Addr = Ipv4Addr::new(10, 1, 4, 1);
const ROUTER_ADDRESS_AT_SERVERS: Ipv4Addr = Ipv4Addr::new(10, 1, 1, 254);
const SERVERS: &str = "10.1.1.0/24";
/// The router's device at the servers' side.
const SERVER_LINK: &str = "servers";

impl Testbed {
    /// Makes the router and the servers' bridge, if there are to be any.
    pub(crate) fn make_server_router(&self) -> anyhow::Result<()> {
        let Some(router) = self.server_router() else { return Ok(()) };
        make_namespaces(&[router])?;
        self.connect(router, "srouter", 1, 1)?;
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
        ip_batch(
            Some(router),
            &format!(
                "address add {ROUTER_ADDRESS}/16 dev {DEVICE}\nlink set {SERVER_LINK} up\n\
                 address add {ROUTER_ADDRESS_AT_SERVERS}/24 dev {SERVER_LINK}\n{}",
                self.route_to_client()
            ),
        )?;
        router.set_sysctls(&[("ipv4/ip_forward", "1")])
    }

    pub(crate) fn bridge_of_servers(&self) -> &'static str {
        if self.server_router().is_some() { "br1" } else { "br0" }
    }

    /// A server's address and routes, as lines for `ip`.
    pub(crate) fn server_routes(&self, address: Ipv4Addr) -> String {
        match self.server_router() {
            None => self.address_lines(address) + &self.route_to_client(),
            Some(_) => {
                format!("address add {address}/24 dev {DEVICE}\nroute add default via {ROUTER_ADDRESS_AT_SERVERS}\n")
            }
        }
    }

    /// The way to servers behind the router, as a line for `ip`.
    pub(crate) fn route_to_servers(&self) -> String {
        match self.server_router() {
            None => String::new(),
            Some(_) => format!("route add {SERVERS} via {ROUTER_ADDRESS}\n"),
        }
    }
}
