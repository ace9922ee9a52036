//! The clock that BPF programs use.

use std::time::Duration;

use nix::time::{ClockId, clock_gettime};

/// Returns the time of CLOCK_MONOTONIC, which is the time since boot without suspension.
pub fn monotonic_time() -> Duration {
    clock_gettime(ClockId::CLOCK_MONOTONIC).expect("every Linux has this clock").into()
}

/// Returns the time of CLOCK_MONOTONIC in ns, as `bpf_ktime_get_ns` returns it to BPF programs.
pub fn monotonic_ns() -> u64 {
    monotonic_time().as_nanos() as u64
}

/// Returns the time of CLOCK_MONOTONIC in ms, modulo 2^32. Linux servers with `tcp_timestamps=2` send it as TSval.
pub fn monotonic_ms() -> u32 {
    monotonic_time().as_millis() as u32
}
