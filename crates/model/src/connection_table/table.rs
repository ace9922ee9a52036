//! Operations that packets and user space perform on the connection table.
//!
//! This code has three users. User space of the data plane frees entries in the memory that it shares with the BPF
//! program. The reference model of the load balancer performs the operations of packets.
//! `tests/integration/connection_table_loom.rs` runs both sides in every order that the memory model allows. The
//! operations of packets follow `bpf/lb/connection_table.h` line by line.

use std::mem::offset_of;
use std::net::{IpAddr, SocketAddr};
use std::sync::atomic::{AtomicU64, Ordering};

use coreward_intf as intf;
use zerocopy::IntoBytes as _;

use super::{
    ConnectionEntry, ConnectionHash, ConnectionIndex, ConnectionTableSize, DecisecondTicks, TableEntryIdentity,
};
use crate::ServerId;
use crate::tuple::{address_from_words, address_to_words};

/// A 64-bit word of the connection table that packets and user space share.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ConnectionTableWord {
    /// Word `connection_stack.top` of the partition with this number.
    PartitionStackTop(u32),
    /// Word `connection_stack.hand` of the partition with this number.
    PartitionClockHand(u32),
    /// Word of the entry with this index, at this byte offset in `struct connection`.
    EntryWordAtOffset(ConnectionIndex, usize),
}

/// Memory that holds the words of a connection table, with atomic operations.
pub trait AtomicWordStorage {
    /// Loads a word with acquire order, so that earlier writes of the thread that stored the word become visible.
    fn load(&self, table_word: ConnectionTableWord) -> u64;
    /// Stores a word atomically with relaxed order, so that the store makes no other write visible.
    fn store(&self, table_word: ConnectionTableWord, value: u64);
    /// Replaces the word's value by `new` if it is `old` (acquire and release order). Returns whether it was `old`.
    fn compare_exchange(&self, table_word: ConnectionTableWord, old: u64, new: u64) -> bool;
    /// Stores a word atomically with release order, after all earlier stores. It publishes an entry's identity.
    fn store_release(&self, table_word: ConnectionTableWord, value: u64);
}

const IDENTITY_OFFSET: usize = offset_of!(intf::connection, identity);
const PACKETS_OFFSET: usize = offset_of!(intf::connection, packets);
const BYTES_OFFSET: usize = offset_of!(intf::connection, bytes);
/// Offset in `struct connection` of the word with `last_seen` (low half) and `opened` (high half).
const TIMES_OFFSET: usize = offset_of!(intf::connection, last_seen);
const CLIENT_ADDRESS_OFFSET: usize = offset_of!(intf::connection, client_address);
/// Offset in `struct connection` of the word with `client_port`, `flags` and, in the high half, `next_free`.
const PORT_FLAGS_NEXT_OFFSET: usize = offset_of!(intf::connection, client_port);
/// Offset in `struct connection` of the word with `generation` (low half).
const GENERATION_OFFSET: usize = offset_of!(intf::connection, generation);

const LOW_HALF_MASK: u64 = 0xffff_ffff;
const ENTRY_FLAGS_SHIFT: u32 = 16;
const ENTRY_NEXT_FREE_SHIFT: u32 = 32;

/// Reason for which a new connection gets no entry in the connection table.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ConnectionSlotError {
    /// The partition has no free slot.
    PartitionFull,
    /// Other operations took or freed slots during each of [`intf::CONNECTION_TAKE_ATTEMPTS`] attempts.
    Contended,
}

/// New connection that needs an entry in the connection table.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct NewConnection {
    /// Hash of the connection's service and client.
    pub hash: ConnectionHash,
    /// Slot of the service in the load balancer's tables.
    pub service_slot: u16,
    /// Address and port of the client.
    pub client: SocketAddr,
    /// Number of bytes in the frame of the SYN.
    pub frame_bytes: u64,
}

/// Connection table in memory of type `M`.
#[derive(Debug, Clone)]
pub struct ConnectionTable<M> {
    memory: M,
    size: ConnectionTableSize,
}

