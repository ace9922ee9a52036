//! The connection table of stateful mode (ConnTable and ConnStack in Cheetah, NSDI'20, Sect. 3.2).
//!
//! The cookie in a connection's packets has the slot of the connection's entry. An entry is therefore found, taken and
//! freed in constant time without a hash table. `bpf/include/intf.h` has the layouts. `bpf/lb/connection_table.h`
//! describes the operations of packets and why they are correct. This module has:
//!
//! * this file: partitions of connections, identities of entries, and the timers after which an entry may be freed
//! * [`table`]: operations of packets and user space on the entries, over any memory of 64-bit words

pub mod table;

use std::fmt;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::time::Duration;

use coreward_intf as intf;

use crate::ServerId;
use crate::cookie::CookieKey;
use crate::tuple::address_from_words;

/// Number of entries in a connection table, a power of two from 1,024 to 4,194,304.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ConnectionTableSize(u32);

/// Error returned for a number of entries that [`ConnectionTableSize`] does not allow.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error(
    "{0} entries of the connection table: expected a power of two from {min} to {max}",
    min = intf::CONNECTIONS_PER_PARTITION,
    max = intf::MAX_CONNECTION_TABLE_ENTRIES
)]
pub struct InvalidConnectionTableSize(pub u64);

impl ConnectionTableSize {
    /// Returns the number of entries in the table.
    pub fn entry_count(self) -> u32 {
        self.0
    }

    /// Returns the number of partitions, a power of two. Each partition has 1,024 entries.
    pub fn partition_count(self) -> u32 {
        self.0 / intf::CONNECTIONS_PER_PARTITION
    }

    /// Returns the indexes of all entries in memory order.
    pub fn entry_indexes(self) -> impl Iterator<Item = ConnectionIndex> {
        (0..self.0).map(move |position| self.index_at_position(position))
    }

    /// Returns the index of the entry at `position` in memory. Slot 0 of all partitions precedes slot 1 of all
    /// partitions.
    ///
    /// Partitions use their low slots first, so this order keeps the used entries close together on few pages, whatever
    /// the table's size. For example, 16,384 connections in a table of 2 million entries are on 256 pages. If each
    /// partition's slots were adjacent, they would be on 2,048 pages, more than the CPU's second-level TLB holds.
    pub fn index_at_position(self, position: u32) -> ConnectionIndex {
        ConnectionIndex::new(position % self.partition_count(), position / self.partition_count())
    }
}

impl Default for ConnectionTableSize {
    fn default() -> Self {
        Self(intf::DEFAULT_CONNECTION_TABLE_ENTRIES)
    }
}

impl TryFrom<u64> for ConnectionTableSize {
    type Error = InvalidConnectionTableSize;

    fn try_from(entry_count: u64) -> Result<Self, Self::Error> {
        let range = u64::from(intf::CONNECTIONS_PER_PARTITION)..=u64::from(intf::MAX_CONNECTION_TABLE_ENTRIES);
        let is_valid = entry_count.is_power_of_two() && range.contains(&entry_count);
        if is_valid { Ok(Self(entry_count as u32)) } else { Err(InvalidConnectionTableSize(entry_count)) }
    }
}

/// Index of an entry in the connection table, which combines the entry's partition and slot in one number.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct ConnectionIndex(u32);

impl ConnectionIndex {
    /// Returns the index of the entry in slot `slot` (modulo 1,024) of partition `partition`.
    pub fn new(partition: u32, slot: u32) -> Self {
        Self(partition << intf::CONNECTION_SLOT_BITS | slot & intf::CONNECTION_SLOT_MASK)
    }

    /// Returns the entry's position in the memory of a table with size `size`.
    pub fn position(self, size: ConnectionTableSize) -> u32 {
        self.slot() * size.partition_count() + self.partition()
    }

    /// Returns the number of the entry's partition.
    pub fn partition(self) -> u32 {
        self.0 >> intf::CONNECTION_SLOT_BITS
    }

    /// Returns the number of the entry's slot in its partition, which the cookie carries.
    pub fn slot(self) -> u32 {
        self.0 & intf::CONNECTION_SLOT_MASK
    }
}

