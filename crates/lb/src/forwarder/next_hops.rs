//! Finds the neighbours to which servers' packets are sent, which are the servers themselves or routers.

use std::collections::{BTreeSet, HashMap};
use std::net::IpAddr;

use coreward_dataplane::routes::RouteSockets;
use coreward_dataplane::{device, neighbour, vlan_device};
use coreward_model::vlan::Vlan;
use coreward_wire::{Server, Service};

use super::Forwarder;
use crate::resolvers::Neighbour;

/// Minimum MTU of an IPv6 link in bytes (RFC 8200, Sect. 5).
const IPV6_MIN_MTU: usize = 1280;

/// Next hops of encapsulated packets, as the kernel routes them.
pub(super) struct ServerNextHops {
    pub route_sockets: RouteSockets,
    /// Next hop to each server whose packets are encapsulated. Servers without a route have no entry.
    addresses_by_server: HashMap<Neighbour, IpAddr>,
    /// Warnings that name servers to which the kernel has no route.
    route_warnings: BTreeSet<String>,
}

impl ServerNextHops {
    pub fn new(route_sockets: RouteSockets) -> Self {
        Self { route_sockets, addresses_by_server: HashMap::new(), route_warnings: BTreeSet::new() }
    }
}

impl Forwarder {
    /// Returns the neighbour to which packets of `service` for `server` are sent, or `None` if the kernel has no route
    /// to the server.
    pub(super) fn neighbour_for_server(&self, service: &Service, server: &Server) -> Option<Neighbour> {
        let server_neighbour = Neighbour { vlan: self.vlan_for_server(service, server), address: server.address };
        if !service.settings.forwarding.encapsulates() {
            return Some(server_neighbour);
        }
        Some(Neighbour { address: *self.next_hops.addresses_by_server.get(&server_neighbour)?, ..server_neighbour })
    }

    fn encapsulating_services(&self) -> impl Iterator<Item = &Service> {
        self.services_by_index
            .values()
            .map(|(service, _)| service)
            .filter(|service| service.settings.forwarding.encapsulates())
    }

    /// Reads the kernel's next hop to each server whose packets are encapsulated.
    pub(super) fn read_next_hops(&mut self) {
        let to_neighbour_and_name = |service: &Service, server: &Server| {
            (Neighbour { vlan: self.vlan_for_server(service, server), address: server.address }, server.name.clone())
        };
        let servers_of_service = |service: &Service| {
            service.servers.iter().map(|server| to_neighbour_and_name(service, server)).collect::<Vec<_>>()
        };
        let service_names_by_server: HashMap<Neighbour, String> =
            self.encapsulating_services().flat_map(servers_of_service).collect();
        let devices_by_vlan = vlan_device::vlan_device_names(
            &self.interface_name,
            service_names_by_server.keys().map(|server| server.vlan),
        );
        let to_interface_index = |device: &String| nix::net::if_::if_nametoindex(device.as_str()).ok();
        let interface_indexes: HashMap<Vlan, u32> =
            devices_by_vlan.iter().filter_map(|(vlan, device)| Some((*vlan, to_interface_index(device)?))).collect();
        (self.next_hops.addresses_by_server, self.next_hops.route_warnings) = (HashMap::new(), BTreeSet::new());
        for (server, name) in service_names_by_server {
            let Some(interface_index) = interface_indexes.get(&server.vlan) else {
                // Without a device, the kernel has no routes for the VLAN, so the server itself must be in it.
                self.next_hops.addresses_by_server.insert(server, server.address);
                continue;
            };
            match self.next_hops.route_sockets.find_next_hop(*interface_index, server.address) {
                Ok(next_hop) => drop(self.next_hops.addresses_by_server.insert(server, next_hop)),
                Err(error) => {
                    let server_address = server.address;
                    self.next_hops.route_warnings.insert(format!("server {name:?} at {server_address} has {error}"));
                }
            }
        }
    }

    /// Reads the next hops again after routes have changed, and applies changed next hops to the data plane.
    pub(super) fn refresh_next_hops(&mut self) {
        if self.encapsulating_services().next().is_none() {
            return;
        }
        let previous_next_hops = std::mem::take(&mut self.next_hops.addresses_by_server);
        if let Err(error) = self.resolve_mac_addresses() {
            tracing::error!(
                event = "neighbours-not-set",
                error = format!("{error:#}"),
                "the load balancer cannot resolve the MAC addresses of the servers' new next hops"
            );
        }
        if self.next_hops.addresses_by_server == previous_next_hops {
            return;
        }
        let servers = self
            .next_hops
            .addresses_by_server
            .iter()
            .filter(|(server, next_hop)| previous_next_hops.get(*server) != Some(*next_hop))
            .count();
        tracing::info!(
            event = "next-hops-changed",
            interface = self.interface_name,
            servers,
            "the kernel's routes have changed: the load balancer sends packets for servers to other next hops"
        );
        self.index_servers_by_neighbour();
        for index in self.services_by_index.keys().copied().collect::<Vec<_>>() {
            self.set_servers_of_service(index);
        }
    }

    /// Returns warnings about problems that prevent sending encapsulated packets.
    pub(super) fn encapsulation_warnings(&self) -> Vec<String> {
        let encapsulation_servers =
            || self.encapsulating_services().flat_map(|service| &service.servers).map(|server| server.address);
        let mut problems: Vec<String> = self.next_hops.route_warnings.iter().cloned().collect();
        let vip_device_name = self.vip_device_name();
        let outer_source_addresses = neighbour::outer_source_addresses(&vip_device_name);
        for (is_family_used, source_address, family) in [
            (
                encapsulation_servers().any(|address| address.is_ipv4()),
                IpAddr::from(outer_source_addresses.ipv4),
                "IPv4",
            ),
            (
                encapsulation_servers().any(|address| address.is_ipv6()),
                outer_source_addresses.ipv6.into(),
                "routable IPv6",
            ),
        ] {
            if is_family_used && source_address.is_unspecified() {
                problems.push(format!(
                    "interface {vip_device_name:?} has no {family} address: expected one, the source of encapsulated \
                     packets to servers with such addresses"
                ));
            }
        }
        problems.extend(self.mtu_warning());
        problems
    }

    /// Returns a warning if IPv6 packets of the minimum MTU exceed the device's MTU when outer headers are added.
    fn mtu_warning(&self) -> Option<String> {
        let ipv6_services = self.encapsulating_services().filter(|service| service.address.vip_and_port.is_ipv6());
        let packet_lengths = ipv6_services.flat_map(|service| {
            service
                .servers
                .iter()
                .map(|server| IPV6_MIN_MTU + service.settings.forwarding.encapsulation_overhead_bytes(server.address))
        });
        let required_mtu = packet_lengths.max()?;
        let mtu = device::interface_mtu_bytes(&self.interface_name).ok()? as usize;
        (mtu < required_mtu).then(|| {
            format!(
                "interface {:?} has an MTU of {mtu}: expected at least {required_mtu}, an IPv6 packet of \
                 {IPV6_MIN_MTU} bytes in its outer header, or such packets of services with IPv6 VIPs are dropped",
                self.interface_name
            )
        })
    }
}
