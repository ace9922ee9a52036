//! Services' connection counts, and listening sockets, from the kernel's socket list of this network namespace.

use std::collections::HashMap;
use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr};
use std::os::fd::OwnedFd;

use anyhow::{Context as _, bail};
use nix::errno::Errno;
use zerocopy::{FromBytes, Immutable, IntoBytes as _, KnownLayout};

use super::{InetDiagRequest, NetlinkHeader, SOCK_DIAG_BY_FAMILY, SocketId, SocketInode, open_diag_socket};

/// Reply of sock_diag(7), which consists of struct nlmsghdr and struct inet_diag_msg up to the inode.
#[derive(Debug, Clone, Copy, FromBytes, Immutable, KnownLayout)]
#[repr(C)]
struct InetDiagReply {
    header: NetlinkHeader,
    family: u8,
    state: u8,
    timer_kind: u8,
    retransmissions: u8,
    socket_id: SocketId,
    timer_expiry_ms: u32,
    receive_queue_bytes: u32,
    send_queue_bytes: u32,
    user_id: u32,
    inode: u32,
}

const NO_TCP_STATE_BITS: u32 = 0;
const TCP_LISTEN_STATE_BIT: u32 = 1 << 10;
/// Bits of the TCP states of counted connections: ESTABLISHED, SYN-RECEIVED (half-open), FIN-WAIT-1, FIN-WAIT-2,
/// CLOSE-WAIT, LAST-ACK and CLOSING (include/net/tcp_states.h).
const CONNECTED_TCP_STATE_BITS: u32 = 1 << 1 | 1 << 3 | 1 << 4 | 1 << 5 | 1 << 8 | 1 << 9 | 1 << 11;
/// Size of the receive buffer in bytes, which is the maximum that the kernel fills per read (32 KiB).
const NETLINK_RECEIVE_BUFFER_BYTES: usize = 32 << 10;

/// Counts the TCP connections to each of `services`, in the same order. Connections count from half-open to the last
/// FIN, without TIME-WAIT. A call takes about 1 us of CPU time for each socket at these ports, and less for each other
/// socket. Fails when the kernel has no sock_diag(7) for TCP or does not answer.
pub fn count_connections(services: &[SocketAddr]) -> anyhow::Result<Vec<u32>> {
    let mut counts = vec![0; services.len()];
    if services.is_empty() {
        return Ok(counts);
    }
    let indexes_by_service: HashMap<SocketAddr, usize> = services.iter().copied().zip(0..).collect();
    for family in [libc::AF_INET, libc::AF_INET6] {
        let request = build_socket_list_request(
            family as u8,
            CONNECTED_TCP_STATE_BITS,
            common_service_port(services).unwrap_or(0),
        );
        for_each_listed_socket(&request, |listed_socket| {
            if let Some(service_index) = indexes_by_service.get(&local_socket_address(listed_socket)) {
                counts[*service_index] += 1;
            }
        })?;
    }
    Ok(counts)
}

/// Returns the address and the inode of each listening TCP socket. The cost does not depend on other sockets. In
/// contrast, /proc/net/tcp walks the kernel's connection table of all network namespaces. Fails when the kernel has no
/// sock_diag(7) for TCP or does not answer.
pub fn list_listening_sockets() -> anyhow::Result<Vec<(SocketAddr, SocketInode)>> {
    let mut listening_sockets = Vec::new();
    for family in [libc::AF_INET, libc::AF_INET6] {
        for_each_listed_socket(&build_socket_list_request(family as u8, TCP_LISTEN_STATE_BIT, 0), |listed_socket| {
            listening_sockets.push((local_socket_address(listed_socket), listed_socket.inode.into()));
        })?;
    }
    Ok(listening_sockets)
}

fn for_each_listed_socket(
    request: &InetDiagRequest,
    mut handle_socket: impl FnMut(&InetDiagReply),
) -> anyhow::Result<()> {
    let (socket, mut buffer) = (open_diag_socket()?, vec![0; NETLINK_RECEIVE_BUFFER_BYTES]);
    nix::unistd::write(&socket, request.as_bytes()).context("asking sock_diag")?;
    // A kernel without IPv6 answers ENOENT.
    let may_lack_family = i32::from(request.family) == libc::AF_INET6;
    while read_socket_list_part(&socket, &mut buffer, may_lack_family, &mut handle_socket)? {}
    Ok(())
}

