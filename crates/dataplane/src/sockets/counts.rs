//! Sockets of this network namespace by state, from the kernel's list: connections of services, and listening sockets.

use std::collections::HashMap;
use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr};
use std::os::fd::OwnedFd;

use anyhow::{Context as _, bail};
use nix::errno::Errno;
use zerocopy::{FromBytes, Immutable, IntoBytes as _, KnownLayout};

use super::{InetDiagRequest, Inode, NetlinkHeader, SOCK_DIAG_BY_FAMILY, SocketId, open};

/// Reply of sock_diag(7): struct nlmsghdr and struct inet_diag_msg, up to the inode.
#[derive(Debug, Clone, Copy, FromBytes, Immutable, KnownLayout)]
#[repr(C)]
struct InetDiagReply {
    header: NetlinkHeader,
    family: u8,
    state: u8,
    timer: u8,
    retransmissions: u8,
    id: SocketId,
    expires: u32,
    receive_queue: u32,
    write_queue: u32,
    user: u32,
    inode: u32,
}

const NO_STATES: u32 = 0;
const LISTENING_STATES: u32 = 1 << 10;
/// Bits of TCP states (include/net/tcp_states.h): ESTABLISHED, SYN-RECEIVED (for half-open connections), FIN-WAIT-1 and
/// 2, CLOSE-WAIT, LAST-ACK, CLOSING.
const CONNECTED_STATES: u32 = 1 << 1 | 1 << 3 | 1 << 4 | 1 << 5 | 1 << 8 | 1 << 9 | 1 << 11;
/// Size of the receive buffer in bytes: the kernel fills at most 32 KiB per read.
const BUFFER_BYTES: usize = 32 << 10;

/// Returns the number of TCP connections at each of `services`, in the same order. Connections count from half-open to
/// the last FIN, without TIME-WAIT. A call takes about 1 us of CPU for every socket at these ports, and less for each
/// other socket. Fails when the kernel has no sock_diag(7) for TCP, or does not answer.
pub fn connection_counts(services: &[SocketAddr]) -> anyhow::Result<Vec<u32>> {
    let mut counts = vec![0; services.len()];
    if services.is_empty() {
        return Ok(counts);
    }
    let places: HashMap<SocketAddr, usize> = services.iter().copied().zip(0..).collect();
    for family in [libc::AF_INET, libc::AF_INET6] {
        let request = list_request(family as u8, CONNECTED_STATES, common_port(services).unwrap_or(0));
        for_each_socket(&request, |listed| {
            if let Some(place) = places.get(&local_address(listed)) {
                counts[*place] += 1;
            }
        })?;
    }
    Ok(counts)
}

/// Returns address and inode of the listening TCP sockets. The cost does not depend on other sockets, unlike that of
/// /proc/net/tcp, which walks the kernel's connection table of all network namespaces. Fails when the kernel has no
/// sock_diag(7) for TCP, or does not answer.
pub fn listening_sockets() -> anyhow::Result<Vec<(SocketAddr, Inode)>> {
    let mut found = Vec::new();
    for family in [libc::AF_INET, libc::AF_INET6] {
        for_each_socket(&list_request(family as u8, LISTENING_STATES, 0), |listed| {
            found.push((local_address(listed), listed.inode.into()));
        })?;
    }
    Ok(found)
}

fn for_each_socket(request: &InetDiagRequest, mut found: impl FnMut(&InetDiagReply)) -> anyhow::Result<()> {
    let (socket, mut buffer) = (open()?, vec![0; BUFFER_BYTES]);
    nix::unistd::write(&socket, request.as_bytes()).context("asking sock_diag")?;
    // A kernel without IPv6 answers ENOENT.
    let may_lack = i32::from(request.family) == libc::AF_INET6;
    while read_list(&socket, &mut buffer, may_lack, &mut found)? {}
    Ok(())
}

/// Checks that the kernel has sock_diag(7) for TCP. A query for one socket would not show that: a kernel without it
/// answers that the socket does not exist.
pub(super) fn ensure_supported() -> anyhow::Result<()> {
    for_each_socket(&list_request(libc::AF_INET as u8, NO_STATES, 0), |_| ())
}

/// Returns the port of all services if they have the same one. The kernel then skips sockets at other ports.
fn common_port(services: &[SocketAddr]) -> Option<u16> {
    let port = services.first()?.port();
    services.iter().all(|service| service.port() == port).then_some(port)
}

/// Returns the request for a list of sockets in `states` at `port`; 0: at all ports.
fn list_request(family: u8, states: u32, port: u16) -> InetDiagRequest {
    InetDiagRequest {
        header: NetlinkHeader {
            length: size_of::<InetDiagRequest>() as u32,
            kind: SOCK_DIAG_BY_FAMILY,
            flags: (libc::NLM_F_REQUEST | libc::NLM_F_DUMP) as u16,
            sequence: 0,
            port: 0,
        },
        family,
        protocol: libc::IPPROTO_TCP as u8,
        extensions: 0,
        padding: 0,
        states,
        id: SocketId {
            source_port: port.to_be_bytes(),
            destination_port: [0; 2],
            source: [0; 16],
            destination: [0; 16],
            interface: 0,
            cookie: [u32::MAX; 2],
        },
    }
}

