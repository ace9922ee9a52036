//! Intake of UDP services' requests by AF_XDP. An XDP program ([`program`]) redirects the requests that arrive in each
//! receive queue to that queue's socket ([`queue`]).

pub mod program;
pub mod queue;

use std::io;
use std::net::{Ipv4Addr, SocketAddrV4};
use std::os::fd::{AsFd as _, BorrowedFd};

use anyhow::{Context as _, ensure};
use coreward_intf as intf;

use crate::ethtool;
use crate::lb::AttachedXdpMode;
use crate::lb::device::interface_mac;
use program::RequestIntakeProgram;
use queue::{AfXdpQueue, FrameCopyMode};

/// Total length of an Ethernet header, an IPv4 header without options and a UDP header, in bytes.
const UDP_FRAME_HEADERS_BYTES: usize = 14 + 20 + 8;

/// UDP datagram with a request, parsed from a received frame.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RequestDatagram<'f> {
    /// Address and port of the client.
    pub source: SocketAddrV4,
    /// Address and port of the service.
    pub destination: SocketAddrV4,
    /// Payload of the datagram, without Ethernet padding.
    pub payload: &'f [u8],
}

impl<'f> RequestDatagram<'f> {
    /// Parses a frame whose headers the XDP program has checked. Returns `None` if the frame is shorter than its
    /// headers indicate.
    pub fn parse(frame: &'f [u8]) -> Option<Self> {
        let (headers, payload_and_padding) = frame.split_first_chunk::<UDP_FRAME_HEADERS_BYTES>()?;
        let ipv4_address_at = |offset: usize| {
            Ipv4Addr::from_bits(u32::from_be_bytes(headers[offset..offset + 4].try_into().expect("four")))
        };
        let read_u16_at = |offset: usize| u16::from_be_bytes([headers[offset], headers[offset + 1]]);
        let payload_length = usize::from(read_u16_at(38)).checked_sub(8)?;
        Some(Self {
            source: SocketAddrV4::new(ipv4_address_at(26), read_u16_at(34)),
            destination: SocketAddrV4::new(ipv4_address_at(30), read_u16_at(36)),
            payload: payload_and_padding.get(..payload_length)?,
        })
    }
}

/// XDP program and AF_XDP sockets that receive the UDP requests at one device. The program is detached and the sockets
/// are closed when the value is dropped or the process ends.
#[derive(Debug)]
pub struct DatagramIntake {
    program: RequestIntakeProgram,
    queues: Vec<AfXdpQueue>,
    received_datagram_count: u64,
    malformed_datagram_count: u64,
}

impl DatagramIntake {
    /// Attaches the program to an interface, in the driver if possible, and opens a socket for each receive queue. The
    /// sockets use zero-copy if the driver supports it. Fails when the interface has another XDP program, or the kernel
    /// rejects the program or a socket.
    pub fn open(interface: &str, listeners: &[SocketAddrV4]) -> anyhow::Result<Self> {
        let interface_index = nix::net::if_::if_nametoindex(interface);
        let interface_index = interface_index.with_context(|| format!("interface {interface:?} does not exist"))?;
        let interface_mac =
            interface_mac(interface)?.with_context(|| format!("interface {interface:?} has no MAC address"))?;
        // A driver that does not report its queues counts as having one.
        let (queue_count, max_queues) =
            (ethtool::receive_queue_count(interface).unwrap_or(1).into(), intf::MAX_INTAKE_QUEUES);
        ensure!(
            queue_count <= max_queues,
            "interface {interface:?} has {queue_count} receive queues: expected at most {max_queues}"
        );
        let mut program = RequestIntakeProgram::load(interface_mac, listeners)?;
        let attachment = program.attach(interface_index).with_context(|| format!("interface {interface:?}"))?;
        let mut queues = Vec::new();
        for queue_id in 0..queue_count {
            let xdp_queue = AfXdpQueue::bind_socket(interface_index, queue_id, attachment == AttachedXdpMode::Native);
            let xdp_queue =
                xdp_queue.with_context(|| format!("AF_XDP at receive queue {queue_id} of interface {interface:?}"))?;
            program.set_queue_socket(queue_id, xdp_queue.as_fd())?;
            queues.push(xdp_queue);
        }
        Ok(Self { program, queues, received_datagram_count: 0, malformed_datagram_count: 0 })
    }

