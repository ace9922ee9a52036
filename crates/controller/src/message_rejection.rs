//! Rejections of reports and registrations.

use std::time::Duration;

use coreward_model::load::BusyTimeReadingsRejection;
use coreward_wire::AgentReportError;

use super::token_bucket::TokenBucketQuota;

/// Maximum time by which a report may be ahead of the controller's wall clock without a warning: NTP's worst error.
pub const MAX_REPORT_CLOCK_LEAD: Duration = Duration::from_secs(1);

/// Rate limit of registrations under one name, because a failing daemon may restart repeatedly.
pub const REGISTRATION_QUOTA_PER_NAME: TokenBucketQuota =
    TokenBucketQuota { token_interval: Duration::from_secs(1), max_burst_tokens: 30 };
/// Maximum number of reports that may arrive together after an interruption of the network.
pub const MAX_REPORTS_PER_BURST: u32 = 64;
pub const MAX_LOAD_BALANCERS: usize = 1024;

/// Reason why the controller rejects a report or a registration. Components that are already running continue.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum MessageRejection {
    #[error("server {0:?} is not known: expected the name of a [[server]] in the fleet's file")]
    UnknownServer(String),
    #[error(
        "server {server:?} has an agent already, last message {} ms ago: expected one agent per server",
        since_last_message.as_millis()
    )]
    DuplicateAgent {
        server: String,
        /// Time since the last message from the agent that is connected.
        since_last_message: Duration,
    },
    /// Two load balancers have the same name, and would thus have the same owner number.
    #[error(
        "load balancer {name:?} is connected already, last message {} ms ago: expected a unique name",
        since_last_message.as_millis()
    )]
    DuplicateLoadBalancer {
        name: String,
        /// Time since the last message from the load balancer that is connected.
        since_last_message: Duration,
    },
    #[error(
        "rack {name:?} is connected already, last message {} ms ago: expected a unique name",
        since_last_message.as_millis()
    )]
    DuplicateRack {
        name: String,
        /// Time since the last message from the rack that is connected.
        since_last_message: Duration,
    },
    /// The fleet document does not list this rack.
    #[error("rack {0:?} is not one of the fleet's: expected one that `racks` names in the fleet's document")]
    UnknownRack(String),
    #[error("load balancer {0:?} is not in the fleet's `load_balancers`: expected one that is, or no such list")]
    UnknownLoadBalancer(String),
    /// The server's agent may not connect through this rack.
    #[error(
        "rack {rack:?} may not report for server {server:?}: expected {}its agent itself (`racks` in the fleet's \
         document)",
        racks.iter().map(|rack| format!("rack {rack:?}, ")).collect::<String>()
            + if racks.is_empty() { "" } else { "or " }
    )]
    ForeignRack {
        server: String,
        rack: String,
        /// Racks through which the server's agent may connect.
        racks: Vec<String>,
    },
    /// A newer agent has replaced this agent of the server.
    #[error("server {0:?} was taken over by a newer agent")]
    SupersededAgent(String),
    /// The agent has sent reports at more than twice the configured rate.
    #[error("server {0:?} reports more often than twice per report interval: expected its configuration's interval")]
    TooManyReports(String),
    #[error("{0:?} registered too often: expected once per second")]
    TooManyRegistrations(String),
    /// The maximum number of load balancers is already on record.
    #[error("load balancer {0:?} is one more than {MAX_LOAD_BALANCERS}: expected fewer, or older ones to be forgotten")]
    TooManyLoadBalancers(String),
    #[error(transparent)]
    InvalidCoreReadings(#[from] BusyTimeReadingsRejection),
    #[error(transparent)]
    MalformedReport(#[from] AgentReportError),
}

impl MessageRejection {
    /// All results of [`MessageRejection::counter_name`], which are names of counters in `coreward status`.
    pub const COUNTER_NAMES: [&'static str; 18] = [
        "unknown_server",
        "duplicate_session",
        "duplicate_load_balancer",
        "duplicate_rack",
        "unknown_rack",
        "unknown_load_balancer",
        "foreign_rack",
        "superseded",
        "out_of_order",
        "clock_stalled",
        "no_cores",
        "malformed_rss",
        "time_to_live",
        "impossible_load",
        "too_large",
        "too_often",
        "too_many_registrations",
        "too_many_load_balancers",
    ];

    /// Returns the name of the counter for this reason.
    pub fn counter_name(&self) -> &'static str {
        match self {
            MessageRejection::UnknownServer(_) => "unknown_server",
            MessageRejection::DuplicateAgent { .. } => "duplicate_session",
            MessageRejection::DuplicateLoadBalancer { .. } => "duplicate_load_balancer",
            MessageRejection::DuplicateRack { .. } => "duplicate_rack",
            MessageRejection::UnknownRack(_) => "unknown_rack",
            MessageRejection::UnknownLoadBalancer(_) => "unknown_load_balancer",
            MessageRejection::ForeignRack { .. } => "foreign_rack",
            MessageRejection::SupersededAgent(_) => "superseded",
            MessageRejection::InvalidCoreReadings(BusyTimeReadingsRejection::OutOfOrder { .. }) => "out_of_order",
            MessageRejection::InvalidCoreReadings(BusyTimeReadingsRejection::ClockStalled { .. }) => "clock_stalled",
            MessageRejection::InvalidCoreReadings(BusyTimeReadingsRejection::NoCores) => "no_cores",
            MessageRejection::MalformedReport(AgentReportError::InvalidRssConfiguration(_)) => "malformed_rss",
            MessageRejection::InvalidCoreReadings(BusyTimeReadingsRejection::ImpossibleLoad { .. }) => {
                "impossible_load"
            }
            MessageRejection::MalformedReport(AgentReportError::InvalidTimeToLive(_)) => "time_to_live",
            MessageRejection::MalformedReport(AgentReportError::TooManyListElements { .. }) => "too_large",
            MessageRejection::TooManyReports(_) => "too_often",
            MessageRejection::TooManyRegistrations(_) => "too_many_registrations",
            MessageRejection::TooManyLoadBalancers(_) => "too_many_load_balancers",
        }
    }

    /// Returns whether the agent's session, and thus its stream, must end.
    pub fn ends_session(&self) -> bool {
        matches!(
            self,
            MessageRejection::UnknownServer(_)
                | MessageRejection::DuplicateAgent { .. }
                | MessageRejection::DuplicateLoadBalancer { .. }
                | MessageRejection::DuplicateRack { .. }
                | MessageRejection::UnknownRack(_)
                | MessageRejection::UnknownLoadBalancer(_)
                | MessageRejection::ForeignRack { .. }
                | MessageRejection::SupersededAgent(_)
                | MessageRejection::TooManyRegistrations(_)
                | MessageRejection::TooManyLoadBalancers(_)
        )
    }
}