impl<M: AtomicWordStorage> ConnectionTable<M> {
    /// Returns a connection table over `memory`, which must have room for `size` entries.
    pub fn new(memory: M, size: ConnectionTableSize) -> Self {
        Self { memory, size }
    }

    /// Returns the size of the table, in entries.
    pub fn size(&self) -> ConnectionTableSize {
        self.size
    }

    /// Returns the memory that holds the table.
    pub fn memory(&self) -> &M {
        &self.memory
    }

    // ---- what packets do ----

    /// Takes a free slot for a new connection and fills its entry, as `take_connection()` of
    /// `bpf/lb/connection_table.h` does. Fails if no slot is free, or if concurrent operations changed the stack at
    /// each attempt.
    pub fn take_slot(
        &self,
        new_connection: &NewConnection,
        server: ServerId,
        now: DecisecondTicks,
    ) -> Result<ConnectionIndex, ConnectionSlotError> {
        let partition = new_connection.hash.partition(self.size);
        let stack_top = ConnectionTableWord::PartitionStackTop(partition);
        for _ in 0..intf::CONNECTION_TAKE_ATTEMPTS {
            // BPF has no acquiring load, but the address of `next_free_slot_plus_one` depends on the first load, which
            // orders both.
            let stack_top_value = self.memory.load(stack_top);
            let Some(slot) = (stack_top_value & u64::from(intf::CONNECTION_STACK_SLOT_MASK)).checked_sub(1) else {
                return Err(ConnectionSlotError::PartitionFull);
            };
            let index = ConnectionIndex::new(partition, slot as u32);
            // If another operation takes the entry meanwhile, `next_free_slot_plus_one` may have any value, but the
            // exchange fails.
            let next_free_slot_plus_one = self.next_free_slot_plus_one(index);
            if self.memory.compare_exchange(
                stack_top,
                stack_top_value,
                updated_stack_top(stack_top_value, next_free_slot_plus_one),
            ) {
                self.fill_entry(index, new_connection, server, now);
                return Ok(index);
            }
        }
        Err(ConnectionSlotError::Contended)
    }

    /// Takes the slot of an expired entry for a new connection if none is free, as `reuse_connection()` of
    /// `bpf/lb/stateful.h` does. Returns the new entry's index and the connection that had the slot.
    pub fn reuse_expired_slot(
        &self,
        new_connection: &NewConnection,
        server: ServerId,
        now: DecisecondTicks,
        is_expired: impl Fn(&ConnectionEntry) -> bool,
    ) -> Option<(ConnectionIndex, ConnectionEntry)> {
        let partition = new_connection.hash.partition(self.size);
        let clock_hand = ConnectionTableWord::PartitionClockHand(partition);
        (0..intf::CONNECTION_HAND_PROBES).find_map(|_| {
            let slot = self.memory.load(clock_hand);
            self.memory.store(clock_hand, slot.wrapping_add(1));
            let index = ConnectionIndex::new(partition, slot as u32);
            let expired_connection = self.connection_at(index).filter(&is_expired)?;
            if !self.release_entry(index, expired_connection.identity) {
                return None;
            }
            self.fill_entry(index, new_connection, server, now);
            Some((index, expired_connection))
        })
    }

