//! Whether this process may do what a daemon in the packet path does: one clear sentence instead of some later EPERM.

use anyhow::Context as _;

/// What loading programs, attaching them and asking for neighbours takes: numbers of linux/capability.h.
const NEEDED: [(&str, u32); 4] = [("CAP_NET_ADMIN", 12), ("CAP_NET_RAW", 13), ("CAP_PERFMON", 38), ("CAP_BPF", 39)];
/// Before Linux 5.8 the only right to BPF; still includes `CAP_BPF` and `CAP_PERFMON`.
const CAP_SYS_ADMIN: u32 = 21;

/// Fails when a right is missing; the error names it.
pub fn require(command: &str) -> anyhow::Result<()> {
    let missing = missing()?;
    anyhow::ensure!(
        missing.is_empty(),
        "{command} loads BPF programs: run it as root or with {} (`coreward controller`, `status` and `explain` need no \
         rights)",
        missing.join(", ")
    );
    Ok(())
}

/// The names of the rights that this process lacks; none: it may do everything that a daemon in the packet path does.
/// Fails when /proc does not tell.
pub fn missing() -> anyhow::Result<Vec<&'static str>> {
    let status = std::fs::read_to_string("/proc/self/status").context("cannot read this process's rights")?;
    missing_in(&status).context("/proc/self/status names no effective capabilities (CapEff)")
}

/// The names of those of [`NEEDED`] that are missing; `None` when `status` does not tell.
fn missing_in(status: &str) -> Option<Vec<&'static str>> {
    let effective = status.lines().find_map(|line| line.strip_prefix("CapEff:"))?;
    let effective = u64::from_str_radix(effective.trim(), 16).ok()?;
    let has = |number: u32| effective & 1 << number != 0;
    let implied = |number: u32| number >= 38 && has(CAP_SYS_ADMIN);
    let lacks = |number: u32| !has(number) && !implied(number);
    Some(NEEDED.into_iter().filter(|(_, number)| lacks(*number)).map(|(name, _)| name).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rights_are_read_from_the_effective_set() {
        let status = |mask: &str| format!("Name:\tx\nCapPrm:\tffffffffffffffff\nCapEff:\t{mask}\n");
        assert_eq!(missing_in(&status("000001ffffffffff")), Some(vec![]));
        assert_eq!(
            missing_in(&status("0000000000000000")),
            Some(vec!["CAP_NET_ADMIN", "CAP_NET_RAW", "CAP_PERFMON", "CAP_BPF"])
        );
        // CAP_SYS_ADMIN, CAP_NET_ADMIN.
        assert_eq!(missing_in(&status("0000000000201000")), Some(vec!["CAP_NET_RAW"]));
        assert_eq!(missing_in("Name:\tx\n"), None);
    }
}
