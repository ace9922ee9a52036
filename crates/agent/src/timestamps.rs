//! net.ipv4.tcp_timestamps of this network namespace. Echoes are restored by the clock, which needs TSvals without an
//! offset per connection: value 2 (bpf/server.bpf.c, section 3).

use std::fs;

use anyhow::Context as _;

use crate::remembered::Memory;

const SYSCTL: &str = "/proc/sys/net/ipv4/tcp_timestamps";
const WITHOUT_OFFSETS: &str = "2";

fn read() -> anyhow::Result<String> {
    Ok(fs::read_to_string(SYSCTL).context(SYSCTL)?.trim().to_owned())
}

fn write(value: &str) -> anyhow::Result<()> {
    fs::write(SYSCTL, value).with_context(|| format!("{SYSCTL}: writing {value}"))
}

/// Sets it, and remembers what it was.
///
/// # Errors
/// When it cannot be read or written.
pub fn manage(memory: &mut Memory) -> anyhow::Result<()> {
    let found = read()?;
    if found != WITHOUT_OFFSETS {
        if memory.get().tcp_timestamps.is_none() {
            memory.change(|remembered| remembered.tcp_timestamps = Some(found.clone()))?;
        }
        write(WITHOUT_OFFSETS)?;
        tracing::info!("net.ipv4.tcp_timestamps: {found} -> {WITHOUT_OFFSETS}");
    }
    Ok(())
}

/// Puts back what it was.
///
/// # Errors
/// When it cannot be written.
pub fn restore(memory: &mut Memory) -> anyhow::Result<()> {
    if let Some(original) = memory.get().tcp_timestamps.clone() {
        write(&original)?;
        tracing::info!("net.ipv4.tcp_timestamps: back to {original}");
        memory.change(|remembered| remembered.tcp_timestamps = None)?;
    }
    Ok(())
}

/// What is wrong with it, in words for `coreward status`.
pub fn warning() -> Option<String> {
    let found = read().ok()?;
    (found != WITHOUT_OFFSETS).then(|| {
        format!(
            "net.ipv4.tcp_timestamps is {found}: expected {WITHOUT_OFFSETS}; new connections are not stamped and break"
        )
    })
}
