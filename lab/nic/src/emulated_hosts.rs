//! Emulates other machines in the guest's network, which answer ARP requests and record received SYNs.

use std::collections::BTreeMap;
use std::io::ErrorKind;
use std::net::{Ipv4Addr, SocketAddrV4};
use std::os::fd::AsRawFd as _;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

use anyhow::{Context as _, Result};
use nix::sys::socket::{LinkAddr, MsgFlags, recvfrom, sendto};
use socket2::{Domain, Protocol, SockFilter, Socket, Type};

/// Protocol number `ETH_P_ALL` (if_ether.h) for packet(7) sockets, in network byte order.
const ETH_P_ALL_BIG_ENDIAN: i32 = (0x0003_u16.to_be()) as i32;
/// Returns a socket filter (classic BPF, Documentation/networking/filter.rst). It accepts ARP, and IPv4 packets without
/// options whose only TCP flag is SYN. Other packets that the guest forwards would fill the socket's buffer.
fn arp_or_syn_filter() -> [SockFilter; 6] {
    let filter_instruction =
        |code: u32, if_true, if_false, operand| SockFilter::new(code as u16, if_true, if_false, operand);
    [
        filter_instruction(libc::BPF_LD | libc::BPF_H | libc::BPF_ABS, 0, 0, 12),
        filter_instruction(libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K, 2, 0, 0x0806),
        filter_instruction(libc::BPF_LD | libc::BPF_B | libc::BPF_ABS, 0, 0, TCP_FLAGS_OFFSET as u32),
        filter_instruction(libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K, 0, 1, 0x02),
        filter_instruction(libc::BPF_RET | libc::BPF_K, 0, 0, u32::MAX),
        filter_instruction(libc::BPF_RET | libc::BPF_K, 0, 0, 0),
    ]
}

/// Offset of the TCP flags in an Ethernet frame whose IPv4 header has no options.
const TCP_FLAGS_OFFSET: usize = 14 + 20 + 13;

/// First three bytes of the IPv4 addresses of all emulated machines (10.2.0.0/24).
const HOST_NETWORK_PREFIX: [u8; 3] = [10, 2, 0];

/// Returns the MAC address of an emulated machine, whose last byte equals that of its IPv4 address.
pub fn host_mac(host_byte: u8) -> [u8; 6] {
    [0x02, 0xc0, 0x4e, 0x00, 0x01, host_byte]
}

/// Clients whose SYNs were received, each with the last address byte of the machine that received its SYN.
type ReceiversByClient = BTreeMap<SocketAddrV4, u8>;

