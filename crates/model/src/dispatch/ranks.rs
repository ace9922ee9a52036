//! Rank arrays, which hold the work ahead of a service's next request at each core, and find a core for the request.

use std::num::NonZeroU16;

use super::TournamentTree;
use super::feo::MAX_SCHEDULED_SERVICES;

/// Factor by which a request of lower priority counts in a service's rank, because preempting it has a cost. It is from
/// 0 to 1, stored in thousandths so that ranks are integers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RankLambda(u16);

/// Error returned for a [`RankLambda`] that is not from 0 to 1.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
#[error("lambda {0}: expected a number from 0 to 1")]
pub struct InvalidRankLambda(pub f64);

/// Contribution to a rank of one request of the same or a higher priority, in thousandths.
const FULL_REQUEST_RANK_WEIGHT: u32 = 1000;

impl RankLambda {
    /// Value that RingLeader's evaluation uses (NSDI'23, Sect. 7.1).
    pub const PAPER_VALUE: RankLambda = RankLambda(200);

    /// Returns the factor `value` rounded to thousandths. Fails when `value` is not from 0 to 1.
    pub fn new(value: f64) -> Result<Self, InvalidRankLambda> {
        if (0.0..=1.0).contains(&value) {
            Ok(Self((value * f64::from(FULL_REQUEST_RANK_WEIGHT)).round() as u16))
        } else {
            Err(InvalidRankLambda(value))
        }
    }

    /// Returns the factor, from 0 to 1.
    pub fn get(self) -> f64 {
        f64::from(self.0) / f64::from(FULL_REQUEST_RANK_WEIGHT)
    }
}

/// Rule by which the outstanding requests of a core count in a service's rank.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CoreRankRule {
    /// Requests of at least the service's priority count in full, others by the service's [`RankLambda`]. This is JBSRQ
    /// (RingLeader, NSDI'23, Sect. 4.2).
    Ranked,
    /// All requests count in full. This is global JBSQ (RackSched, OSDI'20).
    Global,
    /// Only requests of the service count, and each service has its own bound (per-service JBSQ of nanoPU, OSDI'21).
    PerService,
}

/// Priority and lambda of a service for which [`RankArrays`] rank the cores.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RankedService {
    /// Priority of the service, where 0 is the highest. Several services can have the same priority.
    pub priority: u8,
    /// Factor by which a request of lower priority counts in the service's rank.
    pub lambda: RankLambda,
}

/// Error returned for feedback about more requests than are outstanding at the core.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error(
    "feedback for {answered_request_count} requests of service {service} at core {core}: \
     {outstanding_request_count} are outstanding"
)]
pub struct RequestFeedbackError {
    /// Index of the service whose requests were answered.
    pub service: u8,
    /// Index of the core that answered the requests.
    pub core: u16,
    /// Number of answered requests according to the feedback.
    pub answered_request_count: u32,
    /// Number of outstanding requests of the service at the core.
    pub outstanding_request_count: u32,
}

/// Ranks of every core for every service (RingLeader, NSDI'23, Sect. 4.2 and 5.1).
///
/// The rank of a core for a service is a weighted sum of the core's outstanding requests. A core takes a request while
/// its rank for that service is below the maximum and the service is enabled there. The request goes to the core of
/// least rank. Among equal cores, the one with the lowest index gets it.
#[derive(Debug, Clone)]
pub struct RankArrays {
    rank_limit: u32,
    /// Bit mask of the services whose next request at least one core would take.
    eligible_service_mask: u64,
    ranks_by_service: Vec<ServiceCoreRanks>,
}

#[derive(Debug, Clone)]
struct ServiceCoreRanks {
    /// Weight of one request of each service in this service's ranks, in thousandths.
    request_weight_by_service: Vec<u32>,
    /// Rank of each core for this service, in thousandths.
    rank_by_core: Vec<u32>,
    /// Whether this service is enabled on each core.
    is_enabled_by_core: Vec<bool>,
    /// Number of this service's requests that were sent to each core and are not answered.
    outstanding_request_count_by_core: Vec<u32>,
    /// Ranks of the cores that would take a request of this service, or [`NOT_ELIGIBLE_RANK`] for the other cores.
    eligible_rank_by_core: TournamentTree<u32>,
}

const NOT_ELIGIBLE_RANK: u32 = u32::MAX;

