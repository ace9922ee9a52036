//! What is remembered of flows: the flow table (connections that carry no cookie, and their servers), and where the first
//! fragment of a datagram went.
//!
//! Here both have no end; the BPF program's are LRU hashes. They are the same until the first eviction, and which entry
//! that hits is the kernel's business.

use std::net::Ipv4Addr;

use coreward_intf as intf;

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
    /// It is of a SYN-ACK that was not stamped, and nothing else has come from the client yet (`HALF_OPEN_FLOW`).
    pub half_open: bool,
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

impl FlowEntry {
    /// Of a connection that nobody had before.
    pub(super) fn of(server: ServerId) -> Self {
        Self { server, before: None, half_open: false }
    }

    /// What `before` is in `struct flow_table_entry`.
    pub(super) fn before_field(self) -> u16 {
        match self.before {
            _ if self.half_open => intf::HALF_OPEN_FLOW as u16,
            Some(before) => before.get(),
            None => intf::NO_SERVER as u16,
        }
    }
}

impl LoadBalancer {
    /// The entry of the client's flow, if its server is still known.
    pub(super) fn find_flow(&self, service: usize, client: (Ipv4Addr, u16)) -> Option<FlowEntry> {
        let flow = Flow { service, client };
        self.flows.get(&flow).copied().filter(|entry| self.service(service).server(entry.server).is_some())
    }

    /// The same, whether its server is known or not.
    pub(super) fn find_any_flow(&self, service: usize, client: (Ipv4Addr, u16)) -> Option<FlowEntry> {
        self.flows.get(&Flow { service, client }).copied()
    }

    pub(super) fn insert_flow(&mut self, service: usize, packet: &Packet, entry: FlowEntry) {
        self.flows.insert(Flow { service, client: packet.client }, entry);
    }
}
