//! `rr`: new connections go to the servers in turn.

use super::{Policy, Pool, independent_key, table_of};
use crate::placement::{BucketCount, PlacementTable, Rule};
use crate::rss::RssKey;

pub const NAME: &str = "rr";

pub struct RoundRobin {
    key: RssKey,
}

impl RoundRobin {
    pub fn new(seed: u64) -> Self {
        Self { key: independent_key(seed) }
    }
}

impl Policy for RoundRobin {
    fn name(&self) -> &'static str {
        NAME
    }

    fn reads_loads(&self) -> bool {
        false
    }

    fn place(&mut self, pool: &Pool, buckets: BucketCount, generation: u64) -> PlacementTable {
        table_of(pool, Rule::RoundRobin, buckets, generation, self.key.clone())
    }
}
