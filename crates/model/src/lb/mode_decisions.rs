//! Decisions by the consistency mode and the packet, as in the table in docs/design.md, "Consistency", row by row.

use std::net::IpAddr;

use coreward_intf as intf;

use super::decision::{IpIdentificationChange, PacketDecision};
use super::encapsulation::set_frame_macs;
use super::flow::{FlowEntryNeed, FragmentKey};
use super::ip_packet::{IpFragmentPart, IpPacket, NOT_SERVICE_COUNTER, ParseEndCounter};
use super::packet::{self, ClientPacket, RST, SYN};
use super::packet_ipv6::PROTOCOL_ICMPV6;
use super::stateful::ConnectionIndexLookup;
use super::{BroadcastReason, FlowEntry, FrameOutcome, LoadBalancer, MacAddress, ServerTraffic};
use crate::ServerId;
use crate::consistency::{ConsistencyMode, ServiceMigration};
use crate::cookie::{self, Cookie};
use crate::tuple::TransportProtocol;

/// Protocol number of TCP in the IP header.
const TCP_PROTOCOL_NUMBER: u8 = 6;
pub(super) const UDP_PROTOCOL_NUMBER: u8 = 17;

pub(super) const BROADCAST_MAC: MacAddress = [0xff; 6];

#[derive(Debug, Clone, Copy)]
pub(super) struct FrameSourceAndSize {
    pub(super) mac: MacAddress,
    frame_bytes: u64,
}

impl LoadBalancer {
    /// Processes a frame in the VLAN of the VIPs, after its VLAN tag was removed.
    pub(super) fn process_untagged_frame(&mut self, frame: &mut Vec<u8>, now_ns: u64) -> FrameOutcome {
        if let Some(reply_outcome) = self.process_server_reply(frame) {
            return reply_outcome;
        }
        let mut service_slot_if_known = None;
        let decision = self
            .parse_and_decide(frame, now_ns, &mut service_slot_if_known)
            .unwrap_or_else(PacketDecision::from_counter);
        let outcome = decision.frame_outcome(service_slot_if_known);
        if decision.is_forwarded() {
            let frame_bytes = frame.len() as u64;
            if let IpIdentificationChange::PreviousServerId(previous_server_id) = decision.identification_change {
                packet::set_identification(frame, previous_server_id);
            }
            if let Some((tsecr, value)) = &decision.new_tsecr {
                packet::set_tsecr(frame, tsecr, *value);
            }
            let slot_and_server = outcome.service_slot.zip(outcome.server);
            if let Err(drop_counter) = self.rewrite_frame_for_forwarding(frame, &decision, slot_and_server, now_ns) {
                self.count_opened_and_closed_connection(&decision, slot_and_server);
                return PacketDecision { counter: drop_counter, ..decision }.frame_outcome(service_slot_if_known);
            }
            self.count_opened_and_closed_connection(&decision, slot_and_server);
            if let Some((_, server)) = slot_and_server {
                self.count_traffic(server, frame_bytes);
            }
        }
        outcome
    }

    /// Rewrites a frame for the service's forwarding method. If the packet must be dropped, the error is the counter
    /// for the reason.
    fn rewrite_frame_for_forwarding(
        &mut self,
        frame: &mut Vec<u8>,
        decision: &PacketDecision,
        slot_and_server: Option<(usize, ServerId)>,
        now_ns: u64,
    ) -> Result<(), ParseEndCounter> {
        if let Some((service_slot, server)) = slot_and_server {
            let forwarding_method = self.service_in_slot(service_slot).settings.forwarding;
            if forwarding_method.encapsulates() {
                let tunnel = *self.tunnel_by_server.get(&server).ok_or(intf::LB_COUNTER_DROP_SERVER_UNRESOLVED)?;
                let inner_mtu_bytes = self.settings.outer_header.mtu_bytes
                    - forwarding_method.encapsulation_overhead_bytes(tunnel.address);
                if packet::ip_packet_bytes(frame) > inner_mtu_bytes {
                    return Err(self.drop_packet_exceeding_mtu(frame, service_slot, inner_mtu_bytes, now_ns));
                }
                self.encapsulate_frame(frame, forwarding_method, tunnel);
            }
        }
        set_frame_macs(frame, decision.destination_mac, self.own_mac);
        Ok(())
    }

