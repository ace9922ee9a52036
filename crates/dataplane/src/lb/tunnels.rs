//! Outer headers of encapsulated packets (`bpf/lb/outer_header.h`).

use std::mem::offset_of;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use coreward_intf as intf;
use coreward_model::ServerId;

use super::{LoadBalancer, server_entry_offset};

/// Fields of the outer header with which packets to a server are encapsulated.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ServerTunnel {
    /// Destination address of the outer header. Its address family determines that of the outer header.
    pub destination_address: IpAddr,
    /// UDP source port of a GUE header. With `None`, the port is a hash of the client's flow.
    pub source_port: Option<u16>,
}

/// Source addresses of outer headers. An address is unspecified if the device has no address of that family.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct OuterSourceAddresses {
    /// Source address of outer IPv4 headers.
    pub ipv4: Ipv4Addr,
    /// Source address of outer IPv6 headers.
    pub ipv6: Ipv6Addr,
}

impl LoadBalancer {
    /// Sets the outer header of packets to a server, for services that encapsulate. Until it is set, these services
    /// drop packets to the server. A change of an IPv6 address waits for an RCU grace period, and fails when the kernel
    /// offers none.
    pub fn set_server_tunnel(&mut self, id: ServerId, tunnel: ServerTunnel) -> anyhow::Result<()> {
        let entry_offset =
            offset_of!(intf::server_tunnels, entry) + server_entry_offset::<intf::server_tunnel>(id.get());
        let (address, family) = match tunnel.destination_address {
            IpAddr::V4(address) => (u32::from_ne_bytes(address.octets()), intf::ADDRESS_FAMILY_IPV4),
            IpAddr::V6(address) => {
                self.write_ipv6_destination(id, entry_offset, address)?;
                (1, intf::ADDRESS_FAMILY_IPV6)
            }
        };
        let source_port = tunnel.source_port.unwrap_or(0).to_be();
        let tunnel_entry = intf::server_tunnel { address, source_port, family: family as u16 };
        self.maps.server_tunnels.store(entry_offset, zerocopy::transmute!(tunnel_entry));
        Ok(())
    }

    /// Writes the IPv6 destination of the tunnel entry at offset `entry_offset`. No program may read the address during
    /// the change, because it has two words.
    fn write_ipv6_destination(&mut self, id: ServerId, entry_offset: usize, address: Ipv6Addr) -> anyhow::Result<()> {
        let address_offset =
            offset_of!(intf::server_tunnels, address_ipv6) + super::server_entry_offset::<[u64; 2]>(id.get());
        let address_words = ipv6_address_words(address);
        if *self.maps.server_tunnels.read::<[u64; 2]>(address_offset) == address_words {
            return Ok(());
        }
        if self.maps.server_tunnels.load(entry_offset) != 0 {
            self.maps.server_tunnels.store(entry_offset, 0);
            self.grace_periods.wait(self.grace_periods.request_ticket())?;
        }
        self.maps.server_tunnels.write(address_offset, &address_words);
        Ok(())
    }

    /// Sets the source addresses of all outer headers and the device's MTU in bytes.
    pub fn set_outer_sources_and_mtu(&mut self, source_addresses: OuterSourceAddresses, mtu_bytes: u32) {
        // One word holds both fields, own_address (the IPv4 address) and then mtu.
        let address_and_mtu_word =
            u64::from(u32::from_ne_bytes(source_addresses.ipv4.octets())) | u64::from(mtu_bytes) << 32;
        self.maps.state.store(offset_of!(intf::lb_state, own_address), address_and_mtu_word);
        // The two words change one after the other. Servers drop packets whose source mixes both addresses.
        self.maps.state.write(offset_of!(intf::lb_state, own_address_ipv6), &ipv6_address_words(source_addresses.ipv6));
    }
}

fn ipv6_address_words(address: Ipv6Addr) -> [u64; 2] {
    zerocopy::transmute!(address.octets())
}
