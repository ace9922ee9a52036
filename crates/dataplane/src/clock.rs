//! The clock of BPF programs.

use std::time::Duration;

use nix::time::{ClockId, clock_gettime};

/// Returns the time of CLOCK_MONOTONIC, the kernel's clock since boot.
pub fn monotonic() -> Duration {
    clock_gettime(ClockId::CLOCK_MONOTONIC).expect("every Linux has this clock").into()
}

/// Returns the time of CLOCK_MONOTONIC in ns, as `bpf_ktime_get_ns` does in BPF programs.
pub fn monotonic_ns() -> u64 {
    monotonic().as_nanos() as u64
}

/// Returns the time of CLOCK_MONOTONIC in ms, modulo 2^32. Servers with `tcp_timestamps=2` send it as their TSval.
pub fn monotonic_ms() -> u32 {
    monotonic().as_millis() as u32
}
