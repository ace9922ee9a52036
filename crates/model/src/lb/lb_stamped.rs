//! LB-side stamping, where the load balancer writes the cookies (`bpf/lb/lb_cookie.h` and `bpf/lb/reply.h`).

use std::collections::HashMap;

use coreward_intf as intf;

use super::decision::{IpIdentificationChange, PacketDecision};
use super::flow::{FlowEntryNeed, HandshakeState};
use super::ip_packet::{IpFragmentPart, ParseEndCounter};
use super::packet::{self, ClientPacket, RST, SYN};
use super::{FlowEntry, FrameOutcome, LoadBalancer, MacAddress, ServerMapEntry};
use crate::consistency::CookieStamper;
use crate::cookie::{CookieKey, FleetCookieKeys};
use crate::key_activation;
use crate::lb_stamping::{self, ConnectionClockOffsets, ServerClock, connection_word};
use crate::tuple::TransportProtocol;
use crate::{FourTuple, ServerId};

/// Server that sends replies from a source MAC address, with the TSval clock of these replies.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LbStampedServer {
    /// Server whose id the stamped cookies carry.
    pub server: ServerId,
    /// TSval clock of the server.
    pub clock: ServerClock,
}

/// State that a load balancer keeps for LB-side stamping.
#[derive(Debug, Default)]
pub(super) struct LbStampingState {
    /// TSval, on this load balancer's clock, from which the current key is active.
    pub key_switch_ms: u32,
    /// Server at each source MAC address of replies, by service slot and MAC address.
    server_by_mac: HashMap<(usize, MacAddress), LbStampedServer>,
    /// Last known source MAC address of each server's replies, by service slot.
    mac_by_server: HashMap<(usize, ServerId), MacAddress>,
    time_key_by_slot: HashMap<usize, CookieKey>,
    connection_clock_offsets: ConnectionClockOffsets,
}

impl LbStampingState {
    /// Removes a MAC address from its server. Another server with the same address takes the entry over.
    fn remove_mac(&mut self, service_slot: usize, mac: MacAddress) {
        let servers_at_address = self
            .mac_by_server
            .iter()
            .filter(|((entry_slot, _), server_mac)| *entry_slot == service_slot && **server_mac == mac);
        match servers_at_address.map(|((_, id), _)| *id).min() {
            Some(other_server) => {
                self.server_by_mac
                    .entry((service_slot, mac))
                    .and_modify(|stamped_server| stamped_server.server = other_server);
            }
            None => {
                self.server_by_mac.remove(&(service_slot, mac));
            }
        }
    }

    pub fn update_server_mac(&mut self, service_slot: usize, id: ServerId, mac: MacAddress, is_eligible: bool) {
        if !lb_stamping::can_carry_server_id(id) {
            return;
        }
        let previous_mac = self.mac_by_server.insert((service_slot, id), mac).filter(|old_mac| *old_mac != mac);
        let previous_entry = previous_mac
            .and_then(|old_mac| self.server_by_mac.get(&(service_slot, old_mac)).copied())
            .filter(|stamped_server| stamped_server.server == id);
        if let (Some(old_mac), Some(_)) = (previous_mac, previous_entry) {
            self.remove_mac(service_slot, old_mac);
        }
        let entry_at_mac = self.server_by_mac.get(&(service_slot, mac)).copied();
        let keeps_mac = |entry: LbStampedServer| {
            !is_eligible && self.mac_by_server.get(&(service_slot, entry.server)) == Some(&mac)
        };
        if entry_at_mac.is_some_and(|entry| entry.server != id && keeps_mac(entry)) {
            return;
        }
        let server_clock =
            entry_at_mac.or(previous_entry).map(|stamped_server| stamped_server.clock).unwrap_or_default();
        self.server_by_mac.insert((service_slot, mac), LbStampedServer { server: id, clock: server_clock });
    }

    pub fn remove_server(&mut self, service_slot: usize, id: ServerId) {
        if let Some(mac) = self.mac_by_server.remove(&(service_slot, id))
            && self.server_by_mac.get(&(service_slot, mac)).is_some_and(|stamped_server| stamped_server.server == id)
        {
            self.remove_mac(service_slot, mac);
        }
    }

    pub fn remove_state_of_service(&mut self, service_slot: usize) {
        self.mac_by_server.retain(|(entry_slot, _), _| *entry_slot != service_slot);
        self.server_by_mac.retain(|(entry_slot, _), _| *entry_slot != service_slot);
        self.time_key_by_slot.remove(&service_slot);
    }

