//! Dispatcher `jbsrq-fifo`, which bounds the shortest queues by priority class if cores serve in the order of arrival.

use super::{DispatchHeader, RequestDispatcher, TournamentTree};

/// Dispatcher that joins the shortest bounded queue (RingLeader's JBSRQ, NSDI'23, Sect. 4.2) of cores whose FIFO queues
/// cannot preempt. A request earlier in the queue delays a later one whatever its priority, so every outstanding
/// request counts in full (lambda = 1). Priority acts through eligibility instead, because a class may be excluded from
/// some cores or have a lower bound there.
///
/// No request waits at the NIC. A request goes to the core with the fewest outstanding requests among the cores below
/// their bound for its class. If no core is below its bound, the least loaded core of the class gets the request, and a
/// counter is incremented.
#[derive(Debug, Clone)]
pub struct ClassBoundedShortestQueue {
    outstanding_request_count_by_core: Vec<u32>,
    /// Maximum number of outstanding requests by class and core.
    class_bounds: OutstandingBoundsByClass,
    /// Cores ranked by outstanding requests, for each class. The ranks of cores at their bound have
    /// [`CORE_AT_BOUND_RANK_BIT`].
    core_ranks_by_class: Vec<TournamentTree<u32>>,
    over_bound_request_count: u64,
}

const CORE_AT_BOUND_RANK_BIT: u32 = 1 << 30;
const FORBIDDEN_CORE_RANK_BIT: u32 = 1 << 31;

/// Bound on the outstanding requests of each core, by class. A core at its bound for a class takes no request of the
/// class.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct OutstandingBoundsByClass {
    core_count: u16,
    bound_by_class_and_core: Vec<Vec<u32>>,
}

impl OutstandingBoundsByClass {
    /// Returns bounds that reserve the first `reserved_core_count` cores for the highest class. Other classes are
    /// limited to `reserved_bound` requests on these cores, and have at least one other core. All other bounds are
    /// `default_bound`.
    pub fn with_reserved_cores(
        core_count: u16,
        class_count: u8,
        reserved_core_count: u16,
        default_bound: u32,
        reserved_bound: u32,
    ) -> Self {
        let reserved_core_count = usize::from(reserved_core_count.min(core_count.saturating_sub(1)));
        let bounds_for_class = |class: u8| {
            let bound_at_core =
                |core: usize| if class > 0 && core < reserved_core_count { reserved_bound } else { default_bound };
            (0..usize::from(core_count)).map(bound_at_core).collect()
        };
        Self { core_count, bound_by_class_and_core: (0..class_count.max(1)).map(bounds_for_class).collect() }
    }

    /// Returns the bound for `class` at each core.
    pub fn core_bounds_for_class(&self, class: u8) -> &[u32] {
        &self.bound_by_class_and_core[usize::from(class).min(self.bound_by_class_and_core.len() - 1)]
    }
}

impl ClassBoundedShortestQueue {
    /// Returns a dispatcher without outstanding requests.
    pub fn new(bounds: OutstandingBoundsByClass) -> Self {
        let idle_ranks = TournamentTree::new(bounds.core_count, 0);
        let mut dispatcher = Self {
            outstanding_request_count_by_core: vec![0; usize::from(bounds.core_count)],
            core_ranks_by_class: vec![idle_ranks; bounds.bound_by_class_and_core.len()],
            class_bounds: bounds,
            over_bound_request_count: 0,
        };
        (0..dispatcher.class_bounds.core_count).for_each(|core| dispatcher.update_core_rank(core));
        dispatcher
    }

    /// Returns the number of requests that arrived while every core of their class was at its bound.
    pub fn over_bound_request_count(&self) -> u64 {
        self.over_bound_request_count
    }

    fn update_core_rank(&mut self, core: u16) {
        let outstanding_count = self.outstanding_request_count_by_core[usize::from(core)];
        for (ranks, bounds) in self.core_ranks_by_class.iter_mut().zip(&self.class_bounds.bound_by_class_and_core) {
            let core_bound = bounds[usize::from(core)];
            let at_bound_bit = if outstanding_count >= core_bound { CORE_AT_BOUND_RANK_BIT } else { 0 };
            ranks.set_key(
                core,
                outstanding_count | at_bound_bit | if core_bound == 0 { FORBIDDEN_CORE_RANK_BIT } else { 0 },
            );
        }
    }
}

impl RequestDispatcher for ClassBoundedShortestQueue {
    #[inline]
    fn place_request(&mut self, _now: u64, header: &DispatchHeader) -> Option<u16> {
        let class = usize::from(header.service).min(self.core_ranks_by_class.len() - 1);
        let (core, rank) = self.core_ranks_by_class[class].least_leaf();
        self.over_bound_request_count += u64::from(rank & CORE_AT_BOUND_RANK_BIT != 0);
        self.outstanding_request_count_by_core[usize::from(core)] += 1;
        self.update_core_rank(core);
        Some(core)
    }

    #[inline]
    fn record_completion(&mut self, core: u16, _header: &DispatchHeader) {
        self.outstanding_request_count_by_core[usize::from(core)] -= 1;
        self.update_core_rank(core);
    }
}

#[cfg(test)]
mod tests {
    use super::super::tests::build_dispatch_header;
    use super::*;

    fn place_request_of_class(dispatcher: &mut ClassBoundedShortestQueue, class: u8) -> u16 {
        dispatcher.place_request(0, &build_dispatch_header(class, 1)).unwrap()
    }

    #[test]
    fn low_class_gets_no_reserved_core() {
        let mut dispatcher =
            ClassBoundedShortestQueue::new(OutstandingBoundsByClass::with_reserved_cores(3, 2, 1, 2, 0));
        let low_class_cores: Vec<_> = (0..6).map(|_| place_request_of_class(&mut dispatcher, 1)).collect();
        assert_eq!(low_class_cores, [1, 2, 1, 2, 1, 2], "also above the bound, which is counted");
        assert_eq!(dispatcher.over_bound_request_count(), 2);
        assert_eq!((0..3).map(|_| place_request_of_class(&mut dispatcher, 0)).collect::<Vec<_>>(), [0, 0, 0]);
        assert_eq!(dispatcher.over_bound_request_count(), 3, "core 0 had its two");
        dispatcher.record_completion(2, &build_dispatch_header(1, 1));
        dispatcher.record_completion(2, &build_dispatch_header(1, 1));
        assert_eq!(place_request_of_class(&mut dispatcher, 0), 2, "a high class goes everywhere");
    }

    #[test]
    fn low_classes_use_idle_reserved_cores_below_their_bound() {
        let mut dispatcher =
            ClassBoundedShortestQueue::new(OutstandingBoundsByClass::with_reserved_cores(2, 2, 1, 4, 1));
        assert_eq!(
            [
                place_request_of_class(&mut dispatcher, 1),
                place_request_of_class(&mut dispatcher, 1),
                place_request_of_class(&mut dispatcher, 1)
            ],
            [0, 1, 1]
        );
    }

    #[test]
    fn at_least_one_core_is_not_reserved() {
        let bounds = OutstandingBoundsByClass::with_reserved_cores(2, 2, 5, 4, 0);
        assert_eq!(
            (bounds.core_bounds_for_class(0), bounds.core_bounds_for_class(1), bounds.core_bounds_for_class(7)),
            (&[4, 4][..], &[0, 4][..], &[0, 4][..])
        );
        assert_eq!(OutstandingBoundsByClass::with_reserved_cores(1, 2, 1, 4, 0).core_bounds_for_class(1), [4]);
    }
}
