//! What every daemon does around its work: it tells the service manager (systemd, by sd_notify(3)) that it is ready and goes on,
//! and ends by a signal. Without a service manager nobody is told anything. [`Connection`] is its way to the controller.

pub mod confine;
mod connection;
mod controllers;
pub mod log_level;
pub mod priority;

use std::time::Duration;

use nix::sys::signal::{SigSet, Signal};
use sd_notify::NotifyState;
use tokio::signal::unix::{SignalKind, signal};
use tokio::time::MissedTickBehavior;

pub use connection::{Connection, add_expiry};
pub use controllers::Controllers;

/// Signals that a daemon handles.
const HANDLED: [Signal; 3] = [Signal::SIGHUP, Signal::SIGTERM, Signal::SIGINT];

/// Signals wait from now on until the daemon can handle them ([`run_until_shutdown`]): by default they would end it. To be called before there
/// are other threads, and before any file is read.
///
/// # Errors
/// When the kernel refuses.
pub fn hold_signals() -> anyhow::Result<()> {
    Ok(SigSet::from_iter(HANDLED).thread_block()?)
}

/// Says that the daemon is ready, and works until SIGTERM or SIGINT. The watchdog is told that the daemon lives from the
/// runtime that `work` runs on: where `work` blocks a runtime of one thread, the service manager restarts the daemon. (Packets go
/// on meanwhile; the next process takes over what is pinned.) SIGHUP ends nothing; `work` says what it is for.
///
/// # Errors
/// Those of `work`, or when a signal cannot be waited for.
pub async fn run_until_shutdown(work: impl Future<Output = anyhow::Result<()>>) -> anyhow::Result<()> {
    let (mut terminate, mut interrupt) = (signal(SignalKind::terminate())?, signal(SignalKind::interrupt())?);
    let _ends_nothing = signal(SignalKind::hangup())?;
    tell(NotifyState::Ready);
    let outcome = tokio::select! {
        // The work comes first: it handles SIGHUP when those that wait are let go.
        biased;
        outcome = work => outcome,
        never = let_signals_go() => match never? {},
        never = log_level::follow_signals() => match never? {},
        _ = terminate.recv() => Ok(()),
        _ = interrupt.recv() => Ok(()),
        never = tell_watchdog() => match never {},
    };
    tell(NotifyState::Stopping);
    outcome
}

async fn let_signals_go() -> anyhow::Result<std::convert::Infallible> {
    SigSet::from_iter(HANDLED).thread_unblock()?;
    std::future::pending().await
}

/// Twice as often as the service manager wants to hear it.
async fn tell_watchdog() -> std::convert::Infallible {
    let Some(patience) = sd_notify::watchdog_enabled() else { return std::future::pending().await };
    let mut due = tokio::time::interval((patience / 2).max(Duration::from_millis(1)));
    due.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        due.tick().await;
        tell(NotifyState::Watchdog);
    }
}

fn tell(state: NotifyState<'_>) {
    if let Err(error) = sd_notify::notify(std::slice::from_ref(&state)) {
        tracing::warn!("the service manager cannot be told {state}: {error}");
    }
}

/// Lets this process have as many open files as the system allows it: every agent's connection and every health check is
/// one, and the usual soft limit of 1,024 is for programs that use select(2).
pub fn raise_file_limit() {
    use nix::sys::resource::{Resource, getrlimit, setrlimit};
    let raised = getrlimit(Resource::RLIMIT_NOFILE)
        .and_then(|(_, highest)| setrlimit(Resource::RLIMIT_NOFILE, highest, highest).map(|()| highest));
    match raised {
        Ok(highest) => tracing::debug!("up to {highest} open files"),
        Err(error) => tracing::warn!("the limit of open files stays as it is: {error}"),
    }
}
