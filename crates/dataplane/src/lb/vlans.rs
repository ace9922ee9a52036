//! VLANs of the VIPs and of the servers (`bpf/lb/vlan.h`).

use std::collections::BTreeSet;
use std::mem::offset_of;

use coreward_intf as intf;
use coreward_model::ServerId;
use coreward_model::vlan::Vlan;

use super::program::LoadBalancerMaps;
use super::program_variant::{ProgramVariant, ProgramVlanSettings};
use super::{LoadBalancer, ServiceIndex, service_state_offset};

const SERVER_VLANS_OFFSET: usize = offset_of!(intf::lb_state, server_vlans);
/// Number of VLAN ids in each 64-bit word of the array of servers' VLANs.
const VLAN_IDS_PER_WORD: usize = size_of::<u64>() / size_of::<u16>();

/// Returns whether any server in the maps is in a tagged VLAN.
pub(super) fn has_server_in_vlan(maps: &LoadBalancerMaps) -> bool {
    let word_count = intf::SERVER_ID_COUNT as usize / VLAN_IDS_PER_WORD;
    (0..word_count).any(|word_index| maps.state.load(SERVER_VLANS_OFFSET + word_index * size_of::<u64>()) != 0)
}

impl LoadBalancer {
    /// Sets the VLANs in which servers may be. It must be called before [`set_server_vlan`](Self::set_server_vlan)
    /// assigns one of them to a server. Fails when the kernel rejects the program that supports VLAN tags.
    pub fn enable_server_vlans(&mut self, vlans: BTreeSet<Vlan>) -> anyhow::Result<()> {
        let has_server_vlan = vlans.iter().any(|vlan| vlan.is_tagged());
        self.load_variant(ProgramVariant {
            vlan_settings: ProgramVlanSettings { has_server_vlan, ..self.variant.vlan_settings },
            ..self.variant
        })?;
        self.server_vlans = vlans;
        Ok(())
    }

    /// Returns whether the program reads and writes VLAN tags.
    pub fn uses_vlans(&self) -> bool {
        self.variant.vlan_settings.uses_tags()
    }

    /// Sets a server's VLAN for all services that have the server.
    pub fn set_server_vlan(&mut self, id: ServerId, vlan: Vlan) {
        let (word_index, position_in_word) =
            (usize::from(id.get()) / VLAN_IDS_PER_WORD, usize::from(id.get()) % VLAN_IDS_PER_WORD);
        let (word_offset, shift) =
            (SERVER_VLANS_OFFSET + word_index * size_of::<u64>(), position_in_word * u16::BITS as usize);
        // Only this process writes VLANs, so load and store need not be one atomic operation.
        let present_word = self.maps.state.load(word_offset);
        let changed_word = present_word & !(u64::from(u16::MAX) << shift) | u64::from(vlan.id_or_zero()) << shift;
        if changed_word != present_word {
            self.maps.state.store(word_offset, changed_word);
        }
    }

    /// Sets the VLAN to which a service's packets are broadcast, which must contain all its servers. `None` means that
    /// its servers are in several VLANs, so that no broadcast can reach all of them.
    pub fn set_broadcast_vlan(&mut self, service: ServiceIndex, vlan: Option<Vlan>) {
        let vlan_word = vlan.map_or(intf::NO_BROADCAST_VLAN.into(), |vlan| vlan.id_or_zero().into());
        self.maps
            .state
            .store(service_state_offset(service) + offset_of!(intf::service_state, broadcast_vlan), vlan_word);
    }
}
