//! Metrics of the controller.

use std::time::Duration;

use coreward_api::types::{DrainOrigin, ReportState, Server, ServerState, Status};
use coreward_metrics::message_metrics;
use coreward_metrics::message_metrics::{CONFIGURATION_GENERATION, SERVER_WARNINGS, TABLE_GENERATION};
use coreward_metrics::metric_declarations::MetricKind::{Counter, Gauge, MaxGauge};
use coreward_metrics::metric_declarations::{Component, MetricFamily, declare_family};
use coreward_metrics::metrics;
use coreward_metrics::snapshot::MetricsSnapshot;

use super::{ClockReadings, Controller};

metrics! {
    REPORTS_ACCEPTED_TOTAL: MetricFamily<0> = declare_family(
        Counter, "coreward_reports_accepted_total", &[], &[Component::Controller],
        "Reports accepted",
    );
    REPORTS_REJECTED_TOTAL: MetricFamily<1> = declare_family(
        Counter, "coreward_reports_rejected_total", &["reason"], &[Component::Controller],
        "Reports rejected, by reason",
    );
    SERVERS_LIMITED: MetricFamily<0> = declare_family(
        Gauge, "coreward_servers_limited", &[], &[Component::Controller],
        "Servers limited to twice their fair share of new connections",
    );
    TABLE_AGE_SECONDS: MetricFamily<1> = declare_family(
        MaxGauge, "coreward_table_age_seconds", &["service"], &[Component::Controller],
        "Age of the newest placement table",
    );
    STORE_HAS_DOCUMENT: MetricFamily<0> = declare_family(
        Gauge, "coreward_store_has_document", &[], &[Component::Controller],
        "0: no document was applied yet, and no configuration is sent",
    );
    STORE_BEHIND: MetricFamily<0> = declare_family(
        Gauge, "coreward_store_behind", &[], &[Component::Controller],
        "1: a load balancer had a newer configuration",
    );
    REPORTS_AHEAD_TOTAL: MetricFamily<0> = declare_family(
        Counter, "coreward_reports_ahead_total", &[], &[Component::Controller],
        "Reports sent more than a second ahead of the controller's wall clock",
    );
    SERVERS: MetricFamily<1> = declare_family(
        Gauge, "coreward_servers", &["state"], &[Component::Controller], "Servers, by state",
    );
    SERVICE_SERVERS: MetricFamily<2> = declare_family(
        Gauge, "coreward_service_servers", &["service", "state"], &[Component::Controller],
        "Servers of a service, by state",
    );
    SERVICE_FAILING_OPEN: MetricFamily<1> = declare_family(
        Gauge, "coreward_service_failing_open", &["service"], &[Component::Controller],
        "1: all servers of the service are down and still get new connections",
    );
    SERVER_REPORT_AGE_SECONDS: MetricFamily<1> = declare_family(
        MaxGauge, "coreward_server_report_age_seconds", &["server"], &[Component::Controller],
        "Age of the newest report; not of servers that never reported",
    );
    SERVER_CORE_LOAD_RATIO: MetricFamily<2> = declare_family(
        MaxGauge, "coreward_server_core_load_ratio", &["server", "core"], &[Component::Controller],
        "Smoothed load of a core / its capacity",
    );
    SERVER_OPEN_CONNECTIONS: MetricFamily<1> = declare_family(
        Gauge, "coreward_server_open_connections", &["server"], &[Component::Controller],
        "TCP connections of its services",
    );
    SERVER_SERVICE_CONNECTIONS: MetricFamily<2> = declare_family(
        Gauge, "coreward_server_service_connections", &["server", "service"], &[Component::Controller],
        "TCP connections of a service at a server, by its agent's last count; absent: unknown",
    );
    SERVER_DRAINED: MetricFamily<1> = declare_family(
        Gauge, "coreward_server_drained", &["server"], &[Component::Controller],
        "1: drained by `coreward drain`; 0: not, or by the fleet's document",
    );
    LOAD_BALANCERS: MetricFamily<1> = declare_family(
        Gauge, "coreward_load_balancers", &["state"], &[Component::Controller],
        "Load balancers, alive or lost",
    );
    COOKIE_KEY_AGE_SECONDS: MetricFamily<0> = declare_family(
        MaxGauge, "coreward_cookie_key_age_seconds", &[], &[Component::Controller],
        "Time since the current cookie key came into force, in seconds",
    );
}

fn milliseconds_to_seconds(milliseconds: u32) -> f64 {
    f64::from(milliseconds) / 1000.0
}

