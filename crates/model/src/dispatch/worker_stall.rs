//! Periodic repair by user space, which finds requests without a response and workers that do not read.

use std::time::Duration;

/// Returns the indexes of one worker's requests that have expired. `ages` has each request's age, in checks since its
/// dispatch. Requests of age 0 never expire. `queued_datagrams` is the number of datagrams in the worker's socket.
///
/// The socket's queue is a FIFO, so it holds the youngest requests. Only older requests can have been read or dropped.
/// They expire if they are older than `timeout_checks`.
pub fn expired_request_indexes(ages: &[u32], queued_datagrams: usize, timeout_checks: u32) -> Vec<usize> {
    let mut indexes_oldest_first: Vec<usize> = (0..ages.len()).filter(|index| ages[*index] > 0).collect();
    indexes_oldest_first.sort_by_key(|index| (std::cmp::Reverse(ages[*index]), *index));
    indexes_oldest_first.truncate(indexes_oldest_first.len().saturating_sub(queued_datagrams));
    indexes_oldest_first.retain(|index| ages[*index] > timeout_checks);
    indexes_oldest_first
}

/// Detector of a stalled worker, which has datagrams in its socket but has not answered for a while.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct WorkerStallDetector {
    response_count: u64,
    /// Last time at which the worker had no queued datagram or had sent a response.
    last_progress_at: Duration,
}

impl WorkerStallDetector {
    /// Returns a detector that starts at `now`, when the worker has sent `response_count` responses.
    pub fn new(now: Duration, response_count: u64) -> Self {
        Self { response_count, last_progress_at: now }
    }

    /// Returns whether datagrams have waited for at least `stall_after` without a new response of the worker.
    pub fn detect_stall(
        &mut self,
        now: Duration,
        response_count: u64,
        queued_datagrams: usize,
        stall_after: Duration,
    ) -> bool {
        if response_count != self.response_count || queued_datagrams == 0 {
            *self = Self::new(now, response_count);
        }
        now.saturating_sub(self.last_progress_at) >= stall_after
    }
}

/// Exponentially weighted moving average of measured service times, updated once per check.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct LearnedServiceTime {
    mean_ns: Option<f64>,
}

/// Weight of the newest check in the average. After 7 checks with responses, half of the old average is replaced.
const NEWEST_RESPONSE_CHECK_WEIGHT: f64 = 0.1;

impl LearnedServiceTime {
    /// Returns an average that starts with the expected service time `time`.
    pub fn with_expected_time(time: Duration) -> Self {
        Self { mean_ns: Some(time.as_nanos() as f64) }
    }

    /// Adds the service times since the previous check, given as their sum (ns) and their number.
    pub fn add_service_times(&mut self, service_time_sum_ns: u64, response_count: u64) {
        if response_count > 0 {
            let check_mean_ns = service_time_sum_ns as f64 / response_count as f64;
            self.mean_ns =
                Some(self.mean_ns.map_or(check_mean_ns, |mean_ns| {
                    mean_ns + NEWEST_RESPONSE_CHECK_WEIGHT * (check_mean_ns - mean_ns)
                }));
        }
    }

    /// Returns the expected service time, or `None` before the first response.
    pub fn expected_service_time(self) -> Option<Duration> {
        self.mean_ns.map(|mean_ns| Duration::from_nanos(mean_ns as u64))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn request_possibly_in_the_socket_does_not_expire() {
        // The two youngest requests wait in the queue at any age, because the worker was stopped.
        assert_eq!(expired_request_indexes(&[30, 20, 25, 40], 2, 10), [3, 0]);
        assert_eq!(expired_request_indexes(&[30, 20, 25, 40], 4, 10), []);
        assert_eq!(expired_request_indexes(&[30, 20, 25, 40], 9, 10), []);
        assert_eq!(expired_request_indexes(&[3, 20, 10, 11], 0, 10), [1, 3]);
        // Requests of age 0 may be newer than the count of the queue, so older ones may be the queued ones.
        assert_eq!(expired_request_indexes(&[0, 0, 20, 20], 2, 10), []);
        assert_eq!(expired_request_indexes(&[], 0, 10), []);
    }

    #[test]
    fn worker_with_queued_datagrams_and_no_response_is_stalled() {
        let ms = Duration::from_millis;
        let mut detector = WorkerStallDetector::new(ms(0), 5);
        assert!(!detector.detect_stall(ms(1000), 5, 0, ms(300)), "nothing to do");
        assert!(!detector.detect_stall(ms(1299), 5, 1, ms(300)));
        assert!(detector.detect_stall(ms(1300), 5, 1, ms(300)));
        assert!(detector.detect_stall(ms(5000), 5, 2, ms(300)));
        assert!(!detector.detect_stall(ms(5001), 6, 2, ms(300)), "it answered");
    }

    #[test]
    fn learned_service_time_follows_measurements() {
        let mut service_time = LearnedServiceTime::default();
        service_time.add_service_times(0, 0);
        assert_eq!(service_time.expected_service_time(), None);
        service_time.add_service_times(3_000, 3);
        assert_eq!(service_time.expected_service_time(), Some(Duration::from_nanos(1_000)));
        (0..100).for_each(|_| service_time.add_service_times(10_000, 2));
        assert!(service_time.expected_service_time().unwrap() > Duration::from_nanos(4_990), "{service_time:?}");
    }
}
