//! Loads `bpf/server/cpu_load.bpf.c`, which measures the busy time of each CPU.

use std::mem::{MaybeUninit, offset_of};

use anyhow::Context as _;
use coreward_intf as intf;
use libbpf_rs::skel::{OpenSkel as _, SkelBuilder as _};
use libbpf_rs::{Link, ProgramMut};

use crate::clock::monotonic_ns;
use crate::mmap_array::MmapArray;
use crate::skeleton::cpu_load::CpuLoadSkelBuilder;

type CpuBusyTimes = [intf::cpu_busy_time; intf::MAX_CPUS as usize];

/// Counter of each CPU's busy time. Its BPF programs run until the value is dropped.
#[derive(Debug)]
pub struct CpuBusyTimeCounter {
    busy_times: MmapArray<CpuBusyTimes>,
    _program_links: Vec<Link>,
}

impl CpuBusyTimeCounter {
    /// Starts to count the busy time of all CPUs. Fails when the kernel rejects the programs, which require a kernel
    /// with BTF.
    pub fn start() -> anyhow::Result<Self> {
        let mut object_storage = MaybeUninit::uninit();
        let open_skeleton =
            CpuLoadSkelBuilder::default().open(&mut object_storage).context("bpf/server/cpu_load.bpf.c")?;
        let skeleton = open_skeleton.load().context("the kernel rejected bpf/server/cpu_load.bpf.c")?;
        // The programs for ends are attached before those for begins, so that each counted begin has a counted end.
        let programs = [
            &skeleton.progs.interrupt_ends,
            &skeleton.progs.softirq_ends,
            &skeleton.progs.interrupt_begins,
            &skeleton.progs.softirq_begins,
            &skeleton.progs.task_switch,
        ];
        let attach_program =
            |program: &ProgramMut<'_>| program.attach().with_context(|| format!("attaching {:?}", program.name()));
        let program_links = programs.into_iter().map(attach_program).collect::<anyhow::Result<_>>()?;
        Ok(Self {
            busy_times: MmapArray::new(&skeleton.maps.bss).context("mapping busy times")?,
            _program_links: program_links,
        })
    }

    /// Returns the time in ns for which `cpu` has been busy since the start, or 0 if that CPU is not counted.
    pub fn cpu_busy_ns(&self, cpu: usize) -> u64 {
        if cpu >= intf::MAX_CPUS as usize {
            return 0;
        }
        let offset = cpu * size_of::<intf::cpu_busy_time>() + offset_of!(intf::cpu_busy_time, encoded_busy_ns);
        let mut encoded_busy_ns = self.busy_times.load(offset);
        loop {
            // If the word has not changed, the CPU was always busy or always idle while the clock was read.
            let busy_ns = decode_busy_ns(encoded_busy_ns, monotonic_ns());
            let reread_busy_ns = self.busy_times.load(offset);
            if reread_busy_ns == encoded_busy_ns {
                return busy_ns;
            }
            encoded_busy_ns = reread_busy_ns;
        }
    }
}

/// Decodes `cpu_busy_time.encoded_busy_ns`, and returns the CPU's busy time in ns up to `now_ns`.
fn decode_busy_ns(encoded_busy_ns: u64, now_ns: u64) -> u64 {
    match encoded_busy_ns % 2 {
        0 => encoded_busy_ns / 2,
        _ => encoded_busy_ns.wrapping_sub(1).wrapping_add(2 * now_ns) / 2,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn busy_time_excludes_idle_time() {
        // The CPU was busy for 300 ns, then idle, and has been busy again since 1,000 ns.
        assert_eq!(decode_busy_ns(600, 5_000), 300);
        let encoded_while_busy = 600_u64.wrapping_sub(2 * 1_000).wrapping_add(1);
        assert_eq!(decode_busy_ns(encoded_while_busy, 1_000), 300);
        assert_eq!(decode_busy_ns(encoded_while_busy, 1_700), 1_000);
    }
}
