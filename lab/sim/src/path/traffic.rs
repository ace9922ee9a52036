//! Generator of connections and their requests.

use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::net::Ipv4Addr;

use coreward_model::FourTuple;
use coreward_model::rss::{seeded_rng, uniform_below};
use rand_xoshiro::Xoshiro256PlusPlus;

use super::PathSimulationConfig;
use crate::random::{draw_exponential, draw_log_normal, draw_uniform_below_one};
use crate::rpc::ticks::{NEVER, Tick, time_units_to_ticks};

/// Event of the simulated traffic.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum TrafficEvent {
    /// A client opens a connection and sends its first request.
    ConnectionOpened(FourTuple),
    /// A client sends the next request of an open connection.
    NextRequest(ConnectionId),
}

/// Id of an open connection, which may be reused after the connection has closed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct ConnectionId(pub u32);

/// Number of requests that a connection has yet to send, and the mean gap between two of them (ticks).
#[derive(Debug, Clone, Copy)]
struct RemainingRequests {
    remaining_request_count: u64,
    mean_gap_ticks: f64,
}

/// Generator of the simulated traffic. Connections arrive as a Poisson process, each with a geometric number of
/// requests. Gaps between requests are exponential, with a mean drawn per connection. The traffic does not depend on
/// the servers, so all policies get the same traffic.
#[derive(Debug)]
pub struct SimulatedTraffic {
    /// Mean time between the arrivals of two connections (ticks).
    mean_arrival_interval_ticks: f64,
    requests_per_connection: f64,
    mean_request_gap_ticks: f64,
    request_gap_sigma: f64,
    next_connection_at: Tick,
    scheduled_requests: BinaryHeap<Reverse<(Tick, ConnectionId)>>,
    /// Requests that each connection has yet to send, indexed by the connection's id.
    remaining_requests_by_connection: Vec<RemainingRequests>,
    connection_rng: Xoshiro256PlusPlus,
    request_rng: Xoshiro256PlusPlus,
}

const RNG_STREAM_CONNECTIONS: u64 = 0x7061_7401;
const RNG_STREAM_REQUESTS: u64 = 0x7061_7402;

/// Address and port of the service that all connections use.
const VIP_AND_PORT: (Ipv4Addr, u16) = (Ipv4Addr::new(10, 200, 0, 1), 80);

impl SimulatedTraffic {
    pub fn new(config: &PathSimulationConfig, seed: u64) -> Self {
        let core_count = f64::from(config.server_count) * f64::from(config.cores_per_server);
        let work_per_connection = config.service_times.mean() * config.requests_per_connection;
        let mut traffic = Self {
            mean_arrival_interval_ticks: work_per_connection / (config.offered_load * core_count)
                * time_units_to_ticks(1.0) as f64,
            requests_per_connection: config.requests_per_connection,
            mean_request_gap_ticks: config.mean_request_gap * time_units_to_ticks(1.0) as f64,
            request_gap_sigma: config.request_gap_sigma,
            next_connection_at: 0,
            scheduled_requests: BinaryHeap::new(),
            remaining_requests_by_connection: Vec::new(),
            connection_rng: seeded_rng(seed, RNG_STREAM_CONNECTIONS),
            request_rng: seeded_rng(seed, RNG_STREAM_REQUESTS),
        };
        traffic.next_connection_at = traffic.draw_arrival_interval();
        traffic
    }

    fn draw_arrival_interval(&mut self) -> Tick {
        (draw_exponential(&mut self.connection_rng) * self.mean_arrival_interval_ticks + 0.5) as Tick
    }

    pub fn next_event_time(&self) -> Tick {
        self.scheduled_requests
            .peek()
            .map_or(NEVER, |Reverse((request_at, _))| *request_at)
            .min(self.next_connection_at)
    }

    pub fn pop_event(&mut self) -> TrafficEvent {
        if let Some(Reverse((request_at, id))) = self.scheduled_requests.peek().copied()
            && request_at <= self.next_connection_at
        {
            self.scheduled_requests.pop();
            self.remaining_requests_by_connection[id.0 as usize].remaining_request_count -= 1;
            self.schedule_next_request(id, request_at);
            return TrafficEvent::NextRequest(id);
        }
        TrafficEvent::ConnectionOpened(self.draw_four_tuple())
    }

