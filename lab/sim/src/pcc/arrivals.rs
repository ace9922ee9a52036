//! Arrivals of connections, each of one kind (duration and size).

use std::collections::VecDeque;

use coreward_model::rss::{seeded_rng, uniform_below};
use rand::Rng as _;
use rand_xoshiro::Xoshiro256PlusPlus;

use super::mix::ConnectionMix;
use super::simulated_nanoseconds::{Nanoseconds, nanoseconds_to_seconds, seconds_to_nanoseconds};
use crate::random::draw_exponential;

/// Random stream of [`seeded_rng`] for arrivals only, so that all balancing methods get the same connections.
const RNG_STREAM_ARRIVALS: u64 = 200;

/// Process by which clients open connections.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum ConnectionArrivalProcess {
    /// Poisson arrivals, at a rate that keeps the given mean number of connections open.
    OpenLoop { mean_open_connections: f64 },
    /// Closed loop, as in the load generator of Cheetah's Fig. 9 (`includes/httpclient.py` of
    /// github.com/cheetahlb/experiments). Every client sends each request of the mix, and sends it again when it has
    /// ended. Most open requests are therefore long, and most new requests are short.
    ClosedLoop { clients: u32, request_rate: RequestRateWave },
}

/// Request rate that rises once from a base to a peak and falls again.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct RequestRateWave {
    /// Request rate outside the wave, and at its start and end.
    pub base_requests_per_s: f64,
    /// Request rate in the middle of the wave.
    pub peak_requests_per_s: f64,
    /// Duration of the wave (s).
    pub duration_s: f64,
}

impl RequestRateWave {
    /// Returns the request rate at the time `second` (s) of the wave. It rises and falls like the first half of a sine
    /// wave.
    fn request_rate_at(&self, second: f64) -> f64 {
        if second <= 0.0 || second >= self.duration_s {
            return self.base_requests_per_s;
        }
        // This is Bhaskara's approximation of sin(pi x) (7th century), which is within 0.2 % of the height. Unlike a
        // sine function, it yields the same bits on every machine.
        let x = second / self.duration_s;
        let parabola = 16.0 * x * (1.0 - x);
        self.base_requests_per_s
            + (self.peak_requests_per_s - self.base_requests_per_s) * parabola / (5.0 - parabola / 4.0)
    }
}

/// Source of new connections for one simulation, in the order of their starts.
#[derive(Debug)]
pub struct ConnectionSource {
    arrivals: ConnectionArrivalProcess,
    mix: ConnectionMix,
    rng: Xoshiro256PlusPlus,
    next_start: Nanoseconds,
    warm_up_duration: Nanoseconds,
    /// Kinds of the requests that wait to be sent. Only closed-loop arrivals use this queue.
    waiting_request_kind_indices: VecDeque<u8>,
}

impl ConnectionSource {
    /// Creates a source of connections. For a closed loop, the wave of the request rate starts at the end of the
    /// warm-up.
    pub fn new(
        arrivals: ConnectionArrivalProcess,
        mix: &ConnectionMix,
        warm_up_duration: Nanoseconds,
        seed: u64,
    ) -> Self {
        let rng = seeded_rng(seed, RNG_STREAM_ARRIVALS);
        let mut source = Self {
            arrivals,
            mix: mix.clone(),
            rng,
            next_start: 0,
            warm_up_duration,
            waiting_request_kind_indices: VecDeque::new(),
        };
        if let ConnectionArrivalProcess::ClosedLoop { clients, .. } = arrivals {
            let mut kind_indices: Vec<u8> = (0..clients).flat_map(|_| mix.weighted_kind_indices().to_vec()).collect();
            // This is a Fisher-Yates shuffle.
            for last in (1..kind_indices.len()).rev() {
                kind_indices.swap(last, uniform_below(&mut source.rng, last as u32 + 1) as usize);
            }
            source.waiting_request_kind_indices = kind_indices.into();
        }
        source.schedule_next_start();
        source
    }

