//! Policies that assign requests to cores inside a server, and their names.

use std::fmt;
use std::num::NonZeroU16;
use std::str::FromStr;

use super::class_bounds::ClassBoundOptions;
use super::jbsrq::{ClassPriorities, JbsrqOptions};
use crate::unknown_name::UnknownName;

/// Policy that assigns a server's requests to its cores. Times are in units of service time.
#[derive(Debug, Clone, PartialEq)]
pub enum CoreSelectionPolicy {
    /// Keeps one queue at the NIC. A core gets a request from it only after it has reported itself idle (`cfcfs`).
    CentralFcfs,
    /// Assigns every request to a random core (`random`).
    Random,
    /// Assigns requests to the cores in turn (`rr`, round robin).
    RoundRobin,
    /// Assigns a request to the core with the fewest outstanding requests (`jsq`).
    ShortestQueue,
    /// Assigns a request to the core with the least outstanding work (`jlq`).
    LightestQueue,
    /// Assigns a request to the core with the fewest outstanding requests (`jbsq:N`). A core may have at most N of
    /// them, and other requests wait at the NIC.
    BoundedShortestQueue(NonZeroU16),
    /// Uses RingLeader's bounded and ranked queues with priorities (`jbsrq[:OPTIONS]`).
    RankedQueue(JbsrqOptions),
    /// Adapts `jbsrq` to cores that serve in order of arrival, as unmodified servers do (`jbsrq-fifo[:OPTIONS]`).
    ClassBoundedQueue(ClassBoundOptions),
    /// Hashes connections to buckets, which are mapped to cores (`rss`).
    Rss,
    /// Does the same as `rss`, but redistributes the buckets over the cores at every interval T (`rss-rebalanced:T`).
    RssRebalancedEvery(f64),
    /// Does the same as `rss`, but lets idle cores steal from the longest queue (`work-stealing[:COST]`). A stolen
    /// request takes COST longer.
    WorkStealingAtCost(f64),
    /// Lets all requests share all cores equally, which no real server can do (`ps`, processor sharing).
    ProcessorSharing,
    /// Hashes requests to X groups of Y cores, where each group has one ideal queue (`dfcfs:X,Y`).
    GroupedFcfs {
        /// Number of groups (X).
        groups: NonZeroU16,
        /// Number of cores in each group (Y).
        cores_per_group: NonZeroU16,
    },
}

#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum CoreSelectionPolicyError {
    /// No policy has the requested name.
    #[error(transparent)]
    UnknownName(#[from] UnknownName),
    /// The parameters of a policy are invalid.
    #[error("policy {policy_text:?}: expected {expected}")]
    InvalidParameters { policy_text: String, expected: String },
}

/// Syntax of all policies with their parameters.
pub const CORE_SELECTION_POLICY_SYNTAX: [&str; 13] = [
    "cfcfs",
    "random",
    "rr",
    "jsq",
    "jlq",
    "jbsq:N",
    "jbsrq[:OPTION=VALUE,...]",
    "jbsrq-fifo[:OPTION=VALUE,...]",
    "rss",
    "rss-rebalanced:T",
    "work-stealing[:COST]",
    "ps",
    "dfcfs:X,Y",
];

/// Default additional time of a stolen request, in units of service time. ZygOS (SOSP'17, Sect. 6.1) is within 50-60 %
/// of the ideal for requests of 5 us, and within 15 % from 20 us on. So stealing costs a few microseconds, about half
/// the service time of requests that take a few microseconds.
const DEFAULT_STEALING_COST_SERVICE_TIMES: f64 = 0.5;

impl FromStr for CoreSelectionPolicy {
    type Err = CoreSelectionPolicyError;

    fn from_str(policy_text: &str) -> Result<Self, CoreSelectionPolicyError> {
        let (name, parameters) = policy_text
            .split_once(':')
            .map_or((policy_text, None), |(name, parameter_text)| (name, Some(parameter_text)));
        let syntax = CORE_SELECTION_POLICY_SYNTAX
            .iter()
            .find(|policy_syntax| policy_syntax.split([':', '[']).next() == Some(name));
        let Some(policy_syntax) = syntax else {
            return Err(UnknownName::new("policy", policy_text, CORE_SELECTION_POLICY_SYNTAX).into());
        };
        Self::parse_parameters(name, parameters).map_err(|detail| CoreSelectionPolicyError::InvalidParameters {
            policy_text: policy_text.to_owned(),
            expected: policy_syntax.to_string() + &detail,
        })
    }
}

