//! Configuration from the controller: a complete one first, then changes.

use std::collections::{BTreeSet, HashMap, HashSet};
use std::net::IpAddr;

use anyhow::Context as _;
use coreward_dataplane::clock::monotonic;
use coreward_dataplane::lb;
use coreward_model::ServerId;
use coreward_model::connection_table::OwnerNumber;
use coreward_model::consistency::Timestamps;
use coreward_model::policy::TelemetryLevel;
use coreward_model::vlan::Vlan;
use coreward_wire::v1::RefusedUpdate;
use coreward_wire::{FleetChange, FleetConfiguration, Peer, RefusedService, Server, Service, ServiceIndex};

use super::Forwarder;
use super::refusals::RefusalSubject;
use crate::resolvers::Neighbour;

/// Returns the fields that determine the MAC address of a server and its position in lists.
fn server_identity(server: &Server) -> (ServerId, IpAddr, Vlan) {
    (server.id, server.address, server.vlan)
}

fn peer_addresses(peers: &[Peer]) -> Vec<(&str, Option<IpAddr>)> {
    peers.iter().map(|peer| (peer.name.as_str(), peer.address)).collect()
}

impl Forwarder {
    /// Applies a configuration. Unusable services are reported and keep their previous configuration.
    pub fn apply_configuration(
        &mut self,
        number: u64,
        mut configuration: FleetConfiguration,
        refused: &[RefusedService],
    ) -> anyhow::Result<()> {
        let generation = configuration.generation;
        let services: BTreeSet<u32> = configuration.services.iter().map(|service| service.index.get().into()).collect();
        self.refusals.retain_tables(|index| services.contains(&index));
        configuration.services.extend(self.services_in_force(refused, &configuration.services));
        let outcome = self.configure(number, configuration);
        self.report_refused(generation, refused, &outcome);
        outcome
    }

    pub fn apply_change(&mut self, mut change: FleetChange, refused: &[RefusedService]) -> anyhow::Result<()> {
        let generation = change.configuration.generation;
        for service in &change.configuration.services {
            self.refusals.accept(RefusalSubject::Service(service.index.get().into()));
        }
        for index in &change.removed_services {
            self.refusals.forget_service(index.get().into());
        }
        change.configuration.services.extend(self.services_in_force(refused, &change.configuration.services));
        let outcome = self.update_configuration(change);
        if !self.needs_configuration {
            self.report_refused(generation, refused, &outcome);
        }
        outcome
    }

    /// Returns the previous configurations of services whose new ones are unusable.
    fn services_in_force(&self, refused: &[RefusedService], others: &[Service]) -> Vec<Service> {
        let kept = |refused: &RefusedService| {
            let (before, _) = self.services.get(&ServiceIndex::new(refused.index)?)?;
            let is_free = others.iter().all(|other| other.address != before.address);
            (before.name == refused.name && is_free).then(|| refused.with_servers_of(before))
        };
        refused.iter().filter_map(kept).collect()
    }

    fn report_refused(&mut self, generation: u64, refused: &[RefusedService], outcome: &anyhow::Result<()>) {
        for service in refused {
            self.refusals.refuse(RefusalSubject::Service(service.index), service.to_refused_update(generation));
        }
        match outcome {
            Ok(()) => self.refusals.accept(RefusalSubject::WholeConfiguration),
            Err(error) => self.refuse_all(generation, error),
        }
    }

    /// Records that a configuration is unusable as a whole. `generation` is 0 if it is unknown.
    pub fn refuse_all(&mut self, generation: u64, error: &anyhow::Error) {
        let (service, table) = (String::new(), false);
        let reason = format!("{error:#}");
        self.refusals.refuse(RefusalSubject::WholeConfiguration, RefusedUpdate { service, generation, reason, table });
    }

    pub fn record_table_outcome(&mut self, index: u32, generation: u64, outcome: &anyhow::Result<()>) {
        let known = ServiceIndex::new(index).and_then(|index| self.services.get(&index));
        let Err(error) = outcome else { return self.refusals.accept(RefusalSubject::Table(index)) };
        // The controller got the report, and makes tables of the service for other load balancers.
        if known.is_none() && self.refusals.is_refused(index) {
            return;
        }
        let service = known.map_or_else(|| format!("index {index}"), |(service, _)| service.name.clone());
        let reason = format!("{error:#}");
        self.refusals.refuse(RefusalSubject::Table(index), RefusedUpdate { service, generation, reason, table: true });
    }

