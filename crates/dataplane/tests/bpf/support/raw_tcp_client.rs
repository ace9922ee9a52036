//! A TCP client whose packets the test composes itself, while the server uses the kernel's TCP.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::time::{Duration, Instant};

use coreward_dataplane::mac::MacAddress;
use coreward_intf as intf;

use super::network::SERVER_IPV4;
use super::server_env::{PacketSniffer, SERVER_IPV6, SOCKET_TIMEOUT, ServerTestEnv, read_tcp_flags, vip_address};
use super::{
    ACK, AddressFamily, SYN, TcpPacket, aligned_timestamp_option, is_ipv6, ones_complement_sum, read_u32,
    tcp_header_offset, tsval_offset,
};

/// IPv4 address of the simulated client. The kernel of the client's host does not have the address, so it sends no RST
/// to the server.
const CLIENT_ADDRESS: Ipv4Addr = Ipv4Addr::new(10, 1, 0, 77);
const CLIENT_ADDRESS_IPV6: Ipv6Addr = Ipv6Addr::new(0x2001, 0xdb8, 1, 0, 0, 0, 0, 0x77);

pub struct RawTcpClient<'env> {
    env: &'env ServerTestEnv,
    sniffer: PacketSniffer,
    server_mac: MacAddress,
    pub client_port: u16,
    has_timestamps: bool,
    next_sequence_number: u32,
    next_acknowledgement_number: u32,
    /// TSval of the server's newest packet, which the client returns as TSecr.
    pub server_tsval: u32,
    own_tsval: u32,
}

impl<'env> RawTcpClient<'env> {
    pub fn new(env: &'env ServerTestEnv, client_port: u16, has_timestamps: bool) -> Self {
        let mac_of_host =
            |host: &super::network::NamespaceHost| host.run_in_namespace(|| super::network::interface_mac("eth0"));
        for (address, length, server) in [
            (IpAddr::from(CLIENT_ADDRESS), 32, IpAddr::from(SERVER_IPV4)),
            (CLIENT_ADDRESS_IPV6.into(), 128, SERVER_IPV6.into()),
        ] {
            env.veth_pair.server.run_ip_command(&format!(
                "neigh replace {address} lladdr {} dev eth0",
                mac_of_host(&env.veth_pair.client)
            ));
            env.veth_pair.server.run_ip_command(&format!("route replace {address}/{length} dev eth0 src {server}"));
        }
        Self {
            env,
            sniffer: PacketSniffer::new(env),
            server_mac: mac_of_host(&env.veth_pair.server),
            client_port,
            has_timestamps,
            next_sequence_number: 1000,
            next_acknowledgement_number: 0,
            server_tsval: 0,
            own_tsval: 1,
        }
    }

    pub fn address(&self) -> SocketAddr {
        let address = match self.env.family {
            AddressFamily::Ipv4 => IpAddr::from(CLIENT_ADDRESS),
            AddressFamily::Ipv6 => CLIENT_ADDRESS_IPV6.into(),
        };
        (address, self.client_port).into()
    }

    /// Returns the frame that the client would send next. Without timestamps, `tsecr` is ignored.
    pub fn build_next_frame(&self, flags: u8, tsecr: u32, payload: &[u8]) -> Vec<u8> {
        let mut packet = TcpPacket::between(self.address(), vip_address(self.env.family));
        packet.destination_mac = self.server_mac.0;
        packet.flags = flags;
        packet.payload = payload.to_vec();
        if self.has_timestamps {
            packet.tcp_options = aligned_timestamp_option(self.own_tsval, tsecr);
        }
        packet.to_frame_with_sequence(self.next_sequence_number, self.next_acknowledgement_number)
    }

    pub fn send_frame(&mut self, frame: &[u8]) {
        self.own_tsval += 1;
        self.sniffer.send_frame(self.env, frame);
    }

    /// Waits for a packet from the server. Returns all packets that arrive until the server is silent for 50 ms.
    fn wait_for_replies(&mut self) -> Vec<Vec<u8>> {
        let deadline = Instant::now() + SOCKET_TIMEOUT;
        loop {
            let frames = self.receive_replies();
            if !frames.is_empty() {
                return frames;
            }
            assert!(Instant::now() < deadline, "the server does not answer");
        }
    }

