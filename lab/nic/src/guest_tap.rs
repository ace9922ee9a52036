//! The test's end of the tap device: an unnamed network namespace, and a packet socket that sends frames to the guest.

use std::fs;
use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr, SocketAddrV4, SocketAddrV6};
use std::os::fd::AsRawFd as _;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail};
use coreward_intf as intf;
use coreward_model::FourTuple;
use nix::errno::Errno;
use nix::sys::socket::{LinkAddr, MsgFlags, sendto};
use socket2::{Domain, Socket, Type};

use crate::guest::{FIRST_NIC_MAC, FIRST_TAP_NAME};
use crate::host_commands::{command_tied_to_parent, run_command_to_end};
use crate::packages::FetchedPackages;

/// Destination of IPv4 SYNs, which is an address on the guest's loopback.
pub const IPV4_SYN_DESTINATION: SocketAddrV4 = SocketAddrV4::new(Ipv4Addr::new(10, 200, 0, 1), 80);
/// Destination of IPv6 SYNs. The guest does not have this address, because its IPv6 is off.
pub const IPV6_SYN_DESTINATION: SocketAddrV6 =
    SocketAddrV6::new(ipv4_to_ipv6(IPV4_SYN_DESTINATION.ip().to_bits()), IPV4_SYN_DESTINATION.port(), 0, 0);
/// Destination of packets that a guest receives and forwards to another network.
pub const FORWARDED_PACKET_DESTINATION: SocketAddrV4 = SocketAddrV4::new(Ipv4Addr::new(10, 9, 0, 2), 80);
/// Source address in the outer IP headers of GUE packets. It is the load balancer's address.
const OUTER_SOURCE_ADDRESS: Ipv4Addr = Ipv4Addr::new(10, 2, 0, 2);
const OUTER_DESTINATION_ADDRESS: Ipv4Addr = Ipv4Addr::new(10, 2, 0, 11);
/// Number of flows of each IP version in a measurement, so the total is twice this number.
pub const FLOWS_PER_IP_VERSION: u16 = 64;
pub const MEASURED_FLOW_COUNT: u16 = 2 * FLOWS_PER_IP_VERSION;

/// MAC address of the host's end of the link to the guest.
const HOST_MAC: [u8; 6] = [0x02, 0xc0, 0x4e, 0x00, 0x01, 0xfd];
/// TCP options of a segment: two no-operation options (RFC 9293), then timestamps (RFC 7323).
const TIMESTAMP_OPTIONS: [u8; 12] = [1, 1, 8, 10, 0, 0, 0, 1, 0, 0, 0, 0];
const PROTOCOL_TCP: u8 = 6;
const PROTOCOL_UDP: u8 = 17;
const TCP_FLAG_SYN: u8 = 0x02;
const TCP_FLAG_ACK: u8 = 0x10;

/// Returns the IPv6 address whose last 32 bits are those of an IPv4 address.
const fn ipv4_to_ipv6(ipv4_bits: u32) -> Ipv6Addr {
    Ipv6Addr::from_bits(0x2001_0db8 << 96 | ipv4_bits as u128)
}

/// Returns the flows of a measurement, each with another client address and port. The IPv4 flows precede the IPv6
/// flows.
pub fn measured_flows() -> impl Iterator<Item = FourTuple> {
    flows_of_round(0).chain(flows_of_round(0).map(|flow| to_ipv6_flow(&flow)))
}

/// Returns the flows in the outer GUE headers of a measurement, which differ only in the source port. The IPv4 flows
/// come first.
pub fn outer_gue_flows() -> impl Iterator<Item = FourTuple> {
    let flows = flows_of_round(0).map(|flow| {
        FourTuple::ipv4(
            (OUTER_SOURCE_ADDRESS, flow.client().port()),
            (OUTER_DESTINATION_ADDRESS, intf::GUE_PORT as u16),
        )
    });
    flows.clone().chain(flows.map(|flow| to_ipv6_flow(&flow)))
}

