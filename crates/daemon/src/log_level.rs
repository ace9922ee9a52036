//! Log level of a running daemon. SIGUSR1 sets it to debug, and SIGUSR2 restores the initial level.

use std::convert::Infallible;
use std::sync::OnceLock;

use tokio::signal::unix::{SignalKind, signal};

type DebugLogSetter = Box<dyn Fn(bool) + Send + Sync>;

static DEBUG_LOG_SETTER: OnceLock<DebugLogSetter> = OnceLock::new();

/// Registers the function that sets the log level to debug (true) or back to the initial level (false). Without such a
/// function, SIGUSR1 and SIGUSR2 have no effect.
pub fn register_debug_log_setter(set_debug: impl Fn(bool) + Send + Sync + 'static) {
    let _ = DEBUG_LOG_SETTER.set(Box::new(set_debug));
}

/// Sets the log level to debug on SIGUSR1, and to the initial level on SIGUSR2, until the daemon ends.
pub(crate) async fn switch_log_level_on_signals() -> anyhow::Result<Infallible> {
    let (mut debug_signals, mut reset_signals) =
        (signal(SignalKind::user_defined1())?, signal(SignalKind::user_defined2())?);
    loop {
        let is_debug = tokio::select! {
            _ = debug_signals.recv() => true,
            _ = reset_signals.recv() => false,
        };
        let Some(set_debug) = DEBUG_LOG_SETTER.get() else { continue };
        set_debug(is_debug);
        let log_level = if is_debug { "debug" } else { "as at the start" };
        tracing::info!(
            event = "log-level-set",
            log_level,
            "the signal SIGUSR1 or SIGUSR2 has set the daemon's log level"
        );
    }
}
