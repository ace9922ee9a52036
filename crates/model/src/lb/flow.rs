//! Flow state: the flow table (`bpf/lb/flow_table.h`), and the destination of a datagram's first fragment.
//!
//! The table of fragments is unbounded here; the BPF program has an LRU hash. Both agree until the first eviction.

use std::net::IpAddr;

use coreward_intf as intf;

use super::LoadBalancer;
use super::ip_packet::IpPacket;
use super::packet::Packet;
use crate::connection_table::{ClockTicks, ConnectionHash};
use crate::tuple::Protocol;
use crate::{FourTuple, ServerId};

const ENTRY_COUNT: usize = intf::FLOW_SET_ENTRIES as usize;
/// Number of 64-bit words of a set: `flow` and `use` of `struct flow_set`.
const SET_WORDS: usize = size_of::<intf::flow_set>() / size_of::<u64>();

/// Entry of the flow table: the destination of a flow.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct FlowEntry {
    /// Server to which the flow's packets go.
    pub server: ServerId,
    /// Server to which the flow's server forwards packets of unknown connections.
    pub previous_server: Option<ServerId>,
    /// State of the flow's TCP handshake.
    pub handshake: HandshakeState,
}

/// State of the TCP handshake of a flow of a service with LB-side stamping; other flows are [`Open`](Self::Open).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum HandshakeState {
    /// The client has sent a packet after the SYN-ACK.
    Open,
    /// Unstamped SYN-ACK, and no later packet from the client (`HALF_OPEN_FLOW`); with bits of the SYN-ACK's TSval.
    HalfOpen(u16),
    /// The client has answered a stamped SYN-ACK of another server (`STAMPED_FLOW`).
    Stamped,
}

impl HandshakeState {
    /// Returns the state after an unstamped SYN-ACK with TSval `tsval`.
    pub(super) fn half_open(tsval: u32) -> Self {
        Self::HalfOpen((tsval >> intf::HALF_OPEN_TIME_SHIFT) as u16)
    }

    pub(super) fn is_half_open(self) -> bool {
        matches!(self, Self::HalfOpen(_))
    }

    /// Returns whether the client's TSecr `tsecr` may be the TSval of the unstamped SYN-ACK.
    pub(super) fn is_answered_by(self, tsecr: u32) -> bool {
        let Self::HalfOpen(time) = self else { return false };
        let difference = (tsecr >> intf::HALF_OPEN_TIME_SHIFT).wrapping_sub(time.into());
        let tolerance = intf::HALF_OPEN_TIME_TOLERANCE;
        difference.wrapping_add(tolerance) & intf::HALF_OPEN_TIME_MASK <= 2 * tolerance
    }

    fn from_field(field: u16) -> Self {
        match u32::from(field) {
            intf::STAMPED_FLOW => Self::Stamped,
            field if field & intf::HALF_OPEN_FLOW_MASK == intf::HALF_OPEN_FLOW => {
                Self::HalfOpen((field & intf::HALF_OPEN_TIME_MASK) as u16)
            }
            _ => Self::Open,
        }
    }
}

/// Kind of an entry of the flow table.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum FlowEntryKind {
    /// The bucket leads to the same server, unless it has moved since.
    Hint,
    /// Only the entry leads to the flow's server.
    Needed,
}

/// Key by which later fragments of a datagram are matched with the first one.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) struct FragmentKey {
    client: IpAddr,
    vip: IpAddr,
    identification: u32,
    protocol: u8,
}

impl FragmentKey {
    pub fn of(packet: &IpPacket<'_>) -> Self {
        let IpPacket { client, vip, identification, protocol, .. } = *packet;
        Self { client, vip, identification, protocol }
    }
}

impl FlowEntry {
    /// Returns the entry of a new connection to `server`.
    pub(super) fn of(server: ServerId) -> Self {
        Self { server, previous_server: None, handshake: HandshakeState::Open }
    }

    /// Returns handshake state and previous server as one field of `struct flow_table_entry`.
    pub(super) fn encode_state_field(self) -> u16 {
        match (self.handshake, self.previous_server) {
            (HandshakeState::HalfOpen(time), _) => intf::HALF_OPEN_FLOW as u16 | time,
            (HandshakeState::Stamped, _) => intf::STAMPED_FLOW as u16,
            (HandshakeState::Open, Some(before)) => before.get(),
            (HandshakeState::Open, None) => intf::NO_SERVER as u16,
        }
    }

    fn low_word(self) -> u64 {
        u64::from(self.encode_state_field()) << intf::FLOW_PREVIOUS_SHIFT | u64::from(self.server.get())
    }

    fn from_word(word: u64) -> Self {
        let id = |bits: u64| ServerId::try_from(bits & 0xffff).ok();
        let before = word >> intf::FLOW_PREVIOUS_SHIFT;
        Self {
            server: id(word).expect("an entry holds a server's id"),
            previous_server: id(before),
            handshake: HandshakeState::from_field(before as u16),
        }
    }
}

/// The flow table: sets of entries, all of which can be used.
#[derive(Debug)]
pub(super) struct FlowTable {
    words: Vec<u64>,
}

#[derive(Debug, Clone, Copy)]
pub(super) struct FlowKey {
    hash: ConnectionHash,
    service: u64,
    protocol: Protocol,
}

impl FlowKey {
    fn tag(self) -> u64 {
        u64::from(self.hash.tag() | 1)
    }
}

fn flow_use_service(used: u64) -> u64 {
    used >> intf::FLOW_SERVICE_SHIFT & 0xffff
}

