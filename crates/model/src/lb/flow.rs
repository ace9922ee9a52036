//! Flow state, which consists of the flow table (`bpf/lb/flow_table.h`) and the destinations of fragmented datagrams.
//!
//! The table of fragments is unbounded here, but an LRU hash in the BPF program. Both agree until the first eviction.

use std::net::IpAddr;

use coreward_intf as intf;

use super::LoadBalancer;
use super::ip_packet::IpPacket;
use super::packet::ClientPacket;
use crate::connection_table::{ConnectionHash, DecisecondTicks};
use crate::tuple::TransportProtocol;
use crate::{FourTuple, ServerId};

const FLOW_ENTRIES_PER_SET: usize = intf::FLOW_SET_ENTRIES as usize;
/// Number of 64-bit words in a set of the flow table, which are `flow` and `use` of `struct flow_set`.
const WORDS_PER_FLOW_SET: usize = size_of::<intf::flow_set>() / size_of::<u64>();

/// Entry of the flow table, which has the server of a flow.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct FlowEntry {
    /// Server to which the flow's packets go.
    pub server: ServerId,
    /// Server to which the flow's server forwards packets of connections that it does not know.
    pub previous_server: Option<ServerId>,
    /// State of the flow's TCP handshake.
    pub handshake: HandshakeState,
}

/// State of a flow's TCP handshake in a service with LB-side stamping. In other services, flows are
/// [`Open`](Self::Open).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum HandshakeState {
    /// The client has sent a packet after the SYN-ACK.
    Open,
    /// The server sent an unstamped SYN-ACK, and the client has not answered it (`HALF_OPEN_FLOW`). The value is bits
    /// of the SYN-ACK's TSval.
    HalfOpenWithTsvalBits(u16),
    /// The client answered a stamped SYN-ACK of another server (`STAMPED_FLOW`), so the cookie identifies the server.
    Stamped,
}

impl HandshakeState {
    /// Returns the half-open state after an unstamped SYN-ACK with TSval `tsval`.
    pub(super) fn half_open(tsval: u32) -> Self {
        Self::HalfOpenWithTsvalBits((tsval >> intf::HALF_OPEN_TIME_SHIFT) as u16)
    }

    pub(super) fn is_half_open(self) -> bool {
        matches!(self, Self::HalfOpenWithTsvalBits(_))
    }

    /// Returns whether `tsecr` may come from a client that received the SYN-ACK of this half-open connection. The
    /// SYN-ACK had no cookie in its TSval, so only the time can be compared.
    pub(super) fn is_answered_by(self, tsecr: u32) -> bool {
        let Self::HalfOpenWithTsvalBits(time) = self else { return false };
        let tsval_time_difference = (tsecr >> intf::HALF_OPEN_TIME_SHIFT).wrapping_sub(time.into());
        let time_tolerance = intf::HALF_OPEN_TIME_TOLERANCE;
        tsval_time_difference.wrapping_add(time_tolerance) & intf::HALF_OPEN_TIME_MASK <= 2 * time_tolerance
    }

    fn from_state_field(field: u16) -> Self {
        match u32::from(field) {
            intf::STAMPED_FLOW => Self::Stamped,
            field if field & intf::HALF_OPEN_FLOW_MASK == intf::HALF_OPEN_FLOW => {
                Self::HalfOpenWithTsvalBits((field & intf::HALF_OPEN_TIME_MASK) as u16)
            }
            _ => Self::Open,
        }
    }
}

/// Importance of an entry in the flow table for its flow.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum FlowEntryNeed {
    /// The entry is a hint, because the bucket selects the same server unless it has moved since.
    Hint,
    /// Only the entry identifies the flow's server.
    Needed,
}

/// Key by which the later fragments of a datagram are matched with its first fragment.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) struct FragmentKey {
    client: IpAddr,
    vip: IpAddr,
    identification: u32,
    protocol_number: u8,
}

impl FragmentKey {
    pub fn from_packet(packet: &IpPacket<'_>) -> Self {
        let IpPacket { client, vip, identification, protocol_number, .. } = *packet;
        Self { client, vip, identification, protocol_number }
    }
}

impl FlowEntry {
    /// Returns the flow entry of a new connection to `server`.
    pub(super) fn for_server(server: ServerId) -> Self {
        Self { server, previous_server: None, handshake: HandshakeState::Open }
    }