impl RankArrays {
    /// Returns the ranks of `cores` idle cores (at least 1), with every service enabled on every core. `depth` is the
    /// maximum rank of a core, in requests. Panics without cores, or with more than [`MAX_SCHEDULED_SERVICES`]
    /// services.
    pub fn new(cores: u16, services: &[RankedService], rule: CoreRankRule, depth: NonZeroU16) -> Self {
        assert!(
            services.len() <= MAX_SCHEDULED_SERVICES,
            "{} services: expected at most {MAX_SCHEDULED_SERVICES}",
            services.len()
        );
        let core_count = usize::from(cores);
        let service_ranks = (0..services.len()).map(|own_service| ServiceCoreRanks {
            request_weight_by_service: (0..services.len())
                .map(|other_service| rule.request_weight(services, own_service, other_service))
                .collect(),
            rank_by_core: vec![0; core_count],
            is_enabled_by_core: vec![true; core_count],
            outstanding_request_count_by_core: vec![0; core_count],
            eligible_rank_by_core: TournamentTree::new(cores, 0),
        });
        let eligible_service_mask = (0..services.len()).fold(0, |mask, service| mask | 1 << service);
        Self {
            rank_limit: u32::from(depth.get()) * FULL_REQUEST_RANK_WEIGHT,
            eligible_service_mask,
            ranks_by_service: service_ranks.collect(),
        }
    }

    /// Enables or disables `service` on `core` (RingLeader's EnableService and DisableService). Requests that are
    /// already at the core stay at it.
    pub fn set_service_enabled(&mut self, service: u8, core: u16, is_enabled: bool) {
        self.ranks_by_service[usize::from(service)].is_enabled_by_core[usize::from(core)] = is_enabled;
        self.update_core_eligibility(service, core);
    }

    /// Returns whether `service` is enabled on `core`.
    pub fn is_service_enabled(&self, service: u8, core: u16) -> bool {
        self.ranks_by_service[usize::from(service)].is_enabled_by_core[usize::from(core)]
    }

    /// Returns the number of services.
    pub fn service_count(&self) -> usize {
        self.ranks_by_service.len()
    }

    /// Returns the number of cores.
    pub fn core_count(&self) -> u16 {
        self.ranks_by_service.first().map_or(0, |service| service.rank_by_core.len() as u16)
    }

    /// Returns the mask of the services whose next request at least one core would take, where bit s is service s.
    #[inline]
    pub fn eligible_service_mask(&self) -> u64 {
        self.eligible_service_mask
    }

    /// Returns the rank of `core` for `service`, in thousandths.
    pub fn core_rank(&self, service: u8, core: u16) -> u32 {
        self.ranks_by_service[usize::from(service)].rank_by_core[usize::from(core)]
    }

    /// Returns the number of outstanding requests of `service` at `core`.
    pub fn service_outstanding_request_count(&self, service: u8, core: u16) -> u32 {
        self.ranks_by_service[usize::from(service)].outstanding_request_count_by_core[usize::from(core)]
    }

    /// Returns the number of outstanding requests of all services at `core`.
    pub fn core_outstanding_request_count(&self, core: u16) -> u32 {
        self.ranks_by_service.iter().map(|service| service.outstanding_request_count_by_core[usize::from(core)]).sum()
    }

    /// Returns the core to which a load hint goes. It is the core of least rank on which `service` is enabled, even if
    /// the core takes no request.
    pub fn least_loaded_core(&self, service: u8) -> Option<u16> {
        let service_ranks = &self.ranks_by_service[usize::from(service)];
        let enabled_cores = (0..service_ranks.is_enabled_by_core.len() as u16)
            .filter(|core| service_ranks.is_enabled_by_core[usize::from(*core)]);
        enabled_cores.min_by_key(|core| service_ranks.rank_by_core[usize::from(*core)])
    }

    /// Selects the core of least rank for a request of `service`, counts the request there, and returns the core.
    /// Returns `None` if no core takes the request.
    #[inline]
    pub fn assign_request(&mut self, service: u8) -> Option<u16> {
        let (core, rank) = self.ranks_by_service[usize::from(service)].eligible_rank_by_core.least_leaf();
        if rank == NOT_ELIGIBLE_RANK {
            return None;
        }
        self.ranks_by_service[usize::from(service)].outstanding_request_count_by_core[usize::from(core)] += 1;
        self.update_core_ranks(service, core, |rank, weight| rank + weight);
        Some(core)
    }

