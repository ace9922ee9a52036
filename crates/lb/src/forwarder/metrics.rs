//! Metrics of the load balancer.

use std::time::Duration;

use coreward_dataplane::lb::COUNTER_NAMES;
use coreward_metrics::component;
use coreward_metrics::component::{CONFIGURATION_GENERATION, TABLE_GENERATION};
use coreward_metrics::metrics;
use coreward_metrics::snapshot::Snapshot;
use coreward_metrics::table::MetricKind::{Counter, Gauge};
use coreward_metrics::table::{Component, Family, Histogram, family, histogram};
use coreward_wire::{ServiceIndex, v1};

use super::Forwarder;

metrics! {
    LB_SEND_DROPS_TOTAL: Family<0> = family(
        Counter, "coreward_lb_send_drops_total", &[], &[Component::Lb],
        "Frames sent by XDP that the driver dropped, by its counters",
    );
    LB_MASKED_SERVERS: Family<0> = family(
        Gauge, "coreward_lb_masked_servers", &[], &[Component::Lb],
        "Servers that this load balancer masks because its own checks find them down",
    );
    LB_EXPIRED_TABLES: Family<0> = family(
        Gauge, "coreward_lb_expired_tables", &[], &[Component::Lb],
        "Services with an expired placement table: this load balancer places by its own counts",
    );
    LB_ANNOUNCED_VIPS: Family<0> = family(
        Gauge, "coreward_lb_announced_vips", &[], &[Component::Lb],
        "VIPs announced to the routers, with [announce]",
    );
    LB_SERVICE_PACKETS_TOTAL: Family<2> = family(
        Counter, "coreward_lb_service_packets_total", &["service", "decision"], &[Component::Lb],
        "Packets of a service forwarded or passed on, by decision",
    );
    LB_SERVICE_DROPS_TOTAL: Family<2> = family(
        Counter, "coreward_lb_service_drops_total", &["service", "reason"], &[Component::Lb],
        "Dropped packets of a service, by reason",
    );
    LB_SERVICE_FORWARDED_BYTES_TOTAL: Family<1> = family(
        Counter, "coreward_lb_service_forwarded_bytes_total", &["service"], &[Component::Lb],
        "Bytes of a service's forwarded frames",
    );
    LB_SERVICE_HANDSHAKES_FAIL: Family<1> = family(
        Gauge, "coreward_lb_service_handshakes_fail", &["service"], &[Component::Lb],
        "1: most new TCP connections do not become established",
    );
    LB_TABLE_INSTALL_SECONDS: Histogram = histogram(
        "coreward_lb_table_install_seconds", &[Component::Lb],
        "Time from the arrival of a table to the table in force",
    );
}

impl Forwarder {
    /// Records how long the installation of a table took.
    pub fn record_install_time(&mut self, took: Duration) {
        self.table_install_latency.observe(took);
    }

    /// Returns a snapshot of all metrics, given the state message `state` of the daemon.
    pub fn metrics(&self, state: &v1::LoadBalancerState) -> Snapshot {
        let mut page = component::base_snapshot(Component::Lb);
        page.add(&CONFIGURATION_GENERATION, [], self.confirmed_generation as f64);
        component::add_load_balancer(&mut page, &self.name, state);
        page.add_latencies(&LB_TABLE_INSTALL_SECONDS, self.table_install_latency);
        page.add(&LB_SEND_DROPS_TOTAL, [], self.symptoms.send_drops_total as f64);
        page.add(&LB_MASKED_SERVERS, [], self.masked_targets.len() as f64);
        page.add(&LB_EXPIRED_TABLES, [], self.table_ages.expired().len() as f64);
        if let Some(announced) = self.announced_vips {
            page.add(&LB_ANNOUNCED_VIPS, [], announced as f64);
        }
        let checked: Vec<(ServiceIndex, v1::ServerHealth)> =
            self.health.results().map(|(service, _, checked)| (service, (&checked).into())).collect();
        for (service, _) in self.services.values().filter(|(service, _)| service.check.is_some()) {
            let of_service = checked.iter().filter(|(index, _)| *index == service.index).map(|(_, checked)| checked);
            component::add_health_checks(&mut page, &service.name, of_service);
        }
        for (number, (service, index)) in &self.services {
            let name = service.name.as_str();
            let fail = self.symptoms.failing_services.contains(number);
            page.add(&LB_SERVICE_HANDSHAKES_FAIL, [name], f64::from(u8::from(fail)));
            if let Some(generation) = self.balancer.table_generation(*index) {
                page.add(&TABLE_GENERATION, [name], generation as f64);
            }
            let counters = self.balancer.counters(*index);
            for (counter, count) in COUNTER_NAMES.into_iter().zip(counters.packets) {
                match counter.strip_prefix("drop_") {
                    Some(reason) => page.add(&LB_SERVICE_DROPS_TOTAL, [name, reason], count as f64),
                    None => page.add(&LB_SERVICE_PACKETS_TOTAL, [name, counter], count as f64),
                }
            }
            page.add(&LB_SERVICE_FORWARDED_BYTES_TOTAL, [name], counters.forwarded_bytes as f64);
        }
        page
    }
}
