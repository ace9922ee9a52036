//! Applies the controller's configuration. The first one is complete, and later ones may be changes.

use std::collections::{BTreeSet, HashMap, HashSet};
use std::net::IpAddr;
use std::time::Duration;

use anyhow::Context as _;
use coreward_dataplane::clock::monotonic_time;
use coreward_dataplane::lb;
use coreward_model::ServerId;
use coreward_model::connection_table::TableOwnerNumber;
use coreward_model::consistency::CookieStamper;
use coreward_model::cookie::FleetCookieKeys;
use coreward_model::policy::TelemetryLevel;
use coreward_model::vlan::Vlan;
use coreward_wire::v1::RejectedUpdate;
use coreward_wire::{
    FleetConfiguration, FleetConfigurationChange, PeerLoadBalancer, Server, Service, ServiceIndex, UnusableService,
};

use super::Forwarder;
use super::rejections::{RejectedUpdateSubject, log_rejection};
use crate::resolvers::Neighbour;

/// Time from the start of the process until a missing controller configuration is reported.
const FIRST_CONFIGURATION_TIMEOUT: Duration = Duration::from_secs(5);

/// State of the applied fleet configuration. Its services and load balancers are in [`Forwarder`].
#[derive(Default)]
pub(super) struct FleetConfigurationState {
    /// Newest configuration generation that was confirmed on the current controller stream, or 0 if there is none.
    pub confirmed_generation: u64,
    /// Number of the applied configuration, which later changes name. `None` if none is applied or applying it failed.
    pub configuration_number: Option<u64>,
    /// Generation of the applied configuration, from any controller, or 0 if there is none.
    pub applied_generation: u64,
    /// Time at which the first configuration was applied, or `None` if none was applied yet.
    pub first_applied_at: Option<Duration>,
    /// Cookie keys that are in use, or `None` before the first configuration.
    fleet_keys: Option<FleetCookieKeys>,
    /// Whether the applied configuration has not been saved yet.
    is_unsaved: bool,
    /// Whether the next configuration must be complete, because a change did not fit the applied one.
    pub needs_complete: bool,
    /// Time at which the absence of a configuration will be logged, or `None` after it was logged.
    absence_log_due_at: Option<Duration>,
}

impl FleetConfigurationState {
    pub fn new() -> Self {
        Self { absence_log_due_at: Some(monotonic_time() + FIRST_CONFIGURATION_TIMEOUT), ..Self::default() }
    }

    /// Records that a configuration was applied.
    fn record_applied_configuration(&mut self, configuration_number: u64, generation: u64) {
        (self.configuration_number, self.confirmed_generation, self.applied_generation) =
            (Some(configuration_number), generation, generation);
        self.first_applied_at.get_or_insert_with(monotonic_time);
    }
}

/// Returns the fields of a server that require new look-ups of MAC addresses if they change.
fn server_id_address_and_vlan(server: &Server) -> (ServerId, IpAddr, Vlan) {
    (server.id, server.address, server.vlan)
}

fn peer_names_and_addresses(peers: &[PeerLoadBalancer]) -> Vec<(&str, Option<IpAddr>)> {
    peers.iter().map(|peer| (peer.name.as_str(), peer.address)).collect()
}

impl Forwarder {
    /// Applies a configuration. Unusable services are reported to the controller and keep their previous configuration.
    pub fn apply_and_report_configuration(
        &mut self,
        configuration_number: u64,
        mut configuration: FleetConfiguration,
        unusable_services: &[UnusableService],
    ) {
        let generation = configuration.generation;
        let service_indexes: BTreeSet<u32> =
            configuration.services.iter().map(|service| service.index.get().into()).collect();
        self.rejections.retain_table_rejections(|index| service_indexes.contains(&index));
        configuration
            .services
            .extend(self.previous_versions_of_rejected_services(unusable_services, &configuration.services));
        let apply_result = self.apply_configuration(configuration_number, configuration);
        self.record_rejected_services(generation, unusable_services, &apply_result);
    }

