//! States of servers and their reasons.

use std::ops::Bound;
use std::time::Duration;

use coreward_api::types::{CheckedBy, ServerState, ServiceMember};
use coreward_model::health::{HealthVerdict, Probe};
use coreward_model::{ServerId, ServiceAddress};

use super::service::{Eligibility, ServerStatus, Service};
use super::{Controller, Now};
use coreward_fleet::fleet::{AdminState, FleetServer, FleetService};

const DRAIN_COMMAND_REASON: &str = "by `coreward drain`";

pub(super) struct StateReason {
    pub state: ServerState,
    /// Reason for the state; empty if none is known.
    pub reason: String,
    /// Time for which the state has lasted; `None`: it began before this process started.
    pub duration: Option<Duration>,
}

impl StateReason {
    fn since(state: ServerState, reason: String, since: Option<Duration>, now: Now) -> Self {
        Self { state, reason, duration: since.map(|since| now.monotonic.saturating_sub(since)) }
    }

    pub fn duration_ms(&self) -> Option<u64> {
        self.duration.map(|lasts| lasts.as_millis() as u64)
    }
}

impl Controller {
    /// Returns the status of at most `count` members of the service whose ids follow `after`, by id. Returns none if
    /// another service now has this position.
    pub fn members_after(
        &self,
        (position, address): (usize, ServiceAddress),
        after: Option<ServerId>,
        count: usize,
        now: Now,
    ) -> Vec<(ServerId, ServiceMember)> {
        let service = self.services.get(position).filter(|service| service.fleet().address == address);
        let Some(service) = service else { return Vec::new() };
        let first = after.map_or(Bound::Unbounded, Bound::Excluded);
        let ids = service.fleet().members.range((first, Bound::Unbounded)).map(|(id, _)| *id);
        ids.take(count).map(|id| (id, self.member(service, id, now))).collect()
    }

    fn member(&self, service: &Service, id: ServerId, now: Now) -> ServiceMember {
        let status = self.state_reason_in(service, id, now);
        let checks = self.load_balancers.check_results((service.fleet().index, id), now);
        let checks = checks.into_iter().map(|(load_balancer, checked, age)| CheckedBy {
            load_balancer: load_balancer.to_owned(),
            up: checked.verdict.map(|verdict| verdict == HealthVerdict::Up),
            since_ms: (checked.verdict_duration + age).as_millis() as u64,
            error: (!checked.error.is_empty()).then(|| checked.error.clone()),
            latency_us: u32::try_from(checked.latency.as_micros()).unwrap_or(u32::MAX),
            checks: checked.checks,
            failures: checked.failures,
        });
        ServiceMember {
            server: self.fleet.servers[&id].name.clone(),
            state: status.state,
            state_for_ms: status.duration_ms(),
            reason: status.reason,
            checks: checks.collect(),
        }
    }

    /// Returns the best of the server's states in its services, with the services in which the server is down.
    pub(super) fn state_reason(&self, id: ServerId, server: &FleetServer, now: Now) -> StateReason {
        let statuses =
            self.positions_by_server.get(&id).into_iter().flatten().map(|position| &self.services[*position]);
        let statuses: Vec<(&str, StateReason)> =
            statuses.map(|service| (service.fleet().name.as_str(), self.state_reason_in(service, id, now))).collect();
        let down_in = |best: ServerState| {
            let down = statuses
                .iter()
                .filter(move |(_, status)| status.state == ServerState::Down && best != ServerState::Down);
            down.map(|(service, status)| format!("down in {service} ({})", status.reason))
        };
        match statuses.iter().map(|(_, status)| status).min_by_key(|status| status.state) {
            Some(best) => {
                let reasons = Some(best.reason.clone()).filter(|reason| !reason.is_empty()).into_iter();
                let reasons: Vec<String> = reasons.chain(down_in(best.state)).collect();
                StateReason { reason: reasons.join("; "), ..*best }
            }
            None => match server.admin_state {
                AdminState::Active if server.drain.is_some() => {
                    StateReason::since(ServerState::Draining, DRAIN_COMMAND_REASON.to_owned(), None, now)
                }
                AdminState::Active => StateReason::since(ServerState::Active, "in no service".to_owned(), None, now),
                AdminState::Draining => {
                    StateReason::since(ServerState::Draining, "in no service".to_owned(), None, now)
                }
                AdminState::Left => StateReason::since(ServerState::Gone, "has left the fleet".to_owned(), None, now),
            },
        }
    }

    fn state_reason_in(&self, service: &Service, id: ServerId, now: Now) -> StateReason {
        let fleet = service.fleet();
        // Before the first table there are no verdicts.
        let eligibility = self.eligibility(fleet, id, now);
        let (state, since) = match service.status(id) {
            Some(ServerStatus { state, since, eligibility: known, .. }) if *known == eligibility => (*state, *since),
            _ => (eligibility.state(), Some(now.monotonic)),
        };
        let reason = match eligibility {
            Eligibility::Left => "has left".to_owned(),
            Eligibility::Drained => self.drain_reason(fleet, id),
            Eligibility::Unreachable => "no load balancer can find its MAC address".to_owned(),
            Eligibility::Unhealthy => self.unhealthy_reason(fleet, id, now),
            Eligibility::Eligible if state == ServerState::Joining => {
                format!("slow start: {:.0} %", service.ramp(id, now) * 100.0)
            }
            Eligibility::Eligible => self.found_down_by(fleet, id, now).unwrap_or_default(),
        };
        StateReason::since(state, reason, since, now)
    }

    fn drain_reason(&self, service: &FleetService, id: ServerId) -> String {
        let server = &self.fleet.servers[&id];
        if server.is_drained_in(&service.name) {
            return DRAIN_COMMAND_REASON.to_owned();
        }
        match server.admin_state {
            AdminState::Draining => "by the fleet's document".to_owned(),
            AdminState::Active | AdminState::Left => "its weight is 0".to_owned(),
        }
    }

    fn unhealthy_reason(&self, service: &FleetService, id: ServerId, now: Now) -> String {
        if service.check.as_ref().is_some_and(|check| check.probe == Probe::Agent) {
            return "its agent does not report".to_owned();
        }
        self.found_down_by(service, id, now).unwrap_or_else(|| "no load balancer has checked it since".to_owned())
    }

    /// Returns which checks found a server down, and why; `None`: the server is not down.
    fn found_down_by(&self, service: &FleetService, id: ServerId, now: Now) -> Option<String> {
        let checked = self.load_balancers.check_results((service.index, id), now);
        let down: Vec<_> =
            checked.iter().filter(|(_, checked, _)| checked.verdict == Some(HealthVerdict::Down)).collect();
        let (name, first, _) = down.first()?;
        let error = if first.error.is_empty() { "well again for a moment" } else { first.error.as_str() };
        match (down.len(), checked.len()) {
            (1, 1) => Some(format!("{name}: {error}")),
            (some, all) => Some(format!("{some} of {all} load balancers: {error}")),
        }
    }
}
