//! Policy `crossrss`, as published (Barbette et al., CoNEXT'20, Sect. 2). At every tick, each bucket goes to the server
//! whose core for that bucket has the strictly smallest load, or among equals to the lowest id. Until the first report,
//! bucket i goes to server i mod n.

use super::policy_cache::PolicyCache;
use super::rss_group::{fill_table_candidates, rss_groups};
use super::{
    PlacementPolicy, ServerPool, hash_key_independent_of_rss, modulo_placement_table, table_with_consistent_servers,
};
use crate::placement::{BucketCount, PlacementRule, PlacementTable};
use crate::rss::RssKey;

pub const POLICY_NAME: &str = "crossrss";

pub struct CrossRssPolicy {
    hash_key: RssKey,
    pub(super) cache: PolicyCache,
}

impl CrossRssPolicy {
    pub fn new(seed: u64) -> Self {
        Self { hash_key: hash_key_independent_of_rss(seed), cache: PolicyCache::default() }
    }
}

impl PlacementPolicy for CrossRssPolicy {
    fn name(&self) -> &'static str {
        POLICY_NAME
    }

    fn max_candidates_per_bucket(&self, _buckets: BucketCount) -> usize {
        1
    }

    fn compute_table(&mut self, pool: &ServerPool, bucket_count: BucketCount, generation: u64) -> PlacementTable {
        core_aware_table(
            pool,
            bucket_count,
            generation,
            &self.hash_key,
            PlacementRule::Table,
            |_, _| 1,
            &mut self.cache,
        )
    }
}

/// Returns a table with the least loaded cores of each bucket. `candidates_per_bucket_for` returns their number, given
/// the numbers of eligible servers and of groups. Before the first report, a table with one candidate per bucket is a
/// modulo table. With several candidates, the data plane balances by counting assignments.
pub fn core_aware_table(
    pool: &ServerPool,
    bucket_count: BucketCount,
    generation: u64,
    fallback_key: &RssKey,
    rule: PlacementRule,
    candidates_per_bucket_for: impl Fn(usize, usize) -> usize,
    cache: &mut PolicyCache,
) -> PlacementTable {
    let groups = rss_groups(pool, fallback_key);
    let has_no_eligible_server = pool.eligible_servers().next().is_none();
    if has_no_eligible_server || (!pool.has_loads() && rule == PlacementRule::Table) {
        return modulo_placement_table(pool, bucket_count, generation, groups[0].key.clone());
    }
    let consistent_servers = cache.consistent_server_by_bucket(pool, bucket_count);
    let mut table =
        table_with_consistent_servers(pool, rule, bucket_count, generation, groups[0].key.clone(), consistent_servers);
    let candidates_per_bucket = candidates_per_bucket_for(table.members.len(), groups.len());
    fill_table_candidates(&mut table, &groups, bucket_count, pool, candidates_per_bucket, cache);
    table
}