/// Number (0 to 15) that identifies a load balancer among those with a connection table.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct TableOwnerNumber(u8);

/// Error returned for a number outside the range of owner numbers.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("owner number {0} is out of range: expected 0 to {max}", max = intf::MAX_OWNERS - 1)]
pub struct TableOwnerNumberOutOfRange(pub u64);

impl TableOwnerNumber {
    /// Returns all possible owner numbers in ascending order.
    pub fn all() -> impl Iterator<Item = TableOwnerNumber> {
        (0..intf::MAX_OWNERS as u8).map(TableOwnerNumber)
    }

    /// Returns the owner number as an integer, 0 to 15.
    pub fn get(self) -> u8 {
        self.0
    }
}

impl TryFrom<u64> for TableOwnerNumber {
    type Error = TableOwnerNumberOutOfRange;

    fn try_from(value: u64) -> Result<Self, Self::Error> {
        if value < u64::from(intf::MAX_OWNERS) { Ok(Self(value as u8)) } else { Err(TableOwnerNumberOutOfRange(value)) }
    }
}

impl fmt::Display for TableOwnerNumber {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// Returns the index that a stateful-mode cookie carries: the table's owner in the high bits, the slot in the low bits.
pub fn encode_cookie_index(owner: TableOwnerNumber, slot: u32) -> u16 {
    (u32::from(owner.0) << intf::CONNECTION_SLOT_BITS | slot & intf::CONNECTION_SLOT_MASK) as u16
}

/// Returns the table's owner and the slot that a stateful-mode cookie's index encodes.
pub fn decode_cookie_index(cookie_index: u16) -> (TableOwnerNumber, u32) {
    let cookie_index = u32::from(cookie_index) & intf::COOKIE_ID_MASK;
    (TableOwnerNumber((cookie_index >> intf::CONNECTION_SLOT_BITS) as u8), cookie_index & intf::CONNECTION_SLOT_MASK)
}

/// Returns the TSecr value by which a SYN to a stateful service carries the table's owner and the slot to the server.
pub fn encode_syn_tsecr(owner: TableOwnerNumber, slot: u32) -> u32 {
    intf::SYN_TSECR_HOLDS_COOKIE | intf::COOKIE_KIND_BIT | u32::from(encode_cookie_index(owner, slot))
}

/// Keyed hash of a connection's service, client address and client port. The key is constant for the table's lifetime.
/// `bpf/lb/connection_table.h` gives the reason for the hash function.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ConnectionHash(u64);

impl ConnectionHash {
    /// Returns the hash of the connection from `client` to the service in the given slot of the load balancer's tables.
    pub fn new(key: &CookieKey, service_slot: u16, client: SocketAddr) -> Self {
        let folded_address = fold_client_address(key, client.ip());
        let port_big_endian = client.port().swap_bytes();
        let hash = u64::from(service_slot) << 48 | u64::from(port_big_endian) << 32 | u64::from(folded_address);
        let hash = (hash ^ key.k0).wrapping_mul(key.k1 | 1);
        let hash = (hash ^ hash >> 32).wrapping_mul(key.k0 | 1);
        Self(hash ^ hash >> 29)
    }

    /// Returns the partition of the connection's entry, which the low bits of the hash select.
    pub fn partition(self, size: ConnectionTableSize) -> u32 {
        self.0 as u32 & (size.partition_count() - 1)
    }

    /// Returns the tag, the upper half of the hash, which distinguishes the connections of a partition.
    pub fn entry_tag(self) -> u32 {
        (self.0 >> intf::CONNECTION_TAG_SHIFT) as u32
    }

    /// Returns the lower half of the hash, which selects a set of the flow table, or a token bucket.
    pub fn low_half(self) -> u32 {
        self.0 as u32
    }

