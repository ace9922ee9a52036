//! VLANs for clients and servers, at access ports of the switch: access_port.bpf.c. Load balancers are at trunks.
//!
//! The load balancers' kernels have no VLAN devices, which some kernels lack, and do not answer ARP in a VLAN: the
//! client has static entries of their MAC addresses.

use std::mem::MaybeUninit;
use std::os::fd::AsFd as _;

use anyhow::Context as _;
use libbpf_rs::skel::{OpenSkel as _, SkelBuilder as _};
use libbpf_rs::{TC_EGRESS, TC_INGRESS};

use crate::addresses::{DEVICE, load_balancer_address};
use crate::namespace::ip_batch;
use crate::rss_emulation::{attach_tc, skeletons};
use crate::topology::Testbed;

/// Priority of the tc programs, which run before that of the emulated NIC.
const PRIORITY: u32 = 1;

impl Testbed {
    /// Returns the VLAN id of the VIPs; 0 if untagged.
    pub fn vip_vlan(&self) -> u16 {
        self.options().vlans.as_ref().map_or(0, |vlans| vlans.vip_vlan)
    }

    /// Returns the VLAN id of a server; 0 if untagged.
    pub fn server_vlan(&self, number: u16) -> u16 {
        let vlan = |servers: &[u16]| servers[(usize::from(number) - 1) % servers.len()];
        self.options().vlans.as_ref().map_or(0, |vlans| vlan(&vlans.server_vlans))
    }

    /// Makes a port of the switch an access port of the VLAN, if the testbed has VLANs.
    pub(crate) fn make_access_port(&self, port: &str, vlan: u16) -> anyhow::Result<()> {
        if self.options().vlans.is_none() {
            return Ok(());
        }
        let mut storage = MaybeUninit::uninit();
        let mut open = skeletons::access_port::AccessPortSkelBuilder::default().open(&mut storage)?;
        open.maps.rodata_data.as_deref_mut().context("access_port.bpf.c has no constants")?.vlan = vlan;
        let program = open.load().context("the kernel does not load access_port.bpf.c")?;
        attach_tc(self.switch(), port, program.progs.from_host.as_fd(), TC_INGRESS, PRIORITY)?;
        attach_tc(self.switch(), port, program.progs.to_host.as_fd(), TC_EGRESS, PRIORITY)
    }

    /// If VLANs are enabled, makes a load balancer's port a trunk and adds its MAC address to the client's neighbours.
    pub(crate) fn make_trunk(&self, number: u16, port: &str) -> anyhow::Result<()> {
        if self.options().vlans.is_none() {
            return Ok(());
        }
        let mut storage = MaybeUninit::uninit();
        let open = skeletons::access_port::AccessPortSkelBuilder::default().open(&mut storage)?;
        let program = open.load().context("the kernel does not load access_port.bpf.c")?;
        attach_tc(self.switch(), port, program.progs.from_trunk.as_fd(), TC_INGRESS, PRIORITY)?;
        // veth passes tags outside the frame, where XDP cannot read them.
        self.set_offloads(self.switch(), port, &["txvlan", "off"])?;
        let mac = self.load_balancer(number)?.mac_address(DEVICE)?;
        let address = self.options().family.address(load_balancer_address(number));
        ip_batch(Some(self.client()), &format!("neighbour replace {address} lladdr {mac} dev {DEVICE} nud permanent\n"))
    }
}
