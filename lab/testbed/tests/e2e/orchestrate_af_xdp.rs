//! `coreward orchestrate` with requests through AF_XDP, at a server of the testbed (veth, one socket per receive
//! queue).

use std::fs::File;
use std::net::{SocketAddr, UdpSocket};
use std::path::{Path, PathBuf};
use std::process::Command;

use coreward_load::key_value::VALUE_BYTES_MAX;
use coreward_testbed::addresses::{DEVICE, server_address};
use coreward_testbed::fleet::{coreward_command, lab_command};
use coreward_testbed::{Namespace, TIMEOUT, Testbed, TestbedOptions, missing_testbed_rights, skip_if};
use serde_json::Value;

use crate::orchestrate::{Client, RunningProcess, check_accounts, sum};
use crate::support::{eventually, metrics_page, run, series};

const REQUEST_COUNT: u64 = 400;
const MODES: [&str; 4] = ["socket", "socket-fallback", "af-xdp", "af-xdp-zero-copy"];

struct TestEnv {
    testbed: Testbed,
    directory: tempfile::TempDir,
}

impl TestEnv {
    fn new(instance: &str) -> anyhow::Result<Self> {
        let options = TestbedOptions { instance: instance.to_owned(), servers: 1, cores: 4, ..Default::default() };
        Ok(Self { testbed: Testbed::create(options)?, directory: tempfile::tempdir()? })
    }

    fn host(&self) -> &Namespace {
        self.testbed.server(1).unwrap()
    }

    fn start(&self, port: u16) -> anyhow::Result<Service> {
        let path = |kind: &str| self.directory.path().join(format!("{port}.{kind}"));
        let (memory, config, log) = (path("memory"), path("toml"), path("log"));
        let (listen, metrics) = (SocketAddr::from((server_address(1), port)), format!("127.0.0.1:{}", port + 1000));
        let text = format!(
            "memory = {memory:?}\nintake = \"af-xdp\"\ninterface = \"{DEVICE}\"\ncores = 2\npayload = 4096\n\
             metrics = \"{metrics}\"\n\
             [[service]]\nlisten = \"{listen}\"\nmatch = {{ value = 1 }}\n\
             [[service]]\nlisten = \"{listen}\"\npriority = 1\n"
        );
        std::fs::write(&config, text)?;
        let mut command = Command::new(coreward_command()?);
        command.args(["orchestrate", "--config", &config.display().to_string()]).stderr(File::create(&log)?);
        let orchestrator = self.host().within(|| RunningProcess::spawn(&mut command))?;
        eventually(*TIMEOUT, "the memory exists", || memory.exists());
        let server = ["testbed", "orchestrated-server", "--memory", &memory.display().to_string(), "--cores", "0,1"];
        let server = RunningProcess::start(&lab_command()?, &server)?;
        let client = self.testbed.client().within(|| Client::connect(listen))?;
        Ok(Service { orchestrator, server, client, metrics, log })
    }

    fn metrics(&self, service: &Service) -> String {
        metrics_page(&self.testbed, self.host(), &service.metrics).unwrap()
    }

    /// Returns the modes in which requests enter the orchestrator, according to its metrics.
    fn mode(&self, service: &Service) -> Vec<&'static str> {
        let page = self.metrics(service);
        let series_of = |mode: &str| series(&page, &format!("coreward_orchestrate_intake{{mode=\"{mode}\"}}"));
        MODES.into_iter().filter(|mode| series_of(mode) == Some(1.0)).collect()
    }
}

struct Service {
    orchestrator: RunningProcess,
    server: RunningProcess,
    client: Client,
    metrics: String,
    log: PathBuf,
}

impl Service {
    /// Waits until the workers answer, then sends requests one by one, each after the response to the last.
    fn send_requests(&mut self) {
        eventually(*TIMEOUT, "a worker answers", || {
            self.client.send("GET", 0).is_ok() && self.client.receive().is_some()
        });
        self.client.discard_responses();
        for number in 0..REQUEST_COUNT {
            let (request_type, pairs) = if number % 2 == 0 { ("GET", 1) } else { ("SCAN18", 18) };
            let id = self.client.send(request_type, 0).unwrap();
            assert_eq!(self.client.receive().map(|(answered, _, found)| (answered, found)), Some((id, pairs)));
        }
    }

    fn end(self) -> anyhow::Result<Value> {
        self.server.end()?;
        let report = self.orchestrator.end()?;
        check_accounts(&report, self.client.sent);
        Ok(report)
    }
}

fn log_has(log: &Path, words: &[&str]) -> bool {
    let text = std::fs::read_to_string(log).unwrap();
    text.lines().any(|line| words.iter().all(|word| line.contains(word)))
}

