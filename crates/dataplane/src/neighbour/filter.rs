//! Filters of packet sockets (classic BPF).

use coreward_model::vlan::Vlan;
use libc::sock_filter;

pub const LOAD_HALF: u32 = libc::BPF_LD | libc::BPF_H | libc::BPF_ABS;
pub const LOAD_BYTE: u32 = libc::BPF_LD | libc::BPF_B | libc::BPF_ABS;
pub const EQUALS: u32 = libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K;
pub const RETURN: u32 = libc::BPF_RET | libc::BPF_K;
const AND: u32 = libc::BPF_ALU | libc::BPF_AND | libc::BPF_K;

/// Offset by which a filter loads the VLAN tag that the kernel has removed from the frame (SKF_AD_VLAN_TAG of
/// linux/filter.h; below: SKF_AD_VLAN_TAG_PRESENT).
const VLAN_TAG_OFFSET: u32 = (libc::SKF_AD_OFF as u32).wrapping_add(44);
const TAG_PRESENT_OFFSET: u32 = (libc::SKF_AD_OFF as u32).wrapping_add(48);
const ID_MASK: u32 = 0xfff;

pub const fn instruction(code: u32, jt: u8, jf: u8, k: u32) -> sock_filter {
    sock_filter { code: code as u16, jt, jf, k }
}

/// Socket filter that passes only ARP frames.
pub const ARP_FILTER: [sock_filter; 4] = [
    instruction(LOAD_HALF, 0, 0, 12),
    instruction(EQUALS, 0, 1, super::ETHERTYPE_ARP as u32),
    instruction(RETURN, 0, 0, u32::MAX),
    instruction(RETURN, 0, 0, 0),
];

/// Returns a filter for frames of the VLAN that also pass `filter`. For an untagged VLAN it is `filter` unchanged.
pub fn in_vlan(vlan: Vlan, filter: &[sock_filter]) -> Vec<sock_filter> {
    if !vlan.is_tagged() {
        return filter.to_vec();
    }
    let of_vlan = [
        instruction(LOAD_BYTE, 0, 0, TAG_PRESENT_OFFSET),
        instruction(EQUALS, 1, 0, 1),
        instruction(RETURN, 0, 0, 0),
        instruction(LOAD_HALF, 0, 0, VLAN_TAG_OFFSET),
        instruction(AND, 0, 0, ID_MASK),
        instruction(EQUALS, 1, 0, vlan.get().into()),
        instruction(RETURN, 0, 0, 0),
    ];
    [&of_vlan, filter].concat()
}
