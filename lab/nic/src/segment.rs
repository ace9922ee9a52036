//! Other machines of the guest's network, which answer ARP requests and record received frames.

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

/// Protocol `ETH_P_ALL` of if_ether.h for packet(7) sockets, in network byte order.
const ALL_PROTOCOLS: i32 = (0x0003_u16.to_be()) as i32;
/// Returns a socket filter for ARP, and for IPv4 packets without options that have only the TCP flag SYN. Packets that
/// the guest forwards would fill the socket's buffer. Classic BPF: Documentation/networking/filter.rst.
fn arp_or_syn() -> [SockFilter; 6] {
    let filter = |code: u32, if_true, if_false, operand| SockFilter::new(code as u16, if_true, if_false, operand);
    [
        filter(libc::BPF_LD | libc::BPF_H | libc::BPF_ABS, 0, 0, 12),
        filter(libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K, 2, 0, 0x0806),
        filter(libc::BPF_LD | libc::BPF_B | libc::BPF_ABS, 0, 0, TCP_FLAGS_OFFSET as u32),
        filter(libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K, 0, 1, 0x02),
        filter(libc::BPF_RET | libc::BPF_K, 0, 0, u32::MAX),
        filter(libc::BPF_RET | libc::BPF_K, 0, 0, 0),
    ]
}

/// Offset of the TCP flags in an Ethernet frame with an IPv4 header without options.
const TCP_FLAGS_OFFSET: usize = 14 + 20 + 13;

/// First bytes of the addresses of all emulated machines: 10.2.0.0/24.
const NETWORK_PREFIX: [u8; 3] = [10, 2, 0];

/// Returns the MAC address of an emulated machine, whose last byte equals that of its IPv4 address.
pub fn mac_of(host: u8) -> [u8; 6] {
    [0x02, 0xc0, 0x4e, 0x00, 0x01, host]
}

/// Clients of received SYNs, with the last address byte of the machine that received each SYN.
type Syns = BTreeMap<SocketAddrV4, u8>;

/// Emulated machines with the addresses 10.2.0.`hosts`, which stop when this value is dropped.
pub struct HostEmulator {
    syns: Arc<Mutex<Syns>>,
    is_ended: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl HostEmulator {
    /// Starts a thread that answers ARP for `hosts` and records SYNs. Fails when no packet socket can be opened.
    pub fn new(hosts: &'static [u8]) -> Result<Self> {
        let socket = Socket::new(Domain::PACKET, Type::RAW, Some(Protocol::from(ALL_PROTOCOLS)));
        let socket = socket.context("a packet socket")?;
        socket.attach_filter(&arp_or_syn()).context("a filter for the packet socket")?;
        socket.set_read_timeout(Some(Duration::from_millis(100)))?;
        let (syns, is_ended) = (Arc::default(), Arc::default());
        let thread = {
            let (syns, is_ended) = (Arc::clone(&syns), Arc::clone(&is_ended));
            std::thread::spawn(move || answer(&socket, hosts, &syns, &is_ended))
        };
        Ok(Self { syns, is_ended, thread: Some(thread) })
    }

    /// Removes and returns the SYNs that were received since the last call.
    pub fn take_syns(&self) -> Syns {
        std::mem::take(&mut self.syns.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

impl Drop for HostEmulator {
    fn drop(&mut self) {
        self.is_ended.store(true, Ordering::Relaxed);
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

fn answer(socket: &Socket, hosts: &[u8], syns: &Mutex<Syns>, ended: &AtomicBool) {
    let mut frame = [0; 2048];
    while !ended.load(Ordering::Relaxed) {
        let (length, from) = match recvfrom::<LinkAddr>(socket.as_raw_fd(), &mut frame) {
            Ok((length, from)) => (length, from),
            Err(errno) if std::io::Error::from(errno).kind() == ErrorKind::WouldBlock => continue,
            Err(_) => return,
        };
        if let Some(reply) = arp_reply(&frame[..length], hosts) {
            // Errors are ignored, because the ARP request is repeated.
            if let Some(from) = from {
                let _ = sendto(socket.as_raw_fd(), &reply, &from, MsgFlags::empty());
            }
        } else if let Some((client, host)) = parse_syn(&frame[..length]).filter(|(_, host)| hosts.contains(host)) {
            syns.lock().unwrap_or_else(PoisonError::into_inner).insert(client, host);
        }
    }
}

/// Returns the reply to an ARP request (RFC 826) for one of `hosts`; `None` for other frames.
fn arp_reply(frame: &[u8], hosts: &[u8]) -> Option<[u8; 42]> {
    let request: &[u8; 42] = frame.get(..42)?.try_into().ok()?;
    let (target, host) = (&request[38..41], request[41]);
    // The request has ethertype ARP, then Ethernet, IPv4, the lengths of their addresses, and the operation "request".
    if request[12..22] != [0x08, 0x06, 0, 1, 0x08, 0, 6, 4, 0, 1] || target != NETWORK_PREFIX || !hosts.contains(&host)
    {
        return None;
    }
    let mut reply = *request;
    reply[..6].copy_from_slice(&request[6..12]);
    reply[6..12].copy_from_slice(&mac_of(host));
    reply[21] = 2;
    reply[22..28].copy_from_slice(&mac_of(host));
    reply[28..32].copy_from_slice(&request[38..42]);
    reply[32..42].copy_from_slice(&request[22..32]);
    Some(reply)
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
    let host = frame[5];
    let client = Ipv4Addr::new(frame[26], frame[27], frame[28], frame[29]);
    (frame[..6] == mac_of(host)).then(|| {
        let port = u16::from_be_bytes([frame[34], frame[35]]);
        (SocketAddrV4::new(client, port), host)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_requests_for_these_hosts_are_answered() {
        let mut request = [0; 42];
        request[6..12].copy_from_slice(&[2, 0, 0, 0, 0, 9]);
        request[12..22].copy_from_slice(&[0x08, 0x06, 0, 1, 0x08, 0, 6, 4, 0, 1]);
        request[22..32].copy_from_slice(&[2, 0, 0, 0, 0, 9, 10, 2, 0, 1]);
        request[38..42].copy_from_slice(&[10, 2, 0, 11]);
        let reply = arp_reply(&request, &[11]).unwrap();
        assert_eq!(reply[..6], [2, 0, 0, 0, 0, 9]);
        assert_eq!(reply[21..32], [2, 0x02, 0xc0, 0x4e, 0, 1, 11, 10, 2, 0, 11]);
        assert_eq!(reply[32..42], request[22..32]);
        assert!(arp_reply(&request, &[12]).is_none());
        assert!(arp_reply(&reply, &[11]).is_none(), "an answer is not answered");
    }
}
