//! Test of `coreward orchestrate` on loopback with a server that uses the runtime library. It covers requests, workers
//! that die and stop, and a restart.

use std::cell::Cell;
use std::net::{SocketAddr, UdpSocket};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use coreward_load::key_value::{KeyValueRequest, MAX_DATAGRAM_BYTES, key_name, parse_response};
use coreward_metrics::metric_declarations::Component;
use coreward_model::rss::{seeded_rng, uniform_below};
use coreward_testbed::DEFAULT_WAIT_TIMEOUT;
use coreward_testbed::fleet::{coreward_binary_path, lab_binary_path};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use rand_xoshiro::Xoshiro256PlusPlus;
use serde_json::Value;

use crate::support::{assert_eventually, read_effective_capabilities, retained_capability_mask};

/// Timeout of a response, which normally takes microseconds. A request whose worker has just died gets no response.
const RESPONSE_TIMEOUT: Duration = Duration::from_millis(500);

pub struct RunningProcess(Child);

impl RunningProcess {
    pub fn start(command: &Path, arguments: &[&str]) -> anyhow::Result<Self> {
        Self::spawn(Command::new(command).args(arguments))
    }

    pub fn spawn(command: &mut Command) -> anyhow::Result<Self> {
        Ok(Self(command.stdout(Stdio::piped()).spawn()?))
    }

    fn send_signal(&self, signal: Signal) {
        kill(Pid::from_raw(self.0.id() as i32), signal).unwrap();
    }

    /// Ends the process by SIGTERM and returns the report that it prints.
    pub fn terminate_and_report(mut self) -> anyhow::Result<Value> {
        self.send_signal(Signal::SIGTERM);
        let termination_start = Instant::now();
        while self.0.try_wait()?.is_none() {
            anyhow::ensure!(termination_start.elapsed() < *DEFAULT_WAIT_TIMEOUT, "the process does not end");
            std::thread::sleep(Duration::from_millis(5));
        }
        Ok(serde_json::from_reader(self.0.stdout.take().unwrap())?)
    }
}

impl Drop for RunningProcess {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

struct OrchestrateTestEnv {
    directory: tempfile::TempDir,
    config_path: PathBuf,
    service_address: SocketAddr,
}

impl OrchestrateTestEnv {
    /// Writes an orchestrator configuration with four cores, in which GET has priority over all other requests.
    fn new() -> anyhow::Result<Self> {
        let directory = tempfile::tempdir()?;
        let address = UdpSocket::bind("127.0.0.1:0")?.local_addr()?;
        let memory_path = directory.path().join("cores");
        let config_path = directory.path().join("orchestrate.toml");
        let service_configs = format!(
            "[[service]]\nlisten = \"{address}\"\nmatch = {{ value = 1 }}\n\
             [[service]]\nlisten = \"{address}\"\npriority = 1\n"
        );
        let config_text =
            format!("memory = \"{}\"\ncores = 4\nstall_after = \"100ms\"\n{service_configs}", memory_path.display());
        std::fs::write(&config_path, config_text)?;
        Ok(Self { directory, config_path, service_address: address })
    }

    fn memory_path_text(&self) -> String {
        self.directory.path().join("cores").display().to_string()
    }

    /// Starts the orchestrator. Its port is open as soon as its memory file exists.
    fn start_orchestrator(&self) -> anyhow::Result<RunningProcess> {
        let _ = std::fs::remove_file(self.memory_path_text());
        let arguments = ["orchestrate", "--config", &self.config_path.display().to_string()];
        let orchestrator = RunningProcess::start(&coreward_binary_path()?, &arguments)?;
        assert_eventually(*DEFAULT_WAIT_TIMEOUT, "the memory exists", || Path::new(&self.memory_path_text()).exists());
        Ok(orchestrator)
    }

    fn start_server(&self, cores: &str) -> anyhow::Result<RunningProcess> {
        self.start_server_with_options(cores, &[])
    }

    fn start_server_with_options(&self, cores: &str, extra_options: &[&str]) -> anyhow::Result<RunningProcess> {
        let server_arguments =
            ["testbed", "orchestrated-server", "--memory", &self.memory_path_text(), "--cores", cores];
        RunningProcess::start(&lab_binary_path()?, &[&server_arguments, extra_options].concat())
    }
}

/// Client that sends requests without waiting for the responses.
pub struct RequestClient {
    pub socket: UdpSocket,
    next_request_id: u32,
    pub sent_request_count: u64,
    received_response_count: Cell<u64>,
}

impl RequestClient {
    fn new(env: &OrchestrateTestEnv) -> anyhow::Result<Self> {
        Self::connect(env.service_address)
    }

