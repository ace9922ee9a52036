//! Parser of link-layer frames, which finds the addresses and ports.

use super::error::CaptureError;

/// Flag of a packet with IPv6 addresses.
pub const FLAG_IPV6_ADDRESSES: u8 = 1;
/// Flag of a TCP segment that opens a connection, that is, has SYN without ACK.
pub const FLAG_OPENS_CONNECTION: u8 = 2;
/// Flag of a TCP segment with FIN or RST.
pub const FLAG_ENDS_CONNECTION: u8 = 4;

/// Link layer of captured frames, with values from pcap's LINKTYPE_ registry (tcpdump.org/linktypes.html).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CaptureLinkType {
    /// `LINKTYPE_ETHERNET` (1)
    Ethernet,
    /// `LINKTYPE_NULL` (0), in which the address family in the capturing host's byte order precedes the IP packet
    Loopback,
    /// `LINKTYPE_RAW` (101, on some systems 12 or 14), an IPv4 or IPv6 packet without a link-layer header
    Raw,
    /// `LINKTYPE_IPV4` (228)
    Ipv4,
    /// `LINKTYPE_IPV6` (229)
    Ipv6,
    /// `LINKTYPE_LINUX_SLL` (113), which Linux uses for captures on the "any" device
    LinuxCooked,
    /// `LINKTYPE_LINUX_SLL2` (276), the newer format for captures on the "any" device
    LinuxCooked2,
}

impl TryFrom<u32> for CaptureLinkType {
    type Error = CaptureError;

    fn try_from(number: u32) -> Result<Self, CaptureError> {
        match number {
            0 => Ok(CaptureLinkType::Loopback),
            1 => Ok(CaptureLinkType::Ethernet),
            12 | 14 | 101 => Ok(CaptureLinkType::Raw),
            113 => Ok(CaptureLinkType::LinuxCooked),
            228 => Ok(CaptureLinkType::Ipv4),
            229 => Ok(CaptureLinkType::Ipv6),
            276 => Ok(CaptureLinkType::LinuxCooked2),
            other => Err(CaptureError::UnsupportedLinkType(other)),
        }
    }
}

impl CaptureLinkType {
    /// Returns the length of the headers before the network layer (bytes), not counting VLAN tags.
    fn link_header_length(self) -> usize {
        match self {
            CaptureLinkType::Ethernet => 14,
            CaptureLinkType::Loopback => 4,
            CaptureLinkType::Raw | CaptureLinkType::Ipv4 | CaptureLinkType::Ipv6 => 0,
            CaptureLinkType::LinuxCooked => 16,
            CaptureLinkType::LinuxCooked2 => 20,
        }
    }

    /// Returns the smallest captured length (bytes) that includes the ports of an IPv4 packet without options.
    pub fn min_snap_length(self) -> u32 {
        self.link_header_length() as u32 + 24
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PacketSkipReason {
    /// The packet is not IP but, for example, ARP, LLDP or MPLS.
    NotIp,
    /// The packet is neither TCP nor UDP but, for example, ICMP, GRE or ESP.
    OtherProtocol,
    /// The packet is a fragment other than the first, and therefore has no ports.
    Fragment,
    /// The captured bytes end before the ports.
    CutOff,
    /// A header field, such as the version or the header length, is invalid.
    Malformed,
    /// The packet is in a pcapng block that has no valid time stamp.
    NoTimestamp,
}

impl PacketSkipReason {
    /// All reasons for skipping a packet, in the order of their declaration.
    pub const ALL: [PacketSkipReason; 6] = [
        PacketSkipReason::NotIp,
        PacketSkipReason::OtherProtocol,
        PacketSkipReason::Fragment,
        PacketSkipReason::CutOff,
        PacketSkipReason::Malformed,
        PacketSkipReason::NoTimestamp,
    ];
    pub const COUNT: usize = Self::ALL.len();

    pub fn name(self) -> &'static str {
        match self {
            PacketSkipReason::NotIp => "not IP",
            PacketSkipReason::OtherProtocol => "neither TCP nor UDP",
            PacketSkipReason::Fragment => "fragment after the first",
            PacketSkipReason::CutOff => "cut off before the ports",
            PacketSkipReason::Malformed => "malformed",
            PacketSkipReason::NoTimestamp => "without a time stamp",
        }
    }
}

/// Source and destination addresses of a packet.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum AddressPair {
    /// IPv4 addresses, with the source in the upper half.
    V4(u64),
    /// IPv6 addresses, with the source first.
    V6([u8; 32]),
}

