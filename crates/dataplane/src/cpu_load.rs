//! `bpf/cpu_load.bpf.c`: how long each CPU has been busy.

use std::mem::{MaybeUninit, offset_of};

use anyhow::Context as _;
use coreward_intf as intf;
use libbpf_rs::Link;
use libbpf_rs::skel::{OpenSkel as _, SkelBuilder as _};

use crate::mapped::Mapped;
use crate::skeleton::cpu_load::CpuLoadSkelBuilder;

type Cpus = [intf::cpu_busy_time; intf::MAX_CPUS as usize];

/// Counts from when it was started until it is dropped.
#[derive(Debug)]
pub struct CpuLoad {
    cpus: Mapped<Cpus>,
    _link: Link,
}

/// A CPU that switches all the time may be caught in the middle of its stores; hardly ever twice.
const READ_ATTEMPTS: usize = 8;

impl CpuLoad {
    /// Starts to count on all CPUs.
    ///
    /// # Errors
    /// When the kernel refuses the program (it needs BTF).
    pub fn start() -> anyhow::Result<Self> {
        let mut storage = MaybeUninit::uninit();
        let open = CpuLoadSkelBuilder::default().open(&mut storage).context("bpf/cpu_load.bpf.c")?;
        let skeleton = open.load().context("the kernel refused bpf/cpu_load.bpf.c")?;
        let link = skeleton.progs.cpu_load.attach().context("attaching to sched_switch")?;
        Ok(Self { cpus: Mapped::new(&skeleton.maps.bss).context("mapping busy times")?, _link: link })
    }

    /// How long `cpu` has been busy since the start (ns), at `now_ns` (CLOCK_MONOTONIC). 0 for CPUs that are not counted.
    pub fn busy_ns(&self, cpu: usize, now_ns: u64) -> u64 {
        if cpu >= intf::MAX_CPUS as usize {
            return 0;
        }
        let at = |field| cpu * size_of::<intf::cpu_busy_time>() + field;
        let since = || self.cpus.load(at(offset_of!(intf::cpu_busy_time, since_ns)));
        let mut busy_ns = 0;
        for _ in 0..READ_ATTEMPTS {
            let since_ns = since();
            // `running` is the low half of its word.
            let running = self.cpus.load(at(offset_of!(intf::cpu_busy_time, running))) as u32 != 0;
            busy_ns = self.cpus.load(at(offset_of!(intf::cpu_busy_time, busy_ns)));
            if since() == since_ns {
                return busy_ns + if running { now_ns.saturating_sub(since_ns) } else { 0 };
            }
        }
        busy_ns
    }
}
