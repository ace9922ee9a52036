//! Parsing and rewriting of an IPv6 frame, as in `bpf/lb/parse_ipv6.h` and `bpf/lb/icmp_ipv6.h`.

use std::net::{IpAddr, Ipv6Addr, SocketAddr};

use coreward_intf as intf;

use super::ip_packet::{
    ETHERNET_HEADER_BYTES, FrameFields, ICMP_HEADER_BYTES, IpFragmentPart, IpPacket, MIN_QUOTED_PAYLOAD_BYTES,
    NOT_SERVICE_COUNTER, ParseEndCounter, QuotedPacket, u16_at,
};
use super::timestamp_option::quoted_tsval;
use crate::tuple::TransportProtocol;

pub(super) const ETHERTYPE_IPV6: u16 = 0x86dd;
pub(super) const IPV6_HEADER_BYTES: usize = 40;
/// Range of the types of ICMPv6 errors (RFC 4443).
const ICMPV6_ERROR_TYPES: std::ops::RangeInclusive<u8> = 1..=4;
pub(super) const PROTOCOL_ICMPV6: u8 = 58;

/// Protocol number of the fragment header. It is among the extension headers that are skipped (RFC 8200, RFC 4302).
const FRAGMENT_HEADER_PROTOCOL: u8 = 44;
const AUTHENTICATION_HEADER_PROTOCOL: u8 = 51;
const EXTENSION_HEADER_PROTOCOLS: [u8; 5] = [0, 43, FRAGMENT_HEADER_PROTOCOL, AUTHENTICATION_HEADER_PROTOCOL, 60];
const MAX_EXTENSION_HEADERS: usize = 6;
/// Maximum offset of a transport header from the start of the frame, in bytes.
const MAX_TRANSPORT_OFFSET: usize = 111;

pub(super) fn is_ipv6(frame: &[u8]) -> bool {
    frame.len() >= ETHERNET_HEADER_BYTES + IPV6_HEADER_BYTES && u16_at(frame, 12) == ETHERTYPE_IPV6
}

pub(super) fn ipv6_address_at(bytes: &[u8], offset: usize) -> IpAddr {
    Ipv6Addr::from(<[u8; 16]>::try_from(&bytes[offset..offset + 16]).expect("16 bytes")).into()
}

/// Returns the fields that are read before the checks, from a frame that [`is_ipv6`] accepted.
pub(super) fn read_frame_fields(frame: &[u8]) -> Option<FrameFields> {
    Some(FrameFields {
        destination_mac: frame[..6].try_into().expect("six bytes"),
        protocol_number: frame[ETHERNET_HEADER_BYTES + 6],
        vip: ipv6_address_at(frame, ETHERNET_HEADER_BYTES + 24),
    })
}

/// Parses the IP headers of a frame that [`is_ipv6`] accepted.
pub(super) fn parse_ipv6(frame: &[u8]) -> Result<IpPacket<'_>, ParseEndCounter> {
    let packet = &frame[ETHERNET_HEADER_BYTES..];
    let packet_end = IPV6_HEADER_BYTES + usize::from(u16_at(packet, 4));
    if packet[0] >> 4 != 6 || packet_end > packet.len() {
        return Err(intf::LB_COUNTER_DROP_MALFORMED_IPV6);
    }
    let TransportHeaderPosition { protocol_number: protocol, fragment_part, identification, transport_offset } =
        skip_extension_headers(&packet[..packet_end])?;
    Ok(IpPacket {
        client: ipv6_address_at(packet, 8),
        vip: ipv6_address_at(packet, 24),
        protocol_number: protocol,
        identification,
        fragment_part,
        transport_offset: ETHERNET_HEADER_BYTES + transport_offset,
        payload: packet.get(transport_offset..packet_end).unwrap_or_default(),
    })
}

/// Transport header at the end of a chain of extension headers, with its position.
struct TransportHeaderPosition {
    protocol_number: u8,
    fragment_part: IpFragmentPart,
    /// Identification of a fragmented datagram, or 0 for an unfragmented one.
    identification: u32,
    /// Offset of the transport header from the start of the IPv6 header.
    transport_offset: usize,
}

