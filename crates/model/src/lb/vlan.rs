//! 802.1Q tags of frames, as in `bpf/lb/vlan.h`.

use coreward_intf as intf;

use super::decision::PacketDecision;
use super::ip_packet::{ETHERNET_HEADER_BYTES, u16_at};
use super::{FrameOutcome, LoadBalancer, XdpVerdict};
use crate::ServerId;
use crate::vlan::Vlan;

const ETHERTYPE_VLAN: u16 = 0x8100;
const VLAN_TAG_BYTES: usize = 4;
/// Offset of the 802.1Q tag in a tagged frame, which is the offset of the ethertype in an untagged frame.
const VLAN_TAG_OFFSET: usize = ETHERNET_HEADER_BYTES - 2;
const VLAN_PRIORITY_MASK: u16 = 0xf000;
const VLAN_ID_MASK: u16 = 0x0fff;

/// VLANs of a load balancer.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct LoadBalancerVlans {
    /// Whether VLAN tags are read and written. It is false only if the program was loaded without VLANs.
    pub is_tagging_enabled: bool,
    /// VLAN in which clients' packets arrive.
    pub vip_vlan: Vlan,
}

impl LoadBalancer {
    /// Sets the VLAN of server `id`.
    pub fn set_server_vlan(&mut self, id: ServerId, vlan: Vlan) {
        self.vlan_by_server.insert(id, vlan);
    }

    /// Sets the VLAN of all servers of a service, or `None` if they are in several VLANs.
    pub fn set_broadcast_vlan(&mut self, service_slot: usize, vlan: Option<Vlan>) {
        self.broadcast_vlan_by_slot.insert(service_slot, vlan);
    }

    /// Returns whether all servers of the service are in one VLAN, so that one broadcast frame reaches them.
    pub(super) fn has_broadcast_vlan(&self, service_slot: usize) -> bool {
        !self.settings.vlans.is_tagging_enabled || self.broadcast_vlan_by_slot.get(&service_slot) != Some(&None)
    }

    /// Processes a frame, and replaces it by the outgoing frame. `now_ns` is the time of a monotonic clock.
    pub fn process_frame(&mut self, frame: &mut Vec<u8>, now_ns: u64) -> FrameOutcome {
        if !self.settings.vlans.is_tagging_enabled {
            return self.process_untagged_frame(frame, now_ns);
        }
        let ingress_tag = self.remove_vlan_tag(frame);
        let outcome = if ingress_tag.unwrap_or(0) & VLAN_ID_MASK == self.settings.vlans.vip_vlan.id_or_zero() {
            self.process_untagged_frame(frame, now_ns)
        } else {
            let outcome_of_passed_frame =
                || PacketDecision::from_counter(intf::LB_COUNTER_PASSED_NOT_SERVICE).frame_outcome(None);
            self.process_server_reply(frame).unwrap_or_else(outcome_of_passed_frame)
        };
        if outcome.verdict() != XdpVerdict::Drop {
            let egress_tag = self.egress_vlan(&outcome).map(|vlan| {
                (vlan.id_or_zero() != 0).then(|| ingress_tag.unwrap_or(0) & VLAN_PRIORITY_MASK | vlan.id_or_zero())
            });
            insert_vlan_tag(frame, egress_tag.unwrap_or(ingress_tag));
        }
        outcome
    }

    /// Removes the VLAN tag of a frame to this load balancer. Returns the tag's priority and VLAN if the frame had a
    /// tag.
    fn remove_vlan_tag(&self, frame: &mut Vec<u8>) -> Option<u16> {
        let is_own_tagged_frame = frame.len() >= ETHERNET_HEADER_BYTES + VLAN_TAG_BYTES
            && frame[..6] == self.own_mac
            && u16_at(frame, VLAN_TAG_OFFSET) == ETHERTYPE_VLAN;
        is_own_tagged_frame.then(|| {
            let removed_tag: Vec<u8> = frame.drain(VLAN_TAG_OFFSET..VLAN_TAG_OFFSET + VLAN_TAG_BYTES).collect();
            u16_at(&removed_tag, 2)
        })
    }

    /// Returns the VLAN of the outgoing frame, or `None` for the VLAN in which the frame arrived.
    fn egress_vlan(&self, outcome: &FrameOutcome) -> Option<Vlan> {
        match outcome.counter {
            intf::LB_COUNTER_BROADCAST | intf::LB_COUNTER_BROADCAST_OWNER_LOST => {
                *self.broadcast_vlan_by_slot.get(&outcome.service_slot?).unwrap_or(&Some(Vlan::UNTAGGED))
            }
            _ => Some(self.vlan_by_server.get(&outcome.server?).copied().unwrap_or_default()),
        }
    }
}

fn insert_vlan_tag(frame: &mut Vec<u8>, tag: Option<u16>) {
    if let Some(tag) = tag {
        frame.splice(VLAN_TAG_OFFSET..VLAN_TAG_OFFSET, [ETHERTYPE_VLAN.to_be_bytes(), tag.to_be_bytes()].concat());
    }
}
