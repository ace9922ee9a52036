//! Remaining connections of servers that take no new ones. The number can grow until the last load balancer stops
//! sending new connections to the server, so a count is valid only if it began later.

use std::collections::BTreeMap;
use std::time::Duration;

use coreward_api::types::{ActiveDrain, ConnectionCounts, DrainOrigin, DrainStatus, ReportState};
use coreward_model::ServerId;
use coreward_model::tuple::TransportProtocol;

use super::agent::{Agent, ReportedConnectionCount};
use super::service::ServerEligibility;
use super::{ClockReadings, Controller};
use coreward_fleet::drains::{ServerDrainError, ServerDrainRequest};
use coreward_fleet::fleet::{FleetServer, FleetService, ServerAdminState};

/// Maximum delay of an agent's report. The start time of a connection count is derived from the report's arrival, so a
/// delay makes the count seem more recent than it is.
const MAX_REPORT_DELAY: Duration = Duration::from_secs(1);

impl Controller {
    /// Checks that each of the drain's services still has healthy servers other than the drained one.
    pub fn check_drain_is_possible(
        &self,
        request: &ServerDrainRequest,
        now: ClockReadings,
    ) -> Result<(), ServerDrainError> {
        request.check(&self.fleet, |service, id| self.eligibility(service, id, now) == ServerEligibility::Eligible)
    }

    /// Returns the state of the server's drain and its remaining connections, or `None` if no server has this name.
    pub fn drain_status(&self, server: &str, now: ClockReadings) -> Option<DrainStatus> {
        let id = self.fleet.server_id(server)?;
        let (server, empty_agent) = (&self.fleet.servers[&id], Agent::default());
        let agent = self.agent(id).unwrap_or(&empty_agent);
        let state_reason = self.state_with_reason(id, server, now);
        let drain = self.active_drain(id, now);
        let drained_services: Vec<&FleetService> = self.drained_services(id).collect();
        let takes_no_connections = drain.is_some() || server.admin_state == ServerAdminState::Left;
        let remaining_connections =
            takes_no_connections.then(|| self.count_remaining_connections(server, agent, &drained_services, now));
        let (remaining, waits_for) = match remaining_connections {
            None => (None, Vec::new()),
            Some(Ok(remaining)) => (Some(remaining), Vec::new()),
            Some(Err(waits_for)) => (None, waits_for),
        };
        Some(DrainStatus {
            server: server.name.clone(),
            state: state_reason.state,
            state_reason: state_reason.state_reason,
            report_state: agent.report_state(now),
            drain,
            remaining_connections: remaining,
            unknown_count_reasons: waits_for,
            connection_counts: agent
                .fresh_connection_count(now)
                .map(|connection_count| to_counted_connections(connection_count, now)),
            uncounted_services: drained_services
                .iter()
                .filter(|service| !are_connections_counted(service))
                .map(|service| service.name.clone())
                .collect(),
        })
    }

    pub(super) fn active_drain(&self, id: ServerId, now: ClockReadings) -> Option<ActiveDrain> {
        let server = &self.fleet.servers[&id];
        if server.admin_state == ServerAdminState::Left {
            return None;
        }
        if let Some(drain) = &server.drain {
            let drain_duration = now.record_clock_time.saturating_sub(drain.changed_at);
            return Some(ActiveDrain {
                origin: DrainOrigin::Command,
                since_unix_ms: Some(now.wall_time.saturating_sub(drain_duration).as_millis() as u64),
                services: drain.services.iter().flatten().cloned().collect(),
            });
        }
        let is_drained_by_document = server.admin_state == ServerAdminState::Draining || server.weight.get() == 0;
        is_drained_by_document.then_some(ActiveDrain {
            origin: DrainOrigin::Document,
            since_unix_ms: None,
            services: Vec::new(),
        })
    }

    /// Returns the present and past services of the server in which it currently takes no new connections.
    fn drained_services(&self, id: ServerId) -> impl Iterator<Item = &FleetService> {
        let services = self.fleet.services.iter().filter(move |service| service.members.contains_key(&id));
        services.filter(move |service| !self.fleet.is_server_eligible(service, id))
    }

    /// Returns the number of remaining connections of `services`, or the reasons why it is not known yet.
    fn count_remaining_connections(
        &self,
        server: &FleetServer,
        agent: &Agent,
        services: &[&FleetService],
        now: ClockReadings,
    ) -> Result<u64, Vec<String>> {
        let generation = server.drain.as_ref().map_or(self.fleet.generation, |drain| drain.generation);
        let confirmation_time = self.load_balancers.config_confirmation_time(generation, now);
        let counted_connections = newest_connection_count(agent, now);
        let is_count_after_drain = |connection_count: &ReportedConnectionCount| {
            connection_count.configuration_generation >= generation
                && confirmation_time
                    .as_ref()
                    .is_ok_and(|confirmed_at| connection_count.started_at >= *confirmed_at + MAX_REPORT_DELAY)
        };
        match (counted_connections, &confirmation_time) {
            (Ok(connection_count), Ok(_)) if is_count_after_drain(connection_count) => {
                let uncounted_service_names = services
                    .iter()
                    .filter(|service| are_connections_counted(service))
                    .map(|service| service.name.as_str());
                Ok(uncounted_service_names
                    .map(|name| connection_count.connections_by_service.get(name).copied().map_or(0, u64::from))
                    .sum())
            }
            (Ok(_), Ok(_)) => Err(vec!["a count that begins now".to_owned()]),
            (count_result, Ok(_)) => Err(count_result.err().into_iter().collect()),
            (count_result, Err(unconfirmed_names)) => {
                let unconfirmed_balancers = match unconfirmed_names.as_slice() {
                    [] => "a load balancer: none is connected".to_owned(),
                    names => format!("load balancer {}, which may send new connections still", names.join(", ")),
                };
                Err(count_result.err().into_iter().chain([unconfirmed_balancers]).collect())
            }
        }
    }
}

/// Returns the agent's newest count of connections, or a description of what the drain waits for.
fn newest_connection_count(agent: &Agent, now: ClockReadings) -> Result<&ReportedConnectionCount, String> {
    match (agent.report_state(now), agent.fresh_connection_count(now)) {
        (ReportState::None | ReportState::Stale, _) => Err("its agent, which does not report".to_owned()),
        (ReportState::Fresh, None) => {
            Err("its agent's first count of connections (those before this version do not count)".to_owned())
        }
        (ReportState::Fresh, Some(connection_count)) => Ok(connection_count),
    }
}

fn are_connections_counted(service: &FleetService) -> bool {
    service.address.protocol == TransportProtocol::Tcp
}

pub(super) fn to_counted_connections(
    connection_count: &ReportedConnectionCount,
    now: ClockReadings,
) -> ConnectionCounts {
    let connections_by_service: BTreeMap<String, u32> = connection_count.connections_by_service.clone();
    ConnectionCounts { age_ms: connection_count.age(now).as_millis() as u64, connections_by_service }
}
