//! Dispatcher `jbsrq`, which ranks the cores' bounded queues by the requests that are served before a new request.

use std::num::NonZeroU16;

use super::feo::{FirstEligibleOutConfig, FirstEligibleOutConfigError, FirstEligibleOutScheduler};
use super::ranks::{CoreRankRule, RankArrays, RankLambda, RankedService, RequestFeedbackError};
use super::{DispatchHeader, ReleasedRequest, RequestDispatcher};

/// Dispatcher that joins the bounded, shortest ranked queue (JBSRQ, RingLeader, NSDI'23, Sect. 4.2, 4.3).
///
/// A request goes to the core of least rank (see [`RankArrays`]). A request that no core takes waits at the NIC in its
/// service's queue (see [`FirstEligibleOutScheduler`]). `T` is the handle of a waiting request, which is `()` in the
/// simulator.
#[derive(Debug, Clone)]
pub struct JoinBoundedShortestRankedQueue<T = ()> {
    ranks: RankArrays,
    scheduler: FirstEligibleOutScheduler<T>,
    /// For each service, the maximum number of waiting requests since the last call of
    /// `take_peak_waiting_request_count`.
    peak_waiting_requests_by_service: Vec<u64>,
}

/// Effects of submitting a request, which are at most one dropped request and one sent request.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RequestSubmitEffects<T> {
    /// Request that was dropped because the buffer is full, with its service. It may be the submitted request.
    pub dropped_request: Option<(u8, T)>,
    /// Request that goes to a core now. It is the submitted request, unless earlier ones or rate limits delay it.
    pub sent_request: Option<(ReleasedRequest, T)>,
}

impl JoinBoundedShortestRankedQueue {
    /// Returns a dispatcher for `service_count` services in strict priority, each enabled on all cores. Panics without
    /// services, with more than [`MAX_SCHEDULED_SERVICES`](super::MAX_SCHEDULED_SERVICES), or without cores.
    pub fn new(core_count: u16, service_count: u8, lambda: RankLambda, depth: NonZeroU16) -> Self {
        let ranked_services: Vec<_> = (0..service_count).map(|priority| RankedService { priority, lambda }).collect();
        let ranks = RankArrays::new(core_count, &ranked_services, CoreRankRule::Ranked, depth);
        Self::with_ranks(ranks, &FirstEligibleOutConfig::strict_priority(0..service_count)).expect("1 to 64 services")
    }
}

impl<T> JoinBoundedShortestRankedQueue<T> {
    /// Returns a dispatcher with empty queues in front of the cores of `ranks`. Fails if `config` is out of range, or
    /// if `ranks` and `config` differ in their numbers of services.
    pub fn with_ranks(ranks: RankArrays, config: &FirstEligibleOutConfig) -> Result<Self, FirstEligibleOutConfigError> {
        if config.queues.len() != ranks.service_count() {
            return Err(FirstEligibleOutConfigError::InvalidServiceCount(config.queues.len()));
        }
        Ok(Self {
            scheduler: FirstEligibleOutScheduler::new(config)?,
            peak_waiting_requests_by_service: vec![0; ranks.service_count()],
            ranks,
        })
    }

    /// Enables or disables `service` on `core`, as [`RankArrays::set_service_enabled`] does.
    pub fn set_service_enabled(&mut self, service: u8, core: u16, is_enabled: bool) {
        self.ranks.set_service_enabled(service, core, is_enabled);
    }

    /// Returns the ranks of the cores for each service.
    pub fn ranks(&self) -> &RankArrays {
        &self.ranks
    }

    /// Returns the scheduler with the requests that wait at the NIC.
    pub fn scheduler(&self) -> &FirstEligibleOutScheduler<T> {
        &self.scheduler
    }

    /// Returns the number of requests of `service` that wait at the NIC.
    pub fn waiting_request_count(&self, service: u8) -> u64 {
        self.scheduler.waiting_request_count(service) as u64
    }

    /// Returns the maximum number of waiting requests of `service` since the last call.
    pub fn take_peak_waiting_request_count(&mut self, service: u8) -> u64 {
        let waiting_request_count = self.waiting_request_count(service);
        std::mem::replace(&mut self.peak_waiting_requests_by_service[usize::from(service)], waiting_request_count)
    }

