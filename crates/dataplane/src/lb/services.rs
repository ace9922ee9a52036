//! Services in the data plane: a directory with two halves, of which one is active. One store switches between them.

use std::collections::{BTreeMap, BTreeSet};
use std::mem::offset_of;

use anyhow::Context as _;
use coreward_intf as intf;
use coreward_model::ServiceAddress;
use coreward_model::consistency::{Consistency, ServiceMode, Timestamps};
use coreward_model::forwarding::Forwarding;
use coreward_model::tuple::{Protocol, address_from_words};
use libbpf_rs::{MapCore as _, MapFlags};
use zerocopy::FromBytes as _;

use super::program::Maps;
use super::tables::StoredTable;
use super::variant::{EnabledFeatures, Variant};
use super::{LoadBalancer, ServiceIndex, service_state_offset};
use crate::service_slots;

#[derive(Debug)]
pub(super) struct Service {
    pub index: ServiceIndex,
    pub mode: ServiceMode,
    pub table: Option<StoredTable>,
}

impl Service {
    fn new(index: ServiceIndex, mode: ServiceMode) -> Self {
        Self { index, mode, table: None }
    }

    /// Returns the bit of the table's placement rule; `None`: the service has no table, or its table has no members.
    pub fn rule_bit(&self) -> Option<u32> {
        self.table.as_ref()?.rule_bit
    }
}

/// Error for a mode that the service's protocol or another setting does not allow.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ModeError {
    /// The consistency mode needs TCP: a datagram carries no cookie, and a server cannot recognise its UDP flows.
    #[error("service {0}: consistency {name:?} needs TCP: expected \"hash-table\" or \"none\"", name = .1.name())]
    NeedsTcp(ServiceAddress, Consistency),
    /// LB-side stamping needs a stateless TCP service, because its cookie holds only a server id.
    #[error("service {0}: timestamps by the load balancer need consistency \"stateless\" and TCP")]
    NeedsStateless(ServiceAddress),
    /// The service cannot be migrated, because a server could not recognise packets of other connections.
    #[error(
        "service {0}: only TCP with consistency \"stateless\", \"stateful\" or \"hash-table\" and without timestamps \
         by \
             the load balancer can be adopted or handed over"
    )]
    CannotTransfer(ServiceAddress),
    /// LB-side stamping needs L2 forwarding: replies of servers behind routers do not pass the load balancer.
    #[error("service {0}: timestamps by the load balancer need forwarding \"l2\"")]
    NeedsL2(ServiceAddress),
}

fn check_mode(address: &ServiceAddress, mode: &ServiceMode) -> Result<(), ModeError> {
    let any_protocol = matches!(mode.consistency, Consistency::None | Consistency::HashTable);
    if address.protocol == Protocol::Udp && !any_protocol {
        return Err(ModeError::NeedsTcp(*address, mode.consistency));
    }
    let stateless = mode.consistency == Consistency::Stateless && address.protocol == Protocol::Tcp;
    if mode.timestamps == Timestamps::LoadBalancer && !stateless {
        return Err(ModeError::NeedsStateless(*address));
    }
    if mode.timestamps == Timestamps::LoadBalancer && mode.forwarding.encapsulates() {
        return Err(ModeError::NeedsL2(*address));
    }
    if mode.migration.is_some() && (address.protocol == Protocol::Udp || !mode.can_migrate()) {
        return Err(ModeError::CannotTransfer(*address));
    }
    Ok(())
}

/// Encodes a service's index and mode as the number of its directory slot (layout of `bpf/include/intf.h`).
fn slot_number(index: ServiceIndex, mode: ServiceMode) -> u32 {
    u32::from(index.0) | mode.slot_bits()
}

