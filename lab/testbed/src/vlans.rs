//! VLANs for clients and servers, which are at access ports of the switch (access_port.bpf.c). Load balancers are at
//! trunk ports.
//!
//! The load balancers' kernels have no VLAN devices, because some kernels lack them. So they do not answer ARP in a
//! VLAN, and the client has static neighbour entries with their MAC addresses.

use std::mem::MaybeUninit;
use std::os::fd::AsFd as _;

use anyhow::Context as _;
use libbpf_rs::skel::{OpenSkel as _, SkelBuilder as _};
use libbpf_rs::{TC_EGRESS, TC_INGRESS};

use crate::addresses::{HOST_DEVICE, load_balancer_address};
use crate::namespace::run_ip_batch;
use crate::rss_emulation::{attach_tc_program, skeletons};
use crate::topology::Testbed;

/// Priority of the tc programs for VLANs, which makes them run before the emulated NIC's program.
const VLAN_TC_PRIORITY: u32 = 1;

impl Testbed {
    /// Returns the VLAN id of the VIPs, or 0 if untagged.
    pub fn vip_vlan(&self) -> u16 {
        self.options().vlans.as_ref().map_or(0, |vlans| vlans.vip_vlan)
    }

    /// Returns the VLAN id of a server, or 0 if untagged.
    pub fn server_vlan(&self, number: u16) -> u16 {
        let vlan_of_server = |servers: &[u16]| servers[(usize::from(number) - 1) % servers.len()];
        self.options().vlans.as_ref().map_or(0, |vlans| vlan_of_server(&vlans.server_vlans))
    }

    /// Makes a switch port an access port of the VLAN, if the testbed has VLANs.
    pub(crate) fn set_up_access_port(&self, port: &str, vlan: u16) -> anyhow::Result<()> {
        if self.options().vlans.is_none() {
            return Ok(());
        }
        let mut storage = MaybeUninit::uninit();
        let mut open_skeleton = skeletons::access_port::AccessPortSkelBuilder::default().open(&mut storage)?;
        open_skeleton.maps.rodata_data.as_deref_mut().context("access_port.bpf.c has no constants")?.vlan = vlan;
        let loaded_skeleton = open_skeleton.load().context("the kernel does not load access_port.bpf.c")?;
        attach_tc_program(self.switch(), port, loaded_skeleton.progs.from_host.as_fd(), TC_INGRESS, VLAN_TC_PRIORITY)?;
        attach_tc_program(self.switch(), port, loaded_skeleton.progs.to_host.as_fd(), TC_EGRESS, VLAN_TC_PRIORITY)
    }

    /// If the testbed has VLANs, makes a load balancer's switch port a trunk and adds its MAC address to the client's
    /// neighbours.
    pub(crate) fn set_up_trunk_port(&self, number: u16, port: &str) -> anyhow::Result<()> {
        if self.options().vlans.is_none() {
            return Ok(());
        }
        let mut storage = MaybeUninit::uninit();
        let open_skeleton = skeletons::access_port::AccessPortSkelBuilder::default().open(&mut storage)?;
        let loaded_skeleton = open_skeleton.load().context("the kernel does not load access_port.bpf.c")?;
        attach_tc_program(self.switch(), port, loaded_skeleton.progs.from_trunk.as_fd(), TC_INGRESS, VLAN_TC_PRIORITY)?;
        // veth passes tags outside of the frame, where XDP cannot read them.
        self.set_device_offloads(self.switch(), port, &["txvlan", "off"])?;
        let mac = self.load_balancer(number)?.read_device_mac_address(HOST_DEVICE)?;
        let lb_address = self.options().family.host_address(load_balancer_address(number));
        run_ip_batch(
            Some(self.client()),
            &format!("neighbour replace {lb_address} lladdr {mac} dev {HOST_DEVICE} nud permanent\n"),
        )
    }
}