    pub fn connect(server: SocketAddr) -> anyhow::Result<Self> {
        let socket = UdpSocket::bind("0.0.0.0:0")?;
        socket.connect(server)?;
        socket.set_read_timeout(Some(RESPONSE_TIMEOUT))?;
        Ok(Self { socket, next_request_id: 0, sent_request_count: 0, received_response_count: Cell::new(0) })
    }

    /// Sends a request of type `request_type` that needs `service_us` of core time. Returns the request's id.
    pub fn send_request(&mut self, request_type: &str, service_us: u32) -> anyhow::Result<u32> {
        self.send_request_with_value(request_type, service_us, b"")
    }

    pub fn send_request_with_value(
        &mut self,
        request_type: &str,
        service_us: u32,
        value: &[u8],
    ) -> anyhow::Result<u32> {
        let (id, key) = (self.next_request_id, key_name(7));
        let request_type = request_type.parse()?;
        let request =
            KeyValueRequest { request_type, request_id: id, service_ns: service_us * 1000, key: key.as_bytes(), value };
        let mut datagram = Vec::new();
        request.write_datagram(&mut datagram);
        // Sending fails when no orchestrator has the port.
        if self.socket.send(&datagram).is_ok() {
            self.sent_request_count += 1;
        }
        self.next_request_id += 1;
        Ok(id)
    }

    /// Receives the next response. Returns its request's id, the core that answered, and the number of key-value pairs.
    pub fn receive_response(&self) -> Option<(u32, u16, usize)> {
        let mut buffer = [0; MAX_DATAGRAM_BYTES];
        let length = self.socket.recv(&mut buffer).ok()?;
        self.received_response_count.set(self.received_response_count.get() + 1);
        let (header, pairs) = parse_response(&buffer[..length]).expect("a response");
        Some((header.id.get(), header.worker_index.get(), pairs.len()))
    }

    /// Sends requests in bursts of 8 until every core in `cores` has answered.
    fn send_requests_until_cores_answer(&mut self, cores: &[u16]) {
        self.send_bursts_until_cores_answer(8, cores);
    }

    fn send_bursts_until_cores_answer(&mut self, burst_size: usize, cores: &[u16]) {
        let mut has_answered = [false; 4];
        assert_eventually(*DEFAULT_WAIT_TIMEOUT, "each core answers", || {
            (0..burst_size).for_each(|_| _ = self.send_request("GET", 50).unwrap());
            while let Some((_, core, pairs)) = self.receive_response() {
                assert_eq!(pairs, 1);
                has_answered[usize::from(core)] = true;
                if has_answered.iter().filter(|is_answered| **is_answered).count() == cores.len() {
                    break;
                }
            }
            cores.iter().all(|core| has_answered[usize::from(*core)])
        });
    }

    /// Sends a burst of requests and returns the number of responses received, including those to earlier requests.
    fn send_burst_and_count_responses(&mut self, burst_size: usize) -> usize {
        (0..burst_size).for_each(|_| _ = self.send_request("GET", 50).unwrap());
        (0..burst_size).map_while(|_| self.receive_response()).count()
    }

