//! Configuration of the services in the data plane. The program finds services in a directory with two halves, of which
//! one is active. The other half is written first, and then activated by one store.

use std::collections::{BTreeMap, BTreeSet};
use std::mem::offset_of;

use anyhow::Context as _;
use coreward_intf as intf;
use coreward_model::ServiceAddress;
use coreward_model::consistency::{ConsistencyMode, CookieStamper, ServiceSettings};
use coreward_model::forwarding::ForwardingMode;
use coreward_model::tuple::{TransportProtocol, address_from_words};
use libbpf_rs::{MapCore as _, MapFlags};
use zerocopy::FromBytes as _;

use super::placement_memory::StoredPlacementTable;
use super::program::LoadBalancerMaps;
use super::program_variant::{ProgramVariant, RequiredProgramFeatures};
use super::{LoadBalancer, ServiceIndex, service_state_offset};
use crate::service_slots;

#[derive(Debug)]
pub(super) struct ForwardedService {
    pub index: ServiceIndex,
    pub settings: ServiceSettings,
    pub placement_table: Option<StoredPlacementTable>,
}

impl ForwardedService {
    fn new(index: ServiceIndex, settings: ServiceSettings) -> Self {
        Self { index, settings, placement_table: None }
    }

    /// Returns the bit of the table's placement rule, or `None` if the service has no table with members.
    pub fn placement_rule_bit(&self) -> Option<u32> {
        self.placement_table.as_ref()?.rule_bit
    }
}

/// Error for a combination of service settings that the data plane does not support.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ServiceSettingsError {
    /// The consistency mode needs TCP, because datagrams carry no cookie and servers cannot recognise UDP flows.
    #[error("service {0}: consistency {name:?} needs TCP: expected \"hash-table\" or \"none\"", name = .1.name())]
    NeedsTcp(ServiceAddress, ConsistencyMode),
    /// LB-side stamping needs a stateless TCP service, because it puts only a server id into the cookie.
    #[error("service {0}: timestamps by the load balancer need consistency \"stateless\" and TCP")]
    NeedsStatelessMode(ServiceAddress),
    /// The service cannot be migrated between load balancers, because its servers cannot recognise packets of
    /// connections that they do not have.
    #[error(
        "service {0}: only TCP with consistency \"stateless\", \"stateful\" or \"hash-table\" and without timestamps \
         by the load balancer can be adopted or handed over"
    )]
    CannotMigrate(ServiceAddress),
    /// LB-side stamping needs L2 forwarding, because replies of servers behind routers do not pass the load balancer.
    #[error("service {0}: timestamps by the load balancer need forwarding \"l2\"")]
    NeedsL2Forwarding(ServiceAddress),
}

fn check_service_settings(address: &ServiceAddress, mode: &ServiceSettings) -> Result<(), ServiceSettingsError> {
    let allows_any_protocol = matches!(mode.consistency, ConsistencyMode::None | ConsistencyMode::HashTable);
    if address.protocol == TransportProtocol::Udp && !allows_any_protocol {
        return Err(ServiceSettingsError::NeedsTcp(*address, mode.consistency));
    }
    let is_stateless_tcp = mode.consistency == ConsistencyMode::Stateless && address.protocol == TransportProtocol::Tcp;
    if mode.timestamps == CookieStamper::LoadBalancer && !is_stateless_tcp {
        return Err(ServiceSettingsError::NeedsStatelessMode(*address));
    }
    if mode.timestamps == CookieStamper::LoadBalancer && mode.forwarding.encapsulates() {
        return Err(ServiceSettingsError::NeedsL2Forwarding(*address));
    }
    if mode.migration.is_some() && (address.protocol == TransportProtocol::Udp || !mode.can_migrate()) {
        return Err(ServiceSettingsError::CannotMigrate(*address));
    }
    Ok(())
}

/// Encodes a service's index and mode as the number in its directory slot (with the layout of `bpf/include/intf.h`).
fn encode_slot_number(index: ServiceIndex, mode: ServiceSettings) -> u32 {
    u32::from(index.0) | mode.to_service_slot_bits()
}

/// Returns the service index and mode (without forwarding mode) in a slot's number, or `None` if the slot is empty.
fn decode_slot_number(slot_number: u32) -> Option<(ServiceIndex, ServiceSettings)> {
    let service_index = (slot_number & intf::SERVICE_INDEX_MASK) as u16;
    let service_mode = ServiceSettings::from_service_slot_bits(slot_number & !intf::SERVICE_INDEX_MASK)?;
    (u32::from(service_index) < intf::MAX_SERVICES).then_some((ServiceIndex(service_index), service_mode))
}

