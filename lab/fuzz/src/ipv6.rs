//! IPv6 packets, translated from the generator's IPv4 packets: services at [`IPV6_PLACEHOLDERS`] have IPv6 VIPs. Both
//! families therefore get the same headers, options, errors and faults.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};

use coreward_model::FourTuple;

use crate::frame::{ETHERNET_HEADER_BYTES, ICMP};
use crate::fuzz_rng::FuzzRng;

/// IPv4 addresses that stand in for IPv6 VIPs in generated packets.
pub const IPV6_PLACEHOLDERS: [Ipv4Addr; 2] = [Ipv4Addr::new(10, 200, 6, 1), Ipv4Addr::new(10, 200, 6, 2)];

const IPV6_PREFIX: u128 = 0x2001_0db8 << 96;
const IPV4_HEADER: usize = 20;
const IPV6_HEADER: usize = 40;
const ICMP_HEADER: usize = 8;
const ICMPV6: u8 = 58;
const NEXT_HEADER_FRAGMENT: u8 = 44;
const NEXT_HEADER_AUTHENTICATION: u8 = 51;

/// Returns the IPv6 address that corresponds to an IPv4 address. Addresses in the same /24 are in the same /64.
pub fn address(ipv4: Ipv4Addr) -> Ipv6Addr {
    let bits = u128::from(ipv4.to_bits());
    Ipv6Addr::from_bits(IPV6_PREFIX | bits >> 8 << 64 | bits)
}

/// Returns the IPv4 address that corresponds to an IPv6 address of [`address`].
pub fn placeholder(ipv6: Ipv6Addr) -> Ipv4Addr {
    Ipv4Addr::from_bits(ipv6.to_bits() as u32)
}

/// Returns the socket address of the service at this VIP, which is IPv6 for a placeholder.
pub fn socket(vip: (Ipv4Addr, u16)) -> SocketAddr {
    let ip: IpAddr = if IPV6_PLACEHOLDERS.contains(&vip.0) { address(vip.0).into() } else { vip.0.into() };
    SocketAddr::new(ip, vip.1)
}

/// Returns the four-tuple of a client's connection to a VIP, which is IPv6 for a placeholder.
pub fn tuple(client: (Ipv4Addr, u16), vip: (Ipv4Addr, u16)) -> FourTuple {
    match socket(vip) {
        SocketAddr::V4(_) => FourTuple::ipv4(client, vip),
        SocketAddr::V6(_) => FourTuple::ipv6((address(client.0), client.1), (address(vip.0), vip.1)),
    }
}

fn ipv4_at(bytes: &[u8], at: usize) -> Ipv4Addr {
    Ipv4Addr::from(<[u8; 4]>::try_from(&bytes[at..at + 4]).expect("four bytes"))
}

fn read_u16(bytes: &[u8], at: usize) -> u16 {
    u16::from_be_bytes([bytes[at], bytes[at + 1]])
}

/// Translates a well-formed IPv4 packet to IPv6 if its source or destination is a placeholder.
pub fn translate(rng: &mut FuzzRng, frame: &mut Vec<u8>) {
    let packet = &frame[ETHERNET_HEADER_BYTES.min(frame.len())..];
    if packet.len() < IPV4_HEADER || frame[12..14] != [8, 0] || packet[0] >> 4 != 4 {
        return;
    }
    let (header, total) = (usize::from(packet[0] & 0xf) * 4, usize::from(read_u16(packet, 2)));
    let ends = [ipv4_at(packet, 12), ipv4_at(packet, 16)];
    if header < IPV4_HEADER
        || total < header
        || total > packet.len()
        || !ends.iter().any(|end| IPV6_PLACEHOLDERS.contains(end))
    {
        return;
    }
    let transport = match packet[9] {
        ICMP => translate_icmp(rng, &packet[header..total]),
        _ => packet[header..total].to_vec(),
    };
    let protocol = if packet[9] == ICMP { ICMPV6 } else { packet[9] };
    let (next, extensions) = extension_headers(rng, packet, protocol);
    let trailer = packet[total..].to_vec();
    let length = extensions.len() + transport.len();
    let mut translated = [&frame[..12], &[0x86, 0xdd]].concat();
    translated.extend(ipv6_header(rng, length, next, ends));
    for part in [extensions, transport, trailer] {
        translated.extend(part);
    }
    *frame = translated;
}

fn ipv6_header(rng: &mut FuzzRng, length: usize, next: u8, ends: [Ipv4Addr; 2]) -> Vec<u8> {
    let mut header = vec![0x60 | rng.u8() & 0xf, rng.u8(), rng.u8(), rng.u8()];
    header.extend((length as u16).to_be_bytes());
    header.extend([next, 64]);
    header.extend(ends.map(|end| address(end).octets()).concat());
    header
}

