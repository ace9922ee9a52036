//! Attaching the program to a device: replacement of an earlier program, and the device's MAC address.

use std::mem::offset_of;
use std::os::fd::AsFd as _;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, bail};
use coreward_intf as intf;

use super::link::{self, XdpLink};
use super::variant::Variant;
use super::{AttachedXdpMode, LoadBalancer, XdpMode, pinned_program_id};
use crate::device;
use crate::mac::MacAddress;
use crate::neighbour;
use crate::pins;
use crate::veth;
use crate::vlan_device;

impl LoadBalancer {
    /// Attaches the program to an interface, in place of a pinned program. Fails when the interface does not exist or
    /// has another XDP program, or the pinned state is of another interface. Also fails when `mode` is
    /// [`XdpMode::Native`] and the driver cannot run XDP.
    pub fn attach(&mut self, interface: &str, mode: XdpMode) -> anyhow::Result<AttachedXdpMode> {
        let index =
            nix::net::if_::if_nametoindex(interface).map_err(|_| anyhow::anyhow!(no_such_interface(interface)))?;
        self.interface = Some(interface.to_string());
        self.refresh_own_mac()?;
        if let Some(link) = &self.pending_upgrade {
            let found = link.interface_index()?;
            anyhow::ensure!(
                found == index,
                "what another version pinned is at the interface of index {found}, not at {interface:?} (index \
                 {index}): \
                 detach it first, or use another pin directory"
            );
            return Ok(if self.variant.counters_by_cpu { AttachedXdpMode::Generic } else { AttachedXdpMode::Native });
        }
        if let Some(link) = &self.link {
            match link.interface_index()? {
                0 => tracing::warn!(
                    event = "device-gone",
                    interface,
                    "the device of the pinned program is gone: the load balancer attaches its program again"
                ),
                found if found == index => return self.replace_pinned(mode),
                found => bail!(
                    "what is pinned in {} is at the interface of index {found}, not at {interface:?} (index {index}): \
                     detach it first, or use another pin directory",
                    self.lb_pin_directory.as_deref().unwrap_or(Path::new("")).display()
                ),
            }
            self.link = None;
        }
        let attachment = self.attach_new(interface, index, mode)?;
        if let (Some(pins), Some(link)) = (&self.lb_pin_directory, &self.link) {
            link::unpin(&pins.join("link"))?;
            link.pin(&pins.join("link"))?;
        }
        Ok(attachment)
    }

    fn replace_pinned(&mut self, mode: XdpMode) -> anyhow::Result<AttachedXdpMode> {
        let link = self.link.as_ref().expect("a pinned link");
        link.replace(self.program.as_fd()).context("replacing the program at the device")?;
        let attachment = if self.variant.counters_by_cpu { AttachedXdpMode::Generic } else { AttachedXdpMode::Native };
        if mode != XdpMode::Auto && (mode == XdpMode::Generic) != (attachment == AttachedXdpMode::Generic) {
            tracing::warn!(
                event = "xdp-mode-kept",
                interface = self.interface,
                ?attachment,
                "the pinned program keeps its XDP mode: to apply `xdp_mode`, run `coreward lb --detach` first"
            );
        }
        Ok(attachment)
    }

    fn attach_new(&mut self, interface: &str, index: u32, mode: XdpMode) -> anyhow::Result<AttachedXdpMode> {
        // The other end of the veth would not receive the frames that native XDP sends.
        let is_cut_off = mode == XdpMode::Auto && veth::peer_has_xdp(index) == Some(false);
        if is_cut_off {
            tracing::warn!(
                event = "generic-xdp",
                interface,
                "the other end of the veth has no XDP program: the load balancer uses generic XDP, which is slower"
            );
        } else if mode != XdpMode::Generic {
            match self.attach_in(AttachedXdpMode::Native, interface, index) {
                Err(error) if mode == XdpMode::Auto => {
                    tracing::warn!(
                        event = "generic-xdp",
                        interface,
                        error = format!("{error:#}"),
                        "native XDP is not possible: the load balancer uses generic XDP, which is slower"
                    );
                }
                other => return other,
            }
        }
        self.attach_in(AttachedXdpMode::Generic, interface, index)
    }

