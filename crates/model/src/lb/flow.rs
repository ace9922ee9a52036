//! What is remembered of flows: the flow table (connections that carry no cookie, and their servers), and where the first
//! fragment of a datagram went.
//!
//! Here both have no end; the BPF program's are LRU hashes. They are the same until the first eviction, and which entry
//! that hits is the kernel's business.

use std::net::Ipv4Addr;

use super::LoadBalancer;
use super::packet::{Ipv4, Packet};
use crate::ServerId;

/// A connection of one service.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Flow {
    /// The service's place.
    pub service: usize,
    /// The client's address and port.
    pub client: (Ipv4Addr, u16),
}

/// Where a flow goes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct FlowEntry {
    /// Its server.
    pub server: ServerId,
    /// To whom the server hands what it does not know.
    pub before: Option<ServerId>,
}

/// A datagram that comes in fragments.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) struct Datagram {
    client: Ipv4Addr,
    vip: Ipv4Addr,
    identification: u16,
    protocol: u8,
}

impl Datagram {
    pub fn of(packet: &Ipv4<'_>) -> Self {
        let Ipv4 { client, vip, identification, protocol, .. } = *packet;
        Self { client, vip, identification, protocol }
    }
}

impl LoadBalancer {
    /// The entry of the client's flow, if its server is still known.
    pub(super) fn find_flow(&self, service: usize, client: (Ipv4Addr, u16)) -> Option<FlowEntry> {
        let flow = Flow { service, client };
        self.flows.get(&flow).copied().filter(|entry| self.service(service).server(entry.server).is_some())
    }

    pub(super) fn insert_flow(&mut self, service: usize, packet: &Packet, entry: FlowEntry) {
        self.flows.insert(Flow { service, client: packet.client }, entry);
    }
}