    /// Returns the index of the set of [`table::RecentConnections`] that records the connection's latest SYN.
    pub fn recent_syn_set_index(self) -> usize {
        (self.0 as u32 % (intf::RECENT_CONNECTIONS / intf::RECENT_WAYS)) as usize
    }
}

/// Folds a client's address into 32 bits, like `client_word_ipv6()` of `bpf/lb/parse_ipv6.h`. IPv4 addresses stay as
/// is.
pub(crate) fn fold_client_address(key: &CookieKey, client: IpAddr) -> u32 {
    let address = match client {
        IpAddr::V4(address) => return u32::from_le_bytes(address.octets()),
        IpAddr::V6(address) => u128::from_le_bytes(address.octets()),
    };
    let hash = (address as u64 ^ key.k0).wrapping_mul(key.k1 | 1);
    let hash = (hash ^ hash >> 32 ^ (address >> 64) as u64).wrapping_mul(key.k0 | 1);
    (hash >> 32) as u32
}

/// Returns the index of the counter for the entries of the client's source prefix (/24 for IPv4, /64 for IPv6).
pub fn source_prefix_counter_index(key: &CookieKey, client: IpAddr) -> usize {
    let prefix: IpAddr = match client {
        IpAddr::V4(address) => Ipv4Addr::from_bits(address.to_bits() & !0xff).into(),
        IpAddr::V6(address) => Ipv6Addr::from_bits(address.to_bits() & !u128::from(u64::MAX)).into(),
    };
    (ConnectionHash::new(key, 0, SocketAddr::new(prefix, 0)).low_half() % intf::SOURCE_SHARDS) as usize
}

/// Number of entries that must be free for each entry that a source prefix holds.
const FREE_ENTRIES_PER_PREFIX_ENTRY: u32 = 4;

/// Returns the maximum number of table entries that the clients of one source prefix may hold. It is a quarter of the
/// free entries, so `n` prefixes leave at least 4 / (n + 4) of the table to others. Each prefix may always hold an
/// equal share of the table.
pub fn max_entries_per_source_prefix(size: ConnectionTableSize, used_entry_count: u32) -> u32 {
    let free_entry_count = size.entry_count().saturating_sub(used_entry_count);
    (free_entry_count / FREE_ENTRIES_PER_PREFIX_ENTRY).max(size.entry_count() / intf::SOURCE_SHARDS).max(1)
}

/// Identity of a used entry, which one 64-bit word holds. It has all fields of the entry on which forwarding depends.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TableEntryIdentity {
    /// Tag of the connection, as returned by [`ConnectionHash::entry_tag`].
    pub tag: u32,
    /// Generation of the entry, which counts its uses modulo 2^7.
    pub generation: u16,
    /// Slot of the service in the load balancer's tables (10 bits).
    pub service_slot: u16,
    /// Server to which the connection's packets go.
    pub server: ServerId,
}

impl TableEntryIdentity {
    /// Returns the word that encodes the identity (`connection.identity` of `bpf/include/intf.h`).
    pub fn to_word(self) -> u64 {
        u64::from(self.tag) << intf::CONNECTION_TAG_SHIFT
            | u64::from(intf::CONNECTION_IN_USE)
            | (u64::from(self.generation) & u64::from(intf::CONNECTION_GENERATION_MASK))
                << intf::CONNECTION_GENERATION_SHIFT
            | (u64::from(self.service_slot) & u64::from(intf::CONNECTION_SERVICE_MASK))
                << intf::CONNECTION_SERVICE_SHIFT
            | u64::from(self.server.get())
    }

    /// Returns the identity that `identity_word` encodes, or `None` if the entry is free.
    pub fn from_word(identity_word: u64) -> Option<Self> {
        let low_half = identity_word as u32;
        (low_half & intf::CONNECTION_IN_USE != 0).then(|| Self {
            tag: (identity_word >> intf::CONNECTION_TAG_SHIFT) as u32,
            generation: (low_half >> intf::CONNECTION_GENERATION_SHIFT & intf::CONNECTION_GENERATION_MASK) as u16,
            service_slot: (low_half >> intf::CONNECTION_SERVICE_SHIFT & intf::CONNECTION_SERVICE_MASK) as u16,
            server: ServerId::try_from(u64::from(low_half & intf::COOKIE_ID_MASK)).expect("14 bits"),
        })
    }
}

/// Time on the clock of the load balancer's data plane, in tenths of a second modulo 2^32 (13.6 years).
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct DecisecondTicks(pub u32);

impl DecisecondTicks {
    /// Converts `monotonic_time`, a time on the machine's monotonic clock, to ticks.
    pub fn from_monotonic_time(monotonic_time: Duration) -> Self {
        Self((monotonic_time.as_millis() / 100) as u32)
    }

