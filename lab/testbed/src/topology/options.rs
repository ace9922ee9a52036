//! Options of a testbed's hosts and network.

use anyhow::bail;

use crate::addresses::{AddressFamily, ETHERNET_MTU, MIN_IPV4_MTU, MIN_IPV6_MTU};

const MAX_CLIENT_ADDRESS_COUNT: u16 = 200;
pub(super) const MAX_SERVER_COUNT: u16 = 250;
pub(super) const MAX_LOAD_BALANCER_COUNT: u16 = 32;
const MAX_RACK_COUNT: u16 = 32;
const MAX_CORES_PER_SERVER: u16 = 64;

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TestbedOptions {
    /// Name of this testbed, which is unique on the machine. It has 1 to 40 lower-case letters and digits, including
    /// the prefix in the environment variable `COREWARD_TESTBED_PREFIX`.
    pub instance_name: String,
    /// Number of servers at the start (0 to 250). Servers can also be added later.
    pub server_count: u16,
    /// Number of cores of each server, which is also its number of receive queues (1 to 64).
    pub core_count: u16,
    /// Whether each server has a ring of 256 packets per receive queue, like a NIC. Without rings, all hosts share one
    /// backlog per CPU, which is too small for packets to many servers. With rings, agents see one more receive queue
    /// than there are cores.
    pub has_receive_rings: bool,
    /// Number of load balancers at the start (1 to 32), each of which is a next hop for the VIPs. Load balancers can
    /// also be added later.
    pub load_balancer_count: u16,
    /// Number of hosts for rack controllers (0 to 32).
    pub rack_controller_count: u16,
    /// Number of the client's addresses (1 to 200). They count up from 10.1.0.7, or from 10.2.0.7 if the client is
    /// behind a router.
    pub client_address_count: u16,
    /// MTU of the link from the router to the client behind it (68 to 1500). `None` if there is no router and the
    /// client is on the servers' segment.
    pub router_mtu: Option<u16>,
    /// Whether servers reach the client through load balancer 1, whose kernel routes the packets. Needs a router.
    pub routes_answers_via_load_balancer: bool,
    /// Whether a separate router is in front of the servers (see [`crate::server_router`]).
    pub has_server_router: bool,
    /// VLANs of clients and servers, or `None` if all frames are untagged. VLANs cannot be combined with routers or
    /// racks.
    pub vlans: Option<TestbedVlans>,
    /// Number of VIPs on each server (1 to 250).
    pub vip_count: u8,
    /// Address family of the VIPs, and of the packets between the client and the services.
    pub family: AddressFamily,
    /// Number of entries in each emulated NIC's indirection table (a power of two up to 2048).
    pub indirection_entry_count: usize,
    /// Seed of the initial RSS keys of emulated NICs.
    pub rss_key_seed: u64,
}

/// VLAN ids in a testbed. The id 0 means untagged.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TestbedVlans {
    /// VLAN id of clients' packets to the VIPs.
    pub vip_vlan: u16,
    /// VLAN ids of the servers (at least one). Server K has the id at index (K - 1) modulo the number of ids.
    pub server_vlans: Vec<u16>,
}

impl Default for TestbedOptions {
    fn default() -> Self {
        Self {
            instance_name: "testbed".to_owned(),
            server_count: 4,
            core_count: 4,
            has_receive_rings: false,
            load_balancer_count: 1,
            rack_controller_count: 0,
            client_address_count: 4,
            router_mtu: None,
            routes_answers_via_load_balancer: false,
            has_server_router: false,
            vlans: None,
            vip_count: 1,
            family: AddressFamily::Ipv4,
            indirection_entry_count: 128,
            rss_key_seed: 1,
        }
    }
}

impl TestbedOptions {
    /// Checks the options. Fails when a number is out of range, or when two options exclude each other.
    pub(super) fn check_options(&self) -> anyhow::Result<()> {
        for (value, min, max, name) in [
            (self.server_count, 0, MAX_SERVER_COUNT, "servers"),
            (self.core_count, 1, MAX_CORES_PER_SERVER, "cores"),
            (self.load_balancer_count, 1, MAX_LOAD_BALANCER_COUNT, "load balancers"),
            (self.rack_controller_count, 0, MAX_RACK_COUNT, "racks"),
            (self.client_address_count, 1, MAX_CLIENT_ADDRESS_COUNT, "client addresses"),
            (u16::from(self.vip_count), 1, 250, "VIPs"),
            (self.router_mtu.unwrap_or(ETHERNET_MTU), MIN_IPV4_MTU, ETHERNET_MTU, "bytes of MTU"),
        ] {
            if !(min..=max).contains(&value) {
                bail!("{value} {name} in a testbed: expected {min} to {max}");
            }
        }
        if self.routes_answers_via_load_balancer && self.router_mtu.is_none() {
            bail!(
                "answers by a load balancer without a router: expected `router_mtu`, so that there is something to \
                 route"
            );
        }
        if self.vlans.is_some()
            && (self.router_mtu.is_some() || self.has_server_router || self.rack_controller_count > 0)
        {
            bail!("VLANs with routers or racks: expected no `router_mtu`, `routed_servers` and `racks`");
        }
        if self.family == AddressFamily::Ipv6 && self.router_mtu.is_some_and(|mtu| mtu < MIN_IPV6_MTU) {
            bail!("IPv6 by a router with `router_mtu` below {MIN_IPV6_MTU}: expected at least that");
        }
        Ok(())
    }
}
