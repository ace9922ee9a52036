//! Neighbours that servers' packets go to: the server, or the router that the kernel's routes name.

use std::collections::{BTreeSet, HashMap};
use std::net::IpAddr;

use coreward_dataplane::{device, neighbour};
use coreward_wire::{Server, Service};

use super::Forwarder;

/// Least MTU of an IPv6 link (RFC 8200, Sect. 5).
const IPV6_MIN_MTU: usize = 1280;

/// Returns the neighbour that packets of `service` to `server` go to; `None`: there is no route.
pub(super) fn neighbour_of(next_hops: &HashMap<IpAddr, IpAddr>, service: &Service, server: &Server) -> Option<IpAddr> {
    if service.mode.forwarding.encapsulates() {
        return next_hops.get(&server.address).copied();
    }
    Some(server.address)
}

impl Forwarder {
    pub(super) fn neighbour_of(&self, service: &Service, server: &Server) -> Option<IpAddr> {
        neighbour_of(&self.next_hops, service, server)
    }

    fn encapsulating(&self) -> impl Iterator<Item = &Service> {
        self.services.values().map(|(service, _)| service).filter(|service| service.mode.forwarding.encapsulates())
    }

    /// Reads the kernel's next hops of all servers of services that encapsulate.
    pub(super) fn find_next_hops(&mut self) {
        let servers = self.encapsulating().flat_map(|service| &service.servers);
        let servers: HashMap<IpAddr, String> = servers.map(|server| (server.address, server.name.clone())).collect();
        let interface = nix::net::if_::if_nametoindex(self.interface.as_str()).unwrap_or(0);
        (self.next_hops, self.unrouted) = (HashMap::new(), BTreeSet::new());
        for (address, name) in servers {
            match self.routes.next_hop(interface, address) {
                Ok(next_hop) => drop(self.next_hops.insert(address, next_hop)),
                Err(error) => drop(self.unrouted.insert(format!("server {name:?} at {address} has {error}"))),
            }
        }
    }

    /// Applies the next hops after a change of routes.
    pub(super) fn follow_routes(&mut self) {
        if self.encapsulating().next().is_none() {
            return;
        }
        let before = std::mem::take(&mut self.next_hops);
        self.follow_addresses();
        if self.next_hops == before {
            return;
        }
        tracing::info!(event = "next-hops-changed", "servers are reached by other next hops");
        self.index_servers();
        for index in self.services.keys().copied().collect::<Vec<_>>() {
            self.set_servers(index);
        }
    }

    /// Returns warnings of causes for which encapsulated packets do not leave.
    pub(super) fn encapsulation_warnings(&self) -> Vec<String> {
        let servers = || self.encapsulating().flat_map(|service| &service.servers).map(|server| server.address);
        let mut problems: Vec<String> = self.unrouted.iter().cloned().collect();
        let sources = neighbour::outer_sources(&self.interface);
        for (needed, source, family) in [
            (servers().any(|address| address.is_ipv4()), IpAddr::from(sources.ipv4), "IPv4"),
            (servers().any(|address| address.is_ipv6()), sources.ipv6.into(), "routable IPv6"),
        ] {
            if needed && source.is_unspecified() {
                problems.push(format!(
                    "interface {:?} has no {family} address: expected one, the source of encapsulated packets to \
                     servers with such addresses",
                    self.interface
                ));
            }
        }
        problems.extend(self.mtu_problem());
        problems
    }

    /// Returns the warning when packets that every IPv6 link must take do not fit with their outer headers.
    fn mtu_problem(&self) -> Option<String> {
        let ipv6 = self.encapsulating().filter(|service| service.address.socket.is_ipv6());
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
