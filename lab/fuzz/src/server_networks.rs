//! Tunnel endpoints and VLANs of emulated servers, which are derived from the servers' ids.

use std::net::{Ipv4Addr, Ipv6Addr};

use coreward_model::ServerId;
use coreward_model::lb::TunnelEndpoint;
use coreward_model::vlan::Vlan;
/// Returns the tunnel endpoint of a server, which is derived from the server's id.
pub fn server_tunnel_endpoint(id: ServerId) -> TunnelEndpoint {
    let [id_high_byte, id_low_byte] = id.get().to_be_bytes();
    let address = if id.get().is_multiple_of(2) {
        Ipv4Addr::new(10, 9, id_high_byte, id_low_byte).into()
    } else {
        Ipv6Addr::new(0x2001, 0xdb8, 9, 0, 0, 0, 0, id.get()).into()
    };
    TunnelEndpoint { address, source_port: id.get().is_multiple_of(3).then_some(40_000) }
}

/// Ids of the VLANs to which servers belong, where 0 means untagged.
pub const SERVER_VLAN_IDS: [u16; 3] = [0, 20, 4094];

pub fn vlan_from_id(id: u16) -> Vlan {
    Vlan::from_id_or_untagged(id.into()).expect("in range")
}

/// Returns the VLAN of a server, which is derived from the server's id.
pub fn server_vlan(id: ServerId) -> Vlan {
    vlan_from_id(SERVER_VLAN_IDS[usize::from(id.get()) % SERVER_VLAN_IDS.len()])
}

/// Returns the VLAN of a service's broadcasts, which is derived from the service's slot. Every fourth service has none.
pub fn broadcast_vlan(service_slot: usize) -> Option<Vlan> {
    SERVER_VLAN_IDS.get(service_slot % 4).map(|id| vlan_from_id(*id))
}
