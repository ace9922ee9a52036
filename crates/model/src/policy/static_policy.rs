//! Policies whose table depends on the pool alone: hash, consistent-hash, maglev. They differ in how they share
//! buckets.

use super::{Policy, Pool, by_bucket, independent_key};
use crate::ServerId;
use crate::placement::{BucketCount, PlacementTable};
use crate::rss::RssKey;

/// Returns for each bucket the position of its server in the list of servers and shares; empty without servers.
type SharesOut = fn(&[(ServerId, f64)], usize) -> Vec<usize>;

pub struct StaticPolicy {
    name: &'static str,
    shares_out: SharesOut,
    key: RssKey,
}

impl StaticPolicy {
    pub fn new(name: &'static str, shares_out: SharesOut, seed: u64) -> Self {
        Self { name, shares_out, key: independent_key(seed) }
    }
}

impl Policy for StaticPolicy {
    fn name(&self) -> &'static str {
        self.name
    }

    fn reads_loads(&self) -> bool {
        false
    }

    fn is_load_independent(&self) -> bool {
        true
    }

    fn place(&mut self, pool: &Pool, buckets: BucketCount, generation: u64) -> PlacementTable {
        let positions = (self.shares_out)(&pool.shares(), buckets.get() as usize);
        by_bucket(pool, buckets, generation, self.key.clone(), &positions)
    }
}
