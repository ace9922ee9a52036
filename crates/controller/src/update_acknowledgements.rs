//! Acknowledgements and rejections (NACKs) of the newest configuration, and rejections of tables.

use coreward_api::types::{Acknowledgements, PeerGeneration, RejectedUpdate};
use coreward_metrics::snapshot::MetricsSnapshot;
use coreward_wire::v1;

use super::agent::Agent;
use super::{ClockReadings, Controller};
use coreward_fleet::fleet::ServerAdminState;
use coreward_metrics::metric_declarations::MetricKind::{Gauge, MaxGauge};
use coreward_metrics::metric_declarations::{Component, MetricFamily, declare_family};
use coreward_metrics::metrics;

metrics! {
    GENERATION_LAG: MetricFamily<2> = declare_family(
        MaxGauge, "coreward_generation_lag", &["part", "name"], &[Component::Controller],
        "Generations of the configuration that a load balancer (lb) or server (agent) is behind",
    );
    REJECTED_UPDATES: MetricFamily<2> = declare_family(
        Gauge, "coreward_rejected_updates", &["part", "name"], &[Component::Controller],
        "Parts of the newest updates that a load balancer (lb) or server (agent) rejects",
    );
}

/// Maximum number of listed peers (load balancers and agents), and also of listed rejections. Further ones are only
/// counted.
const MAX_LISTED_PEERS_AND_REJECTIONS: usize = 100;
const LOAD_BALANCER_COMPONENT_NAME: &str = "lb";
const AGENT_COMPONENT_NAME: &str = "agent";

fn build_waiting_peer(component: &str, name: &str, configuration_generation: u64) -> PeerGeneration {
    PeerGeneration { component: component.to_owned(), name: name.to_owned(), configuration_generation }
}

impl Controller {
    pub fn acknowledgements(&self, now: ClockReadings) -> Acknowledgements {
        let newest_generation = self.fleet.generation;
        let peers = self.live_peers(now);
        let waiting_peers: Vec<PeerGeneration> = peers
            .iter()
            .filter(|(_, _, confirmed_generation, _)| *confirmed_generation < newest_generation)
            .map(|(component, name, confirmed_generation, _)| {
                build_waiting_peer(component, name, *confirmed_generation)
            })
            .collect();
        let peer_rejected_updates =
            |(component, name, _, rejected_updates): &(&str, &str, u64, &[v1::RejectedUpdate])| {
                rejected_updates
                    .iter()
                    .map(|rejected_update| RejectedUpdate::new(component, name, rejected_update))
                    .collect::<Vec<_>>()
            };
        let all_rejected_updates: Vec<RejectedUpdate> = peers.iter().flat_map(peer_rejected_updates).collect();
        let lost_load_balancers = self.load_balancers.iter().filter(|(_, balancer)| !balancer.is_alive(now));
        let lost_load_balancers = lost_load_balancers.map(|(name, balancer)| {
            build_waiting_peer(LOAD_BALANCER_COMPONENT_NAME, name, balancer.confirmed_config_generation)
        });
        let (waiting_count, rejected_count) = (waiting_peers.len() as u64, all_rejected_updates.len() as u64);
        Acknowledgements {
            configuration_generation: newest_generation,
            acknowledged_count: peers.len() as u64 - waiting_count,
            pending_count: waiting_count,
            pending_peers: waiting_peers.into_iter().take(MAX_LISTED_PEERS_AND_REJECTIONS).collect(),
            rejected_count,
            rejected: all_rejected_updates.into_iter().take(MAX_LISTED_PEERS_AND_REJECTIONS).collect(),
            disconnected_load_balancers: lost_load_balancers.take(MAX_LISTED_PEERS_AND_REJECTIONS).collect(),
        }
    }

    /// Returns each live load balancer and connected agent, with its kind, confirmed generation and rejected updates.
    fn live_peers(&self, now: ClockReadings) -> Vec<(&'static str, &str, u64, &[v1::RejectedUpdate])> {
        let mut peers = Vec::new();
        for (name, balancer) in self.load_balancers.iter().filter(|(_, balancer)| balancer.is_alive(now)) {
            let rejected_updates =
                balancer.reported_state_and_time.as_ref().map_or(&[][..], |(state, _)| &state.rejected);
            peers.push((
                LOAD_BALANCER_COMPONENT_NAME,
                name.as_str(),
                balancer.confirmed_config_generation,
                rejected_updates,
            ));
        }
        for (id, server) in self.fleet.servers.iter().filter(|(_, server)| server.admin_state != ServerAdminState::Left)
        {
            let is_connected = |agent: &&Agent| agent.session.is_some();
            if let Some(agent) = self.agent(*id).filter(is_connected) {
                let rejected_updates =
                    agent.newest_report.as_ref().map_or(&[][..], |report| &report.details.rejected_updates);
                peers.push((
                    AGENT_COMPONENT_NAME,
                    server.name.as_str(),
                    agent.confirmed_config_generation,
                    rejected_updates,
                ));
            }
        }
        peers
    }

    pub(super) fn add_acknowledgement_metrics(&self, snapshot: &mut MetricsSnapshot, now: ClockReadings) {
        for (component, name, confirmed_generation, rejected_updates) in self.live_peers(now) {
            let generation_lag = self.fleet.generation.saturating_sub(confirmed_generation);
            snapshot.add_value(&GENERATION_LAG, [component, name], generation_lag as f64);
            snapshot.add_value(&REJECTED_UPDATES, [component, name], rejected_updates.len() as f64);
        }
    }
}
