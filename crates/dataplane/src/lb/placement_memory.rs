//! Storage of [`PlacementTable`]s in the memory that the tables of all services share.
//!
//! Each placement table has its own block. The Toeplitz tables of an RSS key are in another block, which is shared by
//! all placement tables with that key. A block is reused one grace period after the last table in it was retired.

use std::collections::{HashMap, VecDeque};
use std::mem::offset_of;
use std::net::SocketAddr;
use std::sync::atomic::Ordering;

use coreward_intf as intf;
use coreward_model::ServerId;
use coreward_model::placement::{BucketCount, CoreSlotIndex, PlacementRule, PlacementTable, PlacementTableMember};
use coreward_model::rss::{RssInputTransform, RssKey};

use super::buddy_allocator::{AllocatedMemoryBlock, BuddyAllocator};
use crate::mmap_array::MmapArray;
use crate::rcu::{GracePeriodTicket, GracePeriodWaiter};

/// Error for a placement table that exceeds a limit of the data plane or is inconsistent.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum PlacementTableError {
    /// The table has no RSS groups, or too many.
    #[error("a table of {0} groups: expected 1 to {max}", max = intf::MAX_RSS_GROUPS)]
    InvalidRssGroupCount(usize),
    /// The table has too many candidates per bucket.
    #[error("{0} candidates per bucket: expected at most {max}", max = intf::MAX_CANDIDATES)]
    TooManyCandidatesPerBucket(u32),
    /// The number of candidates is not groups x buckets x candidates per bucket, or exceeds the limit.
    #[error(
        "{found} candidates: expected {expected} (groups x buckets x candidates per bucket), at most {max}",
        max = intf::MAX_TABLE_CANDIDATES
    )]
    WrongCandidateCount {
        /// Number of candidates in the table.
        found: usize,
        /// Number of candidates that follows from the numbers of groups and buckets.
        expected: usize,
    },
    /// The table has members but no candidates, although its placement rule selects among candidates.
    #[error("rule {0} without candidates")]
    NoCandidatesForRule(&'static str),
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
    /// The list of each bucket's consistent server does not have one entry per bucket. (Without members, it may be
    /// empty.)
    #[error("{found} consistent choices for {buckets} buckets")]
    WrongConsistentChoiceCount {
        /// Number of entries in the list of consistent servers.
        found: usize,
        /// Number of buckets.
        buckets: u32,
    },
}

/// Checks that the table is consistent and within the limits of the data plane.
pub(super) fn validate_table(table: &PlacementTable) -> Result<(), PlacementTableError> {
    let (groups, buckets, per_bucket) =
        (table.rss_key_by_group.len(), table.bucket_count.get(), table.candidates_per_bucket);
    if groups == 0 || groups > intf::MAX_RSS_GROUPS as usize {
        return Err(PlacementTableError::InvalidRssGroupCount(groups));
    }
    if per_bucket > intf::MAX_CANDIDATES {
        return Err(PlacementTableError::TooManyCandidatesPerBucket(per_bucket));
    }
    let expected_candidates = groups * buckets as usize * per_bucket as usize;
    if table.candidates.len() != expected_candidates || expected_candidates > intf::MAX_TABLE_CANDIDATES as usize {
        return Err(PlacementTableError::WrongCandidateCount {
            found: table.candidates.len(),
            expected: expected_candidates,
        });
    }
    let needs_candidates = matches!(table.rule, PlacementRule::Table | PlacementRule::LeastAssigned);
    if needs_candidates && expected_candidates == 0 && !table.members.is_empty() {
        return Err(PlacementTableError::NoCandidatesForRule(table.rule.name()));
    }
    let core_slot_count = table.core_slots.len();
    if core_slot_count > intf::MAX_CORE_SLOTS as usize {
        return Err(PlacementTableError::TooManyCoreSlots(core_slot_count));
    }
    if let Some(invalid_candidate) =
        table.candidates.iter().find(|candidate| usize::from(candidate.core_slot) >= core_slot_count)
    {
        return Err(PlacementTableError::UnknownCoreSlot { slot: invalid_candidate.core_slot, count: core_slot_count });
    }
    if table.members.len() > intf::MAX_MEMBERS as usize {
        return Err(PlacementTableError::TooManyMembers(table.members.len()));
    }
    let consistent_server_count = table.consistent_server_by_bucket.len();
    if consistent_server_count != buckets as usize && !(table.members.is_empty() && consistent_server_count == 0) {
        return Err(PlacementTableError::WrongConsistentChoiceCount { found: consistent_server_count, buckets });
    }
    let previous_consistent_server_count = table.previous_consistent_server_by_bucket.len();
    if previous_consistent_server_count != 0 && previous_consistent_server_count != consistent_server_count {
        return Err(PlacementTableError::WrongConsistentChoiceCount {
            found: previous_consistent_server_count,
            buckets,
        });
    }
    Ok(())
}