/// Checks that the kernel has sock_diag(7) for TCP. A query for one socket cannot check this, because a kernel without
/// sock_diag(7) for TCP answers that the socket does not exist.
pub(super) fn ensure_sock_diag_supports_tcp() -> anyhow::Result<()> {
    for_each_listed_socket(&build_socket_list_request(libc::AF_INET as u8, NO_TCP_STATE_BITS, 0), |_| ())
}

/// Returns the services' port if all services have the same port. The kernel can then skip sockets at other ports.
fn common_service_port(services: &[SocketAddr]) -> Option<u16> {
    let port = services.first()?.port();
    services.iter().all(|service| service.port() == port).then_some(port)
}

/// Returns a request to list the sockets in `state_bits` at `port`, or at all ports if `port` is 0.
fn build_socket_list_request(family: u8, state_bits: u32, port: u16) -> InetDiagRequest {
    InetDiagRequest {
        header: NetlinkHeader {
            length: size_of::<InetDiagRequest>() as u32,
            message_type: SOCK_DIAG_BY_FAMILY,
            flags: (libc::NLM_F_REQUEST | libc::NLM_F_DUMP) as u16,
            sequence: 0,
            port_id: 0,
        },
        family,
        protocol: libc::IPPROTO_TCP as u8,
        extensions: 0,
        padding: 0,
        state_mask: state_bits,
        socket_id: SocketId {
            source_port: port.to_be_bytes(),
            destination_port: [0; 2],
            source_address: [0; 16],
            destination_address: [0; 16],
            interface_index: 0,
            cookie: [u32::MAX; 2],
        },
    }
}

/// Reads a part of the list of sockets, and returns whether another part follows. If `may_lack_family` is set, a kernel
/// without the list's address family is no error, and the list is then empty.
fn read_socket_list_part(
    socket: &OwnedFd,
    buffer: &mut [u8],
    may_lack_family: bool,
    on_socket: &mut impl FnMut(&InetDiagReply),
) -> anyhow::Result<bool> {
    let read_length = nix::unistd::read(socket, buffer).context("no list from sock_diag")?;
    let mut unread_bytes = &buffer[..read_length];
    while let Ok((header, _)) = NetlinkHeader::read_from_prefix(unread_bytes) {
        let message = unread_bytes.get(..header.length as usize).context("sock_diag: a message cut short")?;
        match header.message_type {
            SOCK_DIAG_BY_FAMILY => {
                let (listed_socket, _) =
                    InetDiagReply::read_from_prefix(message).ok().context("sock_diag: a socket cut short")?;
                on_socket(&listed_socket);
            }
            kind if [libc::NLMSG_DONE, libc::NLMSG_ERROR].contains(&kind.into()) => {
                let error_code =
                    message.get(size_of::<NetlinkHeader>()..).and_then(|payload| i32::read_from_prefix(payload).ok());
                return match error_code.map(|(code, _)| Errno::from_raw(-code)) {
                    None => bail!("sock_diag: an end without a number"),
                    Some(Errno::ENOENT) if !may_lack_family => {
                        bail!("sock_diag: this kernel has none for TCP: modprobe tcp_diag")
                    }
                    Some(Errno::ENOENT) => Ok(false),
                    // The end of a list has an error number or 0.
                    Some(error) if error as i32 != 0 => bail!("sock_diag: {error}"),
                    Some(_) => Ok(false),
                };
            }
            other => bail!("sock_diag: a message of type {other}"),
        }
        unread_bytes = unread_bytes.get((header.length as usize).next_multiple_of(4)..).unwrap_or_default();
    }
    Ok(true)
}

/// Returns a socket's local address. Converts IPv4-mapped addresses to IPv4, because sockets at `[::]` accept IPv4.
fn local_socket_address(listed_socket: &InetDiagReply) -> SocketAddr {
    let (port, source_bytes) =
        (u16::from_be_bytes(listed_socket.socket_id.source_port), listed_socket.socket_id.source_address);
    let ip = match i32::from(listed_socket.family) {
        libc::AF_INET => Ipv4Addr::new(source_bytes[0], source_bytes[1], source_bytes[2], source_bytes[3]).into(),
        _ => Ipv6Addr::from(source_bytes).to_canonical(),
    };
    SocketAddr::new(ip, port)
}

