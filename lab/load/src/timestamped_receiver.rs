//! Receives packets with the kernel's arrival times, which do not depend on how late the process reads a packet.

use std::io::{self, IoSliceMut};
use std::net::{SocketAddr, SocketAddrV4, SocketAddrV6};
use std::os::fd::{AsFd, AsRawFd as _};
use std::time::Duration;

use nix::sys::socket::sockopt::ReceiveTimestampns;
use nix::sys::socket::{ControlMessageOwned, MsgFlags, SockaddrStorage, recvmsg, setsockopt};
use nix::sys::time::TimeSpec;
use nix::time::{ClockId, clock_gettime};

use crate::event_loop::now_ns;

/// Length, arrival time and sender of the data that one call of [`TimestampedReceiver::receive`] has received.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ReceivedBytes {
    /// Number of bytes written to the buffer, or 0 at the end of a stream.
    pub received_byte_count: usize,
    /// Time when the kernel received the bytes (CLOCK_MONOTONIC, ns). On a stream, this is the last segment's time.
    pub arrived_ns: u64,
    /// Address of the sender, or `None` on a stream.
    pub sender: Option<SocketAddr>,
    /// Whether the datagram was longer than the buffer.
    pub is_truncated: bool,
}

/// Receiver for sockets on which [`TimestampedReceiver::enable_timestamps`] was called.
#[derive(Debug)]
pub struct TimestampedReceiver {
    control_buffer: Vec<u8>,
}

impl Default for TimestampedReceiver {
    fn default() -> Self {
        Self { control_buffer: nix::cmsg_space!(TimeSpec) }
    }
}

impl TimestampedReceiver {
    /// Makes the kernel report arrival times for the socket (SO_TIMESTAMPNS).
    pub fn enable_timestamps(socket: &impl AsFd) -> io::Result<()> {
        Ok(setsockopt(socket, ReceiveTimestampns, &true)?)
    }

    /// Receives a datagram, or the available part of a stream. Blocks if the socket is blocking. Fails like recvmsg(2),
    /// with WouldBlock when nothing is available, and ConnectionRefused when the target has no listener.
    pub fn receive(&mut self, socket: &impl AsFd, buffer: &mut [u8]) -> io::Result<ReceivedBytes> {
        let mut io_slices = [IoSliceMut::new(buffer)];
        let descriptor = socket.as_fd().as_raw_fd();
        let message =
            recvmsg::<SockaddrStorage>(descriptor, &mut io_slices, Some(&mut self.control_buffer), MsgFlags::empty())?;
        let mut arrival_time = None;
        for control in message.cmsgs()? {
            if let ControlMessageOwned::ScmTimestampns(kernel_time) = control {
                arrival_time = Some(kernel_time);
            }
        }
        Ok(ReceivedBytes {
            received_byte_count: message.bytes,
            arrived_ns: arrival_time.map_or_else(now_ns, realtime_to_monotonic_ns),
            sender: message.address.as_ref().and_then(to_socket_address),
            is_truncated: message.flags.contains(MsgFlags::MSG_TRUNC),
        })
    }
}

fn to_socket_address(address: &SockaddrStorage) -> Option<SocketAddr> {
    let ipv4_address = address.as_sockaddr_in().map(|address| SocketAddrV4::from(*address).into());
    ipv4_address.or_else(|| address.as_sockaddr_in6().map(|address| SocketAddrV6::from(*address).into()))
}

/// Converts a past time of CLOCK_REALTIME, such as a packet's kernel time stamp, to CLOCK_MONOTONIC. A step of
/// CLOCK_REALTIME (by NTP) only falsifies times of packets that are in transit during the step.
fn realtime_to_monotonic_ns(realtime: TimeSpec) -> u64 {
    let timespec_to_ns = |time: TimeSpec| Duration::from(time).as_nanos() as u64;
    let realtime_now = clock_gettime(ClockId::CLOCK_REALTIME).expect("every kernel has this clock");
    now_ns().saturating_sub(timespec_to_ns(realtime_now).saturating_sub(timespec_to_ns(realtime)))
}

#[cfg(test)]
mod tests {
    use std::net::UdpSocket;

    use super::*;

    #[test]
    fn arrival_time_is_the_kernel_timestamp_and_not_the_time_of_reading() {
        let (receiver, sender) = (UdpSocket::bind("127.0.0.1:0").unwrap(), UdpSocket::bind("127.0.0.1:0").unwrap());
        receiver.set_read_timeout(Some(Duration::from_secs(30))).unwrap();
        TimestampedReceiver::enable_timestamps(&receiver).unwrap();
        // The kernel begins to stamp some time after the first socket requests it, because net_enable_timestamp defers
        // the work to a queue. Packets without a stamp get the time of reading. A pause of the machine between two
        // clock reads also shifts the time.
        let has_kernel_timestamp = (0..20).any(|_| is_arrival_time_near_send_time(&receiver, &sender));
        assert!(has_kernel_timestamp, "20 of 20 have the time of reading");
    }

    /// Sends a datagram and reads it late. Returns whether its arrival time is near its send time.
    fn is_arrival_time_near_send_time(receiver: &UdpSocket, sender: &UdpSocket) -> bool {
        let send_start_ns = now_ns();
        sender.send_to(b"sent", receiver.local_addr().unwrap()).unwrap();
        let send_end_ns = now_ns();
        std::thread::sleep(Duration::from_millis(300));
        let mut buffer = [0; 3];
        let received_bytes = TimestampedReceiver::default().receive(receiver, &mut buffer).unwrap();
        assert_eq!((received_bytes.received_byte_count, received_bytes.is_truncated), (3, true));
        assert_eq!(received_bytes.sender, Some(sender.local_addr().unwrap()));
        // The tolerance allows the machine to pause between the reads of the two clocks.
        let tolerance_ns = 100_000_000;
        println!("{send_start_ns}, {send_end_ns}: {received_bytes:?}");
        (send_start_ns - tolerance_ns..send_end_ns + tolerance_ns).contains(&received_bytes.arrived_ns)
    }
}
