//! Look-up of connections' sockets in this network namespace by the kernel's sock_diag(7).

pub mod counts;

use std::net::SocketAddr;
use std::os::fd::{AsRawFd as _, FromRawFd as _, OwnedFd};
use std::sync::OnceLock;

use anyhow::{Context as _, bail, ensure};
use coreward_model::FourTuple;
use nix::errno::Errno;
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

/// Inode number of a socket, which identifies it for its lifetime.
pub type SocketInode = u64;

/// Header of a netlink message (struct nlmsghdr of linux/netlink.h). The type in libc lacks zerocopy's traits.
#[derive(Debug, Clone, Copy, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
struct NetlinkHeader {
    length: u32,
    message_type: u16,
    flags: u16,
    sequence: u32,
    port_id: u32,
}

/// Addresses and ports of a socket in network byte order (struct inet_diag_sockid of linux/inet_diag.h).
#[derive(Debug, Clone, Copy, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
struct SocketId {
    source_port: [u8; 2],
    destination_port: [u8; 2],
    source_address: [u8; 16],
    destination_address: [u8; 16],
    interface_index: u32,
    cookie: [u32; 2],
}

/// Query to sock_diag(7), which consists of struct nlmsghdr and struct inet_diag_req_v2.
#[derive(Debug, Clone, Copy, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
struct InetDiagRequest {
    header: NetlinkHeader,
    family: u8,
    protocol: u8,
    extensions: u8,
    padding: u8,
    state_mask: u32,
    socket_id: SocketId,
}

const SOCK_DIAG_BY_FAMILY: u16 = 20;
/// Offset of inet_diag_msg.idiag_state in a reply, where it follows the header and the family.
const SOCKET_STATE_OFFSET: usize = size_of::<NetlinkHeader>() + 1;
/// State of a listening socket (include/net/tcp_states.h). The kernel answers with this socket if a queried connection
/// does not exist.
const TCP_LISTEN_STATE: u8 = 10;
/// Number of queries that are sent at once. Their replies fit into the smallest receive buffer.
const SOCKET_QUERIES_PER_BATCH: usize = 64;

fn build_socket_query(sequence: u32, connection: &FourTuple) -> InetDiagRequest {
    let encode_address = |socket: SocketAddr| {
        let mut padded_bytes = [0; 16];
        match socket {
            SocketAddr::V4(v4) => padded_bytes[..4].copy_from_slice(&v4.ip().octets()),
            SocketAddr::V6(v6) => padded_bytes = v6.ip().octets(),
        }
        padded_bytes
    };
    let (client, vip) = (connection.client(), connection.vip());
    InetDiagRequest {
        header: NetlinkHeader {
            length: size_of::<InetDiagRequest>() as u32,
            message_type: SOCK_DIAG_BY_FAMILY,
            flags: libc::NLM_F_REQUEST as u16,
            sequence,
            port_id: 0,
        },
        family: if client.is_ipv4() { libc::AF_INET } else { libc::AF_INET6 } as u8,
        protocol: libc::IPPROTO_TCP as u8,
        extensions: 0,
        padding: 0,
        state_mask: u32::MAX,
        socket_id: SocketId {
            source_port: vip.port().to_be_bytes(),
            destination_port: client.port().to_be_bytes(),
            source_address: encode_address(vip),
            destination_address: encode_address(client),
            interface_index: 0,
            // INET_DIAG_NOCOOKIE matches any socket.
            cookie: [u32::MAX; 2],
        },
    }
}

