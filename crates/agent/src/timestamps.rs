//! net.ipv4.tcp_timestamps of this network namespace. Echoes are restored by the clock, which needs TSvals without an
//! offset per connection: value 2 (bpf/server/server.bpf.c, section 3).

use std::fs;

use anyhow::Context as _;

use crate::saved_settings::SettingsStore;

const SYSCTL: &str = "/proc/sys/net/ipv4/tcp_timestamps";
const WITHOUT_OFFSETS: &str = "2";
/// A random offset per connection: what is opened with it is not stamped.
const WITH_OFFSETS: &str = "1";

fn read() -> anyhow::Result<String> {
    Ok(fs::read_to_string(SYSCTL).context(SYSCTL)?.trim().to_owned())
}

fn write(value: &str) -> anyhow::Result<()> {
    fs::write(SYSCTL, value).with_context(|| format!("{SYSCTL}: writing {value}"))
}

/// What the sysctl must be: connections that begin now are stamped, or (their service is handed over to another load
/// balancer) they are not, while those of before go on being stamped.
fn wanted(stamp_new: bool) -> &'static str {
    if stamp_new { WITHOUT_OFFSETS } else { WITH_OFFSETS }
}

/// Sets it so that connections that begin now are stamped, or not, and remembers what it was.
///
/// # Errors
/// When it cannot be read or written.
pub fn manage(stamp_new: bool, memory: &mut SettingsStore) -> anyhow::Result<()> {
    let (found, wanted) = (read()?, wanted(stamp_new));
    if found != wanted {
        if memory.get().tcp_timestamps.is_none() {
            memory.change(|settings| settings.tcp_timestamps = Some(found.clone()))?;
        }
        write(wanted)?;
        tracing::info!(event = "sysctl-set", before = found, value = wanted, "net.ipv4.tcp_timestamps is set");
    }
    Ok(())
}

/// Puts back what it was.
///
/// # Errors
/// When it cannot be written.
pub fn restore(memory: &mut SettingsStore) -> anyhow::Result<()> {
    if let Some(original) = memory.get().tcp_timestamps.clone() {
        write(&original)?;
        tracing::info!(event = "sysctl-restored", value = original, "net.ipv4.tcp_timestamps is restored");
        memory.change(|settings| settings.tcp_timestamps = None)?;
    }
    Ok(())
}

/// What is wrong with it, in words for `coreward status`.
pub fn warning(stamp_new: bool) -> Option<String> {
    let (found, wanted) = (read().ok()?, wanted(stamp_new));
    let then = match stamp_new {
        true => "new connections are not stamped and break",
        false => "the load balancer that the services are handed over to does not see all packets of new connections",
    };
    (found != wanted).then(|| format!("net.ipv4.tcp_timestamps is {found}: expected {wanted}; {then}"))
}
