//! State and decisions of the controller, without I/O. Time is an argument, so that tests run in virtual time.
//!
//! * [`agent`]: state of a server, from its agent's reports
//! * [`message_rejection`]: rejections of reports and registrations
//! * [`service`]: a service, its policy and its newest table
//! * [`pool`]: a service's servers as its policy sees them
//! * [`racks`]: rack controllers
//! * [`due_tables`]: services whose tables must be made
//! * [`table_acks`]: active tables at load balancers, and their latency
//! * `share_limiter`: limit of a server's share of new connections
//! * [`load_balancers`]: the load balancers
//! * [`rotation`]: rotation of the cookie keys
//! * [`health`]: health of servers
//! * `server_status`: states of servers and their reasons
//! * `drains`: remaining connections of drained servers
//! * `acknowledged`: acknowledgements of configurations
//! * [`traffic_counts`]: traffic counts by load balancers
//! * [`status`], [`explain`]: output of commands

pub mod agent;
mod agents;
mod dirty_server_set;
mod drains;
#[cfg(test)]
mod drains_tests;
pub mod due_tables;
#[cfg(test)]
mod due_tables_tests;
pub mod explain;
pub mod health;
#[cfg(test)]
mod health_tests;
mod input_fingerprints;
pub mod load_balancers;
pub mod message_rejection;
pub mod metrics;
pub mod pool;
#[cfg(test)]
mod pool_tests;
pub mod racks;
#[cfg(test)]
mod racks_tests;
pub mod rotation;
#[cfg(test)]
mod rotation_tests;
mod rss_keys;
mod server_status;
pub mod service;
mod share_limiter;
#[cfg(test)]
mod share_limiter_tests;
pub mod status;
pub mod table_acks;
#[cfg(test)]
mod table_inputs_tests;
pub mod tables;
#[cfg(test)]
mod tests;
pub mod token_bucket;
pub mod traffic_counts;
mod update_acknowledgements;
pub mod warnings;

use std::collections::{BTreeMap, BTreeSet, HashMap, VecDeque};
use std::sync::Arc;
use std::time::Duration;

use coreward_model::bucket_history::BucketHistory;
use coreward_model::placement::PlacementTable;
use coreward_model::{ServerId, policy};
use coreward_wire::{
    AgentConfiguration, AgentReport, AgentReportError, FleetConfiguration, ReportedRss, ServiceIndex,
    TrafficCountsMessage, v1,
};

use agent::{Agent, LiveAgentSession};
use agents::FleetAgents;
use coreward_fleet::fleet::{Fleet, FleetService};
use health::ServerHealthState;
use load_balancers::LoadBalancers;
use message_rejection::MessageRejection;
use racks::{FleetRacks, RackRelay};
use rss_keys::InternedRssKeys;
use service::{ReplacedService, Service, TableTrigger};
use share_limiter::ConnectionShareLimiter;
use table_acks::TableAcks;

/// Present time on three clocks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ClockReadings {
    /// Time since the controller's start, on a clock that never goes back.
    pub monotonic_time: Duration,
    /// Wall-clock time since 1970, which may jump.
    pub wall_time: Duration,
    /// Time since 1970 by the clock of the records ([`coreward_fleet::clock`]), which never goes back.
    pub record_clock_time: Duration,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct AgentSession {
    server: Arc<str>,
    session_number: u64,
    relay: Option<RackRelay>,
}

impl AgentSession {
    pub fn server_name(&self) -> &str {
        &self.server
    }

    pub fn session_number(&self) -> u64 {
        self.session_number
    }
}

/// New placement table of a service, to be sent to the load balancers.
#[derive(Debug, Clone)]
pub struct NewPlacementTable {
    pub service_index: ServiceIndex,
    pub table: Arc<PlacementTable>,
}

pub struct ServicePositions {
    positions_by_index: HashMap<ServiceIndex, usize>,
    positions_by_server: HashMap<ServerId, Vec<usize>>,
    services: Vec<FleetService>,
}

impl ServicePositions {
    pub fn for_fleet(fleet: &Fleet) -> Self {
        let positions_by_index = fleet.services.iter().enumerate().map(|(position, service)| (service.index, position));
        let mut positions_by_server: HashMap<ServerId, Vec<usize>> = HashMap::new();
        for (position, service) in fleet.services.iter().enumerate() {
            for id in service.members.keys() {
                positions_by_server.entry(*id).or_default().push(position);
            }
        }
        Self { positions_by_index: positions_by_index.collect(), positions_by_server, services: fleet.services.clone() }
    }
}

