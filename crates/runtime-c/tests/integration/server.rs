//! `examples/upper_case.c`, compiled, as a server under the orchestrator.

use std::net::{SocketAddr, UdpSocket};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::time::{Duration, Instant};

use coreward_config::Source;
use coreward_orchestrator::config::Config;
use coreward_orchestrator::daemon::Daemon;
use coreward_orchestrator::intake::RequestIntake;

pub const TIMEOUT: Duration = Duration::from_secs(20);

/// Compiles the example into `directory`.
fn compile(directory: &Path) -> PathBuf {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let libraries = std::env::current_exe().unwrap().parent().unwrap().to_owned();
    let program = directory.join("upper_case");
    let mut compiler = Command::new("cc");
    compiler.args(["-std=c11", "-Wall", "-Wextra", "-Werror", "-D_GNU_SOURCE", "-pthread", "-o"]).arg(&program);
    compiler.arg(root.join("examples/upper_case.c")).arg("-I").arg(root.join("include"));
    compiler.arg("-L").arg(&libraries).arg(format!("-Wl,-rpath,{}", libraries.display())).arg("-lcoreward_runtime_c");
    let output = compiler.output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    program
}

/// Sends a request until it is answered.
fn ask(client: &UdpSocket, request: &[u8]) -> Vec<u8> {
    let started = Instant::now();
    let mut response = [0; 100];
    loop {
        client.send(request).unwrap();
        match client.recv(&mut response) {
            Ok(length) => return response[..length].to_vec(),
            Err(error) => assert!(started.elapsed() < TIMEOUT, "no answer: {error}"),
        }
    }
}

/// Ends the daemon's thread, after a failed assertion, too.
pub struct StopOnDrop<'a>(pub &'a AtomicBool);

impl Drop for StopOnDrop<'_> {
    fn drop(&mut self) {
        self.0.store(true, Relaxed);
    }
}

/// An orchestrator of two cores with one service, and its address.
pub fn orchestrator(memory: &Path) -> (Daemon, SocketAddr) {
    let listen = UdpSocket::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    let text = format!("memory = {memory:?}\ncores = 2\n[[service]]\nlisten = \"{listen}\"\n");
    let config = Config::parse(&Source::from_text("orchestrate.toml", &text)).unwrap();
    (Daemon::start(&config, RequestIntake::default()).unwrap(), listen)
}

pub fn client(server: SocketAddr) -> UdpSocket {
    let client = UdpSocket::bind("127.0.0.1:0").unwrap();
    client.connect(server).unwrap();
    client.set_read_timeout(Some(Duration::from_millis(500))).unwrap();
    client
}

#[test]
fn server_in_c_answers_until_it_is_stopped() {
    let directory = tempfile::tempdir().unwrap();
    let program = compile(directory.path());
    let memory = directory.path().join("cores");
    let (mut daemon, listen) = orchestrator(&memory);
    let mut server = Command::new(program);
    server.arg(&memory).arg(listen.port().to_string()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let stop = AtomicBool::new(false);
    let output = std::thread::scope(|scope| {
        let _end = StopOnDrop(&stop);
        scope.spawn(|| daemon.run(&stop).unwrap());
        let server = server.spawn().unwrap();
        let client = client(listen);
        assert_eq!(ask(&client, b"a small text"), b"A SMALL TEXT");
        assert_eq!(ask(&client, b"*long"), b"*LONG");
        let mut end = Command::new("kill");
        assert!(end.arg(server.id().to_string()).status().unwrap().success());
        server.wait_with_output().unwrap()
    });
    let (printed, errors) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success(), "{printed}{errors}");
    let served: Vec<u64> = printed.lines().map(|line| line.split(' ').nth(2).unwrap().parse().unwrap()).collect();
    assert_eq!(served.len(), 2, "{printed}");
    assert!(served.iter().sum::<u64>() >= 2, "{printed}");
}

#[test]
fn error_names_what_was_expected() {
    let directory = tempfile::tempdir().unwrap();
    let output = Command::new(compile(directory.path())).args(["/nowhere/cores", "4000"]).output().unwrap();
    let errors = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(1), "{errors}");
    assert!(errors.contains("/nowhere/cores") && errors.contains("No such file"), "{errors}");
}
