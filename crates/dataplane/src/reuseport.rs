//! Groups of SO_REUSEPORT sockets, with the program that selects a socket and the array of sockets that it uses.
//!
//! A socket can be in only one REUSEPORT_SOCKARRAY. Therefore a restarted process takes over the pinned array and
//! replaces the attached program.

use std::collections::BTreeMap;
use std::os::fd::{AsRawFd as _, BorrowedFd};

use anyhow::{Context as _, bail};
use libbpf_rs::{MapCore as _, MapFlags, MapHandle};

/// Cookie (SO_COOKIE) that identifies a socket for its lifetime.
pub type SocketCookie = u64;

/// Attaches a program of type sk_reuseport to the SO_REUSEPORT group that contains `socket`, in place of the group's
/// present program, if any. Fails when the socket is in no such group.
pub fn attach_to_reuseport_group(program: BorrowedFd<'_>, socket: BorrowedFd<'_>) -> anyhow::Result<()> {
    set_socket_option(socket, libc::SO_ATTACH_REUSEPORT_EBPF, program.as_raw_fd())
        .context("attaching to the group of sockets")
}

/// Detaches the program from the SO_REUSEPORT group that contains `socket`, so that the kernel selects sockets by hash
/// again. Fails when no program is attached.
pub fn detach_from_reuseport_group(socket: BorrowedFd<'_>) -> anyhow::Result<()> {
    set_socket_option(socket, libc::SO_DETACH_REUSEPORT_BPF, 0).context("detaching from the group of sockets")
}

fn set_socket_option(socket: BorrowedFd<'_>, option: libc::c_int, value: i32) -> nix::Result<()> {
    // SAFETY: the pointer and the length are those of an int that lives until the call returns.
    let result = unsafe {
        libc::setsockopt(
            socket.as_raw_fd(),
            libc::SOL_SOCKET,
            option,
            (&raw const value).cast(),
            size_of_val(&value) as u32,
        )
    };
    nix::errno::Errno::result(result).map(drop)
}

/// Returns the cookie of a socket. Fails when the descriptor is not a socket.
pub fn socket_cookie(socket: BorrowedFd<'_>) -> anyhow::Result<SocketCookie> {
    let mut socket_cookie: SocketCookie = 0;
    let mut length = size_of_val(&socket_cookie) as libc::socklen_t;
    // SAFETY: both pointers are of variables that live until the call returns, and the length is the first's.
    let result = unsafe {
        libc::getsockopt(
            socket.as_raw_fd(),
            libc::SOL_SOCKET,
            libc::SO_COOKIE,
            (&raw mut socket_cookie).cast(),
            &raw mut length,
        )
    };
    nix::errno::Errno::result(result).context("SO_COOKIE")?;
    Ok(socket_cookie)
}

/// BPF map of type BPF_MAP_TYPE_REUSEPORT_SOCKARRAY, which contains a socket in each used slot.
#[derive(Debug)]
pub struct ReuseportSocketArray {
    map: MapHandle,
    slot_count: u32,
}

impl ReuseportSocketArray {
    /// Wraps `map`, which must be of type BPF_MAP_TYPE_REUSEPORT_SOCKARRAY and have `slot_count` slots.
    pub fn new(map: MapHandle, slot_count: u32) -> Self {
        Self { map, slot_count }
    }

    /// Returns the cookie of the socket in each used slot. The kernel clears the slot of a closed socket.
    pub fn socket_cookies_by_slot(&self) -> BTreeMap<u32, SocketCookie> {
        let cookie_in_slot = |slot: u32| {
            let value = self.map.lookup(&slot.to_ne_bytes(), MapFlags::ANY).ok()??;
            Some((slot, SocketCookie::from_ne_bytes(value.try_into().ok()?)))
        };
        (0..self.slot_count).filter_map(cookie_in_slot).collect()
    }

    /// Returns the first slot without a socket. Fails when all slots are taken.
    pub fn find_free_slot(&self) -> anyhow::Result<u32> {
        let used_slots = self.socket_cookies_by_slot();
        let Some(slot) = (0..self.slot_count).find(|slot| !used_slots.contains_key(slot)) else {
            bail!("more than {} sockets of one service", self.slot_count);
        };
        Ok(slot)
    }

    /// Inserts a socket into an empty slot. Fails when the slot is in use, or the socket is in no SO_REUSEPORT group or
    /// in another array.
    pub fn insert_socket(&self, slot: u32, socket: BorrowedFd<'_>) -> anyhow::Result<()> {
        let fd_value = socket.as_raw_fd() as u64;
        self.map
            .update(&slot.to_ne_bytes(), &fd_value.to_ne_bytes(), MapFlags::NO_EXIST)
            .context("a socket cannot be put into the array (is it in another one, or without SO_REUSEPORT?)")
    }

    /// Removes the socket from a slot, if the slot has one.
    pub fn clear_slot(&self, slot: u32) {
        if let Err(error) = self.map.delete(&slot.to_ne_bytes()) {
            tracing::debug!(
                event = "slot-not-cleared",
                slot,
                %error,
                "the daemon cannot remove a worker's socket from its slot in the BPF array"
            );
        }
    }
}
