//! VLANs of the VIPs and of servers, and the devices for them.

use std::collections::{BTreeMap, BTreeSet};

use coreward_dataplane::vlan_device;
use coreward_model::consistency::ServiceMigration;
use coreward_model::vlan::Vlan;
use coreward_wire::{Peer, Server, Service};

use super::Forwarder;
use crate::resolvers::Neighbour;

impl Forwarder {
    /// Returns the VLAN in which frames of `service` reach `server`; for another load balancer, the VIPs' VLAN.
    pub(super) fn vlan_of(&self, service: &Service, server: &Server) -> Vlan {
        let other_balancer = service.mode.migration.map(ServiceMigration::other_balancer);
        if other_balancer == Some(server.id) { self.vlan } else { server.vlan }
    }

    pub(super) fn peer_neighbour(&self, peer: &Peer) -> Option<Neighbour> {
        Some(Neighbour { vlan: self.vlan, address: peer.address? })
    }

    /// Returns the one VLAN that has all servers of a service, or `None` if they are in several VLANs.
    pub(super) fn broadcast_vlan(&self, service: &Service) -> Option<Vlan> {
        let mut vlans = service.servers.iter().map(|server| self.vlan_of(service, server));
        let first = vlans.next().unwrap_or_default();
        vlans.all(|vlan| vlan == first).then_some(first)
    }

    fn server_vlans(&self) -> BTreeSet<Vlan> {
        let of_service = |(service, _): &(Service, _)| {
            service.servers.iter().map(|server| self.vlan_of(service, server)).collect::<Vec<_>>()
        };
        self.services.values().flat_map(of_service).collect()
    }

    /// Loads the variant of the program that the servers' VLANs require. Fails when the kernel rejects the program.
    pub(super) fn use_server_vlans(&mut self) -> anyhow::Result<()> {
        let vlans = self.server_vlans();
        self.balancer.use_server_vlans(vlans)
    }

    /// Returns the name of the network device in the VIPs' VLAN.
    pub(super) fn vip_device(&self) -> String {
        vlan_device::name(&self.interface, self.vlan).unwrap_or_else(|| self.interface.clone())
    }

    /// Returns the name of the network device that receives the packets of each VLAN.
    pub(super) fn devices(&self) -> BTreeMap<Vlan, String> {
        vlan_device::names(&self.interface, self.server_vlans().into_iter().chain([self.vlan]))
    }

    /// Configures the driver to leave VLAN tags in frames, if VLANs are in use. Logs problems of the VLAN devices.
    pub(super) fn check_vlans(&mut self) {
        let found = if self.balancer.uses_vlans() { self.vlan_faults() } else { BTreeSet::new() };
        for problem in found.difference(&self.vlan_problems) {
            tracing::warn!(
                event = "vlan-problem",
                %problem,
                "the load balancer cannot forward packets in a configured VLAN because of a network device"
            );
        }
        self.vlan_problems = found;
    }

    fn vlan_faults(&self) -> BTreeSet<String> {
        let interface = &self.interface;
        let devices = self.devices();
        let mac_problem = |device: &String| vlan_device::mac_problem(interface, device);
        let mut found: BTreeSet<String> = devices.values().filter_map(mac_problem).collect();
        if !devices.contains_key(&self.vlan) {
            found.insert(vlan_device::missing_device_message(interface, self.vlan));
        }
        if let Err(error) = vlan_device::disable_rx_vlan_offload(interface) {
            found.insert(format!(
                "interface {interface:?} removes VLAN tags, which XDP cannot read then ({error}): expected a driver \
                 that can leave them (ethtool -K {interface} rxvlan off)"
            ));
        }
        found
    }
}