    /// Queues a request that arrived at `now`. Then returns the next request if a core takes it. `now` must not
    /// decrease.
    #[inline]
    pub fn submit_request(&mut self, now: u64, service: u8, request: T) -> RequestSubmitEffects<T> {
        if self.scheduler.can_bypass_queue()
            && let Some(core) = self.ranks.assign_request(service)
        {
            return RequestSubmitEffects {
                dropped_request: None,
                sent_request: Some((ReleasedRequest { service, core }, request)),
            };
        }
        let dropped_request = self.scheduler.push_request(now, service, request);
        let sent_request = self.release_next_request(now);
        let peak_waiting_count = &mut self.peak_waiting_requests_by_service[usize::from(service)];
        *peak_waiting_count = (*peak_waiting_count).max(self.scheduler.waiting_request_count(service) as u64);
        RequestSubmitEffects { dropped_request, sent_request }
    }

    /// Returns the next request that goes to a core, or `None` if no request can go now. Callers must call it until it
    /// returns `None` after feedback, after a service was enabled, and when a rate limit ends.
    #[inline]
    pub fn release_next_request(&mut self, now: u64) -> Option<(ReleasedRequest, T)> {
        let (service, request) = self.scheduler.pop_request(now, self.ranks.eligible_service_mask())?;
        let core = self.ranks.assign_request(service)?;
        Some((ReleasedRequest { service, core }, request))
    }

    /// Accounts for `count` answered requests, as [`RankArrays::record_feedback`] does. Fails if fewer are outstanding.
    #[inline]
    pub fn record_feedback(&mut self, service: u8, core: u16, count: u32) -> Result<(), RequestFeedbackError> {
        self.ranks.record_feedback(service, core, count)
    }
}

impl RequestDispatcher for JoinBoundedShortestRankedQueue {
    #[inline]
    fn place_request(&mut self, now: u64, header: &DispatchHeader) -> Option<u16> {
        let (released_request, ()) = self.submit_request(now, header.service, ()).sent_request?;
        debug_assert_eq!(released_request.service, header.service, "release() was called until None");
        Some(released_request.core)
    }

    #[inline]
    fn record_completion(&mut self, core: u16, header: &DispatchHeader) {
        self.record_feedback(header.service, core, 1).expect("a response answers a request");
    }