    /// Applies a configuration: keys, services and servers. Tables follow later. Changes refer to the configuration by
    /// `number`. Fails, without effect, when the data plane cannot hold the services.
    pub fn configure(&mut self, number: u64, configuration: FleetConfiguration) -> anyhow::Result<()> {
        self.configuration_number = None;
        let with_mode = |service: &Service| (service.address, service.mode);
        let services: Vec<_> = configuration.services.iter().map(with_mode).collect();
        let indexes = self.balancer.set_services(&services)?;
        for (service, index) in configuration.services.iter().zip(&indexes) {
            self.balancer.set_service_name(*index, &service.name);
            if let Some(key) = service.time_key {
                self.balancer.set_time_key(*index, key);
            }
        }
        self.balancer.set_keys(&configuration.keys);
        (self.keys, self.is_unsaved) = (Some(configuration.keys), true);
        self.services = configuration
            .services
            .into_iter()
            .zip(indexes)
            .map(|(service, index)| (service.index, (service, index)))
            .collect();
        self.count_traffic()?;
        self.use_server_vlans()?;
        self.peers = configuration.load_balancers;
        self.report_interval = configuration.report_interval;
        self.table_lifetime = configuration.table_lifetime;
        self.table_ages.retain(|service| self.services.contains_key(&service));
        self.resolve_addresses()?;
        self.index_servers();
        self.masked_targets.retain(|(service, _)| self.services.contains_key(service));
        for index in self.services.keys().copied().collect::<Vec<_>>() {
            self.set_servers(index);
        }
        self.set_owners();
        self.health.configure(self.services.values().map(|(service, _)| service));
        (self.confirmed_generation, self.configuration_number) = (configuration.generation, Some(number));
        self.applied_generation = self.confirmed_generation;
        self.configured_at.get_or_insert_with(monotonic);
        Ok(())
    }

    /// Applies a change to the configuration in force, by processing only changed servers; changed services need a
    /// complete configuration. Fails when the change is to another configuration
    /// ([`Forwarder::needs_complete_configuration`]), and for the same reasons as a complete configuration.
    pub fn update_configuration(&mut self, change: FleetChange) -> anyhow::Result<()> {
        if self.configuration_number != Some(change.base_number) {
            self.needs_configuration = true;
            anyhow::bail!(
                "the change is based on configuration {}, which is not in force: expected a complete configuration",
                change.base_number
            );
        }
        let same_but_servers = |new: &Service| {
            let known = self.services.get(&new.index);
            known.is_some_and(|(old, _)| Service { servers: old.servers.clone(), ..new.clone() } == *old)
        };
        let next = &change.configuration;
        let peers_moved = peer_addresses(&self.peers) != peer_addresses(&next.load_balancers);
        if !change.removed_services.is_empty() || peers_moved || !next.services.iter().all(same_but_servers) {
            let number = change.number;
            let before = self.configuration().context("a change without a configuration in force")?;
            let whole = change.apply_to(before);
            return self.configure(number, whole);
        }
        self.balancer.set_keys(&next.keys);
        (self.keys, self.is_unsaved) = (Some(next.keys), true);
        self.report_interval = next.report_interval;
        self.table_lifetime = next.table_lifetime;
        self.peers = change.configuration.load_balancers;
        let (mut moved, mut checked) = (false, false);
        let mut changed = Vec::new();
        for new in change.configuration.services {
            let Some((service, _)) = self.services.get_mut(&new.index) else { continue };
            moved |= !new.servers.iter().map(server_identity).eq(service.servers.iter().map(server_identity));
            checked |= new.check.is_some();
            changed.push(new.index);
            *service = new;
        }
        if moved {
            self.use_server_vlans()?;
            self.resolve_addresses()?;
            self.index_servers();
        }
        changed.into_iter().for_each(|index| self.set_servers(index));
        self.set_owners();
        if checked {
            self.health.configure(self.services.values().map(|(service, _)| service));
        }
        (self.confirmed_generation, self.configuration_number) = (change.configuration.generation, Some(change.number));
        self.applied_generation = self.confirmed_generation;
        Ok(())
    }

    /// Returns whether the next configuration must be complete, because a change did not apply.
    pub fn needs_configuration(&self) -> bool {
        self.needs_configuration
    }

    /// Applies a configuration that an earlier daemon saved. After it, the next one of a controller must be complete.
    pub fn restore(&mut self, configuration: FleetConfiguration) -> anyhow::Result<()> {
        self.configure(0, configuration)?;
        (self.confirmed_generation, self.configuration_number, self.is_unsaved) = (0, None, false);
        Ok(())
    }

