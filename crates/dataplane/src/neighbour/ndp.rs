//! Frames of neighbour discovery (RFC 4861), which are composed for solicitations and parsed to find senders.

use std::net::Ipv6Addr;

use super::filter::{JUMP_IF_EQUAL_OPCODE, LOAD_U8_OPCODE, LOAD_U16_OPCODE, RETURN_OPCODE, new_bpf_instruction};
use crate::mac::MacAddress;

pub const ETHERTYPE_IPV6: u16 = 0x86dd;

const IPV6_HEADER_OFFSET: usize = 14;
const ICMPV6_HEADER_OFFSET: usize = IPV6_HEADER_OFFSET + 40;
const NDP_TARGET_ADDRESS_OFFSET: usize = ICMPV6_HEADER_OFFSET + 8;
const NDP_OPTIONS_OFFSET: usize = NDP_TARGET_ADDRESS_OFFSET + 16;
/// Length in bytes of the frame of a neighbour solicitation with one option.
const SOLICITATION_FRAME_BYTES: usize = NDP_OPTIONS_OFFSET + 8;

const NEXT_HEADER_ICMPV6: u8 = 58;
/// Hop limit of neighbour discovery packets. Because routers decrement it, the value 255 proves that the sender is on
/// the link (RFC 4861, Sect. 7.1.1).
const NDP_HOP_LIMIT: u8 = 255;
const NEIGHBOR_SOLICITATION_TYPE: u8 = 135;
const NEIGHBOR_ADVERTISEMENT_TYPE: u8 = 136;
const NDP_SOURCE_LINK_ADDRESS_OPTION: u8 = 1;
const NDP_TARGET_LINK_ADDRESS_OPTION: u8 = 2;

/// Socket filter that passes only neighbour solicitations and advertisements. Without it, the kernel would copy all
/// IPv6 packets to the socket.
pub const NDP_SOCKET_FILTER: [libc::sock_filter; 9] = [
    new_bpf_instruction(LOAD_U16_OPCODE, 0, 0, 12),
    new_bpf_instruction(JUMP_IF_EQUAL_OPCODE, 0, 6, ETHERTYPE_IPV6 as u32),
    new_bpf_instruction(LOAD_U8_OPCODE, 0, 0, IPV6_HEADER_OFFSET as u32 + 6),
    new_bpf_instruction(JUMP_IF_EQUAL_OPCODE, 0, 4, NEXT_HEADER_ICMPV6 as u32),
    new_bpf_instruction(LOAD_U8_OPCODE, 0, 0, ICMPV6_HEADER_OFFSET as u32),
    new_bpf_instruction(JUMP_IF_EQUAL_OPCODE, 1, 0, NEIGHBOR_SOLICITATION_TYPE as u32),
    new_bpf_instruction(JUMP_IF_EQUAL_OPCODE, 0, 1, NEIGHBOR_ADVERTISEMENT_TYPE as u32),
    new_bpf_instruction(RETURN_OPCODE, 0, 0, u32::MAX),
    new_bpf_instruction(RETURN_OPCODE, 0, 0, 0),
];

/// Returns the frame of a neighbour solicitation for `target`. Its destination is `mac`, or the target's multicast
/// group if `mac` is `None`. If `own_address` is unspecified, the frame is that of duplicate address detection: it goes
/// to the group and has no source link-layer address option (RFC 4861, Sect. 4.3 and 7.1.1).
pub fn neighbour_solicitation_frame(
    target: Ipv6Addr,
    mac: Option<MacAddress>,
    own_mac: MacAddress,
    own_address: Ipv6Addr,
) -> Vec<u8> {
    let [.., a, b, c] = target.octets();
    let (destination_mac, destination) = match mac.filter(|_| !own_address.is_unspecified()) {
        Some(mac) => (mac, target),
        None => {
            let multicast_group =
                Ipv6Addr::new(0xff02, 0, 0, 0, 0, 1, 0xff00 | u16::from(a), u16::from_be_bytes([b, c]));
            (MacAddress([0x33, 0x33, 0xff, a, b, c]), multicast_group)
        }
    };
    let frame_length = if own_address.is_unspecified() { NDP_OPTIONS_OFFSET } else { SOLICITATION_FRAME_BYTES };
    let mut frame = vec![0; frame_length];
    frame[..6].copy_from_slice(&destination_mac.0);
    frame[6..12].copy_from_slice(&own_mac.0);
    frame[12..14].copy_from_slice(&ETHERTYPE_IPV6.to_be_bytes());
    frame[IPV6_HEADER_OFFSET] = 6 << 4;
    frame[IPV6_HEADER_OFFSET + 4..IPV6_HEADER_OFFSET + 6]
        .copy_from_slice(&((frame_length - ICMPV6_HEADER_OFFSET) as u16).to_be_bytes());
    frame[IPV6_HEADER_OFFSET + 6] = NEXT_HEADER_ICMPV6;
    frame[IPV6_HEADER_OFFSET + 7] = NDP_HOP_LIMIT;
    frame[IPV6_HEADER_OFFSET + 8..IPV6_HEADER_OFFSET + 24].copy_from_slice(&own_address.octets());
    frame[IPV6_HEADER_OFFSET + 24..ICMPV6_HEADER_OFFSET].copy_from_slice(&destination.octets());
    frame[ICMPV6_HEADER_OFFSET] = NEIGHBOR_SOLICITATION_TYPE;
    frame[NDP_TARGET_ADDRESS_OFFSET..NDP_OPTIONS_OFFSET].copy_from_slice(&target.octets());
    if let Some(option) = frame.get_mut(NDP_OPTIONS_OFFSET..SOLICITATION_FRAME_BYTES) {
        option[..2].copy_from_slice(&[NDP_SOURCE_LINK_ADDRESS_OPTION, 1]);
        option[2..].copy_from_slice(&own_mac.0);
    }
    let frame_checksum = icmpv6_checksum(&frame);
    frame[ICMPV6_HEADER_OFFSET + 2..ICMPV6_HEADER_OFFSET + 4].copy_from_slice(&frame_checksum.to_be_bytes());
    frame
}