/// Error for a placement table for which the memory for placement tables has no free block that is large enough.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct PlacementMemoryFull;

/// Placement table that has been written to the memory for placement tables.
#[derive(Debug)]
pub(super) struct StoredPlacementTable {
    memory_block: AllocatedMemoryBlock,
    toeplitz_blocks: Vec<AllocatedMemoryBlock>,
    core_slot_index: CoreSlotIndex,
    /// Bit of the table's placement rule, or `None` if the table has no members.
    pub rule_bit: Option<u32>,
}

impl StoredPlacementTable {
    /// Returns the offset of the table in the memory for placement tables, in bytes.
    pub fn memory_offset(&self) -> u32 {
        self.memory_block.offset_bytes
    }
}

/// Origin of the Toeplitz tables that a new placement table uses.
#[derive(Debug, Clone, Copy)]
pub(super) enum ToeplitzTableSource {
    /// Toeplitz tables computed from the RSS keys of the new table's groups, with this VIP as the destination.
    RssKeysForVip(SocketAddr),
    /// Toeplitz tables of the first group in the service's present table.
    PresentPlacementTable,
}

/// Key of Toeplitz tables, which placement tables with the same key share. It contains the RSS key and the address
/// family. If the NIC combines source and destination before it hashes them, the key also contains the VIP.
type ToeplitzTableKey = (RssKey, AddressFamily, Option<SocketAddr>);

/// Address family of a service's VIP, which determines the size of its Toeplitz tables.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) enum AddressFamily {
    Ipv4,
    Ipv6,
}

impl AddressFamily {
    pub fn from_vip(vip: &SocketAddr) -> Self {
        if vip.is_ipv4() { Self::Ipv4 } else { Self::Ipv6 }
    }

    fn toeplitz_table_bytes(self) -> u32 {
        match self {
            Self::Ipv4 => size_of::<intf::toeplitz_source_tables>() as u32,
            Self::Ipv6 => size_of::<intf::toeplitz_source_tables_ipv6>() as u32,
        }
    }
}

/// Toeplitz tables of one RSS key, which several placement tables may use.
#[derive(Debug, Default)]
struct SharedToeplitzTables {
    /// Key of these Toeplitz tables, or `None` if it is unknown, because the tables were taken over.
    key: Option<ToeplitzTableKey>,
    /// Number of placement tables that use these Toeplitz tables.
    reference_count: usize,
}

/// Memory that holds the placement tables of all services.
#[derive(Debug)]
pub(super) struct PlacementMemory {
    mapped_memory: MmapArray<[u64]>,
    allocator: BuddyAllocator,
    toeplitz_tables_by_block: HashMap<AllocatedMemoryBlock, SharedToeplitzTables>,
    toeplitz_blocks_by_key: HashMap<ToeplitzTableKey, AllocatedMemoryBlock>,
    /// Replaced tables that programs may still read, from the oldest to the newest.
    retired_tables: VecDeque<(GracePeriodTicket, StoredPlacementTable)>,
}

const PLACEMENT_TABLE_HEADER_BYTES: u32 = size_of::<intf::placement_table>() as u32;

/// Returns the offset in bytes of a field in the table at offset `at`.
macro_rules! field {
    ($at:expr, $field:ident) => {
        $at as usize + offset_of!(intf::placement_table, $field)
    };
}

/// Splits a word into its lower and its upper 32 bits.
fn low_and_high_half(word: u64) -> (u32, u32) {
    (word as u32, (word >> 32) as u32)
}

/// Returns the bit of the placement rule of the table at offset `table_offset`. Returns `None` if `table_offset` is 0
/// (no table) or the table has no members.
pub(super) fn read_placement_rule_bit(memory: &MmapArray<[u64]>, table_offset: u32) -> Option<u32> {
    const { assert!(offset_of!(intf::placement_table, member_count) % 8 == 0) };
    const { assert!(offset_of!(intf::placement_table, rule) == offset_of!(intf::placement_table, member_count) + 4) };
    if table_offset == 0 {
        return None;
    }
    let (members, rule) = low_and_high_half(memory.load(field!(table_offset, member_count)));
    (members != 0).then_some(1 << rule)
}