    fn attach_in(
        &mut self,
        attachment: AttachedXdpMode,
        interface: &str,
        index: u32,
    ) -> anyhow::Result<AttachedXdpMode> {
        let counters_by_cpu = attachment == AttachedXdpMode::Generic;
        self.change_variant(Variant { counters_by_cpu, ..self.variant })?;
        let link =
            XdpLink::create(self.program.as_fd(), index, attachment).map_err(|error| match error.raw_os_error() {
                Some(libc::EBUSY | libc::EEXIST) => anyhow::anyhow!(self.describe_foreign_program(interface, index)),
                _ => anyhow::Error::from(error).context(format!("{attachment:?} XDP at interface {interface:?}")),
            })?;
        self.link = Some(link);
        Ok(attachment)
    }

    /// Returns an error message about an XDP program of someone else on the interface: its origin and the remedy.
    fn describe_foreign_program(&self, interface: &str, index: u32) -> String {
        let own = self.lb_pin_directory.as_deref().and_then(Path::parent);
        let others = own.map(|own| pins::other_directories(own, "lb/link")).unwrap_or_default();
        // Program ids are compared because an interface index may be one of another network namespace.
        let xdp = device::query_xdp_state(index).unwrap_or_default();
        let at_device = |directory: &&PathBuf| {
            let program = pinned_program_id(directory).ok().flatten();
            program.is_some() && (program == xdp.native_program_id || program == xdp.generic_program_id)
        };
        match others.iter().find(at_device) {
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

    /// Updates the MAC address, other addresses and MTU from the attached interface. The program ignores frames to
    /// other MAC addresses. To be called often, as the operator may change them. Fails when the interface was removed.
    pub fn refresh_own_mac(&mut self) -> anyhow::Result<()> {
        let interface = self.interface.as_deref().context("not attached")?;
        let mac = mac_of(interface)?.with_context(|| match nix::net::if_::if_nametoindex(interface) {
            Ok(_) => format!("interface {interface:?} has no MAC address"),
            Err(_) => no_such_interface(interface),
        })?;
        let mtu = device::mtu(interface).with_context(|| format!("the MTU of interface {interface:?}"))?;
        let vip_vlan = self.variant.vlans.vip;
        let devices = vlan_device::names(interface, self.server_vlans.iter().copied().chain([vip_vlan]));
        let tagged = devices.iter().filter(|(vlan, _)| vlan.is_tagged());
        let mtu = tagged.filter_map(|(_, device)| device::mtu(device).ok()).fold(mtu, u32::min);
        // Without a device for the VIPs' VLAN, the interface itself has this host's address.
        let sources = neighbour::outer_sources(devices.get(&vip_vlan).map_or(interface, String::as_str));
        self.set_own_mac(mac);
        self.set_outer_header(sources, mtu);
        Ok(())
    }

    /// Sets the MAC address from which frames are sent and to which frames are accepted. [`attach`](Self::attach) sets
    /// it to the device's address.
    pub fn set_own_mac(&mut self, mac: MacAddress) {
        self.maps.state.store(offset_of!(intf::lb_state, own_mac_shifted), mac.word() << 16);
    }
}

fn no_such_interface(interface: &str) -> String {
    format!("interface {interface:?} does not exist")
}

/// Returns the MAC address of an interface. /sys is not used because it may show another network namespace.
pub(crate) fn mac_of(interface: &str) -> anyhow::Result<Option<MacAddress>> {
    let addresses = nix::ifaddrs::getifaddrs().context("reading the interfaces' addresses")?;
    let mac = addresses.filter(|entry| entry.interface_name == interface).find_map(|entry| {
        let address = entry.address?;
        address.as_link_addr()?.addr()
    });
    Ok(mac.map(MacAddress))
}
