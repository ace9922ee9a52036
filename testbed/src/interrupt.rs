//! Ctrl-C and SIGTERM: noted, so that a testbed is taken down in order before the process ends.

use std::sync::atomic::{AtomicBool, Ordering};

use anyhow::bail;
use nix::sys::signal::{SaFlags, SigAction, SigHandler, SigSet, Signal, sigaction};

static INTERRUPTED: AtomicBool = AtomicBool::new(false);

extern "C" fn note(_signal: i32) {
    INTERRUPTED.store(true, Ordering::Relaxed);
}

/// From now on SIGINT and SIGTERM only make [`check`] fail.
///
/// # Errors
/// When the kernel refuses.
pub fn catch() -> anyhow::Result<()> {
    let action = SigAction::new(SigHandler::Handler(note), SaFlags::empty(), SigSet::empty());
    for signal in [Signal::SIGINT, Signal::SIGTERM] {
        // SAFETY: the handler only stores to an atomic.
        unsafe { sigaction(signal, &action) }?;
    }
    Ok(())
}

/// # Errors
/// When a signal has come.
pub fn check() -> anyhow::Result<()> {
    if INTERRUPTED.load(Ordering::Relaxed) {
        bail!("interrupted");
    }
    Ok(())
}
