//! Installation of placement tables during operation.

use std::collections::BTreeMap;
use std::mem::offset_of;

use anyhow::{Context as _, ensure};
use coreward_intf as intf;
use coreward_model::ServiceAddress;
use coreward_model::placement::PlacementTable;

use super::program::Maps;
use super::services::{Service, features_in_use};
use super::tables::{Family, MemoryFull, StoredTable, ToeplitzSource};
use super::variant::{EnabledFeatures, Variant};
use super::{LoadBalancer, ServiceIndex, service_state_offset, tables};

impl LoadBalancer {
    /// Installs a service's table by one atomic switch: every new connection is placed by the old or by the new table.
    /// Does not wait for programs that still read the old table. Fails when the data plane cannot hold the table
    /// ([`TableError`]), memory for tables is exhausted, or the kernel rejects the program for the table's rule. The
    /// old table stays then. Panics when `service` is none of [`services`](Self::services).
    ///
    /// [`TableError`]: super::TableError
    pub fn install_table(&mut self, service: ServiceIndex, table: &PlacementTable) -> anyhow::Result<()> {
        self.install(service, ToeplitzSource::Keys(self.address_of(service).socket), table)?;
        self.set_down(service, &table.down_servers);
        Ok(())
    }

    /// Returns the number of connections assigned to each of the first `count` core slots of a service's table; an
    /// empty list if it has no table.
    pub fn assigned_connections(&self, service: ServiceIndex, count: u16) -> Vec<u32> {
        let at = self.maps.state.load(table_word_offset(service)) as u32;
        if at == 0 {
            Vec::new()
        } else {
            (0..count).map(|slot| self.maps.tables.assigned_connections(at, slot)).collect()
        }
    }

    /// Replaces the rule and the candidates of a service's table by those that `choose` returns. `choose` gets the
    /// table without candidates and keys. The rest stays, since established packets depend on it: hash, consistent
    /// choices, members, generation. Does nothing without a table with members, or if `choose` returns no candidates.
    pub fn replace_candidates(
        &mut self,
        service: ServiceIndex,
        choose: impl FnOnce(&PlacementTable) -> PlacementTable,
    ) -> anyhow::Result<()> {
        let at = self.maps.state.load(table_word_offset(service)) as u32;
        let Some(table) = self.maps.tables.read(at) else { return Ok(()) };
        let chosen = choose(&table);
        if chosen.candidates.is_empty() {
            return Ok(());
        }
        let (generation, members) = (table.generation, table.members);
        let (consistent_servers, previous_consistent_servers) =
            (table.consistent_servers, table.previous_consistent_servers);
        let table = PlacementTable { generation, members, consistent_servers, previous_consistent_servers, ..chosen };
        self.install(service, ToeplitzSource::UnchangedMembers, &table)
    }

    /// Returns whether `table` has another rule than the installed table; `install_table` may then load a program.
    pub fn changes_rule(&self, service: ServiceIndex, table: &PlacementTable) -> bool {
        self.service(service).rule_bit() != table_rule_bit(table)
    }

    fn install(
        &mut self,
        service: ServiceIndex,
        hashing: ToeplitzSource,
        table: &PlacementTable,
    ) -> anyhow::Result<()> {
        tables::check(table)?;
        let rule = table_rule_bit(table);
        let with_rule = EnabledFeatures { rule_bits: rule.unwrap_or(0), ..self.variant.features };
        self.change_variant(Variant { features: self.variant.features.union(with_rule), ..self.variant })?;
        let written = self.write_table(service, hashing, table)?;
        self.maps.state.store(table_word_offset(service), written.offset().into());
        let was_in_use = self.service(service).rule_bit();
        if let Some(before) = self.service_mut(service).table.replace(written) {
            self.maps.tables.retire(before, &self.grace_periods);
        }
        if was_in_use == rule {
            return Ok(());
        }
        // The new variant lacks features that no table uses now. A packet on another CPU may still have the old table's
        // offset; that packet runs in the old program.
        self.change_variant(Variant { features: features_in_use(&self.services), ..self.variant })
    }

    /// Writes a table into the memory for placement tables, which is enlarged if it is full.
    fn write_table(
        &mut self,
        service: ServiceIndex,
        hashing: ToeplitzSource,
        table: &PlacementTable,
    ) -> anyhow::Result<StoredTable> {
        loop {
            let before = self.services.get(self.address_of(service)).and_then(|service| service.table.as_ref());
            match self.maps.tables.write(before, hashing, table, &self.grace_periods) {
                Ok(written) => return Ok(written),
                Err(MemoryFull) => match self.maps.tables.last_retired() {
                    Some(moment) if !self.grace_periods.has_passed(moment) => self.grace_periods.wait(moment)?,
                    _ => self.grow_memory()?,
                },
            }
        }
    }

    /// Doubles the memory for tables: creates a larger map, and loads the program against that map.
    fn grow_memory(&mut self) -> anyhow::Result<()> {
        let bytes = self.maps.placement_memory_bytes() * 2;
        ensure!(
            bytes <= intf::MAX_PLACEMENT_MEMORY,
            "placement tables need more than {} MiB in all",
            intf::MAX_PLACEMENT_MEMORY >> 20
        );
        let map = self.maps.create_larger_placement_memory(bytes)?;
        let program = self.maps.switch_placement_memory(
            map,
            bytes,
            &self.variant,
            self.lb_pin_directory.as_deref(),
            |program| match &self.link {
                Some(link) => link.replace(program).context("replacing the program at the device"),
                None => Ok(()),
            },
        )?;
        self.program = program;
        // Programs that still run mask offsets with the old size. They must end before a table lies beyond it.
        self.grace_periods.wait(self.grace_periods.request())?;
        tracing::info!(
            event = "table-memory-grown",
            mib = bytes >> 20,
            "the load balancer has doubled the memory for placement tables"
        );
        Ok(())
    }

    /// Returns the generation of a service's table; `None`: the service has no table, or its table has no members.
    pub fn table_generation(&self, service: ServiceIndex) -> Option<u64> {
        let at = self.maps.state.load(table_word_offset(service)) as u32;
        tables::rule_bit(self.maps.tables.memory(), at).map(|_| self.maps.tables.generation(at))
    }
}

/// Returns the bit of the table's placement rule; `None`: the table has no members and places no connections.
fn table_rule_bit(table: &PlacementTable) -> Option<u32> {
    (!table.members.is_empty()).then(|| 1 << table.rule.number())
}

/// Returns the offset of the word that holds the offset of a service's table.
fn table_word_offset(service: ServiceIndex) -> usize {
    service_state_offset(service) + offset_of!(intf::service_state, table_at)
}

/// Assigns the tables in the placement memory to their services. To be called once, after a take-over.
pub(super) fn adopt_tables(maps: &mut Maps, services: &mut BTreeMap<ServiceAddress, Service>) {
    let at = |service: &Service| maps.state.load(table_word_offset(service.index)) as u32;
    let mut with_table: Vec<((u32, Family), &mut Service)> = services
        .iter_mut()
        .map(|(address, service)| ((at(service), Family::of(&address.socket)), service))
        .filter(|((at, _), _)| *at != 0)
        .collect();
    let in_use: Vec<(u32, Family)> = with_table.iter().map(|(place, _)| *place).collect();
    let tables = maps.tables.adopt(maps.placement_memory_bytes(), &in_use);
    for ((_, service), table) in with_table.iter_mut().zip(tables) {
        service.table = Some(table);
    }
}
