//! Builds frames with correct lengths and checksums. The code is independent of the BPF programs and their reference
//! model.

use std::borrow::Cow;
use std::net::Ipv4Addr;

/// Length of an Ethernet header without a VLAN tag, which is the offset of the IP header.
pub const ETHERNET_HEADER_BYTES: usize = 14;
pub const PROTOCOL_ICMP: u8 = 1;
pub const PROTOCOL_TCP: u8 = 6;
pub const PROTOCOL_UDP: u8 = 17;

/// Fields of a frame's Ethernet and IPv4 headers.
#[derive(Debug, Clone)]
pub struct EthernetIpHeader {
    pub destination_mac: [u8; 6],
    pub source: Ipv4Addr,
    pub destination: Ipv4Addr,
    pub protocol: u8,
    pub ip_identification: u16,
    pub fragment_flags_and_offset: u16,
    /// Number of NOP options after the fixed IPv4 header, in 32-bit words (0 to 10).
    pub option_word_count: usize,
    pub tos_and_ttl: [u8; 2],
}

#[derive(Debug, Clone)]
pub struct TcpHeader {
    /// Source port and destination port.
    pub source_and_destination_ports: (u16, u16),
    pub tcp_flags: u8,
    /// TCP options (at most 40 bytes), which are padded with zeros to a multiple of 4 bytes.
    pub options: Vec<u8>,
}

/// Returns the sum of the 16-bit words of `bytes`, with end-around carry (RFC 1071), starting from `initial_sum`.
pub fn ones_complement_sum(bytes: &[u8], initial_sum: u32) -> u16 {
    let mut carry_sum = initial_sum;
    for word_bytes in bytes.chunks(2) {
        carry_sum += u32::from(word_bytes[0]) << 8 | u32::from(*word_bytes.get(1).unwrap_or(&0));
    }
    while carry_sum >> 16 != 0 {
        carry_sum = (carry_sum & 0xffff) + (carry_sum >> 16);
    }
    carry_sum as u16
}

/// Returns the ones' complement sum over the IPv4 pseudo-header and `segment`. It is 0xffff if the segment's checksum
/// is correct.
pub fn sum_with_pseudo_header(ip: &[u8], protocol: u8, segment: &[u8]) -> u16 {
    let pseudo_header_sum = u32::from(ones_complement_sum(&ip[12..20], 0)) + u32::from(protocol) + segment.len() as u32;
    ones_complement_sum(segment, pseudo_header_sum)
}

fn write_u16(frame: &mut [u8], offset: usize, value: u16) {
    frame[offset..offset + 2].copy_from_slice(&value.to_be_bytes());
}

impl EthernetIpHeader {
    /// Appends the Ethernet and IP headers, followed by the payload from the function `append_payload`.
    pub fn append_frame(&self, frame: &mut Vec<u8>, append_payload: impl FnOnce(&mut Vec<u8>)) {
        frame.extend(self.destination_mac);
        frame.extend([2, 0, 0, 0, 0, 9, 8, 0]);
        self.append_datagram(frame, append_payload);
    }

    /// Appends the IP header, followed by the payload from the function `append_payload`.
    pub fn append_datagram(&self, frame: &mut Vec<u8>, append_payload: impl FnOnce(&mut Vec<u8>)) {
        let ip_offset = frame.len();
        frame.extend([0x45 + self.option_word_count as u8, self.tos_and_ttl[0], 0, 0]);
        frame.extend(self.ip_identification.to_be_bytes());
        frame.extend(self.fragment_flags_and_offset.to_be_bytes());
        frame.extend([self.tos_and_ttl[1], self.protocol, 0, 0]);
        frame.extend(self.source.octets());
        frame.extend(self.destination.octets());
        frame.extend(std::iter::repeat_n(1, 4 * self.option_word_count));
        let payload_offset = frame.len();
        append_payload(frame);
        let datagram_bytes = (frame.len() - ip_offset) as u16;
        write_u16(frame, ip_offset + 2, datagram_bytes);
        let header_checksum = !ones_complement_sum(&frame[ip_offset..payload_offset], 0);
        write_u16(frame, ip_offset + 10, header_checksum);
        self.write_transport_checksum(frame, ip_offset, payload_offset);
    }

