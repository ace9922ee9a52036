//! What people are told of the states of servers' lives.

use std::time::Duration;

use coreward_api::types::{CheckedBy, ServerState, ServiceMember};
use coreward_model::ServerId;
use coreward_model::health::{Probe, Verdict};

use super::service::{Condition, Life, Service};
use super::{Controller, Now};
use coreward_fleet::fleet::{FleetServer, FleetService, Standing};

const BY_COMMAND: &str = "`coreward drain` says so";

/// A state, and what is to be said of it.
pub(super) struct Told {
    pub state: ServerState,
    /// Empty: nothing.
    pub reason: String,
    /// `None`: since before this process.
    pub lasts: Option<Duration>,
}

impl Told {
    fn since(state: ServerState, reason: String, since: Option<Duration>, now: Now) -> Self {
        Self { state, reason, lasts: since.map(|since| now.monotonic.saturating_sub(since)) }
    }

    /// As messages have it.
    pub fn lasts_ms(&self) -> Option<u64> {
        self.lasts.map(|lasts| lasts.as_millis() as u64)
    }
}

impl Controller {
    /// A service's servers one by one.
    pub(super) fn members(&self, service: &Service, now: Now) -> Vec<ServiceMember> {
        let member = |id: &ServerId| {
            let told = self.life_in(service, *id, now);
            let checks = self.load_balancers.checked((service.fleet().index, *id), now);
            let checks = checks.into_iter().map(|(load_balancer, checked, age)| CheckedBy {
                load_balancer: load_balancer.to_owned(),
                up: checked.verdict.map(|verdict| verdict == Verdict::Up),
                since_ms: (checked.since + age).as_millis() as u64,
                error: (!checked.error.is_empty()).then(|| checked.error.clone()),
                latency_us: u32::try_from(checked.latency.as_micros()).unwrap_or(u32::MAX),
                checks: checked.checks,
                failures: checked.failures,
            });
            ServiceMember {
                server: self.fleet.servers[id].name.clone(),
                state: told.state,
                state_for_ms: told.lasts_ms(),
                reason: told.reason,
                checks: checks.collect(),
            }
        };
        service.fleet().members.keys().map(member).collect()
    }

    /// Where the server stands: where it stands best of all its services, and in which of them it is down.
    pub(super) fn life(&self, id: ServerId, server: &FleetServer, now: Now) -> Told {
        let lives = self.services_of.get(&id).into_iter().flatten().map(|position| &self.services[*position]);
        let lives: Vec<(&str, Told)> =
            lives.map(|service| (service.fleet().name.as_str(), self.life_in(service, id, now))).collect();
        let down_in = |best: ServerState| {
            let down =
                lives.iter().filter(move |(_, told)| told.state == ServerState::Down && best != ServerState::Down);
            down.map(|(service, told)| format!("down in {service} ({})", told.reason))
        };
        match lives.iter().map(|(_, told)| told).min_by_key(|told| told.state) {
            Some(best) => {
                let reasons = Some(best.reason.clone()).filter(|reason| !reason.is_empty()).into_iter();
                let reasons: Vec<String> = reasons.chain(down_in(best.state)).collect();
                Told { reason: reasons.join("; "), ..*best }
            }
            None => match server.standing {
                Standing::Active if server.drain.is_some() => {
                    Told::since(ServerState::Draining, BY_COMMAND.to_owned(), None, now)
                }
                Standing::Active => Told::since(ServerState::Active, "in no service".to_owned(), None, now),
                Standing::Draining => Told::since(ServerState::Draining, "in no service".to_owned(), None, now),
                Standing::Left => Told::since(ServerState::Gone, "has left the fleet".to_owned(), None, now),
            },
        }
    }

    fn life_in(&self, service: &Service, id: ServerId, now: Now) -> Told {
        let fleet = service.fleet();
        // Before the first table nobody has been judged.
        let condition = self.condition(fleet, id, now);
        let (state, since) = match service.life(id) {
            Some(Life { state, since, condition: known, .. }) if *known == condition => (*state, *since),
            _ => (condition.state(), Some(now.monotonic)),
        };
        let reason = match condition {
            Condition::Left => "has left".to_owned(),
            Condition::Drained => self.why_drained(fleet, id),
            Condition::Unreachable => "no load balancer can find its MAC address".to_owned(),
            Condition::Unfit => self.why_unfit(fleet, id, now),
            Condition::Fit if state == ServerState::Joining => {
                format!("slow start: {:.0} %", service.ramp(id, now) * 100.0)
            }
            Condition::Fit => self.found_down_by(fleet, id, now).unwrap_or_default(),
        };
        Told::since(state, reason, since, now)
    }

    fn why_drained(&self, service: &FleetService, id: ServerId) -> String {
        let server = &self.fleet.servers[&id];
        if server.is_drained_in(&service.name) {
            return BY_COMMAND.to_owned();
        }
        match server.standing {
            Standing::Draining => "the fleet's document says so".to_owned(),
            Standing::Active | Standing::Left => "its weight is 0".to_owned(),
        }
    }

    fn why_unfit(&self, service: &FleetService, id: ServerId, now: Now) -> String {
        if service.check.as_ref().is_some_and(|check| check.probe == Probe::Agent) {
            return "its agent does not report".to_owned();
        }
        self.found_down_by(service, id, now).unwrap_or_else(|| "no load balancer has checked it since".to_owned())
    }

    /// Who finds it down, and why; `None`: nobody.
    fn found_down_by(&self, service: &FleetService, id: ServerId, now: Now) -> Option<String> {
        let checked = self.load_balancers.checked((service.index, id), now);
        let down: Vec<_> = checked.iter().filter(|(_, checked, _)| checked.verdict == Some(Verdict::Down)).collect();
        let (name, first, _) = down.first()?;
        let error = if first.error.is_empty() { "well again for a moment" } else { first.error.as_str() };
        match (down.len(), checked.len()) {
            (1, 1) => Some(format!("{name}: {error}")),
            (some, all) => Some(format!("{some} of {all} load balancers: {error}")),
        }
    }
}
