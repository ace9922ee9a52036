//! Dispatcher `jbsrq`, which ranks the cores' bounded queues by the requests that are served before a new request.

use std::num::NonZeroU16;

use super::feo::{FirstEligibleOut, FirstEligibleOutConfig, FirstEligibleOutConfigError};
use super::ranks::{FeedbackError, Lambda, RankArrays, RankRule, RankedService};
use super::{DispatchHeader, Dispatcher, ReleasedRequest};

/// Dispatcher that joins the bounded, shortest ranked queue, first eligible out (RingLeader, NSDI'23, Sect. 4.2, 4.3).
///
/// A request goes to the core of least rank (see [`RankArrays`]). A request that no core takes waits at the NIC in its
/// service's queue (see [`FirstEligibleOut`]). `T` is the handle of a waiting request. The simulator has none.
#[derive(Debug, Clone)]
pub struct JoinBoundedShortestRankedQueue<T = ()> {
    ranks: RankArrays,
    scheduler: FirstEligibleOut<T>,
    /// Maximum number of each service's waiting requests since the last call of `take_waiting_peak`.
    waiting_peaks: Vec<u64>,
}

/// Effects of submitting a request.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SubmitEffects<T> {
    /// Request that was dropped because the buffer is full, with its service. It may be the submitted request.
    pub dropped_request: Option<(u8, T)>,
    /// Request that goes to a core now. It is the submitted request, unless earlier ones or rate limits delay it.
    pub sent_request: Option<(ReleasedRequest, T)>,
}

impl JoinBoundedShortestRankedQueue {
    /// Returns a dispatcher for `service_count` services in strict priority, each enabled on all cores. Panics without
    /// services, with more than [`MAX_SERVICES`](super::MAX_SERVICES), or without cores.
    pub fn new(core_count: u16, service_count: u8, lambda: Lambda, depth: NonZeroU16) -> Self {
        let ranked_services: Vec<_> = (0..service_count).map(|priority| RankedService { priority, lambda }).collect();
        let ranks = RankArrays::new(core_count, &ranked_services, RankRule::Ranked, depth);
        Self::with_ranks(ranks, &FirstEligibleOutConfig::strict_priority(0..service_count)).expect("1 to 64 services")
    }
}

impl<T> JoinBoundedShortestRankedQueue<T> {
    /// Returns a dispatcher with empty queues before the cores of `ranks`. Fails if `config` is out of range, or if
    /// `ranks` has another number of services.
    pub fn with_ranks(ranks: RankArrays, config: &FirstEligibleOutConfig) -> Result<Self, FirstEligibleOutConfigError> {
        if config.queues.len() != ranks.service_count() {
            return Err(FirstEligibleOutConfigError::InvalidServiceCount(config.queues.len()));
        }
        Ok(Self { scheduler: FirstEligibleOut::new(config)?, waiting_peaks: vec![0; ranks.service_count()], ranks })
    }

    /// Enables or disables `service` on `core`, as [`RankArrays::set_enabled`] does.
    pub fn set_enabled(&mut self, service: u8, core: u16, is_enabled: bool) {
        self.ranks.set_enabled(service, core, is_enabled);
    }

    /// Returns the ranks of the cores for each service.
    pub fn ranks(&self) -> &RankArrays {
        &self.ranks
    }

    /// Returns the scheduler with the requests that wait at the NIC.
    pub fn scheduler(&self) -> &FirstEligibleOut<T> {
        &self.scheduler
    }

    /// Returns the number of requests of `service` that wait at the NIC.
    pub fn waiting_count(&self, service: u8) -> u64 {
        self.scheduler.waiting_count(service) as u64
    }

    /// Returns the maximum number of waiting requests of `service` since the last call.
    pub fn take_waiting_peak(&mut self, service: u8) -> u64 {
        let waiting_count = self.waiting_count(service);
        std::mem::replace(&mut self.waiting_peaks[usize::from(service)], waiting_count)
    }

