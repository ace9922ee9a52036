//! 802.1Q tags of frames: `bpf/lb/vlan.h`.

use coreward_intf as intf;

use super::decision::Decision;
use super::ip_packet::{ETHERNET_HEADER_BYTES, u16_at};
use super::{LoadBalancer, Outcome, XdpVerdict};
use crate::ServerId;
use crate::vlan::Vlan;

const ETHERTYPE_VLAN: u16 = 0x8100;
const TAG_BYTES: usize = 4;
/// Offset of the 802.1Q tag in a frame, and of the ethertype in a frame without tag.
const TAG_OFFSET: usize = ETHERNET_HEADER_BYTES - 2;
const PRIORITY_MASK: u16 = 0xf000;
const VLAN_ID_MASK: u16 = 0x0fff;

/// VLANs of a load balancer.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Vlans {
    /// Whether tags are read and written; false only if the program was loaded without VLANs.
    pub is_tagging_enabled: bool,
    /// VLAN in which clients' packets arrive.
    pub vip: Vlan,
}

impl LoadBalancer {
    /// Sets the VLAN in which a server is.
    pub fn set_server_vlan(&mut self, id: ServerId, vlan: Vlan) {
        self.server_vlans.insert(id, vlan);
    }

    /// Sets the VLAN in which all servers of a service are; `None` if they are in several.
    pub fn set_broadcast_vlan(&mut self, service: usize, vlan: Option<Vlan>) {
        self.broadcast_vlans.insert(service, vlan);
    }

    /// Returns whether one frame can reach all servers of the service.
    pub(super) fn has_broadcast_vlan(&self, service: usize) -> bool {
        !self.settings.vlans.is_tagging_enabled || self.broadcast_vlans.get(&service) != Some(&None)
    }

    /// Processes a frame, and turns it into the frame that leaves. `now_ns` is the time of a monotonic clock.
    pub fn receive(&mut self, frame: &mut Vec<u8>, now_ns: u64) -> Outcome {
        if !self.settings.vlans.is_tagging_enabled {
            return self.receive_untagged(frame, now_ns);
        }
        let tag = self.remove_tag(frame);
        let outcome = if tag.unwrap_or(0) & VLAN_ID_MASK == self.settings.vlans.vip.get() {
            self.receive_untagged(frame, now_ns)
        } else {
            let not_ours = || Decision::from_counter(intf::LB_COUNTER_PASSED_NOT_SERVICE).outcome(None);
            self.process_reply(frame).unwrap_or_else(not_ours)
        };
        if outcome.verdict() != XdpVerdict::Drop {
            let own = self
                .egress_vlan(&outcome)
                .map(|vlan| (vlan.get() != 0).then(|| tag.unwrap_or(0) & PRIORITY_MASK | vlan.get()));
            insert_tag(frame, own.unwrap_or(tag));
        }
        outcome
    }

    /// Removes the tag of a frame to this load balancer. Returns the tag's priority and VLAN, if the frame had a tag.
    fn remove_tag(&self, frame: &mut Vec<u8>) -> Option<u16> {
        let is_ours = frame.len() >= ETHERNET_HEADER_BYTES + TAG_BYTES
            && frame[..6] == self.own_mac
            && u16_at(frame, TAG_OFFSET) == ETHERTYPE_VLAN;
        is_ours.then(|| {
            let removed: Vec<u8> = frame.drain(TAG_OFFSET..TAG_OFFSET + TAG_BYTES).collect();
            u16_at(&removed, 2)
        })
    }

    /// Returns the VLAN in which a frame leaves; `None` for the VLAN in which it came.
    fn egress_vlan(&self, outcome: &Outcome) -> Option<Vlan> {
        match outcome.counter {
            intf::LB_COUNTER_BROADCAST | intf::LB_COUNTER_BROADCAST_OWNER_LOST => {
                *self.broadcast_vlans.get(&outcome.service?).unwrap_or(&Some(Vlan::UNTAGGED))
            }
            _ => Some(self.server_vlans.get(&outcome.server?).copied().unwrap_or_default()),
        }
    }
}

fn insert_tag(frame: &mut Vec<u8>, tag: Option<u16>) {
    if let Some(tag) = tag {
        frame.splice(TAG_OFFSET..TAG_OFFSET, [ETHERTYPE_VLAN.to_be_bytes(), tag.to_be_bytes()].concat());
    }
}
