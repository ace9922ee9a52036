//! Policy `rr`, by which new connections go to the servers in turn, each as often as its weight.

use super::wrr_schedule::weighted_turn_table;
use super::{PlacementPolicy, ServerPool, hash_key_independent_of_rss};
use crate::placement::{BucketCount, PlacementTable};
use crate::rss::RssKey;

pub const POLICY_NAME: &str = "rr";

pub struct RoundRobinPolicy {
    hash_key: RssKey,
}

impl RoundRobinPolicy {
    pub fn new(seed: u64) -> Self {
        Self { hash_key: hash_key_independent_of_rss(seed) }
    }
}

impl PlacementPolicy for RoundRobinPolicy {
    fn name(&self) -> &'static str {
        POLICY_NAME
    }

    fn reads_loads(&self) -> bool {
        false
    }

    fn compute_table(&mut self, pool: &ServerPool, bucket_count: BucketCount, generation: u64) -> PlacementTable {
        let shares: Vec<f64> = pool.new_connection_shares().into_iter().map(|(_, share)| share).collect();
        weighted_turn_table(pool, bucket_count, generation, self.hash_key.clone(), &shares)
    }
}
