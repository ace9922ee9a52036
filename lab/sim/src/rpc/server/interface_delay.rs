//! Interface between NIC and cores, which delays everything by a constant time and therefore keeps the order.

use std::collections::VecDeque;

use crate::rpc::ticks::{NEVER, Tick};

/// One direction of an interface, in which every item arrives after the same delay.
#[derive(Debug)]
pub struct DelayLine<T> {
    latency: Tick,
    items_in_flight: VecDeque<(Tick, T)>,
}

impl<T> DelayLine<T> {
    pub fn new(latency: Tick) -> Self {
        Self { latency, items_in_flight: VecDeque::new() }
    }

    /// Sends an item at the time `now`, which must not be earlier than the previous send.
    #[inline]
    pub fn send(&mut self, now: Tick, item: T) {
        self.items_in_flight.push_back((now + self.latency, item));
    }

    #[inline]
    pub fn next_arrival_time(&self) -> Tick {
        self.items_in_flight.front().map_or(NEVER, |(at, _)| *at)
    }

    /// Removes the item that arrives first, and returns it with its arrival time.
    #[inline]
    pub fn receive(&mut self) -> Option<(Tick, T)> {
        self.items_in_flight.pop_front()
    }
}
