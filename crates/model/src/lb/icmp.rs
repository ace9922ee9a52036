//! Decisions on ICMP errors, as in `bpf/lb/icmp.h`.

use std::net::IpAddr;

use coreward_intf as intf;

use super::LoadBalancer;
use super::decision::PacketDecision;
use super::ip_packet::{IpPacket, ParseEndCounter};
use super::mode_decisions::{FrameSourceAndSize, UDP_PROTOCOL_NUMBER};
use super::packet;
use super::stateful::ConnectionIndexLookup;
use crate::cookie::{self, Cookie};
use crate::lb_stamping;
use crate::tuple::TransportProtocol;
use crate::{FourTuple, ServerId};

impl LoadBalancer {
    /// Decides on an ICMP error, which goes to the server whose packet the error quotes. The cookie in the quoted TSval
    /// or the flow table identifies the server. If neither does, the error is broadcast.
    pub(super) fn decide_icmp_error(
        &mut self,
        ip_packet: &IpPacket<'_>,
        sender: FrameSourceAndSize,
        now_ns: u64,
        out_service_slot: &mut Option<usize>,
    ) -> Result<PacketDecision, ParseEndCounter> {
        let quote = packet::parse_quoted_packet(ip_packet)?;
        let service_slot = self.find_service_slot(quote.vip.ip(), quote.vip.port(), quote.protocol_number)?;
        *out_service_slot = Some(service_slot);
        let tuple = FourTuple::new(quote.client, quote.vip).expect("of one packet");
        let protocol =
            if quote.protocol_number == UDP_PROTOCOL_NUMBER { TransportProtocol::Udp } else { TransportProtocol::Tcp };
        if let Some(id) = self.find_server_by_quoted_tsval(service_slot, &tuple, protocol, quote.tsval) {
            return Ok(self.decide_delivery_to_server(service_slot, id, intf::LB_COUNTER_ICMP_ERROR));
        }
        let cookie_tsval = quote.tsval.filter(|_| self.service_in_slot(service_slot).has_cookies());
        let mut extra_event = None;
        match cookie_tsval.map(|value| cookie::decode_cookie(&self.cookie_keys, &tuple, value)) {
            Some(Cookie::Server(id)) if self.service_in_slot(service_slot).server(id).is_some() => {
                return Ok(self.decide_delivery_to_server(service_slot, id, intf::LB_COUNTER_ICMP_ERROR));
            }
            Some(Cookie::TableIndex(cookie_index)) if self.service_in_slot(service_slot).is_stateful() => {
                match self.decide_by_cookie_index(
                    service_slot,
                    &tuple,
                    cookie_index,
                    intf::LB_COUNTER_ICMP_ERROR,
                    sender.mac,
                    now_ns,
                ) {
                    ConnectionIndexLookup::Decided(decision, _) => return Ok(decision),
                    ConnectionIndexLookup::UnknownConnection => extra_event = Some(intf::LB_EVENT_CONNECTION_UNKNOWN),
                    ConnectionIndexLookup::UnknownServer => {}
                }
            }
            _ => {}
        }
        let decision = self.decide_icmp_error_by_flow(service_slot, &tuple, protocol, ip_packet.client, now_ns);
        Ok(PacketDecision { extra_event, ..decision })
    }

    /// Returns the server that the cookie in the quoted TSval names, for a service with LB-side stamping. Returns
    /// `None` for a connection in the flow table, because its TSval has no cookie.
    fn find_server_by_quoted_tsval(
        &mut self,
        service_slot: usize,
        tuple: &FourTuple,
        protocol: TransportProtocol,
        quoted_tsval: Option<u32>,
    ) -> Option<ServerId> {
        let tsval = quoted_tsval.filter(|_| self.is_lb_stamped(service_slot))?;
        if self.find_flow(service_slot, tuple, protocol).is_some() {
            return None;
        }
        let id = lb_stamping::decode_server_id(&self.cookie_keys, tuple, tsval);
        self.service_in_slot(service_slot).server(id).is_some().then_some(id)
    }

    /// Decides by the flow table on an ICMP error from `source_address` that quotes no usable cookie.
    fn decide_icmp_error_by_flow(
        &mut self,
        service_slot: usize,
        tuple: &FourTuple,
        protocol: TransportProtocol,
        source_address: IpAddr,
        now_ns: u64,
    ) -> PacketDecision {
        let flow_entry = self
            .find_flow(service_slot, tuple, protocol)
            .filter(|entry| self.may_receive_packet(service_slot, entry.server, false));
        match (flow_entry, self.service_in_slot(service_slot).other_balancer_id()) {
            (Some(entry), _) => self.decide_delivery_to_server(service_slot, entry.server, intf::LB_COUNTER_ICMP_ERROR),
            (None, Some(other_balancer)) => self.decide_other_balancer(service_slot, other_balancer),
            (None, None) => {
                let over_rate_counter = intf::LB_COUNTER_DROP_BROADCAST_RATE_LIMITED;
                self.decide_broadcast(
                    (service_slot, source_address),
                    intf::LIMITED_ICMP_ERROR,
                    over_rate_counter,
                    now_ns,
                )
            }
        }
    }
}
