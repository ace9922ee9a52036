//! Writes a [`PlacementTable`] into a free part of the memory of all tables.
//!
//! Each placement table has a block of its own. The Toeplitz tables of an RSS key have another block, which all
//! placement tables with that key share. A block is reused a grace period after its last table was retired.

use std::collections::{HashMap, VecDeque};
use std::mem::offset_of;
use std::net::SocketAddr;
use std::sync::atomic::Ordering;

use coreward_intf as intf;
use coreward_model::ServerId;
use coreward_model::placement::{BucketCount, CoreSlotIndex, Member, PlacementRule, PlacementTable};
use coreward_model::rss::{InputTransform, RssKey};

use super::buddy_allocator::{Block, BuddyAllocator};
use crate::mmap_array::MmapArray;
use crate::rcu::{GracePeriods, GraceTicket};

/// Error for a placement table that exceeds a limit of the data plane or contradicts itself.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum TableError {
    /// The table has no RSS groups, or too many.
    #[error("a table of {0} groups: expected 1 to {max}", max = intf::MAX_RSS_GROUPS)]
    InvalidGroupCount(usize),
    /// The table has too many candidates per bucket.
    #[error("{0} candidates per bucket: expected at most {max}", max = intf::MAX_CANDIDATES)]
    TooManyPerBucket(u32),
    /// The number of candidates is not groups x buckets x candidates per bucket, or exceeds the limit.
    #[error(
        "{found} candidates: expected {expected} (groups x buckets x candidates per bucket), at most {max}",
        max = intf::MAX_TABLE_CANDIDATES
    )]
    WrongCandidateCount {
        /// Number of candidates in the table.
        found: usize,
        /// Number of candidates that the numbers of groups and buckets require.
        expected: usize,
    },
    /// The rule selects among candidates, but the table has members and no candidates.
    #[error("rule {0} without candidates")]
    NoCandidates(&'static str),
    /// The table has too many core slots.
    #[error("{0} core slots: expected at most {max}", max = intf::MAX_CORE_SLOTS)]
    TooManyCoreSlots(usize),
    /// A candidate refers to a core slot that the table does not have.
    #[error("core slot {slot} of {count}")]
    UnknownCoreSlot {
        /// Core slot to which the candidate refers.
        slot: u16,
        /// Number of core slots of the table.
        count: usize,
    },
    /// The table has too many members.
    #[error("{0} members: expected at most {max}", max = intf::MAX_MEMBERS)]
    TooManyMembers(usize),
    /// The number of consistent choices is not that of buckets. (A table without members may have none.)
    #[error("{found} consistent choices for {buckets} buckets")]
    WrongConsistentCount {
        /// Number of consistent choices in the table.
        found: usize,
        /// Number of buckets.
        buckets: u32,
    },
}

/// Checks that the data plane can hold the table. Fails with the first violated limit.
pub(super) fn check(table: &PlacementTable) -> Result<(), TableError> {
    let (groups, buckets, per_bucket) = (table.groups.len(), table.bucket_count.get(), table.candidates_per_bucket);
    if groups == 0 || groups > intf::MAX_RSS_GROUPS as usize {
        return Err(TableError::InvalidGroupCount(groups));
    }
    if per_bucket > intf::MAX_CANDIDATES {
        return Err(TableError::TooManyPerBucket(per_bucket));
    }
    let expected = groups * buckets as usize * per_bucket as usize;
    if table.candidates.len() != expected || expected > intf::MAX_TABLE_CANDIDATES as usize {
        return Err(TableError::WrongCandidateCount { found: table.candidates.len(), expected });
    }
    let looks_at_candidates = matches!(table.rule, PlacementRule::Table | PlacementRule::LeastAssigned);
    if looks_at_candidates && expected == 0 && !table.members.is_empty() {
        return Err(TableError::NoCandidates(table.rule.name()));
    }
    let slots = table.core_slots.len();
    if slots > intf::MAX_CORE_SLOTS as usize {
        return Err(TableError::TooManyCoreSlots(slots));
    }
    if let Some(stray) = table.candidates.iter().find(|candidate| usize::from(candidate.core_slot) >= slots) {
        return Err(TableError::UnknownCoreSlot { slot: stray.core_slot, count: slots });
    }
    if table.members.len() > intf::MAX_MEMBERS as usize {
        return Err(TableError::TooManyMembers(table.members.len()));
    }
    let consistent = table.consistent_servers.len();
    if consistent != buckets as usize && !(table.members.is_empty() && consistent == 0) {
        return Err(TableError::WrongConsistentCount { found: consistent, buckets });
    }
    let before = table.previous_consistent_servers.len();
    if before != 0 && before != consistent {
        return Err(TableError::WrongConsistentCount { found: before, buckets });
    }
    Ok(())
}