pub struct RetiredFleetConfiguration {
    _fleet: Fleet,
    _services: HashMap<ServiceIndex, Service>,
    _service_positions_by_server: HashMap<ServerId, Vec<usize>>,
    _replaced_services: Vec<ReplacedService>,
}

/// Controller of one fleet, which receives loads of servers and computes placement tables from them.
pub struct Controller {
    fleet: Fleet,
    agents: FleetAgents,
    rss_keys: InternedRssKeys,
    services: Vec<Service>,
    pub load_balancers: LoadBalancers,
    health: ServerHealthState,
    racks: FleetRacks,
    accepted_report_count: u64,
    rejection_counts: BTreeMap<&'static str, u64>,
    /// Number of accepted reports whose wall clock was ahead of this host's by more than
    /// [`MAX_REPORT_CLOCK_LEAD`](message_rejection::MAX_REPORT_CLOCK_LEAD).
    pub clock_ahead_report_count: u64,
    last_session_number: u64,
    service_positions_by_index: HashMap<ServiceIndex, usize>,
    service_positions_by_server: HashMap<ServerId, Vec<usize>>,
    services_with_due_table: VecDeque<ServiceIndex>,
    pub table_acks: TableAcks,
    share_limiter: ConnectionShareLimiter,
}

impl Controller {
    pub fn new(fleet: Fleet) -> Self {
        let mut controller = Self {
            services: Vec::new(),
            agents: FleetAgents::default(),
            rss_keys: InternedRssKeys::default(),
            load_balancers: LoadBalancers::default(),
            health: ServerHealthState::default(),
            racks: FleetRacks::default(),
            accepted_report_count: 0,
            rejection_counts: MessageRejection::COUNTER_NAMES.into_iter().map(|reason| (reason, 0)).collect(),
            clock_ahead_report_count: 0,
            last_session_number: 0,
            service_positions_by_index: HashMap::new(),
            service_positions_by_server: HashMap::new(),
            services_with_due_table: VecDeque::new(),
            table_acks: TableAcks::default(),
            share_limiter: ConnectionShareLimiter::default(),
            fleet: fleet.clone(),
        };
        controller.configure(fleet);
        controller
    }

    pub fn fleet(&self) -> &Fleet {
        &self.fleet
    }

    /// Activates a new configuration. Servers that are in both configurations keep their state.
    pub fn configure(&mut self, fleet: Fleet) {
        let service_indexes = ServicePositions::for_fleet(&fleet);
        drop(self.configure_with_positions(fleet, service_indexes));
    }

    /// Activates a configuration whose `indexes` are already computed. Returns the previous configuration, which can be
    /// dropped later.
    pub fn configure_with_positions(&mut self, fleet: Fleet, indexes: ServicePositions) -> RetiredFleetConfiguration {
        self.agents.retain_fleet_agents(&fleet);
        self.load_balancers.set_known_names(fleet.load_balancer_records.keys());
        let old_services = std::mem::take(&mut self.services);
        let mut old_services_by_index: HashMap<ServiceIndex, Service> =
            old_services.into_iter().map(|service| (service.configuration().index, service)).collect();
        let ServicePositions { positions_by_index: positions, positions_by_server, services } = indexes;
        let mut replaced_services = Vec::new();
        self.services = services
            .into_iter()
            .map(|new_service| match old_services_by_index.remove(&new_service.index) {
                Some(service) if service.is_same_service(&new_service) => {
                    let (service, previous_service) = service.with_new_configuration(new_service);
                    replaced_services.push(previous_service);
                    service
                }
                Some(other_service) => {
                    old_services_by_index.insert(new_service.index, other_service);
                    Service::new(new_service)
                }
                None => Service::new(new_service),
            })
            .collect();
        let old_fleet = std::mem::replace(&mut self.fleet, fleet);
        self.service_positions_by_index = positions;
        let old_positions_by_server = std::mem::replace(&mut self.service_positions_by_server, positions_by_server);
        self.on_services_changed();
        RetiredFleetConfiguration {
            _fleet: old_fleet,
            _services: old_services_by_index,
            _service_positions_by_server: old_positions_by_server,
            _replaced_services: replaced_services,
        }
    }

