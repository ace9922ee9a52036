//! Network namespaces of one thread, so that no device of the machine is touched.

use std::process::Command;

use anyhow::{Context as _, ensure};
use nix::sched::{CloneFlags, unshare};

/// From now on this thread is in a network namespace of its own, which goes with it.
///
/// # Errors
/// Without root.
pub fn enter_new() -> anyhow::Result<()> {
    unshare(CloneFlags::CLONE_NEWNET).context("a network namespace")
}

/// ip(8) in this thread's namespace. Arguments are separated by blanks.
///
/// # Errors
/// When it is not installed or fails.
pub fn ip(arguments: &str) -> anyhow::Result<()> {
    let status = Command::new("ip").args(arguments.split_whitespace()).status().context("ip (package iproute2)")?;
    ensure!(status.success(), "ip {arguments}: {status}");
    Ok(())
}
