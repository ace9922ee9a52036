//! VLAN devices of the calling thread's network namespace, and the offload that hides tags from XDP.

use std::collections::{BTreeMap, BTreeSet};
use std::ffi::{CStr, c_char, c_int, c_short};
use std::io;
use std::os::fd::AsRawFd as _;

use coreward_model::vlan::Vlan;
use nix::net::if_::if_nameindex;
use nix::sys::socket::{AddressFamily, SockFlag, SockType, socket};

use crate::ethtool::{self, ETH_FLAG_RXVLAN};
use crate::lb::mac_of;

/// Number of the ioctl for VLAN devices (linux/sockios.h).
const SIOCGIFVLAN: libc::c_ulong = 0x8982;
/// Commands of SIOCGIFVLAN, of `enum vlan_ioctl_cmds` in linux/if_vlan.h.
const GET_REAL_DEVICE: c_int = 8;
const GET_ID: c_int = 9;
const NAME_BYTES: usize = 24;

/// Argument of SIOCGIFVLAN: struct vlan_ioctl_args of linux/if_vlan.h.
#[repr(C)]
struct VlanIoctlRequest {
    command: c_int,
    device: [c_char; NAME_BYTES],
    /// Answer of the kernel: the name of the underlying device, or the VLAN id in the first bytes.
    answer: [u8; NAME_BYTES],
    priority: c_short,
}

/// Queries a VLAN device and returns the kernel's answer. Fails when `device` is not a VLAN device.
fn query(command: c_int, device: &str) -> io::Result<[u8; NAME_BYTES]> {
    let mut request = VlanIoctlRequest { command, device: [0; NAME_BYTES], answer: [0; NAME_BYTES], priority: 0 };
    if device.len() >= NAME_BYTES {
        return Err(io::Error::from_raw_os_error(libc::ENODEV));
    }
    for (to, from) in request.device.iter_mut().zip(device.bytes()) {
        *to = from as c_char;
    }
    let socket = socket(AddressFamily::Inet, SockType::Datagram, SockFlag::SOCK_CLOEXEC, None)?;
    // SAFETY: the kernel reads and writes one struct vlan_ioctl_args, which lives through the call.
    let result = unsafe { libc::ioctl(socket.as_raw_fd(), SIOCGIFVLAN, &raw mut request) };
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(request.answer) }
}

/// Returns the name of the device below a VLAN device, and the VLAN; `None`: `device` is not a VLAN device.
pub fn underlying_device(device: &str) -> Option<(String, Vlan)> {
    let name = query(GET_REAL_DEVICE, device).ok()?;
    let name = CStr::from_bytes_until_nul(&name).ok()?.to_str().ok()?.to_owned();
    let id = query(GET_ID, device).ok()?;
    let id = c_int::from_ne_bytes(id[..size_of::<c_int>()].try_into().expect("an int's bytes"));
    Some((name, Vlan::new(u64::try_from(id).ok()?).ok()?))
}

/// Returns the device whose receive queues and RSS apply: the underlying device of a VLAN device, or `device`.
pub fn nic(device: &str) -> String {
    underlying_device(device).map_or_else(|| device.to_owned(), |(nic, _)| nic)
}

/// Returns the name of the device for a VLAN at `interface`: `interface` itself for untagged frames; `None`: there is
/// no such device.
pub fn name(interface: &str, vlan: Vlan) -> Option<String> {
    names(interface, [vlan]).remove(&vlan)
}

/// Returns the name of the device for each of these VLANs at `interface`; VLANs without a device are left out. Queries
/// all devices of the network namespace if `vlans` has a tagged VLAN.
pub fn names(interface: &str, vlans: impl IntoIterator<Item = Vlan>) -> BTreeMap<Vlan, String> {
    let mut vlans: BTreeSet<Vlan> = vlans.into_iter().collect();
    let mut names = BTreeMap::new();
    if vlans.remove(&Vlan::UNTAGGED) {
        names.insert(Vlan::UNTAGGED, interface.to_owned());
    }
    if vlans.is_empty() {
        return names;
    }
    let Ok(devices) = if_nameindex() else { return names };
    for device in devices.iter().filter_map(|device| device.name().to_str().ok()) {
        if let Some((_, vlan)) =
            underlying_device(device).filter(|(nic, vlan)| nic == interface && vlans.contains(vlan))
        {
            names.entry(vlan).or_insert_with(|| device.to_owned());
        }
    }
    names
}

/// Returns the error message for a VLAN that has no device at `interface`, with the remedy.
pub fn missing_device_message(interface: &str, vlan: Vlan) -> String {
    let id = vlan.get();
    format!(
        "interface {interface:?} has no device for VLAN {id}: expected one with an address there (ip link add link \
         {interface} name {interface}.{id} type vlan id {id})"
    )
}

/// Returns an error text if a VLAN device has another MAC address than `interface`: its frames are then not forwarded.
pub fn mac_problem(interface: &str, device: &str) -> Option<String> {
    let mac = |name| mac_of(name).ok().flatten();
    let (expected, found) = (mac(interface)?, mac(device)?);
    (found != expected).then(|| {
        format!(
            "interface {device:?} has the MAC address {found}: expected {expected}, that of {interface:?} (ip link set \
             {device} address {expected})"
        )
    })
}

/// Makes the driver leave VLAN tags in received frames. Fails when the driver does not support that.
pub fn disable_rx_vlan_offload(interface: &str) -> io::Result<()> {
    let flags = ethtool::flags(interface)?;
    if flags & ETH_FLAG_RXVLAN == 0 {
        return Ok(());
    }
    ethtool::set_flags(interface, flags & !ETH_FLAG_RXVLAN)?;
    tracing::info!(
        event = "vlan-offload-off",
        interface,
        "the load balancer has turned off rxvlan: the driver leaves VLAN tags in frames"
    );
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn loopback_is_no_vlan_device() {
        assert_eq!((underlying_device("lo"), nic("lo")), (None, "lo".to_owned()));
        assert_eq!(underlying_device("a-name-that-is-longer-than-allowed"), None);
        assert_eq!(name("lo", Vlan::UNTAGGED).as_deref(), Some("lo"));
        let vlan = Vlan::new(7).unwrap();
        assert_eq!(name("lo", vlan), None);
        assert!(missing_device_message("lo", vlan).contains("ip link add link lo name lo.7 type vlan id 7"));
    }
}
