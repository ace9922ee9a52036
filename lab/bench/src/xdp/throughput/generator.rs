//! Generates live frames for one load balancer, by means of `bpf/live_frames.bpf.c`.

use std::mem::MaybeUninit;
use std::os::fd::{AsFd as _, OwnedFd};

use anyhow::{Context as _, ensure};
use coreward_dataplane::mmap_array::MmapArray;
use coreward_dataplane::test_run;
use libbpf_rs::Link;
use libbpf_rs::skel::{OpenSkel as _, SkelBuilder as _};

use super::veth_pair::VethPair;
use crate::xdp::runner::{FrameTemplate, PacketVariation};

#[allow(missing_docs, clippy::all, clippy::undocumented_unsafe_blocks, unsafe_op_in_unsafe_fn, dead_code)]
mod skeleton {
    include!(concat!(env!("OUT_DIR"), "/live_frames.skel.rs"));
}

use skeleton::LiveFramesSkelBuilder;

/// Number of packets in the memory from which the BPF function generate() reads them.
pub const LIVE_PACKET_COUNT: usize = 1 << 17;
const MAX_FRAME_BYTES: usize = 80;

/// Variable fields of a live packet, as in `struct live_packet` of live_frames.bpf.c.
#[derive(Debug, Clone, Copy, zerocopy::IntoBytes, zerocopy::FromBytes, zerocopy::Immutable)]
#[repr(C)]
struct LivePacket {
    client_address: u32,
    ports: u32,
    tsecr: u32,
    /// Index of the frame to vary, which is 0 for a packet of an open connection and 1 for a new client's SYN.
    kind: u32,
}

/// Generator of live frames, whose BPF programs (live_frames.bpf.c) are attached to one pair of devices.
pub struct FrameGenerator {
    generator_program: OwnedFd,
    _sink_link: Link,
    _baseline_link: Option<Link>,
}

/// Baseline program that is attached to the tested end instead of a load balancer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LiveBaselineProgram {
    /// Program swap_macs(), which swaps MAC addresses.
    SwapMacs,
    /// Program read_tsecr(), which also reads the echoed timestamp.
    ReadTsecr,
}

pub struct GeneratedTraffic<'a> {
    /// Frames that are varied, for a packet of an open connection and for a SYN.
    pub frame_templates: [&'a FrameTemplate; 2],
    /// Packets of open connections, whose number must be [`LIVE_PACKET_COUNT`].
    pub open_connection_packets: &'a [PacketVariation],
    /// Function that returns whether the packet with this index is a new client's SYN instead of an open connection's
    /// packet.
    pub is_syn: &'a dyn Fn(usize) -> bool,
}

impl FrameGenerator {
    /// Creates a generator that sends `traffic` through the veth pair and receives the returned frames. Attaches the
    /// baseline program `baseline`, if any, to the tested end. Fails without the capabilities to load BPF programs.
    pub fn new(
        veth_pair: &VethPair,
        traffic: &GeneratedTraffic<'_>,
        baseline: Option<LiveBaselineProgram>,
    ) -> anyhow::Result<Self> {
        ensure!(
            traffic.open_connection_packets.len() == LIVE_PACKET_COUNT,
            "{} packets",
            traffic.open_connection_packets.len()
        );
        let mut skeleton_storage = MaybeUninit::uninit();
        let mut opened_skeleton =
            LiveFramesSkelBuilder::default().open(&mut skeleton_storage).context("opening live_frames.bpf.o")?;
        let bpf_constants =
            opened_skeleton.maps.rodata_data.as_deref_mut().context("live_frames.bpf.o has no constants")?;
        bpf_constants.target_ifindex = veth_pair.generator_interface_index()?;
        for (target_frame, frame_template) in bpf_constants.frames.iter_mut().zip(traffic.frame_templates) {
            target_frame.words = frame_words(frame_template)?;
        }
        let loaded_skeleton = opened_skeleton.load().context("loading live_frames.bpf.c")?;
        let packet_memory: MmapArray<[LivePacket; LIVE_PACKET_COUNT]> =
            MmapArray::new(loaded_skeleton.maps.bss_packets.as_fd())?;
        let to_live_packet = |(packet_index, packet): (usize, &PacketVariation)| LivePacket {
            client_address: packet.client_address,
            ports: packet.ports,
            tsecr: packet.tsecr,
            kind: (traffic.is_syn)(packet_index).into(),
        };
        let live_packets: Vec<LivePacket> =
            traffic.open_connection_packets.iter().enumerate().map(to_live_packet).collect();
        packet_memory.write(0, live_packets.as_slice());
        let [generator_end, tested_end] =
            [veth_pair.generator_interface_index()? as i32, veth_pair.tested_interface_index()? as i32];
        let sink_link = loaded_skeleton.progs.sink.attach_xdp(generator_end).context("the sink")?;
        let baseline_link = baseline.map(|baseline| match baseline {
            LiveBaselineProgram::SwapMacs => loaded_skeleton.progs.swap_macs.attach_xdp(tested_end),
            LiveBaselineProgram::ReadTsecr => loaded_skeleton.progs.read_tsecr.attach_xdp(tested_end),
        });
        Ok(Self {
            generator_program: loaded_skeleton.progs.generate.as_fd().try_clone_to_owned()?,
            _sink_link: sink_link,
            _baseline_link: baseline_link.transpose().context("the floor")?,
        })
    }

    /// Sends `frame_count` frames as fast as this CPU can. Fails when the kernel does not support live frames (before
    /// 5.18).
    pub fn send_frames(&self, frame_count: u32) -> anyhow::Result<()> {
        test_run::run_program_live(self.generator_program.as_fd(), &[0; MAX_FRAME_BYTES], frame_count)
            .context("sending live frames")
    }
}

fn frame_words(frame_template: &FrameTemplate) -> anyhow::Result<[u64; MAX_FRAME_BYTES / 8]> {
    let mut bytes = [0; MAX_FRAME_BYTES];
    bytes
        .get_mut(..frame_template.frame_bytes.len())
        .context("a frame too long")?
        .copy_from_slice(&frame_template.frame_bytes);
    let mut words =
        bytes.chunks_exact(8).map(|word_bytes| u64::from_ne_bytes(word_bytes.try_into().expect("eight bytes")));
    Ok(std::array::from_fn(|_| words.next().expect("as many words")))
}
