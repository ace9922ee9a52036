//! Metrics of the load balancer.

use std::time::Duration;

use coreward_dataplane::lb::COUNTER_NAMES;
use coreward_metrics::component;
use coreward_metrics::snapshot::Snapshot;
use coreward_metrics::table::Component;
use coreward_wire::{ServiceIndex, v1};

use super::Forwarder;

impl Forwarder {
    /// Records the latency of a table's installation.
    pub fn record_install_time(&mut self, took: Duration) {
        self.table_to_kernel.observe(took);
    }

    /// Returns all metrics. `state`: of the whole daemon.
    pub fn metrics(&self, state: &v1::LoadBalancerState) -> Snapshot {
        let mut page = component::begin(Component::Lb);
        page.add("coreward_configuration_generation", &[], self.confirmed as f64);
        component::load_balancer(&mut page, &self.name, state);
        page.add_latencies("coreward_lb_table_install_seconds", self.table_to_kernel);
        page.add("coreward_lb_send_drops_total", &[], self.symptoms.send_drops_total as f64);
        page.add("coreward_lb_masked_servers", &[], self.masked.len() as f64);
        page.add("coreward_lb_expired_tables", &[], self.table_ages.expired().len() as f64);
        if let Some(announced) = self.announced {
            page.add("coreward_lb_announced_vips", &[], announced as f64);
        }
        let checked: Vec<(ServiceIndex, v1::ServerHealth)> =
            self.health.results().map(|(service, _, checked)| (service, (&checked).into())).collect();
        for (service, _) in self.services.values().filter(|(service, _)| service.check.is_some()) {
            let of_service = checked.iter().filter(|(index, _)| *index == service.index).map(|(_, checked)| checked);
            component::health_checks(&mut page, &service.name, of_service);
        }
        for (number, (service, index)) in &self.services {
            let name = service.name.as_str();
            let fail = self.symptoms.handshakes_fail.contains(number);
            page.add("coreward_lb_service_handshakes_fail", &[name], f64::from(u8::from(fail)));
            if let Some(generation) = self.balancer.table_generation(*index) {
                page.add("coreward_table_generation", &[name], generation as f64);
            }
            let counters = self.balancer.counters(*index);
            for (counter, count) in COUNTER_NAMES.into_iter().zip(counters.packets) {
                match counter.strip_prefix("drop_") {
                    Some(reason) => page.add("coreward_lb_service_drops_total", &[name, reason], count as f64),
                    None => page.add("coreward_lb_service_packets_total", &[name, counter], count as f64),
                }
            }
            page.add("coreward_lb_service_forwarded_bytes_total", &[name], counters.forwarded_bytes as f64);
        }
        page
    }
}