    pub fn apply_and_report_change(
        &mut self,
        mut change: FleetConfigurationChange,
        unusable_services: &[UnusableService],
    ) {
        let generation = change.configuration.generation;
        for service in &change.configuration.services {
            self.rejections.clear_rejection(RejectedUpdateSubject::ServiceWithIndex(service.index.get().into()));
        }
        for index in &change.removed_service_indexes {
            self.rejections.clear_service_rejections(index.get().into());
        }
        change
            .configuration
            .services
            .extend(self.previous_versions_of_rejected_services(unusable_services, &change.configuration.services));
        let change_result = self.try_apply_change(change);
        match &change_result {
            Err(error) if self.configuration.needs_complete => log_rejection("change", None, &format!("{error:#}")),
            _ => self.record_rejected_services(generation, unusable_services, &change_result),
        }
    }

    /// Returns the previous configurations of those services whose new ones are unusable.
    fn previous_versions_of_rejected_services(
        &self,
        unusable_services: &[UnusableService],
        new_services: &[Service],
    ) -> Vec<Service> {
        let to_previous_service = |unusable_service: &UnusableService| {
            let (previous_service, _) = self.services_by_index.get(&ServiceIndex::new(unusable_service.index)?)?;
            let is_address_free = new_services.iter().all(|other| other.address != previous_service.address);
            (previous_service.name == unusable_service.name && is_address_free)
                .then(|| unusable_service.replace_servers_in(previous_service))
        };
        unusable_services.iter().filter_map(to_previous_service).collect()
    }

    fn record_rejected_services(
        &mut self,
        generation: u64,
        unusable_services: &[UnusableService],
        apply_result: &anyhow::Result<()>,
    ) {
        for service in unusable_services {
            self.rejections.record_rejection(
                RejectedUpdateSubject::ServiceWithIndex(service.index),
                service.to_rejected_update(generation),
            );
        }
        match apply_result {
            Ok(()) => self.rejections.clear_rejection(RejectedUpdateSubject::WholeConfiguration),
            Err(error) => self.reject_configuration(generation, error),
        }
    }

    /// Records that the whole configuration is unusable. `generation` is 0 if it is unknown.
    pub fn reject_configuration(&mut self, generation: u64, error: &anyhow::Error) {
        let (service, table) = (String::new(), false);
        let reason = format!("{error:#}");
        self.rejections.record_rejection(
            RejectedUpdateSubject::WholeConfiguration,
            RejectedUpdate { service, generation, reason, table },
        );
    }

    pub fn record_table_install_result(
        &mut self,
        service_index: u32,
        generation: u64,
        install_result: &anyhow::Result<()>,
    ) {
        let configured_service = ServiceIndex::new(service_index).and_then(|index| self.services_by_index.get(&index));
        let Err(error) = install_result else {
            return self.rejections.clear_rejection(RejectedUpdateSubject::TableOfService(service_index));
        };
        // The service's configuration was already rejected. The controller was informed of this, but still makes the
        // service's tables because other load balancers use them.
        if configured_service.is_none() && self.rejections.is_service_rejected(service_index) {
            return;
        }
        let service_name =
            configured_service.map_or_else(|| format!("index {service_index}"), |(service, _)| service.name.clone());
        let reason = format!("{error:#}");
        self.rejections.record_rejection(
            RejectedUpdateSubject::TableOfService(service_index),
            RejectedUpdate { service: service_name, generation, reason, table: true },
        );
    }

