//! VLANs of the VIPs and of servers: `bpf/lb/vlan.h`.

use std::collections::BTreeSet;
use std::mem::offset_of;

use coreward_intf as intf;
use coreward_model::ServerId;
use coreward_model::vlan::Vlan;

use super::program::Maps;
use super::variant::{Variant, VlansInUse};
use super::{LoadBalancer, ServiceIndex, service_state_offset};

const SERVER_VLANS_OFFSET: usize = offset_of!(intf::lb_state, server_vlans);
/// Number of VLAN ids in one word of the array.
const VLANS_PER_WORD: usize = size_of::<u64>() / size_of::<u16>();

/// Returns whether any server is in a VLAN.
pub(super) fn has_server_in_vlan(maps: &Maps) -> bool {
    let words = intf::SERVER_ID_COUNT as usize / VLANS_PER_WORD;
    (0..words).any(|word| maps.state.load(SERVER_VLANS_OFFSET + word * size_of::<u64>()) != 0)
}

impl LoadBalancer {
    /// Sets the set of all servers' VLANs. To be called before [`set_server_vlan`](Self::set_server_vlan) sets one of
    /// these VLANs. Fails when the kernel rejects the program with support for tags.
    pub fn use_server_vlans(&mut self, vlans: BTreeSet<Vlan>) -> anyhow::Result<()> {
        let has_server_vlan = vlans.iter().any(|vlan| vlan.is_tagged());
        self.change_variant(Variant { vlans: VlansInUse { has_server_vlan, ..self.variant.vlans }, ..self.variant })?;
        self.server_vlans = vlans;
        Ok(())
    }

    /// Whether the program reads and writes VLAN tags.
    pub fn uses_vlans(&self) -> bool {
        self.variant.vlans.is_used()
    }

    /// Sets the VLAN of a server, which is the same for all services.
    pub fn set_server_vlan(&mut self, id: ServerId, vlan: Vlan) {
        let (word, position) = (usize::from(id.get()) / VLANS_PER_WORD, usize::from(id.get()) % VLANS_PER_WORD);
        let (at, shift) = (SERVER_VLANS_OFFSET + word * size_of::<u64>(), position * u16::BITS as usize);
        // Only this process writes VLANs, so load and store need not be one atomic operation.
        let before = self.maps.state.load(at);
        let new = before & !(u64::from(u16::MAX) << shift) | u64::from(vlan.get()) << shift;
        if new != before {
            self.maps.state.store(at, new);
        }
    }

    /// Sets the VLAN in which all servers of a service are; `None`: the servers are in several VLANs, so that no
    /// broadcast reaches all of them.
    pub fn set_broadcast_vlan(&mut self, service: ServiceIndex, vlan: Option<Vlan>) {
        let word = vlan.map_or(intf::NO_BROADCAST_VLAN.into(), |vlan| vlan.get().into());
        self.maps.state.store(service_state_offset(service) + offset_of!(intf::service_state, broadcast_vlan), word);
    }
}
