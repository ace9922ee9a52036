//! The reports that the agent sends to the controller.

use std::collections::HashMap;
use std::time::{Duration, SystemTime};

use coreward_dataplane::clock::monotonic_ns;
use coreward_dataplane::server;
use coreward_intf as intf;
use coreward_model::load::CoreBusyTimeReadings;
use coreward_wire::{AgentReport, AgentReportDetails, ReportedRss, shrink_oversized_report, v1};

use super::Agent;
use crate::report_state::SentReportState;
use crate::steering::ConnectionSteering;
use crate::{connections, dispatch};

/// Lifetime of a report, as a number of report intervals.
const REPORT_LIFETIME_IN_INTERVALS: u32 = 5;
/// Minimum lifetime of a report, so that reports do not expire when a busy machine delays the next one.
const MIN_REPORT_LIFETIME: Duration = Duration::from_millis(500);

impl Agent {
    /// Returns the next report, without the parts that were already sent according to `report_state`. Returns `None`
    /// while the load of the cores is unknown.
    pub fn build_next_report(
        &mut self,
        report_state: &SentReportState,
        extra_warnings: &[String],
    ) -> Option<v1::Report> {
        let measurement_time_ns = self.read_busy_times_and_clock()?;
        self.report_sequence_number += 1;
        // This does not wait for maintenance, because packets for a server are dropped until its MAC address is known.
        self.daisy_chain.apply_mac_address_changes(&mut self.bpf_programs);
        self.connection_counter.store_result_and_start_count(self.applied_configuration.as_ref());
        let rss_generation = self.rss_manager.settings_change_count();
        let changed_rss = (rss_generation != report_state.sent_rss_generation()).then(|| ReportedRss {
            source: self.rss_manager.settings_source_name().to_owned(),
            rss: self.rss_manager.known_rss().cloned(),
        });
        let counters = self.bpf_programs.counters();
        let warnings = self.own_and_extra_warnings(extra_warnings);
        let needs_details = report_state.next_report_needs_details(self.applied_configuration.as_ref(), &warnings);
        let details = needs_details.then(|| self.build_report_details(&counters, warnings));
        let report = AgentReport {
            sent_at: SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default(),
            time_to_live: (self.report_interval() * REPORT_LIFETIME_IN_INTERVALS).max(MIN_REPORT_LIFETIME),
            readings: CoreBusyTimeReadings {
                report_sequence_number: self.report_sequence_number,
                measured_at_ns: measurement_time_ns,
                busy_ns_by_core: self.core_busy_ns.clone(),
            },
            open_connection_count: connections::open_tcp_connection_count(),
            rss_generation,
            rss: changed_rss,
            rss_matched_syn_count: counters[intf::SERVER_COUNTER_RSS_MATCHED as usize],
            rss_mismatched_syn_count: counters[intf::SERVER_COUNTER_RSS_MISMATCHED as usize],
            configuration_generation: self.confirmed_config_generation(),
            details,
        };
        Some(shrink_oversized_report(report.into()))
    }

    /// Reads the cores' busy times, and logs when they become unknown or known again. Returns the time of the reading
    /// in ns, or `None` if the busy times are unknown.
    fn read_busy_times_and_clock(&mut self) -> Option<u64> {
        self.core_busy_ns.clear();
        let measurement_time_ns = monotonic_ns();
        let load_read_error =
            self.load_source.append_busy_times(&mut self.core_busy_ns).err().map(|error| format!("{error:#}"));
        if load_read_error != self.load_read_error {
            match &load_read_error {
                Some(error_text) => tracing::warn!(
                    event = "load-unknown",
                    error = error_text,
                    "the agent cannot read its cores' loads and sends no load reports until it can"
                ),
                None => tracing::info!(
                    event = "load-known",
                    "the agent can read its cores' loads again and sends load reports"
                ),
            }
            self.load_read_error = load_read_error;
        }
        self.load_read_error.is_none().then_some(measurement_time_ns)
    }

    fn build_report_details(
        &self,
        counters: &[u64; server::SERVER_COUNTER_COUNT],
        warnings: Vec<String>,
    ) -> AgentReportDetails {
        AgentReportDetails {
            counters: [counters_by_name(counters, &self.steering), self.decapsulator.named_counters()].concat(),
            warnings,
            dispatched_services: self.dispatcher.as_ref().map(dispatch::dispatched_service_reports).unwrap_or_default(),
            counted_connections: self.connection_counter.newest_counted_connections(),
            rejected_updates: self.rejected_updates.clone(),
        }
    }

    /// Returns all warnings for `coreward status`. They include `extra_warnings`, which are about the connection to the
    /// controller.
    pub(super) fn own_and_extra_warnings(&self, extra_warnings: &[String]) -> Vec<String> {
        let describe_rejected_update = |rejected_update: &v1::RejectedUpdate| {
            format!(
                "configuration {} cannot be used (service {:?}): {}",
                rejected_update.generation, rejected_update.service, rejected_update.reason
            )
        };
        let rejection_warnings: Vec<String> = self.rejected_updates.iter().map(describe_rejected_update).collect();
        [&self.maintenance_warnings[..], extra_warnings, &rejection_warnings].concat()
    }
}

pub(super) fn counters_by_name(
    counters: &[u64; server::SERVER_COUNTER_COUNT],
    steering: &ConnectionSteering,
) -> Vec<(String, u64)> {
    let server_counters = server::COUNTER_NAMES.into_iter().zip(*counters);
    // Values are sums over all services. If two programs used the same counter name, their values would be added up.
    let mut value_by_name: HashMap<&str, u64> = HashMap::new();
    server_counters
        .chain(steering.named_counter_totals())
        .for_each(|(name, value)| *value_by_name.entry(name).or_default() += value);
    value_by_name.into_iter().map(|(name, value)| (name.to_owned(), value)).collect()
}
