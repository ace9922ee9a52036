//! Configuration of a server simulation, and the errors that it can have.

use std::num::NonZeroU32;

use coreward_model::dispatch::CoreAssignmentMode;

use super::ticks::{TICKS_PER_SERVICE_TIME_UNIT, Tick};
use super::{CoreAllocatorLocation, CoreSelectionPolicy, JbsrqOptions, ServiceTimeDistribution};

/// Configuration of a server simulation. Times are in units of service time (see [`ServiceTimeDistribution`]).
#[derive(Debug, Clone, PartialEq)]
pub struct RpcSimulationConfig {
    pub policy: CoreSelectionPolicy,
    /// Number of cores of the server, at least 1.
    pub cores: u16,
    pub service_times: ServiceTimeDistribution,
    /// One-way latency between NIC and cores, in units of service time.
    pub interface_latency: f64,
    /// Offered load as a fraction of the cores' total capacity.
    pub offered_load: f64,
    /// Number of requests. The first tenth is the warm-up, which is not measured.
    pub request_count: u64,
    /// Seed of the random numbers. Equal seeds yield equal results.
    pub seed: u64,
    /// Number of connections over which the requests are distributed, or `None` if every request has its own.
    pub connection_count: Option<NonZeroU32>,
    /// Skew of the connections. The i-th most frequent has a share proportional to 1 / i^skew, so 0 makes all shares
    /// equal.
    pub connection_skew: f64,
    /// Maximum number of requests inside the server, above which requests are dropped, or `None` if unlimited.
    pub max_requests_in_server: Option<u64>,
    /// Duration of each window in [`RpcSimulationOutcome::windows`](super::RpcSimulationOutcome), in units of service
    /// time.
    pub latency_window_length: Option<f64>,
}

impl Default for RpcSimulationConfig {
    fn default() -> Self {
        Self {
            policy: CoreSelectionPolicy::ShortestQueue,
            cores: 16,
            service_times: ServiceTimeDistribution::Exponential,
            interface_latency: 0.0,
            offered_load: 0.8,
            request_count: 1_000_000,
            seed: 1,
            connection_count: None,
            connection_skew: 0.0,
            max_requests_in_server: None,
            latency_window_length: None,
        }
    }
}

/// Reason why a configuration is invalid or a run has no result.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum RpcSimulationError {
    #[error("0 cores: expected 1 to 65535")]
    NoCores,
    #[error("load {0}: expected a number above 0")]
    InvalidLoad(f64),
    /// The load exceeds the policy's capacity, so that queues would grow without limit.
    #[error(
        "load {load}: expected less than {capacity}, which is what {policy} can carry with this service time and \
         latency, or a bound on the queue"
    )]
    LoadAboveCapacity {
        load: f64,
        /// Highest load that the policy can sustain.
        capacity: f64,
        policy: CoreSelectionPolicy,
    },
    #[error("latency {0}: expected a number from 0 to 1000000 service times")]
    InvalidLatency(f64),
    /// There are too few requests for quantiles, or so many that the simulated times do not fit into 64 bits.
    #[error("{requests} requests: expected 10 to {max} at this load")]
    InvalidRequestCount { requests: u64, max: u64 },
    #[error("skew {0}: expected a number from 0 to 10")]
    InvalidConnectionSkew(f64),
    #[error("window {0}: expected a number from 0.001 to 1000000000 service times")]
    InvalidLatencyWindow(f64),
    #[error("a queue of 0 requests: expected at least 1")]
    ZeroQueueLimit,
    /// No request was measured, because the bounded queue was always full.
    #[error("no request after the warm-up was answered: expected more requests, or a longer queue")]
    NothingMeasured,
    /// The policy's groups have more or fewer cores in total than the server.
    #[error("policy {policy}: its groups have {grouped_cores} cores, the server has {cores}")]
    GroupCoreCountMismatch { policy: CoreSelectionPolicy, grouped_cores: u32, cores: u16 },
    /// Cores cannot be divided, because the number of services is not two or there are fewer than two cores.
    #[error(
        "policy {policy}: {services} services on {cores} cores: expected two services (bimodal) and at least 2 cores"
    )]
    NotTwoServices { policy: CoreSelectionPolicy, services: u8, cores: u16 },
    /// A core is reserved for the load monitor, although the policy never moves cores between services.
    #[error("policy {0}: allocator=core: expected assignment=dedicated or hybrid")]
    ReservedCoreWithoutAllocation(CoreSelectionPolicy),
    #[error("SLO {0}: expected a number above 0, in multiples of the service time")]
    InvalidSlo(f64),
    #[error("no seeds: expected at least one")]
    NoSeeds,
    /// The number of bisection steps is not from 1 to 30.
    #[error("{0} steps of bisection: expected 1 to 30")]
    InvalidBisectionStepCount(u32),
}

