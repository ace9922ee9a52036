//! Dispatcher `jlq`, which selects the core with the least expected outstanding work.

use super::{DispatchHeader, RequestDispatcher, TournamentTree};

/// Dispatcher that joins the queue with the least sum of expected service times (JLQ, Turbo, HPCA'23, Sect. IV-B2).
#[derive(Debug, Clone)]
pub struct JoinLightestQueue {
    outstanding_work_by_core: TournamentTree<u64>,
}

impl JoinLightestQueue {
    /// Returns a dispatcher for `core_count` idle cores.
    pub fn new(core_count: u16) -> Self {
        Self { outstanding_work_by_core: TournamentTree::new(core_count, 0) }
    }
}

impl RequestDispatcher for JoinLightestQueue {
    #[inline]
    fn place_request(&mut self, _now: u64, header: &DispatchHeader) -> Option<u16> {
        let (core, outstanding_work) = self.outstanding_work_by_core.least_leaf();
        self.outstanding_work_by_core.set_key(core, outstanding_work + header.expected_service_time);
        Some(core)
    }

    #[inline]
    fn record_completion(&mut self, core: u16, header: &DispatchHeader) {
        let core_work = self.outstanding_work_by_core.leaf_key(core);
        self.outstanding_work_by_core.set_key(core, core_work - header.expected_service_time);
    }
}

#[cfg(test)]
mod tests {
    use super::super::tests::build_dispatch_header;
    use super::*;

    #[test]
    fn queue_with_the_least_expected_work_gets_the_request() {
        let mut jlq = JoinLightestQueue::new(2);
        let placed_cores: Vec<_> = [5, 1, 1, 1, 1, 1, 1]
            .map(|expected_service_time| {
                jlq.place_request(0, &build_dispatch_header(0, expected_service_time)).unwrap()
            })
            .to_vec();
        assert_eq!(placed_cores, [0, 1, 1, 1, 1, 1, 0]);
        jlq.record_completion(0, &build_dispatch_header(0, 5));
        assert_eq!(jlq.place_request(0, &build_dispatch_header(0, 1)), Some(0));
    }
}