    pub fn discard_responses(&self) {
        while self.receive_response().is_some() {}
    }
}

pub fn sum_over_services(report: &Value, counter_name: &str) -> u64 {
    report["services"].as_array().unwrap().iter().map(|service| service[counter_name].as_u64().unwrap()).sum()
}

/// Asserts that the report counts every received request under exactly one outcome.
pub fn assert_every_request_is_counted_once(report: &Value, received_count: u64) {
    let outcome_counts = ["dropped", "rejected", "completed", "lost", "waiting", "outstanding"]
        .map(|counter_name| sum_over_services(report, counter_name));
    assert_eq!(
        (sum_over_services(report, "received"), outcome_counts.iter().sum::<u64>()),
        (received_count, received_count),
        "{report}"
    );
    for counter_name in ["unclassified", "bad_messages", "bad_feedback", "damaged"] {
        assert_eq!(report[counter_name], 0, "{counter_name}: {report}");
    }
}

#[test]
fn requests_of_two_priorities_are_answered() -> anyhow::Result<()> {
    let env = OrchestrateTestEnv::new()?;
    let orchestrator = env.start_orchestrator()?;
    let server = env.start_server("0,1,2,3")?;
    let mut client = RequestClient::new(&env)?;
    client.send_requests_until_cores_answer(&[0, 1, 2, 3]);
    client.discard_responses();
    let sent_request_count_before = client.sent_request_count;
    for _ in 0..500 {
        let request_ids = [client.send_request("GET", 0)?, client.send_request("SCAN18", 20)?];
        let mut responses: Vec<_> = (0..2).filter_map(|_| client.receive_response()).collect();
        responses.sort_unstable();
        let ids_and_pair_counts: Vec<_> = responses.iter().map(|(id, _, pairs)| (*id, *pairs)).collect();
        assert_eq!(ids_and_pair_counts, [(request_ids[0], 1), (request_ids[1], 18)]);
    }
    let served_request_count: u64 =
        server.terminate_and_report()?.as_array().unwrap().iter().map(|count| count.as_u64().unwrap()).sum();
    assert_eq!(served_request_count, client.sent_request_count);
    let report = orchestrator.terminate_and_report()?;
    assert_every_request_is_counted_once(&report, client.sent_request_count);
    assert_eq!(
        (sum_over_services(&report, "completed"), sum_over_services(&report, "lost")),
        (client.sent_request_count, 0)
    );
    assert_eq!(report["services"][1]["completed"], 500);
    assert_eq!((sent_request_count_before + 1000, &report["workers"]), (client.sent_request_count, &4.into()));
    Ok(())
}

/// Tests that the orchestrator drops its capabilities even if root has started it.
#[test]
fn orchestrator_drops_capabilities() -> anyhow::Result<()> {
    let env = OrchestrateTestEnv::new()?;
    let orchestrator = env.start_orchestrator()?;
    assert_eq!(read_effective_capabilities(orchestrator.0.id()) & !retained_capability_mask(Component::Orchestrate), 0);
    orchestrator.terminate_and_report().map(drop)
}

#[test]
fn dead_and_stopped_workers_get_no_requests() -> anyhow::Result<()> {
    let env = OrchestrateTestEnv::new()?;
    let orchestrator = env.start_orchestrator()?;
    let (first_server, stopped_server) = (env.start_server("0,1")?, env.start_server("2,3")?);
    let mut client = RequestClient::new(&env)?;
    client.send_requests_until_cores_answer(&[0, 1, 2, 3]);
    client.discard_responses();
    stopped_server.send_signal(Signal::SIGSTOP);
    assert_eventually(*DEFAULT_WAIT_TIMEOUT, "stopped workers have requests", || {
        client.send_burst_and_count_responses(8) < 8
    });
    stopped_server.send_signal(Signal::SIGKILL);
    drop(stopped_server);
    assert_eventually(*DEFAULT_WAIT_TIMEOUT, "the other process answers all", || {
        client.send_burst_and_count_responses(8) == 8
    });
    let second_server = env.start_server("2,3")?;
    client.send_requests_until_cores_answer(&[0, 1, 2, 3]);
    client.discard_responses();
    first_server.send_signal(Signal::SIGSTOP);
    assert_eventually(*DEFAULT_WAIT_TIMEOUT, "stopped workers have requests", || {
        client.send_burst_and_count_responses(8) < 8
    });
    assert_eventually(*DEFAULT_WAIT_TIMEOUT, "the other process answers all", || {
        client.send_burst_and_count_responses(8) == 8
    });
    // The worker answers its requests when it continues.
    first_server.send_signal(Signal::SIGCONT);
    client.send_requests_until_cores_answer(&[0, 1, 2, 3]);
    client.discard_responses();
    first_server.terminate_and_report()?;
    second_server.terminate_and_report()?;
    let report = orchestrator.terminate_and_report()?;
    assert_every_request_is_counted_once(&report, client.sent_request_count);
    assert!((1..=8).contains(&sum_over_services(&report, "lost")), "two cores with a depth of 4 had died: {report}");
    assert_eq!(report["workers"], 6);
    Ok(())
}

#[test]
fn workers_reconnect_to_a_restarted_orchestrator() -> anyhow::Result<()> {
    let env = OrchestrateTestEnv::new()?;
    let mut client = RequestClient::new(&env)?;
    let server = env.start_server("0,1,2,3")?;
    for signal in [Signal::SIGTERM, Signal::SIGKILL] {
        let orchestrator = env.start_orchestrator()?;
        client.send_requests_until_cores_answer(&[0, 1, 2, 3]);
        client.discard_responses();
        orchestrator.send_signal(signal);
        drop(orchestrator);
    }
    server.terminate_and_report()?;
    Ok(())
}

#[test]
fn burst_takes_over_a_core_of_the_other_service() -> anyhow::Result<()> {
    let env = OrchestrateTestEnv::new()?;
    let orchestrator = env.start_orchestrator()?;
    // At first GET has cores 0 and 1. All other requests have cores 2 and 3 and keep one of them.
    let options = ["--assignment", "dedicated", "--reserved", "1", "--epoch-us", "200"];
    let server = env.start_server_with_options("0,1,2,3", &options)?;
    let mut client = RequestClient::new(&env)?;
    client.send_bursts_until_cores_answer(100, &[0, 1, 2]);
    client.discard_responses();
    client.send_request("SCAN18", 0)?;
    assert_eq!(client.receive_response().map(|(_, _, pairs)| pairs), Some(18), "some core runs the other service");
    server.terminate_and_report()?;
    let report = orchestrator.terminate_and_report()?;
    assert_every_request_is_counted_once(&report, client.sent_request_count);
    assert!(report["hints"].as_u64().unwrap() >= 1, "{report}");
    Ok(())
}

/// Injector that kills, terminates, stops and resumes server processes, each of which runs a group of cores.
struct ServerFaultInjector<'s> {
    env: &'s OrchestrateTestEnv,
    server_processes: Vec<Option<RunningProcess>>,
    rng: Xoshiro256PlusPlus,
}

