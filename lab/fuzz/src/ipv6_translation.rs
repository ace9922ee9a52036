//! Translates the generator's IPv4 packets to IPv6, so that both families get the same headers, options, errors and
//! faults. Services at [`IPV6_VIP_PLACEHOLDERS`] have IPv6 VIPs.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};

use coreward_model::FourTuple;

use crate::frame::{ETHERNET_HEADER_BYTES, PROTOCOL_ICMP};
use crate::fuzz_rng::FuzzRng;

/// IPv4 addresses that represent IPv6 VIPs in generated packets, until [`translate_to_ipv6`] replaces them.
pub const IPV6_VIP_PLACEHOLDERS: [Ipv4Addr; 2] = [Ipv4Addr::new(10, 200, 6, 1), Ipv4Addr::new(10, 200, 6, 2)];

const IPV6_PREFIX: u128 = 0x2001_0db8 << 96;
const IPV4_HEADER_BYTES: usize = 20;
const IPV6_HEADER_BYTES: usize = 40;
const ICMP_HEADER_BYTES: usize = 8;
const PROTOCOL_ICMPV6: u8 = 58;
const NEXT_HEADER_FRAGMENT: u8 = 44;
const NEXT_HEADER_AUTHENTICATION: u8 = 51;

/// Returns the IPv6 address that corresponds to an IPv4 address. Addresses in the same /24 are in the same /64.
pub fn ipv6_for_ipv4(ipv4: Ipv4Addr) -> Ipv6Addr {
    let bits = u128::from(ipv4.to_bits());
    Ipv6Addr::from_bits(IPV6_PREFIX | bits >> 8 << 64 | bits)
}

/// Returns the IPv4 address from which [`ipv6_for_ipv4`] derived an IPv6 address.
pub fn ipv4_for_ipv6(ipv6: Ipv6Addr) -> Ipv4Addr {
    Ipv4Addr::from_bits(ipv6.to_bits() as u32)
}

/// Returns the socket address of the service with this VIP. It is an IPv6 address if the VIP is a placeholder.
pub fn service_socket_address(vip: (Ipv4Addr, u16)) -> SocketAddr {
    let ip: IpAddr = if IPV6_VIP_PLACEHOLDERS.contains(&vip.0) { ipv6_for_ipv4(vip.0).into() } else { vip.0.into() };
    SocketAddr::new(ip, vip.1)
}

/// Returns the four-tuple of a client's connection to a VIP. It has IPv6 addresses if the VIP is a placeholder.
pub fn four_tuple(client: (Ipv4Addr, u16), vip: (Ipv4Addr, u16)) -> FourTuple {
    match service_socket_address(vip) {
        SocketAddr::V4(_) => FourTuple::ipv4(client, vip),
        SocketAddr::V6(_) => FourTuple::ipv6((ipv6_for_ipv4(client.0), client.1), (ipv6_for_ipv4(vip.0), vip.1)),
    }
}

fn read_ipv4(bytes: &[u8], offset: usize) -> Ipv4Addr {
    Ipv4Addr::from(<[u8; 4]>::try_from(&bytes[offset..offset + 4]).expect("four bytes"))
}

fn read_be_u16(bytes: &[u8], offset: usize) -> u16 {
    u16::from_be_bytes([bytes[offset], bytes[offset + 1]])
}

/// Translates a well-formed IPv4 packet to IPv6 if its source or destination is a placeholder.
pub fn translate_to_ipv6(rng: &mut FuzzRng, frame: &mut Vec<u8>) {
    let ipv4_packet = &frame[ETHERNET_HEADER_BYTES.min(frame.len())..];
    if ipv4_packet.len() < IPV4_HEADER_BYTES || frame[12..14] != [8, 0] || ipv4_packet[0] >> 4 != 4 {
        return;
    }
    let (header_bytes, packet_bytes) =
        (usize::from(ipv4_packet[0] & 0xf) * 4, usize::from(read_be_u16(ipv4_packet, 2)));
    let source_and_destination = [read_ipv4(ipv4_packet, 12), read_ipv4(ipv4_packet, 16)];
    if header_bytes < IPV4_HEADER_BYTES
        || packet_bytes < header_bytes
        || packet_bytes > ipv4_packet.len()
        || !source_and_destination.iter().any(|address| IPV6_VIP_PLACEHOLDERS.contains(address))
    {
        return;
    }
    let transport_segment = match ipv4_packet[9] {
        PROTOCOL_ICMP => translate_icmp_to_icmpv6(rng, &ipv4_packet[header_bytes..packet_bytes]),
        _ => ipv4_packet[header_bytes..packet_bytes].to_vec(),
    };
    let protocol = if ipv4_packet[9] == PROTOCOL_ICMP { PROTOCOL_ICMPV6 } else { ipv4_packet[9] };
    let (next_header, extensions) = random_extension_headers(rng, ipv4_packet, protocol);
    let trailer = ipv4_packet[packet_bytes..].to_vec();
    let payload_bytes = extensions.len() + transport_segment.len();
    let mut ipv6_frame = [&frame[..12], &[0x86, 0xdd]].concat();
    ipv6_frame.extend(build_random_ipv6_header(rng, payload_bytes, next_header, source_and_destination));
    for section_bytes in [extensions, transport_segment, trailer] {
        ipv6_frame.extend(section_bytes);
    }
    *frame = ipv6_frame;
}

