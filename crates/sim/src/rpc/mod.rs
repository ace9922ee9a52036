//! `coreward sim rpc` and `coreward sim peak`: requests at the cores of one server (Turbo, HPCA'23, Sect. III and VI;
//! RingLeader, NSDI'23, Sect. 2.1).
//!
//! Requests come in at a NIC (Poisson), a policy gives them to cores behind an interface that takes time to cross, cores
//! serve them, and responses go out by the same NIC. docs/sim-rpc.md says what is modelled.

pub mod cli;
mod jbsrq;
mod outcome;
mod peak;
mod policy;
pub mod server;
mod service;
mod ticks;
mod workload;

use std::num::NonZeroU32;

use coreward_model::dispatch::{
    BucketHash, Dispatcher, JoinLightestQueue, JoinShortestQueue, RandomCore, RoundRobinCore,
};
use coreward_model::rss::IndirectionTable;
pub use jbsrq::{JbsrqOptions, Priorities};
pub use outcome::{Class, Quantiles, Window};
use outcome::{Observer, Recorder};
pub use peak::{Measure, Peak, PeakConfig, SloUnit, peak};
pub use policy::{FORMS, Policy, PolicyError};
use server::{Cores, FifoCores, IdealGroups, NicServer, Server, SharedCores};
pub use service::{LongClass, Service, ServiceError};
use ticks::{NEVER, Tick, ticks};
use workload::Workload;

/// One simulation. Times are in units of service time (see [`Service`]).
#[derive(Debug, Clone, PartialEq)]
pub struct Config {
    /// How requests get to cores.
    pub policy: Policy,
    /// Cores of the server, at least 1.
    pub cores: u16,
    /// How long requests take.
    pub service: Service,
    /// Latency of the interface between NIC and cores, one way.
    pub latency: f64,
    /// Offered load as a fraction of what the cores could serve.
    pub load: f64,
    /// Requests to simulate; the first tenth is warm-up and is not counted.
    pub requests: u64,
    /// The same seed gives the same result.
    pub seed: u64,
    /// Connections that the requests belong to; `None`: every request is a connection of its own.
    pub connections: Option<NonZeroU32>,
    /// The i-th most frequent connection has a share proportional to 1 / i^skew; 0: all are alike.
    pub skew: f64,
    /// Most requests inside the server; what comes in above that is dropped. `None`: no bound.
    pub queue: Option<u64>,
    /// Length of the windows of [`Outcome::windows`], in units of service time.
    pub window: Option<f64>,
}

impl Default for Config {
    fn default() -> Self {
        Self {
            policy: Policy::ShortestQueue,
            cores: 16,
            service: Service::Exponential,
            latency: 0.0,
            load: 0.8,
            requests: 1_000_000,
            seed: 1,
            connections: None,
            skew: 0.0,
            queue: None,
            window: None,
        }
    }
}

/// What a simulation gave.
#[derive(Debug, Clone, PartialEq)]
pub struct Outcome {
    /// Latencies of all requests after the warm-up.
    pub all: Quantiles,
    /// Latencies by class, the shortest class first. A class of which no request came is left out.
    pub classes: Vec<Class>,
    /// Requests that came in, with those of the warm-up.
    pub requests: u64,
    /// Share of them that was dropped because the server was full, in percent.
    pub dropped_pct: f64,
    /// Latencies over time, when [`Config::window`] is set.
    pub windows: Vec<Window>,
}

/// What is wrong with a simulation.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum Error {
    /// No cores.
    #[error("0 cores: expected 1 to 65535")]
    NoCores,
    /// Not a load.
    #[error("load {0}: expected a number above 0")]
    Load(f64),
    /// A load under which queues grow without end.
    #[error(
        "load {load}: expected less than {capacity}, which is what {policy} can carry with this service time and \
         latency, or a bound on the queue"
    )]
    Overload {
        /// The offered load.
        load: f64,
        /// What the policy can carry.
        capacity: f64,
        /// The policy.
        policy: Policy,
    },
    /// Not a latency.
    #[error("latency {0}: expected a number from 0 to 1000000 service times")]
    Latency(f64),
    /// Too few requests for any quantile, or too many for 64 bits of time.
    #[error("{requests} requests: expected 10 to {most} at this load")]
    Requests {
        /// As given.
        requests: u64,
        /// The most.
        most: u64,
    },
    /// Not a skew.
    #[error("skew {0}: expected a number from 0 to 10")]
    Skew(f64),
    /// Not a window.
    #[error("window {0}: expected a number from 0.001 to 1000000000 service times")]
    Window(f64),
    /// No room for any request.
    #[error("a queue of 0 requests: expected at least 1")]
    NoQueue,
    /// Groups that do not make up the cores.
    #[error("policy {policy}: its groups have {grouped} cores, the server has {cores}")]
    Groups {
        /// The policy.
        policy: Policy,
        /// Cores of all groups.
        grouped: u32,
        /// Cores of the server.
        cores: u16,
    },
    /// Not a service level objective.
    #[error("SLO {0}: expected a number above 0, in multiples of the service time")]
    Slo(f64),
    /// Comes with the next commits.
    #[error("policy {0}: not built yet")]
    NotBuilt(Policy),
    /// No seeds.
    #[error("no seeds: expected at least one")]
    NoSeeds,
    /// Bisections beyond the precision of any run.
    #[error("{0} steps of bisection: expected 1 to 30")]
    Steps(u32),
}

