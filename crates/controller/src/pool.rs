//! Pools of servers, with the inputs that policies use. Between tables, only changed servers are read again. All
//! servers are read again if another input of a table has changed (see [`super::due_tables`]).

use std::borrow::Cow;
use std::ops::Bound;

use coreward_model::ServerId;
use coreward_model::consistency::ConsistencyMode;
use coreward_model::load::CoreLoads;
use coreward_model::policy::{PoolServer, ServerLoads, ServerPool};
use coreward_model::statistics::mean;
use coreward_model::tuple::TransportProtocol;

use super::agent::Agent;
use super::service::{ServerEligibility, Service};
use super::{ClockReadings, Controller, NewPlacementTable};
use coreward_fleet::fleet::FleetService;

impl Controller {
    pub(super) fn make_table(&mut self, service_position: usize, now: ClockReadings) -> NewPlacementTable {
        let pool = match self.services[service_position].take_cached_pool() {
            Some(cached_pool) => self.refresh_pool(service_position, cached_pool, now),
            None => {
                self.update_eligibilities(service_position, now);
                self.compute_pool(&self.services[service_position], now)
            }
        };
        let service = &mut self.services[service_position];
        service.due_trigger = None;
        let pool = service.with_interval_inputs(pool);
        let table = service.make_table(&pool, now);
        service.cache_pool(pool);
        table
    }

    pub(super) fn compute_pool(&self, service: &Service, now: ClockReadings) -> ServerPool {
        self.with_service_wide_inputs(service, ServerPool::new(self.pool_servers(service, now), 1), now)
    }