/// Error: the memory for placement tables has no free block of the required size.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct MemoryFull;

/// Placement table that is stored in the memory for placement tables.
#[derive(Debug)]
pub(super) struct StoredTable {
    block: Block,
    /// Blocks that hold the Toeplitz tables of the groups' RSS keys.
    toeplitz_blocks: Vec<Block>,
    core_slot_index: CoreSlotIndex,
    /// Bit of the table's rule; `None`: the table has no members.
    pub rule_bit: Option<u32>,
}

impl StoredTable {
    /// Returns the offset of the table in the memory for placement tables, in bytes.
    pub fn offset(&self) -> u32 {
        self.block.offset
    }
}

/// Origin of the Toeplitz tables that a new placement table uses.
#[derive(Debug, Clone, Copy)]
pub(super) enum ToeplitzSource {
    /// Computed from the RSS keys of the new table's groups, with this VIP as the destination.
    Keys(SocketAddr),
    /// Taken from the first group of the service's present table.
    UnchangedMembers,
}

/// Key by which Toeplitz tables are shared: the RSS key, the address family and, if the NIC combines source and
/// destination before hashing, the VIP.
type ToeplitzKey = (RssKey, Family, Option<SocketAddr>);

/// Address family of a service's VIP, on which the size of its Toeplitz tables depends.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) enum Family {
    Ipv4,
    Ipv6,
}

impl Family {
    /// Returns the family of a VIP.
    pub fn of(vip: &SocketAddr) -> Self {
        if vip.is_ipv4() { Self::Ipv4 } else { Self::Ipv6 }
    }

    fn source_bytes(self) -> u32 {
        match self {
            Self::Ipv4 => size_of::<intf::toeplitz_source_tables>() as u32,
            Self::Ipv6 => size_of::<intf::toeplitz_source_tables_ipv6>() as u32,
        }
    }
}

/// Toeplitz tables of one RSS key, which several placement tables may use.
#[derive(Debug, Default)]
struct SharedToeplitzTables {
    /// Key of the Toeplitz tables; `None`: it is not known, since they were taken over.
    key: Option<ToeplitzKey>,
    /// Number of placement tables that use these Toeplitz tables.
    reference_count: usize,
}

/// Memory that holds the placement tables of all services.
#[derive(Debug)]
pub(super) struct TableMemory {
    memory: MmapArray<[u64]>,
    blocks: BuddyAllocator,
    sources: HashMap<Block, SharedToeplitzTables>,
    by_key: HashMap<ToeplitzKey, Block>,
    /// Replaced tables that programs may still read, oldest first.
    retired: VecDeque<(GraceTicket, StoredTable)>,
}

const HEADER_BYTES: u32 = size_of::<intf::placement_table>() as u32;

/// Returns the offset in bytes of a field of the table at offset `at`.
macro_rules! field {
    ($at:expr, $field:ident) => {
        $at as usize + offset_of!(intf::placement_table, $field)
    };
}

/// Splits a word into its lower and its upper 32 bits.
fn split_word(word: u64) -> (u32, u32) {
    (word as u32, (word >> 32) as u32)
}

/// Returns the bit of the rule of the table at offset `at`; `None`: `at` is 0, or the table has no members.
pub(super) fn rule_bit(memory: &MmapArray<[u64]>, at: u32) -> Option<u32> {
    const { assert!(offset_of!(intf::placement_table, member_count) % 8 == 0) };
    const { assert!(offset_of!(intf::placement_table, rule) == offset_of!(intf::placement_table, member_count) + 4) };
    if at == 0 {
        return None;
    }
    let (members, rule) = split_word(memory.load(field!(at, member_count)));
    (members != 0).then_some(1 << rule)
}

