//! System calls for the event loops of load generators and the testbed's servers: the clock, and epoll with time-outs
//! in nanoseconds. A request costs these programs a few microseconds, and an async runtime would add to that.

use std::io;
use std::net::{TcpListener, TcpStream};
use std::os::fd::{AsRawFd as _, BorrowedFd, FromRawFd as _, OwnedFd};
use std::time::Duration;

/// Returns the time of CLOCK_MONOTONIC (ns), which is the same in all processes of a time namespace.
pub fn now_ns() -> u64 {
    let monotonic_time =
        nix::time::clock_gettime(nix::time::ClockId::CLOCK_MONOTONIC).expect("every kernel has this clock");
    Duration::from(monotonic_time).as_nanos() as u64
}

/// Event that epoll has reported for one file descriptor.
#[derive(Debug, Clone, Copy)]
pub struct ReadyEvent {
    /// Token that was passed to [`Epoll::add`] with the descriptor.
    pub token: u64,
    /// Combination of EPOLLIN, EPOLLOUT, EPOLLERR, EPOLLHUP and EPOLLRDHUP.
    pub epoll_flags: u32,
}

impl ReadyEvent {
    pub fn has_flags(self, flags: i32) -> bool {
        self.epoll_flags & flags as u32 != 0
    }
}

/// Set of file descriptors that epoll(7) watches. A descriptor leaves the set when it is closed.
#[derive(Debug)]
pub struct Epoll {
    epoll_fd: OwnedFd,
    ready_events: Vec<libc::epoll_event>,
}

impl Epoll {
    /// Creates an empty set. Fails when the process has no descriptors left.
    pub fn new() -> io::Result<Self> {
        // SAFETY: takes a flag, returns a new descriptor or -1.
        let epoll_fd = check_syscall_result(unsafe { libc::epoll_create1(libc::EPOLL_CLOEXEC) })?;
        // SAFETY: new, owned by nothing else.
        let epoll_fd = unsafe { OwnedFd::from_raw_fd(epoll_fd) };
        Ok(Self { epoll_fd, ready_events: vec![libc::epoll_event { events: 0, u64: 0 }; 256] })
    }

    /// Adds a descriptor, whose events then carry `token`. `flags` are those of epoll_ctl(2). Fails when the kernel
    /// refuses, for instance because the descriptor is in the set already.
    pub fn add(&self, descriptor: BorrowedFd<'_>, token: u64, flags: i32) -> io::Result<()> {
        let mut event = libc::epoll_event { events: flags as u32, u64: token };
        let (set_descriptor, descriptor) = (self.epoll_fd.as_raw_fd(), descriptor.as_raw_fd());
        // SAFETY: both descriptors are open, and the kernel copies the event before it returns.
        check_syscall_result(unsafe { libc::epoll_ctl(set_descriptor, libc::EPOLL_CTL_ADD, descriptor, &mut event) })?;
        Ok(())
    }

    /// Removes an open descriptor from the set. Fails when the set does not contain it.
    pub fn remove(&self, descriptor: BorrowedFd<'_>) -> io::Result<()> {
        let (set_descriptor, descriptor) = (self.epoll_fd.as_raw_fd(), descriptor.as_raw_fd());
        // SAFETY: both descriptors are open; removal takes no event.
        check_syscall_result(unsafe {
            libc::epoll_ctl(set_descriptor, libc::EPOLL_CTL_DEL, descriptor, std::ptr::null_mut())
        })?;
        Ok(())
    }

    /// Waits until a descriptor is ready, and returns the events. Returns none after a signal or, if `until_ns` is
    /// given, at that time of the clock [`now_ns`].
    pub fn wait(&mut self, until_ns: Option<u64>) -> io::Result<impl Iterator<Item = ReadyEvent> + use<'_>> {
        let relative_timeout = until_ns.map(|until_ns| {
            let remaining_time = Duration::from_nanos(until_ns.saturating_sub(now_ns()));
            libc::timespec {
                tv_sec: remaining_time.as_secs() as i64,
                tv_nsec: i64::from(remaining_time.subsec_nanos()),
            }
        });
        let timeout_pointer = relative_timeout.as_ref().map_or(std::ptr::null(), std::ptr::from_ref);
        let (set_descriptor, capacity) = (self.epoll_fd.as_raw_fd(), self.ready_events.len() as i32);
        // SAFETY: `ready_events` has room for `capacity` events, `timeout` is null or outlives the call, no signal mask
        // is given.
        let ready_count = check_syscall_result(unsafe {
            libc::epoll_pwait2(
                set_descriptor,
                self.ready_events.as_mut_ptr(),
                capacity,
                timeout_pointer,
                std::ptr::null(),
            )
        });
        let ready_count = match ready_count {
            Err(error) if error.kind() == io::ErrorKind::Interrupted => 0,
            result => result?,
        };
        Ok(self.ready_events[..ready_count as usize]
            .iter()
            .map(|event| ReadyEvent { token: event.u64, epoll_flags: event.events }))
    }
}

/// Accepts the next connection of a nonblocking listener as a nonblocking stream. Returns `None` when no connection
/// waits. Fails when the process has no descriptors left.
pub fn accept_nonblocking(listener: &TcpListener) -> io::Result<Option<TcpStream>> {
    loop {
        match listener.accept() {
            Ok((stream, _)) => {
                stream.set_nonblocking(true)?;
                stream.set_nodelay(true)?;
                return Ok(Some(stream));
            }
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(None),
            // The client closed this connection before it was accepted, so the next one is tried.
            Err(error) if error.kind() == io::ErrorKind::ConnectionAborted => {}
            Err(error) => return Err(error),
        }
    }
}

fn check_syscall_result(result: i32) -> io::Result<i32> {
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(result) }
}
