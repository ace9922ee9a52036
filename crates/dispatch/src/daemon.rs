//! `coreward dispatch`: all services, until a signal.

use std::path::PathBuf;
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::time::Duration;

use anyhow::{Context as _, ensure};
use coreward_daemon::metrics_endpoint;
use coreward_metrics::component;
use coreward_metrics::snapshot::Snapshot;
use coreward_metrics::table::Component;
use coreward_wire::v1;

use crate::config::Config;
use crate::dispatcher::Dispatcher;
use crate::{service, status};

/// Interval of checks whether the services' thread runs.
const ALIVE_INTERVAL: Duration = Duration::from_secs(1);

/// Runs until SIGTERM or SIGINT. The pinned programs continue.
pub fn run(config: &Config) -> anyhow::Result<()> {
    let (sender, signal) = channel();
    ctrlc::set_handler(move || _ = sender.send(())).context("SIGTERM and SIGINT")?;
    let dispatcher = Dispatcher::start(config)?;
    let pins: Vec<PathBuf> =
        config.services.iter().map(|named| service::pins(&config.pin_directory, named.options.service)).collect();
    metrics_endpoint::serve(config.metrics, || (), move || metrics_snapshot(&pins))?;
    while signal.recv_timeout(ALIVE_INTERVAL) == Err(RecvTimeoutError::Timeout) {
        ensure!(dispatcher.is_running(), "no daemon maintains the services");
    }
    tracing::info!(event = "programs-kept", "dispatching continues; `coreward dispatch --detach` ends it");
    Ok(())
}

/// Returns the programs' counts, read from the services' pins, so that no thread waits for another.
fn metrics_snapshot(pins: &[PathBuf]) -> Snapshot {
    let mut page = component::base_snapshot(Component::Dispatch);
    match status::pinned(pins) {
        Ok(services) => {
            let services: Vec<_> = services.into_iter().map(v1::DispatchedService::from).collect();
            component::dispatch(&mut page, "", &services);
        }
        Err(error) => {
            tracing::warn!(event = "metrics-failed", error = format!("{error:#}"), "cannot read the counters")
        }
    }
    page
}
