//! Limit of a server's share of new connections.
//!
//! Policies send connections where the reported load is lowest, so an agent with false reports attracts connections.
//! Load balancers count the connections, and each server has a [`ConnectionAllowance`]. While it is spent, the server
//! gets no new connections. A limit on buckets would not help, because a server chooses its RSS key, and thereby the
//! buckets of its connections.

use std::collections::{HashMap, HashSet};
use std::time::Duration;

use coreward_model::ServerId;
use coreward_model::connection_allowance::{ConnectionAllowance, MAX_FAIR_SHARE_MULTIPLE};
use coreward_wire::ServiceIndex;

use super::service::Service;
use super::traffic_counts::OpenedConnectionCounts;
use super::{ClockReadings, Controller};

/// Interval at which servers' allowances of new connections are updated. Within an interval, a server can exceed its
/// allowance.
const CONNECTION_ALLOWANCE_UPDATE_INTERVAL: Duration = Duration::from_millis(250);
/// Maximum time for which one update adds to servers' allowances, even if the previous update was longer ago.
const MAX_ALLOWANCE_GAIN_TIME: Duration = Duration::from_secs(1);

/// Limiter of each server's share of the new connections.
#[derive(Debug, Default)]
pub struct ConnectionShareLimiter {
    opened_connections_by_service: HashMap<ServiceIndex, u64>,
    opened_connections_by_server: HashMap<ServerId, u64>,
    updated_at: Duration,
    allowances: HashMap<ServerId, ConnectionAllowance>,
    /// Pairs of a service and a server that currently gets none of the service's new connections.
    excluded_service_server_pairs: HashSet<(ServiceIndex, ServerId)>,
}

impl ConnectionShareLimiter {
    pub fn add_opened_connections(&mut self, newly_opened: &OpenedConnectionCounts) {
        for (service, count) in &newly_opened.opened_count_by_service {
            let service_opened_count = self.opened_connections_by_service.entry(*service).or_default();
            *service_opened_count = service_opened_count.saturating_add(*count);
        }
        for (server, count) in &newly_opened.opened_count_by_server {
            let server_opened_count = self.opened_connections_by_server.entry(*server).or_default();
            *server_opened_count = server_opened_count.saturating_add(*count);
        }
    }

    pub fn limited_server_count(&self) -> usize {
        self.limited_servers().count()
    }

    fn limited_servers(&self) -> impl Iterator<Item = ServerId> {
        self.allowances.iter().filter(|(_, allowance)| allowance.is_limited()).map(|(id, _)| *id)
    }

    /// Returns whether the server has used up its allowance, so that services may exclude it.
    pub fn is_limited(&self, id: ServerId) -> bool {
        self.allowances.get(&id).is_some_and(ConnectionAllowance::is_limited)
    }

    fn is_allowance_spent(&self, id: ServerId) -> bool {
        self.allowances.get(&id).is_some_and(ConnectionAllowance::is_spent)
    }

    /// Updates the allowances. `fair_counts` has each server's fair share of the connections opened in `elapsed`, as a
    /// number of connections.
    fn update_allowances(&mut self, fair_counts: &HashMap<ServerId, f64>, elapsed: Duration) {
        let opened_connections_by_server = std::mem::take(&mut self.opened_connections_by_server);
        for id in fair_counts.keys().chain(opened_connections_by_server.keys()) {
            let fair_connection_count = fair_counts.get(id).copied().unwrap_or(0.0);
            let fair_rate_per_second = fair_connection_count / elapsed.as_secs_f64();
            self.allowances
                .entry(*id)
                .or_insert_with(|| ConnectionAllowance::full_for_fair_share(fair_rate_per_second));
        }
        for (id, allowance) in &mut self.allowances {
            let fair_connection_count = fair_counts.get(id).copied().unwrap_or(0.0);
            allowance.update_after_interval(
                fair_connection_count,
                opened_connections_by_server.get(id).copied().unwrap_or(0) as f64,
                elapsed.as_secs_f64(),
            );
        }
    }
}

impl Controller {
    /// Returns the fraction of its fair share of the service's new connections that the server gets. It is less than 1
    /// during the slow start and 0 while the server is excluded.
    pub(super) fn new_connection_share_fraction(&self, service: &Service, id: ServerId, now: ClockReadings) -> f64 {
        if self.is_excluded_from_service(service, id) { 0.0 } else { service.slow_start_fraction(id, now) }
    }