fn to_ipv6_flow(flow: &FourTuple) -> FourTuple {
    let (SocketAddr::V4(client), SocketAddr::V4(vip)) = (flow.client(), flow.vip()) else { return *flow };
    let [client, vip] = [client, vip].map(|v4| (ipv4_to_ipv6(v4.ip().to_bits()), v4.port()));
    FourTuple::ipv6(client, vip)
}

/// Returns the IPv4 flows of a round. Their client addresses differ from those of all other rounds (0 to 249).
pub fn flows_of_round(round: u8) -> impl Iterator<Item = FourTuple> + Clone {
    (0..FLOWS_PER_IP_VERSION).map(move |flow| {
        // The steps are coprime to 250 and 60,000, so that no address or port repeats.
        let [third_byte, fourth_byte] = [flow * 91 % 250, 1 + flow * 37 % 250].map(|byte| byte as u8);
        let client_endpoint = (
            Ipv4Addr::new(10, 1, ((u16::from(third_byte) + u16::from(round)) % 250) as u8, fourth_byte),
            1024 + flow * 907,
        );
        FourTuple::ipv4(client_endpoint, (*IPV4_SYN_DESTINATION.ip(), IPV4_SYN_DESTINATION.port()))
    })
}

/// Moves this process into a new network namespace, which ends with the process. Call it before starting threads.
pub fn enter_network_namespace() -> Result<()> {
    nix::sched::unshare(nix::sched::CloneFlags::CLONE_NEWNET).context("a network namespace cannot be made")?;
    // Without IPv6, no neighbour discovery disturbs the counts of packets.
    match fs::write("/proc/sys/net/ipv6/conf/default/disable_ipv6", "1") {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => Err(error.into()),
        _ => Ok(()),
    }
}

/// Packet socket on a guest's tap device, through which frames are sent to the guest.
pub struct GuestTap {
    packet_socket: Socket,
    tap_address: LinkAddr,
}

impl GuestTap {
    /// Waits until QEMU has created the guest's tap device, and sets it up. Fails when it does not exist after 10 s.
    pub fn set_up_tap(packages: &FetchedPackages) -> Result<Self> {
        let deadline = Instant::now() + Duration::from_secs(10);
        let set_tap_up = || {
            run_command_to_end(command_tied_to_parent(packages.busybox_path()).args([
                "ip",
                "link",
                "set",
                FIRST_TAP_NAME,
                "up",
            ]))
        };
        while let Err(error) = set_tap_up() {
            if Instant::now() > deadline {
                bail!(error);
            }
            std::thread::sleep(Duration::from_millis(50));
        }
        let interfaces = nix::ifaddrs::getifaddrs().context("the network interfaces")?;
        let mut tap_interfaces = interfaces.filter(|interface| interface.interface_name == FIRST_TAP_NAME);
        let tap_address = tap_interfaces.find_map(|interface| interface.address?.as_link_addr().copied());
        let packet_socket = Socket::new(Domain::PACKET, Type::RAW, None).context("a packet socket")?;
        Ok(Self { packet_socket, tap_address: tap_address.with_context(|| format!("{FIRST_TAP_NAME} has no index"))? })
    }

    /// Sends the SYN of a flow to the guest. Fails when the kernel rejects it.
    pub fn send_syn(&self, flow: &FourTuple) -> Result<()> {
        self.send_frame(flow, &build_tcp_frame(flow, TCP_FLAG_SYN)?, 1)
    }

    /// Sends a SYN with an outer GUE header. Fails when the kernel rejects it.
    pub fn send_gue_syn(&self, outer_flow: &FourTuple) -> Result<()> {
        let inner_flow = flows_of_round(0).next().context("a flow")?;
        self.send_frame(outer_flow, &build_gue_frame(outer_flow, &build_tcp_packet(&inner_flow, TCP_FLAG_SYN)?.1)?, 1)
    }