/// Returns whether this host has a socket for each connection, in the order of `connections`. The socket may be
/// established, half-open, closing or in TIME-WAIT. A call takes about 2 us of CPU time per connection. Fails when the
/// kernel has no sock_diag(7) for TCP or does not answer.
pub fn query_open_sockets(connections: &[FourTuple]) -> anyhow::Result<Vec<bool>> {
    static SOCK_DIAG_SUPPORT_CHECK: OnceLock<()> = OnceLock::new();
    if SOCK_DIAG_SUPPORT_CHECK.get().is_none() {
        counts::ensure_sock_diag_supports_tcp()?;
        SOCK_DIAG_SUPPORT_CHECK.get_or_init(|| ());
    }
    let diag_socket = open_diag_socket()?;
    let mut has_socket_by_connection = vec![false; connections.len()];
    for (batch, batch_has_open_socket) in
        connections.chunks(SOCKET_QUERIES_PER_BATCH).zip(has_socket_by_connection.chunks_mut(SOCKET_QUERIES_PER_BATCH))
    {
        let socket_queries: Vec<InetDiagRequest> =
            (0..).zip(batch).map(|(sequence, tuple)| build_socket_query(sequence, tuple)).collect();
        let written_bytes = nix::unistd::write(&diag_socket, socket_queries.as_bytes()).context("asking sock_diag")?;
        ensure!(
            written_bytes == size_of_val(&socket_queries[..]),
            "sock_diag took {written_bytes} bytes of {} questions",
            batch.len()
        );
        let mut answer_count = 0;
        while answer_count < batch.len() {
            let mut answer_buffer = [0; 16384];
            let answer_length =
                nix::unistd::read(&diag_socket, &mut answer_buffer).context("no answer from sock_diag")?;
            answer_count += record_socket_answers(&answer_buffer[..answer_length], batch_has_open_socket)?;
        }
    }
    Ok(has_socket_by_connection)
}

/// Opens a sock_diag(7) socket with a receive timeout of one second.
fn open_diag_socket() -> anyhow::Result<OwnedFd> {
    let socket_type = libc::SOCK_RAW | libc::SOCK_CLOEXEC;
    // SAFETY: socket() returns a new descriptor that nothing else owns, or -1, which is checked.
    let raw_fd = unsafe { libc::socket(libc::AF_NETLINK, socket_type, libc::NETLINK_SOCK_DIAG) };
    Errno::result(raw_fd).context("a socket for sock_diag")?;
    // SAFETY: the descriptor was just made and nothing else owns it.
    let socket = unsafe { OwnedFd::from_raw_fd(raw_fd) };
    let receive_timeout = libc::timeval { tv_sec: 1, tv_usec: 0 };
    // SAFETY: pointer and length are those of a live timeval.
    let result = unsafe {
        let length = size_of::<libc::timeval>() as u32;
        libc::setsockopt(
            socket.as_raw_fd(),
            libc::SOL_SOCKET,
            libc::SO_RCVTIMEO,
            (&raw const receive_timeout).cast(),
            length,
        )
    };
    Errno::result(result).context("a time limit for sock_diag")?;
    Ok(socket)
}

/// Parses the kernel's replies in `bytes`, and sets `has_open_socket` for each queried connection that has a socket.
/// Returns the number of replies.
fn record_socket_answers(mut bytes: &[u8], has_open_socket: &mut [bool]) -> anyhow::Result<usize> {
    let mut answer_count = 0;
    while let Ok((header, _)) = NetlinkHeader::read_from_prefix(bytes) {
        let message = bytes.get(..header.length as usize).context("sock_diag: a message cut short")?;
        let is_found =
            has_open_socket.get_mut(header.sequence as usize).context("sock_diag: an answer that was not asked for")?;
        match header.message_type {
            SOCK_DIAG_BY_FAMILY => {
                *is_found = message.get(SOCKET_STATE_OFFSET).is_some_and(|state| *state != TCP_LISTEN_STATE)
            }
            kind if i32::from(kind) == libc::NLMSG_ERROR => {
                let error_code =
                    message.get(size_of::<NetlinkHeader>()..).and_then(|payload| i32::read_from_prefix(payload).ok());
                match error_code.map(|(code, _)| Errno::from_raw(-code)) {
                    // ENOENT means that the socket does not exist, and ESTALE that it disappeared during the query.
                    Some(Errno::ENOENT | Errno::ESTALE) => *is_found = false,
                    Some(error) => bail!("sock_diag: {error}"),
                    None => bail!("sock_diag: an error without a number"),
                }
            }
            other => bail!("sock_diag: a message of type {other}"),
        }
        answer_count += 1;
        bytes = bytes.get((header.length as usize).next_multiple_of(4)..).unwrap_or_default();
    }
    Ok(answer_count)
}