/// Skips the extension headers of a packet. Fails with a counter if the headers are malformed or too long.
fn skip_extension_headers(packet: &[u8]) -> Result<TransportHeaderPosition, ParseEndCounter> {
    let (mut next_header, mut offset) = (packet[6], IPV6_HEADER_BYTES);
    for _ in 0..MAX_EXTENSION_HEADERS {
        if !EXTENSION_HEADER_PROTOCOLS.contains(&next_header) {
            break;
        }
        let header_start = packet.get(offset..offset + 4).ok_or(intf::LB_COUNTER_DROP_MALFORMED_IPV6)?;
        let length_field = usize::from(header_start[1]);
        let (header_number, field) = (next_header, u16_at(header_start, 2));
        next_header = header_start[0];
        offset += match header_number {
            FRAGMENT_HEADER_PROTOCOL => 8,
            AUTHENTICATION_HEADER_PROTOCOL => (length_field + 2) * 4,
            _ => (length_field + 1) * 8,
        };
        if ETHERNET_HEADER_BYTES + offset > MAX_TRANSPORT_OFFSET {
            return Err(intf::LB_COUNTER_DROP_EXTENSION_HEADERS);
        }
        // An atomic fragment is a whole packet, whose fragment bits are 0 except the reserved ones (RFC 6946).
        if header_number == FRAGMENT_HEADER_PROTOCOL && field & !0x6 != 0 {
            let fragment_part = if field & !0x7 == 0 { IpFragmentPart::First } else { IpFragmentPart::Later };
            let identification = packet.get(offset - 4..offset).ok_or(intf::LB_COUNTER_DROP_MALFORMED_IPV6)?;
            let identification = u32::from_be_bytes(identification.try_into().expect("four bytes"));
            return Ok(TransportHeaderPosition {
                protocol_number: next_header,
                fragment_part,
                identification,
                transport_offset: offset,
            });
        }
    }
    Ok(TransportHeaderPosition {
        protocol_number: next_header,
        fragment_part: IpFragmentPart::Whole,
        identification: 0,
        transport_offset: offset,
    })
}

pub(super) fn parse_quoted_packet(packet: &IpPacket<'_>) -> Result<QuotedPacket, ParseEndCounter> {
    const MALFORMED_ICMP_COUNTER: ParseEndCounter = intf::LB_COUNTER_DROP_MALFORMED_ICMP;
    let message = packet.payload;
    if message.len() < ICMP_HEADER_BYTES {
        return Err(MALFORMED_ICMP_COUNTER);
    }
    if !ICMPV6_ERROR_TYPES.contains(&message[0]) {
        return Err(NOT_SERVICE_COUNTER);
    }
    let quoted_packet = &message[ICMP_HEADER_BYTES..];
    if quoted_packet.len() < IPV6_HEADER_BYTES + MIN_QUOTED_PAYLOAD_BYTES || quoted_packet[0] >> 4 != 6 {
        return Err(MALFORMED_ICMP_COUNTER);
    }
    let protocol = quoted_packet[6];
    if ipv6_address_at(quoted_packet, 8) != packet.vip
        || !TransportProtocol::ALL.map(TransportProtocol::iana_number).contains(&protocol)
    {
        return Err(NOT_SERVICE_COUNTER);
    }
    let quoted_segment = &quoted_packet[IPV6_HEADER_BYTES..];
    Ok(QuotedPacket {
        protocol_number: protocol,
        client: SocketAddr::new(ipv6_address_at(quoted_packet, 24), u16_at(quoted_segment, 2)),
        vip: SocketAddr::new(packet.vip, u16_at(quoted_segment, 0)),
        tsval: if protocol == TransportProtocol::Tcp.iana_number() { quoted_tsval(quoted_segment) } else { None },
    })
}

pub(super) fn ip_packet_bytes(frame: &[u8]) -> usize {
    IPV6_HEADER_BYTES + usize::from(u16_at(frame, ETHERNET_HEADER_BYTES + 4))
}

pub(super) fn set_flow_label(frame: &mut [u8], flow_label: u16) {
    frame[ETHERNET_HEADER_BYTES + 1] &= 0xf0;
    frame[ETHERNET_HEADER_BYTES + 2..ETHERNET_HEADER_BYTES + 4].copy_from_slice(&flow_label.to_be_bytes());
}
