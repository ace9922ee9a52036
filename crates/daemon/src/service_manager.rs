//! Readiness and watchdog of the service manager (sd_notify(3)). Without one, notifications go nowhere.

use std::time::Duration;

use sd_notify::NotifyState;

/// Reports that the daemon works.
pub fn notify_ready() {
    notify(NotifyState::Ready);
}

/// Reports that the daemon ends.
pub fn notify_stopping() {
    notify(NotifyState::Stopping);
}

/// Runs work that does not feed the watchdog for longer than its interval, within `limit`. So the kernel's verifier may
/// take its time with a program on a slow machine: a restart would only repeat it.
pub fn block_within<T>(limit: Duration, work: impl FnOnce() -> T) -> T {
    let Some(interval) = sd_notify::watchdog_enabled().filter(|interval| *interval < limit) else { return work() };
    let set = |limit: Duration| notify(NotifyState::WatchdogUsec(limit.as_micros().try_into().unwrap_or(u32::MAX)));
    set(limit);
    let outcome = work();
    set(interval);
    outcome
}

/// Returns half of the watchdog's interval, between two notifications; `None`: there is no watchdog.
pub fn watchdog_interval() -> Option<Duration> {
    sd_notify::watchdog_enabled().map(|limit| (limit / 2).max(Duration::from_millis(1)))
}

/// Notifies the watchdog.
pub fn notify_watchdog() {
    notify(NotifyState::Watchdog);
}

/// Notifications to the watchdog from a loop without an asynchronous runtime.
#[derive(Debug)]
pub struct Watchdog {
    interval: Option<Duration>,
    /// Time of the next notification.
    next: Duration,
}

impl Default for Watchdog {
    fn default() -> Self {
        Self { interval: watchdog_interval(), next: Duration::ZERO }
    }
}

impl Watchdog {
    /// Notifies the watchdog if a notification is due. `now`: of a monotonic clock.
    pub fn feed(&mut self, now: Duration) {
        if let Some(interval) = self.interval.filter(|_| now >= self.next) {
            notify_watchdog();
            self.next = now + interval;
        }
    }
}

fn notify(state: NotifyState<'_>) {
    if let Err(error) = sd_notify::notify(std::slice::from_ref(&state)) {
        tracing::warn!(event = "service-manager-unreachable", %state, %error, "cannot notify the service manager");
    }
}
