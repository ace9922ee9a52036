//! Sockets of a service and their processes, for an unmodified server: listening sockets (TCP), or unconnected ones
//! (UDP).
//!
//! nginx's master opens one socket per worker (`listen ... reuseport`), and every process inherits all of them. Only
//! epoll sets show which worker uses which socket. The kernel lists the members of an epoll set, with inode numbers,
//! in `/proc/PID/fdinfo/FD` (fs/eventpoll.c, ep_show_fdinfo). A UDP worker may read its socket without epoll: then
//! only the open descriptors show the owner ([`find_owners`]).

use std::collections::{BTreeMap, BTreeSet};
use std::fs::{self, File};
use std::io::{BufRead as _, BufReader};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::os::fd::{AsRawFd as _, FromRawFd as _, OwnedFd};
use std::path::Path;

use anyhow::Context as _;

use crate::sockets::{self, Inode};

/// Socket of a service, with a process that has it open.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Listener {
    /// Inode number of the socket.
    pub inode: Inode,
    /// Number of the socket's file descriptor in the process.
    pub descriptor: i32,
    /// Id of the process.
    pub pid: i32,
    /// CPUs on which the process may run.
    pub cpu_affinity: BTreeSet<usize>,
}

/// Returns the inodes of TCP sockets that listen at `address`. If there are none, returns those that listen at its port
/// on the wildcard address, as the kernel does. Fails when the kernel's list cannot be read.
pub fn tcp_listener_inodes(address: SocketAddr) -> anyhow::Result<BTreeSet<Inode>> {
    Ok(most_specific(address, &sockets::counts::listening_sockets()?))
}

/// Returns the inodes of unconnected UDP sockets at `address`. If there are none, returns those at its port on 0.0.0.0,
/// or else on `[::]`, which also receives IPv4. Fails when the kernel's lists cannot be read.
pub fn udp_socket_inodes(address: SocketAddr) -> anyhow::Result<BTreeSet<Inode>> {
    // The kernel's state TCP_CLOSE: not connected.
    const UNCONNECTED: &str = "07";
    let mut sockets = sockets_in("udp", UNCONNECTED)?;
    // A kernel without IPv6 has no /proc/net/udp6.
    sockets.extend(sockets_in("udp6", UNCONNECTED).unwrap_or_default());
    Ok(most_specific(address, &sockets))
}

/// Returns those of `sockets` that connections to `address` reach: sockets bound to this address or, if there are none,
/// to its port on the wildcard address.
pub fn most_specific(address: SocketAddr, sockets: &[(SocketAddr, Inode)]) -> BTreeSet<Inode> {
    let any_ipv4 = SocketAddr::new(Ipv4Addr::UNSPECIFIED.into(), address.port());
    let any = SocketAddr::new(Ipv6Addr::UNSPECIFIED.into(), address.port());
    let candidates: &[SocketAddr] = if address.is_ipv4() { &[address, any_ipv4, any] } else { &[address, any] };
    let at = |address: &SocketAddr| -> BTreeSet<Inode> {
        sockets.iter().filter(|(socket, _)| socket == address).map(|(_, inode)| *inode).collect()
    };
    candidates.iter().map(at).find(|found| !found.is_empty()).unwrap_or_default()
}

fn sockets_in(file: &str, state: &str) -> anyhow::Result<Vec<(SocketAddr, Inode)>> {
    // /proc/net would show the network namespace of the process's first thread.
    let path = format!("/proc/thread-self/net/{file}");
    let mut sockets = Vec::new();
    for line in BufReader::new(File::open(&path).with_context(|| path.clone())?).lines().skip(1) {
        let line = line.with_context(|| path.clone())?;
        match parse_socket(&line) {
            Some((socket, of, inode)) if of == state => sockets.push((socket, inode)),
            _ => {}
        }
    }
    Ok(sockets)
}

/// Parses a line of /proc/net/tcp, udp or udp6. Returns the local address, the state and the inode of the socket.
fn parse_socket(line: &str) -> Option<(SocketAddr, &str, Inode)> {
    let mut words = line.split_whitespace();
    let (local, state) = (words.nth(1)?, words.nth(1)?);
    let inode = words.nth(5)?.parse().ok()?;
    let (address, port) = local.split_once(':')?;
    // The address is written as 32-bit words in memory order, the port as a number.
    let word = |at: usize| u32::from_str_radix(address.get(at * 8..at * 8 + 8)?, 16).ok().map(u32::to_ne_bytes);
    let ip: IpAddr = match address.len() {
        8 => Ipv4Addr::from(word(0)?).into(),
        32 => {
            let bytes: Vec<u8> = (0..4).map(word).collect::<Option<Vec<_>>>()?.concat();
            Ipv6Addr::from(<[u8; 16]>::try_from(bytes).ok()?).to_canonical()
        }
        _ => return None,
    };
    Some((SocketAddr::new(ip, u16::from_str_radix(port, 16).ok()?), state, inode))
}

