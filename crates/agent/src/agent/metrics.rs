//! The agent's metrics for Prometheus.

use std::collections::BTreeMap;

use coreward_metrics::message_metrics;
use coreward_metrics::message_metrics::{CONFIGURATION_GENERATION, SERVER_WARNINGS};
use coreward_metrics::metric_declarations::MetricKind::{Counter, Gauge};
use coreward_metrics::metric_declarations::{Component, MetricFamily, declare_family};
use coreward_metrics::metrics;
use coreward_metrics::snapshot::MetricsSnapshot;

use super::Agent;
use super::report::counters_by_name;
use crate::dispatch;

metrics! {
    AGENT_REPORTS_TOTAL: MetricFamily<0> = declare_family(
        Counter, "coreward_agent_reports_total", &[], &[Component::Agent],
        "Reports made by this process",
    );
    AGENT_CORE_BUSY_SECONDS_TOTAL: MetricFamily<1> = declare_family(
        Counter, "coreward_agent_core_busy_seconds_total", &["core"], &[Component::Agent],
        "Busy time of a core, by receive queue",
    );
    AGENT_OPEN_CONNECTIONS: MetricFamily<0> = declare_family(
        Gauge, "coreward_agent_open_connections", &[], &[Component::Agent],
        "TCP connections of its services",
    );
}

impl Agent {
    /// Returns the current value of every metric. Cores' busy times are those of the newest report. `extra_warnings`
    /// are warnings about the connection to the controller.
    pub fn metrics_snapshot(&self, extra_warnings: &[String]) -> MetricsSnapshot {
        let mut snapshot = message_metrics::base_metrics_snapshot(Component::Agent);
        let server_name = self.config.server.as_str();
        snapshot.add_value(&CONFIGURATION_GENERATION, [], self.confirmed_config_generation() as f64);
        snapshot.add_value(&AGENT_REPORTS_TOTAL, [], self.report_sequence_number as f64);
        let open_connection_count: u32 = self
            .connection_counter
            .newest_counted_connections()
            .iter()
            .flat_map(|connection_counts| connection_counts.connection_count_by_service.values())
            .sum();
        snapshot.add_value(&AGENT_OPEN_CONNECTIONS, [], open_connection_count.into());
        snapshot.add_value(&SERVER_WARNINGS, [server_name], self.own_and_extra_warnings(extra_warnings).len() as f64);
        for (core, busy_ns) in self.core_busy_ns.iter().enumerate() {
            snapshot.add_value(&AGENT_CORE_BUSY_SECONDS_TOTAL, [&core.to_string()], *busy_ns as f64 / 1e9);
        }
        let counters = counters_by_name(&self.bpf_programs.counters(), &self.steering).into_iter();
        let counters: BTreeMap<String, u64> = counters.chain(self.decapsulator.named_counters()).collect();
        message_metrics::add_server_counters(
            &mut snapshot,
            server_name,
            self.syn_match_and_mismatch_counts(),
            counters.iter(),
        );
        let dispatched_services =
            self.dispatcher.as_ref().map(dispatch::dispatched_service_reports).unwrap_or_default();
        message_metrics::add_dispatch_counters(&mut snapshot, server_name, &dispatched_services);
        snapshot
    }
}
