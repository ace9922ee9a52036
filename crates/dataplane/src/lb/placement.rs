//! Placement tables, installed while packets pass.

use std::mem::offset_of;

use anyhow::Context as _;
use coreward_intf as intf;
use coreward_model::placement::PlacementTable;

use super::program::{InUse, Variant};
use super::services::in_use;
use super::{LoadBalancer, ServiceIndex, state_of, table_position, tables};
use crate::mapped::wait_for_programs;

impl LoadBalancer {
    /// Installs a service's table by one atomic switch: every first packet is placed by the table before or by this one.
    /// Waits for an RCU grace period (some ms) unless one has passed since the service's previous table.
    ///
    /// # Errors
    /// When the table cannot be held ([`TableError`]), or the kernel refuses the program for its rule: the table before
    /// stays then.
    ///
    /// # Panics
    /// When `service` is none of [`services`](Self::services).
    pub fn install_table(&mut self, service: ServiceIndex, table: &PlacementTable) -> anyhow::Result<()> {
        tables::check(table)?;
        let rule = (!table.members.is_empty()).then(|| 1 << table.rule.number());
        let with_rule = InUse { rules: rule.unwrap_or(0), ..self.variant.in_use };
        self.change_variant(Variant { in_use: self.variant.in_use.and(with_rule), ..self.variant })?;
        let active = self.active_half(service);
        let idle = active ^ 1;
        self.wait_since(self.service(service).halves[idle].retired_at)?;

        let address = self.address(service);
        let mut half = std::mem::take(&mut self.service_mut(service).halves[idle]);
        let of_active = &self.service(service).halves[active];
        let counts = tables::carried(&self.maps.tables, table_position(service, active), of_active, table);
        tables::write(&self.maps.tables, table_position(service, idle), &mut half, address, table, counts);
        self.maps.state.store(state_of(service) + offset_of!(intf::service_state, active_half), idle as u64);
        let grace_periods = self.grace_periods;
        let entry = self.service_mut(service);
        entry.halves[idle] = half;
        entry.halves[active].retired_at = grace_periods;
        entry.rule = rule;
        // What no table uses any more need not be compiled in. The new variant may find the old table for a moment:
        // a first packet on another CPU that read the old half; it runs in the old program.
        self.change_variant(Variant { in_use: in_use(&self.services), ..self.variant })
    }

    /// The generation of a service's table; `None`: it has none, or one without members.
    pub fn table_generation(&self, service: ServiceIndex) -> Option<u64> {
        let position = table_position(service, self.active_half(service));
        tables::rule_bit(&self.maps.tables, position).map(|_| tables::generation(&self.maps.tables, position))
    }

    /// Returns when a grace period has passed since `retired_at`.
    pub(super) fn wait_since(&mut self, retired_at: u64) -> anyhow::Result<()> {
        if retired_at == self.grace_periods {
            wait_for_programs().context("waiting for an RCU grace period by membarrier(2)")?;
            self.grace_periods += 1;
        }
        Ok(())
    }
}
