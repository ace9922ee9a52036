//! Servers with equal RSS key see the same hash for a connection, so they share buckets: a group.

use super::levels::Levels;
use super::{Pool, PoolServer};
use crate::load::fixed_point;
use crate::placement::{BucketCount, Candidate, Core, PlacementTable};
use crate::rss::RssKey;

/// Servers that share buckets.
#[derive(Debug, Clone, PartialEq)]
pub struct RssGroup<'a> {
    /// Their key.
    pub key: RssKey,
    /// The servers whose cores are known by it.
    pub servers: Vec<&'a PoolServer>,
    /// Servers that only share the group's table: their RSS is unknown or in a group too many. Their load counts as the
    /// mean of their cores, whichever the bucket.
    pub without_cores: Vec<&'a PoolServer>,
}

/// The eligible servers by RSS key, largest group first (ties: lowest id first), at most `MAX_RSS_GROUPS`; what is left
/// over goes to the first group's `without_cores`. `fallback` is the key of a pool in which no RSS is known.
pub fn rss_groups<'a>(pool: &'a Pool, fallback: &RssKey) -> Vec<RssGroup<'a>> {
    let mut groups: Vec<RssGroup<'a>> = Vec::new();
    let mut unknown = Vec::new();
    for server in pool.eligible() {
        let Some(rss) = &server.rss else {
            unknown.push(server);
            continue;
        };
        match groups.iter_mut().find(|group| group.key == rss.key) {
            Some(group) => group.servers.push(server),
            None => groups.push(RssGroup { key: rss.key.clone(), servers: vec![server], without_cores: Vec::new() }),
        }
    }
    // A stable sort: groups of one size stay in the order of their first id.
    groups.sort_by_key(|group| std::cmp::Reverse(group.servers.len()));
    let kept = groups.len().min(coreward_intf::MAX_RSS_GROUPS as usize);
    unknown.extend(groups.drain(kept..).flat_map(|group| group.servers));
    if groups.is_empty() {
        groups.push(RssGroup { key: fallback.clone(), servers: Vec::new(), without_cores: Vec::new() });
    }
    unknown.sort_by_key(|server| server.id);
    groups[0].without_cores = unknown;
    groups
}

/// Cores in the order in which they were first seen.
struct CoreSlots<'a> {
    slots: &'a mut Vec<Core>,
    by_core: std::collections::HashMap<Core, u16>,
}

impl CoreSlots<'_> {
    /// The core's slot. Beyond the data plane's limit cores share the last slot: their counts then add up, which only
    /// makes them look busier.
    fn slot(&mut self, core: Core) -> u16 {
        let slots = &mut *self.slots;
        *self.by_core.entry(core).or_insert_with(|| {
            if slots.len() < coreward_intf::MAX_CORE_SLOTS as usize {
                slots.push(core);
            }
            (slots.len() - 1) as u16
        })
    }
}

/// Fills a table with the `per_bucket` least loaded cores of every bucket of every group.
pub fn fill_candidates(
    table: &mut PlacementTable,
    groups: &[RssGroup<'_>],
    buckets: BucketCount,
    pool: &Pool,
    per_bucket: usize,
) {
    let without_loads = !pool.has_loads();
    let bucket_of = BucketOf { pool, buckets, neutral: pool.neutral_load(), levels: Levels::of(pool) };
    let mut core_slots = CoreSlots { slots: &mut table.core_slots, by_core: std::collections::HashMap::new() };
    table.groups = groups.iter().map(|group| group.key.clone()).collect();
    table.candidates_per_bucket = per_bucket as u32;
    for group in groups {
        for bucket in 0..buckets.get() {
            let mut found = bucket_of.candidates(group, bucket);
            // Strictly smallest load, ties to the lowest id (CrossRSS as published).
            let order = |(a, a_load): &(Core, f64), (b, b_load): &(Core, f64)| a_load.total_cmp(b_load).then(a.cmp(b));
            if without_loads {
                // All are equal, so their order decides: as many buckets start with one server as with another.
                let first = bucket as usize % found.len();
                found.sort_by_key(|(core, _)| *core);
                found.rotate_left(first);
            } else if per_bucket < found.len() {
                // Of a thousand servers only these few are sorted.
                found.select_nth_unstable_by(per_bucket, order);
                found.truncate(per_bucket);
            }
            if !without_loads {
                found.sort_by(order);
            }
            for position in 0..per_bucket {
                let (core, load) = found[position.min(found.len() - 1)];
                let core_slot = core_slots.slot(core);
                table.candidates.push(Candidate { server: core.server, load: fixed_point(load), core_slot });
            }
        }
    }
}

/// What the candidates of one bucket depend on.
struct BucketOf<'a> {
    pool: &'a Pool,
    buckets: BucketCount,
    neutral: f64,
    levels: Levels,
}

impl BucketOf<'_> {
    /// For each server of the group that takes part in the bucket's connections, the core that they reach there, with what
    /// its load is compared by. With none that takes part, all do.
    fn candidates(&self, group: &RssGroup<'_>, bucket: u32) -> Vec<(Core, f64)> {
        let all = || group.servers.iter().chain(&group.without_cores).copied();
        let taking_part = all().filter(|server| self.pool.takes_part(server, bucket));
        let candidate = |server: &PoolServer| {
            let (core, load) = self.core(group, server, bucket);
            (Core { server: server.id, core }, self.levels.compared(server, load))
        };
        let found: Vec<(Core, f64)> = taking_part.map(candidate).collect();
        if found.is_empty() { all().map(candidate).collect() } else { found }
    }

    /// The core of the server that the bucket's connections reach, and its load. Of a server that only shares the group's
    /// table it is not known: all its cores count as one.
    fn core(&self, group: &RssGroup<'_>, server: &PoolServer, bucket: u32) -> (u16, f64) {
        let Some(rss) = server.rss.as_ref().filter(|rss| rss.key == group.key) else {
            return (0, server.mean_load(self.neutral));
        };
        let table = &rss.indirection_table;
        // A table longer than the buckets are many: the bucket reaches several of its entries, evenly.
        let entries = (table.entry_count() / self.buckets.get() as usize).max(1);
        let cores = (0..entries as u32).map(|step| table.queue(bucket + step * self.buckets.get()));
        let load = cores.map(|core| server.core_load(core, self.neutral)).sum::<f64>() / entries as f64;
        (table.queue(bucket), load)
    }
}
