//! Emulated NIC of a server. A BPF program at the switch's port does RSS, and a pinned map contains the NIC's
//! registers.

use std::fs;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd as _, BorrowedFd};
use std::path::Path;

use anyhow::Context as _;
use coreward_intf as intf;
use coreward_model::rss::RssConfig;
use libbpf_rs::skel::{OpenSkel as _, SkelBuilder as _};
use libbpf_rs::{
    MapCore as _, MapFlags, MapHandle, TC_EGRESS, TC_INGRESS, TcAttachPoint, TcHookBuilder, Xdp, XdpFlags,
};
use zerocopy::{FromBytes as _, IntoBytes as _};

use crate::namespace::NetworkNamespace;

#[allow(missing_docs, clippy::all, clippy::undocumented_unsafe_blocks)]
pub(crate) mod skeletons {
    pub mod rss_emulation {
        include!(concat!(env!("OUT_DIR"), "/rss_emulation.skel.rs"));
    }
    pub mod xdp_pass {
        include!(concat!(env!("OUT_DIR"), "/xdp_pass.skel.rs"));
    }
    pub mod access_port {
        include!(concat!(env!("OUT_DIR"), "/access_port.skel.rs"));
    }
    pub mod receive_queues {
        include!(concat!(env!("OUT_DIR"), "/receive_queues.skel.rs"));
    }
}

/// Priority of the tc program that emulates RSS, which makes it run after the access port's program.
const RSS_TC_PRIORITY: u32 = 2;

/// Attaches the program that emulates RSS at the egress of `port` in `switch`, and pins its registers at `pin_path`.
pub(crate) fn attach_rss_emulation(
    switch: &NetworkNamespace,
    port: &str,
    pin_path: &Path,
    rss: &RssConfig,
) -> anyhow::Result<()> {
    let mut storage = MaybeUninit::uninit();
    let open_skeleton = skeletons::rss_emulation::RssEmulationSkelBuilder::default().open(&mut storage)?;
    let mut loaded_skeleton = open_skeleton.load().context("the kernel does not load rss_emulation.bpf.c")?;
    fs::create_dir_all(pin_path.parent().context("the pin has no directory")?)?;
    loaded_skeleton.maps.registers.pin(pin_path).with_context(|| format!("cannot pin {}", pin_path.display()))?;
    write_rss_registers(pin_path, rss)?;
    attach_tc_program(switch, port, loaded_skeleton.progs.rss_emulation.as_fd(), TC_EGRESS, RSS_TC_PRIORITY)
        .with_context(|| format!("cannot attach the RSS emulation to port {port}"))
}

/// Writes RSS key and indirection table into the emulated NIC registers, as the agent does with `manage_rss = true`.
/// Fails when `pin_path` is not a pinned map of registers, or when the key does not have 40 bytes.
pub fn write_rss_registers(pin_path: &Path, rss: &RssConfig) -> anyhow::Result<()> {
    let generation = read_register_map(pin_path)?.mapping.generation.wrapping_add(1);
    let registers = rss.to_emulated_registers(generation)?;
    open_register_map(pin_path)?.update(&0u32.to_ne_bytes(), registers.as_bytes(), MapFlags::ANY)?;
    Ok(())
}

/// Adds `shift` to the indirection table indices of open TCP connections, until the registers are written again. A
/// NIC's flow director has this effect (ATR of ixgbe and i40e). Fails when `pin_path` is not a pinned map of registers.
pub fn shift_established_connection_queues(pin_path: &Path, shift: u32) -> anyhow::Result<()> {
    let registers = intf::emulated_rss { established_shift: shift, ..*read_register_map(pin_path)? };
    Ok(open_register_map(pin_path)?.update(&0u32.to_ne_bytes(), registers.as_bytes(), MapFlags::ANY)?)
}

/// Reads RSS key and indirection table from the emulated NIC registers. Fails when `pin_path` is not a pinned map of
/// registers, or has no table.
pub fn read_rss_registers(pin_path: &Path) -> anyhow::Result<RssConfig> {
    Ok(RssConfig::from_emulated_registers(&*read_register_map(pin_path)?)?)
}

fn open_register_map(pin_path: &Path) -> anyhow::Result<MapHandle> {
    MapHandle::from_pinned_path(pin_path)
        .with_context(|| format!("cannot open the emulated RSS at {}", pin_path.display()))
}

