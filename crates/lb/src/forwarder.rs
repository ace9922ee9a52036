//! The data plane as the controller wants it: configuration, tables and MAC addresses put together.

use std::collections::{BTreeMap, BTreeSet};
use std::net::{IpAddr, Ipv4Addr};

use coreward_dataplane::lb::{self, COUNTER_NAMES, LoadBalancer};
use coreward_dataplane::mac::MacAddress;
use coreward_dataplane::neighbour::{Change, Resolver};
use coreward_model::placement::PlacementTable;
use coreward_wire::{FleetConfiguration, Service, ServiceIndex, v1};

/// The load balancer's program and what is known for it.
pub struct Forwarder {
    balancer: LoadBalancer,
    attachment: lb::Attachment,
    resolver: Resolver,
    macs: BTreeMap<Ipv4Addr, MacAddress>,
    services: BTreeMap<ServiceIndex, (Service, lb::ServiceIndex)>,
}

impl Forwarder {
    /// Around a program that is attached.
    pub fn new(balancer: LoadBalancer, attachment: lb::Attachment, resolver: Resolver) -> Self {
        Self { balancer, attachment, resolver, macs: BTreeMap::new(), services: BTreeMap::new() }
    }

    /// Puts a configuration in force: keys, services, servers. Tables follow.
    ///
    /// # Errors
    /// When the data plane cannot hold its services: nothing has changed then.
    pub fn configure(&mut self, configuration: FleetConfiguration) -> anyhow::Result<()> {
        let addresses: Vec<_> = configuration.services.iter().map(|service| service.address).collect();
        let indexes = self.balancer.set_services(&addresses)?;
        self.balancer.set_keys(&configuration.keys);
        self.services = configuration
            .services
            .into_iter()
            .zip(indexes)
            .map(|(service, index)| (service.index, (service, index)))
            .collect();
        let servers = self.services.values().flat_map(|(service, _)| &service.servers);
        let followed: BTreeSet<Ipv4Addr> = servers.filter_map(|server| ipv4(server.address)).collect();
        self.macs.retain(|address, _| followed.contains(address));
        self.resolver.follow(followed.into_iter().collect());
        self.set_servers();
        Ok(())
    }

    /// Every server of every service as it is known now. A server whose MAC address this process does not know yet keeps
    /// the one that a process before it left in the data plane, until ARP says otherwise.
    fn set_servers(&mut self) {
        for (service, index) in self.services.values() {
            let before: BTreeMap<_, _> = self.balancer.servers(*index).into_iter().collect();
            for server in &service.servers {
                let mac = ipv4(server.address).and_then(|address| self.macs.get(&address).copied());
                let mac = mac.or_else(|| before.get(&server.id).and_then(|left| left.mac));
                self.balancer.set_server(*index, server.id, lb::Server { mac, eligible: server.eligible });
            }
            for id in before.keys().filter(|id| service.servers.iter().all(|server| server.id != **id)) {
                self.balancer.remove_server(*index, *id);
            }
        }
    }

    /// A neighbour's MAC address became known, changed or was lost.
    pub fn neighbour(&mut self, change: Change) {
        match change.mac {
            Some(mac) => self.macs.insert(change.address, mac),
            None => self.macs.remove(&change.address),
        };
        for (service, index) in self.services.values() {
            for server in service.servers.iter().filter(|server| server.address == change.address) {
                match change.mac {
                    Some(mac) => tracing::info!("server {} is at {mac}", server.name),
                    None => tracing::warn!("server {} ({}) does not answer ARP", server.name, server.address),
                }
                let server_now = lb::Server { mac: change.mac, eligible: server.eligible };
                self.balancer.set_server(*index, server.id, server_now);
            }
        }
    }

    /// Switches to a service's new table.
    ///
    /// # Errors
    /// When the service is not configured, or the data plane cannot hold the table: the one before stays then.
    pub fn install(&mut self, service: ServiceIndex, table: &PlacementTable) -> anyhow::Result<()> {
        let Some((_, index)) = self.services.get(&service) else {
            anyhow::bail!("a table for service index {}, which is not configured", service.get());
        };
        self.balancer.install_table(*index, table)
    }

    /// Looks after what may change without being told: the device's own MAC address.
    ///
    /// # Errors
    /// When the device is gone.
    pub fn look_after(&mut self) -> anyhow::Result<()> {
        anyhow::ensure!(self.resolver.is_alive(), "the thread that resolves MAC addresses has ended");
        self.balancer.refresh_own_mac()
    }

    /// How many services have a table.
    pub fn tables(&self) -> usize {
        self.services.values().filter(|(_, index)| self.balancer.table_generation(*index).is_some()).count()
    }

    /// Servers without a MAC address, by name.
    fn unresolved(&self) -> BTreeSet<String> {
        let mut unresolved = BTreeSet::new();
        for (service, index) in self.services.values() {
            let known: BTreeMap<_, _> = self.balancer.servers(*index).into_iter().collect();
            let missing = |server: &&coreward_wire::Server| known.get(&server.id).is_none_or(|now| now.mac.is_none());
            unresolved.extend(service.servers.iter().filter(missing).map(|server| server.name.clone()));
        }
        unresolved
    }

    /// What the controller is told.
    pub fn state(&self) -> v1::LoadBalancerState {
        let generations = self.services.values().filter_map(|(service, index)| {
            let generation = self.balancer.table_generation(*index)?;
            Some((service.name.clone(), generation))
        });
        let mut packets = self.balancer.counters_without_service().packets;
        for (_, index) in self.services.values() {
            for (sum, count) in packets.iter_mut().zip(self.balancer.counters(*index).packets) {
                *sum += count;
            }
        }
        let mode = match self.attachment {
            lb::Attachment::Native => "native",
            lb::Attachment::Generic => "generic",
        };
        v1::LoadBalancerState {
            table_generations: generations.collect(),
            unresolved_servers: self.unresolved().into_iter().collect(),
            counters: COUNTER_NAMES.iter().map(|name| (*name).to_owned()).zip(packets).collect(),
            xdp_mode: mode.to_owned(),
        }
    }
}

/// IPv6 servers cannot be configured yet: the data plane refuses their services.
fn ipv4(address: IpAddr) -> Option<Ipv4Addr> {
    match address {
        IpAddr::V4(address) => Some(address),
        IpAddr::V6(_) => None,
    }
}