    /// Parses a frame and decides on its packet. Sets `out_service_slot` to the service's slot as soon as it is known.
    fn parse_and_decide(
        &mut self,
        frame: &[u8],
        now_ns: u64,
        out_service_slot: &mut Option<usize>,
    ) -> Result<PacketDecision, ParseEndCounter> {
        let frame_fields = packet::read_frame_fields(frame).ok_or(NOT_SERVICE_COUNTER)?;
        if frame_fields.destination_mac != self.own_mac || !self.vips.contains(&frame_fields.vip) {
            return Err(NOT_SERVICE_COUNTER);
        }
        // In IPv6, the protocol is known only behind the extension headers.
        if frame_fields.vip.is_ipv4() && !self.is_handled_protocol(frame_fields.protocol_number) {
            return Err(NOT_SERVICE_COUNTER);
        }
        let ip_packet = packet::parse_ip(frame)?;
        let sender = FrameSourceAndSize { mac: packet::source_mac(frame), frame_bytes: frame.len() as u64 };
        match (ip_packet.protocol_number, ip_packet.fragment_part) {
            (PROTOCOL_ICMPV6, _) if frame_fields.protocol_number != PROTOCOL_ICMPV6 => Err(NOT_SERVICE_COUNTER),
            (packet::PROTOCOL_ICMP | PROTOCOL_ICMPV6, _) if icmp_version_matches_ip_version(&ip_packet) => {
                self.decide_icmp_error(&ip_packet, sender, now_ns, out_service_slot)
            }
            (packet::PROTOCOL_ICMP, _) => Err(NOT_SERVICE_COUNTER),
            (protocol, _) if !self.is_handled_protocol(protocol) => Err(NOT_SERVICE_COUNTER),
            (UDP_PROTOCOL_NUMBER, IpFragmentPart::Later) => self.decide_later_fragment(&ip_packet, out_service_slot),
            (UDP_PROTOCOL_NUMBER, _) | (_, IpFragmentPart::Whole) => {
                self.decide_tcp_or_udp_packet(&ip_packet, &sender, now_ns, out_service_slot)
            }
            (_, _) => Err(intf::LB_COUNTER_DROP_FRAGMENT),
        }
    }

    /// Decides on a TCP segment, a UDP datagram, or the first fragment of a UDP datagram.
    fn decide_tcp_or_udp_packet(
        &mut self,
        ip_packet: &IpPacket<'_>,
        sender: &FrameSourceAndSize,
        now_ns: u64,
        out_service_slot: &mut Option<usize>,
    ) -> Result<PacketDecision, ParseEndCounter> {
        let is_udp = ip_packet.protocol_number == UDP_PROTOCOL_NUMBER;
        let malformed_counter =
            if is_udp { intf::LB_COUNTER_DROP_MALFORMED_UDP } else { intf::LB_COUNTER_DROP_MALFORMED_TCP };
        let source_and_destination_port = packet::parse_ports(ip_packet, malformed_counter)?;
        let service_slot =
            self.find_service_slot(ip_packet.vip, source_and_destination_port.1, ip_packet.protocol_number)?;
        *out_service_slot = Some(service_slot);
        let packet = if is_udp {
            packet::parse_udp(ip_packet, source_and_destination_port)
        } else {
            packet::parse_tcp(ip_packet, source_and_destination_port)
        }?;
        let decision = self.decide(service_slot, &packet, sender, now_ns);
        self.store_server_of_first_fragment(ip_packet, service_slot, &decision);
        Ok(decision)
    }

    /// Returns whether the BPF program processes the protocol. It contains code for UDP only if a service needs UDP.
    fn is_handled_protocol(&self, protocol: u8) -> bool {
        let has_udp_service =
            || self.service_slot_by_address.keys().any(|(.., protocol)| *protocol == UDP_PROTOCOL_NUMBER);
        matches!(protocol, TCP_PROTOCOL_NUMBER | packet::PROTOCOL_ICMP)
            || protocol == UDP_PROTOCOL_NUMBER && has_udp_service()
    }

    pub(super) fn find_service_slot(&self, vip: IpAddr, port: u16, protocol: u8) -> Result<usize, ParseEndCounter> {
        self.service_slot_by_address.get(&(vip, port, protocol)).copied().ok_or(NOT_SERVICE_COUNTER)
    }

