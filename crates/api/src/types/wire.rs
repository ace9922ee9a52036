//! Conversion of wire messages from load balancers and agents into API documents.

use std::collections::{BTreeMap, HashMap};

use coreward_model::vlan::Vlan;
use coreward_wire::v1;

use super::{DispatchedService, DispatchedWorker, LoadBalancerState, RejectedUpdate, ServerClock, StampedService};

fn sort_by_name(counts: &HashMap<String, u64>) -> BTreeMap<String, u64> {
    counts.iter().map(|(name, count)| (name.clone(), *count)).collect()
}

impl From<&v1::DispatchedService> for DispatchedService {
    fn from(service: &v1::DispatchedService) -> Self {
        Self {
            listen: service.listen.clone(),
            policy: service.policy.clone(),
            workers: service.workers.iter().map(DispatchedWorker::from).collect(),
            counters: sort_by_name(&service.counters),
        }
    }
}

impl From<&v1::DispatchedWorker> for DispatchedWorker {
    fn from(worker: &v1::DispatchedWorker) -> Self {
        Self {
            worker: worker.worker,
            pid: worker.pid,
            outstanding: worker.outstanding,
            outstanding_work_us: worker.outstanding_work_ns as f64 / 1e3,
            queued: worker.queued,
            dispatched: worker.dispatched,
            completed: worker.completed,
            abandoned: worker.abandoned,
            dropped: worker.dropped,
            eligible: worker.eligible,
        }
    }
}

impl From<&v1::LoadBalancerState> for LoadBalancerState {
    fn from(state: &v1::LoadBalancerState) -> Self {
        Self {
            table_generations: sort_by_name(&state.table_generations),
            unresolved_servers: state.unresolved_servers.clone(),
            counters: sort_by_name(&state.counters),
            xdp_mode: state.xdp_mode.clone(),
            vlan: Vlan::new(state.vlan.into()).ok().map(Vlan::id_or_zero),
            configuration_generation: state.configuration_generation,
            event_counters: sort_by_name(&state.events),
            connection_count: state.connections,
            unresolved_load_balancers: state.unresolved_load_balancers.clone(),
            server_clocks: state.server_clocks.iter().map(ServerClock::from).collect(),
            stamped_services: state.stamped_services.iter().map(StampedService::from).collect(),
            warnings: load_balancer_warnings(state),
        }
    }
}

/// Returns the faults of a load balancer's machine, followed by the updates that it rejected.
fn load_balancer_warnings(state: &v1::LoadBalancerState) -> Vec<String> {
    let rejected_updates: Vec<RejectedUpdate> =
        state.rejected.iter().map(|rejected_update| RejectedUpdate::new("it", "", rejected_update)).collect();
    state.warnings.iter().cloned().chain(RejectedUpdate::summary_lines(&rejected_updates)).collect()
}

impl RejectedUpdate {
    /// Converts a peer's message about an update that it rejected. `component` and `name` are the peer's kind and name.
    pub fn new(component: &str, name: &str, rejected_update: &v1::RejectedUpdate) -> Self {
        Self {
            component: component.to_owned(),
            name: name.to_owned(),
            update_kind: if rejected_update.table { "table" } else { "configuration" }.to_owned(),
            service: (!rejected_update.service.is_empty()).then(|| rejected_update.service.clone()),
            generation: rejected_update.generation,
            reason: rejected_update.reason.clone(),
        }
    }
}

impl From<&v1::StampedPackets> for StampedService {
    fn from(stamped_packets: &v1::StampedPackets) -> Self {
        let v1::StampedPackets { service, by_cookie, by_flow_table } = stamped_packets.clone();
        Self { service, cookie_packets: by_cookie, flow_table_packets: by_flow_table }
    }
}

impl From<&v1::ServerClock> for ServerClock {
    fn from(clock: &v1::ServerClock) -> Self {
        Self {
            service: clock.service.clone(),
            server: clock.server.clone(),
            clock_state: clock.state.clone(),
            syn_acks: clock.syn_acks,
            syn_acks_with_timestamps: clock.with_timestamps,
            disagreeing_syn_acks: clock.disagreed,
            problem: (!clock.problem.is_empty()).then(|| clock.problem.clone()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn warning_count_includes_faults_and_grouped_rejections() {
        let build_rejected_update = |service: &str, reason: &str, table| v1::RejectedUpdate {
            service: service.to_owned(),
            generation: 5,
            reason: reason.to_owned(),
            table,
        };
        let state = v1::LoadBalancerState {
            warnings: vec!["the configuration is not saved".to_owned()],
            rejected: vec![
                build_rejected_update("web0", "mode \"new\"", false),
                build_rejected_update("web1", "mode \"new\"", false),
                build_rejected_update("", "no memory\na log", false),
                build_rejected_update("", "no memory\nanother log", false),
                build_rejected_update("web0", "no memory", true),
            ],
            ..Default::default()
        };
        assert_eq!(LoadBalancerState::from(&state).warnings.len(), 4);
        assert_eq!(state.warning_count(), 4);
    }
}
