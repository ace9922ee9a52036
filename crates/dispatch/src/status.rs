//! Shows the BPF programs' counters, as text and as JSON.

use std::fmt::Write as _;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;

use coreward_dataplane::dispatch::{
    self, COUNTER_NAMES, RequestLedger, WORKER_QUEUE_POLL_INTERVAL, WorkerRequestCounts,
};
use coreward_wire::v1;
use serde_json::{Value, json};

/// Time since the last poll after which the status shows a warning.
const MAX_QUEUE_POLL_DELAY: Duration = WORKER_QUEUE_POLL_INTERVAL.saturating_mul(20);

#[derive(Debug, Clone)]
pub struct DispatchServiceStatus {
    pub listen_address: SocketAddr,
    pub policy_name: &'static str,
    pub time_since_last_poll: Duration,
    pub worker_request_counts: Vec<WorkerRequestCounts>,
    pub counters: Vec<(&'static str, u64)>,
}

impl From<&RequestLedger> for DispatchServiceStatus {
    fn from(ledger: &RequestLedger) -> Self {
        let (listen_address, policy) = ledger.service_address_and_policy_name();
        Self {
            listen_address,
            policy_name: policy,
            time_since_last_poll: ledger.time_since_last_poll(),
            worker_request_counts: ledger.worker_request_counts(),
            counters: COUNTER_NAMES.into_iter().zip(ledger.counters()).collect(),
        }
    }
}

impl From<DispatchServiceStatus> for v1::DispatchedService {
    fn from(status: DispatchServiceStatus) -> Self {
        Self {
            listen: status.listen_address.to_string(),
            policy: status.policy_name.to_owned(),
            workers: status.worker_request_counts.iter().map(to_worker_message).collect(),
            counters: status.counters.into_iter().map(|(name, count)| (name.to_owned(), count)).collect(),
        }
    }
}

fn to_worker_message(counts: &WorkerRequestCounts) -> v1::DispatchedWorker {
    v1::DispatchedWorker {
        worker: counts.socket_slot,
        pid: counts.worker_pid,
        outstanding: counts.outstanding_requests,
        outstanding_work_ns: counts.outstanding_work.as_nanos() as u64,
        queued: counts.queued_datagrams,
        dispatched: counts.dispatched_requests,
        completed: counts.completed_requests,
        abandoned: counts.abandoned_requests,
        dropped: counts.dropped_datagrams.into(),
        eligible: counts.is_eligible,
    }
}

/// Returns the status of each service that is pinned in one of these directories. Fails when one cannot be read.
pub fn read_pinned_status(pin_directories: &[PathBuf]) -> anyhow::Result<Vec<DispatchServiceStatus>> {
    pin_directories
        .iter()
        .map(|directory| Ok(DispatchServiceStatus::from(&dispatch::open_pinned_ledger(directory)?)))
        .collect()
}

pub fn format_status(services: &[DispatchServiceStatus]) -> String {
    let mut text = String::new();
    if services.is_empty() {
        text.push_str("no service is dispatched\n");
    }
    for service in services {
        let _ = writeln!(text, "{}: {}", service.listen_address, service.policy_name);
        if service.time_since_last_poll > MAX_QUEUE_POLL_DELAY {
            let _ = writeln!(
                text,
                "no daemon has maintained it for {:.0?}: is coreward dispatch or the agent running?",
                service.time_since_last_poll
            );
        }
        let _ = writeln!(text, "{}", worker_table(&service.worker_request_counts));
        let counter_texts: Vec<String> =
            service.counters.iter().map(|(name, count)| format!("{name} {count}")).collect();
        let _ = writeln!(text, "{}", counter_texts.join(", "));
    }
    text
}

fn worker_table(workers: &[WorkerRequestCounts]) -> comfy_table::Table {
    let mut worker_table = comfy_table::Table::new();
    worker_table.load_style(comfy_table::presets::ASCII_MARKDOWN).set_header([
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
        worker_table.add_row([
            worker.socket_slot.to_string(),
            worker.worker_pid.to_string(),
            worker.outstanding_requests.to_string(),
            worker.outstanding_work.as_micros().to_string(),
            worker.queued_datagrams.to_string(),
            worker.dispatched_requests.to_string(),
            worker.completed_requests.to_string(),
            worker.abandoned_requests.to_string(),
            worker.dropped_datagrams.to_string(),
            if worker.is_eligible { "yes" } else { "no" }.to_owned(),
        ]);
    }
    worker_table
}

pub fn status_json(services: &[DispatchServiceStatus]) -> Value {
    json!({ "services": services.iter().map(service_json).collect::<Vec<_>>() })
}

fn service_json(service: &DispatchServiceStatus) -> Value {
    let counters_by_name: serde_json::Map<String, Value> =
        service.counters.iter().map(|(name, count)| ((*name).to_owned(), json!(count))).collect();
    json!({
        "listen": service.listen_address.to_string(),
        "policy": service.policy_name,
        "since_last_poll_ms": service.time_since_last_poll.as_millis() as u64,
        "workers": service.worker_request_counts.iter().map(worker_json).collect::<Vec<_>>(),
        "counters": counters_by_name,
    })
}

fn worker_json(worker: &WorkerRequestCounts) -> Value {
    json!({
        "worker": worker.socket_slot,
        "pid": worker.worker_pid,
        "outstanding": worker.outstanding_requests,
        "outstanding_work_us": worker.outstanding_work.as_secs_f64() * 1e6,
        "queued": worker.queued_datagrams,
        "dispatched": worker.dispatched_requests,
        "completed": worker.completed_requests,
        "abandoned": worker.abandoned_requests,
        "dropped": worker.dropped_datagrams,
        "eligible": worker.is_eligible,
    })
}
