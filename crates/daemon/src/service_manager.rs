//! Readiness and watchdog of the service manager (sd_notify(3)). Without a service manager, notifications have no
//! effect.

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

/// Runs work during which the watchdog gets no notifications for up to `limit`. The kernel's verifier may need longer
/// than the watchdog's interval on a slow machine, where a restart would not help.
pub fn run_with_watchdog_limit<T>(limit: Duration, work: impl FnOnce() -> T) -> T {
    let Some(interval) = sd_notify::watchdog_enabled().filter(|interval| *interval < limit) else { return work() };
    let set_watchdog =
        |limit: Duration| notify(NotifyState::WatchdogUsec(limit.as_micros().try_into().unwrap_or(u32::MAX)));
    set_watchdog(limit);
    let outcome = work();
    set_watchdog(interval);
    outcome
}

/// Returns half of the watchdog's interval, the time between two notifications; `None`: no watchdog is set.
pub fn watchdog_interval() -> Option<Duration> {
    sd_notify::watchdog_enabled().map(|limit| (limit / 2).max(Duration::from_millis(1)))
}

/// Notifies the watchdog that the daemon is alive.
pub fn notify_watchdog() {
    notify(NotifyState::Watchdog);
}

/// Sender of notifications to the watchdog, for a loop without an asynchronous runtime.
#[derive(Debug)]
pub struct Watchdog {
    interval: Option<Duration>,
    /// Time of the next notification.
    next_notification: Duration,
}

impl Default for Watchdog {
    fn default() -> Self {
        Self { interval: watchdog_interval(), next_notification: Duration::ZERO }
    }
}

impl Watchdog {
    /// Notifies the watchdog if a notification is due. `now`: time of a monotonic clock.
    pub fn feed(&mut self, now: Duration) {
        if let Some(interval) = self.interval.filter(|_| now >= self.next_notification) {
            notify_watchdog();
            self.next_notification = now + interval;
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