/// Fields of a packet that identify its flow.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ParsedHeaders {
    pub addresses: AddressPair,
    /// Source and destination ports, with the source port in the upper 16 bits.
    pub port_pair: u32,
    /// IP protocol number, which is 6 (TCP) or 17 (UDP).
    pub ip_protocol: u8,
    /// Combination of [`FLAG_OPENS_CONNECTION`] and [`FLAG_ENDS_CONNECTION`].
    pub connection_flags: u8,
}

const ETHERTYPE_IPV4: u16 = 0x0800;
const ETHERTYPE_IPV6: u16 = 0x86dd;
/// EtherTypes of VLAN tags: those of 802.1Q and 802.1ad, and the value that QinQ used earlier.
const ETHERTYPES_VLAN: [u16; 3] = [0x8100, 0x88a8, 0x9100];

const IP_PROTOCOL_TCP: u8 = 6;
const IP_PROTOCOL_UDP: u8 = 17;

/// Returns a packet's addresses, ports and flags. Fails when the packet has no ports, or was captured without them.
#[inline]
pub fn parse_headers(link_type: CaptureLinkType, data: &[u8]) -> Result<ParsedHeaders, PacketSkipReason> {
    match link_type {
        CaptureLinkType::Ethernet => parse_from_ethertype_field(data, 12),
        CaptureLinkType::LinuxCooked => parse_from_ethertype_field(data, 14),
        CaptureLinkType::LinuxCooked2 => {
            let (header, packet) = data.split_at_checked(20).ok_or(PacketSkipReason::CutOff)?;
            parse_packet_by_ethertype(read_be_u16(header, 0).ok_or(PacketSkipReason::CutOff)?, packet)
        }
        CaptureLinkType::Raw => parse_ip_packet(data),
        CaptureLinkType::Ipv4 => parse_ipv4(data),
        CaptureLinkType::Ipv6 => parse_ipv6(data),
        CaptureLinkType::Loopback => parse_ip_packet(data.get(4..).ok_or(PacketSkipReason::CutOff)?),
    }
}

fn read_be_u16(data: &[u8], offset: usize) -> Option<u16> {
    Some(u16::from_be_bytes(data.get(offset..offset + 2)?.try_into().ok()?))
}

/// Parses a packet whose first EtherType is at `offset`. Any number of VLAN tags may follow.
#[inline]
fn parse_from_ethertype_field(data: &[u8], mut offset: usize) -> Result<ParsedHeaders, PacketSkipReason> {
    loop {
        let ethertype = read_be_u16(data, offset).ok_or(PacketSkipReason::CutOff)?;
        if !ETHERTYPES_VLAN.contains(&ethertype) {
            return parse_packet_by_ethertype(ethertype, &data[offset + 2..]);
        }
        offset += 4;
    }
}

#[inline]
fn parse_packet_by_ethertype(ethertype: u16, packet: &[u8]) -> Result<ParsedHeaders, PacketSkipReason> {
    match ethertype {
        ETHERTYPE_IPV4 => parse_ipv4(packet),
        ETHERTYPE_IPV6 => parse_ipv6(packet),
        _ => Err(PacketSkipReason::NotIp),
    }
}

