//! Tests of a controller that gets signals while it starts, or that starts on a full disk.

use std::fs::{File, OpenOptions};
use std::io::{BufRead as _, BufReader, Write as _};
use std::path::{Path, PathBuf};
use std::process::{ChildStderr, Command, ExitStatus, Output, Stdio};
use std::sync::mpsc;
use std::time::{Duration, Instant};

use crate::support::{CorewardProcess, coreward_command};

/// Time limit for operations that normally take only milliseconds.
const OPERATION_TIMEOUT: Duration = Duration::from_secs(120);

/// Writes the controller's configuration file, with the keys in `extra_settings`, and returns its path.
fn write_controller_file(directory: &Path, extra_settings: &str) -> PathBuf {
    let (path, store) = (directory.join("controller.toml"), directory.join("store"));
    let text = format!("listen = \"127.0.0.1:0\"\napi = \"127.0.0.1:0\"\nstore = {store:?}\n{extra_settings}");
    std::fs::write(&path, text).unwrap();
    path
}

/// Returns the API's address from the controller's log. A thread reads the rest, so that the controller does not block.
fn read_api_address(controller_stderr: ChildStderr) -> String {
    let mut lines = BufReader::new(controller_stderr).lines().map(Result::unwrap);
    let mut log_lines = Vec::new();
    let address = lines.find_map(|line| {
        let address = line.split_once(" api=").map(|(_, address)| address.to_owned());
        log_lines.push(line);
        address
    });
    std::thread::spawn(move || lines.for_each(drop));
    address.unwrap_or_else(|| panic!("it has ended: {log_lines:?}"))
}

fn run_command(directory: &Path, api_address: &str, arguments: &[&str]) -> Output {
    let token_path = directory.join("operator.token");
    let mut command = coreward_command();
    command.args(arguments).args(["--controller", api_address, "--token-file"]).arg(token_path);
    command.output().unwrap()
}

fn output_text(output: &Output) -> String {
    String::from_utf8_lossy(&output.stdout).into_owned() + &String::from_utf8_lossy(&output.stderr)
}

/// Opens a named pipe for writing as soon as the controller has opened it for reading.
fn open_pipe_for_writing(pipe: &Path) -> File {
    let (file_sender, file_receiver) = mpsc::channel();
    let pipe = pipe.to_owned();
    // Opening the pipe would block forever if the controller has exited, so another thread does it.
    std::thread::spawn(move || file_sender.send(OpenOptions::new().write(true).open(pipe)));
    file_receiver.recv_timeout(OPERATION_TIMEOUT).expect("the controller does not read the pipe").unwrap()
}

fn wait_for_exit(controller: &mut CorewardProcess) -> ExitStatus {
    let deadline = Instant::now() + OPERATION_TIMEOUT;
    loop {
        if let Some(status) = controller.0.try_wait().unwrap() {
            return status;
        }
        assert!(Instant::now() < deadline, "the controller does not end");
        std::thread::sleep(Duration::from_millis(20));
    }
}

/// Sends SIGHUP or SIGTERM to a controller during its start, while it waits for its fleet document from a pipe. The
/// controller must handle the signal after the start.
#[test]
fn early_signals_are_handled_after_startup() {
    let directory = tempfile::tempdir().unwrap();
    let config_path = write_controller_file(directory.path(), "fleet = \"fleet.toml\"\n");
    let fleet_pipe = directory.path().join("fleet.toml");
    assert!(Command::new("mkfifo").arg(&fleet_pipe).status().unwrap().success());
    let mut command = coreward_command();
    command.arg("controller").arg("--config").arg(&config_path).stderr(Stdio::null());
    let mut controller = CorewardProcess(command.spawn().unwrap());
    // Each opening waits until the controller reads the pipe, first because of its start and then because of SIGHUP.
    for round in 0..2 {
        let mut file = open_pipe_for_writing(&fleet_pipe);
        if round == 0 {
            controller.send_signal("HUP");
        }
        // The controller reads another pipe the next time.
        std::fs::remove_file(&fleet_pipe).unwrap();
        assert!(Command::new("mkfifo").arg(&fleet_pipe).status().unwrap().success());
        file.write_all(b"load_ewma_alpha = 0.5\n").unwrap();
    }
    controller.send_signal("TERM");
    let exit_status = wait_for_exit(&mut controller);
    assert!(exit_status.success(), "{exit_status}");

    let mut controller = CorewardProcess(command.spawn().unwrap());
    let mut file = open_pipe_for_writing(&fleet_pipe);
    controller.send_signal("TERM");
    file.write_all(b"load_ewma_alpha = 0.5\n").unwrap();
    drop(file);
    let exit_status = wait_for_exit(&mut controller);
    assert!(exit_status.success(), "{exit_status}");
}

