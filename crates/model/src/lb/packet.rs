//! Parsing and rewriting of a frame's Ethernet, IPv4 and TCP headers. `packet_ipv6.rs` has IPv6.

use std::net::{IpAddr, Ipv4Addr, SocketAddr};

use coreward_intf as intf;

use super::ip_packet::{
    ETHERNET_HEADER_BYTES, FrameFields, ICMP_HEADER_BYTES, IpFragmentPart, IpPacket, MIN_QUOTED_PAYLOAD_BYTES,
    NOT_SERVICE_COUNTER, ParseEndCounter, QuotedPacket, u16_at, u32_at,
};
use super::packet_ipv6::{self, PROTOCOL_ICMPV6};
use super::timestamp_option::{MalformedTcpOptions, TCP_HEADER_BYTES, quoted_tsval, timestamp_option_offset};
use crate::FourTuple;
use crate::tuple::TransportProtocol;

pub(super) const IPV4_HEADER_BYTES: usize = 20;
pub(super) const ETHERTYPE_IPV4: u16 = 0x0800;
const UDP_HEADER_BYTES: usize = 8;
/// Flag of a fragment that is followed by later ones (RFC 791, Sect. 3.1).
const MORE_FRAGMENTS_FLAG: u16 = 0x2000;
pub(super) const FRAGMENT_OFFSET_MASK: u16 = 0x1fff;
pub(super) const PROTOCOL_ICMP: u8 = 1;
/// Types of ICMP errors that quote a packet (RFC 792): destination unreachable, time exceeded, parameter problem.
const ICMP_ERROR_TYPES: [u8; 3] = [3, 11, 12];

pub(super) const FIN: u8 = 0x01;
pub(super) const SYN: u8 = 0x02;
pub(super) const RST: u8 = 0x04;
pub(super) const ACK: u8 = 0x10;

pub(super) fn ipv4_address_at(frame: &[u8], offset: usize) -> IpAddr {
    Ipv4Addr::from(u32_at(frame, offset)).into()
}

/// Returns the source and the destination address of an IPv4 packet.
pub(super) fn ipv4_source_and_destination(packet: &[u8]) -> [Ipv4Addr; 2] {
    [12, 16].map(|offset| Ipv4Addr::from(u32_at(packet, offset)))
}

/// Returns the fields that are read before the checks, or `None` unless the frame has a complete IP destination
/// address.
pub(super) fn read_frame_fields(frame: &[u8]) -> Option<FrameFields> {
    if packet_ipv6::is_ipv6(frame) {
        return packet_ipv6::read_frame_fields(frame);
    }
    if frame.len() < ETHERNET_HEADER_BYTES + IPV4_HEADER_BYTES || u16_at(frame, 12) != ETHERTYPE_IPV4 {
        return None;
    }
    Some(FrameFields {
        destination_mac: frame[..6].try_into().expect("six bytes"),
        protocol_number: frame[ETHERNET_HEADER_BYTES + 9],
        vip: ipv4_address_at(frame, ETHERNET_HEADER_BYTES + 16),
    })
}

fn read_fragment_part(packet: &[u8]) -> IpFragmentPart {
    match u16_at(packet, 6) {
        field if field & FRAGMENT_OFFSET_MASK != 0 => IpFragmentPart::Later,
        field if field & MORE_FRAGMENTS_FLAG != 0 => IpFragmentPart::First,
        _ => IpFragmentPart::Whole,
    }
}

/// Returns the length in bytes of the IPv4 header at the start of `packet`, or `None` if it is not IPv4.
fn ipv4_header_bytes(packet: &[u8]) -> Option<usize> {
    let length = usize::from(packet[0] & 0xf) * 4;
    (packet[0] >> 4 == 4 && length >= IPV4_HEADER_BYTES).then_some(length)
}

/// Parses the IP headers of a frame that [`read_frame_fields`] accepted.
pub(super) fn parse_ip(frame: &[u8]) -> Result<IpPacket<'_>, ParseEndCounter> {
    if packet_ipv6::is_ipv6(frame) { packet_ipv6::parse_ipv6(frame) } else { parse_ipv4(frame) }
}

