//! UDP sockets that receive and send many datagrams by one system call.

use std::io::{self, ErrorKind};
use std::net::{SocketAddr, SocketAddrV4, UdpSocket};
use std::ops::Range;
use std::os::fd::{AsFd, AsRawFd as _, BorrowedFd};

/// Maximum number of datagrams in a batch, which one system call sends or receives.
pub const BATCH: usize = 32;
/// Requested size of the kernel's receive buffer in bytes; the kernel may limit it.
const RECEIVE_BUFFER_BYTES: usize = 4 << 20;

/// A UDP socket with memory for a batch of datagrams in each direction.
///
/// The kernel's own batches (UDP GSO and GRO) are not used: they consist of datagrams of one client.
#[derive(Debug)]
pub struct BatchSocket {
    socket: UdpSocket,
    /// Memory for received datagrams, in slots of equal length.
    receive_buffer: Box<[u8]>,
    slot_bytes: usize,
    /// Payloads of the datagrams to be sent, one after the other.
    send_buffer: Vec<u8>,
    /// Destination of each outgoing datagram, and the end of its payload in the send buffer.
    receivers: Vec<(SocketAddrV4, usize)>,
    unsent: u64,
}

impl BatchSocket {
    /// Opens a socket bound to `address`. Datagrams longer than `max_bytes` are cut to `max_bytes + 1` bytes.
    pub fn bind(address: SocketAddrV4, max_bytes: usize) -> io::Result<Self> {
        let socket = socket2::Socket::new(socket2::Domain::IPV4, socket2::Type::DGRAM, None)?;
        socket.set_recv_buffer_size(RECEIVE_BUFFER_BYTES)?;
        socket.bind(&address.into())?;
        socket.set_nonblocking(true)?;
        let slot_bytes = max_bytes + 1;
        let receive_buffer = vec![0; slot_bytes * BATCH].into();
        let (send_buffer, ends) = (Vec::new(), Vec::with_capacity(BATCH));
        Ok(Self { socket: socket.into(), receive_buffer, slot_bytes, send_buffer, receivers: ends, unsent: 0 })
    }

    /// Receives the next batch of datagrams, and passes each one with its sender to `accept`. Returns the number of
    /// datagrams, which may be 0. Fails when the socket fails.
    pub fn receive(&mut self, accept: &mut impl FnMut(SocketAddrV4, &[u8])) -> io::Result<usize> {
        let mut headers = Headers::default();
        for (number, slot) in self.receive_buffer.chunks_exact_mut(self.slot_bytes).enumerate() {
            headers.vectors[number] = libc::iovec { iov_base: slot.as_mut_ptr().cast(), iov_len: slot.len() };
        }
        let count = loop {
            match headers.receive(self.socket.as_fd()) {
                Ok(count) => break count,
                Err(error) if error.kind() == ErrorKind::WouldBlock => return Ok(0),
                // A signal, or an ICMP error about an earlier datagram.
                Err(error) if matches!(error.kind(), ErrorKind::Interrupted | ErrorKind::ConnectionRefused) => (),
                Err(error) => return Err(error),
            }
        };
        for (number, slot) in self.receive_buffer.chunks_exact(self.slot_bytes).take(count).enumerate() {
            accept(headers.sender(number), &slot[..headers.length(number)]);
        }
        Ok(count)
    }

    /// Adds a datagram to the batch, which is sent when it is full or by [`flush`](Self::flush).
    pub fn send(&mut self, to: SocketAddrV4, payload: &[u8]) {
        self.send_buffer.extend_from_slice(payload);
        self.receivers.push((to, self.send_buffer.len()));
        if self.receivers.len() == BATCH {
            self.flush();
        }
    }