    pub fn set_time_key(&mut self, service_slot: usize, key: CookieKey) {
        self.time_key_by_slot.insert(service_slot, key);
    }

    fn time_key(&self, service_slot: usize) -> CookieKey {
        self.time_key_by_slot.get(&service_slot).copied().unwrap_or(CookieKey { k0: 0, k1: 0 })
    }

    pub fn set_cookie_keys(&mut self, previous_keys: FleetCookieKeys, new_keys: &FleetCookieKeys, now_ms: u32) {
        self.key_switch_ms =
            key_activation::key_activation_time_ms(&(previous_keys, self.key_switch_ms), new_keys, now_ms);
    }
}

impl LoadBalancer {
    /// Sets the key that masks the time in a service's cookies.
    pub fn set_time_key(&mut self, service_slot: usize, key: CookieKey) {
        self.lb_stamping_state.set_time_key(service_slot, key);
    }

    /// Returns each source MAC address of a service's replies, with its server.
    pub fn lb_stamped_servers(&self, service: usize) -> impl Iterator<Item = (MacAddress, LbStampedServer)> + '_ {
        let entry_if_of_service =
            move |((service_slot, mac), stamped_server): (&(usize, MacAddress), &LbStampedServer)| {
                (*service_slot == service).then_some((*mac, *stamped_server))
            };
        self.lb_stamping_state.server_by_mac.iter().filter_map(entry_if_of_service)
    }

    pub(super) fn now_ms(&self) -> u32 {
        self.connection_table_state.now.0.wrapping_mul(100)
    }

    pub(super) fn is_lb_stamped(&self, service_slot: usize) -> bool {
        self.service_in_slot(service_slot).settings.timestamps == CookieStamper::LoadBalancer
    }

    pub(super) fn update_lb_stamped_server(
        &mut self,
        service_slot: usize,
        id: ServerId,
        server: Option<ServerMapEntry>,
    ) {
        match server {
            None => self.lb_stamping_state.remove_server(service_slot, id),
            Some(ServerMapEntry { mac: Some(mac), is_eligible }) if self.is_lb_stamped(service_slot) => {
                self.lb_stamping_state.update_server_mac(service_slot, id, mac, is_eligible);
            }
            Some(_) => {}
        }
    }

    /// Processes a server's reply of a service with LB-side stamping. Returns `None` for any other frame.
    pub(super) fn process_server_reply(&mut self, frame: &mut [u8]) -> Option<FrameOutcome> {
        let (service_slot, packet) = self.parse_reply(frame)?;
        let key = (service_slot, packet::source_mac(frame));
        let mut outcome = FrameOutcome {
            counter: intf::LB_COUNTER_REPLY_UNCHANGED,
            service_slot: Some(service_slot),
            server: None,
            syn_table_entry_index: None,
            event: None,
        };
        let (Ok(packet), Some(mut stamped_server)) = (packet, self.lb_stamping_state.server_by_mac.get(&key).copied())
        else {
            return Some(outcome);
        };
        if self.is_syn_ack_of_second_server(service_slot, &packet, stamped_server.server) {
            outcome.counter = intf::LB_COUNTER_DROP_LATE_SYN_ACK;
            return Some(outcome);
        }
        let server_tsval = packet.tsecr.map(|tsecr| tsecr.preceding_tsval(frame));
        if let Some(tsval) = server_tsval.filter(|_| packet.tcp_flags & RST == 0) {
            let connection = connection_word(&self.connection_table_state.connection_key, &packet.four_tuple());
            stamped_server.clock.record_reply_tsval(connection, tsval.timestamp_value, self.now_ms());
        }
        let is_stamped = self.decide_whether_to_stamp_reply(
            service_slot,
            &packet,
            &mut stamped_server,
            server_tsval.map(|tsval| tsval.timestamp_value),
            &mut outcome,
        );
        if let Some(tsval) = server_tsval.filter(|_| is_stamped) {
            let stamped_tsval =
                self.stamp_reply_tsval(service_slot, &packet, &mut stamped_server, tsval.timestamp_value);
            packet::set_tsecr(frame, &tsval, stamped_tsval);
            outcome.counter = intf::LB_COUNTER_REPLY_STAMPED;
        }
        self.lb_stamping_state.server_by_mac.insert(key, stamped_server);
        Some(outcome)
    }

    /// Parses a server's reply of a service with LB-side stamping, and returns it with the service's slot. Returns
    /// `None` for any other frame. The inner result is an error if the ports are complete but the TCP header is
    /// malformed.
    fn parse_reply(&self, frame: &[u8]) -> Option<(usize, Result<ClientPacket, ParseEndCounter>)> {
        packet::read_frame_fields(frame).filter(|frame_fields| frame_fields.destination_mac == self.own_mac)?;
        let ip_packet = packet::parse_ip(frame).ok()?;
        if ip_packet.protocol_number != TransportProtocol::Tcp.iana_number()
            || ip_packet.fragment_part != IpFragmentPart::Whole
        {
            return None;
        }
        let ports = packet::parse_ports(&ip_packet, intf::LB_COUNTER_DROP_MALFORMED_TCP).ok()?;
        let service_slot = self.find_service_slot(ip_packet.client, ports.0, ip_packet.protocol_number).ok()?;
        if !self.is_lb_stamped(service_slot) {
            return None;
        }
        Some((service_slot, packet::parse_tcp_reply(&ip_packet, ports)))
    }

    /// Returns whether the packet is a SYN-ACK, and another server sent a SYN-ACK of the connection earlier. SYNs go to
    /// that server while it takes new connections.
    fn is_syn_ack_of_second_server(&mut self, service_slot: usize, packet: &ClientPacket, server: ServerId) -> bool {
        packet.tcp_flags & SYN != 0
            && self.find_unstamped_server(service_slot, packet).is_some_and(|earlier_server| earlier_server != server)
    }

    /// Returns whether the reply is to be stamped. The SYN-ACK decides this for the whole connection, and an unstamped
    /// connection enters the flow table.
    fn decide_whether_to_stamp_reply(
        &mut self,
        service_slot: usize,
        packet: &ClientPacket,
        stamped_server: &mut LbStampedServer,
        server_tsval_ms: Option<u32>,
        outcome: &mut FrameOutcome,
    ) -> bool {
        let unstamped_flow = self.find_unstamped_flow(service_slot, packet);
        if packet.tcp_flags & SYN == 0 {
            // After an unstamped SYN-ACK, a server sends data when the client has answered it, or by TCP Fast Open.
            let unstamped_flow = unstamped_flow.filter(|flow_entry| {
                !flow_entry.handshake.is_half_open() || flow_entry.server == stamped_server.server
            });
            // A reply proves that the connection exists, unless it is a reset, which may answer any packet.
            if unstamped_flow.is_none() && server_tsval_ms.is_none() && packet.tcp_flags & RST == 0 {
                self.insert_flow(
                    service_slot,
                    packet,
                    FlowEntry::for_server(stamped_server.server),
                    FlowEntryNeed::Needed,
                );
                outcome.event = Some(intf::LB_EVENT_FLOW_INSERTED);
            }
            return unstamped_flow.is_none() && server_tsval_ms.is_some();
        }
        stamped_server.clock.record_syn_ack(
            connection_word(&self.connection_table_state.connection_key, &packet.four_tuple()),
            server_tsval_ms,
            self.now_ms(),
        );
        if server_tsval_ms.is_some() && stamped_server.clock.can_stamp_connections() && unstamped_flow.is_none() {
            return true;
        }
        let handshake = HandshakeState::half_open(server_tsval_ms.unwrap_or(0));
        let entry = FlowEntry { handshake, ..FlowEntry::for_server(stamped_server.server) };
        if unstamped_flow != Some(entry) {
            self.insert_flow(service_slot, packet, entry, FlowEntryNeed::Needed);
            outcome.event = Some(intf::LB_EVENT_FLOW_INSERTED);
        }
        false
    }

    fn stamp_reply_tsval(
        &mut self,
        service_slot: usize,
        packet: &ClientPacket,
        stamped_server: &mut LbStampedServer,
        server_tsval_ms: u32,
    ) -> u32 {
        let (tuple, now_ms) = (packet.four_tuple(), self.now_ms());
        let hash = self.connection_hash(service_slot, &tuple);
        let offset_ms = stamped_server.clock.record_stamped_reply(
            &mut self.lb_stamping_state.connection_clock_offsets,
            hash,
            server_tsval_ms,
            now_ms,
        );
        let keys = self
            .cookie_keys
            .keys_for_tsval(server_tsval_ms.wrapping_sub(offset_ms), self.lb_stamping_state.key_switch_ms);
        lb_stamping::stamp_tsval(
            &keys,
            &self.lb_stamping_state.time_key(service_slot),
            &tuple,
            stamped_server.server,
            server_tsval_ms,
        )
    }

    /// Returns the server of an unstamped connection with the packet's addresses and ports, if it takes new
    /// connections.
    pub(super) fn find_unstamped_server(&mut self, service_slot: usize, packet: &ClientPacket) -> Option<ServerId> {
        let server = self.find_unstamped_flow(service_slot, packet)?.server;
        self.service_in_slot(service_slot).takes_new_connections(server).then_some(server)
    }

    /// Decides on a client's packet to a service with LB-side stamping, if it opens no connection or has no timestamps.
    pub(super) fn decide_lb_stamped(&mut self, service_slot: usize, packet: &ClientPacket) -> PacketDecision {
        let is_syn = packet.tcp_flags & SYN != 0;
        if let Some(entry) = self.find_unstamped_flow(service_slot, packet)
            && self.may_receive_packet(service_slot, entry.server, is_syn)
            && (is_syn || !self.check_and_mark_stamped_flow(service_slot, packet, entry))
        {
            if entry.handshake.is_half_open() && !is_syn {
                self.insert_flow(service_slot, packet, FlowEntry::for_server(entry.server), FlowEntryNeed::Needed);
            }
            return self.decide_delivery_to_server(service_slot, entry.server, intf::LB_COUNTER_FLOW_TABLE);
        }
        let Some(tsecr) = packet.tsecr else {
            if packet.tcp_flags & RST != 0 {
                return PacketDecision::from_counter(intf::LB_COUNTER_DROP_UNKNOWN_COOKIE);
            }
            return match self.decide_by_bucket(service_slot, packet) {
                (None, _) if is_syn => self.decide_by_rule(service_slot, packet, intf::LB_COUNTER_NEW_CONNECTION),
                (_, decision) => decision.with_identification_change(IpIdentificationChange::Unchanged),
            };
        };
        let tuple = packet.four_tuple();
        let id = lb_stamping::decode_server_id(&self.cookie_keys, &tuple, tsecr.timestamp_value);
        let Some(server) = self.service_in_slot(service_slot).server(id) else {
            return PacketDecision::from_counter(intf::LB_COUNTER_DROP_UNKNOWN_COOKIE);
        };
        let decision = self
            .decide_delivery_to_server(service_slot, id, intf::LB_COUNTER_ESTABLISHED)
            .with_closes_connection(packet.is_closing());
        let lb_stamped_server =
            server.mac.and_then(|mac| self.lb_stamping_state.server_by_mac.get(&(service_slot, mac)));
        let restored_tsecr = lb_stamped_server.map_or(tsecr.timestamp_value, |stamped_server| {
            self.restore_tsecr(service_slot, &tuple, tsecr.timestamp_value, stamped_server)
        });
        decision.with_new_tsecr(tsecr, restored_tsecr)
    }

    /// Returns whether a client's packet belongs to a stamped connection despite its flow entry, and if so, changes the
    /// entry. This happens if the client's SYNs reached two servers and the client answered the stamped SYN-ACK.
    fn check_and_mark_stamped_flow(&mut self, service_slot: usize, packet: &ClientPacket, entry: FlowEntry) -> bool {
        let Some(tsecr) = packet.tsecr else { return false };
        if !entry.handshake.is_half_open() || entry.handshake.is_answered_by(tsecr.timestamp_value) {
            return false;
        }
        let id = lb_stamping::decode_server_id(&self.cookie_keys, &packet.four_tuple(), tsecr.timestamp_value);
        let is_known = self.service_in_slot(service_slot).server(id).is_some();
        if is_known {
            let stamped_entry = FlowEntry { handshake: HandshakeState::Stamped, ..FlowEntry::for_server(id) };
            self.insert_flow(service_slot, packet, stamped_entry, FlowEntryNeed::Needed);
        }
        is_known
    }

    /// Returns the TSval that the server sent, or 0 ("no TSecr") if the clock of the connection is not known.
    fn restore_tsecr(
        &self,
        service_slot: usize,
        tuple: &FourTuple,
        tsecr: u32,
        stamped_server: &LbStampedServer,
    ) -> u32 {
        let hash = self.connection_hash(service_slot, tuple);
        let offset_ms =
            stamped_server.clock.connection_offset_ms(&self.lb_stamping_state.connection_clock_offsets, hash);
        offset_ms.map_or(0, |offset_ms| {
            let server_clock_ms = self.now_ms().wrapping_add(offset_ms);
            lb_stamping::restore_tsval(&self.lb_stamping_state.time_key(service_slot), tuple, tsecr, server_clock_ms)
        })
    }
}
