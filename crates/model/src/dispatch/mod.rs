//! Dispatchers: which core of a server gets a request that has just come in at the NIC. One file each.
//!
//! A dispatcher sees what a NIC sees: the header of a request when it comes in, and the response when it goes out. It
//! decides by counters of its own and knows nothing of what the cores do meanwhile. All of them are pure: time and the
//! hash of a request come in as arguments, so that the simulator and a program in the data plane can be compared
//! decision by decision. Of equal cores the one with the lowest index is taken, as Turbo's comparator tree does
//! (HPCA'23, Sect. V-A).

mod assignment;
mod class_bounds;
mod feo;
mod jbsrq;
mod jlq;
mod jsq;
mod least;
mod load_monitor;
mod ranks;
mod repair;
mod rss;
mod spread;
mod stealing;
mod weight;

pub use assignment::{Assignment, Change, CoreAllocation, UnknownAssignment};
pub use class_bounds::{ClassBoundedShortestQueue, ClassBounds};
pub use feo::{
    FeoConfig, FeoConfigError, FirstEligibleOut, GroupConfig, MAX_SERVICES, MAX_WEIGHT, Member, QueueConfig, Ranking,
    RateLimit, Selection,
};
pub use jbsrq::{JoinBoundedShortestRankedQueue, Submitted};
pub use jlq::JoinLightestQueue;
pub use jsq::JoinShortestQueue;
pub use least::{Key, LeastTree};
pub use load_monitor::{Epoch, LoadHint, LoadMonitor, ScaleDown, ScaleUp};
pub use ranks::{FeedbackError, Lambda, LambdaOutOfRange, RankArrays, RankRule, RankedService};
pub use repair::{LearnedTime, Liveness, given_up};
pub use rss::{BucketHash, regroup};
pub use spread::{RandomCore, RoundRobinCore};
pub use stealing::{LongestQueueStealing, Steal};
pub use weight::Weight;

/// What the NIC knows of a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Header {
    /// The service (the kind of request) it asks for, from 0; a lower number has the higher priority.
    pub service: u8,
    /// The service time to expect, in any one unit (Turbo's request type field, HPCA'23, Sect. V-B).
    pub expected: u64,
    /// A hash of the whole header: differs between the requests of one connection.
    pub hash: u32,
    /// The hash that RSS takes: the same for all requests of a connection.
    pub flow_hash: u32,
}

/// A request that waited at the NIC and may go to a core now.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Release {
    /// The first that waits of this service ...
    pub service: u8,
    /// ... goes to this core.
    pub core: u16,
}

/// Decides at the NIC.
pub trait Dispatcher {
    /// The core for a request that came in at `now`; `None`: it waits at the NIC, in the queue of its service.
    fn place(&mut self, now: u64, header: &Header) -> Option<u16>;

    /// The response to a request that `core` had passes the NIC on its way out.
    fn completed(&mut self, core: u16, header: &Header);

    /// After [`Dispatcher::completed`]: a request that waits and may go at `now`. Ask until the answer is `None`.
    fn release(&mut self, _now: u64) -> Option<Release> {
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A request of that service and expected service time.
    pub(super) fn header(service: u8, expected: u64) -> Header {
        Header { service, expected, hash: 0, flow_hash: 0 }
    }
}
