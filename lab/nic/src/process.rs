//! Commands of the host.

use std::process::{Command, Stdio};

use anyhow::{Context as _, Result, bail};

/// Returns a command that the kernel kills when this process ends, for whatever reason.
pub fn command_tied_to_parent(program: impl AsRef<std::ffi::OsStr>) -> Command {
    let mut command = Command::new("setpriv");
    command.args(["--pdeathsig", "KILL", "--"]).arg(program).stdin(Stdio::null());
    command
}

/// Runs a command to its end and returns its output. Fails with the last line of its error output.
pub fn run(command: &mut Command) -> Result<String> {
    let output = command.output().with_context(|| format!("{command:?} does not start"))?;
    if !output.status.success() {
        let words: Vec<_> = command.get_args().map(|word| word.to_string_lossy()).collect();
        let words = words.split(|word| word == "--").next_back().unwrap_or_default().join(" ");
        let complaint = String::from_utf8_lossy(&output.stderr).trim().lines().last().unwrap_or_default().to_string();
        bail!("`{words}`: {}: {complaint}", output.status);
    }
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
}
