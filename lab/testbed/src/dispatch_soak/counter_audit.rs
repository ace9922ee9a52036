//! Comparison of the request counters (the ledger) of `coreward dispatch` with the kernel's counters.
//!
//! The kernel counts datagrams in both network namespaces (RFC 4113) and those at closed sockets. Together these
//! counters account for every datagram. It was read by a worker, dropped at a full receive buffer, received without a
//! listener, or queued at a killed worker. A request cannot be lost in any other way.

use coreward_load::report::LoadRunReport;
use serde::Serialize;
use serde_json::Value;

use super::fault_injector::FaultCounts;
use super::test_env::{SoakTestEnv, WORKER_COUNT, count_eligible_workers};
use crate::counters::{self, KernelNetworkCounters};

#[derive(Debug)]
pub struct RequestCounterReading {
    dispatch_status: Value,
    client_counters: KernelNetworkCounters,
    server_counters: KernelNetworkCounters,
    purged_datagram_count: u64,
    /// Number of datagrams that workers read but did not answer, such as invalid ones.
    refused_datagram_count: u64,
}

impl RequestCounterReading {
    pub fn read_from_env(env: &SoakTestEnv) -> anyhow::Result<Self> {
        Ok(Self {
            dispatch_status: env.query_dispatch_status()?,
            client_counters: counters::read_kernel_counters(env.testbed().client())?,
            server_counters: counters::read_kernel_counters(env.testbed().server(1)?)?,
            purged_datagram_count: env.read_purged_datagram_count()?,
            refused_datagram_count: env.key_value_server().read_counters()?.iter().map(|worker| worker.refused).sum(),
        })
    }

    /// Describes all signs in these counters of pending requests or of workers that get no requests.
    pub fn describe_pending_requests(&self) -> Vec<String> {
        let mut signs = Vec::new();
        let (outstanding_count, queued_count) = (self.sum_over_workers("outstanding"), self.sum_over_workers("queued"));
        if outstanding_count != 0 || queued_count != 0 {
            signs.push(format!("{outstanding_count} outstanding, {queued_count} queued: {}", self.dispatch_status));
        }
        let eligible_workers = count_eligible_workers(&self.dispatch_status);
        if eligible_workers != Some(WORKER_COUNT) {
            signs.push(format!("{eligible_workers:?} workers are eligible: {}", self.dispatch_status));
        }
        for worker in self.dispatch_status["workers"].as_array().into_iter().flatten() {
            let read_worker_counter = |name: &str| worker[name].as_u64().unwrap_or(u64::MAX);
            if read_worker_counter("dispatched")
                != read_worker_counter("completed").saturating_add(read_worker_counter("abandoned"))
            {
                signs.push(format!("dispatched, but neither completed nor abandoned: {worker}"));
            }
        }
        signs
    }

    /// Returns the sum over all workers of `coreward dispatch`'s counter `counter_name`.
    fn sum_over_workers(&self, counter_name: &str) -> u64 {
        let workers = self.dispatch_status["workers"].as_array().into_iter().flatten();
        workers.filter_map(|worker| worker[counter_name].as_u64()).sum()
    }

    fn dispatch_status_counter(&self, name: &str) -> u64 {
        self.dispatch_status["counters"][name].as_u64().unwrap_or(0)
    }

    fn server_counter(&self, name: &str) -> u64 {
        self.server_counters.get(name).copied().unwrap_or(0)
    }

    fn client_counter(&self, name: &str) -> u64 {
        self.client_counters.get(name).copied().unwrap_or(0)
    }
}

/// Results of one segment of the soak test, computed from the growth of the counters.
#[derive(Debug, Serialize)]
pub struct SoakSegment {
    /// Number of the segment, counted from 0.
    pub number: u32,
    pub fault_counts: FaultCounts,
    /// Number of datagrams that the client sent to the service.
    pub sent_datagrams: u64,
    /// Number of requests that workers read.
    pub read_requests: u64,
    /// Number of requests dropped because a receive buffer was full.
    pub dropped_requests: u64,
    /// Number of requests that arrived when no worker's socket listened.
    pub requests_without_listener: u64,
    /// Number of requests that were still queued at workers when these workers were killed.
    pub purged_requests: u64,
    /// Number of requests that were read but not yet answered when their worker was killed.
    pub requests_killed_in_service: i64,
    /// Number of responses that workers sent.
    pub responses: u64,
    /// Request counters of `coreward dispatch`, or `None` if a fault restarted it, which resets them.
    pub ledger: Option<RequestLedger>,
    pub load_requests: u64,
    /// Number of requests from the load generator that got no response.
    pub load_lost: u64,
    pub violations: Vec<String>,
}