/// Returns the features that the program needs for the services and their tables.
pub(super) fn required_program_features(
    services: &BTreeMap<ServiceAddress, ForwardedService>,
) -> RequiredProgramFeatures {
    let features_for_service = |(address, service): (&ServiceAddress, &ForwardedService)| RequiredProgramFeatures {
        placement_rule_bits: service.placement_rule_bit().unwrap_or(0),
        consistency_mode_bits: 1 << service.settings.consistency.bpf_number(),
        has_tcp_without_timestamps: service.settings.timestamps == CookieStamper::Off
            && address.protocol == TransportProtocol::Tcp,
        has_lb_stamping: service.settings.timestamps == CookieStamper::LoadBalancer,
        has_migrating_service: service.settings.migration.is_some(),
        has_udp_service: address.protocol == TransportProtocol::Udp,
        forwarding_mode_bits: 1 << service.settings.forwarding.bpf_number(),
        has_ipv6_service: address.vip_and_port.is_ipv6(),
    };
    services.iter().map(features_for_service).fold(RequiredProgramFeatures::default(), RequiredProgramFeatures::union)
}

impl LoadBalancer {
    /// Sets the services and their modes, and returns each service's index. A known service keeps its index, servers,
    /// table and connections, while a new one starts empty. Fails when there are too many services, or one is listed
    /// twice. Also fails when a mode does not suit its service ([`ServiceSettingsError`]), or the kernel rejects the
    /// program. A failed call changes nothing.
    pub fn set_services(
        &mut self,
        services: &[(ServiceAddress, ServiceSettings)],
    ) -> anyhow::Result<Vec<ServiceIndex>> {
        let addresses_without_numbers: Vec<_> = services.iter().map(|(address, _)| (*address, 0)).collect();
        service_slots::build_lb_directory(&addresses_without_numbers)?;
        services.iter().try_for_each(|(address, mode)| check_service_settings(address, mode))?;
        let modes_by_address: BTreeMap<_, _> = services.iter().copied().collect();

        // The program must support a mode before it gets the first service with that mode.
        let new_services =
            modes_by_address.iter().map(|(address, mode)| (*address, ForwardedService::new(ServiceIndex(0), *mode)));
        let new_features = required_program_features(&new_services.collect());
        self.load_variant(ProgramVariant {
            required_features: self.variant.required_features.union(new_features),
            ..self.variant
        })?;

        let previous_stateful_indexes = self.stateful_service_indexes();
        let removed_indexes = self.update_or_remove_known_services(&modes_by_address)?;
        let formerly_stateful_indexes: Vec<_> =
            previous_stateful_indexes.difference(&self.stateful_service_indexes()).copied().collect();
        if !formerly_stateful_indexes.is_empty() {
            self.grace_periods.wait(self.service_directory_grace_ticket)?;
            self.free_connections_of_services(&formerly_stateful_indexes)?;
        }
        // Packets may still find a removed index, for example in the map entry of a datagram's first fragment.
        removed_indexes.into_iter().for_each(|index| self.clear_member_flags(index));
        self.add_new_services(services)?;
        self.load_variant(ProgramVariant {
            required_features: required_program_features(&self.services),
            ..self.variant
        })?;
        Ok(services.iter().map(|(address, _)| self.services[address].index).collect())
    }

    /// Removes the services that have no mode in `modes_by_address`, and sets the modes of the others. Returns the
    /// indexes of the removed services.
    fn update_or_remove_known_services(
        &mut self,
        modes_by_address: &BTreeMap<ServiceAddress, ServiceSettings>,
    ) -> anyhow::Result<Vec<ServiceIndex>> {
        let previous_numbers = self.addresses_with_slot_numbers();
        let mut unused_tables = Vec::new();
        let removed_services: Vec<(ServiceAddress, ServiceIndex)> =
            self.services().filter(|(address, _)| !modes_by_address.contains_key(address)).collect();
        for (address, index) in &removed_services {
            let removed_table = self.services.remove(address).and_then(|service| service.placement_table);
            self.service_addresses_by_index[usize::from(index.0)] = None;
            unused_tables.extend(removed_table);
        }
        for (address, service) in &mut self.services {
            service.settings = modes_by_address[address];
        }
        self.services.values().for_each(|service| store_forwarding_mode(&self.maps, service));
        if self.addresses_with_slot_numbers() != previous_numbers {
            self.rebuild_service_directory()?;
        }
        unused_tables.into_iter().for_each(|table| self.maps.placement_memory.retire_table(table, &self.grace_periods));
        Ok(removed_services.into_iter().map(|(_, index)| index).collect())
    }

