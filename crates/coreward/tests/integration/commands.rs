//! Tests that sub-commands of daemons, such as `coreward lb forget`, do not handle signals as daemons do.

use std::fs::Permissions;
use std::net::TcpListener;
use std::os::unix::fs::{PermissionsExt as _, chown};
use std::os::unix::process::ExitStatusExt as _;
use std::process::{Command, Stdio};

use crate::support::{CorewardProcess, coreward_command};

const SIGINT: i32 = 2;

#[test]
fn root_can_use_another_users_token_and_sigint_ends_command() {
    let directory = tempfile::tempdir().unwrap();
    let token_path = directory.path().join("operator.token");
    std::fs::write(&token_path, "0".repeat(64)).unwrap();
    std::fs::set_permissions(&token_path, Permissions::from_mode(0o600)).unwrap();
    // The file gets the controller's user. Without root this fails, but the rest of the test does not depend on it.
    let _ = chown(&token_path, Some(65_534), None);
    // This controller accepts the request, but does not answer it.
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let url = format!("http://{}", listener.local_addr().unwrap());
    // A background shell ignores SIGINT, and its child processes inherit that.
    let mut command = Command::new("env");
    command.arg("--default-signal=INT").arg(coreward_command().get_program());
    command.args(["lb", "forget", "lb1", "--controller", &url, "--token-file"]).arg(&token_path);
    let mut forget_process = CorewardProcess(command.stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap());
    listener.set_nonblocking(true).unwrap();
    let request_stream = loop {
        match listener.accept() {
            Ok((stream, _)) => break stream,
            Err(_) => assert_eq!(forget_process.0.try_wait().unwrap(), None, "it has ended without a question"),
        }
        std::thread::sleep(std::time::Duration::from_millis(10));
    };
    forget_process.send_signal("INT");
    assert_eq!(forget_process.0.wait().unwrap().signal(), Some(SIGINT));
    // The request was open until here, so neither a response nor the HTTP timeout has ended the command.
    drop(request_stream);
}
