//! Interface between NIC and cores: a constant delay, so the order is kept.

use std::collections::VecDeque;

use crate::rpc::ticks::{NEVER, Tick};

/// One direction of an interface, which delivers items after a constant delay.
#[derive(Debug)]
pub struct DelayLine<T> {
    latency: Tick,
    in_flight: VecDeque<(Tick, T)>,
}

impl<T> DelayLine<T> {
    /// Returns an empty line with a delay of `latency`.
    pub fn new(latency: Tick) -> Self {
        Self { latency, in_flight: VecDeque::new() }
    }

    /// Sends an item at `now`, which must not be before the last send.
    #[inline]
    pub fn send(&mut self, now: Tick, item: T) {
        self.in_flight.push_back((now + self.latency, item));
    }

    #[inline]
    pub fn next_arrival(&self) -> Tick {
        self.in_flight.front().map_or(NEVER, |(at, _)| *at)
    }

    /// Removes the first item to arrive, and returns it with its arrival time.
    #[inline]
    pub fn receive(&mut self) -> Option<(Tick, T)> {
        self.in_flight.pop_front()
    }
}
