//! The demo as a user starts it: its output, its files, and that it leaves nothing else behind.

use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::Context as _;
use coreward_model::arrivals::ArrivalLog;
use coreward_testbed::fleet::lab_command;
use coreward_testbed::instance::find_remains;
use coreward_testbed::{missing_testbed_rights, skip_if};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

fn demo(arguments: &[&str], out: &Path) -> anyhow::Result<Command> {
    let mut command = Command::new(lab_command()?);
    command.arg("demo").args(arguments).arg("--out").arg(out);
    Ok(command)
}

fn instance(demo: u32) -> String {
    format!("demohash{demo}")
}

#[test]
fn core_aware_placement_beats_hash_and_nothing_breaks() -> anyhow::Result<()> {
    skip_if!(missing_testbed_rights(), Ok(()));
    let out = tempfile::tempdir()?;
    let arguments = ["--seconds", "24", "--seeds", "1", "--policy", "hash,crossrss,crossrss-plus", "--format", "json"];
    let demo = demo(&arguments, out.path())?.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn()?;
    let pid = demo.id();
    let output = demo.wait_with_output()?;
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let results: serde_json::Value = serde_json::from_slice(&output.stdout).context("stdout is not one JSON object")?;

    assert_eq!((&results["seconds"], &results["servers"], &results["cores"]), (&24.into(), &4.into(), &4.into()));
    let policies = results["policies"].as_array().context("policies")?;
    let names: Vec<_> = policies.iter().map(|policy| policy["policy"].as_str().unwrap_or_default()).collect();
    assert_eq!(names, ["hash", "crossrss", "crossrss-plus"]);
    let log: ArrivalLog = std::fs::read_to_string(out.path().join("arrivals-seed1.txt"))?.parse()?;
    for policy in policies {
        assert_eq!(policy["connections"]["opened"], log.arrivals.len(), "{results:#}");
        assert_eq!(policy["connections"]["broken"], 0, "{results:#}");
        // The controller makes ten tables a second on a machine that is fast enough.
        assert!(policy["table_generations"].as_u64() > Some(100), "{results:#}");
    }
    let variance = |policy: usize| policies[policy]["core_variance_pct"].as_f64().context("core_variance_pct");
    let floor = results["noise_floor_pct"].as_f64().context("noise_floor_pct")?;
    for core_aware in [1, 2] {
        assert!(floor < variance(core_aware)? && variance(core_aware)? * 5.0 <= variance(0)?, "{results:#}");
    }
    assert!(std::fs::read_to_string(out.path().join("demo.svg"))?.contains("crossrss-plus"));
    let kept: serde_json::Value = serde_json::from_slice(&std::fs::read(out.path().join("demo.json"))?)?;
    assert_eq!(kept, results);
    for policy in ["hash", "crossrss", "crossrssplus"] {
        assert_eq!(find_remains(&format!("demo{policy}{pid}")), Vec::<PathBuf>::new());
    }
    Ok(())
}

#[test]
fn ipv6_connections_through_gue_do_not_break() -> anyhow::Result<()> {
    skip_if!(missing_testbed_rights(), Ok(()));
    let out = tempfile::tempdir()?;
    let arguments = ["--family", "6", "--forwarding", "gue", "--seconds", "18", "--seeds", "1", "--policy", "crossrss"];
    let output = demo(&arguments, out.path())?.args(["--format", "json"]).output()?;
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let results: serde_json::Value = serde_json::from_slice(&output.stdout).context("stdout is not one JSON object")?;
    let log: ArrivalLog = std::fs::read_to_string(out.path().join("arrivals-seed1.txt"))?.parse()?;
    let connections = &results["policies"][0]["connections"];
    assert_eq!(
        (&connections["opened"], &connections["broken"]),
        (&log.arrivals.len().into(), &0.into()),
        "{results:#}"
    );
    Ok(())
}

fn wait(child: &mut Child, limit: Duration) -> anyhow::Result<std::process::ExitStatus> {
    let end = Instant::now() + limit;
    loop {
        if let Some(status) = child.try_wait()? {
            return Ok(status);
        }
        anyhow::ensure!(Instant::now() < end, "the demo still runs after {limit:?}");
        std::thread::sleep(Duration::from_millis(20));
    }
}

/// Starts a demo, waits until its testbed exists, and sends it a signal. Returns the testbed's name.
fn demo_ended_by(signal: Signal) -> anyhow::Result<String> {
    let out = tempfile::tempdir()?;
    let mut demo = demo(&["--policy", "hash"], out.path())?.stdout(Stdio::null()).stderr(Stdio::null()).spawn()?;
    let instance = instance(demo.id());
    let end = Instant::now() + Duration::from_secs(60);
    while !find_remains(&instance).iter().any(|path| path.to_string_lossy().ends_with(&format!("{instance}-s5"))) {
        anyhow::ensure!(Instant::now() < end && demo.try_wait()?.is_none(), "the demo makes no testbed");
        std::thread::sleep(Duration::from_millis(20));
    }
    std::thread::sleep(Duration::from_millis(500));
    kill(Pid::from_raw(demo.id() as i32), signal)?;
    assert!(!wait(&mut demo, Duration::from_secs(60))?.success());
    Ok(instance)
}

#[test]
fn interrupted_or_killed_demo_leaves_nothing() -> anyhow::Result<()> {
    skip_if!(missing_testbed_rights(), Ok(()));
    let instance = demo_ended_by(Signal::SIGINT)?;
    assert_eq!(find_remains(&instance), Vec::<PathBuf>::new());

    let instance = demo_ended_by(Signal::SIGKILL)?;
    assert_ne!(find_remains(&instance), Vec::<PathBuf>::new());
    let clean = Command::new(lab_command()?).args(["testbed", "clean", &instance]).output()?;
    let removed = String::from_utf8_lossy(&clean.stdout);
    assert!(removed.starts_with("removed testbed ") && removed.trim_end().ends_with(&instance), "{clean:?}");
    assert_eq!(find_remains(&instance), Vec::<PathBuf>::new());
    Ok(())
}

#[test]
fn invalid_options_are_rejected_before_setup() -> anyhow::Result<()> {
    let out = tempfile::tempdir()?;
    for (arguments, expected) in [
        (["--policy", "crosrss"], "crossrss-plus"),
        (["--seconds", "5"], "18..=3600"),
        (["--cores", "0"], "1..=32"),
        (["--format", "xml"], "json"),
    ] {
        let output = demo(&arguments, out.path())?.output()?;
        let error = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(!output.status.success() && error.contains(expected), "{arguments:?}: {error}");
    }
    Ok(())
}