/// Returns the ICMPv6 checksum over a frame (RFC 4443, Sect. 2.3). The result is 0 if the frame already contains the
/// correct checksum.
fn icmpv6_checksum(frame: &[u8]) -> u16 {
    let checksum_words = frame[IPV6_HEADER_OFFSET + 8..]
        .chunks(2)
        .map(|word_bytes| u32::from(word_bytes[0]) << 8 | word_bytes.get(1).map_or(0, |low_byte| (*low_byte).into()));
    let mut word_sum =
        checksum_words.sum::<u32>() + (frame.len() - ICMPV6_HEADER_OFFSET) as u32 + u32::from(NEXT_HEADER_ICMPV6);
    while word_sum > 0xffff {
        word_sum = (word_sum & 0xffff) + (word_sum >> 16);
    }
    !(word_sum as u16)
}

/// Returns the sender of a solicitation or the target of an advertisement, with its MAC address. Returns `None` if the
/// frame is neither of them, is invalid, or has no MAC address.
pub fn parse_ndp_sender(frame: &[u8]) -> Option<(Ipv6Addr, MacAddress)> {
    if frame.len() < NDP_OPTIONS_OFFSET || frame[12..14] != ETHERTYPE_IPV6.to_be_bytes() {
        return None;
    }
    let payload_length =
        usize::from(u16::from_be_bytes([frame[IPV6_HEADER_OFFSET + 4], frame[IPV6_HEADER_OFFSET + 5]]));
    // Ethernet pads short frames, so only the payload is parsed.
    let frame = frame.get(..ICMPV6_HEADER_OFFSET + payload_length).filter(|frame| frame.len() >= NDP_OPTIONS_OFFSET)?;
    let is_discovery = frame[IPV6_HEADER_OFFSET] >> 4 == 6
        && frame[IPV6_HEADER_OFFSET + 6] == NEXT_HEADER_ICMPV6
        && frame[IPV6_HEADER_OFFSET + 7] == NDP_HOP_LIMIT;
    if !is_discovery || frame[ICMPV6_HEADER_OFFSET + 1] != 0 || icmpv6_checksum(frame) != 0 {
        return None;
    }
    let (address_offset, option_type) = match frame[ICMPV6_HEADER_OFFSET] {
        NEIGHBOR_SOLICITATION_TYPE => (IPV6_HEADER_OFFSET + 8, NDP_SOURCE_LINK_ADDRESS_OPTION),
        NEIGHBOR_ADVERTISEMENT_TYPE => (NDP_TARGET_ADDRESS_OFFSET, NDP_TARGET_LINK_ADDRESS_OPTION),
        _ => return None,
    };
    let address = Ipv6Addr::from(<[u8; 16]>::try_from(&frame[address_offset..address_offset + 16]).ok()?);
    let mac = find_mac_option(&frame[NDP_OPTIONS_OFFSET..], option_type)?;
    let is_unicast = !address.is_unspecified() && !address.is_multicast();
    (is_unicast && !mac.is_group_address() && mac != MacAddress([0; 6])).then_some((address, mac))
}