/// Counters of `coreward dispatch` that account for every request in a segment.
#[derive(Debug, Serialize)]
pub struct RequestLedger {
    /// Number of requests that `coreward dispatch` sent to workers.
    pub dispatched: u64,
    /// Number of requests that got a response.
    pub completed: u64,
    /// Number of requests for which `coreward dispatch` has stopped expecting a response.
    pub abandoned: u64,
    /// Number of datagrams from the service's port that answer no pending request.
    pub unmatched: u64,
    /// Number of responses that arrived after their request had been counted as abandoned.
    pub late: i64,
}

impl SoakSegment {
    /// Computes the results of a segment from three readings of the counters, taken in this order. The first is taken
    /// before the segment's requests, and the others at least a second after them. No request is pending at the first
    /// and the last reading.
    pub fn new(
        number: u32,
        reading_before: &RequestCounterReading,
        settled_reading: &RequestCounterReading,
        reading_after: &RequestCounterReading,
        fault_counts: &FaultCounts,
        load_report: &LoadRunReport,
    ) -> Self {
        let server_counter_growth =
            |name: &str| reading_after.server_counter(name) - reading_before.server_counter(name);
        let (read, responses) = (server_counter_growth("UdpInDatagrams"), server_counter_growth("UdpOutDatagrams"));
        let refused_datagrams = reading_after.refused_datagram_count - reading_before.refused_datagram_count;
        let is_ledger_reset = fault_counts.detachments + fault_counts.server_restarts > 0;
        let mut segment = Self {
            number,
            fault_counts: fault_counts.clone(),
            sent_datagrams: reading_after.client_counter("UdpOutDatagrams")
                - reading_before.client_counter("UdpOutDatagrams"),
            read_requests: read,
            dropped_requests: server_counter_growth("UdpRcvbufErrors") + server_counter_growth("UdpMemErrors"),
            requests_without_listener: server_counter_growth("UdpNoPorts"),
            purged_requests: reading_after.purged_datagram_count - reading_before.purged_datagram_count,
            requests_killed_in_service: read as i64 - responses as i64 - refused_datagrams as i64,
            responses,
            ledger: (!is_ledger_reset).then(|| RequestLedger::new(reading_before, reading_after, fault_counts)),
            load_requests: load_report.requests,
            load_lost: load_report.lost,
            violations: Vec::new(),
        };
        settled_reading
            .describe_pending_requests()
            .into_iter()
            .for_each(|violation| segment.record_violation(&violation));
        segment.check_datagram_counts();
        segment.check_request_ledger(reading_before, reading_after);
        segment
    }

    /// Returns a text of one line with the results of the segment.
    pub fn summary_line(&self) -> String {
        let Self {
            sent_datagrams: sent,
            read_requests: read,
            dropped_requests: dropped,
            requests_without_listener: without_listener,
            purged_requests: purged,
            requests_killed_in_service: killed_in_service,
            load_lost,
            ..
        } = self;
        format!(
            "{sent} datagrams: {read} read ({killed_in_service} of them by workers killed then), {dropped} dropped, \
             {purged} queued at killed workers, {without_listener} reached no worker; {load_lost} lost; {} violations",
            self.violations.len()
        )
    }

    fn record_violation_unless(&mut self, is_satisfied: bool, to_description: impl FnOnce() -> String) {
        if !is_satisfied {
            self.record_violation(&to_description());
        }
    }

    fn record_violation(&mut self, description: &str) {
        self.violations.push(format!("segment {}: {description}", self.number));
    }

