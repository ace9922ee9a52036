//! Resolves the MAC addresses of neighbours in each VLAN.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;

use coreward_dataplane::mac::MacAddress;
use coreward_dataplane::neighbour::{self, NeighbourResolver};
use coreward_model::vlan::Vlan;
use tokio::sync::mpsc::{UnboundedReceiver, UnboundedSender, unbounded_channel};

/// Neighbour of the load balancer's interface, which is a server, a router or another load balancer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Neighbour {
    pub vlan: Vlan,
    pub address: IpAddr,
}

/// New MAC address of a neighbour, or `None` if the neighbour no longer answers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MacResolution {
    pub neighbour: Neighbour,
    pub mac: Option<MacAddress>,
}

/// Resolvers of MAC addresses, one for each VLAN that has neighbours.
pub struct NeighbourResolvers {
    interface_name: String,
    resolution_sender: UnboundedSender<MacResolution>,
    resolvers_by_vlan: BTreeMap<Vlan, NeighbourResolver>,
}

impl NeighbourResolvers {
    /// Starts the resolver for neighbours without a VLAN. Fails when the interface does not exist or the process may
    /// not open packet sockets.
    pub fn start(interface: &str) -> anyhow::Result<(Self, UnboundedReceiver<MacResolution>)> {
        let (resolution_sender, resolution_receiver) = unbounded_channel();
        let mut resolvers =
            Self { interface_name: interface.to_owned(), resolution_sender, resolvers_by_vlan: BTreeMap::new() };
        resolvers.start_resolver_if_missing(Vlan::UNTAGGED)?;
        Ok((resolvers, resolution_receiver))
    }

    /// Sets the neighbours to resolve. Fails for the same reasons as [`start`](Self::start).
    pub fn set_neighbours(&mut self, neighbours: &BTreeSet<Neighbour>) -> anyhow::Result<()> {
        let mut addresses_by_vlan = BTreeMap::from([(Vlan::UNTAGGED, Vec::new())]);
        for Neighbour { vlan, address } in neighbours {
            addresses_by_vlan.entry(*vlan).or_default().push(*address);
        }
        self.resolvers_by_vlan.retain(|vlan, _| addresses_by_vlan.contains_key(vlan));
        for (vlan, addresses) in addresses_by_vlan {
            self.start_resolver_if_missing(vlan)?;
            self.resolvers_by_vlan[&vlan].set_addresses(addresses);
        }
        Ok(())
    }

    pub fn are_threads_running(&self) -> bool {
        self.resolvers_by_vlan.values().all(NeighbourResolver::is_alive)
    }

    fn start_resolver_if_missing(&mut self, vlan: Vlan) -> anyhow::Result<()> {
        if !self.resolvers_by_vlan.contains_key(&vlan) {
            let resolution_sender = self.resolution_sender.clone();
            let send_resolution = move |mac_change: neighbour::NeighbourMacChange| {
                let neighbour = Neighbour { vlan, address: mac_change.address };
                resolution_sender.send(MacResolution { neighbour, mac: mac_change.mac }).is_ok()
            };
            self.resolvers_by_vlan
                .insert(vlan, NeighbourResolver::start_in_vlan(&self.interface_name, vlan, send_resolution)?);
        }
        Ok(())
    }
}
