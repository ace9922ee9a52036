//! Filters of packet sockets (classic BPF).

use coreward_model::vlan::Vlan;
use libc::sock_filter;

pub const LOAD_U16: u32 = libc::BPF_LD | libc::BPF_H | libc::BPF_ABS;
pub const LOAD_U8: u32 = libc::BPF_LD | libc::BPF_B | libc::BPF_ABS;
pub const JUMP_IF_EQUAL: u32 = libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K;
pub const RETURN: u32 = libc::BPF_RET | libc::BPF_K;
const AND: u32 = libc::BPF_ALU | libc::BPF_AND | libc::BPF_K;

/// Offset at which a filter loads the VLAN tag that the kernel has removed from the frame (SKF_AD_VLAN_TAG of
/// linux/filter.h). At the next offset, SKF_AD_VLAN_TAG_PRESENT, it loads whether there was a tag.
const VLAN_TAG_METADATA: u32 = (libc::SKF_AD_OFF as u32).wrapping_add(44);
const VLAN_TAG_PRESENT_METADATA: u32 = (libc::SKF_AD_OFF as u32).wrapping_add(48);
const VLAN_ID_MASK: u32 = 0xfff;

pub const fn instruction(code: u32, jt: u8, jf: u8, k: u32) -> sock_filter {
    sock_filter { code: code as u16, jt, jf, k }
}

/// Socket filter that passes only ARP frames.
pub const ARP_FILTER: [sock_filter; 4] = [
    instruction(LOAD_U16, 0, 0, 12),
    instruction(JUMP_IF_EQUAL, 0, 1, super::ETHERTYPE_ARP as u32),
    instruction(RETURN, 0, 0, u32::MAX),
    instruction(RETURN, 0, 0, 0),
];

/// Returns a filter for frames that are in the VLAN and also pass `filter`. For an untagged VLAN it is `filter`.
pub fn restrict_to_vlan(vlan: Vlan, filter: &[sock_filter]) -> Vec<sock_filter> {
    if !vlan.is_tagged() {
        return filter.to_vec();
    }
    let vlan_check = [
        instruction(LOAD_U8, 0, 0, VLAN_TAG_PRESENT_METADATA),
        instruction(JUMP_IF_EQUAL, 1, 0, 1),
        instruction(RETURN, 0, 0, 0),
        instruction(LOAD_U16, 0, 0, VLAN_TAG_METADATA),
        instruction(AND, 0, 0, VLAN_ID_MASK),
        instruction(JUMP_IF_EQUAL, 1, 0, vlan.get().into()),
        instruction(RETURN, 0, 0, 0),
    ];
    [&vlan_check, filter].concat()
}
