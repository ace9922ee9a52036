//! Simulated time: whole nanoseconds from the start of the warm-up, so that sums are exact.

/// A moment, or a length of time.
pub type Nanoseconds = u64;

/// Seconds, rounded to the nearest nanosecond; negative ones are 0.
pub fn from_seconds(seconds: f64) -> Nanoseconds {
    (seconds * 1e9).round() as Nanoseconds
}

pub fn seconds(time: Nanoseconds) -> f64 {
    time as f64 / 1e9
}
