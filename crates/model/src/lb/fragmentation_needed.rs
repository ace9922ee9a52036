//! Errors for packets that do not fit with their outer header, either ICMP "fragmentation needed" or ICMPv6 "packet too
//! big", as in `bpf/lb/fragmentation_needed.h` and `bpf/lb/packet_too_big.h`.

use std::net::{IpAddr, Ipv6Addr};

use coreward_intf as intf;

use super::LoadBalancer;
use super::encapsulation::{IpHeaderFields, set_frame_macs};
use super::ip_packet::{ETHERNET_HEADER_BYTES, ICMP_HEADER_BYTES, u16_at};
use super::packet::{self, FRAGMENT_OFFSET_MASK, IPV4_HEADER_BYTES, PROTOCOL_ICMP};
use super::packet_ipv6::{self, IPV6_HEADER_BYTES, PROTOCOL_ICMPV6};

/// Number of bytes of a dropped IPv4 packet that an ICMP error quotes.
const QUOTED_BYTES_IPV4: usize = 68;
const QUOTED_BYTES_IPV6: usize = 504;
const TOS_INTERNETWORK_CONTROL: u8 = 0xc0;
const ICMP_DESTINATION_UNREACHABLE: u8 = 3;
const ICMP_FRAGMENTATION_NEEDED: u8 = 4;
const ICMPV6_PACKET_TOO_BIG: u8 = 2;
/// Minimum MTU of an IPv6 link, in bytes (RFC 8200, Sect. 5).
const IPV6_MIN_MTU: usize = 1280;

impl LoadBalancer {
    /// Drops the packet in `frame` to the service in slot `service_slot`, because it is longer than `mtu_bytes`.
    /// Replaces `frame` by an ICMP error to the packet's sender, if an error may be sent. Returns the packet's counter.
    pub(super) fn drop_packet_exceeding_mtu(
        &mut self,
        frame: &mut Vec<u8>,
        service_slot: usize,
        mtu_bytes: usize,
        now_ns: u64,
    ) -> intf::lb_counter {
        let is_ipv6 = packet_ipv6::is_ipv6(frame);
        let (source, may_answer) = match is_ipv6 {
            true => (packet_ipv6::ipv6_address_at(frame, ETHERNET_HEADER_BYTES + 8), may_send_icmpv6_error(frame)),
            false => (packet::ipv4_address_at(frame, ETHERNET_HEADER_BYTES + 12), may_send_icmp_error(frame)),
        };
        let limit_reason = intf::LIMITED_FRAGMENTATION_NEEDED;
        let is_sent = may_answer
            && self.broadcast_limiter.take_tokens(
                &self.connection_table_state.connection_key,
                (service_slot, source),
                limit_reason,
                &self.settings.broadcast_rates,
                now_ns,
            );
        if !is_sent {
            return intf::LB_COUNTER_DROP_EXCEEDS_MTU;
        }
        let sender_mac = packet::source_mac(frame);
        *frame = if is_ipv6 {
            create_icmpv6_packet_too_big(frame, mtu_bytes)
        } else {
            create_icmp_fragmentation_needed(frame, mtu_bytes)
        };
        set_frame_macs(frame, sender_mac, self.own_mac);
        intf::LB_COUNTER_DROP_FRAGMENTATION_NEEDED
    }
}

fn may_send_icmp_error(frame: &[u8]) -> bool {
    let packet = &frame[ETHERNET_HEADER_BYTES..];
    packet.len() >= QUOTED_BYTES_IPV4
        && packet[9] != PROTOCOL_ICMP
        && (1..224).contains(&packet[12])
        && u16_at(packet, 6) & FRAGMENT_OFFSET_MASK == 0
}

fn may_send_icmpv6_error(frame: &[u8]) -> bool {
    let IpAddr::V6(source) = packet_ipv6::ipv6_address_at(frame, ETHERNET_HEADER_BYTES + 8) else { return false };
    packet_ipv6::ip_packet_bytes(frame) > IPV6_MIN_MTU
        && frame[ETHERNET_HEADER_BYTES + 6] != PROTOCOL_ICMPV6
        && !source.is_multicast()
        && source != Ipv6Addr::UNSPECIFIED
}

/// Returns a frame with the ICMP error about the packet in `frame`. The MAC addresses are not set.
fn create_icmp_fragmentation_needed(frame: &[u8], mtu_bytes: usize) -> Vec<u8> {
    let quoted_packet = &frame[ETHERNET_HEADER_BYTES..][..QUOTED_BYTES_IPV4];
    let [client, vip] = packet::ipv4_source_and_destination(quoted_packet);
    let mut message = vec![ICMP_DESTINATION_UNREACHABLE, ICMP_FRAGMENTATION_NEEDED, 0, 0];
    message.extend((mtu_bytes as u32).to_be_bytes());
    message.extend(quoted_packet);
    let checksum = packet::internet_checksum(&message);
    message[2..4].copy_from_slice(&checksum.to_be_bytes());
    let packet_bytes = IPV4_HEADER_BYTES + ICMP_HEADER_BYTES + QUOTED_BYTES_IPV4;
    let header = IpHeaderFields {
        traffic_class: TOS_INTERNETWORK_CONTROL,
        flow_label: 0,
        packet_bytes,
        protocol_number: PROTOCOL_ICMP,
    };
    [&frame[..ETHERNET_HEADER_BYTES], &header.encode_ipv4_header(vip, client), &message].concat()
}

/// Returns a frame with the ICMPv6 error about the packet in `frame`. The MAC addresses are not set.
fn create_icmpv6_packet_too_big(frame: &[u8], mtu_bytes: usize) -> Vec<u8> {
    let quoted_packet = &frame[ETHERNET_HEADER_BYTES..][..QUOTED_BYTES_IPV6];
    let address_bytes_at =
        |offset: usize| Ipv6Addr::from(<[u8; 16]>::try_from(&quoted_packet[offset..offset + 16]).expect("16 bytes"));
    let (client, vip) = (address_bytes_at(8), address_bytes_at(24));
    let mut message = vec![ICMPV6_PACKET_TOO_BIG, 0, 0, 0];
    message.extend((mtu_bytes.max(IPV6_MIN_MTU) as u32).to_be_bytes());
    message.extend(quoted_packet);
    let pseudo_header =
        [&vip.octets()[..], &client.octets(), &(message.len() as u32).to_be_bytes(), &[0, 0, 0, PROTOCOL_ICMPV6]];
    let checksum = packet::internet_checksum(&[&pseudo_header.concat()[..], &message].concat());
    message[2..4].copy_from_slice(&checksum.to_be_bytes());
    let packet_bytes = IPV6_HEADER_BYTES + message.len();
    let header = IpHeaderFields {
        traffic_class: TOS_INTERNETWORK_CONTROL,
        flow_label: 0,
        packet_bytes,
        protocol_number: PROTOCOL_ICMPV6,
    };
    [&frame[..ETHERNET_HEADER_BYTES], &header.encode_ipv6_header(vip, client), &message].concat()
}
