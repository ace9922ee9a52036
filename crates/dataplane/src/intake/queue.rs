//! AF_XDP socket of one receive queue. It is used only to receive.

use std::io;
use std::os::fd::{AsFd, AsRawFd as _, BorrowedFd};

use anyhow::Context as _;
use nix::sys::socket::{getsockopt, sockopt};
use xdp::nic::NicIndex;
use xdp::slab::{Slab as _, StackSlab};
use xdp::socket::{XdpSocket, XdpSocketBuilder};
use xdp::umem::{FrameSize, UmemCfgBuilder};
use xdp::{RingConfigBuilder, RxRing, Umem, WakableFillRing};

/// Number of frames in one socket's memory. Each frame is in either the fill ring or the receive ring.
const FRAMES_PER_XDP_SOCKET: u32 = 2048;
/// Maximum number of frames received in one batch.
const MAX_BATCH_FRAMES: usize = 32;

/// Method by which received frames get into an AF_XDP socket's memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FrameCopyMode {
    /// The driver writes frames directly into the socket's memory.
    ZeroCopy,
    /// The kernel copies frames into the socket's memory.
    Copy,
}

/// Numbers of redirected frames that the kernel dropped, by reason.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct FrameDropCounts {
    /// Number of frames dropped because the receive ring was full.
    pub receive_ring_full_count: u64,
    /// Number of frames dropped because the fill ring was empty.
    pub fill_ring_empty_count: u64,
}

/// AF_XDP socket of one receive queue, with its rings and memory. Fields are dropped in their order, so the memory
/// must come after the fields that use it.
pub struct AfXdpQueue {
    socket: XdpSocket,
    rx_ring: RxRing,
    fill_ring: WakableFillRing,
    umem: Umem,
    copy_mode: FrameCopyMode,
}

impl AfXdpQueue {
    /// Binds an AF_XDP socket to a device's receive queue. `is_native` means that the XDP program runs in the driver,
    /// which then uses zero-copy if it can. Fails without CAP_NET_RAW, or when the queue already has a socket.
    pub fn bind_socket(interface_index: u32, queue_id: u32, is_native: bool) -> anyhow::Result<Self> {
        let umem_config =
            UmemCfgBuilder { frame_size: FrameSize::TwoK, frame_count: FRAMES_PER_XDP_SOCKET, ..Default::default() };
        let mut umem = Umem::map(umem_config.build()?).context("memory for frames")?;
        let mut builder = XdpSocketBuilder::new()?;
        let ring_sizes = RingConfigBuilder {
            rx_count: FRAMES_PER_XDP_SOCKET,
            fill_count: FRAMES_PER_XDP_SOCKET,
            tx_count: 0,
            ..Default::default()
        };
        let (rings, mut flags) = builder.build_wakable_rings(&umem, ring_sizes.build()?)?;
        if !is_native {
            flags.force_copy();
        }
        let socket = builder.bind(NicIndex(interface_index), queue_id, flags)?;
        let mut fill_ring = rings.fill_ring;
        let rx_ring = rings.rx_ring.context("a socket without a receive ring")?;
        // SAFETY: `AfXdpQueue` drops the socket before the memory.
        unsafe { fill_ring.enqueue(&mut umem, FRAMES_PER_XDP_SOCKET as usize, true) }.context("the fill ring")?;
        let copy_mode = query_copy_mode(socket_fd(&socket))?;
        Ok(Self { socket, rx_ring, fill_ring, umem, copy_mode })
    }

    /// Returns the method by which received frames get into the socket's memory.
    pub fn copy_mode(&self) -> FrameCopyMode {
        self.copy_mode
    }

    /// Receives a batch of frames, and passes each frame to `handle_frame`. Returns the number of received frames.
    /// Fails when the driver cannot be woken.
    pub fn receive_batch(&mut self, handle_frame: &mut impl FnMut(&[u8])) -> io::Result<usize> {
        let mut frame_batch = StackSlab::<MAX_BATCH_FRAMES>::new();
        // SAFETY: all frames are freed before this function returns, and `AfXdpQueue` drops the memory last.
        let received_frames = unsafe { self.rx_ring.recv(&self.umem, &mut frame_batch) };
        if received_frames == 0 {
            return Ok(0);
        }
        while let Some(frame) = frame_batch.pop_back() {
            handle_frame(&frame);
            self.umem.free_packet(frame);
        }
        // SAFETY: as above.
        unsafe { self.fill_ring.enqueue(&mut self.umem, received_frames, self.copy_mode == FrameCopyMode::ZeroCopy) }?;
        Ok(received_frames)
    }

    /// Returns the numbers of frames that the kernel has dropped since the socket was bound.
    pub fn dropped_frame_counts(&self) -> anyhow::Result<FrameDropCounts> {
        let statistics = self.socket.statistics()?;
        Ok(FrameDropCounts {
            receive_ring_full_count: statistics.rx_ring_full,
            fill_ring_empty_count: statistics.rx_dropped,
        })
    }

    /// Checks that the socket's device still exists. Fails when it was removed.
    pub fn check_device_exists(&self) -> io::Result<()> {
        match getsockopt(&self.as_fd(), sockopt::SocketError)? {
            0 => Ok(()),
            error => Err(io::Error::from_raw_os_error(error)),
        }
    }
}

impl AsFd for AfXdpQueue {
    fn as_fd(&self) -> BorrowedFd<'_> {
        socket_fd(&self.socket)
    }
}

impl std::fmt::Debug for AfXdpQueue {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Queue").field("socket", &self.socket.raw_fd()).field("copy_mode", &self.copy_mode).finish()
    }
}

fn socket_fd(socket: &XdpSocket) -> BorrowedFd<'_> {
    // SAFETY: the descriptor is open as long as the socket is borrowed.
    unsafe { BorrowedFd::borrow_raw(socket.raw_fd()) }
}

fn query_copy_mode(socket: BorrowedFd<'_>) -> io::Result<FrameCopyMode> {
    let mut options = libc::xdp_options { flags: 0 };
    let mut option_length = size_of_val(&options) as libc::socklen_t;
    let (value, descriptor) = ((&raw mut options).cast(), socket.as_raw_fd());
    // SAFETY: the kernel writes at most `option_length` bytes into the struct.
    let result =
        unsafe { libc::getsockopt(descriptor, libc::SOL_XDP, libc::XDP_OPTIONS, value, &raw mut option_length) };
    if result < 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(if options.flags & libc::XDP_OPTIONS_ZEROCOPY != 0 { FrameCopyMode::ZeroCopy } else { FrameCopyMode::Copy })
}
