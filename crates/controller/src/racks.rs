//! Rack controllers: their agents and their summaries.
//!
//! An agent behind a rack is an agent like any other: it registers, has its configuration, answers queries, and
//! reports, but less often. Only the loads for tables come in the rack's summaries.

use std::collections::{BTreeMap, HashSet};
use std::sync::Arc;
use std::time::Duration;

use coreward_api::types::Rack as RackStatus;
use coreward_model::ServerId;
use coreward_model::policy::RackSummary;
use coreward_wire::rack::parse_summary;
use coreward_wire::{
    LOAD_BALANCER_TIMEOUT, RackConfiguration, RackMember, RackServer, RackService, ServiceIndex, WireError, v1,
};

use super::pool::places_requests;
use super::rejection::Rejection;
use super::service::Service;
use super::{Controller, Now, Session};

/// Maximum rate of full reports from all agents behind racks: a tenth of what a controller without racks can process.
const WHOLE_REPORTS_PER_SECOND: usize = 2_000;

/// Number of report intervals after which a rack's summaries expire, which is the default for agents' reports.
const SUMMARY_VALID_INTERVALS: u32 = 3;

/// Racks that are connected, and the valid summaries of disconnected ones.
#[derive(Debug, Default)]
pub struct Racks {
    by_name: BTreeMap<String, Rack>,
    last_session: u64,
    /// Number of changes after which the configurations of all racks may differ.
    pub changes: u64,
}

/// Version of one rack's configuration, by which changes are detected.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RackConfigVersion {
    all_racks_version: u64,
    own_version: u64,
    detail_interval: Duration,
}

#[derive(Debug)]
struct Rack {
    /// Session of the rack while it is connected.
    session: Option<u64>,
    version: String,
    /// Time of the rack's last message, since the controller's start.
    last_message_at: Duration,
    agents: BTreeMap<u64, Session>,
    /// Number of changes of this rack's agents. One number for all racks would send every change to all racks: with
    /// hundreds of racks, that would take a quarter of a CPU.
    changes: u64,
    summaries: BTreeMap<ServiceIndex, ReceivedSummary>,
}

#[derive(Debug)]
struct ReceivedSummary {
    summary: Arc<RackSummary>,
    /// Time at which the summary expires, since the controller's start.
    fresh_until: Duration,
}

impl ReceivedSummary {
    fn is_valid(&self, now: Now) -> bool {
        now.monotonic <= self.fresh_until
    }
}

impl Rack {
    fn fresh_summaries(&self, now: Now) -> impl Iterator<Item = &Arc<RackSummary>> {
        self.summaries.values().filter(move |relayed| relayed.is_valid(now)).map(|relayed| &relayed.summary)
    }
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RackRelay {
    pub rack_session: u64,
    pub name: Arc<str>,
    /// Number that the rack has given to the agent's stream.
    pub stream: u64,
}

/// Reason for which a rack's summaries are rejected.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum SummaryRejection {
    #[error(transparent)]
    Malformed(#[from] WireError),
    /// Server whose agent is not connected through the rack, so that the rack must not report it.
    #[error("the agent of server {0} is not connected through this rack: expected only servers whose agents are")]
    ForeignServer(ServerId),
}

impl Racks {
    fn by_session(&mut self, session: u64) -> Option<&mut Rack> {
        self.by_name.values_mut().find(|rack| rack.session == Some(session))
    }

    fn connected(&self, session: u64) -> Option<(&String, &Rack)> {
        self.by_name.iter().find(|(_, rack)| rack.session == Some(session))
    }

    /// Returns the valid summaries that contain servers of the service.
    pub fn summaries(&self, service: ServiceIndex, now: Now) -> impl Iterator<Item = &Arc<RackSummary>> {
        let relayed = self.by_name.values().filter_map(move |rack| rack.summaries.get(&service));
        relayed.filter(move |relayed| relayed.is_valid(now)).map(|relayed| &relayed.summary)
    }

    /// Returns the servers that are in any valid summary.
    pub fn servers(&self, now: Now) -> HashSet<ServerId> {
        let summaries = self.by_name.values().flat_map(|rack| rack.fresh_summaries(now));
        summaries.flat_map(|summary| &summary.servers).map(|server| server.id).collect()
    }

    pub fn relayed(&self, service: ServiceIndex, now: Now) -> Vec<bool> {
        let mut relayed = Vec::new();
        for server in self.summaries(service, now).flat_map(|summary| &summary.servers) {
            let id = usize::from(server.id.get());
            if id >= relayed.len() {
                relayed.resize(id + 1, false);
            }
            relayed[id] = true;
        }
        relayed
    }

