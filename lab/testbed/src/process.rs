//! Processes in network namespaces, which end with the testbed.

use std::os::fd::AsRawFd as _;
use std::os::unix::process::CommandExt as _;
use std::path::Path;
use std::process::{Child, Command, ExitStatus, Output};
use std::sync::LazyLock;
use std::time::{Duration, Instant};

use anyhow::{Context as _, bail, ensure};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use serde::de::DeserializeOwned;

use crate::namespace::NetworkNamespace;

/// Timeout for conditions that hold soon in the absence of faults. It is 60 s, or the environment variable
/// `COREWARD_TEST_TIMEOUT` (s). A wait ends as soon as its condition holds, so a long timeout costs no time.
pub static DEFAULT_WAIT_TIMEOUT: LazyLock<Duration> = LazyLock::new(|| {
    let seconds = std::env::var("COREWARD_TEST_TIMEOUT").ok();
    let seconds = seconds.map(|text| text.parse().expect("COREWARD_TEST_TIMEOUT: expected a whole number of seconds"));
    Duration::from_secs(seconds.unwrap_or(60))
});

/// Running child process. Dropping this value kills the process.
#[derive(Debug)]
pub struct TestbedProcess {
    child: Child,
    program_name: String,
}

impl TestbedProcess {
    /// Starts `command` in `namespace`. The kernel kills the process when the caller's *thread* ends
    /// (PR_SET_PDEATHSIG), so that no process remains after a killed testbed. The calling thread must live as long as
    /// the process should. Fails when the namespace cannot be opened or the program cannot be started.
    pub fn spawn(namespace: &NetworkNamespace, mut command: Command) -> anyhow::Result<Self> {
        enter_namespace_before_exec(namespace, &mut command)?;
        let program_name = command.get_program().to_string_lossy().into_owned();
        let child = command
            .spawn()
            .with_context(|| format!("cannot start {program_name} in namespace {}", namespace.name()))?;
        Ok(Self { child, program_name })
    }

    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Returns the child process, with its pipes.
    pub fn child(&mut self) -> &mut Child {
        &mut self.child
    }

    /// Sends a signal to the process. Fails when the process has ended.
    pub fn send_signal(&self, signal: Signal) -> anyhow::Result<()> {
        kill(Pid::from_raw(self.child.id() as i32), signal)
            .with_context(|| format!("cannot send {signal} to {} (pid {})", self.program_name, self.child.id()))
    }

    /// Returns the exit status, or `None` while the process runs. Fails when the status cannot be read.
    pub fn try_wait(&mut self) -> anyhow::Result<Option<ExitStatus>> {
        Ok(self.child.try_wait()?)
    }

    /// Waits for the end of the process and returns its exit status. Fails when it still runs after `limit`.
    pub fn wait_for_exit(&mut self, limit: Duration) -> anyhow::Result<ExitStatus> {
        let deadline = Instant::now() + limit;
        loop {
            if let Some(status) = self.try_wait()? {
                return Ok(status);
            }
            if Instant::now() > deadline {
                bail!("{} (pid {}) still runs after {limit:?}", self.program_name, self.pid());
            }
            std::thread::sleep(Duration::from_millis(2));
        }
    }

    /// Waits until the process has created `file`, as servers do when they listen. `description` names the process in
    /// errors. Fails when the process ends first, or when the file is still missing after [`DEFAULT_WAIT_TIMEOUT`].
    pub fn wait_for_file(&mut self, description: &str, file: &Path) -> anyhow::Result<()> {
        let deadline = Instant::now() + *DEFAULT_WAIT_TIMEOUT;
        while !file.exists() {
            if let Some(status) = self.try_wait()? {
                bail!("{description} ended: {status}");
            }
            if Instant::now() > deadline {
                bail!("{description} does not listen after {:?}", *DEFAULT_WAIT_TIMEOUT);
            }
            std::thread::sleep(Duration::from_millis(2));
        }
        Ok(())
    }

    /// Waits for the end of the process and parses its output as JSON, which must fit into the pipe. Fails when the
    /// process fails or still runs after `limit`.
    pub fn wait_for_json<R: DeserializeOwned>(mut self, limit: Duration) -> anyhow::Result<R> {
        let exit_status = self.wait_for_exit(limit)?;
        ensure!(exit_status.success(), "{} failed: {exit_status}", self.program_name);
        Ok(serde_json::from_reader(self.child.stdout.take().context("stdout is no pipe")?)?)
    }

    /// Sends SIGTERM and waits for the end of the process. Fails when it still runs after `limit`.
    pub fn terminate(&mut self, limit: Duration) -> anyhow::Result<ExitStatus> {
        if let Some(status) = self.try_wait()? {
            return Ok(status);
        }
        self.send_signal(Signal::SIGTERM)?;
        self.wait_for_exit(limit)
    }
}

impl Drop for TestbedProcess {
    fn drop(&mut self) {
        // Both calls fail only after the process has ended.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Runs `command` in `namespace` until it ends, and returns its output. Fails when it cannot be started. Fails with the
/// command's stderr when its exit status is not 0.
pub fn run_command_in_namespace(namespace: &NetworkNamespace, mut command: Command) -> anyhow::Result<Output> {
    enter_namespace_before_exec(namespace, &mut command)?;
    let output = command.output().with_context(|| format!("cannot run {command:?}"))?;
    if !output.status.success() {
        let stderr = String::from_utf8_lossy(&output.stderr);
        bail!("{command:?} in namespace {}: {}: {}", namespace.name(), output.status, stderr.trim());
    }
    Ok(output)
}

/// Makes the command start in the namespace and in a new process group. The kernel sends SIGHUP to a group that has a
/// stopped process and loses its shell (kernel/exit.c, kill_orphaned_pgrp). In the caller's group, nginx could
/// therefore reload unexpectedly.
fn enter_namespace_before_exec(namespace: &NetworkNamespace, command: &mut Command) -> anyhow::Result<()> {
    command.process_group(0);
    let namespace_file = namespace.open_file()?;
    let parent_pid = std::process::id() as i32;
    let prepare_child = move || {
        // SAFETY: setns, prctl and getppid are plain system calls, allowed between fork and exec.
        let is_prepared = unsafe {
            libc::setns(namespace_file.as_raw_fd(), libc::CLONE_NEWNET) == 0
                && libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL) == 0
        };
        if !is_prepared {
            return Err(std::io::Error::last_os_error());
        }
        // SAFETY: as above.
        if unsafe { libc::getppid() } != parent_pid {
            // The parent died before the signal was armed.
            return Err(std::io::ErrorKind::BrokenPipe.into());
        }
        Ok(())
    };
    // SAFETY: `prepare_child` makes system calls only: no allocation, no lock.
    unsafe { command.pre_exec(prepare_child) };
    Ok(())
}