    /// Returns the server's packets until it is silent for 50 ms, and stores the newest TSval in `server_tsval`.
    pub fn receive_replies(&mut self) -> Vec<Vec<u8>> {
        let (mut frames, mut last_arrival) = (vec![], Instant::now());
        while last_arrival.elapsed() < Duration::from_millis(50) {
            let new_frames: Vec<_> =
                self.sniffer.receive_frames_from_vip().into_iter().filter(|f| self.is_for_this_client(f)).collect();
            if new_frames.is_empty() {
                std::thread::sleep(Duration::from_millis(2));
            } else {
                last_arrival = Instant::now();
            }
            frames.extend(new_frames);
        }
        if let Some(frame) = frames.last() {
            self.server_tsval = tsval_offset(frame).map_or(0, |offset| read_u32(frame, offset));
        }
        frames
    }

    /// Waits until the server has processed all sent packets. Returns the packets to this client since the last call.
    pub fn collect_frames_to_this_client(&self) -> Vec<Vec<u8>> {
        let mut frames = self.sniffer.collect_frames_from_vip(self.env);
        frames.retain(|frame| self.is_for_this_client(frame));
        frames
    }

    /// Waits until the server has processed all sent packets. Returns packets of all hosts since the last call.
    pub fn collect_all_frames(&self) -> Vec<Vec<u8>> {
        self.sniffer.collect_frames_until_processed(self.env)
    }

    fn is_for_this_client(&self, frame: &[u8]) -> bool {
        let tcp_start = tcp_header_offset(frame);
        let is_for_address = if is_ipv6(frame) {
            frame[38..54] == CLIENT_ADDRESS_IPV6.octets()
        } else {
            frame[30..34] == CLIENT_ADDRESS.octets()
        };
        is_for_address && frame[tcp_start + 2..tcp_start + 4] == self.client_port.to_be_bytes()
    }

    pub fn open_connection(&mut self, tsecr: u32) -> Vec<u8> {
        let syn = self.build_next_frame(SYN, tsecr, b"");
        self.send_frame(&syn);
        let syn_ack = self.wait_for_replies().pop().expect("not empty");
        assert_eq!(read_tcp_flags(&syn_ack), SYN | ACK);
        self.next_sequence_number += 1;
        self.next_acknowledgement_number = read_u32(&syn_ack, tcp_header_offset(&syn_ack) + 4).wrapping_add(1);
        syn_ack
    }

    pub fn send_final_ack(&mut self) {
        let ack_frame = self.build_next_frame(ACK, self.server_tsval, b"");
        self.send_frame(&ack_frame);
    }

    /// Sends `payload` in a packet to which `change` is applied. Returns the packets that the server sends in reply.
    pub fn send_payload(&mut self, payload: &[u8], change: impl FnOnce(&mut Vec<u8>)) -> Vec<Vec<u8>> {
        let mut frame = self.build_next_frame(ACK, self.server_tsval, payload);
        change(&mut frame);
        self.send_frame(&frame);
        let replies = self.wait_for_replies();
        if replies.iter().any(|answer| read_u32(answer, tcp_header_offset(answer) + 8) != self.next_sequence_number) {
            self.next_sequence_number += payload.len() as u32;
        }
        replies
    }
}

/// Writes `identification`, the id of the previous server, into a frame's IP identification or flow label.
pub fn write_previous_server_id(frame: &mut [u8], identification: u16) {
    if is_ipv6(frame) {
        frame[16..18].copy_from_slice(&identification.to_be_bytes());
        return;
    }
    frame[18..20].copy_from_slice(&identification.to_be_bytes());
    frame[24..26].fill(0);
    let header_checksum = !ones_complement_sum(&frame[14..34]);
    frame[24..26].copy_from_slice(&header_checksum.to_be_bytes());
}

/// Sets a frame's destination MAC address to the broadcast address, as the load balancer does if it cannot determine
/// the packet's server.
pub fn set_broadcast_destination_mac(frame: &mut [u8]) {
    frame[..6].fill(0xff);
}

/// Returns the TSecr of a SYN by which a load balancer passes the connection table index `index` (owner and slot) to a
/// server.
pub fn tsecr_with_table_index(index: u16) -> u32 {
    intf::SYN_TSECR_HOLDS_COOKIE | intf::COOKIE_KIND_BIT | u32::from(index)
}