    /// Adds the services that are not known yet.
    fn add_new_services(&mut self, services: &[(ServiceAddress, ServiceSettings)]) -> anyhow::Result<()> {
        let added_services: Vec<_> =
            services.iter().filter(|(address, _)| !self.services.contains_key(address)).collect();
        if added_services.is_empty() {
            return Ok(());
        }
        // Programs that still use a removed service must have ended before its index is reused.
        self.grace_periods.wait(self.service_directory_grace_ticket)?;
        let mut added_indexes = BTreeSet::new();
        for (address, mode) in added_services {
            let added_index = self.allocate_service_index(*address);
            self.services.insert(*address, ForwardedService::new(added_index, *mode));
            added_indexes.insert(added_index);
        }
        self.clear_state_of_services(&added_indexes)?;
        let added_services = self.services.values().filter(|service| added_indexes.contains(&service.index));
        added_services.for_each(|service| store_forwarding_mode(&self.maps, service));
        self.rebuild_service_directory()
    }

    /// Stores a service's name for commands that read the pinned state without the daemon. A name longer than
    /// [`SERVICE_NAME_BYTES`](intf::SERVICE_NAME_BYTES) bytes is truncated.
    pub fn set_service_name(&mut self, service: ServiceIndex, name: &str) {
        let mut name_bytes: ServiceNameBytes = [0; intf::SERVICE_NAME_BYTES as usize];
        let truncated_length =
            (0..=name_bytes.len().min(name.len())).rev().find(|end| name.is_char_boundary(*end)).unwrap_or(0);
        name_bytes[..truncated_length].copy_from_slice(&name.as_bytes()[..truncated_length]);
        self.maps.state.write(service_name_field_offset(service), &name_bytes);
    }

    fn allocate_service_index(&mut self, address: ServiceAddress) -> ServiceIndex {
        let free_index = self
            .service_addresses_by_index
            .iter()
            .position(Option::is_none)
            .unwrap_or(self.service_addresses_by_index.len());
        self.service_addresses_by_index.resize(self.service_addresses_by_index.len().max(free_index + 1), None);
        self.service_addresses_by_index[free_index] = Some(address);
        ServiceIndex(free_index as u16)
    }

    fn stateful_service_indexes(&self) -> BTreeSet<ServiceIndex> {
        let is_stateful = |service: &&ForwardedService| service.settings.consistency == ConsistencyMode::Stateful;
        self.services.values().filter(is_stateful).map(|service| service.index).collect()
    }

    fn addresses_with_slot_numbers(&self) -> Vec<(ServiceAddress, u32)> {
        self.services
            .iter()
            .map(|(address, service)| (*address, encode_slot_number(service.index, service.settings)))
            .collect()
    }

    /// Writes the services into the idle half of the service directory and then activates that half.
    fn rebuild_service_directory(&mut self) -> anyhow::Result<()> {
        self.grace_periods.wait(self.service_directory_grace_ticket)?;
        let service_directory = service_slots::build_lb_directory(&self.addresses_with_slot_numbers())?;
        let active_half_offset = SERVICE_DIRECTORIES_OFFSET + offset_of!(intf::lb_service_directories, active);
        let idle_half = self.maps.state.load(active_half_offset) ^ 1;
        let idle_half_offset = offset_of!(intf::lb_service_directories, half)
            + idle_half as usize * size_of::<intf::lb_service_directory>();
        self.maps.state.write(SERVICE_DIRECTORIES_OFFSET + idle_half_offset, &*service_directory);
        self.maps.state.store(active_half_offset, idle_half);
        self.service_directory_grace_ticket = self.grace_periods.request_ticket();
        Ok(())
    }

    /// Clears the servers, tables and connections of the services with these indexes.
    fn clear_state_of_services(&mut self, indexes: &BTreeSet<ServiceIndex>) -> anyhow::Result<()> {
        self.remove_lb_stamped_servers(indexes)?;
        for index in indexes {
            self.clear_member_flags(*index);
            self.maps.state.write(service_state_offset(*index), &intf::service_state::default());
        }
        self.remove_flows_of_services(indexes);
        self.remove_fragments_of_services(indexes)?;
        indexes.iter().for_each(|index| self.move_counters_to_removed_total(*index));
        Ok(())
    }

    /// Removes the stored destinations of fragmented datagrams to the services with these indexes.
    fn remove_fragments_of_services(&self, indexes: &BTreeSet<ServiceIndex>) -> anyhow::Result<()> {
        let fragment_map = self.maps.fragment_map();
        // Keys are collected first, because the kernel's iteration restarts when its current key is deleted.
        let fragment_keys: Vec<Vec<u8>> = fragment_map.keys().collect();
        for key in fragment_keys {
            let Some(value) = fragment_map.lookup(&key, MapFlags::ANY).context("a fragmented datagram")? else {
                continue;
            };
            let fragment_entry = intf::fragment_entry::read_from_bytes(&value);
            if fragment_entry.is_ok_and(|entry| indexes.contains(&ServiceIndex(entry.service))) {
                match fragment_map.delete(&key) {
                    Err(error) if error.kind() == libbpf_rs::ErrorKind::NotFound => {}
                    result => result.context("removing a fragmented datagram of a service that is gone")?,
                }
            }
        }
        Ok(())
    }