    /// Accounts for `answered_count` requests of `service` that `core` has answered (RingLeader's LoadFeedback). Fails
    /// without effect if fewer requests are outstanding at the core.
    #[inline]
    pub fn record_feedback(&mut self, service: u8, core: u16, answered_count: u32) -> Result<(), RequestFeedbackError> {
        let outstanding_count =
            &mut self.ranks_by_service[usize::from(service)].outstanding_request_count_by_core[usize::from(core)];
        let Some(remaining_count) = outstanding_count.checked_sub(answered_count) else {
            return Err(RequestFeedbackError {
                service,
                core,
                answered_request_count: answered_count,
                outstanding_request_count: *outstanding_count,
            });
        };
        *outstanding_count = remaining_count;
        self.update_core_ranks(service, core, |rank, weight| rank - weight * answered_count);
        Ok(())
    }

    #[inline]
    fn update_core_ranks(&mut self, service: u8, core: u16, change_rank: impl Fn(u32, u32) -> u32) {
        for own_service in 0..self.ranks_by_service.len() as u8 {
            let service_ranks = &mut self.ranks_by_service[usize::from(own_service)];
            let weight = service_ranks.request_weight_by_service[usize::from(service)];
            if weight != 0 {
                service_ranks.rank_by_core[usize::from(core)] =
                    change_rank(service_ranks.rank_by_core[usize::from(core)], weight);
                self.update_core_eligibility(own_service, core);
            }
        }
    }

    #[inline]
    fn update_core_eligibility(&mut self, service: u8, core: u16) {
        let service_ranks = &mut self.ranks_by_service[usize::from(service)];
        let rank = service_ranks.rank_by_core[usize::from(core)];
        let is_eligible = service_ranks.is_enabled_by_core[usize::from(core)] && rank < self.rank_limit;
        service_ranks.eligible_rank_by_core.set_key(core, if is_eligible { rank } else { NOT_ELIGIBLE_RANK });
        let eligibility_bit = u64::from(service_ranks.eligible_rank_by_core.least_leaf().1 != NOT_ELIGIBLE_RANK);
        self.eligible_service_mask = self.eligible_service_mask & !(1 << service) | eligibility_bit << service;
    }
}