    /// Writes an entry that no other thread accesses. The identity is written last, because it publishes the entry.
    fn fill_entry(
        &self,
        index: ConnectionIndex,
        new_connection: &NewConnection,
        server: ServerId,
        now: DecisecondTicks,
    ) {
        let entry_word = |field_offset| ConnectionTableWord::EntryWordAtOffset(index, field_offset);
        let generation =
            (self.memory.load(entry_word(GENERATION_OFFSET)) & u64::from(intf::CONNECTION_GENERATION_MASK)) as u16;
        self.memory.store(entry_word(PACKETS_OFFSET), 1);
        self.memory.store(entry_word(BYTES_OFFSET), new_connection.frame_bytes);
        self.memory.store(entry_word(TIMES_OFFSET), u64::from(now.0) << 32 | u64::from(now.0));
        let client_words = address_to_words(new_connection.client.ip());
        for (word_index, word_bytes) in client_words.as_bytes().chunks_exact(size_of::<u64>()).enumerate() {
            let client_word = u64::from_ne_bytes(word_bytes.try_into().expect("two of four bytes each"));
            self.memory.store(entry_word(CLIENT_ADDRESS_OFFSET + word_index * size_of::<u64>()), client_word);
        }
        self.set_port_and_flags(index, u64::from(new_connection.client.port().to_be()));
        let identity = TableEntryIdentity {
            tag: new_connection.hash.entry_tag(),
            generation,
            service_slot: new_connection.service_slot,
            server,
        };
        self.memory.store_release(entry_word(IDENTITY_OFFSET), identity.to_word());
    }

    /// Returns the entry and the server of the connection whose cookie has slot `slot`, as `find_connection()` in BPF
    /// does. Returns `None` if the entry is free or belongs to another connection.
    pub fn find_connection(
        &self,
        hash: ConnectionHash,
        slot: u32,
        service_slot: u16,
    ) -> Option<(ConnectionIndex, ServerId)> {
        let index = ConnectionIndex::new(hash.partition(self.size), slot);
        let identity = TableEntryIdentity::from_word(
            self.memory.load(ConnectionTableWord::EntryWordAtOffset(index, IDENTITY_OFFSET)),
        )?;
        (identity.tag == hash.entry_tag() && identity.service_slot == service_slot).then_some((index, identity.server))
    }

    /// Counts a packet that is not a SYN, like `update_connection()` in BPF. Returns whether it starts the connection's
    /// close.
    pub fn record_packet(
        &self,
        index: ConnectionIndex,
        frame_bytes: u64,
        is_closing_packet: bool,
        now: DecisecondTicks,
    ) -> bool {
        self.add_to_entry_word(index, PACKETS_OFFSET, 1);
        self.add_to_entry_word(index, BYTES_OFFSET, frame_bytes);
        self.set_last_seen(index, now);
        let (flags_word, closing_flag) = (
            ConnectionTableWord::EntryWordAtOffset(index, PORT_FLAGS_NEXT_OFFSET),
            u64::from(intf::CONNECTION_CLOSING) << ENTRY_FLAGS_SHIFT,
        );
        let starts_closing = is_closing_packet && self.memory.load(flags_word) & closing_flag == 0;
        if starts_closing {
            self.memory.store(flags_word, self.memory.load(flags_word) | closing_flag);
        }
        starts_closing
    }

    /// Records another SYN of a connection, like `reopen_connection()` in BPF. Returns whether the connection was
    /// closing.
    pub fn record_repeated_syn(&self, index: ConnectionIndex, now: DecisecondTicks) -> bool {
        let (flags_word, closing_flag) = (
            ConnectionTableWord::EntryWordAtOffset(index, PORT_FLAGS_NEXT_OFFSET),
            u64::from(intf::CONNECTION_CLOSING) << ENTRY_FLAGS_SHIFT,
        );
        self.set_last_seen(index, now);
        let old_word = self.memory.load(flags_word);
        self.memory.store(flags_word, old_word & !closing_flag);
        old_word & closing_flag != 0
    }

    // ---- what user space does ----

    /// Puts all slots of a new table onto the stacks of their partitions. All words of the table's memory must be 0.
    pub fn initialise_entries(&self) {
        let last_slot = intf::CONNECTIONS_PER_PARTITION - 1;
        for index in self.size.entry_indexes() {
            let next_free_slot_plus_one = if index.slot() == last_slot { 0 } else { index.slot() + 2 };
            self.set_next_free_slot(index, next_free_slot_plus_one);
        }
        for partition in 0..self.size.partition_count() {
            self.memory.store(ConnectionTableWord::PartitionStackTop(partition), updated_stack_top(0, 1));
        }
    }

