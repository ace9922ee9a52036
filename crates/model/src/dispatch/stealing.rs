//! `work-stealing`: which core takes from which, when cores may help each other.

use super::LeastTree;

/// An idle core takes from the longest queue. ZygOS (SOSP'17) and Shenango (NSDI'19) look at the others' queues in random
/// order; the longest is what they would find if looking were free, so this is the best that stealing can give at its cost.
#[derive(Debug, Clone)]
pub struct LongestQueueStealing {
    /// Least for the longest queue.
    lengths: LeastTree<u32>,
    /// [`IDLE`] or [`BUSY`].
    states: LeastTree<u32>,
}

const IDLE: u32 = 0;
const BUSY: u32 = 1;
/// The key of an empty queue.
const EMPTY: u32 = u32::MAX;

/// A core that helps another.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Steal {
    /// Takes the first request ...
    pub thief: u16,
    /// ... of this core's queue.
    pub victim: u16,
}

impl LongestQueueStealing {
    /// All cores idle, all queues empty.
    pub fn new(cores: u16) -> Self {
        Self { lengths: LeastTree::new(cores, EMPTY), states: LeastTree::new(cores, IDLE) }
    }

    /// `core` works from now on, or has nothing to do.
    pub fn set_busy(&mut self, core: u16, busy: bool) {
        self.states.set(core, if busy { BUSY } else { IDLE });
    }

    /// `core`'s queue has that many requests, without the one that it works on.
    pub fn set_queued(&mut self, core: u16, length: u32) {
        self.lengths.set(core, EMPTY - length);
    }

    /// Who takes from whom now: the idle core and the longest queue with the lowest indices. `None`: no core is idle, or
    /// no request is queued.
    pub fn theft(&self) -> Option<Steal> {
        let ((thief, state), (victim, length)) = (self.states.least(), self.lengths.least());
        (state == IDLE && length != EMPTY).then_some(Steal { thief, victim })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_idle_take_from_the_longest() {
        let mut stealing = LongestQueueStealing::new(3);
        assert_eq!(stealing.theft(), None);
        (0..3).for_each(|core| stealing.set_busy(core, true));
        stealing.set_queued(1, 2);
        stealing.set_queued(2, 3);
        assert_eq!(stealing.theft(), None);
        stealing.set_busy(0, false);
        assert_eq!(stealing.theft(), Some(Steal { thief: 0, victim: 2 }));
        stealing.set_queued(2, 2);
        assert_eq!(stealing.theft(), Some(Steal { thief: 0, victim: 1 }));
    }
}
