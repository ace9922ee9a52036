//! Mutates packets, as noise, broken senders and attackers do.

use crate::frame::ETHERNET_HEADER_BYTES;
use crate::fuzz_rng::FuzzRng;
use crate::harness::LOAD_BALANCER_MAC;
use crate::packet_generator_state::PacketGeneratorState;

/// Minimum length of a frame that the kernel accepts for a test run (bytes).
pub const MIN_FRAME_BYTES: usize = 14;
/// Maximum length of a mutated frame (bytes). A test run has room for more, because it stores the packet in a page.
pub const MAX_FRAME_BYTES: usize = 2048;

const BOUNDARY_BYTES: [u8; 10] = [0, 1, 2, 7, 8, 0x0f, 0x40, 0x7f, 0x80, 0xff];

/// Writes a packet of random bytes, which are either the whole frame or the payload after valid headers.
pub fn write_packet_of_random_bytes(state: &PacketGeneratorState, rng: &mut FuzzRng, packet: &mut Vec<u8>) {
    packet.resize(MIN_FRAME_BYTES + rng.random_below(200), 0);
    rng.fill_bytes(packet);
    if packet.len() >= ETHERNET_HEADER_BYTES + 20 && rng.random_bool(15, 16) {
        let vip = state.services[rng.random_below(state.services.len())].ipv4_address;
        packet[..6].copy_from_slice(&LOAD_BALANCER_MAC);
        packet[12..14].copy_from_slice(&[8, 0]);
        packet[ETHERNET_HEADER_BYTES + 9] = rng.pick(&[1, 6, 17]);
        packet[ETHERNET_HEADER_BYTES + 16..ETHERNET_HEADER_BYTES + 20].copy_from_slice(&vip.0.octets());
        if rng.random_bool(3, 4) {
            packet[ETHERNET_HEADER_BYTES] = 0x45;
            packet[ETHERNET_HEADER_BYTES + 6..ETHERNET_HEADER_BYTES + 8].fill(0);
            let ip_packet_bytes = (packet.len() - ETHERNET_HEADER_BYTES) as u16;
            packet[ETHERNET_HEADER_BYTES + 2..ETHERNET_HEADER_BYTES + 4]
                .copy_from_slice(&ip_packet_bytes.to_be_bytes());
        }
        if packet.len() >= ETHERNET_HEADER_BYTES + 24 && rng.random_bool(3, 4) {
            packet[ETHERNET_HEADER_BYTES + 22..ETHERNET_HEADER_BYTES + 24].copy_from_slice(&vip.1.to_be_bytes());
        }
    }
}

/// Applies one to three random mutations to the packet.
pub fn mutate_packet(rng: &mut FuzzRng, packet: &mut Vec<u8>) {
    for _ in 0..1 + rng.random_below(3) {
        apply_random_mutation(rng, packet);
        packet.truncate(MAX_FRAME_BYTES);
        if packet.len() < MIN_FRAME_BYTES {
            packet.resize(MIN_FRAME_BYTES, 0);
        }
    }
}

/// Returns a random offset, mostly in the headers and rarely after them.
fn random_offset(rng: &mut FuzzRng, packet: &[u8]) -> usize {
    let headers_end = packet.len().min(110);
    if rng.random_bool(1, 16) { rng.random_below(packet.len()) } else { rng.random_below(headers_end) }
}

fn apply_random_mutation(rng: &mut FuzzRng, packet: &mut Vec<u8>) {
    let mutated_offset = random_offset(rng, packet);
    match rng.random_below(12) {
        0..3 => packet[mutated_offset] ^= 1 << rng.random_below(8),
        3 => packet[mutated_offset] = rng.pick(&BOUNDARY_BYTES),
        4 => packet[mutated_offset] = rng.next_u8(),
        5 => packet.truncate(mutated_offset),
        6 => {
            let new_length = packet.len() + rng.random_below(64);
            packet.resize(new_length, rng.pick(&BOUNDARY_BYTES));
        }
        7 => corrupt_length_field(rng, packet),
        8 => packet.insert(mutated_offset, rng.next_u8()),
        9 => {
            packet.remove(mutated_offset);
        }
        10 => {
            let range_end = (mutated_offset + 1 + rng.random_below(8)).min(packet.len());
            packet[mutated_offset..range_end].fill(rng.pick(&BOUNDARY_BYTES));
        }
        _ => {
            let source_offset = random_offset(rng, packet);
            let copied_bytes = (1 + rng.random_below(12)).min(packet.len() - mutated_offset.max(source_offset));
            packet.copy_within(source_offset..source_offset + copied_bytes, mutated_offset);
        }
    }
}

/// Changes a random length field by a random amount: that of the IP packet, the IP header, the TCP header or the UDP
/// datagram.
fn corrupt_length_field(rng: &mut FuzzRng, packet: &mut [u8]) {
    let ip_header_bytes = packet.get(ETHERNET_HEADER_BYTES).map_or(20, |byte| usize::from(byte & 0xf) * 4);
    let length_change = rng.pick(&[-20i16, -12, -8, -4, -1, 1, 4, 8, 20]);
    let mut change_field_at = |field_offset: usize| {
        if let Some(bytes) = packet.get_mut(field_offset..field_offset + 2) {
            let field_value = u16::from_be_bytes([bytes[0], bytes[1]]).wrapping_add_signed(length_change);
            bytes.copy_from_slice(&field_value.to_be_bytes());
        }
    };
    match rng.random_below(4) {
        0 => change_field_at(ETHERNET_HEADER_BYTES + 2),
        1 => change_field_at(ETHERNET_HEADER_BYTES + ip_header_bytes + 4),
        2 => {
            if let Some(byte) = packet.get_mut(ETHERNET_HEADER_BYTES) {
                *byte = byte.wrapping_add_signed(rng.pick(&[-1, 1, 2]));
            }
        }
        _ => {
            if let Some(byte) = packet.get_mut(ETHERNET_HEADER_BYTES + ip_header_bytes + 12) {
                *byte = byte.wrapping_add_signed(rng.pick(&[-16, 16, 32]));
            }
        }
    }
}
