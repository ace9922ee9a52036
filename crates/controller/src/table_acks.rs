//! Active tables at load balancers, and the latency from the triggering report until a table is active.

use std::collections::{HashMap, VecDeque};

use coreward_metrics::latency_histogram::LatencyHistogram;
use coreward_wire::ServiceIndex;

use super::ClockReadings;
use super::service::TableTrigger;

/// Maximum number of a service's tables that wait for confirmations. The latency of slower confirmations is not
/// measured.
const MAX_UNCONFIRMED_TABLES_PER_SERVICE: usize = 1024;

/// Triggers of the newest tables, and histograms of the latencies until load balancers confirm the tables.
#[derive(Debug, Default)]
pub struct TableAcks {
    unconfirmed_tables: HashMap<ServiceIndex, VecDeque<(u64, TableTrigger)>>,
    /// Generation of the newest confirmed table, by the load balancer's session and the service.
    confirmed_generation_by_session_service: HashMap<(u64, ServiceIndex), u64>,
    /// Histogram of the time from a report's arrival to each load balancer's confirmation of the table that contains
    /// it.
    pub latency_since_report_receipt: LatencyHistogram,
    /// Histogram of the time from the sending of a report, by the agent's wall clock, to each confirmation of the table
    /// that contains it.
    pub latency_since_report_sent: LatencyHistogram,
}

impl TableAcks {
    pub fn record_unconfirmed_table(&mut self, service: ServiceIndex, generation: u64, trigger: TableTrigger) {
        let unconfirmed_tables = self.unconfirmed_tables.entry(service).or_default();
        if unconfirmed_tables.len() == MAX_UNCONFIRMED_TABLES_PER_SERVICE {
            unconfirmed_tables.pop_front();
        }
        unconfirmed_tables.push_back((generation, trigger));
    }

    /// Records that a load balancer has activated the table. The latency is also measured for earlier tables that this
    /// one has replaced before they were confirmed.
    pub fn record_confirmation(&mut self, session: u64, service: ServiceIndex, generation: u64, now: ClockReadings) {
        let Some(unconfirmed_tables) = self.unconfirmed_tables.get(&service) else { return };
        let previous_generation = self.confirmed_generation_by_session_service.insert((session, service), generation);
        // The first confirmation in a session may be for an earlier table.
        let Some(old_generation) = previous_generation else { return };
        let first_confirmed_index =
            unconfirmed_tables.partition_point(|(table_generation, _)| *table_generation <= old_generation);
        for (_, trigger) in unconfirmed_tables
            .range(first_confirmed_index..)
            .take_while(|(table_generation, _)| *table_generation <= generation)
        {
            if trigger.is_load_change {
                self.latency_since_report_receipt
                    .observe_latency(now.monotonic_time.saturating_sub(trigger.received_at));
            }
            if let Some(sent_at) = trigger.sent_at {
                self.latency_since_report_sent.observe_latency(now.wall_time.saturating_sub(sent_at));
            }
        }
    }

    pub fn forget_session(&mut self, session: u64) {
        self.confirmed_generation_by_session_service
            .retain(|(confirming_session, _), _| *confirming_session != session);
    }

    pub fn retain_fleet_services(&mut self, is_in_fleet: impl Fn(ServiceIndex) -> bool) {
        self.unconfirmed_tables.retain(|service, _| is_in_fleet(*service));
        self.confirmed_generation_by_session_service.retain(|(_, service), _| is_in_fleet(*service));
    }
}
