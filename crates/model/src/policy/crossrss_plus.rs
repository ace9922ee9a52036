//! `crossrss-plus`, ours: `crossrss` that also knows what was assigned since the last report.
//!
//! Between two reports every bucket of `crossrss` sends all its new connections to the core that was least loaded at the
//! last one; a burst then piles up there. Here the data plane gets several candidates per bucket, and counts the
//! connections it gives to each core: a connection goes to the candidate of least load + assigned x cost. The cost is what
//! a connection adds to the smoothed load at the next report. The counts start anew with every table. docs/policies.md
//! says what else was tried, and what it gave.

use coreward_intf as intf;

use super::crossrss::core_aware;
use super::{Policy, Pool, independent_key};
use crate::load::fixed_point;
use crate::placement::{BucketCount, PlacementTable, Rule};
use crate::rss::RssKey;

pub const NAME: &str = "crossrss-plus";

/// How much of a new connection's load the next report shows: the EWMA's published alpha. The best or nearly so on each
/// of four workloads; counting in full, or a quarter, was up to half as bad again on some (docs/policies.md).
const SHARE_AT_NEXT_REPORT: f64 = 0.5;

/// `crossrss` that counts what it assigned since the last report.
pub struct CrossRssPlus {
    key: RssKey,
    share: f64,
}

impl CrossRssPlus {
    /// The policy as the registry has it.
    pub fn new(seed: u64) -> Self {
        Self::counting(seed, SHARE_AT_NEXT_REPORT)
    }

    /// The policy with connections counted as `share` of what one brings on average: for comparing, 0 is `crossrss`.
    pub fn counting(seed: u64, share: f64) -> Self {
        Self { key: independent_key(seed), share }
    }
}

impl Policy for CrossRssPlus {
    fn name(&self) -> &'static str {
        NAME
    }

    fn place(&mut self, pool: &Pool, buckets: BucketCount, generation: u64) -> PlacementTable {
        let fits = |groups: usize| intf::MAX_TABLE_CANDIDATES as usize / (groups * buckets.get() as usize);
        let per_bucket =
            |servers: usize, groups: usize| servers.min(intf::MAX_CANDIDATES as usize).min(fits(groups)).max(1);
        let mut table = core_aware(pool, buckets, generation, &self.key, Rule::LeastAssigned, per_bucket);
        // Every load balancer sees only its own assignments; the others' are about as many.
        let cost = self.share * pool.load_per_connection() * f64::from(pool.load_balancers);
        // At least the smallest step: in a pool without load and connections, all of whose cores are equal, the first
        // burst is then spread evenly and does not pile up on the lowest id.
        table.assignment_cost = fixed_point(cost).max(1);
        table
    }
}