/// Layout of a table's block, which consists of the header and lists. The offsets are in bytes from the block's start.
struct TableBlockLayout {
    consistent_servers_offset: u32,
    previous_servers_offset: u32,
    candidates_offset: u32,
    members_offset: u32,
    assigned_connection_counts_offset: u32,
    size_bytes: u32,
}

impl TableBlockLayout {
    fn for_table(table: &PlacementTable) -> Self {
        let mut size_bytes = PLACEMENT_TABLE_HEADER_BYTES.next_multiple_of(8);
        let consistent_servers_offset =
            reserve_list_space::<u16>(&mut size_bytes, table.consistent_server_by_bucket.len());
        let previous_servers_offset =
            reserve_list_space::<u16>(&mut size_bytes, table.consistent_server_by_bucket.len());
        let candidates_offset = reserve_list_space::<intf::candidate>(&mut size_bytes, table.candidates.len());
        let members_offset = reserve_list_space::<intf::member>(&mut size_bytes, table.members.len());
        let assigned_connection_counts_offset = reserve_list_space::<u32>(&mut size_bytes, table.core_slots.len());
        Self {
            consistent_servers_offset,
            previous_servers_offset,
            candidates_offset,
            members_offset,
            assigned_connection_counts_offset,
            size_bytes,
        }
    }

    /// Returns the header of a table with this layout whose block is at offset `block_offset`. `group_hashes` contains,
    /// for each RSS group, the block with its Toeplitz tables and the hash of the destination address.
    fn build_table_header(
        &self,
        table: &PlacementTable,
        block_offset: u32,
        group_hashes: &[(AllocatedMemoryBlock, u32)],
    ) -> intf::placement_table {
        let mut table_header = intf::placement_table {
            generation: table.generation,
            bucket_count: table.bucket_count.get(),
            group_count: group_hashes.len() as u32,
            candidates_per_bucket: table.candidates_per_bucket,
            assignment_cost: table.assignment_cost,
            member_count: table.members.len() as u32,
            rule: table.rule.bpf_number(),
            toeplitz_destination: [0; intf::MAX_RSS_GROUPS as usize],
            toeplitz_source_offset: [0; intf::MAX_RSS_GROUPS as usize],
            consistent_at: block_offset + self.consistent_servers_offset,
            previous_consistent_offset: block_offset + self.previous_servers_offset,
            candidates_at: block_offset + self.candidates_offset,
            members_offset: block_offset + self.members_offset,
            assigned_offset: block_offset + self.assigned_connection_counts_offset,
            bytes: self.size_bytes,
        };
        for (group, (toeplitz_block, destination_hash)) in group_hashes.iter().enumerate() {
            table_header.toeplitz_destination[group] = *destination_hash;
            table_header.toeplitz_source_offset[group] = toeplitz_block.offset_bytes;
        }
        table_header
    }
}

/// Extends a block of `block_bytes` bytes by space for `count` values of type `T`. Returns the offset of that space.
fn reserve_list_space<T>(block_bytes: &mut u32, count: usize) -> u32 {
    let list_offset = *block_bytes;
    *block_bytes += ((count * size_of::<T>()) as u32).next_multiple_of(8);
    list_offset
}

impl PlacementMemory {
    /// Creates an empty placement memory of `bytes` bytes.
    pub fn new(mapped_memory: MmapArray<[u64]>, bytes: u32) -> Self {
        let allocator = BuddyAllocator::new(bytes, []);
        Self {
            mapped_memory,
            allocator,
            toeplitz_tables_by_block: HashMap::new(),
            toeplitz_blocks_by_key: HashMap::new(),
            retired_tables: VecDeque::new(),
        }
    }