/// Returns the MAC address in the first option of type `option_type`, or `None` if there is no valid one.
fn find_mac_option(mut options: &[u8], option_type: u8) -> Option<MacAddress> {
    while let [kind, length, ..] = *options {
        let option_bytes = usize::from(length) * 8;
        let option = options.get(..option_bytes).filter(|option| !option.is_empty())?;
        if kind == option_type {
            return Some(MacAddress(option.get(2..8)?.try_into().ok()?));
        }
        options = &options[option_bytes..];
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    const OWN_ADDRESS: Ipv6Addr = Ipv6Addr::new(0x2001, 0xdb8, 0, 0, 0, 0, 0, 1);
    const TARGET_ADDRESS: Ipv6Addr = Ipv6Addr::new(0x2001, 0xdb8, 0, 0, 0, 0, 0xa01, 0x203);
    const SENDER_MAC: MacAddress = MacAddress([2, 0, 0, 0, 0, 1]);

    fn frame_with_checksum(mut frame: Vec<u8>) -> Vec<u8> {
        frame[ICMPV6_HEADER_OFFSET + 2..ICMPV6_HEADER_OFFSET + 4].fill(0);
        let frame_checksum = icmpv6_checksum(&frame);
        frame[ICMPV6_HEADER_OFFSET + 2..ICMPV6_HEADER_OFFSET + 4].copy_from_slice(&frame_checksum.to_be_bytes());
        frame
    }

    #[test]
    fn solicitation_contains_its_sender_and_goes_to_the_target_group() {
        let frame = neighbour_solicitation_frame(TARGET_ADDRESS, None, SENDER_MAC, OWN_ADDRESS);
        assert_eq!(frame[..6], [0x33, 0x33, 0xff, 1, 2, 3]);
        assert_eq!(
            frame[IPV6_HEADER_OFFSET + 24..ICMPV6_HEADER_OFFSET],
            "ff02::1:ff01:203".parse::<Ipv6Addr>().unwrap().octets()
        );
        assert_eq!(parse_ndp_sender(&frame), Some((OWN_ADDRESS, SENDER_MAC)));
        let target_mac = MacAddress([2, 0, 0, 0, 0, 9]);
        let unicast_frame = neighbour_solicitation_frame(TARGET_ADDRESS, Some(target_mac), SENDER_MAC, OWN_ADDRESS);
        assert_eq!(
            (&unicast_frame[..6], &unicast_frame[IPV6_HEADER_OFFSET + 24..ICMPV6_HEADER_OFFSET]),
            (&target_mac.0[..], &TARGET_ADDRESS.octets()[..])
        );
        for length in 0..SOLICITATION_FRAME_BYTES {
            assert_eq!(parse_ndp_sender(&frame[..length]), None, "{length} bytes");
        }
    }

    #[test]
    fn solicitation_without_own_address_is_duplicate_address_detection() {
        let frame = neighbour_solicitation_frame(TARGET_ADDRESS, Some(SENDER_MAC), SENDER_MAC, Ipv6Addr::UNSPECIFIED);
        assert_eq!(frame.len(), NDP_OPTIONS_OFFSET, "RFC 4861, Sect. 4.3: no source link-layer address option");
        assert_eq!(frame[..6], [0x33, 0x33, 0xff, 1, 2, 3]);
        assert_eq!(
            frame[IPV6_HEADER_OFFSET + 24..ICMPV6_HEADER_OFFSET],
            "ff02::1:ff01:203".parse::<Ipv6Addr>().unwrap().octets()
        );
        assert_eq!((icmpv6_checksum(&frame), parse_ndp_sender(&frame)), (0, None));
    }

    #[test]
    fn advertisement_yields_its_target_address() {
        let mut frame = neighbour_solicitation_frame(TARGET_ADDRESS, None, SENDER_MAC, OWN_ADDRESS);
        frame[ICMPV6_HEADER_OFFSET] = NEIGHBOR_ADVERTISEMENT_TYPE;
        assert_eq!(parse_ndp_sender(&frame_with_checksum(frame.clone())), None, "the option is of a solicitation");
        frame[NDP_OPTIONS_OFFSET] = NDP_TARGET_LINK_ADDRESS_OPTION;
        let valid_frame = frame_with_checksum(frame);
        assert_eq!(parse_ndp_sender(&valid_frame), Some((TARGET_ADDRESS, SENDER_MAC)));
        // Ethernet pads short frames.
        assert_eq!(parse_ndp_sender(&[&valid_frame[..], &[7; 9]].concat()), Some((TARGET_ADDRESS, SENDER_MAC)));
        for (at, value) in [
            (IPV6_HEADER_OFFSET + 7, 254),
            (ICMPV6_HEADER_OFFSET + 1, 1),
            (NDP_OPTIONS_OFFSET + 1, 0),
            (NDP_OPTIONS_OFFSET + 2, 1),
        ] {
            let mut invalid_frame = valid_frame.clone();
            invalid_frame[at] = value;
            assert_eq!(parse_ndp_sender(&frame_with_checksum(invalid_frame)), None, "byte {at}");
        }
        let mut damaged_frame = valid_frame;
        damaged_frame[NDP_TARGET_ADDRESS_OFFSET] ^= 1;
        assert_eq!(parse_ndp_sender(&damaged_frame), None);
    }
}
