//! Buddy allocator whose blocks have 2^k bytes and begin at multiples of their size. It only computes offsets.

use std::collections::BTreeSet;

/// Size of the smallest block in bytes, which equals that of a cache line.
const MIN_BUDDY_BLOCK_BYTES: u32 = 64;

/// Allocated block of memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct AllocatedMemoryBlock {
    /// Offset of the block from the start of the memory, in bytes. It is never 0.
    pub offset_bytes: u32,
    /// Binary logarithm of the block's size in bytes.
    size_log2: u32,
}

impl AllocatedMemoryBlock {
    /// Returns the block that was allocated at `offset_bytes` for `bytes` bytes.
    pub fn from_offset_and_size(offset_bytes: u32, bytes: u32) -> Self {
        Self { offset_bytes, size_log2: block_size_log2(bytes) }
    }

    pub fn size_bytes(self) -> u32 {
        1 << self.size_log2
    }
}

fn block_size_log2(bytes: u32) -> u32 {
    bytes.max(MIN_BUDDY_BLOCK_BYTES).next_power_of_two().trailing_zeros()
}

#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct BuddyAllocator {
    /// Offsets of the free blocks, indexed by the binary logarithm of the blocks' size.
    free_offsets_by_size_log2: [BTreeSet<u32>; 32],
    memory_bytes: u32,
}

impl BuddyAllocator {
    /// Creates an allocator for a memory of `bytes` bytes, a power of two. The first block and the `used_ranges`
    /// (offset and size in bytes) count as allocated.
    pub fn new(bytes: u32, used_ranges: impl IntoIterator<Item = (u32, u32)>) -> Self {
        let mut allocator = Self { memory_bytes: bytes, ..Self::default() };
        let mut used_blocks: Vec<AllocatedMemoryBlock> = used_ranges
            .into_iter()
            .map(|(address, bytes)| AllocatedMemoryBlock::from_offset_and_size(address, bytes))
            .collect();
        used_blocks.push(AllocatedMemoryBlock::from_offset_and_size(0, MIN_BUDDY_BLOCK_BYTES));
        used_blocks.sort_unstable();
        used_blocks.dedup();
        let mut previous_end = 0;
        for block in used_blocks {
            allocator.free_memory_range(previous_end, block.offset_bytes);
            previous_end = previous_end.max(block.offset_bytes + block.size_bytes());
        }
        allocator.free_memory_range(previous_end, bytes);
        allocator
    }

    /// Grows the memory to `bytes` bytes, a power of two.
    pub fn grow(&mut self, bytes: u32) {
        let old_bytes = std::mem::replace(&mut self.memory_bytes, bytes);
        self.free_memory_range(old_bytes, bytes);
    }

    fn free_memory_range(&mut self, mut start: u32, end: u32) {
        while start < end {
            let max_aligned_log2 = if start == 0 { 31 } else { start.trailing_zeros() };
            let max_fitting_log2 = (end - start).ilog2();
            let size_log2 = max_aligned_log2.min(max_fitting_log2);
            self.free(AllocatedMemoryBlock { offset_bytes: start, size_log2 });
            start += 1 << size_log2;
        }
    }

    /// Allocates a block of at least `bytes` bytes. Returns `None` if no free block is large enough.
    pub fn allocate(&mut self, bytes: u32) -> Option<AllocatedMemoryBlock> {
        let needed_log2 = block_size_log2(bytes);
        let split_block_log2 =
            (needed_log2..32).find(|order| !self.free_offsets_by_size_log2[*order as usize].is_empty())?;
        let block_offset = self.free_offsets_by_size_log2[split_block_log2 as usize].pop_first()?;
        // A larger block is split, and its upper halves stay free.
        for half_log2 in needed_log2..split_block_log2 {
            self.free_offsets_by_size_log2[half_log2 as usize].insert(block_offset + (1 << half_log2));
        }
        Some(AllocatedMemoryBlock { offset_bytes: block_offset, size_log2: needed_log2 })
    }

    /// Frees a block and merges it with free neighbours.
    pub fn free(&mut self, block: AllocatedMemoryBlock) {
        let AllocatedMemoryBlock { offset_bytes: mut block_offset, size_log2: mut order } = block;
        loop {
            let buddy_offset = block_offset ^ 1 << order;
            if order >= 31 || !self.free_offsets_by_size_log2[order as usize].remove(&buddy_offset) {
                break;
            }
            block_offset &= !(1 << order);
            order += 1;
        }
        self.free_offsets_by_size_log2[order as usize].insert(block_offset);
    }

    #[cfg(test)]
    fn free_byte_count(&self) -> u64 {
        (0..32).map(|order| (self.free_offsets_by_size_log2[order].len() as u64) << order).sum()
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn first_block_is_never_allocated() {
        let mut allocator = BuddyAllocator::new(1024, []);
        let mut block_offsets: Vec<u32> =
            std::iter::from_fn(|| allocator.allocate(64)).map(|block| block.offset_bytes).collect();
        block_offsets.sort_unstable();
        assert_eq!(block_offsets, (1..16).map(|n| n * 64).collect::<Vec<_>>());
        assert_eq!(allocator.allocate(1), None);
        allocator.grow(2048);
        assert_eq!(allocator.allocate(1000).map(|block| block.offset_bytes), Some(1024));
    }

    proptest! {
        #[test]
        fn allocated_blocks_are_disjoint_and_can_all_be_freed(
            steps in prop::collection::vec((0u32..5000, any::<bool>(), any::<prop::sample::Index>()), 1..200),
        ) {
            let mut allocator = BuddyAllocator::new(1 << 16, []);
            let initial_allocator = allocator.clone();
            let mut allocated_blocks: Vec<(AllocatedMemoryBlock, u32)> = Vec::new();
            for (bytes, is_free_step, block_choice) in steps {
                if is_free_step && !allocated_blocks.is_empty() {
                    allocator.free(allocated_blocks.swap_remove(block_choice.index(allocated_blocks.len())).0);
                } else if let Some(block) = allocator.allocate(bytes) {
                    prop_assert!(block.offset_bytes > 0 && block.offset_bytes + bytes <= 1 << 16);
                    prop_assert!(1 << block.size_log2 >= bytes);
                    let is_disjoint = |(other, _): &(AllocatedMemoryBlock, u32)| {
                        block.offset_bytes + (1 << block.size_log2) <= other.offset_bytes
                            || other.offset_bytes + (1 << other.size_log2) <= block.offset_bytes
                    };
                    prop_assert!(allocated_blocks.iter().all(is_disjoint));
                    allocated_blocks.push((block, bytes));
                }
                let used_bytes: u64 = allocated_blocks.iter().map(|(block, _)| 1u64 << block.size_log2).sum();
                prop_assert_eq!(allocator.free_byte_count() + used_bytes, initial_allocator.free_byte_count());
            }
            // An allocator that is rebuilt from the used blocks, as after a take-over, has the same state.
            let rebuilt_allocator = BuddyAllocator::new(1 << 16,
                allocated_blocks.iter().map(|(block, bytes)| (block.offset_bytes, *bytes)));
            prop_assert_eq!(&rebuilt_allocator, &allocator);
            allocated_blocks.into_iter().for_each(|(block, _)| allocator.free(block));
            prop_assert_eq!(allocator, initial_allocator);
        }
    }
}
