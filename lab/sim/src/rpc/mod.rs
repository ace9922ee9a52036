//! Commands `coreward-lab sim rpc` and `coreward-lab sim capacity`, which simulate requests at the cores of one server
//! (Turbo, HPCA'23, Sect. III and VI; RingLeader, NSDI'23, Sect. 2.1).
//!
//! Requests arrive at a NIC as a Poisson process. A policy at the NIC assigns them to cores, which they reach after the
//! latency of an interface. Responses leave by the same NIC. docs/simulator.md describes the model.

mod class_bounds;
pub mod cli;
mod config;
mod jbsrq;
pub(crate) mod outcome;
mod peak_load;
mod policy;
pub mod server;
mod service;
pub mod ticks;
mod workload;

use coreward_model::rss::IndirectionTable;

pub use class_bounds::ClassBoundOptions;
pub use config::{RpcSimulationConfig, RpcSimulationError};
pub use jbsrq::{ClassPriorities, CoreAllocatorLocation, JbsrqOptions};
pub use outcome::{ClassLatency, LatencySummary, WindowLatency};
use outcome::{LatencyRecorder, ResponseObserver};
pub use peak_load::{PeakLoadEstimate, PeakLoadSearchConfig, SloRequestSelection, SloTimeUnit, find_peak_load};
pub use policy::{CORE_SELECTION_POLICY_SYNTAX, CoreSelectionPolicy, CoreSelectionPolicyError};
use server::{QueueingServer, ServerSpec, ServerVisitor};
pub use service::{LongRequestClass, ServiceTimeDistribution, ServiceTimeError, ServiceTimeSampler};
use ticks::{NEVER, time_units_to_ticks};
use workload::RequestGenerator;

/// Results of a server simulation.
#[derive(Debug, Clone, PartialEq)]
pub struct RpcSimulationOutcome {
    /// Latencies of all requests after the warm-up.
    pub overall_latency: LatencySummary,
    /// Latencies of each class that has requests, beginning with the shortest class.
    pub class_latencies: Vec<ClassLatency>,
    /// Number of requests that arrived, including those of the warm-up.
    pub request_count: u64,
    /// Percentage of the requests that were dropped because the server was full.
    pub dropped_request_pct: f64,
    /// Latencies over time. Empty unless [`RpcSimulationConfig::latency_window_length`] is set.
    pub window_latencies: Vec<WindowLatency>,
}

/// Runs the simulation. An error names the value that is out of range, and the allowed range.
pub fn run(config: &RpcSimulationConfig) -> Result<RpcSimulationOutcome, RpcSimulationError> {
    config.check_load_below_capacity(RSS_BUCKET_COUNT)?;
    let class_times = config.service_times.class_service_times();
    let mut recorder = LatencyRecorder::new(class_times.len(), config.latency_window_length);
    let dropped_requests = simulate_and_count_drops(config, config.offered_load, &mut recorder);
    let class_latency =
        |(service, quantiles): (f64, Option<LatencySummary>)| Some(ClassLatency { service, quantiles: quantiles? });
    Ok(RpcSimulationOutcome {
        overall_latency: recorder.overall_latency().ok_or(RpcSimulationError::NothingMeasured)?,
        class_latencies: class_times.into_iter().zip(recorder.class_latencies()).filter_map(class_latency).collect(),
        request_count: config.request_count,
        dropped_request_pct: dropped_requests as f64 / config.request_count as f64 * 100.0,
        window_latencies: recorder.into_window_latencies(),
    })
}

/// Number of entries in the RSS indirection table (Turbo, HPCA'23, Sect. VII-E).
const RSS_BUCKET_COUNT: u32 = 512;

/// Simulates the configuration at `load` instead of its own load, and returns the number of dropped requests.
fn simulate_and_count_drops(config: &RpcSimulationConfig, load: f64, observer: &mut impl ResponseObserver) -> u64 {
    let indirection_table =
        IndirectionTable::draw_balanced_entries(config.seed, RSS_BUCKET_COUNT as usize, config.cores)
            .expect("512 is a power of two");
    let spec = ServerSpec {
        policy: &config.policy,
        core_count: config.cores,
        class_count: config.service_times.class_service_times().len() as u8,
        interface_latency: time_units_to_ticks(config.interface_latency),
        indirection_table: &indirection_table,
    };
    spec.build_and_visit(WorkloadRunner { config, offered_load: load, observer })
}

/// Visitor that sends the requests of a workload to a simulated server.
struct WorkloadRunner<'a, O> {
    config: &'a RpcSimulationConfig,
    offered_load: f64,
    observer: &'a mut O,
}

impl<O: ResponseObserver> ServerVisitor<O> for WorkloadRunner<'_, O> {
    /// Number of requests that the server dropped.
    type Output = u64;

    fn visit_server(self, mut server: impl QueueingServer<O>) -> u64 {
        let mut workload = RequestGenerator::new(self.config, self.offered_load);
        let warm_up_requests = self.config.request_count / 10;
        let queue_limit = self.config.max_requests_in_server.unwrap_or(u64::MAX);
        let mut dropped_requests = 0;
        for number in 0..self.config.request_count {
            let request = workload.draw_request();
            if number == warm_up_requests {
                self.observer.begin_measurement_at(request.arrived_at);
            }
            server.advance(request.arrived_at, self.observer);
            if self.observer.can_end_simulation_early() {
                return dropped_requests;
            }
            if server.outstanding_request_count() < queue_limit {
                server.add_request(request);
            } else {
                dropped_requests += 1;
            }
        }
        server.advance(NEVER - 1, self.observer);
        dropped_requests
    }
}
