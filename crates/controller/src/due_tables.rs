//! Services whose table is due because an input has changed since their newest table (`table_updates = "on-change"`).
//!
//! Reports and counts mark their services. Other inputs change with time, when a server becomes unreachable, a report
//! expires or a slow start advances. These inputs are polled once per report interval.

use std::collections::VecDeque;
use std::hash::{BuildHasher as _, Hash as _, Hasher as _};

use coreward_model::ServerId;
use coreward_model::health::AllServersDownTreatment;
use coreward_model::policy::{RackSummary, ServerCapacity};
use coreward_wire::ServiceIndex;

use super::agent::Agent;
use super::input_fingerprints::ServerShard;
use super::pool::directly_reported_loads;
use super::service::{Service, TableTrigger};
use super::{ClockReadings, Controller, NewPlacementTable};
use coreward_fleet::config::PlacementTableTiming;

/// Number of servers and services after which polling is interrupted, because polling them takes a few milliseconds. A
/// shard (range of server ids) is never interrupted.
const MEMBERS_PER_POLL: usize = 512;

/// Position at which [`Controller::poll_table_inputs_from`] continues. The default is the first service.
#[derive(Debug, Default)]
pub struct TableInputPollCursor {
    service_position: usize,
    /// Shards of the service at `service_position` that have not been polled yet.
    remaining_shards: VecDeque<ServerShard>,
}

#[derive(Debug, Clone)]
pub struct PlacementTableWithTrigger {
    pub new_table: NewPlacementTable,
    /// Oldest change that the table contains.
    pub trigger: TableTrigger,
}

impl Controller {
    pub(super) fn on_services_changed(&mut self) {
        self.racks.shared_config_change_count += 1;
        let (positions, services) = (&self.service_positions_by_index, &self.services);
        self.services_with_due_table
            .retain(|index| positions.get(index).is_some_and(|position| services[*position].due_trigger.is_some()));
        self.table_acks.retain_fleet_services(|index| positions.contains_key(&index));
    }

    pub(super) fn on_load_changed(&mut self, id: ServerId, trigger: TableTrigger) {
        let Some(positions) = self.service_positions_by_server.get(&id) else { return };
        for position in positions {
            let service = &mut self.services[*position];
            if !service.reads_loads() {
                continue;
            }
            service.mark_load_changed(id);
            queue_due_table(&mut self.services_with_due_table, service, trigger, self.fleet.table_timing);
        }
    }

    /// Makes the next tables of the server's services read all inputs again, because the server's agent has connected
    /// or disconnected.
    pub(super) fn on_load_source_changed(&mut self, id: ServerId) {
        for position in self.service_positions_by_server.get(&id).into_iter().flatten() {
            self.services[*position].drop_cached_pool();
        }
    }

    pub(super) fn on_relayed_loads_changed(
        &mut self,
        service: ServiceIndex,
        summary: &RackSummary,
        now: ClockReadings,
    ) {
        let Some(position) = self.service_positions_by_index.get(&service) else { return };
        let service = &mut self.services[*position];
        if !service.reads_loads() {
            return;
        }
        summary.servers.iter().for_each(|server| service.mark_relayed_load_changed(server.id));
        let trigger = TableTrigger { received_at: now.monotonic_time, is_load_change: true, sent_at: None };
        queue_due_table(&mut self.services_with_due_table, service, trigger, self.fleet.table_timing);
    }

    pub(super) fn on_traffic_changed(&mut self, now: ClockReadings) {
        let trigger = TableTrigger { received_at: now.monotonic_time, is_load_change: false, sent_at: None };
        for service in self.services.iter_mut().filter(|service| service.reads_traffic()) {
            service.mark_all_loads_changed();
            queue_due_table(&mut self.services_with_due_table, service, trigger, self.fleet.table_timing);
        }
    }

    /// Polls the inputs of tables that change with time. It is called once per report interval, and after a change of
    /// the configuration or of check results. `has_interval_ended` is whether a report interval has ended.
    pub fn poll_table_inputs(&mut self, now: ClockReadings, has_interval_ended: bool) {
        let mut next_cursor = Some(TableInputPollCursor::default());
        while let Some(cursor) = next_cursor {
            next_cursor = self.poll_table_inputs_from(cursor, now, has_interval_ended);
        }
    }

    /// Polls the next [`MEMBERS_PER_POLL`] servers. Returns the position at which to continue, or `None` at the end.
    pub fn poll_table_inputs_from(
        &mut self,
        cursor: TableInputPollCursor,
        now: ClockReadings,
        has_interval_ended: bool,
    ) -> Option<TableInputPollCursor> {
        let TableInputPollCursor { service_position: mut position, remaining_shards: mut shards } = cursor;
        if position == 0 && shards.is_empty() {
            self.update_health_verdicts(now);
            self.update_share_limiter(now);
        }
        // Each service counts as one more server, because thousands of services may have no servers.
        let mut polled_member_count = 0;
        while position < self.services.len() && polled_member_count < MEMBERS_PER_POLL {
            if shards.is_empty() {
                shards = self.shards_due_for_poll(position, now, has_interval_ended);
            }
            while polled_member_count < MEMBERS_PER_POLL
                && let Some(shard) = shards.pop_front()
            {
                polled_member_count += shard.members_in_shard(&self.services[position].configuration().members).count();
                self.poll_shard(position, Some(shard), now);
            }
            if shards.is_empty() {
                (position, polled_member_count) = (position + 1, polled_member_count + 1);
            }
        }
        (position < self.services.len())
            .then_some(TableInputPollCursor { service_position: position, remaining_shards: shards })
    }

