//! Clock of an emulated core, which sleeps for the service times of its requests, so that two CPUs run many cores.

use std::cell::Cell;
use std::time::Duration;

use coreward_load::event_loop::now_ns;

use crate::key_value::worker::{CATCH_UP_NS, sleep_until};

/// Clock of an emulated core, in virtual time.
///
/// A late wake-up delays a response but does not reduce the core's capacity: the next request starts at the virtual end
/// of the previous one.
#[derive(Debug)]
pub struct CoreClock {
    /// Maximum service time between two yield points (ns).
    slice_ns: u64,
    /// Minimum time for which an idle worker sleeps (ns).
    sleep_ns: u64,
    /// Time that the core needs to switch to another service (ns).
    switch_ns: u64,
    /// Number of the service that ran in the last slice.
    service: Cell<u8>,
    /// End of the last slice in virtual time (ns).
    virtual_end_ns: Cell<u64>,
    /// Time at which the worker woke up after the last slice (ns).
    woke_ns: Cell<u64>,
}

impl CoreClock {
    /// Creates a clock. `slice`: maximum service time between two yield points. `sleep`: minimum sleep of an idle
    /// worker. `switch`: time that the core needs to switch to another service.
    pub fn new(slice: Duration, sleep: Duration, switch: Duration) -> Self {
        let [slice_ns, sleep_ns, switch_ns] = [slice, sleep, switch].map(|time| time.as_nanos() as u64);
        let (virtual_end_ns, woke_ns) = (Cell::new(0), Cell::new(0));
        Self { slice_ns, sleep_ns, switch_ns, service: Cell::new(0), virtual_end_ns, woke_ns }
    }

    /// Sleeps for the service time of a request. Meanwhile, `yield_point` may serve other requests.
    pub fn serve(&self, service: u8, time: Duration, mut yield_point: impl FnMut()) {
        self.begin(now_ns());
        let mut left_ns = time.as_nanos() as u64;
        loop {
            let slice_ns = left_ns.min(self.slice_ns);
            let end_ns = self.begin_slice(service) + slice_ns;
            sleep_until(end_ns);
            self.end_slice(end_ns, now_ns());
            left_ns -= slice_ns;
            if left_ns == 0 {
                return;
            }
            yield_point();
        }
    }

    /// Starts a request: now if the worker has slept since the last request, otherwise at that request's virtual end.
    fn begin(&self, now_ns: u64) {
        let has_slept = now_ns - self.woke_ns.get() >= self.sleep_ns;
        let earliest_ns = if has_slept { now_ns } else { now_ns.saturating_sub(CATCH_UP_NS) };
        self.virtual_end_ns.set(self.virtual_end_ns.get().max(earliest_ns));
    }

    /// Starts a slice of a service, and returns the virtual time of its start (ns).
    fn begin_slice(&self, service: u8) -> u64 {
        let switch_ns = if self.service.replace(service) == service { 0 } else { self.switch_ns };
        self.virtual_end_ns.get() + switch_ns
    }

    fn end_slice(&self, end_ns: u64, now_ns: u64) {
        self.virtual_end_ns.set(end_ns);
        self.woke_ns.set(now_ns);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: u64 = 1_000_000;

    fn clock() -> CoreClock {
        CoreClock::new(Duration::from_millis(1), Duration::from_millis(10), Duration::from_millis(2))
    }

    #[test]
    fn late_wake_up_takes_nothing_from_the_capacity() {
        let clock = clock();
        clock.begin(100 * MS);
        clock.end_slice(101 * MS, 104 * MS);
        clock.begin(105 * MS);
        assert_eq!(clock.virtual_end_ns.get(), 101 * MS);
    }

    #[test]
    fn idle_core_begins_when_it_wakes() {
        let clock = clock();
        clock.begin(100 * MS);
        clock.end_slice(101 * MS, 102 * MS);
        clock.begin(112 * MS);
        assert_eq!(clock.virtual_end_ns.get(), 112 * MS);
    }

    #[test]
    fn stopped_core_has_lost_its_time() {
        let clock = clock();
        clock.begin(100 * MS);
        clock.end_slice(101 * MS, 1000 * MS);
        clock.begin(1001 * MS);
        assert_eq!(clock.virtual_end_ns.get(), 1001 * MS - CATCH_UP_NS);
    }

    #[test]
    fn request_takes_its_time_and_that_of_those_in_between() {
        let (clock, before) = (clock(), now_ns());
        let mut yields = 0;
        clock.serve(0, Duration::from_millis(3), || {
            yields += 1;
            clock.serve(0, Duration::from_millis(2), || ());
        });
        assert_eq!(yields, 2);
        assert!(now_ns() - before >= 7 * MS, "3 ms and twice 2 ms");
    }

    #[test]
    fn core_needs_time_to_turn_to_another_service() {
        let clock = clock();
        clock.begin(100 * MS);
        assert_eq!(
            [0, 0, 1, 1, 0].map(|service| clock.begin_slice(service)),
            [100, 100, 102, 100, 102].map(|ms| ms * MS)
        );
    }
}
