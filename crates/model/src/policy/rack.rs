//! Summary of a rack's servers that a rack controller sends ("hierarchical aggregation, as the minimal load of a group
//! of servers is the same as the minimal load of any server", CrossRSS, CoNEXT'20, Sect. 2).
//!
//! A table needs the k least loaded cores of each bucket. A core among the k least of all is among the k least of its
//! rack, because fewer cores of the rack are before it. So the k least of the racks' lists are the k least of all, in
//! the same order if the server's id breaks ties. Cores may be compared by another value than their load
//! ([`super::normalized_load`]), which depends on the whole pool. In a `ServerLoadClass` that value never falls where
//! loads rise. So a rack sends the k least of each class and needs no knowledge of other racks.
//!
//! Policies also use each server's mean load with its number of cores, and the total work missing to a level
//! ([`LoadHistogram`]). The level is known once all loads are. All sums are exact to the last bit. The controller
//! handles servers with unknown loads, and servers in slow start, which take part in some buckets only.
//!
//! `crates/model/tests/integration/racks.rs` compares every policy's tables with those of the same pool without racks.

use std::collections::BTreeMap;

use super::bucket_loads::reachable_core_and_load;
use super::loads::{LoadHistogram, LoadHistogramBins, ServerLoadClass, ServerLoads};
use super::rss_group::LeastLoadedCoreList;
use super::{PlacementPolicy, PoolServer, ServerPool};
use crate::ServerId;
use crate::placement::{BucketCount, ServerCore};
use crate::rss::RssKey;

/// Maximum number of candidates of a bucket in a rack's summary, which is the data plane's limit.
pub const MAX_CANDIDATES: u8 = coreward_intf::MAX_CANDIDATES as u8;

/// Summary of those servers of one service in one rack whose loads are known.
#[derive(Debug, Clone, PartialEq)]
pub struct RackSummary {
    /// Servers of the rack with known loads, by id.
    pub servers: Vec<SummarizedServer>,
    /// Load histogram of each class of eligible servers with [`ServerLoads::Aggregated`].
    pub histograms_by_class: Vec<(ServerLoadClass, LoadHistogramBins)>,
    /// Least loaded cores of eligible servers with [`ServerLoads::Aggregated`], in one list per RSS key and class.
    pub candidate_lists: Vec<BucketCandidateList>,
}

/// Server in a rack's summary, with its loads in reduced form.
#[derive(Debug, Clone, PartialEq)]
pub struct SummarizedServer {
    /// Id of the server.
    pub id: ServerId,
    /// Loads of the server, which are [`ServerLoads::Relayed`] in slow start and [`ServerLoads::Aggregated`] otherwise.
    pub loads: ServerLoads,
}

/// Least loaded cores for each bucket, among servers with the same RSS key and class.
#[derive(Debug, Clone, PartialEq)]
pub struct BucketCandidateList {
    /// RSS key of the list's servers.
    pub key: RssKey,
    /// Number of candidates for each bucket, at least 1.
    pub candidates_per_bucket: usize,
    /// Candidates by bucket, each with its load. The least loaded is first, or the lowest id among equal loads.
    pub candidates: Vec<(ServerCore, f64)>,
}

impl BucketCandidateList {
    /// Returns the candidates of a bucket, or an empty list if the list does not contain the bucket.
    pub fn candidates_of_bucket(&self, bucket: u32) -> &[(ServerCore, f64)] {
        let first_candidate_index = bucket as usize * self.candidates_per_bucket;
        self.candidates
            .get(first_candidate_index..first_candidate_index + self.candidates_per_bucket)
            .unwrap_or_default()
    }
}

impl RackSummary {
    /// Returns the summary of a rack whose servers are in `pool`, with at most `max_candidate_count` candidates per
    /// bucket. Fewer than [`PlacementPolicy::max_candidates_per_bucket`] lose information. Callers call it once per
    /// table, because the policy may smooth loads.
    pub fn from_pool(
        pool: &ServerPool,
        policy: &mut dyn PlacementPolicy,
        bucket_count: BucketCount,
        max_candidate_count: usize,
    ) -> Self {
        let max_candidates_per_bucket = policy.max_candidates_per_bucket(bucket_count).min(max_candidate_count);
        let preprocessed_pool = policy.preprocess_pool(pool);
        let mut summary = Self { servers: Vec::new(), histograms_by_class: Vec::new(), candidate_lists: Vec::new() };
        let mut histogram_by_class: BTreeMap<ServerLoadClass, LoadHistogram> = BTreeMap::new();
        let mut servers_by_key_and_class: Vec<(&RssKey, ServerLoadClass, Vec<&PoolServer>)> = Vec::new();
        for server in &preprocessed_pool.servers {
            let Some(loads) = &server.loads else { continue };
            let Some(cores) = loads.core_loads().filter(|cores| !cores.is_empty()) else { continue };
            if server.slow_start_fraction < 1.0 {
                summary.servers.push(SummarizedServer { id: server.id, loads: ServerLoads::Relayed(cores.clone()) });
                continue;
            }
            let loads = ServerLoads::Aggregated { sum: loads.load_sum(), core_count: loads.core_count() };
            summary.servers.push(SummarizedServer { id: server.id, loads });
            if !server.is_eligible {
                continue;
            }
            let class = server.server_class();
            let histogram = histogram_by_class.entry(class).or_default();
            cores.iter().for_each(|load| histogram.add_core(*load));
            let Some(rss) = &server.rss else { continue };
            match servers_by_key_and_class
                .iter_mut()
                .find(|(key, server_class, _)| **key == rss.key && *server_class == class)
            {
                Some((_, _, servers)) => servers.push(server),
                None => servers_by_key_and_class.push((&rss.key, class, vec![server])),
            }
        }
        summary.histograms_by_class =
            histogram_by_class.into_iter().map(|(class, histogram)| (class, histogram.bins().collect())).collect();
        if max_candidates_per_bucket > 0 {
            let candidate_lists = servers_by_key_and_class
                .into_iter()
                .map(|(key, _, servers)| build_candidate_list(key, &servers, bucket_count, max_candidates_per_bucket));
            summary.candidate_lists = candidate_lists.collect();
        }
        summary
    }
}

/// Returns the candidate list of servers with the same RSS key and class.
fn build_candidate_list(
    key: &RssKey,
    servers: &[&PoolServer],
    bucket_count: BucketCount,
    max_candidate_count: usize,
) -> BucketCandidateList {
    let candidates_per_bucket = servers.len().min(max_candidate_count);
    let mut candidates = Vec::with_capacity(candidates_per_bucket * bucket_count.get() as usize);
    for bucket in 0..bucket_count.get() {
        let mut least_cores = LeastLoadedCoreList::new(candidates_per_bucket);
        for server in servers {
            let rss = server.rss.as_ref().expect("servers are listed by their key");
            // All loads are known, so no neutral value is needed.
            let (core, load) = reachable_core_and_load(server, rss, bucket, bucket_count, 0.0);
            least_cores.insert_core_if_least(load, load, ServerCore { server: server.id, core });
        }
        candidates.extend(least_cores.cores_loads_and_ranking_values().map(|(core, load, _)| (core, load)));
    }
    BucketCandidateList { key: key.clone(), candidates_per_bucket, candidates }
}