fn build_random_ipv6_header(
    rng: &mut FuzzRng,
    payload_bytes: usize,
    next_header: u8,
    source_and_destination: [Ipv4Addr; 2],
) -> Vec<u8> {
    let mut header = vec![0x60 | rng.next_u8() & 0xf, rng.next_u8(), rng.next_u8(), rng.next_u8()];
    header.extend((payload_bytes as u16).to_be_bytes());
    header.extend([next_header, 64]);
    header.extend(source_and_destination.map(|address| ipv6_for_ipv4(address).octets()).concat());
    header
}

/// Returns random IPv6 extension headers that end with `protocol` as the next header. The first value is the type of
/// the first header, for the fixed header's field Next Header.
fn random_extension_headers(rng: &mut FuzzRng, ipv4_packet: &[u8], protocol: u8) -> (u8, Vec<u8>) {
    let mut headers: Vec<(u8, Vec<u8>)> = Vec::new();
    if rng.random_bool(1, 8) {
        let max_header_count = if rng.random_bool(1, 16) { 8 } else { 3 };
        for _ in 0..1 + rng.random_below(max_header_count) {
            let (header_number, unit_count) = (rng.pick(&[0, 43, 60, NEXT_HEADER_AUTHENTICATION]), rng.random_below(3));
            let header_bytes =
                if header_number == NEXT_HEADER_AUTHENTICATION { 8 + 4 * unit_count } else { 8 * (unit_count + 1) };
            headers.push((header_number, [&[0, unit_count as u8][..], &vec![0; header_bytes - 2]].concat()));
        }
    }
    let fragment_field = read_be_u16(ipv4_packet, 6) & 0x3fff;
    if fragment_field != 0 || rng.random_bool(1, 30) {
        // The offset moves up by three bits, and the flag "more fragments" moves to the lowest bit.
        let offset_and_flag = fragment_field.rotate_left(3).to_be_bytes();
        headers.push((NEXT_HEADER_FRAGMENT, [&[0, 0][..], &offset_and_flag, &[0, 0], &ipv4_packet[4..6]].concat()));
    }
    let header_numbers: Vec<u8> = headers.iter().map(|(header_number, _)| *header_number).chain([protocol]).collect();
    for ((_, bytes), next_number) in headers.iter_mut().zip(&header_numbers[1..]) {
        bytes[0] = *next_number;
    }
    (header_numbers[0], headers.into_iter().flat_map(|(_, bytes)| bytes).collect())
}

/// Translates an ICMP message to ICMPv6, together with the headers of the quoted packet.
fn translate_icmp_to_icmpv6(rng: &mut FuzzRng, message: &[u8]) -> Vec<u8> {
    let mut icmpv6_message = message[..ICMP_HEADER_BYTES.min(message.len())].to_vec();
    if let Some(icmp_type) = icmpv6_message.first_mut() {
        *icmp_type = match *icmp_type {
            3 => rng.pick(&[1, 2]),
            11 => 3,
            12 => 4,
            other => other,
        };
    }
    let quoted_packet = message.get(ICMP_HEADER_BYTES..).unwrap_or_default();
    if quoted_packet.len() < IPV4_HEADER_BYTES {
        icmpv6_message.resize(icmpv6_message.len() + 2 * quoted_packet.len(), 0);
        return icmpv6_message;
    }
    let header_bytes = (usize::from(quoted_packet[0] & 0xf) * 4).min(quoted_packet.len());
    let payload_bytes = usize::from(read_be_u16(quoted_packet, 2)).saturating_sub(header_bytes);
    icmpv6_message.extend(build_random_ipv6_header(
        rng,
        payload_bytes,
        quoted_packet[9],
        [read_ipv4(quoted_packet, 12), read_ipv4(quoted_packet, 16)],
    ));
    icmpv6_message.extend(&quoted_packet[header_bytes..]);
    icmpv6_message
}

/// Fields of the headers of an IPv6 packet.
pub struct Ipv6Headers {
    pub source_and_destination: [Ipv6Addr; 2],
    pub protocol: u8,
    /// Offset of the transport header, counted from the start of the frame.
    pub transport_offset: usize,
    /// Whether the packet is a fragment that is not the first one, and so has no transport header.
    pub is_later_fragment: bool,
}

/// Parses the headers of an IPv6 frame. Returns `None` when the frame is malformed or not IPv6.
pub fn parse_frame(frame: &[u8]) -> Option<Ipv6Headers> {
    let packet = frame
        .get(ETHERNET_HEADER_BYTES..)
        .filter(|packet| packet.len() >= IPV6_HEADER_BYTES && frame[12..14] == [0x86, 0xdd])?;
    let read_address_at = |address_offset: usize| {
        Some(Ipv6Addr::from(<[u8; 16]>::try_from(packet.get(address_offset..address_offset + 16)?).ok()?))
    };
    let (mut protocol, mut offset, mut is_later_fragment) = (packet[6], IPV6_HEADER_BYTES, false);
    while let 0 | 43 | NEXT_HEADER_FRAGMENT | NEXT_HEADER_AUTHENTICATION | 60 = protocol {
        let header = packet.get(offset..offset + 4)?;
        let length_field = usize::from(header[1]);
        offset += match protocol {
            NEXT_HEADER_FRAGMENT => 8,
            NEXT_HEADER_AUTHENTICATION => (length_field + 2) * 4,
            _ => (length_field + 1) * 8,
        };
        is_later_fragment |= protocol == NEXT_HEADER_FRAGMENT && read_be_u16(header, 2) & 0xfff8 != 0;
        protocol = header[0];
        if is_later_fragment {
            break;
        }
    }
    Some(Ipv6Headers {
        source_and_destination: [read_address_at(8)?, read_address_at(24)?],
        protocol,
        transport_offset: ETHERNET_HEADER_BYTES + offset,
        is_later_fragment,
    })
}
