//! `pow2`: of two servers drawn at random the one whose cores are less loaded on average, by reports of the same rate as
//! `crossrss` gets (CrossRSS, CoNEXT'20, Sect. 3; Mitzenmacher, "The power of two choices", 2001).

use super::{Policy, Pool, independent_key, table_of};
use crate::placement::{BucketCount, PlacementTable, Rule};
use crate::rss::RssKey;

pub const NAME: &str = "pow2";

pub struct PowerOfTwo {
    key: RssKey,
}

impl PowerOfTwo {
    pub fn new(seed: u64) -> Self {
        Self { key: independent_key(seed) }
    }
}

impl Policy for PowerOfTwo {
    fn name(&self) -> &'static str {
        NAME
    }

    fn place(&mut self, pool: &Pool, buckets: BucketCount, generation: u64) -> PlacementTable {
        table_of(pool, Rule::PowerOfTwo, buckets, generation, self.key.clone())
    }
}