    /// Registers an agent for its server and returns its session. Fails if the server is unknown or has a live agent.
    pub fn register_agent(
        &mut self,
        server: &str,
        version: &str,
        now: ClockReadings,
    ) -> Result<AgentSession, MessageRejection> {
        self.register_agent_with_relay(server, version, None, now)
    }

    /// Registers an agent like [`Controller::register_agent`]. If `relay` is given, the agent is connected through a
    /// rack.
    pub fn register_agent_with_relay(
        &mut self,
        server: &str,
        version: &str,
        relay: Option<RackRelay>,
        now: ClockReadings,
    ) -> Result<AgentSession, MessageRejection> {
        let registration = self.try_register_agent(server, version, relay, now);
        self.count_rejection(registration)
    }

    fn try_register_agent(
        &mut self,
        server: &str,
        version: &str,
        relay: Option<RackRelay>,
        now: ClockReadings,
    ) -> Result<AgentSession, MessageRejection> {
        let id = self.fleet.server_id(server).ok_or_else(|| MessageRejection::UnknownServer(server.to_owned()))?;
        self.require_allowed_relay(id, relay.as_ref())?;
        let agent = self.agents.get_or_insert(server, id);
        if !agent.take_registration_token(now) {
            return Err(MessageRejection::TooManyRegistrations(server.to_owned()));
        }
        if let Some(live_session) = &agent.session {
            let since_last_message = now.monotonic_time.saturating_sub(live_session.last_message_at);
            if since_last_message <= live_session.time_to_live {
                return Err(MessageRejection::DuplicateAgent { server: server.to_owned(), since_last_message });
            }
        }
        self.last_session_number += 1;
        if let Some(rack) = agent.session.as_ref().and_then(|replaced_session| replaced_session.rack_name.as_deref()) {
            self.racks.on_agent_replaced(rack);
        }
        agent.begin_session(LiveAgentSession {
            session_number: self.last_session_number,
            last_message_at: now.monotonic_time,
            // The agent's first report sets its time to live. Until then it is three report intervals.
            time_to_live: 3 * self.fleet.report_interval,
            agent_version: version.to_owned(),
            rack_name: relay.as_ref().map(|relay| relay.rack_name.clone()),
        });
        self.on_load_source_changed(id);
        let session = AgentSession { server: server.into(), session_number: self.last_session_number, relay };
        if let Some(relay) = &session.relay {
            self.racks.begin_agent_session(relay, &session);
        }
        Ok(session)
    }

    /// Returns the configuration for the session's agent. Fails if the server has left the fleet, or if the agent may
    /// no longer use its rack.
    pub fn agent_configuration(&self, session: &AgentSession) -> Result<AgentConfiguration, MessageRejection> {
        let build_unknown_server_rejection = || MessageRejection::UnknownServer(session.server_name().to_owned());
        let id = self.fleet.server_id(session.server_name()).ok_or_else(build_unknown_server_rejection)?;
        self.require_allowed_relay(id, session.relay.as_ref())?;
        let previous_servers = self.services.iter().filter_map(|service| service.previous_servers(id));
        Ok(self
            .fleet
            .agent_configuration(id, &previous_servers.flatten().copied().filter(|server| *server != id).collect()))
    }

    /// Returns the configuration that is sent to all load balancers.
    pub fn fleet_configuration(&self, now: ClockReadings) -> FleetConfiguration {
        self.fleet.load_balancer_configuration(|name| self.load_balancers.is_alive(name, now))
    }

    pub fn live_load_balancer_names(&self, now: ClockReadings) -> BTreeSet<String> {
        let live_balancers = self.load_balancers.iter().filter(|(_, balancer)| balancer.is_alive(now));
        live_balancers.map(|(name, _)| name.clone()).collect()
    }

    /// Registers a load balancer and returns its session. Fails if a load balancer with this name is alive.
    pub fn register_load_balancer(&mut self, name: &str, now: ClockReadings) -> Result<u64, MessageRejection> {
        let is_allowed =
            self.fleet.allowed_load_balancers.as_ref().is_none_or(|allowed_names| allowed_names.contains(name));
        let registration = match is_allowed {
            true => self.load_balancers.register_session(name, now),
            false => Err(MessageRejection::UnknownLoadBalancer(name.to_owned())),
        };
        self.count_rejection(registration)
    }

