//! Values of each daemon, from its messages to others.

use coreward_wire::v1;

use crate::snapshot::Snapshot;
use crate::table::Component;

/// Returns a snapshot with the values of every daemon.
pub fn begin(part: Component) -> Snapshot {
    let mut page = Snapshot::default();
    page.add("coreward_build_info", &[part.name(), env!("CARGO_PKG_VERSION")], 1.0);
    page
}

/// Adds a server's counters. `syns`: by the predicted receive queue, and by others.
pub fn server_counters<'a>(
    page: &mut Snapshot,
    server: &str,
    syns: (u64, u64),
    counters: impl Iterator<Item = (&'a String, &'a u64)>,
) {
    for (queue, count) in [("predicted", syns.0), ("other", syns.1)] {
        page.add("coreward_server_syns_total", &[server, queue], count as f64);
    }
    for (outcome, count) in counters.filter(|(name, _)| !name.starts_with("rss_")) {
        page.add("coreward_server_packets_total", &[server, outcome], *count as f64);
    }
}

/// Adds a load balancer's counters of all services.
pub fn load_balancer(page: &mut Snapshot, name: &str, state: &v1::LoadBalancerState) {
    for (counter, count) in &state.counters {
        match counter.strip_prefix("drop_") {
            Some(reason) => page.add("coreward_lb_drops_total", &[name, reason], *count as f64),
            None => page.add("coreward_lb_packets_total", &[name, counter], *count as f64),
        }
    }
    for (event, count) in &state.events {
        page.add("coreward_lb_events_total", &[name, event], *count as f64);
    }
    page.add("coreward_lb_connections", &[name], state.connections as f64);
    page.add("coreward_lb_unresolved_servers", &[name], state.unresolved_servers.len() as f64);
    page.add("coreward_lb_warnings", &[name], state.warning_count() as f64);
}

/// Adds a service's health checks: number, failures, and verdicts of its servers.
pub fn health_checks<'a>(
    page: &mut Snapshot,
    service: &str,
    servers: impl Iterator<Item = &'a v1::ServerHealth> + Clone,
) {
    let failed: u64 = servers.clone().map(|server| server.failures).sum();
    let made: u64 = servers.clone().map(|server| server.checks).sum();
    page.add("coreward_health_checks_total", &[service, "passed"], made.saturating_sub(failed) as f64);
    page.add("coreward_health_checks_total", &[service, "failed"], failed as f64);
    for (verdict, up) in [("up", Some(true)), ("down", Some(false)), ("unknown", None)] {
        let count = servers.clone().filter(|server| server.up == up).count();
        page.add("coreward_health_servers", &[service, verdict], count as f64);
    }
    let slowest = servers.map(|server| server.latency_us).max().unwrap_or(0);
    page.add("coreward_health_check_duration_max_seconds", &[service], f64::from(slowest) / 1e6);
}

/// Adds the requests of UDP services.
pub fn dispatch(page: &mut Snapshot, server: &str, services: &[v1::DispatchedService]) {
    for service in services {
        for worker in &service.workers {
            let number = worker.worker.to_string();
            let labels = [server, service.listen.as_str(), number.as_str()];
            page.add("coreward_dispatch_outstanding_requests", &labels, worker.outstanding.into());
            page.add("coreward_dispatch_queued_datagrams", &labels, worker.queued.into());
            page.add("coreward_dispatch_dispatched_total", &labels, worker.dispatched as f64);
            page.add("coreward_dispatch_completed_total", &labels, worker.completed as f64);
            page.add("coreward_dispatch_abandoned_total", &labels, worker.repaired as f64);
            page.add("coreward_dispatch_dropped_total", &labels, worker.dropped as f64);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::table::METRICS;

    #[test]
    fn dispatch_metrics_cover_the_table() {
        let worker = v1::DispatchedWorker { worker: 3, dispatched: 7, ..Default::default() };
        let service =
            v1::DispatchedService { listen: "0.0.0.0:53".to_owned(), workers: vec![worker], ..Default::default() };
        let mut page = begin(Component::Dispatch);
        dispatch(&mut page, "", &[service]);
        let expected: Vec<&str> = METRICS
            .iter()
            .filter(|metric| metric.parts.contains(&Component::Dispatch))
            .map(|metric| metric.name)
            .collect();
        let mut found: Vec<&str> = page.names().collect();
        found.sort_by_key(|name| METRICS.iter().position(|metric| metric.name == *name));
        assert_eq!(found, expected);
        let line = "coreward_dispatch_dispatched_total{server=\"\",service=\"0.0.0.0:53\",worker=\"3\"} 7.0\n";
        assert!(page.text().contains(line), "{}", page.text());
    }
}