    /// Registers the tables that an earlier process has stored in the memory, and returns them. `tables_in_use`
    /// contains each table's offset and address family. The memory has `bytes` bytes.
    pub fn register_stored_tables(
        &mut self,
        bytes: u32,
        tables_in_use: &[(u32, AddressFamily)],
    ) -> Vec<StoredPlacementTable> {
        let mut reference_counts: HashMap<AllocatedMemoryBlock, usize> = HashMap::new();
        let read_table_header =
            |table_offset: u32| self.mapped_memory.read::<intf::placement_table>(table_offset as usize);
        let find_table_blocks = |(table_offset, family): &(u32, AddressFamily)| {
            let table_header = read_table_header(*table_offset);
            let group_count = (table_header.group_count as usize).min(intf::MAX_RSS_GROUPS as usize);
            let toeplitz_block = |block_offset: &u32| {
                AllocatedMemoryBlock::from_offset_and_size(*block_offset, family.toeplitz_table_bytes())
            };
            (
                *table_offset,
                table_header.bytes,
                table_header.toeplitz_source_offset[..group_count].iter().map(toeplitz_block).collect(),
            )
        };
        let blocks_by_table: Vec<(u32, u32, Vec<AllocatedMemoryBlock>)> =
            tables_in_use.iter().map(find_table_blocks).collect();
        for toeplitz_block in blocks_by_table.iter().flat_map(|(_, _, toeplitz_blocks)| toeplitz_blocks) {
            *reference_counts.entry(*toeplitz_block).or_default() += 1;
        }
        let used_ranges = blocks_by_table.iter().map(|(table_offset, bytes, _)| (*table_offset, *bytes));
        self.allocator = BuddyAllocator::new(
            bytes,
            used_ranges.chain(reference_counts.keys().map(|block| (block.offset_bytes, block.size_bytes()))),
        );
        let stored_tables = blocks_by_table.iter().map(|(table_offset, bytes, toeplitz_blocks)| StoredPlacementTable {
            memory_block: AllocatedMemoryBlock::from_offset_and_size(*table_offset, *bytes),
            toeplitz_blocks: toeplitz_blocks.clone(),
            core_slot_index: CoreSlotIndex::default(),
            rule_bit: read_placement_rule_bit(&self.mapped_memory, *table_offset),
        });
        let stored_tables = stored_tables.collect();
        self.toeplitz_tables_by_block = reference_counts
            .into_iter()
            .map(|(block, reference_count)| (block, SharedToeplitzTables { key: None, reference_count }))
            .collect();
        stored_tables
    }

    /// Switches to the larger `memory` of `bytes` bytes, into which the contents have already been copied.
    pub fn switch_to_larger_memory(&mut self, memory: MmapArray<[u64]>, bytes: u32) {
        self.mapped_memory = memory;
        self.allocator.grow(bytes);
    }

    pub fn mapped_memory(&self) -> &MmapArray<[u64]> {
        &self.mapped_memory
    }

    pub fn table_generation(&self, table_offset: u32) -> u64 {
        self.mapped_memory.load(field!(table_offset, generation))
    }

    /// Reads the table at offset `table_offset`, without its candidates and its groups' RSS keys. Returns `None` if
    /// `table_offset` is 0 (no table) or the table has no members.
    pub fn read_table(&self, table_offset: u32) -> Option<PlacementTable> {
        read_placement_rule_bit(&self.mapped_memory, table_offset)?;
        let header = self.mapped_memory.read::<intf::placement_table>(table_offset as usize);
        let bucket_count = BucketCount::new(header.bucket_count.into()).ok()?;
        let to_server_id = |id: u16| ServerId::try_from(u64::from(id)).ok();
        let read_ids =
            |list_offset: u32| self.mapped_memory.read_slice::<u16>(list_offset as usize, bucket_count.get() as usize);
        let read_members =
            self.mapped_memory.read_slice::<intf::member>(header.members_offset as usize, header.member_count as usize);
        let parse_member = |member: intf::member| {
            Some(PlacementTableMember { server: to_server_id(member.server_id)?, fixed_point_load: member.load })
        };
        Some(PlacementTable {
            generation: header.generation,
            members: read_members.into_iter().filter_map(parse_member).collect(),
            consistent_server_by_bucket: read_ids(header.consistent_at).into_iter().filter_map(to_server_id).collect(),
            previous_consistent_server_by_bucket: read_ids(header.previous_consistent_offset)
                .into_iter()
                .map(to_server_id)
                .collect(),
            down_servers: Vec::new(),
            ..PlacementTable::empty(bucket_count)
        })
    }

    /// Returns the initial numbers of connections assigned to the cores in `next_table`. A core whose load is not newer
    /// than in the previous table keeps its number. A core with a newer load starts at 0, because that load includes
    /// the connections assigned before (docs/policies.md).
    fn initial_assigned_connection_counts(
        &self,
        previous_table: Option<&StoredPlacementTable>,
        next_table: &PlacementTable,
    ) -> Vec<u32> {
        let Some(previous_table) = previous_table else { return vec![0; next_table.core_slots.len()] };
        previous_table.core_slot_index.initial_connection_counts(next_table, |slot| {
            self.assigned_connection_count(previous_table.memory_offset(), slot)
        })
    }

