//! Simulated time in whole nanoseconds since the start of the warm-up. Sums of integers are exact.

/// Point in time or duration (ns).
pub type Nanoseconds = u64;

/// Converts seconds to nanoseconds, rounded to the nearest integer. Negative values become 0.
pub fn seconds_to_nanoseconds(seconds: f64) -> Nanoseconds {
    (seconds * 1e9).round() as Nanoseconds
}

pub fn nanoseconds_to_seconds(time: Nanoseconds) -> f64 {
    time as f64 / 1e9
}
