//! Runs of a loaded program on a packet by `BPF_PROG_TEST_RUN`, for tests and benchmarks.

use std::io;
use std::os::fd::{AsRawFd as _, BorrowedFd};
use std::time::Duration;

use libbpf_rs::libbpf_sys;

pub use crate::skip_if;

/// Skips a test if `$missing` contains a missing requirement. Prints the requirement, and returns `$result` from the
/// calling function.
#[macro_export]
macro_rules! skip_if {
    ($missing:expr $(, $result:expr)?) => {
        if let Some(missing) = $missing {
            fn here() {}
            println!("SKIPPED {}: {missing}", $crate::test_run::surrounding_function_name(here));
            return $($result)?;
        }
    };
}

/// Returns the name of the function in which `inner` is defined.
pub fn surrounding_function_name<F>(_inner: F) -> &'static str {
    std::any::type_name::<F>()
        .rsplit("::")
        .find(|path_segment| !["here", "{{closure}}"].contains(path_segment))
        .unwrap_or_default()
}

/// Returns a description of the rights that this process lacks for tests that load BPF programs, or `None` if it lacks
/// none. scripts/test sets COREWARD_WITHOUT_RIGHTS if scripts/capabilities reported a missing requirement.
pub fn missing_bpf_rights() -> Option<&'static str> {
    let may_load_programs = nix::unistd::geteuid().is_root() && std::env::var_os("COREWARD_WITHOUT_RIGHTS").is_none();
    (!may_load_programs).then_some("needs root, to load BPF programs")
}

/// Result of a BPF program's run by `BPF_PROG_TEST_RUN`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TestRunOutcome {
    /// Return value of the program.
    pub verdict: i32,
    /// Packet after the program has processed it.
    pub packet: Vec<u8>,
    /// Mean duration of one repetition, measured by the kernel.
    pub mean_duration: Duration,
}

/// Receive queue from which the packets of a test run seem to come. Its device is in the calling thread's network
/// namespace.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ReceiveQueueId {
    /// Index of the network device.
    pub interface_index: u32,
    /// Index of the receive queue, from 0.
    pub queue_index: u32,
}

/// Maximum number of bytes by which a program may extend a packet.
const MAX_PACKET_GROWTH_BYTES: usize = 256;

/// Runs `program` `repeat_count` times on `packet`, an Ethernet frame of at least 14 bytes.
///
/// The kernel does not restore the packet between runs. Fails without privileges, when the packet is too short or too
/// long, or when the program's type does not support test runs.
pub fn run_program(program: BorrowedFd<'_>, packet: &[u8], repeat_count: u32) -> io::Result<TestRunOutcome> {
    run_program_from_queue(program, packet, repeat_count, None)
}

/// Runs `program` as [`run_program`] does, on a packet from the receive queue `queue`. With `None`, the packet is from
/// the first queue of the loopback device. Fails as [`run_program`] does, and when the queue does not exist.
pub fn run_program_from_queue(
    program: BorrowedFd<'_>,
    packet: &[u8],
    repeat: u32,
    queue: Option<ReceiveQueueId>,
) -> io::Result<TestRunOutcome> {
    let mut output_buffer = vec![0; packet.len() + MAX_PACKET_GROWTH_BYTES];
    let run_options = run_program_with_context(program, packet, repeat, queue, &mut output_buffer)?;
    output_buffer.truncate(run_options.data_size_out as usize);
    let mean_duration = Duration::from_nanos(run_options.duration.into());
    Ok(TestRunOutcome { verdict: run_options.retval as i32, packet: output_buffer, mean_duration })
}

/// Runs `program` once, without allocating memory, and writes the resulting packet to `output_buffer`. Returns the
/// program's return value and the length of the resulting packet. Fails as [`run_program`] does, and when that packet
/// does not fit into `output_buffer`.
pub fn run_program_into_buffer(
    program: BorrowedFd<'_>,
    packet: &[u8],
    output_buffer: &mut [u8],
) -> io::Result<(i32, usize)> {
    let run_options = run_program_with_context(program, packet, 1, None, output_buffer)?;
    Ok((run_options.retval as i32, run_options.data_size_out as usize))
}

/// Runs an XDP program on `frame_count` copies of `frame` and executes its actions (`BPF_F_TEST_XDP_LIVE_FRAMES`). The
/// kernel reuses frames without restoring them.
pub fn run_program_live(program: BorrowedFd<'_>, frame: &[u8], frame_count: u32) -> io::Result<()> {
    let mut run_options = libbpf_sys::bpf_test_run_opts {
        sz: size_of::<libbpf_sys::bpf_test_run_opts>() as _,
        data_in: frame.as_ptr().cast(),
        data_size_in: frame.len() as u32,
        repeat: frame_count as i32,
        flags: libbpf_sys::BPF_F_TEST_XDP_LIVE_FRAMES,
        ..Default::default()
    };
    // SAFETY: pointer and size are those of a live buffer.
    let result = unsafe { libbpf_sys::bpf_prog_test_run_opts(program.as_raw_fd(), &raw mut run_options) };
    if result < 0 { Err(io::Error::from_raw_os_error(-result)) } else { Ok(()) }
}

fn run_program_with_context(
    program: BorrowedFd<'_>,
    packet: &[u8],
    repeat: u32,
    queue: Option<ReceiveQueueId>,
    output_buffer: &mut [u8],
) -> io::Result<libbpf_sys::bpf_test_run_opts> {
    let xdp_context = queue.map(|queue| libbpf_sys::xdp_md {
        data_end: packet.len() as u32,
        ingress_ifindex: queue.interface_index,
        rx_queue_index: queue.queue_index,
        ..Default::default()
    });
    let mut run_options = libbpf_sys::bpf_test_run_opts {
        sz: size_of::<libbpf_sys::bpf_test_run_opts>() as _,
        data_in: packet.as_ptr().cast(),
        data_size_in: packet.len() as u32,
        data_out: output_buffer.as_mut_ptr().cast(),
        data_size_out: output_buffer.len() as u32,
        ctx_in: xdp_context.as_ref().map_or(std::ptr::null(), |context| std::ptr::from_ref(context).cast()),
        ctx_size_in: xdp_context.map_or(0, |context| size_of_val(&context) as u32),
        repeat: repeat as i32,
        ..Default::default()
    };
    // SAFETY: pointers and sizes are those of live buffers.
    let result = unsafe { libbpf_sys::bpf_prog_test_run_opts(program.as_raw_fd(), &raw mut run_options) };
    if result < 0 {
        return Err(io::Error::from_raw_os_error(-result));
    }
    Ok(run_options)
}