    /// Returns the time since `earlier`. Returns 0 if `earlier` is later than `self`, as when a packet came after the
    /// clock was read.
    pub fn saturating_duration_since(self, earlier: DecisecondTicks) -> Duration {
        let elapsed_ticks = self.0.wrapping_sub(earlier.0);
        if elapsed_ticks > u32::MAX / 2 {
            Duration::ZERO
        } else {
            Duration::from_millis(u64::from(elapsed_ticks) * 100)
        }
    }
}

/// Snapshot of a connection's entry in the connection table.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ConnectionEntry {
    /// Index of the connection's entry in the connection table.
    pub index: ConnectionIndex,
    /// Identity of the entry, which has its connection's tag, service and server.
    pub identity: TableEntryIdentity,
    /// Address and port of the client.
    pub client: SocketAddr,
    /// Number of packets from the client, without retransmitted SYNs.
    pub packet_count: u64,
    /// Number of bytes in the client's frames, without retransmitted SYNs.
    pub byte_count: u64,
    /// Time of the connection's first SYN.
    pub opened_at: DecisecondTicks,
    /// Time of the last packet from the client.
    pub last_packet_at: DecisecondTicks,
    /// Whether a FIN or RST has arrived and no SYN came after it.
    pub is_closing: bool,
}

impl ConnectionEntry {
    /// Returns the connection in the entry at `index`, or `None` if the entry is free.
    pub fn from_entry(index: ConnectionIndex, entry: &intf::connection) -> Option<Self> {
        Some(Self {
            index,
            identity: TableEntryIdentity::from_word(entry.identity)?,
            client: SocketAddr::new(address_from_words(entry.client_address), u16::from_be(entry.client_port)),
            packet_count: entry.packets,
            byte_count: entry.bytes,
            opened_at: DecisecondTicks(entry.opened),
            last_packet_at: DecisecondTicks(entry.last_seen),
            is_closing: u32::from(entry.flags) & intf::CONNECTION_CLOSING != 0,
        })
    }

    /// Returns whether no packet of the connection arrived since its copy `earlier_snapshot` was made.
    pub fn has_no_packet_since(&self, earlier_snapshot: &Self) -> bool {
        (self.packet_count, self.last_packet_at) == (earlier_snapshot.packet_count, earlier_snapshot.last_packet_at)
    }
}

/// Returns the `count` connections with the largest weights in descending order. Among equal weights, the earlier
/// connection comes first. Needs memory for `2 * count` connections.
pub fn top_connections_by_weight(
    connections: impl Iterator<Item = ConnectionEntry>,
    count: usize,
    weight: impl Fn(&ConnectionEntry) -> u64,
) -> Vec<ConnectionEntry> {
    let mut candidates = Vec::new();
    let keep_heaviest = |kept_connections: &mut Vec<ConnectionEntry>| {
        kept_connections.sort_by_key(|connection| std::cmp::Reverse(weight(connection)));
        kept_connections.truncate(count);
    };
    for connection in connections {
        candidates.push(connection);
        if candidates.len() >= 2 * count.max(1) {
            keep_heaviest(&mut candidates);
        }
    }
    keep_heaviest(&mut candidates);
    candidates
}

/// Idle times after which an entry of the connection table may be freed.
///
/// A FIN or RST only shortens the time, because either may be forged, a FIN is only half a close, and the server's
/// TIME-WAIT follows. An expired entry is therefore freed only if the server's agent finds no socket of the connection,
/// or the server is gone. Entries without a second packet are the exception ([`ConnectionExpiryReason::HalfOpen`]).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ConnectionTimeouts {
    /// Maximum time from the SYN to the second packet of a connection.
    pub half_open: Duration,
    /// Idle time after which a connection with a FIN or RST expires.
    pub closing: Duration,
    /// Idle time after which a connection without a FIN or RST expires.
    pub idle: Duration,
}

impl Default for ConnectionTimeouts {
    fn default() -> Self {
        // A client sends its SYN again after 1, 3 and 7 s, because the timeout doubles from 1 s (RFC 6298, Sect. 2).
        // TIME-WAIT lasts 60 s in Linux (include/net/tcp.h, TCP_TIMEWAIT_LEN).
        Self { half_open: Duration::from_secs(10), closing: Duration::from_secs(60), idle: Duration::from_secs(300) }
    }
}

