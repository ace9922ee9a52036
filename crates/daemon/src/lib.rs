//! What every daemon does around its work: it tells the service manager (systemd, by sd_notify(3)) that it is ready and goes on,
//! and ends by a signal. Without a service manager nobody is told anything. [`Connection`] is its way to the controller.

pub mod confine;
mod connection;
mod controllers;
pub mod priority;

use std::time::Duration;

use sd_notify::NotifyState;
use tokio::signal::unix::{SignalKind, signal};
use tokio::time::MissedTickBehavior;

pub use connection::{Connection, add_expiry};
pub use controllers::Controllers;

/// Says that the daemon is ready, and works until SIGTERM or SIGINT. The watchdog is told that the daemon lives from the
/// runtime that `work` runs on: where `work` blocks a runtime of one thread, the service manager restarts the daemon. (Packets go
/// on meanwhile; the next process takes over what is pinned.)
///
/// # Errors
/// Those of `work`, or when a signal cannot be waited for.
pub async fn until_told(work: impl Future<Output = anyhow::Result<()>>) -> anyhow::Result<()> {
    let (mut terminate, mut interrupt) = (signal(SignalKind::terminate())?, signal(SignalKind::interrupt())?);
    tell(NotifyState::Ready);
    let outcome = tokio::select! {
        outcome = work => outcome,
        _ = terminate.recv() => Ok(()),
        _ = interrupt.recv() => Ok(()),
        never = tell_watchdog() => match never {},
    };
    tell(NotifyState::Stopping);
    outcome
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