    fn decide_later_fragment(
        &self,
        ip_packet: &IpPacket<'_>,
        out_service_slot: &mut Option<usize>,
    ) -> Result<PacketDecision, ParseEndCounter> {
        let fragment_target =
            self.slot_and_server_by_fragment.get(&FragmentKey::from_packet(ip_packet)).filter(|(service_slot, id)| {
                self.services[*service_slot].as_ref().is_some_and(|service| service.server(*id).is_some())
            });
        let (service_slot, id) = *fragment_target.ok_or(intf::LB_COUNTER_DROP_FRAGMENT)?;
        *out_service_slot = Some(service_slot);
        Ok(self.decide_delivery_to_server(service_slot, id, intf::LB_COUNTER_FRAGMENT))
    }

    fn store_server_of_first_fragment(
        &mut self,
        ip_packet: &IpPacket<'_>,
        service_slot: usize,
        decision: &PacketDecision,
    ) {
        if let (IpFragmentPart::First, true, Some(server)) =
            (ip_packet.fragment_part, decision.is_forwarded(), decision.server)
        {
            self.slot_and_server_by_fragment.insert(FragmentKey::from_packet(ip_packet), (service_slot, server));
        }
    }

    fn count_opened_and_closed_connection(
        &mut self,
        decision: &PacketDecision,
        slot_and_server: Option<(usize, ServerId)>,
    ) {
        let Some((service_slot, server)) = slot_and_server else { return };
        *self.opened_connection_count_by_slot.entry(service_slot).or_default() += u64::from(decision.opens_connection);
        let traffic: &mut ServerTraffic = self.traffic_by_server.entry(server).or_default();
        traffic.opened_connection_count += u64::from(decision.opens_connection);
        traffic.closed_connection_count += u64::from(decision.closes_connection);
    }

    fn count_traffic(&mut self, server: ServerId, frame_bytes: u64) {
        if self.settings.counts_traffic {
            let traffic = self.traffic_by_server.entry(server).or_default();
            traffic.packet_count += 1;
            traffic.frame_bytes += frame_bytes;
        }
    }

    fn decide(
        &mut self,
        service_slot: usize,
        packet: &ClientPacket,
        sender: &FrameSourceAndSize,
        now_ns: u64,
    ) -> PacketDecision {
        let Some(migration) = self.service_in_slot(service_slot).settings.migration else {
            return self.decide_by_consistency_mode(service_slot, packet, sender, now_ns);
        };
        let (other_balancer, is_syn) = (migration.other_balancer_id(), packet.tcp_flags & SYN != 0);
        if is_syn && matches!(migration, ServiceMigration::HandedOverTo(_)) {
            return self.decide_other_balancer(service_slot, other_balancer);
        }
        let decision = self.decide_by_consistency_mode(service_slot, packet, sender, now_ns);
        if decision.server.is_some() && !is_syn {
            decision.with_previous_server(other_balancer.get())
        } else {
            decision
        }
    }

    /// Decides on a packet of a connection without state on this load balancer. `slot_and_source` is the service's slot
    /// and the packet's source address.
    pub(super) fn decide_packet_of_unknown_connection(
        &mut self,
        slot_and_source: (usize, IpAddr),
        now_ns: u64,
    ) -> PacketDecision {
        match self.service_in_slot(slot_and_source.0).other_balancer_id() {
            Some(other_balancer) => self.decide_other_balancer(slot_and_source.0, other_balancer),
            None => {
                let over_rate_counter = intf::LB_COUNTER_DROP_UNKNOWN_COOKIE;
                self.decide_broadcast(slot_and_source, intf::LIMITED_UNKNOWN_COOKIE, over_rate_counter, now_ns)
            }
        }
    }

    /// Forwards a packet to the other load balancer of a migration. The packet carries `NO_SERVER` as the previous
    /// server, so that no server forwards it once more.
    pub(super) fn decide_other_balancer(&self, service_slot: usize, other_balancer_id: ServerId) -> PacketDecision {
        let decision = self
            .decide_delivery_to_server(service_slot, other_balancer_id, intf::LB_COUNTER_TO_OTHER_BALANCER)
            .with_previous_server(intf::NO_SERVER as u16);
        PacketDecision { server: None, ..decision }
    }

