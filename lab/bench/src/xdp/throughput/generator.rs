//! Frames for one load balancer: `bpf/live_frames.bpf.c` from user space.

use std::mem::MaybeUninit;
use std::os::fd::{AsFd as _, OwnedFd};

use anyhow::{Context as _, ensure};
use coreward_dataplane::mmap_array::MmapArray;
use coreward_dataplane::test_run;
use libbpf_rs::Link;
use libbpf_rs::skel::{OpenSkel as _, SkelBuilder as _};

use super::wire::VethPair;
use crate::xdp::runner::{Frame, Packet};

#[allow(missing_docs, clippy::all, clippy::undocumented_unsafe_blocks, unsafe_op_in_unsafe_fn, dead_code)]
mod skeleton {
    include!(concat!(env!("OUT_DIR"), "/live_frames.skel.rs"));
}

use skeleton::LiveFramesSkelBuilder;

/// Number of packets in the memory from which generate() reads them.
pub const LIVE_PACKET_COUNT: usize = 1 << 17;
const FRAME_BYTES: usize = 80;

/// Variable fields of a live packet: `struct live_packet` of live_frames.bpf.c.
#[derive(Debug, Clone, Copy, zerocopy::IntoBytes, zerocopy::FromBytes, zerocopy::Immutable)]
#[repr(C)]
struct LivePacket {
    client_address: u32,
    ports: u32,
    tsecr: u32,
    /// Frame to vary: 0 for a packet of an open connection, 1 for the SYN of a new client.
    kind: u32,
}

/// Loaded programs of live_frames.bpf.c, attached to one pair of devices.
pub struct Generator {
    generate: OwnedFd,
    _sink: Link,
    _floor: Option<Link>,
}

/// Baseline program that is attached to the tested end instead of a load balancer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Floor {
    /// Program swap_macs(), which swaps MAC addresses.
    SwapMacs,
    /// Program read_tsecr(), which also reads the echoed timestamp.
    ReadTsecr,
}

pub struct Traffic<'a> {
    /// Frames that are varied: a packet of an open connection, and a SYN.
    pub frames: [&'a Frame; 2],
    /// Packets of open connections; their number is [`LIVE_PACKET_COUNT`].
    pub packets: &'a [Packet],
    /// Returns whether the packet with this index is a SYN of a new client instead.
    pub is_new: &'a dyn Fn(usize) -> bool,
}

impl Generator {
    /// Creates a generator that sends `traffic` into the wire and receives the returned frames. Attaches the baseline
    /// `floor`, if any, to the tested end. Fails without the capabilities to load BPF programs.
    pub fn new(wire: &VethPair, traffic: &Traffic<'_>, floor: Option<Floor>) -> anyhow::Result<Self> {
        ensure!(traffic.packets.len() == LIVE_PACKET_COUNT, "{} packets", traffic.packets.len());
        let mut storage = MaybeUninit::uninit();
        let mut open = LiveFramesSkelBuilder::default().open(&mut storage).context("opening live_frames.bpf.o")?;
        let constants = open.maps.rodata_data.as_deref_mut().context("live_frames.bpf.o has no constants")?;
        constants.target_ifindex = wire.generator_index()?;
        for (to, frame) in constants.frames.iter_mut().zip(traffic.frames) {
            to.words = words(frame)?;
        }
        let loaded = open.load().context("loading live_frames.bpf.c")?;
        let memory: MmapArray<[LivePacket; LIVE_PACKET_COUNT]> = MmapArray::new(loaded.maps.bss_packets.as_fd())?;
        let live = |(number, packet): (usize, &Packet)| LivePacket {
            client_address: packet.client_address,
            ports: packet.ports,
            tsecr: packet.tsecr,
            kind: (traffic.is_new)(number).into(),
        };
        let packets: Vec<LivePacket> = traffic.packets.iter().enumerate().map(live).collect();
        memory.write(0, packets.as_slice());
        let [generator_end, tested_end] = [wire.generator_index()? as i32, wire.tested_index()? as i32];
        let sink = loaded.progs.sink.attach_xdp(generator_end).context("the sink")?;
        let floor = floor.map(|floor| match floor {
            Floor::SwapMacs => loaded.progs.swap_macs.attach_xdp(tested_end),
            Floor::ReadTsecr => loaded.progs.read_tsecr.attach_xdp(tested_end),
        });
        Ok(Self {
            generate: loaded.progs.generate.as_fd().try_clone_to_owned()?,
            _sink: sink,
            _floor: floor.transpose().context("the floor")?,
        })
    }

    /// Sends `frames` frames as fast as this CPU can. Fails when the kernel does not support live frames (before 5.18).
    pub fn send(&self, frames: u32) -> anyhow::Result<()> {
        test_run::run_live(self.generate.as_fd(), &[0; FRAME_BYTES], frames).context("sending live frames")
    }
}

fn words(frame: &Frame) -> anyhow::Result<[u64; FRAME_BYTES / 8]> {
    let mut bytes = [0; FRAME_BYTES];
    bytes.get_mut(..frame.bytes.len()).context("a frame too long")?.copy_from_slice(&frame.bytes);
    let mut words = bytes.chunks_exact(8).map(|word| u64::from_ne_bytes(word.try_into().expect("eight bytes")));
    Ok(std::array::from_fn(|_| words.next().expect("as many words")))
}
