//! Counts of the programs, as text and as JSON.

use std::fmt::Write as _;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;

use coreward_dataplane::dispatch::{self, COUNTER_NAMES, POLL_INTERVAL, RequestLedger, WorkerCounts};
use coreward_wire::v1;
use serde_json::{Value, json};

/// Time since the last poll after which the status shows a warning.
const MAX_POLL_DELAY: Duration = POLL_INTERVAL.saturating_mul(20);

#[derive(Debug, Clone)]
pub struct ServiceStatus {
    pub listen: SocketAddr,
    pub policy: &'static str,
    pub since_last_poll: Duration,
    pub workers: Vec<WorkerCounts>,
    pub counters: Vec<(&'static str, u64)>,
}

impl From<&RequestLedger> for ServiceStatus {
    fn from(ledger: &RequestLedger) -> Self {
        let (listen, policy) = ledger.service();
        Self {
            listen,
            policy,
            since_last_poll: ledger.since_last_poll(),
            workers: ledger.workers(),
            counters: COUNTER_NAMES.into_iter().zip(ledger.counters()).collect(),
        }
    }
}

impl From<ServiceStatus> for v1::DispatchedService {
    fn from(status: ServiceStatus) -> Self {
        Self {
            listen: status.listen.to_string(),
            policy: status.policy.to_owned(),
            workers: status.workers.iter().map(worker_message).collect(),
            counters: status.counters.into_iter().map(|(name, count)| (name.to_owned(), count)).collect(),
        }
    }
}

fn worker_message(counts: &WorkerCounts) -> v1::DispatchedWorker {
    v1::DispatchedWorker {
        worker: counts.slot,
        pid: counts.pid,
        outstanding: counts.outstanding,
        outstanding_work_ns: counts.outstanding_work.as_nanos() as u64,
        queued: counts.queued,
        dispatched: counts.dispatched,
        completed: counts.completed,
        abandoned: counts.abandoned,
        dropped: counts.dropped.into(),
        eligible: counts.is_eligible,
    }
}

/// Returns the status of every service with pins in these directories. Fails when one cannot be read.
pub fn read_pinned_status(pins: &[PathBuf]) -> anyhow::Result<Vec<ServiceStatus>> {
    pins.iter().map(|directory| Ok(ServiceStatus::from(&dispatch::pinned_ledger(directory)?))).collect()
}

pub fn format_status(services: &[ServiceStatus]) -> String {
    let mut text = String::new();
    if services.is_empty() {
        text.push_str("no service is dispatched\n");
    }
    for service in services {
        let _ = writeln!(text, "{}: {}", service.listen, service.policy);
        if service.since_last_poll > MAX_POLL_DELAY {
            let _ = writeln!(
                text,
                "no daemon has maintained it for {:.0?}: is coreward dispatch or the agent running?",
                service.since_last_poll
            );
        }
        let _ = writeln!(text, "{}", worker_table(&service.workers));
        let counters: Vec<String> = service.counters.iter().map(|(name, count)| format!("{name} {count}")).collect();
        let _ = writeln!(text, "{}", counters.join(", "));
    }
    text
}

fn worker_table(workers: &[WorkerCounts]) -> comfy_table::Table {
    let mut table = comfy_table::Table::new();
    table.load_style(comfy_table::presets::ASCII_MARKDOWN).set_header([
        "worker",
        "pid",
        "outstanding",
        "work us",
        "queued",
        "dispatched",
        "completed",
        "abandoned",
        "dropped",
        "eligible",
    ]);
    for worker in workers {
        table.add_row([
            worker.slot.to_string(),
            worker.pid.to_string(),
            worker.outstanding.to_string(),
            worker.outstanding_work.as_micros().to_string(),
            worker.queued.to_string(),
            worker.dispatched.to_string(),
            worker.completed.to_string(),
            worker.abandoned.to_string(),
            worker.dropped.to_string(),
            if worker.is_eligible { "yes" } else { "no" }.to_owned(),
        ]);
    }
    table
}

pub fn json(services: &[ServiceStatus]) -> Value {
    json!({ "services": services.iter().map(service_json).collect::<Vec<_>>() })
}

fn service_json(service: &ServiceStatus) -> Value {
    let counters: serde_json::Map<String, Value> =
        service.counters.iter().map(|(name, count)| ((*name).to_owned(), json!(count))).collect();
    json!({
        "listen": service.listen.to_string(),
        "policy": service.policy,
        "since_last_poll_ms": service.since_last_poll.as_millis() as u64,
        "workers": service.workers.iter().map(worker_json).collect::<Vec<_>>(),
        "counters": counters,
    })
}

fn worker_json(worker: &WorkerCounts) -> Value {
    json!({
        "worker": worker.slot,
        "pid": worker.pid,
        "outstanding": worker.outstanding,
        "outstanding_work_us": worker.outstanding_work.as_secs_f64() * 1e6,
        "queued": worker.queued,
        "dispatched": worker.dispatched,
        "completed": worker.completed,
        "abandoned": worker.abandoned,
        "dropped": worker.dropped,
        "eligible": worker.is_eligible,
    })
}
