//! Test of `coreward orchestrate` with requests through AF_XDP, at a server of the testbed (veth, one socket per
//! receive queue).

use std::fs::File;
use std::net::{SocketAddr, UdpSocket};
use std::path::{Path, PathBuf};
use std::process::Command;

use coreward_load::key_value::MAX_VALUE_BYTES;
use coreward_testbed::addresses::{HOST_DEVICE, server_address};
use coreward_testbed::fleet::{coreward_binary_path, lab_binary_path};
use coreward_testbed::{
    DEFAULT_WAIT_TIMEOUT, NetworkNamespace, Testbed, TestbedOptions, find_missing_testbed_rights, skip_if,
};
use serde_json::Value;

use crate::orchestrate::{RequestClient, RunningProcess, assert_every_request_is_counted_once, sum_over_services};
use crate::support::{assert_eventually, fetch_metrics_page, find_metric_series_value, run_command_line};

const REQUEST_COUNT: u64 = 400;
const REQUEST_INTAKE_MODES: [&str; 4] = ["socket", "socket-fallback", "af-xdp", "af-xdp-zero-copy"];

struct AfXdpTestEnv {
    testbed: Testbed,
    directory: tempfile::TempDir,
}

impl AfXdpTestEnv {
    fn new(instance: &str) -> anyhow::Result<Self> {
        let options =
            TestbedOptions { instance_name: instance.to_owned(), server_count: 1, core_count: 4, ..Default::default() };
        Ok(Self { testbed: Testbed::create(options)?, directory: tempfile::tempdir()? })
    }

    fn server_host(&self) -> &NetworkNamespace {
        self.testbed.server(1).unwrap()
    }

    fn start_service(&self, port: u16) -> anyhow::Result<OrchestratedService> {
        let path_with_extension = |kind: &str| self.directory.path().join(format!("{port}.{kind}"));
        let (memory_path, config_path, log) =
            (path_with_extension("memory"), path_with_extension("toml"), path_with_extension("log"));
        let (listen, metrics) = (SocketAddr::from((server_address(1), port)), format!("127.0.0.1:{}", port + 1000));
        let config_text = format!(
            "memory = {memory_path:?}\nintake = \"af-xdp\"\ninterface = \"{HOST_DEVICE}\"\ncores = 2\npayload = 4096\n\
             metrics = \"{metrics}\"\n\
             [[service]]\nlisten = \"{listen}\"\nmatch = {{ value = 1 }}\n\
             [[service]]\nlisten = \"{listen}\"\npriority = 1\n"
        );
        std::fs::write(&config_path, config_text)?;
        let mut command = Command::new(coreward_binary_path()?);
        command.args(["orchestrate", "--config", &config_path.display().to_string()]).stderr(File::create(&log)?);
        let orchestrator = self.server_host().run_within(|| RunningProcess::spawn(&mut command))?;
        assert_eventually(*DEFAULT_WAIT_TIMEOUT, "the memory exists", || memory_path.exists());
        let server_arguments =
            ["testbed", "orchestrated-server", "--memory", &memory_path.display().to_string(), "--cores", "0,1"];
        let server = RunningProcess::start(&lab_binary_path()?, &server_arguments)?;
        let client = self.testbed.client().run_within(|| RequestClient::connect(listen))?;
        Ok(OrchestratedService {
            orchestrator,
            server_process: server,
            client,
            metrics_address: metrics,
            log_path: log,
        })
    }

    fn fetch_metrics_page(&self, service: &OrchestratedService) -> String {
        fetch_metrics_page(&self.testbed, self.server_host(), &service.metrics_address).unwrap()
    }

    /// Returns the modes in which the orchestrator receives requests (see [`REQUEST_INTAKE_MODES`]), as its metrics
    /// show them.
    fn read_request_intake_modes(&self, service: &OrchestratedService) -> Vec<&'static str> {
        let metrics_text = self.fetch_metrics_page(service);
        let mode_value = |mode: &str| {
            find_metric_series_value(&metrics_text, &format!("coreward_orchestrate_intake{{mode=\"{mode}\"}}"))
        };
        REQUEST_INTAKE_MODES.into_iter().filter(|mode| mode_value(mode) == Some(1.0)).collect()
    }
}

struct OrchestratedService {
    orchestrator: RunningProcess,
    server_process: RunningProcess,
    client: RequestClient,
    metrics_address: String,
    log_path: PathBuf,
}

impl OrchestratedService {
    /// Waits until the workers answer. Then sends requests one by one, each after the response to the previous one.
    fn send_requests_one_by_one(&mut self) {
        assert_eventually(*DEFAULT_WAIT_TIMEOUT, "a worker answers", || {
            self.client.send_request("GET", 0).is_ok() && self.client.receive_response().is_some()
        });
        self.client.discard_responses();
        for number in 0..REQUEST_COUNT {
            let (request_type, expected_pair_count) = if number % 2 == 0 { ("GET", 1) } else { ("SCAN18", 18) };
            let id = self.client.send_request(request_type, 0).unwrap();
            assert_eq!(
                self.client.receive_response().map(|(response_id, _, pair_count)| (response_id, pair_count)),
                Some((id, expected_pair_count))
            );
        }
    }

    fn stop_and_report(self) -> anyhow::Result<Value> {
        self.server_process.terminate_and_report()?;
        let report = self.orchestrator.terminate_and_report()?;
        assert_every_request_is_counted_once(&report, self.client.sent_request_count);
        Ok(report)
    }
}