    /// Applies the keys, services and servers of a configuration. Placement tables arrive separately. A later change
    /// names this configuration by `configuration_number`. If the data plane cannot hold the services, this fails
    /// without effect.
    pub fn apply_configuration(
        &mut self,
        configuration_number: u64,
        configuration: FleetConfiguration,
    ) -> anyhow::Result<()> {
        self.configuration.configuration_number = None;
        let address_and_mode = |service: &Service| (service.address, service.settings);
        let addresses_and_modes: Vec<_> = configuration.services.iter().map(address_and_mode).collect();
        let lb_service_indexes = self.load_balancer.set_services(&addresses_and_modes)?;
        for (service, index) in configuration.services.iter().zip(&lb_service_indexes) {
            self.load_balancer.set_service_name(*index, &service.name);
            if let Some(key) = service.time_key {
                self.load_balancer.set_time_key(*index, key);
            }
        }
        self.load_balancer.set_cookie_keys(&configuration.cookie_keys);
        (self.configuration.fleet_keys, self.configuration.is_unsaved) = (Some(configuration.cookie_keys), true);
        self.services_by_index = configuration
            .services
            .into_iter()
            .zip(lb_service_indexes)
            .map(|(service, index)| (service.index, (service, index)))
            .collect();
        self.update_telemetry_level()?;
        self.enable_server_vlans()?;
        self.fleet_load_balancers = configuration.load_balancers;
        self.traffic_report_interval = configuration.report_interval;
        self.load_based_table_lifetime = configuration.table_lifetime;
        self.table_ages.retain_services(|service| self.services_by_index.contains_key(&service));
        self.resolve_mac_addresses()?;
        self.index_servers_by_neighbour();
        self.masked_targets.retain(|(service, _)| self.services_by_index.contains_key(service));
        for index in self.services_by_index.keys().copied().collect::<Vec<_>>() {
            self.set_servers_of_service(index);
        }
        self.set_connection_table_owners();
        self.health_checks.configure_checks(self.services_by_index.values().map(|(service, _)| service));
        self.configuration.record_applied_configuration(configuration_number, configuration.generation);
        Ok(())
    }

    /// Applies a change to the current configuration by processing only the changed servers. If services have changed,
    /// a complete configuration is needed instead. Fails if the change is based on another configuration
    /// ([`Forwarder::needs_complete_configuration`]), or for the same reasons as a complete configuration.
    pub fn try_apply_change(&mut self, change: FleetConfigurationChange) -> anyhow::Result<()> {
        if self.configuration.configuration_number != Some(change.base_configuration_number) {
            self.configuration.needs_complete = true;
            anyhow::bail!(
                "the change is based on configuration {}, which is not in force: expected a complete configuration",
                change.base_configuration_number
            );
        }
        if self.affects_more_than_servers(&change) {
            let change_number = change.next_configuration_number;
            let previous_configuration =
                self.current_configuration().context("a change without a configuration in force")?;
            let complete_configuration = change.apply_to(previous_configuration);
            return self.apply_configuration(change_number, complete_configuration);
        }
        let next_configuration = change.configuration;
        self.load_balancer.set_cookie_keys(&next_configuration.cookie_keys);
        (self.configuration.fleet_keys, self.configuration.is_unsaved) = (Some(next_configuration.cookie_keys), true);
        self.traffic_report_interval = next_configuration.report_interval;
        self.load_based_table_lifetime = next_configuration.table_lifetime;
        self.fleet_load_balancers = next_configuration.load_balancers;
        let has_health_checks = self.replace_services(next_configuration.services)?;
        self.set_connection_table_owners();
        if has_health_checks {
            self.health_checks.configure_checks(self.services_by_index.values().map(|(service, _)| service));
        }
        self.configuration
            .record_applied_configuration(change.next_configuration_number, next_configuration.generation);
        Ok(())
    }

    /// Returns whether a change adds or removes services, changes more of a service than its servers, or changes the
    /// names or addresses of load balancers.
    fn affects_more_than_servers(&self, change: &FleetConfigurationChange) -> bool {
        let differs_only_in_servers = |new_service: &Service| {
            let known_service = self.services_by_index.get(&new_service.index);
            known_service.is_some_and(|(old_service, _)| {
                Service { servers: old_service.servers.clone(), ..new_service.clone() } == *old_service
            })
        };
        let next_configuration = &change.configuration;
        let have_peers_changed = peer_names_and_addresses(&self.fleet_load_balancers)
            != peer_names_and_addresses(&next_configuration.load_balancers);
        !change.removed_service_indexes.is_empty()
            || have_peers_changed
            || !next_configuration.services.iter().all(differs_only_in_servers)
    }