    /// Releases the entry from its connection if the entry still has identity `identity`. Of several callers, only one
    /// succeeds. That caller must call [`push_free_slot`](Self::push_free_slot) once no packet that read the identity
    /// is in flight.
    pub fn release_entry(&self, index: ConnectionIndex, identity: TableEntryIdentity) -> bool {
        if !self.memory.compare_exchange(
            ConnectionTableWord::EntryWordAtOffset(index, IDENTITY_OFFSET),
            identity.to_word(),
            0,
        ) {
            return false;
        }
        let generation = u64::from(identity.generation) + 1;
        self.memory.store(ConnectionTableWord::EntryWordAtOffset(index, GENERATION_OFFSET), generation);
        true
    }

    /// Puts the slot of an entry onto the stack of its partition, after [`release_entry`](Self::release_entry).
    pub fn push_free_slot(&self, index: ConnectionIndex) {
        let stack_top = ConnectionTableWord::PartitionStackTop(index.partition());
        loop {
            let stack_top_value = self.memory.load(stack_top);
            self.set_next_free_slot(index, (stack_top_value & u64::from(intf::CONNECTION_STACK_SLOT_MASK)) as u32);
            if self.memory.compare_exchange(
                stack_top,
                stack_top_value,
                updated_stack_top(stack_top_value, index.slot() + 1),
            ) {
                return;
            }
        }
    }

    /// Returns the free slots of a partition, starting at the stack's top. Packets may take slots during the call, but
    /// no caller may push one.
    pub fn free_slot_indexes(&self, partition: u32) -> Vec<ConnectionIndex> {
        let mut slots = Vec::new();
        let mut next_slot_plus_one = (self.memory.load(ConnectionTableWord::PartitionStackTop(partition))
            & u64::from(intf::CONNECTION_STACK_SLOT_MASK)) as u32;
        // A taken slot keeps its `next_free_slot_plus_one`, so the walk ends at the original bottom of the stack.
        while let Some(slot) =
            next_slot_plus_one.checked_sub(1).filter(|_| slots.len() < intf::CONNECTIONS_PER_PARTITION as usize)
        {
            let index = ConnectionIndex::new(partition, slot);
            slots.push(index);
            next_slot_plus_one = self.next_free_slot_plus_one(index);
        }
        slots
    }

    /// Returns whether the entry at `index` is free, or about to be filled.
    pub fn is_entry_free(&self, index: ConnectionIndex) -> bool {
        self.load_entry_word(index, IDENTITY_OFFSET) == 0
    }

    /// Returns the client address of the connection at `index`, or `None` if the entry is free. If another connection
    /// gets the entry while its three words are read, the address may be the previous client's, or a mixture of both.
    pub fn client_address(&self, index: ConnectionIndex) -> Option<IpAddr> {
        let address_halves =
            [0, size_of::<u64>()].map(|half_offset| self.load_entry_word(index, CLIENT_ADDRESS_OFFSET + half_offset));
        let address_quarters = address_halves.map(|address_half| [address_half as u32, (address_half >> 32) as u32]);
        (!self.is_entry_free(index)).then(|| {
            address_from_words([
                address_quarters[0][0],
                address_quarters[0][1],
                address_quarters[1][0],
                address_quarters[1][1],
            ])
        })
    }

    /// Returns a copy of the connection at `index`, even if packets update it meanwhile. Returns `None` if the entry is
    /// free, or if its connection changes during the copy.
    pub fn connection_at(&self, index: ConnectionIndex) -> Option<ConnectionEntry> {
        let identity = self.load_entry_word(index, IDENTITY_OFFSET);
        if identity == 0 {
            return None;
        }
        let mut entry = intf::connection { identity, ..Default::default() };
        for (word_index, bytes) in entry.as_mut_bytes().chunks_exact_mut(size_of::<u64>()).enumerate().skip(1) {
            let entry_word = self.load_entry_word(index, word_index * size_of::<u64>());
            bytes.copy_from_slice(&entry_word.to_ne_bytes());
        }
        let is_unchanged = self.load_entry_word(index, IDENTITY_OFFSET) == identity;
        if is_unchanged { ConnectionEntry::from_entry(index, &entry) } else { None }
    }

