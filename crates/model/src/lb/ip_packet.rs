//! Parts of a packet that IPv4 and IPv6 share.

use std::net::{IpAddr, SocketAddr};

use coreward_intf as intf;

pub(super) const ETHERNET_HEADER_BYTES: usize = 14;
pub(super) const ICMP_HEADER_BYTES: usize = 8;
/// Minimum number of bytes of an IP payload that an ICMP error quotes (RFC 792).
pub(super) const MIN_QUOTED_PAYLOAD_BYTES: usize = 8;

/// Counter of a packet whose parsing ends early. The counter also identifies the reason.
pub(super) type ParseEndCounter = intf::lb_counter;
/// Counter of a packet that belongs to no service.
pub(super) const NOT_SERVICE_COUNTER: ParseEndCounter = intf::LB_COUNTER_PASSED_NOT_SERVICE;

pub(super) fn u16_at(frame: &[u8], offset: usize) -> u16 {
    u16::from_be_bytes([frame[offset], frame[offset + 1]])
}

pub(super) fn u32_at(frame: &[u8], offset: usize) -> u32 {
    u32::from_be_bytes(frame[offset..offset + 4].try_into().expect("four bytes"))
}

/// Fields of the Ethernet and IP headers that are read before the headers are checked.
pub(super) struct FrameFields {
    pub destination_mac: [u8; 6],
    /// Protocol number, or the number of the next header in IPv6.
    pub protocol_number: u8,
    pub vip: IpAddr,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum IpFragmentPart {
    Whole,
    /// First of several fragments, which has the transport header.
    First,
    Later,
}

/// Parsed IP packet or fragment.
pub(super) struct IpPacket<'a> {
    pub client: IpAddr,
    pub vip: IpAddr,
    pub protocol_number: u8,
    pub identification: u32,
    pub fragment_part: IpFragmentPart,
    /// Offset of the transport header from the start of the frame.
    pub transport_offset: usize,
    /// Bytes from the end of the IP headers to the end of the IP packet.
    pub payload: &'a [u8],
}

/// Fields of the packet from VIP to client that an ICMP error quotes.
pub(super) struct QuotedPacket {
    pub protocol_number: u8,
    pub client: SocketAddr,
    pub vip: SocketAddr,
    /// TSval of the quoted packet, if it is TCP and the quote includes TSval.
    pub tsval: Option<u32>,
}