fn age(used: u64, now: ClockTicks) -> u64 {
    (now.0.wrapping_sub(used as u32) as i32).max(0) as u64
}

fn is_idle(used: u64, now: ClockTicks) -> bool {
    let limit =
        if used >> intf::FLOW_UDP_SHIFT & 1 == 1 { intf::FLOW_IDLE_UDP_TICKS } else { intf::FLOW_IDLE_TCP_TICKS };
    age(used, now) > u64::from(limit)
}

impl FlowTable {
    /// Returns an empty table of `sets` sets; at least one.
    pub fn new(sets: u32) -> Self {
        Self { words: vec![0; sets as usize * SET_WORDS] }
    }

    /// Returns the 64-bit words of the whole table.
    pub fn words(&self) -> &[u64] {
        &self.words
    }

    fn flow_set_mut(&mut self, key: FlowKey) -> (&mut [u64], &mut [u64]) {
        let sets = (self.words.len() / SET_WORDS) as u64;
        let set = ((u64::from(key.hash.low_half()) * sets) >> 32) as usize;
        self.words[set * SET_WORDS..][..SET_WORDS].split_at_mut(ENTRY_COUNT)
    }

    /// Returns the entry of a flow, and marks it as used at `now`.
    pub fn find(&mut self, key: FlowKey, now: ClockTicks) -> Option<FlowEntry> {
        let (flows, used) = self.flow_set_mut(key);
        let position = flows.iter().position(|flow| flow >> intf::FLOW_TAG_SHIFT == key.tag())?;
        if is_idle(used[position], now) {
            return None;
        }
        used[position] = used[position] & !u64::from(u32::MAX) | u64::from(now.0);
        Some(FlowEntry::from_word(flows[position]))
    }

    /// Inserts or changes the entry of a flow. Returns false if the entry is a hint for which there is no room.
    pub fn insert(&mut self, key: FlowKey, entry: FlowEntry, kind: FlowEntryKind, now: ClockTicks) -> bool {
        let (flows, used) = self.flow_set_mut(key);
        // Criteria of replacement, most important first.
        let rank = |position: usize| {
            let (flow, use_of) = (flows[position], used[position]);
            let is_flow = flow >> intf::FLOW_TAG_SHIFT == key.tag();
            let is_free = flow == 0 || is_idle(use_of, now);
            let is_hint = use_of >> intf::FLOW_HINT_SHIFT & 1 == 1;
            let own = flow_use_service(use_of) == key.service;
            let of_service = used.iter().filter(|other| flow_use_service(**other) == flow_use_service(use_of)).count();
            let half_open = HandshakeState::from_field((flow >> intf::FLOW_PREVIOUS_SHIFT) as u16).is_half_open();
            (is_flow, is_free, is_hint, of_service + usize::from(own), own, half_open, age(use_of, now))
        };
        let position = (0..ENTRY_COUNT).rev().max_by_key(|position| rank(*position)).expect("a set has entries");
        let (is_flow, is_free, is_hint, ..) = rank(position);
        if kind == FlowEntryKind::Hint && !(is_flow || is_free || is_hint) {
            return false;
        }
        flows[position] = key.tag() << intf::FLOW_TAG_SHIFT | entry.low_word();
        used[position] = u64::from(kind == FlowEntryKind::Hint) << intf::FLOW_HINT_SHIFT
            | u64::from(key.protocol == Protocol::Udp) << intf::FLOW_UDP_SHIFT
            | key.service << intf::FLOW_SERVICE_SHIFT
            | u64::from(now.0);
        true
    }

    /// Removes all flows of the service in slot `service`.
    pub fn remove_service(&mut self, service: usize) {
        for set in self.words.chunks_mut(SET_WORDS) {
            let (flows, used) = set.split_at_mut(ENTRY_COUNT);
            let theirs = flows.iter_mut().zip(used).filter(|(_, used)| flow_use_service(**used) == service as u64);
            theirs.for_each(|(flow, _)| *flow = 0);
        }
    }
}

impl LoadBalancer {
    fn flow_key(&self, service: usize, tuple: &FourTuple, protocol: Protocol) -> FlowKey {
        let hash = self.connection_hash(service, tuple);
        FlowKey { hash, service: service as u64, protocol }
    }

    /// Returns the entry of a flow, even if the service no longer has its server.
    pub(super) fn find_flow(&mut self, service: usize, tuple: &FourTuple, protocol: Protocol) -> Option<FlowEntry> {
        let key = self.flow_key(service, tuple, protocol);
        self.flows.find(key, self.stateful.clock)
    }

    pub(super) fn find_packet_flow(&mut self, service: usize, packet: &Packet) -> Option<FlowEntry> {
        self.find_flow(service, &packet.tuple(), packet.protocol)
    }

    /// Returns the entry of a packet's flow to a service with LB-side stamping; `None` for a stamped connection.
    pub(super) fn find_unstamped_flow(&mut self, service: usize, packet: &Packet) -> Option<FlowEntry> {
        self.find_packet_flow(service, packet).filter(|entry| entry.handshake != HandshakeState::Stamped)
    }

    /// Inserts the flow of a packet. Returns false if the entry is a hint for which there is no room.
    pub(super) fn insert_flow(
        &mut self,
        service: usize,
        packet: &Packet,
        entry: FlowEntry,
        kind: FlowEntryKind,
    ) -> bool {
        let key = self.flow_key(service, &packet.tuple(), packet.protocol);
        self.flows.insert(key, entry, kind, self.stateful.clock)
    }
}
