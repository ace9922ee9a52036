//! Runs an XDP program on many fresh packets, by means of `bpf/generated_packets.bpf.c`.

use std::mem::MaybeUninit;
use std::os::fd::{AsFd as _, AsRawFd as _, BorrowedFd, OwnedFd};
use std::time::Duration;

use anyhow::{Context as _, ensure};
use coreward_dataplane::mmap_array::MmapArray;
use coreward_dataplane::test_run::{self, ReceiveQueueId};
use libbpf_rs::skel::{OpenSkel as _, SkelBuilder as _};
use libbpf_rs::{MapCore as _, MapFlags, MapHandle};
use nix::time::{ClockId, clock_gettime};

#[allow(missing_docs, clippy::all, clippy::undocumented_unsafe_blocks, unsafe_op_in_unsafe_fn, dead_code)]
mod skeleton {
    include!(concat!(env!("OUT_DIR"), "/generated_packets.skel.rs"));
}

use skeleton::GeneratedPacketsSkelBuilder;

/// Maximum number of packets in the memory from which the BPF function `generated_packet` reads them.
pub const PACKET_COUNT: usize = 1 << 20;

/// Fields in which generated packets differ, as in `struct variation` of `bpf/feed.h`.
#[derive(Debug, Clone, Copy, Default, zerocopy::IntoBytes, zerocopy::FromBytes, zerocopy::Immutable)]
#[repr(C)]
pub struct PacketVariation {
    /// Client's IPv4 address, in network byte order like `ports` and `tsecr`.
    pub client_address: u32,
    pub ports: u32,
    /// Echoed timestamp (TSecr) of the TCP timestamps option.
    pub tsecr: u32,
    /// Index in host byte order of the cache line that [`PacketGenerator::WithParallelCacheLine`] and
    /// [`PacketGenerator::AfterAwaitedCacheLine`] load.
    pub line_index: u32,
}

/// Frame that is varied for each packet, with its destination port and the offsets of the variable fields.
#[derive(Debug, Clone)]
pub struct FrameTemplate {
    pub frame_bytes: Vec<u8>,
    /// Offset in the frame, in bytes, of the client's IPv4 address, or of the last four bytes of its IPv6 address.
    pub client_offset: u32,
    pub ports_offset: u32,
    /// Offset in the frame, in bytes, of TSecr, or of TSval in a server's response.
    pub tsecr_offset: u32,
    pub destination_port: u16,
}

/// BPF program that generates packets and calls the measured program.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PacketGenerator {
    VariedFrame,
    /// Generator that also loads a cache line, for which the measured program does not wait.
    WithParallelCacheLine,
    /// Generator that also loads a cache line, and makes the measured program wait for it.
    AfterAwaitedCacheLine,
    /// Generator that sends packets of new clients.
    GeneratedSource,
    /// Generator that first removes the outer header which the previous run has added to the frame.
    WithoutOuterHeader,
}

/// Runner that generates packets from one frame, by the loaded programs of generated_packets.bpf.c.
pub struct PacketRunner {
    frame_bytes: Vec<u8>,
    /// Programs that generate packets from the frame, in the order of [`PacketGenerator`].
    generator_programs: [OwnedFd; 5],
    /// Baseline program that returns at once.
    pub empty_program: OwnedFd,
    /// Baseline program that parses packets and swaps their MAC addresses.
    pub parse_and_swap_program: OwnedFd,
    measured_program_map: MapHandle,
    connection_count: usize,
    receive_queue: Option<ReceiveQueueId>,
}

