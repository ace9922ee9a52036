//! States of servers and their reasons.

use std::ops::Bound;
use std::time::Duration;

use coreward_api::types::{HealthCheckResult, ServerState, ServiceMember};
use coreward_model::health::{HealthProbe, HealthVerdict};
use coreward_model::{ServerId, ServiceAddress};

use super::service::{ServerEligibility, ServerStatus, Service};
use super::{ClockReadings, Controller};
use coreward_fleet::fleet::{FleetServer, FleetService, ServerAdminState};

const DRAIN_COMMAND_REASON: &str = "by `coreward drain`";

pub(super) struct StateReason {
    pub state: ServerState,
    /// Reason for the state, or empty if none is known.
    pub state_reason: String,
    /// Time for which the state has lasted, or `None` if it began before this process started.
    pub state_duration: Option<Duration>,
}

impl StateReason {
    fn lasting_since(
        state: ServerState,
        state_reason: String,
        start_time: Option<Duration>,
        now: ClockReadings,
    ) -> Self {
        Self { state, state_reason, state_duration: start_time.map(|since| now.monotonic_time.saturating_sub(since)) }
    }

    pub fn state_duration_ms(&self) -> Option<u64> {
        self.state_duration.map(|duration| duration.as_millis() as u64)
    }
}

impl Controller {
    /// Returns the status of at most `max_count` members of the service whose ids follow `last_id`, sorted by id.
    /// Returns no members if another service has taken this position.
    pub fn members_after_id(
        &self,
        (position, address): (usize, ServiceAddress),
        last_id: Option<ServerId>,
        max_count: usize,
        now: ClockReadings,
    ) -> Vec<(ServerId, ServiceMember)> {
        let service = self.services.get(position).filter(|service| service.configuration().address == address);
        let Some(service) = service else { return Vec::new() };
        let lower_bound = last_id.map_or(Bound::Unbounded, Bound::Excluded);
        let member_ids = service.configuration().members.range((lower_bound, Bound::Unbounded)).map(|(id, _)| *id);
        member_ids.take(max_count).map(|id| (id, self.service_member(service, id, now))).collect()
    }

    fn service_member(&self, service: &Service, id: ServerId, now: ClockReadings) -> ServiceMember {
        let state_reason = self.state_reason_in_service(service, id, now);
        let check_results = self.load_balancers.health_check_results((service.configuration().index, id), now);
        let check_results = check_results.into_iter().map(|(load_balancer, check_result, age)| HealthCheckResult {
            load_balancer: load_balancer.to_owned(),
            is_up: check_result.verdict.map(|verdict| verdict == HealthVerdict::Up),
            result_age_ms: (check_result.verdict_age + age).as_millis() as u64,
            error: (!check_result.error.is_empty()).then(|| check_result.error.clone()),
            latency_us: u32::try_from(check_result.latency.as_micros()).unwrap_or(u32::MAX),
            check_count: check_result.completed_check_count,
            failure_count: check_result.failed_check_count,
        });
        ServiceMember {
            server: self.fleet.servers[&id].name.clone(),
            state: state_reason.state,
            state_for_ms: state_reason.state_duration_ms(),
            state_reason: state_reason.state_reason,
            health_checks: check_results.collect(),
        }
    }

