//! Server: a dispatcher at the NIC, and cores behind an interface with latency.
//!
//! The caller steps a server: [`Server::advance`] to a time, then [`Server::offer`] for the requests of that time. A
//! simulation can therefore have many servers, and step each only at its own events.

mod allocated;
mod delay;
mod dfcfs;
mod fifo;
mod priority;
mod queued;
mod rebalance;
mod sharing;
mod spec;
mod stealing;

use std::collections::VecDeque;

pub use allocated::RingLeaderServer;
use coreward_model::dispatch::{DispatchHeader, Dispatcher};
pub use dfcfs::GroupedFcfsDispatcher;
pub use fifo::FifoCores;
pub use priority::PriorityCores;
pub use queued::DisciplineCores;
pub use rebalance::RebalancedServer;
pub use sharing::ProcessorSharing;
pub use spec::{ServerSpec, ServerVisitor};
pub use stealing::StealingCores;

use super::ticks::Tick;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Request {
    /// Arrival time at the NIC.
    pub arrived_at: Tick,
    /// Service time of the request.
    pub work: Tick,
    pub hash: u32,
    /// RSS hash of the connection.
    pub flow_hash: u32,
    /// Number of the request's connection, if the policy uses it.
    pub connection: u32,
    /// Class of service time, as in [`super::ServiceTimeDistribution::class_times`].
    pub class: u8,
    /// Service to which the request belongs, by priority: 0 is served first.
    pub service: u8,
}

impl Request {
    #[inline]
    fn header(&self) -> DispatchHeader {
        DispatchHeader {
            service: self.service,
            expected_service_time: self.work,
            request_hash: self.hash,
            flow_hash: self.flow_hash,
        }
    }
}

/// Response that leaves the NIC.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Response {
    /// Time at which the response leaves the NIC.
    pub departed_at: Tick,
    pub request: Request,
}

pub trait ResponseSink {
    /// Processes a response that leaves the NIC. Must be called in the order of departures.
    fn handle_response(&mut self, response: &Response);
}

/// Interface of a server to a simulation.
pub trait Server<S: ResponseSink> {
    /// Processes all events up to and including the time `until`.
    fn advance(&mut self, until: Tick, sink: &mut S);

    /// Adds a request. All events up to `request.arrived_at` must have been processed.
    fn offer(&mut self, request: Request);

    /// Returns the number of requests whose responses have not left the NIC yet.
    fn outstanding_count(&self) -> u64;

    /// Returns each core's busy time until `now`; all events up to `now` must have been processed.
    fn busy_times(&self, now: Tick) -> Vec<Tick>;
}

/// Cores behind the NIC.
pub trait Cores {
    /// Sends `request` from the NIC to `core` at `now`.
    fn dispatch(&mut self, now: Tick, core: u16, request: Request);

    /// Returns the time of the next event; [`super::ticks::LONG_TIMEOUT`] without outstanding requests.
    fn next_event(&self) -> Tick;

    /// Processes the next event. Returns the response and its core, if a response reaches the NIC.
    fn step(&mut self) -> Option<(u16, Response)>;

    /// Returns each core's busy time until `now`.
    fn busy_times(&self, now: Tick) -> Vec<Tick>;
}

#[derive(Debug)]
pub struct NicServer<D, C> {
    dispatcher: D,
    cores: C,
    waiting_requests: Vec<VecDeque<Request>>,
    outstanding_count: u64,
}

impl<D: Dispatcher, C: Cores> NicServer<D, C> {
    /// Creates a server with a queue at the NIC for each of `services` services.
    pub fn new(dispatcher: D, cores: C, services: u8) -> Self {
        Self { dispatcher, cores, waiting_requests: vec![VecDeque::new(); usize::from(services)], outstanding_count: 0 }
    }

    /// Sends those waiting requests to cores that the dispatcher now allows.
    #[inline]
    fn release_waiting_requests(&mut self, now: Tick) {
        while let Some(release) = self.dispatcher.release(now) {
            let request = self.waiting_requests[usize::from(release.service)].pop_front();
            self.cores.dispatch(now, release.core, request.expect("the dispatcher counts those that wait"));
        }
    }
}

impl<D: Dispatcher, C: Cores, S: ResponseSink> Server<S> for NicServer<D, C> {
    #[inline]
    fn advance(&mut self, until: Tick, sink: &mut S) {
        while self.cores.next_event() <= until {
            let Some((core, response)) = self.cores.step() else { continue };
            self.dispatcher.record_completion(core, &response.request.header());
            self.release_waiting_requests(response.departed_at);
            self.outstanding_count -= 1;
            sink.handle_response(&response);
        }
    }

    #[inline]
    fn offer(&mut self, request: Request) {
        self.outstanding_count += 1;
        match self.dispatcher.place(request.arrived_at, &request.header()) {
            Some(core) => self.cores.dispatch(request.arrived_at, core, request),
            None => self.waiting_requests[usize::from(request.service)].push_back(request),
        }
    }

    #[inline]
    fn outstanding_count(&self) -> u64 {
        self.outstanding_count
    }

    fn busy_times(&self, now: Tick) -> Vec<Tick> {
        self.cores.busy_times(now)
    }
}