fn parse_ipv4(frame: &[u8]) -> Result<IpPacket<'_>, ParseEndCounter> {
    const MALFORMED_IPV4_COUNTER: ParseEndCounter = intf::LB_COUNTER_DROP_MALFORMED_IPV4;
    let packet = &frame[ETHERNET_HEADER_BYTES..];
    let header_bytes = ipv4_header_bytes(packet).ok_or(MALFORMED_IPV4_COUNTER)?;
    let total_bytes = usize::from(u16_at(packet, 2));
    if total_bytes < header_bytes || total_bytes > packet.len() {
        return Err(MALFORMED_IPV4_COUNTER);
    }
    Ok(IpPacket {
        client: ipv4_address_at(packet, 12),
        vip: ipv4_address_at(packet, 16),
        protocol_number: packet[9],
        identification: u16_at(packet, 4).into(),
        fragment_part: read_fragment_part(packet),
        transport_offset: ETHERNET_HEADER_BYTES + header_bytes,
        payload: &packet[header_bytes..total_bytes],
    })
}

/// Returns the source and the destination port. Fails with counter `malformed_counter` if the packet is too short for
/// both.
pub(super) fn parse_ports(
    packet: &IpPacket<'_>,
    malformed_counter: ParseEndCounter,
) -> Result<(u16, u16), ParseEndCounter> {
    if packet.payload.len() < 4 {
        return Err(malformed_counter);
    }
    Ok((u16_at(packet.payload, 0), u16_at(packet.payload, 2)))
}

/// Fields of a client's packet that determine where the load balancer forwards it.
#[derive(Debug, Clone)]
pub(super) struct ClientPacket {
    pub client: SocketAddr,
    pub vip: SocketAddr,
    pub protocol: TransportProtocol,
    pub tcp_flags: u8,
    /// TSecr of the packet, if it has a timestamp option.
    pub tsecr: Option<TcpTimestampField>,
}

#[derive(Debug, Clone, Copy)]
pub(super) struct TcpTimestampField {
    pub timestamp_value: u32,
    /// Offset of the TCP header in the frame.
    transport_offset: usize,
    offset_in_tcp_header: usize,
}

impl TcpTimestampField {
    /// Returns the TSval that precedes this TSecr in the frame, with its position.
    pub fn preceding_tsval(self, frame: &[u8]) -> TcpTimestampField {
        let tsval_offset = self.offset_in_tcp_header - 4;
        TcpTimestampField {
            timestamp_value: u32_at(frame, self.transport_offset + tsval_offset),
            offset_in_tcp_header: tsval_offset,
            ..self
        }
    }
}

impl ClientPacket {
    pub fn four_tuple(&self) -> FourTuple {
        FourTuple::new(self.client, self.vip).expect("of one packet")
    }

    pub fn is_closing(&self) -> bool {
        self.tcp_flags & (FIN | RST) != 0
    }
}

/// Parses the TCP header of a client's packet, whose ports have already been parsed.
pub(super) fn parse_tcp(
    packet: &IpPacket<'_>,
    source_and_destination_port: (u16, u16),
) -> Result<ClientPacket, ParseEndCounter> {
    let parsed_packet = parse_tcp_header(packet, source_and_destination_port)?;
    let flags = parsed_packet.tcp_flags;
    // Only a SYN opens a connection, and clients send no SYN-ACK. All other packets have ACK, except a bare RST.
    let are_flags_valid = if flags & SYN != 0 { flags & (ACK | FIN | RST) == 0 } else { flags & (ACK | RST) != 0 };
    are_flags_valid.then_some(parsed_packet).ok_or(intf::LB_COUNTER_DROP_MALFORMED_TCP)
}

/// Parses a TCP packet from a server, and returns it as if the client had sent it.
pub(super) fn parse_tcp_reply(
    packet: &IpPacket<'_>,
    source_and_destination_port: (u16, u16),
) -> Result<ClientPacket, ParseEndCounter> {
    let ClientPacket { client, vip, protocol, tcp_flags: flags, tsecr } =
        parse_tcp_header(packet, source_and_destination_port)?;
    Ok(ClientPacket { client: vip, vip: client, protocol, tcp_flags: flags, tsecr })
}