    pub fn begin_agent_session(&mut self, relay: &RackRelay, session: &Session) {
        if let Some(rack) = self.by_session(relay.rack_session) {
            rack.changes += 1;
            rack.agents.insert(relay.stream, session.clone());
        }
    }

    pub fn end_agent_session(&mut self, relay: &RackRelay) {
        if let Some(rack) = self.by_session(relay.rack_session) {
            rack.changes += 1;
            rack.agents.remove(&relay.stream);
        }
    }

    pub fn on_agent_replaced(&mut self, rack: &str) {
        if let Some(rack) = self.by_name.get_mut(rack) {
            rack.changes += 1;
        }
    }

    /// Returns the interval of each agent's full reports, such that the sum of their rates is within the limit.
    fn detail_interval(&self) -> Duration {
        let agents: usize = self.by_name.values().map(|rack| rack.agents.len()).sum();
        Duration::from_secs((agents / WHOLE_REPORTS_PER_SECOND) as u64)
    }
}

impl Controller {
    pub(super) fn rack_status(&self, now: Now) -> Vec<RackStatus> {
        let mut connected = self.racks.by_name.iter().filter(|(_, rack)| rack.session.is_some()).peekable();
        if connected.peek().is_none() {
            return Vec::new();
        }
        let permitted_servers = self.fleet.servers_by_rack();
        let of_rack = |(name, rack): (&String, &Rack)| {
            let mut servers: Vec<String> = rack.agents.values().map(|session| session.server().to_owned()).collect();
            // Sorted, because agents connect in any order.
            servers.sort_unstable();
            RackStatus {
                name: name.clone(),
                version: rack.version.clone(),
                age_ms: now.monotonic.saturating_sub(rack.last_message_at).as_millis() as u32,
                servers,
                permitted_servers: permitted_servers.count_of_rack(name),
            }
        };
        connected.map(of_rack).collect()
    }

    /// Fails if the fleet's document does not allow a rack with this name.
    fn check_rack(&self, name: &str) -> Result<(), Rejection> {
        let is_known = self.fleet.racks.as_ref().is_none_or(|racks| racks.contains(name));
        if is_known { Ok(()) } else { Err(Rejection::UnknownRack(name.to_owned())) }
    }

    /// Fails if the agent may not report for the server through its rack. A direct agent proves its identity by its
    /// certificate; a rack has authenticated its agents, within the limits of the fleet's document.
    pub(super) fn check_relay(&self, id: ServerId, relay: Option<&RackRelay>) -> Result<(), Rejection> {
        let Some(RackRelay { name, .. }) = relay.filter(|relay| !self.fleet.may_connect_through(id, &relay.name))
        else {
            return Ok(());
        };
        let racks = self.fleet.racks_of(id).into_iter().flatten().cloned().collect();
        Err(Rejection::ForeignRack { server: self.fleet.servers[&id].name.clone(), rack: name.to_string(), racks })
    }

    /// Registers a rack and returns its session. Fails if a rack of this name is connected and has reported recently,
    /// or the fleet's document does not list the rack.
    pub fn register_rack(&mut self, name: &str, version: &str, now: Now) -> Result<u64, Rejection> {
        let known = self.check_rack(name);
        self.count(known)?;
        let racks = &mut self.racks;
        if let Some(live) = racks.by_name.get(name).filter(|rack| rack.session.is_some()) {
            let since_last_message = now.monotonic.saturating_sub(live.last_message_at);
            if since_last_message <= LOAD_BALANCER_TIMEOUT {
                let refused = Rejection::DuplicateRack { name: name.to_owned(), since_last_message };
                return self.count(Err(refused));
            }
        }
        racks.by_name.retain(|_, rack| rack.session.is_some() || rack.fresh_summaries(now).next().is_some());
        racks.last_session += 1;
        let old = racks.by_name.remove(name);
        let summaries = old.map(|old| old.summaries).unwrap_or_default();
        let rack = Rack {
            session: Some(racks.last_session),
            version: version.to_owned(),
            last_message_at: now.monotonic,
            agents: BTreeMap::new(),
            changes: 0,
            summaries,
        };
        racks.by_name.insert(name.to_owned(), rack);
        Ok(racks.last_session)
    }

    /// Ends a rack's session. The rack's summaries remain valid until they expire.
    pub fn disconnect_rack(&mut self, session: u64) {
        if let Some(rack) = self.racks.by_session(session) {
            rack.session = None;
            rack.agents.clear();
        }
    }