    /// Sends `packet_count` ACKs of an established connection to the guest. Fails when the kernel rejects one.
    pub fn send_acks(&self, flow: &FourTuple, packet_count: u32) -> Result<()> {
        self.send_frame(flow, &build_tcp_frame(flow, TCP_FLAG_ACK)?, packet_count)
    }

    fn send_frame(&self, flow: &FourTuple, frame: &[u8], packet_count: u32) -> Result<()> {
        for _ in 0..packet_count {
            match sendto(self.packet_socket.as_raw_fd(), frame, &self.tap_address, MsgFlags::empty()) {
                // If the tap's queue is full, the packet counts as lost.
                Ok(_) | Err(Errno::ENOBUFS) => {}
                Err(errno) => return Err(errno).with_context(|| format!("a packet of {flow:?}")),
            }
        }
        Ok(())
    }
}

/// Returns a frame to the guest with a TCP segment like a Linux client's, except that its only option is timestamps.
fn build_tcp_frame(flow: &FourTuple, flags: u8) -> Result<Vec<u8>> {
    let (ethertype, packet) = build_tcp_packet(flow, flags)?;
    Ok([&FIRST_NIC_MAC[..], &HOST_MAC, &ethertype, &packet].concat())
}

/// Returns the ethertype and the IP packet of a TCP segment.
fn build_tcp_packet(flow: &FourTuple, flags: u8) -> Result<([u8; 2], Vec<u8>)> {
    let mut tcp_segment = build_segment_without_checksum(flow, flags);
    let segment_bytes = tcp_segment.len() as u8;
    let (ethertype, header, addresses_offset) = build_ip_header(flow, PROTOCOL_TCP, segment_bytes)?;
    let pseudo_header = [&header[addresses_offset..], &[0, PROTOCOL_TCP, 0, segment_bytes]].concat();
    let checksum = internet_checksum(&[&pseudo_header[..], &tcp_segment].concat());
    tcp_segment[16..18].copy_from_slice(&checksum.to_be_bytes());
    Ok((ethertype, [header, tcp_segment].concat()))
}

/// Returns a GUE frame, in which outer IP and UDP headers for `outer_flow` enclose an IP packet. The outer UDP header
/// has no checksum (docs/design.md).
fn build_gue_frame(outer_flow: &FourTuple, packet: &[u8]) -> Result<Vec<u8>> {
    let udp_bytes = 8 + packet.len() as u8;
    let (ethertype, header, _) = build_ip_header(outer_flow, PROTOCOL_UDP, udp_bytes)?;
    let port_bytes = [outer_flow.client(), outer_flow.vip()].map(|socket| socket.port().to_be_bytes()).concat();
    Ok([&FIRST_NIC_MAC[..], &HOST_MAC, &ethertype, &header, &port_bytes, &[0, udp_bytes, 0, 0], packet].concat())
}

/// Returns the ethertype, the IP header, and the offset of the addresses in that header.
fn build_ip_header(flow: &FourTuple, protocol: u8, payload_bytes: u8) -> Result<([u8; 2], Vec<u8>, usize)> {
    Ok(match (flow.client(), flow.vip()) {
        (SocketAddr::V4(client), SocketAddr::V4(vip)) => {
            ([0x08, 0x00], build_ipv4_header([*client.ip(), *vip.ip()], protocol, payload_bytes), 12)
        }
        (SocketAddr::V6(client), SocketAddr::V6(vip)) => {
            ([0x86, 0xdd], build_ipv6_header([*client.ip(), *vip.ip()], protocol, payload_bytes), 8)
        }
        _ => bail!("{flow:?} has addresses of two families"),
    })
}

/// Returns a TCP segment without data, whose checksum is still 0.
fn build_segment_without_checksum(flow: &FourTuple, flags: u8) -> Vec<u8> {
    let port_bytes = [flow.client(), flow.vip()].map(|socket| socket.port().to_be_bytes()).concat();
    let data_offset = ((20 + TIMESTAMP_OPTIONS.len()) / 4) as u8;
    // sequence number 1, no acknowledgement, data offset, flags, window, no checksum yet, no urgent data
    let header_fields = [0, 0, 0, 1, 0, 0, 0, 0, data_offset << 4, flags, 0xfa, 0xf0, 0, 0, 0, 0];
    [&port_bytes[..], &header_fields, &TIMESTAMP_OPTIONS].concat()
}

