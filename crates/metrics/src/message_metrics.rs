//! Metrics of each daemon whose values are in messages between daemons.

use coreward_wire::v1;

use crate::metric_declarations::MetricKind::{Counter, Gauge, MaxGauge};
use crate::metric_declarations::{Component, MetricFamily, declare_family};
use crate::metrics;
use crate::snapshot::MetricsSnapshot;

/// Daemons whose metrics contain the request counts of UDP services.
const DISPATCH_METRIC_COMPONENTS: &[Component] = &[Component::Controller, Component::Agent, Component::Dispatch];

metrics! {
    BUILD_INFO: MetricFamily<2> = declare_family(
        Gauge, "coreward_build_info", &["part", "version"], Component::ALL, "1",
    );
    pub CONFIGURATION_GENERATION: MetricFamily<0> = declare_family(
        MaxGauge, "coreward_configuration_generation", &[], &[Component::Controller, Component::Lb, Component::Agent],
        "Generation of the configuration in force; 0: none yet",
    );
    pub TABLE_GENERATION: MetricFamily<1> = declare_family(
        MaxGauge, "coreward_table_generation", &["service"], &[Component::Controller, Component::Lb],
        "Generation of the newest placement table; at a load balancer of the one in force",
    );
    SERVER_SYNS_TOTAL: MetricFamily<2> = declare_family(
        Counter, "coreward_server_syns_total", &["server", "queue"], &[Component::Controller, Component::Agent],
        "SYNs that arrived on the receive queue that RSS predicts (predicted), or on another (other)",
    );
    SERVER_PACKETS_TOTAL: MetricFamily<2> = declare_family(
        Counter, "coreward_server_packets_total", &["server", "outcome"], &[Component::Controller, Component::Agent],
        "Packets at a server's programs, by outcome",
    );
    pub SERVER_WARNINGS: MetricFamily<1> = declare_family(
        Gauge, "coreward_server_warnings", &["server"], &[Component::Controller, Component::Agent],
        "Faults that the agent reports, as in `coreward status`",
    );
    LB_PACKETS_TOTAL: MetricFamily<2> = declare_family(
        Counter, "coreward_lb_packets_total", &["load_balancer", "decision"], &[Component::Controller, Component::Lb],
        "Packets forwarded or passed on, by decision",
    );
    LB_DROPS_TOTAL: MetricFamily<2> = declare_family(
        Counter, "coreward_lb_drops_total", &["load_balancer", "reason"], &[Component::Controller, Component::Lb],
        "Dropped packets, by reason",
    );
    LB_EVENTS_TOTAL: MetricFamily<2> = declare_family(
        Counter, "coreward_lb_events_total", &["load_balancer", "event"], &[Component::Controller, Component::Lb],
        "Other events of packets",
    );
    LB_CONNECTIONS: MetricFamily<1> = declare_family(
        Gauge, "coreward_lb_connections", &["load_balancer"], &[Component::Controller, Component::Lb],
        "Connections in the connection table",
    );
    LB_UNRESOLVED_SERVERS: MetricFamily<1> = declare_family(
        Gauge, "coreward_lb_unresolved_servers", &["load_balancer"], &[Component::Controller, Component::Lb],
        "Servers without a known MAC address",
    );
    LB_WARNINGS: MetricFamily<1> = declare_family(
        Gauge, "coreward_lb_warnings", &["load_balancer"], &[Component::Controller, Component::Lb],
        "Faults of the machine, and rejected updates",
    );
    HEALTH_CHECKS_TOTAL: MetricFamily<2> = declare_family(
        Counter, "coreward_health_checks_total", &["service", "outcome"], &[Component::Lb],
        "Health checks of a service's servers, passed or failed",
    );
    HEALTH_SERVERS: MetricFamily<2> = declare_family(
        Gauge, "coreward_health_servers", &["service", "verdict"], &[Component::Lb],
        "Servers of a service that this load balancer finds up or down, or has no verdict on",
    );
    HEALTH_CHECK_DURATION_MAX_SECONDS: MetricFamily<1> = declare_family(
        MaxGauge, "coreward_health_check_duration_max_seconds", &["service"], &[Component::Lb],
        "Duration of the slowest server's newest health check",
    );
    DISPATCH_OUTSTANDING_REQUESTS: MetricFamily<3> = declare_family(
        Gauge, "coreward_dispatch_outstanding_requests", &["server", "service", "worker"], DISPATCH_METRIC_COMPONENTS,
        "Requests without a response",
    );
    DISPATCH_QUEUED_DATAGRAMS: MetricFamily<3> = declare_family(
        Gauge, "coreward_dispatch_queued_datagrams", &["server", "service", "worker"], DISPATCH_METRIC_COMPONENTS,
        "Datagrams in a worker's socket queue at the last poll",
    );
    DISPATCH_DISPATCHED_TOTAL: MetricFamily<3> = declare_family(
        Counter, "coreward_dispatch_dispatched_total", &["server", "service", "worker"], DISPATCH_METRIC_COMPONENTS,
        "Requests given to a worker",
    );
    DISPATCH_COMPLETED_TOTAL: MetricFamily<3> = declare_family(
        Counter, "coreward_dispatch_completed_total", &["server", "service", "worker"], DISPATCH_METRIC_COMPONENTS,
        "Requests that a worker answered",
    );
    DISPATCH_ABANDONED_TOTAL: MetricFamily<3> = declare_family(
        Counter, "coreward_dispatch_abandoned_total", &["server", "service", "worker"], DISPATCH_METRIC_COMPONENTS,
        "Requests given up: without a response, dropped, or their worker died",
    );
    DISPATCH_DROPPED_TOTAL: MetricFamily<3> = declare_family(
        Counter, "coreward_dispatch_dropped_total", &["server", "service", "worker"], DISPATCH_METRIC_COMPONENTS,
        "Datagrams that a worker's full receive buffer dropped",
    );
}

