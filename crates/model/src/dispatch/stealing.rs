//! Policy `work-stealing`, by which idle cores take requests from other cores' queues.

use super::TournamentTree;

/// Work stealing by idle cores from the longest queue. ZygOS (SOSP'17) and Shenango (NSDI'19) check queues in random
/// order. The longest queue is the best victim, so this policy is an upper bound for work stealing.
#[derive(Debug, Clone)]
pub struct LongestQueueStealing {
    /// Queue lengths, inverted so that the longest queue has the smallest key.
    inverted_queue_length_by_core: TournamentTree<u32>,
    /// State of each core, either [`IDLE_CORE_STATE`] or [`BUSY_CORE_STATE`].
    busy_state_by_core: TournamentTree<u32>,
}

const IDLE_CORE_STATE: u32 = 0;
const BUSY_CORE_STATE: u32 = 1;
const EMPTY_QUEUE_KEY: u32 = u32::MAX;

/// Transfer of one request from another core's queue to an idle core.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RequestSteal {
    /// Core that takes the first request of the victim's queue.
    pub thief_core: u16,
    /// Core whose queue loses the request.
    pub victim_core: u16,
}

impl LongestQueueStealing {
    /// Returns a policy whose cores are idle and have empty queues.
    pub fn new(core_count: u16) -> Self {
        Self {
            inverted_queue_length_by_core: TournamentTree::new(core_count, EMPTY_QUEUE_KEY),
            busy_state_by_core: TournamentTree::new(core_count, IDLE_CORE_STATE),
        }
    }

    /// Sets whether `core` serves a request.
    pub fn set_core_busy(&mut self, core: u16, is_busy: bool) {
        self.busy_state_by_core.set_key(core, if is_busy { BUSY_CORE_STATE } else { IDLE_CORE_STATE });
    }

    /// Sets the number of requests in `core`'s queue, without the request in service.
    pub fn set_queue_length(&mut self, core: u16, length: u32) {
        self.inverted_queue_length_by_core.set_key(core, EMPTY_QUEUE_KEY - length);
    }

    /// Returns the next transfer, from the longest queue to an idle core. Among equals, the core with the lowest index
    /// is chosen. Returns `None` if no core is idle or no request is queued.
    pub fn next_steal(&self) -> Option<RequestSteal> {
        let ((thief, busy_state), (victim, inverted_length)) =
            (self.busy_state_by_core.least_leaf(), self.inverted_queue_length_by_core.least_leaf());
        (busy_state == IDLE_CORE_STATE && inverted_length != EMPTY_QUEUE_KEY)
            .then_some(RequestSteal { thief_core: thief, victim_core: victim })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn idle_core_steals_from_the_longest_queue() {
        let mut stealing = LongestQueueStealing::new(3);
        assert_eq!(stealing.next_steal(), None);
        (0..3).for_each(|core| stealing.set_core_busy(core, true));
        stealing.set_queue_length(1, 2);
        stealing.set_queue_length(2, 3);
        assert_eq!(stealing.next_steal(), None);
        stealing.set_core_busy(0, false);
        assert_eq!(stealing.next_steal(), Some(RequestSteal { thief_core: 0, victim_core: 2 }));
        stealing.set_queue_length(2, 2);
        assert_eq!(stealing.next_steal(), Some(RequestSteal { thief_core: 0, victim_core: 1 }));
    }
}