/// Reads a part of the list. Returns whether another part follows. `may_lack`: the list is empty if the kernel lacks
/// this address family.
fn read_list(
    socket: &OwnedFd,
    buffer: &mut [u8],
    may_lack: bool,
    found: &mut impl FnMut(&InetDiagReply),
) -> anyhow::Result<bool> {
    let length = nix::unistd::read(socket, buffer).context("no list from sock_diag")?;
    let mut bytes = &buffer[..length];
    while let Ok((header, _)) = NetlinkHeader::read_from_prefix(bytes) {
        let message = bytes.get(..header.length as usize).context("sock_diag: a message cut short")?;
        match header.kind {
            SOCK_DIAG_BY_FAMILY => {
                let (listed, _) =
                    InetDiagReply::read_from_prefix(message).ok().context("sock_diag: a socket cut short")?;
                found(&listed);
            }
            kind if [libc::NLMSG_DONE, libc::NLMSG_ERROR].contains(&kind.into()) => {
                let code = message.get(size_of::<NetlinkHeader>()..).and_then(|rest| i32::read_from_prefix(rest).ok());
                return match code.map(|(code, _)| Errno::from_raw(-code)) {
                    None => bail!("sock_diag: an end without a number"),
                    Some(Errno::ENOENT) if !may_lack => {
                        bail!("sock_diag: this kernel has none for TCP: modprobe tcp_diag")
                    }
                    Some(Errno::ENOENT) => Ok(false),
                    // The end of a list has an error number, or 0.
                    Some(error) if error as i32 != 0 => bail!("sock_diag: {error}"),
                    Some(_) => Ok(false),
                };
            }
            other => bail!("sock_diag: a message of type {other}"),
        }
        bytes = bytes.get((header.length as usize).next_multiple_of(4)..).unwrap_or_default();
    }
    Ok(true)
}

/// Returns the local address of a socket. An IPv4-mapped address becomes IPv4, because sockets at `[::]` accept IPv4.
fn local_address(listed: &InetDiagReply) -> SocketAddr {
    let (port, source) = (u16::from_be_bytes(listed.id.source_port), listed.id.source);
    let ip = match i32::from(listed.family) {
        libc::AF_INET => Ipv4Addr::new(source[0], source[1], source[2], source[3]).into(),
        _ => Ipv6Addr::from(source).to_canonical(),
    };
    SocketAddr::new(ip, port)
}

#[cfg(test)]
mod tests {
    use std::io::Write as _;
    use std::net::{Shutdown, TcpListener, TcpStream};
    use std::time::{Duration, Instant};

    use super::*;

    /// Returns the result of [`read_list_part`] for a list that ends with `error`.
    fn read_end(kind: i32, error: i32, may_lack: bool) -> anyhow::Result<bool> {
        let (ours, mut theirs) = std::os::unix::net::UnixStream::pair().unwrap();
        let length = (size_of::<NetlinkHeader>() + size_of::<i32>()) as u32;
        let header = NetlinkHeader { length, kind: kind as u16, flags: 0, sequence: 0, port: 0 };
        theirs.write_all(&[header.as_bytes(), (-error).as_bytes()].concat()).unwrap();
        read_list(&ours.into(), &mut [0; 64], may_lack, &mut |_| panic!("no socket is in the list"))
    }

    #[test]
    fn missing_sock_diag_for_tcp_is_an_error() {
        for kind in [libc::NLMSG_DONE, libc::NLMSG_ERROR] {
            let error = read_end(kind, libc::ENOENT, false).unwrap_err().to_string();
            assert!(error.contains("modprobe tcp_diag"), "{error}");
            assert!(!read_end(kind, libc::ENOENT, true).unwrap(), "a kernel without IPv6");
            assert!(read_end(kind, libc::EPERM, true).is_err());
        }
        assert!(!read_end(libc::NLMSG_DONE, 0, false).unwrap());
        ensure_supported().unwrap();
    }

    fn pair(listener: &TcpListener, to: SocketAddr) -> (TcpStream, TcpStream) {
        let client = TcpStream::connect(to).unwrap();
        (client, listener.accept().unwrap().0)
    }

    #[test]
    fn connections_count_from_the_handshake_to_the_last_fin() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let other = TcpListener::bind("[::]:0").unwrap();
        let address = listener.local_addr().unwrap();
        let of_both = SocketAddr::from(([127, 0, 0, 1], other.local_addr().unwrap().port()));
        // On a busy machine the loopback device delivers packets with a delay.
        let counts = |expected: [u32; 2], what: &str| {
            let end = Instant::now() + Duration::from_secs(30);
            while connection_counts(&[address, of_both]).unwrap() != expected {
                assert!(Instant::now() < end, "{what}: {:?}", connection_counts(&[address, of_both]));
                std::thread::sleep(Duration::from_millis(1));
            }
        };
        counts([0, 0], "a listening socket has no connection");
        let mut pairs: Vec<_> = (0..300).map(|_| pair(&listener, address)).collect();
        // This connection is not accepted yet.
        let _waiting = TcpStream::connect(address).unwrap();
        let _of_both = pair(&other, of_both);
        counts([301, 1], "all of them");
        assert_eq!(connection_counts(&[of_both]).unwrap(), [1], "one port");
        assert_eq!(connection_counts(&[]).unwrap(), [0; 0]);
        // Half-closed by the server: FIN-WAIT-2, still receiving from the client.
        let (mut client, server) = pairs.pop().unwrap();
        server.shutdown(Shutdown::Write).unwrap();
        client.write_all(b"x").unwrap();
        counts([301, 1], "half-closed");
        // Closed by the clients first: the server's sockets go through CLOSE-WAIT.
        let (clients, servers): (Vec<_>, Vec<_>) = pairs.into_iter().unzip();
        drop(clients);
        counts([301, 1], "closed by the clients");
        drop(servers);
        counts([2, 1], "closed by both");
        drop(server);
        drop(client);
        counts([1, 1], "closed by the server, then by the client");
    }
}
