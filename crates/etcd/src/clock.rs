//! Clock by which leases are measured.

use std::ops::Add;
use std::time::Duration;

use nix::time::{ClockId, clock_gettime};

/// Point in time on CLOCK_BOOTTIME. This clock continues while the machine is suspended, unlike CLOCK_MONOTONIC, with
/// which an expired lease would seem valid after a suspension.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Deadline(Duration);

impl Deadline {
    /// Returns the current time. The caller adds a duration to it to get a deadline.
    pub fn now() -> Self {
        Self(clock_gettime(ClockId::CLOCK_BOOTTIME).expect("the kernel has CLOCK_BOOTTIME").into())
    }

    /// Returns the time until the deadline, or zero if it has passed.
    pub fn remaining_time(self) -> Duration {
        self.0.saturating_sub(Self::now().0)
    }

    pub(crate) fn time_since_boot(self) -> Duration {
        self.0
    }

    pub(crate) fn from_time_since_boot(since_boot: Duration) -> Self {
        Self(since_boot)
    }
}

impl Add<Duration> for Deadline {
    type Output = Self;

    fn add(self, time: Duration) -> Self {
        Self(self.0 + time)
    }
}
