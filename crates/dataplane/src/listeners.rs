//! Listening (TCP) or unconnected (UDP) sockets of an unmodified server, and the processes that use them.
//!
//! nginx's master opens one socket per worker (`listen ... reuseport`), and every process inherits all of them. Only
//! epoll sets show which worker uses which socket. The kernel lists the members of an epoll set, with their inode
//! numbers, in `/proc/PID/fdinfo/FD` (fs/eventpoll.c, ep_show_fdinfo). A UDP worker may read its socket without epoll.
//! In that case only the open descriptors show the owner ([`find_owning_processes`]).

use std::collections::{BTreeMap, BTreeSet};
use std::fs::{self, File};
use std::io::{BufRead as _, BufReader};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::os::fd::{AsRawFd as _, FromRawFd as _, OwnedFd};
use std::path::Path;

use anyhow::Context as _;

use crate::sockets::{self, SocketInode};

/// Socket of a service, and a process that has opened or inherited the socket.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ServiceSocket {
    /// Inode number of the socket.
    pub inode: SocketInode,
    /// Number of the process's file descriptor for the socket.
    pub file_descriptor: i32,
    /// Id of the process that has the socket.
    pub pid: i32,
    /// CPUs on which the process may run.
    pub cpu_affinity: BTreeSet<usize>,
}

/// Returns the inodes of TCP sockets that listen on `address`. If there are none, returns the inodes of sockets that
/// listen on the wildcard address with the same port, which the kernel then uses. Fails when the kernel's list of
/// sockets cannot be read.
pub fn tcp_listener_inodes(address: SocketAddr) -> anyhow::Result<BTreeSet<SocketInode>> {
    Ok(find_receiving_socket_inodes(address, &sockets::counts::list_listening_sockets()?))
}

/// Returns the inodes of unconnected UDP sockets that are bound to `address`. If there are none, returns those bound to
/// the same port on 0.0.0.0, or else on `[::]`, which also receives IPv4. Fails when the kernel's lists of sockets
/// cannot be read.
pub fn udp_socket_inodes(address: SocketAddr) -> anyhow::Result<BTreeSet<SocketInode>> {
    // Unconnected sockets have the kernel's state TCP_CLOSE.
    const UNCONNECTED_UDP_STATE: &str = "07";
    let mut unconnected_sockets = read_proc_sockets("udp", UNCONNECTED_UDP_STATE)?;
    // A kernel without IPv6 has no /proc/net/udp6.
    unconnected_sockets.extend(read_proc_sockets("udp6", UNCONNECTED_UDP_STATE).unwrap_or_default());
    Ok(find_receiving_socket_inodes(address, &unconnected_sockets))
}

/// Returns the inodes of those `sockets` that get packets to `address`. These are the sockets bound to this address or,
/// if there are none, to the same port on a wildcard address.
pub fn find_receiving_socket_inodes(
    address: SocketAddr,
    sockets: &[(SocketAddr, SocketInode)],
) -> BTreeSet<SocketInode> {
    let wildcard_ipv4 = SocketAddr::new(Ipv4Addr::UNSPECIFIED.into(), address.port());
    let wildcard_ipv6 = SocketAddr::new(Ipv6Addr::UNSPECIFIED.into(), address.port());
    let bound_addresses: &[SocketAddr] =
        if address.is_ipv4() { &[address, wildcard_ipv4, wildcard_ipv6] } else { &[address, wildcard_ipv6] };
    let inodes_bound_to = |address: &SocketAddr| -> BTreeSet<SocketInode> {
        sockets.iter().filter(|(socket, _)| socket == address).map(|(_, inode)| *inode).collect()
    };
    bound_addresses.iter().map(inodes_bound_to).find(|inodes| !inodes.is_empty()).unwrap_or_default()
}