fn parse_tcp_header(
    packet: &IpPacket<'_>,
    source_and_destination_port: (u16, u16),
) -> Result<ClientPacket, ParseEndCounter> {
    const MALFORMED_TCP_COUNTER: ParseEndCounter = intf::LB_COUNTER_DROP_MALFORMED_TCP;
    let segment = packet.payload;
    if segment.len() < TCP_HEADER_BYTES {
        return Err(MALFORMED_TCP_COUNTER);
    }
    let (header_bytes, flags) = (usize::from(segment[12] >> 4) * 4, segment[13]);
    if header_bytes < TCP_HEADER_BYTES || header_bytes > segment.len() {
        return Err(MALFORMED_TCP_COUNTER);
    }
    let options = &segment[TCP_HEADER_BYTES..header_bytes];
    let tsecr =
        timestamp_option_offset(options).map_err(|MalformedTcpOptions| MALFORMED_TCP_COUNTER)?.map(|option_offset| {
            TcpTimestampField {
                timestamp_value: u32_at(options, option_offset + 6),
                transport_offset: packet.transport_offset,
                offset_in_tcp_header: TCP_HEADER_BYTES + option_offset + 6,
            }
        });
    let (client, vip) = (
        SocketAddr::new(packet.client, source_and_destination_port.0),
        SocketAddr::new(packet.vip, source_and_destination_port.1),
    );
    Ok(ClientPacket { client, vip, protocol: TransportProtocol::Tcp, tcp_flags: flags, tsecr })
}

/// Parses the UDP header of a client's datagram or first fragment, whose ports have already been parsed.
pub(super) fn parse_udp(
    packet: &IpPacket<'_>,
    source_and_destination_port: (u16, u16),
) -> Result<ClientPacket, ParseEndCounter> {
    const MALFORMED_UDP_COUNTER: ParseEndCounter = intf::LB_COUNTER_DROP_MALFORMED_UDP;
    if packet.payload.len() < UDP_HEADER_BYTES {
        return Err(MALFORMED_UDP_COUNTER);
    }
    let datagram_bytes = usize::from(u16_at(packet.payload, 4));
    if datagram_bytes < UDP_HEADER_BYTES
        || packet.fragment_part == IpFragmentPart::Whole && datagram_bytes > packet.payload.len()
    {
        return Err(MALFORMED_UDP_COUNTER);
    }
    let (client, vip) = (
        SocketAddr::new(packet.client, source_and_destination_port.0),
        SocketAddr::new(packet.vip, source_and_destination_port.1),
    );
    Ok(ClientPacket { client, vip, protocol: TransportProtocol::Udp, tcp_flags: 0, tsecr: None })
}

pub(super) fn parse_quoted_packet(packet: &IpPacket<'_>) -> Result<QuotedPacket, ParseEndCounter> {
    if packet.vip.is_ipv6() { packet_ipv6::parse_quoted_packet(packet) } else { parse_quoted_ipv4_packet(packet) }
}

fn parse_quoted_ipv4_packet(packet: &IpPacket<'_>) -> Result<QuotedPacket, ParseEndCounter> {
    const MALFORMED_ICMP_COUNTER: ParseEndCounter = intf::LB_COUNTER_DROP_MALFORMED_ICMP;
    if packet.fragment_part != IpFragmentPart::Whole {
        return Err(NOT_SERVICE_COUNTER);
    }
    let message = packet.payload;
    if message.len() < ICMP_HEADER_BYTES {
        return Err(MALFORMED_ICMP_COUNTER);
    }
    if !ICMP_ERROR_TYPES.contains(&message[0]) {
        return Err(NOT_SERVICE_COUNTER);
    }
    let quoted_packet = &message[ICMP_HEADER_BYTES..];
    if quoted_packet.len() < IPV4_HEADER_BYTES {
        return Err(MALFORMED_ICMP_COUNTER);
    }
    let header_bytes = ipv4_header_bytes(quoted_packet).ok_or(MALFORMED_ICMP_COUNTER)?;
    if quoted_packet.len() < header_bytes + MIN_QUOTED_PAYLOAD_BYTES {
        return Err(MALFORMED_ICMP_COUNTER);
    }
    if ipv4_address_at(quoted_packet, 12) != packet.vip || read_fragment_part(quoted_packet) == IpFragmentPart::Later {
        return Err(NOT_SERVICE_COUNTER);
    }
    let quoted_segment = &quoted_packet[header_bytes..];
    Ok(QuotedPacket {
        protocol_number: quoted_packet[9],
        client: SocketAddr::new(ipv4_address_at(quoted_packet, 16), u16_at(quoted_segment, 2)),
        vip: SocketAddr::new(packet.vip, u16_at(quoted_segment, 0)),
        tsval: if quoted_packet[9] == TransportProtocol::Tcp.iana_number() {
            quoted_tsval(quoted_segment)
        } else {
            None
        },
    })
}

/// Returns the Internet checksum (RFC 1071) of an even number of bytes.
pub(super) fn internet_checksum(bytes: &[u8]) -> u16 {
    let sum: u32 = bytes.chunks(2).map(|word_bytes| u32::from(u16_at(word_bytes, 0))).sum();
    let folded_sum = (sum & 0xffff) + (sum >> 16);
    !((folded_sum & 0xffff) + (folded_sum >> 16)) as u16
}