    /// Returns the shards of the service at `service_position` that must be polled.
    fn shards_due_for_poll(
        &mut self,
        service_position: usize,
        now: ClockReadings,
        has_interval_ended: bool,
    ) -> VecDeque<ServerShard> {
        if has_interval_ended {
            self.begin_report_interval(service_position);
            self.restart_silent_servers_connection_counts(service_position, now);
        }
        let shards = self.services[service_position].next_shards_to_poll(!has_interval_ended);
        if shards.is_empty() {
            self.poll_shard(service_position, None, now);
        }
        shards.into()
    }

    /// Polls a shard of the service's servers, or only the service's own inputs if it has no servers (`None`).
    fn poll_shard(&mut self, service_position: usize, shard: Option<ServerShard>, now: ClockReadings) {
        let shard_fingerprint =
            shard.map(|shard| (shard, self.server_inputs_fingerprint(service_position, shard, now)));
        let service_fingerprint = self.service_inputs_fingerprint(service_position, now);
        let service = &mut self.services[service_position];
        if !service.store_and_compare_fingerprints(service_fingerprint, shard_fingerprint.as_slice()) {
            return;
        }
        service.drop_cached_pool();
        self.racks.shared_config_change_count += 1;
        let trigger = TableTrigger { received_at: now.monotonic_time, is_load_change: false, sent_at: None };
        queue_due_table(&mut self.services_with_due_table, service, trigger, self.fleet.table_timing);
    }

    /// Restarts the counts of connections assigned to servers that do not report, at the end of the report interval.
    /// For other servers, reports of their load restart these counts.
    fn restart_silent_servers_connection_counts(&mut self, service_position: usize, now: ClockReadings) {
        let is_relayed_by_id =
            self.racks.relay_flags_by_server_id(self.services[service_position].configuration().index, now);
        let member_ids = self.services[service_position].configuration().members.keys().copied();
        let is_silent = |id: &ServerId| {
            let is_relayed = is_relayed_by_id.get(usize::from(id.get())).copied().unwrap_or(false);
            !is_relayed && self.agent(*id).and_then(|agent| directly_reported_loads(agent, now)).is_none()
        };
        let silent_servers: Vec<ServerId> = member_ids.filter(is_silent).collect();
        silent_servers.into_iter().for_each(|id| self.services[service_position].mark_load_changed(id));
    }

    /// Returns a hash of the service's inputs, except loads, counts, and the inputs of its servers.
    fn service_inputs_fingerprint(&self, service_position: usize, now: ClockReadings) -> u64 {
        let service = &self.services[service_position];
        let fleet_service = service.configuration();
        let mut hasher = foldhash::fast::FixedState::default().build_hasher();
        (fleet_service.bucket_count.get(), fleet_service.policy_name, fleet_service.hash_seed).hash(&mut hasher);
        for (name, balancer) in self.load_balancers.iter() {
            (name, balancer.is_connected()).hash(&mut hasher);
        }
        (fleet_service.when_all_down == AllServersDownTreatment::FailOpen).hash(&mut hasher);
        self.racks.valid_summaries_of_service(fleet_service.index, now).count().hash(&mut hasher);
        fleet_service.members.len().hash(&mut hasher);
        hasher.finish()
    }

    fn server_inputs_fingerprint(&self, service_position: usize, shard: ServerShard, now: ClockReadings) -> u64 {
        let service = &self.services[service_position];
        let fleet_service = service.configuration();
        let mut hasher = foldhash::fast::FixedState::default().build_hasher();
        for id in shard.members_in_shard(&fleet_service.members) {
            let (agent, server) = (self.agent(id), &self.fleet.servers[&id]);
            // The loads from an agent behind a rack are only displayed.
            let reporting_agent = agent.filter(|agent| !agent.is_relayed_by_rack());
            let core_count = reporting_agent.and_then(Agent::core_count);
            let has_fresh_loads =
                service.reads_loads() && reporting_agent.is_some_and(|agent| agent.has_fresh_report(now));
            let eligibility = self.eligibility(fleet_service, id, now);
            (id, eligibility, has_fresh_loads, core_count, reporting_agent.is_some()).hash(&mut hasher);
            (service.next_slow_start_fraction(id, eligibility, now).to_bits(), server.weight.get()).hash(&mut hasher);
            self.is_excluded_from_service(service, id).hash(&mut hasher);
            server.capacity.map(|capacity| ServerCapacity::get(capacity).to_bits()).hash(&mut hasher);
        }
        hasher.finish()
    }

    /// Makes the table that has been due for the longest time. Returns `None` if no table is due.
    pub fn make_next_due_table(&mut self, now: ClockReadings) -> Option<PlacementTableWithTrigger> {
        loop {
            let position = *self.service_positions_by_index.get(&self.services_with_due_table.pop_front()?)?;
            if let Some(trigger) = self.services[position].due_trigger {
                let new_table = self.make_table(position, now);
                self.table_acks.record_unconfirmed_table(new_table.service_index, new_table.table.generation, trigger);
                return Some(PlacementTableWithTrigger { new_table, trigger });
            }
        }
    }

    pub fn has_due_table(&self) -> bool {
        !self.services_with_due_table.is_empty()
    }
}

/// Queues a service's table unless it is already queued, so that the first trigger is kept. Tables that are made once
/// per report interval are not queued.
fn queue_due_table(
    due_services: &mut VecDeque<ServiceIndex>,
    service: &mut Service,
    trigger: TableTrigger,
    table_timing: PlacementTableTiming,
) {
    if table_timing == PlacementTableTiming::OnChange && service.due_trigger.is_none() {
        service.due_trigger = Some(trigger);
        due_services.push_back(service.configuration().index);
    }
}