/// Decodes the index and the mode, without its forwarding, from a slot's number; `None`: the slot is empty.
fn parse_slot_number(number: u32) -> Option<(ServiceIndex, ServiceMode)> {
    let index = (number & intf::SERVICE_INDEX_MASK) as u16;
    let mode = ServiceMode::from_slot_bits(number & !intf::SERVICE_INDEX_MASK)?;
    (u32::from(index) < intf::MAX_SERVICES).then_some((ServiceIndex(index), mode))
}

/// Returns the features that the program must have for these services and their tables.
pub(super) fn features_in_use(services: &BTreeMap<ServiceAddress, Service>) -> EnabledFeatures {
    let of = |(address, service): (&ServiceAddress, &Service)| EnabledFeatures {
        rule_bits: service.rule_bit().unwrap_or(0),
        mode_bits: 1 << service.mode.consistency.number(),
        has_timestamps_off: service.mode.timestamps == Timestamps::Off && address.protocol == Protocol::Tcp,
        has_lb_stamping: service.mode.timestamps == Timestamps::LoadBalancer,
        has_transfer: service.mode.migration.is_some(),
        has_udp: address.protocol == Protocol::Udp,
        forwarding_bits: 1 << service.mode.forwarding.number(),
        has_ipv6: address.socket.is_ipv6(),
    };
    services.iter().map(of).fold(EnabledFeatures::default(), EnabledFeatures::union)
}

impl LoadBalancer {
    /// Sets the services and their modes. Returns the index of each service. A known service keeps its index, servers,
    /// table and connections; a new service starts empty. Fails when a service has no slot (too many, a duplicate), a
    /// mode does not suit its protocol ([`ModeError`]), or the kernel rejects the program. A failed call changes
    /// nothing.
    pub fn set_services(&mut self, services: &[(ServiceAddress, ServiceMode)]) -> anyhow::Result<Vec<ServiceIndex>> {
        let unnumbered: Vec<_> = services.iter().map(|(address, _)| (*address, 0)).collect();
        service_slots::lb_directory(&unnumbered)?;
        services.iter().try_for_each(|(address, mode)| check_mode(address, mode))?;
        let modes: BTreeMap<_, _> = services.iter().copied().collect();

        // The program must support a mode before the first service with it.
        let new_modes = modes.iter().map(|(address, mode)| (*address, Service::new(ServiceIndex(0), *mode)));
        let needed = features_in_use(&new_modes.collect());
        self.change_variant(Variant { features: self.variant.features.union(needed), ..self.variant })?;

        let before = self.addresses_with_numbers();
        let stateful = self.stateful_slots();
        let mut left = Vec::new();
        let gone: Vec<(ServiceAddress, ServiceIndex)> =
            self.services().filter(|(address, _)| !modes.contains_key(address)).collect();
        for (address, index) in &gone {
            let table = self.services.remove(address).and_then(|service| service.table);
            self.services_by_index[usize::from(index.0)] = None;
            left.extend(table);
        }
        for (address, service) in &mut self.services {
            service.mode = modes[address];
        }
        self.services.values().for_each(|service| set_forwarding(&self.maps, service));
        if self.addresses_with_numbers() != before {
            self.switch_directory()?;
        }
        left.into_iter().for_each(|table| self.maps.tables.retire(table, &self.grace_periods));
        let still = self.stateful_slots();
        let not_any_more: Vec<_> = stateful.into_iter().filter(|index| !still.contains(index)).collect();
        if !not_any_more.is_empty() {
            self.grace_periods.wait(self.directory_grace_ticket)?;
            self.forget_connections(&not_any_more)?;
        }
        // Packets may still find a removed index: a later fragment gets it from the first fragment's map entry.
        gone.into_iter().for_each(|(_, index)| self.forget_servers(index));
        let new: Vec<_> = services.iter().filter(|(address, _)| !self.services.contains_key(address)).collect();
        if !new.is_empty() {
            // Programs that still use a removed service must have ended before its index is reused.
            self.grace_periods.wait(self.directory_grace_ticket)?;
            let mut indexes = BTreeSet::new();
            for (address, mode) in new {
                let index = self.allocate_slot(*address);
                self.services.insert(*address, Service::new(index, *mode));
                indexes.insert(index);
            }
            self.clear_services(&indexes)?;
            let new = self.services.values().filter(|service| indexes.contains(&service.index));
            new.for_each(|service| set_forwarding(&self.maps, service));
            self.switch_directory()?;
        }
        self.change_variant(Variant { features: features_in_use(&self.services), ..self.variant })?;
        Ok(services.iter().map(|(address, _)| self.services[address].index).collect())
    }

