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

pub use connection::{ControllerConnection, add_certificate_expiry};
pub use controllers::Controllers;
pub use service_manager::run_with_watchdog_limit;

const HANDLED_SIGNALS: [Signal; 3] = [Signal::SIGHUP, Signal::SIGTERM, Signal::SIGINT];

/// Blocks the signals that [`run_until_shutdown`] handles, because until then they would end the daemon. Must be called
/// before other threads exist and before files are read.
pub fn block_signals() -> anyhow::Result<()> {
    Ok(SigSet::from_iter(HANDLED_SIGNALS).thread_block()?)
}

/// Reports readiness and runs `work` until SIGTERM or SIGINT arrives. `work` must handle SIGHUP. The watchdog is
/// notified from the runtime of `work`, so if `work` blocks a single-threaded runtime, the service manager restarts the
/// daemon.
pub async fn run_until_shutdown(work: impl Future<Output = anyhow::Result<()>>) -> anyhow::Result<()> {
    let (mut terminate, mut interrupt) = (signal(SignalKind::terminate())?, signal(SignalKind::interrupt())?);
    let _ignored_hangup = signal(SignalKind::hangup())?;
    service_manager::notify_ready();
    let outcome = tokio::select! {
        // `work` is polled first, so that it has installed its SIGHUP handler when signals are unblocked.
        biased;
        outcome = work => outcome,
        never = unblock_signals() => match never? {},
        never = log_level::switch_level_by_signals() => match never? {},
        _ = terminate.recv() => Ok(()),
        _ = interrupt.recv() => Ok(()),
        never = feed_watchdog() => match never {},
    };
    service_manager::notify_stopping();
    outcome
}

/// Logs that a configuration file was rejected when it was reloaded.
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

async fn feed_watchdog() -> std::convert::Infallible {
    let Some(interval) = service_manager::watchdog_interval() else { return std::future::pending().await };
    let mut watchdog_ticks = tokio::time::interval(interval);
    watchdog_ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        watchdog_ticks.tick().await;
        service_manager::notify_watchdog();
    }
}

/// Raises the soft limit of open files to the hard limit, because each agent's connection and each health check needs a
/// file descriptor. The default of 1,024 is meant for programs that use select(2).
pub fn raise_file_limit() {
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
            "the daemon cannot raise its limit of open files to the hard limit: many connections may exceed it"
        ),
    }
}
