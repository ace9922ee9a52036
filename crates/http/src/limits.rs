//! Rate limits of the API's callers.

use std::net::{IpAddr, Ipv6Addr};
use std::num::NonZeroU32;
use std::time::Duration;

use governor::clock::{Clock as _, MonotonicClock};
use governor::middleware::NoOpMiddleware;
use governor::state::keyed::DashMapStateStore;
use governor::{Quota, RateLimiter};

use crate::{Problem, ProblemKind};
use coreward_api::Role;

type KeyedRateLimiter<K> = RateLimiter<
    K,
    DashMapStateStore<K>,
    MonotonicClock,
    NoOpMiddleware<<MonotonicClock as governor::clock::Clock>::Instant>,
>;

/// Maximum number of read-only requests per second, for each role and client address. This is enough for a dashboard
/// and a few scripts.
const MAX_API_READS_PER_SECOND: NonZeroU32 = NonZeroU32::new(200).unwrap();
/// Maximum number of requests per second to operators' endpoints, for each role and client address.
const MAX_API_WRITES_PER_SECOND: NonZeroU32 = NonZeroU32::new(20).unwrap();
/// Maximum number of requests per second without a valid credential, for each client address.
const MAX_UNAUTHENTICATED_REQUESTS_PER_SECOND: NonZeroU32 = NonZeroU32::new(10).unwrap();
/// Maximum number of requests in a burst, as a multiple of the rate per second.
const BURST_RATE_MULTIPLE: u32 = 5;
/// Number of callers in a rate limiter above which the limiter removes inactive callers.
const MAX_TRACKED_API_CALLERS: usize = 4096;

/// Rate limits of the API, for each caller's role and address.
pub struct ApiRateLimits {
    clock: MonotonicClock,
    read_limiter: KeyedRateLimiter<(Role, IpAddr)>,
    write_limiter: KeyedRateLimiter<(Role, IpAddr)>,
    rejected_request_limiter: KeyedRateLimiter<IpAddr>,
}

impl Default for ApiRateLimits {
    fn default() -> Self {
        let clock = MonotonicClock;
        let quota_for_rate =
            |rate: NonZeroU32| Quota::per_second(rate).allow_burst(rate.saturating_mul(BURST_TO_RATE_FACTOR));
        Self {
            read_limiter: RateLimiter::new(
                quota_for_rate(MAX_API_READS_PER_SECOND),
                DashMapStateStore::default(),
                clock.clone(),
            ),
            write_limiter: RateLimiter::new(
                quota_for_rate(MAX_API_WRITES_PER_SECOND),
                DashMapStateStore::default(),
                clock.clone(),
            ),
            rejected_request_limiter: RateLimiter::new(
                quota_for_rate(MAX_UNAUTHENTICATED_REQUESTS_PER_SECOND),
                DashMapStateStore::default(),
                clock.clone(),
            ),
            clock,
        }
    }
}

const BURST_TO_RATE_FACTOR: NonZeroU32 = NonZeroU32::new(BURST_RATE_MULTIPLE).unwrap();

impl ApiRateLimits {
    /// Counts a request of an authenticated caller. Fails if the caller's rate limit is exceeded.
    pub fn check_request_rate(&self, role: Role, address: IpAddr, is_write: bool) -> Result<(), Problem> {
        self.check_rate_limiter(
            if is_write { &self.write_limiter } else { &self.read_limiter },
            &(role, network_of_address(address)),
        )
    }

    /// Counts a request without a valid credential. Fails if the address's rate limit is exceeded.
    pub fn check_rejected_request_rate(&self, address: IpAddr) -> Result<(), Problem> {
        self.check_rate_limiter(&self.rejected_request_limiter, &network_of_address(address))
    }

    fn check_rate_limiter<K: std::hash::Hash + Eq + Clone>(
        &self,
        limiter: &KeyedRateLimiter<K>,
        key: &K,
    ) -> Result<(), Problem> {
        if limiter.len() > MAX_TRACKED_API_CALLERS {
            limiter.retain_recent();
        }
        limiter
            .check_key(key)
            .map_err(|not_until| too_many_requests_problem(not_until.wait_time_from(self.clock.now())))
    }
}

fn too_many_requests_problem(retry_delay: Duration) -> Problem {
    let delay_s = retry_delay.as_millis().div_ceil(1000).max(1) as u64;
    Problem::new(ProblemKind::TooManyRequests, format!("too many requests: expected none within {delay_s} s"))
        .with_retry_after(delay_s)
}

/// Returns the address, or the /64 network of an IPv6 address, because one host may use every address in that network.
pub(crate) fn network_of_address(address: IpAddr) -> IpAddr {
    match address.to_canonical() {
        IpAddr::V6(v6) => IpAddr::V6(Ipv6Addr::from_bits(v6.to_bits() & !u128::from(u64::MAX))),
        v4 => v4,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn excess_requests_get_a_retry_after_header() {
        let limits = ApiRateLimits::default();
        let client_address = |last_segment: u16| IpAddr::from(Ipv6Addr::new(0xfd00, 0, 0, 0, 0, 0, 0, last_segment));
        let start_time = std::time::Instant::now();
        let (allowed_count, problem) = (0..=u16::MAX)
            .find_map(|n| {
                limits
                    .check_request_rate(Role::Operator, client_address(n), true)
                    .err()
                    .map(|problem| (u32::from(n), problem))
            })
            .unwrap();
        let (burst, replenished_count) = (
            MAX_API_WRITES_PER_SECOND.get() * BURST_RATE_MULTIPLE,
            start_time.elapsed().as_secs_f64() * f64::from(MAX_API_WRITES_PER_SECOND.get()),
        );
        assert!(
            (burst..=burst + replenished_count as u32 + 1).contains(&allowed_count),
            "{allowed_count} allowed, {replenished_count} earned meanwhile"
        );
        assert_eq!((problem.status, problem.retry_after_s), (429, Some(1)));
        assert!(limits.check_request_rate(Role::Operator, client_address(1), false).is_ok());
        assert!(limits.check_request_rate(Role::Viewer, client_address(1), true).is_ok());
        assert!(limits.check_rejected_request_rate("10.0.0.1".parse().unwrap()).is_ok());
    }
}
