//! The least loaded cores of one bucket, kept while loads change.
//!
//! A table is made every few reports, and needs the eight least loaded of perhaps thousands of cores in each bucket. So
//! each bucket keeps a few more than eight, and a changed load moves within them or leaves them. Only when too few are
//! left, all cores are compared again.

use super::MAX_CANDIDATES;
use crate::placement::ServerCore;

/// Maximum number of cores that are kept for a bucket. It is twice the number needed, so that a full search is rare.
const MAX_KEPT_CORES_PER_BUCKET: usize = 2 * MAX_CANDIDATES as usize;

/// Core with the load by which a bucket's cores are ordered. Ties are broken by id, as in CrossRSS.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct RankedCore {
    pub load: f64,
    pub core: ServerCore,
    /// Index of the server or rack that reported the core's load.
    pub reporter_index: u32,
}

impl RankedCore {
    fn precedes(&self, other: &RankedCore) -> bool {
        self.load.total_cmp(&other.load).then(self.core.cmp(&other.core)).is_lt()
    }
}

/// Least loaded cores of one bucket in ascending order. No other core precedes the last of them.
#[derive(Debug, Clone, Default)]
pub struct LeastLoadedCores(Vec<RankedCore>);

/// Last kept core before the cores of a source were removed. Cores that precede it are kept or belong to that source.
#[derive(Debug, Clone, Copy)]
pub struct CoreInsertionBound(RankedCore);

impl LeastLoadedCores {
    /// Removes the cores of a source (a server or a rack). Returns the bound for later insertions, or `None` if the
    /// list was empty.
    #[inline]
    pub fn remove_cores_of_reporter(&mut self, source: u32) -> Option<CoreInsertionBound> {
        let insertion_bound = CoreInsertionBound(*self.0.last()?);
        self.0.retain(|ranked_core| ranked_core.reporter_index != source);
        Some(insertion_bound)
    }

    /// Inserts a core of the removed source if it precedes `insertion_bound`, and returns whether it does.
    #[inline]
    pub fn insert_core_below_bound(&mut self, insertion_bound: CoreInsertionBound, new_core: RankedCore) -> bool {
        let is_before_bound = new_core.precedes(&insertion_bound.0);
        if is_before_bound {
            let insert_index = self.0.partition_point(|ranked_core| ranked_core.precedes(&new_core));
            self.0.insert(insert_index, new_core);
            self.0.truncate(MAX_KEPT_CORES_PER_BUCKET);
        }
        is_before_bound
    }

    /// Changes the load of a source that has only one core.
    #[inline]
    pub fn update_core_of_reporter(&mut self, previous_load: f64, new_core: RankedCore) {
        if self.0.last().is_some_and(|last| previous_load > last.load && new_core.load > last.load) {
            return;
        }
        if let Some(insertion_bound) = self.remove_cores_of_reporter(new_core.reporter_index) {
            self.insert_core_below_bound(insertion_bound, new_core);
        }
    }

    /// Searches the least loaded of all cores. Each iterator is in ascending order, so the search of an iterator ends
    /// at the first core whose load is too high.
    pub fn refill_from_ascending_lists<I: Iterator<Item = RankedCore>>(
        &mut self,
        ascending_lists: impl Iterator<Item = I>,
    ) {
        self.0.clear();
        for ascending_list in ascending_lists {
            for new_core in ascending_list {
                let is_full = self.0.len() == MAX_KEPT_CORES_PER_BUCKET;
                if is_full && !new_core.precedes(&self.0[MAX_KEPT_CORES_PER_BUCKET - 1]) {
                    break;
                }
                let insert_index = self.0.partition_point(|ranked_core| ranked_core.precedes(&new_core));
                self.0.insert(insert_index, new_core);
                self.0.truncate(MAX_KEPT_CORES_PER_BUCKET);
            }
        }
    }

