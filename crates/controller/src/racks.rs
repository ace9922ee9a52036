//! Rack controllers, with their agents and their summaries.
//!
//! An agent behind a rack is treated like any other agent, except that it reports less often. It registers, has its
//! configuration and answers queries. Only the loads for tables come in the rack's summaries.

use std::collections::{BTreeMap, HashSet};
use std::sync::Arc;
use std::time::Duration;

use coreward_api::types::Rack as RackStatus;
use coreward_model::ServerId;
use coreward_model::policy::RackSummary;
use coreward_wire::rack::parse_rack_summary;
use coreward_wire::{
    LOAD_BALANCER_LOSS_TIMEOUT, RackConfiguration, RackMember, RackServer, RackService, ServiceIndex, WireError, v1,
};

use super::message_rejection::MessageRejection;
use super::pool::places_each_datagram;
use super::service::Service;
use super::{AgentSession, ClockReadings, Controller};

/// Maximum number of detailed reports per second from all agents behind racks. It is a tenth of the reports that a
/// controller without racks can process.
const MAX_FULL_REPORTS_PER_SECOND: usize = 2_000;

/// Number of report intervals after which a rack's summaries expire. Agents' reports have the same default.
const RACK_SUMMARY_LIFETIME_INTERVALS: u32 = 3;

/// Connected racks, and disconnected racks whose summaries are still valid.
#[derive(Debug, Default)]
pub struct FleetRacks {
    by_name: BTreeMap<String, Rack>,
    last_session_number: u64,
    /// Number of changes so far that may affect the configurations of all racks.
    pub shared_config_change_count: u64,
}

/// Version of one rack's configuration. The configuration is sent again when its version has changed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RackConfigVersion {
    all_racks_version: u64,
    rack_version: u64,
    detail_interval: Duration,
}

#[derive(Debug)]
struct Rack {
    /// Session of the rack while it is connected.
    session_number: Option<u64>,
    daemon_version: String,
    /// Time of the rack's last message, since the controller's start.
    last_message_at: Duration,
    sessions_by_stream: BTreeMap<u64, AgentSession>,
    /// Number of changes of this rack's agents so far. If all racks shared one number, every change would be sent to
    /// all racks. With hundreds of racks, that would take a quarter of a CPU.
    agent_change_count: u64,
    summaries_by_service: BTreeMap<ServiceIndex, ReceivedRackSummary>,
}

#[derive(Debug)]
struct ReceivedRackSummary {
    summary: Arc<RackSummary>,
    /// Time at which the summary expires, since the controller's start.
    expires_at: Duration,
}

impl ReceivedRackSummary {
    fn is_valid(&self, now: ClockReadings) -> bool {
        now.monotonic_time <= self.expires_at
    }
}

impl Rack {
    fn valid_summaries(&self, now: ClockReadings) -> impl Iterator<Item = &Arc<RackSummary>> {
        self.summaries_by_service
            .values()
            .filter(move |received_summary| received_summary.is_valid(now))
            .map(|relayed| &relayed.summary)
    }
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RackRelay {
    pub rack_session: u64,
    pub rack_name: Arc<str>,
    /// Number that the rack has given to the agent's stream.
    pub stream_number: u64,
}

/// Reason why a rack's summaries are rejected.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum RackSummaryRejection {
    #[error(transparent)]
    MalformedSummary(#[from] WireError),
    /// The agent of this server is not connected through the rack, so the rack must not report the server.
    #[error("the agent of server {0} is not connected through this rack: expected only servers whose agents are")]
    ForeignServer(ServerId),
}

impl FleetRacks {
    fn find_by_session(&mut self, session: u64) -> Option<&mut Rack> {
        self.by_name.values_mut().find(|rack| rack.session_number == Some(session))
    }

    fn find_connected_rack(&self, session: u64) -> Option<(&String, &Rack)> {
        self.by_name.iter().find(|(_, rack)| rack.session_number == Some(session))
    }

