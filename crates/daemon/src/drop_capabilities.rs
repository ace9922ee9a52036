//! Capabilities of a daemon, which drops those that it does not need, however it was started.

use anyhow::Context as _;
use caps::{CapSet, Capability, CapsHashSet};
use coreward_metrics::metric_declarations::Component;
use nix::sys::prctl;

/// Returns the capabilities that a daemon keeps after its start. BPF capabilities are among them, because a daemon
/// loads further programs when services change.
pub fn retained_capabilities(daemon: Component) -> &'static [Capability] {
    use Capability::{
        CAP_BPF, CAP_DAC_READ_SEARCH, CAP_NET_ADMIN, CAP_NET_BIND_SERVICE, CAP_NET_RAW, CAP_PERFMON, CAP_SYS_PTRACE,
    };
    match daemon {
        Component::Controller | Component::Rack => &[],
        // NET_ADMIN is for XDP and neighbour entries, and NET_RAW for ARP probes.
        Component::Lb => &[CAP_BPF, CAP_PERFMON, CAP_NET_ADMIN, CAP_NET_RAW],
        // NET_ADMIN is for tc, the NIC's RSS, socket states and sysctls. NET_RAW is for ARP probes to servers that
        // receive forwarded packets. SYS_PTRACE and DAC_READ_SEARCH are for finding the listening sockets of other
        // users' processes (/proc/PID/fd).
        Component::Agent => &[CAP_BPF, CAP_PERFMON, CAP_NET_ADMIN, CAP_NET_RAW, CAP_SYS_PTRACE, CAP_DAC_READ_SEARCH],
        // Services may listen at ports below 1024.
        Component::Orchestrate => &[CAP_NET_BIND_SERVICE],
        Component::Dispatch => &[CAP_BPF, CAP_PERFMON, CAP_NET_ADMIN, CAP_SYS_PTRACE, CAP_DAC_READ_SEARCH],
    }
}

/// Drops all capabilities that the daemon does not keep, irrevocably and also for child processes. Also forbids core
/// dumps, and ptrace(2) without CAP_SYS_PTRACE, because keys are in memory. Must be called before other threads exist,
/// because each thread has its own capabilities.
pub fn drop_other_capabilities(daemon: Component) -> anyhow::Result<()> {
    let retained_set: CapsHashSet = retained_capabilities(daemon).iter().copied().collect();
    let read_capability_set = |set| caps::read(None, set).context("cannot read this process's capabilities");
    let permitted_set: CapsHashSet =
        read_capability_set(CapSet::Permitted)?.intersection(&retained_set).copied().collect();
    let effective_set: CapsHashSet =
        read_capability_set(CapSet::Effective)?.intersection(&retained_set).copied().collect();
    if caps::has_cap(None, CapSet::Effective, Capability::CAP_SETPCAP)? {
        for capability in read_capability_set(CapSet::Bounding)?.difference(&retained_set) {
            caps::drop(None, CapSet::Bounding, *capability)?;
        }
    }
    caps::clear(None, CapSet::Ambient)?;
    reduce_capability_set(CapSet::Inheritable, &CapsHashSet::new())?;
    reduce_capability_set(CapSet::Effective, &effective_set)?;
    reduce_capability_set(CapSet::Permitted, &permitted_set)?;
    prctl::set_no_new_privs().context("no_new_privs")?;
    prctl::set_dumpable(false).context("dumpable")?;
    Ok(())
}

/// Reduces a capability set to `retained_set`. Does nothing if they are equal, because a seccomp filter may forbid
/// capset(2).
fn reduce_capability_set(set: CapSet, retained_set: &CapsHashSet) -> anyhow::Result<()> {
    if caps::read(None, set)? == *retained_set {
        return Ok(());
    }
    caps::set(None, set, retained_set).with_context(|| format!("cannot drop {set:?} capabilities"))
}
