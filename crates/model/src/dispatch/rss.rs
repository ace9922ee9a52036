//! Dispatchers `rss` and `rss-rebalanced`, which hash connections to buckets that belong to cores.

use super::{DispatchHeader, Dispatcher, TournamentTree};
use crate::rss::IndirectionTable;

/// Dispatcher by RSS, whose indirection table maps all requests of a connection to the same core by their RSS hash.
#[derive(Debug, Clone)]
pub struct RssDispatcher {
    indirection_table: IndirectionTable,
}

impl RssDispatcher {
    /// Returns a dispatcher with this indirection table.
    pub fn new(indirection_table: IndirectionTable) -> Self {
        Self { indirection_table }
    }

    /// Returns the indirection table, which has the core of each bucket.
    pub fn table(&self) -> &IndirectionTable {
        &self.indirection_table
    }

    /// Replaces the indirection table, which assigns the buckets to other cores.
    pub fn set_table(&mut self, table: IndirectionTable) {
        self.indirection_table = table;
    }
}

impl Dispatcher for RssDispatcher {
    #[inline]
    fn place(&mut self, _now: u64, header: &DispatchHeader) -> Option<u16> {
        Some(self.indirection_table.queue_of_hash(header.flow_hash))
    }

    #[inline]
    fn record_completion(&mut self, _core: u16, _header: &DispatchHeader) {}
}

/// Returns a core for each bucket, so that the cores' loads are nearly equal. The heaviest bucket is assigned first,
/// each to the core that is least loaded so far (Graham's LPT rule, 1969). The maximum is then at most 4/3 of the
/// optimum. `loads` has each bucket's load, `backlog` each core's present work, in the same unit and at most 2^48.
pub fn assign_buckets_to_cores(loads: &[u64], backlog: &[u64]) -> Vec<u32> {
    let mut heaviest_first: Vec<usize> = (0..loads.len()).collect();
    heaviest_first.sort_by_key(|bucket| (std::cmp::Reverse(loads[*bucket]), *bucket));
    // Each bucket counts slightly more than its load, so that idle buckets are spread, too.
    let scale = loads.len() as u64 + 1;
    let mut load_by_core = TournamentTree::<u64>::new(backlog.len() as u16, 0);
    (0..).zip(backlog).for_each(|(core, backlog)| load_by_core.set_key(core, backlog * scale));
    let mut core_by_bucket = vec![0; loads.len()];
    for bucket in heaviest_first {
        let (core, core_load) = load_by_core.least();
        core_by_bucket[bucket] = u32::from(core);
        load_by_core.set_key(core, core_load + loads[bucket] * scale + 1);
    }
    core_by_bucket
}

#[cfg(test)]
mod tests {
    use super::super::tests::header;
    use super::*;

    #[test]
    fn indirection_table_selects_the_core() {
        let mut rss = RssDispatcher::new(IndirectionTable::new(&[2, 0, 1, 0]).unwrap());
        let mut core_for_hash = |flow_hash| rss.place(0, &DispatchHeader { flow_hash, ..header(0, 1) });
        assert_eq!(
            [core_for_hash(0), core_for_hash(1), core_for_hash(6), core_for_hash(7)],
            [Some(2), Some(0), Some(1), Some(0)]
        );
    }

    #[test]
    fn bucket_assignment_balances_loads_and_then_bucket_counts() {
        assert_eq!(assign_buckets_to_cores(&[9, 1, 5, 4, 0, 0], &[0; 2]), [0, 0, 1, 1, 1, 1], "10 against 9");
        assert_eq!(
            assign_buckets_to_cores(&[0, 7, 0, 7, 0, 0], &[0; 2]),
            [0, 0, 1, 1, 0, 1],
            "7 against 7, 3 buckets against 3"
        );
        assert_eq!(
            assign_buckets_to_cores(&[1; 8], &[4, 0]),
            [1, 1, 1, 1, 0, 1, 0, 1],
            "6 against 6 with what there is to do already"
        );
    }
}
