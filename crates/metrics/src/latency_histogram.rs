//! Histogram of durations.

use std::time::Duration;

/// Upper bounds of the histogram's buckets, in seconds. A further bucket counts longer durations.
pub const LATENCY_BUCKET_BOUNDS_S: [f64; 13] =
    [0.0001, 0.000_25, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0];

/// Histogram of all durations that were observed since the process started.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct LatencyHistogram {
    bucket_counts: [u64; LATENCY_BUCKET_BOUNDS_S.len() + 1],
    total_duration_s: f64,
}

impl LatencyHistogram {
    pub fn observe_latency(&mut self, latency: Duration) {
        let seconds = latency.as_secs_f64();
        let bucket_index =
            LATENCY_BUCKET_BOUNDS_S.iter().position(|bound| seconds <= *bound).unwrap_or(LATENCY_BUCKET_BOUNDS_S.len());
        self.bucket_counts[bucket_index] += 1;
        self.total_duration_s += seconds;
    }

    /// Returns the sum of all observed durations, in seconds.
    pub fn total_duration_s(&self) -> f64 {
        self.total_duration_s
    }

    /// Returns the number of observed durations.
    pub fn observed_latency_count(&self) -> u64 {
        self.bucket_counts.iter().sum()
    }

    /// Returns each bucket's upper bound in seconds, and the number of durations in that bucket alone (not cumulative).
    pub fn bucket_bounds_and_counts(&self) -> [(f64, u64); LATENCY_BUCKET_BOUNDS_S.len() + 1] {
        std::array::from_fn(|class| {
            (LATENCY_BUCKET_BOUNDS_S.get(class).copied().unwrap_or(f64::MAX), self.bucket_counts[class])
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_latency_is_counted_in_its_bucket() {
        let mut latencies = LatencyHistogram::default();
        [100, 101, 1_000_000, 7_000_000]
            .map(Duration::from_micros)
            .into_iter()
            .for_each(|took| latencies.observe_latency(took));
        let counts = latencies.bucket_bounds_and_counts().map(|(_, count)| count);
        assert_eq!(counts, [1, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1, 1]);
        assert_eq!(latencies.observed_latency_count(), 4);
        assert!((latencies.total_duration_s() - 8.000_201).abs() < 1e-9);
    }
}
