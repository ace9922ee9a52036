//! Clock of leases.

use std::ops::Add;
use std::time::Duration;

use nix::time::{ClockId, clock_gettime};

/// Point in time by CLOCK_BOOTTIME, which also counts while the machine sleeps. CLOCK_MONOTONIC does not: after a sleep
/// a machine would consider an expired lease valid.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Deadline(Duration);

impl Deadline {
    /// Returns the present time as a deadline, to which a duration can be added.
    pub fn now() -> Self {
        Self(clock_gettime(ClockId::CLOCK_BOOTTIME).expect("the kernel has CLOCK_BOOTTIME").into())
    }

    /// Returns the time until the deadline; zero if it has passed.
    pub fn remaining(self) -> Duration {
        self.0.saturating_sub(Self::now().0)
    }

    pub(crate) fn since_boot(self) -> Duration {
        self.0
    }

    pub(crate) fn at(since_boot: Duration) -> Self {
        Self(since_boot)
    }
}

impl Add<Duration> for Deadline {
    type Output = Self;

    fn add(self, time: Duration) -> Self {
        Self(self.0 + time)
    }
}
