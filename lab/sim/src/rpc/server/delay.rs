//! The interface between NIC and cores: everything takes equally long, so nothing overtakes.

use std::collections::VecDeque;

use crate::rpc::ticks::{NEVER, Tick};

/// Items under way, in one direction.
#[derive(Debug)]
pub struct DelayLine<T> {
    latency: Tick,
    in_flight: VecDeque<(Tick, T)>,
}

impl<T> DelayLine<T> {
    /// Everything takes `latency`.
    pub fn new(latency: Tick) -> Self {
        Self { latency, in_flight: VecDeque::new() }
    }

    /// Sends something at `now`, not before what was sent last.
    #[inline]
    pub fn send(&mut self, now: Tick, what: T) {
        self.in_flight.push_back((now + self.latency, what));
    }

    #[inline]
    pub fn next_arrival(&self) -> Tick {
        self.in_flight.front().map_or(NEVER, |(at, _)| *at)
    }

    /// The first to arrive, and when it does.
    #[inline]
    pub fn receive(&mut self) -> Option<(Tick, T)> {
        self.in_flight.pop_front()
    }
}