/// Finds, for each of these sockets, a process that has it in an epoll set. Fails when /proc cannot be read.
pub fn find_waiters(inodes: &BTreeSet<Inode>) -> anyhow::Result<Vec<Listener>> {
    let mut found: BTreeMap<Inode, Listener> = BTreeMap::new();
    for entry in fs::read_dir("/proc").context("/proc")?.flatten() {
        let Some(pid) = entry.file_name().to_str().and_then(|name| name.parse::<i32>().ok()) else { continue };
        // A process that has just ended has no descriptors to read.
        for (inode, descriptor) in epoll_members(&entry.path()).unwrap_or_default() {
            if inodes.contains(&inode) {
                let cpu_affinity = cpu_affinity(pid);
                found.entry(inode).or_insert(Listener { inode, descriptor, pid, cpu_affinity });
            }
        }
    }
    Ok(found.into_values().collect())
}

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

/// Parses a line `tfd:  8 events:  2019 data: 7f0e... pos:0 ino:5a3f sdev:9`, in which only `tfd` is decimal.
fn parse_epoll_member(line: &str) -> Option<(Inode, i32)> {
    let mut words = line.strip_prefix("tfd:")?.split_whitespace();
    let descriptor = words.next()?.parse().ok()?;
    let inode = words.find_map(|word| word.strip_prefix("ino:"))?;
    Some((Inode::from_str_radix(inode, 16).ok()?, descriptor))
}

/// Finds, for each of these sockets, a process that has it open. Among several (a master and workers that inherited its
/// sockets) it is the one with the fewest of these sockets, or else the youngest. Fails when /proc cannot be read.
pub fn find_owners(inodes: &BTreeSet<Inode>) -> anyhow::Result<Vec<Listener>> {
    let mut holders: Vec<(i32, Vec<(Inode, i32)>)> = Vec::new();
    for entry in fs::read_dir("/proc").context("/proc")?.flatten() {
        let Some(pid) = entry.file_name().to_str().and_then(|name| name.parse::<i32>().ok()) else { continue };
        let mut held = open_sockets(&entry.path()).unwrap_or_default();
        held.retain(|(inode, _)| inodes.contains(inode));
        if !held.is_empty() {
            holders.push((pid, held));
        }
    }
    holders.sort_by_key(|(pid, held)| (held.len(), std::cmp::Reverse(*pid)));
    let mut found: BTreeMap<Inode, Listener> = BTreeMap::new();
    for (pid, held) in holders {
        for (inode, descriptor) in held {
            found.entry(inode).or_insert_with(|| Listener { inode, descriptor, pid, cpu_affinity: cpu_affinity(pid) });
        }
    }
    Ok(found.into_values().collect())
}

fn open_sockets(process: &Path) -> std::io::Result<Vec<(Inode, i32)>> {
    let socket = |entry: fs::DirEntry| {
        let target = fs::read_link(entry.path()).ok()?;
        let inode = target.to_str()?.strip_prefix("socket:[")?.strip_suffix(']')?.parse().ok()?;
        Some((inode, entry.file_name().to_str()?.parse().ok()?))
    };
    Ok(fs::read_dir(process.join("fd"))?.flatten().filter_map(socket).collect())
}

fn cpu_affinity(pid: i32) -> BTreeSet<usize> {
    let set = nix::sched::sched_getaffinity(nix::unistd::Pid::from_raw(pid)).unwrap_or_default();
    (0..nix::sched::CpuSet::count()).filter(|cpu| set.is_set(*cpu).unwrap_or(false)).collect()
}