    // ---- parts of words ----

    fn load_entry_word(&self, index: ConnectionIndex, field_offset: usize) -> u64 {
        self.memory.load(ConnectionTableWord::EntryWordAtOffset(index, field_offset))
    }

    fn next_free_slot_plus_one(&self, index: ConnectionIndex) -> u32 {
        (self.memory.load(ConnectionTableWord::EntryWordAtOffset(index, PORT_FLAGS_NEXT_OFFSET))
            >> ENTRY_NEXT_FREE_SHIFT) as u32
    }

    fn set_next_free_slot(&self, index: ConnectionIndex, next_free_slot_plus_one: u32) {
        self.memory.store(
            ConnectionTableWord::EntryWordAtOffset(index, PORT_FLAGS_NEXT_OFFSET),
            u64::from(next_free_slot_plus_one) << ENTRY_NEXT_FREE_SHIFT,
        );
    }

    fn set_port_and_flags(&self, index: ConnectionIndex, port_and_flags: u64) {
        let port_flags_word = ConnectionTableWord::EntryWordAtOffset(index, PORT_FLAGS_NEXT_OFFSET);
        self.memory.store(port_flags_word, self.memory.load(port_flags_word) & !LOW_HALF_MASK | port_and_flags);
    }

    fn set_last_seen(&self, index: ConnectionIndex, now: DecisecondTicks) {
        let times_word = ConnectionTableWord::EntryWordAtOffset(index, TIMES_OFFSET);
        self.memory.store(times_word, self.memory.load(times_word) & !LOW_HALF_MASK | u64::from(now.0));
    }

    fn add_to_entry_word(&self, index: ConnectionIndex, field_offset: usize, value: u64) {
        let entry_word = ConnectionTableWord::EntryWordAtOffset(index, field_offset);
        self.memory.store(entry_word, self.memory.load(entry_word).wrapping_add(value));
    }
}

/// Returns the next value of a stack's top word. It has the new top slot plus one, or 0 for an empty stack, and an
/// incremented count of changes, which prevents the ABA problem.
fn updated_stack_top(stack_top_value: u64, slot_plus_one: u32) -> u64 {
    let change_count = (stack_top_value >> intf::CONNECTION_STACK_COUNT_SHIFT).wrapping_add(1);
    change_count << intf::CONNECTION_STACK_COUNT_SHIFT | u64::from(slot_plus_one & intf::CONNECTION_STACK_SLOT_MASK)
}

/// Set-associative cache of the slots of connections with a recent SYN, by connection hash. Its entries are only hints.
/// A lookup compares the identity in the connection table.
#[derive(Debug, Clone)]
pub struct RecentConnections(Vec<[u32; intf::RECENT_WAYS as usize]>);

impl Default for RecentConnections {
    fn default() -> Self {
        let set_count = intf::RECENT_CONNECTIONS / intf::RECENT_WAYS;
        Self(vec![[0; intf::RECENT_WAYS as usize]; set_count as usize])
    }
}

impl RecentConnections {
    /// Returns the slot in which [`ConnectionTable::find_connection`] may find the connection of a retransmitted SYN.
    /// Returns `None` if no recent SYN of the connection is recorded.
    pub fn find_slot(&self, hash: ConnectionHash) -> Option<u32> {
        let recent_entry =
            self.0[hash.recent_syn_set_index()].iter().find(|entry| Self::entry_matches(**entry, hash))?;
        Some(recent_entry & intf::CONNECTION_SLOT_MASK)
    }