    fn decide_by_consistency_mode(
        &mut self,
        service_slot: usize,
        packet: &ClientPacket,
        sender: &FrameSourceAndSize,
        now_ns: u64,
    ) -> PacketDecision {
        let service = self.service_in_slot(service_slot);
        let mode = service.settings;
        let is_syn = packet.tcp_flags & SYN != 0;
        if self.is_lb_stamped(service_slot) {
            return match is_syn && packet.tsecr.is_some() {
                true => match self.find_unstamped_server(service_slot, packet) {
                    Some(id) => self.decide_delivery_to_server(service_slot, id, intf::LB_COUNTER_NEW_CONNECTION),
                    None => self.decide_by_rule(service_slot, packet, intf::LB_COUNTER_NEW_CONNECTION),
                },
                false => self.decide_lb_stamped(service_slot, packet),
            };
        }
        match (mode.consistency, packet.tsecr.filter(|_| service.has_cookies())) {
            (ConsistencyMode::None, _) => self.decide_by_rule(service_slot, packet, placement_counter(is_syn)),
            (ConsistencyMode::HashTable, _) => self.decide_by_hash_table(service_slot, packet),
            (ConsistencyMode::Beamer, _) | (_, None) => self.decide_without_cookie(service_slot, packet, now_ns),
            (ConsistencyMode::Stateful, Some(tsecr)) if is_syn => {
                self.decide_stateful_syn(service_slot, packet, tsecr, sender.frame_bytes)
            }
            (ConsistencyMode::Stateless, Some(_)) if is_syn => {
                self.decide_by_rule(service_slot, packet, intf::LB_COUNTER_NEW_CONNECTION)
            }
            (ConsistencyMode::Stateless | ConsistencyMode::Stateful, Some(tsecr)) => {
                self.decide_by_cookie(service_slot, packet, tsecr.timestamp_value, sender, now_ns)
            }
        }
    }

    /// Forwards a packet to server `id`, the only one that may have the connection. Drops the packet if the server's
    /// MAC address is unknown.
    pub(super) fn decide_delivery_to_server(
        &self,
        service_slot: usize,
        id: ServerId,
        counter: intf::lb_counter,
    ) -> PacketDecision {
        match self.service_in_slot(service_slot).server(id).and_then(|server| server.mac) {
            Some(mac) => {
                PacketDecision { destination_mac: mac, server: Some(id), ..PacketDecision::from_counter(counter) }
            }
            None => PacketDecision::from_counter(intf::LB_COUNTER_DROP_SERVER_UNRESOLVED),
        }
    }

    pub(super) fn decide_by_rule(
        &mut self,
        service_slot: usize,
        packet: &ClientPacket,
        counter: intf::lb_counter,
    ) -> PacketDecision {
        let service = self.services[service_slot].as_mut().expect("in the directory");
        let recent_placements = (packet.protocol == TransportProtocol::Tcp).then_some(&mut self.recent_placements);
        match service.select_server(service_slot, recent_placements, &packet.four_tuple()) {
            Some(id) => self
                .decide_delivery_to_server(service_slot, id, counter)
                .with_opens_connection(counter == placement_counter(true)),
            None => PacketDecision::from_counter(intf::LB_COUNTER_DROP_NO_ELIGIBLE_SERVER),
        }
    }

    fn decide_by_cookie(
        &mut self,
        service_slot: usize,
        packet: &ClientPacket,
        tsecr: u32,
        sender: &FrameSourceAndSize,
        now_ns: u64,
    ) -> PacketDecision {
        let tuple = packet.four_tuple();
        match cookie::decode_cookie(&self.cookie_keys, &tuple, tsecr) {
            Cookie::Server(id) if self.service_in_slot(service_slot).server(id).is_some() => self
                .decide_delivery_to_server(service_slot, id, intf::LB_COUNTER_ESTABLISHED)
                .with_closes_connection(packet.is_closing()),
            Cookie::TableIndex(cookie_index) if self.service_in_slot(service_slot).is_stateful() => {
                match self.decide_by_cookie_index(
                    service_slot,
                    &tuple,
                    cookie_index,
                    intf::LB_COUNTER_CONNECTION_TABLE,
                    sender.mac,
                    now_ns,
                ) {
                    ConnectionIndexLookup::Decided(decision, None) => decision,
                    ConnectionIndexLookup::Decided(decision, Some(index)) => decision.with_closes_connection(
                        self.connection_table_state.record_packet(index, sender.frame_bytes, packet.is_closing()),
                    ),
                    ConnectionIndexLookup::UnknownConnection => self
                        .decide_packet_of_unknown_connection((service_slot, packet.client.ip()), now_ns)
                        .with_extra_event(intf::LB_EVENT_CONNECTION_UNKNOWN),
                    ConnectionIndexLookup::UnknownServer => {
                        self.decide_packet_of_unknown_connection((service_slot, packet.client.ip()), now_ns)
                    }
                }
            }
            _ => self.decide_packet_of_unknown_connection((service_slot, packet.client.ip()), now_ns),
        }
    }

