//! Outer headers of services that encapsulate: `bpf/lb/outer_header.h`.

use std::mem::offset_of;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use coreward_intf as intf;
use coreward_model::ServerId;

use super::{LoadBalancer, entry_at};

/// Outer header of a server's packets.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Tunnel {
    /// Destination of the outer header, which decides its family.
    pub address: IpAddr,
    /// Source port of GUE; `None`: by the flow.
    pub source_port: Option<u16>,
}

/// Sources of outer headers; an unspecified one: the device has no address of that family.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct OuterSources {
    /// Source of IPv4 headers.
    pub ipv4: Ipv4Addr,
    /// Source of IPv6 headers.
    pub ipv6: Ipv6Addr,
}

impl LoadBalancer {
    /// Sets a server's outer header. Used by services that encapsulate, which drop packets of servers that have none.
    /// Fails when the kernel offers no grace period, which another IPv6 address waits for.
    pub fn set_tunnel(&mut self, id: ServerId, tunnel: Tunnel) -> anyhow::Result<()> {
        let at = offset_of!(intf::server_tunnels, entry) + entry_at::<intf::server_tunnel>(id.get());
        let (address, family) = match tunnel.address {
            IpAddr::V4(address) => (u32::from_ne_bytes(address.octets()), intf::ADDRESS_FAMILY_IPV4),
            IpAddr::V6(address) => {
                self.set_tunnel_address_ipv6(id, at, address)?;
                (1, intf::ADDRESS_FAMILY_IPV6)
            }
        };
        let source_port = tunnel.source_port.unwrap_or(0).to_be();
        let entry = intf::server_tunnel { address, source_port, family: family as u16 };
        self.maps.tunnels.store(at, zerocopy::transmute!(entry));
        Ok(())
    }

    /// Writes an IPv6 destination. It has two words, so no program may read it meanwhile. `entry_at`: offset of the
    /// server's entry.
    fn set_tunnel_address_ipv6(&mut self, id: ServerId, entry_at: usize, address: Ipv6Addr) -> anyhow::Result<()> {
        let at = offset_of!(intf::server_tunnels, address_ipv6) + super::entry_at::<[u64; 2]>(id.get());
        let words = words_of(address);
        if *self.maps.tunnels.read::<[u64; 2]>(at) == words {
            return Ok(());
        }
        if self.maps.tunnels.load(entry_at) != 0 {
            self.maps.tunnels.store(entry_at, 0);
            self.grace_periods.wait(self.grace_periods.now())?;
        }
        self.maps.tunnels.write(at, &words);
        Ok(())
    }

    /// Sets the sources of outer headers, and the longest packet that may leave.
    pub fn set_outer(&mut self, sources: OuterSources, mtu: u32) {
        // Both are one word: own_address, then mtu.
        let word = u64::from(u32::from_ne_bytes(sources.ipv4.octets())) | u64::from(mtu) << 32;
        self.maps.state.store(offset_of!(intf::lb_state, own_address), word);
        // Servers drop the packets that get half of another address.
        self.maps.state.write(offset_of!(intf::lb_state, own_address_ipv6), &words_of(sources.ipv6));
    }
}

fn words_of(address: Ipv6Addr) -> [u64; 2] {
    zerocopy::transmute!(address.octets())
}
