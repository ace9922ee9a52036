//! Clock of an emulated core, which sleeps for its requests' service times, so that two CPUs can run many cores.

use std::cell::Cell;
use std::time::Duration;

use coreward_load::event_loop::now_ns;

use crate::key_value::worker::{MAX_CATCH_UP_NS, sleep_until};

/// Clock of an emulated core, which computes when each request would end on a real core.
///
/// A late wake-up delays a response but does not reduce the core's capacity. The next request starts at the computed
/// end of the previous one and not at the wake-up.
#[derive(Debug)]
pub struct CoreClock {
    /// Maximum duration of a slice, which is the service time between two yield points (ns).
    max_slice_ns: u64,
    /// Minimum time for which an idle worker sleeps (ns).
    idle_sleep_ns: u64,
    /// Time that the core needs to switch to a different service (ns).
    service_switch_ns: u64,
    /// Number of the service to which the last slice belonged.
    last_service_number: Cell<u8>,
    /// Computed end of the last slice (ns), which precedes the actual wake-up.
    last_slice_end_ns: Cell<u64>,
    /// Time at which the worker woke up after the last slice (ns).
    last_wake_up_ns: Cell<u64>,
}

impl CoreClock {
    /// Creates a clock. `slice` is the maximum service time between two yield points. `sleep` is the minimum sleep of
    /// an idle worker. `switch` is the time that the core needs to switch to another service.
    pub fn new(slice: Duration, sleep: Duration, switch: Duration) -> Self {
        let [max_slice_ns, idle_sleep_ns, service_switch_ns] =
            [slice, sleep, switch].map(|time| time.as_nanos() as u64);
        let (last_slice_end_ns, last_wake_up_ns) = (Cell::new(0), Cell::new(0));
        Self {
            max_slice_ns,
            idle_sleep_ns,
            service_switch_ns,
            last_service_number: Cell::new(0),
            last_slice_end_ns,
            last_wake_up_ns,
        }
    }

    /// Sleeps for the service time of a request. At each call of `yield_point`, other requests may be served.
    pub fn serve_request(&self, service: u8, service_time: Duration, mut yield_point: impl FnMut()) {
        self.begin_request(now_ns());
        let mut remaining_ns = service_time.as_nanos() as u64;
        loop {
            let slice_ns = remaining_ns.min(self.max_slice_ns);
            let slice_end_ns = self.begin_slice(service) + slice_ns;
            sleep_until(slice_end_ns);
            self.end_slice(slice_end_ns, now_ns());
            remaining_ns -= slice_ns;
            if remaining_ns == 0 {
                return;
            }
            yield_point();
        }
    }

    /// Starts a request. Its start is now if the worker has been idle, or else the computed end of the previous
    /// request.
    fn begin_request(&self, now_ns: u64) {
        let has_slept = now_ns - self.last_wake_up_ns.get() >= self.idle_sleep_ns;
        let earliest_start_ns = if has_slept { now_ns } else { now_ns.saturating_sub(MAX_CATCH_UP_NS) };
        self.last_slice_end_ns.set(self.last_slice_end_ns.get().max(earliest_start_ns));
    }

    /// Starts a slice of a service, and returns the slice's start on the emulated core (ns).
    fn begin_slice(&self, service: u8) -> u64 {
        let switch_ns = if self.last_service_number.replace(service) == service { 0 } else { self.service_switch_ns };
        self.last_slice_end_ns.get() + switch_ns
    }

    fn end_slice(&self, end_ns: u64, now_ns: u64) {
        self.last_slice_end_ns.set(end_ns);
        self.last_wake_up_ns.set(now_ns);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const NS_PER_MS: u64 = 1_000_000;

    fn build_core_clock() -> CoreClock {
        CoreClock::new(Duration::from_millis(1), Duration::from_millis(10), Duration::from_millis(2))
    }

    #[test]
    fn late_wake_up_does_not_reduce_the_capacity() {
        let core_clock = build_core_clock();
        core_clock.begin_request(100 * NS_PER_MS);
        core_clock.end_slice(101 * NS_PER_MS, 104 * NS_PER_MS);
        core_clock.begin_request(105 * NS_PER_MS);
        assert_eq!(core_clock.last_slice_end_ns.get(), 101 * NS_PER_MS);
    }

    #[test]
    fn idle_core_starts_a_request_when_it_wakes_up() {
        let core_clock = build_core_clock();
        core_clock.begin_request(100 * NS_PER_MS);
        core_clock.end_slice(101 * NS_PER_MS, 102 * NS_PER_MS);
        core_clock.begin_request(112 * NS_PER_MS);
        assert_eq!(core_clock.last_slice_end_ns.get(), 112 * NS_PER_MS);
    }

    #[test]
    fn core_stopped_for_long_does_not_catch_up() {
        let core_clock = build_core_clock();
        core_clock.begin_request(100 * NS_PER_MS);
        core_clock.end_slice(101 * NS_PER_MS, 1000 * NS_PER_MS);
        core_clock.begin_request(1001 * NS_PER_MS);
        assert_eq!(core_clock.last_slice_end_ns.get(), 1001 * NS_PER_MS - MAX_CATCH_UP_NS);
    }

    #[test]
    fn preempted_request_ends_after_own_and_preempting_service_time() {
        let (clock, start_ns) = (build_core_clock(), now_ns());
        let mut yield_count = 0;
        clock.serve_request(0, Duration::from_millis(3), || {
            yield_count += 1;
            clock.serve_request(0, Duration::from_millis(2), || ());
        });
        assert_eq!(yield_count, 2);
        assert!(now_ns() - start_ns >= 7 * NS_PER_MS, "3 ms and twice 2 ms");
    }

    #[test]
    fn switch_to_another_service_takes_time() {
        let core_clock = build_core_clock();
        core_clock.begin_request(100 * NS_PER_MS);
        assert_eq!(
            [0, 0, 1, 1, 0].map(|service| core_clock.begin_slice(service)),
            [100, 100, 102, 100, 102].map(|ms| ms * NS_PER_MS)
        );
    }
}
