//! Counters in per-CPU arrays.

use anyhow::Context as _;
use libbpf_rs::{MapCore as _, MapFlags, MapHandle};

/// Returns the array's first `N` counters, each summed over all CPUs. Fails when the array has fewer counters.
pub(crate) fn sum_over_cpus<const N: usize>(counters: &MapHandle) -> anyhow::Result<[u64; N]> {
    let mut counter_sums = [0; N];
    for (counter, sum) in (0u32..).zip(&mut counter_sums) {
        let values_by_cpu =
            counters.lookup_percpu(&counter.to_ne_bytes(), MapFlags::ANY)?.context("no such counter")?;
        *sum = values_by_cpu.iter().filter_map(|row| Some(u64::from_ne_bytes(row.get(..8)?.try_into().ok()?))).sum();
    }
    Ok(counter_sums)
}
