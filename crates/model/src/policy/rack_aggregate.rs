//! Merged summaries of racks, kept between tables, because each table needs the new summaries of only a few racks out
//! of hundreds.

use std::collections::BTreeMap;
use std::sync::Arc;

use super::least_loaded::{LeastLoadedCores, RankedCore};
use super::loads::{LoadHistogram, ServerClass};
use super::{CandidateList, RackSummary};
use crate::placement::BucketCount;
use crate::rss::RssKey;

/// Rack summaries that have been merged, for comparison with newer ones.
#[derive(Debug, Default)]
struct MergedSummaries(Vec<Arc<RackSummary>>);

impl MergedSummaries {
    /// Stores the newest summaries. Returns the indexes of changed summaries with their previous versions, or `None` if
    /// all have changed.
    fn update(&mut self, racks: &[Arc<RackSummary>]) -> Option<Vec<(usize, Arc<RackSummary>)>> {
        let previous_racks = std::mem::replace(&mut self.0, racks.to_vec());
        let is_same_rack_count = previous_racks.len() == racks.len();
        let indexed_pairs = previous_racks.into_iter().zip(racks).enumerate();
        let changed_pairs =
            indexed_pairs.filter(|(_, (previous_rack, current_rack))| !Arc::ptr_eq(previous_rack, current_rack));
        is_same_rack_count
            .then(|| changed_pairs.map(|(position, (previous_rack, _))| (position, previous_rack)).collect())
    }
}

#[derive(Debug, Default)]
pub struct RackHistograms {
    merged_summaries: MergedSummaries,
    by_class: BTreeMap<ServerClass, LoadHistogram>,
}

impl RackHistograms {
    /// Merges these summaries, and returns the load histogram of each class.
    pub fn update(&mut self, racks: &[Arc<RackSummary>]) -> &BTreeMap<ServerClass, LoadHistogram> {
        match self.merged_summaries.update(racks) {
            Some(changed_racks) => {
                for (position, previous_rack) in changed_racks {
                    for (class, bins) in &previous_rack.histograms_by_class {
                        self.by_class.entry(*class).or_default().remove_bins(bins.iter().copied());
                    }
                    self.add_rack(&racks[position]);
                }
            }
            None => {
                self.by_class.clear();
                racks.iter().for_each(|rack| self.add_rack(rack));
            }
        }
        &self.by_class
    }

    fn add_rack(&mut self, rack: &RackSummary) {
        for (class, bins) in &rack.histograms_by_class {
            self.by_class.entry(*class).or_default().add_bins(bins.iter().copied());
        }
    }
}

/// Least loaded cores of each bucket, among the servers of all racks with one RSS key.
#[derive(Debug, Default)]
pub struct RackAggregate {
    merged_summaries: MergedSummaries,
    rss_key: Option<RssKey>,
    total_core_count: usize,
    least_cores_by_bucket: Vec<LeastLoadedCores>,
}

impl RackAggregate {
    /// Updates the least loaded cores to these summaries. `needed_core_count` is the number of cores needed for each
    /// bucket.
    pub fn update(&mut self, racks: &[Arc<RackSummary>], key: &RssKey, buckets: BucketCount, needed_core_count: usize) {
        let is_same_group =
            self.rss_key.as_ref() == Some(key) && self.least_cores_by_bucket.len() == buckets.get() as usize;
        match self.merged_summaries.update(racks) {
            Some(changed_racks) if is_same_group => {
                changed_racks.into_iter().for_each(|(position, _)| self.replace_rack(position, &racks[position]))
            }
            _ => {
                self.rss_key = Some(key.clone());
                self.least_cores_by_bucket.clear();
                self.least_cores_by_bucket.resize(buckets.get() as usize, LeastLoadedCores::default());
            }
        }
        self.total_core_count =
            racks.iter().flat_map(|rack| lists_of_key(rack, key)).map(|list| list.candidates_per_bucket).sum();
        let needed_count = needed_core_count.min(self.total_core_count);
        for (bucket, least_cores) in (0..)
            .zip(&mut self.least_cores_by_bucket)
            .filter(|(_, least_cores)| least_cores.ranked_cores().len() < needed_count)
        {
            let lists_by_rack = racks
                .iter()
                .enumerate()
                .flat_map(|(position, rack)| lists_of_key(rack, key).map(move |list| (position, list)));
            least_cores.refill(lists_by_rack.map(|(position, list)| ranked_cores(position, list, bucket)));
        }
    }

    fn replace_rack(&mut self, position: usize, rack: &RackSummary) {
        let Some(key) = &self.rss_key else { return };
        let candidate_lists: Vec<&CandidateList> = lists_of_key(rack, key).collect();
        for (bucket, least_cores) in (0..).zip(&mut self.least_cores_by_bucket) {
            let Some(insertion_bound) = least_cores.remove_source(position as u32) else { continue };
            for list in &candidate_lists {
                for ranked_core in ranked_cores(position, list, bucket) {
                    if !least_cores.insert_core(insertion_bound, ranked_core) {
                        break;
                    }
                }
            }
        }
    }

    /// Returns the least loaded cores of the bucket, as many as needed if they exist.
    pub fn least_cores(&self, bucket: u32) -> &[RankedCore] {
        self.least_cores_by_bucket.get(bucket as usize).map_or(&[], LeastLoadedCores::ranked_cores)
    }

    /// Returns whether `ranked_cores` are all cores that exist.
    pub fn is_complete(&self, ranked_cores: &[RankedCore]) -> bool {
        ranked_cores.len() >= self.total_core_count
    }
}

fn lists_of_key<'a>(rack: &'a RackSummary, key: &'a RssKey) -> impl Iterator<Item = &'a CandidateList> {
    rack.candidate_lists.iter().filter(move |list| list.key == *key)
}

fn ranked_cores(position: usize, list: &CandidateList, bucket: u32) -> impl Iterator<Item = RankedCore> {
    let candidates = list.bucket(bucket).iter();
    candidates.map(move |(core, load)| RankedCore { load: *load, core: *core, source: position as u32 })
}
