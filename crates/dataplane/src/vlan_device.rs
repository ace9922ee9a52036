//! VLAN devices of the calling thread's network namespace, and the driver offload that hides VLAN tags from XDP.

use std::collections::{BTreeMap, BTreeSet};
use std::ffi::{CStr, c_char, c_int, c_short};
use std::io;
use std::os::fd::AsRawFd as _;

use coreward_model::vlan::Vlan;
use nix::net::if_::if_nameindex;
use nix::sys::socket::{AddressFamily, SockFlag, SockType, socket};

use crate::ethtool::{self, ETH_FLAG_RXVLAN};
use crate::lb::interface_mac;

/// Number of the ioctl for VLAN devices (linux/sockios.h).
const SIOCGIFVLAN: libc::c_ulong = 0x8982;
/// Command of SIOCGIFVLAN that returns the underlying device's name (`enum vlan_ioctl_cmds` in linux/if_vlan.h).
const GET_VLAN_REALDEV_NAME_CMD: c_int = 8;
const GET_VLAN_VID_CMD: c_int = 9;
const DEVICE_NAME_FIELD_BYTES: usize = 24;

/// Argument of SIOCGIFVLAN, struct vlan_ioctl_args of linux/if_vlan.h.
#[repr(C)]
struct VlanIoctlRequest {
    command: c_int,
    device_name: [c_char; DEVICE_NAME_FIELD_BYTES],
    /// Answer of the kernel: the name of the underlying device, or the VLAN id in the first bytes.
    answer_field: [u8; DEVICE_NAME_FIELD_BYTES],
    priority: c_short,
}

/// Queries a VLAN device and returns the kernel's answer. Fails when `device` is not a VLAN device.
fn query_vlan_device(command: c_int, device: &str) -> io::Result<[u8; DEVICE_NAME_FIELD_BYTES]> {
    let mut vlan_request = VlanIoctlRequest {
        command,
        device_name: [0; DEVICE_NAME_FIELD_BYTES],
        answer_field: [0; DEVICE_NAME_FIELD_BYTES],
        priority: 0,
    };
    if device.len() >= DEVICE_NAME_FIELD_BYTES {
        return Err(io::Error::from_raw_os_error(libc::ENODEV));
    }
    for (name_char, byte) in vlan_request.device_name.iter_mut().zip(device.bytes()) {
        *name_char = byte as c_char;
    }
    let socket = socket(AddressFamily::Inet, SockType::Datagram, SockFlag::SOCK_CLOEXEC, None)?;
    // SAFETY: the kernel reads and writes one struct vlan_ioctl_args, which lives through the call.
    let result = unsafe { libc::ioctl(socket.as_raw_fd(), SIOCGIFVLAN, &raw mut vlan_request) };
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(vlan_request.answer_field) }
}

/// Returns the name of a VLAN device's underlying device, and the VLAN. Returns `None` if `device` is not a VLAN
/// device.
pub fn underlying_device_and_vlan(device: &str) -> Option<(String, Vlan)> {
    let device_name = query_vlan_device(GET_VLAN_REALDEV_NAME_CMD, device).ok()?;
    let device_name = CStr::from_bytes_until_nul(&device_name).ok()?.to_str().ok()?.to_owned();
    let id = query_vlan_device(GET_VLAN_VID_CMD, device).ok()?;
    let id = c_int::from_ne_bytes(id[..size_of::<c_int>()].try_into().expect("an int's bytes"));
    Some((device_name, Vlan::new(u64::try_from(id).ok()?).ok()?))
}

/// Returns the name of the device whose receive queues and RSS configuration apply to `device`: the underlying device
/// of a VLAN device, and otherwise `device` itself.
pub fn underlying_device_or_self(device: &str) -> String {
    underlying_device_and_vlan(device).map_or_else(|| device.to_owned(), |(nic, _)| nic)
}

/// Returns the name of the device for a VLAN at `interface`, or `None` if there is no such device. Untagged frames use
/// `interface` itself.
pub fn vlan_device_name(interface: &str, vlan: Vlan) -> Option<String> {
    vlan_device_names(interface, [vlan]).remove(&vlan)
}

/// Returns the name of the device for each of `vlans` at `interface`. VLANs without a device are omitted. If `vlans`
/// has a tagged VLAN, queries all devices of the network namespace.
pub fn vlan_device_names(interface: &str, vlans: impl IntoIterator<Item = Vlan>) -> BTreeMap<Vlan, String> {
    let mut tagged_vlans: BTreeSet<Vlan> = vlans.into_iter().collect();
    let mut names_by_vlan = BTreeMap::new();
    if tagged_vlans.remove(&Vlan::UNTAGGED) {
        names_by_vlan.insert(Vlan::UNTAGGED, interface.to_owned());
    }
    if tagged_vlans.is_empty() {
        return names_by_vlan;
    }
    let Ok(devices) = if_nameindex() else { return names_by_vlan };
    for device in devices.iter().filter_map(|device| device.name().to_str().ok()) {
        if let Some((_, vlan)) =
            underlying_device_and_vlan(device).filter(|(nic, vlan)| nic == interface && tagged_vlans.contains(vlan))
        {
            names_by_vlan.entry(vlan).or_insert_with(|| device.to_owned());
        }
    }
    names_by_vlan
}

/// Returns the error message for a VLAN that has no device at `interface`, with the remedy.
pub fn missing_vlan_device_message(interface: &str, vlan: Vlan) -> String {
    let id = vlan.id_or_zero();
    format!(
        "interface {interface:?} has no device for VLAN {id}: expected one with an address there (ip link add link \
         {interface} name {interface}.{id} type vlan id {id})"
    )
}

/// Returns an error message if a VLAN device has another MAC address than `interface`. The load balancer does not
/// forward frames to such an address.
pub fn mac_mismatch_message(interface: &str, device: &str) -> Option<String> {
    let read_mac = |name| interface_mac(name).ok().flatten();
    let (interface_mac, device_mac) = (read_mac(interface)?, read_mac(device)?);
    (device_mac != interface_mac).then(|| {
        format!(
            "interface {device:?} has the MAC address {device_mac}: expected {interface_mac}, that of {interface:?} \
             (ip link set {device} address {interface_mac})"
        )
    })
}

/// Configures the driver to leave VLAN tags in received frames. Fails when the driver does not support this.
pub fn disable_rx_vlan_offload(interface: &str) -> io::Result<()> {
    let offload_flags = ethtool::read_offload_flags(interface)?;
    if offload_flags & ETH_FLAG_RXVLAN == 0 {
        return Ok(());
    }
    ethtool::set_offload_flags(interface, offload_flags & !ETH_FLAG_RXVLAN)?;
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
        assert_eq!((underlying_device_and_vlan("lo"), underlying_device_or_self("lo")), (None, "lo".to_owned()));
        assert_eq!(underlying_device_and_vlan("a-name-that-is-longer-than-allowed"), None);
        assert_eq!(vlan_device_name("lo", Vlan::UNTAGGED).as_deref(), Some("lo"));
        let some_vlan = Vlan::new(7).unwrap();
        assert_eq!(vlan_device_name("lo", some_vlan), None);
        assert!(missing_vlan_device_message("lo", some_vlan).contains("ip link add link lo name lo.7 type vlan id 7"));
    }
}
