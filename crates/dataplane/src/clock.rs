//! The clock of BPF programs.

use nix::time::{ClockId, clock_gettime};

/// Returns CLOCK_MONOTONIC in ns: what `bpf_ktime_get_ns` returns.
pub fn monotonic_ns() -> u64 {
    let now = clock_gettime(ClockId::CLOCK_MONOTONIC).expect("every Linux has this clock");
    now.tv_sec() as u64 * 1_000_000_000 + now.tv_nsec() as u64
}
