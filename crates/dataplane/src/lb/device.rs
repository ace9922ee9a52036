//! Attachment of the program to a device, and its updates when the device's addresses change.

use std::mem::offset_of;
use std::os::fd::AsFd as _;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, bail};
use coreward_intf as intf;

use super::link::{self, XdpLink};
use super::program_variant::ProgramVariant;
use super::{AttachedXdpMode, LoadBalancer, XdpMode, pinned_program_id};
use crate::device;
use crate::mac::MacAddress;
use crate::neighbour;
use crate::pins;
use crate::veth;
use crate::vlan_device;

impl LoadBalancer {
    /// Attaches the program to an interface, in place of a pinned program that is attached there. Fails when the
    /// interface does not exist or has a foreign XDP program, or the pinned program is attached to another interface.
    /// Also fails when `mode` is [`XdpMode::Native`] and the driver does not support XDP.
    pub fn attach(&mut self, interface: &str, mode: XdpMode) -> anyhow::Result<AttachedXdpMode> {
        let interface_index = nix::net::if_::if_nametoindex(interface)
            .map_err(|_| anyhow::anyhow!(missing_interface_error(interface)))?;
        self.attached_interface = Some(interface.to_string());
        self.refresh_interface_addresses()?;
        if let Some(link) = &self.old_program_link {
            let attached_index = link.interface_index()?;
            anyhow::ensure!(
                attached_index == interface_index,
                "what another version pinned is at the interface of index {attached_index}, not at {interface:?} \
                 (index {interface_index}): detach it first, or use another pin directory"
            );
            return Ok(if self.variant.has_per_cpu_counters {
                AttachedXdpMode::Generic
            } else {
                AttachedXdpMode::Native
            });
        }
        if let Some(link) = &self.xdp_link {
            match link.interface_index()? {
                0 => tracing::warn!(
                    event = "device-gone",
                    interface,
                    "the device of the pinned program is gone: the load balancer attaches its program again"
                ),
                attached_index if attached_index == interface_index => return self.replace_attached_program(mode),
                attached_index => bail!(
                    "what is pinned in {} is at the interface of index {attached_index}, not at {interface:?} (index \
                     {interface_index}): detach it first, or use another pin directory",
                    self.lb_directory.as_deref().unwrap_or(Path::new("")).display()
                ),
            }
            self.xdp_link = None;
        }
        let attached_mode = self.attach_new_xdp_link(interface, interface_index, mode)?;
        if let (Some(pins), Some(link)) = (&self.lb_directory, &self.xdp_link) {
            link::unpin_object(&pins.join("link"))?;
            link.pin(&pins.join("link"))?;
        }
        Ok(attached_mode)
    }

    fn replace_attached_program(&mut self, mode: XdpMode) -> anyhow::Result<AttachedXdpMode> {
        let pinned_link = self.xdp_link.as_ref().expect("a pinned link");
        pinned_link.replace_program(self.program.as_fd()).context("replacing the program at the device")?;
        let attachment =
            if self.variant.has_per_cpu_counters { AttachedXdpMode::Generic } else { AttachedXdpMode::Native };
        if mode != XdpMode::Auto && (mode == XdpMode::Generic) != (attachment == AttachedXdpMode::Generic) {
            tracing::warn!(
                event = "xdp-mode-kept",
                interface = self.attached_interface,
                ?attachment,
                "the pinned program keeps its XDP mode: to apply `xdp_mode`, run `coreward lb --detach` first"
            );
        }
        Ok(attachment)
    }

    fn attach_new_xdp_link(
        &mut self,
        interface: &str,
        interface_index: u32,
        mode: XdpMode,
    ) -> anyhow::Result<AttachedXdpMode> {
        // The other end of the veth would not receive the frames that native XDP sends.
        let peer_has_no_xdp = mode == XdpMode::Auto && veth::peer_has_native_xdp(interface_index) == Some(false);
        if peer_has_no_xdp {
            tracing::warn!(
                event = "generic-xdp",
                interface,
                "the other end of the veth has no XDP program: the load balancer uses generic XDP, which is slower"
            );
        } else if mode != XdpMode::Generic {
            match self.attach_program_in_mode(AttachedXdpMode::Native, interface, interface_index) {
                Err(error) if mode == XdpMode::Auto => {
                    tracing::warn!(
                        event = "generic-xdp",
                        interface,
                        error = format!("{error:#}"),
                        "native XDP is not possible: the load balancer uses generic XDP, which is slower"
                    );
                }
                attach_result => return attach_result,
            }
        }
        self.attach_program_in_mode(AttachedXdpMode::Generic, interface, interface_index)
    }