    /// Returns the handshake state and the previous server as one field of `struct flow_table_entry`.
    pub(super) fn encode_state_field(self) -> u16 {
        match (self.handshake, self.previous_server) {
            (HandshakeState::HalfOpenWithTsvalBits(time), _) => intf::HALF_OPEN_FLOW as u16 | time,
            (HandshakeState::Stamped, _) => intf::STAMPED_FLOW as u16,
            (HandshakeState::Open, Some(previous_server)) => previous_server.get(),
            (HandshakeState::Open, None) => intf::NO_SERVER as u16,
        }
    }

    fn encode_flow_word_low_bits(self) -> u64 {
        u64::from(self.encode_state_field()) << intf::FLOW_PREVIOUS_SHIFT | u64::from(self.server.get())
    }

    fn from_flow_word(flow_word: u64) -> Self {
        let server_id_in_bits = |bits: u64| ServerId::try_from(bits & 0xffff).ok();
        let state_field = flow_word >> intf::FLOW_PREVIOUS_SHIFT;
        Self {
            server: server_id_in_bits(flow_word).expect("an entry holds a server's id"),
            previous_server: server_id_in_bits(state_field),
            handshake: HandshakeState::from_state_field(state_field as u16),
        }
    }
}

/// Set-associative flow table, in which a flow may use any entry of its set.
#[derive(Debug)]
pub(super) struct FlowTable {
    table_words: Vec<u64>,
}

#[derive(Debug, Clone, Copy)]
pub(super) struct FlowKey {
    hash: ConnectionHash,
    service_slot: u64,
    protocol: TransportProtocol,
}

impl FlowKey {
    fn flow_tag(self) -> u64 {
        u64::from(self.hash.entry_tag() | 1)
    }
}

fn service_slot_from_use_word(use_word: u64) -> u64 {
    use_word >> intf::FLOW_SERVICE_SHIFT & 0xffff
}

fn ticks_since_last_use(use_word: u64, now: DecisecondTicks) -> u64 {
    (now.0.wrapping_sub(use_word as u32) as i32).max(0) as u64
}

fn is_flow_idle(use_word: u64, now: DecisecondTicks) -> bool {
    let idle_limit_ticks =
        if use_word >> intf::FLOW_UDP_SHIFT & 1 == 1 { intf::FLOW_IDLE_UDP_TICKS } else { intf::FLOW_IDLE_TCP_TICKS };
    ticks_since_last_use(use_word, now) > u64::from(idle_limit_ticks)
}

impl FlowTable {
    /// Returns an empty table of `set_count` sets (at least 1).
    pub fn new(set_count: u32) -> Self {
        Self { table_words: vec![0; set_count as usize * WORDS_PER_FLOW_SET] }
    }

    pub fn table_words(&self) -> &[u64] {
        &self.table_words
    }

    fn flow_set_mut(&mut self, key: FlowKey) -> (&mut [u64], &mut [u64]) {
        let set_count = (self.table_words.len() / WORDS_PER_FLOW_SET) as u64;
        let set_index = ((u64::from(key.hash.low_half()) * set_count) >> 32) as usize;
        self.table_words[set_index * WORDS_PER_FLOW_SET..][..WORDS_PER_FLOW_SET].split_at_mut(FLOW_ENTRIES_PER_SET)
    }

    /// Returns the entry of a flow that has not been idle for too long, and marks it as used at `now`.
    pub fn find_entry(&mut self, key: FlowKey, now: DecisecondTicks) -> Option<FlowEntry> {
        let (flow_words, use_words) = self.flow_set_mut(key);
        let entry_index =
            flow_words.iter().position(|flow_word| flow_word >> intf::FLOW_TAG_SHIFT == key.flow_tag())?;
        if is_flow_idle(use_words[entry_index], now) {
            return None;
        }
        use_words[entry_index] = use_words[entry_index] & !u64::from(u32::MAX) | u64::from(now.0);
        Some(FlowEntry::from_flow_word(flow_words[entry_index]))
    }

