//! Notification of the service manager about the daemon's readiness and liveness (sd_notify(3)). It has no effect if
//! there is no service manager.

use std::time::Duration;

use sd_notify::NotifyState;

/// Reports that the daemon is ready.
pub fn notify_ready() {
    notify(NotifyState::Ready);
}

/// Reports that the daemon is about to end.
pub fn notify_stopping() {
    notify(NotifyState::Stopping);
}

/// Runs `work`, during which the watchdog waits up to `limit` for a notification. On a slow machine, the kernel's
/// verifier may need longer than the watchdog's interval, and a restart would not help.
pub fn run_with_watchdog_limit<T>(limit: Duration, work: impl FnOnce() -> T) -> T {
    let Some(interval) = sd_notify::watchdog_enabled().filter(|interval| *interval < limit) else { return work() };
    let set_watchdog =
        |limit: Duration| notify(NotifyState::WatchdogUsec(limit.as_micros().try_into().unwrap_or(u32::MAX)));
    set_watchdog(limit);
    let outcome = work();
    set_watchdog(interval);
    outcome
}

/// Returns the time between two notifications, which is half of the watchdog's interval, or `None` without a watchdog.
pub fn watchdog_interval() -> Option<Duration> {
    sd_notify::watchdog_enabled().map(|limit| (limit / 2).max(Duration::from_millis(1)))
}

pub fn notify_watchdog() {
    notify(NotifyState::Watchdog);
}

/// Notifier of the watchdog, for a loop without an asynchronous runtime.
#[derive(Debug)]
pub struct Watchdog {
    interval: Option<Duration>,
    /// Time on the caller's monotonic clock at which the next notification is due.
    next_notification_at: Duration,
}

impl Default for Watchdog {
    fn default() -> Self {
        Self { interval: watchdog_interval(), next_notification_at: Duration::ZERO }
    }
}

impl Watchdog {
    /// Notifies the watchdog if a notification is due at `now`, a time on a monotonic clock.
    pub fn feed(&mut self, now: Duration) {
        if let Some(interval) = self.interval.filter(|_| now >= self.next_notification_at) {
            notify_watchdog();
            self.next_notification_at = now + interval;
        }
    }
}

fn notify(state: NotifyState<'_>) {
    if let Err(error) = sd_notify::notify(std::slice::from_ref(&state)) {
        tracing::warn!(
            event = "service-manager-unreachable",
            %state,
            %error,
            "the daemon cannot notify the service manager, which may restart the daemon"
        );
    }
}
