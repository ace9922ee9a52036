//! The test's end of the tap: an unnamed network namespace, and a raw socket that sends packets into it.

use std::fs;
use std::net::{Ipv4Addr, SocketAddr, SocketAddrV4};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail};
use coreward_model::FourTuple;
use socket2::{Domain, Protocol, Socket, Type};

use crate::guest::{MAC_ADDRESS, TAP};
use crate::packages::Packages;
use crate::process::{command_tied_to_parent, run};

/// Destination of the SYNs, an address on the guest's loopback.
pub const VIP: SocketAddrV4 = SocketAddrV4::new(Ipv4Addr::new(10, 200, 0, 1), 80);
/// Destination of packets that a guest forwards by a route.
pub const FORWARDED: SocketAddrV4 = SocketAddrV4::new(Ipv4Addr::new(10, 9, 0, 2), 80);
pub const FLOWS: u16 = 64;

const IPV4_HEADER: usize = 20;
const TCP_HEADER: usize = 20;
/// A timestamp option (RFC 7323) after two no-operations (RFC 9293).
const TCP_OPTIONS: [u8; 12] = [1, 1, 8, 10, 0, 0, 0, 1, 0, 0, 0, 0];
const SYN: u8 = 0x02;
const ACK: u8 = 0x10;

/// Returns the flows of a measurement, each with another client address and port.
pub fn flows() -> impl Iterator<Item = FourTuple> {
    flows_of_round(0)
}

/// Returns [`flows`] with different client addresses in each round (up to 250).
pub fn flows_of_round(round: u8) -> impl Iterator<Item = FourTuple> {
    (0..FLOWS).map(move |flow| {
        // Steps coprime to 250 and 60,000, so that no address or port repeats.
        let [third, fourth] = [flow * 91 % 250, 1 + flow * 37 % 250].map(|byte| byte as u8);
        let client =
            (Ipv4Addr::new(10, 1, ((u16::from(third) + u16::from(round)) % 250) as u8, fourth), 1024 + flow * 907);
        FourTuple::ipv4(client, (*VIP.ip(), VIP.port()))
    })
}

/// Moves this process into a new network namespace, which ends with the process. Call it before threads are started.
pub fn enter_namespace() -> Result<()> {
    nix::sched::unshare(nix::sched::CloneFlags::CLONE_NEWNET).context("a network namespace cannot be made")?;
    // Without IPv6 no neighbour discovery disturbs the counted packets.
    match fs::write("/proc/sys/net/ipv6/conf/default/disable_ipv6", "1") {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => Err(error.into()),
        _ => Ok(()),
    }
}

/// Connection to the guest.
pub struct Wire {
    socket: Socket,
}

impl Wire {
    /// Sets up the tap of a guest's QEMU. Fails when the tap does not exist.
    pub fn connect(packages: &Packages) -> Result<Self> {
        let busybox = |arguments: &[&str]| run(command_tied_to_parent(packages.busybox()).args(arguments));
        let end = Instant::now() + Duration::from_secs(10);
        while let Err(error) = busybox(&["ip", "link", "set", TAP, "up"]) {
            if Instant::now() > end {
                bail!(error);
            }
            std::thread::sleep(Duration::from_millis(50));
        }
        let mac = MAC_ADDRESS.map(|byte| format!("{byte:02x}")).join(":");
        for address in [VIP.ip(), FORWARDED.ip()].map(ToString::to_string) {
            busybox(&["ip", "route", "add", &address, "dev", TAP])?;
            busybox(&["arp", "-i", TAP, "-s", &address, &mac])?;
        }
        let socket = Socket::new(Domain::IPV4, Type::RAW, Some(Protocol::TCP)).context("a raw socket")?;
        socket.set_header_included_v4(true)?;
        Ok(Self { socket })
    }

    /// Sends the flow's SYN. Fails when the kernel rejects it.
    pub fn send_syn(&self, flow: &FourTuple) -> Result<()> {
        self.send(flow, SYN)
    }

    /// Sends a packet of an established connection. Fails when the kernel rejects it.
    pub fn send_ack(&self, flow: &FourTuple) -> Result<()> {
        self.send(flow, ACK)
    }

    fn send(&self, flow: &FourTuple, flags: u8) -> Result<()> {
        let packet = segment(flow, flags)?;
        self.socket.send_to(&packet, &flow.vip().into()).with_context(|| format!("a packet of {flow:?}"))?;
        Ok(())
    }
}

/// Returns a TCP segment over IPv4 with a timestamp, like a Linux client's except for irrelevant options.
fn segment(flow: &FourTuple, flags: u8) -> Result<Vec<u8>> {
    let (SocketAddr::V4(client), SocketAddr::V4(vip)) = (flow.client(), flow.vip()) else {
        bail!("{flow:?} is not IPv4")
    };
    let length = IPV4_HEADER + TCP_HEADER + TCP_OPTIONS.len();
    let mut packet = Vec::with_capacity(length);
    // version and header length, TOS, total length; identification 1, do not fragment; TTL 64, TCP, no checksum yet
    packet.extend_from_slice(&[0x45, 0, 0, length as u8, 0, 1, 0x40, 0, 64, 6, 0, 0]);
    packet.extend_from_slice(&client.ip().octets());
    packet.extend_from_slice(&vip.ip().octets());
    let checksum = internet_checksum(&packet);
    packet[10..12].copy_from_slice(&checksum.to_be_bytes());
    let mut tcp = Vec::with_capacity(TCP_HEADER + TCP_OPTIONS.len());
    tcp.extend_from_slice(&client.port().to_be_bytes());
    tcp.extend_from_slice(&vip.port().to_be_bytes());
    let data_offset = ((TCP_HEADER + TCP_OPTIONS.len()) / 4) as u8;
    // sequence number 1, no acknowledgement, data offset, flags, window, no checksum yet, no urgent data
    tcp.extend_from_slice(&[0, 0, 0, 1, 0, 0, 0, 0, data_offset << 4, flags, 0xfa, 0xf0, 0, 0, 0, 0]);
    tcp.extend_from_slice(&TCP_OPTIONS);
    let pseudo_header = [&packet[12..20], &[0, 6, 0, tcp.len() as u8]].concat();
    let checksum = internet_checksum(&[&pseudo_header[..], &tcp].concat());
    tcp[16..18].copy_from_slice(&checksum.to_be_bytes());
    packet.extend_from_slice(&tcp);
    Ok(packet)
}

/// Returns the ones' complement checksum of an even number of bytes (RFC 1071).
fn internet_checksum(bytes: &[u8]) -> u16 {
    let sum: u32 = bytes.chunks_exact(2).map(|pair| u32::from(u16::from_be_bytes([pair[0], pair[1]]))).sum();
    let folded = (sum & 0xffff) + (sum >> 16);
    !((folded & 0xffff) + (folded >> 16)) as u16
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn flows_have_different_tuples() {
        let all: std::collections::BTreeSet<_> = (0..250).flat_map(flows_of_round).collect();
        assert_eq!(all.len(), 250 * usize::from(FLOWS));
    }

    #[test]
    fn checksums_are_right() {
        let packet = segment(&flows().nth(5).unwrap(), SYN).unwrap();
        assert_eq!(internet_checksum(&packet[..IPV4_HEADER]), 0);
        let tcp = &packet[IPV4_HEADER..];
        let pseudo_header = [&packet[12..20], &[0, 6, 0, tcp.len() as u8]].concat();
        assert_eq!(internet_checksum(&[&pseudo_header[..], tcp].concat()), 0);
    }
}