/// Returns the new value of a checksum after a word that it covers changed from `old` to `new` (RFC 1624, Eqn. 3).
fn updated_checksum(checksum: u16, old: u16, new: u16) -> u16 {
    let add_ones_complement = |a: u16, b: u16| {
        let sum = u32::from(a) + u32::from(b);
        (sum as u16).wrapping_add((sum >> 16) as u16)
    };
    !add_ones_complement(add_ones_complement(!checksum, !old), new)
}

/// Sets the TSecr, or the TSval, at the position `tsecr` to `value`, and updates the TCP checksum.
pub(super) fn set_tsecr(frame: &mut [u8], tsecr: &TcpTimestampField, value: u32) {
    let (value_offset, checksum_offset) =
        (tsecr.transport_offset + tsecr.offset_in_tcp_header, tsecr.transport_offset + 16);
    for half_offset in [0, 2] {
        let (old_half, new_half) =
            (u16_at(frame, value_offset + half_offset), (value >> (16 - 8 * half_offset)) as u16);
        // At an odd offset both bytes count in the other half of the checksum's words (RFC 1071, Sect. 2 B).
        let is_odd_offset = !tsecr.offset_in_tcp_header.is_multiple_of(2);
        let to_checksum_byte_order = |value_half: u16| if is_odd_offset { value_half.swap_bytes() } else { value_half };
        let new_checksum = updated_checksum(
            u16_at(frame, checksum_offset),
            to_checksum_byte_order(old_half),
            to_checksum_byte_order(new_half),
        );
        frame[checksum_offset..checksum_offset + 2].copy_from_slice(&new_checksum.to_be_bytes());
    }
    frame[value_offset..value_offset + 4].copy_from_slice(&value.to_be_bytes());
}

pub(super) fn source_mac(frame: &[u8]) -> [u8; 6] {
    frame[6..12].try_into().expect("six bytes")
}

pub(super) fn ip_packet_bytes(frame: &[u8]) -> usize {
    if packet_ipv6::is_ipv6(frame) {
        return packet_ipv6::ip_packet_bytes(frame);
    }
    usize::from(u16_at(frame, ETHERNET_HEADER_BYTES + 2))
}

/// Returns the packet's type of service (IPv4) or traffic class (IPv6).
pub(super) fn read_traffic_class(frame: &[u8]) -> u8 {
    if packet_ipv6::is_ipv6(frame) {
        return (u16_at(frame, ETHERNET_HEADER_BYTES) >> 4) as u8;
    }
    frame[ETHERNET_HEADER_BYTES + 1]
}

/// Returns the client's address and the ports of a forwarded packet, from which the GUE source port is derived. The
/// ports are 0 in ICMP packets and later fragments.
pub(super) fn client_and_ports(frame: &[u8]) -> (IpAddr, [u8; 4]) {
    let packet = parse_ip(frame).expect("a packet that is forwarded");
    let has_ports = ![PROTOCOL_ICMP, PROTOCOL_ICMPV6].contains(&packet.protocol_number)
        && packet.fragment_part != IpFragmentPart::Later;
    let ports = packet.payload.get(..4).filter(|_| has_ports).and_then(|ports| ports.try_into().ok());
    (packet.client, ports.unwrap_or_default())
}

/// Sets the packet's identification (IPv4) or flow label (IPv6).
pub(super) fn set_identification(frame: &mut [u8], identification: u16) {
    if packet_ipv6::is_ipv6(frame) {
        return packet_ipv6::set_flow_label(frame, identification);
    }
    let (id_offset, checksum_offset) = (ETHERNET_HEADER_BYTES + 4, ETHERNET_HEADER_BYTES + 10);
    let new_checksum = updated_checksum(u16_at(frame, checksum_offset), u16_at(frame, id_offset), identification);
    frame[id_offset..id_offset + 2].copy_from_slice(&identification.to_be_bytes());
    frame[checksum_offset..checksum_offset + 2].copy_from_slice(&new_checksum.to_be_bytes());
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn updated_checksum_matches_the_example_of_rfc_1624() {
        // The example of RFC 1624, Sect. 4: 0xdd2f, a word that goes from 0x5555 to 0x3285.
        assert_eq!(updated_checksum(0xdd2f, 0x5555, 0x3285), 0x0000);
    }
}
