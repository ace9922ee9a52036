//! What the programs count, for people and for programs.

use std::fmt::Write as _;
use std::path::{Path, PathBuf};
use std::time::Duration;

use coreward_dataplane::dispatch::{self, Books, COUNTER_NAMES, LOOK_INTERVAL, WorkerCounts};
use serde_json::{Value, json};

/// So many looks may be late before somebody is told.
const LATE: Duration = LOOK_INTERVAL.saturating_mul(20);

/// Of every service whose pins are in these directories, as text.
///
/// # Errors
/// When one cannot be read.
pub fn text(pins: &[PathBuf]) -> anyhow::Result<String> {
    let mut text = String::new();
    if pins.is_empty() {
        text.push_str("no service is dispatched\n");
    }
    for directory in pins {
        let books = dispatch::pinned_books(directory)?;
        let (listen, policy) = books.service();
        writeln!(text, "{listen}: {policy}")?;
        if books.since_last_look() > LATE {
            writeln!(
                text,
                "nobody has looked after it for {:.0?}: is coreward dispatch running?",
                books.since_last_look()
            )?;
        }
        writeln!(text, "{}", table(&books.workers()))?;
        let counters = COUNTER_NAMES.iter().zip(books.counters());
        let counters: Vec<String> = counters.map(|(name, count)| format!("{name} {count}")).collect();
        writeln!(text, "{}", counters.join(", "))?;
    }
    Ok(text)
}

fn table(workers: &[WorkerCounts]) -> comfy_table::Table {
    let mut table = comfy_table::Table::new();
    table.load_style(comfy_table::presets::ASCII_MARKDOWN).set_header([
        "worker",
        "pid",
        "outstanding",
        "work us",
        "queued",
        "dispatched",
        "completed",
        "repaired",
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
            worker.repaired.to_string(),
            worker.dropped.to_string(),
            if worker.eligible { "yes" } else { "no" }.to_owned(),
        ]);
    }
    table
}

/// Of every service whose pins are in these directories, as one object.
///
/// # Errors
/// When one cannot be read.
pub fn json(pins: &[PathBuf]) -> anyhow::Result<Value> {
    let services = pins.iter().map(|directory| service_json(directory)).collect::<anyhow::Result<Vec<Value>>>()?;
    Ok(json!({ "services": services }))
}

fn service_json(pins: &Path) -> anyhow::Result<Value> {
    let books: Books = dispatch::pinned_books(pins)?;
    let (listen, policy) = books.service();
    let workers: Vec<Value> = books.workers().iter().map(worker_json).collect();
    let counters: serde_json::Map<String, Value> =
        COUNTER_NAMES.iter().zip(books.counters()).map(|(name, count)| ((*name).to_owned(), json!(count))).collect();
    Ok(json!({
        "listen": listen.to_string(),
        "policy": policy,
        "since_last_look_ms": books.since_last_look().as_millis() as u64,
        "workers": workers,
        "counters": counters,
    }))
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
        "repaired": worker.repaired,
        "dropped": worker.dropped,
        "eligible": worker.eligible,
    })
}