    /// Sends the outgoing batch of datagrams.
    pub fn flush(&mut self) {
        if self.receivers.is_empty() {
            return;
        }
        let (mut headers, mut begin) = (Headers::default(), 0);
        for (number, (to, end)) in self.receivers.iter().enumerate() {
            let payload = &self.send_buffer[begin..*end];
            let iov_base = payload.as_ptr().cast_mut().cast();
            headers.vectors[number] = libc::iovec { iov_base, iov_len: payload.len() };
            headers.addresses[number] = socket_address(*to);
            begin = *end;
        }
        let (mut done, count) = (0, self.receivers.len());
        while done < count {
            match headers.send(self.socket.as_fd(), done..count) {
                Ok(sent) => done += sent,
                Err(error) if error.kind() == ErrorKind::Interrupted => (),
                // A full send buffer or a receiver that is gone: the datagram is lost.
                Err(_) => {
                    self.unsent += 1;
                    done += 1;
                }
            }
        }
        self.send_buffer.clear();
        self.receivers.clear();
    }

    pub fn local_address(&self) -> io::Result<SocketAddrV4> {
        match self.socket.local_addr()? {
            SocketAddr::V4(address) => Ok(address),
            SocketAddr::V6(_) => unreachable!("bound to an IPv4 address"),
        }
    }

    /// Returns the number of datagrams that the kernel did not send.
    pub fn unsent(&self) -> u64 {
        self.unsent
    }
}

impl AsFd for BatchSocket {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

/// Message headers for recvmmsg(2) and sendmmsg(2), with the address and I/O vector of each datagram of a batch.
struct Headers {
    addresses: [libc::sockaddr_in; BATCH],
    vectors: [libc::iovec; BATCH],
    headers: [libc::mmsghdr; BATCH],
}

impl Default for Headers {
    fn default() -> Self {
        // SAFETY: integers and pointers, of which all zeros are valid values.
        unsafe { std::mem::zeroed() }
    }
}

impl Headers {
    /// Sets the pointers of these headers to their addresses and I/O vectors, at the current memory location of `self`.
    fn link(&mut self, range: Range<usize>) -> &mut [libc::mmsghdr] {
        let headers = &mut self.headers[range.clone()];
        let memory = self.addresses[range.clone()].iter_mut().zip(&mut self.vectors[range]);
        for (header, (address, vector)) in headers.iter_mut().zip(memory) {
            header.msg_hdr.msg_name = (&raw mut *address).cast();
            header.msg_hdr.msg_namelen = size_of::<libc::sockaddr_in>() as libc::socklen_t;
            header.msg_hdr.msg_iov = vector;
            header.msg_hdr.msg_iovlen = 1;
        }
        headers
    }

    fn receive(&mut self, socket: BorrowedFd<'_>) -> io::Result<usize> {
        let (headers, no_timeout) = (self.link(0..BATCH), std::ptr::null_mut());
        let (first, count) = (headers.as_mut_ptr(), headers.len() as libc::c_uint);
        // SAFETY: all pointers are to memory that is borrowed until the call returns.
        let received = unsafe { libc::recvmmsg(socket.as_raw_fd(), first, count, libc::MSG_DONTWAIT, no_timeout) };
        usize::try_from(received).map_err(|_| io::Error::last_os_error())
    }

    /// Sends the datagrams of a range. Returns the number of sent datagrams, at least one.
    fn send(&mut self, socket: BorrowedFd<'_>, range: Range<usize>) -> io::Result<usize> {
        let headers = self.link(range);
        let (first, count) = (headers.as_mut_ptr(), headers.len() as libc::c_uint);
        // SAFETY: as in `receive`; the kernel only reads the payloads.
        let sent = unsafe { libc::sendmmsg(socket.as_raw_fd(), first, count, libc::MSG_DONTWAIT) };
        usize::try_from(sent).map_err(|_| io::Error::last_os_error())
    }

    fn sender(&self, number: usize) -> SocketAddrV4 {
        let address = &self.addresses[number];
        SocketAddrV4::new(u32::from_be(address.sin_addr.s_addr).into(), u16::from_be(address.sin_port))
    }

    fn length(&self, number: usize) -> usize {
        self.headers[number].msg_len as usize
    }
}

fn socket_address(address: SocketAddrV4) -> libc::sockaddr_in {
    libc::sockaddr_in {
        sin_family: libc::AF_INET as libc::sa_family_t,
        sin_port: address.port().to_be(),
        sin_addr: libc::in_addr { s_addr: u32::from(*address.ip()).to_be() },
        sin_zero: [0; 8],
    }
}
