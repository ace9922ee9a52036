//! Loads `bpf/orchestrate/intake.bpf.c`, the XDP program that redirects requests to AF_XDP sockets.

use std::mem::MaybeUninit;
use std::net::SocketAddrV4;
use std::os::fd::{AsFd as _, AsRawFd as _, BorrowedFd, OwnedFd};

use anyhow::{Context as _, ensure};
use coreward_intf as intf;
use libbpf_rs::skel::{OpenSkel as _, SkelBuilder as _};
use libbpf_rs::{MapCore as _, MapFlags, MapHandle};
use zerocopy::IntoBytes as _;

pub use coreward_intf::INTAKE_COUNTER_NAMES as COUNTER_NAMES;

use crate::lb::AttachedXdpMode;
use crate::lb::link::XdpLink;
use crate::mac::MacAddress;
use crate::per_cpu::sum_over_cpus;
use crate::skeleton::intake::IntakeSkelBuilder;

/// Number of the intake program's counters.
pub const INTAKE_COUNTER_COUNT: usize = intf::INTAKE_COUNTER_COUNT as usize;

/// XDP program that redirects requests to AF_XDP sockets, with its maps. It is detached when the value is dropped or
/// the process ends.
#[derive(Debug)]
pub struct RequestIntakeProgram {
    program: OwnedFd,
    sockets_by_queue: MapHandle,
    counters: MapHandle,
    link_and_mode: Option<(XdpLink, AttachedXdpMode)>,
}

impl RequestIntakeProgram {
    /// Loads the program for a device with the MAC address `mac`. It redirects datagrams to the `listeners`. Fails when
    /// there are too many listeners, or the kernel rejects the program.
    pub fn load(mac: MacAddress, listeners: &[SocketAddrV4]) -> anyhow::Result<Self> {
        let max_listeners = intf::MAX_INTAKE_LISTENERS as usize;
        ensure!(
            listeners.len() <= max_listeners,
            "{} addresses of requests: expected at most {max_listeners}",
            listeners.len()
        );
        let mut object_storage = MaybeUninit::uninit();
        let mut open_skeleton =
            IntakeSkelBuilder::default().open(&mut object_storage).context("bpf/orchestrate/intake.bpf.c")?;
        let rodata = open_skeleton.maps.rodata_data.as_deref_mut().context("intake.bpf.c without read-only data")?;
        rodata.device_mac = mac.0;
        let loaded_skeleton = open_skeleton.load().context("the kernel rejected bpf/orchestrate/intake.bpf.c")?;
        for listener in listeners {
            let listener_address = u32::from_ne_bytes(listener.ip().octets());
            let listener_key =
                intf::intake_listener { address: listener_address, port: listener.port().to_be(), unused: 0 };
            loaded_skeleton
                .maps
                .intake_listeners
                .update(listener_key.as_bytes(), &[1], MapFlags::ANY)
                .context("adding an address")?;
        }
        Ok(Self {
            program: loaded_skeleton.progs.intake.as_fd().try_clone_to_owned()?,
            sockets_by_queue: MapHandle::try_from(&loaded_skeleton.maps.intake_sockets)?,
            counters: MapHandle::try_from(&loaded_skeleton.maps.intake_counters)?,
            link_and_mode: None,
        })
    }

    /// Attaches the program to a device, in the driver if possible. Fails when the device has another XDP program.
    pub fn attach(&mut self, interface_index: u32) -> anyhow::Result<AttachedXdpMode> {
        let created_link = XdpLink::create_in_any_mode(self.program_fd(), interface_index);
        let (link, attachment) = created_link.context("attaching the XDP program: expected no other one there")?;
        self.link_and_mode = Some((link, attachment));
        Ok(attachment)
    }

    /// Returns the file descriptor of the program, for `BPF_PROG_TEST_RUN`.
    pub fn program_fd(&self) -> BorrowedFd<'_> {
        self.program.as_fd()
    }

    /// Sets the AF_XDP socket that receives the requests of a receive queue. The socket must be bound to that queue.
    pub fn set_queue_socket(&self, queue_id: u32, socket: BorrowedFd<'_>) -> anyhow::Result<()> {
        let socket_value = (socket.as_raw_fd() as u32).to_ne_bytes();
        self.sockets_by_queue
            .update(&queue_id.to_ne_bytes(), &socket_value, MapFlags::ANY)
            .context("adding an AF_XDP socket")
    }

    /// Returns the counters in the order of [`COUNTER_NAMES`]. They count from the loading of the program.
    pub fn counters(&self) -> anyhow::Result<[u64; INTAKE_COUNTER_COUNT]> {
        sum_over_cpus(&self.counters)
    }
}
