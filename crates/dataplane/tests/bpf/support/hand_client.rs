//! A TCP client whose packets the test composes. The server uses the kernel's TCP.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::time::{Duration, Instant};

use coreward_dataplane::mac::MacAddress;
use coreward_intf as intf;

use super::network::SERVER;
use super::server_env::{SERVER_IPV6, Sniffer, TIMEOUT, TestEnv, flags, vip};
use super::{
    ACK, Family, SYN, Tcp, aligned_timestamp, is_ipv6, ones_complement_sum, tcp_offset, timestamp_offset, word,
};

/// Address of the client. The kernel of its host does not have this address, so it sends no RST to the server.
const ADDRESS: Ipv4Addr = Ipv4Addr::new(10, 1, 0, 77);
const ADDRESS_IPV6: Ipv6Addr = Ipv6Addr::new(0x2001, 0xdb8, 1, 0, 0, 0, 0, 0x77);

pub struct RawTcpClient<'env> {
    env: &'env TestEnv,
    sniffer: Sniffer,
    server_mac: MacAddress,
    pub port: u16,
    timestamps: bool,
    sequence: u32,
    acknowledgement: u32,
    /// TSval of the server's newest packet, which the client returns as TSecr.
    pub server_tsval: u32,
    own_time: u32,
}

impl<'env> RawTcpClient<'env> {
    pub fn new(env: &'env TestEnv, port: u16, timestamps: bool) -> Self {
        let mac = |host: &super::network::Host| host.run_inside(|| super::network::mac_address("eth0"));
        for (address, length, server) in
            [(IpAddr::from(ADDRESS), 32, IpAddr::from(SERVER)), (ADDRESS_IPV6.into(), 128, SERVER_IPV6.into())]
        {
            env.pair.server.ip(&format!("neigh replace {address} lladdr {} dev eth0", mac(&env.pair.client)));
            env.pair.server.ip(&format!("route replace {address}/{length} dev eth0 src {server}"));
        }
        Self {
            env,
            sniffer: Sniffer::new(env),
            server_mac: mac(&env.pair.server),
            port,
            timestamps,
            sequence: 1000,
            acknowledgement: 0,
            server_tsval: 0,
            own_time: 1,
        }
    }

    pub fn address(&self) -> SocketAddr {
        let address = match self.env.family {
            Family::Ipv4 => IpAddr::from(ADDRESS),
            Family::Ipv6 => ADDRESS_IPV6.into(),
        };
        (address, self.port).into()
    }

    /// Returns the frame that the client would send next. Without timestamps, `tsecr` is ignored.
    pub fn frame(&self, flags: u8, tsecr: u32, payload: &[u8]) -> Vec<u8> {
        let mut packet = Tcp::between(self.address(), vip(self.env.family));
        packet.destination_mac = self.server_mac.0;
        packet.flags = flags;
        packet.payload = payload.to_vec();
        if self.timestamps {
            packet.options = aligned_timestamp(self.own_time, tsecr);
        }
        packet.frame_with_sequence(self.sequence, self.acknowledgement)
    }

    pub fn send(&mut self, frame: &[u8]) {
        self.own_time += 1;
        self.sniffer.send(self.env, frame);
    }

    /// Waits for a packet from the server. Returns all packets that arrive until the server is silent for 50 ms.
    fn answers(&mut self) -> Vec<Vec<u8>> {
        let end = Instant::now() + TIMEOUT;
        loop {
            let frames = self.receive();
            if !frames.is_empty() {
                return frames;
            }
            assert!(Instant::now() < end, "the server does not answer");
        }
    }

    /// Returns the server's packets until it is silent for 50 ms, and stores the newest TSval in `server_tsval`.
    pub fn receive(&mut self) -> Vec<Vec<u8>> {
        let (mut frames, mut last) = (vec![], Instant::now());
        while last.elapsed() < Duration::from_millis(50) {
            let new: Vec<_> = self.sniffer.received_from_vip().into_iter().filter(|f| self.is_for_us(f)).collect();
            if new.is_empty() {
                std::thread::sleep(Duration::from_millis(2));
            } else {
                last = Instant::now();
            }
            frames.extend(new);
        }
        if let Some(frame) = frames.last() {
            self.server_tsval = timestamp_offset(frame).map_or(0, |at| word(frame, at));
        }
        frames
    }

    /// Waits until the server has processed all sent packets. Returns the packets to this client since the last call.
    pub fn received(&self) -> Vec<Vec<u8>> {
        let mut frames = self.sniffer.collect_from_vip(self.env);
        frames.retain(|frame| self.is_for_us(frame));
        frames
    }

    /// Waits until the server has processed all sent packets. Returns packets of all hosts since the last call.
    pub fn collect_all(&self) -> Vec<Vec<u8>> {
        self.sniffer.collect(self.env)
    }

    fn is_for_us(&self, frame: &[u8]) -> bool {
        let tcp = tcp_offset(frame);
        let is_for_host =
            if is_ipv6(frame) { frame[38..54] == ADDRESS_IPV6.octets() } else { frame[30..34] == ADDRESS.octets() };
        is_for_host && frame[tcp + 2..tcp + 4] == self.port.to_be_bytes()
    }

    /// Sends a SYN with this TSecr. Returns the SYN-ACK.
    pub fn open(&mut self, tsecr: u32) -> Vec<u8> {
        let syn = self.frame(SYN, tsecr, b"");
        self.send(&syn);
        let answer = self.answers().pop().expect("not empty");
        assert_eq!(flags(&answer), SYN | ACK);
        self.sequence += 1;
        self.acknowledgement = word(&answer, tcp_offset(&answer) + 4).wrapping_add(1);
        answer
    }

    /// Sends the ACK that completes the handshake.
    pub fn acknowledge(&mut self) {
        let ack = self.frame(ACK, self.server_tsval, b"");
        self.send(&ack);
    }

    /// Sends `payload` in a packet to which `change` is applied. Returns the packets that the server sends in reply.
    pub fn exchange(&mut self, payload: &[u8], change: impl FnOnce(&mut Vec<u8>)) -> Vec<Vec<u8>> {
        let mut frame = self.frame(ACK, self.server_tsval, payload);
        change(&mut frame);
        self.send(&frame);
        let answers = self.answers();
        if answers.iter().any(|answer| word(answer, tcp_offset(answer) + 8) != self.sequence) {
            self.sequence += payload.len() as u32;
        }
        answers
    }
}

/// Writes `identification`, the id of the previous server, into a frame's IP identification or flow label.
pub fn set_previous_server(frame: &mut [u8], identification: u16) {
    if is_ipv6(frame) {
        frame[16..18].copy_from_slice(&identification.to_be_bytes());
        return;
    }
    frame[18..20].copy_from_slice(&identification.to_be_bytes());
    frame[24..26].fill(0);
    let sum = !ones_complement_sum(&frame[14..34]);
    frame[24..26].copy_from_slice(&sum.to_be_bytes());
}

/// Makes a frame a broadcast, as the load balancer does if it does not know the server of the packet.
pub fn set_broadcast_mac(frame: &mut [u8]) {
    frame[..6].fill(0xff);
}

/// Returns the TSecr by which a load balancer passes the entry `index` (owner and slot) to a server in a SYN.
pub fn syn_tsecr(index: u16) -> u32 {
    intf::SYN_TSECR_HOLDS_COOKIE | intf::COOKIE_KIND_BIT | u32::from(index)
}
