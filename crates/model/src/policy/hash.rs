//! `hash`: what an LB without any knowledge of loads does. Bucket i goes to server i mod n, by a hash of its own.

use super::{Policy, Pool, independent_key, striped};
use crate::placement::{BucketCount, PlacementTable};
use crate::rss::RssKey;

pub const NAME: &str = "hash";

pub struct Hash {
    key: RssKey,
}

impl Hash {
    pub fn new(seed: u64) -> Self {
        Self { key: independent_key(seed) }
    }
}

impl Policy for Hash {
    fn name(&self) -> &'static str {
        NAME
    }

    fn reads_loads(&self) -> bool {
        false
    }

    fn place(&mut self, pool: &Pool, buckets: BucketCount, generation: u64) -> PlacementTable {
        striped(pool, buckets, generation, self.key.clone())
    }
}

/// For each of `size` buckets the position of its server among `servers`: empty without servers.
pub fn striped_table(servers: usize, size: usize) -> Vec<usize> {
    if servers == 0 { Vec::new() } else { (0..size).map(|bucket| bucket % servers).collect() }
}
