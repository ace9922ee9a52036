//! Determines the VLANs of the VIPs and of servers, and the network devices for them.

use std::collections::{BTreeMap, BTreeSet};

use coreward_dataplane::vlan_device;
use coreward_model::consistency::ServiceMigration;
use coreward_model::vlan::Vlan;
use coreward_wire::{PeerLoadBalancer, Server, Service};

use super::Forwarder;
use crate::resolvers::Neighbour;

impl Forwarder {
    /// Returns the VLAN of frames of `service` to `server`. During a migration, `server` may be another load balancer,
    /// which is in the VIPs' VLAN.
    pub(super) fn vlan_for_server(&self, service: &Service, server: &Server) -> Vlan {
        let other_balancer = service.settings.migration.map(ServiceMigration::other_balancer_id);
        if other_balancer == Some(server.id) { self.vip_vlan } else { server.vlan }
    }

    pub(super) fn peer_neighbour(&self, peer: &PeerLoadBalancer) -> Option<Neighbour> {
        Some(Neighbour { vlan: self.vip_vlan, address: peer.address? })
    }

    /// Returns the VLAN of all servers of a service, or `None` if they are in several VLANs.
    pub(super) fn broadcast_vlan(&self, service: &Service) -> Option<Vlan> {
        let mut vlans = service.servers.iter().map(|server| self.vlan_for_server(service, server));
        let first_vlan = vlans.next().unwrap_or_default();
        vlans.all(|vlan| vlan == first_vlan).then_some(first_vlan)
    }

    fn all_server_vlans(&self) -> BTreeSet<Vlan> {
        let vlans_of_service = |(service, _): &(Service, _)| {
            service.servers.iter().map(|server| self.vlan_for_server(service, server)).collect::<Vec<_>>()
        };
        self.services_by_index.values().flat_map(vlans_of_service).collect()
    }

    /// Loads the program variant that the servers' VLANs require. Fails when the kernel rejects the program.
    pub(super) fn enable_server_vlans(&mut self) -> anyhow::Result<()> {
        let vlans = self.all_server_vlans();
        self.load_balancer.enable_server_vlans(vlans)
    }

    /// Returns the name of the network device in the VIPs' VLAN.
    pub(super) fn vip_device_name(&self) -> String {
        vlan_device::vlan_device_name(&self.interface_name, self.vip_vlan)
            .unwrap_or_else(|| self.interface_name.clone())
    }

    /// Returns the name of the network device that receives the packets of each VLAN.
    pub(super) fn device_names_by_vlan(&self) -> BTreeMap<Vlan, String> {
        vlan_device::vlan_device_names(&self.interface_name, self.all_server_vlans().into_iter().chain([self.vip_vlan]))
    }

    /// Makes the driver leave VLAN tags in frames, if VLANs are in use. Logs problems of the VLAN devices.
    pub(super) fn update_vlan_devices(&mut self) {
        let vlan_problems = if self.load_balancer.uses_vlans() { self.vlan_device_problems() } else { BTreeSet::new() };
        for problem in vlan_problems.difference(&self.vlan_device_problems) {
            tracing::warn!(
                event = "vlan-problem",
                %problem,
                "the load balancer cannot forward packets in a configured VLAN because of a network device"
            );
        }
        self.vlan_device_problems = vlan_problems;
    }

    fn vlan_device_problems(&self) -> BTreeSet<String> {
        let interface_name = &self.interface_name;
        let devices_by_vlan = self.device_names_by_vlan();
        let mac_problem_of = |device: &String| vlan_device::mac_mismatch_message(interface_name, device);
        let mut vlan_problems: BTreeSet<String> = devices_by_vlan.values().filter_map(mac_problem_of).collect();
        if !devices_by_vlan.contains_key(&self.vip_vlan) {
            vlan_problems.insert(vlan_device::missing_vlan_device_message(interface_name, self.vip_vlan));
        }
        if let Err(error) = vlan_device::disable_rx_vlan_offload(interface_name) {
            vlan_problems.insert(format!(
                "interface {interface_name:?} removes VLAN tags, which XDP cannot read then ({error}): expected a \
                 driver that can leave them (ethtool -K {interface_name} rxvlan off)"
            ));
        }
        vlan_problems
    }
}