    /// Returns the number of connections assigned to a core slot in the table at offset `table_offset`.
    pub fn assigned_connection_count(&self, table_offset: u32, slot: u16) -> u32 {
        let counts_offset =
            self.mapped_memory.atomic_u32(field!(table_offset, assigned_offset)).load(Ordering::Relaxed) as usize;
        self.mapped_memory.atomic_u32(counts_offset + usize::from(slot) * size_of::<u32>()).load(Ordering::Relaxed)
    }

    /// Writes a table that [`validate_table`] has accepted. `previous_table` is the service's present table.
    pub fn write_table(
        &mut self,
        previous_table: Option<&StoredPlacementTable>,
        toeplitz_source: ToeplitzTableSource,
        table: &PlacementTable,
        grace_periods: &GracePeriodWaiter,
    ) -> Result<StoredPlacementTable, PlacementMemoryFull> {
        self.free_retired_tables(grace_periods);
        let block_layout = TableBlockLayout::for_table(table);
        let table_block = self.allocator.allocate(block_layout.size_bytes).ok_or(PlacementMemoryFull)?;
        let Ok(hashes) = self.acquire_rss_group_hashes(previous_table, toeplitz_source, table) else {
            self.allocator.free(table_block);
            return Err(PlacementMemoryFull);
        };
        let table_header = block_layout.build_table_header(table, table_block.offset_bytes, &hashes);
        let assigned_counts = self.initial_assigned_connection_counts(previous_table, table);
        self.mapped_memory.write(table_block.offset_bytes as usize, &table_header);
        self.write_table_lists(&table_header, table, assigned_counts);
        let rule_bit = (!table.members.is_empty()).then(|| 1 << table.rule.bpf_number());
        let toeplitz_blocks = hashes.into_iter().map(|(toeplitz_block, _)| toeplitz_block).collect();
        Ok(StoredPlacementTable {
            memory_block: table_block,
            toeplitz_blocks,
            core_slot_index: CoreSlotIndex::from_table(table),
            rule_bit,
        })
    }

    fn write_table_lists(&self, header: &intf::placement_table, table: &PlacementTable, mut assigned_counts: Vec<u32>) {
        let collect_padded_ids = |servers: &mut dyn Iterator<Item = u16>| {
            let mut server_ids: Vec<u16> = servers.collect();
            // `write` takes only whole words, each of which holds 4 ids.
            server_ids.resize(server_ids.len().next_multiple_of(4), 0);
            server_ids
        };
        let consistent_ids =
            collect_padded_ids(&mut table.consistent_server_by_bucket.iter().map(|server| server.get()));
        self.mapped_memory.write(header.consistent_at as usize, consistent_ids.as_slice());
        let no_server_id = intf::NO_SERVER as u16;
        let previous_ids = match table.previous_consistent_server_by_bucket.as_slice() {
            [] => vec![no_server_id; consistent_ids.len()],
            before => {
                collect_padded_ids(&mut before.iter().map(|before| before.map_or(no_server_id, |server| server.get())))
            }
        };
        self.mapped_memory.write(header.previous_consistent_offset as usize, previous_ids.as_slice());
        let bpf_candidates: Vec<intf::candidate> = table
            .candidates
            .iter()
            .map(|candidate| intf::candidate {
                load: candidate.fixed_point_load,
                server_id: candidate.server.get(),
                core_slot: candidate.core_slot,
            })
            .collect();
        self.mapped_memory.write(header.candidates_at as usize, bpf_candidates.as_slice());
        let bpf_members: Vec<intf::member> = table
            .members
            .iter()
            .map(|member| intf::member { load: member.fixed_point_load, server_id: member.server.get(), reserved: 0 })
            .collect();
        self.mapped_memory.write(header.members_offset as usize, bpf_members.as_slice());
        assigned_counts.resize(assigned_counts.len().next_multiple_of(2), 0);
        self.mapped_memory.write(header.assigned_offset as usize, assigned_counts.as_slice());
    }

