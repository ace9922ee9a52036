//! Check of this process's capabilities, for an error that names them instead of a later EPERM.

use anyhow::Context as _;

/// Capabilities to load programs, attach them and resolve neighbours, with their numbers in linux/capability.h.
const REQUIRED_CAPABILITIES: [(&str, u32); 4] =
    [("CAP_NET_ADMIN", 12), ("CAP_NET_RAW", 13), ("CAP_PERFMON", 38), ("CAP_BPF", 39)];
/// The capability for BPF before Linux 5.8, which still includes `CAP_BPF` and `CAP_PERFMON`.
const CAP_SYS_ADMIN: u32 = 21;

/// Checks the capabilities of a command. Fails when one is missing; the error names it.
pub fn require(command: &str) -> anyhow::Result<()> {
    let missing = missing_capabilities()?;
    anyhow::ensure!(
        missing.is_empty(),
        "{command} loads BPF programs: run it as root or with {} (`coreward controller`, `status` and `explain` need \
         no \
         rights)",
        missing.join(", ")
    );
    Ok(())
}

/// Returns the missing capabilities of a daemon in the packet path. Fails when /proc does not show them.
pub fn missing_capabilities() -> anyhow::Result<Vec<&'static str>> {
    let status = std::fs::read_to_string("/proc/self/status").context("cannot read this process's rights")?;
    missing_in(&status).context("/proc/self/status names no effective capabilities (CapEff)")
}

/// Returns the names of missing capabilities of [`REQUIRED_CAPABILITIES`]; `None`: `status` does not show any.
fn missing_in(status: &str) -> Option<Vec<&'static str>> {
    let effective = status.lines().find_map(|line| line.strip_prefix("CapEff:"))?;
    let effective = u64::from_str_radix(effective.trim(), 16).ok()?;
    let has = |number: u32| effective & 1 << number != 0;
    let implied = |number: u32| number >= 38 && has(CAP_SYS_ADMIN);
    let lacks = |number: u32| !has(number) && !implied(number);
    Some(REQUIRED_CAPABILITIES.into_iter().filter(|(_, number)| lacks(*number)).map(|(name, _)| name).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn capabilities_are_read_from_the_effective_set() {
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
