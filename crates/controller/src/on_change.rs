//! Due tables: services whose inputs have changed since their newest table (`table_updates = "on-change"`).
//!
//! Reports and counts mark their services. Other inputs change with time: a server becomes unreachable, a report
//! expires, a slow start advances. These inputs are polled once per report interval.

use std::collections::VecDeque;
use std::hash::{BuildHasher as _, Hash as _, Hasher as _};

use coreward_model::ServerId;
use coreward_model::health::WhenAllDown;
use coreward_model::policy::{Capacity, RackSummary};
use coreward_wire::ServiceIndex;

use super::agent::Agent;
use super::input_fingerprints::Shard;
use super::pool::direct_loads;
use super::service::{Service, TableTrigger};
use super::{Controller, NewTable, Now};
use coreward_fleet::config::TableTiming;

/// Number of servers and services that are polled without interruption, plus at most one shard: a few milliseconds.
const MEMBERS_PER_POLL: usize = 512;

/// Position at which [`Controller::poll_inputs_from`] continues. The default is the first service.
#[derive(Debug, Default)]
pub struct InputCursor {
    position: usize,
    /// Shards of this service that are still to be polled.
    shards: VecDeque<Shard>,
}

#[derive(Debug, Clone)]
pub struct DueTable {
    pub new_table: NewTable,
    /// Oldest of the changes that the table contains.
    pub trigger: TableTrigger,
}

impl Controller {
    pub(super) fn on_services_changed(&mut self) {
        self.racks.changes += 1;
        let (positions, services) = (&self.positions, &self.services);
        self.due_services
            .retain(|index| positions.get(index).is_some_and(|position| services[*position].due_trigger.is_some()));
        self.table_acks.retain(|index| positions.contains_key(&index));
    }

    pub(super) fn on_load_changed(&mut self, id: ServerId, trigger: TableTrigger) {
        let Some(positions) = self.positions_by_server.get(&id) else { return };
        for position in positions {
            let service = &mut self.services[*position];
            if !service.reads_loads() {
                continue;
            }
            service.mark_load_changed(id);
            queue_table(&mut self.due_services, service, trigger, self.fleet.table_updates);
        }
    }

    /// Marks a server as changed, because its agent has connected or disconnected.
    pub(super) fn on_load_source_changed(&mut self, id: ServerId) {
        for position in self.positions_by_server.get(&id).into_iter().flatten() {
            self.services[*position].forget_servers();
        }
    }

    pub(super) fn on_relayed_loads(&mut self, service: ServiceIndex, summary: &RackSummary, now: Now) {
        let Some(position) = self.positions.get(&service) else { return };
        let service = &mut self.services[*position];
        if !service.reads_loads() {
            return;
        }
        summary.servers.iter().for_each(|server| service.on_relayed_load(server.id));
        let trigger = TableTrigger { received_at: now.monotonic, is_load: true, sent_at: None };
        queue_table(&mut self.due_services, service, trigger, self.fleet.table_updates);
    }

    pub(super) fn on_traffic_changed(&mut self, now: Now) {
        let trigger = TableTrigger { received_at: now.monotonic, is_load: false, sent_at: None };
        for service in self.services.iter_mut().filter(|service| service.reads_traffic()) {
            service.mark_all_loads_changed();
            queue_table(&mut self.due_services, service, trigger, self.fleet.table_updates);
        }
    }

    /// Polls the inputs of tables that change with time: once per report interval, and after a change of configuration
    /// or check results. `interval_ended`: whether a report interval has ended.
    pub fn poll_inputs(&mut self, now: Now, interval_ended: bool) {
        let mut next = Some(InputCursor::default());
        while let Some(from) = next {
            next = self.poll_inputs_from(from, now, interval_ended);
        }
    }

    /// Polls the next [`MEMBERS_PER_POLL`] servers. Returns the position at which to continue; `None`: all are polled.
    pub fn poll_inputs_from(&mut self, from: InputCursor, now: Now, interval_ended: bool) -> Option<InputCursor> {
        let InputCursor { mut position, mut shards } = from;
        if position == 0 && shards.is_empty() {
            self.update_health(now);
            self.update_share_limiter(now);
        }
        // Each service counts as one more server, because thousands of services may have no servers.
        let mut read = 0;
        while position < self.services.len() && read < MEMBERS_PER_POLL {
            if shards.is_empty() {
                shards = self.due_shards(position, now, interval_ended);
            }
            while read < MEMBERS_PER_POLL
                && let Some(shard) = shards.pop_front()
            {
                read += shard.members(&self.services[position].fleet().members).count();
                self.poll_shard(position, Some(shard), now);
            }
            if shards.is_empty() {
                (position, read) = (position + 1, read + 1);
            }
        }
        (position < self.services.len()).then_some(InputCursor { position, shards })
    }

