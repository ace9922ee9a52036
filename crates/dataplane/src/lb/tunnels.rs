//! Outer headers of services that encapsulate: `bpf/lb/outer_header.h`.

use std::mem::offset_of;
use std::net::Ipv4Addr;

use coreward_intf as intf;
use coreward_model::ServerId;

use super::{LoadBalancer, entry_at};

/// Outer header of a server's packets.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Tunnel {
    /// Destination of the outer header.
    pub address: Ipv4Addr,
    /// Source port of GUE; `None`: by the flow.
    pub source_port: Option<u16>,
}

impl LoadBalancer {
    /// Sets a server's outer header. Used by services that encapsulate, which drop packets of servers that have none.
    pub fn set_tunnel(&mut self, id: ServerId, tunnel: Tunnel) {
        let entry = intf::server_tunnel {
            address: u32::from_ne_bytes(tunnel.address.octets()),
            source_port: tunnel.source_port.unwrap_or(0).to_be(),
            reserved: 0,
        };
        self.maps.tunnels.store(entry_at::<intf::server_tunnel>(id.get()), zerocopy::transmute!(entry));
    }

    /// Sets the source of outer headers, and the longest packet that may leave.
    pub fn set_outer(&mut self, own_address: Ipv4Addr, mtu: u32) {
        // Both are one word: own_address, then mtu.
        let word = u64::from(u32::from_ne_bytes(own_address.octets())) | u64::from(mtu) << 32;
        self.maps.state.store(offset_of!(intf::lb_state, own_address), word);
    }
}
