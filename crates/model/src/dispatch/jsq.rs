//! Dispatchers `jsq`, `jbsq:n` and `cfcfs`, which select the core with the fewest outstanding requests.

use super::{DispatchHeader, ReleasedRequest, RequestDispatcher, TournamentTree};

/// Dispatcher that joins the shortest queue (Turbo, HPCA'23, Sect. IV-B1), optionally with a bound. With a bound, no
/// core has more than `max_outstanding_requests` outstanding requests. Other requests wait in one queue at the NIC
/// (R2P2's JBSQ(n), ATC'19, and RingLeader, NSDI'23, Sect. 4.2). JBSQ(1) is one central queue, which a request leaves
/// when a core is free.
#[derive(Debug, Clone)]
pub struct JoinShortestQueue {
    outstanding_request_count_by_core: TournamentTree<u32>,
    max_outstanding_requests: u32,
    waiting_request_count: u64,
}

impl JoinShortestQueue {
    /// Returns a dispatcher without a bound, which sends every request to a core at once.
    pub fn unbounded(core_count: u16) -> Self {
        Self {
            outstanding_request_count_by_core: TournamentTree::new(core_count, 0),
            max_outstanding_requests: u32::MAX,
            waiting_request_count: 0,
        }
    }

    /// Returns a dispatcher that allows at most `max_outstanding` outstanding requests at each core.
    pub fn bounded(core_count: u16, max_outstanding: std::num::NonZeroU16) -> Self {
        Self { max_outstanding_requests: u32::from(max_outstanding.get()), ..Self::unbounded(core_count) }
    }

    #[inline]
    fn assign_request_to_shortest_queue(&mut self) -> Option<u16> {
        let (core, outstanding_count) = self.outstanding_request_count_by_core.least_leaf();
        if outstanding_count >= self.max_outstanding_requests {
            return None;
        }
        self.outstanding_request_count_by_core.set_key(core, outstanding_count + 1);
        Some(core)
    }
}

impl RequestDispatcher for JoinShortestQueue {
    #[inline]
    fn place_request(&mut self, _now: u64, _header: &DispatchHeader) -> Option<u16> {
        let core = self.assign_request_to_shortest_queue();
        self.waiting_request_count += u64::from(core.is_none());
        core
    }

    #[inline]
    fn record_completion(&mut self, core: u16, _header: &DispatchHeader) {
        let outstanding_count = self.outstanding_request_count_by_core.leaf_key(core);
        self.outstanding_request_count_by_core.set_key(core, outstanding_count - 1);
    }

    #[inline]
    fn release_request(&mut self, _now: u64) -> Option<ReleasedRequest> {
        if self.waiting_request_count == 0 {
            return None;
        }
        let core = self.assign_request_to_shortest_queue()?;
        self.waiting_request_count -= 1;
        Some(ReleasedRequest { service: 0, core })
    }
}

#[cfg(test)]
mod tests {
    use super::super::tests::build_dispatch_header;
    use super::*;

    #[test]
    fn shortest_queue_gets_the_request() {
        let mut jsq = JoinShortestQueue::unbounded(3);
        let placed_cores: Vec<_> =
            (0..4).map(|_| jsq.place_request(0, &build_dispatch_header(0, 1)).unwrap()).collect();
        assert_eq!(placed_cores, [0, 1, 2, 0]);
        jsq.record_completion(2, &build_dispatch_header(0, 1));
        assert_eq!(jsq.place_request(0, &build_dispatch_header(0, 1)), Some(2));
        assert_eq!(jsq.release_request(0), None);
    }

    #[test]
    fn request_above_the_bound_waits_at_the_nic() {
        let mut jbsq = JoinShortestQueue::bounded(2, 2.try_into().unwrap());
        let placed_cores: Vec<_> = (0..6).map(|_| jbsq.place_request(0, &build_dispatch_header(0, 1))).collect();
        assert_eq!(placed_cores, [Some(0), Some(1), Some(0), Some(1), None, None]);
        assert_eq!(jbsq.release_request(0), None);
        jbsq.record_completion(1, &build_dispatch_header(0, 1));
        assert_eq!(jbsq.release_request(0), Some(ReleasedRequest { service: 0, core: 1 }));
        assert_eq!(jbsq.release_request(0), None);
    }
}
