//! Starting coreward's daemons in a testbed, with the commands and capabilities that they need.

use std::fmt::Write as _;
use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

use anyhow::{Context as _, bail, ensure};

use super::files::daemon_config_path;
use super::names::controller_api_address;
use super::options::TestbedFleetOptions;
use crate::namespace::NetworkNamespace;
use crate::process::TestbedProcess;
use crate::topology::Testbed;

/// Returns the path of `coreward` in the directory of the running program or in its parent. Fails when it does not
/// exist.
pub fn coreward_binary_path() -> anyhow::Result<PathBuf> {
    find_binary("coreward")
}

/// Returns the path of the command `coreward-lab`. Fails when it does not exist.
pub fn lab_binary_path() -> anyhow::Result<PathBuf> {
    find_binary("coreward-lab")
}

fn find_binary(name: &str) -> anyhow::Result<PathBuf> {
    let own_path = std::env::current_exe()?;
    // Search the parent directory too, because test executables are in a subdirectory.
    let found_path =
        own_path.ancestors().skip(1).take(2).map(|directory| directory.join(name)).find(|path| path.is_file());
    found_path.with_context(|| format!("no {name} in the directory of {}: `make build` makes it", own_path.display()))
}

/// Returns a command that runs `coreward` with these arguments and the operator's token, on the machine of the only
/// controller. Fails when `coreward` does not exist.
pub fn build_operator_command(testbed: &Testbed, arguments: &[&str]) -> anyhow::Result<Command> {
    build_operator_command_at_controllers(testbed, [1], arguments)
}

/// Returns a command that runs `coreward` with these arguments and finds the leader of these controllers. Fails when
/// `coreward` does not exist.
pub fn build_operator_command_at_controllers(
    testbed: &Testbed,
    controllers: impl IntoIterator<Item = u16>,
    arguments: &[&str],
) -> anyhow::Result<Command> {
    let api_addresses: Vec<String> = controllers.into_iter().map(controller_api_address).collect();
    let mut command = Command::new(coreward_binary_path()?);
    command.args(arguments).env("COREWARD_CONTROLLER", api_addresses.join(","));
    command.env("COREWARD_TOKEN_FILE", testbed.directory().join("operator.token"));
    Ok(command)
}

/// Returns the last lines of every daemon's log.
pub(crate) fn read_log_tails(testbed: &Testbed) -> String {
    let mut log_tails = String::new();
    let directory_files = fs::read_dir(testbed.directory()).into_iter().flatten().flatten().map(|entry| entry.path());
    for path in directory_files.filter(|path| path.extension().is_some_and(|extension| extension == "log")) {
        let text = fs::read_to_string(&path).unwrap_or_default();
        let lines: Vec<&str> = text.lines().collect();
        let last_lines = lines[lines.len().saturating_sub(10)..].join("\n");
        let _ = writeln!(log_tails, "-- {}:\n{last_lines}", path.display());
    }
    log_tails
}

/// Returns the capabilities that the systemd unit of `daemon` grants, such as `CAP_BPF`. Fails when the daemon has no
/// unit.
pub fn systemd_unit_capabilities(daemon: &str) -> anyhow::Result<Vec<&'static str>> {
    let unit_text = match daemon {
        "controller" => include_str!("../../../../packaging/systemd/coreward-controller.service"),
        "rack" => include_str!("../../../../packaging/systemd/coreward-rack.service"),
        "lb" => include_str!("../../../../packaging/systemd/coreward-lb.service"),
        "agent" => include_str!("../../../../packaging/systemd/coreward-agent.service"),
        "orchestrate" => include_str!("../../../../packaging/systemd/coreward-orchestrate.service"),
        other => bail!("{other:?} has no unit: expected controller, rack, lb, agent or orchestrate"),
    };
    let capability_line = unit_text.lines().find_map(|line| line.strip_prefix("CapabilityBoundingSet="));
    Ok(capability_line.context("a unit without CapabilityBoundingSet")?.split_whitespace().collect())
}

/// Returns a command that runs `coreward` with the capability bounding set of the systemd unit of `daemon`. It uses
/// setpriv(1), which has the same effect as systemd.
fn build_confined_command(daemon: &str, coreward: &Path) -> anyhow::Result<Command> {
    let mut bounding_set = "-all".to_owned();
    for capability in systemd_unit_capabilities(daemon)? {
        let capability_name = capability.strip_prefix("CAP_").context("a capability that does not begin with CAP_")?;
        write!(bounding_set, ",+{}", capability_name.to_lowercase())?;
    }
    let mut command = Command::new("setpriv");
    command.args(["--no-new-privs", "--bounding-set", &bounding_set]).arg(coreward);
    Ok(command)
}

/// Starts a daemon. `daemon` is the coreward sub-command, and `name` is the base name of the daemon's files.
pub(super) fn start_daemon(
    testbed: &Testbed,
    namespace: &NetworkNamespace,
    daemon: &str,
    name: &str,
    options: &TestbedFleetOptions,
    coreward: &Path,
) -> anyhow::Result<TestbedProcess> {
    let log_path = testbed.directory().join(format!("{name}.log"));
    let log_file = File::options().create(true).append(true).open(&log_path)?;
    let mut command = if options.has_only_unit_capabilities {
        build_confined_command(daemon, coreward)?
    } else {
        Command::new(coreward)
    };
    if options.uses_json_logs {
        command.env("COREWARD_LOG_FORMAT", "json");
    }
    if let Some(preload) = &options.preloaded_faults {
        preload.preload_fault_library(name, &mut command)?;
    }
    command.arg(daemon).arg("--config").arg(daemon_config_path(testbed, name));
    command.stdin(Stdio::null()).stdout(log_file.try_clone()?).stderr(log_file);
    let mut daemon_process = testbed.spawn(namespace, command)?;
    // Wait, because a daemon with an invalid configuration ends soon after its start.
    std::thread::sleep(Duration::from_millis(20));
    let exit_status = daemon_process.try_wait()?;
    ensure!(exit_status.is_none(), "{name} ended: {}", fs::read_to_string(&log_path).unwrap_or_default().trim());
    Ok(daemon_process)
}