    /// Queues a request that arrived at `now`, then sends the next request if a core takes it. `now` must not decrease.
    #[inline]
    pub fn submit(&mut self, now: u64, service: u8, request: T) -> SubmitEffects<T> {
        if self.scheduler.can_bypass_queue()
            && let Some(core) = self.ranks.assign_request(service)
        {
            return SubmitEffects {
                dropped_request: None,
                sent_request: Some((ReleasedRequest { service, core }, request)),
            };
        }
        let dropped_request = self.scheduler.push(now, service, request);
        let sent_request = self.next_request(now);
        let waiting_peak = &mut self.waiting_peaks[usize::from(service)];
        *waiting_peak = (*waiting_peak).max(self.scheduler.waiting_count(service) as u64);
        SubmitEffects { dropped_request, sent_request }
    }

    /// Returns the next request that goes to a core, or `None` if none can go now. It must be called until it returns
    /// `None` after feedback, after a service was enabled, and when a rate limit ends.
    #[inline]
    pub fn next_request(&mut self, now: u64) -> Option<(ReleasedRequest, T)> {
        let (service, request) = self.scheduler.pop(now, self.ranks.eligible_service_mask())?;
        let core = self.ranks.assign_request(service)?;
        Some((ReleasedRequest { service, core }, request))
    }

    /// Accounts for answered requests, as [`RankArrays::record_feedback`] does. Fails if fewer are outstanding.
    #[inline]
    pub fn record_feedback(&mut self, service: u8, core: u16, count: u32) -> Result<(), FeedbackError> {
        self.ranks.record_feedback(service, core, count)
    }
}

impl Dispatcher for JoinBoundedShortestRankedQueue {
    #[inline]
    fn place(&mut self, now: u64, header: &DispatchHeader) -> Option<u16> {
        let (released_request, ()) = self.submit(now, header.service, ()).sent_request?;
        debug_assert_eq!(released_request.service, header.service, "release() was called until None");
        Some(released_request.core)
    }

    #[inline]
    fn record_completion(&mut self, core: u16, header: &DispatchHeader) {
        self.record_feedback(header.service, core, 1).expect("a response answers a request");
    }