fn build_ipv4_header(addresses: [Ipv4Addr; 2], protocol: u8, payload_bytes: u8) -> Vec<u8> {
    // version and header length, TOS, total length; identification 1, do not fragment; TTL 64, protocol, no checksum
    let header_fields = [0x45, 0, 0, 20 + payload_bytes, 0, 1, 0x40, 0, 64, protocol, 0, 0];
    let mut header = [&header_fields[..], &addresses.map(|address| address.octets()).concat()].concat();
    let checksum = internet_checksum(&header);
    header[10..12].copy_from_slice(&checksum.to_be_bytes());
    header
}

fn build_ipv6_header(addresses: [Ipv6Addr; 2], protocol: u8, payload_bytes: u8) -> Vec<u8> {
    // version, traffic class, flow label; payload length, next header, hop limit
    let header_fields = [0x60, 0, 0, 1, 0, payload_bytes, protocol, 64];
    [&header_fields[..], &addresses.map(|address| address.octets()).concat()].concat()
}

/// Returns the Internet checksum of an even number of bytes, which is the complement of their ones' complement sum (RFC
/// 1071).
fn internet_checksum(bytes: &[u8]) -> u16 {
    let word_sum: u32 =
        bytes.chunks_exact(2).map(|word_bytes| u32::from(u16::from_be_bytes([word_bytes[0], word_bytes[1]]))).sum();
    let folded_sum = (word_sum & 0xffff) + (word_sum >> 16);
    !((folded_sum & 0xffff) + (folded_sum >> 16)) as u16
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    #[test]
    fn flows_of_all_rounds_have_different_four_tuples() {
        let flows_of_all_rounds: BTreeSet<_> = (0..250).flat_map(flows_of_round).collect();
        assert_eq!(flows_of_all_rounds.len(), 250 * usize::from(FLOWS_PER_IP_VERSION));
        assert_eq!(measured_flows().collect::<BTreeSet<_>>().len(), usize::from(MEASURED_FLOW_COUNT));
    }

    #[test]
    fn gue_frames_have_different_outer_ports_and_contain_whole_packets() {
        assert_eq!(outer_gue_flows().collect::<BTreeSet<_>>().len(), usize::from(MEASURED_FLOW_COUNT));
        for (flow, header_bytes) in [(0, 20), (FLOWS_PER_IP_VERSION, 40)] {
            let frame = build_gue_frame(&outer_gue_flows().nth(flow.into()).unwrap(), &[7; 9]).unwrap();
            let (ip, udp) = frame[14..].split_at(header_bytes);
            assert!(header_bytes == 40 || internet_checksum(ip) == 0);
            assert_eq!((udp.len(), &udp[2..8], &udp[8..]), (17, &[0x17, 0xc0, 0, 17, 0, 0][..], &[7; 9][..]));
        }
    }

    #[test]
    fn ip_and_tcp_checksums_of_built_frames_are_correct() {
        for (flow, header_bytes, addresses_offset) in [(5, 20, 12), (FLOWS_PER_IP_VERSION + 5, 40, 8)] {
            let tcp_frame = build_tcp_frame(&measured_flows().nth(flow.into()).unwrap(), TCP_FLAG_SYN).unwrap();
            let (ip, tcp) = tcp_frame[14..].split_at(header_bytes);
            assert!(header_bytes == 40 || internet_checksum(ip) == 0);
            let pseudo_header = [&ip[addresses_offset..], &[0, PROTOCOL_TCP, 0, tcp.len() as u8]].concat();
            assert_eq!(internet_checksum(&[&pseudo_header[..], tcp].concat()), 0);
        }
    }
}
