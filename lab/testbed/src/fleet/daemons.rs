//! Processes of coreward's daemons.

use std::fmt::Write as _;
use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

use anyhow::{Context as _, bail, ensure};

use super::files::config_path;
use super::names::api_address_of;
use super::options::FleetOptions;
use crate::namespace::Namespace;
use crate::process::Process;
use crate::topology::Testbed;

/// Returns the path of `coreward` in this program's directory or the one above. Fails when it does not exist.
pub fn coreward_command() -> anyhow::Result<PathBuf> {
    command_named("coreward")
}

/// Returns the path of the command `coreward-lab`. Fails when it does not exist.
pub fn lab_command() -> anyhow::Result<PathBuf> {
    command_named("coreward-lab")
}

fn command_named(name: &str) -> anyhow::Result<PathBuf> {
    let own = std::env::current_exe()?;
    // Test executables are in a subdirectory.
    let found = own.ancestors().skip(1).take(2).map(|directory| directory.join(name)).find(|path| path.is_file());
    found.with_context(|| format!("no {name} in the directory of {}: `make build` makes it", own.display()))
}

/// Returns the command `coreward ARGUMENTS` with the operator's token, for the machine of the only controller. Fails
/// when `coreward` does not exist.
pub fn operator_command(testbed: &Testbed, arguments: &[&str]) -> anyhow::Result<Command> {
    operator_command_for(testbed, [1], arguments)
}

/// Returns a command for the leader of these controllers. Fails when `coreward` does not exist.
pub fn operator_command_for(
    testbed: &Testbed,
    controllers: impl IntoIterator<Item = u16>,
    arguments: &[&str],
) -> anyhow::Result<Command> {
    let controllers: Vec<String> = controllers.into_iter().map(api_address_of).collect();
    let mut command = Command::new(coreward_command()?);
    command.args(arguments).env("COREWARD_CONTROLLER", controllers.join(","));
    command.env("COREWARD_TOKEN_FILE", testbed.directory().join("operator.token"));
    Ok(command)
}

/// Returns the last lines of the log of every daemon.
pub(crate) fn read_log_tails(testbed: &Testbed) -> String {
    let mut all = String::new();
    let files = fs::read_dir(testbed.directory()).into_iter().flatten().flatten().map(|entry| entry.path());
    for path in files.filter(|path| path.extension().is_some_and(|extension| extension == "log")) {
        let text = fs::read_to_string(&path).unwrap_or_default();
        let lines: Vec<&str> = text.lines().collect();
        let last = lines[lines.len().saturating_sub(10)..].join("\n");
        let _ = writeln!(all, "-- {}:\n{last}", path.display());
    }
    all
}

/// Returns the capabilities that the daemon's systemd unit grants, such as `CAP_BPF`. Fails when the daemon has no
/// unit.
pub fn unit_capabilities(daemon: &str) -> anyhow::Result<Vec<&'static str>> {
    let unit = match daemon {
        "controller" => include_str!("../../../../packaging/systemd/coreward-controller.service"),
        "rack" => include_str!("../../../../packaging/systemd/coreward-rack.service"),
        "lb" => include_str!("../../../../packaging/systemd/coreward-lb.service"),
        "agent" => include_str!("../../../../packaging/systemd/coreward-agent.service"),
        "orchestrate" => include_str!("../../../../packaging/systemd/coreward-orchestrate.service"),
        other => bail!("{other:?} has no unit: expected controller, rack, lb, agent or orchestrate"),
    };
    let line = unit.lines().find_map(|line| line.strip_prefix("CapabilityBoundingSet="));
    Ok(line.context("a unit without CapabilityBoundingSet")?.split_whitespace().collect())
}

/// Returns a command with the capability bounding set of the daemon's unit; setpriv(1) sets it as systemd does.
fn confined_command(daemon: &str, coreward: &Path) -> anyhow::Result<Command> {
    let mut bounding_set = "-all".to_owned();
    for capability in unit_capabilities(daemon)? {
        let name = capability.strip_prefix("CAP_").context("a capability that does not begin with CAP_")?;
        write!(bounding_set, ",+{}", name.to_lowercase())?;
    }
    let mut command = Command::new("setpriv");
    command.args(["--no-new-privs", "--bounding-set", &bounding_set]).arg(coreward);
    Ok(command)
}

/// Starts a daemon. `daemon`: sub-command of coreward; `name`: base name of the daemon's files.
pub(super) fn start_daemon(
    testbed: &Testbed,
    namespace: &Namespace,
    daemon: &str,
    name: &str,
    options: &FleetOptions,
    coreward: &Path,
) -> anyhow::Result<Process> {
    let log_path = testbed.directory().join(format!("{name}.log"));
    let log = File::options().create(true).append(true).open(&log_path)?;
    let mut command = if options.is_confined { confined_command(daemon, coreward)? } else { Command::new(coreward) };
    if options.json_logs {
        command.env("COREWARD_LOG_FORMAT", "json");
    }
    if let Some(preload) = &options.preloaded_faults {
        preload.apply_faults(name, &mut command)?;
    }
    command.arg(daemon).arg("--config").arg(config_path(testbed, name));
    command.stdin(Stdio::null()).stdout(log.try_clone()?).stderr(log);
    let mut process = testbed.spawn(namespace, command)?;
    // An invalid configuration ends the daemon soon.
    std::thread::sleep(Duration::from_millis(20));
    let ended = process.try_wait()?;
    ensure!(ended.is_none(), "{name} ended: {}", fs::read_to_string(&log_path).unwrap_or_default().trim());
    Ok(process)
}
