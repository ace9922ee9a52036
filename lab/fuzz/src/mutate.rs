//! Mutations of packets: noise, broken senders and attackers.

use crate::frame::ETHERNET_HEADER_BYTES;
use crate::fuzz_rng::FuzzRng;
use crate::gen_state::GenState;
use crate::harness::OWN_MAC;

/// Minimum length of a frame that the kernel accepts for a test run (bytes).
pub const MIN_FRAME_BYTES: usize = 14;
/// Maximum length of a mutated frame (bytes), which is far below the page of a test run's packet.
pub const MAX_FRAME_BYTES: usize = 2048;

const INTERESTING_BYTES: [u8; 10] = [0, 1, 2, 7, 8, 0x0f, 0x40, 0x7f, 0x80, 0xff];

/// Writes a packet of random bytes, either the whole frame or the payload behind valid headers.
pub fn write_random_bytes(state: &GenState, rng: &mut FuzzRng, packet: &mut Vec<u8>) {
    packet.resize(MIN_FRAME_BYTES + rng.below(200), 0);
    rng.fill(packet);
    if packet.len() >= ETHERNET_HEADER_BYTES + 20 && rng.chance(15, 16) {
        let vip = state.services[rng.below(state.services.len())].vip;
        packet[..6].copy_from_slice(&OWN_MAC);
        packet[12..14].copy_from_slice(&[8, 0]);
        packet[ETHERNET_HEADER_BYTES + 9] = rng.pick(&[1, 6, 17]);
        packet[ETHERNET_HEADER_BYTES + 16..ETHERNET_HEADER_BYTES + 20].copy_from_slice(&vip.0.octets());
        if rng.chance(3, 4) {
            packet[ETHERNET_HEADER_BYTES] = 0x45;
            packet[ETHERNET_HEADER_BYTES + 6..ETHERNET_HEADER_BYTES + 8].fill(0);
            let total = (packet.len() - ETHERNET_HEADER_BYTES) as u16;
            packet[ETHERNET_HEADER_BYTES + 2..ETHERNET_HEADER_BYTES + 4].copy_from_slice(&total.to_be_bytes());
        }
        if packet.len() >= ETHERNET_HEADER_BYTES + 24 && rng.chance(3, 4) {
            packet[ETHERNET_HEADER_BYTES + 22..ETHERNET_HEADER_BYTES + 24].copy_from_slice(&vip.1.to_be_bytes());
        }
    }
}

/// Applies one to three random mutations to the packet.
pub fn mutate(rng: &mut FuzzRng, packet: &mut Vec<u8>) {
    for _ in 0..1 + rng.below(3) {
        mutate_once(rng, packet);
        packet.truncate(MAX_FRAME_BYTES);
        if packet.len() < MIN_FRAME_BYTES {
            packet.resize(MIN_FRAME_BYTES, 0);
        }
    }
}

/// Returns a random offset, mostly in the headers, rarely behind them.
fn offset(rng: &mut FuzzRng, packet: &[u8]) -> usize {
    let headers = packet.len().min(110);
    if rng.chance(1, 16) { rng.below(packet.len()) } else { rng.below(headers) }
}

fn mutate_once(rng: &mut FuzzRng, packet: &mut Vec<u8>) {
    let at = offset(rng, packet);
    match rng.below(12) {
        0..3 => packet[at] ^= 1 << rng.below(8),
        3 => packet[at] = rng.pick(&INTERESTING_BYTES),
        4 => packet[at] = rng.u8(),
        5 => packet.truncate(at),
        6 => {
            let length = packet.len() + rng.below(64);
            packet.resize(length, rng.pick(&INTERESTING_BYTES));
        }
        7 => corrupt_length(rng, packet),
        8 => packet.insert(at, rng.u8()),
        9 => {
            packet.remove(at);
        }
        10 => {
            let end = (at + 1 + rng.below(8)).min(packet.len());
            packet[at..end].fill(rng.pick(&INTERESTING_BYTES));
        }
        _ => {
            let from = offset(rng, packet);
            let length = (1 + rng.below(12)).min(packet.len() - at.max(from));
            packet.copy_within(from..from + length, at);
        }
    }
}

/// Changes a length field by a random amount: that of the IP packet, the IP header, the TCP header or the UDP datagram.
fn corrupt_length(rng: &mut FuzzRng, packet: &mut [u8]) {
    let header = packet.get(ETHERNET_HEADER_BYTES).map_or(20, |byte| usize::from(byte & 0xf) * 4);
    let by = rng.pick(&[-20i16, -12, -8, -4, -1, 1, 4, 8, 20]);
    let mut add = |at: usize| {
        if let Some(bytes) = packet.get_mut(at..at + 2) {
            let value = u16::from_be_bytes([bytes[0], bytes[1]]).wrapping_add_signed(by);
            bytes.copy_from_slice(&value.to_be_bytes());
        }
    };
    match rng.below(4) {
        0 => add(ETHERNET_HEADER_BYTES + 2),
        1 => add(ETHERNET_HEADER_BYTES + header + 4),
        2 => {
            if let Some(byte) = packet.get_mut(ETHERNET_HEADER_BYTES) {
                *byte = byte.wrapping_add_signed(rng.pick(&[-1, 1, 2]));
            }
        }
        _ => {
            if let Some(byte) = packet.get_mut(ETHERNET_HEADER_BYTES + header + 12) {
                *byte = byte.wrapping_add_signed(rng.pick(&[-16, 16, 32]));
            }
        }
    }
}
