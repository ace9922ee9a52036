//! Dispatchers `rss` and `rss-rebalanced`, which hash connections to buckets that belong to cores.

use super::{DispatchHeader, RequestDispatcher, TournamentTree};
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

    /// Returns the indirection table, which maps each bucket to a core.
    pub fn indirection_table(&self) -> &IndirectionTable {
        &self.indirection_table
    }

    /// Replaces the indirection table.
    pub fn set_indirection_table(&mut self, table: IndirectionTable) {
        self.indirection_table = table;
    }
}

impl RequestDispatcher for RssDispatcher {
    #[inline]
    fn place_request(&mut self, _now: u64, header: &DispatchHeader) -> Option<u16> {
        Some(self.indirection_table.queue_for_hash(header.flow_hash))
    }

    #[inline]
    fn record_completion(&mut self, _core: u16, _header: &DispatchHeader) {}
}

/// Returns a core for each bucket, so that the cores' loads are nearly equal. The buckets are assigned in descending
/// order of load, each to the core with the least load so far (Graham's LPT rule, 1969). The maximum load is then at
/// most 4/3 of the optimum. `load_by_bucket` has each bucket's load and `backlog_by_core` each core's waiting work, in
/// the same unit and at most 2^48.
pub fn assign_buckets_to_cores(load_by_bucket: &[u64], backlog_by_core: &[u64]) -> Vec<u32> {
    let mut buckets_by_descending_load: Vec<usize> = (0..load_by_bucket.len()).collect();
    buckets_by_descending_load.sort_by_key(|bucket| (std::cmp::Reverse(load_by_bucket[*bucket]), *bucket));
    // Each bucket counts slightly more than its load, so that idle buckets are spread, too.
    let load_scale = load_by_bucket.len() as u64 + 1;
    let mut load_by_core = TournamentTree::<u64>::new(backlog_by_core.len() as u16, 0);
    (0..).zip(backlog_by_core).for_each(|(core, backlog)| load_by_core.set_key(core, backlog * load_scale));
    let mut core_by_bucket = vec![0; load_by_bucket.len()];
    for bucket in buckets_by_descending_load {
        let (core, core_load) = load_by_core.least_leaf();
        core_by_bucket[bucket] = u32::from(core);
        load_by_core.set_key(core, core_load + load_by_bucket[bucket] * load_scale + 1);
    }
    core_by_bucket
}

#[cfg(test)]
mod tests {
    use super::super::tests::build_dispatch_header;
    use super::*;

    #[test]
    fn indirection_table_selects_the_core() {
        let mut rss = RssDispatcher::new(IndirectionTable::new(&[2, 0, 1, 0]).unwrap());
        let mut core_for_hash =
            |flow_hash| rss.place_request(0, &DispatchHeader { flow_hash, ..build_dispatch_header(0, 1) });
        assert_eq!(
            [core_for_hash(0), core_for_hash(1), core_for_hash(6), core_for_hash(7)],
            [Some(2), Some(0), Some(1), Some(0)]
        );
    }

    #[test]
    fn bucket_assignment_balances_loads_first_and_bucket_counts_second() {
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