    /// Returns the valid summaries that contain servers of the service.
    pub fn valid_summaries_of_service(
        &self,
        service: ServiceIndex,
        now: ClockReadings,
    ) -> impl Iterator<Item = &Arc<RackSummary>> {
        let received_summaries = self.by_name.values().filter_map(move |rack| rack.summaries_by_service.get(&service));
        received_summaries
            .filter(move |received_summary| received_summary.is_valid(now))
            .map(|relayed| &relayed.summary)
    }

    /// Returns the servers that at least one valid summary contains.
    pub fn summarized_servers(&self, now: ClockReadings) -> HashSet<ServerId> {
        let valid_summaries = self.by_name.values().flat_map(|rack| rack.valid_summaries(now));
        valid_summaries.flat_map(|summary| &summary.servers).map(|server| server.id).collect()
    }

    pub fn relay_flags_by_server_id(&self, service: ServiceIndex, now: ClockReadings) -> Vec<bool> {
        let mut is_relayed_by_id = Vec::new();
        for server in self.valid_summaries_of_service(service, now).flat_map(|summary| &summary.servers) {
            let id = usize::from(server.id.get());
            if id >= is_relayed_by_id.len() {
                is_relayed_by_id.resize(id + 1, false);
            }
            is_relayed_by_id[id] = true;
        }
        is_relayed_by_id
    }

    pub fn begin_agent_session(&mut self, relay: &RackRelay, session: &AgentSession) {
        if let Some(rack) = self.find_by_session(relay.rack_session) {
            rack.agent_change_count += 1;
            rack.sessions_by_stream.insert(relay.stream_number, session.clone());
        }
    }

    pub fn end_agent_session(&mut self, relay: &RackRelay) {
        if let Some(rack) = self.find_by_session(relay.rack_session) {
            rack.agent_change_count += 1;
            rack.sessions_by_stream.remove(&relay.stream_number);
        }
    }

    pub fn on_agent_replaced(&mut self, rack: &str) {
        if let Some(rack) = self.by_name.get_mut(rack) {
            rack.agent_change_count += 1;
        }
    }

    /// Returns the interval between an agent's detailed reports with which all agents together keep to
    /// [`MAX_FULL_REPORTS_PER_SECOND`].
    fn detail_interval(&self) -> Duration {
        let agent_count: usize = self.by_name.values().map(|rack| rack.sessions_by_stream.len()).sum();
        Duration::from_secs((agent_count / MAX_FULL_REPORTS_PER_SECOND) as u64)
    }
}

impl Controller {
    pub(super) fn rack_statuses(&self, now: ClockReadings) -> Vec<RackStatus> {
        let mut connected_racks =
            self.racks.by_name.iter().filter(|(_, rack)| rack.session_number.is_some()).peekable();
        if connected_racks.peek().is_none() {
            return Vec::new();
        }
        let permitted_server_counts = self.fleet.server_counts_by_rack();
        let status_of_rack = |(name, rack): (&String, &Rack)| {
            let mut server_names: Vec<String> =
                rack.sessions_by_stream.values().map(|session| session.server_name().to_owned()).collect();
            // The names are sorted, because agents connect in any order.
            server_names.sort_unstable();
            RackStatus {
                name: name.clone(),
                version: rack.daemon_version.clone(),
                last_message_age_ms: now.monotonic_time.saturating_sub(rack.last_message_at).as_millis() as u32,
                servers: server_names,
                permitted_servers: permitted_server_counts.server_count(name),
            }
        };
        connected_racks.map(status_of_rack).collect()
    }

    /// Checks that the fleet document allows a rack with this name. Fails if it does not.
    fn require_allowed_rack(&self, name: &str) -> Result<(), MessageRejection> {
        let is_allowed = self.fleet.allowed_racks.as_ref().is_none_or(|racks| racks.contains(name));
        if is_allowed { Ok(()) } else { Err(MessageRejection::UnknownRack(name.to_owned())) }
    }