fn read_proc_sockets(proc_file_name: &str, state: &str) -> anyhow::Result<Vec<(SocketAddr, SocketInode)>> {
    // /proc/net would show the network namespace of the process's first thread.
    let proc_path = format!("/proc/thread-self/net/{proc_file_name}");
    let mut sockets = Vec::new();
    for line in BufReader::new(File::open(&proc_path).with_context(|| proc_path.clone())?).lines().skip(1) {
        let line = line.with_context(|| proc_path.clone())?;
        match parse_proc_socket_line(&line) {
            Some((socket, socket_state, inode)) if socket_state == state => sockets.push((socket, inode)),
            _ => {}
        }
    }
    Ok(sockets)
}

/// Parses a line of /proc/net/tcp, udp or udp6. Returns the socket's local address, state and inode.
fn parse_proc_socket_line(line: &str) -> Option<(SocketAddr, &str, SocketInode)> {
    let mut line_fields = line.split_whitespace();
    let (local_address, state) = (line_fields.nth(1)?, line_fields.nth(1)?);
    let inode = line_fields.nth(5)?.parse().ok()?;
    let (address, port) = local_address.split_once(':')?;
    // The address consists of 32-bit words in memory order, but the port is a number.
    let parse_word = |word_index: usize| {
        u32::from_str_radix(address.get(word_index * 8..word_index * 8 + 8)?, 16).ok().map(u32::to_ne_bytes)
    };
    let ip: IpAddr = match address.len() {
        8 => Ipv4Addr::from(parse_word(0)?).into(),
        32 => {
            let address_bytes: Vec<u8> = (0..4).map(parse_word).collect::<Option<Vec<_>>>()?.concat();
            Ipv6Addr::from(<[u8; 16]>::try_from(address_bytes).ok()?).to_canonical()
        }
        _ => return None,
    };
    Some((SocketAddr::new(ip, u16::from_str_radix(port, 16).ok()?), state, inode))
}

/// Finds, for each socket in `inodes`, a process that waits for it with epoll. Fails when /proc cannot be read.
pub fn find_processes_waiting_with_epoll(inodes: &BTreeSet<SocketInode>) -> anyhow::Result<Vec<ServiceSocket>> {
    let mut sockets_by_inode: BTreeMap<SocketInode, ServiceSocket> = BTreeMap::new();
    for entry in fs::read_dir("/proc").context("/proc")?.flatten() {
        let Some(pid) = entry.file_name().to_str().and_then(|name| name.parse::<i32>().ok()) else { continue };
        // A process that has just ended has no descriptors to read.
        for (inode, descriptor) in read_epoll_members(&entry.path()).unwrap_or_default() {
            if inodes.contains(&inode) {
                let cpu_affinity = process_cpu_affinity(pid);
                sockets_by_inode.entry(inode).or_insert(ServiceSocket {
                    inode,
                    file_descriptor: descriptor,
                    pid,
                    cpu_affinity,
                });
            }
        }
    }
    Ok(sockets_by_inode.into_values().collect())
}

fn read_epoll_members(process: &Path) -> std::io::Result<Vec<(SocketInode, i32)>> {
    let mut epoll_members = Vec::new();
    for entry in fs::read_dir(process.join("fd"))?.flatten() {
        let link_target = fs::read_link(entry.path()).unwrap_or_default();
        if link_target.as_os_str() != "anon_inode:[eventpoll]" {
            continue;
        }
        let fdinfo_text = fs::read_to_string(process.join("fdinfo").join(entry.file_name())).unwrap_or_default();
        epoll_members.extend(fdinfo_text.lines().filter_map(parse_epoll_member));
    }
    Ok(epoll_members)
}

/// Parses a line of an epoll descriptor's fdinfo, such as `tfd:  8 events:  2019 data: 7f0e... pos:0 ino:5a3f sdev:9`.
/// Returns the socket's inode and descriptor. `tfd` is decimal, and `ino` is hexadecimal.
fn parse_epoll_member(line: &str) -> Option<(SocketInode, i32)> {
    let mut line_fields = line.strip_prefix("tfd:")?.split_whitespace();
    let descriptor = line_fields.next()?.parse().ok()?;
    let inode = line_fields.find_map(|field| field.strip_prefix("ino:"))?;
    Some((SocketInode::from_str_radix(inode, 16).ok()?, descriptor))
}