    /// Stores the name of a service, for commands that read the pinned state without the daemon. A name longer than
    /// [`SERVICE_NAME_BYTES`](intf::SERVICE_NAME_BYTES) bytes is cut.
    pub fn set_service_name(&mut self, service: ServiceIndex, name: &str) {
        let mut bytes: ServiceName = [0; intf::SERVICE_NAME_BYTES as usize];
        let end = (0..=bytes.len().min(name.len())).rev().find(|end| name.is_char_boundary(*end)).unwrap_or(0);
        bytes[..end].copy_from_slice(&name.as_bytes()[..end]);
        self.maps.state.write(service_name_offset(service), &bytes);
    }

    fn allocate_slot(&mut self, address: ServiceAddress) -> ServiceIndex {
        let place = self.services_by_index.iter().position(Option::is_none).unwrap_or(self.services_by_index.len());
        self.services_by_index.resize(self.services_by_index.len().max(place + 1), None);
        self.services_by_index[place] = Some(address);
        ServiceIndex(place as u16)
    }

    fn stateful_slots(&self) -> BTreeSet<ServiceIndex> {
        let stateful = |service: &&Service| service.mode.consistency == Consistency::Stateful;
        self.services.values().filter(stateful).map(|service| service.index).collect()
    }

    fn addresses_with_numbers(&self) -> Vec<(ServiceAddress, u32)> {
        self.services.iter().map(|(address, service)| (*address, slot_number(service.index, service.mode))).collect()
    }

    /// Writes the services into the unused half of the service directory, and then activates that half.
    fn switch_directory(&mut self) -> anyhow::Result<()> {
        self.grace_periods.wait(self.directory_grace_ticket)?;
        let directory = service_slots::lb_directory(&self.addresses_with_numbers())?;
        let active = DIRECTORIES_OFFSET + offset_of!(intf::lb_service_directories, active);
        let idle = self.maps.state.load(active) ^ 1;
        let half =
            offset_of!(intf::lb_service_directories, half) + idle as usize * size_of::<intf::lb_service_directory>();
        self.maps.state.write(DIRECTORIES_OFFSET + half, &*directory);
        self.maps.state.store(active, idle);
        self.directory_grace_ticket = self.grace_periods.request();
        Ok(())
    }

    /// Clears the servers, tables and connections of the services with these indexes.
    fn clear_services(&mut self, indexes: &BTreeSet<ServiceIndex>) -> anyhow::Result<()> {
        self.forget_lb_stamped_servers(indexes)?;
        for index in indexes {
            self.forget_servers(*index);
            self.maps.state.write(service_state_offset(*index), &intf::service_state::default());
        }
        self.forget_flows(indexes);
        self.forget_fragments(indexes)?;
        indexes.iter().for_each(|index| self.retire_counters(*index));
        Ok(())
    }

    /// Removes the destinations of fragmented datagrams that belong to the services with these indexes.
    fn forget_fragments(&self, indexes: &BTreeSet<ServiceIndex>) -> anyhow::Result<()> {
        let fragments = self.maps.fragments();
        // Keys are collected first, because the kernel's iteration restarts when its current key is deleted.
        let keys: Vec<Vec<u8>> = fragments.keys().collect();
        for key in keys {
            let Some(value) = fragments.lookup(&key, MapFlags::ANY).context("a fragmented datagram")? else { continue };
            let entry = intf::fragment_entry::read_from_bytes(&value);
            if entry.is_ok_and(|entry| indexes.contains(&ServiceIndex(entry.service))) {
                match fragments.delete(&key) {
                    Err(error) if error.kind() == libbpf_rs::ErrorKind::NotFound => {}
                    result => result.context("removing a fragmented datagram of a service that is gone")?,
                }
            }
        }
        Ok(())
    }