    /// Checks that the agent may report for the server through its rack. Fails if it may not. An agent without a rack
    /// proves its identity by its certificate. A rack authenticates its agents itself, so the fleet document limits the
    /// servers for which it may report.
    pub(super) fn require_allowed_relay(
        &self,
        id: ServerId,
        relay: Option<&RackRelay>,
    ) -> Result<(), MessageRejection> {
        let Some(RackRelay { rack_name: name, .. }) =
            relay.filter(|relay| !self.fleet.may_connect_through_rack(id, &relay.rack_name))
        else {
            return Ok(());
        };
        let permitted_racks = self.fleet.racks_allowed_for_server(id).into_iter().flatten().cloned().collect();
        Err(MessageRejection::ForeignRack {
            server: self.fleet.servers[&id].name.clone(),
            rack: name.to_string(),
            racks: permitted_racks,
        })
    }

    /// Registers a rack and returns its session. Fails if a rack with this name is connected and has reported recently,
    /// or if the fleet document does not list the rack.
    pub fn register_rack(&mut self, name: &str, version: &str, now: ClockReadings) -> Result<u64, MessageRejection> {
        let rack_check_result = self.require_allowed_rack(name);
        self.count_rejection(rack_check_result)?;
        let racks = &mut self.racks;
        if let Some(connected_rack) = racks.by_name.get(name).filter(|rack| rack.session_number.is_some()) {
            let since_last_message = now.monotonic_time.saturating_sub(connected_rack.last_message_at);
            if since_last_message <= LOAD_BALANCER_LOSS_TIMEOUT {
                let rejection = MessageRejection::DuplicateRack { name: name.to_owned(), since_last_message };
                return self.count_rejection(Err(rejection));
            }
        }
        racks.by_name.retain(|_, rack| rack.session_number.is_some() || rack.valid_summaries(now).next().is_some());
        racks.last_session_number += 1;
        let old_rack = racks.by_name.remove(name);
        let summaries = old_rack.map(|old| old.summaries_by_service).unwrap_or_default();
        let rack = Rack {
            session_number: Some(racks.last_session_number),
            daemon_version: version.to_owned(),
            last_message_at: now.monotonic_time,
            sessions_by_stream: BTreeMap::new(),
            agent_change_count: 0,
            summaries_by_service: summaries,
        };
        racks.by_name.insert(name.to_owned(), rack);
        Ok(racks.last_session_number)
    }

    /// Ends a rack's session. The rack's summaries remain valid until they expire.
    pub fn disconnect_rack(&mut self, session: u64) {
        if let Some(rack) = self.racks.find_by_session(session) {
            rack.session_number = None;
            rack.sessions_by_stream.clear();
        }
    }

    pub fn record_rack_message(&mut self, session: u64, now: ClockReadings) {
        if let Some(rack) = self.racks.find_by_session(session) {
            rack.last_message_at = now.monotonic_time;
        }
    }

