//! Packets on several CPUs take entries of the connection table while user space frees other entries. Loom tries every
//! order of their steps, and all values that the memory model lets them read. Both sides are the code of
//! `model::connection_table::table`. User space runs that code; the code for packets equals `bpf/lb/connection_table.h`
//! line by line.

use std::collections::BTreeSet;
use std::net::{Ipv4Addr, SocketAddr};
use std::sync::atomic::AtomicU64 as PlainWord;

use coreward_intf as intf;
use coreward_model::ServerId;
use coreward_model::connection_table::table::{AtomicStorage, ConnectionTable, NewConnection, StorageCell, TakeError};
use coreward_model::connection_table::{
    ClockTicks, Connection, ConnectionHash, ConnectionIndex, EntryIdentity, TableSize,
};
use coreward_model::cookie::CookieKey;
use loom::sync::Arc;
use loom::sync::atomic::{AtomicU64, Ordering};
use loom::thread;

const SERVICE: u16 = 3;
const WORDS: usize = size_of::<intf::connection>() / 8;
/// Number of slots in use of the one partition. The number of orders that loom tries grows quickly with it.
const SLOT_COUNT: usize = 2;

/// Memory of a connection table. Shared words are loom's, so that each access is a separate step; others are plain.
struct LoomMemory {
    top: AtomicU64,
    /// Word of the clock hand: only a hint, on which no packet relies.
    hand: PlainWord,
    identity: [AtomicU64; SLOT_COUNT],
    port_flags_next: [AtomicU64; SLOT_COUNT],
    generation: [AtomicU64; SLOT_COUNT],
    rest: [[PlainWord; WORDS]; SLOT_COUNT],
    /// Stands for every word of the other slots: 0, as in a free slot.
    other: PlainWord,
    /// Mask of those bits of the stack's top by which states of the stack are distinguished.
    top_mask: u64,
}

enum Cell<'a> {
    Loom(&'a AtomicU64),
    Plain(&'a PlainWord),
}

impl LoomMemory {
    fn new(top_mask: u64) -> Self {
        let words = || std::array::from_fn(|_| AtomicU64::new(0));
        let rest = std::array::from_fn(|_| std::array::from_fn(|_| PlainWord::new(0)));
        let (top, hand) = (AtomicU64::new(0), PlainWord::new(0));
        Self {
            top,
            hand,
            identity: words(),
            port_flags_next: words(),
            generation: words(),
            rest,
            other: PlainWord::new(0),
            top_mask,
        }
    }

    fn cell(&self, word: StorageCell) -> Cell<'_> {
        const IDENTITY: usize = std::mem::offset_of!(intf::connection, identity);
        const PORT_FLAGS_NEXT: usize = std::mem::offset_of!(intf::connection, client_port);
        const GENERATION: usize = std::mem::offset_of!(intf::connection, generation);
        match word {
            StorageCell::StackTop(_) => Cell::Loom(&self.top),
            StorageCell::StackHand(_) => Cell::Plain(&self.hand),
            StorageCell::Entry(index, field) => {
                let slot = index.slot() as usize;
                match field {
                    _ if slot >= SLOT_COUNT => Cell::Plain(&self.other),
                    IDENTITY => Cell::Loom(&self.identity[slot]),
                    PORT_FLAGS_NEXT => Cell::Loom(&self.port_flags_next[slot]),
                    GENERATION => Cell::Loom(&self.generation[slot]),
                    _ => Cell::Plain(&self.rest[slot][field / 8]),
                }
            }
        }
    }
}

impl AtomicStorage for LoomMemory {
    fn load(&self, word: StorageCell) -> u64 {
        match self.cell(word) {
            Cell::Loom(cell) if matches!(word, StorageCell::StackTop(_)) => {
                cell.load(Ordering::Acquire) & self.top_mask
            }
            Cell::Loom(cell) => cell.load(Ordering::Acquire),
            Cell::Plain(cell) => cell.load(Ordering::Relaxed),
        }
    }

    fn store(&self, word: StorageCell, value: u64) {
        match self.cell(word) {
            Cell::Loom(cell) => cell.store(value, Ordering::Relaxed),
            Cell::Plain(cell) => cell.store(value, Ordering::Relaxed),
        }
    }

