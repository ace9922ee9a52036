//! UDP sockets that receive and send many datagrams with one system call.

use std::io::{self, ErrorKind};
use std::net::{SocketAddr, SocketAddrV4, UdpSocket};
use std::ops::Range;
use std::os::fd::{AsFd, AsRawFd as _, BorrowedFd};

/// Maximum number of datagrams that one system call sends or receives.
pub const MAX_DATAGRAMS_PER_SYSCALL: usize = 32;
/// Requested size of the kernel's receive buffer in bytes. The kernel may limit it.
const SOCKET_RECEIVE_BUFFER_BYTES: usize = 4 << 20;

/// UDP socket with memory for a batch of received datagrams and a batch of datagrams to send.
///
/// The kernel's own batches (UDP GSO and GRO) are not used, because each consists of datagrams for a single client.
#[derive(Debug)]
pub struct UdpBatchSocket {
    udp_socket: UdpSocket,
    /// Memory for received datagrams, in slots of equal length.
    receive_buffer: Box<[u8]>,
    receive_slot_bytes: usize,
    /// Payloads of the outgoing datagrams, one after the other.
    send_buffer: Vec<u8>,
    /// Destination of each outgoing datagram, and the end of its payload in the send buffer.
    destinations_and_payload_ends: Vec<(SocketAddrV4, usize)>,
    unsent_datagram_count: u64,
}

impl UdpBatchSocket {
    /// Opens a socket that is bound to `address`. Datagrams longer than `max_payload_bytes` are cut to
    /// `max_payload_bytes + 1` bytes.
    pub fn bind(address: SocketAddrV4, max_payload_bytes: usize) -> io::Result<Self> {
        let socket = socket2::Socket::new(socket2::Domain::IPV4, socket2::Type::DGRAM, None)?;
        socket.set_recv_buffer_size(SOCKET_RECEIVE_BUFFER_BYTES)?;
        socket.bind(&address.into())?;
        socket.set_nonblocking(true)?;
        let slot_bytes = max_payload_bytes + 1;
        let receive_buffer = vec![0; slot_bytes * MAX_DATAGRAMS_PER_SYSCALL].into();
        let (send_buffer, destinations_and_ends) = (Vec::new(), Vec::with_capacity(MAX_DATAGRAMS_PER_SYSCALL));
        Ok(Self {
            udp_socket: socket.into(),
            receive_buffer,
            receive_slot_bytes: slot_bytes,
            send_buffer,
            destinations_and_payload_ends: destinations_and_ends,
            unsent_datagram_count: 0,
        })
    }

    /// Receives the next batch of datagrams and passes each to `accept` with its sender. Returns the number of
    /// datagrams, which may be 0. Fails when the socket fails.
    pub fn receive_batch(&mut self, accept: &mut impl FnMut(SocketAddrV4, &[u8])) -> io::Result<usize> {
        let mut message_headers = BatchMessageHeaders::default();
        for (number, slot) in self.receive_buffer.chunks_exact_mut(self.receive_slot_bytes).enumerate() {
            message_headers.io_vectors[number] =
                libc::iovec { iov_base: slot.as_mut_ptr().cast(), iov_len: slot.len() };
        }
        let datagram_count = loop {
            match message_headers.receive_datagrams(self.udp_socket.as_fd()) {
                Ok(count) => break count,
                Err(error) if error.kind() == ErrorKind::WouldBlock => return Ok(0),
                // The error is a signal, or an ICMP error about an earlier datagram, so the call is repeated.
                Err(error) if matches!(error.kind(), ErrorKind::Interrupted | ErrorKind::ConnectionRefused) => (),
                Err(error) => return Err(error),
            }
        };
        for (number, slot) in self.receive_buffer.chunks_exact(self.receive_slot_bytes).take(datagram_count).enumerate()
        {
            accept(message_headers.sender_address(number), &slot[..message_headers.datagram_length(number)]);
        }
        Ok(datagram_count)
    }

    /// Adds a datagram to the batch to send. The batch is sent when it is full or [`flush`](Self::flush) is called.
    pub fn queue_datagram(&mut self, destination: SocketAddrV4, payload: &[u8]) {
        self.send_buffer.extend_from_slice(payload);
        self.destinations_and_payload_ends.push((destination, self.send_buffer.len()));
        if self.destinations_and_payload_ends.len() == MAX_DATAGRAMS_PER_SYSCALL {
            self.flush();
        }
    }

