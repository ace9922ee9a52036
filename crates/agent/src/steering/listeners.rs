//! The listening sockets of a service, and whose they are, as an unmodified server made them.
//!
//! nginx's master opens one socket per worker (`listen ... reuseport`), and every process inherits all of them. Whose is
//! whose shows only in the epoll sets: each worker waits for its own. The kernel lists the members of an epoll set, with
//! inode numbers, in `/proc/PID/fdinfo/FD` (fs/eventpoll.c, ep_show_fdinfo).

use std::collections::{BTreeMap, BTreeSet};
use std::fs::{self, File};
use std::io::{BufRead as _, BufReader};
use std::net::{Ipv4Addr, SocketAddrV4};
use std::os::fd::{AsRawFd as _, FromRawFd as _, OwnedFd};
use std::path::Path;

use anyhow::Context as _;

/// An inode number of the kernel's file system of sockets: names a socket as long as it lives.
pub type Inode = u64;

/// A listening socket and the process that waits for it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Listener {
    /// The socket.
    pub inode: Inode,
    /// Its number in the process.
    pub descriptor: i32,
    /// The process.
    pub pid: i32,
    /// CPUs that the process may run on.
    pub affinity: BTreeSet<usize>,
}

/// Inodes of the sockets that listen at `address`; if there are none, of those that listen at its port on any address
/// (the kernel prefers the more specific ones just so).
///
/// # Errors
/// When the kernel's list cannot be read.
pub fn listening(address: SocketAddrV4) -> anyhow::Result<BTreeSet<Inode>> {
    // Not /proc/net: that is the namespace of the process's first thread.
    let path = "/proc/thread-self/net/tcp";
    let lines = BufReader::new(File::open(path).context(path)?).lines();
    let (mut exact, mut any) = (BTreeSet::new(), BTreeSet::new());
    for line in lines.skip(1) {
        // Listening sockets come first (net/ipv4/tcp_ipv4.c, tcp_seq_start): the many others need not be read.
        let Some((socket, inode)) = parse_listening(&line.context(path)?) else { break };
        if socket == address {
            exact.insert(inode);
        } else if socket == SocketAddrV4::new(Ipv4Addr::UNSPECIFIED, address.port()) {
            any.insert(inode);
        }
    }
    Ok(if exact.is_empty() { any } else { exact })
}

/// Address and inode of a line of /proc/net/tcp; `None` for a socket that does not listen.
fn parse_listening(line: &str) -> Option<(SocketAddrV4, Inode)> {
    const LISTEN: &str = "0A";
    let words: Vec<&str> = line.split_whitespace().collect();
    let (local, state, inode) = (words.get(1)?, words.get(3)?, words.get(9)?);
    let (address, port) = local.split_once(':')?;
    // The address is the word as it stands in memory, the port a number.
    let address = Ipv4Addr::from(u32::from_str_radix(address, 16).ok()?.to_ne_bytes());
    let port = u16::from_str_radix(port, 16).ok()?;
    (*state == LISTEN).then_some((SocketAddrV4::new(address, port), inode.parse().ok()?))
}

/// Who waits for each of these sockets: looks through the epoll sets of every process that may be looked into.
///
/// # Errors
/// When /proc cannot be read.
pub fn waiting(inodes: &BTreeSet<Inode>) -> anyhow::Result<Vec<Listener>> {
    let mut found: BTreeMap<Inode, Listener> = BTreeMap::new();
    for entry in fs::read_dir("/proc").context("/proc")?.flatten() {
        let Some(pid) = entry.file_name().to_str().and_then(|name| name.parse::<i32>().ok()) else { continue };
        // A process that has just ended has none.
        for (inode, descriptor) in epoll_members(&entry.path()).unwrap_or_default() {
            if inodes.contains(&inode) {
                let affinity = affinity(pid);
                found.entry(inode).or_insert(Listener { inode, descriptor, pid, affinity });
            }
        }
    }
    Ok(found.into_values().collect())
}

/// Members of all epoll sets of a process: inode and descriptor.
fn epoll_members(process: &Path) -> std::io::Result<Vec<(Inode, i32)>> {
    let mut members = Vec::new();
    for entry in fs::read_dir(process.join("fd"))?.flatten() {
        let target = fs::read_link(entry.path()).unwrap_or_default();
        if target.as_os_str() != "anon_inode:[eventpoll]" {
            continue;
        }
        let info = fs::read_to_string(process.join("fdinfo").join(entry.file_name())).unwrap_or_default();
        members.extend(info.lines().filter_map(parse_epoll_member));
    }
    Ok(members)
}