    /// Returns the method by which frames get into the sockets' memory: zero-copy only if all queues use it.
    pub fn copy_mode(&self) -> FrameCopyMode {
        let is_zero_copy = self.queues.iter().all(|queue| queue.copy_mode() == FrameCopyMode::ZeroCopy);
        if is_zero_copy { FrameCopyMode::ZeroCopy } else { FrameCopyMode::Copy }
    }

    /// Receives a batch of frames from each queue, and passes their requests to `handle_request`. Returns the number of
    /// received frames. Fails when the driver cannot be woken.
    pub fn receive_batches(&mut self, handle_request: &mut impl FnMut(RequestDatagram<'_>)) -> io::Result<usize> {
        let Self { queues, received_datagram_count: received_count, malformed_datagram_count: malformed_count, .. } =
            self;
        let mut frame_count = 0;
        for queue in queues {
            frame_count += queue.receive_batch(&mut |frame| match RequestDatagram::parse(frame) {
                Some(datagram) => {
                    *received_count += 1;
                    handle_request(datagram);
                }
                None => *malformed_count += 1,
            })?;
        }
        Ok(frame_count)
    }

    /// Returns the AF_XDP sockets, on which a caller can wait for requests.
    pub fn socket_fds(&self) -> impl Iterator<Item = BorrowedFd<'_>> {
        self.queues.iter().map(AfXdpQueue::as_fd)
    }

    /// Checks that the device of the sockets still exists. Fails when it was removed.
    pub fn check_device_exists(&self) -> io::Result<()> {
        self.queues.iter().try_for_each(AfXdpQueue::check_device_exists)
    }

    /// Returns the names and values of all counters. Each redirected datagram is counted as either received or dropped.
    pub fn counters(&self) -> anyhow::Result<Vec<(&'static str, u64)>> {
        let mut counters: Vec<_> = program::COUNTER_NAMES.into_iter().zip(self.program.counters()?).collect();
        let (mut ring_full_drops, mut no_buffer_drops) = (0, 0);
        for queue in &self.queues {
            let drop_counts = queue.dropped_frame_counts()?;
            ring_full_drops += drop_counts.receive_ring_full_count;
            no_buffer_drops += drop_counts.fill_ring_empty_count;
        }
        counters.extend([
            ("received", self.received_datagram_count),
            ("dropped_ring_full", ring_full_drops),
            ("dropped_no_buffer", no_buffer_drops),
            ("dropped_malformed", self.malformed_datagram_count),
        ]);
        Ok(counters)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ethernet_padding_is_not_part_of_the_datagram() {
        let mut frame = vec![0; UDP_FRAME_HEADERS_BYTES];
        frame[26..34].copy_from_slice(&[192, 0, 2, 1, 192, 0, 2, 2]);
        frame[34..40].copy_from_slice(&[0x12, 0x34, 0x0f, 0xa0, 0, 8 + 3]);
        assert_eq!(RequestDatagram::parse(&frame), None, "the payload is missing");
        frame.extend(b"getpadding");
        let (source, destination) = ("192.0.2.1:4660".parse().unwrap(), "192.0.2.2:4000".parse().unwrap());
        assert_eq!(RequestDatagram::parse(&frame), Some(RequestDatagram { source, destination, payload: b"get" }));
        frame[39] = 7;
        assert_eq!(RequestDatagram::parse(&frame), None, "shorter than a UDP header");
    }
}
