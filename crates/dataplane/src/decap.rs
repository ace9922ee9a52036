//! Loads `bpf/server/decap.bpf.c` at a server's device. The program removes the outer headers that configured load
//! balancers add.
//!
//! The maps and the link are pinned below one directory of a bpffs, so that the program works without the process:
//!
//! ```text
//! decap/sources   addresses of load balancers
//! decap/vips      VIPs of this server
//! decap/counters
//! decap/link
//! ```

use std::collections::BTreeSet;
use std::mem::MaybeUninit;
use std::net::IpAddr;
use std::os::fd::{AsFd as _, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};

use anyhow::{Context as _, ensure};
use coreward_intf as intf;
use coreward_model::tuple::address_to_words;
use libbpf_rs::skel::{OpenSkel as _, SkelBuilder as _};
use libbpf_rs::{MapCore as _, MapFlags, MapHandle};

pub use coreward_intf::DECAP_COUNTER_NAMES as COUNTER_NAMES;

use crate::lb::link::{self, XdpLink};
use crate::per_cpu::sum_over_cpus;
use crate::skeleton::decap::DecapSkelBuilder;

/// Number of the decapsulation program's counters.
pub const DECAP_COUNTER_COUNT: usize = intf::DECAP_COUNTER_COUNT as usize;

const DECAP_MAP_NAMES: [&str; 3] = ["sources", "vips", "counters"];
/// Length of an IP address in a map key, in bytes. IPv4 addresses are encoded as in `struct service_key`.
const ADDRESS_MAP_KEY_BYTES: usize = 16;

/// XDP program that decapsulates packets, with its maps. The program stays attached after the value is dropped.
#[derive(Debug)]
pub struct DecapProgram {
    program: OwnedFd,
    source_addresses: MapHandle,
    vip_addresses: MapHandle,
    counters: MapHandle,
}

fn decap_pin_directory(pin_directory: &Path) -> PathBuf {
    pin_directory.join("decap")
}

impl DecapProgram {
    /// Attaches the program to a device, in the driver if possible. It replaces the program of an earlier process and
    /// keeps that program's maps. Fails when the device has a foreign XDP program, or the kernel rejects the program.
    pub fn attach(interface_index: u32, pin_directory: &Path) -> anyhow::Result<Self> {
        let decap_directory = decap_pin_directory(pin_directory);
        let mut pinned_link = XdpLink::open_pinned(&decap_directory.join("link"))?;
        if let Some(link) = &pinned_link
            && link.interface_index()? != interface_index
        {
            detach_and_unpin(pin_directory)?;
            pinned_link = None;
        }
        std::fs::create_dir_all(&decap_directory).with_context(|| decap_directory.display().to_string())?;
        remove_ipv4_only_pins(&decap_directory)?;
        let decapsulation = Self::load(Some(&decap_directory))?;
        let program = decapsulation.program_fd();
        match pinned_link {
            Some(link) => link.replace_program(program).context("replacing the decapsulation program")?,
            None => attach_new_link(program, interface_index)?.pin(&decap_directory.join("link"))?,
        }
        Ok(decapsulation)
    }

    /// Loads the program without attaching or pinning it, for tests by `BPF_PROG_TEST_RUN`.
    pub fn load_unattached() -> anyhow::Result<Self> {
        Self::load(None)
    }

    fn load(decap_directory: Option<&Path>) -> anyhow::Result<Self> {
        let mut object_storage = MaybeUninit::uninit();
        let mut open_skeleton =
            DecapSkelBuilder::default().open(&mut object_storage).context("bpf/server/decap.bpf.c")?;
        let maps = [
            &mut open_skeleton.maps.decap_sources,
            &mut open_skeleton.maps.decap_vips,
            &mut open_skeleton.maps.decap_counters,
        ];
        for (map, name) in maps.into_iter().zip(DECAP_MAP_NAMES) {
            if let Some(decap_directory) = decap_directory {
                map.set_pin_path(decap_directory.join(name)).with_context(|| format!("the pin {name}"))?;
            }
        }
        let loaded_skeleton = open_skeleton.load().context("the kernel rejected bpf/server/decap.bpf.c")?;
        Ok(Self {
            program: loaded_skeleton.progs.decap.as_fd().try_clone_to_owned()?,
            source_addresses: MapHandle::try_from(&loaded_skeleton.maps.decap_sources)?,
            vip_addresses: MapHandle::try_from(&loaded_skeleton.maps.decap_vips)?,
            counters: MapHandle::try_from(&loaded_skeleton.maps.decap_counters)?,
        })
    }

