//! Metrics for Prometheus.

use std::collections::BTreeMap;

use coreward_metrics::component;
use coreward_metrics::component::{CONFIGURATION_GENERATION, SERVER_WARNINGS};
use coreward_metrics::metrics;
use coreward_metrics::snapshot::Snapshot;
use coreward_metrics::table::MetricKind::{Counter, Gauge};
use coreward_metrics::table::{Component, Family, family};

use super::{Agent, counters_by_name};
use crate::dispatch;

metrics! {
    AGENT_REPORTS_TOTAL: Family<0> = family(
        Counter, "coreward_agent_reports_total", &[], &[Component::Agent],
        "Reports made by this process",
    );
    AGENT_CORE_BUSY_SECONDS_TOTAL: Family<1> = family(
        Counter, "coreward_agent_core_busy_seconds_total", &["core"], &[Component::Agent],
        "Busy time of a core, by receive queue",
    );
    AGENT_OPEN_CONNECTIONS: Family<0> = family(
        Gauge, "coreward_agent_open_connections", &[], &[Component::Agent],
        "TCP connections of its services",
    );
}

impl Agent {
    /// Returns all current metrics, with the cores' busy time of the newest report. `more_warnings` are those about the
    /// connection to the controller.
    pub fn metrics(&self, more_warnings: &[String]) -> Snapshot {
        let mut page = component::base_snapshot(Component::Agent);
        let server = self.config.server.as_str();
        page.add(&CONFIGURATION_GENERATION, [], self.confirmed_generation() as f64);
        page.add(&AGENT_REPORTS_TOTAL, [], self.sequence as f64);
        let open: u32 = self.connection_counter.newest().iter().flat_map(|counted| counted.services.values()).sum();
        page.add(&AGENT_OPEN_CONNECTIONS, [], open.into());
        page.add(&SERVER_WARNINGS, [server], self.all_warnings(more_warnings).len() as f64);
        for (core, busy_ns) in self.core_busy_ns.iter().enumerate() {
            page.add(&AGENT_CORE_BUSY_SECONDS_TOTAL, [&core.to_string()], *busy_ns as f64 / 1e9);
        }
        let counters = counters_by_name(&self.programs.counters(), &self.steering).into_iter();
        let counters: BTreeMap<String, u64> = counters.chain(self.decapsulator.counters()).collect();
        component::add_server_counters(&mut page, server, self.rss_counters(), counters.iter());
        let dispatched = self.dispatcher.as_ref().map(dispatch::service_reports).unwrap_or_default();
        component::add_dispatch(&mut page, server, &dispatched);
        page
    }
}
