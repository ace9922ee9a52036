//! Lets packets on several CPUs take entries of the connection table while user space frees other entries. Loom tries
//! every order of their steps, and all values that the memory model lets them read. Both sides run
//! `model::connection_table::table`, whose code for packets equals `bpf/lb/connection_table.h` line by line.

use std::collections::BTreeSet;
use std::net::{Ipv4Addr, SocketAddr};
use std::sync::atomic::AtomicU64 as PlainWord;

use coreward_intf as intf;
use coreward_model::ServerId;
use coreward_model::connection_table::table::{
    AtomicWordStorage, ConnectionSlotError, ConnectionTable, ConnectionTableWord, NewConnection,
};
use coreward_model::connection_table::{
    ConnectionEntry, ConnectionHash, ConnectionIndex, ConnectionTableSize, DecisecondTicks, TableEntryIdentity,
};
use coreward_model::cookie::CookieKey;
use loom::sync::Arc;
use loom::sync::atomic::{AtomicU64, Ordering};
use loom::thread;

const SERVICE_SLOT: u16 = 3;
const WORDS_PER_CONNECTION_ENTRY: usize = size_of::<intf::connection>() / 8;
/// Number of usable slots in the table's one partition. The number of orders that loom tries grows quickly with it.
const USABLE_SLOT_COUNT: usize = 2;

/// Memory of a connection table. Shared words are loom's, so that each access is a separate step. Other words are plain
/// integers.
struct LoomTableMemory {
    stack_top: AtomicU64,
    /// Word of the clock hand, which is plain because packets use it only as a hint.
    clock_hand: PlainWord,
    identity_words: [AtomicU64; USABLE_SLOT_COUNT],
    port_flags_next_words: [AtomicU64; USABLE_SLOT_COUNT],
    generation_words: [AtomicU64; USABLE_SLOT_COUNT],
    plain_entry_words: [[PlainWord; WORDS_PER_CONNECTION_ENTRY]; USABLE_SLOT_COUNT],
    /// Value of every word of the unusable slots, which is 0 as in a free slot.
    unused_slot_word: PlainWord,
    /// Mask of the stack top's bits that the test keeps. If it omits the bits of the change count, the ABA problem
    /// occurs.
    stack_top_mask: u64,
}

enum TableWordRef<'a> {
    LoomWord(&'a AtomicU64),
    UnsharedWord(&'a PlainWord),
}

impl LoomTableMemory {
    fn new(stack_top_mask: u64) -> Self {
        let new_loom_words = || std::array::from_fn(|_| AtomicU64::new(0));
        let plain_entry_words = std::array::from_fn(|_| std::array::from_fn(|_| PlainWord::new(0)));
        let (stack_top, clock_hand) = (AtomicU64::new(0), PlainWord::new(0));
        Self {
            stack_top,
            clock_hand,
            identity_words: new_loom_words(),
            port_flags_next_words: new_loom_words(),
            generation_words: new_loom_words(),
            plain_entry_words,
            unused_slot_word: PlainWord::new(0),
            stack_top_mask,
        }
    }

    fn word_ref(&self, table_word: ConnectionTableWord) -> TableWordRef<'_> {
        const IDENTITY_OFFSET: usize = std::mem::offset_of!(intf::connection, identity);
        const PORT_FLAGS_NEXT_OFFSET: usize = std::mem::offset_of!(intf::connection, client_port);
        const GENERATION_OFFSET: usize = std::mem::offset_of!(intf::connection, generation);
        match table_word {
            ConnectionTableWord::PartitionStackTop(_) => TableWordRef::LoomWord(&self.stack_top),
            ConnectionTableWord::PartitionClockHand(_) => TableWordRef::UnsharedWord(&self.clock_hand),
            ConnectionTableWord::EntryWordAtOffset(index, field_offset) => {
                let slot = index.slot() as usize;
                match field_offset {
                    _ if slot >= USABLE_SLOT_COUNT => TableWordRef::UnsharedWord(&self.unused_slot_word),
                    IDENTITY_OFFSET => TableWordRef::LoomWord(&self.identity_words[slot]),
                    PORT_FLAGS_NEXT_OFFSET => TableWordRef::LoomWord(&self.port_flags_next_words[slot]),
                    GENERATION_OFFSET => TableWordRef::LoomWord(&self.generation_words[slot]),
                    _ => TableWordRef::UnsharedWord(&self.plain_entry_words[slot][field_offset / 8]),
                }
            }
        }
    }
}

