//! Loads `bpf/server/steer.bpf.c` at a group of listening sockets, among which it selects one for each connection.
//!
//! A restarted agent takes over the pins `workers` and `state`, which are below `steer/NAME/` in one directory of a
//! bpffs. It also replaces the attached program, for the reason in [`crate::reuseport`].

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
use crate::reuseport::{self, ReuseportSocketArray, SocketCookie};
use crate::skeleton::steer::SteerSkelBuilder;

/// Names of the counters that [`ConnectionSteeringProgram::counters`] returns.
pub use coreward_intf::STEER_COUNTER_NAMES as COUNTER_NAMES;

/// Number of counters of the steering program.
pub const STEER_COUNTER_COUNT: usize = intf::STEER_COUNTER_COUNT as usize;

/// BPF program that selects a listening socket for each connection to one service. It continues to run after the value
/// is dropped.
#[derive(Debug)]
pub struct ConnectionSteeringProgram {
    selection_program: OwnedFd,
    worker_sockets: ReuseportSocketArray,
    state: MmapArray<intf::steer_state>,
    is_state_taken_over: bool,
}

/// Read access to the pinned steering counters of one service, even if no agent is running.
#[derive(Debug)]
pub struct ConnectionSteeringCounters(MmapArray<intf::steer_state>);

impl ConnectionSteeringCounters {
    /// Opens the counters that [`ConnectionSteeringProgram::load`] pinned. Fails when nothing is pinned, or the pins
    /// are of another version.
    pub fn open_pinned(pin_directory: &Path, service_name: &str) -> anyhow::Result<Self> {
        let state_path = pin_directory.join("steer").join(service_name).join("state");
        let state_map = MapHandle::from_pinned_path(&state_path).with_context(|| state_path.display().to_string())?;
        let (found_bytes, expected_bytes) = (state_map.value_size() as usize, size_of::<intf::steer_state>());
        anyhow::ensure!(
            found_bytes == expected_bytes,
            "{}: {found_bytes} bytes of another version, expected {expected_bytes}",
            state_path.display()
        );
        Ok(Self(MmapArray::new(&state_map)?))
    }

    /// Returns the counters in the order of [`COUNTER_NAMES`].
    pub fn counter_values(&self) -> [u64; STEER_COUNTER_COUNT] {
        *self.0.read(offset_of!(intf::steer_state, counters))
    }
}

impl ConnectionSteeringProgram {
    /// Loads the program for a service, whose name is part of the pins' path. Pinned sockets stay in their slots.
    /// `rss_map` is the map that [`ServerPrograms::rss_map_fd`](crate::server::ServerPrograms::rss_map_fd) returns.
    /// Fails when the pin directory is not on a bpffs, the pins are of another version, or the kernel rejects the
    /// program.
    pub fn load(pin_directory: &Path, service_name: &str, rss_map: BorrowedFd<'_>) -> anyhow::Result<Self> {
        let service_directory = pin_directory.join("steer").join(service_name);
        fs::create_dir_all(&service_directory).with_context(|| service_directory.display().to_string())?;
        let is_state_taken_over = service_directory.join("workers").exists();
        let mut object_storage = MaybeUninit::uninit();
        let mut open_skeleton =
            SteerSkelBuilder::default().open(&mut object_storage).context("bpf/server/steer.bpf.c")?;
        open_skeleton.maps.rss_mapping.reuse_fd(rss_map).context("the map of the server's RSS")?;
        open_skeleton.maps.workers.set_pin_path(service_directory.join("workers"))?;
        open_skeleton.maps.bss_steer.set_pin_path(service_directory.join("state"))?;
        let loaded_skeleton = open_skeleton.load().with_context(|| {
            format!(
                "the kernel rejected bpf/server/steer.bpf.c, or {} is of another version (remove it then)",
                service_directory.display()
            )
        })?;
        let steer_program = Self {
            selection_program: loaded_skeleton.progs.steer.as_fd().try_clone_to_owned()?,
            worker_sockets: ReuseportSocketArray::new(
                (&loaded_skeleton.maps.workers).try_into()?,
                intf::MAX_STEERED_SOCKETS,
            ),
            state: MmapArray::new(&loaded_skeleton.maps.bss_steer).context("mapping steer_state")?,
            is_state_taken_over,
        };
        if !is_state_taken_over {
            steer_program.set_socket_slots_by_queue(&[]);
        }
        Ok(steer_program)
    }

    /// Returns whether the program has taken over the pinned state of an earlier process.
    pub fn is_state_taken_over(&self) -> bool {
        self.is_state_taken_over
    }

    /// Attaches the program to the SO_REUSEPORT group that contains `socket`, and replaces the group's program, if any.
    /// Fails when the socket is in no such group.
    pub fn attach_to_socket_group(&self, socket: BorrowedFd<'_>) -> anyhow::Result<()> {
        reuseport::attach_to_reuseport_group(self.selection_program.as_fd(), socket)
    }

    /// Returns the cookie of the socket in each used slot. The kernel clears the slot of a closed socket.
    pub fn socket_cookies_by_slot(&self) -> BTreeMap<u32, SocketCookie> {
        self.worker_sockets.socket_cookies_by_slot()
    }

    /// Inserts a listening socket into a free slot and returns that slot. Fails when all slots are taken, the socket
    /// does not listen, or it is in another array.
    pub fn add_listening_socket(&self, socket: BorrowedFd<'_>) -> anyhow::Result<u32> {
        let free_slot = self.worker_sockets.find_free_slot()?;
        self.worker_sockets.insert_socket(free_slot, socket)?;
        Ok(free_slot)
    }

    /// Sets the slot whose socket gets the connections of each receive queue. For `None`, and for queues beyond the
    /// list, the kernel selects the socket. Panics with more than [`MAX_STEERED_QUEUES`](intf::MAX_STEERED_QUEUES)
    /// queues.
    pub fn set_socket_slots_by_queue(&self, slots: &[Option<u32>]) {
        let mut slots_by_queue = [intf::NO_SOCKET; intf::MAX_STEERED_QUEUES as usize];
        for (queue_entry, slot) in slots_by_queue[..slots.len()].iter_mut().zip(slots) {
            *queue_entry = slot.unwrap_or(intf::NO_SOCKET);
        }
        self.state.write(offset_of!(intf::steer_state, socket_of_queue), &slots_by_queue);
    }

    /// Returns the counters in the order of [`COUNTER_NAMES`].
    pub fn counters(&self) -> [u64; STEER_COUNTER_COUNT] {
        *self.state.read(offset_of!(intf::steer_state, counters))
    }
}
