//! Policies whose table depends on the pool alone (hash, consistent-hash, maglev). They differ in how they share
//! buckets.

use super::{PlacementPolicy, ServerPool, hash_key_independent_of_rss, table_with_server_per_bucket};
use crate::ServerId;
use crate::placement::{BucketCount, PlacementTable};
use crate::rss::RssKey;

/// Function that assigns each bucket to a server, given servers with shares and the number of buckets. It returns
/// positions in the list of servers, or an empty list without servers.
type BucketAssigner = fn(&[(ServerId, f64)], usize) -> Vec<usize>;

pub struct StaticPolicy {
    name: &'static str,
    assign_buckets: BucketAssigner,
    hash_key: RssKey,
}

impl StaticPolicy {
    pub fn new(name: &'static str, assign_buckets: BucketAssigner, seed: u64) -> Self {
        Self { name, assign_buckets, hash_key: hash_key_independent_of_rss(seed) }
    }
}

impl PlacementPolicy for StaticPolicy {
    fn name(&self) -> &'static str {
        self.name
    }

    fn reads_loads(&self) -> bool {
        false
    }

    fn is_load_independent(&self) -> bool {
        true
    }

    fn compute_table(&mut self, pool: &ServerPool, bucket_count: BucketCount, generation: u64) -> PlacementTable {
        let server_positions = (self.assign_buckets)(&pool.new_connection_shares(), bucket_count.get() as usize);
        table_with_server_per_bucket(pool, bucket_count, generation, self.hash_key.clone(), &server_positions)
    }
}