    /// Returns the time at which the next connection starts.
    pub fn next_start_time(&self) -> Nanoseconds {
        self.next_start
    }

    /// Removes the next connection and returns its identity and kind. Returns `None` if no request waits to be sent.
    pub fn pop_connection(&mut self) -> Option<(u64, u8)> {
        let kind_index = match self.arrivals {
            ConnectionArrivalProcess::OpenLoop { .. } => Some(self.mix.draw_kind(&mut self.rng)),
            ConnectionArrivalProcess::ClosedLoop { .. } => self.waiting_request_kind_indices.pop_front(),
        };
        let identity = self.rng.next_u64();
        self.schedule_next_start();
        Some((identity, kind_index?))
    }

    pub fn on_connection_ended(&mut self, kind_index: u8) {
        if let ConnectionArrivalProcess::ClosedLoop { .. } = self.arrivals {
            self.waiting_request_kind_indices.push_back(kind_index);
        }
    }

    fn schedule_next_start(&mut self) {
        let unit_gap = draw_exponential(&mut self.rng);
        let mean_gap_ns = match self.arrivals {
            ConnectionArrivalProcess::OpenLoop { mean_open_connections: connections } => {
                self.mix.mean_duration_ns() / connections
            }
            ConnectionArrivalProcess::ClosedLoop { request_rate, .. } => {
                1e9 / request_rate.request_rate_at(
                    nanoseconds_to_seconds(self.next_start) - nanoseconds_to_seconds(self.warm_up_duration),
                )
            }
        };
        self.next_start += (unit_gap * mean_gap_ns).round() as Nanoseconds;
    }
}

/// Returns the time that the initially empty system takes to reach its steady state. In an open loop, this is the
/// longest connection's duration.
pub fn settling_time(arrivals: &ConnectionArrivalProcess, mix: &ConnectionMix) -> Nanoseconds {
    match arrivals {
        ConnectionArrivalProcess::OpenLoop { .. } => mix.longest_duration(),
        // The experiment runs for 15 s before the time that its plot shows.
        ConnectionArrivalProcess::ClosedLoop { .. } => seconds_to_nanoseconds(15.0),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn open_loop_rate_follows_from_the_mean_duration() {
        let mut source = ConnectionSource::new(
            ConnectionArrivalProcess::OpenLoop { mean_open_connections: 1_000.0 },
            &ConnectionMix::with_constant_duration(10.0),
            0,
            1,
        );
        let mut connection_count = 0;
        while source.next_start_time() < seconds_to_nanoseconds(1_000.0) {
            source.pop_connection().unwrap();
            connection_count += 1;
        }
        // The mean is 100 per second, and the standard deviation of the count is 316.
        assert!((98_700..101_300).contains(&connection_count), "{connection_count}");
    }

    #[test]
    fn ended_request_of_a_closed_loop_is_sent_again() {
        let wave = RequestRateWave { base_requests_per_s: 1_000.0, peak_requests_per_s: 2_000.0, duration_s: 40.0 };
        let mix = ConnectionMix::with_constant_duration(10.0);
        let mut source =
            ConnectionSource::new(ConnectionArrivalProcess::ClosedLoop { clients: 2, request_rate: wave }, &mix, 0, 1);
        assert!(
            source.pop_connection().is_some() && source.pop_connection().is_some() && source.pop_connection().is_none()
        );
        source.on_connection_ended(0);
        assert!(source.pop_connection().is_some() && source.pop_connection().is_none());
        assert_eq!(
            [
                wave.request_rate_at(-1.0),
                wave.request_rate_at(0.0),
                wave.request_rate_at(20.0),
                wave.request_rate_at(40.0)
            ],
            [1_000.0, 1_000.0, 2_000.0, 1_000.0]
        );
        // The expected values contain sin(pi / 6) and sin(pi / 4).
        assert!(
            (wave.request_rate_at(40.0 / 6.0) - 1_500.0).abs() < 2.0
                && (wave.request_rate_at(10.0) - 1_707.1).abs() < 2.0
        );
    }
}
