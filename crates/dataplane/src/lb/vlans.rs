//! VLANs of the VIPs and of servers: `bpf/lb/vlan.h`.

use std::collections::BTreeSet;
use std::mem::offset_of;

use coreward_intf as intf;
use coreward_model::ServerId;
use coreward_model::vlan::Vlan;

use super::program::Maps;
use super::variant::Variant;
use super::{LoadBalancer, ServiceIndex, state_of};

/// VLANs as far as the program depends on them.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct VlansInUse {
    /// VLAN of the VIPs.
    pub vip: Vlan,
    /// Whether a server is in a VLAN.
    pub servers: bool,
}

impl VlansInUse {
    pub fn is_used(self) -> bool {
        self.servers || self.vip.is_tagged()
    }
}

const SERVER_VLANS: usize = offset_of!(intf::lb_state, server_vlans);
/// VLANs in one word of the array.
const VLANS_PER_WORD: usize = size_of::<u64>() / size_of::<u16>();

/// Returns whether a server is in a VLAN.
pub(super) fn has_server_in_vlan(maps: &Maps) -> bool {
    let words = intf::SERVER_ID_COUNT as usize / VLANS_PER_WORD;
    (0..words).any(|word| maps.state.load(SERVER_VLANS + word * size_of::<u64>()) != 0)
}

impl LoadBalancer {
    /// Sets the VLANs that servers are in, before the first [`set_server_vlan`](Self::set_server_vlan) with one. Fails
    /// when the kernel refuses the program with tags.
    pub fn use_server_vlans(&mut self, vlans: BTreeSet<Vlan>) -> anyhow::Result<()> {
        let servers = vlans.iter().any(|vlan| vlan.is_tagged());
        self.change_variant(Variant { vlans: VlansInUse { servers, ..self.variant.vlans }, ..self.variant })?;
        self.server_vlans = vlans;
        Ok(())
    }

    /// Whether the program reads and writes tags.
    pub fn uses_vlans(&self) -> bool {
        self.variant.vlans.is_used()
    }

    /// Sets the VLAN of a server, which is the same for all services.
    pub fn set_server_vlan(&mut self, id: ServerId, vlan: Vlan) {
        let (word, position) = (usize::from(id.get()) / VLANS_PER_WORD, usize::from(id.get()) % VLANS_PER_WORD);
        let (at, shift) = (SERVER_VLANS + word * size_of::<u64>(), position * u16::BITS as usize);
        // Only this process writes.
        let before = self.maps.state.load(at);
        let new = before & !(u64::from(u16::MAX) << shift) | u64::from(vlan.get()) << shift;
        if new != before {
            self.maps.state.store(at, new);
        }
    }

    /// Sets the VLAN in which all servers of a service are; `None`: they are in several, so that no broadcast reaches
    /// all.
    pub fn set_broadcast_vlan(&mut self, service: ServiceIndex, vlan: Option<Vlan>) {
        let word = vlan.map_or(intf::NO_BROADCAST_VLAN.into(), |vlan| vlan.get().into());
        self.maps.state.store(state_of(service) + offset_of!(intf::service_state, broadcast_vlan), word);
    }
}