    /// Returns whether the server may get a packet. For a SYN, the server must take new connections.
    pub(super) fn may_receive_packet(&self, service_slot: usize, server: ServerId, is_syn: bool) -> bool {
        let service = self.service_in_slot(service_slot);
        if is_syn { service.takes_new_connections(server) } else { service.server(server).is_some() }
    }

    /// Decides by the packet's bucket. Returns the bucket's server as a flow entry, or `None` if it may not get the
    /// packet. The decision carries the id of the bucket's previous server.
    pub(super) fn decide_by_bucket(
        &mut self,
        service_slot: usize,
        packet: &ClientPacket,
    ) -> (Option<FlowEntry>, PacketDecision) {
        let is_syn = packet.tcp_flags & SYN != 0;
        match self
            .bucket_flow_entry(service_slot, packet)
            .filter(|choice| self.may_receive_packet(service_slot, choice.server, is_syn))
        {
            Some(choice) => {
                let decision =
                    self.decide_delivery_to_server(service_slot, choice.server, intf::LB_COUNTER_BUCKET_HASH);
                (Some(choice), decision.with_previous_server(choice.encode_state_field()))
            }
            None => (None, PacketDecision::from_counter(intf::LB_COUNTER_DROP_NO_ELIGIBLE_SERVER)),
        }
    }

    fn bucket_flow_entry(&self, service_slot: usize, packet: &ClientPacket) -> Option<FlowEntry> {
        self.service_in_slot(service_slot)
            .installed_table
            .as_ref()
            .and_then(|placement| placement.flow_entry_of_bucket(&packet.four_tuple()))
    }

    /// Decides on a SYN whose flow has no usable entry. `unusable_entry` is the flow's unusable entry, if it has one.
    fn decide_syn_without_cookie(
        &mut self,
        service_slot: usize,
        packet: &ClientPacket,
        unusable_entry: Option<FlowEntry>,
    ) -> PacketDecision {
        let (choice, decision) = self.decide_by_bucket(service_slot, packet);
        let (mut previous_server, decision, entry_need) = match (choice, unusable_entry) {
            (Some(_), None) => return decision,
            (Some(choice), Some(_)) => (choice.previous_server, decision, FlowEntryNeed::Hint),
            (None, _) => {
                let bucket_server = self.bucket_flow_entry(service_slot, packet).map(|choice| choice.server);
                (
                    bucket_server,
                    self.decide_by_rule(service_slot, packet, intf::LB_COUNTER_NEW_CONNECTION),
                    FlowEntryNeed::Needed,
                )
            }
        };
        let Some(server) = decision.server else { return decision };
        if let Some(unusable_entry) =
            unusable_entry.filter(|stale| self.service_in_slot(service_slot).server(stale.server).is_some())
        {
            previous_server = Some(unusable_entry.server);
        }
        let new_flow_entry = FlowEntry { previous_server, ..FlowEntry::for_server(server) };
        self.services[service_slot].as_mut().expect("in the directory").has_flows = true;
        self.insert_flow_entry(
            service_slot,
            packet,
            new_flow_entry,
            entry_need,
            decision.with_previous_server(new_flow_entry.encode_state_field()),
        )
    }

    fn decide_without_cookie(&mut self, service_slot: usize, packet: &ClientPacket, now_ns: u64) -> PacketDecision {
        let is_syn = packet.tcp_flags & SYN != 0;
        let service = self.service_in_slot(service_slot);
        let is_beamer = service.settings.consistency == ConsistencyMode::Beamer;
        let flow_entry =
            if is_beamer && !service.has_flows { None } else { self.find_flow_of_packet(service_slot, packet) };
        if let Some(entry) = flow_entry.filter(|entry| self.may_receive_packet(service_slot, entry.server, is_syn)) {
            return self
                .decide_delivery_to_server(service_slot, entry.server, intf::LB_COUNTER_FLOW_TABLE)
                .with_previous_server(entry.encode_state_field());
        }
        if is_syn {
            return self.decide_syn_without_cookie(service_slot, packet, flow_entry);
        }
        if is_beamer {
            return self.decide_by_bucket(service_slot, packet).1;
        }
        if packet.tcp_flags & RST != 0 {
            let (slot_and_source, over_rate_counter) =
                ((service_slot, packet.client.ip()), intf::LB_COUNTER_DROP_BROADCAST_RATE_LIMITED);
            return self
                .decide_broadcast(slot_and_source, intf::LIMITED_RESET, over_rate_counter, now_ns)
                .with_previous_server(intf::NO_SERVER as u16);
        }
        // Connections of this load balancer are in the flow table since their second packet. The other load balancer
        // must get all packets of its own connections.
        if let Some(ServiceMigration::HandedOverTo(other_balancer)) =
            self.service_in_slot(service_slot).settings.migration
        {
            return self.decide_other_balancer(service_slot, other_balancer);
        }
        let (choice, decision) = self.decide_by_bucket(service_slot, packet);
        match choice.filter(|_| decision.is_forwarded()) {
            Some(choice) => self.insert_flow_entry(service_slot, packet, choice, FlowEntryNeed::Hint, decision),
            None => decision,
        }
    }

