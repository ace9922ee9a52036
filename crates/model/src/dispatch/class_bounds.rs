//! `jbsrq-fifo`: bounded shortest queues by priority class, for cores that serve in the order of arrival.

use super::{DispatchHeader, Dispatcher, LeastTree};

/// RingLeader's JBSRQ (NSDI'23, Sect. 4.2) for a stock server, whose queue is a FIFO and cannot yield. A request
/// earlier in the queue delays a later one whatever its priority, so every outstanding request counts in full (lambda =
/// 1). Priority then acts through eligibility: a class may be excluded from some cores, or limited to a lower bound
/// there.
///
/// Nothing waits at the NIC. A request goes to the core with the fewest outstanding requests, of the cores below their
/// bound for the class. Without such a core, it goes to the least loaded core that is open to the class, and counts.
#[derive(Debug, Clone)]
pub struct ClassBoundedShortestQueue {
    outstanding: Vec<u32>,
    /// Maximum number of outstanding requests by class and core.
    bounds: ClassBounds,
    /// Cores ranked by outstanding requests, for each class. Ranks of cores at their bound are above [`AT_BOUND`].
    ranks: Vec<LeastTree<u32>>,
    over_bound: u64,
}

const AT_BOUND: u32 = 1 << 30;
const FORBIDDEN: u32 = 1 << 31;

/// Maximum outstanding requests by class and core: a core below its bound takes another request; with 0 it takes none.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ClassBounds {
    cores: u16,
    bounds: Vec<Vec<u32>>,
}

impl ClassBounds {
    /// Reserves the first `reserved` cores for the highest class. Other classes are limited to `reserved_bound`
    /// requests on these cores, and have at least one other core. Everywhere else the bound is `bound`.
    pub fn with_reserved_cores(cores: u16, classes: u8, reserved: u16, bound: u32, reserved_bound: u32) -> Self {
        let reserved = usize::from(reserved.min(cores.saturating_sub(1)));
        let row = |class: u8| {
            let at = |core: usize| if class > 0 && core < reserved { reserved_bound } else { bound };
            (0..usize::from(cores)).map(at).collect()
        };
        Self { cores, bounds: (0..classes.max(1)).map(row).collect() }
    }

    /// Returns the bound of `class` at each core.
    pub fn for_class(&self, class: u8) -> &[u32] {
        &self.bounds[usize::from(class).min(self.bounds.len() - 1)]
    }
}

impl ClassBoundedShortestQueue {
    /// Returns a dispatcher without outstanding requests.
    pub fn new(bounds: ClassBounds) -> Self {
        let tree = LeastTree::new(bounds.cores, 0);
        let mut dispatcher = Self {
            outstanding: vec![0; usize::from(bounds.cores)],
            ranks: vec![tree; bounds.bounds.len()],
            bounds,
            over_bound: 0,
        };
        (0..dispatcher.bounds.cores).for_each(|core| dispatcher.update_rank(core));
        dispatcher
    }

    /// Returns the number of requests that arrived while every core of their class was at its bound.
    pub fn over_bound(&self) -> u64 {
        self.over_bound
    }

    fn update_rank(&mut self, core: u16) {
        let under_way = self.outstanding[usize::from(core)];
        for (ranks, bounds) in self.ranks.iter_mut().zip(&self.bounds.bounds) {
            let bound = bounds[usize::from(core)];
            let at_bound = if under_way >= bound { AT_BOUND } else { 0 };
            ranks.set(core, under_way | at_bound | if bound == 0 { FORBIDDEN } else { 0 });
        }
    }
}

impl Dispatcher for ClassBoundedShortestQueue {
    #[inline]
    fn place(&mut self, _now: u64, header: &DispatchHeader) -> Option<u16> {
        let class = usize::from(header.service).min(self.ranks.len() - 1);
        let (core, rank) = self.ranks[class].least();
        self.over_bound += u64::from(rank & AT_BOUND != 0);
        self.outstanding[usize::from(core)] += 1;
        self.update_rank(core);
        Some(core)
    }

    #[inline]
    fn record_completion(&mut self, core: u16, _header: &DispatchHeader) {
        self.outstanding[usize::from(core)] -= 1;
        self.update_rank(core);
    }
}

#[cfg(test)]
mod tests {
    use super::super::tests::header;
    use super::*;

    fn placed(dispatcher: &mut ClassBoundedShortestQueue, class: u8) -> u16 {
        dispatcher.place(0, &header(class, 1)).unwrap()
    }

    #[test]
    fn low_class_stays_off_reserved_cores() {
        let mut fifo = ClassBoundedShortestQueue::new(ClassBounds::with_reserved_cores(3, 2, 1, 2, 0));
        let low: Vec<_> = (0..6).map(|_| placed(&mut fifo, 1)).collect();
        assert_eq!(low, [1, 2, 1, 2, 1, 2], "also above the bound, which is counted");
        assert_eq!(fifo.over_bound(), 2);
        assert_eq!((0..3).map(|_| placed(&mut fifo, 0)).collect::<Vec<_>>(), [0, 0, 0]);
        assert_eq!(fifo.over_bound(), 3, "core 0 had its two");
        fifo.record_completion(2, &header(1, 1));
        fifo.record_completion(2, &header(1, 1));
        assert_eq!(placed(&mut fifo, 0), 2, "a high class goes everywhere");
    }

    #[test]
    fn low_classes_use_idle_reserved_cores_below_their_bound() {
        let mut fifo = ClassBoundedShortestQueue::new(ClassBounds::with_reserved_cores(2, 2, 1, 4, 1));
        assert_eq!([placed(&mut fifo, 1), placed(&mut fifo, 1), placed(&mut fifo, 1)], [0, 1, 1]);
    }

    #[test]
    fn one_core_is_left_to_low_classes() {
        let bounds = ClassBounds::with_reserved_cores(2, 2, 5, 4, 0);
        assert_eq!(
            (bounds.for_class(0), bounds.for_class(1), bounds.for_class(7)),
            (&[4, 4][..], &[0, 4][..], &[0, 4][..])
        );
        assert_eq!(ClassBounds::with_reserved_cores(1, 2, 1, 4, 0).for_class(1), [4]);
    }
}
