//! Time as the records count it. What is on record is kept for a time ("left a day ago"), over restarts, so by seconds since
//! 1970; but a wall clock that jumps a day ahead must not give away the ids of servers that left a minute ago, and one that
//! jumps back must not keep them for ever. So the records have a clock of their own: it began with the wall clock of the first
//! controller, and goes on only while a controller is at work, by the machine's monotonic clock. Nothing is forgotten
//! too early; it may be kept longer, by as long as there was no controller.

use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

/// The records' clock.
#[derive(Debug, Clone, Copy)]
pub struct RecordClock {
    base: Duration,
    started: Instant,
}

impl RecordClock {
    /// Goes on from where it stood when the records were last written; from the wall clock where they do not say.
    pub fn from(stood: Option<Duration>) -> Self {
        Self { base: stood.unwrap_or_else(wall_now), started: Instant::now() }
    }

    /// Now, since 1970.
    pub fn now(&self) -> Duration {
        self.base + self.started.elapsed()
    }
}

/// By the wall clock, since 1970; 0 before.
pub fn wall_now() -> Duration {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default()
}