/// Layout of a table's block, to which lists are appended.
struct BlockLayout {
    bytes: u32,
}

impl BlockLayout {
    /// Reserves space for `count` values of type `T`. Returns their offset from the start of the table.
    fn reserve<T>(&mut self, count: usize) -> u32 {
        let at = self.bytes;
        self.bytes += ((count * size_of::<T>()) as u32).next_multiple_of(8);
        at
    }
}

impl TableMemory {
    /// Creates the allocator and the registry of an empty placement memory with `bytes` bytes.
    pub fn new(memory: MmapArray<[u64]>, bytes: u32) -> Self {
        let blocks = BuddyAllocator::new(bytes, []);
        Self { memory, blocks, sources: HashMap::new(), by_key: HashMap::new(), retired: VecDeque::new() }
    }

    /// Registers the tables that an earlier process has stored at the offsets `in_use`, and returns them.
    pub fn adopt(&mut self, bytes: u32, in_use: &[(u32, Family)]) -> Vec<StoredTable> {
        let mut sources: HashMap<Block, usize> = HashMap::new();
        let header = |at: u32| self.memory.read::<intf::placement_table>(at as usize);
        let of_table = |(at, family): &(u32, Family)| {
            let table = header(*at);
            let groups = (table.group_count as usize).min(intf::MAX_RSS_GROUPS as usize);
            let source = |at: &u32| Block::aligned(*at, family.source_bytes());
            (*at, table.bytes, table.toeplitz_source_offset[..groups].iter().map(source).collect())
        };
        let tables: Vec<(u32, u32, Vec<Block>)> = in_use.iter().map(of_table).collect();
        for source in tables.iter().flat_map(|(_, _, sources)| sources) {
            *sources.entry(*source).or_default() += 1;
        }
        let used = tables.iter().map(|(at, bytes, _)| (*at, *bytes));
        self.blocks = BuddyAllocator::new(bytes, used.chain(sources.keys().map(|block| (block.offset, block.bytes()))));
        let written = tables.iter().map(|(at, bytes, sources)| StoredTable {
            block: Block::aligned(*at, *bytes),
            toeplitz_blocks: sources.clone(),
            core_slot_index: CoreSlotIndex::default(),
            rule_bit: rule_bit(&self.memory, *at),
        });
        let written = written.collect();
        self.sources = sources
            .into_iter()
            .map(|(block, reference_count)| (block, SharedToeplitzTables { key: None, reference_count }))
            .collect();
        written
    }

    /// Switches to a larger memory, to which the contents have been copied.
    pub fn grow(&mut self, memory: MmapArray<[u64]>, bytes: u32) {
        self.memory = memory;
        self.blocks.grow(bytes);
    }

    /// Returns the mapped memory.
    pub fn memory(&self) -> &MmapArray<[u64]> {
        &self.memory
    }

    /// Returns the generation of the table at `at`.
    pub fn generation(&self, at: u32) -> u64 {
        self.memory.load(field!(at, generation))
    }

    /// Reads the table at offset `at`, without its candidates and its groups' keys; `None`: `at` is 0, or the table has
    /// no members.
    pub fn read(&self, at: u32) -> Option<PlacementTable> {
        rule_bit(&self.memory, at)?;
        let header = self.memory.read::<intf::placement_table>(at as usize);
        let buckets = BucketCount::new(header.bucket_count.into()).ok()?;
        let id = |id: u16| ServerId::try_from(u64::from(id)).ok();
        let ids = |at: u32| self.memory.read_slice::<u16>(at as usize, buckets.get() as usize);
        let members =
            self.memory.read_slice::<intf::member>(header.members_offset as usize, header.member_count as usize);
        let member = |member: intf::member| Some(Member { server: id(member.server_id)?, load: member.load });
        Some(PlacementTable {
            generation: header.generation,
            members: members.into_iter().filter_map(member).collect(),
            consistent_servers: ids(header.consistent_at).into_iter().filter_map(id).collect(),
            previous_consistent_servers: ids(header.previous_consistent_offset).into_iter().map(id).collect(),
            down_servers: Vec::new(),
            ..PlacementTable::empty(buckets)
        })
    }