/// Reason for which an entry of the connection table may be freed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ConnectionExpiryReason {
    /// The server of the connection left the fleet.
    ServerGone,
    /// Only a SYN arrived, most likely from a SYN flood. The entry is freed without a query to the server. If the
    /// client does send another packet, that packet is broadcast and the connection continues.
    HalfOpen,
    /// A FIN or RST arrived. The entry is freed if the server has no socket of the connection.
    Closing,
    /// No packet arrived for the idle time. The entry is freed if the server has no socket of the connection.
    Idle,
}

impl ConnectionExpiryReason {
    /// Returns whether the server must be queried before the entry is freed.
    pub fn must_query_server(self) -> bool {
        matches!(self, ConnectionExpiryReason::Closing | ConnectionExpiryReason::Idle)
    }
}

impl ConnectionTimeouts {
    /// Returns the timeouts in the BPF program's layout. `last_sweep` is the time at which user space last swept the
    /// table.
    pub fn to_bpf_timers(&self, last_sweep: DecisecondTicks) -> intf::connection_timers {
        let to_ticks = |time: Duration| i32::try_from(time.as_millis() / 100).unwrap_or(i32::MAX) as u32;
        intf::connection_timers {
            half_open: to_ticks(self.half_open),
            closing: to_ticks(self.closing),
            idle: to_ticks(self.idle),
            swept: last_sweep.0,
        }
    }

    /// Returns whether a new connection may reuse `connection`'s entry at `now`, like `is_expired()` of
    /// `bpf/lb/stateful.h`.
    pub fn is_expired(
        &self,
        connection: &ConnectionEntry,
        is_server_known: bool,
        last_sweep: DecisecondTicks,
        now: DecisecondTicks,
    ) -> bool {
        let is_sweep_overdue = now.0.wrapping_sub(last_sweep.0) as i32 >= intf::CONNECTION_UNSWEPT_TICKS as i32;
        self.expiry_reason(connection, is_server_known, now)
            .is_some_and(|reason| !reason.must_query_server() || is_sweep_overdue)
    }

