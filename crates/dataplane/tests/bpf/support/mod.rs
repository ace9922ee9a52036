//! Test packets. The code that builds and checks them is independent of the BPF programs.

pub mod balancer;
pub mod dispatch_env;
pub mod model_checked_lb;
pub mod network;
pub mod packet_socket;
pub mod raw_tcp_client;
pub mod server_env;
pub mod stateful;
pub mod tunnel;

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, SocketAddrV4};

use coreward_model::cookie::CookieKey;

pub const FIN: u8 = 0x01;
pub const SYN: u8 = 0x02;
pub const RST: u8 = 0x04;
pub const ACK: u8 = 0x10;

const ETHERNET_HEADER_BYTES: usize = 14;

pub use coreward_dataplane::test_run::{missing_bpf_rights, skip_if};

/// Key that masks the time in TSvals of a service whose server takes no part in the test.
pub const FOREIGN_TIME_KEY: CookieKey = CookieKey { k0: 5, k1: 6 };

/// Returns the time of the kernel's TSval clock, which is CLOCK_MONOTONIC in ms.
pub fn tsval_clock_ms() -> u32 {
    let monotonic_time = nix::time::clock_gettime(nix::time::ClockId::CLOCK_MONOTONIC).unwrap();
    (monotonic_time.tv_sec() as u64 * 1000 + monotonic_time.tv_nsec() as u64 / 1_000_000) as u32
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum AddressFamily {
    Ipv4,
    Ipv6,
}

impl AddressFamily {
    pub const BOTH: [Self; 2] = [Self::Ipv4, Self::Ipv6];

    pub fn from_frame(frame: &[u8]) -> Self {
        if is_ipv6(frame) { Self::Ipv6 } else { Self::Ipv4 }
    }
}

/// IPv6 extension header: its protocol number, and its bytes. The first byte is replaced by the number of the next
/// header.
pub type ExtensionHeader = (u8, Vec<u8>);

#[derive(Debug, Clone)]
pub struct TcpPacket {
    pub destination_mac: [u8; 6],
    pub source: SocketAddrV4,
    pub destination: SocketAddrV4,
    pub ip_options: Vec<u8>,
    /// IPv6 source and destination, or `None` if the packet is IPv4.
    pub ipv6_source_and_destination: Option<[Ipv6Addr; 2]>,
    pub extension_headers: Vec<ExtensionHeader>,
    pub flags: u8,
    /// TCP options as bytes, which are padded with zeros (end of options) to a multiple of four.
    pub tcp_options: Vec<u8>,
    pub payload: Vec<u8>,
}

impl TcpPacket {
    pub fn new(source: (Ipv4Addr, u16), destination: (Ipv4Addr, u16)) -> Self {
        Self {
            // With the loopback device's address, eth_type_trans() marks the packet as addressed to this host.
            destination_mac: [0; 6],
            source: SocketAddrV4::new(source.0, source.1),
            destination: SocketAddrV4::new(destination.0, destination.1),
            ip_options: vec![],
            ipv6_source_and_destination: None,
            extension_headers: vec![],
            flags: ACK,
            tcp_options: vec![],
            payload: b"payload".to_vec(),
        }
    }

    /// Returns a packet from `source` to `destination`. Panics when their address families differ.
    pub fn between(source: SocketAddr, destination: SocketAddr) -> Self {
        let ports = (source.port(), destination.port());
        match (source.ip(), destination.ip()) {
            (IpAddr::V4(source), IpAddr::V4(destination)) => Self::new((source, ports.0), (destination, ports.1)),
            (IpAddr::V6(source), IpAddr::V6(destination)) => {
                let unspecified_address = Ipv4Addr::UNSPECIFIED;
                let ipv6_addresses = Some([source, destination]);
                Self {
                    ipv6_source_and_destination: ipv6_addresses,
                    ..Self::new((unspecified_address, ports.0), (unspecified_address, ports.1))
                }
            }
            _ => panic!("{source} and {destination}"),
        }
    }

    /// Returns the packet as a frame, with correct lengths and checksums.
    pub fn to_frame(&self) -> Vec<u8> {
        self.to_frame_with_sequence(0x0102_0304, 0x0506_0708)
    }

    pub fn to_frame_with_sequence(&self, sequence: u32, acknowledgement: u32) -> Vec<u8> {
        let ipv4_frame = self.to_ipv4_frame(sequence, acknowledgement);
        let Some(addresses) = self.ipv6_source_and_destination else { return ipv4_frame };
        let mut frame = frame_with_ipv6_header(&ipv4_frame, addresses, &self.extension_headers);
        frame[..6].copy_from_slice(&self.destination_mac);
        frame
    }

    fn to_ipv4_frame(&self, sequence: u32, acknowledgement: u32) -> Vec<u8> {
        let pad_to_words = |bytes: &[u8]| {
            let mut bytes = bytes.to_vec();
            bytes.resize(bytes.len().next_multiple_of(4), 0);
            bytes
        };
        let (ip_options, options) = (pad_to_words(&self.ip_options), pad_to_words(&self.tcp_options));
        let (ip_header, tcp_header) = (20 + ip_options.len(), 20 + options.len());
        let ip_length = ip_header + tcp_header + self.payload.len();

        let mut frame = [&self.destination_mac[..], &[2, 0, 0, 0, 0, 9], &[8, 0]].concat();
        frame.extend([0x40 | (ip_header / 4) as u8, 0]);
        frame.extend((ip_length as u16).to_be_bytes());
        frame.extend([0x12, 0x34, 0x40, 0, 64, 6, 0, 0]);
        frame.extend(self.source.ip().octets());
        frame.extend(self.destination.ip().octets());
        frame.extend(&ip_options);
        let checksum = !ones_complement_sum(&frame[ETHERNET_HEADER_BYTES..]);
        frame[ETHERNET_HEADER_BYTES + 10..ETHERNET_HEADER_BYTES + 12].copy_from_slice(&checksum.to_be_bytes());

        let tcp_start = frame.len();
        frame.extend(self.source.port().to_be_bytes());
        frame.extend(self.destination.port().to_be_bytes());
        frame.extend(sequence.to_be_bytes());
        frame.extend(acknowledgement.to_be_bytes());
        frame.extend([((tcp_header / 4) as u8) << 4, self.flags, 0xff, 0xff, 0, 0, 0, 0]);
        frame.extend(&options);
        frame.extend(&self.payload);
        let checksum = !tcp_segment_sum(&frame);
        frame[tcp_start + 16..tcp_start + 18].copy_from_slice(&checksum.to_be_bytes());
        frame
    }
}

/// Fields of a UDP datagram or of one of its fragments.
#[derive(Debug, Clone)]
pub struct UdpDatagram {
    pub source: SocketAddrV4,
    pub destination: SocketAddrV4,
    pub ip_options: Vec<u8>,
    pub identification: u16,
    /// Flags and fragment offset (in units of 8 bytes) in the IPv4 header.
    pub flags_and_offset: u16,
    pub payload: Vec<u8>,
}

pub const MORE_FRAGMENTS_FLAG: u16 = 0x2000;

impl UdpDatagram {
    pub fn new(source: (Ipv4Addr, u16), destination: (Ipv4Addr, u16)) -> Self {
        Self {
            source: SocketAddrV4::new(source.0, source.1),
            destination: SocketAddrV4::new(destination.0, destination.1),
            ip_options: vec![],
            identification: 0x1234,
            flags_and_offset: 0,
            payload: b"datagram".to_vec(),
        }
    }

    /// Returns the datagram or fragment as a frame. Later fragments have no UDP header. The UDP length of a first
    /// fragment assumes that two fragments have equally long payloads.
    pub fn to_frame(&self) -> Vec<u8> {
        let is_later_fragment = self.flags_and_offset & 0x1fff != 0;
        let udp_length = 8 + self.payload.len() * if self.flags_and_offset & MORE_FRAGMENTS_FLAG != 0 { 2 } else { 1 };
        let mut transport_bytes = Vec::new();
        if !is_later_fragment {
            transport_bytes.extend(self.source.port().to_be_bytes());
            transport_bytes.extend(self.destination.port().to_be_bytes());
            // No checksum (RFC 768).
            transport_bytes.extend([(udp_length >> 8) as u8, udp_length as u8, 0, 0]);
        }
        transport_bytes.extend(&self.payload);
        let addresses = [*self.source.ip(), *self.destination.ip()];
        ipv4_frame(17, addresses, &self.ip_options, [self.identification, self.flags_and_offset], &transport_bytes)
    }
}

/// Returns a frame with an IPv4 packet. Its destination MAC address is that of [`TcpPacket::new`].
pub fn ipv4_frame(
    protocol: u8,
    addresses: [Ipv4Addr; 2],
    options: &[u8],
    identification_and_fragment: [u16; 2],
    transport: &[u8],
) -> Vec<u8> {
    assert_eq!(options.len() % 4, 0);
    let header_length = 20 + options.len();
    let mut frame = [&[0; 6][..], &[2, 0, 0, 0, 0, 9], &[8, 0]].concat();
    frame.extend([0x40 | (header_length / 4) as u8, 0]);
    frame.extend(((header_length + transport.len()) as u16).to_be_bytes());
    frame.extend(identification_and_fragment.map(u16::to_be_bytes).concat());
    frame.extend([64, protocol, 0, 0]);
    frame.extend(addresses.map(|address| address.octets()).concat());
    frame.extend(options);
    let checksum = !ones_complement_sum(&frame[ETHERNET_HEADER_BYTES..]);
    frame[ETHERNET_HEADER_BYTES + 10..ETHERNET_HEADER_BYTES + 12].copy_from_slice(&checksum.to_be_bytes());
    frame.extend(transport);
    frame
}

pub fn is_ipv6(frame: &[u8]) -> bool {
    frame[12..14] == [0x86, 0xdd]
}

/// Returns a frame with an IPv6 packet with flow label 0x12345. Its destination MAC address is that of
/// [`TcpPacket::new`].
pub fn ipv6_frame(addresses: [Ipv6Addr; 2], headers: &[ExtensionHeader], protocol: u8, transport: &[u8]) -> Vec<u8> {
    let protocol_numbers: Vec<u8> = headers.iter().map(|(number, _)| *number).chain([protocol]).collect();
    let payload_length = headers.iter().map(|(_, bytes)| bytes.len()).sum::<usize>() + transport.len();
    let mut frame = [&[0; 6][..], &[2, 0, 0, 0, 0, 9], &[0x86, 0xdd], &[0x60, 0x01, 0x23, 0x45]].concat();
    frame.extend((payload_length as u16).to_be_bytes());
    frame.extend([protocol_numbers[0], 64]);
    frame.extend(addresses.map(|address| address.octets()).concat());
    for ((_, bytes), next_header) in headers.iter().zip(&protocol_numbers[1..]) {
        frame.push(*next_header);
        frame.extend(&bytes[1..]);
    }
    frame.extend(transport);
    frame
}

impl TcpPacket {
    pub fn to_ipv6_frame(&self, client: Ipv6Addr, vip: Ipv6Addr, headers: &[ExtensionHeader]) -> Vec<u8> {
        frame_with_ipv6_header(&self.to_frame(), [client, vip], headers)
    }
}

/// Returns the frame `ipv4` with its IPv4 header replaced by an IPv6 header and extension headers.
fn frame_with_ipv6_header(ipv4: &[u8], addresses: [Ipv6Addr; 2], headers: &[ExtensionHeader]) -> Vec<u8> {
    let mut frame = ipv6_frame(addresses, headers, 6, &ipv4[tcp_header_offset(ipv4)..]);
    let checksum_offset = tcp_header_offset(&frame) + 16;
    frame[checksum_offset..checksum_offset + 2].fill(0);
    let checksum = !tcp_segment_sum(&frame);
    frame[checksum_offset..checksum_offset + 2].copy_from_slice(&checksum.to_be_bytes());
    frame
}

/// Returns a TCP timestamp option (RFC 7323).
pub fn timestamp_option(tsval: u32, tsecr: u32) -> Vec<u8> {
    [&[8, 10][..], &tsval.to_be_bytes(), &tsecr.to_be_bytes()].concat()
}

/// Returns the TCP options of most packets: two no-operations and a timestamp.
pub fn aligned_timestamp_option(tsval: u32, tsecr: u32) -> Vec<u8> {
    [&[1, 1][..], &timestamp_option(tsval, tsecr)].concat()
}

/// Returns the ones' complement sum of 16-bit words in network byte order (RFC 1071).
pub fn ones_complement_sum(bytes: &[u8]) -> u16 {
    let mut sum = 0u32;
    for word_bytes in bytes.chunks(2) {
        sum += u32::from(word_bytes[0]) << 8 | u32::from(*word_bytes.get(1).unwrap_or(&0));
    }
    while sum >> 16 != 0 {
        sum = (sum & 0xffff) + (sum >> 16);
    }
    sum as u16
}

/// Returns the ones' complement sum of the TCP segment and its pseudo header. It is 0xffff if the checksum is correct.
pub fn tcp_segment_sum(frame: &[u8]) -> u16 {
    let tcp_start = tcp_header_offset(frame);
    let address_range = if is_ipv6(frame) {
        ETHERNET_HEADER_BYTES + 8..ETHERNET_HEADER_BYTES + 40
    } else {
        ETHERNET_HEADER_BYTES + 12..ETHERNET_HEADER_BYTES + 20
    };
    let segment_length = (frame.len() - tcp_start) as u16;
    // IPv6 has longer fields for length and protocol, but their zeros do not change the sum.
    let pseudo_header = [&frame[address_range], &[0, 6], &segment_length.to_be_bytes()].concat();
    ones_complement_sum(&[&pseudo_header, &frame[tcp_start..]].concat())
}

pub fn tcp_header_offset(frame: &[u8]) -> usize {
    if !is_ipv6(frame) {
        return ETHERNET_HEADER_BYTES + usize::from(frame[ETHERNET_HEADER_BYTES] & 0xf) * 4;
    }
    let (mut header_offset, mut next_header) = (ETHERNET_HEADER_BYTES + 40, frame[ETHERNET_HEADER_BYTES + 6]);
    while let Some(length) = extension_header_length_bytes(next_header, frame.get(header_offset + 1)) {
        next_header = frame[header_offset];
        header_offset += length;
    }
    header_offset
}

/// Returns the length in bytes of the IPv6 extension header with protocol number `number`, whose second byte is
/// `length_byte`. Returns `None` if no extension header has this number.
fn extension_header_length_bytes(number: u8, length_byte: Option<&u8>) -> Option<usize> {
    let length_field = usize::from(*length_byte?);
    match number {
        0 | 43 | 60 => Some((length_field + 1) * 8),
        44 => Some(8),
        51 => Some((length_field + 2) * 4),
        _ => None,
    }
}

/// Returns the offset of TSval in a frame, or `None` if the frame has no timestamp option (RFC 9293, Sect. 3.1).
pub fn tsval_offset(frame: &[u8]) -> Option<usize> {
    let tcp_start = tcp_header_offset(frame);
    let header_length = usize::from(frame.get(tcp_start + 12)? >> 4) * 4;
    let options = frame.get(tcp_start + 20..tcp_start + header_length)?;
    let mut option_offset = 0;
    while let Some(kind) = options.get(option_offset) {
        match kind {
            0 => return None,
            1 => option_offset += 1,
            _ => {
                let option_length = usize::from(*options.get(option_offset + 1)?);
                if option_length < 2 || option_offset + option_length > options.len() {
                    return None;
                }
                if (*kind, option_length) == (8, 10) {
                    return Some(tcp_start + 20 + option_offset + 2);
                }
                option_offset += option_length;
            }
        }
    }
    None
}

pub fn read_u32(frame: &[u8], offset: usize) -> u32 {
    u32::from_be_bytes(frame[offset..offset + 4].try_into().unwrap())
}