impl CoreSelectionPolicy {
    /// Returns the policy `name` with these parameters. An error contains the text to append to the policy's syntax in
    /// the message.
    fn parse_parameters(name: &str, parameters: Option<&str>) -> Result<Self, String> {
        match (name, parameters) {
            ("cfcfs", None) => Ok(Self::CentralFcfs),
            ("random", None) => Ok(Self::Random),
            ("rr", None) => Ok(Self::RoundRobin),
            ("jsq", None) => Ok(Self::ShortestQueue),
            ("jlq", None) => Ok(Self::LightestQueue),
            ("jbsq", Some(bound_text)) => {
                Ok(Self::BoundedShortestQueue(bound_text.parse().map_err(|_| " with N from 1 to 65535")?))
            }
            ("jbsrq", options) => Ok(Self::RankedQueue(parse_options(options)?)),
            ("jbsrq-fifo", options) => Ok(Self::ClassBoundedQueue(parse_options(options)?)),
            ("rss", None) => Ok(Self::Rss),
            ("rss-rebalanced", Some(interval_text)) => {
                let rebalance_interval =
                    parse_time(interval_text).filter(|every| *every >= MIN_REBALANCE_INTERVAL_SERVICE_TIMES);
                Ok(Self::RssRebalancedEvery(rebalance_interval.ok_or(" with T from 0.01 to 1000000 service times")?))
            }
            ("work-stealing", None) => Ok(Self::WorkStealingAtCost(DEFAULT_STEALING_COST_SERVICE_TIMES)),
            ("work-stealing", Some(cost)) => {
                Ok(Self::WorkStealingAtCost(parse_time(cost).ok_or(" with COST from 0 to 1000000 service times")?))
            }
            ("ps", None) => Ok(Self::ProcessorSharing),
            ("dfcfs", Some(pair_text)) => {
                let parsed_pair = pair_text.split_once(',').and_then(|(x, y)| Some((x.parse().ok()?, y.parse().ok()?)));
                let (groups, cores_per_group) = parsed_pair.ok_or(" with X and Y from 1 on")?;
                Ok(Self::GroupedFcfs { groups, cores_per_group })
            }
            _ => Err(String::new()),
        }
    }
}

fn parse_options<T: FromStr<Err: fmt::Display>>(options: Option<&str>) -> Result<T, String> {
    options.unwrap_or_default().parse::<T>().map_err(|detail| format!(": {detail}"))
}

/// Parses a time from 0 to [`MAX_PARAMETER_SERVICE_TIMES`].
fn parse_time(text: &str) -> Option<f64> {
    text.parse().ok().filter(|time: &f64| (0.0..=MAX_PARAMETER_SERVICE_TIMES).contains(time))
}

/// Longest time to which a policy's parameter can be set, in units of service time.
const MAX_PARAMETER_SERVICE_TIMES: f64 = 1e6;
/// Shortest interval between two redistributions of buckets (units of service time). With shorter ones, simulations
/// would take hours.
const MIN_REBALANCE_INTERVAL_SERVICE_TIMES: f64 = 0.01;

impl fmt::Display for CoreSelectionPolicy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::CentralFcfs => f.write_str("cfcfs"),
            Self::Random => f.write_str("random"),
            Self::RoundRobin => f.write_str("rr"),
            Self::ShortestQueue => f.write_str("jsq"),
            Self::LightestQueue => f.write_str("jlq"),
            Self::BoundedShortestQueue(bound) => write!(f, "jbsq:{bound}"),
            Self::RankedQueue(options) if *options == JbsrqOptions::default() => f.write_str("jbsrq"),
            Self::RankedQueue(options) => write!(f, "jbsrq:{options}"),
            Self::ClassBoundedQueue(options) if *options == ClassBoundOptions::default() => f.write_str("jbsrq-fifo"),
            Self::ClassBoundedQueue(options) => write!(f, "jbsrq-fifo:{options}"),
            Self::Rss => f.write_str("rss"),
            Self::RssRebalancedEvery(regroup_interval) => write!(f, "rss-rebalanced:{regroup_interval}"),
            Self::WorkStealingAtCost(cost) => write!(f, "work-stealing:{cost}"),
            Self::ProcessorSharing => f.write_str("ps"),
            Self::GroupedFcfs { groups, cores_per_group } => write!(f, "dfcfs:{groups},{cores_per_group}"),
        }
    }
}