    /// Checks that each datagram sent is in one of the counts, and that only faults caused losses.
    fn check_datagram_counts(&mut self) {
        let accounted_datagram_count =
            self.read_requests + self.dropped_requests + self.requests_without_listener + self.purged_requests;
        let (sent_datagrams, fault_counts) = (self.sent_datagrams, self.fault_counts.clone());
        let (dropped_datagrams, without_listener, purged_datagrams) =
            (self.dropped_requests, self.requests_without_listener, self.purged_requests);
        let killed_worker_count = fault_counts.worker_kills + fault_counts.server_restarts * WORKER_COUNT;
        // One more datagram per killed worker may be missing, because it arrived while the socket was being closed.
        let is_accounted_for =
            (accounted_datagram_count..=accounted_datagram_count + killed_worker_count).contains(&sent_datagrams);
        self.record_violation_unless(is_accounted_for, || {
            format!("{sent_datagrams} datagrams were sent, {accounted_datagram_count} are accounted for")
        });
        self.record_violation_unless(dropped_datagrams == 0 || fault_counts.floods > 0, || {
            format!("{dropped_datagrams} datagrams dropped without a flood")
        });
        self.record_violation_unless(without_listener == 0 || fault_counts.server_restarts > 0, || {
            format!("{without_listener} reached no worker without a restart")
        });
        self.record_violation_unless(purged_datagrams == 0 || killed_worker_count > 0, || {
            format!("{purged_datagrams} were purged without a kill")
        });
        // A worker counts a request after reading it and again after answering it. A kill may come before either count.
        let killed_in_service = self.requests_killed_in_service;
        let possible_range = -(killed_worker_count as i64)..=killed_worker_count as i64;
        self.record_violation_unless(possible_range.contains(&killed_in_service), || {
            format!("{killed_in_service} requests were read and not answered")
        });
        let (lost_requests, explained_losses) =
            (self.load_lost, dropped_datagrams + without_listener + purged_datagrams + killed_worker_count);
        self.record_violation_unless(lost_requests <= explained_losses, || {
            format!("{lost_requests} requests of the load are lost, {explained_losses} with a reason")
        });
    }

    fn check_request_ledger(&mut self, reading_before: &RequestCounterReading, reading_after: &RequestCounterReading) {
        let Some(ledger) = &self.ledger else { return };
        let (dispatched_count, response_count) = (ledger.dispatched, ledger.completed + ledger.unmatched);
        let (arrived_datagram_count, fault_counts) =
            (self.read_requests + self.dropped_requests + self.purged_requests, self.fault_counts.clone());
        let sent_response_count = self.responses + fault_counts.spoofed_responses + fault_counts.answered_by_others;
        let (abandoned_count, late_count) = (ledger.abandoned, ledger.late);
        let uncounted_request_counts = ["untracked", "no_worker"]
            .map(|name| reading_after.dispatch_status_counter(name) - reading_before.dispatch_status_counter(name));
        let ledger_agrees_with_workers =
            (arrived_datagram_count..=arrived_datagram_count + fault_counts.worker_kills).contains(&dispatched_count);
        self.record_violation_unless(ledger_agrees_with_workers, || {
            format!("{dispatched_count} dispatched, the workers' sockets were given {arrived_datagram_count}")
        });
        self.record_violation_unless(response_count == sent_response_count, || {
            format!("{response_count} completed or unmatched, {sent_response_count} responses were sent")
        });
        self.record_violation_unless(uncounted_request_counts == [0, 0], || {
            format!("{uncounted_request_counts:?} untracked, without a worker")
        });
        self.record_violation_unless(abandoned_count >= self.dropped_requests + self.purged_requests, || {
            format!("{abandoned_count} abandoned")
        });
        self.record_violation_unless(late_count >= 0, || format!("{late_count} responses late"));
    }
}

impl RequestLedger {
    fn new(
        reading_before: &RequestCounterReading,
        reading_after: &RequestCounterReading,
        fault_counts: &FaultCounts,
    ) -> Self {
        let worker_counter_growth =
            |name: &str| reading_after.sum_over_workers(name) - reading_before.sum_over_workers(name);
        let unmatched_growth =
            reading_after.dispatch_status_counter("unmatched") - reading_before.dispatch_status_counter("unmatched");
        Self {
            dispatched: worker_counter_growth("dispatched"),
            completed: worker_counter_growth("completed"),
            abandoned: worker_counter_growth("abandoned"),
            unmatched: unmatched_growth,
            late: unmatched_growth as i64 - fault_counts.spoofed_responses as i64,
        }
    }
}
