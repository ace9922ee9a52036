//! ICMP "fragmentation needed" for packets that do not fit with their outer header: `bpf/lb/fragmentation_needed.h`.

use coreward_intf as intf;

use super::LoadBalancer;
use super::encapsulation::{ip_header, set_macs};
use super::packet::{self, ETHERNET_HEADER, FRAGMENT_OFFSET, IPV4_HEADER, PROTOCOL_ICMP};

/// Bytes of the packet that an error quotes.
const QUOTED: usize = 68;
const ICMP_HEADER: usize = 8;
const INTERNETWORK_CONTROL: u8 = 0xc0;
const DESTINATION_UNREACHABLE: u8 = 3;
const FRAGMENTATION_NEEDED: u8 = 4;

impl LoadBalancer {
    /// Drops the packet of `frame`, of the service at `slot`, which is longer than `mtu`. Makes `frame` the error to
    /// its sender, if there is one. Returns the counter.
    pub(super) fn drop_exceeding(
        &mut self,
        frame: &mut Vec<u8>,
        slot: usize,
        mtu: usize,
        now_ns: u64,
    ) -> intf::lb_counter {
        let source = packet::address_at(frame, ETHERNET_HEADER + 12);
        let reason = intf::BROADCAST_FRAGMENTATION_NEEDED;
        let is_sent = may_answer(frame)
            && self.broadcast.take(&self.stateful.key, (slot, source), reason, &self.constants.broadcast, now_ns);
        if !is_sent {
            return intf::LB_COUNTER_DROP_EXCEEDS_MTU;
        }
        let sender = packet::source_mac(frame);
        *frame = error(frame, mtu);
        set_macs(frame, sender, self.own_mac);
        intf::LB_COUNTER_DROP_FRAGMENTATION_NEEDED
    }
}

fn may_answer(frame: &[u8]) -> bool {
    let packet = &frame[ETHERNET_HEADER..];
    packet.len() >= QUOTED
        && packet[9] != PROTOCOL_ICMP
        && (1..224).contains(&packet[12])
        && packet::u16_at(packet, 6) & FRAGMENT_OFFSET == 0
}

/// Returns the error about the packet of `frame`, without MAC addresses.
fn error(frame: &[u8], mtu: usize) -> Vec<u8> {
    let quoted = &frame[ETHERNET_HEADER..][..QUOTED];
    let [client, vip] = packet::ipv4_addresses(quoted);
    let mut message = vec![DESTINATION_UNREACHABLE, FRAGMENTATION_NEEDED, 0, 0];
    message.extend((mtu as u32).to_be_bytes());
    message.extend(quoted);
    let checksum = packet::checksum(&message);
    message[2..4].copy_from_slice(&checksum.to_be_bytes());
    let length = IPV4_HEADER + ICMP_HEADER + QUOTED;
    let header = ip_header(INTERNETWORK_CONTROL, length, PROTOCOL_ICMP, vip, client);
    [&frame[..ETHERNET_HEADER], &header, &message].concat()
}
