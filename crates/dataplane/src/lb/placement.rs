//! Installation and change of services' placement tables during operation.

use std::collections::BTreeMap;
use std::mem::offset_of;

use anyhow::{Context as _, ensure};
use coreward_intf as intf;
use coreward_model::ServiceAddress;
use coreward_model::placement::PlacementTable;

use super::placement_memory::{AddressFamily, PlacementMemoryFull, StoredPlacementTable, ToeplitzTableSource};
use super::program::LoadBalancerMaps;
use super::program_variant::{ProgramVariant, RequiredProgramFeatures};
use super::services::{ForwardedService, required_program_features};
use super::{LoadBalancer, ServiceIndex, placement_memory, service_state_offset};

impl LoadBalancer {
    /// Installs a service's table by one atomic switch, so that each new connection is placed by either the old or the
    /// new table. Does not wait for programs that still read the old table. Fails when the data plane cannot hold the
    /// table ([`PlacementTableError`]), memory for tables is exhausted, or the kernel rejects the program for the
    /// table's rule. The old table then stays active. Panics when `service` is none of [`services`](Self::services).
    ///
    /// [`PlacementTableError`]: super::PlacementTableError
    pub fn install_table(&mut self, service: ServiceIndex, table: &PlacementTable) -> anyhow::Result<()> {
        self.store_and_activate_table(
            service,
            ToeplitzTableSource::RssKeysForVip(self.service_address(service).vip_and_port),
            table,
        )?;
        self.set_down_servers(service, &table.down_servers);
        Ok(())
    }

    /// Returns the number of connections assigned to each of the first `slot_count` core slots of a service's table.
    /// Returns an empty list if the service has no table.
    pub fn assigned_connection_counts(&self, service: ServiceIndex, slot_count: u16) -> Vec<u32> {
        let table_offset = self.maps.state.load(service_table_field_offset(service)) as u32;
        if table_offset == 0 {
            Vec::new()
        } else {
            (0..slot_count)
                .map(|slot| self.maps.placement_memory.assigned_connection_count(table_offset, slot))
                .collect()
        }
    }

    /// Replaces the rule and the candidates of a service's table by those that `choose_candidates` returns. That
    /// function gets the table without candidates and keys. The table keeps its hash, consistent servers, members and
    /// generation, because established packets depend on them. Does nothing if the service has no table with members,
    /// or if `choose_candidates` returns no candidates.
    pub fn replace_candidates(
        &mut self,
        service: ServiceIndex,
        choose_candidates: impl FnOnce(&PlacementTable) -> PlacementTable,
    ) -> anyhow::Result<()> {
        let table_offset = self.maps.state.load(service_table_field_offset(service)) as u32;
        let Some(table) = self.maps.placement_memory.read_table(table_offset) else { return Ok(()) };
        let chosen_table = choose_candidates(&table);
        if chosen_table.candidates.is_empty() {
            return Ok(());
        }
        let (generation, members) = (table.generation, table.members);
        let (consistent_servers, previous_consistent_servers) =
            (table.consistent_server_by_bucket, table.previous_consistent_server_by_bucket);
        let merged_table = PlacementTable {
            generation,
            members,
            consistent_server_by_bucket: consistent_servers,
            previous_consistent_server_by_bucket: previous_consistent_servers,
            ..chosen_table
        };
        self.store_and_activate_table(service, ToeplitzTableSource::PresentPlacementTable, &merged_table)
    }

    /// Returns whether `table` has another placement rule than the service's installed table. If so,
    /// [`install_table`](Self::install_table) may have to load a program.
    pub fn table_changes_placement_rule(&self, service: ServiceIndex, table: &PlacementTable) -> bool {
        self.service(service).placement_rule_bit() != table_rule_bit(table)
    }

    fn store_and_activate_table(
        &mut self,
        service: ServiceIndex,
        toeplitz_source: ToeplitzTableSource,
        table: &PlacementTable,
    ) -> anyhow::Result<()> {
        placement_memory::validate_table(table)?;
        let rule_bit = table_rule_bit(table);
        let required_features_with_rule =
            RequiredProgramFeatures { placement_rule_bits: rule_bit.unwrap_or(0), ..self.variant.required_features };
        self.load_variant(ProgramVariant {
            required_features: self.variant.required_features.union(required_features_with_rule),
            ..self.variant
        })?;
        let stored_table = self.write_table(service, toeplitz_source, table)?;
        self.maps.state.store(service_table_field_offset(service), stored_table.memory_offset().into());
        let previous_rule_bit = self.service(service).placement_rule_bit();
        if let Some(previous_table) = self.service_mut(service).placement_table.replace(stored_table) {
            self.maps.placement_memory.retire_table(previous_table, &self.grace_periods);
        }
        if previous_rule_bit == rule_bit {
            return Ok(());
        }
        // The new variant lacks features that no table uses now. Packets that still use the old table on another CPU
        // are processed by the old program, which has these features.
        self.load_variant(ProgramVariant {
            required_features: required_program_features(&self.services),
            ..self.variant
        })
    }