    #[inline]
    fn release_request(&mut self, now: u64) -> Option<ReleasedRequest> {
        self.release_next_request(now).map(|(released_request, ())| released_request)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::super::tests::build_dispatch_header;
    use super::super::{DispatchEligibilityRule, DispatchRateLimit, SchedulingMemberRanking};
    use super::*;

    fn build_dispatcher(core_count: u16, depth: u16) -> JoinBoundedShortestRankedQueue {
        JoinBoundedShortestRankedQueue::new(core_count, 2, RankLambda::PAPER_VALUE, depth.try_into().unwrap())
    }

    /// Sends a request of `service` to core `core` of two, while the other core is disabled for the service.
    fn submit_request_to_core(jbsrq: &mut JoinBoundedShortestRankedQueue, service: u8, core: u16) {
        (0..2).for_each(|other| jbsrq.set_service_enabled(service, other, other == core));
        assert_eq!(jbsrq.place_request(0, &build_dispatch_header(service, 1)), Some(core));
        (0..2).for_each(|other| jbsrq.set_service_enabled(service, other, true));
    }

    #[test]
    fn low_priority_requests_add_little_to_high_priority_ranks() {
        // In RingLeader's Fig. 5 (c), core 0 has three requests of low priority, and core 1 has one of high priority.
        let mut jbsrq = build_dispatcher(2, 4);
        (0..3).for_each(|_| submit_request_to_core(&mut jbsrq, 1, 0));
        submit_request_to_core(&mut jbsrq, 0, 1);
        assert_eq!(jbsrq.place_request(0, &build_dispatch_header(0, 1)), Some(0));
    }

    #[test]
    fn idle_core_is_preferred_to_a_core_with_low_priority_requests() {
        let mut jbsrq = build_dispatcher(2, 4);
        submit_request_to_core(&mut jbsrq, 1, 0);
        assert_eq!(jbsrq.place_request(0, &build_dispatch_header(0, 1)), Some(1));
    }

    #[test]
    fn high_priority_requests_count_in_full_in_low_priority_ranks() {
        let mut jbsrq = build_dispatcher(2, 4);
        submit_request_to_core(&mut jbsrq, 1, 0);
        (0..2).for_each(|_| submit_request_to_core(&mut jbsrq, 0, 1));
        assert_eq!(jbsrq.place_request(0, &build_dispatch_header(1, 1)), Some(0));
    }

    #[test]
    fn request_of_an_eligible_service_overtakes_ineligible_ones() {
        let mut jbsrq = build_dispatcher(2, 1);
        jbsrq.set_service_enabled(0, 1, false);
        assert_eq!(jbsrq.place_request(0, &build_dispatch_header(0, 1)), Some(0));
        assert_eq!(jbsrq.place_request(0, &build_dispatch_header(0, 1)), None);
        assert_eq!(jbsrq.place_request(0, &build_dispatch_header(1, 1)), Some(1));
        assert_eq!(jbsrq.place_request(0, &build_dispatch_header(1, 1)), None);
        assert_eq!(jbsrq.release_request(0), None);
        jbsrq.record_completion(1, &build_dispatch_header(1, 1));
        assert_eq!(jbsrq.release_request(0), Some(ReleasedRequest { service: 1, core: 1 }));
        jbsrq.record_completion(0, &build_dispatch_header(0, 1));
        assert_eq!(jbsrq.release_request(0), Some(ReleasedRequest { service: 0, core: 0 }));
        assert_eq!(
            (jbsrq.waiting_request_count(0), jbsrq.waiting_request_count(1), jbsrq.release_request(0)),
            (0, 0, None)
        );
    }

    /// Reproduces RingLeader, Sect. 5.2 and Fig. 7, with depth 3 and lambda 0.2. Service 1 has the paper's priority 2,
    /// service 2 has priority 1 (the lowest), and priority 3 has no request. The test counts cores from 0.
    #[test]
    fn ranks_match_figure_7_of_ringleader() {
        const PRIORITY_3: u8 = 0;
        const SERVICE_1: u8 = 1;
        const SERVICE_2: u8 = 2;
        let ranks_of_core = |jbsrq: &JoinBoundedShortestRankedQueue, core| {
            [SERVICE_2, SERVICE_1, PRIORITY_3].map(|service| jbsrq.ranks().core_rank(service, core))
        };
        let depth = NonZeroU16::new(3).unwrap();
        let mut jbsrq = JoinBoundedShortestRankedQueue::new(2, 3, RankLambda::PAPER_VALUE, depth);
        for (service, core) in [(SERVICE_2, 0), (SERVICE_2, 0), (SERVICE_1, 1), (SERVICE_2, 1), (SERVICE_2, 1)] {
            submit_request_to_core(&mut jbsrq, service, core);
        }
        assert_eq!(
            (ranks_of_core(&jbsrq, 0), ranks_of_core(&jbsrq, 1)),
            ([2000, 400, 400], [3000, 1400, 600]),
            "before"
        );
        assert_eq!(jbsrq.ranks().eligible_service_mask(), 0b111);

        let sent_request = jbsrq.submit_request(0, SERVICE_1, ()).sent_request;
        assert_eq!(sent_request, Some((ReleasedRequest { service: SERVICE_1, core: 0 }, ())), "steps 1 to 5");
        assert_eq!(ranks_of_core(&jbsrq, 0), [3000, 1400, 600], "step 6");
        assert_eq!(jbsrq.ranks().eligible_service_mask() >> SERVICE_2 & 1, 0, "steps 7 and 8");
        assert_eq!(jbsrq.submit_request(0, SERVICE_2, ()).sent_request, None, "held at the NIC");

        jbsrq.record_feedback(SERVICE_1, 0, 1).unwrap();
        assert_eq!(ranks_of_core(&jbsrq, 0), [2000, 400, 400], "step 9, F");
        jbsrq.record_feedback(SERVICE_2, 0, 1).unwrap();
        assert_eq!(ranks_of_core(&jbsrq, 0), [1000, 200, 200], "step 9, A");
        assert_eq!(jbsrq.release_next_request(0), Some((ReleasedRequest { service: SERVICE_2, core: 0 }, ())));
        assert_eq!(jbsrq.release_next_request(0), None);
    }

    #[test]
    fn ineligible_head_request_blocks_the_next_one_only_in_pifo() {
        for (selection, core) in
            [(DispatchEligibilityRule::FirstEligible, Some(1)), (DispatchEligibilityRule::Pifo, None)]
        {
            let config =
                FirstEligibleOutConfig { eligibility_rule: selection, ..FirstEligibleOutConfig::strict_priority(0..2) };
            let mut jbsrq = JoinBoundedShortestRankedQueue::with_ranks(build_dispatcher(2, 1).ranks, &config).unwrap();
            jbsrq.set_service_enabled(0, 1, false);
            assert!(
                jbsrq.submit_request(0, 0, 'a').sent_request.is_some()
                    && jbsrq.submit_request(0, 0, 'b').sent_request.is_none()
            );
            let sent_request = jbsrq.submit_request(0, 1, 'c').sent_request;
            assert_eq!(sent_request, core.map(|core| (ReleasedRequest { service: 1, core }, 'c')), "{selection:?}");
        }
    }

    #[test]
    fn rate_limit_applies_to_idle_cores() {
        let mut config = FirstEligibleOutConfig::strict_priority(0..2);
        config.queues[0].parameters.rate_limit = Some(DispatchRateLimit { token_interval: 10, burst_tokens: 1 });
        let mut jbsrq = JoinBoundedShortestRankedQueue::with_ranks(build_dispatcher(2, 4).ranks, &config).unwrap();
        assert!(
            jbsrq.submit_request(0, 0, 'a').sent_request.is_some()
                && jbsrq.submit_request(1, 0, 'b').sent_request.is_none()
        );
        assert_eq!((jbsrq.release_next_request(9), jbsrq.scheduler().next_token_time()), (None, Some(10)));
        assert_eq!(jbsrq.release_next_request(10), Some((ReleasedRequest { service: 0, core: 1 }, 'b')));
    }

    proptest! {
        /// Compares a dispatcher whose requests may bypass an empty queue with one whose requests cannot. The second
        /// has a rate limit that delays nothing but forbids the bypass.
        #[test]
        fn bypass_of_an_empty_queue_changes_no_decision(
            is_deadline_ranking in any::<bool>(),
            is_pifo in any::<bool>(),
            steps in prop::collection::vec((0u8..4, 0u8..3, 0u16..2), 0..200),
        ) {
            let mut config = FirstEligibleOutConfig::strict_priority(0..3);
            config.max_waiting_requests = 4;
            config.groups[0].service_ranking =
                match is_deadline_ranking {
                    true => SchedulingMemberRanking::EarliestDeadline,
                    false => SchedulingMemberRanking::StrictPriority,
                };
            config.eligibility_rule = match is_pifo {
                true => DispatchEligibilityRule::Pifo,
                false => DispatchEligibilityRule::FirstEligible,
            };
            let ranks = JoinBoundedShortestRankedQueue::new(2, 3, RankLambda::PAPER_VALUE, 2.try_into().unwrap()).ranks;
            let mut dispatcher_with_bypass =
                JoinBoundedShortestRankedQueue::with_ranks(ranks.clone(), &config).unwrap();
            config.groups[0].parameters.rate_limit = Some(DispatchRateLimit { token_interval: 0, burst_tokens: 1 });
            let mut dispatcher_without_bypass = JoinBoundedShortestRankedQueue::with_ranks(ranks, &config).unwrap();
            for (now, (step, service, core)) in (0u64..).zip(steps) {
                match step {
                    0 | 1 => prop_assert_eq!(dispatcher_with_bypass.submit_request(now, service, now),
                        dispatcher_without_bypass.submit_request(now, service, now)),
                    2 => {
                        let expected_result = dispatcher_with_bypass.record_feedback(service, core, 1);
                        prop_assert_eq!(expected_result, dispatcher_without_bypass.record_feedback(service, core, 1));
                    }
                    _ => {
                        let is_enabled = !dispatcher_with_bypass.ranks().is_service_enabled(service, core);
                        dispatcher_with_bypass.set_service_enabled(service, core, is_enabled);
                        dispatcher_without_bypass.set_service_enabled(service, core, is_enabled);
                    }
                }
                loop {
                    let expected_request = dispatcher_with_bypass.release_next_request(now);
                    prop_assert_eq!(&expected_request, &dispatcher_without_bypass.release_next_request(now));
                    if expected_request.is_none() {
                        break;
                    }
                }
                for service in 0..3 {
                    prop_assert_eq!(dispatcher_with_bypass.take_peak_waiting_request_count(service),
                        dispatcher_without_bypass.take_peak_waiting_request_count(service));
                }
            }
        }
    }
}