/// Emulated machines in 10.2.0.0/24, which stop answering when this value is dropped.
pub struct HostEmulator {
    received_syns: Arc<Mutex<ReceiversByClient>>,
    should_stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl HostEmulator {
    /// Starts a thread that answers ARP for `hosts` and records SYNs. Fails when no packet socket can be opened.
    pub fn new(hosts: &'static [u8]) -> Result<Self> {
        let packet_socket = Socket::new(Domain::PACKET, Type::RAW, Some(Protocol::from(ETH_P_ALL_BIG_ENDIAN)));
        let packet_socket = packet_socket.context("a packet socket")?;
        packet_socket.attach_filter(&arp_or_syn_filter()).context("a filter for the packet socket")?;
        packet_socket.set_read_timeout(Some(Duration::from_millis(100)))?;
        let (received_syns, should_stop) = (Arc::default(), Arc::default());
        let answering_thread = {
            let (received_syns, should_stop) = (Arc::clone(&received_syns), Arc::clone(&should_stop));
            std::thread::spawn(move || answer_arp_until_stopped(&packet_socket, hosts, &received_syns, &should_stop))
        };
        Ok(Self { received_syns, should_stop, thread: Some(answering_thread) })
    }

    /// Returns the SYNs that were received since the last call, and forgets them.
    pub fn take_received_syns(&self) -> ReceiversByClient {
        std::mem::take(&mut self.received_syns.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

impl Drop for HostEmulator {
    fn drop(&mut self) {
        self.should_stop.store(true, Ordering::Relaxed);
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

fn answer_arp_until_stopped(
    socket: &Socket,
    hosts: &[u8],
    received_syns: &Mutex<ReceiversByClient>,
    should_stop: &AtomicBool,
) {
    let mut frame = [0; 2048];
    while !should_stop.load(Ordering::Relaxed) {
        let (length, sender_address) = match recvfrom::<LinkAddr>(socket.as_raw_fd(), &mut frame) {
            Ok((length, sender_address)) => (length, sender_address),
            Err(errno) if std::io::Error::from(errno).kind() == ErrorKind::WouldBlock => continue,
            Err(_) => return,
        };
        if let Some(reply) = arp_reply_to(&frame[..length], hosts) {
            // Errors are ignored, because the guest repeats its ARP request.
            if let Some(sender_address) = sender_address {
                let _ = sendto(socket.as_raw_fd(), &reply, &sender_address, MsgFlags::empty());
            }
        } else if let Some((client, host)) = parse_syn(&frame[..length]).filter(|(_, host)| hosts.contains(host)) {
            received_syns.lock().unwrap_or_else(PoisonError::into_inner).insert(client, host);
        }
    }
}

/// Returns the reply to an ARP request (RFC 826) for one of `hosts`, or `None` for other frames.
fn arp_reply_to(frame: &[u8], hosts: &[u8]) -> Option<[u8; 42]> {
    let arp_request: &[u8; 42] = frame.get(..42)?.try_into().ok()?;
    let (target_prefix, host) = (&arp_request[38..41], arp_request[41]);
    // The bytes are ethertype ARP, then Ethernet, IPv4, the lengths of their addresses, and the operation "request".
    if arp_request[12..22] != [0x08, 0x06, 0, 1, 0x08, 0, 6, 4, 0, 1]
        || target_prefix != HOST_NETWORK_PREFIX
        || !hosts.contains(&host)
    {
        return None;
    }
    let mut arp_reply = *arp_request;
    arp_reply[..6].copy_from_slice(&arp_request[6..12]);
    arp_reply[6..12].copy_from_slice(&host_mac(host));
    arp_reply[21] = 2;
    arp_reply[22..28].copy_from_slice(&host_mac(host));
    arp_reply[28..32].copy_from_slice(&arp_request[38..42]);
    arp_reply[32..42].copy_from_slice(&arp_request[22..32]);
    Some(arp_reply)
}

/// Returns the client of a TCP SYN over IPv4, and the last address byte of the machine that the frame is sent to.
fn parse_syn(frame: &[u8]) -> Option<(SocketAddrV4, u8)> {
    if frame.len() <= TCP_FLAGS_OFFSET
        || frame[12..15] != [0x08, 0x00, 0x45]
        || frame[23] != 6
        || frame[TCP_FLAGS_OFFSET] != 0x02
    {
        return None;
    }
    let host_byte = frame[5];
    let client_address = Ipv4Addr::new(frame[26], frame[27], frame[28], frame[29]);
    (frame[..6] == host_mac(host_byte)).then(|| {
        let port = u16::from_be_bytes([frame[34], frame[35]]);
        (SocketAddrV4::new(client_address, port), host_byte)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_arp_requests_for_the_emulated_hosts_are_answered() {
        let mut request = [0; 42];
        request[6..12].copy_from_slice(&[2, 0, 0, 0, 0, 9]);
        request[12..22].copy_from_slice(&[0x08, 0x06, 0, 1, 0x08, 0, 6, 4, 0, 1]);
        request[22..32].copy_from_slice(&[2, 0, 0, 0, 0, 9, 10, 2, 0, 1]);
        request[38..42].copy_from_slice(&[10, 2, 0, 11]);
        let reply = arp_reply_to(&request, &[11]).unwrap();
        assert_eq!(reply[..6], [2, 0, 0, 0, 0, 9]);
        assert_eq!(reply[21..32], [2, 0x02, 0xc0, 0x4e, 0, 1, 11, 10, 2, 0, 11]);
        assert_eq!(reply[32..42], request[22..32]);
        assert!(arp_reply_to(&request, &[12]).is_none());
        assert!(arp_reply_to(&reply, &[11]).is_none(), "an answer is not answered");
    }
}
