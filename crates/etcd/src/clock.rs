//! The clock by which a lease ends.

use std::ops::Add;
use std::time::Duration;

use nix::time::{ClockId, clock_gettime};

/// A moment by CLOCK_BOOTTIME: never goes back, is not set by anybody, and goes on while the machine sleeps (CLOCK_MONOTONIC
/// does not: who wakes up would think that its lease still holds).
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Moment(Duration);

impl Moment {
    /// Now.
    pub fn now() -> Self {
        // Every kernel since 2.6.39 has this clock.
        Self(clock_gettime(ClockId::CLOCK_BOOTTIME).expect("the kernel has CLOCK_BOOTTIME").into())
    }

    /// How long it is until then; zero: it has passed.
    pub fn left(self) -> Duration {
        self.0.saturating_sub(Self::now().0)
    }

    /// Since the machine's start.
    pub(crate) fn since_boot(self) -> Duration {
        self.0
    }

    pub(crate) fn at(since_boot: Duration) -> Self {
        Self(since_boot)
    }
}

impl Add<Duration> for Moment {
    type Output = Self;

    fn add(self, time: Duration) -> Self {
        Self(self.0 + time)
    }
}
