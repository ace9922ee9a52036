//! Test of the demo as a user starts it, with its output and its files, and of whether it leaves anything else behind.

use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

use anyhow::Context as _;
use coreward_model::arrival_log::ArrivalLog;
use coreward_testbed::fleet::lab_binary_path;
use coreward_testbed::instance::find_leftover_paths;
use coreward_testbed::{find_missing_testbed_rights, skip_if};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

fn build_demo_command(arguments: &[&str], output_directory: &Path) -> anyhow::Result<Command> {
    let mut command = Command::new(lab_binary_path()?);
    command.arg("demo").args(arguments).arg("--out").arg(output_directory);
    Ok(command)
}

/// Parses the JSON results that a demo has printed. Panics if the demo has failed.
fn parse_results(output: &Output) -> anyhow::Result<serde_json::Value> {
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    serde_json::from_slice(&output.stdout).context("stdout is not one JSON object")
}

fn read_arrival_log(output_directory: &Path) -> anyhow::Result<ArrivalLog> {
    Ok(std::fs::read_to_string(output_directory.join("arrivals-seed1.txt"))?.parse()?)
}

fn demo_instance_name(demo_pid: u32) -> String {
    format!("demohash{demo_pid}")
}

#[test]
fn core_aware_policies_beat_hash_and_break_no_connection() -> anyhow::Result<()> {
    skip_if!(find_missing_testbed_rights(), Ok(()));
    let output_directory = tempfile::tempdir()?;
    let arguments = ["--seconds", "24", "--seeds", "1", "--policy", "hash,crossrss,crossrss-plus", "--format", "json"];
    let demo_process = build_demo_command(&arguments, output_directory.path())?
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()?;
    let demo_pid = demo_process.id();
    let results = parse_results(&demo_process.wait_with_output()?)?;

    assert_eq!((&results["seconds"], &results["servers"], &results["cores"]), (&24.into(), &4.into(), &4.into()));
    let policies = results["policies"].as_array().context("policies")?;
    let policy_names: Vec<_> = policies.iter().map(|policy| policy["policy"].as_str().unwrap_or_default()).collect();
    assert_eq!(policy_names, ["hash", "crossrss", "crossrss-plus"]);
    let arrival_log = read_arrival_log(output_directory.path())?;
    for policy in policies {
        assert_eq!(policy["connections"]["opened"], arrival_log.arrivals.len(), "{results:#}");
        assert_eq!(policy["connections"]["broken"], 0, "{results:#}");
        // The controller makes ten tables a second on a machine that is fast enough.
        assert!(policy["table_generations"].as_u64() > Some(100), "{results:#}");
    }
    let core_variance_pct = |policy: usize| policies[policy]["core_variance_pct"].as_f64().context("core_variance_pct");
    let noise_floor_pct = results["noise_floor_pct"].as_f64().context("noise_floor_pct")?;
    for policy_index in [1, 2] {
        assert!(
            noise_floor_pct < core_variance_pct(policy_index)?
                && core_variance_pct(policy_index)? * 5.0 <= core_variance_pct(0)?,
            "{results:#}"
        );
    }
    assert!(std::fs::read_to_string(output_directory.path().join("demo.svg"))?.contains("crossrss-plus"));
    let saved_results: serde_json::Value =
        serde_json::from_slice(&std::fs::read(output_directory.path().join("demo.json"))?)?;
    assert_eq!(saved_results, results);
    for policy in ["hash", "crossrss", "crossrssplus"] {
        assert_eq!(find_leftover_paths(&format!("demo{policy}{demo_pid}")), Vec::<PathBuf>::new());
    }
    Ok(())
}

#[test]
fn ipv6_connections_through_gue_do_not_break() -> anyhow::Result<()> {
    skip_if!(find_missing_testbed_rights(), Ok(()));
    let output_directory = tempfile::tempdir()?;
    let arguments = ["--family", "6", "--forwarding", "gue", "--seconds", "18", "--seeds", "1", "--policy", "crossrss"];
    let output = build_demo_command(&arguments, output_directory.path())?.args(["--format", "json"]).output()?;
    let results = parse_results(&output)?;
    let arrival_log = read_arrival_log(output_directory.path())?;
    let connections = &results["policies"][0]["connections"];
    assert_eq!(
        (&connections["opened"], &connections["broken"]),
        (&arrival_log.arrivals.len().into(), &0.into()),
        "{results:#}"
    );
    Ok(())
}

fn wait_with_timeout(child: &mut Child, limit: Duration) -> anyhow::Result<std::process::ExitStatus> {
    let deadline = Instant::now() + limit;
    loop {
        if let Some(status) = child.try_wait()? {
            return Ok(status);
        }
        anyhow::ensure!(Instant::now() < deadline, "the demo still runs after {limit:?}");
        std::thread::sleep(Duration::from_millis(20));
    }
}

/// Starts a demo, waits until its testbed exists, and sends the demo a signal. Returns the testbed's name.
fn start_and_signal_demo(signal: Signal) -> anyhow::Result<String> {
    let output_directory = tempfile::tempdir()?;
    let mut demo_process = build_demo_command(&["--policy", "hash"], output_directory.path())?
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()?;
    let instance_name = demo_instance_name(demo_process.id());
    let deadline = Instant::now() + Duration::from_secs(60);
    while !find_leftover_paths(&instance_name)
        .iter()
        .any(|path| path.to_string_lossy().ends_with(&format!("{instance_name}-s5")))
    {
        anyhow::ensure!(Instant::now() < deadline && demo_process.try_wait()?.is_none(), "the demo makes no testbed");
        std::thread::sleep(Duration::from_millis(20));
    }
    std::thread::sleep(Duration::from_millis(500));
    kill(Pid::from_raw(demo_process.id() as i32), signal)?;
    assert!(!wait_with_timeout(&mut demo_process, Duration::from_secs(60))?.success());
    Ok(instance_name)
}

#[test]
fn interrupted_or_killed_demo_leaves_nothing_behind() -> anyhow::Result<()> {
    skip_if!(find_missing_testbed_rights(), Ok(()));
    let instance_name = start_and_signal_demo(Signal::SIGINT)?;
    assert_eq!(find_leftover_paths(&instance_name), Vec::<PathBuf>::new());

    let instance_name = start_and_signal_demo(Signal::SIGKILL)?;
    assert_ne!(find_leftover_paths(&instance_name), Vec::<PathBuf>::new());
    let clean_output = Command::new(lab_binary_path()?).args(["testbed", "clean", &instance_name]).output()?;
    let removed_names = String::from_utf8_lossy(&clean_output.stdout);
    assert!(
        removed_names.starts_with("removed testbed ") && removed_names.trim_end().ends_with(&instance_name),
        "{clean_output:?}"
    );
    assert_eq!(find_leftover_paths(&instance_name), Vec::<PathBuf>::new());
    Ok(())
}

#[test]
fn invalid_options_are_rejected_before_any_setup() -> anyhow::Result<()> {
    let output_directory = tempfile::tempdir()?;
    for (arguments, expected) in [
        (["--policy", "crosrss"], "crossrss-plus"),
        (["--seconds", "5"], "18..=3600"),
        (["--cores", "0"], "1..=32"),
        (["--format", "xml"], "json"),
    ] {
        let output = build_demo_command(&arguments, output_directory.path())?.output()?;
        let error = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(!output.status.success() && error.contains(expected), "{arguments:?}: {error}");
    }
    Ok(())
}
