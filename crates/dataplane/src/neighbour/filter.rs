//! Filters of packet sockets (classic BPF).

use coreward_model::vlan::Vlan;
use libc::sock_filter;

pub const LOAD_HALF: u32 = libc::BPF_LD | libc::BPF_H | libc::BPF_ABS;
pub const LOAD_BYTE: u32 = libc::BPF_LD | libc::BPF_B | libc::BPF_ABS;
pub const EQUALS: u32 = libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K;
pub const RETURN: u32 = libc::BPF_RET | libc::BPF_K;
const AND: u32 = libc::BPF_ALU | libc::BPF_AND | libc::BPF_K;

/// Offset of the VLAN tag, which the kernel has removed from the frame: SKF_AD_VLAN_TAG (and SKF_AD_VLAN_TAG_PRESENT
/// below) of linux/filter.h.
const TAG: u32 = (libc::SKF_AD_OFF as u32).wrapping_add(44);
const TAG_PRESENT: u32 = (libc::SKF_AD_OFF as u32).wrapping_add(48);
const ID_MASK: u32 = 0xfff;

pub const fn step(code: u32, jt: u8, jf: u8, k: u32) -> sock_filter {
    sock_filter { code: code as u16, jt, jf, k }
}

/// Filter that passes only ARP.
pub const ARP: [sock_filter; 4] = [
    step(LOAD_HALF, 0, 0, 12),
    step(EQUALS, 0, 1, super::ETHERTYPE_ARP as u32),
    step(RETURN, 0, 0, u32::MAX),
    step(RETURN, 0, 0, 0),
];

/// Returns a filter that passes frames of the VLAN that also pass `filter`. For an untagged VLAN it is `filter` alone.
pub fn in_vlan(vlan: Vlan, filter: &[sock_filter]) -> Vec<sock_filter> {
    if !vlan.is_tagged() {
        return filter.to_vec();
    }
    let of_vlan = [
        step(LOAD_BYTE, 0, 0, TAG_PRESENT),
        step(EQUALS, 1, 0, 1),
        step(RETURN, 0, 0, 0),
        step(LOAD_HALF, 0, 0, TAG),
        step(AND, 0, 0, ID_MASK),
        step(EQUALS, 1, 0, vlan.get().into()),
        step(RETURN, 0, 0, 0),
    ];
    [&of_vlan, filter].concat()
}
