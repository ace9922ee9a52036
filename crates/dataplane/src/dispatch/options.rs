//! Options of a service before its program is loaded.

use std::net::SocketAddr;
use std::str::FromStr;
use std::time::Duration;

use coreward_intf as intf;

/// Policy that selects a worker.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Policy {
    /// `random`: the kernel's choice, by a hash of the client's address and port
    Random,
    /// `rr`: the workers in turn
    RoundRobin,
    /// `jsq`: the one with the fewest requests outstanding
    ShortestQueue,
    /// `jlq`: the one with the least expected work outstanding
    LightestQueue,
    /// `jbsrq`: the one with the fewest requests outstanding, of those that take the request's priority class
    RankedQueue,
}

const POLICIES: [Policy; intf::DISPATCH_POLICY_COUNT as usize] =
    [Policy::Random, Policy::RoundRobin, Policy::ShortestQueue, Policy::LightestQueue, Policy::RankedQueue];

impl Policy {
    /// Returns the policy's number in bpf/include/dispatch.h.
    pub fn number(self) -> u32 {
        match self {
            Self::Random => intf::DISPATCH_POLICY_RANDOM,
            Self::RoundRobin => intf::DISPATCH_POLICY_RR,
            Self::ShortestQueue => intf::DISPATCH_POLICY_JSQ,
            Self::LightestQueue => intf::DISPATCH_POLICY_JLQ,
            Self::RankedQueue => intf::DISPATCH_POLICY_JBSRQ,
        }
    }

    /// Returns the policy's name in configuration and output.
    pub fn name(self) -> &'static str {
        intf::DISPATCH_POLICY_NAMES[self.number() as usize]
    }

    /// Returns all policies.
    pub fn all() -> impl Iterator<Item = Self> {
        POLICIES.into_iter()
    }
}

/// An unknown policy name.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("policy {0:?}: expected one of {names}", names = intf::DISPATCH_POLICY_NAMES.join(", "))]
pub struct UnknownPolicy(pub String);

impl FromStr for Policy {
    type Err = UnknownPolicy;

    fn from_str(name: &str) -> Result<Self, UnknownPolicy> {
        Self::all().find(|policy| policy.name() == name).ok_or_else(|| UnknownPolicy(name.to_owned()))
    }
}

/// Position of the number that identifies a request and its response.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RequestIdPosition {
    /// Offset from the start of a request's payload.
    pub offset: u16,
    /// Offset from the start of a response's payload.
    pub response_offset: u16,
    /// Length of the number in bytes: 1 to 8.
    pub bytes: u8,
}

/// A type of requests.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RequestType {
    /// Bytes of such requests from [`Options::type_offset`] on; bits outside `mask` are 0.
    pub value: [u8; intf::DISPATCH_TYPE_BYTES as usize],
    /// Bits of `value` that a request must have.
    pub mask: [u8; intf::DISPATCH_TYPE_BYTES as usize],
    /// Priority class; 0 is the highest.
    pub class: u8,
}

/// Dispatch options of one service.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Options {
    /// Address of the service's sockets; the unspecified address matches any.
    pub service: SocketAddr,
    /// Policy that selects a worker.
    pub policy: Policy,
    /// Position of the request's number; `None`: responses are matched by the client's address and port alone.
    pub request_id: Option<RequestIdPosition>,
    /// Offset of [`RequestType::value`] in the payload.
    pub type_offset: u16,
    /// Types of requests, at most [`MAX_TYPES`]; the first match counts.
    pub types: Vec<RequestType>,
    /// Priority class of requests that match none of `types`.
    pub other_class: u8,
    /// Whether service times are observed.
    pub observes_service_times: bool,
}

/// Limit of request types; the data plane has one more for all other requests.
pub const MAX_TYPES: usize = intf::MAX_DISPATCH_TYPES as usize - 1;

/// Timeouts of requests and workers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Timeouts {
    /// Age at which a request that has left the queue without a response is given up.
    pub response_timeout: Duration,
    /// Time without a response after which a worker with queued requests gets no further ones until it responds.
    pub stall_after: Duration,
}

impl Default for Timeouts {
    fn default() -> Self {
        Self { response_timeout: Duration::from_secs(1), stall_after: Duration::from_millis(500) }
    }
}

/// Time between two polls; [`Timeouts`] are rounded up to multiples of it.
pub const POLL_INTERVAL: Duration = Duration::from_millis(100);
/// Limit of [`Timeouts::response_timeout`]: ages are kept modulo 256 polls.
pub const MAX_RESPONSE_TIMEOUT: Duration = Duration::from_secs(20);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn policies_equal_those_of_the_bpf_program() {
        for (number, policy) in Policy::all().enumerate() {
            assert_eq!((policy.number(), policy.name().parse()), (number as u32, Ok(policy)));
        }
        assert_eq!(
            "jsk".parse::<Policy>().unwrap_err().to_string(),
            "policy \"jsk\": expected one of random, rr, jsq, jlq, jbsrq"
        );
    }
}
