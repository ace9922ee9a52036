//! Outer headers of services that encapsulate: `bpf/lb/outer_header.h`.

use std::mem::offset_of;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use coreward_intf as intf;
use coreward_model::ServerId;

use super::{LoadBalancer, entry_offset};

/// Outer header with which packets to a server are encapsulated.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Tunnel {
    /// Destination address of the outer header, which also determines its address family.
    pub address: IpAddr,
    /// UDP source port of a GUE header; `None`: a hash of the client's flow.
    pub source_port: Option<u16>,
}

/// Source addresses of outer headers. An address is unspecified if the device has none of that family.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct OuterSources {
    /// Source address of outer IPv4 headers.
    pub ipv4: Ipv4Addr,
    /// Source address of outer IPv6 headers.
    pub ipv6: Ipv6Addr,
}

impl LoadBalancer {
    /// Sets a server's outer header for services that encapsulate. Such services drop packets to a server without an
    /// outer header. A change of an IPv6 address waits for a grace period; fails when the kernel offers none.
    pub fn set_tunnel(&mut self, id: ServerId, tunnel: Tunnel) -> anyhow::Result<()> {
        let at = offset_of!(intf::server_tunnels, entry) + entry_offset::<intf::server_tunnel>(id.get());
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

    /// Writes the IPv6 destination of the entry at offset `entry_at`. As the address has two words, no program may read
    /// it during the change.
    fn set_tunnel_address_ipv6(&mut self, id: ServerId, entry_at: usize, address: Ipv6Addr) -> anyhow::Result<()> {
        let at = offset_of!(intf::server_tunnels, address_ipv6) + super::entry_offset::<[u64; 2]>(id.get());
        let words = words_of(address);
        if *self.maps.tunnels.read::<[u64; 2]>(at) == words {
            return Ok(());
        }
        if self.maps.tunnels.load(entry_at) != 0 {
            self.maps.tunnels.store(entry_at, 0);
            self.grace_periods.wait(self.grace_periods.request())?;
        }
        self.maps.tunnels.write(at, &words);
        Ok(())
    }

    /// Sets the source addresses of all outer headers, and the MTU of the device in bytes.
    pub fn set_outer_header(&mut self, sources: OuterSources, mtu: u32) {
        // The IPv4 address and the MTU share one word: own_address, then mtu.
        let word = u64::from(u32::from_ne_bytes(sources.ipv4.octets())) | u64::from(mtu) << 32;
        self.maps.state.store(offset_of!(intf::lb_state, own_address), word);
        // The two words change one after the other: servers drop packets whose source mixes both addresses.
        self.maps.state.write(offset_of!(intf::lb_state, own_address_ipv6), &words_of(sources.ipv6));
    }
}

fn words_of(address: Ipv6Addr) -> [u64; 2] {
    zerocopy::transmute!(address.octets())
}