    pub(super) fn is_excluded_from_service(&self, service: &Service, id: ServerId) -> bool {
        self.share_limiter.excluded_service_server_pairs.contains(&(service.configuration().index, id))
    }

    /// Updates the allowances of all servers, once per [`CONNECTION_ALLOWANCE_UPDATE_INTERVAL`].
    pub(super) fn update_share_limiter(&mut self, now: ClockReadings) {
        let elapsed = now.monotonic_time.saturating_sub(self.share_limiter.updated_at);
        if elapsed < CONNECTION_ALLOWANCE_UPDATE_INTERVAL {
            return;
        }
        self.share_limiter.updated_at = now.monotonic_time;
        let mut fair_connection_counts: HashMap<ServerId, f64> = HashMap::new();
        for (index, opened_count) in std::mem::take(&mut self.share_limiter.opened_connections_by_service) {
            let Some(position) = self.service_positions_by_index.get(&index) else { continue };
            for (id, share) in self.fair_share_fractions(*position, now) {
                *fair_connection_counts.entry(id).or_default() += share * opened_count as f64;
            }
        }
        let previously_limited_servers: HashSet<ServerId> = self.share_limiter.limited_servers().collect();
        let servers = &self.fleet.servers;
        self.share_limiter.allowances.retain(|id, _| servers.contains_key(id));
        self.share_limiter.update_allowances(&fair_connection_counts, elapsed.min(MAX_ALLOWANCE_GAIN_TIME));
        let limited_servers: HashSet<ServerId> = self.share_limiter.limited_servers().collect();
        self.log_limited_servers(&previously_limited_servers, &limited_servers);
        self.exclude_limited_servers(&limited_servers, now);
    }

    fn fair_share_fractions(&self, service_position: usize, now: ClockReadings) -> Vec<(ServerId, f64)> {
        let service = &self.services[service_position];
        service.fair_share_fractions(&self.cached_or_computed_pool(service, now))
    }

    /// Excludes servers that have used up their allowance from services whose policy reads loads, if other servers
    /// remain.
    fn exclude_limited_servers(&mut self, limited_servers: &HashSet<ServerId>, now: ClockReadings) {
        let mut excluded_servers = HashSet::new();
        let positions_of_server =
            |id: &ServerId| self.service_positions_by_server.get(id).into_iter().flatten().copied();
        let affected_service_positions: HashSet<usize> = limited_servers.iter().flat_map(positions_of_server).collect();
        for position in affected_service_positions.into_iter().filter(|position| self.services[*position].reads_loads())
        {
            let service_index = self.services[position].configuration().index;
            let pool_servers = self.fair_share_fractions(position, now).into_iter().map(|(id, _)| id);
            let (spent_ids, unspent_ids): (Vec<_>, Vec<_>) =
                pool_servers.partition(|id| self.share_limiter.is_allowance_spent(*id));
            if !unspent_ids.is_empty() {
                excluded_servers.extend(spent_ids.into_iter().map(|id| (service_index, id)));
            }
        }
        let previously_excluded_servers =
            std::mem::replace(&mut self.share_limiter.excluded_service_server_pairs, excluded_servers);
        let changed_servers = previously_excluded_servers
            .symmetric_difference(&self.share_limiter.excluded_service_server_pairs)
            .map(|(_, id)| *id);
        for id in changed_servers.collect::<HashSet<_>>() {
            self.on_load_source_changed(id);
        }
    }

    fn log_limited_servers(&mut self, previously_limited: &HashSet<ServerId>, limited_servers: &HashSet<ServerId>) {
        for id in previously_limited.symmetric_difference(limited_servers) {
            let Some(server) = self.fleet.servers.get(id) else { continue };
            let server_name = &server.name;
            match limited_servers.contains(id) {
                true => tracing::warn!(
                    event = "share-limited",
                    server = server_name,
                    max_fair_shares = MAX_FAIR_SHARE_MULTIPLE,
                    "the server received more than `max_fair_shares` times its fair share of new connections: the \
                     controller limits its share; check the loads that its agent reports"
                ),
                false => tracing::info!(
                    event = "share-unlimited",
                    server = server_name,
                    "the controller no longer limits the server's share of new connections"
                ),
            }
            self.racks.shared_config_change_count += 1;
        }
    }
}
