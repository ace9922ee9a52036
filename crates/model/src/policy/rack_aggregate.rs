//! Merged summaries of racks, kept between tables, because each table needs the new summaries of only a few racks out
//! of hundreds.

use std::collections::BTreeMap;
use std::sync::Arc;

use super::least_loaded::{LeastLoadedCores, RankedCore};
use super::loads::{LoadHistogram, ServerLoadClass};
use super::{BucketCandidateList, RackSummary};
use crate::placement::BucketCount;
use crate::rss::RssKey;

/// Rack summaries that were merged last. Newer summaries are compared with them to find those that changed.
#[derive(Debug, Default)]
struct MergedRackSummaries(Vec<Arc<RackSummary>>);

impl MergedRackSummaries {
    /// Stores the newest rack summaries. Returns the index and previous version of each changed summary, or `None` if
    /// all may have changed.
    fn replace_summaries_and_find_changes(
        &mut self,
        newest_summaries: &[Arc<RackSummary>],
    ) -> Option<Vec<(usize, Arc<RackSummary>)>> {
        let previous_summaries = std::mem::replace(&mut self.0, newest_summaries.to_vec());
        let is_same_rack_count = previous_summaries.len() == newest_summaries.len();
        let indexed_pairs = previous_summaries.into_iter().zip(newest_summaries).enumerate();
        let changed_pairs =
            indexed_pairs.filter(|(_, (previous_rack, current_rack))| !Arc::ptr_eq(previous_rack, current_rack));
        is_same_rack_count
            .then(|| changed_pairs.map(|(position, (previous_rack, _))| (position, previous_rack)).collect())
    }
}

#[derive(Debug, Default)]
pub struct RackLoadHistograms {
    merged_summaries: MergedRackSummaries,
    histogram_by_class: BTreeMap<ServerLoadClass, LoadHistogram>,
}

impl RackLoadHistograms {
    /// Merges the load histograms of these rack summaries, and returns one histogram for each class of servers.
    pub fn update_histograms(
        &mut self,
        newest_summaries: &[Arc<RackSummary>],
    ) -> &BTreeMap<ServerLoadClass, LoadHistogram> {
        match self.merged_summaries.replace_summaries_and_find_changes(newest_summaries) {
            Some(changed_racks) => {
                for (position, previous_rack) in changed_racks {
                    for (class, bins) in &previous_rack.histograms_by_class {
                        self.histogram_by_class.entry(*class).or_default().remove_bins(bins.iter().copied());
                    }
                    self.add_rack_histograms(&newest_summaries[position]);
                }
            }
            None => {
                self.histogram_by_class.clear();
                newest_summaries.iter().for_each(|rack| self.add_rack_histograms(rack));
            }
        }
        &self.histogram_by_class
    }

    fn add_rack_histograms(&mut self, rack: &RackSummary) {
        for (class, bins) in &rack.histograms_by_class {
            self.histogram_by_class.entry(*class).or_default().add_bins(bins.iter().copied());
        }
    }
}

/// Least loaded cores of each bucket, among all racks' servers that share one RSS key.
#[derive(Debug, Default)]
pub struct RackSummaryAggregate {
    merged_summaries: MergedRackSummaries,
    rss_key: Option<RssKey>,
    total_core_count: usize,
    least_loaded_cores_by_bucket: Vec<LeastLoadedCores>,
}

impl RackSummaryAggregate {
    /// Updates the least loaded cores of each bucket from these rack summaries. `needed_core_count` is the number of
    /// cores needed for each bucket.
    pub fn update_summaries(
        &mut self,
        newest_summaries: &[Arc<RackSummary>],
        key: &RssKey,
        bucket_count: BucketCount,
        needed_core_count: usize,
    ) {
        let is_same_group = self.rss_key.as_ref() == Some(key)
            && self.least_loaded_cores_by_bucket.len() == bucket_count.get() as usize;
        match self.merged_summaries.replace_summaries_and_find_changes(newest_summaries) {
            Some(changed_racks) if is_same_group => changed_racks
                .into_iter()
                .for_each(|(position, _)| self.replace_cores_of_rack(position, &newest_summaries[position])),
            _ => {
                self.rss_key = Some(key.clone());
                self.least_loaded_cores_by_bucket.clear();
                self.least_loaded_cores_by_bucket.resize(bucket_count.get() as usize, LeastLoadedCores::default());
            }
        }
        self.total_core_count = newest_summaries
            .iter()
            .flat_map(|rack| candidate_lists_with_key(rack, key))
            .map(|list| list.candidates_per_bucket)
            .sum();
        let available_needed_count = needed_core_count.min(self.total_core_count);
        for (bucket, least_cores) in (0..)
            .zip(&mut self.least_loaded_cores_by_bucket)
            .filter(|(_, least_cores)| least_cores.ranked_cores().len() < available_needed_count)
        {
            let lists_by_rack = newest_summaries
                .iter()
                .enumerate()
                .flat_map(|(position, rack)| candidate_lists_with_key(rack, key).map(move |list| (position, list)));
            least_cores.refill_from_ascending_lists(
                lists_by_rack.map(|(position, list)| ranked_cores(position, list, bucket)),
            );
        }
    }

    fn replace_cores_of_rack(&mut self, rack_index: usize, rack: &RackSummary) {
        let Some(key) = &self.rss_key else { return };
        let candidate_lists: Vec<&BucketCandidateList> = candidate_lists_with_key(rack, key).collect();
        for (bucket, least_cores) in (0..).zip(&mut self.least_loaded_cores_by_bucket) {
            let Some(insertion_bound) = least_cores.remove_cores_of_reporter(rack_index as u32) else { continue };
            for list in &candidate_lists {
                for ranked_core in ranked_cores(rack_index, list, bucket) {
                    if !least_cores.insert_core_below_bound(insertion_bound, ranked_core) {
                        break;
                    }
                }
            }
        }
    }

    /// Returns the bucket's least loaded cores. There are at least as many as needed, unless the racks have fewer
    /// cores.
    pub fn least_loaded_cores(&self, bucket: u32) -> &[RankedCore] {
        self.least_loaded_cores_by_bucket.get(bucket as usize).map_or(&[], LeastLoadedCores::ranked_cores)
    }

    /// Returns whether `ranked_cores` contains every core of the racks.
    pub fn is_complete_core_list(&self, ranked_cores: &[RankedCore]) -> bool {
        ranked_cores.len() >= self.total_core_count
    }
}

fn candidate_lists_with_key<'a>(
    rack: &'a RackSummary,
    key: &'a RssKey,
) -> impl Iterator<Item = &'a BucketCandidateList> {
    rack.candidate_lists.iter().filter(move |list| list.key == *key)
}

fn ranked_cores(rack_index: usize, list: &BucketCandidateList, bucket: u32) -> impl Iterator<Item = RankedCore> {
    let candidates = list.candidates_of_bucket(bucket).iter();
    candidates.map(move |(core, load)| RankedCore { load: *load, core: *core, reporter_index: rack_index as u32 })
}
