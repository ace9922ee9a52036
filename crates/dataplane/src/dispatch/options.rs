//! Options of a dispatched service, which are needed to load its programs.

use std::net::SocketAddr;
use std::str::FromStr;
use std::time::Duration;

use coreward_intf as intf;

/// Policy by which the dispatcher selects a worker for a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DispatchPolicy {
    /// `random` selects the worker by the kernel's hash of the client's address and port.
    Random,
    /// `rr` (round robin) selects each worker in turn.
    RoundRobin,
    /// `jsq` (join the shortest queue) selects the worker with the fewest outstanding requests.
    ShortestQueue,
    /// `jlq` (join the lightest queue) selects the worker whose outstanding requests have the least expected work.
    LightestQueue,
    /// `jbsrq` selects the worker with the fewest outstanding requests, among the workers whose limit for the request's
    /// priority class is not reached.
    RankedQueue,
}

const ALL_DISPATCH_POLICIES: [DispatchPolicy; intf::DISPATCH_POLICY_COUNT as usize] = [
    DispatchPolicy::Random,
    DispatchPolicy::RoundRobin,
    DispatchPolicy::ShortestQueue,
    DispatchPolicy::LightestQueue,
    DispatchPolicy::RankedQueue,
];

impl DispatchPolicy {
    /// Returns the policy's number in the BPF programs (bpf/include/dispatch.h).
    pub fn bpf_number(self) -> u32 {
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
        intf::DISPATCH_POLICY_NAMES[self.bpf_number() as usize]
    }

    /// Returns an iterator over all policies.
    pub fn all() -> impl Iterator<Item = Self> {
        ALL_DISPATCH_POLICIES.into_iter()
    }
}

/// Error for the name of a policy that does not exist.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("policy {0:?}: expected one of {names}", names = intf::DISPATCH_POLICY_NAMES.join(", "))]
pub struct UnknownDispatchPolicy(pub String);

impl FromStr for DispatchPolicy {
    type Err = UnknownDispatchPolicy;

    fn from_str(name: &str) -> Result<Self, UnknownDispatchPolicy> {
        Self::all().find(|policy| policy.name() == name).ok_or_else(|| UnknownDispatchPolicy(name.to_owned()))
    }
}

/// Position of the request number in requests and responses. The number matches a response to its request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RequestIdPosition {
    /// Offset of the request number from the start of a request's payload, in bytes.
    pub offset_in_request: u16,
    /// Offset of the request number from the start of a response's payload, in bytes.
    pub offset_in_response: u16,
    /// Length of the request number in bytes, from 1 to 8.
    pub byte_count: u8,
}

/// Type of requests, recognised by bytes of the payload at a fixed offset.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PayloadRequestType {
    /// Bytes that a request of this type contains at [`DispatchOptions::type_offset`]. Bits outside `payload_mask` are
    /// 0.
    pub payload_value: [u8; intf::DISPATCH_TYPE_BYTES as usize],
    /// Mask of the payload's bits that are compared with `payload_value`.
    pub payload_mask: [u8; intf::DISPATCH_TYPE_BYTES as usize],
    /// Priority class of requests of this type. Class 0 has the highest priority.
    pub priority_class: u8,
}

/// Options for dispatching one service's requests.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DispatchOptions {
    /// Address and port to which the service's sockets are bound. The unspecified address matches any address.
    pub service_address: SocketAddr,
    /// Policy by which a worker is selected for each request.
    pub policy: DispatchPolicy,
    /// Position of the request number, or `None` if responses are matched only by the client's address and port.
    pub request_id_position: Option<RequestIdPosition>,
    /// Offset from the start of the payload, in bytes, at which [`PayloadRequestType::payload_value`] is compared.
    pub type_offset: u16,
    /// Types of requests, at most [`MAX_REQUEST_TYPES`]. If several types match a request, the first one applies.
    pub request_types: Vec<PayloadRequestType>,
    /// Priority class of requests that match none of `request_types`.
    pub default_priority_class: u8,
    /// Whether the programs measure the service times of requests.
    pub measures_service_times: bool,
}

/// Maximum number of configured request types. The data plane has one more type, for all other requests.
pub const MAX_REQUEST_TYPES: usize = intf::MAX_DISPATCH_TYPES as usize - 1;

/// Timeouts after which the dispatcher abandons requests and disables workers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RequestTimeouts {
    /// Time after which the dispatcher abandons a request that has left the queue but got no response.
    pub response_timeout: Duration,
    /// Time without a response after which a worker with queued requests gets no new ones until it responds again.
    pub stall_after: Duration,
}

impl Default for RequestTimeouts {
    fn default() -> Self {
        Self { response_timeout: Duration::from_secs(1), stall_after: Duration::from_millis(500) }
    }
}

/// Interval at which the dispatcher polls the sockets' queues. [`RequestTimeouts`] are rounded up to multiples of it.
pub const WORKER_QUEUE_POLL_INTERVAL: Duration = Duration::from_millis(100);
/// Maximum of [`RequestTimeouts::response_timeout`], which is limited because a request's age is counted in polls
/// modulo 256.
pub const MAX_RESPONSE_TIMEOUT: Duration = Duration::from_secs(20);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn policy_numbers_and_names_match_the_bpf_program() {
        for (number, policy) in DispatchPolicy::all().enumerate() {
            assert_eq!((policy.bpf_number(), policy.name().parse()), (number as u32, Ok(policy)));
        }
        assert_eq!(
            "jsk".parse::<DispatchPolicy>().unwrap_err().to_string(),
            "policy \"jsk\": expected one of random, rr, jsq, jlq, jbsrq"
        );
    }
}
