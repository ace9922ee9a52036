//! Buddy allocator of blocks of 2^k bytes, each at a multiple of its size. It computes offsets, without a memory.

use std::collections::BTreeSet;

/// Size of the smallest block in bytes: a cache line.
const MIN_BLOCK_BYTES: u32 = 64;

/// Block of memory that is in use.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Block {
    /// Offset of the block from the start of the memory, in bytes; never 0.
    pub offset: u32,
    /// Binary logarithm of the size in bytes.
    order: u32,
}

impl Block {
    /// Returns the block at offset `at` that was allocated for `bytes` bytes.
    pub fn aligned(at: u32, bytes: u32) -> Self {
        Self { offset: at, order: order_of(bytes) }
    }

    /// Returns the block's size in bytes.
    pub fn bytes(self) -> u32 {
        1 << self.order
    }
}

fn order_of(bytes: u32) -> u32 {
    bytes.max(MIN_BLOCK_BYTES).next_power_of_two().trailing_zeros()
}

#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct BuddyAllocator {
    /// Offsets of the free blocks, indexed by the binary logarithm of their size.
    free: [BTreeSet<u32>; 32],
    bytes: u32,
}

impl BuddyAllocator {
    /// Creates an allocator of `bytes` bytes (a power of two). The first block and `used` (offset, size) are in use.
    pub fn new(bytes: u32, used: impl IntoIterator<Item = (u32, u32)>) -> Self {
        let mut blocks = Self { bytes, ..Self::default() };
        let mut used: Vec<Block> = used.into_iter().map(|(at, bytes)| Block::aligned(at, bytes)).collect();
        used.push(Block::aligned(0, MIN_BLOCK_BYTES));
        used.sort_unstable();
        used.dedup();
        let mut end = 0;
        for block in used {
            blocks.free_range(end, block.offset);
            end = end.max(block.offset + block.bytes());
        }
        blocks.free_range(end, bytes);
        blocks
    }

    /// Grows the memory to `bytes` bytes, a power of two.
    pub fn grow(&mut self, bytes: u32) {
        let old = std::mem::replace(&mut self.bytes, bytes);
        self.free_range(old, bytes);
    }

    /// Frees the bytes from `start` to `end`, exclusive.
    fn free_range(&mut self, mut start: u32, end: u32) {
        while start < end {
            let aligned = if start == 0 { 31 } else { start.trailing_zeros() };
            let fitting = (end - start).ilog2();
            let order = aligned.min(fitting);
            self.free(Block { offset: start, order });
            start += 1 << order;
        }
    }

    /// Allocates a block of at least `bytes` bytes; `None`: no free block is large enough.
    pub fn allocate(&mut self, bytes: u32) -> Option<Block> {
        let needed = order_of(bytes);
        let order = (needed..32).find(|order| !self.free[*order as usize].is_empty())?;
        let at = self.free[order as usize].pop_first()?;
        // The upper halves of a larger block stay free.
        for half in needed..order {
            self.free[half as usize].insert(at + (1 << half));
        }
        Some(Block { offset: at, order: needed })
    }

    /// Frees a block, and merges it with free neighbours.
    pub fn free(&mut self, block: Block) {
        let Block { offset: mut at, mut order } = block;
        loop {
            let buddy = at ^ 1 << order;
            if order >= 31 || !self.free[order as usize].remove(&buddy) {
                break;
            }
            at &= !(1 << order);
            order += 1;
        }
        self.free[order as usize].insert(at);
    }

    #[cfg(test)]
    fn free_bytes(&self) -> u64 {
        (0..32).map(|order| (self.free[order].len() as u64) << order).sum()
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn first_block_is_never_allocated() {
        let mut blocks = BuddyAllocator::new(1024, []);
        let mut places: Vec<u32> = std::iter::from_fn(|| blocks.allocate(64)).map(|block| block.offset).collect();
        places.sort_unstable();
        assert_eq!(places, (1..16).map(|n| n * 64).collect::<Vec<_>>());
        assert_eq!(blocks.allocate(1), None);
        blocks.grow(2048);
        assert_eq!(blocks.allocate(1000).map(|block| block.offset), Some(1024));
    }

    proptest! {
        #[test]
        fn blocks_never_overlap_and_nothing_is_lost(
            steps in prop::collection::vec((0u32..5000, any::<bool>(), any::<prop::sample::Index>()), 1..200),
        ) {
            let mut blocks = BuddyAllocator::new(1 << 16, []);
            let all = blocks.clone();
            let mut allocated: Vec<(Block, u32)> = Vec::new();
            for (bytes, free, which) in steps {
                if free && !allocated.is_empty() {
                    blocks.free(allocated.swap_remove(which.index(allocated.len())).0);
                } else if let Some(block) = blocks.allocate(bytes) {
                    prop_assert!(block.offset > 0 && block.offset + bytes <= 1 << 16 && 1 << block.order >= bytes);
                    let apart = |(other, _): &(Block, u32)| {
                        block.offset + (1 << block.order) <= other.offset
                            || other.offset + (1 << other.order) <= block.offset
                    };
                    prop_assert!(allocated.iter().all(apart));
                    allocated.push((block, bytes));
                }
                let used: u64 = allocated.iter().map(|(block, _)| 1u64 << block.order).sum();
                prop_assert_eq!(blocks.free_bytes() + used, all.free_bytes());
            }
            // An allocator from the same used blocks, as after a take-over, has the same state.
            let again = BuddyAllocator::new(1 << 16, allocated.iter().map(|(block, bytes)| (block.offset, *bytes)));
            prop_assert_eq!(&again, &blocks);
            allocated.into_iter().for_each(|(block, _)| blocks.free(block));
            prop_assert_eq!(blocks, all);
        }
    }
}