/// Finds, for each socket in `inodes`, a process that has it open. Workers may inherit all sockets of their master.
/// Among several processes, chooses the one with the fewest of the sockets, and then the youngest. Fails when /proc
/// cannot be read.
pub fn find_owning_processes(inodes: &BTreeSet<SocketInode>) -> anyhow::Result<Vec<ServiceSocket>> {
    let mut sockets_by_process: Vec<(i32, Vec<(SocketInode, i32)>)> = Vec::new();
    for entry in fs::read_dir("/proc").context("/proc")?.flatten() {
        let Some(pid) = entry.file_name().to_str().and_then(|name| name.parse::<i32>().ok()) else { continue };
        let mut open_sockets = list_open_sockets(&entry.path()).unwrap_or_default();
        open_sockets.retain(|(inode, _)| inodes.contains(inode));
        if !open_sockets.is_empty() {
            sockets_by_process.push((pid, open_sockets));
        }
    }
    sockets_by_process.sort_by_key(|(pid, open_sockets)| (open_sockets.len(), std::cmp::Reverse(*pid)));
    let mut sockets_by_inode: BTreeMap<SocketInode, ServiceSocket> = BTreeMap::new();
    for (pid, open_sockets) in sockets_by_process {
        for (inode, descriptor) in open_sockets {
            sockets_by_inode.entry(inode).or_insert_with(|| ServiceSocket {
                inode,
                file_descriptor: descriptor,
                pid,
                cpu_affinity: process_cpu_affinity(pid),
            });
        }
    }
    Ok(sockets_by_inode.into_values().collect())
}

fn list_open_sockets(process: &Path) -> std::io::Result<Vec<(SocketInode, i32)>> {
    let parse_descriptor_entry = |entry: fs::DirEntry| {
        let link_target = fs::read_link(entry.path()).ok()?;
        let inode = link_target.to_str()?.strip_prefix("socket:[")?.strip_suffix(']')?.parse().ok()?;
        Some((inode, entry.file_name().to_str()?.parse().ok()?))
    };
    Ok(fs::read_dir(process.join("fd"))?.flatten().filter_map(parse_descriptor_entry).collect())
}

fn process_cpu_affinity(pid: i32) -> BTreeSet<usize> {
    let cpu_set = nix::sched::sched_getaffinity(nix::unistd::Pid::from_raw(pid)).unwrap_or_default();
    (0..nix::sched::CpuSet::count()).filter(|cpu| cpu_set.is_set(*cpu).unwrap_or(false)).collect()
}