#[cfg(test)]
mod tests {
    use std::io::Write as _;
    use std::net::{Shutdown, TcpListener, TcpStream};
    use std::time::{Duration, Instant};

    use super::*;

    /// Returns the result of [`read_socket_list_part`] for a list that ends with the errno `error`.
    fn read_list_ending_with_error(kind: i32, error: i32, may_lack_family: bool) -> anyhow::Result<bool> {
        let (reader, mut writer) = std::os::unix::net::UnixStream::pair().unwrap();
        let message_length = (size_of::<NetlinkHeader>() + size_of::<i32>()) as u32;
        let message_header =
            NetlinkHeader { length: message_length, message_type: kind as u16, flags: 0, sequence: 0, port_id: 0 };
        writer.write_all(&[message_header.as_bytes(), (-error).as_bytes()].concat()).unwrap();
        read_socket_list_part(&reader.into(), &mut [0; 64], may_lack_family, &mut |_| {
            panic!("no socket is in the list")
        })
    }

    #[test]
    fn missing_sock_diag_for_tcp_is_an_error() {
        for kind in [libc::NLMSG_DONE, libc::NLMSG_ERROR] {
            let error = read_list_ending_with_error(kind, libc::ENOENT, false).unwrap_err().to_string();
            assert!(error.contains("modprobe tcp_diag"), "{error}");
            assert!(!read_list_ending_with_error(kind, libc::ENOENT, true).unwrap(), "a kernel without IPv6");
            assert!(read_list_ending_with_error(kind, libc::EPERM, true).is_err());
        }
        assert!(!read_list_ending_with_error(libc::NLMSG_DONE, 0, false).unwrap());
        ensure_sock_diag_supports_tcp().unwrap();
    }

    fn connect_pair(listener: &TcpListener, listener_address: SocketAddr) -> (TcpStream, TcpStream) {
        let client = TcpStream::connect(listener_address).unwrap();
        (client, listener.accept().unwrap().0)
    }

    #[test]
    fn connections_are_counted_from_half_open_to_last_fin() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let dual_stack_listener = TcpListener::bind("[::]:0").unwrap();
        let address = listener.local_addr().unwrap();
        let dual_stack_address = SocketAddr::from(([127, 0, 0, 1], dual_stack_listener.local_addr().unwrap().port()));
        // On a busy machine the loopback device delivers packets with a delay.
        let wait_for_counts = |expected: [u32; 2], description: &str| {
            let deadline = Instant::now() + Duration::from_secs(30);
            while count_connections(&[address, dual_stack_address]).unwrap() != expected {
                assert!(
                    Instant::now() < deadline,
                    "{description}: {:?}",
                    count_connections(&[address, dual_stack_address])
                );
                std::thread::sleep(Duration::from_millis(1));
            }
        };
        wait_for_counts([0, 0], "a listening socket has no connection");
        let mut connection_pairs: Vec<_> = (0..300).map(|_| connect_pair(&listener, address)).collect();
        // This connection is not accepted yet.
        let _unaccepted_connection = TcpStream::connect(address).unwrap();
        let _dual_stack_pair = connect_pair(&dual_stack_listener, dual_stack_address);
        wait_for_counts([301, 1], "all of them");
        assert_eq!(count_connections(&[dual_stack_address]).unwrap(), [1], "one port");
        assert_eq!(count_connections(&[]).unwrap(), [0; 0]);
        // The server has closed its half. Its socket is in FIN-WAIT-2 and still receives from the client.
        let (mut client, server) = connection_pairs.pop().unwrap();
        server.shutdown(Shutdown::Write).unwrap();
        client.write_all(b"x").unwrap();
        wait_for_counts([301, 1], "half-closed");
        // The clients close first, so the server's sockets go through CLOSE-WAIT.
        let (clients, servers): (Vec<_>, Vec<_>) = connection_pairs.into_iter().unzip();
        drop(clients);
        wait_for_counts([301, 1], "closed by the clients");
        drop(servers);
        wait_for_counts([2, 1], "closed by both");
        drop(server);
        drop(client);
        wait_for_counts([1, 1], "closed by the server, then by the client");
    }
}
