//! Why a report, or an agent, was not taken.

use std::time::Duration;

use coreward_model::load::ReadingsRefused;
use coreward_wire::ReportError;

/// How far a report may be ahead of the controller's wall clock: what NTP keeps apart at worst.
pub const CLOCK_TOLERANCE: Duration = Duration::from_secs(1);

/// Why a report, or an agent, was not taken. What runs keeps running.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum Refused {
    /// Nobody of that name is in the controller's file.
    #[error("server {0:?} is not known: expected the name of a [[server]] in the fleet's file")]
    UnknownServer(String),
    /// Two agents say they are one server.
    #[error(
        "server {server:?} has an agent already, last heard of {} ms ago: expected one agent per server",
        silence.as_millis()
    )]
    DuplicateSession {
        /// The server.
        server: String,
        /// How long the other one has been silent.
        silence: Duration,
    },
    /// Two load balancers have one name, and so one owner number.
    #[error(
        "load balancer {name:?} is connected already, last heard of {} ms ago: expected a name of its own for each",
        silence.as_millis()
    )]
    DuplicateLoadBalancer {
        /// The name.
        name: String,
        /// How long the other one has been silent.
        silence: Duration,
    },
    /// Two racks have one name.
    #[error(
        "rack {name:?} is connected already, last heard of {} ms ago: expected a name of its own for each",
        silence.as_millis()
    )]
    DuplicateRack {
        /// The name.
        name: String,
        /// How long the other one has been silent.
        silence: Duration,
    },
    /// A newer agent has taken the server over.
    #[error("server {0:?} was taken over by a newer agent")]
    Superseded(String),
    /// Its clock is ahead of ours.
    #[error(
        "a report sent {} ms from now: expected at most {} ms (are the clocks synchronised?)",
        ahead.as_millis(),
        CLOCK_TOLERANCE.as_millis()
    )]
    FromTheFuture {
        /// By how much.
        ahead: Duration,
    },
    /// The readings are of no use.
    #[error(transparent)]
    Readings(#[from] ReadingsRefused),
    /// The message is.
    #[error(transparent)]
    Malformed(#[from] ReportError),
}

impl Refused {
    /// All names that [`Refused::reason`] gives: the counters in `coreward status`.
    pub const REASONS: [&'static str; 11] = [
        "unknown_server",
        "duplicate_session",
        "duplicate_load_balancer",
        "duplicate_rack",
        "superseded",
        "from_the_future",
        "out_of_order",
        "clock_stood_still",
        "no_cores",
        "malformed_rss",
        "no_time_to_live",
    ];

    /// The counter that counts it.
    pub fn reason(&self) -> &'static str {
        match self {
            Refused::UnknownServer(_) => "unknown_server",
            Refused::DuplicateSession { .. } => "duplicate_session",
            Refused::DuplicateLoadBalancer { .. } => "duplicate_load_balancer",
            Refused::DuplicateRack { .. } => "duplicate_rack",
            Refused::Superseded(_) => "superseded",
            Refused::FromTheFuture { .. } => "from_the_future",
            Refused::Readings(ReadingsRefused::OutOfOrder { .. }) => "out_of_order",
            Refused::Readings(ReadingsRefused::ClockStoodStill { .. }) => "clock_stood_still",
            Refused::Readings(ReadingsRefused::NoCores) => "no_cores",
            Refused::Malformed(ReportError::Rss(_)) => "malformed_rss",
            Refused::Malformed(ReportError::NoTimeToLive) => "no_time_to_live",
        }
    }

    /// Whether the agent that sent it cannot go on: the stream ends.
    pub fn ends_session(&self) -> bool {
        matches!(
            self,
            Refused::UnknownServer(_)
                | Refused::DuplicateSession { .. }
                | Refused::DuplicateLoadBalancer { .. }
                | Refused::DuplicateRack { .. }
                | Refused::Superseded(_)
        )
    }
}