    /// Returns, for each RSS group, the block with the Toeplitz tables for source addresses, and the destination's
    /// hash.
    fn acquire_rss_group_hashes(
        &mut self,
        previous_table: Option<&StoredPlacementTable>,
        toeplitz_source: ToeplitzTableSource,
        table: &PlacementTable,
    ) -> Result<Vec<(AllocatedMemoryBlock, u32)>, PlacementMemoryFull> {
        let vip = match (toeplitz_source, previous_table) {
            (ToeplitzTableSource::RssKeysForVip(vip), _) => vip,
            (ToeplitzTableSource::PresentPlacementTable, None) => return Ok(Vec::new()),
            (ToeplitzTableSource::PresentPlacementTable, Some(previous_table)) => {
                let previous_header =
                    self.mapped_memory.read::<intf::placement_table>(previous_table.memory_offset() as usize);
                let first_group = previous_table
                    .toeplitz_blocks
                    .first()
                    .map(|toeplitz_block| (*toeplitz_block, previous_header.toeplitz_destination[0]));
                first_group.iter().for_each(|(toeplitz_block, _)| {
                    self.toeplitz_tables_by_block.entry(*toeplitz_block).or_default().reference_count += 1
                });
                return Ok(first_group.into_iter().collect());
            }
        };
        let mut group_hashes: Vec<(AllocatedMemoryBlock, u32)> = Vec::new();
        for key in &table.rss_key_by_group {
            let Ok(toeplitz_block) = self.acquire_toeplitz_block(key, vip) else {
                self.release_toeplitz_blocks(
                    &group_hashes.into_iter().map(|(toeplitz_block, _)| toeplitz_block).collect::<Vec<_>>(),
                );
                return Err(PlacementMemoryFull);
            };
            group_hashes.push((toeplitz_block, key.destination_hash_part(vip)));
        }
        Ok(group_hashes)
    }

    /// Returns the block with the Toeplitz tables of an RSS key, and creates the block if it does not exist. Placement
    /// tables with the same key share the block. If the key transforms its input, only tables with the same VIP share
    /// it.
    fn acquire_toeplitz_block(
        &mut self,
        key: &RssKey,
        vip: SocketAddr,
    ) -> Result<AllocatedMemoryBlock, PlacementMemoryFull> {
        let address_family = AddressFamily::from_vip(&vip);
        let table_key =
            (key.clone(), address_family, (key.input_transform() != RssInputTransform::None).then_some(vip));
        let table_block = match self.toeplitz_blocks_by_key.get(&table_key) {
            Some(block) => *block,
            None => {
                let new_block =
                    self.allocator.allocate(address_family.toeplitz_table_bytes()).ok_or(PlacementMemoryFull)?;
                self.mapped_memory
                    .write(new_block.offset_bytes as usize, key.source_hash_contribution_tables(vip).as_slice());
                self.toeplitz_blocks_by_key.insert(table_key.clone(), new_block);
                self.toeplitz_tables_by_block
                    .insert(new_block, SharedToeplitzTables { key: Some(table_key), reference_count: 0 });
                new_block
            }
        };
        self.toeplitz_tables_by_block.entry(table_block).or_default().reference_count += 1;
        Ok(table_block)
    }

    fn release_toeplitz_blocks(&mut self, toeplitz_blocks: &[AllocatedMemoryBlock]) {
        for block in toeplitz_blocks {
            let Some(shared_tables) = self.toeplitz_tables_by_block.get_mut(block) else { continue };
            shared_tables.reference_count -= 1;
            if shared_tables.reference_count == 0 {
                if let Some(key) =
                    self.toeplitz_tables_by_block.remove(block).and_then(|shared_tables| shared_tables.key)
                {
                    self.toeplitz_blocks_by_key.remove(&key);
                }
                self.allocator.free(*block);
            }
        }
    }

    /// Retires a replaced table. Programs that start now no longer find it, but running programs may still read it.
    pub fn retire_table(&mut self, table: StoredPlacementTable, grace_periods: &GracePeriodWaiter) {
        self.retired_tables.push_back((grace_periods.request_ticket(), table));
    }

    /// Frees the blocks of retired tables that no running program can read.
    fn free_retired_tables(&mut self, grace_periods: &GracePeriodWaiter) {
        while self.retired_tables.front().is_some_and(|(ticket, _)| grace_periods.has_passed(*ticket)) {
            let Some((_, table)) = self.retired_tables.pop_front() else { return };
            self.allocator.free(table.memory_block);
            self.release_toeplitz_blocks(&table.toeplitz_blocks);
        }
    }

    /// Returns the grace period ticket of the table that was retired last, or `None` if no table is retired.
    pub fn last_retired_table_ticket(&self) -> Option<GracePeriodTicket> {
        self.retired_tables.back().map(|(ticket, _)| *ticket)
    }
}