impl ServerFaultInjector<'_> {
    const CORE_GROUPS: [&'static str; 3] = ["0", "1,2", "3"];
    const CORE_ASSIGNMENT_MODE_NAMES: [&'static str; 3] = ["share", "dedicated", "hybrid"];

    fn random_number_below(&mut self, upper_bound: u32) -> usize {
        uniform_below(&mut self.rng, upper_bound) as usize
    }

    fn start_server_of_group(&mut self, group: usize) -> anyhow::Result<()> {
        let assignment = Self::CORE_ASSIGNMENT_MODE_NAMES[self.random_number_below(3)];
        let options = ["--assignment", assignment, "--epoch-us", "300"];
        self.server_processes[group] = Some(self.env.start_server_with_options(Self::CORE_GROUPS[group], &options)?);
        Ok(())
    }

    fn inject_random_fault(&mut self) -> anyhow::Result<()> {
        let group = self.random_number_below(3);
        match self.random_number_below(4) {
            0 => {
                self.server_processes[group] = None;
                self.start_server_of_group(group)?;
            }
            1 => {
                let server = self.server_processes[group].take().unwrap();
                server.send_signal(Signal::SIGCONT);
                server.terminate_and_report()?;
                self.start_server_of_group(group)?;
            }
            2 => self.server_processes[group].as_ref().unwrap().send_signal(Signal::SIGSTOP),
            _ => self.resume_all_servers(),
        }
        Ok(())
    }

    fn resume_all_servers(&self) {
        self.server_processes.iter().flatten().for_each(|server| server.send_signal(Signal::SIGCONT));
    }
}

#[test]
fn every_request_has_exactly_one_outcome_while_workers_die() -> anyhow::Result<()> {
    let env = OrchestrateTestEnv::new()?;
    let orchestrator = env.start_orchestrator()?;
    let (servers, generator) = ([None, None, None].into(), seeded_rng(1, 0));
    let mut fault_injector = ServerFaultInjector { env: &env, server_processes: servers, rng: generator };
    (0..3).try_for_each(|group| fault_injector.start_server_of_group(group))?;
    let mut client = RequestClient::new(&env)?;
    // The first request is not a GET, because some assignments run GET on no core.
    assert_eventually(*DEFAULT_WAIT_TIMEOUT, "a core answers", || {
        client.send_request("SCAN18", 0).is_ok() && client.receive_response().is_some()
    });
    client.socket.set_read_timeout(Some(Duration::from_millis(1)))?;
    for _ in 0..24 {
        fault_injector.inject_random_fault()?;
        for number in 0..20 {
            (0..10).try_for_each(|_| client.send_request(["GET", "SCAN18"][number % 2], 50).map(drop))?;
            client.discard_responses();
        }
    }
    fault_injector.resume_all_servers();
    client.socket.set_read_timeout(Some(RESPONSE_TIMEOUT))?;
    client.discard_responses();
    fault_injector
        .server_processes
        .drain(..)
        .flatten()
        .try_for_each(|server| server.terminate_and_report().map(drop))?;
    client.discard_responses();
    let report = orchestrator.terminate_and_report()?;
    // A full socket buffer drops requests before they are received.
    let received_request_count = sum_over_services(&report, "received");
    assert!(received_request_count <= client.sent_request_count && sum_over_services(&report, "lost") > 0, "{report}");
    assert_every_request_is_counted_once(&report, received_request_count);
    assert_eq!(
        sum_over_services(&report, "completed"),
        client.received_response_count.get(),
        "each completed request was answered: {report}"
    );
    Ok(())
}
