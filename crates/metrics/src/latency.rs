//! Histogram of durations.

use std::time::Duration;

/// Upper bounds of the buckets, in seconds. A further bucket counts longer durations.
pub const BUCKET_BOUNDS_S: [f64; 13] =
    [0.0001, 0.000_25, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0];

/// Histogram of the durations observed since the process started.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct LatencyHistogram {
    bucket_counts: [u64; BUCKET_BOUNDS_S.len() + 1],
    sum_s: f64,
}

impl LatencyHistogram {
    pub fn observe(&mut self, latency: Duration) {
        let seconds = latency.as_secs_f64();
        let bucket_index = BUCKET_BOUNDS_S.iter().position(|bound| seconds <= *bound).unwrap_or(BUCKET_BOUNDS_S.len());
        self.bucket_counts[bucket_index] += 1;
        self.sum_s += seconds;
    }

    /// Returns the sum of all durations, in seconds.
    pub fn sum_s(&self) -> f64 {
        self.sum_s
    }

    /// Returns the number of durations that were observed.
    pub fn count(&self) -> u64 {
        self.bucket_counts.iter().sum()
    }

    /// Returns each bucket's upper bound in seconds, and the number of durations in this bucket only (not cumulative).
    pub fn buckets(&self) -> [(f64, u64); BUCKET_BOUNDS_S.len() + 1] {
        std::array::from_fn(|class| {
            (BUCKET_BOUNDS_S.get(class).copied().unwrap_or(f64::MAX), self.bucket_counts[class])
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_latency_is_in_its_bucket() {
        let mut latencies = LatencyHistogram::default();
        [100, 101, 1_000_000, 7_000_000]
            .map(Duration::from_micros)
            .into_iter()
            .for_each(|took| latencies.observe(took));
        let counts = latencies.buckets().map(|(_, count)| count);
        assert_eq!(counts, [1, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1, 1]);
        assert_eq!(latencies.count(), 4);
        assert!((latencies.sum_s() - 8.000_201).abs() < 1e-9);
    }
}
