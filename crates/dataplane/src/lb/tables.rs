//! Writing a [`PlacementTable`] into the half of a service's double buffer that no program reads.

use std::mem::offset_of;
use std::net::SocketAddrV4;
use std::sync::atomic::Ordering;

use coreward_intf as intf;
use coreward_model::placement::{CountedTable, PlacementTable, Rule};
use coreward_model::rss::RssKey;

use super::program::Tables;
use crate::mapped::Mapped;

/// A table that the data plane cannot hold, or that contradicts itself.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum TableError {
    /// Too many or none.
    #[error("a table of {0} groups: expected 1 to {max}", max = intf::MAX_RSS_GROUPS)]
    Groups(usize),
    /// Too many for one bucket.
    #[error("{0} candidates per bucket: expected at most {max}", max = intf::MAX_CANDIDATES)]
    CandidatesPerBucket(u32),
    /// Not groups x buckets x candidates per bucket, or too many in all.
    #[error(
        "{found} candidates: expected {expected} (groups x buckets x candidates per bucket), at most {max}",
        max = intf::MAX_TABLE_CANDIDATES
    )]
    Candidates {
        /// In the table.
        found: usize,
        /// By its own numbers.
        expected: usize,
    },
    /// A rule that looks at candidates, and members, but no candidates.
    #[error("rule {0} without candidates")]
    NoCandidates(&'static str),
    /// More than the counts of assigned connections have room for.
    #[error("{0} core slots: expected at most {max}", max = intf::MAX_CORE_SLOTS)]
    CoreSlots(usize),
    /// A candidate that counts nowhere.
    #[error("core slot {slot} of {count}")]
    CoreSlot {
        /// In a candidate.
        slot: u16,
        /// How many the table has.
        count: usize,
    },
    /// More than there are ids.
    #[error("{0} members: expected at most {max}", max = intf::MAX_MEMBERS)]
    Members(usize),
    /// Neither one per bucket nor, without members, none.
    #[error("{found} consistent choices for {buckets} buckets")]
    Consistent {
        /// In the table.
        found: usize,
        /// Buckets.
        buckets: u32,
    },
}

/// Whether the data plane can hold the table.
pub(super) fn check(table: &PlacementTable) -> Result<(), TableError> {
    let (groups, buckets, per_bucket) = (table.groups.len(), table.bucket_count.get(), table.candidates_per_bucket);
    if groups == 0 || groups > intf::MAX_RSS_GROUPS as usize {
        return Err(TableError::Groups(groups));
    }
    if per_bucket > intf::MAX_CANDIDATES {
        return Err(TableError::CandidatesPerBucket(per_bucket));
    }
    let expected = groups * buckets as usize * per_bucket as usize;
    if table.candidates.len() != expected || expected > intf::MAX_TABLE_CANDIDATES as usize {
        return Err(TableError::Candidates { found: table.candidates.len(), expected });
    }
    let looks_at_candidates = matches!(table.rule, Rule::Table | Rule::LeastAssigned);
    if looks_at_candidates && expected == 0 && !table.members.is_empty() {
        return Err(TableError::NoCandidates(table.rule.name()));
    }
    let slots = table.core_slots.len();
    if slots > intf::MAX_CORE_SLOTS as usize {
        return Err(TableError::CoreSlots(slots));
    }
    if let Some(stray) = table.candidates.iter().find(|candidate| usize::from(candidate.core_slot) >= slots) {
        return Err(TableError::CoreSlot { slot: stray.core_slot, count: slots });
    }
    if table.members.len() > intf::MAX_MEMBERS as usize {
        return Err(TableError::Members(table.members.len()));
    }
    let consistent = table.consistent.len();
    if consistent != buckets as usize && !(table.members.is_empty() && consistent == 0) {
        return Err(TableError::Consistent { found: consistent, buckets });
    }
    let before = table.consistent_before.len();
    if before != 0 && before != consistent {
        return Err(TableError::Consistent { found: before, buckets });
    }
    Ok(())
}

/// What user space remembers of a half, so that it writes only what changed.
#[derive(Debug, Default)]
pub(super) struct Half {
    keys: Option<(Vec<RssKey>, SocketAddrV4)>,
    /// What is counted in it.
    counted: CountedTable,
    /// Grace periods that had passed when programs were told to leave this half.
    pub retired_at: u64,
}

/// Bytes from the start of [`Tables`] to a field of table `position`.
fn at(position: usize, field: usize) -> usize {
    position * size_of::<intf::placement_table>() + field
}

