//! net.ipv4.tcp_timestamps of this network namespace. Restoring TSecr by the clock needs TSvals without an offset per
//! connection: value 2 (bpf/server/server.bpf.c, section 3).

use std::fs;

use anyhow::Context as _;

use crate::saved_settings::SettingsStore;

const TCP_TIMESTAMPS_PATH: &str = "/proc/sys/net/ipv4/tcp_timestamps";
const SYSCTL_WITHOUT_OFFSETS: &str = "2";
/// Value of the sysctl by which each connection has a random offset, so that it is not stamped.
const SYSCTL_WITH_OFFSETS: &str = "1";

fn read_sysctl() -> anyhow::Result<String> {
    Ok(fs::read_to_string(TCP_TIMESTAMPS_PATH).context(TCP_TIMESTAMPS_PATH)?.trim().to_owned())
}

fn write_sysctl(value: &str) -> anyhow::Result<()> {
    fs::write(TCP_TIMESTAMPS_PATH, value).with_context(|| format!("{TCP_TIMESTAMPS_PATH}: writing {value}"))
}

/// Returns the value of the sysctl that stamping requires. New connections are not stamped while their service is
/// handed over to another load balancer; older connections stay stamped.
fn required_sysctl_value(stamp_new: bool) -> &'static str {
    if stamp_new { SYSCTL_WITHOUT_OFFSETS } else { SYSCTL_WITH_OFFSETS }
}

/// Sets the sysctl as required, depending on whether new connections are stamped, and saves the original value. Fails
/// when the sysctl cannot be read or written.
pub fn manage_sysctl(stamp_new: bool, memory: &mut SettingsStore) -> anyhow::Result<()> {
    let (found, required) = (read_sysctl()?, required_sysctl_value(stamp_new));
    if found != required {
        if memory.get().tcp_timestamps.is_none() {
            memory.change(|settings| settings.tcp_timestamps = Some(found.clone()))?;
        }
        write_sysctl(required)?;
        tracing::info!(
            event = "sysctl-set",
            before = found,
            value = required,
            "the agent has set net.ipv4.tcp_timestamps; `coreward agent --detach` restores it"
        );
    }
    Ok(())
}

pub fn restore_sysctl(memory: &mut SettingsStore) -> anyhow::Result<()> {
    if let Some(original) = memory.get().tcp_timestamps.clone() {
        write_sysctl(&original)?;
        tracing::info!(event = "sysctl-restored", value = original, "the agent has restored net.ipv4.tcp_timestamps");
        memory.change(|settings| settings.tcp_timestamps = None)?;
    }
    Ok(())
}

/// Returns a warning about a wrong value of the sysctl, as text for `coreward status`.
pub fn sysctl_warning(stamp_new: bool) -> Option<String> {
    let (found, required) = (read_sysctl().ok()?, required_sysctl_value(stamp_new));
    let consequence = match stamp_new {
        true => "new connections are not stamped and break",
        false => "the load balancer that the services are handed over to does not see all packets of new connections",
    };
    (found != required).then(|| format!("net.ipv4.tcp_timestamps is {found}: expected {required}; {consequence}"))
}
