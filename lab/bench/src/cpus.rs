//! Threads and their CPUs.

use anyhow::Context as _;
use nix::sched::{CpuSet, sched_setaffinity};
use nix::unistd::Pid;

/// The calling thread, for [`bind`].
pub const THIS_THREAD: Pid = Pid::from_raw(0);

/// Binds a thread, and what it starts from then on, to one CPU. Fails when there is no such CPU, or it may not run
/// there.
pub fn bind(thread: Pid, cpu: usize) -> anyhow::Result<()> {
    let mut only = CpuSet::new();
    only.set(cpu)?;
    sched_setaffinity(thread, &only).with_context(|| format!("binding a thread to CPU {cpu}"))
}