/// Adds the metrics that are computed from `status` and the wall-clock time.
pub fn add_status_metrics(snapshot: &mut MetricsSnapshot, status: &Status, wall_time: Duration) {
    snapshot.add_value(&CONFIGURATION_GENERATION, [], status.configuration_generation as f64);
    snapshot.add_value(&REPORTS_ACCEPTED_TOTAL, [], status.accepted_reports as f64);
    for (reason, count) in &status.rejected_reports {
        snapshot.add_value(&REPORTS_REJECTED_TOTAL, [reason], *count as f64);
    }
    for service in &status.services {
        snapshot.add_value(&TABLE_GENERATION, [&service.name], service.table_generation as f64);
        snapshot.add_value(&TABLE_AGE_SECONDS, [&service.name], milliseconds_to_seconds(service.table_age_ms));
    }
    for state in ServerState::ALL {
        let server_count = status.servers.iter().filter(|server| server.state == state).count();
        snapshot.add_value(&SERVERS, [state.name()], server_count as f64);
    }
    for service in &status.services {
        for state in ServerState::ALL {
            let member_count = service.members.iter().filter(|member| member.state == state).count();
            snapshot.add_value(&SERVICE_SERVERS, [&service.name, state.name()], member_count as f64);
        }
        snapshot.add_value(&SERVICE_FAILING_OPEN, [&service.name], f64::from(u8::from(service.failing_open)));
    }
    status.servers.iter().for_each(|server| add_server_metrics(snapshot, server));
    for (state, is_alive) in [("alive", true), ("lost", false)] {
        let load_balancer_count = status.load_balancers.iter().filter(|balancer| balancer.alive == is_alive).count();
        snapshot.add_value(&LOAD_BALANCERS, [state], load_balancer_count as f64);
    }
    let key_age_s = wall_time.as_secs().saturating_sub(status.keys.current_since_unix_s);
    snapshot.add_value(&COOKIE_KEY_AGE_SECONDS, [], key_age_s as f64);
}

impl Controller {
    /// Adds the metrics that cannot be computed from the status.
    pub fn add_metrics(&self, snapshot: &mut MetricsSnapshot, now: ClockReadings) {
        self.add_acknowledgement_metrics(snapshot, now);
        snapshot.add_value(&STORE_BEHIND, [], self.is_store_outdated().into());
        snapshot.add_value(&STORE_HAS_DOCUMENT, [], self.fleet.has_document().into());
        snapshot.add_value(&SERVERS_LIMITED, [], self.share_limiter.limited_server_count() as f64);
        snapshot.add_value(&REPORTS_AHEAD_TOTAL, [], self.clock_ahead_report_count as f64);
        for (id, server) in &self.fleet.servers {
            if let Some(report) = self.agent(*id).and_then(|agent| agent.newest_report.as_ref()) {
                message_metrics::add_dispatch_counters(snapshot, &server.name, &report.details.dispatched_services);
            }
        }
        for (name, balancer) in self.load_balancers.iter() {
            if let Some((state, _)) = &balancer.reported_state_and_time {
                message_metrics::add_load_balancer_metrics(snapshot, name, state);
            }
        }
    }
}

fn add_server_metrics(snapshot: &mut MetricsSnapshot, server: &Server) {
    let server_name = server.name.as_str();
    if server.report_state != ReportState::None && server.state != ServerState::Gone {
        snapshot.add_value(&SERVER_REPORT_AGE_SECONDS, [server_name], milliseconds_to_seconds(server.report_age_ms));
        snapshot.add_indexed_values(&SERVER_CORE_LOAD_RATIO, server_name, server.core_loads.iter().copied());
    }
    snapshot.add_value(&SERVER_OPEN_CONNECTIONS, [server_name], server.open_connections.into());
    if let Some(counted_connections) = server.connection_counts.as_ref().filter(|_| server.state != ServerState::Gone) {
        for (service, count) in &counted_connections.connections_by_service {
            snapshot.add_value(&SERVER_SERVICE_CONNECTIONS, [server_name, service], (*count).into());
        }
    }
    let is_drained_by_command = server.drain.as_ref().is_some_and(|drain| drain.origin == DrainOrigin::Command);
    snapshot.add_value(&SERVER_DRAINED, [server_name], f64::from(u8::from(is_drained_by_command)));
    message_metrics::add_server_counters(
        snapshot,
        server_name,
        (server.rss_matched_syns, server.rss_mismatched_syns),
        server.counters.iter(),
    );
    snapshot.add_value(&SERVER_WARNINGS, [server_name], server.warnings.len() as f64);
}