    pub fn ranked_cores(&self) -> &[RankedCore] {
        &self.0
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::ServerId;

    const SERVER_COUNT: usize = 60;

    fn ranked_core(position: usize, load: f64) -> RankedCore {
        let server = ServerId::try_from((position as u64 * 37) % 61).unwrap();
        RankedCore { load, core: ServerCore { server, core: 0 }, reporter_index: position as u32 }
    }

    /// Checks that the kept cores are the first ones in the order of all cores.
    fn assert_has_least_loaded_cores(
        least_cores: &LeastLoadedCores,
        mut all_cores: Vec<RankedCore>,
    ) -> Result<(), TestCaseError> {
        all_cores.sort_by(|left, right| left.load.total_cmp(&right.load).then(left.core.cmp(&right.core)));
        prop_assert_eq!(least_cores.ranked_cores(), &all_cores[..least_cores.ranked_cores().len()]);
        Ok(())
    }

    proptest! {
        #[test]
        fn list_has_the_least_loaded_cores_after_server_updates(
            load_changes in prop::collection::vec((0..SERVER_COUNT, 0u32..20), 1..400),
        ) {
            let mut load_by_server = vec![1.0; SERVER_COUNT];
            let mut least_cores = LeastLoadedCores::default();
            for (position, twentieths) in load_changes {
                let load = f64::from(twentieths) / 20.0;
                let old_load = std::mem::replace(&mut load_by_server[position], load);
                least_cores.update_core_of_reporter(old_load, ranked_core(position, load));
                let all_cores: Vec<RankedCore> =
                    load_by_server.iter().enumerate().map(|(index, load)| ranked_core(index, *load)).collect();
                if least_cores.ranked_cores().len() < usize::from(MAX_CANDIDATES) {
                    least_cores.refill_from_ascending_lists(all_cores.iter().map(|core| std::iter::once(*core)));
                    prop_assert_eq!(least_cores.ranked_cores().len(), MAX_KEPT_CORES_PER_BUCKET);
                }
                assert_has_least_loaded_cores(&least_cores, all_cores)?;
            }
        }

        #[test]
        fn list_has_the_least_loaded_cores_after_rack_updates(
            changes in prop::collection::vec((0..SERVER_COUNT / 4, prop::collection::vec(0u32..20, 4)), 1..200),
        ) {
            let sorted_rack_cores = |rack: usize, twentieths: &[u32]| {
                let rack_cores = twentieths.iter().enumerate().map(|(index, twentieths)| {
                    let core = ranked_core(rack * 4 + index, f64::from(*twentieths) / 20.0);
                    RankedCore { reporter_index: rack as u32, ..core }
                });
                let mut sorted_cores: Vec<RankedCore> = rack_cores.collect();
                sorted_cores.sort_by(|left, right| left.load.total_cmp(&right.load).then(left.core.cmp(&right.core)));
                sorted_cores
            };
            let mut core_lists_by_rack: Vec<Vec<RankedCore>> =
                (0..SERVER_COUNT / 4).map(|rack| sorted_rack_cores(rack, &[20; 4])).collect();
            let mut least_cores = LeastLoadedCores::default();
            for (rack, twentieths) in changes {
                core_lists_by_rack[rack] = sorted_rack_cores(rack, &twentieths);
                if let Some(insertion_bound) = least_cores.remove_cores_of_reporter(rack as u32) {
                    let insert_core = |new_core: &&_| least_cores.insert_core_below_bound(insertion_bound, **new_core);
                    core_lists_by_rack[rack].iter().take_while(insert_core).count();
                }
                if least_cores.ranked_cores().len() < usize::from(MAX_CANDIDATES) {
                    least_cores.refill_from_ascending_lists(core_lists_by_rack.iter().map(|list| list.iter().copied()));
                    prop_assert_eq!(least_cores.ranked_cores().len(), MAX_KEPT_CORES_PER_BUCKET);
                }
                assert_has_least_loaded_cores(&least_cores, core_lists_by_rack.concat())?;
            }
        }
    }
}
