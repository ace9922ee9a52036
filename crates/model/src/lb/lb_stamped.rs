//! LB-side stamping (`timestamps = "lb"`): `bpf/lb/lb_cookie.h` and `bpf/lb/reply.h`.

use std::collections::HashMap;

use coreward_intf as intf;

use super::decision::{Decision, Identification};
use super::flow::{FlowEntryKind, HandshakeState};
use super::ip_packet::FragmentPart;
use super::packet::{self, Packet, RST, SYN};
use super::{FlowEntry, LoadBalancer, Mac, Outcome, Server};
use crate::consistency::Timestamps;
use crate::cookie::{CookieKey, FleetKeys};
use crate::key_activation;
use crate::lb_stamping::{self, ConnectionOffsets, ServerClock, connection_word};
use crate::tuple::Protocol;
use crate::{FourTuple, ServerId};

/// The server behind a source MAC address, and its TSval clock.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LbStampedServer {
    /// Server whose id the cookies carry.
    pub server: ServerId,
    /// TSval clock of the server.
    pub clock: ServerClock,
}

/// State of LB-side stamping in a load balancer.
#[derive(Debug, Default)]
pub(super) struct LbStamping {
    /// TSval of this load balancer's clock from which the current key is in force.
    pub switch_ms: u32,
    /// Servers by the service's slot and the source MAC address of replies.
    servers: HashMap<(usize, Mac), LbStampedServer>,
    /// Last known source MAC address of each server's replies, by service slot.
    server_macs: HashMap<(usize, ServerId), Mac>,
    time_keys: HashMap<usize, CookieKey>,
    own_offsets: ConnectionOffsets,
}

impl LbStamping {
    /// Removes a MAC address from its server; another server with the same address takes it over.
    fn remove_address(&mut self, service_slot: usize, mac: Mac) {
        let others = self.server_macs.iter().filter(|((of, _), at)| *of == service_slot && **at == mac);
        match others.map(|((_, id), _)| *id).min() {
            Some(other) => {
                self.servers.entry((service_slot, mac)).and_modify(|known| known.server = other);
            }
            None => {
                self.servers.remove(&(service_slot, mac));
            }
        }
    }

    pub fn move_server(&mut self, service_slot: usize, id: ServerId, mac: Mac, eligible: bool) {
        if !lb_stamping::can_name(id) {
            return;
        }
        let left = self.server_macs.insert((service_slot, id), mac).filter(|left| *left != mac);
        let known =
            left.and_then(|left| self.servers.get(&(service_slot, left)).copied()).filter(|known| known.server == id);
        if let (Some(left), Some(_)) = (left, known) {
            self.remove_address(service_slot, left);
        }
        let here = self.servers.get(&(service_slot, mac)).copied();
        let other_stays =
            |here: LbStampedServer| !eligible && self.server_macs.get(&(service_slot, here.server)) == Some(&mac);
        if here.is_some_and(|here| here.server != id && other_stays(here)) {
            return;
        }
        let clock = here.or(known).map(|known| known.clock).unwrap_or_default();
        self.servers.insert((service_slot, mac), LbStampedServer { server: id, clock });
    }

    pub fn forget_server(&mut self, service_slot: usize, id: ServerId) {
        if let Some(mac) = self.server_macs.remove(&(service_slot, id))
            && self.servers.get(&(service_slot, mac)).is_some_and(|known| known.server == id)
        {
            self.remove_address(service_slot, mac);
        }
    }

    pub fn forget_service(&mut self, service_slot: usize) {
        self.server_macs.retain(|(of, _), _| *of != service_slot);
        self.servers.retain(|(of, _), _| *of != service_slot);
        self.time_keys.remove(&service_slot);
    }

    pub fn set_time_key(&mut self, service_slot: usize, key: CookieKey) {
        self.time_keys.insert(service_slot, key);
    }

    fn time_key(&self, service_slot: usize) -> CookieKey {
        self.time_keys.get(&service_slot).copied().unwrap_or(CookieKey { k0: 0, k1: 0 })
    }

    pub fn set_keys(&mut self, before: FleetKeys, new: &FleetKeys, now_ms: u32) {
        self.switch_ms = key_activation::switch_ms(&(before, self.switch_ms), new, now_ms);
    }
}

impl LoadBalancer {
    /// Sets the key that masks the time in a service's cookies.
    pub fn set_time_key(&mut self, service: usize, key: CookieKey) {
        self.lb_stamping.set_time_key(service, key);
    }