    /// Records the slot of a connection whose SYN arrived, at the front of its set, as `remember_connection()` in BPF
    /// does.
    pub fn record_syn_slot(&mut self, hash: ConnectionHash, index: ConnectionIndex) {
        let mut shifted_entry = hash.entry_tag() & !intf::CONNECTION_SLOT_MASK | index.slot();
        for way in &mut self.0[hash.recent_syn_set_index()] {
            let displaced_entry = std::mem::replace(way, shifted_entry);
            if Self::entry_matches(displaced_entry, hash) {
                return;
            }
            shifted_entry = displaced_entry;
        }
    }

    fn entry_matches(entry: u32, hash: ConnectionHash) -> bool {
        (entry ^ hash.entry_tag()) & !intf::CONNECTION_SLOT_MASK == 0
    }
}

/// Memory of a connection table in the heap of this process, which several threads may use.
#[derive(Debug)]
pub struct HeapTableMemory {
    size: ConnectionTableSize,
    stack_top_by_partition: Vec<AtomicU64>,
    clock_hand_by_partition: Vec<AtomicU64>,
    entry_words: Vec<AtomicU64>,
}

const WORDS_PER_CONNECTION_ENTRY: usize = size_of::<intf::connection>() / size_of::<u64>();

impl HeapTableMemory {
    /// Returns memory for a table of size `size`, with all words 0.
    pub fn new(size: ConnectionTableSize) -> Self {
        let allocate_zeroed_words = |count: usize| (0..count).map(|_| AtomicU64::new(0)).collect();
        let partition_count = size.partition_count() as usize;
        let entry_words = allocate_zeroed_words(size.entry_count() as usize * WORDS_PER_CONNECTION_ENTRY);
        Self {
            size,
            stack_top_by_partition: allocate_zeroed_words(partition_count),
            clock_hand_by_partition: allocate_zeroed_words(partition_count),
            entry_words,
        }
    }

    fn atomic_word(&self, table_word: ConnectionTableWord) -> &AtomicU64 {
        match table_word {
            ConnectionTableWord::PartitionStackTop(partition) => &self.stack_top_by_partition[partition as usize],
            ConnectionTableWord::PartitionClockHand(partition) => &self.clock_hand_by_partition[partition as usize],
            ConnectionTableWord::EntryWordAtOffset(index, field_offset) => {
                &self.entry_words
                    [index.position(self.size) as usize * WORDS_PER_CONNECTION_ENTRY + field_offset / size_of::<u64>()]
            }
        }
    }
}

impl AtomicWordStorage for HeapTableMemory {
    fn load(&self, table_word: ConnectionTableWord) -> u64 {
        self.atomic_word(table_word).load(Ordering::Acquire)
    }

    fn store(&self, table_word: ConnectionTableWord, value: u64) {
        self.atomic_word(table_word).store(value, Ordering::Relaxed);
    }

    fn compare_exchange(&self, table_word: ConnectionTableWord, old: u64, new: u64) -> bool {
        self.atomic_word(table_word).compare_exchange(old, new, Ordering::AcqRel, Ordering::Acquire).is_ok()
    }