/// `tfd:        8 events:     2019 data: 7f0e...  pos:0 ino:5a3f sdev:9`, numbers but the first in hexadecimal.
fn parse_epoll_member(line: &str) -> Option<(Inode, i32)> {
    let mut words = line.strip_prefix("tfd:")?.split_whitespace();
    let descriptor = words.next()?.parse().ok()?;
    let inode = words.find_map(|word| word.strip_prefix("ino:"))?;
    Some((Inode::from_str_radix(inode, 16).ok()?, descriptor))
}

fn affinity(pid: i32) -> BTreeSet<usize> {
    let set = nix::sched::sched_getaffinity(nix::unistd::Pid::from_raw(pid)).unwrap_or_default();
    (0..nix::sched::CpuSet::count()).filter(|cpu| set.is_set(*cpu).unwrap_or(false)).collect()
}

/// A descriptor of our own for another process's socket (pidfd_getfd, Linux 5.6).
///
/// # Errors
/// When the process has ended, or we may not look into it (CAP_SYS_PTRACE).
pub fn take(listener: &Listener) -> anyhow::Result<OwnedFd> {
    let own = |result: libc::c_long| {
        // SAFETY: the system call returned a new descriptor that nobody else owns.
        nix::errno::Errno::result(result).map(|descriptor| unsafe { OwnedFd::from_raw_fd(descriptor as i32) })
    };
    // SAFETY: takes no pointers.
    let process = own(unsafe { libc::syscall(libc::SYS_pidfd_open, listener.pid, 0) })
        .with_context(|| format!("process {}", listener.pid))?;
    // SAFETY: takes no pointers.
    own(unsafe { libc::syscall(libc::SYS_pidfd_getfd, process.as_raw_fd(), listener.descriptor, 0) })
        .with_context(|| format!("descriptor {} of process {}", listener.descriptor, listener.pid))
}

/// What identifies the socket in the kernel's map of steered sockets (SO_COOKIE).
///
/// # Errors
/// When it is no socket.
pub fn socket_cookie(socket: &OwnedFd) -> anyhow::Result<u64> {
    let mut cookie = 0u64;
    let mut length = size_of_val(&cookie) as libc::socklen_t;
    // SAFETY: both pointers are of variables that live until the call returns, and the length is the first's.
    let result = unsafe {
        libc::getsockopt(
            socket.as_raw_fd(),
            libc::SOL_SOCKET,
            libc::SO_COOKIE,
            (&raw mut cookie).cast(),
            &raw mut length,
        )
    };
    nix::errno::Errno::result(result).context("SO_COOKIE")?;
    Ok(cookie)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_of_the_kernel() {
        let listens =
            "   0: 0100C80A:0050 00000000:0000 0A 00000000:00000000 00:00000000 00000000     0        0 23103 1";
        assert_eq!(parse_listening(listens), Some(("10.200.0.1:80".parse().unwrap(), 23103)));
        let established = "   5: 0100C80A:0050 0700010A:A000 01 00000000:00000000 00:00000000 00000000  0  0 23107 1";
        assert_eq!(parse_listening(established), None);
        let member = "tfd:        8 events:     2019 data:     7f0e64a2c010  pos:0 ino:5a3f sdev:9";
        assert_eq!(parse_epoll_member(member), Some((0x5a3f, 8)));
        assert_eq!(parse_epoll_member("pos:\t0"), None);
    }

    #[test]
    fn a_socket_of_our_own_is_found_in_our_epoll_set() {
        let socket = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let std::net::SocketAddr::V4(address) = socket.local_addr().unwrap() else { panic!("IPv4") };
        let inodes = listening(address).unwrap();
        assert_eq!(inodes.len(), 1);
        // SAFETY: takes no pointers and returns a new descriptor.
        let epoll = unsafe { OwnedFd::from_raw_fd(libc::epoll_create1(libc::EPOLL_CLOEXEC)) };
        let mut event = libc::epoll_event { events: libc::EPOLLIN as u32, u64: 0 };
        // SAFETY: the event lives until the call returns.
        let added =
            unsafe { libc::epoll_ctl(epoll.as_raw_fd(), libc::EPOLL_CTL_ADD, socket.as_raw_fd(), &raw mut event) };
        assert_eq!(added, 0);
        let found = waiting(&inodes).unwrap();
        assert_eq!(found.len(), 1, "{found:?}");
        assert_eq!((found[0].pid, found[0].descriptor), (std::process::id() as i32, socket.as_raw_fd()));
        assert!(!found[0].affinity.is_empty());
        let taken = take(&found[0]).unwrap();
        assert_eq!(socket_cookie(&taken).unwrap(), socket_cookie(&socket.into()).unwrap());
    }
}
