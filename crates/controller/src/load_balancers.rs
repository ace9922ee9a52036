//! Load balancers of the fleet, and their last messages.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::time::Duration;

use coreward_api::types::StampedService;
use coreward_model::ServerId;
use coreward_model::health::HealthVerdict;
use coreward_model::load::SmoothingWeight;
use coreward_model::policy::TrafficRates;
use coreward_wire::sanitize::{sanitize_load_balancer_state, sanitize_str};
use coreward_wire::{
    HealthCheckResultsMessage, LOAD_BALANCER_LOSS_TIMEOUT, ServerCheckResult, ServiceIndex, TrafficCountsMessage, v1,
};

use super::ClockReadings;
use super::message_rejection::{MAX_LOAD_BALANCERS, MessageRejection, REGISTRATION_QUOTA_PER_NAME};
use super::token_bucket::TokenBucket;
use super::traffic_counts::{LoadBalancerTraffic, OpenedConnectionCounts, TrafficTotalsByBalancer};
use coreward_fleet::fleet::Fleet;

pub type HealthCheckTarget = (ServiceIndex, ServerId);

/// Time after which a server that no load balancer can reach gets no new connections. During shorter interruptions, the
/// data plane sends first packets to other servers.
pub const SERVER_UNREACHABLE_TIMEOUT: Duration = Duration::from_secs(3);

/// Time after the controller's start during which missing load balancers and agents do not count as lost, because they
/// retry at least every two seconds.
pub const PEER_LOSS_GRACE_PERIOD: Duration = Duration::from_secs(5);

/// Load balancers by name: connected ones, and those in the fleet records.
#[derive(Debug, Default)]
pub struct LoadBalancers {
    by_name: BTreeMap<String, LoadBalancer>,
    last_session_number: u64,
}

#[derive(Debug, Default)]
pub struct LoadBalancer {
    /// Session of the load balancer while it is connected.
    session: Option<LiveLoadBalancerSession>,
    /// Time at which the newest session ended, since the controller's start.
    session_ended_at: Duration,
    /// Last state that the load balancer reported, and the time of its arrival, since the controller's start.
    pub reported_state_and_time: Option<(v1::LoadBalancerState, Duration)>,
    /// Generation of the newest configuration that the load balancer has confirmed. Its data plane keeps the state
    /// after the session has ended.
    pub confirmed_config_generation: u64,
    /// Time at which `confirmed_config_generation` was first confirmed, since the controller's start.
    pub config_confirmed_at: Duration,
    /// Configuration that was active at the load balancer when its session began, if it was newer than the store's.
    newer_configuration: Option<NewerThanStoreConfiguration>,
    /// Time since the controller's start at which each unreachable server's MAC address became unknown, by server name.
    unresolved_since_by_server: HashMap<String, Duration>,
    traffic: LoadBalancerTraffic,
    reported_health: ReportedServerHealth,
    registration_bucket: Option<TokenBucket>,
}

/// Configuration of a load balancer that is newer than the configuration in the controller's store.
#[derive(Debug, Clone, Copy)]
struct NewerThanStoreConfiguration {
    generation: u64,
    /// Generation of the fleet document in the store when the load balancer's session began.
    document_generation: u64,
}

#[derive(Debug, Default)]
struct ReportedServerHealth {
    check_results: BTreeMap<HealthCheckTarget, ServerCheckResult>,
    verdicts: BTreeMap<HealthCheckTarget, HealthVerdict>,
    /// Time at which the last message with health check results arrived, since the controller's start.
    received_at: Duration,
    verdict_version: u64,
    has_reported_results: bool,
}

#[derive(Debug)]
struct LiveLoadBalancerSession {
    session_number: u64,
    /// Time of the load balancer's last message, since the controller's start.
    last_message_at: Duration,
}

