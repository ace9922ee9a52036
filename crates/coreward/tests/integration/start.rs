//! A controller that starts: what comes too early, and on a disk where nothing can be written.

use std::fs::{File, OpenOptions};
use std::io::{BufRead as _, BufReader, Write as _};
use std::path::{Path, PathBuf};
use std::process::{ChildStderr, Command, ExitStatus, Output, Stdio};
use std::sync::mpsc;
use std::time::{Duration, Instant};

use crate::support::{Daemon, coreward};

/// Timeout of operations that a controller normally finishes at once; only a safety net.
const LIMIT: Duration = Duration::from_secs(120);

/// Writes the controller's file and returns its path. `more`: further keys.
fn write_controller(directory: &Path, more: &str) -> PathBuf {
    let (path, store) = (directory.join("controller.toml"), directory.join("store"));
    let text = format!("listen = \"127.0.0.1:0\"\napi = \"127.0.0.1:0\"\nstore = {store:?}\n{more}");
    std::fs::write(&path, text).unwrap();
    path
}

/// Returns the API's address from the log; a thread reads the rest of the log.
fn read_api_address(log: ChildStderr) -> String {
    let mut lines = BufReader::new(log).lines().map(Result::unwrap);
    let mut seen = Vec::new();
    let address = lines.find_map(|line| {
        let address = line.split_once(" api=").map(|(_, address)| address.to_owned());
        seen.push(line);
        address
    });
    std::thread::spawn(move || lines.for_each(drop));
    address.unwrap_or_else(|| panic!("it has ended: {seen:?}"))
}

fn run_command(directory: &Path, api: &str, arguments: &[&str]) -> Output {
    let token = directory.join("operator.token");
    let mut command = coreward();
    command.args(arguments).args(["--controller", api, "--token-file"]).arg(token);
    command.output().unwrap()
}

fn text(output: &Output) -> String {
    String::from_utf8_lossy(&output.stdout).into_owned() + &String::from_utf8_lossy(&output.stderr)
}

/// Opens a pipe for writing as soon as the controller reads from it.
fn open_for_reader(pipe: &Path) -> File {
    let (opened, file) = mpsc::channel();
    let pipe = pipe.to_owned();
    // The opening itself waits without limit, also when the controller has ended.
    std::thread::spawn(move || opened.send(OpenOptions::new().write(true).open(pipe)));
    file.recv_timeout(LIMIT).expect("the controller does not read the pipe").unwrap()
}

fn wait_for_end(controller: &mut Daemon) -> ExitStatus {
    let end = Instant::now() + LIMIT;
    loop {
        if let Some(status) = controller.0.try_wait().unwrap() {
            return status;
        }
        assert!(Instant::now() < end, "the controller does not end");
        std::thread::sleep(Duration::from_millis(20));
    }
}

/// The controller gets SIGHUP or SIGTERM while it starts and waits for its fleet document, a pipe without a writer.
/// The signals take effect after the start.
#[test]
fn early_signals_are_handled_after_startup() {
    let directory = tempfile::tempdir().unwrap();
    let config = write_controller(directory.path(), "fleet = \"fleet.toml\"\n");
    let fleet = directory.path().join("fleet.toml");
    assert!(Command::new("mkfifo").arg(&fleet).status().unwrap().success());
    let mut command = coreward();
    command.arg("controller").arg("--config").arg(&config).stderr(Stdio::null());
    let mut controller = Daemon(command.spawn().unwrap());
    // Each opening waits for it to read: the first time as it starts, the second time because of SIGHUP.
    for round in 0..2 {
        let mut file = open_for_reader(&fleet);
        if round == 0 {
            controller.signal("HUP");
        }
        // The next reading is of another pipe.
        std::fs::remove_file(&fleet).unwrap();
        assert!(Command::new("mkfifo").arg(&fleet).status().unwrap().success());
        file.write_all(b"load_ewma_alpha = 0.5\n").unwrap();
    }
    controller.signal("TERM");
    let ended = wait_for_end(&mut controller);
    assert!(ended.success(), "{ended}");

    let mut controller = Daemon(command.spawn().unwrap());
    let mut file = open_for_reader(&fleet);
    controller.signal("TERM");
    file.write_all(b"load_ewma_alpha = 0.5\n").unwrap();
    drop(file);
    let ended = wait_for_end(&mut controller);
    assert!(ended.success(), "{ended}");
}

/// A limit of 0 bytes for every file emulates a full disk, and the previous controller was killed.
#[test]
fn controller_starts_and_recovers_on_a_full_disk() {
    let directory = tempfile::tempdir().unwrap();
    let directory = directory.path();
    let config = write_controller(directory, "");
    let mut first = coreward();
    first.arg("controller").arg("--config").arg(&config).stderr(Stdio::piped());
    let mut first = Daemon(first.spawn().unwrap());
    let api = read_api_address(first.0.stderr.take().unwrap());
    let fleet = directory.join("fleet.toml");
    let server = |n: u8| format!("[[server]]\nname = \"s{n}\"\naddress = \"10.2.0.{n}\"\n");
    let service = "[[service]]\nname = \"web\"\nvip = \"10.200.0.1:80\"\n";
    std::fs::write(&fleet, format!("{}{}{service}", server(1), server(2))).unwrap();
    let applied = run_command(directory, &api, &["apply", "--yes", fleet.to_str().unwrap()]);
    assert!(applied.status.success(), "{}", text(&applied));
    drop(first);

    let mut command = Command::new("sh");
    command.args(["-c", "trap '' XFSZ; ulimit -S -f 0; exec \"$0\" controller --config \"$1\""]);
    command.arg(env!("CARGO_BIN_EXE_coreward")).arg(&config).stderr(Stdio::piped());
    let mut controller = Daemon(command.spawn().unwrap());
    let api = read_api_address(controller.0.stderr.take().unwrap());
    let status = run_command(directory, &api, &["status"]);
    assert!(status.status.success() && text(&status).contains("10.200.0.1:80"), "{}", text(&status));
    let refused = run_command(directory, &api, &["drain", "s1", "--force"]);
    assert!(
        !refused.status.success() && text(&refused).contains("not on record, and not in force"),
        "{}",
        text(&refused)
    );

    let limit = ["--pid", &controller.0.id().to_string(), "--fsize=unlimited"].map(str::to_owned);
    assert!(Command::new("prlimit").args(limit).status().unwrap().success());
    let drained = run_command(directory, &api, &["drain", "s1", "--force"]);
    assert!(drained.status.success(), "{}", text(&drained));
}

/// `systemctl reload` runs `coreward check` first; if the check fails, the controller does not reload its files.
#[test]
fn reload_of_an_invalid_fleet_fails() {
    let unit = include_str!("../../../../packaging/systemd/coreward-controller.service");
    let mut reloads = unit.lines().filter_map(|line| line.strip_prefix("ExecReload="));
    let first = reloads.next().unwrap().strip_prefix("/usr/bin/coreward ").unwrap();
    assert_eq!(reloads.next(), Some("/bin/kill -HUP $MAINPID"));
    let directory = tempfile::tempdir().unwrap();
    let config = write_controller(directory.path(), "fleet = \"fleet.toml\"\n");
    let command = first.replace("/etc/coreward/controller.toml", config.to_str().unwrap());
    for (fleet, is_right) in [("load_ewma_alpha = 7\n", false), ("load_ewma_alpha = 0.5\n", true)] {
        std::fs::write(directory.path().join("fleet.toml"), fleet).unwrap();
        let checked = coreward().args(command.split(' ')).output().unwrap();
        assert_eq!(checked.status.success(), is_right, "{}", text(&checked));
    }
}
