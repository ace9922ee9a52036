//! The load balancer's metrics.

use std::time::Duration;

use coreward_dataplane::lb::{self, COUNTER_NAMES};
use coreward_metrics::message_metrics;
use coreward_metrics::message_metrics::{CONFIGURATION_GENERATION, TABLE_GENERATION};
use coreward_metrics::metric_declarations::MetricKind::{Counter, Gauge};
use coreward_metrics::metric_declarations::{
    Component, HistogramMetric, MetricFamily, declare_family, declare_histogram,
};
use coreward_metrics::metrics;
use coreward_metrics::snapshot::MetricsSnapshot;
use coreward_wire::{Service, ServiceIndex, v1};

use super::Forwarder;

metrics! {
    LB_SEND_DROPS_TOTAL: MetricFamily<0> = declare_family(
        Counter, "coreward_lb_send_drops_total", &[], &[Component::Lb],
        "Frames sent by XDP that the driver dropped, by its counters",
    );
    LB_MASKED_SERVERS: MetricFamily<0> = declare_family(
        Gauge, "coreward_lb_masked_servers", &[], &[Component::Lb],
        "Servers that this load balancer masks because its own checks find them down",
    );
    LB_EXPIRED_TABLES: MetricFamily<0> = declare_family(
        Gauge, "coreward_lb_expired_tables", &[], &[Component::Lb],
        "Services with an expired placement table: this load balancer places by its own counts",
    );
    LB_ANNOUNCED_VIPS: MetricFamily<0> = declare_family(
        Gauge, "coreward_lb_announced_vips", &[], &[Component::Lb],
        "VIPs announced to the routers, with [announce]",
    );
    LB_SERVICE_PACKETS_TOTAL: MetricFamily<2> = declare_family(
        Counter, "coreward_lb_service_packets_total", &["service", "decision"], &[Component::Lb],
        "Packets of a service forwarded or passed on, by decision",
    );
    LB_SERVICE_DROPS_TOTAL: MetricFamily<2> = declare_family(
        Counter, "coreward_lb_service_drops_total", &["service", "reason"], &[Component::Lb],
        "Dropped packets of a service, by reason",
    );
    LB_SERVICE_FORWARDED_BYTES_TOTAL: MetricFamily<1> = declare_family(
        Counter, "coreward_lb_service_forwarded_bytes_total", &["service"], &[Component::Lb],
        "Bytes of a service's forwarded frames",
    );
    LB_SERVICE_HANDSHAKES_FAIL: MetricFamily<1> = declare_family(
        Gauge, "coreward_lb_service_handshakes_fail", &["service"], &[Component::Lb],
        "1: most new TCP connections do not become established",
    );
    LB_TABLE_INSTALL_SECONDS: HistogramMetric = declare_histogram(
        "coreward_lb_table_install_seconds", &[Component::Lb],
        "Time from the arrival of a table to the table in force",
    );
}

impl Forwarder {
    pub fn record_table_install_latency(&mut self, latency: Duration) {
        self.table_install_latency.observe_latency(latency);
    }

    /// Returns the current value of every metric. `state` is the daemon's state message.
    pub fn metrics_snapshot(&self, state: &v1::LoadBalancerState) -> MetricsSnapshot {
        let mut snapshot = message_metrics::base_metrics_snapshot(Component::Lb);
        snapshot.add_value(&CONFIGURATION_GENERATION, [], self.configuration.confirmed_generation as f64);
        message_metrics::add_load_balancer_metrics(&mut snapshot, &self.own_name, state);
        snapshot.add_histogram(&LB_TABLE_INSTALL_SECONDS, self.table_install_latency);
        snapshot.add_value(&LB_SEND_DROPS_TOTAL, [], self.symptoms.send_drops_total as f64);
        snapshot.add_value(&LB_MASKED_SERVERS, [], self.masked_targets.len() as f64);
        snapshot.add_value(&LB_EXPIRED_TABLES, [], self.table_ages.services_with_expired_tables().len() as f64);
        if let Some(announced_count) = self.announced_vips.vip_count {
            snapshot.add_value(&LB_ANNOUNCED_VIPS, [], announced_count as f64);
        }
        let health_by_service: Vec<(ServiceIndex, v1::ServerHealth)> = self
            .health_checks
            .checked_server_results()
            .map(|(service, _, check_result)| (service, (&check_result).into()))
            .collect();
        for (service, _) in self.services_by_index.values().filter(|(service, _)| service.health_check.is_some()) {
            let health_of_service = health_by_service
                .iter()
                .filter(|(index, _)| *index == service.index)
                .map(|(_, server_health)| server_health);
            message_metrics::add_health_check_metrics(&mut snapshot, &service.name, health_of_service);
        }
        for (service, lb_service_index) in self.services_by_index.values() {
            self.add_service_metrics(&mut snapshot, service, *lb_service_index);
        }
        snapshot
    }

    fn add_service_metrics(
        &self,
        snapshot: &mut MetricsSnapshot,
        service: &Service,
        lb_service_index: lb::ServiceIndex,
    ) {
        let service_name = service.name.as_str();
        let is_failing = self.symptoms.services_with_failing_handshakes.contains(&service.index);
        snapshot.add_value(&LB_SERVICE_HANDSHAKES_FAIL, [service_name], f64::from(u8::from(is_failing)));
        if let Some(generation) = self.load_balancer.placement_table_generation(lb_service_index) {
            snapshot.add_value(&TABLE_GENERATION, [service_name], generation as f64);
        }
        let counters = self.load_balancer.service_counters(lb_service_index);
        for (counter, count) in COUNTER_NAMES.into_iter().zip(counters.packets_by_outcome) {
            match counter.strip_prefix("drop_") {
                Some(reason) => snapshot.add_value(&LB_SERVICE_DROPS_TOTAL, [service_name, reason], count as f64),
                None => snapshot.add_value(&LB_SERVICE_PACKETS_TOTAL, [service_name, counter], count as f64),
            }
        }
        snapshot.add_value(&LB_SERVICE_FORWARDED_BYTES_TOTAL, [service_name], counters.forwarded_bytes as f64);
    }
}
