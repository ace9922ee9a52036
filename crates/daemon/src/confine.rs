//! What a daemon may still do once it runs: no more than it needs, also when it was started as root without a service
//! manager that sees to it.

use anyhow::Context as _;
use caps::{CapSet, Capability, CapsHashSet};
use nix::sys::prctl;

/// A daemon, by its command.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Daemon {
    /// `coreward controller`
    Controller,
    /// `coreward lb`
    Lb,
    /// `coreward agent`
    Agent,
    /// `coreward dispatch`
    Dispatch,
    /// `coreward rack`
    Rack,
}

impl Daemon {
    /// The capabilities that it keeps for as long as it lives. Programs are loaded and attached anew whenever services
    /// change, so that those for BPF cannot go after the start.
    pub fn keeps(self) -> &'static [Capability] {
        use Capability::{CAP_BPF, CAP_DAC_READ_SEARCH, CAP_NET_ADMIN, CAP_NET_RAW, CAP_PERFMON, CAP_SYS_PTRACE};
        match self {
            // They decide, add up and listen.
            Self::Controller | Self::Rack => &[],
            // NET_ADMIN: XDP, neighbours. NET_RAW: ARP probes.
            Self::Lb => &[CAP_BPF, CAP_PERFMON, CAP_NET_ADMIN, CAP_NET_RAW],
            // NET_ADMIN: tc, the NIC's RSS, sockets' states, sysctls. NET_RAW: ARP probes, for servers that packets are handed
            // on to. SYS_PTRACE, DAC_READ_SEARCH: listening sockets of other processes, of other users (/proc/PID/fd).
            Self::Agent => &[CAP_BPF, CAP_PERFMON, CAP_NET_ADMIN, CAP_NET_RAW, CAP_SYS_PTRACE, CAP_DAC_READ_SEARCH],
            Self::Dispatch => &[CAP_BPF, CAP_PERFMON, CAP_NET_ADMIN, CAP_SYS_PTRACE, CAP_DAC_READ_SEARCH],
        }
    }

    /// Gives up every other capability, for good; no program that is started from here gets any back. Nobody reads this
    /// process's memory by its core or by ptrace(2) without CAP_SYS_PTRACE: keys are in it. Rights are a thread's, and
    /// threads inherit them: to be called before the first is started.
    ///
    /// # Errors
    /// When the kernel refuses; it never refuses to give something up.
    pub fn confine(self) -> anyhow::Result<()> {
        let keeps: CapsHashSet = self.keeps().iter().copied().collect();
        let has = |set| caps::read(None, set).context("cannot read this process's capabilities");
        let permitted: CapsHashSet = has(CapSet::Permitted)?.intersection(&keeps).copied().collect();
        let effective: CapsHashSet = has(CapSet::Effective)?.intersection(&keeps).copied().collect();
        if caps::has_cap(None, CapSet::Effective, Capability::CAP_SETPCAP)? {
            for capability in has(CapSet::Bounding)?.difference(&keeps) {
                caps::drop(None, CapSet::Bounding, *capability)?;
            }
        }
        caps::clear(None, CapSet::Ambient)?;
        caps::clear(None, CapSet::Inheritable)?;
        caps::set(None, CapSet::Effective, &effective)?;
        caps::set(None, CapSet::Permitted, &permitted)?;
        prctl::set_no_new_privs().context("no_new_privs")?;
        prctl::set_dumpable(false).context("dumpable")?;
        Ok(())
    }
}
