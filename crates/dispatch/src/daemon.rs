//! The daemon of `coreward dispatch`, which maintains all services until a signal arrives.

use std::path::PathBuf;
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::time::Duration;

use anyhow::{Context as _, ensure};
use coreward_daemon::metrics_endpoint;
use coreward_metrics::message_metrics;
use coreward_metrics::metric_declarations::Component;
use coreward_metrics::snapshot::MetricsSnapshot;
use coreward_wire::v1;

use crate::config::DispatchConfig;
use crate::dispatcher::DispatcherHandle;
use crate::{service, status};

/// Interval between checks that the services' maintenance thread is running.
const MAINTENANCE_THREAD_CHECK_INTERVAL: Duration = Duration::from_secs(1);

/// Runs the dispatcher until SIGTERM or SIGINT. Afterwards, the pinned BPF programs continue to dispatch requests.
pub fn run_daemon(config: &DispatchConfig) -> anyhow::Result<()> {
    let (stop_sender, stop_receiver) = channel();
    ctrlc::set_handler(move || _ = stop_sender.send(())).context("cannot handle SIGTERM and SIGINT")?;
    let dispatcher = DispatcherHandle::start(config)?;
    let service_pin_directories: Vec<PathBuf> = config
        .services
        .iter()
        .map(|service_config| {
            service::service_pin_directory(&config.pin_directory, service_config.program_options.service_address)
        })
        .collect();
    metrics_endpoint::serve_metrics(config.metrics, || (), move || metrics_snapshot(&service_pin_directories))?;
    while stop_receiver.recv_timeout(MAINTENANCE_THREAD_CHECK_INTERVAL) == Err(RecvTimeoutError::Timeout) {
        ensure!(dispatcher.is_running(), "the thread that maintains the services has ended");
    }
    tracing::info!(
        event = "programs-kept",
        "the BPF programs stay attached and dispatch requests; `coreward dispatch --detach` removes them"
    );
    Ok(())
}

/// Returns the BPF programs' counters. Reads them from the pinned maps, which needs no wait for the maintenance thread.
fn metrics_snapshot(pin_directories: &[PathBuf]) -> MetricsSnapshot {
    let mut snapshot = message_metrics::base_metrics_snapshot(Component::Dispatch);
    match status::read_pinned_status(pin_directories) {
        Ok(services) => {
            let dispatched_services: Vec<_> = services.into_iter().map(v1::DispatchedService::from).collect();
            message_metrics::add_dispatch_counters(&mut snapshot, "", &dispatched_services);
        }
        Err(error) => {
            tracing::warn!(
                event = "counters-unreadable",
                error = format!("{error:#}"),
                "the dispatcher cannot read the counters of its services: the metrics omit them"
            )
        }
    }
    snapshot
}
