//! Outer headers of packets to servers behind routers: `bpf/lb/emit.h`.

use std::net::Ipv4Addr;

use coreward_intf as intf;

use super::packet::{self, ETHERNET_HEADER, IPV4_HEADER};
use super::{LoadBalancer, Mac};
use crate::ServerId;
use crate::forwarding::{Forwarding, flow_port};

/// TTL of outer headers.
const TTL: u8 = 64;
const DONT_FRAGMENT: u8 = 0x40;
const PROTOCOL_IPIP: u8 = 4;
const PROTOCOL_UDP: u8 = 17;

/// Outer header of a server's packets.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Tunnel {
    /// Destination of the outer header.
    pub address: Ipv4Addr,
    /// Source port of GUE; `None`: by the flow.
    pub source_port: Option<u16>,
}

/// Parts that all outer headers share.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Outer {
    /// Their source.
    pub address: Ipv4Addr,
    /// Longest packet that leaves, its outer header included.
    pub mtu: usize,
}

impl LoadBalancer {
    /// Sets a server's outer header.
    pub fn set_tunnel(&mut self, id: ServerId, tunnel: Tunnel) {
        self.tunnels.insert(id, tunnel);
    }

    /// Puts an outer header around the packet of `frame`, which fits with it. Fails with the counter of the
    /// drop.
    pub(super) fn encapsulate(
        &self,
        frame: &mut Vec<u8>,
        forwarding: Forwarding,
        id: ServerId,
    ) -> Result<(), intf::lb_counter> {
        let length = usize::from(packet::u16_at(&frame[ETHERNET_HEADER..], 2)) + forwarding.overhead();
        let tunnel = self.tunnels.get(&id).ok_or(intf::LB_COUNTER_DROP_SERVER_UNRESOLVED)?;
        let protocol = if forwarding == Forwarding::Ipip { PROTOCOL_IPIP } else { PROTOCOL_UDP };
        let (client, ports) = packet::flow(frame);
        let type_of_service = frame[ETHERNET_HEADER + 1];
        let mut outer = ip_header(type_of_service, length, protocol, self.constants.outer.address, tunnel.address);
        if forwarding == Forwarding::Gue {
            let port = tunnel.source_port.unwrap_or_else(|| flow_port(client, ports));
            for word in [port, intf::GUE_PORT as u16, (length - IPV4_HEADER) as u16, 0] {
                outer.extend(word.to_be_bytes());
            }
        }
        frame.splice(ETHERNET_HEADER..ETHERNET_HEADER, outer);
        Ok(())
    }
}

pub(super) fn ip_header(
    type_of_service: u8,
    length: usize,
    protocol: u8,
    source: Ipv4Addr,
    destination: Ipv4Addr,
) -> Vec<u8> {
    let [high, low] = (length as u16).to_be_bytes();
    let mut header = vec![0x45, type_of_service, high, low, 0, 0, DONT_FRAGMENT, 0, TTL, protocol, 0, 0];
    header.extend(source.octets());
    header.extend(destination.octets());
    let checksum = packet::checksum(&header);
    header[10..12].copy_from_slice(&checksum.to_be_bytes());
    header
}

/// No address, and no limit: of load balancers whose services do not encapsulate.
impl Default for Outer {
    fn default() -> Self {
        Self { address: Ipv4Addr::UNSPECIFIED, mtu: usize::from(u16::MAX) }
    }
}

/// A frame that goes by its MAC address alone.
pub(super) fn set_macs(frame: &mut [u8], destination: Mac, source: Mac) {
    frame[..6].copy_from_slice(&destination);
    frame[6..12].copy_from_slice(&source);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn header_checksum_is_that_of_an_example() {
        // The header of a captured packet: 10.0.0.1 to 10.9.0.2, 60 bytes of TCP in IP-in-IP.
        let header = ip_header(0, 80, PROTOCOL_IPIP, Ipv4Addr::new(10, 0, 0, 1), Ipv4Addr::new(10, 9, 0, 2));
        let sum: u32 = header.chunks(2).map(|word| u32::from(u16::from_be_bytes([word[0], word[1]]))).sum();
        assert_eq!((sum & 0xffff) + (sum >> 16), 0xffff);
        assert_eq!(header.len(), IPV4_HEADER);
    }
}
