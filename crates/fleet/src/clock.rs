//! Clock of the records. Ages survive restarts, so they are seconds since 1970. A wall clock that jumps must neither
//! release ids early nor keep them indefinitely. So this clock starts with the first controller's wall clock, and
//! advances by the monotonic clock while a controller runs. Time without a controller does not count, so ids may be
//! kept longer.

use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

#[derive(Debug, Clone, Copy)]
pub struct RecordClock {
    time_at_start: Duration,
    start_instant: Instant,
}

impl RecordClock {
    /// Creates a clock that continues from the stored time, or else begins with the wall clock.
    pub fn from(stood: Option<Duration>) -> Self {
        Self { time_at_start: stood.unwrap_or_else(wall_clock), start_instant: Instant::now() }
    }

    /// Returns the present time of this clock, since 1970.
    pub fn now(&self) -> Duration {
        self.time_at_start + self.start_instant.elapsed()
    }
}

/// Returns the wall-clock time since 1970; 0 if the wall clock is set before 1970.
pub fn wall_clock() -> Duration {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default()
}

/// Rounds down to whole seconds, which is how records store times.
pub fn whole_seconds(time: Duration) -> Duration {
    Duration::from_secs(time.as_secs())
}
