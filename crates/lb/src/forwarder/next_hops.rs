//! Neighbours that servers' packets go to: the server, or the router that the kernel's routes name.

use std::collections::{BTreeSet, HashMap};
use std::net::{IpAddr, Ipv4Addr};

use coreward_dataplane::neighbour;
use coreward_wire::{Server, Service};

use super::{Forwarder, ipv4};

/// Returns the neighbour that packets of `service` to `server` go to; `None`: there is no route.
pub(super) fn neighbour_of(
    next_hops: &HashMap<Ipv4Addr, Ipv4Addr>,
    service: &Service,
    server: &Server,
) -> Option<IpAddr> {
    if service.mode.forwarding.encapsulates() {
        return next_hops.get(&ipv4(server.address)?).copied().map(IpAddr::V4);
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
        let servers: HashMap<Ipv4Addr, String> =
            servers.filter_map(|server| Some((ipv4(server.address)?, server.name.clone()))).collect();
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
        if self.encapsulating().next().is_none() {
            return Vec::new();
        }
        let mut problems: Vec<String> = self.unrouted.iter().cloned().collect();
        if neighbour::own_address(&self.interface).is_none() {
            problems.push(format!(
                "interface {:?} has no IPv4 address: expected one, the source of encapsulated packets",
                self.interface
            ));
        }
        problems
    }
}
