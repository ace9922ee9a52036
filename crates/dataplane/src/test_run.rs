//! One run of a loaded program on one packet (`BPF_PROG_TEST_RUN`), for tests and benches.

use std::io;
use std::os::fd::{AsRawFd as _, BorrowedFd};
use std::time::Duration;

use libbpf_rs::libbpf_sys;

pub use crate::skip_if;

/// Ends a test, by returning `$result`, and reports it as skipped if `$missing` is `Some`, which names what is missing.
#[macro_export]
macro_rules! skip_if {
    ($missing:expr $(, $result:expr)?) => {
        if let Some(missing) = $missing {
            fn here() {}
            println!("SKIPPED {}: {missing}", $crate::test_run::surrounding_function(here));
            return $($result)?;
        }
    };
}

/// Returns the name of the function that `inner` is defined in.
pub fn surrounding_function<F>(_inner: F) -> &'static str {
    std::any::type_name::<F>().rsplit("::").find(|part| !["here", "{{closure}}"].contains(part)).unwrap_or_default()
}

/// Returns the right to load BPF programs if this process lacks it. scripts/test sets the variable when
/// scripts/capabilities found that something is missing.
pub fn missing_bpf_rights() -> Option<&'static str> {
    let allowed = nix::unistd::geteuid().is_root() && std::env::var_os("COREWARD_WITHOUT_RIGHTS").is_none();
    (!allowed).then_some("needs root, to load BPF programs")
}

/// Result of a run.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Outcome {
    /// The program's return value.
    pub verdict: i32,
    /// The packet afterwards.
    pub packet: Vec<u8>,
    /// Time of the run as the kernel measured it, mean over its repetitions.
    pub duration: Duration,
}

/// A receive queue of a device in the calling thread's network namespace, as the packets' origin.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ReceiveQueue {
    /// The device's index.
    pub interface: u32,
    /// Below the device's number of receive queues.
    pub queue: u32,
}

/// Room for a packet that grows.
const HEADROOM: usize = 256;

/// Runs `program` on `packet` (an Ethernet frame of at least 14 bytes).
///
/// With `repeat` above 1 the kernel does not restore the packet in between. Fails when the kernel refuses: no
/// privilege, a packet too short or too long, a type of program that cannot be test-run.
pub fn run(program: BorrowedFd<'_>, packet: &[u8], repeat: u32) -> io::Result<Outcome> {
    run_from(program, packet, repeat, None)
}

/// [`run`] with packets from a certain receive queue; `None`: the loopback device's first. Fails as [`run`] does, and
/// when there is no such queue.
pub fn run_from(
    program: BorrowedFd<'_>,
    packet: &[u8],
    repeat: u32,
    queue: Option<ReceiveQueue>,
) -> io::Result<Outcome> {
    let mut out = vec![0; packet.len() + HEADROOM];
    let options = run_with(program, packet, repeat, queue, &mut out)?;
    out.truncate(options.data_size_out as usize);
    let duration = Duration::from_nanos(options.duration.into());
    Ok(Outcome { verdict: options.retval as i32, packet: out, duration })
}

/// One run of `program` on `packet`, for callers with many: returns the program's return value, and the packet's new
/// length in `out`. Fails as [`run`] does, and when the packet does not fit into `out`.
pub fn run_into(program: BorrowedFd<'_>, packet: &[u8], out: &mut [u8]) -> io::Result<(i32, usize)> {
    let options = run_with(program, packet, 1, None, out)?;
    Ok((options.retval as i32, options.data_size_out as usize))
}

/// Runs an XDP program on `frames` live copies of `frame`, for which the kernel executes the program's action
/// (`BPF_F_TEST_XDP_LIVE_FRAMES`). Frames are reused with all changes.
pub fn run_live(program: BorrowedFd<'_>, frame: &[u8], frames: u32) -> io::Result<()> {
    let mut options = libbpf_sys::bpf_test_run_opts {
        sz: size_of::<libbpf_sys::bpf_test_run_opts>() as _,
        data_in: frame.as_ptr().cast(),
        data_size_in: frame.len() as u32,
        repeat: frames as i32,
        flags: libbpf_sys::BPF_F_TEST_XDP_LIVE_FRAMES,
        ..Default::default()
    };
    // SAFETY: pointer and size are those of a live buffer.
    let result = unsafe { libbpf_sys::bpf_prog_test_run_opts(program.as_raw_fd(), &raw mut options) };
    if result < 0 { Err(io::Error::from_raw_os_error(-result)) } else { Ok(()) }
}

fn run_with(
    program: BorrowedFd<'_>,
    packet: &[u8],
    repeat: u32,
    queue: Option<ReceiveQueue>,
    out: &mut [u8],
) -> io::Result<libbpf_sys::bpf_test_run_opts> {
    let context = queue.map(|queue| libbpf_sys::xdp_md {
        data_end: packet.len() as u32,
        ingress_ifindex: queue.interface,
        rx_queue_index: queue.queue,
        ..Default::default()
    });
    let mut options = libbpf_sys::bpf_test_run_opts {
        sz: size_of::<libbpf_sys::bpf_test_run_opts>() as _,
        data_in: packet.as_ptr().cast(),
        data_size_in: packet.len() as u32,
        data_out: out.as_mut_ptr().cast(),
        data_size_out: out.len() as u32,
        ctx_in: context.as_ref().map_or(std::ptr::null(), |context| std::ptr::from_ref(context).cast()),
        ctx_size_in: context.map_or(0, |context| size_of_val(&context) as u32),
        repeat: repeat as i32,
        ..Default::default()
    };
    // SAFETY: pointers and sizes are those of live buffers.
    let result = unsafe { libbpf_sys::bpf_prog_test_run_opts(program.as_raw_fd(), &raw mut options) };
    if result < 0 {
        return Err(io::Error::from_raw_os_error(-result));
    }
    Ok(options)
}
