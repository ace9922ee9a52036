//! Growth of counters over the last seconds, and its interpretation.

use std::collections::VecDeque;
use std::time::Duration;

/// Length of the time window in which the growth of counters is measured.
pub const COUNTER_GROWTH_WINDOW: Duration = Duration::from_secs(10);
/// Minimum number of SYNs in [`COUNTER_GROWTH_WINDOW`] from which failing handshakes are inferred.
const MIN_SYNS_TO_INFER_FAILURE: u64 = 20;

/// Samples of `N` counters in the last [`COUNTER_GROWTH_WINDOW`].
#[derive(Debug, Clone)]
pub struct RecentCounterSamples<const N: usize> {
    samples: VecDeque<(Duration, [u64; N])>,
}

impl<const N: usize> Default for RecentCounterSamples<N> {
    fn default() -> Self {
        Self { samples: VecDeque::new() }
    }
}

impl<const N: usize> RecentCounterSamples<N> {
    /// Records the values of the counters at `now`. Returns by how much each counter grew in the last
    /// [`COUNTER_GROWTH_WINDOW`], or since the first call. If a counter decreases, a new window begins.
    pub fn record_and_get_growth(&mut self, now: Duration, counter_values: [u64; N]) -> [u64; N] {
        let has_counter_shrunk = |(_, newest_counts): &(Duration, [u64; N])| {
            newest_counts.iter().zip(&counter_values).any(|(old_count, new_count)| new_count < old_count)
        };
        if self.samples.back().is_some_and(has_counter_shrunk) {
            self.samples.clear();
        }
        // Growth counts from the newest sample that is older than the window.
        while self
            .samples
            .get(1)
            .is_some_and(|(sample_time, _)| now.saturating_sub(*sample_time) >= COUNTER_GROWTH_WINDOW)
        {
            self.samples.pop_front();
        }
        self.samples.push_back((now, counter_values));
        let (_, oldest_counts) = self.samples[0];
        std::array::from_fn(|i| counter_values[i] - oldest_counts[i])
    }
}

/// Returns whether most new connections of a service fail to become established. In an established connection, the
/// client sends more packets than its SYN. The arguments count the packets of the service's clients in
/// [`COUNTER_GROWTH_WINDOW`].
pub fn most_handshakes_fail(syn_count: u64, other_packet_count: u64) -> bool {
    syn_count >= MIN_SYNS_TO_INFER_FAILURE && other_packet_count < syn_count / 2
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counter_growth_covers_only_the_window() {
        let mut samples = RecentCounterSamples::default();
        let mut counter_growth_at =
            |second, count| samples.record_and_get_growth(Duration::from_secs(second), [count])[0];
        assert_eq!(counter_growth_at(1, 1000), 0, "what was counted before the first call is not recent");
        assert_eq!(counter_growth_at(2, 1010), 10);
        assert_eq!(counter_growth_at(11, 1030), 30);
        assert_eq!(counter_growth_at(12, 1030), 20);
        assert_eq!(counter_growth_at(30, 1030), 0);
        assert_eq!(counter_growth_at(31, 5), 0, "the counter began again at 0");
        assert_eq!(counter_growth_at(32, 9), 4);
    }

    #[test]
    fn most_handshakes_fail_if_few_packets_follow_the_syns() {
        assert!(!most_handshakes_fail(MIN_SYNS_TO_INFER_FAILURE - 1, 0));
        assert!(most_handshakes_fail(MIN_SYNS_TO_INFER_FAILURE, 0));
        assert!(most_handshakes_fail(100, 49));
        // A client that connects and resets sends one more packet.
        assert!(!most_handshakes_fail(100, 50));
    }
}