impl LoadBalancers {
    /// Adds load balancers with these names, and removes other load balancers that are not connected.
    pub fn set_known_names<'a>(&mut self, names: impl Iterator<Item = &'a String>) {
        let known_names: BTreeSet<&String> = names.collect();
        self.by_name.retain(|name, balancer| known_names.contains(name) || balancer.session.is_some());
        for name in known_names {
            self.by_name.entry(name.clone()).or_default();
        }
    }

    /// Registers a load balancer and returns its session. Fails if a load balancer with this name is alive.
    pub fn register_session(&mut self, name: &str, now: ClockReadings) -> Result<u64, MessageRejection> {
        if self.by_name.len() >= MAX_LOAD_BALANCERS && !self.by_name.contains_key(name) {
            return Err(MessageRejection::TooManyLoadBalancers(sanitize_str(name)));
        }
        let balancer = self.by_name.entry(name.to_owned()).or_default();
        if !balancer
            .registration_bucket
            .get_or_insert(REGISTRATION_QUOTA_PER_NAME.from(now.monotonic_time))
            .try_take(REGISTRATION_QUOTA_PER_NAME, now.monotonic_time)
        {
            return Err(MessageRejection::TooManyRegistrations(name.to_owned()));
        }
        if let Some(live_session) = &balancer.session {
            let since_last_message = now.monotonic_time.saturating_sub(live_session.last_message_at);
            if since_last_message <= LOAD_BALANCER_LOSS_TIMEOUT {
                return Err(MessageRejection::DuplicateLoadBalancer { name: name.to_owned(), since_last_message });
            }
        }
        self.last_session_number += 1;
        balancer.session = Some(LiveLoadBalancerSession {
            session_number: self.last_session_number,
            last_message_at: now.monotonic_time,
        });
        balancer.reported_state_and_time = None;
        balancer.unresolved_since_by_server.clear();
        balancer.reported_health.record_health_check_results(HealthCheckResultsMessage::default(), now);
        Ok(self.last_session_number)
    }

    /// Records the configuration that was active at the load balancer when its session began. Returns the load
    /// balancer's name if the store has an older configuration.
    pub fn record_configuration_in_force(&mut self, session: u64, generation: u64, fleet: &Fleet) -> Option<&str> {
        let (name, balancer) = self.by_name.iter_mut().find(|(_, balancer)| balancer.has_session(session))?;
        let is_ahead_of_store = generation > fleet.generation;
        balancer.newer_configuration = is_ahead_of_store
            .then_some(NewerThanStoreConfiguration { generation, document_generation: fleet.document.generation });
        is_ahead_of_store.then_some(name)
    }

    /// Returns the name and the generation of each load balancer whose configuration is newer than the store's. Omits
    /// a load balancer if the generation of the stored fleet document, `document_generation`, has changed since the
    /// load balancer's session began.
    pub fn configurations_newer_than_store(&self, document_generation: u64) -> impl Iterator<Item = (&str, u64)> {
        self.by_name.iter().filter_map(move |(name, balancer)| {
            let newer_configuration = balancer
                .newer_configuration
                .filter(|configuration| configuration.document_generation == document_generation)?;
            Some((name.as_str(), newer_configuration.generation))
        })
    }

    fn record_message_time(&mut self, session: u64, now: ClockReadings) -> Option<&mut LoadBalancer> {
        let has_this_session = |balancer: &&mut LoadBalancer| balancer.has_session(session);
        let balancer = self.by_name.values_mut().find(has_this_session)?;
        balancer.session.as_mut()?.last_message_at = now.monotonic_time;
        Some(balancer)
    }

    /// Records the load balancer's state. `newest_generation` is that of the active configuration, the highest one that
    /// a load balancer can confirm.
    pub fn record_state(
        &mut self,
        session: u64,
        state: v1::LoadBalancerState,
        newest_generation: u64,
        now: ClockReadings,
    ) {
        if let Some(balancer) = self.record_message_time(session, now) {
            let sanitized_state = sanitize_load_balancer_state(state);
            let unresolved_since = |server: &String| {
                balancer.unresolved_since_by_server.get(server).copied().unwrap_or(now.monotonic_time)
            };
            balancer.unresolved_since_by_server = sanitized_state
                .unresolved_servers
                .iter()
                .map(|server| (server.clone(), unresolved_since(server)))
                .collect();
            if (balancer.confirmed_config_generation + 1..=newest_generation)
                .contains(&sanitized_state.configuration_generation)
            {
                (balancer.confirmed_config_generation, balancer.config_confirmed_at) =
                    (sanitized_state.configuration_generation, now.monotonic_time);
            }
            balancer.reported_state_and_time = Some((sanitized_state, now.monotonic_time));
        }
    }

    /// Records a table that the load balancer has activated since its last reported state.
    pub fn record_table_in_force(&mut self, session: u64, service: &str, generation: u64) {
        let balancer = self.by_name.values_mut().find(|balancer| balancer.has_session(session));
        let tables_in_force = balancer
            .and_then(|balancer| balancer.reported_state_and_time.as_mut())
            .map(|(state, _)| &mut state.table_generations);
        if let Some(tables) = tables_in_force {
            tables.insert(service.to_owned(), generation);
        }
    }

    pub fn record_health_check_results(
        &mut self,
        session: u64,
        message: HealthCheckResultsMessage,
        now: ClockReadings,
    ) {
        if let Some(balancer) = self.record_message_time(session, now) {
            balancer.reported_health.record_health_check_results(message, now);
            balancer.reported_health.has_reported_results = true;
        }
    }

    /// Returns whether all live load balancers have reported results of health checks to this leader.
    pub fn have_all_reported_health(&self, now: ClockReadings) -> bool {
        self.live_load_balancers(now).all(|(_, balancer)| balancer.reported_health.has_reported_results)
    }

    /// Returns the name of each live load balancer and the version of its verdicts, which changes when they do.
    pub fn health_verdict_versions(&self, now: ClockReadings) -> Vec<(String, u64)> {
        self.live_load_balancers(now)
            .map(|(name, balancer)| (name.clone(), balancer.reported_health.verdict_version))
            .collect()
    }

    pub fn live_health_verdicts(&self, now: ClockReadings) -> Vec<&BTreeMap<HealthCheckTarget, HealthVerdict>> {
        self.live_load_balancers(now).map(|(_, balancer)| &balancer.reported_health.verdicts).collect()
    }

    /// Returns the results of all live load balancers' checks of one server, each with the load balancer's name
    /// and the result's age.
    pub fn health_check_results(
        &self,
        target: HealthCheckTarget,
        now: ClockReadings,
    ) -> Vec<(&str, &ServerCheckResult, Duration)> {
        let mut check_results = Vec::new();
        for (name, LoadBalancer { reported_health: health, .. }) in self.live_load_balancers(now) {
            let result_age = now.monotonic_time.saturating_sub(health.received_at);
            check_results.extend(
                health.check_results.get(&target).map(|check_result| (name.as_str(), check_result, result_age)),
            );
        }
        check_results
    }

    /// Returns the time, since the controller's start, at which the last live load balancer confirmed `generation` or a
    /// newer one. The error lists those that have not confirmed it, and is empty if no load balancer is live.
    pub fn config_confirmation_time(&self, generation: u64, now: ClockReadings) -> Result<Duration, Vec<&str>> {
        let unconfirmed_balancers =
            self.live_load_balancers(now).filter(|(_, balancer)| balancer.confirmed_config_generation < generation);
        let unconfirmed_names: Vec<&str> = unconfirmed_balancers.map(|(name, _)| name.as_str()).collect();
        let last_confirmed_at = self.live_load_balancers(now).map(|(_, balancer)| balancer.config_confirmed_at).max();
        last_confirmed_at.filter(|_| unconfirmed_names.is_empty()).ok_or(unconfirmed_names)
    }

    fn live_load_balancers(&self, now: ClockReadings) -> impl Iterator<Item = (&String, &LoadBalancer)> {
        self.by_name.iter().filter(move |(_, balancer)| balancer.is_alive(now))
    }

    /// Records a load balancer's traffic counts. Returns the numbers of connections opened since its previous message.
    /// `alpha` is the weight of the newest rate in the moving average.
    pub fn record_traffic(
        &mut self,
        session: u64,
        message: &TrafficCountsMessage,
        alpha: SmoothingWeight,
        now: ClockReadings,
    ) -> OpenedConnectionCounts {
        let Some(balancer) = self.record_message_time(session, now) else { return OpenedConnectionCounts::default() };
        let opened_connections = balancer.traffic.opened_connection_counts(message);
        balancer.traffic.record_traffic_totals(message, alpha, now);
        opened_connections
    }

    pub fn traffic_totals(&self, server: ServerId) -> TrafficTotalsByBalancer {
        let name_and_traffic = |(name, balancer): (&String, &LoadBalancer)| {
            Some((name.clone(), balancer.traffic.server_traffic_total(server)?))
        };
        TrafficTotalsByBalancer(self.by_name.iter().filter_map(name_and_traffic).collect())
    }

    /// Returns the sum of all load balancers' traffic rates to the server, or `None` before any load balancer has sent
    /// two messages.
    pub fn traffic_rates(&self, server: ServerId) -> Option<TrafficRates> {
        let balancer_rates = self.by_name.values().filter_map(|balancer| balancer.traffic.server_traffic_rates(server));
        balancer_rates.reduce(|a, b| TrafficRates {
            packets_per_second: a.packets_per_second + b.packets_per_second,
            bytes_per_second: a.bytes_per_second + b.bytes_per_second,
        })
    }

    /// Returns the number of connections to the service opened since the last call, or `None` if it is not known yet.
    pub fn take_opened_connection_count(&mut self, service: ServiceIndex) -> Option<u64> {
        let opened_counts =
            self.by_name.values_mut().filter_map(|balancer| balancer.traffic.take_opened_connection_count(service));
        opened_counts.reduce(u64::saturating_add)
    }

    /// Returns the numbers of packets that all load balancers together forwarded by cookie and by flow table, for a
    /// service that they stamp.
    pub fn stamped_packet_counts(&self, service: &str) -> StampedService {
        let reported_states = self.by_name.values().filter_map(|balancer| balancer.reported_state_and_time.as_ref());
        let stamped_services = reported_states.flat_map(|(state, _)| &state.stamped_services);
        let zero_counts = StampedService { service: service.to_owned(), cookie_packets: 0, flow_table_packets: 0 };
        stamped_services.filter(|stamped_service| stamped_service.service == service).fold(
            zero_counts,
            |sum, stamped| StampedService {
                cookie_packets: sum.cookie_packets.saturating_add(stamped.by_cookie),
                flow_table_packets: sum.flow_table_packets.saturating_add(stamped.by_flow_table),
                ..sum
            },
        )
    }

    /// Ends a session. Returns whether the load balancer is now disconnected, and false if it has a newer session.
    pub fn end_session(&mut self, session: u64, now: ClockReadings) -> bool {
        let balancer = self.by_name.values_mut().find(|balancer| balancer.has_session(session));
        let has_ended = balancer.map(|balancer| {
            balancer.session = None;
            balancer.session_ended_at = now.monotonic_time;
            balancer.traffic.clear_rates();
        });
        has_ended.is_some()
    }

    pub fn is_connected(&self, name: &str) -> bool {
        self.by_name.get(name).is_some_and(LoadBalancer::is_connected)
    }

    /// Returns whether the load balancer's session is open or ended recently.
    pub fn is_alive(&self, name: &str, now: ClockReadings) -> bool {
        self.by_name.get(name).is_some_and(|balancer| balancer.is_alive(now))
    }

    /// Returns whether no load balancer has been able to reach the server for [`SERVER_UNREACHABLE_TIMEOUT`].
    pub fn is_unreachable(&self, server: &str, now: ClockReadings) -> bool {
        let is_long_unresolved = |balancer: &LoadBalancer| {
            let unresolved_since = balancer.unresolved_since_by_server.get(server);
            unresolved_since
                .is_some_and(|start_time| now.monotonic_time.saturating_sub(*start_time) >= SERVER_UNREACHABLE_TIMEOUT)
        };
        let mut reporting_balancers = self
            .connected_load_balancers()
            .filter(|(_, balancer)| balancer.reported_state_and_time.is_some())
            .peekable();
        reporting_balancers.peek().is_some() && reporting_balancers.all(|(_, balancer)| is_long_unresolved(balancer))
    }

    /// Returns the number of connected load balancers, which share the new connections.
    pub fn connected_load_balancer_count(&self) -> usize {
        self.connected_load_balancers().count()
    }

    fn connected_load_balancers(&self) -> impl Iterator<Item = (&String, &LoadBalancer)> {
        self.by_name.iter().filter(|(_, balancer)| balancer.is_connected())
    }

    pub fn iter(&self) -> impl Iterator<Item = (&String, &LoadBalancer)> {
        self.by_name.iter()
    }
}