/// Asserts that a datagram to a port without a service still reaches the server's socket.
fn other_traffic_passes(env: &TestEnv) -> anyhow::Result<()> {
    let address = SocketAddr::from((server_address(1), 4999));
    let receiver = env.host().within(|| Ok(UdpSocket::bind(address)?))?;
    receiver.set_read_timeout(Some(*TIMEOUT))?;
    let sender = env.testbed.client().within(|| Ok(UdpSocket::bind("0.0.0.0:0")?))?;
    sender.send_to(b"other traffic", address)?;
    let mut buffer = [0; 100];
    let length = receiver.recv(&mut buffer)?;
    assert_eq!(&buffer[..length], b"other traffic");
    Ok(())
}

#[test]
fn requests_enter_by_af_xdp_and_other_traffic_passes() -> anyhow::Result<()> {
    skip_if!(missing_testbed_rights(), Ok(()));
    let env = TestEnv::new("taxdp")?;
    let mut service = env.start(4000)?;
    service.send_requests();
    let by_af_xdp = service.client.sent;
    assert_eq!(env.mode(&service), ["af-xdp"]);
    // Fragments and packets with IP options go to the kernel, and so to the UDP socket.
    set_ip_options(&service.client.socket)?;
    service.client.send("GET", 0)?;
    assert!(service.client.receive().is_some());
    run(&env.testbed, env.testbed.client(), &format!("ip link set {DEVICE} mtu 1000"));
    service.client.send_value("PUT", 0, &[7; VALUE_BYTES_MAX])?;
    assert!(service.client.receive().is_some());
    other_traffic_passes(&env)?;
    assert!(log_has(&service.log, &["intake-opened", "af-xdp"]));
    let report = service.end()?;
    let intake = &report["intake"];
    assert_eq!((&intake["mode"], &intake["fallback"]), (&"af-xdp".into(), &Value::Null), "{report}");
    assert_eq!((&intake["redirected"], &intake["received"]), (&by_af_xdp.into(), &by_af_xdp.into()), "{report}");
    assert_eq!(sum(&report, "completed"), by_af_xdp + 2, "{report}");
    let unexpected = |name: &&String| name.starts_with("passed_") || name.starts_with("dropped_");
    for name in intake.as_object().unwrap().keys().filter(unexpected) {
        assert_eq!(intake[name], 0, "{name}: {report}");
    }
    Ok(())
}

/// Sets an IP option without effect for all datagrams of the socket.
fn set_ip_options(socket: &UdpSocket) -> std::io::Result<()> {
    use std::os::fd::AsRawFd as _;
    const NO_OPERATION: [u8; 4] = [1; 4];
    let (options, length) = (NO_OPERATION.as_ptr().cast(), NO_OPERATION.len() as libc::socklen_t);
    // SAFETY: the kernel reads `length` bytes from the array.
    let result = unsafe { libc::setsockopt(socket.as_raw_fd(), libc::IPPROTO_IP, libc::IP_OPTIONS, options, length) };
    if result < 0 { Err(std::io::Error::last_os_error()) } else { Ok(()) }
}

#[test]
fn fallback_to_the_socket_is_announced() -> anyhow::Result<()> {
    skip_if!(missing_testbed_rights(), Ok(()));
    let env = TestEnv::new("tfallback")?;
    let mut first = env.start(4000)?;
    // An interface can have only one XDP program.
    let mut second = env.start(4100)?;
    assert_eq!((env.mode(&first), env.mode(&second)), (vec!["af-xdp"], vec!["socket-fallback"]));
    assert!(log_has(&second.log, &["WARN", "intake-fallback", "expected no other one there"]));
    first.send_requests();
    second.send_requests();
    let report = second.end()?;
    let intake = &report["intake"];
    assert_eq!((&intake["mode"], &intake["received"]), (&"socket-fallback".into(), &Value::Null), "{report}");
    assert!(intake["fallback"].as_str().unwrap().contains("expected no other one there"), "{report}");
    // Without the device no request can enter by AF_XDP.
    let sent = first.client.sent;
    let mut ip = Command::new("ip");
    ip.args(["link", "delete", DEVICE]);
    env.testbed.run(env.host(), ip)?;
    eventually(*TIMEOUT, "the loss of the device is noticed", || env.mode(&first) == ["socket-fallback"]);
    assert!(log_has(&first.log, &["WARN", "intake-fallback", "the device is gone"]));
    let report = first.end()?;
    assert_eq!(report["intake"]["received"], sent, "{report}");
    Ok(())
}
