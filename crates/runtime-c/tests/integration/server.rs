//! Compiles `examples/*.c` and runs them as servers under the orchestrator.

use std::net::{SocketAddr, UdpSocket};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::time::{Duration, Instant};

use coreward_config::TomlSource;
use coreward_orchestrator::config::OrchestratorConfig;
use coreward_orchestrator::daemon::OrchestratorDaemon;
use coreward_orchestrator::intake::RequestIntake;

pub const RESPONSE_TIMEOUT: Duration = Duration::from_secs(20);

pub fn compile_example(directory: &Path, example: &str, compiler_options: &[&str]) -> PathBuf {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let library_directory = std::env::current_exe().unwrap().parent().unwrap().to_owned();
    let program_path = directory.join(example);
    let mut compiler = Command::new("cc");
    compiler.args(["-std=c11", "-Wall", "-Wextra", "-Werror", "-D_GNU_SOURCE", "-pthread", "-o"]).arg(&program_path);
    compiler.arg(root.join("examples").join(format!("{example}.c"))).arg("-I").arg(root.join("include"));
    // DT_RPATH is used because it precedes LD_LIBRARY_PATH, which may lead to an older library.
    let rpath_option = format!("-Wl,--disable-new-dtags,-rpath,{}", library_directory.display());
    compiler.arg("-L").arg(&library_directory).arg(rpath_option).arg("-lcoreward_runtime_c");
    compiler.args(compiler_options);
    let output = compiler.output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    program_path
}

/// Sends a request until it is answered, and returns the response. Responses to earlier requests are ignored.
pub fn send_request_until_answered(client: &UdpSocket, request: &[u8], is_response: impl Fn(&[u8]) -> bool) -> Vec<u8> {
    let start = Instant::now();
    let mut response = [0; 1500];
    client.send(request).unwrap();
    loop {
        match client.recv(&mut response) {
            Ok(length) if is_response(&response[..length]) => return response[..length].to_vec(),
            Ok(_) => (),
            Err(error) => {
                assert!(start.elapsed() < RESPONSE_TIMEOUT, "no answer: {error}");
                client.send(request).unwrap();
            }
        }
    }
}

/// Guard that ends the daemon's thread, even after a failed assertion.
pub struct StopDaemonOnDrop<'a>(pub &'a AtomicBool);

impl Drop for StopDaemonOnDrop<'_> {
    fn drop(&mut self) {
        self.0.store(true, Relaxed);
    }
}

pub fn unused_udp_address() -> SocketAddr {
    UdpSocket::bind("127.0.0.1:0").unwrap().local_addr().unwrap()
}

pub fn start_orchestrator(memory_path: &Path, services_toml: &str) -> OrchestratorDaemon {
    let config_text = format!("memory = {memory_path:?}\ncores = 2\n{services_toml}");
    let config = OrchestratorConfig::parse(&TomlSource::from_text("orchestrate.toml", &config_text)).unwrap();
    OrchestratorDaemon::start(&config, RequestIntake::default()).unwrap()
}

/// Starts an orchestrator with two cores and one service. Also returns the service's address.
pub fn start_one_service_orchestrator(memory_path: &Path) -> (OrchestratorDaemon, SocketAddr) {
    let listen = unused_udp_address();
    (start_orchestrator(memory_path, &format!("[[service]]\nlisten = \"{listen}\"\n")), listen)
}

/// Ends a server with SIGTERM, and returns its output.
pub fn stop_server(server: Child) -> Output {
    assert!(Command::new("kill").arg(server.id().to_string()).status().unwrap().success());
    server.wait_with_output().unwrap()
}

pub fn connected_client_socket(server: SocketAddr) -> UdpSocket {
    let client = UdpSocket::bind("127.0.0.1:0").unwrap();
    client.connect(server).unwrap();
    client.set_read_timeout(Some(Duration::from_millis(500))).unwrap();
    client
}

#[test]
fn server_in_c_answers_until_it_is_stopped() {
    let directory = tempfile::tempdir().unwrap();
    let program = compile_example(directory.path(), "upper_case", &[]);
    let memory_path = directory.path().join("cores");
    let (mut daemon, listen) = start_one_service_orchestrator(&memory_path);
    let mut server = Command::new(program);
    server.arg(&memory_path).arg(listen.port().to_string()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let stop_flag = AtomicBool::new(false);
    let output = std::thread::scope(|scope| {
        let _stop_guard = StopDaemonOnDrop(&stop_flag);
        scope.spawn(|| daemon.run_until_stopped(&stop_flag).unwrap());
        let server = server.spawn().unwrap();
        let client = connected_client_socket(listen);
        send_request_until_answered(&client, b"a small text", |response| response == b"A SMALL TEXT");
        send_request_until_answered(&client, b"*long", |response| response == b"*LONG");
        stop_server(server)
    });
    let (stdout_text, stderr_text) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success(), "{stdout_text}{stderr_text}");
    let served_counts: Vec<u64> =
        stdout_text.lines().map(|line| line.split(' ').nth(2).unwrap().parse().unwrap()).collect();
    assert_eq!(served_counts.len(), 2, "{stdout_text}");
    assert!(served_counts.iter().sum::<u64>() >= 2, "{stdout_text}");
}

#[test]
fn missing_memory_file_is_named_in_the_error() {
    let directory = tempfile::tempdir().unwrap();
    let program = compile_example(directory.path(), "upper_case", &[]);
    let output = Command::new(program).args(["/nowhere/cores", "4000"]).output().unwrap();
    let stderr_text = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(1), "{stderr_text}");
    assert!(stderr_text.contains("/nowhere/cores") && stderr_text.contains("No such file"), "{stderr_text}");
}