/// Returns random extension headers before `protocol`, and the header number to write into the fixed header.
fn extension_headers(rng: &mut FuzzRng, ipv4: &[u8], protocol: u8) -> (u8, Vec<u8>) {
    let mut headers: Vec<(u8, Vec<u8>)> = Vec::new();
    if rng.chance(1, 8) {
        let most = if rng.chance(1, 16) { 8 } else { 3 };
        for _ in 0..1 + rng.below(most) {
            let (number, units) = (rng.pick(&[0, 43, 60, NEXT_HEADER_AUTHENTICATION]), rng.below(3));
            let length = if number == NEXT_HEADER_AUTHENTICATION { 8 + 4 * units } else { 8 * (units + 1) };
            headers.push((number, [&[0, units as u8][..], &vec![0; length - 2]].concat()));
        }
    }
    let fragment = read_u16(ipv4, 6) & 0x3fff;
    if fragment != 0 || rng.chance(1, 30) {
        // The offset moves up by three bits; the flag "more fragments" moves to the lowest bit.
        let field = fragment.rotate_left(3).to_be_bytes();
        headers.push((NEXT_HEADER_FRAGMENT, [&[0, 0][..], &field, &[0, 0], &ipv4[4..6]].concat()));
    }
    let numbers: Vec<u8> = headers.iter().map(|(number, _)| *number).chain([protocol]).collect();
    for ((_, bytes), next) in headers.iter_mut().zip(&numbers[1..]) {
        bytes[0] = *next;
    }
    (numbers[0], headers.into_iter().flat_map(|(_, bytes)| bytes).collect())
}

/// Translates an ICMP message to ICMPv6, with the header of the packet that it quotes.
fn translate_icmp(rng: &mut FuzzRng, message: &[u8]) -> Vec<u8> {
    let mut translated = message[..ICMP_HEADER.min(message.len())].to_vec();
    if let Some(kind) = translated.first_mut() {
        *kind = match *kind {
            3 => rng.pick(&[1, 2]),
            11 => 3,
            12 => 4,
            other => other,
        };
    }
    let quoted = message.get(ICMP_HEADER..).unwrap_or_default();
    if quoted.len() < IPV4_HEADER {
        translated.resize(translated.len() + 2 * quoted.len(), 0);
        return translated;
    }
    let header = (usize::from(quoted[0] & 0xf) * 4).min(quoted.len());
    let length = usize::from(read_u16(quoted, 2)).saturating_sub(header);
    translated.extend(ipv6_header(rng, length, quoted[9], [ipv4_at(quoted, 12), ipv4_at(quoted, 16)]));
    translated.extend(&quoted[header..]);
    translated
}

/// Fields of the headers of an IPv6 packet.
pub struct Headers {
    /// Source and destination address.
    pub ends: [Ipv6Addr; 2],
    pub protocol: u8,
    /// Offset of the transport header, counted from the start of the frame.
    pub transport_offset: usize,
    /// Whether the packet is a fragment that is not the first one, and so has no transport header.
    pub is_later_fragment: bool,
}

/// Parses the headers of an IPv6 frame; `None` when it is not IPv6, or malformed.
pub fn read(frame: &[u8]) -> Option<Headers> {
    let packet = frame
        .get(ETHERNET_HEADER_BYTES..)
        .filter(|packet| packet.len() >= IPV6_HEADER && frame[12..14] == [0x86, 0xdd])?;
    let end = |at: usize| Some(Ipv6Addr::from(<[u8; 16]>::try_from(packet.get(at..at + 16)?).ok()?));
    let (mut protocol, mut at, mut is_later_fragment) = (packet[6], IPV6_HEADER, false);
    while let 0 | 43 | NEXT_HEADER_FRAGMENT | NEXT_HEADER_AUTHENTICATION | 60 = protocol {
        let header = packet.get(at..at + 4)?;
        let length = usize::from(header[1]);
        at += match protocol {
            NEXT_HEADER_FRAGMENT => 8,
            NEXT_HEADER_AUTHENTICATION => (length + 2) * 4,
            _ => (length + 1) * 8,
        };
        is_later_fragment |= protocol == NEXT_HEADER_FRAGMENT && read_u16(header, 2) & 0xfff8 != 0;
        protocol = header[0];
        if is_later_fragment {
            break;
        }
    }
    Some(Headers {
        ends: [end(8)?, end(24)?],
        protocol,
        transport_offset: ETHERNET_HEADER_BYTES + at,
        is_later_fragment,
    })
}