fn read_register_map(pin_path: &Path) -> anyhow::Result<Box<intf::emulated_rss>> {
    let entry_bytes = open_register_map(pin_path)?
        .lookup(&0u32.to_ne_bytes(), MapFlags::ANY)?
        .context("an array without its only entry")?;
    let registers = intf::emulated_rss::read_from_bytes(&entry_bytes);
    Ok(Box::new(registers.map_err(|_| anyhow::anyhow!("{} does not hold an emulated RSS", pin_path.display()))?))
}

/// Attaches a native XDP program that passes all frames. A switch port needs the program to receive frames that its
/// peer sends by XDP_TX (see xdp_pass.bpf.c). Fails when the device does not support native XDP.
pub fn attach_xdp_pass_program(namespace: &NetworkNamespace, device: &str) -> anyhow::Result<()> {
    let mut storage = MaybeUninit::uninit();
    let open_skeleton = skeletons::xdp_pass::XdpPassSkelBuilder::default().open(&mut storage)?;
    let loaded_skeleton = open_skeleton.load().context("the kernel does not load xdp_pass.bpf.c")?;
    let program_fd = loaded_skeleton.progs.xdp_pass.as_fd();
    namespace.run_within(|| {
        let device_index = find_interface_index(device)?;
        Xdp::new(program_fd)
            .attach(device_index, XdpFlags::DRV_MODE)
            .with_context(|| format!("no native XDP on {device}"))
    })
}

/// Recorder of the receive queues at which flows arrive, for tests.
pub struct ReceiveQueueRecorder {
    flow_map: MapHandle,
}

impl ReceiveQueueRecorder {
    /// Records the flows that arrive at a device until the device is removed. Fails when the BPF program does not load
    /// or attach.
    pub fn start(namespace: &NetworkNamespace, device: &str) -> anyhow::Result<Self> {
        let mut storage = MaybeUninit::uninit();
        let open_skeleton = skeletons::receive_queues::ReceiveQueuesSkelBuilder::default().open(&mut storage)?;
        let loaded_skeleton = open_skeleton.load().context("the kernel does not load receive_queues.bpf.c")?;
        attach_tc_program(
            namespace,
            device,
            loaded_skeleton.progs.receive_queues.as_fd(),
            TC_INGRESS,
            RSS_TC_PRIORITY,
        )?;
        Ok(Self { flow_map: MapHandle::try_from(&loaded_skeleton.maps.received_flows)? })
    }

    /// Returns the receive queue and the hash of a flow's last frame, as the kernel reports them. Returns `None` if
    /// there is no frame or queue. Fails when the map cannot be read.
    pub fn find_queue_and_hash(&self, flow: &coreward_model::FourTuple) -> anyhow::Result<Option<(u16, u32)>> {
        let mut flow_key = [0; intf::RSS_INPUT_IPV6_BYTES as usize];
        flow_key[..flow.bytes().len()].copy_from_slice(&flow.bytes());
        let Some(bytes) = self.flow_map.lookup(&flow_key, MapFlags::ANY)? else { return Ok(None) };
        let received_flow = intf::received_flow::read_from_bytes(&bytes);
        let received_flow = received_flow.map_err(|_| anyhow::anyhow!("an entry of another size"))?;
        Ok(received_flow.recorded_queue.checked_sub(1).map(|queue| (queue as u16, received_flow.hash)))
    }
}

/// Attaches a tc program by clsact instead of tcx. Clsact also exists before Linux 6.6, and ends with the device.
pub(crate) fn attach_tc_program(
    namespace: &NetworkNamespace,
    device: &str,
    program: BorrowedFd<'_>,
    direction: TcAttachPoint,
    priority: u32,
) -> anyhow::Result<()> {
    namespace.run_within(|| {
        let mut hook_builder = TcHookBuilder::new(program);
        hook_builder.ifindex(find_interface_index(device)?).replace(true).handle(1).priority(priority);
        let mut tc_hook = hook_builder.hook(direction);
        tc_hook.create()?;
        tc_hook.attach()?;
        Ok(())
    })
}

fn find_interface_index(device: &str) -> anyhow::Result<i32> {
    let device_index = nix::net::if_::if_nametoindex(device).with_context(|| format!("no interface {device}"))?;
    Ok(device_index as i32)
}