impl CoreRankRule {
    /// Returns the weight of one request of `other_service` in the ranks for `own_service`, in thousandths.
    fn request_weight(self, services: &[RankedService], own_service: usize, other_service: usize) -> u32 {
        match self {
            Self::Ranked if services[other_service].priority <= services[own_service].priority => {
                FULL_REQUEST_RANK_WEIGHT
            }
            Self::Ranked => u32::from(services[own_service].lambda.0),
            Self::Global => FULL_REQUEST_RANK_WEIGHT,
            Self::PerService => u32::from(own_service == other_service) * FULL_REQUEST_RANK_WEIGHT,
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const QUEUE_DEPTH: NonZeroU16 = NonZeroU16::new(4).unwrap();

    fn services_with_priorities(priorities: &[u8]) -> Vec<RankedService> {
        priorities.iter().map(|&priority| RankedService { priority, lambda: RankLambda::PAPER_VALUE }).collect()
    }

    /// Assigns `request_count` requests of `service` to core `core` of two.
    fn assign_requests_to_core(ranks: &mut RankArrays, service: u8, core: u16, request_count: u32) {
        ranks.set_service_enabled(service, 1 - core, false);
        (0..request_count).for_each(|_| assert_eq!(ranks.assign_request(service), Some(core)));
        ranks.set_service_enabled(service, 1 - core, true);
    }

    /// In RingLeader's Fig. 5 (a), core 0 has three requests of low priority, and core 1 has one of high priority.
    #[test]
    fn global_jbsq_counts_low_priority_requests_in_full_unlike_jbsrq() {
        for (rule, expected) in [(CoreRankRule::Global, 1), (CoreRankRule::Ranked, 0)] {
            let mut ranks = RankArrays::new(2, &services_with_priorities(&[0, 1]), rule, QUEUE_DEPTH);
            assign_requests_to_core(&mut ranks, 1, 0, 3);
            assign_requests_to_core(&mut ranks, 0, 1, 1);
            assert_eq!(ranks.assign_request(0), Some(expected), "{rule:?}");
        }
    }

    /// In RingLeader's Fig. 5 (b), core 0 has fewer requests of low priority but more of high priority, which go first.
    #[test]
    fn per_service_jbsq_ignores_high_priority_requests_unlike_jbsrq() {
        for (rule, expected) in [(CoreRankRule::PerService, 0), (CoreRankRule::Ranked, 1)] {
            let mut ranks = RankArrays::new(2, &services_with_priorities(&[0, 1]), rule, QUEUE_DEPTH);
            assign_requests_to_core(&mut ranks, 1, 0, 1);
            assign_requests_to_core(&mut ranks, 1, 1, 2);
            assign_requests_to_core(&mut ranks, 0, 0, 2);
            assert_eq!(ranks.assign_request(1), Some(expected), "{rule:?}");
        }
    }

    #[test]
    fn feedback_for_more_requests_than_outstanding_is_rejected() {
        let mut ranks = RankArrays::new(2, &services_with_priorities(&[0, 1]), CoreRankRule::Ranked, QUEUE_DEPTH);
        assign_requests_to_core(&mut ranks, 1, 0, 2);
        let error = ranks.record_feedback(1, 0, 3).unwrap_err();
        let expected_error = "feedback for 3 requests of service 1 at core 0: 2 are outstanding";
        assert_eq!(error.to_string(), expected_error);
        assert_eq!(
            (ranks.service_outstanding_request_count(1, 0), ranks.core_rank(1, 0)),
            (2, 2000),
            "nothing changes"
        );
        assert_eq!((ranks.record_feedback(0, 0, 0), ranks.record_feedback(1, 0, 2)), (Ok(()), Ok(())));
        assert_eq!(ranks.core_outstanding_request_count(0), 0);
    }

    #[test]
    fn load_hint_goes_to_the_least_loaded_core_even_if_it_is_full() {
        let mut ranks = RankArrays::new(2, &services_with_priorities(&[0, 1]), CoreRankRule::Ranked, NonZeroU16::MIN);
        assert_eq!((ranks.assign_request(1), ranks.least_loaded_core(1)), (Some(0), Some(1)));
        assert_eq!(
            (ranks.assign_request(1), ranks.assign_request(1), ranks.least_loaded_core(1)),
            (Some(1), None, Some(0))
        );
        ranks.set_service_enabled(1, 0, false);
        assert_eq!(ranks.least_loaded_core(1), Some(1));
        ranks.set_service_enabled(1, 1, false);
        assert_eq!((ranks.least_loaded_core(1), ranks.least_loaded_core(0)), (None, Some(0)));
    }

    #[test]
    fn lambda_out_of_range_is_rejected() {
        assert_eq!(RankLambda::new(1.5).unwrap_err().to_string(), "lambda 1.5: expected a number from 0 to 1");
        assert!(RankLambda::new(f64::NAN).is_err());
        assert_eq!(RankLambda::new(0.2), Ok(RankLambda::PAPER_VALUE));
    }

    proptest! {
        /// Checks that ranks are weighted sums of the outstanding requests, and that the eligible core of least rank is
        /// selected.
        #[test]
        fn ranks_match_the_weighted_sum_of_outstanding_requests(
            priorities in prop::collection::vec(0u8..3, 1..5),
            rule in prop_oneof![Just(CoreRankRule::Ranked), Just(CoreRankRule::Global), Just(CoreRankRule::PerService)],
            cores in 1u16..5,
            steps in prop::collection::vec((0u8..4, any::<u8>(), any::<u16>()), 0..200),
        ) {
            let services = services_with_priorities(&priorities);
            let mut ranks = RankArrays::new(cores, &services, rule, QUEUE_DEPTH);
            for (step, service, core) in steps {
                let (service, core) = (service % services.len() as u8, core % cores);
                let expected_rank = |ranks: &RankArrays, core| -> u32 {
                    let weighted_outstanding_count = |other: u8| {
                        let weight = rule.request_weight(&services, usize::from(service), usize::from(other));
                        ranks.service_outstanding_request_count(other, core) * weight
                    };
                    (0..services.len() as u8).map(weighted_outstanding_count).sum()
                };
                for core in 0..cores {
                    prop_assert_eq!(ranks.core_rank(service, core), expected_rank(&ranks, core));
                }
                let is_core_eligible =
                    |core: &u16| ranks.is_service_enabled(service, *core) && expected_rank(&ranks, *core) < 4000;
                let expected_core = (0..cores).filter(is_core_eligible).min_by_key(|core| expected_rank(&ranks, *core));
                prop_assert_eq!(ranks.eligible_service_mask() >> service & 1 == 1, expected_core.is_some());
                match step {
                    0 | 1 => prop_assert_eq!(ranks.assign_request(service), expected_core),
                    2 => {
                        let answered_count = ranks.service_outstanding_request_count(service, core).min(2);
                        prop_assert!(ranks.record_feedback(service, core, answered_count).is_ok());
                    }
                    _ => ranks.set_service_enabled(service, core, !ranks.is_service_enabled(service, core)),
                }
            }
        }
    }
}
