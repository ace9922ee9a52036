//! `bpf/server/steer.bpf.c` at a group of listening sockets: loading, attaching, pinning, take-over, counters.
//!
//! A restarted agent takes over the pins below `steer/NAME/` of one directory of a bpffs (`workers` and `state`) and
//! replaces the attached program, for the reason in [`crate::reuseport`].

use std::collections::BTreeMap;
use std::fs;
use std::mem::{MaybeUninit, offset_of};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::Path;

use anyhow::Context as _;
use coreward_intf as intf;
use libbpf_rs::MapCore as _;
use libbpf_rs::MapHandle;
use libbpf_rs::skel::{OpenSkel as _, SkelBuilder as _};

use crate::mmap_array::MmapArray;
use crate::reuseport::{self, SocketArray, SocketCookie};
use crate::skeleton::steer::SteerSkelBuilder;

/// Names of the counters that [`SteerProgram::counters`] returns.
pub use coreward_intf::STEER_COUNTER_NAMES as COUNTER_NAMES;

/// Number of counters of the steering program.
pub const COUNTER_COUNT: usize = intf::STEER_COUNTER_COUNT as usize;

/// BPF program that steers one service's connections to sockets. It continues to work after the value is dropped.
#[derive(Debug)]
pub struct SteerProgram {
    program: OwnedFd,
    workers: SocketArray,
    state: MmapArray<intf::steer_state>,
    is_taken_over: bool,
}

/// Read access to the steering counters of one service, for which the agent need not run.
#[derive(Debug)]
pub struct SteerCounters(MmapArray<intf::steer_state>);

impl SteerCounters {
    /// Opens the pins of [`SteerProgram::load`]. Fails when nothing is pinned, or the pins are of another version.
    pub fn open_pinned(pin_directory: &Path, name: &str) -> anyhow::Result<Self> {
        let path = pin_directory.join("steer").join(name).join("state");
        let map = MapHandle::from_pinned_path(&path).with_context(|| path.display().to_string())?;
        let (found, expected) = (map.value_size() as usize, size_of::<intf::steer_state>());
        anyhow::ensure!(found == expected, "{}: {found} bytes of another version, expected {expected}", path.display());
        Ok(Self(MmapArray::new(&map)?))
    }

    /// Returns the counters in the order of [`COUNTER_NAMES`].
    pub fn values(&self) -> [u64; COUNTER_COUNT] {
        *self.0.read(offset_of!(intf::steer_state, counters))
    }
}

impl SteerProgram {
    /// Loads the program. `name`, the service's name, becomes part of the pins' path; pinned sockets stay in their
    /// slots. `rss_map` is [`rss_map`](crate::server::ServerPrograms::rss_map) of the server's programs. Fails when the
    /// pin directory is not on a bpffs, the pins are of another version, or the kernel rejects the program.
    pub fn load(pin_directory: &Path, name: &str, rss_map: BorrowedFd<'_>) -> anyhow::Result<Self> {
        let pins = pin_directory.join("steer").join(name);
        fs::create_dir_all(&pins).with_context(|| pins.display().to_string())?;
        let is_taken_over = pins.join("workers").exists();
        let mut storage = MaybeUninit::uninit();
        let mut open = SteerSkelBuilder::default().open(&mut storage).context("bpf/server/steer.bpf.c")?;
        open.maps.rss_mapping.reuse_fd(rss_map).context("the map of the server's RSS")?;
        open.maps.workers.set_pin_path(pins.join("workers"))?;
        open.maps.bss_steer.set_pin_path(pins.join("state"))?;
        let loaded = open.load().with_context(|| {
            format!(
                "the kernel refused bpf/server/steer.bpf.c, or {} is of another version (remove it then)",
                pins.display()
            )
        })?;
        let steer = Self {
            program: loaded.progs.steer.as_fd().try_clone_to_owned()?,
            workers: SocketArray::new((&loaded.maps.workers).try_into()?, intf::MAX_STEERED_SOCKETS),
            state: MmapArray::new(&loaded.maps.bss_steer).context("mapping steer_state")?,
            is_taken_over,
        };
        if !is_taken_over {
            steer.set_queues(&[]);
        }
        Ok(steer)
    }

    /// Returns whether the pinned state of an earlier process was taken over.
    pub fn is_taken_over(&self) -> bool {
        self.is_taken_over
    }

    /// Attaches the program to the SO_REUSEPORT group of `socket`, in place of an attached program. Fails when the
    /// socket is in no such group.
    pub fn attach(&self, socket: BorrowedFd<'_>) -> anyhow::Result<()> {
        reuseport::attach(self.program.as_fd(), socket)
    }

    /// Returns the cookie of the socket in each used slot. The kernel clears the slot of a closed socket.
    pub fn sockets(&self) -> BTreeMap<u32, SocketCookie> {
        self.workers.sockets()
    }

    /// Inserts a listening socket into a free slot and returns that slot. Fails when all slots are taken, the socket
    /// does not listen, or it is in another array.
    pub fn add_socket(&self, socket: BorrowedFd<'_>) -> anyhow::Result<u32> {
        let slot = self.workers.free_slot()?;
        self.workers.insert(slot, socket)?;
        Ok(slot)
    }

    /// Sets the slot of the socket that gets each receive queue's connections. For `None`, and for queues beyond the
    /// list, the kernel selects. Panics with more than [`MAX_STEERED_QUEUES`](intf::MAX_STEERED_QUEUES) queues.
    pub fn set_queues(&self, slots: &[Option<u32>]) {
        let mut queues = [intf::NO_SOCKET; intf::MAX_STEERED_QUEUES as usize];
        for (queue, slot) in queues[..slots.len()].iter_mut().zip(slots) {
            *queue = slot.unwrap_or(intf::NO_SOCKET);
        }
        self.state.write(offset_of!(intf::steer_state, socket_of_queue), &queues);
    }

    /// Returns the counters in the order of [`COUNTER_NAMES`].
    pub fn counters(&self) -> [u64; COUNTER_COUNT] {
        *self.state.read(offset_of!(intf::steer_state, counters))
    }
}