    pub fn flush(&mut self) {
        if self.destinations_and_payload_ends.is_empty() {
            return;
        }
        let (mut message_headers, mut payload_start) = (BatchMessageHeaders::default(), 0);
        for (number, (destination, payload_end)) in self.destinations_and_payload_ends.iter().enumerate() {
            let payload = &self.send_buffer[payload_start..*payload_end];
            let iov_base = payload.as_ptr().cast_mut().cast();
            message_headers.io_vectors[number] = libc::iovec { iov_base, iov_len: payload.len() };
            message_headers.addresses[number] = to_sockaddr_in(*destination);
            payload_start = *payload_end;
        }
        let (mut handled_count, datagram_count) = (0, self.destinations_and_payload_ends.len());
        while handled_count < datagram_count {
            match message_headers.send_datagrams(self.udp_socket.as_fd(), handled_count..datagram_count) {
                Ok(sent_count) => handled_count += sent_count,
                Err(error) if error.kind() == ErrorKind::Interrupted => (),
                // The send buffer is full or the receiver is gone, so the datagram is lost.
                Err(_) => {
                    self.unsent_datagram_count += 1;
                    handled_count += 1;
                }
            }
        }
        self.send_buffer.clear();
        self.destinations_and_payload_ends.clear();
    }

    pub fn local_address(&self) -> io::Result<SocketAddrV4> {
        match self.udp_socket.local_addr()? {
            SocketAddr::V4(address) => Ok(address),
            SocketAddr::V6(_) => unreachable!("bound to an IPv4 address"),
        }
    }

    pub fn unsent_datagram_count(&self) -> u64 {
        self.unsent_datagram_count
    }
}

impl AsFd for UdpBatchSocket {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.udp_socket.as_fd()
    }
}

/// Message headers for recvmmsg(2) and sendmmsg(2), with an address and an I/O vector for each datagram.
struct BatchMessageHeaders {
    addresses: [libc::sockaddr_in; MAX_DATAGRAMS_PER_SYSCALL],
    io_vectors: [libc::iovec; MAX_DATAGRAMS_PER_SYSCALL],
    message_headers: [libc::mmsghdr; MAX_DATAGRAMS_PER_SYSCALL],
}

impl Default for BatchMessageHeaders {
    fn default() -> Self {
        // SAFETY: integers and pointers, of which all zeros are valid values.
        unsafe { std::mem::zeroed() }
    }
}

impl BatchMessageHeaders {
    /// Makes the headers in `range` point to their addresses and I/O vectors at the current memory location of `self`.
    fn point_headers_at_buffers(&mut self, range: Range<usize>) -> &mut [libc::mmsghdr] {
        let linked_headers = &mut self.message_headers[range.clone()];
        let addresses_and_vectors = self.addresses[range.clone()].iter_mut().zip(&mut self.io_vectors[range]);
        for (header, (address, vector)) in linked_headers.iter_mut().zip(addresses_and_vectors) {
            header.msg_hdr.msg_name = (&raw mut *address).cast();
            header.msg_hdr.msg_namelen = size_of::<libc::sockaddr_in>() as libc::socklen_t;
            header.msg_hdr.msg_iov = vector;
            header.msg_hdr.msg_iovlen = 1;
        }
        linked_headers
    }

    fn receive_datagrams(&mut self, socket: BorrowedFd<'_>) -> io::Result<usize> {
        let (headers, no_timeout) = (self.point_headers_at_buffers(0..MAX_DATAGRAMS_PER_SYSCALL), std::ptr::null_mut());
        let (first, count) = (headers.as_mut_ptr(), headers.len() as libc::c_uint);
        // SAFETY: all pointers are to memory that is borrowed until the call returns.
        let received_datagram_count =
            unsafe { libc::recvmmsg(socket.as_raw_fd(), first, count, libc::MSG_DONTWAIT, no_timeout) };
        usize::try_from(received_datagram_count).map_err(|_| io::Error::last_os_error())
    }

    /// Sends the queued datagrams with indexes in `range`. Returns the number of sent datagrams, which is at least one.
    fn send_datagrams(&mut self, socket: BorrowedFd<'_>, range: Range<usize>) -> io::Result<usize> {
        let linked_headers = self.point_headers_at_buffers(range);
        let (first, count) = (linked_headers.as_mut_ptr(), linked_headers.len() as libc::c_uint);
        // SAFETY: as in `receive_batch`; the kernel only reads the payloads.
        let sent_datagram_count = unsafe { libc::sendmmsg(socket.as_raw_fd(), first, count, libc::MSG_DONTWAIT) };
        usize::try_from(sent_datagram_count).map_err(|_| io::Error::last_os_error())
    }

    fn sender_address(&self, datagram_index: usize) -> SocketAddrV4 {
        let raw_address = &self.addresses[datagram_index];
        SocketAddrV4::new(u32::from_be(raw_address.sin_addr.s_addr).into(), u16::from_be(raw_address.sin_port))
    }

    fn datagram_length(&self, datagram_index: usize) -> usize {
        self.message_headers[datagram_index].msg_len as usize
    }
}

fn to_sockaddr_in(address: SocketAddrV4) -> libc::sockaddr_in {
    libc::sockaddr_in {
        sin_family: libc::AF_INET as libc::sa_family_t,
        sin_port: address.port().to_be(),
        sin_addr: libc::in_addr { s_addr: u32::from(*address.ip()).to_be() },
        sin_zero: [0; 8],
    }
}