    fn clear_member_flags(&self, index: ServiceIndex) {
        let zero_words = [0u64; intf::MEMBERSHIP_WORDS as usize];
        self.maps.service_member_flags.write(usize::from(index.0) * size_of_val(&zero_words), &zero_words);
    }

    /// Removes the flows of the services with these indexes from the flow table.
    fn remove_flows_of_services(&self, indexes: &BTreeSet<ServiceIndex>) {
        let flow_table = &self.maps.flow_table;
        for set_index in 0..self.maps.flow_table_set_count() {
            for entry_index in 0..intf::FLOW_SET_ENTRIES as usize {
                let flow_offset = set_index * size_of::<intf::flow_set>() + entry_index * size_of::<u64>();
                let flow_word = flow_table.load(flow_offset);
                let use_word = flow_table.load(flow_offset + offset_of!(intf::flow_set, use_));
                if flow_word != 0 && indexes.contains(&ServiceIndex((use_word >> intf::FLOW_SERVICE_SHIFT) as u16)) {
                    // The exchange fails if a packet of another service has taken the entry since.
                    flow_table.compare_exchange(flow_offset, flow_word, 0);
                }
            }
        }
    }

    /// Returns the address and the index of each service.
    pub fn services(&self) -> impl Iterator<Item = (ServiceAddress, ServiceIndex)> + '_ {
        self.services.iter().map(|(address, service)| (*address, service.index))
    }
}

fn service_forwarding_field_offset(service: ServiceIndex) -> usize {
    service_state_offset(service) + offset_of!(intf::service_state, forwarding)
}

fn store_forwarding_mode(maps: &LoadBalancerMaps, service: &ForwardedService) {
    maps.state.store(service_forwarding_field_offset(service.index), service.settings.forwarding.bpf_number().into());
}

fn load_forwarding_mode(maps: &LoadBalancerMaps, service: ServiceIndex) -> ForwardingMode {
    let forwarding_number = maps.state.load(service_forwarding_field_offset(service));
    ForwardingMode::ALL.get(forwarding_number as usize).copied().unwrap_or_default()
}

type ServiceNameBytes = [u8; intf::SERVICE_NAME_BYTES as usize];

fn service_name_field_offset(service: ServiceIndex) -> usize {
    offset_of!(intf::lb_state, service_names) + usize::from(service.0) * size_of::<ServiceNameBytes>()
}

/// Returns the address and the configured name of each service in `maps`.
pub(super) fn services_with_names(maps: &LoadBalancerMaps) -> Vec<(ServiceAddress, String)> {
    let address_and_name =
        |(address, service): (ServiceAddress, ForwardedService)| (address, service_name(maps, service.index));
    read_services(maps).into_iter().map(address_and_name).collect()
}

/// Returns a service's configured name, or an empty string if none is set.
pub(super) fn service_name(maps: &LoadBalancerMaps, service: ServiceIndex) -> String {
    let name_bytes = maps.state.read::<ServiceNameBytes>(service_name_field_offset(service));
    String::from_utf8_lossy(&name_bytes[..]).trim_end_matches('\0').to_owned()
}

const SERVICE_DIRECTORIES_OFFSET: usize = offset_of!(intf::lb_state, directories);

pub(super) fn read_services(maps: &LoadBalancerMaps) -> BTreeMap<ServiceAddress, ForwardedService> {
    let directories = maps.state.read::<intf::lb_service_directories>(SERVICE_DIRECTORIES_OFFSET);
    let services_of_slots =
        directories.half[usize::from(directories.active & 1 != 0)].slots.iter().filter_map(|slot| {
            let protocol =
                TransportProtocol::ALL.into_iter().find(|protocol| protocol.iana_number() == slot.key.protocol)?;
            let (index, mode) = decode_slot_number(slot.number)?;
            let mode = ServiceSettings { forwarding: load_forwarding_mode(maps, index), ..mode };
            let vip_address = address_from_words(slot.key.address);
            let service_address =
                ServiceAddress { vip_and_port: (vip_address, u16::from_be(slot.key.port)).into(), protocol };
            Some((service_address, index, mode))
        });
    services_of_slots.map(|(address, index, mode)| (address, ForwardedService::new(index, mode))).collect()
}
