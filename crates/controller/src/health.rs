//! Health of servers by the checks of load balancers and agents.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use coreward_model::ServerId;
use coreward_model::health::{HealthCheck, HealthTracker, HealthVerdict, Probe, majority_verdicts};

use super::Now;
use super::load_balancers::{HealthTarget, LoadBalancers, START_GRACE};
use coreward_fleet::fleet::{Fleet, FleetService};
use coreward_fleet::records::Membership;

#[derive(Debug, Default)]
pub struct HealthState {
    /// Verdicts by service and server. Servers without a verdict are up.
    verdicts: BTreeMap<HealthTarget, HealthVerdict>,
    agent_checks: BTreeMap<HealthTarget, AgentCheck>,
    /// Inputs from which the newest verdicts follow: generation of the configuration, and versions of the load
    /// balancers' verdicts.
    inputs: Option<(u64, Vec<(String, u64)>)>,
}

#[derive(Debug)]
struct AgentCheck {
    check: Arc<HealthCheck>,
    health_tracker: HealthTracker,
    due_at: Duration,
}

impl HealthState {
    /// Updates the verdicts. `has_reporting_agent`: returns whether the agent of a server reports.
    pub fn update(
        &mut self,
        fleet: &Fleet,
        load_balancers: &LoadBalancers,
        now: Now,
        reports: impl Fn(ServerId) -> bool,
    ) {
        self.check_agents(fleet, now, reports);
        let printed = load_balancers.verdict_versions(now);
        let inputs = Some((fleet.generation, printed));
        if self.inputs == inputs {
            return;
        }
        self.inputs = inputs;
        let checked = checked_by_load_balancers(fleet);
        let before = std::mem::take(&mut self.verdicts);
        let was = |target: &HealthTarget| before.get(target).copied().unwrap_or(HealthVerdict::Up);
        let now_said = majority_verdicts(&load_balancers.verdicts(now), was);
        for target in checked {
            let verdict = now_said.get(&target).copied().unwrap_or_else(|| was(&target));
            self.verdicts.insert(target, verdict);
        }
    }

    /// Performs the checks by agents' reports, each at its own interval. After the controller's start, agents have time
    /// to reconnect.
    fn check_agents(&mut self, fleet: &Fleet, now: Now, reports: impl Fn(ServerId) -> bool) {
        let mut required: BTreeMap<HealthTarget, &Arc<HealthCheck>> = BTreeMap::new();
        for service in &fleet.services {
            let Some(check) = service.check.as_ref().filter(|check| check.probe == Probe::Agent) else { continue };
            required.extend(present_servers(service).map(|id| ((service.index, id), check)));
        }
        self.agent_checks.retain(|target, asked| required.get(target).is_some_and(|check| **check == asked.check));
        for (target, check) in required {
            let asked = self.agent_checks.entry(target).or_insert_with(|| AgentCheck {
                check: check.clone(),
                health_tracker: HealthTracker::default(),
                due_at: now.monotonic.max(START_GRACE),
            });
            if now.monotonic >= asked.due_at {
                asked.health_tracker.record_result(reports(target.1), check.thresholds);
                asked.due_at = now.monotonic + check.interval;
            }
        }
    }

    pub fn is_down(&self, target: &HealthTarget) -> bool {
        let by_agent =
            self.agent_checks.get(target).and_then(|asked| asked.health_tracker.verdict()) == Some(HealthVerdict::Down);
        by_agent || self.verdicts.get(target) == Some(&HealthVerdict::Down)
    }
}

fn checked_by_load_balancers(fleet: &Fleet) -> BTreeSet<HealthTarget> {
    let by_them = |service: &&FleetService| service.check.as_ref().is_some_and(|check| check.probe != Probe::Agent);
    let services = fleet.services.iter().filter(by_them);
    services.flat_map(|service| present_servers(service).map(|id| (service.index, id))).collect()
}

fn present_servers(service: &FleetService) -> impl Iterator<Item = ServerId> {
    let present = service.members.iter().filter(|(_, membership)| **membership == Membership::Present);
    present.map(|(id, _)| *id)
}
