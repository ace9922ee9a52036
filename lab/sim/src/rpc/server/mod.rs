//! Simulated server, in which a dispatcher at the NIC sends requests over an interface with latency to the cores.
//!
//! The caller first calls [`QueueingServer::advance`] up to a time, then [`QueueingServer::add_request`] for each
//! request that arrives at this time. A simulation can therefore have many servers and advance each only at its own
//! events.

mod dfcfs;
mod fifo;
mod interface_delay;
mod priority;
mod processor_sharing;
mod queue_discipline;
mod ringleader_server;
mod rss_rebalancing;
mod spec;
mod stealing;

use std::collections::VecDeque;

use coreward_model::dispatch::{DispatchHeader, RequestDispatcher};
pub use dfcfs::GroupedFcfsDispatcher;
pub use fifo::FifoCores;
pub use priority::PriorityCores;
pub use processor_sharing::ProcessorSharingCores;
pub use queue_discipline::QueueDisciplineCores;
pub use ringleader_server::RingLeaderServer;
pub use rss_rebalancing::RebalancedServer;
pub use spec::{ServerSpec, ServerVisitor};
pub use stealing::StealingCores;

use super::ticks::Tick;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SimulatedRequest {
    /// Time at which the request arrives at the NIC.
    pub arrived_at: Tick,
    /// Service time that the request needs at a core.
    pub service_time: Tick,
    pub request_hash: u32,
    /// RSS hash of the request's connection.
    pub flow_hash: u32,
    /// Number of the request's connection, if the policy uses connections.
    pub connection_number: u32,
    /// Index of the request's class in [`super::ServiceTimeDistribution::class_service_times`].
    pub class_index: u8,
    /// Service to which the request belongs. Services are numbered by priority, and 0 is served first.
    pub service: u8,
}

impl SimulatedRequest {
    #[inline]
    fn dispatch_header(&self) -> DispatchHeader {
        DispatchHeader {
            service: self.service,
            expected_service_time: self.service_time,
            request_hash: self.request_hash,
            flow_hash: self.flow_hash,
        }
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SimulatedResponse {
    /// Time at which the response leaves the server's NIC.
    pub departed_at: Tick,
    pub request: SimulatedRequest,
}

pub trait ResponseSink {
    /// Processes a response that leaves the NIC. Responses must be passed in the order of their departure.
    fn handle_response(&mut self, response: &SimulatedResponse);
}

/// Simulated server. The simulation adds requests to it and advances its time.
pub trait QueueingServer<S: ResponseSink> {
    /// Processes all of the server's events up to and including the time `end_time`.
    fn advance(&mut self, end_time: Tick, sink: &mut S);

    /// Adds a request that arrives at the NIC. All events up to `request.arrived_at` must have been processed.
    fn add_request(&mut self, request: SimulatedRequest);

    /// Returns the number of requests that have arrived, but whose responses have not left the NIC yet.
    fn outstanding_request_count(&self) -> u64;

    /// Returns each core's busy time until `now`. All events up to `now` must have been processed.
    fn core_busy_times(&self, now: Tick) -> Vec<Tick>;
}

/// Cores that serve requests, behind the interface to the NIC.
pub trait ServerCores {
    /// Sends `request` from the NIC to `core` at `now`.
    fn dispatch(&mut self, now: Tick, core: u16, request: SimulatedRequest);

    /// Returns the time of the next event, or [`super::ticks::NEVER`] if no request is outstanding.
    fn next_event_time(&self) -> Tick;

    /// Processes the next event. If a response reaches the NIC, returns it with the core that sent it.
    fn process_next_event(&mut self) -> Option<(u16, SimulatedResponse)>;

    /// Returns each core's busy time until `now`.
    fn core_busy_times(&self, now: Tick) -> Vec<Tick>;
}

#[derive(Debug)]
pub struct NicServer<D, C> {
    dispatcher: D,
    cores: C,
    waiting_requests_by_service: Vec<VecDeque<SimulatedRequest>>,
    outstanding_request_count: u64,
}

impl<D: RequestDispatcher, C: ServerCores> NicServer<D, C> {
    /// Creates a server whose NIC has one queue for each of `services` services.
    pub fn new(dispatcher: D, cores: C, services: u8) -> Self {
        Self {
            dispatcher,
            cores,
            waiting_requests_by_service: vec![VecDeque::new(); usize::from(services)],
            outstanding_request_count: 0,
        }
    }

    /// Sends waiting requests to cores for as long as the dispatcher allows it.
    #[inline]
    fn dispatch_waiting_requests(&mut self, now: Tick) {
        while let Some(release) = self.dispatcher.release_request(now) {
            let request = self.waiting_requests_by_service[usize::from(release.service)].pop_front();
            self.cores.dispatch(now, release.core, request.expect("the dispatcher counts those that wait"));
        }
    }
}

impl<D: RequestDispatcher, C: ServerCores, S: ResponseSink> QueueingServer<S> for NicServer<D, C> {
    #[inline]
    fn advance(&mut self, end_time: Tick, sink: &mut S) {
        while self.cores.next_event_time() <= end_time {
            let Some((core, response)) = self.cores.process_next_event() else { continue };
            self.dispatcher.record_completion(core, &response.request.dispatch_header());
            self.dispatch_waiting_requests(response.departed_at);
            self.outstanding_request_count -= 1;
            sink.handle_response(&response);
        }
    }

    #[inline]
    fn add_request(&mut self, request: SimulatedRequest) {
        self.outstanding_request_count += 1;
        match self.dispatcher.place_request(request.arrived_at, &request.dispatch_header()) {
            Some(core) => self.cores.dispatch(request.arrived_at, core, request),
            None => self.waiting_requests_by_service[usize::from(request.service)].push_back(request),
        }
    }

    #[inline]
    fn outstanding_request_count(&self) -> u64 {
        self.outstanding_request_count
    }

    fn core_busy_times(&self, now: Tick) -> Vec<Tick> {
        self.cores.core_busy_times(now)
    }
}