    /// Records the time at which a rack has sent a message.
    pub fn record_rack_message(&mut self, session: u64, now: Now) {
        if let Some(rack) = self.racks.by_session(session) {
            rack.last_message_at = now.monotonic;
        }
    }

    /// Replaces the rack's summaries for each service in a message; a rack with many services sends several messages.
    /// If a summary is invalid, fails and keeps the previous summaries.
    pub fn record_rack_summaries(
        &mut self,
        session: u64,
        messages: &[v1::RackSummary],
        now: Now,
    ) -> Result<(), SummaryRejection> {
        let Some((_, rack)) = self.racks.connected(session) else { return Ok(()) };
        let mut own: Vec<ServerId> = self.agent_streams(rack).map(|(_, id)| id).collect();
        own.sort_unstable();
        let mut summaries = BTreeMap::new();
        for message in messages {
            let (service, mut summary) = parse_summary(message)?;
            // The rack has not noticed yet that this agent disconnected.
            if !self.positions.contains_key(&service) {
                continue;
            }
            for list in &mut summary.lists {
                list.key = self.rss_keys.intern(list.key.clone());
            }
            if let Some(foreign) = summary.servers.iter().find(|server| own.binary_search(&server.id).is_err()) {
                return Err(SummaryRejection::ForeignServer(foreign.id));
            }
            summaries.insert(service, Arc::new(summary));
        }
        let fresh_until = now.monotonic + SUMMARY_VALID_INTERVALS * self.fleet.report_interval;
        if let Some(rack) = self.racks.by_session(session) {
            rack.summaries.retain(|_, relayed| relayed.is_valid(now));
            let relayed = |(service, summary): (&ServiceIndex, &Arc<RackSummary>)| {
                (*service, ReceivedSummary { summary: summary.clone(), fresh_until })
            };
            rack.summaries.extend(summaries.iter().map(relayed));
        }
        for (service, summary) in &summaries {
            self.on_relayed_loads(*service, summary, now);
        }
        Ok(())
    }

    pub fn rack_config_version(&self, session: u64) -> RackConfigVersion {
        let own_version = self.racks.connected(session).map_or(0, |(_, rack)| rack.changes);
        RackConfigVersion {
            all_racks_version: self.racks.changes,
            own_version,
            detail_interval: self.racks.detail_interval(),
        }
    }

    /// Returns a rack's configuration; `None`: the rack is disconnected. Fails if the fleet's document lists racks, but
    /// not this one.
    pub fn rack_configuration(&self, session: u64, now: Now) -> Result<Option<RackConfiguration>, Rejection> {
        let Some((name, rack)) = self.racks.connected(session) else { return Ok(None) };
        self.check_rack(name)?;
        let server = |(stream_number, id): (u64, ServerId)| {
            let server = &self.fleet.servers[&id];
            RackServer { stream_number, id, weight: server.weight, capacity: server.capacity }
        };
        let servers: Vec<RackServer> = self.agent_streams(rack).map(server).collect();
        let services = self.services.iter().map(|service| self.rack_service(service, &servers, now));
        Ok(Some(RackConfiguration {
            report_interval: self.fleet.report_interval,
            detail_interval: self.racks.detail_interval(),
            alpha: self.fleet.alpha,
            services: services.filter(|service| !service.members.is_empty()).collect(),
            servers,
        }))
    }

    /// Returns the streams of a rack's agents, and their servers, without servers that have a newer agent elsewhere.
    fn agent_streams<'a>(&'a self, rack: &'a Rack) -> impl Iterator<Item = (u64, ServerId)> + 'a {
        rack.agents.iter().filter_map(|(stream, session)| {
            let id = self.fleet.server_id(session.server())?;
            (self.agent_session(id) == Some(session.number())).then_some((*stream, id))
        })
    }

    fn rack_service(&self, service: &Service, servers: &[RackServer], now: Now) -> RackService {
        let fleet = service.fleet();
        let member = |server: &RackServer| RackMember {
            id: server.id,
            is_eligible: self.takes_connections(service, server.id, now),
            has_full_share: service.ramp(server.id, now) >= 1.0 && !self.share_limiter.is_limited(server.id),
        };
        RackService {
            index: fleet.index,
            policy: fleet.policy.to_owned(),
            bucket_count: fleet.buckets,
            places_requests: places_requests(fleet),
            members: servers.iter().filter(|server| fleet.members.contains_key(&server.id)).map(member).collect(),
        }
    }
}
