//! Dispatchers, which choose a server's core for each request at the NIC. Each has its own file.
//!
//! A dispatcher knows what a NIC knows, which is the headers of arriving requests and the departing responses. It
//! decides by its own counters, without the state of the cores. Time and the request's hash are arguments, so that
//! decisions of the simulator and of the data plane can be compared. Among equal cores, the core with the lowest index
//! is selected, as in Turbo's comparator tree (HPCA'23, Sect. V-A).

mod assignment;
mod class_bounds;
mod feo;
mod jbsrq;
mod jlq;
mod jsq;
mod load_monitor;
mod random_dispatcher;
mod ranks;
mod rounded_service_time;
mod rss;
mod stealing;
mod tournament_tree;
mod worker_stall;

pub use assignment::{
    CoreAllocator, CoreAssignmentChange, CoreAssignmentMode, InvalidReservedCores, ReservedCores,
    UnknownCoreAssignmentMode,
};
pub use class_bounds::{ClassBoundedShortestQueue, OutstandingBoundsByClass};
pub use feo::{
    DispatchEligibilityRule, DispatchRateLimit, FirstEligibleOutConfig, FirstEligibleOutConfigError,
    FirstEligibleOutScheduler, MAX_SCHEDULED_SERVICES, MAX_SHARE_WEIGHT, SchedulingGroupConfig,
    SchedulingMemberRanking, SchedulingParameters, ServiceQueueConfig,
};
pub use jbsrq::{JoinBoundedShortestRankedQueue, RequestSubmitEffects};
pub use jlq::JoinLightestQueue;
pub use jsq::JoinShortestQueue;
pub use load_monitor::{LoadCheckInterval, LoadHint, LoadMonitor, ScaleDownCondition, ScaleUpCondition};
pub use random_dispatcher::{RandomDispatcher, RoundRobinDispatcher};
pub use ranks::{CoreRankRule, InvalidRankLambda, RankArrays, RankLambda, RankedService, RequestFeedbackError};
pub use rounded_service_time::RoundedServiceTime;
pub use rss::{RssDispatcher, assign_buckets_to_cores};
pub use stealing::{LongestQueueStealing, RequestSteal};
pub use tournament_tree::{TournamentKey, TournamentTree};
pub use worker_stall::{LearnedServiceTime, WorkerStallDetector, expired_request_indexes};

/// Fields of a request that a dispatcher at the NIC reads.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DispatchHeader {
    /// Service (type of request), counted from 0. A lower number has higher priority.
    pub service: u8,
    /// Expected service time, in the same unit for all requests (Turbo's request type field, HPCA'23, Sect. V-B).
    pub expected_service_time: u64,
    /// Hash of the request's whole header, which differs between the requests of one connection.
    pub request_hash: u32,
    /// RSS hash of the connection, which is the same for all its requests.
    pub flow_hash: u32,
}

/// Request that waited at the NIC and is released to a core.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ReleasedRequest {
    /// Service whose oldest waiting request is released.
    pub service: u8,
    /// Core that gets the request.
    pub core: u16,
}

/// Dispatcher at the NIC, which selects the core that serves each request.
pub trait RequestDispatcher {
    /// Returns the core for a request that arrived at `now`, or `None` if the request waits at the NIC in its service's
    /// queue.
    fn place_request(&mut self, now: u64, header: &DispatchHeader) -> Option<u16>;

    /// Accounts for the completion of a request that `core` served.
    fn record_completion(&mut self, core: u16, header: &DispatchHeader);

    /// Returns a waiting request that may go to a core at `now`. Callers repeat the call until `None` after each
    /// completion.
    fn release_request(&mut self, _now: u64) -> Option<ReleasedRequest> {
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns the header of a request of service `service` with this expected service time.
    pub(super) fn build_dispatch_header(service: u8, expected_service_time: u64) -> DispatchHeader {
        DispatchHeader { service, expected_service_time, request_hash: 0, flow_hash: 0 }
    }
}