fn parse_ip_packet(packet: &[u8]) -> Result<ParsedHeaders, PacketSkipReason> {
    match packet.first().ok_or(PacketSkipReason::CutOff)? >> 4 {
        4 => parse_ipv4(packet),
        6 => parse_ipv6(packet),
        _ => Err(PacketSkipReason::NotIp),
    }
}

#[inline]
fn parse_ipv4(packet: &[u8]) -> Result<ParsedHeaders, PacketSkipReason> {
    let header: &[u8; 20] = packet.first_chunk().ok_or(PacketSkipReason::CutOff)?;
    let header_bytes = usize::from(header[0] & 0x0f) * 4;
    if header[0] >> 4 != 4 || header_bytes < 20 {
        return Err(PacketSkipReason::Malformed);
    }
    // The lower 13 bits are the fragment offset.
    if u16::from_be_bytes([header[6], header[7]]) & 0x1fff != 0 {
        return Err(PacketSkipReason::Fragment);
    }
    let address_bytes: [u8; 8] = header[12..20].try_into().expect("eight bytes");
    parse_transport_header(
        header[9],
        packet.get(header_bytes..).ok_or(PacketSkipReason::CutOff)?,
        AddressPair::V4(u64::from_be_bytes(address_bytes)),
    )
}

fn parse_ipv6(packet: &[u8]) -> Result<ParsedHeaders, PacketSkipReason> {
    let header: &[u8; 40] = packet.first_chunk().ok_or(PacketSkipReason::CutOff)?;
    if header[0] >> 4 != 6 {
        return Err(PacketSkipReason::Malformed);
    }
    let addresses = AddressPair::V6(header[8..40].try_into().expect("32 bytes"));
    let (mut next_header, mut payload) = (header[6], &packet[40..]);
    loop {
        // By RFC 8200, Sect. 4, headers other than the fragment header and AH contain their length in units of 8 bytes,
        // without the first 8.
        let header_bytes = match next_header {
            // These are hop-by-hop options, routing, destination options, mobility, HIP and shim6.
            0 | 43 | 60 | 135 | 139 | 140 => usize::from(*payload.get(1).ok_or(PacketSkipReason::CutOff)?) * 8 + 8,
            44 => {
                // The upper 13 bits are the fragment offset.
                if read_be_u16(payload, 2).ok_or(PacketSkipReason::CutOff)? & 0xfff8 != 0 {
                    return Err(PacketSkipReason::Fragment);
                }
                8
            }
            // The authentication header has its length in units of 4 bytes, minus 2.
            51 => usize::from(*payload.get(1).ok_or(PacketSkipReason::CutOff)?) * 4 + 8,
            _ => return parse_transport_header(next_header, payload, addresses),
        };
        next_header = *payload.first().ok_or(PacketSkipReason::CutOff)?;
        payload = payload.get(header_bytes..).ok_or(PacketSkipReason::CutOff)?;
    }
}

#[inline]
fn parse_transport_header(
    protocol: u8,
    segment: &[u8],
    addresses: AddressPair,
) -> Result<ParsedHeaders, PacketSkipReason> {
    if protocol != IP_PROTOCOL_TCP && protocol != IP_PROTOCOL_UDP {
        return Err(PacketSkipReason::OtherProtocol);
    }
    let ports = u32::from_be_bytes(*segment.first_chunk().ok_or(PacketSkipReason::CutOff)?);
    // If a capture ends between ports and flags, the idle timeout ends the flow.
    let flags = match segment.get(13) {
        Some(flags) if protocol == IP_PROTOCOL_TCP => {
            let (fin, syn, rst, ack) = (flags & 1 != 0, flags & 2 != 0, flags & 4 != 0, flags & 16 != 0);
            (u8::from(syn && !ack) * FLAG_OPENS_CONNECTION) | (u8::from(fin || rst) * FLAG_ENDS_CONNECTION)
        }
        _ => 0,
    };
    Ok(ParsedHeaders { addresses, port_pair: ports, ip_protocol: protocol, connection_flags: flags })
}