    /// Returns the reason to free the entry at `now`, if any. `is_server_known` is false if the server left the fleet.
    pub fn expiry_reason(
        &self,
        connection: &ConnectionEntry,
        is_server_known: bool,
        now: DecisecondTicks,
    ) -> Option<ConnectionExpiryReason> {
        if !is_server_known {
            return Some(ConnectionExpiryReason::ServerGone);
        }
        let (timeout, reason) = match connection {
            ConnectionEntry { packet_count: 0..=1, .. } => (self.half_open, ConnectionExpiryReason::HalfOpen),
            ConnectionEntry { is_closing: true, .. } => (self.closing, ConnectionExpiryReason::Closing),
            _ => (self.idle, ConnectionExpiryReason::Idle),
        };
        (now.saturating_duration_since(connection.last_packet_at) >= timeout).then_some(reason)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn build_connection(packet_count: u64, is_closing: bool, last_seen_ticks: u32) -> ConnectionEntry {
        let server = ServerId::try_from(7).unwrap();
        ConnectionEntry {
            index: ConnectionIndex::new(1, 2),
            identity: TableEntryIdentity { tag: 1, generation: 2, service_slot: 3, server },
            client: SocketAddr::new(Ipv4Addr::LOCALHOST.into(), 1),
            packet_count,
            byte_count: 0,
            opened_at: DecisecondTicks(0),
            last_packet_at: DecisecondTicks(last_seen_ticks),
            is_closing,
        }
    }

    proptest! {
        #[test]
        fn entry_identity_round_trips(
            tag: u32, generation in 0u16..128, service_slot in 0u16..1024, id in 0u64..16_384,
        ) {
            let identity =
                TableEntryIdentity { tag, generation, service_slot, server: ServerId::try_from(id).unwrap() };
            prop_assert_eq!(TableEntryIdentity::from_word(identity.to_word()), Some(identity));
        }

        #[test]
        fn cookie_index_round_trips(owner in 0u64..16, slot in 0u32..1024) {
            let owner = TableOwnerNumber::try_from(owner).unwrap();
            let cookie_index = encode_cookie_index(owner, slot);
            prop_assert!(u32::from(cookie_index) <= intf::COOKIE_ID_MASK);
            prop_assert_eq!(decode_cookie_index(cookie_index), (owner, slot));
        }
    }

    proptest! {
        #[test]
        fn top_connections_by_weight_match_a_full_sort(
            packets in proptest::collection::vec(0u64..50, 0..200), count in 0usize..20,
        ) {
            let connections: Vec<_> = packets.iter().map(|packets| build_connection(*packets, false, 0)).collect();
            let heaviest = top_connections_by_weight(connections.iter().copied(), count,
                |connection| connection.packet_count);
            let mut expected_packet_counts = packets;
            expected_packet_counts.sort_by_key(|packets| std::cmp::Reverse(*packets));
            expected_packet_counts.truncate(count);
            let packet_counts: Vec<u64> = heaviest.iter().map(|connection| connection.packet_count).collect();
            prop_assert_eq!(packet_counts, expected_packet_counts);
        }
    }

    #[test]
    fn table_size_must_be_a_power_of_two_in_range() {
        assert_eq!(ConnectionTableSize::try_from(1024).unwrap().partition_count(), 1);
        assert_eq!(ConnectionTableSize::try_from(4_194_304).unwrap().partition_count(), 4096);
        for invalid_size in [0, 512, 1025, 3000, 8_388_608, 1 << 40] {
            let error = ConnectionTableSize::try_from(invalid_size).unwrap_err().to_string();
            let expected_error =
                format!("{invalid_size} entries of the connection table: expected a power of two from 1024 to 4194304");
            assert_eq!(error, expected_error);
        }
        assert_eq!(
            TableOwnerNumber::try_from(16).unwrap_err().to_string(),
            "owner number 16 is out of range: expected 0 to 15"
        );
    }

    #[test]
    fn source_prefix_may_hold_a_quarter_of_the_free_entries() {
        let table_size = ConnectionTableSize::default();
        let source_prefix_limit = |used_entry_count| max_entries_per_source_prefix(table_size, used_entry_count);
        assert_eq!([0, 131_072, 262_143, 262_144].map(source_prefix_limit), [65_536, 32_768, 64, 64]);
        assert_eq!(max_entries_per_source_prefix(ConnectionTableSize::try_from(1024).unwrap(), 1024), 1);
    }

    #[test]
    fn timeout_depends_on_the_connection_state() {
        let timeouts = ConnectionTimeouts::default();
        let expiry_reason_at =
            |connection, now_ticks| timeouts.expiry_reason(&connection, true, DecisecondTicks(now_ticks));
        let start_ticks = u32::MAX - 50;
        for (connection, elapsed_ticks, reason) in [
            (build_connection(1, false, start_ticks), 100, ConnectionExpiryReason::HalfOpen),
            (build_connection(1, true, start_ticks), 100, ConnectionExpiryReason::HalfOpen),
            (build_connection(2, true, start_ticks), 600, ConnectionExpiryReason::Closing),
            (build_connection(2, false, start_ticks), 3000, ConnectionExpiryReason::Idle),
        ] {
            assert_eq!(expiry_reason_at(connection, start_ticks.wrapping_add(elapsed_ticks - 1)), None);
            assert_eq!(expiry_reason_at(connection, start_ticks.wrapping_add(elapsed_ticks)), Some(reason));
            // The packet came after the clock was read.
            assert_eq!(expiry_reason_at(connection, start_ticks.wrapping_sub(5)), None);
        }
        assert_eq!(
            timeouts.expiry_reason(&build_connection(9, false, start_ticks), false, DecisecondTicks(start_ticks)),
            Some(ConnectionExpiryReason::ServerGone)
        );
        let needs_query = [
            ConnectionExpiryReason::ServerGone,
            ConnectionExpiryReason::HalfOpen,
            ConnectionExpiryReason::Closing,
            ConnectionExpiryReason::Idle,
        ]
        .map(ConnectionExpiryReason::must_query_server);
        assert_eq!(needs_query, [false, false, true, true]);
    }
}
