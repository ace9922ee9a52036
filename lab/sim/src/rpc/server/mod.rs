//! A server: a dispatcher at the NIC, and cores behind an interface that takes time to cross.
//!
//! A server is stepped from outside: [`Server::advance`] to a time, then [`Server::offer`] the requests of that time.
//! So one simulation can have many servers and touches each only at its own events.

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
use coreward_model::dispatch::{Dispatcher, Header};
pub use dfcfs::IdealGroups;
pub use fifo::FifoCores;
pub use priority::PriorityCores;
pub use queued::DisciplineCores;
pub use rebalance::RebalancedServer;
pub use sharing::ProcessorSharing;
pub use spec::{ServerSpec, WithServer};
pub use stealing::StealingCores;

use super::ticks::Tick;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Request {
    /// Arrival at the NIC.
    pub arrived: Tick,
    /// Service time.
    pub work: Tick,
    pub hash: u32,
    /// The hash of its connection, as RSS takes it.
    pub flow_hash: u32,
    /// Its connection, where it matters.
    pub connection: u32,
    /// Its class of service time, as in [`super::Service::class_times`].
    pub class: u8,
    /// Its service: its rank in priority, 0 is served first.
    pub service: u8,
}

impl Request {
    #[inline]
    fn header(&self) -> Header {
        Header { service: self.service, expected: self.work, hash: self.hash, flow_hash: self.flow_hash }
    }
}

/// A response that passes the NIC on its way out.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Response {
    /// Departure.
    pub departed: Tick,
    pub request: Request,
}

pub trait Sink {
    /// A response passed the NIC. Called in the order of time.
    fn response(&mut self, response: &Response);
}

/// A server as a simulation sees it.
pub trait Server<S: Sink> {
    /// Lets everything happen up to and including the moment `until`.
    fn advance(&mut self, until: Tick, sink: &mut S);

    /// A request arrives. Everything up to `request.arrived` must have happened.
    fn offer(&mut self, request: Request);

    /// Requests that came in and whose responses have not left.
    fn outstanding(&self) -> u64;

    /// For each core the time that it has been busy until `now`; everything up to `now` must have happened.
    fn busy(&self, now: Tick) -> Vec<Tick>;
}

/// Cores behind the NIC.
pub trait Cores {
    /// The NIC sends `request` to `core` at `now`.
    fn dispatch(&mut self, now: Tick, core: u16, request: Request);

    /// Time of the next event; [`super::ticks::NEVER`]: nothing is under way.
    fn next_event(&self) -> Tick;

    /// Lets the next event happen; the response and its core, when the event is that one passes the NIC.
    fn step(&mut self) -> Option<(u16, Response)>;

    /// For each core the time that it has been busy until `now`.
    fn busy(&self, now: Tick) -> Vec<Tick>;
}

#[derive(Debug)]
pub struct NicServer<D, C> {
    dispatcher: D,
    cores: C,
    waiting: Vec<VecDeque<Request>>,
    outstanding: u64,
}

impl<D: Dispatcher, C: Cores> NicServer<D, C> {
    /// `services`: how many kinds of requests are queued apart at the NIC.
    pub fn new(dispatcher: D, cores: C, services: u8) -> Self {
        Self { dispatcher, cores, waiting: vec![VecDeque::new(); usize::from(services)], outstanding: 0 }
    }

    /// Sends what waits at the NIC and may go now.
    #[inline]
    fn release(&mut self, now: Tick) {
        while let Some(release) = self.dispatcher.release(now) {
            let released = self.waiting[usize::from(release.service)].pop_front();
            self.cores.dispatch(now, release.core, released.expect("the dispatcher counts those that wait"));
        }
    }
}

impl<D: Dispatcher, C: Cores, S: Sink> Server<S> for NicServer<D, C> {
    #[inline]
    fn advance(&mut self, until: Tick, sink: &mut S) {
        while self.cores.next_event() <= until {
            let Some((core, response)) = self.cores.step() else { continue };
            self.dispatcher.completed(core, &response.request.header());
            self.release(response.departed);
            self.outstanding -= 1;
            sink.response(&response);
        }
    }

    #[inline]
    fn offer(&mut self, request: Request) {
        self.outstanding += 1;
        match self.dispatcher.place(request.arrived, &request.header()) {
            Some(core) => self.cores.dispatch(request.arrived, core, request),
            None => self.waiting[usize::from(request.service)].push_back(request),
        }
    }

    #[inline]
    fn outstanding(&self) -> u64 {
        self.outstanding
    }

    fn busy(&self, now: Tick) -> Vec<Tick> {
        self.cores.busy(now)
    }
}