    fn decide_by_hash_table(&mut self, service_slot: usize, packet: &ClientPacket) -> PacketDecision {
        let is_syn = packet.tcp_flags & SYN != 0;
        let is_udp = packet.protocol == TransportProtocol::Udp;
        // A datagram without a known flow opens one.
        let opens_flow = is_syn || is_udp;
        let flow_entry = self
            .find_flow_of_packet(service_slot, packet)
            .filter(|entry| self.may_receive_packet(service_slot, entry.server, is_syn));
        if let Some(entry) =
            flow_entry.filter(|entry| !is_udp || !self.service_in_slot(service_slot).is_server_down(entry.server))
        {
            return self.decide_delivery_to_server(
                service_slot,
                entry.server,
                if is_syn { placement_counter(true) } else { intf::LB_COUNTER_FLOW_TABLE },
            );
        }
        if let Some(other_balancer) = self.service_in_slot(service_slot).other_balancer_id().filter(|_| !opens_flow) {
            return self.decide_other_balancer(service_slot, other_balancer);
        }
        let decision = self.decide_by_rule(service_slot, packet, placement_counter(opens_flow));
        match (decision.server.filter(|_| opens_flow), flow_entry) {
            (Some(server), _) => self.insert_flow_entry(
                service_slot,
                packet,
                FlowEntry::for_server(server),
                FlowEntryNeed::Needed,
                decision,
            ),
            (None, Some(entry)) => {
                self.decide_delivery_to_server(service_slot, entry.server, intf::LB_COUNTER_FLOW_TABLE)
            }
            (None, None) => decision,
        }
    }

    fn insert_flow_entry(
        &mut self,
        service_slot: usize,
        packet: &ClientPacket,
        entry: FlowEntry,
        entry_need: FlowEntryNeed,
        decision: PacketDecision,
    ) -> PacketDecision {
        let is_inserted = self.insert_flow(service_slot, packet, entry, entry_need);
        PacketDecision { extra_event: is_inserted.then_some(intf::LB_EVENT_FLOW_INSERTED), ..decision }
    }

    /// Broadcasts a packet within the rate limits. `slot_and_source` is the service's slot and the packet's source
    /// address.
    pub(super) fn decide_broadcast(
        &mut self,
        slot_and_source: (usize, IpAddr),
        reason: BroadcastReason,
        over_rate_counter: intf::lb_counter,
        now_ns: u64,
    ) -> PacketDecision {
        if self.service_in_slot(slot_and_source.0).settings.forwarding.encapsulates()
            || !self.has_broadcast_vlan(slot_and_source.0)
        {
            return PacketDecision::from_counter(intf::LB_COUNTER_DROP_NOT_BROADCAST);
        }
        if !self.broadcast_limiter.take_tokens(
            &self.connection_table_state.connection_key,
            slot_and_source,
            reason,
            &self.settings.broadcast_rates,
            now_ns,
        ) {
            return PacketDecision::from_counter(over_rate_counter);
        }
        let is_owner_lost = reason == intf::LIMITED_OWNER_LOST;
        PacketDecision::forward_to_mac(
            if is_owner_lost { intf::LB_COUNTER_BROADCAST_OWNER_LOST } else { intf::LB_COUNTER_BROADCAST },
            BROADCAST_MAC,
        )
    }
}

/// Returns whether an ICMP packet is in IPv4, or an ICMPv6 packet in IPv6.
fn icmp_version_matches_ip_version(packet: &IpPacket<'_>) -> bool {
    packet.vip.is_ipv6() == (packet.protocol_number == PROTOCOL_ICMPV6)
}

/// Returns the counter of a packet whose server the placement rule selects.
fn placement_counter(opens_connection: bool) -> intf::lb_counter {
    if opens_connection { intf::LB_COUNTER_NEW_CONNECTION } else { intf::LB_COUNTER_PER_PACKET }
}
