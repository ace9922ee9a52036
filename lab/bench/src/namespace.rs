//! Network namespaces for single threads, which leave the machine's devices untouched.

use std::process::Command;

use anyhow::{Context as _, ensure};
use nix::sched::{CloneFlags, unshare};

use crate::report::BenchReport;

/// Moves the calling thread into a new network namespace, which ends with the thread. Fails without root.
pub fn enter_new_network_namespace() -> anyhow::Result<()> {
    unshare(CloneFlags::CLONE_NEWNET).context("a network namespace")
}

/// Runs `measure` in a new thread, so that it may enter another network namespace or bind itself to a CPU. Fails
/// without root.
pub fn run_measurement_in_new_thread<A: Clone + Send + 'static>(
    bench: &str,
    args: &A,
    measure: fn(&A) -> anyhow::Result<BenchReport>,
) -> anyhow::Result<BenchReport> {
    ensure!(nix::unistd::geteuid().is_root(), "coreward-lab bench {bench}: run it as root");
    let args = args.clone();
    std::thread::spawn(move || measure(&args)).join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
}

/// Runs a shell script that sees the /sys of the calling thread's network namespace, and returns its output. Fails when
/// /sys cannot be mounted, or the script fails.
pub fn run_script_with_namespace_sysfs(script: &str) -> anyhow::Result<String> {
    // /sys shows the network namespace in which it was mounted.
    let script = format!("mount -t sysfs none /sys && {script}");
    let output = Command::new("unshare").args(["--mount", "sh", "-c", &script]).output().context("unshare(1)")?;
    ensure!(output.status.success(), "{script}: {}", String::from_utf8_lossy(&output.stderr));
    Ok(String::from_utf8(output.stdout)?)
}

/// Runs ip(8) in this thread's network namespace. Spaces separate the arguments. Fails when ip is missing or fails.
pub fn run_ip_command(arguments: &str) -> anyhow::Result<()> {
    let status = Command::new("ip").args(arguments.split_whitespace()).status().context("ip (package iproute2)")?;
    ensure!(status.success(), "ip {arguments}: {status}");
    Ok(())
}
