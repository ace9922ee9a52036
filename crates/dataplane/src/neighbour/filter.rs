//! Filters of packet sockets (classic BPF).

use coreward_model::vlan::Vlan;
use libc::sock_filter;

pub const LOAD_U16: u32 = libc::BPF_LD | libc::BPF_H | libc::BPF_ABS;
pub const LOAD_U8: u32 = libc::BPF_LD | libc::BPF_B | libc::BPF_ABS;
pub const JUMP_IF_EQUAL: u32 = libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K;
pub const RETURN: u32 = libc::BPF_RET | libc::BPF_K;
const AND: u32 = libc::BPF_ALU | libc::BPF_AND | libc::BPF_K;

/// Offset from which a filter loads the VLAN tag that the kernel has removed from the frame (SKF_AD_VLAN_TAG of
/// linux/filter.h). From [`VLAN_TAG_PRESENT_METADATA`], it loads whether there was a tag (SKF_AD_VLAN_TAG_PRESENT).
const VLAN_TAG_METADATA: u32 = (libc::SKF_AD_OFF as u32).wrapping_add(44);
const VLAN_TAG_PRESENT_METADATA: u32 = (libc::SKF_AD_OFF as u32).wrapping_add(48);
const VLAN_ID_MASK: u32 = 0xfff;

pub const fn bpf_instruction(code: u32, jt: u8, jf: u8, k: u32) -> sock_filter {
    sock_filter { code: code as u16, jt, jf, k }
}

/// Socket filter that passes only ARP frames.
pub const ARP_FILTER: [sock_filter; 4] = [
    bpf_instruction(LOAD_U16, 0, 0, 12),
    bpf_instruction(JUMP_IF_EQUAL, 0, 1, super::ETHERTYPE_ARP as u32),
    bpf_instruction(RETURN, 0, 0, u32::MAX),
    bpf_instruction(RETURN, 0, 0, 0),
];

/// Returns a filter for frames that are in the VLAN and pass `filter`. If the VLAN is untagged, returns `filter`
/// itself.
pub fn restrict_to_vlan(vlan: Vlan, filter: &[sock_filter]) -> Vec<sock_filter> {
    if !vlan.is_tagged() {
        return filter.to_vec();
    }
    let vlan_check = [
        bpf_instruction(LOAD_U8, 0, 0, VLAN_TAG_PRESENT_METADATA),
        bpf_instruction(JUMP_IF_EQUAL, 1, 0, 1),
        bpf_instruction(RETURN, 0, 0, 0),
        bpf_instruction(LOAD_U16, 0, 0, VLAN_TAG_METADATA),
        bpf_instruction(AND, 0, 0, VLAN_ID_MASK),
        bpf_instruction(JUMP_IF_EQUAL, 1, 0, vlan.get().into()),
        bpf_instruction(RETURN, 0, 0, 0),
    ];
    [&vlan_check, filter].concat()
}
