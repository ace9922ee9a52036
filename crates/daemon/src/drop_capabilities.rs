//! Capabilities of a daemon: it drops unneeded ones, regardless of the way it was started.

use anyhow::Context as _;
use caps::{CapSet, Capability, CapsHashSet};
use coreward_metrics::table::Component;
use nix::sys::prctl;

/// Returns the capabilities that the daemon keeps. BPF capabilities remain, because changed services need other
/// programs.
pub fn retained_capabilities(daemon: Component) -> &'static [Capability] {
    use Capability::{
        CAP_BPF, CAP_DAC_READ_SEARCH, CAP_NET_ADMIN, CAP_NET_BIND_SERVICE, CAP_NET_RAW, CAP_PERFMON, CAP_SYS_PTRACE,
    };
    match daemon {
        Component::Controller | Component::Rack => &[],
        // NET_ADMIN: XDP, neighbours. NET_RAW: ARP probes.
        Component::Lb => &[CAP_BPF, CAP_PERFMON, CAP_NET_ADMIN, CAP_NET_RAW],
        // NET_ADMIN: tc, the NIC's RSS, sockets' states, sysctls. NET_RAW: ARP probes for servers that receive
        // forwarded packets. SYS_PTRACE, DAC_READ_SEARCH: listening sockets of other processes, of other users
        // (/proc/PID/fd).
        Component::Agent => &[CAP_BPF, CAP_PERFMON, CAP_NET_ADMIN, CAP_NET_RAW, CAP_SYS_PTRACE, CAP_DAC_READ_SEARCH],
        // Services may have ports below 1024.
        Component::Orchestrate => &[CAP_NET_BIND_SERVICE],
        Component::Dispatch => &[CAP_BPF, CAP_PERFMON, CAP_NET_ADMIN, CAP_SYS_PTRACE, CAP_DAC_READ_SEARCH],
    }
}

/// Drops all capabilities that the daemon does not keep, for good and also for child processes. Forbids core dumps and
/// ptrace(2) without CAP_SYS_PTRACE, since keys are in memory. Must be called before the first thread is started,
/// because capabilities belong to threads.
pub fn drop_other_capabilities(daemon: Component) -> anyhow::Result<()> {
    let retained: CapsHashSet = retained_capabilities(daemon).iter().copied().collect();
    let read_set = |set| caps::read(None, set).context("cannot read this process's capabilities");
    let permitted: CapsHashSet = read_set(CapSet::Permitted)?.intersection(&retained).copied().collect();
    let effective: CapsHashSet = read_set(CapSet::Effective)?.intersection(&retained).copied().collect();
    if caps::has_cap(None, CapSet::Effective, Capability::CAP_SETPCAP)? {
        for capability in read_set(CapSet::Bounding)?.difference(&retained) {
            caps::drop(None, CapSet::Bounding, *capability)?;
        }
    }
    caps::clear(None, CapSet::Ambient)?;
    reduce_capability_set(CapSet::Inheritable, &CapsHashSet::new())?;
    reduce_capability_set(CapSet::Effective, &effective)?;
    reduce_capability_set(CapSet::Permitted, &permitted)?;
    prctl::set_no_new_privs().context("no_new_privs")?;
    prctl::set_dumpable(false).context("dumpable")?;
    Ok(())
}

/// Sets `set` to `retained` unless they are equal, because a unit's filter may forbid capset(2).
fn reduce_capability_set(set: CapSet, retained: &CapsHashSet) -> anyhow::Result<()> {
    if caps::read(None, set)? == *retained {
        return Ok(());
    }
    caps::set(None, set, retained).with_context(|| format!("cannot drop {set:?} capabilities"))
}