    /// Returns each source MAC address of replies of a service, with its server.
    pub fn lb_stamped(&self, service: usize) -> impl Iterator<Item = (Mac, LbStampedServer)> + '_ {
        let of_service = move |((service_slot, mac), known): (&(usize, Mac), &LbStampedServer)| {
            (*service_slot == service).then_some((*mac, *known))
        };
        self.lb_stamping.servers.iter().filter_map(of_service)
    }

    pub(super) fn now_ms(&self) -> u32 {
        self.stateful.clock.0.wrapping_mul(100)
    }

    pub(super) fn is_lb_stamped(&self, service_slot: usize) -> bool {
        self.service(service_slot).mode.timestamps == Timestamps::LoadBalancer
    }

    pub(super) fn move_lb_stamped(&mut self, service_slot: usize, id: ServerId, server: Option<Server>) {
        match server {
            None => self.lb_stamping.forget_server(service_slot, id),
            Some(Server { mac: Some(mac), eligible }) if self.is_lb_stamped(service_slot) => {
                self.lb_stamping.move_server(service_slot, id, mac, eligible);
            }
            Some(_) => {}
        }
    }

    /// Processes a frame from a server of a service with LB-side stamping; returns `None` for any other frame.
    pub(super) fn process_reply(&mut self, frame: &mut [u8]) -> Option<Outcome> {
        packet::read_frame_fields(frame).filter(|outer| outer.destination_mac == self.own_mac)?;
        let whole = packet::parse_ip(frame).ok()?;
        if whole.protocol != Protocol::Tcp.number() || whole.part != FragmentPart::Whole {
            return None;
        }
        let ports = packet::parse_ports(&whole, intf::LB_COUNTER_DROP_MALFORMED_TCP).ok()?;
        let service_slot = self.service_at(whole.client, ports.0, whole.protocol).ok()?;
        if !self.is_lb_stamped(service_slot) {
            return None;
        }
        let (key, packet) = ((service_slot, packet::source_mac(frame)), packet::parse_tcp_reply(&whole, ports));
        let mut answered = Outcome {
            counter: intf::LB_COUNTER_REPLY_UNCHANGED,
            service: Some(service_slot),
            server: None,
            reported_entry: None,
            event: None,
        };
        let (Ok(packet), Some(mut known)) = (packet, self.lb_stamping.servers.get(&key).copied()) else {
            return Some(answered);
        };
        if self.is_late_syn_ack(service_slot, &packet, known.server) {
            answered.counter = intf::LB_COUNTER_DROP_LATE_SYN_ACK;
            return Some(answered);
        }
        let own = packet.tsecr.map(|tsecr| tsecr.tsval(frame));
        if let Some(own) = own.filter(|_| packet.flags & RST == 0) {
            let connection = connection_word(&self.stateful.key, &packet.tuple());
            known.clock.record_sample(connection, own.value, self.now_ms());
        }
        let stamped =
            self.decide_reply_stamping(service_slot, &packet, &mut known, own.map(|own| own.value), &mut answered);
        if let Some(own) = own.filter(|_| stamped) {
            let value = self.lb_stamped_tsval(service_slot, &packet, &mut known, own.value);
            packet::set_tsecr(frame, &own, value);
            answered.counter = intf::LB_COUNTER_REPLY_STAMPED;
        }
        self.lb_stamping.servers.insert(key, known);
        Some(answered)
    }

    /// Returns whether another server sent a SYN-ACK earlier. SYNs go to that server while it takes new connections.
    fn is_late_syn_ack(&mut self, service_slot: usize, packet: &Packet, server: ServerId) -> bool {
        packet.flags & SYN != 0
            && self.find_unstamped_server(service_slot, packet).is_some_and(|earlier| earlier != server)
    }

    /// Returns whether the reply is stamped. The SYN-ACK decides that for its connection: an unstamped connection
    /// enters the flow table.
    fn decide_reply_stamping(
        &mut self,
        service_slot: usize,
        packet: &Packet,
        known: &mut LbStampedServer,
        milliseconds: Option<u32>,
        answered: &mut Outcome,
    ) -> bool {
        let plain = self.find_unstamped_flow(service_slot, packet);
        if packet.flags & SYN == 0 {
            // A server with an unstamped SYN-ACK sends data when the client has answered it, or by TCP Fast Open.
            let plain = plain.filter(|plain| !plain.handshake.is_half_open() || plain.server == known.server);
            // An answer proves that the connection exists, but a reset answers any packet.
            if plain.is_none() && milliseconds.is_none() && packet.flags & RST == 0 {
                self.insert_flow(service_slot, packet, FlowEntry::of(known.server), FlowEntryKind::Needed);
                answered.event = Some(intf::LB_EVENT_FLOW_INSERTED);
            }
            return plain.is_none() && milliseconds.is_some();
        }
        known.clock.record_syn_ack(connection_word(&self.stateful.key, &packet.tuple()), milliseconds, self.now_ms());
        if milliseconds.is_some() && known.clock.can_be_stamped() && plain.is_none() {
            return true;
        }
        let handshake = HandshakeState::half_open(milliseconds.unwrap_or(0));
        let entry = FlowEntry { handshake, ..FlowEntry::of(known.server) };
        if plain != Some(entry) {
            self.insert_flow(service_slot, packet, entry, FlowEntryKind::Needed);
            answered.event = Some(intf::LB_EVENT_FLOW_INSERTED);
        }
        false
    }

    fn lb_stamped_tsval(
        &mut self,
        service_slot: usize,
        packet: &Packet,
        known: &mut LbStampedServer,
        milliseconds: u32,
    ) -> u32 {
        let (tuple, now_ms) = (packet.tuple(), self.now_ms());
        let hash = self.connection_hash(service_slot, &tuple);
        let offset_ms = known.clock.learn_offset(&mut self.lb_stamping.own_offsets, hash, milliseconds, now_ms);
        let keys = self.keys.at_tsval(milliseconds.wrapping_sub(offset_ms), self.lb_stamping.switch_ms);
        lb_stamping::stamp_tsval(&keys, &self.lb_stamping.time_key(service_slot), &tuple, known.server, milliseconds)
    }

    /// Returns the server of the unstamped connection with a packet's addresses and ports, if it takes new connections.
    pub(super) fn find_unstamped_server(&mut self, service_slot: usize, packet: &Packet) -> Option<ServerId> {
        let server = self.find_unstamped_flow(service_slot, packet)?.server;
        self.service(service_slot).takes_new_connections(server).then_some(server)
    }

    /// Decides on a client's packet that opens no connection, or has no timestamps, to a service with LB-side stamping.
    pub(super) fn decide_lb_stamped(&mut self, service_slot: usize, packet: &Packet) -> Decision {
        let first = packet.flags & SYN != 0;
        if let Some(entry) = self.find_unstamped_flow(service_slot, packet)
            && self.is_usable(service_slot, entry.server, first)
            && (first || !self.is_stamped_flow(service_slot, packet, entry))
        {
            if entry.handshake.is_half_open() && !first {
                self.insert_flow(service_slot, packet, FlowEntry::of(entry.server), FlowEntryKind::Needed);
            }
            return self.deliver_to(service_slot, entry.server, intf::LB_COUNTER_FLOW_TABLE);
        }
        let Some(tsecr) = packet.tsecr else {
            if packet.flags & RST != 0 {
                return Decision::from_counter(intf::LB_COUNTER_DROP_UNKNOWN_COOKIE);
            }
            return match self.decide_by_bucket(service_slot, packet) {
                (None, _) if first => self.decide_by_rule(service_slot, packet, intf::LB_COUNTER_NEW_CONNECTION),
                (_, decision) => decision.with_identification(Identification::Unchanged),
            };
        };
        let tuple = packet.tuple();
        let id = lb_stamping::decode_server_id(&self.keys, &tuple, tsecr.value);
        let Some(server) = self.service(service_slot).server(id) else {
            return Decision::from_counter(intf::LB_COUNTER_DROP_UNKNOWN_COOKIE);
        };
        let decision = self.deliver_to(service_slot, id, intf::LB_COUNTER_ESTABLISHED).closing(packet.is_closing());
        let known = server.mac.and_then(|mac| self.lb_stamping.servers.get(&(service_slot, mac)));
        let restored = known.map_or(tsecr.value, |known| self.restored_tsecr(service_slot, &tuple, tsecr.value, known));
        decision.with_tsecr(tsecr, restored)
    }

    /// Returns whether a client's packet belongs to a stamped connection despite its flow entry: its SYNs reached two
    /// servers, and the client answered the stamped SYN-ACK. Then the entry is changed.
    fn is_stamped_flow(&mut self, service_slot: usize, packet: &Packet, entry: FlowEntry) -> bool {
        let Some(tsecr) = packet.tsecr else { return false };
        if !entry.handshake.is_half_open() || entry.handshake.is_answered_by(tsecr.value) {
            return false;
        }
        let id = lb_stamping::decode_server_id(&self.keys, &packet.tuple(), tsecr.value);
        let is_known = self.service(service_slot).server(id).is_some();
        if is_known {
            let stamped = FlowEntry { handshake: HandshakeState::Stamped, ..FlowEntry::of(id) };
            self.insert_flow(service_slot, packet, stamped, FlowEntryKind::Needed);
        }
        is_known
    }

    /// Returns the TSval that the server sent; 0 ("no TSecr") if the clock of the connection is not known.
    fn restored_tsecr(&self, service_slot: usize, tuple: &FourTuple, tsecr: u32, known: &LbStampedServer) -> u32 {
        let hash = self.connection_hash(service_slot, tuple);
        let offset_ms = known.clock.offset_of(&self.lb_stamping.own_offsets, hash);
        offset_ms.map_or(0, |offset_ms| {
            let clock_ms = self.now_ms().wrapping_add(offset_ms);
            lb_stamping::restore_tsval(&self.lb_stamping.time_key(service_slot), tuple, tsecr, clock_ms)
        })
    }
}