    /// Returns the shards of the service at this position that are to be polled.
    fn due_shards(&mut self, position: usize, now: Now, interval_ended: bool) -> VecDeque<Shard> {
        if interval_ended {
            self.begin_interval(position);
            self.renew_unreported(position, now);
        }
        let shards = self.services[position].next_shards(!interval_ended);
        if shards.is_empty() {
            self.poll_shard(position, None, now);
        }
        shards.into()
    }

    /// Polls a shard of the service's servers; `None`: the service has no servers, only its own inputs are polled.
    fn poll_shard(&mut self, position: usize, shard: Option<Shard>, now: Now) {
        let found = shard.map(|shard| (shard, self.server_inputs_fingerprint(position, shard, now)));
        let inputs = self.inputs_fingerprint(position, now);
        let service = &mut self.services[position];
        if !service.update_fingerprints(inputs, found.as_slice()) {
            return;
        }
        service.forget_servers();
        self.racks.changes += 1;
        let trigger = TableTrigger { received_at: now.monotonic, is_load: false, sent_at: None };
        queue_table(&mut self.due_services, service, trigger, self.fleet.table_updates);
    }

    /// Restarts the counts of assigned connections of servers that do not report, at the end of the interval: no report
    /// of their load will do so.
    fn renew_unreported(&mut self, position: usize, now: Now) {
        let relayed = self.racks.relayed(self.services[position].fleet().index, now);
        let members = self.services[position].fleet().members.keys().copied();
        let silent = |id: &ServerId| {
            let is_relayed = relayed.get(usize::from(id.get())).copied().unwrap_or(false);
            !is_relayed && self.agent(*id).and_then(|agent| direct_loads(agent, now)).is_none()
        };
        let silent: Vec<ServerId> = members.filter(silent).collect();
        silent.into_iter().for_each(|id| self.services[position].mark_load_changed(id));
    }

    /// Returns a hash of the service's inputs, except loads, counts, and the inputs of its servers.
    fn inputs_fingerprint(&self, position: usize, now: Now) -> u64 {
        let service = &self.services[position];
        let fleet = service.fleet();
        let mut hasher = foldhash::fast::FixedState::default().build_hasher();
        (fleet.buckets.get(), fleet.policy, fleet.seed).hash(&mut hasher);
        for (name, balancer) in self.load_balancers.iter() {
            (name, balancer.is_connected()).hash(&mut hasher);
        }
        (fleet.when_all_down == WhenAllDown::FailOpen).hash(&mut hasher);
        self.racks.summaries(fleet.index, now).count().hash(&mut hasher);
        fleet.members.len().hash(&mut hasher);
        hasher.finish()
    }

    fn server_inputs_fingerprint(&self, position: usize, shard: Shard, now: Now) -> u64 {
        let service = &self.services[position];
        let fleet = service.fleet();
        let mut hasher = foldhash::fast::FixedState::default().build_hasher();
        for id in shard.members(&fleet.members) {
            let (agent, server) = (self.agent(id), &self.fleet.servers[&id]);
            // Loads from an agent behind a rack are for display.
            let reports = agent.filter(|agent| !agent.is_behind_rack());
            let cores = reports.and_then(Agent::core_count);
            let fresh = service.reads_loads() && reports.is_some_and(|agent| agent.is_fresh(now));
            let eligibility = self.eligibility(fleet, id, now);
            (id, eligibility, fresh, cores, reports.is_some()).hash(&mut hasher);
            (service.next_ramp(id, eligibility, now).to_bits(), server.weight.get()).hash(&mut hasher);
            self.is_excluded(service, id).hash(&mut hasher);
            server.capacity.map(|capacity| Capacity::get(capacity).to_bits()).hash(&mut hasher);
        }
        hasher.finish()
    }

    /// Makes the table that has been due for the longest time; `None`: no table is due.
    pub fn make_next_due_table(&mut self, now: Now) -> Option<DueTable> {
        loop {
            let position = *self.positions.get(&self.due_services.pop_front()?)?;
            if let Some(trigger) = self.services[position].due_trigger {
                let new_table = self.make_table(position, now);
                self.table_acks.record_build(new_table.service, new_table.table.generation, trigger);
                return Some(DueTable { new_table, trigger });
            }
        }
    }

    pub fn has_due_table(&self) -> bool {
        !self.due_services.is_empty()
    }
}

/// Queues a service's table unless it is queued: the first trigger counts. Tables at the interval are never queued.
fn queue_table(due: &mut VecDeque<ServiceIndex>, service: &mut Service, trigger: TableTrigger, tables: TableTiming) {
    if tables == TableTiming::OnChange && service.due_trigger.is_none() {
        service.due_trigger = Some(trigger);
        due.push_back(service.fleet().index);
    }
}