    fn compare_exchange(&self, word: StorageCell, old: u64, new: u64) -> bool {
        let Cell::Loom(cell) = self.cell(word) else { unreachable!("no plain word is exchanged") };
        let new = if matches!(word, StorageCell::StackTop(_)) { new & self.top_mask } else { new };
        cell.compare_exchange(old, new, Ordering::AcqRel, Ordering::Acquire).is_ok()
    }

    fn publish(&self, word: StorageCell, value: u64) {
        let Cell::Loom(cell) = self.cell(word) else { unreachable!("no plain word is published") };
        assert_eq!(cell.swap(value, Ordering::AcqRel), 0, "a slot was handed out that is in use");
    }
}

type Table = ConnectionTable<LoomMemory>;

fn size() -> TableSize {
    TableSize::try_from(u64::from(intf::CONNECTIONS_PER_PARTITION)).unwrap()
}

/// Returns a table with `free` free slots in its one partition, with slot 0 on top of the stack.
fn table(free: usize, top_mask: u64) -> Arc<Table> {
    let table = ConnectionTable::new(LoomMemory::new(top_mask), size());
    for slot in (0..free as u32).rev() {
        table.push(ConnectionIndex::new(0, slot));
    }
    Arc::new(table)
}

fn packet(client: u16) -> NewConnection {
    let address = SocketAddr::new(Ipv4Addr::new(10, 1, 0, 7).into(), client);
    let hash =
        ConnectionHash::new(&CookieKey { k0: 0x5d3c_91ab_04e7_aa13, k1: 0x0f1e_77c9_d2b4_5a61 }, SERVICE, address);
    NewConnection { hash, service: SERVICE, client: address, bytes: u64::from(client) }
}

fn server(client: u16) -> ServerId {
    ServerId::try_from(u64::from(client)).unwrap()
}

fn take(table: &Table, client: u16) -> Result<ConnectionIndex, TakeError> {
    table.take(&packet(client), server(client), ClockTicks(5))
}

fn identity(client: u16, generation: u16) -> EntryIdentity {
    EntryIdentity { tag: packet(client).hash.tag(), generation, service: SERVICE, server: server(client) }
}

/// Frees an entry as user space does. The grace period, which only keeps counters apart, is omitted.
fn free(table: &Table, index: ConnectionIndex, identity: EntryIdentity) -> bool {
    let released = table.release(index, identity);
    if released {
        table.push(index);
    }
    released
}

/// Checks that the entries of `taken` are in use, and that all other slots are on the stack exactly once.
fn check(table: &Table, taken: &[(u16, ConnectionIndex)]) {
    for (client, index) in taken {
        let connection = table.connection(*index).expect("it was taken");
        assert_eq!((connection.client.port(), connection.bytes), (*client, u64::from(*client)));
        assert_eq!(connection.identity.server, server(*client));
        assert_eq!(table.find(packet(*client).hash, index.slot(), SERVICE), Some((*index, server(*client))));
    }
    let on_stack = table.free_slots(0);
    let slots = taken.iter().map(|(_, index)| *index).chain(on_stack.iter().copied());
    let distinct: BTreeSet<_> = slots.clone().collect();
    assert_eq!((slots.count(), distinct.len()), (SLOT_COUNT, SLOT_COUNT), "taken {taken:?}, free {on_stack:?}");
}

const WHOLE_TOP: u64 = u64::MAX;

#[test]
fn concurrent_packets_and_user_space_neither_lose_nor_duplicate_slots() {
    loom::model(|| {
        let table = table(SLOT_COUNT, WHOLE_TOP);
        let first = take(&table, 1).unwrap();
        let others = [2, 3].map(|client| {
            let table = table.clone();
            thread::spawn(move || (client, take(&table, client)))
        });
        assert!(free(&table, first, identity(1, 0)));
        let mut taken = Vec::new();
        for (client, outcome) in others.map(|other| other.join().unwrap()) {
            match outcome {
                Ok(index) => taken.push((client, index)),
                Err(TakeError::Full) => {}
                Err(TakeError::Contended) => panic!("three changes cannot spoil eight attempts"),
            }
        }
        assert!(!taken.is_empty(), "one slot was free all the time");
        check(&table, &taken);
    });
}