    fn attach_program_in_mode(
        &mut self,
        attachment: AttachedXdpMode,
        interface: &str,
        interface_index: u32,
    ) -> anyhow::Result<AttachedXdpMode> {
        let counts_by_cpu = attachment == AttachedXdpMode::Generic;
        self.load_variant(ProgramVariant { has_per_cpu_counters: counts_by_cpu, ..self.variant })?;
        let new_link =
            XdpLink::create(self.program.as_fd(), interface_index, attachment).map_err(|error| {
                match error.raw_os_error() {
                    Some(libc::EBUSY | libc::EEXIST) => {
                        anyhow::anyhow!(self.foreign_program_error(interface, interface_index))
                    }
                    _ => anyhow::Error::from(error).context(format!("{attachment:?} XDP at interface {interface:?}")),
                }
            })?;
        self.xdp_link = Some(new_link);
        Ok(attachment)
    }

    /// Returns an error message about a foreign XDP program on the interface, with the program's origin and the remedy.
    fn foreign_program_error(&self, interface: &str, interface_index: u32) -> String {
        let own_pin_directory = self.lb_directory.as_deref().and_then(Path::parent);
        let other_pin_directories = own_pin_directory
            .map(|directory| pins::find_other_pin_directories(directory, "lb/link"))
            .unwrap_or_default();
        // Program ids are compared because the same interface index may exist in another network namespace.
        let xdp_state = device::query_xdp_state(interface_index).unwrap_or_default();
        let is_attached_here = |directory: &&PathBuf| {
            let directory_program_id = pinned_program_id(directory).ok().flatten();
            directory_program_id.is_some()
                && (directory_program_id == xdp_state.native_program_id
                    || directory_program_id == xdp_state.generic_program_id)
        };
        match other_pin_directories.iter().find(is_attached_here) {
            Some(directory) => format!(
                "interface {interface:?} has the program of a load balancer that is pinned in {directory}: expected \
                 `pin_directory` to be that, or first `coreward lb --detach` with that in its file",
                directory = directory.display()
            ),
            None => format!(
                "interface {interface:?} has another XDP program: remove it first (ip link set {interface} xdp off)"
            ),
        }
    }

    /// Updates the program's copy of the attached interface's addresses and MTU. It must be called often, because the
    /// program ignores frames to any MAC address other than the copied one. Fails when the interface was removed.
    pub fn refresh_interface_addresses(&mut self) -> anyhow::Result<()> {
        let interface = self.attached_interface.as_deref().context("not attached")?;
        let interface_mac =
            interface_mac(interface)?.with_context(|| match nix::net::if_::if_nametoindex(interface) {
                Ok(_) => format!("interface {interface:?} has no MAC address"),
                Err(_) => missing_interface_error(interface),
            })?;
        let interface_mtu =
            device::interface_mtu_bytes(interface).with_context(|| format!("the MTU of interface {interface:?}"))?;
        let vip_vlan = self.variant.vlan_settings.vip_vlan;
        let vlan_devices =
            vlan_device::vlan_device_names(interface, self.server_vlans.iter().copied().chain([vip_vlan]));
        let tagged_devices = vlan_devices.iter().filter(|(vlan, _)| vlan.is_tagged());
        let smallest_mtu = tagged_devices
            .filter_map(|(_, device)| device::interface_mtu_bytes(device).ok())
            .fold(interface_mtu, u32::min);
        // If the VIPs' VLAN has no device of its own, the interface itself has this host's address.
        let outer_source_addresses =
            neighbour::outer_source_addresses(vlan_devices.get(&vip_vlan).map_or(interface, String::as_str));
        self.set_own_mac(interface_mac);
        self.set_outer_sources_and_mtu(outer_source_addresses, smallest_mtu);
        Ok(())
    }

    /// Sets the load balancer's MAC address, which is the source of sent frames and the destination of accepted frames.
    /// [`attach`](Self::attach) sets it to the device's address.
    pub fn set_own_mac(&mut self, mac: MacAddress) {
        self.maps.state.store(offset_of!(intf::lb_state, own_mac_shifted), mac.to_word() << 16);
    }
}

fn missing_interface_error(interface: &str) -> String {
    format!("interface {interface:?} does not exist")
}

/// Returns the MAC address of an interface. /sys is not used because it may show another network namespace.
pub(crate) fn interface_mac(interface: &str) -> anyhow::Result<Option<MacAddress>> {
    let interface_addresses = nix::ifaddrs::getifaddrs().context("reading the interfaces' addresses")?;
    let mac = interface_addresses.filter(|entry| entry.interface_name == interface).find_map(|entry| {
        let link_address = entry.address?;
        link_address.as_link_addr()?.addr()
    });
    Ok(mac.map(MacAddress))
}