macro_rules! field {
    ($position:expr, $field:ident) => {
        at($position, offset_of!(intf::placement_table, $field))
    };
}

/// The rule of the table at `position`; `None` when it has no members.
pub(super) fn rule_bit(tables: &Mapped<Tables>, position: usize) -> Option<u32> {
    // Two 32-bit fields in one word: member_count below, rule above.
    const { assert!(offset_of!(intf::placement_table, member_count) % 8 == 0) };
    const { assert!(offset_of!(intf::placement_table, rule) == offset_of!(intf::placement_table, member_count) + 4) };
    let word = tables.load(field!(position, member_count));
    (word as u32 != 0).then_some(1 << (word >> 32))
}

/// The generation of the table at `position`.
pub(super) fn generation(tables: &Mapped<Tables>, position: usize) -> u64 {
    tables.load(field!(position, generation))
}

/// A table without members at `position`.
pub(super) fn clear(tables: &Mapped<Tables>, position: usize) {
    tables.write(at(position, 0), &[0u64; offset_of!(intf::placement_table, toeplitz_destination) / 8]);
}

/// What the counts of assigned connections begin with in `next`: of a core whose load is no newer they go on, of the others
/// they start at 0, as what a core got before, its load shows (docs/policies.md).
pub(super) fn carried(tables: &Mapped<Tables>, position: usize, half: &Half, next: &PlacementTable) -> Vec<u32> {
    let count = |slot: u16| {
        let at = field!(position, assigned) + usize::from(slot) * size_of::<u32>();
        tables.half(at).load(Ordering::Relaxed)
    };
    half.counted.carried(next, count)
}

/// Writes `table` at `position`, where no program may look. `counts`: what counts of assigned connections begin with.
pub(super) fn write(
    tables: &Mapped<Tables>,
    position: usize,
    half: &mut Half,
    vip: SocketAddrV4,
    table: &PlacementTable,
    mut counts: Vec<u32>,
) {
    write_keys(tables, position, half, vip, table);
    tables.store(field!(position, generation), table.generation);
    let numbers = [
        table.bucket_count.get(),
        table.groups.len() as u32,
        table.candidates_per_bucket,
        table.assignment_cost,
        table.members.len() as u32,
        table.rule.number(),
    ];
    tables.write(field!(position, bucket_count), &numbers);
    let ids = |servers: &mut dyn Iterator<Item = u16>| {
        let mut ids: Vec<u16> = servers.collect();
        // Whole words: 4 ids each.
        ids.resize(ids.len().next_multiple_of(4), 0);
        ids
    };
    let consistent = ids(&mut table.consistent.iter().map(|server| server.get()));
    tables.write(field!(position, consistent), consistent.as_slice());
    let nobody = intf::NO_SERVER as u16;
    let before = match table.consistent_before.as_slice() {
        [] => vec![nobody; consistent.len()],
        before => ids(&mut before.iter().map(|before| before.map_or(nobody, |server| server.get()))),
    };
    tables.write(field!(position, consistent_before), before.as_slice());
    let candidates: Vec<intf::candidate> = table
        .candidates
        .iter()
        .map(|c| intf::candidate { load: c.load, server_id: c.server.get(), core_slot: c.core_slot })
        .collect();
    tables.write(field!(position, candidates), candidates.as_slice());
    let members: Vec<intf::member> = table
        .members
        .iter()
        .map(|member| intf::member { load: member.load, server_id: member.server.get(), reserved: 0 })
        .collect();
    tables.write(field!(position, members), members.as_slice());
    counts.resize(counts.len().next_multiple_of(2), 0);
    tables.write(field!(position, assigned), counts.as_slice());
    half.counted = CountedTable::of(table);
}

/// The Toeplitz tables are large and change with the fleet's keys only.
fn write_keys(tables: &Mapped<Tables>, position: usize, half: &mut Half, vip: SocketAddrV4, table: &PlacementTable) {
    if half.keys.as_ref().is_some_and(|(keys, of)| *keys == table.groups && *of == vip) {
        return;
    }
    let mut destinations = [0u32; intf::MAX_RSS_GROUPS as usize];
    for (group, key) in table.groups.iter().enumerate() {
        destinations[group] = key.destination_part(vip);
        let source = key.source_tables();
        tables.write(field!(position, toeplitz_source) + group * size_of_val(&source.byte), &source.byte);
    }
    tables.write(field!(position, toeplitz_destination), &destinations);
    half.keys = Some((table.groups.clone(), vip));
}