impl AtomicWordStorage for LoomTableMemory {
    fn load(&self, table_word: ConnectionTableWord) -> u64 {
        match self.word_ref(table_word) {
            TableWordRef::LoomWord(cell) if matches!(table_word, ConnectionTableWord::PartitionStackTop(_)) => {
                cell.load(Ordering::Acquire) & self.stack_top_mask
            }
            TableWordRef::LoomWord(cell) => cell.load(Ordering::Acquire),
            TableWordRef::UnsharedWord(cell) => cell.load(Ordering::Relaxed),
        }
    }

    fn store(&self, table_word: ConnectionTableWord, value: u64) {
        match self.word_ref(table_word) {
            TableWordRef::LoomWord(cell) => cell.store(value, Ordering::Relaxed),
            TableWordRef::UnsharedWord(cell) => cell.store(value, Ordering::Relaxed),
        }
    }

    fn compare_exchange(&self, table_word: ConnectionTableWord, old: u64, new: u64) -> bool {
        let TableWordRef::LoomWord(cell) = self.word_ref(table_word) else {
            unreachable!("no plain word is exchanged")
        };
        let new = if matches!(table_word, ConnectionTableWord::PartitionStackTop(_)) {
            new & self.stack_top_mask
        } else {
            new
        };
        cell.compare_exchange(old, new, Ordering::AcqRel, Ordering::Acquire).is_ok()
    }

    fn store_release(&self, table_word: ConnectionTableWord, value: u64) {
        let TableWordRef::LoomWord(cell) = self.word_ref(table_word) else {
            unreachable!("no plain word is published")
        };
        assert_eq!(cell.swap(value, Ordering::AcqRel), 0, "a slot was handed out that is in use");
    }
}

type LoomConnectionTable = ConnectionTable<LoomTableMemory>;

fn table_size() -> ConnectionTableSize {
    ConnectionTableSize::try_from(u64::from(intf::CONNECTIONS_PER_PARTITION)).unwrap()
}

/// Returns a table with `free_slot_count` free slots in its one partition, of which slot 0 is on top of the stack.
fn table_with_free_slots(free_slot_count: usize, stack_top_mask: u64) -> Arc<LoomConnectionTable> {
    let table = ConnectionTable::new(LoomTableMemory::new(stack_top_mask), table_size());
    for slot in (0..free_slot_count as u32).rev() {
        table.push_free_slot(ConnectionIndex::new(0, slot));
    }
    Arc::new(table)
}

fn new_connection(client_port: u16) -> NewConnection {
    let client_socket = SocketAddr::new(Ipv4Addr::new(10, 1, 0, 7).into(), client_port);
    let hash = ConnectionHash::new(
        &CookieKey { k0: 0x5d3c_91ab_04e7_aa13, k1: 0x0f1e_77c9_d2b4_5a61 },
        SERVICE_SLOT,
        client_socket,
    );
    NewConnection { hash, service_slot: SERVICE_SLOT, client: client_socket, frame_bytes: u64::from(client_port) }
}

fn server_of_client(client_port: u16) -> ServerId {
    ServerId::try_from(u64::from(client_port)).unwrap()
}

fn take_slot(table: &LoomConnectionTable, client_port: u16) -> Result<ConnectionIndex, ConnectionSlotError> {
    table.take_slot(&new_connection(client_port), server_of_client(client_port), DecisecondTicks(5))
}

fn entry_identity_of_client(client_port: u16, generation: u16) -> TableEntryIdentity {
    TableEntryIdentity {
        tag: new_connection(client_port).hash.entry_tag(),
        generation,
        service_slot: SERVICE_SLOT,
        server: server_of_client(client_port),
    }
}

