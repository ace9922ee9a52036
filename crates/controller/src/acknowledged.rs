//! Acknowledgements of the newest configuration, and rejections of it or of tables (NACKs).

use coreward_api::types::{Acknowledgements, RefusedUpdate, Waiting};
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

/// Maximum number of listed peers, and of listed rejections. Further ones are only counted.
const MAX_LISTED: usize = 100;
const LB_PART: &str = "lb";
const AGENT_PART: &str = "agent";

fn waiting(part: &str, name: &str, configuration_generation: u64) -> Waiting {
    Waiting { part: part.to_owned(), name: name.to_owned(), configuration_generation }
}

impl Controller {
    pub fn acknowledgements(&self, now: Now) -> Acknowledgements {
        let newest = self.fleet.generation;
        let parts = self.peers(now);
        let lacking: Vec<Waiting> = parts
            .iter()
            .filter(|(_, _, confirmed, _)| *confirmed < newest)
            .map(|(part, name, confirmed, _)| waiting(part, name, *confirmed))
            .collect();
        let of_part = |(part, name, _, list): &(&str, &str, u64, &[v1::RefusedUpdate])| {
            list.iter().map(|refused| RefusedUpdate::new(part, name, refused)).collect::<Vec<_>>()
        };
        let all_refused: Vec<RefusedUpdate> = parts.iter().flat_map(of_part).collect();
        let lost = self.load_balancers.iter().filter(|(_, balancer)| !balancer.is_alive(now));
        let lost = lost.map(|(name, balancer)| waiting(LB_PART, name, balancer.confirmed_generation));
        let (waiting_count, refused_count) = (lacking.len() as u64, all_refused.len() as u64);
        Acknowledgements {
            configuration_generation: newest,
            acknowledged_count: parts.len() as u64 - waiting_count,
            waiting_count,
            waiting: lacking.into_iter().take(MAX_LISTED).collect(),
            refused_count,
            refused: all_refused.into_iter().take(MAX_LISTED).collect(),
            disconnected: lost.take(MAX_LISTED).collect(),
        }
    }

    /// Returns live load balancers and connected agents: kind, name, confirmed generation, and rejected updates.
    fn peers(&self, now: Now) -> Vec<(&'static str, &str, u64, &[v1::RefusedUpdate])> {
        let mut parts = Vec::new();
        for (name, balancer) in self.load_balancers.iter().filter(|(_, balancer)| balancer.is_alive(now)) {
            let list = balancer.state.as_ref().map_or(&[][..], |(state, _)| &state.refused);
            parts.push((LB_PART, name.as_str(), balancer.confirmed_generation, list));
        }
        for (id, server) in self.fleet.servers.iter().filter(|(_, server)| server.admin_state != AdminState::Left) {
            let connected = |agent: &&Agent| agent.session.is_some();
            if let Some(agent) = self.agent(*id).filter(connected) {
                let list = agent.newest_report.as_ref().map_or(&[][..], |newest| &newest.details.refused);
                parts.push((AGENT_PART, server.name.as_str(), agent.confirmed_generation, list));
            }
        }
        parts
    }

    pub(super) fn add_acknowledgements(&self, page: &mut Snapshot, now: Now) {
        for (part, name, confirmed, refused) in self.peers(now) {
            let lag = self.fleet.generation.saturating_sub(confirmed);
            page.add(&GENERATION_LAG, [part, name], lag as f64);
            page.add(&REFUSED_UPDATES, [part, name], refused.len() as f64);
        }
    }
}