    /// Draws a 4-tuple with a random client in 10.0.0.0/8. Connections rarely get the same 4-tuple.
    fn draw_four_tuple(&mut self) -> FourTuple {
        let client = Ipv4Addr::from(0x0a00_0000 | uniform_below(&mut self.connection_rng, 1 << 24));
        let port = 1_024 + uniform_below(&mut self.connection_rng, 65_536 - 1_024) as u16;
        FourTuple::ipv4((client, port), VIP_AND_PORT)
    }

    /// Assigns the id to the connection of the last [`TrafficEvent::ConnectionOpened`], and schedules its next request.
    /// No other open connection may have this id.
    pub fn open_connection(&mut self, id: ConnectionId) {
        let opened_at = self.next_connection_at;
        self.next_connection_at = opened_at + self.draw_arrival_interval();
        let pending_requests = RemainingRequests {
            remaining_request_count: self.draw_request_count(),
            mean_gap_ticks: self.draw_mean_request_gap(),
        };
        let index = id.0 as usize;
        if self.remaining_requests_by_connection.len() <= index {
            self.remaining_requests_by_connection.resize(index + 1, pending_requests);
        }
        self.remaining_requests_by_connection[index] = pending_requests;
        self.schedule_next_request(id, opened_at);
    }

    pub fn has_more_requests(&self, id: ConnectionId) -> bool {
        self.remaining_requests_by_connection[id.0 as usize].remaining_request_count > 0
    }

    /// Draws the number of requests that follow the first (geometric). The configured mean includes the first.
    fn draw_request_count(&mut self) -> u64 {
        let mean_request_count = self.requests_per_connection;
        if mean_request_count <= 1.0 {
            return 0;
        }
        // By inversion, this is the number of failures before a success whose probability is 1/mean.
        let u = 1.0 - draw_uniform_below_one(&mut self.connection_rng);
        (libm::log(u) / libm::log(1.0 - 1.0 / mean_request_count)) as u64
    }

    /// Draws a connection's mean gap between requests (ticks). The average over all connections is the configured gap.
    fn draw_mean_request_gap(&mut self) -> f64 {
        let sigma = self.request_gap_sigma;
        if sigma == 0.0 {
            self.mean_request_gap_ticks
        } else {
            self.mean_request_gap_ticks * draw_log_normal(&mut self.connection_rng, -sigma * sigma / 2.0, sigma)
        }
    }

    /// Schedules the connection's next request, if it has one, relative to the previous request at `last_request_at`.
    fn schedule_next_request(&mut self, id: ConnectionId, last_request_at: Tick) {
        let pending_requests = self.remaining_requests_by_connection[id.0 as usize];
        if pending_requests.remaining_request_count > 0 {
            let request_gap = (draw_exponential(&mut self.request_rng) * pending_requests.mean_gap_ticks + 0.5) as Tick;
            self.scheduled_requests.push(Reverse((last_request_at + request_gap, id)));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::rpc::ticks::ticks_to_time_units;

    #[test]
    fn connection_and_request_rates_are_as_configured() {
        let config = PathSimulationConfig {
            offered_load: 0.5,
            requests_per_connection: 8.0,
            request_gap_sigma: 1.0,
            ..PathSimulationConfig::default()
        };
        let mut traffic = SimulatedTraffic::new(&config, 1);
        let (mut connections, mut requests, mut last_event_time) = (0u32, 0u32, 0);
        while connections < 50_000 {
            assert!(traffic.next_event_time() >= last_event_time, "time goes on");
            last_event_time = traffic.next_event_time();
            requests += 1;
            if let TrafficEvent::ConnectionOpened(_) = traffic.pop_event() {
                traffic.open_connection(ConnectionId(connections));
                connections += 1;
            }
        }
        // The load is 0.5 of 16 cores, with 8 requests of mean 1 per connection. The last connections are incomplete.
        let connections_per_unit = f64::from(connections) / ticks_to_time_units(last_event_time);
        assert!((connections_per_unit - 1.0).abs() < 0.02, "{connections_per_unit} connections per unit");
        let requests_per_connection = f64::from(requests) / f64::from(connections);
        assert!((7.6..8.1).contains(&requests_per_connection), "{requests_per_connection} requests per connection");
    }
}