/// Duplicates the socket of another process (pidfd_getfd, Linux 5.6). Returns the new descriptor. Fails when the
/// process has ended, or access is denied (CAP_SYS_PTRACE).
pub fn duplicate_socket(listener: &Listener) -> anyhow::Result<OwnedFd> {
    let own = |result: libc::c_long| {
        // SAFETY: the system call returned a new descriptor that nothing else owns.
        nix::errno::Errno::result(result).map(|descriptor| unsafe { OwnedFd::from_raw_fd(descriptor as i32) })
    };
    // SAFETY: takes no pointers.
    let process = own(unsafe { libc::syscall(libc::SYS_pidfd_open, listener.pid, 0) })
        .with_context(|| format!("process {}", listener.pid))?;
    // SAFETY: takes no pointers.
    own(unsafe { libc::syscall(libc::SYS_pidfd_getfd, process.as_raw_fd(), listener.descriptor, 0) })
        .with_context(|| format!("descriptor {} of process {}", listener.descriptor, listener.pid))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::fd::AsFd as _;

    use crate::reuseport::socket_cookie;

    #[test]
    fn lines_of_proc_are_parsed() {
        let listens =
            "   0: 0100C80A:0050 00000000:0000 0A 00000000:00000000 00:00000000 00000000     0        0 23103 1";
        assert_eq!(parse_socket(listens), Some(("10.200.0.1:80".parse().unwrap(), "0A", 23103)));
        let unconnected = " 3175: 00000000000000000000000000000000:0035 00000000000000000000000000000000:0000 07 \
                           00000000:00000000 00:00000000 00000000     0        0 3190 2 0000000000000000 0";
        assert_eq!(parse_socket(unconnected), Some(("[::]:53".parse().unwrap(), "07", 3190)));
        let loopback =
            "0: 00000000000000000000000001000000:0035 00000000000000000000000000000000:0000 07 0:0 0:0 0 0 0 7 2";
        assert_eq!(parse_socket(loopback), Some(("[::1]:53".parse().unwrap(), "07", 7)));
        assert_eq!(parse_socket("sl local_address"), None);
        let member = "tfd:        8 events:     2019 data:     7f0e64a2c010  pos:0 ino:5a3f sdev:9";
        assert_eq!(parse_epoll_member(member), Some((0x5a3f, 8)));
        assert_eq!(parse_epoll_member("pos:\t0"), None);
    }

    #[test]
    fn own_socket_is_found_in_own_epoll_set() {
        let socket = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let inodes = tcp_listener_inodes(socket.local_addr().unwrap()).unwrap();
        assert_eq!(inodes.len(), 1);
        // SAFETY: takes no pointers and returns a new descriptor.
        let epoll = unsafe { OwnedFd::from_raw_fd(libc::epoll_create1(libc::EPOLL_CLOEXEC)) };
        let mut event = libc::epoll_event { events: libc::EPOLLIN as u32, u64: 0 };
        // SAFETY: the event lives until the call returns.
        let added =
            unsafe { libc::epoll_ctl(epoll.as_raw_fd(), libc::EPOLL_CTL_ADD, socket.as_raw_fd(), &raw mut event) };
        assert_eq!(added, 0);
        let found = find_waiters(&inodes).unwrap();
        assert_eq!(found.len(), 1, "{found:?}");
        assert_eq!((found[0].pid, found[0].descriptor), (std::process::id() as i32, socket.as_raw_fd()));
        assert!(!found[0].cpu_affinity.is_empty());
        let taken = duplicate_socket(&found[0]).unwrap();
        assert_eq!(socket_cookie(taken.as_fd()).unwrap(), socket_cookie(socket.as_fd()).unwrap());
    }

    #[test]
    fn reader_of_a_udp_socket_without_epoll_is_found() {
        let socket = std::net::UdpSocket::bind("127.0.0.1:0").unwrap();
        let inodes = udp_socket_inodes(socket.local_addr().unwrap()).unwrap();
        assert_eq!(inodes.len(), 1);
        assert_eq!(find_waiters(&inodes).unwrap(), []);
        let found = find_owners(&inodes).unwrap();
        assert_eq!(found.len(), 1, "{found:?}");
        assert_eq!((found[0].pid, found[0].descriptor), (std::process::id() as i32, socket.as_raw_fd()));
    }

    #[test]
    fn most_specific_address_wins() {
        let sockets: Vec<(SocketAddr, Inode)> =
            [("10.0.0.1:53", 1), ("0.0.0.0:53", 2), ("[::]:53", 3), ("[::]:54", 4), ("10.0.0.1:54", 5)]
                .map(|(socket, inode)| (socket.parse().unwrap(), inode))
                .to_vec();
        let found = |address: &str| most_specific(address.parse().unwrap(), &sockets).into_iter().collect::<Vec<_>>();
        assert_eq!(found("10.0.0.1:53"), [1]);
        assert_eq!(found("10.0.0.2:53"), [2]);
        assert_eq!(found("[fd00::1]:53"), [3]);
        assert_eq!(found("10.0.0.2:54"), [4]);
        assert_eq!(found("10.0.0.2:55"), []);
    }
}