    pub fn record_load_balancer_traffic(&mut self, session: u64, message: &TrafficCountsMessage, now: ClockReadings) {
        let opened_connections = self.load_balancers.record_traffic(session, message, self.fleet.load_ewma_alpha, now);
        self.share_limiter.add_opened_connections(&opened_connections);
        self.on_traffic_changed(now);
    }

    pub fn record_load_balancer_state(&mut self, session: u64, state: v1::LoadBalancerState, now: ClockReadings) {
        self.load_balancers.record_state(session, state, self.fleet.generation, now);
    }

    pub fn record_table_in_force(&mut self, session: u64, service: ServiceIndex, generation: u64, now: ClockReadings) {
        self.table_acks.record_confirmation(session, service, generation, now);
        if let Some(position) = self.service_positions_by_index.get(&service) {
            self.load_balancers.record_table_in_force(
                session,
                &self.services[*position].configuration().name,
                generation,
            );
        }
    }

    pub fn live_agent_session_number(&self, id: ServerId) -> Option<u64> {
        Some(self.agent(id)?.session.as_ref()?.session_number)
    }

    /// Returns each [`BucketHistory`] that has changed since the last call, with its service's name. The caller stores
    /// them.
    pub fn take_changed_bucket_histories(&mut self) -> Vec<(String, BucketHistory)> {
        self.services.iter_mut().filter_map(Service::take_changed_bucket_history).collect()
    }

    /// Returns a number that increases with every change of any agent's [`AgentConfiguration::previous_servers`].
    pub fn previous_server_change_count(&self) -> u64 {
        self.services.iter().map(Service::previous_server_change_count).sum()
    }

    /// Records an agent's report, or its parse error. A rejected report is counted and has no other effect.
    pub fn record_report(
        &mut self,
        session: &AgentSession,
        report: Result<AgentReport, AgentReportError>,
        now: ClockReadings,
    ) -> Result<(), MessageRejection> {
        let report_result = self.try_record_report(session, report, now);
        if report_result.is_ok() {
            self.accepted_report_count += 1;
        }
        self.count_rejection(report_result)
    }

    fn try_record_report(
        &mut self,
        session: &AgentSession,
        mut report: Result<AgentReport, AgentReportError>,
        now: ClockReadings,
    ) -> Result<(), MessageRejection> {
        let server_name = session.server_name();
        let agent = self
            .agents
            .find_by_name_mut(server_name)
            .ok_or_else(|| MessageRejection::UnknownServer(server_name.to_owned()))?;
        if agent.session.as_ref().is_none_or(|live_session| live_session.session_number != session.session_number) {
            return Err(MessageRejection::SupersededAgent(server_name.to_owned()));
        }
        if !agent.take_report_token(self.fleet.report_interval, now) {
            return Err(MessageRejection::TooManyReports(server_name.to_owned()));
        }
        if let Ok(AgentReport { rss: Some(ReportedRss { rss: Some(rss), .. }), .. }) = &mut report {
            rss.key = self.rss_keys.intern(rss.key.clone());
        }
        let sent_at = report.as_ref().ok().map(|report| report.sent_at);
        agent.record_report(report, self.fleet.load_ewma_alpha, self.fleet.generation, now)?;
        self.clock_ahead_report_count += u64::from(agent.clock_lead.is_some());
        if let Some(id) = self.fleet.server_id(server_name) {
            agent.traffic_at_report = self.load_balancers.traffic_totals(id);
            self.on_load_changed(id, TableTrigger { received_at: now.monotonic_time, is_load_change: true, sent_at });
        }
        Ok(())
    }

    /// Returns the time until the session's next message may be read, or zero if it may be read at once. It is
    /// always zero for agents behind racks, whose messages the racks delay.
    pub fn time_until_next_message(&mut self, session: &AgentSession, now: ClockReadings) -> Duration {
        if session.relay.is_some() {
            return Duration::ZERO;
        }
        let report_interval = self.fleet.report_interval;
        let agent = self.agents.find_by_name_mut(session.server_name());
        agent.map_or(Duration::ZERO, |agent| agent.time_until_next_report(report_interval, now))
    }

