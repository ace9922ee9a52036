//! The interface between NIC and cores: everything takes equally long, so nothing overtakes.

use std::collections::VecDeque;

use crate::rpc::ticks::{NEVER, Tick};

/// Items under way, in one direction.
#[derive(Debug)]
pub struct DelayLine<T> {
    latency: Tick,
    on_the_way: VecDeque<(Tick, T)>,
}

impl<T> DelayLine<T> {
    /// Everything takes `latency`.
    pub fn new(latency: Tick) -> Self {
        Self { latency, on_the_way: VecDeque::new() }
    }

    /// Sends something at `now`, not before what was sent last.
    #[inline]
    pub fn send(&mut self, now: Tick, what: T) {
        self.on_the_way.push_back((now + self.latency, what));
    }

    #[inline]
    pub fn next_arrival(&self) -> Tick {
        self.on_the_way.front().map_or(NEVER, |(at, _)| *at)
    }

    /// The first to arrive, and when it does.
    #[inline]
    pub fn receive(&mut self) -> Option<(Tick, T)> {
        self.on_the_way.pop_front()
    }
}
