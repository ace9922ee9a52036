//! The packets of a capture, as far as `coreward explain` needs them.

use std::fs::File;
use std::net::SocketAddr;
use std::path::Path;

use anyhow::{Context as _, bail};
use coreward_model::tuple::Protocol;
use etherparse::{NetSlice, SlicedPacket, TcpOptionElement, TransportSlice};
use pcap_file::DataLink;
use pcap_file::pcap::PcapReader;
use pcap_file::pcapng::{Block, PcapNgReader};

/// One TCP or UDP packet.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Packet {
    /// Its number in the file, from 1 on.
    pub number: usize,
    /// Its protocol.
    pub protocol: Protocol,
    /// Where it came from.
    pub source: SocketAddr,
    /// Where it went.
    pub destination: SocketAddr,
    /// It opens a connection: SYN without ACK.
    pub syn: bool,
    /// RST.
    pub reset: bool,
    /// TSval and TSecr, if it has timestamps.
    pub timestamp: Option<(u32, u32)>,
}

/// Begins a pcapng file (draft-ietf-opsawg-pcapng, Sect. 4.1).
const PCAPNG_MAGIC: [u8; 4] = [0x0a, 0x0d, 0x0d, 0x0a];

/// All TCP and UDP packets of a pcap or pcapng file, in its order; others are left out.
///
/// # Errors
/// When the file cannot be read, is neither, or was not captured on Ethernet or as bare IP.
pub fn read(path: &Path) -> anyhow::Result<Vec<Packet>> {
    let shown = || path.display().to_string();
    let bytes = std::fs::read(path).with_context(shown)?;
    let frames = if bytes.starts_with(&PCAPNG_MAGIC) { pcapng(path) } else { pcap(path) }.with_context(shown)?;
    let parsed = frames.into_iter().enumerate().map(|(position, (link, frame))| {
        let sliced = match link {
            DataLink::ETHERNET => SlicedPacket::from_ethernet(&frame),
            DataLink::RAW | DataLink::IPV4 | DataLink::IPV6 => SlicedPacket::from_ip(&frame),
            other => bail!("{}: link type {other:?}: expected Ethernet or bare IP", shown()),
        };
        Ok(sliced.ok().and_then(|sliced| packet(position + 1, &sliced)))
    });
    parsed.filter_map(Result::transpose).collect()
}

type Frames = Vec<(DataLink, Vec<u8>)>;

fn pcap(path: &Path) -> anyhow::Result<Frames> {
    let mut reader = PcapReader::new(File::open(path)?).context("expected a pcap or pcapng file")?;
    let link = reader.header().datalink;
    let mut frames = Frames::new();
    while let Some(packet) = reader.next_packet() {
        frames.push((link, packet?.data.into_owned()));
    }
    Ok(frames)
}

fn pcapng(path: &Path) -> anyhow::Result<Frames> {
    let mut reader = PcapNgReader::new(File::open(path)?)?;
    let mut frames = Frames::new();
    while let Some(block) = reader.next_block() {
        let (interface, data) = match block? {
            Block::EnhancedPacket(packet) => (packet.interface_id, packet.data.into_owned()),
            Block::SimplePacket(packet) => (0, packet.data.into_owned()),
            _ => continue,
        };
        let described = reader.interfaces().get(interface as usize).map(|interface| interface.linktype);
        frames.push((described.with_context(|| format!("interface {interface} is not described"))?, data));
    }
    Ok(frames)
}

fn packet(number: usize, sliced: &SlicedPacket<'_>) -> Option<Packet> {
    let (from, to): (std::net::IpAddr, std::net::IpAddr) = match sliced.net.as_ref()? {
        NetSlice::Ipv4(ip) => (ip.header().source_addr().into(), ip.header().destination_addr().into()),
        NetSlice::Ipv6(ip) => (ip.header().source_addr().into(), ip.header().destination_addr().into()),
        _ => return None,
    };
    let whole = |protocol, source: u16, destination: u16, syn, reset, timestamp| Packet {
        number,
        protocol,
        source: (from, source).into(),
        destination: (to, destination).into(),
        syn,
        reset,
        timestamp,
    };
    match sliced.transport.as_ref()? {
        TransportSlice::Udp(udp) => {
            Some(whole(Protocol::Udp, udp.source_port(), udp.destination_port(), false, false, None))
        }
        TransportSlice::Tcp(tcp) => {
            let timestamp = tcp.options_iterator().find_map(|option| match option {
                Ok(TcpOptionElement::Timestamp(value, echo)) => Some((value, echo)),
                _ => None,
            });
            let syn = tcp.syn() && !tcp.ack();
            Some(whole(Protocol::Tcp, tcp.source_port(), tcp.destination_port(), syn, tcp.rst(), timestamp))
        }
        _ => None,
    }
}