    /// Returns the service's server pool: the cached pool of the newest table, or else a computed one.
    pub(super) fn cached_or_computed_pool<'a>(&self, service: &'a Service, now: ClockReadings) -> Cow<'a, ServerPool> {
        service.cached_pool().map_or_else(|| Cow::Owned(self.compute_pool(service, now)), Cow::Borrowed)
    }

    /// Returns whether the service at `service_position` has no cached pool, or `None` if there is no such service.
    pub fn lacks_cached_pool(&self, service_position: usize) -> Option<bool> {
        Some(self.services.get(service_position)?.cached_pool().is_none())
    }

    /// Appends the service's next servers to `servers`, which is sorted by id, but at most `max_count`. Returns whether
    /// `servers` then contains all servers of the service.
    pub fn append_next_pool_servers(
        &self,
        service_position: usize,
        servers: &mut Vec<PoolServer>,
        max_count: usize,
        now: ClockReadings,
    ) -> bool {
        let Some(service) = self.services.get(service_position) else { return true };
        let lower_bound = servers.last().map_or(Bound::Unbounded, |last| Bound::Excluded(last.id));
        let previous_server_count = servers.len();
        let next_server_ids =
            service.configuration().members.range((lower_bound, Bound::Unbounded)).map(|(id, _)| *id).take(max_count);
        servers.extend(next_server_ids.map(|id| self.pool_server(service, id, now)));
        servers.len() < previous_server_count + max_count
    }

    pub fn build_pool_from_servers(
        &self,
        service_position: usize,
        servers: Vec<PoolServer>,
        now: ClockReadings,
    ) -> Option<ServerPool> {
        Some(self.with_service_wide_inputs(self.services.get(service_position)?, ServerPool::new(servers, 1), now))
    }

    fn pool_servers(&self, service: &Service, now: ClockReadings) -> Vec<PoolServer> {
        service.configuration().members.keys().map(|id| self.pool_server(service, *id, now)).collect()
    }

    /// Adds the table inputs that do not belong to a single server, such as racks' summaries, to `pool` and returns it.
    pub(super) fn with_service_wide_inputs(
        &self,
        service: &Service,
        pool: ServerPool,
        now: ClockReadings,
    ) -> ServerPool {
        let fleet_service = service.configuration();
        let pool = pool.for_next_table(self.load_balancers.connected_load_balancer_count() as u32);
        let pool = pool
            .with_rack_summaries(self.racks.valid_summaries_of_service(fleet_service.index, now).cloned().collect());
        if places_each_datagram(fleet_service) { pool.with_placements_counted_as_requests() } else { pool }
    }

    /// Returns `pool`, from which the newest table was made, after reading its changed servers again.
    fn refresh_pool(&self, service_position: usize, mut pool: ServerPool, now: ClockReadings) -> ServerPool {
        let service = &self.services[service_position];
        for id in service.dirty_servers() {
            if service.needs_input_reread(id) {
                pool.replace_server(self.pool_server(service, id, now));
            } else {
                pool.set_has_new_load(id, service.has_new_load(id));
            }
        }
        self.with_service_wide_inputs(service, pool, now)
    }

    /// Updates whether each server of the service takes new connections, and the reason if it does not.
    fn update_eligibilities(&mut self, service_position: usize, now: ClockReadings) {
        let fleet_service = self.services[service_position].configuration();
        let eligibility_by_id = |id: &ServerId| (*id, self.eligibility(fleet_service, *id, now));
        let eligibilities = fleet_service.members.keys().map(eligibility_by_id).collect();
        self.services[service_position].update_eligibilities(eligibilities, now);
        self.racks.shared_config_change_count += 1;
    }

    pub(super) fn eligibility(&self, service: &FleetService, id: ServerId, now: ClockReadings) -> ServerEligibility {
        if self.fleet.has_left_service(service, id) {
            ServerEligibility::Left
        } else if !self.fleet.is_server_eligible(service, id) {
            ServerEligibility::Drained
        } else if self.load_balancers.is_unreachable(&self.fleet.servers[&id].name, now) {
            ServerEligibility::Unreachable
        } else if self.health.is_down(&(service.index, id)) {
            ServerEligibility::Unhealthy
        } else {
            ServerEligibility::Eligible
        }
    }

    pub(super) fn takes_new_connections(&self, service: &Service, id: ServerId, now: ClockReadings) -> bool {
        let takes_connections = service.takes_new_connections(id);
        takes_connections
            .unwrap_or_else(|| self.eligibility(service.configuration(), id, now) == ServerEligibility::Eligible)
    }

    pub(super) fn pool_server(&self, service: &Service, id: ServerId, now: ClockReadings) -> PoolServer {
        let (agent, server) = (self.agent(id), &self.fleet.servers[&id]);
        PoolServer {
            id,
            is_eligible: self.takes_new_connections(service, id, now),
            loads: agent
                .and_then(|agent| directly_reported_loads(agent, now))
                .map(|loads| policy_loads_for_service(service.configuration(), loads)),
            rss: agent.and_then(Agent::rss_config).cloned(),
            open_connection_count: self.open_connection_count(id, agent),
            weight: server.weight,
            slow_start_fraction: self.new_connection_share_fraction(service, id, now),
            capacity: server.capacity,
            traffic: self.load_balancers.traffic_rates(id),
            has_new_load: service.has_new_load(id),
        }
    }

    /// Returns the number of the server's open connections: the agent's last count plus the changes that load balancers
    /// have counted since. Load balancers count a retransmitted FIN twice, until the next report corrects it.
    fn open_connection_count(&self, id: ServerId, agent: Option<&Agent>) -> u32 {
        let Some(report) = agent.and_then(|agent| agent.newest_report.as_ref()) else { return 0 };
        let traffic_at_report = agent.map(|agent| &agent.traffic_at_report);
        let increase_since_report = traffic_at_report.map_or(0, |earlier_totals| {
            self.load_balancers.traffic_totals(id).open_connection_increase_since(earlier_totals)
        });
        u32::try_from((i64::from(report.open_connection_count) + increase_since_report).max(0)).unwrap_or(u32::MAX)
    }
}

/// Returns the loads that the server's own agent reported. Reports of an agent behind a rack are only displayed.
pub(super) fn directly_reported_loads(agent: &Agent, now: ClockReadings) -> Option<&CoreLoads> {
    agent.fresh_core_loads(now).filter(|_| !agent.is_relayed_by_rack())
}

/// Returns whether the service places each datagram on its own (`udp = "packet"`).
pub(super) fn places_each_datagram(service: &FleetService) -> bool {
    service.address.protocol == TransportProtocol::Udp && service.settings.consistency == ConsistencyMode::None
}

/// Returns the loads of a server's cores as inputs of the service's policy. If requests are placed one by one, the
/// server chooses the worker of each, so each core counts with the server's mean load. Flows stay on their core, so a
/// policy can select a core with less load.
fn policy_loads_for_service(service: &FleetService, loads: &CoreLoads) -> ServerLoads {
    policy_loads_for_rack(places_each_datagram(service), loads)
}

/// Returns loads as [`policy_loads_for_service`] does, for use by a rack. The only property of the service that matters
/// is `places_each_datagram`.
pub fn policy_loads_for_rack(places_each_datagram: bool, loads: &CoreLoads) -> ServerLoads {
    ServerLoads::Local(if places_each_datagram {
        vec![mean(loads).unwrap_or(0.0); loads.len()].into()
    } else {
        loads.clone()
    })
}
