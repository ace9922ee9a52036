//! Acknowledgements and rejections (NACKs) of the newest configuration, and rejections of tables.

use coreward_api::types::{Acknowledgements, PeerGeneration, RefusedUpdate};
use coreward_metrics::snapshot::Snapshot;
use coreward_wire::v1;

use super::agent::Agent;
use super::{Controller, Now};
use coreward_fleet::fleet::AdminState;
use coreward_metrics::metrics;
use coreward_metrics::table::MetricKind::{Gauge, MaxGauge};
use coreward_metrics::table::{Component, Family, family};

metrics! {
    GENERATION_LAG: Family<2> = family(
        MaxGauge, "coreward_generation_lag", &["part", "name"], &[Component::Controller],
        "Generations of the configuration that a load balancer (lb) or server (agent) is behind",
    );
    REFUSED_UPDATES: Family<2> = family(
        Gauge, "coreward_refused_updates", &["part", "name"], &[Component::Controller],
        "Parts of the newest updates that a load balancer (lb) or server (agent) rejects",
    );
}

/// Maximum number of listed peers (load balancers and agents), and also of listed rejections. Further ones are only
/// counted.
const MAX_LISTED_PEERS: usize = 100;
const LOAD_BALANCER_KIND: &str = "lb";
const AGENT_KIND: &str = "agent";

fn waiting_peer(component: &str, name: &str, configuration_generation: u64) -> PeerGeneration {
    PeerGeneration { component: component.to_owned(), name: name.to_owned(), configuration_generation }
}

impl Controller {
    pub fn acknowledgements(&self, now: Now) -> Acknowledgements {
        let newest_generation = self.fleet.generation;
        let peers = self.peers(now);
        let waiting_peers: Vec<PeerGeneration> = peers
            .iter()
            .filter(|(_, _, confirmed_generation, _)| *confirmed_generation < newest_generation)
            .map(|(component, name, confirmed_generation, _)| waiting_peer(component, name, *confirmed_generation))
            .collect();
        let peer_refused_updates = |(component, name, _, refused_updates): &(&str, &str, u64, &[v1::RefusedUpdate])| {
            refused_updates
                .iter()
                .map(|refused_update| RefusedUpdate::new(component, name, refused_update))
                .collect::<Vec<_>>()
        };
        let all_refused_updates: Vec<RefusedUpdate> = peers.iter().flat_map(peer_refused_updates).collect();
        let lost_load_balancers = self.load_balancers.iter().filter(|(_, balancer)| !balancer.is_alive(now));
        let lost_load_balancers = lost_load_balancers
            .map(|(name, balancer)| waiting_peer(LOAD_BALANCER_KIND, name, balancer.confirmed_generation));
        let (waiting_count, refused_count) = (waiting_peers.len() as u64, all_refused_updates.len() as u64);
        Acknowledgements {
            configuration_generation: newest_generation,
            acknowledged_count: peers.len() as u64 - waiting_count,
            pending_count: waiting_count,
            pending_peers: waiting_peers.into_iter().take(MAX_LISTED_PEERS).collect(),
            refused_count,
            refused: all_refused_updates.into_iter().take(MAX_LISTED_PEERS).collect(),
            disconnected_load_balancers: lost_load_balancers.take(MAX_LISTED_PEERS).collect(),
        }
    }

    /// Returns each live load balancer and connected agent, with its kind, confirmed generation and rejected updates.
    fn peers(&self, now: Now) -> Vec<(&'static str, &str, u64, &[v1::RefusedUpdate])> {
        let mut peers = Vec::new();
        for (name, balancer) in self.load_balancers.iter().filter(|(_, balancer)| balancer.is_alive(now)) {
            let refused_updates = balancer.reported_state.as_ref().map_or(&[][..], |(state, _)| &state.refused);
            peers.push((LOAD_BALANCER_KIND, name.as_str(), balancer.confirmed_generation, refused_updates));
        }
        for (id, server) in self.fleet.servers.iter().filter(|(_, server)| server.admin_state != AdminState::Left) {
            let is_connected = |agent: &&Agent| agent.session.is_some();
            if let Some(agent) = self.agent(*id).filter(is_connected) {
                let refused_updates =
                    agent.newest_report.as_ref().map_or(&[][..], |report| &report.details.refused_updates);
                peers.push((AGENT_KIND, server.name.as_str(), agent.confirmed_generation, refused_updates));
            }
        }
        peers
    }

    pub(super) fn add_acknowledgement_metrics(&self, snapshot: &mut Snapshot, now: Now) {
        for (component, name, confirmed_generation, refused_updates) in self.peers(now) {
            let generation_lag = self.fleet.generation.saturating_sub(confirmed_generation);
            snapshot.add_value(&GENERATION_LAG, [component, name], generation_lag as f64);
            snapshot.add_value(&REFUSED_UPDATES, [component, name], refused_updates.len() as f64);
        }
    }
}