    /// Replaces known services by new ones, which differ only in their servers. Returns whether a new service has a
    /// health check.
    fn replace_services(&mut self, new_services: Vec<Service>) -> anyhow::Result<bool> {
        let (mut have_servers_moved, mut has_health_checks) = (false, false);
        let mut changed_services = Vec::new();
        for new_service in new_services {
            let Some((service, _)) = self.services_by_index.get_mut(&new_service.index) else { continue };
            have_servers_moved |= !new_service
                .servers
                .iter()
                .map(server_id_address_and_vlan)
                .eq(service.servers.iter().map(server_id_address_and_vlan));
            has_health_checks |= new_service.health_check.is_some();
            changed_services.push(new_service.index);
            *service = new_service;
        }
        if have_servers_moved {
            self.enable_server_vlans()?;
            self.resolve_mac_addresses()?;
            self.index_servers_by_neighbour();
        }
        changed_services.into_iter().for_each(|index| self.set_servers_of_service(index));
        Ok(has_health_checks)
    }

    /// Returns whether the next configuration must be complete, because a change was based on another configuration.
    pub fn needs_complete_configuration(&self) -> bool {
        self.configuration.needs_complete
    }

    /// Applies a configuration that an earlier daemon saved. The controller's next configuration must then be complete.
    pub fn restore_saved_configuration(&mut self, configuration: FleetConfiguration) -> anyhow::Result<()> {
        self.apply_configuration(0, configuration)?;
        (
            self.configuration.confirmed_generation,
            self.configuration.configuration_number,
            self.configuration.is_unsaved,
        ) = (0, None, false);
        Ok(())
    }