/// Frees an entry as user space does, and returns whether it was freed. Omits the grace period, which only separates
/// the counters of the slot's old and next connection.
fn free_entry(table: &LoomConnectionTable, index: ConnectionIndex, identity: TableEntryIdentity) -> bool {
    let is_released = table.release_entry(index, identity);
    if is_released {
        table.push_free_slot(index);
    }
    is_released
}

/// Checks that the entries of `taken_slots` are in use, and that every other slot is on the stack exactly once.
fn assert_slots_are_consistent(table: &LoomConnectionTable, taken_slots: &[(u16, ConnectionIndex)]) {
    for (client, index) in taken_slots {
        let entry = table.connection_at(*index).expect("it was taken");
        assert_eq!((entry.client.port(), entry.byte_count), (*client, u64::from(*client)));
        assert_eq!(entry.identity.server, server_of_client(*client));
        assert_eq!(
            table.find_connection(new_connection(*client).hash, index.slot(), SERVICE_SLOT),
            Some((*index, server_of_client(*client)))
        );
    }
    let stack_slots = table.free_slot_indexes(0);
    let all_slots = taken_slots.iter().map(|(_, index)| *index).chain(stack_slots.iter().copied());
    let distinct_slots: BTreeSet<_> = all_slots.clone().collect();
    assert_eq!(
        (all_slots.count(), distinct_slots.len()),
        (USABLE_SLOT_COUNT, USABLE_SLOT_COUNT),
        "taken {taken_slots:?}, free {stack_slots:?}"
    );
}

const FULL_STACK_TOP_MASK: u64 = u64::MAX;

#[test]
fn slots_are_neither_lost_nor_duplicated_by_concurrent_accesses() {
    loom::model(|| {
        let table = table_with_free_slots(USABLE_SLOT_COUNT, FULL_STACK_TOP_MASK);
        let first_index = take_slot(&table, 1).unwrap();
        let packet_threads = [2, 3].map(|client| {
            let table = table.clone();
            thread::spawn(move || (client, take_slot(&table, client)))
        });
        assert!(free_entry(&table, first_index, entry_identity_of_client(1, 0)));
        let mut taken_slots = Vec::new();
        for (client, take_result) in packet_threads.map(|thread_handle| thread_handle.join().unwrap()) {
            match take_result {
                Ok(index) => taken_slots.push((client, index)),
                Err(ConnectionSlotError::PartitionFull) => {}
                Err(ConnectionSlotError::Contended) => panic!("three changes cannot spoil eight attempts"),
            }
        }
        assert!(!taken_slots.is_empty(), "one slot was free all the time");
        assert_slots_are_consistent(&table, &taken_slots);
    });
}

/// Provokes the ABA problem. One packet reads the stack's top and is delayed. Meanwhile, the same slot is taken, freed
/// and pushed as the top again, but with another slot below.
fn provoke_aba_problem(stack_top_mask: u64) {
    loom::model(move || {
        let table = table_with_free_slots(USABLE_SLOT_COUNT, stack_top_mask);
        let delayed_packet_thread = {
            let table = table.clone();
            thread::spawn(move || take_slot(&table, 1))
        };
        let mut taken_slots = Vec::new();
        let quick_packet_result = take_slot(&table, 2);
        taken_slots.extend(take_slot(&table, 3).ok().map(|index| (3, index)));
        if let Ok(index) = quick_packet_result {
            assert!(free_entry(&table, index, entry_identity_of_client(2, 0)));
        }
        taken_slots.extend(take_slot(&table, 4).ok().map(|index| (4, index)));
        taken_slots.extend(delayed_packet_thread.join().unwrap().ok().map(|index| (1, index)));
        assert_slots_are_consistent(&table, &taken_slots);
    });
}

#[test]
fn change_count_prevents_the_aba_problem() {
    provoke_aba_problem(FULL_STACK_TOP_MASK);
}