    /// Returns the best of the server's states in its services. The reason also lists the services in which the server
    /// is down.
    pub(super) fn state_with_reason(&self, id: ServerId, server: &FleetServer, now: ClockReadings) -> StateReason {
        let states_by_service =
            self.service_positions_by_server.get(&id).into_iter().flatten().map(|position| &self.services[*position]);
        let states_by_service: Vec<(&str, StateReason)> = states_by_service
            .map(|service| (service.configuration().name.as_str(), self.state_reason_in_service(service, id, now)))
            .collect();
        let services_where_down = |best_state: ServerState| {
            let down_services = states_by_service
                .iter()
                .filter(move |(_, status)| status.state == ServerState::Down && best_state != ServerState::Down);
            down_services.map(|(service, status)| format!("down in {service} ({})", status.state_reason))
        };
        match states_by_service.iter().map(|(_, status)| status).min_by_key(|status| status.state) {
            Some(best_status) => {
                let best_reason =
                    Some(best_status.state_reason.clone()).filter(|reason| !reason.is_empty()).into_iter();
                let all_reasons: Vec<String> = best_reason.chain(services_where_down(best_status.state)).collect();
                StateReason { state_reason: all_reasons.join("; "), ..*best_status }
            }
            None => match server.admin_state {
                ServerAdminState::Active if server.drain.is_some() => {
                    StateReason::lasting_since(ServerState::Draining, DRAIN_COMMAND_REASON.to_owned(), None, now)
                }
                ServerAdminState::Active => {
                    StateReason::lasting_since(ServerState::Active, "in no service".to_owned(), None, now)
                }
                ServerAdminState::Draining => {
                    StateReason::lasting_since(ServerState::Draining, "in no service".to_owned(), None, now)
                }
                ServerAdminState::Left => {
                    StateReason::lasting_since(ServerState::Gone, "has left the fleet".to_owned(), None, now)
                }
            },
        }
    }

    fn state_reason_in_service(&self, service: &Service, id: ServerId, now: ClockReadings) -> StateReason {
        let fleet_service = service.configuration();
        // There are no verdicts before the first table.
        let eligibility = self.eligibility(fleet_service, id, now);
        let (state, start_time) = match service.server_status(id) {
            Some(ServerStatus { state, state_since: start_time, eligibility: known_eligibility, .. })
                if *known_eligibility == eligibility =>
            {
                (*state, *start_time)
            }
            _ => (eligibility.to_server_state(), Some(now.monotonic_time)),
        };
        let reason = match eligibility {
            ServerEligibility::Left => "has left".to_owned(),
            ServerEligibility::Drained => self.drain_reason(fleet_service, id),
            ServerEligibility::Unreachable => "no load balancer can find its MAC address".to_owned(),
            ServerEligibility::Unhealthy => self.unhealthy_reason(fleet_service, id, now),
            ServerEligibility::Eligible if state == ServerState::Joining => {
                format!("slow start: {:.0} %", service.slow_start_fraction(id, now) * 100.0)
            }
            ServerEligibility::Eligible => self.down_reason(fleet_service, id, now).unwrap_or_default(),
        };
        StateReason::lasting_since(state, reason, start_time, now)
    }

    fn drain_reason(&self, service: &FleetService, id: ServerId) -> String {
        let server = &self.fleet.servers[&id];
        if server.is_drained_in_service(&service.name) {
            return DRAIN_COMMAND_REASON.to_owned();
        }
        match server.admin_state {
            ServerAdminState::Draining => "by the fleet's document".to_owned(),
            ServerAdminState::Active | ServerAdminState::Left => "its weight is 0".to_owned(),
        }
    }

    fn unhealthy_reason(&self, service: &FleetService, id: ServerId, now: ClockReadings) -> String {
        if service.health_check.as_ref().is_some_and(|check| check.probe == HealthProbe::Agent) {
            return "its agent does not report".to_owned();
        }
        self.down_reason(service, id, now).unwrap_or_else(|| "no load balancer has checked it since".to_owned())
    }

    /// Returns a text that names the checks that found a server down and their errors, or `None` if the server is not
    /// down.
    fn down_reason(&self, service: &FleetService, id: ServerId, now: ClockReadings) -> Option<String> {
        let check_results = self.load_balancers.health_check_results((service.index, id), now);
        let down_results: Vec<_> = check_results
            .iter()
            .filter(|(_, check_result, _)| check_result.verdict == Some(HealthVerdict::Down))
            .collect();
        let (name, first_result, _) = down_results.first()?;
        let error_text =
            if first_result.error.is_empty() { "well again for a moment" } else { first_result.error.as_str() };
        match (down_results.len(), check_results.len()) {
            (1, 1) => Some(format!("{name}: {error_text}")),
            (down_count, result_count) => Some(format!("{down_count} of {result_count} load balancers: {error_text}")),
        }
    }
}
