//! Queries about a network device, such as its XDP programs and its MTU.

use std::io;
use std::os::fd::AsRawFd as _;

use libbpf_rs::libbpf_sys;
use nix::sys::socket::{AddressFamily, SockFlag, SockType, socket};

use crate::ethtool::ifreq_for_interface;

/// XDP programs attached to a network device, and the driver's support for XDP.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct DeviceXdpState {
    /// Id of the attached program that runs in the driver (native XDP).
    pub native_program_id: Option<u32>,
    /// Id of the attached program that runs after the driver (generic XDP).
    pub generic_program_id: Option<u32>,
    /// Whether the driver supports XDP_PASS, XDP_DROP and XDP_TX, or `None` before Linux 6.3, which first reports it.
    pub supports_native: Option<bool>,
}

/// Feature flag of drivers that support XDP_ABORTED, XDP_DROP, XDP_PASS and XDP_TX (include/uapi/linux/netdev.h).
const NETDEV_XDP_ACT_BASIC: u64 = 1;

/// Returns the XDP state of a device. Fails when no device has this index.
pub fn query_xdp_state(interface_index: u32) -> io::Result<DeviceXdpState> {
    let mut query_options = libbpf_sys::bpf_xdp_query_opts {
        sz: size_of::<libbpf_sys::bpf_xdp_query_opts>() as libbpf_sys::size_t,
        ..Default::default()
    };
    // SAFETY: `query_options` lives through the call and contains its own length.
    let result = unsafe { libbpf_sys::bpf_xdp_query(interface_index as i32, 0, &raw mut query_options) };
    if result < 0 {
        return Err(io::Error::from_raw_os_error(-result));
    }
    let nonzero_id = |id: u32| (id != 0).then_some(id);
    // Flags of 0 mean either a driver without XDP, or a kernel without this query, for which libbpf leaves 0.
    let reports_features = query_options.feature_flags != 0 || kernel_reports_xdp_features();
    Ok(DeviceXdpState {
        native_program_id: nonzero_id(query_options.drv_prog_id),
        generic_program_id: nonzero_id(query_options.skb_prog_id),
        supports_native: reports_features.then_some(query_options.feature_flags & NETDEV_XDP_ACT_BASIC != 0),
    })
}

/// Returns whether the kernel reports which drivers support XDP (since version 6.3, in the netlink family `netdev`).
/// The kernel's version decides, because no device can be probed: loopback has no XDP driver, and veth may be absent.
fn kernel_reports_xdp_features() -> bool {
    nix::sys::utsname::uname().is_ok_and(|utsname| {
        let kernel_release = utsname.release().to_string_lossy();
        let mut version_numbers = kernel_release.split(['.', '-']).map_while(|component| component.parse::<u32>().ok());
        (version_numbers.next().unwrap_or(0), version_numbers.next().unwrap_or(0)) >= (6, 3)
    })
}

/// Returns the MTU of a network interface in bytes. Fails when the interface does not exist.
pub fn interface_mtu_bytes(interface: &str) -> io::Result<u32> {
    let socket = socket(AddressFamily::Inet, SockType::Datagram, SockFlag::SOCK_CLOEXEC, None)?;
    let mut mtu_request = ifreq_for_interface(interface)?;
    // SAFETY: SIOCGIFMTU writes into the struct alone, which lives through the call.
    if unsafe { libc::ioctl(socket.as_raw_fd(), libc::SIOCGIFMTU, &raw mut mtu_request) } < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the call has succeeded, so this is the member of the union that holds a value.
    let mtu = unsafe { mtu_request.ifr_ifru.ifru_mtu };
    u32::try_from(mtu).map_err(io::Error::other)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn loopback_reports_no_xdp_program_and_a_large_mtu() {
        let loopback_index = nix::net::if_::if_nametoindex("lo").unwrap();
        let loopback_xdp_state = query_xdp_state(loopback_index).unwrap();
        assert_eq!((loopback_xdp_state.native_program_id, loopback_xdp_state.generic_program_id), (None, None));
        assert_ne!(loopback_xdp_state.supports_native, Some(true));
        assert!(interface_mtu_bytes("lo").unwrap() >= 1500);
        assert!(
            interface_mtu_bytes("nonexistent0").is_err() && interface_mtu_bytes("a-name-that-is-too-long").is_err()
        );
    }
}