impl PacketRunner {
    /// Creates a runner that varies `frame` by each of `packets` in turn. The number of packets must be a power of two,
    /// and each `line_index` must be below `line_count`. New clients send to the frame's destination port.
    pub fn new(frame: &FrameTemplate, packets: &[PacketVariation], line_count: u32) -> anyhow::Result<Self> {
        ensure!(packets.len().is_power_of_two() && packets.len() <= PACKET_COUNT, "{} packets", packets.len());
        let mut skeleton_storage = MaybeUninit::uninit();
        let mut opened_skeleton = GeneratedPacketsSkelBuilder::default()
            .open(&mut skeleton_storage)
            .context("opening generated_packets.bpf.o")?;
        let bpf_constants =
            opened_skeleton.maps.rodata_data.as_deref_mut().context("generated_packets.bpf.o has no constants")?;
        bpf_constants.packet_index_mask = packets.len() as u32 - 1;
        bpf_constants.first_word = u64::from_ne_bytes(frame.frame_bytes[..8].try_into().expect("eight bytes"));
        bpf_constants.second_word = u64::from_ne_bytes(frame.frame_bytes[8..16].try_into().expect("eight bytes"));
        bpf_constants.frame_length = frame.frame_bytes.len() as u32;
        bpf_constants.client_offset = frame.client_offset;
        bpf_constants.ports_offset = frame.ports_offset;
        bpf_constants.tsecr_offset = frame.tsecr_offset;
        bpf_constants.destination_port = u32::from(frame.destination_port.to_be()) << 16;
        opened_skeleton.maps.lines.set_max_entries(line_count.max(1)).context("the number of lines")?;
        let loaded_skeleton = opened_skeleton.load().context("loading generated_packets.bpf.c")?;
        let packet_memory: MmapArray<[PacketVariation; PACKET_COUNT]> =
            MmapArray::new(loaded_skeleton.maps.bss_packets.as_fd())?;
        packet_memory.write(0, packets);
        let programs = &loaded_skeleton.progs;
        Ok(Self {
            frame_bytes: frame.frame_bytes.clone(),
            generator_programs: [
                programs.generated_packet.as_fd().try_clone_to_owned()?,
                programs.generated_packet_with_line.as_fd().try_clone_to_owned()?,
                programs.generated_packet_after_line.as_fd().try_clone_to_owned()?,
                programs.generated_source.as_fd().try_clone_to_owned()?,
                programs.generated_packet_shortened.as_fd().try_clone_to_owned()?,
            ],
            empty_program: programs.empty.as_fd().try_clone_to_owned()?,
            parse_and_swap_program: programs.parse_and_swap_macs.as_fd().try_clone_to_owned()?,
            measured_program_map: MapHandle::try_from(&loaded_skeleton.maps.measured)?,
            connection_count: packets.len(),
            receive_queue: None,
        })
    }

    pub fn with_receive_queue(self, queue: ReceiveQueueId) -> Self {
        Self { receive_queue: Some(queue), ..self }
    }

    /// Returns the number of different packets, after which the runner repeats the first one.
    pub fn connection_count(&self) -> usize {
        self.connection_count
    }

    /// Selects `program` and runs it `repeat` times. Returns the mean time of one run (ns) and the last verdict. The
    /// time is CPU time of this thread, on which other processes have little influence.
    pub fn choose_program_and_run(
        &self,
        generator: PacketGenerator,
        program: BorrowedFd<'_>,
        repeat: u32,
    ) -> anyhow::Result<(f64, i32)> {
        self.choose_program(program)?;
        self.run_chosen_program(generator, repeat)
    }

    /// Selects the program to measure. This interrupts other CPUs, because the kernel patches the tail call.
    pub fn choose_program(&self, program: BorrowedFd<'_>) -> anyhow::Result<()> {
        set_measured_program(&self.measured_program_map, program)
    }

    /// Runs the program that is already selected `repeat` times. Returns the mean CPU time of one run (ns) and the last
    /// verdict.
    pub fn run_chosen_program(&self, generator: PacketGenerator, repeat: u32) -> anyhow::Result<(f64, i32)> {
        run_generator(
            self.generator_programs[generator as usize].as_fd(),
            &self.frame_bytes,
            repeat,
            self.receive_queue,
        )
    }
}

/// Selects the program that the generators in `bpf/feed.h` call.
pub fn set_measured_program(program_map: &MapHandle, program: BorrowedFd<'_>) -> anyhow::Result<()> {
    let program_descriptor = program.as_raw_fd() as u32;
    Ok(program_map.update(&0u32.to_ne_bytes(), &program_descriptor.to_ne_bytes(), MapFlags::ANY)?)
}

/// Runs a generator `repeat` times. Returns this thread's mean CPU time per run (ns), and the last verdict.
pub fn run_generator(
    generator_program: BorrowedFd<'_>,
    frame: &[u8],
    repeat: u32,
    queue: Option<ReceiveQueueId>,
) -> anyhow::Result<(f64, i32)> {
    let start = thread_cpu_time()?;
    let test_run_result = test_run::run_program_from_queue(generator_program, frame, repeat, queue)?;
    let elapsed_cpu_time = thread_cpu_time()? - start;
    Ok((elapsed_cpu_time.as_secs_f64() * 1e9 / f64::from(repeat), test_run_result.verdict))
}

pub fn thread_cpu_time() -> nix::Result<Duration> {
    Ok(Duration::from(clock_gettime(ClockId::CLOCK_THREAD_CPUTIME_ID)?))
}
