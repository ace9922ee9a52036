//! CPU time of threads, and binding of threads to CPUs.

use std::time::Duration;

use anyhow::Context as _;
use nix::sched::{CpuSet, sched_setaffinity};
use nix::time::{ClockId, clock_gettime};
use nix::unistd::Pid;

/// Process ID 0, by which [`bind_to_cpu`] binds the calling thread.
pub const CALLING_THREAD_PID: Pid = Pid::from_raw(0);

/// Returns the CPU time that the calling thread has used so far.
pub fn thread_cpu_time() -> Duration {
    clock_gettime(ClockId::CLOCK_THREAD_CPUTIME_ID).expect("every Linux has this clock").into()
}

/// Binds a thread, and the threads that it starts later, to one CPU. Fails when the CPU does not exist or this process
/// may not use it.
pub fn bind_to_cpu(thread: Pid, cpu: usize) -> anyhow::Result<()> {
    let mut cpu_set = CpuSet::new();
    cpu_set.set(cpu)?;
    sched_setaffinity(thread, &cpu_set).with_context(|| format!("binding a thread to CPU {cpu}"))
}