    /// Returns a warning if the controller's first configuration is overdue and no configuration was saved.
    pub(super) fn missing_configuration_warning(&self) -> Option<&'static str> {
        if self.configuration.fleet_keys.is_some() || self.configuration.absence_log_due_at.is_some() {
            return None;
        }
        Some(if self.load_balancer.is_state_taken_over() || self.load_balancer.is_upgrade_pending() {
            "no configuration: the pinned services and tables forward, without health checks"
        } else {
            "no configuration: packets for VIPs pass to this machine, as no VIP is known"
        })
    }

    pub(super) fn log_missing_configuration(&mut self) {
        if self.configuration.absence_log_due_at.is_none_or(|log_at| monotonic_time() < log_at) {
            return;
        }
        self.configuration.absence_log_due_at = None;
        if let Some(problem) = self.missing_configuration_warning() {
            tracing::warn!(event = "no-configuration", "{problem}");
        }
    }

    /// Returns the current configuration, if it has changed since the last call.
    pub fn take_changed_configuration(&mut self) -> Option<FleetConfiguration> {
        std::mem::take(&mut self.configuration.is_unsaved).then(|| self.current_configuration()).flatten()
    }

    fn current_configuration(&self) -> Option<FleetConfiguration> {
        Some(FleetConfiguration {
            generation: self.configuration.applied_generation,
            cookie_keys: self.configuration.fleet_keys?,
            services: self.services_by_index.values().map(|(service, _)| service.clone()).collect(),
            load_balancers: self.fleet_load_balancers.clone(),
            report_interval: self.traffic_report_interval,
            table_lifetime: self.load_based_table_lifetime,
        })
    }

    fn update_telemetry_level(&mut self) -> anyhow::Result<()> {
        let needed_telemetry_level =
            self.services_by_index.values().map(|(service, _)| service.telemetry_level).max().unwrap_or_default();
        self.load_balancer.set_server_traffic_counting(needed_telemetry_level == TelemetryLevel::All)
    }

    /// Starts to resolve MAC addresses of servers and load balancers. Fails if the process may not open packet sockets.
    pub(super) fn resolve_mac_addresses(&mut self) -> anyhow::Result<()> {
        self.read_next_hops();
        let neighbours_of_service = |(service, _): &(Service, _)| {
            service.servers.iter().filter_map(|server| self.neighbour_for_server(service, server)).collect::<Vec<_>>()
        };
        let server_neighbours = self.services_by_index.values().flat_map(neighbours_of_service);
        let other_peers = self.fleet_load_balancers.iter().filter(|peer| peer.name != self.own_name);
        let peer_neighbours = other_peers.filter_map(|peer| self.peer_neighbour(peer));
        let required_neighbours: BTreeSet<Neighbour> = server_neighbours.chain(peer_neighbours).collect();
        self.mac_addresses.retain(|neighbour, _| required_neighbours.contains(neighbour));
        self.resolvers.set_neighbours(&required_neighbours)
    }

    pub(super) fn index_servers_by_neighbour(&mut self) {
        let mut servers_by_neighbour: HashMap<Neighbour, Vec<(ServiceIndex, usize)>> = HashMap::new();
        for (index, (service, _)) in &self.services_by_index {
            for (position, server) in service.servers.iter().enumerate() {
                if let Some(neighbour) = self.neighbour_for_server(service, server) {
                    servers_by_neighbour.entry(neighbour).or_default().push((*index, position));
                }
            }
        }
        self.servers_by_neighbour = servers_by_neighbour;
    }

    /// Applies all of the service's servers to the data plane. A server whose MAC address is unknown keeps the address
    /// from an earlier process until ARP finds another.
    pub(super) fn set_servers_of_service(&mut self, service_index: ServiceIndex) {
        self.mask_down_servers(service_index);
        let Some((service, lb_service_index)) = self.services_by_index.get(&service_index) else { return };
        let mut removed_server_ids: HashSet<ServerId> =
            self.load_balancer.member_server_ids(*lb_service_index).into_iter().collect();
        self.load_balancer.set_broadcast_vlan(*lb_service_index, self.broadcast_vlan(service));
        for server in &service.servers {
            removed_server_ids.remove(&server.id);
            let previous_server = self.load_balancer.server(*lb_service_index, server.id);
            let neighbour = self.neighbour_for_server(service, server);
            let mac = neighbour.and_then(|neighbour| self.mac_addresses.get(&neighbour).copied());
            let mac =
                mac.or_else(|| previous_server.and_then(|lb_server| lb_server.mac)).filter(|_| neighbour.is_some());
            let tunnel = lb::ServerTunnel { destination_address: server.address, source_port: None };
            if let Err(error) = self.load_balancer.set_server_tunnel(server.id, tunnel) {
                tracing::error!(
                    event = "server-address-not-set",
                    server = server.name,
                    service = service.name,
                    address = %server.address,
                    error = format!("{error:#}"),
                    "the load balancer cannot encapsulate packets for the server's new address"
                );
            }
            self.load_balancer.set_server_vlan(server.id, self.vlan_for_server(service, server));
            let new_server = lb::Server { mac, is_eligible: self.may_get_new_connections(service_index, server) };
            // After a switch to LB-side stamping, even an unchanged server's address must be set.
            if previous_server != Some(new_server) || service.settings.timestamps == CookieStamper::LoadBalancer {
                self.load_balancer.set_server(*lb_service_index, server.id, new_server);
            }
        }
        removed_server_ids.into_iter().for_each(|id| self.load_balancer.remove_server(*lb_service_index, id));
    }

    /// Applies the numbers and addresses of all load balancers with a connection table to the data plane. A load
    /// balancer whose MAC address is unknown keeps the address from an earlier process.
    fn set_connection_table_owners(&mut self) {
        let own_owner_number =
            self.fleet_load_balancers.iter().find(|peer| peer.name == self.own_name).and_then(|peer| peer.owner_number);
        if self.load_balancer.owner_number() != own_owner_number {
            self.load_balancer.set_owner_number(own_owner_number);
        }
        for owner in TableOwnerNumber::all() {
            let peer = self
                .fleet_load_balancers
                .iter()
                .find(|peer| peer.owner_number == Some(owner) && peer.name != self.own_name);
            match peer {
                None => self.load_balancer.remove_owner(owner),
                Some(peer) if !peer.is_alive => self.load_balancer.set_owner_mac(owner, None),
                Some(peer) => {
                    let mac = self.peer_mac(peer).or_else(|| self.load_balancer.owner_mac(owner));
                    self.load_balancer.set_owner_mac(owner, mac);
                }
            }
        }
    }
}
