//! Health of servers, by the checks that load balancers and agents make.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use coreward_model::ServerId;
use coreward_model::health::{HealthCheck, HealthTracker, HealthVerdict, Probe, majority_verdicts};

use super::Now;
use super::load_balancers::{HealthTarget, LoadBalancers, START_GRACE_PERIOD};
use coreward_fleet::fleet::{Fleet, FleetService};
use coreward_fleet::records::Membership;

#[derive(Debug, Default)]
pub struct HealthState {
    /// Verdicts by service and server. A server without a verdict counts as up.
    verdicts: BTreeMap<HealthTarget, HealthVerdict>,
    agent_checks: BTreeMap<HealthTarget, AgentCheck>,
    /// Inputs of the newest verdicts: the configuration's generation, and the name and verdict version of each load
    /// balancer.
    verdict_inputs: Option<(u64, Vec<(String, u64)>)>,
}

#[derive(Debug)]
struct AgentCheck {
    health_check: Arc<HealthCheck>,
    health_tracker: HealthTracker,
    due_at: Duration,
}

impl HealthState {
    /// Updates the health verdicts of all servers. `has_reporting_agent` returns whether a server's agent reports.
    pub fn update_verdicts(
        &mut self,
        fleet: &Fleet,
        load_balancers: &LoadBalancers,
        now: Now,
        has_reporting_agent: impl Fn(ServerId) -> bool,
    ) {
        self.check_agents(fleet, now, has_reporting_agent);
        let verdict_versions = load_balancers.verdict_versions(now);
        let verdict_inputs = Some((fleet.generation, verdict_versions));
        if self.verdict_inputs == verdict_inputs {
            return;
        }
        self.verdict_inputs = verdict_inputs;
        let checked_targets = lb_checked_targets(fleet);
        let previous_verdicts = std::mem::take(&mut self.verdicts);
        let previous_verdict =
            |target: &HealthTarget| previous_verdicts.get(target).copied().unwrap_or(HealthVerdict::Up);
        let majority_verdicts = majority_verdicts(&load_balancers.live_verdicts(now), previous_verdict);
        for target in checked_targets {
            let verdict = majority_verdicts.get(&target).copied().unwrap_or_else(|| previous_verdict(&target));
            self.verdicts.insert(target, verdict);
        }
    }

    /// Performs the health checks that agents pass by reporting, each at its own interval. After the start of the
    /// controller, agents have time to reconnect before they count as missing.
    fn check_agents(&mut self, fleet: &Fleet, now: Now, has_reporting_agent: impl Fn(ServerId) -> bool) {
        let mut required_checks: BTreeMap<HealthTarget, &Arc<HealthCheck>> = BTreeMap::new();
        for service in &fleet.services {
            let Some(check) = service.health_check.as_ref().filter(|check| check.probe == Probe::Agent) else {
                continue;
            };
            required_checks.extend(present_servers(service).map(|id| ((service.index, id), check)));
        }
        self.agent_checks.retain(|target, agent_check| {
            required_checks.get(target).is_some_and(|check| **check == agent_check.health_check)
        });
        for (target, check) in required_checks {
            let agent_check = self.agent_checks.entry(target).or_insert_with(|| AgentCheck {
                health_check: check.clone(),
                health_tracker: HealthTracker::default(),
                due_at: now.monotonic.max(START_GRACE_PERIOD),
            });
            if now.monotonic >= agent_check.due_at {
                agent_check.health_tracker.record_result(has_reporting_agent(target.1), check.thresholds);
                agent_check.due_at = now.monotonic + check.interval;
            }
        }
    }

    pub fn is_down(&self, target: &HealthTarget) -> bool {
        let is_down_by_agent =
            self.agent_checks.get(target).and_then(|agent_check| agent_check.health_tracker.verdict())
                == Some(HealthVerdict::Down);
        is_down_by_agent || self.verdicts.get(target) == Some(&HealthVerdict::Down)
    }
}

fn lb_checked_targets(fleet: &Fleet) -> BTreeSet<HealthTarget> {
    let is_checked_by_load_balancers =
        |service: &&FleetService| service.health_check.as_ref().is_some_and(|check| check.probe != Probe::Agent);
    let checked_services = fleet.services.iter().filter(is_checked_by_load_balancers);
    checked_services.flat_map(|service| present_servers(service).map(|id| (service.index, id))).collect()
}

fn present_servers(service: &FleetService) -> impl Iterator<Item = ServerId> {
    let present_members = service.members.iter().filter(|(_, membership)| **membership == Membership::Present);
    present_members.map(|(id, _)| *id)
}