    /// Returns a warning if the first configuration of a controller is overdue and none was saved.
    pub(super) fn missing_configuration(&self) -> Option<&'static str> {
        if self.keys.is_some() || self.missing_log_due.is_some() {
            return None;
        }
        Some(if self.balancer.is_taken_over() || self.balancer.is_upgrade_pending() {
            "no configuration: the pinned services and tables forward, without health checks"
        } else {
            "no configuration: packets for VIPs pass to this machine, as no VIP is known"
        })
    }

    pub(super) fn log_missing_configuration(&mut self) {
        if self.missing_log_due.is_none_or(|due| monotonic() < due) {
            return;
        }
        self.missing_log_due = None;
        if let Some(problem) = self.missing_configuration() {
            tracing::warn!(event = "no-configuration", "{problem}");
        }
    }

    /// Returns the configuration in force, if it changed since the last call.
    pub fn take_changed_configuration(&mut self) -> Option<FleetConfiguration> {
        std::mem::take(&mut self.is_unsaved).then(|| self.configuration()).flatten()
    }

    fn configuration(&self) -> Option<FleetConfiguration> {
        Some(FleetConfiguration {
            generation: self.applied_generation,
            keys: self.keys?,
            services: self.services.values().map(|(service, _)| service.clone()).collect(),
            load_balancers: self.peers.clone(),
            report_interval: self.report_interval,
            table_lifetime: self.table_lifetime,
        })
    }

    fn count_traffic(&mut self) -> anyhow::Result<()> {
        let wanted = self.services.values().map(|(service, _)| service.telemetry_level).max().unwrap_or_default();
        self.balancer.count_traffic(wanted == TelemetryLevel::All)
    }

    /// Starts to resolve the addresses of servers and load balancers. Fails when packet sockets are not allowed.
    pub(super) fn resolve_addresses(&mut self) -> anyhow::Result<()> {
        self.find_next_hops();
        let of_service = |(service, _): &(Service, _)| {
            service.servers.iter().filter_map(|server| self.neighbour_of(service, server)).collect::<Vec<_>>()
        };
        let servers = self.services.values().flat_map(of_service);
        let others = self.peers.iter().filter(|peer| peer.name != self.name);
        let peers = others.filter_map(|peer| self.peer_neighbour(peer));
        let followed: BTreeSet<Neighbour> = servers.chain(peers).collect();
        self.macs.retain(|neighbour, _| followed.contains(neighbour));
        self.resolvers.set_neighbours(&followed)
    }

    pub(super) fn index_servers(&mut self) {
        let mut servers_by_neighbour: HashMap<Neighbour, Vec<(ServiceIndex, usize)>> = HashMap::new();
        for (index, (service, _)) in &self.services {
            for (position, server) in service.servers.iter().enumerate() {
                if let Some(neighbour) = self.neighbour_of(service, server) {
                    servers_by_neighbour.entry(neighbour).or_default().push((*index, position));
                }
            }
        }
        self.servers_by_neighbour = servers_by_neighbour;
    }

    /// Applies every server of the service to the data plane. A server without a resolved MAC address keeps the one
    /// from an earlier process until ARP finds another.
    pub(super) fn set_servers(&mut self, service_index: ServiceIndex) {
        self.mask_down_servers(service_index);
        let Some((service, index)) = self.services.get(&service_index) else { return };
        let mut gone: HashSet<ServerId> = self.balancer.members(*index).into_iter().collect();
        self.balancer.set_broadcast_vlan(*index, self.broadcast_vlan(service));
        for server in &service.servers {
            gone.remove(&server.id);
            let before = self.balancer.server(*index, server.id);
            let neighbour = self.neighbour_of(service, server);
            let mac = neighbour.and_then(|neighbour| self.macs.get(&neighbour).copied());
            let mac = mac.or_else(|| before.and_then(|before| before.mac)).filter(|_| neighbour.is_some());
            let tunnel = lb::Tunnel { address: server.address, source_port: None };
            if let Err(error) = self.balancer.set_tunnel(server.id, tunnel) {
                tracing::error!(
                    event = "server-address-not-set",
                    server = server.name,
                    service = service.name,
                    address = %server.address,
                    error = format!("{error:#}"),
                    "the load balancer cannot encapsulate packets for the server's new address"
                );
            }
            self.balancer.set_server_vlan(server.id, self.vlan_of(service, server));
            let now = lb::Server { mac, is_eligible: self.is_eligible(service_index, server) };
            // After a switch to LB-side stamping, even an unchanged server needs its address.
            if before != Some(now) || service.mode.timestamps == Timestamps::LoadBalancer {
                self.balancer.set_server(*index, server.id, now);
            }
        }
        gone.into_iter().for_each(|id| self.balancer.remove_server(*index, id));
    }

    /// Applies the numbers and addresses of all load balancers that have a connection table. One without a resolved MAC
    /// address keeps the one from an earlier process, as servers do.
    fn set_owners(&mut self) {
        let own = self.peers.iter().find(|peer| peer.name == self.name).and_then(|peer| peer.owner);
        if self.balancer.owner_number() != own {
            self.balancer.set_owner_number(own);
        }
        for owner in OwnerNumber::all() {
            let peer = self.peers.iter().find(|peer| peer.owner == Some(owner) && peer.name != self.name);
            match peer {
                None => self.balancer.forget_owner(owner),
                Some(peer) if !peer.is_alive => self.balancer.set_owner_mac(owner, None),
                Some(peer) => {
                    let mac = self.peer_mac(peer).or_else(|| self.balancer.owner_mac(owner));
                    self.balancer.set_owner_mac(owner, mac);
                }
            }
        }
    }
}
