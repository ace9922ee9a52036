//! ICMP "fragmentation needed" and ICMPv6 "packet too big" for packets that do not fit with their outer header:
//! `bpf/lb/fragmentation_needed.h` and `bpf/lb/packet_too_big.h`.

use std::net::{IpAddr, Ipv6Addr};

use coreward_intf as intf;

use super::LoadBalancer;
use super::encapsulation::{IpHeaderFields, set_macs};
use super::ip_packet::{ETHERNET_HEADER_BYTES, ICMP_HEADER, u16_at};
use super::packet::{self, FRAGMENT_OFFSET_MASK, IPV4_HEADER, PROTOCOL_ICMP};
use super::packet_ipv6::{self, IPV6_HEADER, PROTOCOL_ICMPV6};

/// Number of bytes of the dropped packet that an ICMP error quotes.
const QUOTED_BYTES_IPV4: usize = 68;
const QUOTED_BYTES_IPV6: usize = 504;
const INTERNETWORK_CONTROL: u8 = 0xc0;
const DESTINATION_UNREACHABLE: u8 = 3;
const FRAGMENTATION_NEEDED: u8 = 4;
const PACKET_TOO_BIG: u8 = 2;
/// Minimum MTU of an IPv6 link (RFC 8200, Sect. 5).
const IPV6_MIN_MTU: usize = 1280;

impl LoadBalancer {
    /// Drops the packet in `frame` to the service in slot `slot`, because it is longer than `mtu`. Replaces `frame` by
    /// an ICMP error to the packet's sender, if one may be sent. Returns the counter.
    pub(super) fn drop_exceeding(
        &mut self,
        frame: &mut Vec<u8>,
        slot: usize,
        mtu: usize,
        now_ns: u64,
    ) -> intf::lb_counter {
        let is_ipv6 = packet_ipv6::is_ipv6(frame);
        let (source, may_answer) = match is_ipv6 {
            true => (packet_ipv6::address_at(frame, ETHERNET_HEADER_BYTES + 8), may_answer_ipv6(frame)),
            false => (packet::address_at(frame, ETHERNET_HEADER_BYTES + 12), may_answer(frame)),
        };
        let reason = intf::LIMITED_FRAGMENTATION_NEEDED;
        let is_sent = may_answer
            && self.broadcast.take_tokens(
                &self.stateful.key,
                (slot, source),
                reason,
                &self.settings.broadcast_rates,
                now_ns,
            );
        if !is_sent {
            return intf::LB_COUNTER_DROP_EXCEEDS_MTU;
        }
        let sender = packet::source_mac(frame);
        *frame = if is_ipv6 { icmpv6_packet_too_big(frame, mtu) } else { icmp_fragmentation_needed(frame, mtu) };
        set_macs(frame, sender, self.own_mac);
        intf::LB_COUNTER_DROP_FRAGMENTATION_NEEDED
    }
}

fn may_answer(frame: &[u8]) -> bool {
    let packet = &frame[ETHERNET_HEADER_BYTES..];
    packet.len() >= QUOTED_BYTES_IPV4
        && packet[9] != PROTOCOL_ICMP
        && (1..224).contains(&packet[12])
        && u16_at(packet, 6) & FRAGMENT_OFFSET_MASK == 0
}

fn may_answer_ipv6(frame: &[u8]) -> bool {
    let IpAddr::V6(source) = packet_ipv6::address_at(frame, ETHERNET_HEADER_BYTES + 8) else { return false };
    packet_ipv6::packet_length(frame) > IPV6_MIN_MTU
        && frame[ETHERNET_HEADER_BYTES + 6] != PROTOCOL_ICMPV6
        && !source.is_multicast()
        && source != Ipv6Addr::UNSPECIFIED
}

/// Returns the ICMP error about the packet in `frame`, without MAC addresses.
fn icmp_fragmentation_needed(frame: &[u8], mtu: usize) -> Vec<u8> {
    let quoted = &frame[ETHERNET_HEADER_BYTES..][..QUOTED_BYTES_IPV4];
    let [client, vip] = packet::ipv4_addresses(quoted);
    let mut message = vec![DESTINATION_UNREACHABLE, FRAGMENTATION_NEEDED, 0, 0];
    message.extend((mtu as u32).to_be_bytes());
    message.extend(quoted);
    let checksum = packet::checksum(&message);
    message[2..4].copy_from_slice(&checksum.to_be_bytes());
    let length = IPV4_HEADER + ICMP_HEADER + QUOTED_BYTES_IPV4;
    let header = IpHeaderFields { traffic_class: INTERNETWORK_CONTROL, flow_label: 0, length, protocol: PROTOCOL_ICMP };
    [&frame[..ETHERNET_HEADER_BYTES], &header.ipv4(vip, client), &message].concat()
}

/// Returns the ICMPv6 error about the packet in `frame`, without MAC addresses.
fn icmpv6_packet_too_big(frame: &[u8], mtu: usize) -> Vec<u8> {
    let quoted = &frame[ETHERNET_HEADER_BYTES..][..QUOTED_BYTES_IPV6];
    let address = |at: usize| Ipv6Addr::from(<[u8; 16]>::try_from(&quoted[at..at + 16]).expect("16 bytes"));
    let (client, vip) = (address(8), address(24));
    let mut message = vec![PACKET_TOO_BIG, 0, 0, 0];
    message.extend((mtu.max(IPV6_MIN_MTU) as u32).to_be_bytes());
    message.extend(quoted);
    let pseudo_header =
        [&vip.octets()[..], &client.octets(), &(message.len() as u32).to_be_bytes(), &[0, 0, 0, PROTOCOL_ICMPV6]];
    let checksum = packet::checksum(&[&pseudo_header.concat()[..], &message].concat());
    message[2..4].copy_from_slice(&checksum.to_be_bytes());
    let length = IPV6_HEADER + message.len();
    let header =
        IpHeaderFields { traffic_class: INTERNETWORK_CONTROL, flow_label: 0, length, protocol: PROTOCOL_ICMPV6 };
    [&frame[..ETHERNET_HEADER_BYTES], &header.ipv6(vip, client), &message].concat()
}