    /// Returns the file descriptor of the program, for `BPF_PROG_TEST_RUN`.
    pub fn program_fd(&self) -> BorrowedFd<'_> {
        self.program.as_fd()
    }

    /// Sets the addresses of the load balancers whose packets are decapsulated. Fails when there are too many.
    pub fn set_source_addresses(&self, load_balancer_addresses: &[IpAddr]) -> anyhow::Result<()> {
        let max_sources = intf::MAX_DECAP_SOURCES as usize;
        ensure!(
            load_balancer_addresses.len() <= max_sources,
            "{} sources of encapsulated packets: expected at most {max_sources}",
            load_balancer_addresses.len()
        );
        set_map_addresses(&self.source_addresses, load_balancer_addresses)
    }

    /// Sets the VIPs that encapsulated packets may have as inner destination address.
    pub fn set_vips(&self, vips: &[IpAddr]) -> anyhow::Result<()> {
        set_map_addresses(&self.vip_addresses, vips)
    }

    /// Returns the counters in the order of [`COUNTER_NAMES`]. They count from the creation of the maps.
    pub fn counters(&self) -> anyhow::Result<[u64; DECAP_COUNTER_COUNT]> {
        sum_over_cpus(&self.counters)
    }
}

fn attach_new_link(program: BorrowedFd<'_>, interface_index: u32) -> anyhow::Result<XdpLink> {
    let created_link = XdpLink::create_in_any_mode(program, interface_index).map(|(link, _)| link);
    created_link.with_context(|| {
        format!("decapsulation at the interface of index {interface_index}: expected no other XDP program there")
    })
}

/// Makes an address map contain exactly the `desired_addresses`.
fn set_map_addresses(map: &MapHandle, desired_addresses: &[IpAddr]) -> anyhow::Result<()> {
    let encode_address_key =
        |address: &IpAddr| -> [u8; ADDRESS_MAP_KEY_BYTES] { zerocopy::transmute!(address_to_words(*address)) };
    let desired_keys: BTreeSet<[u8; ADDRESS_MAP_KEY_BYTES]> =
        desired_addresses.iter().map(encode_address_key).collect();
    let present_keys: Vec<Vec<u8>> = map.keys().collect();
    for present_key in
        present_keys.iter().filter(|key| !desired_keys.iter().any(|desired_key| desired_key[..] == key[..]))
    {
        map.delete(present_key).context("removing an address")?;
    }
    for desired_key in desired_keys {
        map.update(&desired_key, &[1], MapFlags::ANY).context("adding an address")?;
    }
    Ok(())
}

/// Removes the pinned maps of older versions, which could hold only IPv4 addresses. The attached program keeps using
/// these maps until it is replaced.
fn remove_ipv4_only_pins(decap_directory: &Path) -> anyhow::Result<()> {
    match MapHandle::from_pinned_path(decap_directory.join(DECAP_MAP_NAMES[0])) {
        Ok(sources_map) if sources_map.key_size() as usize != ADDRESS_MAP_KEY_BYTES => {
            DECAP_MAP_NAMES.iter().try_for_each(|name| link::unpin_object(&decap_directory.join(name)))
        }
        _ => Ok(()),
    }
}

/// Detaches the decapsulation program and removes its pins, if there are any.
pub fn detach_and_unpin(pin_directory: &Path) -> anyhow::Result<()> {
    let decap_directory = decap_pin_directory(pin_directory);
    for name in ["link"].into_iter().chain(DECAP_MAP_NAMES) {
        link::unpin_object(&decap_directory.join(name))?;
    }
    match std::fs::remove_dir(&decap_directory) {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
            Err(error).context(decap_directory.display().to_string())
        }
        _ => Ok(()),
    }
}
