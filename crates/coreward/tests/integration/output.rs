//! Tests with output that cannot be written, because the disk is full or the reader has closed the pipe.

use std::fs::OpenOptions;
use std::path::Path;
use std::process::Stdio;
use std::time::{Duration, Instant};

use crate::support::{CorewardProcess, coreward_command};

const CONDITION_TIMEOUT: Duration = Duration::from_secs(30);

fn wait_until(description: &str, mut condition: impl FnMut() -> bool) {
    let deadline = Instant::now() + CONDITION_TIMEOUT;
    while !condition() {
        assert!(Instant::now() < deadline, "not within {CONDITION_TIMEOUT:?}: {description}");
        std::thread::sleep(Duration::from_millis(20));
    }
}

/// Uses `/dev/full`, which rejects every write with ENOSPC, as a full disk does.
#[test]
fn daemon_continues_when_its_log_cannot_be_written() {
    let directory = tempfile::tempdir().unwrap();
    let file_path = |name: &str| directory.path().join(name);
    let write_fleet = |text: &str| std::fs::write(file_path("fleet.toml"), text).unwrap();
    let store_path = file_path("store");
    let listen_keys = "listen = \"127.0.0.1:0\"\napi = \"127.0.0.1:0\"\n";
    std::fs::write(
        file_path("controller.toml"),
        format!("{listen_keys}store = {store_path:?}\nfleet = \"fleet.toml\"\n"),
    )
    .unwrap();
    write_fleet("load_ewma_alpha = 0.5\n");
    let full_device = OpenOptions::new().write(true).open("/dev/full").unwrap();
    let mut command = coreward_command();
    command.args([Path::new("controller"), Path::new("--config"), &file_path("controller.toml")]);
    let mut controller = CorewardProcess(command.stdout(Stdio::null()).stderr(full_device).spawn().unwrap());
    wait_until("it has drawn its tokens", || {
        file_path("operator.token").exists() || controller.0.try_wait().unwrap().is_some()
    });
    // Each reload logs several lines, about the missing token and about the invalid file.
    for round in 0..5 {
        let token_path = file_path("viewer.token");
        std::fs::remove_file(&token_path).unwrap();
        controller.send_signal("HUP");
        wait_until("it has read the files again", || token_path.exists() || controller.0.try_wait().unwrap().is_some());
        assert_eq!(controller.0.try_wait().unwrap(), None, "it has ended in round {round}");
        write_fleet(if round % 2 == 0 { "load_ewma_alpha = 5\n" } else { "load_ewma_alpha = 0.5\n" });
    }
    controller.send_signal("TERM");
    assert!(controller.0.wait().unwrap().success());
}

/// Emulates `coreward check FILE 2>&1 | head -1`, and a command whose long output is no longer read.
#[test]
fn closed_output_pipe_does_not_change_the_exit_status() {
    let mut completions_process =
        coreward_command().args(["completions", "bash"]).stdout(Stdio::piped()).spawn().unwrap();
    drop(completions_process.stdout.take());
    assert_eq!(completions_process.wait().unwrap().code(), Some(0));

    let mut check_process = coreward_command()
        .args(["check", "/nonexistent/lb.toml"])
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    drop((check_process.stdout.take(), check_process.stderr.take()));
    assert_eq!(check_process.wait().unwrap().code(), Some(1));
}
