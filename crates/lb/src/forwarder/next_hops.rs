//! Neighbours that servers' packets go to: the servers themselves, or routers of the kernel's routes.

use std::collections::{BTreeSet, HashMap};
use std::net::IpAddr;

use coreward_dataplane::{device, neighbour, vlan_device};
use coreward_model::vlan::Vlan;
use coreward_wire::{Server, Service};

use super::Forwarder;
use crate::resolvers::Neighbour;

/// Minimum MTU of an IPv6 link in bytes (RFC 8200, Sect. 5).
const IPV6_MIN_MTU: usize = 1280;

impl Forwarder {
    /// Returns the neighbour to which packets of `service` for `server` are sent, or `None` if the server has no route.
    pub(super) fn neighbour_of(&self, service: &Service, server: &Server) -> Option<Neighbour> {
        let direct = Neighbour { vlan: self.vlan_of(service, server), address: server.address };
        if !service.mode.forwarding.encapsulates() {
            return Some(direct);
        }
        Some(Neighbour { address: *self.next_hops.get(&direct)?, ..direct })
    }

    fn encapsulating_services(&self) -> impl Iterator<Item = &Service> {
        self.services.values().map(|(service, _)| service).filter(|service| service.mode.forwarding.encapsulates())
    }

    /// Reads the kernel's next hops to all servers of services with encapsulation.
    pub(super) fn find_next_hops(&mut self) {
        let to = |service: &Service, server: &Server| {
            (Neighbour { vlan: self.vlan_of(service, server), address: server.address }, server.name.clone())
        };
        let of_service =
            |service: &Service| service.servers.iter().map(|server| to(service, server)).collect::<Vec<_>>();
        let servers: HashMap<Neighbour, String> = self.encapsulating_services().flat_map(of_service).collect();
        let devices = vlan_device::names(&self.interface, servers.keys().map(|server| server.vlan));
        let index = |device: &String| nix::net::if_::if_nametoindex(device.as_str()).ok();
        let indexes: HashMap<Vlan, u32> =
            devices.iter().filter_map(|(vlan, device)| Some((*vlan, index(device)?))).collect();
        (self.next_hops, self.route_warnings) = (HashMap::new(), BTreeSet::new());
        for (server, name) in servers {
            let Some(index) = indexes.get(&server.vlan) else {
                // Without a device the kernel has no routes: the server is in the VLAN itself.
                self.next_hops.insert(server, server.address);
                continue;
            };
            match self.routes.next_hop(*index, server.address) {
                Ok(next_hop) => drop(self.next_hops.insert(server, next_hop)),
                Err(error) => {
                    let address = server.address;
                    self.route_warnings.insert(format!("server {name:?} at {address} has {error}"));
                }
            }
        }
    }

    /// Reads the next hops after a change of routes, and applies them.
    pub(super) fn refresh_next_hops(&mut self) {
        if self.encapsulating_services().next().is_none() {
            return;
        }
        let before = std::mem::take(&mut self.next_hops);
        if let Err(error) = self.resolve_addresses() {
            tracing::error!(
                event = "neighbours-not-set",
                error = format!("{error:#}"),
                "the load balancer cannot resolve the MAC addresses of the servers' new next hops"
            );
        }
        if self.next_hops == before {
            return;
        }
        let servers = self.next_hops.iter().filter(|(server, next_hop)| before.get(*server) != Some(*next_hop)).count();
        tracing::info!(
            event = "next-hops-changed",
            interface = self.interface,
            servers,
            "the kernel's routes have changed: the load balancer sends packets for servers to other next hops"
        );
        self.index_servers();
        for index in self.services.keys().copied().collect::<Vec<_>>() {
            self.set_servers(index);
        }
    }

    /// Returns warnings about problems that prevent the sending of encapsulated packets.
    pub(super) fn encapsulation_warnings(&self) -> Vec<String> {
        let servers =
            || self.encapsulating_services().flat_map(|service| &service.servers).map(|server| server.address);
        let mut problems: Vec<String> = self.route_warnings.iter().cloned().collect();
        let device = self.vip_device();
        let sources = neighbour::outer_sources(&device);
        for (needed, source, family) in [
            (servers().any(|address| address.is_ipv4()), IpAddr::from(sources.ipv4), "IPv4"),
            (servers().any(|address| address.is_ipv6()), sources.ipv6.into(), "routable IPv6"),
        ] {
            if needed && source.is_unspecified() {
                problems.push(format!(
                    "interface {device:?} has no {family} address: expected one, the source of encapsulated packets to \
                     servers with such addresses"
                ));
            }
        }
        problems.extend(self.mtu_problem());
        problems
    }

    /// Returns a warning if IPv6 packets of the minimum MTU do not fit the device's MTU with their outer headers.
    fn mtu_problem(&self) -> Option<String> {
        let ipv6 = self.encapsulating_services().filter(|service| service.address.socket.is_ipv6());
        let lengths = ipv6.flat_map(|service| {
            service.servers.iter().map(|server| IPV6_MIN_MTU + service.mode.forwarding.overhead(server.address))
        });
        let needed = lengths.max()?;
        let mtu = device::mtu(&self.interface).ok()? as usize;
        (mtu < needed).then(|| {
            format!(
                "interface {:?} has an MTU of {mtu}: expected at least {needed}, an IPv6 packet of {IPV6_MIN_MTU} \
                 bytes in its outer header, or such packets of services with IPv6 VIPs are dropped",
                self.interface
            )
        })
    }
}