impl RpcSimulationConfig {
    /// Returns the load below which queues are stable, which is at most [`CoreSelectionPolicy::max_stable_load`]. Under
    /// RSS, the cores with the most buckets limit it, assuming that all buckets have equal load. Few or uneven
    /// connections can still overload a core.
    pub fn max_stable_load(&self, bucket_count: u32) -> f64 {
        let policy_capacity = self.policy.max_stable_load(self.service_times.mean(), self.interface_latency);
        let cores = u32::from(self.cores);
        match self.policy {
            CoreSelectionPolicy::Rss => {
                policy_capacity.min(f64::from(bucket_count) / f64::from(cores * bucket_count.div_ceil(cores)))
            }
            CoreSelectionPolicy::RssRebalancedEvery(_) => {
                policy_capacity.min(f64::from(bucket_count) / f64::from(cores))
            }
            CoreSelectionPolicy::RankedQueue(ref options) => {
                policy_capacity * f64::from(options.serving_core_count(self.cores)) / f64::from(self.cores)
            }
            _ => policy_capacity,
        }
    }

    /// Checks that all values are in range, and that the policy can sustain the load.
    pub(crate) fn check_load_below_capacity(&self, bucket_count: u32) -> Result<(), RpcSimulationError> {
        self.check_value_ranges()?;
        let capacity = self.max_stable_load(bucket_count);
        if self.max_requests_in_server.is_none() && self.offered_load >= capacity {
            return Err(RpcSimulationError::LoadAboveCapacity {
                load: self.offered_load,
                capacity,
                policy: self.policy.clone(),
            });
        }
        Ok(())
    }

    /// Checks that all values are in range, but allows a load above the policy's capacity.
    pub(super) fn check_value_ranges(&self) -> Result<(), RpcSimulationError> {
        let is_within = |value: f64, min: f64, max: f64| (min..=max).contains(&value);
        if self.cores == 0 {
            return Err(RpcSimulationError::NoCores);
        }
        if !(self.offered_load > 0.0 && self.offered_load.is_finite()) {
            return Err(RpcSimulationError::InvalidLoad(self.offered_load));
        }
        if !is_within(self.interface_latency, 0.0, 1e6) {
            return Err(RpcSimulationError::InvalidLatency(self.interface_latency));
        }
        // Arrivals may last for half of the time that 64 bits represent. The other half is for queues.
        let mean_arrival_interval = self.service_times.mean() / (self.offered_load * f64::from(self.cores));
        let max_requests = (Tick::MAX / 2) as f64 / TICKS_PER_SERVICE_TIME_UNIT as f64 / mean_arrival_interval;
        if self.request_count < 10 || self.request_count as f64 > max_requests {
            return Err(RpcSimulationError::InvalidRequestCount {
                requests: self.request_count,
                max: max_requests as u64,
            });
        }
        if !is_within(self.connection_skew, 0.0, 10.0) {
            return Err(RpcSimulationError::InvalidConnectionSkew(self.connection_skew));
        }
        if let Some(window) = self.latency_window_length.filter(|window| !is_within(*window, 1e-3, 1e9)) {
            return Err(RpcSimulationError::InvalidLatencyWindow(window));
        }
        if self.max_requests_in_server == Some(0) {
            return Err(RpcSimulationError::ZeroQueueLimit);
        }
        if let CoreSelectionPolicy::RankedQueue(options) = &self.policy {
            self.check_core_assignment(options)?;
        }
        if let CoreSelectionPolicy::GroupedFcfs { groups, cores_per_group } = self.policy {
            let grouped_cores = u32::from(groups.get()) * u32::from(cores_per_group.get());
            if grouped_cores != u32::from(self.cores) {
                return Err(RpcSimulationError::GroupCoreCountMismatch {
                    policy: self.policy.clone(),
                    grouped_cores,
                    cores: self.cores,
                });
            }
        }
        Ok(())
    }

    /// Checks that cores can be assigned to services as the options request.
    fn check_core_assignment(&self, options: &JbsrqOptions) -> Result<(), RpcSimulationError> {
        if options.core_assignment_mode == CoreAssignmentMode::CompleteShare {
            return match options.core_allocator_location {
                CoreAllocatorLocation::Nic => Ok(()),
                CoreAllocatorLocation::Core => {
                    Err(RpcSimulationError::ReservedCoreWithoutAllocation(self.policy.clone()))
                }
            };
        }
        let services = options.priorities.service_count(self.service_times.class_service_times().len() as u8);
        let cores = options.serving_core_count(self.cores);
        if services != 2 || cores < 2 {
            return Err(RpcSimulationError::NotTwoServices { policy: self.policy.clone(), services, cores });
        }
        Ok(())
    }
}
