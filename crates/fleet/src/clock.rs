//! Clock by which the records measure ages. Ages survive restarts, so times are seconds since 1970. A jump of the wall
//! clock must neither release ids early nor keep them indefinitely. This clock therefore starts with the first
//! controller's wall clock, and advances by the monotonic clock while a controller runs. Time without a controller does
//! not count, so ids may be kept longer.

use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

#[derive(Debug, Clone, Copy)]
pub struct RecordClock {
    wall_time_at_start: Duration,
    start_instant: Instant,
}

impl RecordClock {
    /// Creates a clock that continues from the stored time, or starts with the wall clock's time if there is none.
    pub fn continue_from(stored_time: Option<Duration>) -> Self {
        Self { wall_time_at_start: stored_time.unwrap_or_else(wall_clock_time), start_instant: Instant::now() }
    }

    /// Returns the current time of this clock, as the time since 1970.
    pub fn now(&self) -> Duration {
        self.wall_time_at_start + self.start_instant.elapsed()
    }
}

/// Returns the wall-clock time since 1970, or 0 if the wall clock is set before 1970.
pub fn wall_clock_time() -> Duration {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default()
}

/// Rounds a time down to whole seconds, because records store times in seconds.
pub fn round_down_to_seconds(time: Duration) -> Duration {
    Duration::from_secs(time.as_secs())
}