/// Starts a controller after its predecessor was killed. A file size limit of 0 bytes emulates a full disk.
#[test]
fn controller_starts_on_full_disk_and_recovers() {
    let directory = tempfile::tempdir().unwrap();
    let directory = directory.path();
    let config_path = write_controller_file(directory, "");
    let mut first_command = coreward_command();
    first_command.arg("controller").arg("--config").arg(&config_path).stderr(Stdio::piped());
    let mut first_controller = CorewardProcess(first_command.spawn().unwrap());
    let api_address = read_api_address(first_controller.0.stderr.take().unwrap());
    let fleet_path = directory.join("fleet.toml");
    let server_toml = |n: u8| format!("[[server]]\nname = \"s{n}\"\naddress = \"10.2.0.{n}\"\n");
    let service_table = "[[service]]\nname = \"web\"\nvip = \"10.200.0.1:80\"\n";
    std::fs::write(&fleet_path, format!("{}{}{service_table}", server_toml(1), server_toml(2))).unwrap();
    let apply_output = run_command(directory, &api_address, &["apply", "--yes", fleet_path.to_str().unwrap()]);
    assert!(apply_output.status.success(), "{}", output_text(&apply_output));
    drop(first_controller);

    let mut command = Command::new("sh");
    command.args(["-c", "trap '' XFSZ; ulimit -S -f 0; exec \"$0\" controller --config \"$1\""]);
    command.arg(env!("CARGO_BIN_EXE_coreward")).arg(&config_path).stderr(Stdio::piped());
    let mut controller = CorewardProcess(command.spawn().unwrap());
    let api_address = read_api_address(controller.0.stderr.take().unwrap());
    let status_output = run_command(directory, &api_address, &["status"]);
    assert!(
        status_output.status.success() && output_text(&status_output).contains("10.200.0.1:80"),
        "{}",
        output_text(&status_output)
    );
    let rejected_drain_output = run_command(directory, &api_address, &["drain", "s1", "--force"]);
    assert!(
        !rejected_drain_output.status.success()
            && output_text(&rejected_drain_output).contains("not on record, and not in force"),
        "{}",
        output_text(&rejected_drain_output)
    );

    let prlimit_arguments = ["--pid", &controller.0.id().to_string(), "--fsize=unlimited"].map(str::to_owned);
    assert!(Command::new("prlimit").args(prlimit_arguments).status().unwrap().success());
    let drain_output = run_command(directory, &api_address, &["drain", "s1", "--force"]);
    assert!(drain_output.status.success(), "{}", output_text(&drain_output));
}

/// Checks that `systemctl reload` first runs `coreward check`, whose failure prevents the reload of invalid files.
#[test]
fn reload_of_invalid_fleet_document_fails() {
    let unit_file_text = include_str!("../../../../packaging/systemd/coreward-controller.service");
    let mut reload_commands = unit_file_text.lines().filter_map(|line| line.strip_prefix("ExecReload="));
    let check_arguments = reload_commands.next().unwrap().strip_prefix("/usr/bin/coreward ").unwrap();
    assert_eq!(reload_commands.next(), Some("/bin/kill -HUP $MAINPID"));
    let directory = tempfile::tempdir().unwrap();
    let config_path = write_controller_file(directory.path(), "fleet = \"fleet.toml\"\n");
    let arguments = check_arguments.replace("/etc/coreward/controller.toml", config_path.to_str().unwrap());
    for (fleet, is_right) in [("load_ewma_alpha = 7\n", false), ("load_ewma_alpha = 0.5\n", true)] {
        std::fs::write(directory.path().join("fleet.toml"), fleet).unwrap();
        let output = coreward_command().args(arguments.split(' ')).output().unwrap();
        assert_eq!(output.status.success(), is_right, "{}", output_text(&output));
    }
}