    fn write_transport_checksum(&self, frame: &mut [u8], ip_offset: usize, payload_offset: usize) {
        let (header, payload) = frame.split_at_mut(payload_offset);
        let (checksum_offset, min_header_bytes) = match self.protocol {
            PROTOCOL_TCP => (16, 20),
            PROTOCOL_UDP => (6, 8),
            PROTOCOL_ICMP => (2, 8),
            _ => return,
        };
        // A later fragment has no transport header.
        if payload.len() < min_header_bytes || self.fragment_flags_and_offset & 0x1fff != 0 {
            return;
        }
        write_u16(payload, checksum_offset, 0);
        let word_sum = match self.protocol {
            PROTOCOL_ICMP => ones_complement_sum(payload, 0),
            _ => sum_with_pseudo_header(&header[ip_offset..], self.protocol, payload),
        };
        // In UDP, a checksum of 0 means that there is none (RFC 768).
        let checksum = if self.protocol == PROTOCOL_UDP && word_sum == 0xffff { 0xffff } else { !word_sum };
        write_u16(payload, checksum_offset, checksum);
    }
}

impl TcpHeader {
    /// Appends the TCP header and `payload_bytes` bytes of data. `sequence_and_ack_numbers` are the sequence and
    /// acknowledgement numbers.
    pub fn append_segment(&self, frame: &mut Vec<u8>, sequence_and_ack_numbers: (u32, u32), payload_bytes: usize) {
        let option_bytes = self.options.len().next_multiple_of(4);
        frame.extend(self.source_and_destination_ports.0.to_be_bytes());
        frame.extend(self.source_and_destination_ports.1.to_be_bytes());
        frame.extend(sequence_and_ack_numbers.0.to_be_bytes());
        frame.extend(sequence_and_ack_numbers.1.to_be_bytes());
        frame.extend([((20 + option_bytes) as u8) << 2, self.tcp_flags, 0xff, 0xff, 0, 0, 0, 0]);
        frame.extend(&self.options);
        frame.extend(std::iter::repeat_n(0, option_bytes - self.options.len()));
        frame.extend(std::iter::repeat_n(0x5a, payload_bytes));
    }
}

/// Appends a UDP header without a checksum, and `payload_bytes` bytes of data.
pub fn append_udp_datagram(frame: &mut Vec<u8>, ports: (u16, u16), payload_bytes: usize) {
    frame.extend(ports.0.to_be_bytes());
    frame.extend(ports.1.to_be_bytes());
    frame.extend((8 + payload_bytes as u16).to_be_bytes());
    frame.extend([0, 0]);
    frame.extend(std::iter::repeat_n(0xa5, payload_bytes));
}

pub fn timestamp_option(tsval: u32, tsecr: u32) -> [u8; 10] {
    let mut tcp_option = [8, 10, 0, 0, 0, 0, 0, 0, 0, 0];
    tcp_option[2..6].copy_from_slice(&tsval.to_be_bytes());
    tcp_option[6..].copy_from_slice(&tsecr.to_be_bytes());
    tcp_option
}

/// Inserts an 802.1Q tag after the MAC addresses.
pub fn insert_vlan_tag(frame: &mut Vec<u8>, tag: u16) {
    let [tag_high_byte, tag_low_byte] = tag.to_be_bytes();
    frame.splice(ETHERNET_HEADER_BYTES - 2..ETHERNET_HEADER_BYTES - 2, [0x81, 0, tag_high_byte, tag_low_byte]);
}

/// Returns the frame without its outermost 802.1Q tag, if it has one.
pub fn strip_vlan_tag(frame: &[u8]) -> Cow<'_, [u8]> {
    if frame.get(ETHERNET_HEADER_BYTES - 2..ETHERNET_HEADER_BYTES) != Some(&[0x81, 0])
        || frame.len() < ETHERNET_HEADER_BYTES + 4
    {
        return frame.into();
    }
    [&frame[..ETHERNET_HEADER_BYTES - 2], &frame[ETHERNET_HEADER_BYTES + 2..]].concat().into()
}

/// Returns the bytes in hexadecimal, in indented lines of 16 bytes.
pub fn format_hex(bytes: &[u8]) -> String {
    let format_hex_line = |line: &[u8]| line.iter().map(|byte| format!("{byte:02x}")).collect::<Vec<_>>().join(" ");
    bytes.chunks(16).map(format_hex_line).collect::<Vec<_>>().join("\n    ")
}