/// Provokes the ABA problem: one packet reads the top and sleeps. Meanwhile the same slot is taken, freed and on top
/// again, but with another slot below.
fn check_slot_back_on_top(top_mask: u64) {
    loom::model(move || {
        let table = table(SLOT_COUNT, top_mask);
        let slow = {
            let table = table.clone();
            thread::spawn(move || take(&table, 1))
        };
        let mut taken = Vec::new();
        let quick = take(&table, 2);
        taken.extend(take(&table, 3).ok().map(|index| (3, index)));
        if let Ok(index) = quick {
            assert!(free(&table, index, identity(2, 0)));
        }
        taken.extend(take(&table, 4).ok().map(|index| (4, index)));
        taken.extend(slow.join().unwrap().ok().map(|index| (1, index)));
        check(&table, &taken);
    });
}

#[test]
fn free_list_has_no_aba_problem() {
    check_slot_back_on_top(WHOLE_TOP);
}

/// Without the change count, the test above must find the fault.
#[test]
#[should_panic(expected = "a slot was handed out that is in use")]
fn slot_is_allocated_twice_without_the_change_count() {
    check_slot_back_on_top(u64::from(intf::CONNECTION_STACK_SLOT_MASK));
}

#[test]
fn reader_never_finds_the_server_of_another_connection() {
    loom::model(|| {
        let table = table(1, WHOLE_TOP);
        let index = take(&table, 1).unwrap();
        let reader = {
            let table = table.clone();
            thread::spawn(move || {
                for client in [1, 2] {
                    let found = table.find(packet(client).hash, index.slot(), SERVICE);
                    assert!(found.is_none_or(|(_, found)| found == server(client)));
                }
            })
        };
        assert!(free(&table, index, identity(1, 0)));
        assert_eq!(take(&table, 2), Ok(index));
        assert_eq!(table.connection(index).unwrap().identity, identity(2, 1), "the generation grew");
        reader.join().unwrap();
    });
}

#[test]
fn concurrent_free_of_an_entry_succeeds_once() {
    loom::model(|| {
        let table = table(SLOT_COUNT, WHOLE_TOP);
        let index = take(&table, 1).unwrap();
        let other = {
            let table = table.clone();
            thread::spawn(move || free(&table, index, identity(1, 0)))
        };
        let freed = [free(&table, index, identity(1, 0)), other.join().unwrap()];
        assert_eq!(freed.iter().filter(|freed| **freed).count(), 1);
        check(&table, &[]);
        // A late caller does not free the entry's next connection either, even if it belongs to the same client.
        assert_eq!(take(&table, 1), Ok(index));
        assert!(!free(&table, index, identity(1, 0)));
    });
}

/// Lets a packet reuse the one slot in use, whose entry has expired, while `other` acts. Returns the results of both.
fn reuse_beside<T>(other: impl Fn(&Table, ConnectionIndex) -> Option<T>) -> (Option<ConnectionIndex>, Option<T>) {
    let table = table(1, WHOLE_TOP);
    let index = take(&table, 1).unwrap();
    let packet = {
        let table = table.clone();
        thread::spawn(move || reuse(&table, 2))
    };
    let by_other = other(&table, index);
    let reused = packet.join().unwrap();
    if reused.is_some() {
        assert_eq!(table.connection(index).unwrap().identity, identity(2, 1), "the generation grew");
    }
    (reused, by_other)
}

/// Lets client `client` reuse the slot of client 1, whose entry has expired.
fn reuse(table: &Table, client: u16) -> Option<ConnectionIndex> {
    let is_first = |connection: &Connection| connection.client.port() == 1;
    table.reuse(&packet(client), server(client), ClockTicks(5), is_first).map(|(index, _)| index)
}

#[test]
fn expired_entry_is_reused_by_one_of_two_packets() {
    loom::model(|| {
        let (first, second) = reuse_beside(|table, _| reuse(table, 3));
        assert!(first.is_none() || second.is_none(), "{first:?}, {second:?}");
    });
}

#[test]
fn expired_entry_is_either_reused_or_freed() {
    loom::model(|| {
        let (reused, freed) = reuse_beside(|table, index| table.release(index, identity(1, 0)).then_some(()));
        assert!(reused.is_some() != freed.is_some(), "{reused:?}, {freed:?}");
    });
}