impl CoreSelectionPolicy {
    /// Returns whether shorter classes have priority under this policy.
    pub fn class_priorities(&self) -> ClassPriorities {
        match self {
            Self::RankedQueue(options) => options.priorities,
            Self::ClassBoundedQueue(_) => ClassPriorities::Classes,
            _ => ClassPriorities::None,
        }
    }

    /// Returns whether each request goes to the core that its connection's RSS hash selects, which load balancers can
    /// predict.
    pub fn selects_core_by_rss(&self) -> bool {
        matches!(self, Self::Rss | Self::RssRebalancedEvery(_) | Self::WorkStealingAtCost(_))
    }

    /// Returns the load below which this policy's queues are stable, as a fraction of the cores' capacity.
    ///
    /// `latency` is the one-way latency between NIC and cores. A core's slot is occupied until the response has passed
    /// the NIC. A core with one slot is therefore idle for two latencies per request. The result is exact for `cfcfs`,
    /// and an upper bound for bounded queues with several slots.
    pub fn max_stable_load(&self, mean_service_time: f64, latency: f64) -> f64 {
        let capacity_with_slots =
            |slots: f64| (slots * mean_service_time / (mean_service_time + 2.0 * latency)).min(1.0);
        match self {
            Self::CentralFcfs => capacity_with_slots(1.0),
            Self::BoundedShortestQueue(bound) => capacity_with_slots(f64::from(bound.get())),
            Self::RankedQueue(options) => capacity_with_slots(f64::from(options.queue_depth.get())),
            _ => 1.0,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn policy_names_round_trip() {
        for name in [
            "cfcfs",
            "random",
            "rr",
            "jsq",
            "jlq",
            "jbsq:3",
            "jbsrq",
            "jbsrq:lambda=0.5",
            "jbsrq:rank=global,scheduler=pifo",
            "jbsrq:rank=per-service",
            "jbsrq:assignment=dedicated,allocator=core",
            "jbsrq-fifo",
            "jbsrq-fifo:reserved=2",
            "rss",
            "rss-rebalanced:50",
            "work-stealing:0.25",
            "ps",
            "dfcfs:4,8",
        ] {
            assert_eq!(name.parse::<CoreSelectionPolicy>().unwrap().to_string(), name);
        }
    }

    #[test]
    fn invalid_policies_are_rejected() {
        let expect_parse_error = |text: &str| text.parse::<CoreSelectionPolicy>().unwrap_err().to_string();
        assert!(expect_parse_error("jsk").contains("did you mean jsq"), "{}", expect_parse_error("jsk"));
        assert_eq!(expect_parse_error("jsq:2"), "policy \"jsq:2\": expected jsq");
        assert_eq!(expect_parse_error("jbsq"), "policy \"jbsq\": expected jbsq:N");
        assert_eq!(expect_parse_error("jbsq:0"), "policy \"jbsq:0\": expected jbsq:N with N from 1 to 65535");
        assert!(expect_parse_error("dfcfs:0,4").contains("X and Y from 1 on"));
        assert!(expect_parse_error("rss-rebalanced:0").contains("T from 0.01"));
        assert!(expect_parse_error("jbsrq:rank=x").ends_with("rank \"x\": expected jbsrq, global or per-service"));
        assert!(expect_parse_error("jbsrq:scheduler=").ends_with("scheduler \"\": expected feo or pifo"));
        assert!(expect_parse_error("jbsrq:lamda=1").contains("lamda"), "{}", expect_parse_error("jbsrq:lamda=1"));
    }

    #[test]
    fn round_trip_time_limits_core_capacity() {
        assert_eq!(CoreSelectionPolicy::CentralFcfs.max_stable_load(1.0, 0.5), 0.5);
        assert_eq!("jbsq:2".parse::<CoreSelectionPolicy>().unwrap().max_stable_load(1.0, 0.5), 1.0);
        assert_eq!(CoreSelectionPolicy::ShortestQueue.max_stable_load(1.0, 0.5), 1.0);
    }
}
