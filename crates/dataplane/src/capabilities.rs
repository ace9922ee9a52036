//! Check of this process's capabilities, so that an error names the missing ones instead of a later EPERM.

use anyhow::Context as _;

/// Capabilities needed to load programs and resolve neighbours, by name and number (linux/capability.h).
const REQUIRED_CAPABILITIES: [(&str, u32); 4] =
    [("CAP_NET_ADMIN", 12), ("CAP_NET_RAW", 13), ("CAP_PERFMON", 38), ("CAP_BPF", 39)];
/// Number of `CAP_SYS_ADMIN`, which implies `CAP_BPF` and `CAP_PERFMON`. Before Linux 5.8, BPF needed it.
const CAP_SYS_ADMIN: u32 = 21;

/// Checks that this process has the capabilities that the command needs. The error names the missing capabilities.
pub fn check_capabilities(command_name: &str) -> anyhow::Result<()> {
    let missing_names = missing_capabilities()?;
    anyhow::ensure!(
        missing_names.is_empty(),
        "{command_name} loads BPF programs: run it as root or with {} (`coreward controller`, `status` and `explain` \
         need no rights)",
        missing_names.join(", ")
    );
    Ok(())
}

/// Returns the names of the [`REQUIRED_CAPABILITIES`] that this process lacks. Fails when /proc does not list the
/// process's capabilities.
pub fn missing_capabilities() -> anyhow::Result<Vec<&'static str>> {
    let status = std::fs::read_to_string("/proc/self/status").context("cannot read this process's rights")?;
    parse_missing_capabilities(&status).context("/proc/self/status names no effective capabilities (CapEff)")
}

/// Returns the [`REQUIRED_CAPABILITIES`] missing in `status`, the text of /proc/PID/status. Returns `None` if the text
/// lists no capabilities.
fn parse_missing_capabilities(status: &str) -> Option<Vec<&'static str>> {
    let effective_hex = status.lines().find_map(|line| line.strip_prefix("CapEff:"))?;
    let effective_mask = u64::from_str_radix(effective_hex.trim(), 16).ok()?;
    let has_capability = |number: u32| effective_mask & 1 << number != 0;
    let is_implied_by_sys_admin = |number: u32| number >= 38 && has_capability(CAP_SYS_ADMIN);
    let is_missing = |number: u32| !has_capability(number) && !is_implied_by_sys_admin(number);
    Some(REQUIRED_CAPABILITIES.into_iter().filter(|(_, number)| is_missing(*number)).map(|(name, _)| name).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn capabilities_are_read_from_the_effective_set() {
        let status_with_effective_set = |mask: &str| format!("Name:\tx\nCapPrm:\tffffffffffffffff\nCapEff:\t{mask}\n");
        assert_eq!(parse_missing_capabilities(&status_with_effective_set("000001ffffffffff")), Some(vec![]));
        assert_eq!(
            parse_missing_capabilities(&status_with_effective_set("0000000000000000")),
            Some(vec!["CAP_NET_ADMIN", "CAP_NET_RAW", "CAP_PERFMON", "CAP_BPF"])
        );
        // The mask contains CAP_SYS_ADMIN and CAP_NET_ADMIN.
        assert_eq!(
            parse_missing_capabilities(&status_with_effective_set("0000000000201000")),
            Some(vec!["CAP_NET_RAW"])
        );
        assert_eq!(parse_missing_capabilities("Name:\tx\n"), None);
    }
}