    /// Returns the initial counts of assigned connections in `next`. A core whose load is not newer keeps its count. A
    /// core with a newer load starts at 0, because the load includes earlier assignments (docs/policies.md).
    fn initial_assigned_counts(&self, before: Option<&StoredTable>, next: &PlacementTable) -> Vec<u32> {
        let Some(before) = before else { return vec![0; next.core_slots.len()] };
        before.core_slot_index.initial_counts(next, |slot| self.assigned_connections(before.offset(), slot))
    }

    /// Returns the number of connections that were assigned to a core slot of the table at offset `at`.
    pub fn assigned_connections(&self, at: u32, slot: u16) -> u32 {
        let assigned_offset = self.memory.word32(field!(at, assigned_offset)).load(Ordering::Relaxed) as usize;
        self.memory.word32(assigned_offset + usize::from(slot) * size_of::<u32>()).load(Ordering::Relaxed)
    }

    /// Writes a table that [`validate_table`] has accepted. `before` is the service's present table.
    pub fn write(
        &mut self,
        before: Option<&StoredTable>,
        hashing: ToeplitzSource,
        table: &PlacementTable,
        grace_periods: &GracePeriods,
    ) -> Result<StoredTable, MemoryFull> {
        self.reclaim(grace_periods);
        let mut layout = BlockLayout { bytes: HEADER_BYTES.next_multiple_of(8) };
        let consistent = layout.reserve::<u16>(table.consistent_servers.len());
        let previous_consistent = layout.reserve::<u16>(table.consistent_servers.len());
        let candidates = layout.reserve::<intf::candidate>(table.candidates.len());
        let members = layout.reserve::<intf::member>(table.members.len());
        let assigned = layout.reserve::<u32>(table.core_slots.len());
        let block = self.blocks.allocate(layout.bytes).ok_or(MemoryFull)?;
        let Ok(hashes) = self.acquire_group_hashes(before, hashing, table) else {
            self.blocks.free(block);
            return Err(MemoryFull);
        };
        let mut header = intf::placement_table {
            generation: table.generation,
            bucket_count: table.bucket_count.get(),
            group_count: hashes.len() as u32,
            candidates_per_bucket: table.candidates_per_bucket,
            assignment_cost: table.assignment_cost,
            member_count: table.members.len() as u32,
            rule: table.rule.number(),
            toeplitz_destination: [0; intf::MAX_RSS_GROUPS as usize],
            toeplitz_source_offset: [0; intf::MAX_RSS_GROUPS as usize],
            consistent_at: block.offset + consistent,
            previous_consistent_offset: block.offset + previous_consistent,
            candidates_at: block.offset + candidates,
            members_offset: block.offset + members,
            assigned_offset: block.offset + assigned,
            bytes: layout.bytes,
        };
        for (group, (source, destination)) in hashes.iter().enumerate() {
            header.toeplitz_destination[group] = *destination;
            header.toeplitz_source_offset[group] = source.offset;
        }
        let counts = self.initial_assigned_counts(before, table);
        self.memory.write(block.offset as usize, &header);
        self.write_lists(&header, table, counts);
        let rule = (!table.members.is_empty()).then(|| 1 << table.rule.number());
        let toeplitz_blocks = hashes.into_iter().map(|(source, _)| source).collect();
        Ok(StoredTable { block, toeplitz_blocks, core_slot_index: CoreSlotIndex::of(table), rule_bit: rule })
    }

    fn write_lists(&self, header: &intf::placement_table, table: &PlacementTable, mut counts: Vec<u32>) {
        let ids = |servers: &mut dyn Iterator<Item = u16>| {
            let mut ids: Vec<u16> = servers.collect();
            // `write` takes only whole words, of 4 ids each.
            ids.resize(ids.len().next_multiple_of(4), 0);
            ids
        };
        let consistent = ids(&mut table.consistent_servers.iter().map(|server| server.get()));
        self.memory.write(header.consistent_at as usize, consistent.as_slice());
        let nobody = intf::NO_SERVER as u16;
        let before = match table.previous_consistent_servers.as_slice() {
            [] => vec![nobody; consistent.len()],
            before => ids(&mut before.iter().map(|before| before.map_or(nobody, |server| server.get()))),
        };
        self.memory.write(header.previous_consistent_offset as usize, before.as_slice());
        let candidates: Vec<intf::candidate> = table
            .candidates
            .iter()
            .map(|c| intf::candidate { load: c.load, server_id: c.server.get(), core_slot: c.core_slot })
            .collect();
        self.memory.write(header.candidates_at as usize, candidates.as_slice());
        let members: Vec<intf::member> = table
            .members
            .iter()
            .map(|member| intf::member { load: member.load, server_id: member.server.get(), reserved: 0 })
            .collect();
        self.memory.write(header.members_offset as usize, members.as_slice());
        counts.resize(counts.len().next_multiple_of(2), 0);
        self.memory.write(header.assigned_offset as usize, counts.as_slice());
    }

