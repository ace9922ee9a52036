//! Memory of the connection table: two BPF maps, which the program changes as well.

use std::mem::offset_of;
use std::os::fd::BorrowedFd;

use anyhow::Context as _;
use coreward_intf as intf;
use coreward_model::connection_table::table::{AtomicStorage, ConnectionTable, StorageCell};
use coreward_model::connection_table::{ConnectionIndex, TableSize};

use crate::mmap_array::MmapArray;

#[derive(Debug)]
pub(super) struct SharedMemory {
    entries: MmapArray<[intf::connection]>,
    /// Stack of each partition's free entries.
    free_stacks: MmapArray<[intf::connection_stack]>,
    size: TableSize,
}

/// Connection table in memory that is shared with the BPF program.
pub(super) type SharedConnectionTable = ConnectionTable<SharedMemory>;

impl SharedMemory {
    fn offset_of_entry(&self, index: ConnectionIndex) -> usize {
        index.position(self.size) as usize * size_of::<intf::connection>()
    }

    fn stack_top_offset(partition: u32) -> usize {
        partition as usize * size_of::<intf::connection_stack>() + offset_of!(intf::connection_stack, top)
    }

    fn clock_hand_offset(partition: u32) -> usize {
        partition as usize * size_of::<intf::connection_stack>() + offset_of!(intf::connection_stack, hand)
    }
}

impl AtomicStorage for SharedMemory {
    fn load(&self, word: StorageCell) -> u64 {
        match word {
            StorageCell::StackTop(partition) => self.free_stacks.load(Self::stack_top_offset(partition)),
            StorageCell::StackHand(partition) => self.free_stacks.load(Self::clock_hand_offset(partition)),
            StorageCell::Entry(index, field) => self.entries.load(self.offset_of_entry(index) + field),
        }
    }

    fn store(&self, word: StorageCell, value: u64) {
        match word {
            StorageCell::StackTop(partition) => self.free_stacks.store(Self::stack_top_offset(partition), value),
            StorageCell::StackHand(partition) => self.free_stacks.store(Self::clock_hand_offset(partition), value),
            StorageCell::Entry(index, field) => self.entries.store(self.offset_of_entry(index) + field, value),
        }
    }

    fn compare_exchange(&self, word: StorageCell, old: u64, new: u64) -> bool {
        match word {
            StorageCell::StackTop(partition) => {
                self.free_stacks.compare_exchange(Self::stack_top_offset(partition), old, new)
            }
            StorageCell::StackHand(partition) => {
                self.free_stacks.compare_exchange(Self::clock_hand_offset(partition), old, new)
            }
            StorageCell::Entry(index, field) => {
                self.entries.compare_exchange(self.offset_of_entry(index) + field, old, new)
            }
        }
    }

    fn publish(&self, word: StorageCell, value: u64) {
        self.store(word, value);
    }
}

/// Maps the memory of the entries and the free stacks. Returns the connection table of `size` in that memory.
pub(super) fn map(
    entries: BorrowedFd<'_>,
    free_stacks: BorrowedFd<'_>,
    size: TableSize,
) -> anyhow::Result<SharedConnectionTable> {
    let entries = MmapArray::new_slice(entries, size.entry_count() as usize).context("mapping the connection table")?;
    let free_stacks =
        MmapArray::new_slice(free_stacks, size.partition_count() as usize).context("mapping the free slots")?;
    Ok(ConnectionTable::new(SharedMemory { entries, free_stacks, size }, size))
}

/// Returns the number of connection table entries in use.
pub(super) fn count_used(table: &SharedConnectionTable) -> usize {
    table.size().indexes().filter(|index| !table.is_free(*index)).count()
}
