//! Merged summaries of racks, kept between tables: each table needs the new summaries of one or a few racks out of
//! hundreds.

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
    /// Stores the newest summaries. Returns the indexes of changed summaries with their previous versions; `None` if
    /// all have changed.
    fn update(&mut self, racks: &[Arc<RackSummary>]) -> Option<Vec<(usize, Arc<RackSummary>)>> {
        let before = std::mem::replace(&mut self.0, racks.to_vec());
        let same_racks = before.len() == racks.len();
        let changed = before.into_iter().zip(racks).enumerate();
        let changed = changed.filter(|(_, (before, now))| !Arc::ptr_eq(before, now));
        same_racks.then(|| changed.map(|(position, (before, _))| (position, before)).collect())
    }
}

#[derive(Debug, Default)]
pub struct RelayedHistograms {
    merged: MergedSummaries,
    by_class: BTreeMap<ServerClass, LoadHistogram>,
}

impl RelayedHistograms {
    /// Merges these summaries, and returns the load histogram of each class.
    pub fn update(&mut self, racks: &[Arc<RackSummary>]) -> &BTreeMap<ServerClass, LoadHistogram> {
        match self.merged.update(racks) {
            Some(changed) => {
                for (position, before) in changed {
                    for (class, spread) in &before.spreads {
                        self.by_class.entry(*class).or_default().remove_all(spread.iter().copied());
                    }
                    self.add(&racks[position]);
                }
            }
            None => {
                self.by_class.clear();
                racks.iter().for_each(|rack| self.add(rack));
            }
        }
        &self.by_class
    }

    fn add(&mut self, rack: &RackSummary) {
        for (class, spread) in &rack.spreads {
            self.by_class.entry(*class).or_default().add_all(spread.iter().copied());
        }
    }
}

/// Least loaded cores of each bucket, of the servers of all racks with one RSS key.
#[derive(Debug, Default)]
pub struct RackAggregate {
    merged: MergedSummaries,
    key: Option<RssKey>,
    count: usize,
    /// Least loaded cores by bucket.
    least: Vec<LeastLoadedCores>,
}

impl RackAggregate {
    /// Updates the least loaded cores to these summaries. `most` is the number of cores needed for each bucket.
    pub fn update(&mut self, racks: &[Arc<RackSummary>], key: &RssKey, buckets: BucketCount, most: usize) {
        let same = self.key.as_ref() == Some(key) && self.least.len() == buckets.get() as usize;
        match self.merged.update(racks) {
            Some(changed) if same => {
                changed.into_iter().for_each(|(position, _)| self.replace(position, &racks[position]))
            }
            _ => {
                self.key = Some(key.clone());
                self.least.clear();
                self.least.resize(buckets.get() as usize, LeastLoadedCores::default());
            }
        }
        self.count = racks.iter().flat_map(|rack| lists(rack, key)).map(|list| list.per_bucket).sum();
        let limit = most.min(self.count);
        for (bucket, least) in (0..).zip(&mut self.least).filter(|(_, least)| least.ranked_cores().len() < limit) {
            let lists = racks
                .iter()
                .enumerate()
                .flat_map(|(position, rack)| lists(rack, key).map(move |list| (position, list)));
            least.find(lists.map(|(position, list)| ranked_cores(position, list, bucket)));
        }
    }

    fn replace(&mut self, position: usize, rack: &RackSummary) {
        let Some(key) = &self.key else { return };
        let lists: Vec<&CandidateList> = lists(rack, key).collect();
        for (bucket, least) in (0..).zip(&mut self.least) {
            let Some(bound) = least.remove_source(position as u32) else { continue };
            for list in &lists {
                for place in ranked_cores(position, list, bucket) {
                    if !least.insert_core(bound, place) {
                        break;
                    }
                }
            }
        }
    }

    /// Returns the least loaded cores of the bucket: as many as needed, if they exist.
    pub fn least(&self, bucket: u32) -> &[RankedCore] {
        self.least.get(bucket as usize).map_or(&[], LeastLoadedCores::ranked_cores)
    }

    /// Returns whether `places` are all cores that exist.
    pub fn is_complete(&self, places: &[RankedCore]) -> bool {
        places.len() >= self.count
    }
}

fn lists<'a>(rack: &'a RackSummary, key: &'a RssKey) -> impl Iterator<Item = &'a CandidateList> {
    rack.lists.iter().filter(move |list| list.key == *key)
}

fn ranked_cores(position: usize, list: &CandidateList, bucket: u32) -> impl Iterator<Item = RankedCore> {
    let candidates = list.bucket(bucket).iter();
    candidates.map(move |(core, load)| RankedCore { load: *load, core: *core, source: position as u32 })
}