    /// Returns the Toeplitz tables for source addresses and the hash of the destination, for each RSS group.
    fn acquire_group_hashes(
        &mut self,
        before: Option<&StoredTable>,
        hashing: ToeplitzSource,
        table: &PlacementTable,
    ) -> Result<Vec<(Block, u32)>, MemoryFull> {
        let vip = match (hashing, before) {
            (ToeplitzSource::Keys(vip), _) => vip,
            (ToeplitzSource::UnchangedMembers, None) => return Ok(Vec::new()),
            (ToeplitzSource::UnchangedMembers, Some(before)) => {
                let header = self.memory.read::<intf::placement_table>(before.offset() as usize);
                let first = before.toeplitz_blocks.first().map(|source| (*source, header.toeplitz_destination[0]));
                first.iter().for_each(|(source, _)| self.sources.entry(*source).or_default().reference_count += 1);
                return Ok(first.into_iter().collect());
            }
        };
        let mut hashes: Vec<(Block, u32)> = Vec::new();
        for key in &table.groups {
            let Ok(source) = self.acquire_toeplitz_block(key, vip) else {
                self.release_sources(&hashes.into_iter().map(|(source, _)| source).collect::<Vec<_>>());
                return Err(MemoryFull);
            };
            hashes.push((source, key.destination_hash(vip)));
        }
        Ok(hashes)
    }

    /// Returns the block with the Toeplitz tables of an RSS key. Placement tables with the same key share it; if the
    /// key has an input transform, only those of the same VIP do.
    fn acquire_toeplitz_block(&mut self, key: &RssKey, vip: SocketAddr) -> Result<Block, MemoryFull> {
        let family = Family::of(&vip);
        let source_key = (key.clone(), family, (key.input_transform() != InputTransform::None).then_some(vip));
        let block = match self.by_key.get(&source_key) {
            Some(block) => *block,
            None => {
                let block = self.blocks.allocate(family.source_bytes()).ok_or(MemoryFull)?;
                self.memory.write(block.offset as usize, key.source_tables(vip).as_slice());
                self.by_key.insert(source_key.clone(), block);
                self.sources.insert(block, SharedToeplitzTables { key: Some(source_key), reference_count: 0 });
                block
            }
        };
        self.sources.entry(block).or_default().reference_count += 1;
        Ok(block)
    }

    fn release_sources(&mut self, sources: &[Block]) {
        for block in sources {
            let Some(source) = self.sources.get_mut(block) else { continue };
            source.reference_count -= 1;
            if source.reference_count == 0 {
                if let Some(key) = self.sources.remove(block).and_then(|source| source.key) {
                    self.by_key.remove(&key);
                }
                self.blocks.free(*block);
            }
        }
    }

    /// Retires a replaced table. New program runs do not find it any more, but running programs may still read it.
    pub fn retire(&mut self, table: StoredTable, grace_periods: &GracePeriods) {
        self.retired.push_back((grace_periods.request(), table));
    }

    /// Frees the blocks of retired tables that no program reads any more.
    fn reclaim(&mut self, grace_periods: &GracePeriods) {
        while self.retired.front().is_some_and(|(moment, _)| grace_periods.has_passed(*moment)) {
            let Some((_, table)) = self.retired.pop_front() else { return };
            self.blocks.free(table.block);
            self.release_sources(&table.toeplitz_blocks);
        }
    }

    /// Returns the grace period ticket of the table that was retired last; `None`: no table is retired.
    pub fn last_retired(&self) -> Option<GraceTicket> {
        self.retired.back().map(|(moment, _)| *moment)
    }
}