    /// Writes a table into the memory for placement tables. If the memory is full, it is enlarged.
    fn write_table(
        &mut self,
        service: ServiceIndex,
        toeplitz_source: ToeplitzTableSource,
        table: &PlacementTable,
    ) -> anyhow::Result<StoredPlacementTable> {
        loop {
            let previous_table =
                self.services.get(self.service_address(service)).and_then(|service| service.placement_table.as_ref());
            match self.maps.placement_memory.write_table(previous_table, toeplitz_source, table, &self.grace_periods) {
                Ok(stored_table) => return Ok(stored_table),
                Err(PlacementMemoryFull) => match self.maps.placement_memory.last_retired_table_ticket() {
                    Some(ticket) if !self.grace_periods.has_passed(ticket) => self.grace_periods.wait(ticket)?,
                    _ => self.double_placement_memory()?,
                },
            }
        }
    }

    /// Doubles the memory for placement tables by creating a larger map and loading the program with that map.
    fn double_placement_memory(&mut self) -> anyhow::Result<()> {
        let memory_bytes = self.maps.placement_memory_bytes() * 2;
        ensure!(
            memory_bytes <= intf::MAX_PLACEMENT_MEMORY,
            "placement tables need more than {} MiB in all",
            intf::MAX_PLACEMENT_MEMORY >> 20
        );
        let larger_map = self.maps.create_larger_placement_memory(memory_bytes)?;
        let program = self.maps.switch_placement_memory(
            larger_map,
            memory_bytes,
            &self.variant,
            self.lb_directory.as_deref(),
            |program| match &self.xdp_link {
                Some(link) => link.replace_program(program).context("replacing the program at the device"),
                None => Ok(()),
            },
        )?;
        self.program = program;
        // Programs that still run limit offsets to the old size, so they must end before a table lies beyond that size.
        self.grace_periods.wait(self.grace_periods.request_ticket())?;
        tracing::info!(
            event = "table-memory-grown",
            mib = memory_bytes >> 20,
            "the load balancer has doubled the memory for placement tables"
        );
        Ok(())
    }

    /// Returns the generation of a service's table, or `None` if the service has no table with members.
    pub fn placement_table_generation(&self, service: ServiceIndex) -> Option<u64> {
        let table_offset = self.maps.state.load(service_table_field_offset(service)) as u32;
        placement_memory::read_placement_rule_bit(self.maps.placement_memory.mapped_memory(), table_offset)
            .map(|_| self.maps.placement_memory.table_generation(table_offset))
    }
}

/// Returns the bit `1 << enum placement_rule` of the table's rule. Returns `None` if the table has no members and thus
/// places no connections.
fn table_rule_bit(table: &PlacementTable) -> Option<u32> {
    (!table.members.is_empty()).then(|| 1 << table.rule.bpf_number())
}

/// Returns the offset in `struct lb_state` of the word that holds the offset of a service's table.
fn service_table_field_offset(service: ServiceIndex) -> usize {
    service_state_offset(service) + offset_of!(intf::service_state, table_at)
}

/// Assigns the tables in the placement memory to their services. It must be called exactly once, after a take-over.
pub(super) fn assign_tables_to_services(
    maps: &mut LoadBalancerMaps,
    services: &mut BTreeMap<ServiceAddress, ForwardedService>,
) {
    let table_offset_of =
        |service: &ForwardedService| maps.state.load(service_table_field_offset(service.index)) as u32;
    let mut services_with_tables: Vec<((u32, AddressFamily), &mut ForwardedService)> = services
        .iter_mut()
        .map(|(address, service)| ((table_offset_of(service), AddressFamily::from_vip(&address.vip_and_port)), service))
        .filter(|((table_offset, _), _)| *table_offset != 0)
        .collect();
    let tables_in_use: Vec<(u32, AddressFamily)> =
        services_with_tables.iter().map(|(offset_and_family, _)| *offset_and_family).collect();
    let adopted_tables = maps.placement_memory.register_stored_tables(maps.placement_memory_bytes(), &tables_in_use);
    for ((_, service), table) in services_with_tables.iter_mut().zip(adopted_tables) {
        service.placement_table = Some(table);
    }
}