/// Simulates.
///
/// # Errors
/// Names the value that is out of range, and the range.
pub fn run(config: &Config) -> Result<Outcome, Error> {
    config.check()?;
    let capacity = config.policy.capacity(config.service.mean(), config.latency);
    if config.queue.is_none() && config.load >= capacity {
        return Err(Error::Overload { load: config.load, capacity, policy: config.policy.clone() });
    }
    let times = config.service.class_times();
    let mut recorder = Recorder::new(times.len(), config.window);
    let dropped = simulate(config, config.load, &mut recorder);
    let class = |(service, quantiles): (f64, Option<Quantiles>)| Some(Class { service, quantiles: quantiles? });
    Ok(Outcome {
        all: recorder.all().expect("requests after the warm-up were answered"),
        classes: times.into_iter().zip(recorder.classes()).filter_map(class).collect(),
        requests: config.requests,
        dropped_pct: dropped as f64 / config.requests as f64 * 100.0,
        windows: recorder.into_windows(),
    })
}

impl Config {
    fn check(&self) -> Result<(), Error> {
        let within = |value: f64, low: f64, high: f64| (low..=high).contains(&value);
        if self.cores == 0 {
            return Err(Error::NoCores);
        }
        if !(self.load > 0.0 && self.load.is_finite()) {
            return Err(Error::Load(self.load));
        }
        if !within(self.latency, 0.0, 1e6) {
            return Err(Error::Latency(self.latency));
        }
        // Half of the 64 bits: the other half is for queues.
        let duration = self.service.mean() / (self.load * f64::from(self.cores));
        let most = (Tick::MAX / 2) as f64 / ticks::TICKS_PER_UNIT as f64 / duration;
        if self.requests < 10 || self.requests as f64 > most {
            return Err(Error::Requests { requests: self.requests, most: most as u64 });
        }
        if !within(self.skew, 0.0, 10.0) {
            return Err(Error::Skew(self.skew));
        }
        if let Some(window) = self.window.filter(|window| !within(*window, 1e-3, 1e9)) {
            return Err(Error::Window(window));
        }
        if self.queue == Some(0) {
            return Err(Error::NoQueue);
        }
        if matches!(self.policy, Policy::RankedQueue(_) | Policy::RssRebalanced(_) | Policy::WorkStealing(_)) {
            return Err(Error::NotBuilt(self.policy.clone()));
        }
        if let Policy::GroupedFcfs { groups, cores_each } = self.policy {
            let grouped = u32::from(groups.get()) * u32::from(cores_each.get());
            if grouped != u32::from(self.cores) {
                return Err(Error::Groups { policy: self.policy.clone(), grouped, cores: self.cores });
            }
        }
        Ok(())
    }
}

/// Simulates the configuration at `load`, which need not be its own; the number of requests that were dropped.
fn simulate(config: &Config, load: f64, observer: &mut impl Observer) -> u64 {
    let cores = config.cores;
    let fifo = || FifoCores::new(cores, ticks(config.latency));
    let mut run = Run { config, load, observer };
    match &config.policy {
        Policy::CentralFcfs => run.nic(JoinShortestQueue::bounded(cores, std::num::NonZeroU16::MIN), fifo()),
        Policy::Random => run.nic(RandomCore::new(cores), fifo()),
        Policy::RoundRobin => run.nic(RoundRobinCore::new(cores), fifo()),
        Policy::ShortestQueue => run.nic(JoinShortestQueue::unbounded(cores), fifo()),
        Policy::LightestQueue => run.nic(JoinLightestQueue::new(cores), fifo()),
        Policy::BoundedShortestQueue(bound) => run.nic(JoinShortestQueue::bounded(cores, *bound), fifo()),
        Policy::Rss => run.nic(BucketHash::new(indirection_table(config)), fifo()),
        Policy::ProcessorSharing => run.nic(RoundRobinCore::new(1), SharedCores::new(cores, ticks(config.latency))),
        Policy::GroupedFcfs { groups, cores_each } => {
            run.nic(IdealGroups::new(groups.get(), cores_each.get(), ticks(config.latency)), fifo())
        }
        Policy::RankedQueue(_) | Policy::RssRebalanced(_) | Policy::WorkStealing(_) => {
            unreachable!("refused by check()")
        }
    }
}

/// Entries of an indirection table (Turbo, HPCA'23, Sect. VII-E).
const BUCKETS: usize = 512;

fn indirection_table(config: &Config) -> IndirectionTable {
    IndirectionTable::balanced(config.seed, BUCKETS, config.cores).expect("512 is a power of two")
}

/// A configuration that a server is being built for.
struct Run<'a, O> {
    config: &'a Config,
    load: f64,
    observer: &'a mut O,
}

impl<O: Observer> Run<'_, O> {
    fn nic(&mut self, dispatcher: impl Dispatcher, cores: impl Cores) -> u64 {
        self.drive(NicServer::new(dispatcher, cores, 1), Priorities::None)
    }

    /// Lets the requests come in; the number of those that the server dropped.
    fn drive(&mut self, mut server: impl Server<O>, priorities: Priorities) -> u64 {
        let mut workload = Workload::new(self.config, self.load, priorities);
        let warm_up = self.config.requests / 10;
        let bound = self.config.queue.unwrap_or(u64::MAX);
        let mut dropped = 0;
        for number in 0..self.config.requests {
            let request = workload.draw();
            if number == warm_up {
                self.observer.measure_from(request.arrived);
            }
            server.advance(request.arrived, self.observer);
            if self.observer.decided() {
                return dropped;
            }
            if server.inside() < bound {
                server.offer(request);
            } else {
                dropped += 1;
            }
        }
        server.advance(NEVER - 1, self.observer);
        dropped
    }
}