    /// Inserts or changes the entry of a flow. Returns false if the entry is a hint for which there is no room.
    pub fn insert_entry(
        &mut self,
        key: FlowKey,
        entry: FlowEntry,
        entry_need: FlowEntryNeed,
        now: DecisecondTicks,
    ) -> bool {
        let (flow_words, use_words) = self.flow_set_mut(key);
        // Criteria for the replacement of an entry, the most important first.
        let replacement_rank = |position: usize| {
            let (flow_word, use_word) = (flow_words[position], use_words[position]);
            let is_same_flow = flow_word >> intf::FLOW_TAG_SHIFT == key.flow_tag();
            let is_replaceable = flow_word == 0 || is_flow_idle(use_word, now);
            let is_hint = use_word >> intf::FLOW_HINT_SHIFT & 1 == 1;
            let is_own_service = service_slot_from_use_word(use_word) == key.service_slot;
            let same_service_count = use_words
                .iter()
                .filter(|other_use_word| {
                    service_slot_from_use_word(**other_use_word) == service_slot_from_use_word(use_word)
                })
                .count();
            let is_half_open =
                HandshakeState::from_state_field((flow_word >> intf::FLOW_PREVIOUS_SHIFT) as u16).is_half_open();
            (
                is_same_flow,
                is_replaceable,
                is_hint,
                same_service_count + usize::from(is_own_service),
                is_own_service,
                is_half_open,
                ticks_since_last_use(use_word, now),
            )
        };
        let entry_index = (0..FLOW_ENTRIES_PER_SET)
            .rev()
            .max_by_key(|position| replacement_rank(*position))
            .expect("a set has entries");
        let (is_flow, is_free, is_hint, ..) = replacement_rank(entry_index);
        if entry_need == FlowEntryNeed::Hint && !(is_flow || is_free || is_hint) {
            return false;
        }
        flow_words[entry_index] = key.flow_tag() << intf::FLOW_TAG_SHIFT | entry.encode_flow_word_low_bits();
        use_words[entry_index] = u64::from(entry_need == FlowEntryNeed::Hint) << intf::FLOW_HINT_SHIFT
            | u64::from(key.protocol == TransportProtocol::Udp) << intf::FLOW_UDP_SHIFT
            | key.service_slot << intf::FLOW_SERVICE_SHIFT
            | u64::from(now.0);
        true
    }

    pub fn remove_flows_of_service(&mut self, service_slot: usize) {
        for set in self.table_words.chunks_mut(WORDS_PER_FLOW_SET) {
            let (flow_words, use_words) = set.split_at_mut(FLOW_ENTRIES_PER_SET);
            let flows_of_service = flow_words
                .iter_mut()
                .zip(use_words)
                .filter(|(_, use_word)| service_slot_from_use_word(**use_word) == service_slot as u64);
            flows_of_service.for_each(|(flow_word, _)| *flow_word = 0);
        }
    }
}

impl LoadBalancer {
    fn build_flow_key(&self, service_slot: usize, tuple: &FourTuple, protocol: TransportProtocol) -> FlowKey {
        let hash = self.connection_hash(service_slot, tuple);
        FlowKey { hash, service_slot: service_slot as u64, protocol }
    }

    /// Returns the entry of a flow, even if its server has left the service.
    pub(super) fn find_flow(
        &mut self,
        service_slot: usize,
        tuple: &FourTuple,
        protocol: TransportProtocol,
    ) -> Option<FlowEntry> {
        let key = self.build_flow_key(service_slot, tuple, protocol);
        self.flow_table.find_entry(key, self.connection_table_state.now)
    }

    pub(super) fn find_flow_of_packet(&mut self, service_slot: usize, packet: &ClientPacket) -> Option<FlowEntry> {
        self.find_flow(service_slot, &packet.four_tuple(), packet.protocol)
    }

    /// Returns the flow entry of an unstamped connection to a service with LB-side stamping, or `None` for a stamped
    /// one.
    pub(super) fn find_unstamped_flow(&mut self, service_slot: usize, packet: &ClientPacket) -> Option<FlowEntry> {
        self.find_flow_of_packet(service_slot, packet).filter(|entry| entry.handshake != HandshakeState::Stamped)
    }

    /// Inserts the flow of a packet. Returns false if the entry is a hint for which there is no room.
    pub(super) fn insert_flow(
        &mut self,
        service_slot: usize,
        packet: &ClientPacket,
        entry: FlowEntry,
        entry_need: FlowEntryNeed,
    ) -> bool {
        let key = self.build_flow_key(service_slot, &packet.four_tuple(), packet.protocol);
        self.flow_table.insert_entry(key, entry, entry_need, self.connection_table_state.now)
    }
}
