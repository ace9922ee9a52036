//! Health of servers, by the checks that load balancers and agents make.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use coreward_model::ServerId;
use coreward_model::health::{HealthCheck, HealthProbe, HealthVerdict, ServerHealthTracker, majority_verdicts};

use super::ClockReadings;
use super::load_balancers::{HealthCheckTarget, LoadBalancers, PEER_LOSS_GRACE_PERIOD};
use coreward_fleet::fleet::{Fleet, FleetService};
use coreward_fleet::records::ServiceMembership;

#[derive(Debug, Default)]
pub struct ServerHealthState {
    /// Verdicts by service and server. A server without a verdict counts as up.
    verdicts: BTreeMap<HealthCheckTarget, HealthVerdict>,
    agent_checks: BTreeMap<HealthCheckTarget, AgentHealthCheck>,
    /// Inputs of the newest verdicts: the configuration's generation, and the name and verdict version of each load
    /// balancer.
    verdict_input_versions: Option<(u64, Vec<(String, u64)>)>,
}

#[derive(Debug)]
struct AgentHealthCheck {
    health_check: Arc<HealthCheck>,
    health_tracker: ServerHealthTracker,
    due_at: Duration,
}

impl ServerHealthState {
    /// Updates the health verdicts of all servers. `has_reporting_agent` returns whether a server's agent reports.
    pub fn update_verdicts(
        &mut self,
        fleet: &Fleet,
        load_balancers: &LoadBalancers,
        now: ClockReadings,
        has_reporting_agent: impl Fn(ServerId) -> bool,
    ) {
        self.run_agent_health_checks(fleet, now, has_reporting_agent);
        let verdict_versions = load_balancers.health_verdict_versions(now);
        let verdict_inputs = Some((fleet.generation, verdict_versions));
        if self.verdict_input_versions == verdict_inputs {
            return;
        }
        self.verdict_input_versions = verdict_inputs;
        let checked_targets = targets_checked_by_lbs(fleet);
        let previous_verdicts = std::mem::take(&mut self.verdicts);
        let previous_verdict =
            |target: &HealthCheckTarget| previous_verdicts.get(target).copied().unwrap_or(HealthVerdict::Up);
        let majority_verdicts = majority_verdicts(&load_balancers.live_health_verdicts(now), previous_verdict);
        for target in checked_targets {
            let verdict = majority_verdicts.get(&target).copied().unwrap_or_else(|| previous_verdict(&target));
            self.verdicts.insert(target, verdict);
        }
    }

    /// Performs the health checks that agents pass by reporting, each at its own interval. After the start of the
    /// controller, agents have time to reconnect before they count as missing.
    fn run_agent_health_checks(
        &mut self,
        fleet: &Fleet,
        now: ClockReadings,
        has_reporting_agent: impl Fn(ServerId) -> bool,
    ) {
        let mut required_checks: BTreeMap<HealthCheckTarget, &Arc<HealthCheck>> = BTreeMap::new();
        for service in &fleet.services {
            let Some(check) = service.health_check.as_ref().filter(|check| check.probe == HealthProbe::Agent) else {
                continue;
            };
            required_checks.extend(present_member_ids(service).map(|id| ((service.index, id), check)));
        }
        self.agent_checks.retain(|target, agent_check| {
            required_checks.get(target).is_some_and(|check| **check == agent_check.health_check)
        });
        for (target, check) in required_checks {
            let agent_check = self.agent_checks.entry(target).or_insert_with(|| AgentHealthCheck {
                health_check: check.clone(),
                health_tracker: ServerHealthTracker::default(),
                due_at: now.monotonic_time.max(PEER_LOSS_GRACE_PERIOD),
            });
            if now.monotonic_time >= agent_check.due_at {
                agent_check.health_tracker.record_check_result(has_reporting_agent(target.1), check.thresholds);
                agent_check.due_at = now.monotonic_time + check.interval;
            }
        }
    }

    pub fn is_down(&self, target: &HealthCheckTarget) -> bool {
        let is_down_by_agent =
            self.agent_checks.get(target).and_then(|agent_check| agent_check.health_tracker.verdict())
                == Some(HealthVerdict::Down);
        is_down_by_agent || self.verdicts.get(target) == Some(&HealthVerdict::Down)
    }
}

fn targets_checked_by_lbs(fleet: &Fleet) -> BTreeSet<HealthCheckTarget> {
    let is_checked_by_load_balancers =
        |service: &&FleetService| service.health_check.as_ref().is_some_and(|check| check.probe != HealthProbe::Agent);
    let checked_services = fleet.services.iter().filter(is_checked_by_load_balancers);
    checked_services.flat_map(|service| present_member_ids(service).map(|id| (service.index, id))).collect()
}

fn present_member_ids(service: &FleetService) -> impl Iterator<Item = ServerId> {
    let present_members = service.members.iter().filter(|(_, membership)| **membership == ServiceMembership::Present);
    present_members.map(|(id, _)| *id)
}
