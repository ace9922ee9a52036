//! Manages the sysctl net.ipv4.tcp_timestamps in this network namespace. The original TSecr is restored from the clock,
//! so TSvals must not have a random offset per connection. This requires the value 2 (bpf/server/server.bpf.c, section
//! 3).

use std::fs;

use anyhow::Context as _;

use crate::saved_settings::SettingsStore;

const TCP_TIMESTAMPS_PATH: &str = "/proc/sys/net/ipv4/tcp_timestamps";
const SYSCTL_TIMESTAMPS_WITHOUT_OFFSETS: &str = "2";
/// Value of net.ipv4.tcp_timestamps that adds a random offset per connection, so that new connections are not stamped.
const SYSCTL_TIMESTAMPS_WITH_OFFSETS: &str = "1";

fn read_timestamps_sysctl() -> anyhow::Result<String> {
    Ok(fs::read_to_string(TCP_TIMESTAMPS_PATH).context(TCP_TIMESTAMPS_PATH)?.trim().to_owned())
}

fn write_timestamps_sysctl(value: &str) -> anyhow::Result<()> {
    fs::write(TCP_TIMESTAMPS_PATH, value).with_context(|| format!("{TCP_TIMESTAMPS_PATH}: writing {value}"))
}

/// Returns the required value of net.ipv4.tcp_timestamps. During a handover of a service to another load balancer, new
/// connections are not stamped, but older connections remain stamped.
fn required_timestamps_value(stamps_new_connections: bool) -> &'static str {
    if stamps_new_connections { SYSCTL_TIMESTAMPS_WITHOUT_OFFSETS } else { SYSCTL_TIMESTAMPS_WITH_OFFSETS }
}

/// Enables stamping of new connections by net.ipv4.tcp_timestamps if `stamps_new_connections` is set, and otherwise
/// disables it. Saves the sysctl's original value. Fails if the sysctl cannot be read or written.
pub fn manage_timestamps_sysctl(
    stamps_new_connections: bool,
    settings_store: &mut SettingsStore,
) -> anyhow::Result<()> {
    let (current_value, required_value) =
        (read_timestamps_sysctl()?, required_timestamps_value(stamps_new_connections));
    if current_value != required_value {
        if settings_store.get().tcp_timestamps.is_none() {
            settings_store.update_and_save(|settings| settings.tcp_timestamps = Some(current_value.clone()))?;
        }
        write_timestamps_sysctl(required_value)?;
        tracing::info!(
            event = "sysctl-set",
            before = current_value,
            value = required_value,
            "the agent has set net.ipv4.tcp_timestamps; `coreward agent --detach` restores it"
        );
    }
    Ok(())
}

pub fn restore_timestamps_sysctl(settings_store: &mut SettingsStore) -> anyhow::Result<()> {
    if let Some(original_value) = settings_store.get().tcp_timestamps.clone() {
        write_timestamps_sysctl(&original_value)?;
        tracing::info!(
            event = "sysctl-restored",
            value = original_value,
            "the agent has restored net.ipv4.tcp_timestamps"
        );
        settings_store.update_and_save(|settings| settings.tcp_timestamps = None)?;
    }
    Ok(())
}

/// Returns a warning for `coreward status` if net.ipv4.tcp_timestamps has a wrong value.
pub fn timestamps_sysctl_warning(stamps_new_connections: bool) -> Option<String> {
    let (current_value, required_value) =
        (read_timestamps_sysctl().ok()?, required_timestamps_value(stamps_new_connections));
    let consequence = match stamps_new_connections {
        true => "new connections are not stamped and break",
        false => "the load balancer that the services are handed over to does not see all packets of new connections",
    };
    (current_value != required_value)
        .then(|| format!("net.ipv4.tcp_timestamps is {current_value}: expected {required_value}; {consequence}"))
}