    /// Replaces the rack's summary of each service in a message. A rack with many services sends several messages. If a
    /// summary is invalid, this fails and keeps the previous summaries.
    pub fn record_rack_summaries(
        &mut self,
        session: u64,
        messages: &[v1::RackSummary],
        now: ClockReadings,
    ) -> Result<(), RackSummaryRejection> {
        let Some((_, rack)) = self.racks.find_connected_rack(session) else { return Ok(()) };
        let mut rack_servers: Vec<ServerId> = self.agent_streams(rack).map(|(_, id)| id).collect();
        rack_servers.sort_unstable();
        let mut new_summaries = BTreeMap::new();
        for message in messages {
            let (service, mut summary) = parse_rack_summary(message)?;
            // The rack has not yet received the configuration without this service.
            if !self.service_positions_by_index.contains_key(&service) {
                continue;
            }
            for list in &mut summary.candidate_lists {
                list.key = self.rss_keys.intern(list.key.clone());
            }
            if let Some(foreign_server) =
                summary.servers.iter().find(|server| rack_servers.binary_search(&server.id).is_err())
            {
                return Err(RackSummaryRejection::ForeignServer(foreign_server.id));
            }
            new_summaries.insert(service, Arc::new(summary));
        }
        let expires_at = now.monotonic_time + RACK_SUMMARY_LIFETIME_INTERVALS * self.fleet.report_interval;
        if let Some(rack) = self.racks.find_by_session(session) {
            rack.summaries_by_service.retain(|_, received_summary| received_summary.is_valid(now));
            let to_received_summary = |(service, summary): (&ServiceIndex, &Arc<RackSummary>)| {
                (*service, ReceivedRackSummary { summary: summary.clone(), expires_at })
            };
            rack.summaries_by_service.extend(new_summaries.iter().map(to_received_summary));
        }
        for (service, summary) in &new_summaries {
            self.on_relayed_loads_changed(*service, summary, now);
        }
        Ok(())
    }

    pub fn rack_config_version(&self, session: u64) -> RackConfigVersion {
        let rack_version = self.racks.find_connected_rack(session).map_or(0, |(_, rack)| rack.agent_change_count);
        RackConfigVersion {
            all_racks_version: self.racks.shared_config_change_count,
            rack_version,
            detail_interval: self.racks.detail_interval(),
        }
    }

    /// Returns a rack's configuration, or `None` if the rack is disconnected. Fails if the fleet document lists racks,
    /// but not this one.
    pub fn rack_configuration(
        &self,
        session: u64,
        now: ClockReadings,
    ) -> Result<Option<RackConfiguration>, MessageRejection> {
        let Some((name, rack)) = self.racks.find_connected_rack(session) else { return Ok(None) };
        self.require_allowed_rack(name)?;
        let to_rack_server = |(stream_number, id): (u64, ServerId)| {
            let fleet_server = &self.fleet.servers[&id];
            RackServer { stream_number, id, weight: fleet_server.weight, capacity: fleet_server.capacity }
        };
        let servers: Vec<RackServer> = self.agent_streams(rack).map(to_rack_server).collect();
        let rack_services = self.services.iter().map(|service| self.build_rack_service(service, &servers, now));
        Ok(Some(RackConfiguration {
            report_interval: self.fleet.report_interval,
            detail_interval: self.racks.detail_interval(),
            load_ewma_alpha: self.fleet.load_ewma_alpha,
            services: rack_services.filter(|service| !service.members.is_empty()).collect(),
            servers,
        }))
    }

    /// Returns the stream number and the server of each agent in a rack, except servers that have a newer agent
    /// elsewhere.
    fn agent_streams<'a>(&'a self, rack: &'a Rack) -> impl Iterator<Item = (u64, ServerId)> + 'a {
        rack.sessions_by_stream.iter().filter_map(|(stream, session)| {
            let id = self.fleet.server_id(session.server_name())?;
            (self.live_agent_session_number(id) == Some(session.session_number())).then_some((*stream, id))
        })
    }

    fn build_rack_service(&self, service: &Service, servers: &[RackServer], now: ClockReadings) -> RackService {
        let fleet_service = service.configuration();
        let to_rack_member = |server: &RackServer| RackMember {
            id: server.id,
            is_eligible: self.takes_new_connections(service, server.id, now),
            has_full_share: service.slow_start_fraction(server.id, now) >= 1.0
                && !self.share_limiter.is_limited(server.id),
        };
        RackService {
            index: fleet_service.index,
            policy_name: fleet_service.policy_name.to_owned(),
            bucket_count: fleet_service.bucket_count,
            places_each_datagram: places_each_datagram(fleet_service),
            members: servers
                .iter()
                .filter(|server| fleet_service.members.contains_key(&server.id))
                .map(to_rack_member)
                .collect(),
        }
    }
}