/// Duplicates a socket of another process with pidfd_getfd(2) (Linux 5.6 or later), and returns the new descriptor.
/// Fails when the process has ended, or access is denied (without CAP_SYS_PTRACE).
pub fn duplicate_process_socket(socket: &ServiceSocket) -> anyhow::Result<OwnedFd> {
    let fd_from_result = |result: libc::c_long| {
        // SAFETY: the system call returned a new descriptor that nothing else owns.
        nix::errno::Errno::result(result).map(|descriptor| unsafe { OwnedFd::from_raw_fd(descriptor as i32) })
    };
    // SAFETY: takes no pointers.
    let pidfd = fd_from_result(unsafe { libc::syscall(libc::SYS_pidfd_open, socket.pid, 0) })
        .with_context(|| format!("process {}", socket.pid))?;
    // SAFETY: takes no pointers.
    fd_from_result(unsafe { libc::syscall(libc::SYS_pidfd_getfd, pidfd.as_raw_fd(), socket.file_descriptor, 0) })
        .with_context(|| format!("descriptor {} of process {}", socket.file_descriptor, socket.pid))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::fd::AsFd as _;

    use crate::reuseport::socket_cookie;

    #[test]
    fn proc_and_fdinfo_lines_are_parsed() {
        let listening_line =
            "   0: 0100C80A:0050 00000000:0000 0A 00000000:00000000 00:00000000 00000000     0        0 23103 1";
        assert_eq!(parse_proc_socket_line(listening_line), Some(("10.200.0.1:80".parse().unwrap(), "0A", 23103)));
        let unconnected_line = " 3175: 00000000000000000000000000000000:0035 00000000000000000000000000000000:0000 07 \
                           00000000:00000000 00:00000000 00000000     0        0 3190 2 0000000000000000 0";
        assert_eq!(parse_proc_socket_line(unconnected_line), Some(("[::]:53".parse().unwrap(), "07", 3190)));
        let loopback_line =
            "0: 00000000000000000000000001000000:0035 00000000000000000000000000000000:0000 07 0:0 0:0 0 0 0 7 2";
        assert_eq!(parse_proc_socket_line(loopback_line), Some(("[::1]:53".parse().unwrap(), "07", 7)));
        assert_eq!(parse_proc_socket_line("sl local_address"), None);
        let epoll_line = "tfd:        8 events:     2019 data:     7f0e64a2c010  pos:0 ino:5a3f sdev:9";
        assert_eq!(parse_epoll_member(epoll_line), Some((0x5a3f, 8)));
        assert_eq!(parse_epoll_member("pos:\t0"), None);
    }

    #[test]
    fn socket_in_epoll_set_of_this_process_is_found() {
        let socket = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let inodes = tcp_listener_inodes(socket.local_addr().unwrap()).unwrap();
        assert_eq!(inodes.len(), 1);
        // SAFETY: takes no pointers and returns a new descriptor.
        let epoll_fd = unsafe { OwnedFd::from_raw_fd(libc::epoll_create1(libc::EPOLL_CLOEXEC)) };
        let mut epoll_event = libc::epoll_event { events: libc::EPOLLIN as u32, u64: 0 };
        // SAFETY: the event lives until the call returns.
        let add_result = unsafe {
            libc::epoll_ctl(epoll_fd.as_raw_fd(), libc::EPOLL_CTL_ADD, socket.as_raw_fd(), &raw mut epoll_event)
        };
        assert_eq!(add_result, 0);
        let epoll_waiters = find_processes_waiting_with_epoll(&inodes).unwrap();
        assert_eq!(epoll_waiters.len(), 1, "{epoll_waiters:?}");
        assert_eq!(
            (epoll_waiters[0].pid, epoll_waiters[0].file_descriptor),
            (std::process::id() as i32, socket.as_raw_fd())
        );
        assert!(!epoll_waiters[0].cpu_affinity.is_empty());
        let duplicate = duplicate_process_socket(&epoll_waiters[0]).unwrap();
        assert_eq!(socket_cookie(duplicate.as_fd()).unwrap(), socket_cookie(socket.as_fd()).unwrap());
    }

    #[test]
    fn owner_of_a_udp_socket_without_epoll_is_found() {
        let socket = std::net::UdpSocket::bind("127.0.0.1:0").unwrap();
        let inodes = udp_socket_inodes(socket.local_addr().unwrap()).unwrap();
        assert_eq!(inodes.len(), 1);
        assert_eq!(find_processes_waiting_with_epoll(&inodes).unwrap(), []);
        let owners = find_owning_processes(&inodes).unwrap();
        assert_eq!(owners.len(), 1, "{owners:?}");
        assert_eq!((owners[0].pid, owners[0].file_descriptor), (std::process::id() as i32, socket.as_raw_fd()));
    }

    #[test]
    fn socket_at_the_most_specific_address_is_reached() {
        let sockets: Vec<(SocketAddr, SocketInode)> =
            [("10.0.0.1:53", 1), ("0.0.0.0:53", 2), ("[::]:53", 3), ("[::]:54", 4), ("10.0.0.1:54", 5)]
                .map(|(socket, inode)| (socket.parse().unwrap(), inode))
                .to_vec();
        let reached_inodes = |address: &str| {
            find_receiving_socket_inodes(address.parse().unwrap(), &sockets).into_iter().collect::<Vec<_>>()
        };
        assert_eq!(reached_inodes("10.0.0.1:53"), [1]);
        assert_eq!(reached_inodes("10.0.0.2:53"), [2]);
        assert_eq!(reached_inodes("[fd00::1]:53"), [3]);
        assert_eq!(reached_inodes("10.0.0.2:54"), [4]);
        assert_eq!(reached_inodes("10.0.0.2:55"), []);
    }
}
