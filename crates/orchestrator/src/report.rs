//! Reports the daemon's counters as JSON and as metrics.

use std::net::SocketAddrV4;
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use coreward_metrics::message_metrics;
use coreward_metrics::metric_declarations::MetricKind::{Counter, Gauge};
use coreward_metrics::metric_declarations::{Component, MetricFamily, declare_family};
use coreward_metrics::metrics;
use coreward_metrics::snapshot::MetricsSnapshot;
use serde_json::{Value, json};

use crate::dispatch_engine::{CoreRequestCounters, ServiceRequestCounters};
use crate::intake::RequestIntakeStatus;

metrics! {
    ORCHESTRATE_REQUESTS_TOTAL: MetricFamily<2> = declare_family(
        Counter, "coreward_orchestrate_requests_total", &["service", "outcome"], &[Component::Orchestrate],
        "Requests of a service, by its number: received, dropped, rejected, completed, lost",
    );
    ORCHESTRATE_WAITING_REQUESTS: MetricFamily<1> = declare_family(
        Gauge, "coreward_orchestrate_waiting_requests", &["service"], &[Component::Orchestrate],
        "Requests of a service that wait for a core",
    );
    ORCHESTRATE_OUTSTANDING_REQUESTS: MetricFamily<1> = declare_family(
        Gauge, "coreward_orchestrate_outstanding_requests", &["service"], &[Component::Orchestrate],
        "Requests of a service at cores",
    );
    ORCHESTRATE_INTAKE: MetricFamily<1> = declare_family(
        Gauge, "coreward_orchestrate_intake", &["mode"], &[Component::Orchestrate],
        "1 for the way by which requests enter: socket, socket-fallback, af-xdp or af-xdp-zero-copy",
    );
    ORCHESTRATE_INTAKE_DATAGRAMS_TOTAL: MetricFamily<1> = declare_family(
        Counter, "coreward_orchestrate_intake_datagrams_total", &["outcome"], &[Component::Orchestrate],
        "Datagrams to services at the interface of AF_XDP, by outcome",
    );
    ORCHESTRATE_WORKERS: MetricFamily<0> = declare_family(
        Gauge, "coreward_orchestrate_workers", &[], &[Component::Orchestrate],
        "Workers that are attached",
    );
    ORCHESTRATE_EVENTS_TOTAL: MetricFamily<1> = declare_family(
        Counter, "coreward_orchestrate_events_total", &["event"], &[Component::Orchestrate],
        "Events of workers, messages and datagrams, by kind",
    );
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct OrchestratorStatus {
    pub service_statuses: Vec<OrchestratedServiceStatus>,
    pub core_counters: CoreRequestCounters,
    pub attached_worker_count: usize,
    pub intake_status: RequestIntakeStatus,
    /// Number of datagrams that matched no service.
    pub unclassified_datagrams: u64,
    /// Number of responses that the kernel did not accept for sending.
    pub unsent_responses: u64,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct OrchestratedServiceStatus {
    pub listen_address: SocketAddrV4,
    pub counters: ServiceRequestCounters,
    /// Number of requests that wait because no core can take them yet.
    pub waiting_requests: u64,
    pub outstanding_requests: u64,
}

impl OrchestratedServiceStatus {
    fn request_counts_by_state(&self) -> [(&'static str, u64); 5] {
        let ServiceRequestCounters {
            received_requests,
            dropped_requests,
            rejected_requests,
            completed_requests,
            lost_requests,
        } = self.counters;
        [
            ("received", received_requests),
            ("dropped", dropped_requests),
            ("rejected", rejected_requests),
            ("completed", completed_requests),
            ("lost", lost_requests),
        ]
    }
}

impl OrchestratorStatus {
    fn event_counts(&self) -> [(&'static str, u64); 10] {
        let CoreRequestCounters {
            accepted_workers: workers,
            ended_workers,
            worker_stalls: stalls,
            sent_hints: hints,
            invalid_messages: bad_messages,
            enable_messages_without_worker: enabled_without_worker,
            rejected_feedback: bad_feedback,
            damaged_queues: damaged,
        } = self.core_counters;
        [
            ("workers", workers),
            ("ended", ended_workers),
            ("stalls", stalls),
            ("hints", hints),
            ("bad_messages", bad_messages),
            ("enabled_without_worker", enabled_without_worker),
            ("bad_feedback", bad_feedback),
            ("damaged", damaged),
            ("unclassified", self.unclassified_datagrams),
            ("unsent", self.unsent_responses),
        ]
    }

    pub fn to_json(&self) -> Value {
        let service_to_json = |service: &OrchestratedServiceStatus| {
            let mut service_json = json!({
                "listen": service.listen_address,
                "waiting": service.waiting_requests,
                "outstanding": service.outstanding_requests,
            });
            service.request_counts_by_state().iter().for_each(|(name, count)| service_json[*name] = (*count).into());
            service_json
        };
        let mut status_json =
            json!({ "services": self.service_statuses.iter().map(service_to_json).collect::<Vec<_>>() });
        self.event_counts().iter().for_each(|(name, count)| status_json[*name] = (*count).into());
        let mut intake_json =
            json!({ "mode": self.intake_status.mode_name, "fallback": self.intake_status.fallback_reason });
        self.intake_status
            .datagram_counters
            .iter()
            .for_each(|(outcome, count)| intake_json[*outcome] = (*count).into());
        status_json["intake"] = intake_json;
        status_json
    }

    pub fn metrics_snapshot(&self) -> MetricsSnapshot {
        let mut snapshot = message_metrics::base_metrics_snapshot(Component::Orchestrate);
        for (number, service) in self.service_statuses.iter().enumerate() {
            let service_number = number.to_string();
            for (outcome, count) in service.request_counts_by_state() {
                snapshot.add_value(&ORCHESTRATE_REQUESTS_TOTAL, [&service_number, outcome], count as f64);
            }
            snapshot.add_value(&ORCHESTRATE_WAITING_REQUESTS, [&service_number], service.waiting_requests as f64);
            snapshot.add_value(
                &ORCHESTRATE_OUTSTANDING_REQUESTS,
                [&service_number],
                service.outstanding_requests as f64,
            );
        }
        snapshot.add_value(&ORCHESTRATE_WORKERS, [], self.attached_worker_count as f64);
        snapshot.add_value(&ORCHESTRATE_INTAKE, [self.intake_status.mode_name], 1.0);
        for (outcome, count) in &self.intake_status.datagram_counters {
            snapshot.add_value(&ORCHESTRATE_INTAKE_DATAGRAMS_TOTAL, [outcome], *count as f64);
        }
        for (event, count) in self.event_counts() {
            snapshot.add_value(&ORCHESTRATE_EVENTS_TOTAL, [event], count as f64);
        }
        snapshot
    }
}

/// Maximum time to wait for a requested status. The daemon usually publishes it within milliseconds.
const STATUS_REQUEST_TIMEOUT: Duration = Duration::from_secs(1);

/// Status that the daemon shares with other threads. The daemon collects it only on request, because with AF_XDP this
/// takes system calls.
#[derive(Debug)]
pub struct SharedOrchestratorStatus {
    shared_state: Mutex<SharedOrchestratorStatusState>,
    status_published: Condvar,
}

#[derive(Debug)]
struct SharedOrchestratorStatusState {
    last_status: OrchestratorStatus,
    is_status_requested: bool,
}

impl SharedOrchestratorStatus {
    pub fn new(status: OrchestratorStatus) -> Self {
        Self {
            shared_state: Mutex::new(SharedOrchestratorStatusState { last_status: status, is_status_requested: false }),
            status_published: Condvar::new(),
        }
    }

    fn lock_state(&self) -> MutexGuard<'_, SharedOrchestratorStatusState> {
        self.shared_state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Requests a new status and returns it, or returns the previous status after a timeout.
    pub fn request_status(&self) -> OrchestratorStatus {
        let mut state = self.lock_state();
        state.is_status_requested = true;
        let wait_result =
            self.status_published.wait_timeout_while(state, STATUS_REQUEST_TIMEOUT, |state| state.is_status_requested);
        wait_result.unwrap_or_else(PoisonError::into_inner).0.last_status.clone()
    }

    /// Publishes a new status if one was requested.
    pub fn publish_if_requested(&self, make_status: impl FnOnce() -> OrchestratorStatus) {
        let mut state = self.lock_state();
        if std::mem::take(&mut state.is_status_requested) {
            state.last_status = make_status();
            self.status_published.notify_all();
        }
    }
}
