//! What is said of a service before its program is loaded.

use std::net::SocketAddr;
use std::str::FromStr;
use std::time::Duration;

use coreward_intf as intf;

/// Which worker gets a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Policy {
    /// `random`: the kernel's own choice, by a hash of the client's address and port
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
    /// Its number in bpf/include/dispatch.h.
    pub fn number(self) -> u32 {
        match self {
            Self::Random => intf::DISPATCH_POLICY_RANDOM,
            Self::RoundRobin => intf::DISPATCH_POLICY_RR,
            Self::ShortestQueue => intf::DISPATCH_POLICY_JSQ,
            Self::LightestQueue => intf::DISPATCH_POLICY_JLQ,
            Self::RankedQueue => intf::DISPATCH_POLICY_JBSRQ,
        }
    }

    /// As people write it.
    pub fn name(self) -> &'static str {
        intf::DISPATCH_POLICY_NAMES[self.number() as usize]
    }

    /// Every one.
    pub fn all() -> impl Iterator<Item = Self> {
        POLICIES.into_iter()
    }
}

/// A name that no policy has.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("policy {0:?}: expected one of {names}", names = intf::DISPATCH_POLICY_NAMES.join(", "))]
pub struct UnknownPolicy(pub String);

impl FromStr for Policy {
    type Err = UnknownPolicy;

    fn from_str(name: &str) -> Result<Self, UnknownPolicy> {
        Self::all().find(|policy| policy.name() == name).ok_or_else(|| UnknownPolicy(name.to_owned()))
    }
}

/// Where a request and its response carry the number that belongs to both.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RequestId {
    /// From the start of a request's payload.
    pub offset: u16,
    /// From the start of a response's payload.
    pub response_offset: u16,
    /// 1 to 8.
    pub bytes: u8,
}

/// A kind of requests.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RequestType {
    /// The bytes that it has from [`Options::type_offset`] on; those not in `mask` are 0.
    pub value: [u8; intf::DISPATCH_TYPE_BYTES as usize],
    /// Which bits count.
    pub mask: [u8; intf::DISPATCH_TYPE_BYTES as usize],
    /// The priority class, 0 is the highest.
    pub class: u8,
}

/// How the requests of one service are dispatched.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Options {
    /// Where the service's sockets are bound; an unspecified address: on any.
    pub service: SocketAddr,
    /// Which worker gets a request.
    pub policy: Policy,
    /// None: responses are told apart by the client's address and port alone.
    pub request_id: Option<RequestId>,
    /// Where in the payload [`RequestType::value`] is looked for.
    pub type_offset: u16,
    /// At most [`MAX_TYPES`], the first that matches counts.
    pub types: Vec<RequestType>,
    /// The priority class of requests that match none of `types`.
    pub other_class: u8,
    /// Whether service times are observed.
    pub learn: bool,
}

/// Types that can be told apart; one more stands for all others.
pub const MAX_TYPES: usize = intf::MAX_DISPATCH_TYPES as usize - 1;

/// How long a worker may take, and how often it is looked after.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Timeouts {
    /// A request without a response that is older and cannot be in the queue any more is given up.
    pub response_timeout: Duration,
    /// A worker with a queue that answers nothing for so long gets no requests until it answers.
    pub stall_after: Duration,
}

impl Default for Timeouts {
    fn default() -> Self {
        Self { response_timeout: Duration::from_secs(1), stall_after: Duration::from_millis(500) }
    }
}

/// Time between two looks; what [`Timeouts`] says is rounded up to multiples of it.
pub const POLL_INTERVAL: Duration = Duration::from_millis(100);
/// The longest [`Timeouts::response_timeout`]: ages are kept modulo 256 looks.
pub const LONGEST_RESPONSE_TIMEOUT: Duration = Duration::from_secs(20);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn policies_are_those_of_the_program() {
        for (number, policy) in Policy::all().enumerate() {
            assert_eq!((policy.number(), policy.name().parse()), (number as u32, Ok(policy)));
        }
        assert_eq!(
            "jsk".parse::<Policy>().unwrap_err().to_string(),
            "policy \"jsk\": expected one of random, rr, jsq, jlq, jbsrq"
        );
    }
}
