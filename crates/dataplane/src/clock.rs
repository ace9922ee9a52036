//! The clock that BPF programs use.

use std::time::Duration;

use nix::time::{ClockId, clock_gettime};

/// Returns the time of CLOCK_MONOTONIC, which counts from boot.
pub fn monotonic() -> Duration {
    clock_gettime(ClockId::CLOCK_MONOTONIC).expect("every Linux has this clock").into()
}

/// Returns the time of CLOCK_MONOTONIC in ns, which BPF programs get from `bpf_ktime_get_ns`.
pub fn monotonic_ns() -> u64 {
    monotonic().as_nanos() as u64
}

/// Returns the time of CLOCK_MONOTONIC in ms, modulo 2^32. Servers with `tcp_timestamps=2` send it as TSval.
pub fn monotonic_ms() -> u32 {
    monotonic().as_millis() as u32
}
