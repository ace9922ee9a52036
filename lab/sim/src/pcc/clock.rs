//! Simulated time: whole nanoseconds from the start of the warm-up, so that sums are exact.

/// Time or duration (ns).
pub type Nanoseconds = u64;

/// Converts seconds to nanoseconds, rounded to the nearest one; negative values become 0.
pub fn from_seconds(seconds: f64) -> Nanoseconds {
    (seconds * 1e9).round() as Nanoseconds
}

pub fn to_seconds(time: Nanoseconds) -> f64 {
    time as f64 / 1e9
}
