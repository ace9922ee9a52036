//! Memory of the connection table. It consists of two BPF maps, which the BPF program changes as well.

use std::mem::offset_of;
use std::os::fd::BorrowedFd;

use anyhow::Context as _;
use coreward_intf as intf;
use coreward_model::connection_table::table::{AtomicWordStorage, ConnectionTable, ConnectionTableWord};
use coreward_model::connection_table::{ConnectionIndex, ConnectionTableSize};

use crate::mmap_array::MmapArray;

#[derive(Debug)]
pub(super) struct SharedTableMemory {
    entries: MmapArray<[intf::connection]>,
    free_stacks: MmapArray<[intf::connection_stack]>,
    table_size: ConnectionTableSize,
}

/// Connection table in memory that is shared with the BPF program.
pub(super) type SharedConnectionTable = ConnectionTable<SharedTableMemory>;

impl SharedTableMemory {
    fn connection_entry_offset(&self, index: ConnectionIndex) -> usize {
        index.position(self.table_size) as usize * size_of::<intf::connection>()
    }

    fn partition_stack_top_offset(partition: u32) -> usize {
        partition as usize * size_of::<intf::connection_stack>() + offset_of!(intf::connection_stack, top)
    }

    fn partition_clock_hand_offset(partition: u32) -> usize {
        partition as usize * size_of::<intf::connection_stack>() + offset_of!(intf::connection_stack, hand)
    }
}

impl AtomicWordStorage for SharedTableMemory {
    fn load(&self, word: ConnectionTableWord) -> u64 {
        match word {
            ConnectionTableWord::PartitionStackTop(partition) => {
                self.free_stacks.load(Self::partition_stack_top_offset(partition))
            }
            ConnectionTableWord::PartitionClockHand(partition) => {
                self.free_stacks.load(Self::partition_clock_hand_offset(partition))
            }
            ConnectionTableWord::EntryWordAtOffset(index, field) => {
                self.entries.load(self.connection_entry_offset(index) + field)
            }
        }
    }

    fn store(&self, word: ConnectionTableWord, value: u64) {
        match word {
            ConnectionTableWord::PartitionStackTop(partition) => {
                self.free_stacks.store(Self::partition_stack_top_offset(partition), value)
            }
            ConnectionTableWord::PartitionClockHand(partition) => {
                self.free_stacks.store(Self::partition_clock_hand_offset(partition), value)
            }
            ConnectionTableWord::EntryWordAtOffset(index, field) => {
                self.entries.store(self.connection_entry_offset(index) + field, value)
            }
        }
    }

    fn compare_exchange(&self, word: ConnectionTableWord, old: u64, new: u64) -> bool {
        match word {
            ConnectionTableWord::PartitionStackTop(partition) => {
                self.free_stacks.compare_exchange(Self::partition_stack_top_offset(partition), old, new)
            }
            ConnectionTableWord::PartitionClockHand(partition) => {
                self.free_stacks.compare_exchange(Self::partition_clock_hand_offset(partition), old, new)
            }
            ConnectionTableWord::EntryWordAtOffset(index, field) => {
                self.entries.compare_exchange(self.connection_entry_offset(index) + field, old, new)
            }
        }
    }

    fn store_release(&self, word: ConnectionTableWord, value: u64) {
        self.store(word, value);
    }
}

/// Maps the two BPF maps of a connection table (entries, and stacks of free entries) into memory. Returns the table,
/// whose size is `size`.
pub(super) fn mmap_connection_table(
    entries: BorrowedFd<'_>,
    free_stacks: BorrowedFd<'_>,
    size: ConnectionTableSize,
) -> anyhow::Result<SharedConnectionTable> {
    let entries =
        MmapArray::mmap_slice(entries, size.entry_count() as usize).context("mapping the connection table")?;
    let free_stacks =
        MmapArray::mmap_slice(free_stacks, size.partition_count() as usize).context("mapping the free slots")?;
    Ok(ConnectionTable::new(SharedTableMemory { entries, free_stacks, table_size: size }, size))
}

pub(super) fn count_used_entries(table: &SharedConnectionTable) -> usize {
    table.size().entry_indexes().filter(|index| !table.is_entry_free(*index)).count()
}
