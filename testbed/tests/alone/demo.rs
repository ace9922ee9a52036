//! The demo as a user starts it: what it prints and keeps, and that it leaves nothing behind.

use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::Context as _;
use coreward_model::arrivals::ArrivalLog;
use coreward_testbed::fleet::coreward_command;
use coreward_testbed::skip_without_privilege;
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

/// The names of the demo's testbeds are fixed: one demo at a time.
static ONE_DEMO: std::sync::Mutex<()> = std::sync::Mutex::new(());

fn demo(arguments: &[&str], out: &Path) -> anyhow::Result<Command> {
    let mut command = Command::new(coreward_command()?);
    command.arg("demo").args(arguments).arg("--out").arg(out);
    Ok(command)
}

fn remains() -> Vec<String> {
    let names = |directory: &str, prefix: &str| -> Vec<String> {
        let entries = std::fs::read_dir(directory).into_iter().flatten().flatten();
        let names = entries.filter_map(|entry| entry.file_name().into_string().ok());
        names.filter(|name| name.starts_with(prefix)).map(|name| format!("{directory}/{name}")).collect()
    };
    [
        names("/run/netns", "cwdemo"),
        names("/run/coreward-testbed", "demo"),
        names("/sys/fs/bpf/coreward-testbed", "demo"),
    ]
    .concat()
}

#[test]
fn core_aware_placement_beats_hash_and_nothing_breaks() -> anyhow::Result<()> {
    if skip_without_privilege("core_aware_placement_beats_hash_and_nothing_breaks") {
        return Ok(());
    }
    let _one = ONE_DEMO.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
    let out = tempfile::tempdir()?;
    let arguments = ["--seconds", "24", "--seeds", "1", "--policy", "hash,crossrss,crossrss-plus", "--format", "json"];
    let output = demo(&arguments, out.path())?.output()?;
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
        // Ten a second, on a machine that keeps up.
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
    assert_eq!(remains(), Vec::<String>::new());
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

/// Starts a demo, waits until its testbed is there, and sends it a signal.
fn signalled(signal: Signal) -> anyhow::Result<()> {
    let out = tempfile::tempdir()?;
    let mut demo = demo(&["--policy", "hash"], out.path())?.stdout(Stdio::null()).stderr(Stdio::null()).spawn()?;
    let end = Instant::now() + Duration::from_secs(20);
    while !Path::new("/run/netns/cwdemohash-s5").exists() {
        anyhow::ensure!(Instant::now() < end && demo.try_wait()?.is_none(), "the demo makes no testbed");
        std::thread::sleep(Duration::from_millis(20));
    }
    std::thread::sleep(Duration::from_millis(500));
    kill(Pid::from_raw(demo.id() as i32), signal)?;
    assert!(!wait(&mut demo, Duration::from_secs(20))?.success());
    Ok(())
}

#[test]
fn interrupted_or_killed_it_leaves_nothing_behind() -> anyhow::Result<()> {
    if skip_without_privilege("interrupted_or_killed_it_leaves_nothing_behind") {
        return Ok(());
    }
    let _one = ONE_DEMO.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
    signalled(Signal::SIGINT)?;
    assert_eq!(remains(), Vec::<String>::new());

    signalled(Signal::SIGKILL)?;
    assert_ne!(remains(), Vec::<String>::new());
    let clean = Command::new(coreward_command()?).args(["testbed", "clean"]).output()?;
    assert!(String::from_utf8_lossy(&clean.stdout).contains("removed testbed demohash"), "{clean:?}");
    assert_eq!(remains(), Vec::<String>::new());
    Ok(())
}

#[test]
fn bad_options_are_refused_before_anything_is_made() -> anyhow::Result<()> {
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
