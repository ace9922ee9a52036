//! The clock of BPF programs.

use std::time::Duration;

use nix::time::{ClockId, clock_gettime};

/// Returns CLOCK_MONOTONIC.
pub fn monotonic() -> Duration {
    clock_gettime(ClockId::CLOCK_MONOTONIC).expect("every Linux has this clock").into()
}

/// Returns CLOCK_MONOTONIC in ns, like `bpf_ktime_get_ns`.
pub fn monotonic_ns() -> u64 {
    monotonic().as_nanos() as u64
}

/// Returns CLOCK_MONOTONIC in ms, modulo 2^32: a server's own TSval with `tcp_timestamps=2`.
pub fn monotonic_ms() -> u32 {
    monotonic().as_millis() as u32
}
