//! `examples/*.c`, compiled, as servers under the orchestrator.

use std::net::{SocketAddr, UdpSocket};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::time::{Duration, Instant};

use coreward_config::Source;
use coreward_orchestrator::config::Config;
use coreward_orchestrator::daemon::Daemon;
use coreward_orchestrator::intake::RequestIntake;

pub const TIMEOUT: Duration = Duration::from_secs(20);

/// Compiles an example into `directory` with these linker options, and returns the program's path.
pub fn compile(directory: &Path, example: &str, options: &[&str]) -> PathBuf {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let libraries = std::env::current_exe().unwrap().parent().unwrap().to_owned();
    let program = directory.join(example);
    let mut compiler = Command::new("cc");
    compiler.args(["-std=c11", "-Wall", "-Wextra", "-Werror", "-D_GNU_SOURCE", "-pthread", "-o"]).arg(&program);
    compiler.arg(root.join("examples").join(format!("{example}.c"))).arg("-I").arg(root.join("include"));
    // As DT_RPATH, which precedes LD_LIBRARY_PATH: that may have an older library.
    let path = format!("-Wl,--disable-new-dtags,-rpath,{}", libraries.display());
    compiler.arg("-L").arg(&libraries).arg(path).arg("-lcoreward_runtime_c");
    compiler.args(options);
    let output = compiler.output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    program
}

/// Sends a request until it is answered, and returns the response. Others, to earlier repeated requests, are ignored.
pub fn ask(client: &UdpSocket, request: &[u8], is_response: impl Fn(&[u8]) -> bool) -> Vec<u8> {
    let started = Instant::now();
    let mut response = [0; 1500];
    client.send(request).unwrap();
    loop {
        match client.recv(&mut response) {
            Ok(length) if is_response(&response[..length]) => return response[..length].to_vec(),
            Ok(_) => (),
            Err(error) => {
                assert!(started.elapsed() < TIMEOUT, "no answer: {error}");
                client.send(request).unwrap();
            }
        }
    }
}

/// Guard that ends the daemon's thread, even after a failed assertion.
pub struct StopOnDrop<'a>(pub &'a AtomicBool);

impl Drop for StopOnDrop<'_> {
    fn drop(&mut self) {
        self.0.store(true, Relaxed);
    }
}

pub fn free_address() -> SocketAddr {
    UdpSocket::bind("127.0.0.1:0").unwrap().local_addr().unwrap()
}

/// Starts an orchestrator of two cores with these services.
pub fn orchestrator_of(memory: &Path, services: &str) -> Daemon {
    let text = format!("memory = {memory:?}\ncores = 2\n{services}");
    let config = Config::parse(&Source::from_text("orchestrate.toml", &text)).unwrap();
    Daemon::start(&config, RequestIntake::default()).unwrap()
}

/// Starts an orchestrator of two cores with one service, and returns the service's address, too.
pub fn orchestrator(memory: &Path) -> (Daemon, SocketAddr) {
    let listen = free_address();
    (orchestrator_of(memory, &format!("[[service]]\nlisten = \"{listen}\"\n")), listen)
}

/// Ends a server by SIGTERM, and returns its output.
pub fn end(server: Child) -> Output {
    assert!(Command::new("kill").arg(server.id().to_string()).status().unwrap().success());
    server.wait_with_output().unwrap()
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
    let program = compile(directory.path(), "upper_case", &[]);
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
        ask(&client, b"a small text", |response| response == b"A SMALL TEXT");
        ask(&client, b"*long", |response| response == b"*LONG");
        end(server)
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
    let program = compile(directory.path(), "upper_case", &[]);
    let output = Command::new(program).args(["/nowhere/cores", "4000"]).output().unwrap();
    let errors = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(1), "{errors}");
    assert!(errors.contains("/nowhere/cores") && errors.contains("No such file"), "{errors}");
}
