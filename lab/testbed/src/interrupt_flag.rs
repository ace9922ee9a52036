//! SIGINT and SIGTERM set a flag, so that a testbed can be removed before the process ends.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use anyhow::bail;
use nix::sys::signal::{SaFlags, SigAction, SigHandler, SigSet, Signal, sigaction};

use coreward_load::event_loop::now_ns;

static IS_INTERRUPTION_REQUESTED: AtomicBool = AtomicBool::new(false);

extern "C" fn record_signal(_signal: i32) {
    request_interruption();
}

/// Requests an interruption, after which [`ensure_not_interrupted`] fails as after SIGINT.
pub fn request_interruption() {
    IS_INTERRUPTION_REQUESTED.store(true, Ordering::Relaxed);
}

/// Installs handlers for SIGINT and SIGTERM, which make [`ensure_not_interrupted`] fail.
pub fn catch_signals() -> anyhow::Result<()> {
    for signal in [Signal::SIGINT, Signal::SIGTERM] {
        set_signal_handler(signal, SigHandler::Handler(record_signal))?;
    }
    Ok(())
}

/// Makes the calling process, a forked child, ignore SIGINT (which its parent handles) and end at SIGTERM.
pub fn reset_signals_in_child() -> anyhow::Result<()> {
    set_signal_handler(Signal::SIGINT, SigHandler::SigIgn)?;
    set_signal_handler(Signal::SIGTERM, SigHandler::SigDfl)
}

fn set_signal_handler(signal: Signal, handler: SigHandler) -> anyhow::Result<()> {
    let action = SigAction::new(handler, SaFlags::empty(), SigSet::empty());
    // SAFETY: the only handler of ours stores to an atomic and does nothing else.
    unsafe { sigaction(signal, &action) }?;
    Ok(())
}

/// Fails if SIGINT or SIGTERM has arrived, or if an interruption was requested.
pub fn ensure_not_interrupted() -> anyhow::Result<()> {
    if IS_INTERRUPTION_REQUESTED.load(Ordering::Relaxed) {
        bail!("interrupted");
    }
    Ok(())
}

/// Sleeps until `deadline_ns` on CLOCK_MONOTONIC (ns). Fails after SIGINT or SIGTERM.
pub fn sleep_until(deadline_ns: u64) -> anyhow::Result<()> {
    loop {
        ensure_not_interrupted()?;
        let remaining_time = Duration::from_nanos(deadline_ns.saturating_sub(now_ns()));
        if remaining_time.is_zero() {
            return Ok(());
        }
        // Sleep briefly, because a signal between check and sleep would otherwise not be noticed for a long time.
        std::thread::sleep(remaining_time.min(Duration::from_millis(200)));
    }
}