    fn store_release(&self, table_word: ConnectionTableWord, value: u64) {
        self.atomic_word(table_word).store(value, Ordering::Release);
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;
    use std::net::Ipv4Addr;

    use super::*;
    use crate::cookie::CookieKey;

    const SERVICE_SLOT: u16 = 9;

    fn empty_connection_table(entry_count: u64) -> ConnectionTable<HeapTableMemory> {
        let size = ConnectionTableSize::try_from(entry_count).unwrap();
        let table = ConnectionTable::new(HeapTableMemory::new(size), size);
        table.initialise_entries();
        table
    }

    fn new_connection(client_number: u32) -> NewConnection {
        let client = SocketAddr::new(
            Ipv4Addr::from(0x0a01_0000 + client_number / 60_000).into(),
            (client_number % 60_000) as u16,
        );
        let hash = ConnectionHash::new(
            &CookieKey { k0: 0x5d3c_91ab_04e7_aa13, k1: 0x0f1e_77c9_d2b4_5a61 },
            SERVICE_SLOT,
            client,
        );
        NewConnection { hash, service_slot: SERVICE_SLOT, client, frame_bytes: 74 }
    }

    fn server_of_client(client_number: u32) -> ServerId {
        ServerId::try_from(u64::from(client_number) % 16_384).unwrap()
    }

    #[test]
    fn slot_is_taken_only_once_until_it_is_freed() {
        let table = empty_connection_table(4096);
        let mut taken_slots = BTreeSet::new();
        let mut rejected_connection_count = 0;
        for client in 0..8000 {
            match table.take_slot(&new_connection(client), server_of_client(client), DecisecondTicks(3)) {
                Ok(index) => assert!(taken_slots.insert((index, client))),
                Err(take_error) => {
                    assert_eq!(take_error, ConnectionSlotError::PartitionFull);
                    rejected_connection_count += 1;
                }
            }
        }
        assert_eq!((taken_slots.len(), rejected_connection_count), (4096, 8000 - 4096));
        for (index, client) in &taken_slots {
            let syn = new_connection(*client);
            assert_eq!(
                table.find_connection(syn.hash, index.slot(), SERVICE_SLOT),
                Some((*index, server_of_client(*client)))
            );
            assert_eq!(table.find_connection(syn.hash, index.slot(), SERVICE_SLOT + 1), None);
            let connection = table.connection_at(*index).unwrap();
            assert_eq!((connection.client, connection.packet_count, connection.byte_count), (syn.client, 1, 74));
            assert_eq!((connection.opened_at, connection.identity.generation), (DecisecondTicks(3), 0));
        }
        for (index, client) in &taken_slots {
            let identity = table.connection_at(*index).unwrap().identity;
            assert!(table.release_entry(*index, identity) && !table.release_entry(*index, identity));
            table.push_free_slot(*index);
            assert_eq!(table.find_connection(new_connection(*client).hash, index.slot(), SERVICE_SLOT), None);
        }
        assert_eq!((0..4).map(|partition| table.free_slot_indexes(partition).len()).sum::<usize>(), 4096);
        let retaken_index = table.take_slot(&new_connection(1), server_of_client(1), DecisecondTicks(4)).unwrap();
        assert_eq!(table.connection_at(retaken_index).unwrap().identity.generation, 1);
    }

    #[test]
    fn packets_update_the_entry_that_a_retransmitted_syn_finds() {
        let table = empty_connection_table(1024);
        let syn = new_connection(1);
        let mut recent_connections = RecentConnections::default();
        let find_by_syn = |recent_connections: &RecentConnections| {
            table.find_connection(syn.hash, recent_connections.find_slot(syn.hash)?, SERVICE_SLOT)
        };
        assert_eq!(find_by_syn(&recent_connections), None);
        table.take_slot(&self::new_connection(2), server_of_client(2), DecisecondTicks(10)).unwrap();
        let entry_index = table.take_slot(&syn, server_of_client(1), DecisecondTicks(10)).unwrap();
        recent_connections.record_syn_slot(syn.hash, entry_index);
        table.record_packet(entry_index, 1500, false, DecisecondTicks(11));
        table.record_packet(entry_index, 66, true, DecisecondTicks(12));
        let connection = table.connection_at(entry_index).unwrap();
        assert_eq!((connection.packet_count, connection.byte_count), (3, 74 + 1500 + 66));
        assert_eq!(
            (connection.opened_at, connection.last_packet_at, connection.is_closing),
            (DecisecondTicks(10), DecisecondTicks(12), true)
        );
        assert_eq!(connection.client, syn.client);
        assert_eq!(find_by_syn(&recent_connections), Some((entry_index, server_of_client(1))));
        table.record_repeated_syn(entry_index, DecisecondTicks(20));
        let connection = table.connection_at(entry_index).unwrap();
        assert_eq!(
            (connection.packet_count, connection.last_packet_at, connection.is_closing),
            (3, DecisecondTicks(20), false)
        );
        assert!(table.release_entry(entry_index, connection.identity));
        assert_eq!(find_by_syn(&recent_connections), None);
    }
}