    fn forget_servers(&self, index: ServiceIndex) {
        let words = [0u64; intf::MEMBERSHIP_WORDS as usize];
        self.maps.membership.write(usize::from(index.0) * size_of_val(&words), &words);
    }

    /// Removes the flows of the services with these indexes from the flow table.
    fn forget_flows(&self, indexes: &BTreeSet<ServiceIndex>) {
        let table = &self.maps.flows;
        for set in 0..self.maps.flow_set_count() {
            for entry in 0..intf::FLOW_SET_ENTRIES as usize {
                let at = set * size_of::<intf::flow_set>() + entry * size_of::<u64>();
                let flow = table.load(at);
                let used = table.load(at + offset_of!(intf::flow_set, use_));
                if flow != 0 && indexes.contains(&ServiceIndex((used >> intf::FLOW_SERVICE_SHIFT) as u16)) {
                    // The exchange fails if a packet of another service has taken the entry since.
                    table.compare_exchange(at, flow, 0);
                }
            }
        }
    }

    /// Returns the address and the index of each service.
    pub fn services(&self) -> impl Iterator<Item = (ServiceAddress, ServiceIndex)> + '_ {
        self.services.iter().map(|(address, service)| (*address, service.index))
    }
}

fn forwarding_offset(service: ServiceIndex) -> usize {
    service_state_offset(service) + offset_of!(intf::service_state, forwarding)
}

fn set_forwarding(maps: &Maps, service: &Service) {
    maps.state.store(forwarding_offset(service.index), service.mode.forwarding.number().into());
}

fn forwarding_of(maps: &Maps, service: ServiceIndex) -> Forwarding {
    let number = maps.state.load(forwarding_offset(service));
    Forwarding::ALL.get(number as usize).copied().unwrap_or_default()
}

type ServiceName = [u8; intf::SERVICE_NAME_BYTES as usize];

fn service_name_offset(service: ServiceIndex) -> usize {
    offset_of!(intf::lb_state, service_names) + usize::from(service.0) * size_of::<ServiceName>()
}

/// Returns the address and the configured name of each service in `maps`.
pub(super) fn service_names(maps: &Maps) -> Vec<(ServiceAddress, String)> {
    let named = |(address, service): (ServiceAddress, Service)| (address, service_name(maps, service.index));
    read_services(maps).into_iter().map(named).collect()
}

/// Returns the configured name of a service; an empty string if none is set.
pub(super) fn service_name(maps: &Maps, service: ServiceIndex) -> String {
    let bytes = maps.state.read::<ServiceName>(service_name_offset(service));
    String::from_utf8_lossy(&bytes[..]).trim_end_matches('\0').to_owned()
}

const DIRECTORIES_OFFSET: usize = offset_of!(intf::lb_state, directories);

pub(super) fn read_services(maps: &Maps) -> BTreeMap<ServiceAddress, Service> {
    let directories = maps.state.read::<intf::lb_service_directories>(DIRECTORIES_OFFSET);
    let named = directories.half[usize::from(directories.active & 1 != 0)].slots.iter().filter_map(|slot| {
        let protocol = Protocol::ALL.into_iter().find(|protocol| protocol.number() == slot.key.protocol)?;
        let (index, mode) = parse_slot_number(slot.number)?;
        let mode = ServiceMode { forwarding: forwarding_of(maps, index), ..mode };
        let vip = address_from_words(slot.key.address);
        let address = ServiceAddress { socket: (vip, u16::from_be(slot.key.port)).into(), protocol };
        Some((address, index, mode))
    });
    named.map(|(address, index, mode)| (address, Service::new(index, mode))).collect()
}