    #[inline]
    fn release(&mut self, now: u64) -> Option<ReleasedRequest> {
        self.next_request(now).map(|(released_request, ())| released_request)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::super::tests::header;
    use super::super::{Ranking, RateLimit, Selection};
    use super::*;

    fn dispatcher(cores: u16, depth: u16) -> JoinBoundedShortestRankedQueue {
        JoinBoundedShortestRankedQueue::new(cores, 2, Lambda::PAPER_VALUE, depth.try_into().unwrap())
    }

    /// Sends a request of `service` to core `core` of two, by disabling the other core for a moment.
    fn submit_to_core(jbsrq: &mut JoinBoundedShortestRankedQueue, service: u8, core: u16) {
        (0..2).for_each(|other| jbsrq.set_enabled(service, other, other == core));
        assert_eq!(jbsrq.place(0, &header(service, 1)), Some(core));
        (0..2).for_each(|other| jbsrq.set_enabled(service, other, true));
    }

    #[test]
    fn low_priority_requests_hardly_count_for_high_priority() {
        // In RingLeader's Fig. 5 (c), core 0 has three requests of low priority, and core 1 has one of high priority.
        let mut jbsrq = dispatcher(2, 4);
        (0..3).for_each(|_| submit_to_core(&mut jbsrq, 1, 0));
        submit_to_core(&mut jbsrq, 0, 1);
        assert_eq!(jbsrq.place(0, &header(0, 1)), Some(0));
    }

    #[test]
    fn idle_core_is_preferred_to_a_core_with_low_priority_requests() {
        let mut jbsrq = dispatcher(2, 4);
        submit_to_core(&mut jbsrq, 1, 0);
        assert_eq!(jbsrq.place(0, &header(0, 1)), Some(1));
    }

    #[test]
    fn high_priority_requests_count_in_full_for_low_priority() {
        let mut jbsrq = dispatcher(2, 4);
        submit_to_core(&mut jbsrq, 1, 0);
        (0..2).for_each(|_| submit_to_core(&mut jbsrq, 0, 1));
        assert_eq!(jbsrq.place(0, &header(1, 1)), Some(0));
    }

    #[test]
    fn first_eligible_request_leaves_first() {
        let mut jbsrq = dispatcher(2, 1);
        jbsrq.set_enabled(0, 1, false);
        assert_eq!(jbsrq.place(0, &header(0, 1)), Some(0));
        assert_eq!(jbsrq.place(0, &header(0, 1)), None);
        assert_eq!(jbsrq.place(0, &header(1, 1)), Some(1));
        assert_eq!(jbsrq.place(0, &header(1, 1)), None);
        assert_eq!(jbsrq.release(0), None);
        jbsrq.record_completion(1, &header(1, 1));
        assert_eq!(jbsrq.release(0), Some(ReleasedRequest { service: 1, core: 1 }));
        jbsrq.record_completion(0, &header(0, 1));
        assert_eq!(jbsrq.release(0), Some(ReleasedRequest { service: 0, core: 0 }));
        assert_eq!((jbsrq.waiting_count(0), jbsrq.waiting_count(1), jbsrq.release(0)), (0, 0, None));
    }

    /// Reproduces RingLeader, Sect. 5.2 and Fig. 7, with depth 3 and lambda 0.2. Service 1 has the paper's priority 2,
    /// service 2 its priority 1 (the lowest), and priority 3 has no request. Cores count from 0 here.
    #[test]
    fn ranks_equal_ringleader_figure_7() {
        const PRIORITY_3: u8 = 0;
        const SERVICE_1: u8 = 1;
        const SERVICE_2: u8 = 2;
        let ranks_of_core = |jbsrq: &JoinBoundedShortestRankedQueue, core| {
            [SERVICE_2, SERVICE_1, PRIORITY_3].map(|service| jbsrq.ranks().rank(service, core))
        };
        let depth = NonZeroU16::new(3).unwrap();
        let mut jbsrq = JoinBoundedShortestRankedQueue::new(2, 3, Lambda::PAPER_VALUE, depth);
        for (service, core) in [(SERVICE_2, 0), (SERVICE_2, 0), (SERVICE_1, 1), (SERVICE_2, 1), (SERVICE_2, 1)] {
            submit_to_core(&mut jbsrq, service, core);
        }
        assert_eq!(
            (ranks_of_core(&jbsrq, 0), ranks_of_core(&jbsrq, 1)),
            ([2000, 400, 400], [3000, 1400, 600]),
            "before"
        );
        assert_eq!(jbsrq.ranks().eligible_service_mask(), 0b111);

        let sent_request_f = jbsrq.submit(0, SERVICE_1, ()).sent_request;
        assert_eq!(sent_request_f, Some((ReleasedRequest { service: SERVICE_1, core: 0 }, ())), "steps 1 to 5");
        assert_eq!(ranks_of_core(&jbsrq, 0), [3000, 1400, 600], "step 6");
        assert_eq!(jbsrq.ranks().eligible_service_mask() >> SERVICE_2 & 1, 0, "steps 7 and 8");
        assert_eq!(jbsrq.submit(0, SERVICE_2, ()).sent_request, None, "held at the NIC");

        jbsrq.record_feedback(SERVICE_1, 0, 1).unwrap();
        assert_eq!(ranks_of_core(&jbsrq, 0), [2000, 400, 400], "step 9, F");
        jbsrq.record_feedback(SERVICE_2, 0, 1).unwrap();
        assert_eq!(ranks_of_core(&jbsrq, 0), [1000, 200, 200], "step 9, A");
        assert_eq!(jbsrq.next_request(0), Some((ReleasedRequest { service: SERVICE_2, core: 0 }, ())));
        assert_eq!(jbsrq.next_request(0), None);
    }

    #[test]
    fn pifo_holds_a_request_behind_an_ineligible_head() {
        for (selection, core) in [(Selection::FirstEligible, Some(1)), (Selection::Pifo, None)] {
            let config = FirstEligibleOutConfig { selection, ..FirstEligibleOutConfig::strict_priority(0..2) };
            let mut jbsrq = JoinBoundedShortestRankedQueue::with_ranks(dispatcher(2, 1).ranks, &config).unwrap();
            jbsrq.set_enabled(0, 1, false);
            assert!(jbsrq.submit(0, 0, 'a').sent_request.is_some() && jbsrq.submit(0, 0, 'b').sent_request.is_none());
            let sent_request = jbsrq.submit(0, 1, 'c').sent_request;
            assert_eq!(sent_request, core.map(|core| (ReleasedRequest { service: 1, core }, 'c')), "{selection:?}");
        }
    }

    #[test]
    fn rate_limit_applies_to_idle_cores() {
        let mut config = FirstEligibleOutConfig::strict_priority(0..2);
        config.queues[0].parameters.rate_limit = Some(RateLimit { token_interval: 10, burst: 1 });
        let mut jbsrq = JoinBoundedShortestRankedQueue::with_ranks(dispatcher(2, 4).ranks, &config).unwrap();
        assert!(jbsrq.submit(0, 0, 'a').sent_request.is_some() && jbsrq.submit(1, 0, 'b').sent_request.is_none());
        assert_eq!((jbsrq.next_request(9), jbsrq.scheduler().next_token_time()), (None, Some(10)));
        assert_eq!(jbsrq.next_request(10), Some((ReleasedRequest { service: 0, core: 1 }, 'b')));
    }

    proptest! {
        /// A rate limit that never delays a request makes every request pass through the queue.
        #[test]
        fn shortcut_past_an_empty_queue_changes_no_decision(
            deadline in any::<bool>(),
            pifo in any::<bool>(),
            steps in prop::collection::vec((0u8..4, 0u8..3, 0u16..2), 0..200),
        ) {
            let mut config = FirstEligibleOutConfig::strict_priority(0..3);
            config.capacity = 4;
            config.groups[0].ranking = if deadline { Ranking::EarliestDeadline } else { Ranking::StrictPriority };
            config.selection = if pifo { Selection::Pifo } else { Selection::FirstEligible };
            let ranks = JoinBoundedShortestRankedQueue::new(2, 3, Lambda::PAPER_VALUE, 2.try_into().unwrap()).ranks;
            let mut with_shortcut = JoinBoundedShortestRankedQueue::with_ranks(ranks.clone(), &config).unwrap();
            config.groups[0].parameters.rate_limit = Some(RateLimit { token_interval: 0, burst: 1 });
            let mut without_shortcut = JoinBoundedShortestRankedQueue::with_ranks(ranks, &config).unwrap();
            for (now, (step, service, core)) in (0u64..).zip(steps) {
                match step {
                    0 | 1 => prop_assert_eq!(with_shortcut.submit(now, service, now),
                        without_shortcut.submit(now, service, now)),
                    2 => {
                        let expected = with_shortcut.record_feedback(service, core, 1);
                        prop_assert_eq!(expected, without_shortcut.record_feedback(service, core, 1));
                    }
                    _ => {
                        let is_enabled = !with_shortcut.ranks().is_enabled(service, core);
                        with_shortcut.set_enabled(service, core, is_enabled);
                        without_shortcut.set_enabled(service, core, is_enabled);
                    }
                }
                loop {
                    let next = with_shortcut.next_request(now);
                    prop_assert_eq!(&next, &without_shortcut.next_request(now));
                    if next.is_none() {
                        break;
                    }
                }
                for service in 0..3 {
                    prop_assert_eq!(with_shortcut.take_waiting_peak(service),
                        without_shortcut.take_waiting_peak(service));
                }
            }
        }
    }
}
