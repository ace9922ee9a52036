//! Notification of the service manager about the daemon's readiness and liveness (sd_notify(3)). It has no effect if
//! there is no service manager.

use std::time::Duration;

use sd_notify::NotifyState;

/// Reports to the service manager that the daemon is ready.
pub fn notify_ready() {
    notify_service_manager(NotifyState::Ready);
}

/// Reports to the service manager that the daemon is about to end.
pub fn notify_stopping() {
    notify_service_manager(NotifyState::Stopping);
}

/// Runs `work` with the watchdog's time limit raised to `limit`. On a slow machine, the kernel's BPF verifier may take
/// longer than the configured limit, and a restart would not help.
pub fn run_with_raised_watchdog_limit<T>(limit: Duration, work: impl FnOnce() -> T) -> T {
    let Some(configured_limit) = sd_notify::watchdog_enabled().filter(|interval| *interval < limit) else {
        return work();
    };
    let set_watchdog = |limit: Duration| {
        notify_service_manager(NotifyState::WatchdogUsec(limit.as_micros().try_into().unwrap_or(u32::MAX)))
    };
    set_watchdog(limit);
    let work_result = work();
    set_watchdog(configured_limit);
    work_result
}

/// Returns the interval of watchdog notifications, which is half of the watchdog's limit, or `None` without a watchdog.
pub fn watchdog_notification_interval() -> Option<Duration> {
    sd_notify::watchdog_enabled().map(|limit| (limit / 2).max(Duration::from_millis(1)))
}

pub fn notify_watchdog() {
    notify_service_manager(NotifyState::Watchdog);
}

/// Sender of watchdog notifications for a loop without an asynchronous runtime.
#[derive(Debug)]
pub struct WatchdogNotifier {
    notification_interval: Option<Duration>,
    /// Time at which the next notification is due, on the caller's monotonic clock.
    next_notification_at: Duration,
}

impl Default for WatchdogNotifier {
    fn default() -> Self {
        Self { notification_interval: watchdog_notification_interval(), next_notification_at: Duration::ZERO }
    }
}

impl WatchdogNotifier {
    /// Notifies the watchdog if a notification is due at `now`, a time on the caller's monotonic clock.
    pub fn notify_if_due(&mut self, now: Duration) {
        if let Some(interval) = self.notification_interval.filter(|_| now >= self.next_notification_at) {
            notify_watchdog();
            self.next_notification_at = now + interval;
        }
    }
}

fn notify_service_manager(state: NotifyState<'_>) {
    if let Err(error) = sd_notify::notify(std::slice::from_ref(&state)) {
        tracing::warn!(
            event = "service-manager-unreachable",
            %state,
            %error,
            "the daemon cannot notify the service manager, which may restart the daemon"
        );
    }
}
