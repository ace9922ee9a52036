//! The controller as one caller has it, while all others wait. Tests measure how long that is, in CPU time: what else runs on the
//! machine does not count.

use parking_lot::MutexGuard;

use coreward_controller::Controller;

#[cfg(not(test))]
pub type TimedGuard<'a> = MutexGuard<'a, Controller>;

#[cfg(test)]
pub use timed::TimedGuard;

#[cfg(test)]
mod timed {
    use std::ops::{Deref, DerefMut};
    use std::sync::atomic::{AtomicU64, Ordering};
    use std::time::Duration;

    use nix::time::{ClockId, clock_gettime};

    use super::{Controller, MutexGuard};

    pub struct TimedGuard<'a> {
        controller: MutexGuard<'a, Controller>,
        since: u64,
        longest: &'a AtomicU64,
    }

    impl<'a> TimedGuard<'a> {
        /// `longest`: nanoseconds.
        pub fn begin(controller: MutexGuard<'a, Controller>, longest: &'a AtomicU64) -> Self {
            Self { controller, since: cpu_time(), longest }
        }
    }

    fn cpu_time() -> u64 {
        Duration::from(clock_gettime(ClockId::CLOCK_THREAD_CPUTIME_ID).unwrap()).as_nanos() as u64
    }

    impl Drop for TimedGuard<'_> {
        fn drop(&mut self) {
            self.longest.fetch_max(cpu_time() - self.since, Ordering::Relaxed);
        }
    }

    impl Deref for TimedGuard<'_> {
        type Target = Controller;

        fn deref(&self) -> &Controller {
            &self.controller
        }
    }

    impl DerefMut for TimedGuard<'_> {
        fn deref_mut(&mut self) -> &mut Controller {
            &mut self.controller
        }
    }
}