    /// Counts a message that the controller did not read at once, because the agent exceeded its rate limit.
    pub fn count_delayed_message(&mut self, session: &AgentSession) {
        let _ = self.count_rejection::<()>(Err(MessageRejection::TooManyReports(session.server_name().to_owned())));
    }

    /// Counts an unsolicited message towards the rate limit of reports.
    pub fn count_unsolicited_message(&mut self, session: &AgentSession, now: ClockReadings) {
        let report_interval = self.fleet.report_interval;
        if let Some(agent) = self.agents.find_by_name_mut(session.server_name()) {
            agent.take_report_token(report_interval, now);
        }
    }

    fn count_rejection<T>(&mut self, outcome: Result<T, MessageRejection>) -> Result<T, MessageRejection> {
        outcome.inspect_err(|rejection| *self.rejection_counts.entry(rejection.counter_name()).or_default() += 1)
    }

    /// Ends the session. The loads of its server remain valid until the last report expires.
    pub fn end_session(&mut self, session: &AgentSession) {
        if let Some(agent) = self.agents.find_by_name_mut(session.server_name())
            && agent.session.as_ref().is_some_and(|live_session| live_session.session_number == session.session_number)
        {
            agent.session = None;
            if let Some(id) = self.fleet.server_id(session.server_name()) {
                self.on_load_source_changed(id);
            }
        }
        if let Some(relay) = &session.relay {
            self.racks.end_agent_session(relay);
        }
    }

    /// Returns whether the loads of all servers that take new connections are known.
    pub fn are_all_loads_known(&self, now: ClockReadings) -> bool {
        let relayed_servers = self.racks.summarized_servers(now);
        let is_load_known = |id: ServerId| {
            relayed_servers.contains(&id) || self.agent(id).is_some_and(|agent| agent.fresh_core_loads(now).is_some())
        };
        let is_eligible = |service: &FleetService, id: ServerId| self.fleet.is_server_eligible(service, id);
        self.services
            .iter()
            .map(Service::configuration)
            .all(|service| service.members.keys().all(|id| !is_eligible(service, *id) || is_load_known(*id)))
    }

    /// Returns whether all expected load balancers have reported results of health checks, or no checks are configured.
    /// A new leader waits for the results, so that servers that are down remain down.
    pub fn has_all_check_results(&self, now: ClockReadings) -> bool {
        let has_checks = self.fleet.services.iter().any(|service| service.health_check.is_some());
        !has_checks || self.load_balancers.have_all_reported_health(now)
    }

    /// Computes all services' tables at the end of a report interval, and resets the counts of assigned connections.
    pub fn end_report_interval(&mut self, now: ClockReadings) -> Vec<NewPlacementTable> {
        self.services_with_due_table.clear();
        self.racks.shared_config_change_count += 1;
        self.update_health_verdicts(now);
        self.update_share_limiter(now);
        for position in 0..self.services.len() {
            self.begin_report_interval(position);
            self.services[position].mark_all_loads_changed();
            self.services[position].drop_cached_pool();
        }
        (0..self.services.len()).map(|position| self.make_table(position, now)).collect()
    }

    fn update_health_verdicts(&mut self, now: ClockReadings) {
        let mut health_state = std::mem::take(&mut self.health);
        health_state.update_verdicts(&self.fleet, &self.load_balancers, now, |id| {
            self.agent(id).is_some_and(|agent| agent.has_fresh_report(now))
        });
        self.health = health_state;
    }

    fn begin_report_interval(&mut self, service_position: usize) {
        let opened_connection_count =
            self.load_balancers.take_opened_connection_count(self.services[service_position].configuration().index);
        self.services[service_position].begin_report_interval(opened_connection_count);
    }

    /// Returns the arrival times of the servers' newest reports that are later than `lower_bound` (monotonic clock).
    pub fn arrival_times_of_reports_after(&self, lower_bound: Duration) -> impl Iterator<Item = Duration> {
        let newest_reports = self.agents.iter().filter_map(|agent| agent.newest_report.as_ref());
        newest_reports.map(|report| report.received_at).filter(move |received_at| *received_at > lower_bound)
    }

    fn agent(&self, id: ServerId) -> Option<&Agent> {
        self.agents.get(id)
    }
}

fn create_policy(service: &FleetService) -> Box<dyn policy::PlacementPolicy> {
    policy::create_policy_by_name(service.policy_name, service.hash_seed)
        .expect("the configuration takes only policies that exist")
}
