//! Metrics of the controller.

use std::time::Duration;

use coreward_api::types::{DrainedBy, ReportState, Server, ServerState, Status};
use coreward_metrics::component;
use coreward_metrics::snapshot::Snapshot;

use super::{Controller, Now};

fn seconds(milliseconds: u32) -> f64 {
    f64::from(milliseconds) / 1000.0
}

/// Adds the metrics of `status` at this wall-clock time.
pub fn add_status(page: &mut Snapshot, status: &Status, wall: Duration) {
    page.add("coreward_configuration_generation", &[], status.configuration_generation as f64);
    page.add("coreward_reports_accepted_total", &[], status.accepted_reports as f64);
    for (reason, count) in &status.refused_reports {
        page.add("coreward_reports_refused_total", &[reason], *count as f64);
    }
    for service in &status.services {
        page.add("coreward_table_generation", &[&service.name], service.table_generation as f64);
        page.add("coreward_table_age_seconds", &[&service.name], seconds(service.table_age_ms));
    }
    for state in ServerState::ALL {
        let count = status.servers.iter().filter(|server| server.state == state).count();
        page.add("coreward_servers", &[state.name()], count as f64);
    }
    for service in &status.services {
        for state in ServerState::ALL {
            let count = service.members.iter().filter(|member| member.state == state).count();
            page.add("coreward_service_servers", &[&service.name, state.name()], count as f64);
        }
        page.add("coreward_service_failing_open", &[&service.name], f64::from(u8::from(service.failing_open)));
    }
    status.servers.iter().for_each(|server| add_server(page, server));
    for (state, alive) in [("alive", true), ("lost", false)] {
        let count = status.load_balancers.iter().filter(|balancer| balancer.alive == alive).count();
        page.add("coreward_load_balancers", &[state], count as f64);
    }
    let age = wall.as_secs().saturating_sub(status.keys.current_since_unix_s);
    page.add("coreward_cookie_key_age_seconds", &[], age as f64);
}

impl Controller {
    /// Adds the metrics of messages that have no other use.
    pub fn add_metrics(&self, page: &mut Snapshot, now: Now) {
        self.add_acknowledgements(page, now);
        page.add("coreward_store_behind", &[], self.store_is_behind().into());
        page.add("coreward_store_has_document", &[], self.fleet.has_document().into());
        page.add("coreward_servers_limited", &[], self.share_limiter.limited_count() as f64);
        page.add("coreward_reports_ahead_total", &[], self.reports_ahead as f64);
        for (id, server) in &self.fleet.servers {
            if let Some(newest) = self.agent(*id).and_then(|agent| agent.newest.as_ref()) {
                component::dispatch(page, &server.name, &newest.details.dispatch);
            }
        }
        for (name, balancer) in self.load_balancers.iter() {
            if let Some((state, _)) = &balancer.state {
                component::load_balancer(page, name, state);
            }
        }
    }
}

fn add_server(page: &mut Snapshot, server: &Server) {
    let name = server.name.as_str();
    if server.reports != ReportState::None && server.state != ServerState::Gone {
        page.add("coreward_server_report_age_seconds", &[name], seconds(server.report_age_ms));
        page.add_numbered("coreward_server_core_load_ratio", name, server.core_load.iter().copied());
    }
    page.add("coreward_server_open_connections", &[name], server.open_connections.into());
    if let Some(counted) = server.connections.as_ref().filter(|_| server.state != ServerState::Gone) {
        for (service, count) in &counted.services {
            page.add("coreward_server_service_connections", &[name, service], (*count).into());
        }
    }
    let is_drained = server.drained.as_ref().is_some_and(|drained| drained.by == DrainedBy::Command);
    page.add("coreward_server_drained", &[name], f64::from(u8::from(is_drained)));
    component::server_counters(page, name, (server.rss_matched, server.rss_mismatched), server.counters.iter());
    page.add("coreward_server_warnings", &[name], server.warnings.len() as f64);
}