impl ReportedServerHealth {
    fn record_health_check_results(&mut self, message: HealthCheckResultsMessage, now: ClockReadings) {
        let check_results: BTreeMap<HealthCheckTarget, ServerCheckResult> = message
            .check_results
            .into_iter()
            .map(|(service, server, check_result)| ((service, server), check_result))
            .collect();
        let verdicts_by_target =
            check_results.iter().filter_map(|(target, check_result)| Some((*target, check_result.verdict?)));
        let verdicts: BTreeMap<HealthCheckTarget, HealthVerdict> = verdicts_by_target.collect();
        self.verdict_version += u64::from(verdicts != self.verdicts);
        (self.check_results, self.verdicts, self.received_at) = (check_results, verdicts, now.monotonic_time);
    }
}

impl LoadBalancer {
    fn has_session(&self, session_number: u64) -> bool {
        self.session.as_ref().is_some_and(|live_session| live_session.session_number == session_number)
    }

    pub fn is_connected(&self) -> bool {
        self.session.is_some()
    }

    /// Returns whether the load balancer sent a message recently. After a power failure, its stream stays open until
    /// the keep-alive fails, which is too late for clients.
    pub fn is_alive(&self, now: ClockReadings) -> bool {
        let last_message_at =
            self.session.as_ref().map_or(self.session_ended_at, |live_session| live_session.last_message_at);
        now.monotonic_time < PEER_LOSS_GRACE_PERIOD.max(last_message_at + LOAD_BALANCER_LOSS_TIMEOUT)
    }
}
