//! Parts that all daemons share, such as the interface to the [service manager](service_manager), signals, metrics, and
//! the [`ControllerConnection`] to the controllers.

mod connection;
mod controllers;
pub mod drop_capabilities;
pub mod log_level;
pub mod metrics_endpoint;
pub mod priority;
pub mod service_manager;

use std::fmt::Display;
use std::path::Path;

use nix::sys::signal::{SigSet, Signal};
use tokio::signal::unix::{SignalKind, signal};
use tokio::time::MissedTickBehavior;

pub use connection::{ControllerConnection, add_certificate_expiry_metrics};
pub use controllers::ControllerAddresses;
pub use service_manager::run_with_raised_watchdog_limit;

const HANDLED_SIGNALS: [Signal; 3] = [Signal::SIGHUP, Signal::SIGTERM, Signal::SIGINT];

/// Blocks the signals that [`run_until_shutdown`] handles, because they would otherwise end the daemon during its
/// start. Must be called before other threads exist and before files are read.
pub fn block_signals() -> anyhow::Result<()> {
    Ok(SigSet::from_iter(HANDLED_SIGNALS).thread_block()?)
}

/// Reports readiness to the service manager, and runs `work` until SIGTERM or SIGINT arrives. `work` must handle
/// SIGHUP. If `work` blocks its single-threaded runtime, the watchdog is not notified, and the service manager restarts
/// the daemon.
pub async fn run_until_shutdown(work: impl Future<Output = anyhow::Result<()>>) -> anyhow::Result<()> {
    let (mut terminate, mut interrupt) = (signal(SignalKind::terminate())?, signal(SignalKind::interrupt())?);
    let _sighup_stream = signal(SignalKind::hangup())?;
    service_manager::notify_ready();
    let work_result = tokio::select! {
        // `work` is polled first, so that it has installed its SIGHUP handler when signals are unblocked.
        biased;
        outcome = work => outcome,
        never = unblock_signals() => match never? {},
        never = log_level::switch_log_level_on_signals() => match never? {},
        _ = terminate.recv() => Ok(()),
        _ = interrupt.recv() => Ok(()),
        never = notify_watchdog_periodically() => match never {},
    };
    service_manager::notify_stopping();
    work_result
}

/// Logs that the daemon has rejected a configuration file at a reload.
pub fn log_reload_failure(path: &Path, error: &dyn Display) {
    tracing::warn!(
        event = "reload-failed",
        file = %path.display(),
        %error,
        "the daemon rejects its changed configuration file and keeps the previous configuration"
    );
}

async fn unblock_signals() -> anyhow::Result<std::convert::Infallible> {
    SigSet::from_iter(HANDLED_SIGNALS).thread_unblock()?;
    std::future::pending().await
}

async fn notify_watchdog_periodically() -> std::convert::Infallible {
    let Some(interval) = service_manager::watchdog_notification_interval() else { return std::future::pending().await };
    let mut watchdog_ticks = tokio::time::interval(interval);
    watchdog_ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        watchdog_ticks.tick().await;
        service_manager::notify_watchdog();
    }
}

/// Raises the soft limit of open files to the hard limit, because each agent's connection and each health check needs a
/// file descriptor. The usual soft limit of 1,024 is meant for programs that use select(2).
pub fn raise_open_file_limit() {
    use nix::sys::resource::{Resource, getrlimit, setrlimit};
    let result = getrlimit(Resource::RLIMIT_NOFILE)
        .and_then(|(_, highest)| setrlimit(Resource::RLIMIT_NOFILE, highest, highest).map(|()| highest));
    match result {
        Ok(highest) => tracing::debug!(
            event = "file-limit-raised",
            limit = highest,
            "the daemon has raised its limit of open files"
        ),
        Err(error) => tracing::warn!(
            event = "file-limit-unchanged",
            %error,
            "the daemon cannot raise its limit of open files: many connections may exhaust its file descriptors"
        ),
    }
}
