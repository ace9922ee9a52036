//! Filters of packet sockets (classic BPF).

use coreward_model::vlan::Vlan;
use libc::sock_filter;

pub const LOAD_U16_OPCODE: u32 = libc::BPF_LD | libc::BPF_H | libc::BPF_ABS;
pub const LOAD_U8_OPCODE: u32 = libc::BPF_LD | libc::BPF_B | libc::BPF_ABS;
pub const JUMP_IF_EQUAL_OPCODE: u32 = libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K;
pub const RETURN_OPCODE: u32 = libc::BPF_RET | libc::BPF_K;
const AND_OPCODE: u32 = libc::BPF_ALU | libc::BPF_AND | libc::BPF_K;

/// Offset from which a filter loads the VLAN tag that the kernel has removed from the frame (SKF_AD_VLAN_TAG of
/// linux/filter.h). From [`VLAN_TAG_PRESENT_METADATA_OFFSET`], it loads whether there was a tag
/// (SKF_AD_VLAN_TAG_PRESENT).
const VLAN_TAG_METADATA_OFFSET: u32 = (libc::SKF_AD_OFF as u32).wrapping_add(44);
const VLAN_TAG_PRESENT_METADATA_OFFSET: u32 = (libc::SKF_AD_OFF as u32).wrapping_add(48);
const VLAN_ID_MASK: u32 = 0xfff;

pub const fn new_bpf_instruction(code: u32, jt: u8, jf: u8, k: u32) -> sock_filter {
    sock_filter { code: code as u16, jt, jf, k }
}

/// Socket filter that passes only ARP frames.
pub const ARP_SOCKET_FILTER: [sock_filter; 4] = [
    new_bpf_instruction(LOAD_U16_OPCODE, 0, 0, 12),
    new_bpf_instruction(JUMP_IF_EQUAL_OPCODE, 0, 1, super::ETHERTYPE_ARP as u32),
    new_bpf_instruction(RETURN_OPCODE, 0, 0, u32::MAX),
    new_bpf_instruction(RETURN_OPCODE, 0, 0, 0),
];

/// Returns a filter for frames that are in the VLAN and pass `filter`. If the VLAN is untagged, returns `filter`
/// itself.
pub fn restrict_filter_to_vlan(vlan: Vlan, filter: &[sock_filter]) -> Vec<sock_filter> {
    if !vlan.is_tagged() {
        return filter.to_vec();
    }
    let vlan_check = [
        new_bpf_instruction(LOAD_U8_OPCODE, 0, 0, VLAN_TAG_PRESENT_METADATA_OFFSET),
        new_bpf_instruction(JUMP_IF_EQUAL_OPCODE, 1, 0, 1),
        new_bpf_instruction(RETURN_OPCODE, 0, 0, 0),
        new_bpf_instruction(LOAD_U16_OPCODE, 0, 0, VLAN_TAG_METADATA_OFFSET),
        new_bpf_instruction(AND_OPCODE, 0, 0, VLAN_ID_MASK),
        new_bpf_instruction(JUMP_IF_EQUAL_OPCODE, 1, 0, vlan.id_or_zero().into()),
        new_bpf_instruction(RETURN_OPCODE, 0, 0, 0),
    ];
    [&vlan_check, filter].concat()
}