fn log_contains_all(log: &Path, log_words: &[&str]) -> bool {
    let text = std::fs::read_to_string(log).unwrap();
    text.lines().any(|line| log_words.iter().all(|log_word| line.contains(log_word)))
}

/// Asserts that a datagram to a port without a service still reaches the server's socket.
fn assert_other_traffic_passes(env: &AfXdpTestEnv) -> anyhow::Result<()> {
    let receiver_address = SocketAddr::from((server_address(1), 4999));
    let receiver = env.server_host().run_within(|| Ok(UdpSocket::bind(receiver_address)?))?;
    receiver.set_read_timeout(Some(*DEFAULT_WAIT_TIMEOUT))?;
    let sender = env.testbed.client().run_within(|| Ok(UdpSocket::bind("0.0.0.0:0")?))?;
    sender.send_to(b"other traffic", receiver_address)?;
    let mut buffer = [0; 100];
    let length = receiver.recv(&mut buffer)?;
    assert_eq!(&buffer[..length], b"other traffic");
    Ok(())
}

#[test]
fn requests_enter_by_af_xdp_and_other_traffic_passes() -> anyhow::Result<()> {
    skip_if!(find_missing_testbed_rights(), Ok(()));
    let env = AfXdpTestEnv::new("taxdp")?;
    let mut service = env.start_service(4000)?;
    service.send_requests_one_by_one();
    let af_xdp_request_count = service.client.sent_request_count;
    assert_eq!(env.read_request_intake_modes(&service), ["af-xdp"]);
    // Fragments and packets with IP options go to the kernel, and so to the UDP socket.
    set_ip_options(&service.client.socket)?;
    service.client.send_request("GET", 0)?;
    assert!(service.client.receive_response().is_some());
    run_command_line(&env.testbed, env.testbed.client(), &format!("ip link set {HOST_DEVICE} mtu 1000"));
    service.client.send_request_with_value("PUT", 0, &[7; MAX_VALUE_BYTES])?;
    assert!(service.client.receive_response().is_some());
    assert_other_traffic_passes(&env)?;
    assert!(log_contains_all(&service.log_path, &["intake-opened", "af-xdp"]));
    let report = service.stop_and_report()?;
    let intake_counters = &report["intake"];
    assert_eq!((&intake_counters["mode"], &intake_counters["fallback"]), (&"af-xdp".into(), &Value::Null), "{report}");
    assert_eq!(
        (&intake_counters["redirected"], &intake_counters["received"]),
        (&af_xdp_request_count.into(), &af_xdp_request_count.into()),
        "{report}"
    );
    assert_eq!(sum_over_services(&report, "completed"), af_xdp_request_count + 2, "{report}");
    let is_unexpected = |name: &&String| name.starts_with("passed_") || name.starts_with("dropped_");
    for name in intake_counters.as_object().unwrap().keys().filter(is_unexpected) {
        assert_eq!(intake_counters[name], 0, "{name}: {report}");
    }
    Ok(())
}

/// Makes the socket add IP options without effect (no operation) to each datagram that it sends.
fn set_ip_options(socket: &UdpSocket) -> std::io::Result<()> {
    use std::os::fd::AsRawFd as _;
    const NO_OPERATION_OPTIONS: [u8; 4] = [1; 4];
    let (options, length) = (NO_OPERATION_OPTIONS.as_ptr().cast(), NO_OPERATION_OPTIONS.len() as libc::socklen_t);
    // SAFETY: the kernel reads `length` bytes from the array.
    let result = unsafe { libc::setsockopt(socket.as_raw_fd(), libc::IPPROTO_IP, libc::IP_OPTIONS, options, length) };
    if result < 0 { Err(std::io::Error::last_os_error()) } else { Ok(()) }
}

#[test]
fn fallback_from_af_xdp_to_socket_is_reported() -> anyhow::Result<()> {
    skip_if!(find_missing_testbed_rights(), Ok(()));
    let env = AfXdpTestEnv::new("tfallback")?;
    let mut first_service = env.start_service(4000)?;
    // The second service falls back to the socket, because an interface can have only one XDP program.
    let mut second_service = env.start_service(4100)?;
    assert_eq!(
        (env.read_request_intake_modes(&first_service), env.read_request_intake_modes(&second_service)),
        (vec!["af-xdp"], vec!["socket-fallback"])
    );
    assert!(log_contains_all(&second_service.log_path, &["WARN", "intake-fallback", "expected no other one there"]));
    first_service.send_requests_one_by_one();
    second_service.send_requests_one_by_one();
    let report = second_service.stop_and_report()?;
    let intake_counters = &report["intake"];
    assert_eq!(
        (&intake_counters["mode"], &intake_counters["received"]),
        (&"socket-fallback".into(), &Value::Null),
        "{report}"
    );
    assert!(intake_counters["fallback"].as_str().unwrap().contains("expected no other one there"), "{report}");
    // Without the device no request can enter by AF_XDP.
    let sent_requests = first_service.client.sent_request_count;
    let mut ip = Command::new("ip");
    ip.args(["link", "delete", HOST_DEVICE]);
    env.testbed.run_command(env.server_host(), ip)?;
    assert_eventually(*DEFAULT_WAIT_TIMEOUT, "the loss of the device is noticed", || {
        env.read_request_intake_modes(&first_service) == ["socket-fallback"]
    });
    assert!(log_contains_all(&first_service.log_path, &["WARN", "intake-fallback", "the device is gone"]));
    let report = first_service.stop_and_report()?;
    assert_eq!(report["intake"]["received"], sent_requests, "{report}");
    Ok(())
}
