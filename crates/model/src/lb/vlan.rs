//! 802.1Q tags of frames, as in `bpf/lb/vlan.h`.

use coreward_intf as intf;

use super::decision::Decision;
use super::ip_packet::{ETHERNET_HEADER_BYTES, u16_at};
use super::{LoadBalancer, Outcome, XdpVerdict};
use crate::ServerId;
use crate::vlan::Vlan;

const ETHERTYPE_VLAN: u16 = 0x8100;
const VLAN_TAG_BYTES: usize = 4;
/// Offset of the 802.1Q tag in a frame, and of the ethertype in a frame without tag.
const VLAN_TAG_OFFSET: usize = ETHERNET_HEADER_BYTES - 2;
const VLAN_PRIORITY_MASK: u16 = 0xf000;
const VLAN_ID_MASK: u16 = 0x0fff;

/// VLANs of a load balancer.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Vlans {
    /// Whether tags are read and written, which is false only if the program was loaded without VLANs.
    pub is_tagging_enabled: bool,
    /// VLAN in which clients' packets arrive.
    pub vip_vlan: Vlan,
}

impl LoadBalancer {
    /// Sets the VLAN in which a server is.
    pub fn set_server_vlan(&mut self, id: ServerId, vlan: Vlan) {
        self.vlan_by_server.insert(id, vlan);
    }

    /// Sets the VLAN in which all servers of a service are, or `None` if they are in several.
    pub fn set_broadcast_vlan(&mut self, service: usize, vlan: Option<Vlan>) {
        self.broadcast_vlan_by_slot.insert(service, vlan);
    }

    /// Returns whether one frame can reach all servers of the service.
    pub(super) fn has_broadcast_vlan(&self, service: usize) -> bool {
        !self.settings.vlans.is_tagging_enabled || self.broadcast_vlan_by_slot.get(&service) != Some(&None)
    }

    /// Processes a frame, and turns it into the frame that leaves. `now_ns` is the time of a monotonic clock.
    pub fn process_frame(&mut self, frame: &mut Vec<u8>, now_ns: u64) -> Outcome {
        if !self.settings.vlans.is_tagging_enabled {
            return self.receive_untagged(frame, now_ns);
        }
        let tag = self.remove_tag(frame);
        let outcome = if tag.unwrap_or(0) & VLAN_ID_MASK == self.settings.vlans.vip_vlan.get() {
            self.receive_untagged(frame, now_ns)
        } else {
            let pass_outcome = || Decision::from_counter(intf::LB_COUNTER_PASSED_NOT_SERVICE).outcome(None);
            self.process_reply(frame).unwrap_or_else(pass_outcome)
        };
        if outcome.verdict() != XdpVerdict::Drop {
            let egress_tag = self
                .egress_vlan(&outcome)
                .map(|vlan| (vlan.get() != 0).then(|| tag.unwrap_or(0) & VLAN_PRIORITY_MASK | vlan.get()));
            insert_vlan_tag(frame, egress_tag.unwrap_or(tag));
        }
        outcome
    }

    /// Removes the tag of a frame to this load balancer. Returns the tag's priority and VLAN, if the frame had a tag.
    fn remove_tag(&self, frame: &mut Vec<u8>) -> Option<u16> {
        let is_own_tagged_frame = frame.len() >= ETHERNET_HEADER_BYTES + VLAN_TAG_BYTES
            && frame[..6] == self.own_mac
            && u16_at(frame, VLAN_TAG_OFFSET) == ETHERTYPE_VLAN;
        is_own_tagged_frame.then(|| {
            let removed_tag: Vec<u8> = frame.drain(VLAN_TAG_OFFSET..VLAN_TAG_OFFSET + VLAN_TAG_BYTES).collect();
            u16_at(&removed_tag, 2)
        })
    }

    /// Returns the VLAN in which a frame leaves, or `None` for the VLAN in which it came.
    fn egress_vlan(&self, outcome: &Outcome) -> Option<Vlan> {
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