/// Returns a snapshot that contains the metrics which all daemons have in common.
pub fn base_metrics_snapshot(component: Component) -> MetricsSnapshot {
    let mut snapshot = MetricsSnapshot::default();
    snapshot.add_value(&BUILD_INFO, [component.name(), env!("CARGO_PKG_VERSION")], 1.0);
    snapshot
}

/// Adds a server's counters. They include the numbers of SYNs that arrived at the predicted receive queue and at other
/// queues.
pub fn add_server_counters<'a>(
    snapshot: &mut MetricsSnapshot,
    server: &str,
    predicted_and_other_syn_counts: (u64, u64),
    counters: impl Iterator<Item = (&'a String, &'a u64)>,
) {
    for (queue, count) in [("predicted", predicted_and_other_syn_counts.0), ("other", predicted_and_other_syn_counts.1)]
    {
        snapshot.add_value(&SERVER_SYNS_TOTAL, [server, queue], count as f64);
    }
    for (outcome, count) in counters.filter(|(name, _)| !name.starts_with("rss_")) {
        snapshot.add_value(&SERVER_PACKETS_TOTAL, [server, outcome], *count as f64);
    }
}

/// Adds a load balancer's counters of packets and events, its number of connections, and its warnings.
pub fn add_load_balancer_metrics(snapshot: &mut MetricsSnapshot, name: &str, state: &v1::LoadBalancerState) {
    for (counter, count) in &state.counters {
        match counter.strip_prefix("drop_") {
            Some(reason) => snapshot.add_value(&LB_DROPS_TOTAL, [name, reason], *count as f64),
            None => snapshot.add_value(&LB_PACKETS_TOTAL, [name, counter], *count as f64),
        }
    }
    for (event, count) in &state.events {
        snapshot.add_value(&LB_EVENTS_TOTAL, [name, event], *count as f64);
    }
    snapshot.add_value(&LB_CONNECTIONS, [name], state.connections as f64);
    snapshot.add_value(&LB_UNRESOLVED_SERVERS, [name], state.unresolved_servers.len() as f64);
    snapshot.add_value(&LB_WARNINGS, [name], state.warning_count() as f64);
}

/// Adds the numbers of passed and failed health checks of a service, and its numbers of servers by health verdict.
pub fn add_health_check_metrics<'a>(
    snapshot: &mut MetricsSnapshot,
    service: &str,
    servers: impl Iterator<Item = &'a v1::ServerHealth> + Clone,
) {
    let failed_count: u64 = servers.clone().map(|server| server.failures).sum();
    let check_count: u64 = servers.clone().map(|server| server.checks).sum();
    snapshot.add_value(&HEALTH_CHECKS_TOTAL, [service, "passed"], check_count.saturating_sub(failed_count) as f64);
    snapshot.add_value(&HEALTH_CHECKS_TOTAL, [service, "failed"], failed_count as f64);
    for (verdict, up) in [("up", Some(true)), ("down", Some(false)), ("unknown", None)] {
        let server_count = servers.clone().filter(|server| server.up == up).count();
        snapshot.add_value(&HEALTH_SERVERS, [service, verdict], server_count as f64);
    }
    let slowest_latency_us = servers.map(|server| server.latency_us).max().unwrap_or(0);
    snapshot.add_value(&HEALTH_CHECK_DURATION_MAX_SECONDS, [service], f64::from(slowest_latency_us) / 1e6);
}

/// Adds the request counters of the UDP services that a server dispatches to its workers.
pub fn add_dispatch_counters(snapshot: &mut MetricsSnapshot, server: &str, services: &[v1::DispatchedService]) {
    for service in services {
        for worker in &service.workers {
            let worker_label = worker.worker.to_string();
            let labels = [server, service.listen.as_str(), worker_label.as_str()];
            snapshot.add_value(&DISPATCH_OUTSTANDING_REQUESTS, labels, worker.outstanding.into());
            snapshot.add_value(&DISPATCH_QUEUED_DATAGRAMS, labels, worker.queued.into());
            snapshot.add_value(&DISPATCH_DISPATCHED_TOTAL, labels, worker.dispatched as f64);
            snapshot.add_value(&DISPATCH_COMPLETED_TOTAL, labels, worker.completed as f64);
            snapshot.add_value(&DISPATCH_ABANDONED_TOTAL, labels, worker.abandoned as f64);
            snapshot.add_value(&DISPATCH_DROPPED_TOTAL, labels, worker.dropped as f64);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;
    use crate::metric_declarations::METRIC_DECLARATIONS;

    #[test]
    fn dispatch_counters_include_every_declared_dispatch_metric() {
        let worker = v1::DispatchedWorker { worker: 3, dispatched: 7, ..Default::default() };
        let service =
            v1::DispatchedService { listen: "0.0.0.0:53".to_owned(), workers: vec![worker], ..Default::default() };
        let mut snapshot = base_metrics_snapshot(Component::Dispatch);
        add_dispatch_counters(&mut snapshot, "", &[service]);
        let dispatch_metrics =
            METRIC_DECLARATIONS.iter().filter(|metric| metric.components.contains(&Component::Dispatch));
        let expected: BTreeSet<&str> = dispatch_metrics.map(|metric| metric.name).collect();
        assert_eq!(snapshot.metric_names().collect::<BTreeSet<_>>(), expected);
        let expected_line = "coreward_dispatch_dispatched_total{server=\"\",service=\"0.0.0.0:53\",worker=\"3\"} 7.0\n";
        assert!(snapshot.to_openmetrics().contains(expected_line), "{}", snapshot.to_openmetrics());
    }
}
