//! Why a report, or an agent, was not taken.

use std::time::Duration;

use coreward_model::load::ReadingsRefused;
use coreward_wire::ReportError;

use super::token_bucket::Quota;

/// How far a report may be ahead of the controller's wall clock before people are warned: what NTP keeps apart at worst.
pub const CLOCK_TOLERANCE: Duration = Duration::from_secs(1);

/// Of one name: a daemon that is restarted again and again comes back later.
pub const REGISTRATIONS: Quota = Quota { every: Duration::from_secs(1), at_once: 30 };
/// Reports at once: after a pause of the network those that were on the way come together.
pub const REPORTS_AT_ONCE: u32 = 64;
/// Names of load balancers that are known at a time.
pub const MOST_LOAD_BALANCERS: usize = 1024;

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
    /// The fleet's document names others.
    #[error("rack {0:?} is not one of the fleet's: expected one that `racks` names in the fleet's document")]
    UnknownRack(String),
    /// The fleet's `load_balancers` does not name it.
    #[error("load balancer {0:?} is not in the fleet's `load_balancers`: expected one that is, or no such list")]
    UnknownLoadBalancer(String),
    /// Whoever speaks for that server does not come through this rack.
    #[error(
        "rack {rack:?} may not speak for server {server:?}: expected {}its agent itself (`racks` in the fleet's document)",
        racks.iter().map(|rack| format!("rack {rack:?}, ")).collect::<String>() + if racks.is_empty() { "" } else { "or " }
    )]
    ForeignRack {
        /// The server.
        server: String,
        /// Who spoke for it.
        rack: String,
        /// Through which its agent may speak.
        racks: Vec<String>,
    },
    /// A newer agent has taken the server over.
    #[error("server {0:?} was taken over by a newer agent")]
    Superseded(String),
    /// More reports than twice what the report interval says.
    #[error("server {0:?} reports more often than twice per report interval: expected its configuration's interval")]
    TooOften(String),
    /// It comes and goes all the time.
    #[error("{0:?} registered too often: expected once per second")]
    TooManyRegistrations(String),
    /// Each new name stays on record.
    #[error(
        "load balancer {0:?} is one more than {MOST_LOAD_BALANCERS}: expected fewer, or older ones to be forgotten"
    )]
    TooManyLoadBalancers(String),
    /// The readings are of no use.
    #[error(transparent)]
    Readings(#[from] ReadingsRefused),
    /// The message is.
    #[error(transparent)]
    Malformed(#[from] ReportError),
}

impl Refused {
    /// All names that [`Refused::reason`] gives: the counters in `coreward status`.
    pub const REASONS: [&'static str; 18] = [
        "unknown_server",
        "duplicate_session",
        "duplicate_load_balancer",
        "duplicate_rack",
        "unknown_rack",
        "unknown_load_balancer",
        "foreign_rack",
        "superseded",
        "out_of_order",
        "clock_stood_still",
        "no_cores",
        "malformed_rss",
        "time_to_live",
        "impossible_load",
        "too_large",
        "too_often",
        "too_many_registrations",
        "too_many_load_balancers",
    ];

    /// The counter that counts it.
    pub fn reason(&self) -> &'static str {
        match self {
            Refused::UnknownServer(_) => "unknown_server",
            Refused::DuplicateSession { .. } => "duplicate_session",
            Refused::DuplicateLoadBalancer { .. } => "duplicate_load_balancer",
            Refused::DuplicateRack { .. } => "duplicate_rack",
            Refused::UnknownRack(_) => "unknown_rack",
            Refused::UnknownLoadBalancer(_) => "unknown_load_balancer",
            Refused::ForeignRack { .. } => "foreign_rack",
            Refused::Superseded(_) => "superseded",
            Refused::Readings(ReadingsRefused::OutOfOrder { .. }) => "out_of_order",
            Refused::Readings(ReadingsRefused::ClockStoodStill { .. }) => "clock_stood_still",
            Refused::Readings(ReadingsRefused::NoCores) => "no_cores",
            Refused::Malformed(ReportError::Rss(_)) => "malformed_rss",
            Refused::Readings(ReadingsRefused::Impossible { .. }) => "impossible_load",
            Refused::Malformed(ReportError::TimeToLive(_)) => "time_to_live",
            Refused::Malformed(ReportError::TooLarge { .. }) => "too_large",
            Refused::TooOften(_) => "too_often",
            Refused::TooManyRegistrations(_) => "too_many_registrations",
            Refused::TooManyLoadBalancers(_) => "too_many_load_balancers",
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
                | Refused::UnknownRack(_)
                | Refused::UnknownLoadBalancer(_)
                | Refused::ForeignRack { .. }
                | Refused::Superseded(_)
                | Refused::TooManyRegistrations(_)
                | Refused::TooManyLoadBalancers(_)
        )
    }
}
