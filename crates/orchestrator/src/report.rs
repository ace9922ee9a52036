//! Counters of the daemon, as JSON and as metrics.

use std::net::SocketAddrV4;
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use coreward_metrics::component;
use coreward_metrics::metrics;
use coreward_metrics::snapshot::Snapshot;
use coreward_metrics::table::MetricKind::{Counter, Gauge};
use coreward_metrics::table::{Component, Family, family};
use serde_json::{Value, json};

use crate::engine::{CoreCounters, ServiceCounters};
use crate::intake::IntakeStatus;

metrics! {
    ORCHESTRATE_REQUESTS_TOTAL: Family<2> = family(
        Counter, "coreward_orchestrate_requests_total", &["service", "outcome"], &[Component::Orchestrate],
        "Requests of a service, by its number: received, dropped, rejected, completed, lost",
    );
    ORCHESTRATE_WAITING_REQUESTS: Family<1> = family(
        Gauge, "coreward_orchestrate_waiting_requests", &["service"], &[Component::Orchestrate],
        "Requests of a service that wait for a core",
    );
    ORCHESTRATE_OUTSTANDING_REQUESTS: Family<1> = family(
        Gauge, "coreward_orchestrate_outstanding_requests", &["service"], &[Component::Orchestrate],
        "Requests of a service at cores",
    );
    ORCHESTRATE_INTAKE: Family<1> = family(
        Gauge, "coreward_orchestrate_intake", &["mode"], &[Component::Orchestrate],
        "1 for the way by which requests enter: socket, socket-fallback, af-xdp or af-xdp-zero-copy",
    );
    ORCHESTRATE_INTAKE_DATAGRAMS_TOTAL: Family<1> = family(
        Counter, "coreward_orchestrate_intake_datagrams_total", &["outcome"], &[Component::Orchestrate],
        "Datagrams to services at the interface of AF_XDP, by outcome",
    );
    ORCHESTRATE_WORKERS: Family<0> = family(
        Gauge, "coreward_orchestrate_workers", &[], &[Component::Orchestrate],
        "Workers that are attached",
    );
    ORCHESTRATE_EVENTS_TOTAL: Family<1> = family(
        Counter, "coreward_orchestrate_events_total", &["event"], &[Component::Orchestrate],
        "Events of workers, messages and datagrams, by kind",
    );
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct OrchestratorStatus {
    pub services: Vec<ServiceStatus>,
    pub cores: CoreCounters,
    pub workers: usize,
    pub intake: IntakeStatus,
    /// Number of datagrams that match no service.
    pub unclassified: u64,
    /// Number of responses that a socket did not accept.
    pub unsent: u64,
}

/// Counters and gauges of a service.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ServiceStatus {
    pub listen: SocketAddrV4,
    pub counters: ServiceCounters,
    /// Number of requests that no core can take yet.
    pub waiting: u64,
    pub outstanding: u64,
}

impl ServiceStatus {
    fn requests(&self) -> [(&'static str, u64); 5] {
        let ServiceCounters { received, dropped, rejected, completed, lost } = self.counters;
        [("received", received), ("dropped", dropped), ("rejected", rejected), ("completed", completed), ("lost", lost)]
    }
}

impl OrchestratorStatus {
    fn events(&self) -> [(&'static str, u64); 10] {
        let CoreCounters {
            workers,
            ended,
            stalls,
            hints,
            bad_messages,
            enabled_without_worker,
            bad_feedback,
            damaged_queues: damaged,
        } = self.cores;
        [
            ("workers", workers),
            ("ended", ended),
            ("stalls", stalls),
            ("hints", hints),
            ("bad_messages", bad_messages),
            ("enabled_without_worker", enabled_without_worker),
            ("bad_feedback", bad_feedback),
            ("damaged", damaged),
            ("unclassified", self.unclassified),
            ("unsent", self.unsent),
        ]
    }

    pub fn json(&self) -> Value {
        let service = |service: &ServiceStatus| {
            let mut value = json!({
                "listen": service.listen,
                "waiting": service.waiting,
                "outstanding": service.outstanding,
            });
            service.requests().iter().for_each(|(name, count)| value[*name] = (*count).into());
            value
        };
        let mut value = json!({ "services": self.services.iter().map(service).collect::<Vec<_>>() });
        self.events().iter().for_each(|(name, count)| value[*name] = (*count).into());
        let mut intake = json!({ "mode": self.intake.mode, "fallback": self.intake.fallback_reason });
        self.intake.datagrams.iter().for_each(|(outcome, count)| intake[*outcome] = (*count).into());
        value["intake"] = intake;
        value
    }

    pub fn snapshot(&self) -> Snapshot {
        let mut snapshot = component::base_snapshot(Component::Orchestrate);
        for (number, service) in self.services.iter().enumerate() {
            let number = number.to_string();
            for (outcome, count) in service.requests() {
                snapshot.add(&ORCHESTRATE_REQUESTS_TOTAL, [&number, outcome], count as f64);
            }
            snapshot.add(&ORCHESTRATE_WAITING_REQUESTS, [&number], service.waiting as f64);
            snapshot.add(&ORCHESTRATE_OUTSTANDING_REQUESTS, [&number], service.outstanding as f64);
        }
        snapshot.add(&ORCHESTRATE_WORKERS, [], self.workers as f64);
        snapshot.add(&ORCHESTRATE_INTAKE, [self.intake.mode], 1.0);
        for (outcome, count) in &self.intake.datagrams {
            snapshot.add(&ORCHESTRATE_INTAKE_DATAGRAMS_TOTAL, [outcome], *count as f64);
        }
        for (event, count) in self.events() {
            snapshot.add(&ORCHESTRATE_EVENTS_TOTAL, [event], count as f64);
        }
        snapshot
    }
}

/// Maximum time to wait for a requested status, which the daemon publishes within milliseconds.
const REQUEST_TIMEOUT: Duration = Duration::from_secs(1);

/// Status for other threads, which the daemon collects only on request: with AF_XDP that takes system calls.
#[derive(Debug)]
pub struct SharedStatus {
    state: Mutex<SharedStatusState>,
    published: Condvar,
}

#[derive(Debug)]
struct SharedStatusState {
    status: OrchestratorStatus,
    is_requested: bool,
}

impl SharedStatus {
    /// Returns a shared status that contains `status` until another one is published.
    pub fn new(status: OrchestratorStatus) -> Self {
        Self { state: Mutex::new(SharedStatusState { status, is_requested: false }), published: Condvar::new() }
    }

    fn state(&self) -> MutexGuard<'_, SharedStatusState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Requests a new status and returns it, or the last one after a timeout.
    pub fn request(&self) -> OrchestratorStatus {
        let mut state = self.state();
        state.is_requested = true;
        let waited = self.published.wait_timeout_while(state, REQUEST_TIMEOUT, |state| state.is_requested);
        waited.unwrap_or_else(PoisonError::into_inner).0.status.clone()
    }

    /// Publishes a new status if one was requested.
    pub fn publish(&self, report: impl FnOnce() -> OrchestratorStatus) {
        let mut state = self.state();
        if std::mem::take(&mut state.is_requested) {
            state.status = report();
            self.published.notify_all();
        }
    }
}
