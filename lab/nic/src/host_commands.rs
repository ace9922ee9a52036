//! Commands that run on the host.

use std::process::{Command, Stdio};

use anyhow::{Context as _, Result, bail};

/// Returns a command that the kernel kills when this process ends, for whatever reason.
pub fn command_tied_to_parent(program: impl AsRef<std::ffi::OsStr>) -> Command {
    let mut command = Command::new("setpriv");
    command.args(["--pdeathsig", "KILL", "--"]).arg(program).stdin(Stdio::null());
    command
}

/// Runs a command to its end and returns its output. Fails with the last line of its error output.
pub fn run_command_to_end(command: &mut Command) -> Result<String> {
    let output = command.output().with_context(|| format!("{command:?} does not start"))?;
    if !output.status.success() {
        let arguments: Vec<_> = command.get_args().map(|argument| argument.to_string_lossy()).collect();
        let command_line = arguments.split(|argument| argument == "--").next_back().unwrap_or_default().join(" ");
        let last_error_line =
            String::from_utf8_lossy(&output.stderr).trim().lines().last().unwrap_or_default().to_string();
        bail!("`{command_line}`: {}: {last_error_line}", output.status);
    }
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
}