/// Without the change count, a slot is taken twice, and the test above must detect this.
#[test]
#[should_panic(expected = "a slot was handed out that is in use")]
fn slot_is_taken_twice_without_the_change_count() {
    provoke_aba_problem(u64::from(intf::CONNECTION_STACK_SLOT_MASK));
}

#[test]
fn reader_never_finds_the_server_of_another_connection() {
    loom::model(|| {
        let table = table_with_free_slots(1, FULL_STACK_TOP_MASK);
        let index = take_slot(&table, 1).unwrap();
        let reader_thread = {
            let table = table.clone();
            thread::spawn(move || {
                for client in [1, 2] {
                    let find_result = table.find_connection(new_connection(client).hash, index.slot(), SERVICE_SLOT);
                    assert!(find_result.is_none_or(|(_, server)| server == server_of_client(client)));
                }
            })
        };
        assert!(free_entry(&table, index, entry_identity_of_client(1, 0)));
        assert_eq!(take_slot(&table, 2), Ok(index));
        assert_eq!(table.connection_at(index).unwrap().identity, entry_identity_of_client(2, 1), "the generation grew");
        reader_thread.join().unwrap();
    });
}

#[test]
fn only_one_of_two_concurrent_frees_of_an_entry_succeeds() {
    loom::model(|| {
        let table = table_with_free_slots(USABLE_SLOT_COUNT, FULL_STACK_TOP_MASK);
        let index = take_slot(&table, 1).unwrap();
        let second_thread = {
            let table = table.clone();
            thread::spawn(move || free_entry(&table, index, entry_identity_of_client(1, 0)))
        };
        let free_results = [free_entry(&table, index, entry_identity_of_client(1, 0)), second_thread.join().unwrap()];
        assert_eq!(free_results.iter().filter(|is_freed| **is_freed).count(), 1);
        assert_slots_are_consistent(&table, &[]);
        // A late caller does not free the entry's next connection either, even if it belongs to the same client.
        assert_eq!(take_slot(&table, 1), Ok(index));
        assert!(!free_entry(&table, index, entry_identity_of_client(1, 0)));
    });
}

/// Lets a packet reuse the only used slot, whose entry has expired, while `other_operation` runs. Returns the results
/// of both.
fn reuse_slot_during_other_operation<T>(
    other_operation: impl Fn(&LoomConnectionTable, ConnectionIndex) -> Option<T>,
) -> (Option<ConnectionIndex>, Option<T>) {
    let table = table_with_free_slots(1, FULL_STACK_TOP_MASK);
    let index = take_slot(&table, 1).unwrap();
    let packet_thread = {
        let table = table.clone();
        thread::spawn(move || reuse_expired_slot(&table, 2))
    };
    let other_result = other_operation(&table, index);
    let reused_index = packet_thread.join().unwrap();
    if reused_index.is_some() {
        assert_eq!(table.connection_at(index).unwrap().identity, entry_identity_of_client(2, 1), "the generation grew");
    }
    (reused_index, other_result)
}

/// Lets the client with port `client_port` reuse the slot of client 1, whose entry counts as expired.
fn reuse_expired_slot(table: &LoomConnectionTable, client_port: u16) -> Option<ConnectionIndex> {
    let is_of_client_1 = |connection: &ConnectionEntry| connection.client.port() == 1;
    table
        .reuse_expired_slot(
            &new_connection(client_port),
            server_of_client(client_port),
            DecisecondTicks(5),
            is_of_client_1,
        )
        .map(|(index, _)| index)
}

#[test]
fn expired_entry_is_reused_by_at_most_one_packet() {
    loom::model(|| {
        let (first, second) = reuse_slot_during_other_operation(|table, _| reuse_expired_slot(table, 3));
        assert!(first.is_none() || second.is_none(), "{first:?}, {second:?}");
    });
}

#[test]
fn expired_entry_is_either_reused_or_freed() {
    loom::model(|| {
        let (reused_index, release_result) = reuse_slot_during_other_operation(|table, index| {
            table.release_entry(index, entry_identity_of_client(1, 0)).then_some(())
        });
        assert!(reused_index.is_some() != release_result.is_some(), "{reused_index:?}, {release_result:?}");
    });
}
