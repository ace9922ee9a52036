//! `coreward orchestrate` with a server that uses the runtime library, on loopback: requests, workers that die and
//! stop, a restart.

use std::cell::Cell;
use std::net::{SocketAddr, UdpSocket};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use coreward_load::key_value::{DATAGRAM_BYTES_MAX, Request, key_name, parse_response};
use coreward_metrics::table::Component;
use coreward_model::rss::{seeded_rng, uniform_below};
use coreward_testbed::TIMEOUT;
use coreward_testbed::fleet::{coreward_command, lab_command};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use rand_xoshiro::Xoshiro256PlusPlus;
use serde_json::Value;

use crate::support::{effective_capabilities, eventually, retained_capabilities};

/// Timeout of a response, which takes microseconds; the request of a worker that has just died gets none.
const RESPONSE_TIMEOUT: Duration = Duration::from_millis(500);

/// Child process that is killed when dropped.
pub struct RunningProcess(Child);

impl RunningProcess {
    pub fn start(command: &Path, arguments: &[&str]) -> anyhow::Result<Self> {
        Self::spawn(Command::new(command).args(arguments))
    }

    pub fn spawn(command: &mut Command) -> anyhow::Result<Self> {
        Ok(Self(command.stdout(Stdio::piped()).spawn()?))
    }

    fn signal(&self, signal: Signal) {
        kill(Pid::from_raw(self.0.id() as i32), signal).unwrap();
    }

    /// Ends the process by SIGTERM and returns the report that it prints.
    pub fn end(mut self) -> anyhow::Result<Value> {
        self.signal(Signal::SIGTERM);
        let started = Instant::now();
        while self.0.try_wait()?.is_none() {
            anyhow::ensure!(started.elapsed() < *TIMEOUT, "the process does not end");
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

struct TestEnv {
    directory: tempfile::TempDir,
    config: PathBuf,
    address: SocketAddr,
}

impl TestEnv {
    /// Writes a configuration with four cores, in which GET has priority over all other requests.
    fn new() -> anyhow::Result<Self> {
        let directory = tempfile::tempdir()?;
        let address = UdpSocket::bind("127.0.0.1:0")?.local_addr()?;
        let memory = directory.path().join("cores");
        let config = directory.path().join("orchestrate.toml");
        let services = format!(
            "[[service]]\nlisten = \"{address}\"\nmatch = {{ value = 1 }}\n\
             [[service]]\nlisten = \"{address}\"\npriority = 1\n"
        );
        let text = format!("memory = \"{}\"\ncores = 4\nstall_after = \"100ms\"\n{services}", memory.display());
        std::fs::write(&config, text)?;
        Ok(Self { directory, config, address })
    }

    fn memory(&self) -> String {
        self.directory.path().join("cores").display().to_string()
    }

    /// Starts the orchestrator. Its port is open as soon as the file of its memory exists.
    fn orchestrator(&self) -> anyhow::Result<RunningProcess> {
        let _ = std::fs::remove_file(self.memory());
        let arguments = ["orchestrate", "--config", &self.config.display().to_string()];
        let running = RunningProcess::start(&coreward_command()?, &arguments)?;
        eventually(*TIMEOUT, "the memory exists", || Path::new(&self.memory()).exists());
        Ok(running)
    }

    fn server(&self, cores: &str) -> anyhow::Result<RunningProcess> {
        self.server_with(cores, &[])
    }

    fn server_with(&self, cores: &str, more: &[&str]) -> anyhow::Result<RunningProcess> {
        let arguments = ["testbed", "orchestrated-server", "--memory", &self.memory(), "--cores", cores];
        RunningProcess::start(&lab_command()?, &[&arguments, more].concat())
    }
}

/// Client that sends requests without waiting for the responses.
pub struct Client {
    pub socket: UdpSocket,
    next_id: u32,
    pub sent: u64,
    received: Cell<u64>,
}

impl Client {
    fn new(setup: &TestEnv) -> anyhow::Result<Self> {
        Self::connect(setup.address)
    }

    pub fn connect(server: SocketAddr) -> anyhow::Result<Self> {
        let socket = UdpSocket::bind("0.0.0.0:0")?;
        socket.connect(server)?;
        socket.set_read_timeout(Some(RESPONSE_TIMEOUT))?;
        Ok(Self { socket, next_id: 0, sent: 0, received: Cell::new(0) })
    }

    /// Sends a request of a type that needs `service_us` of core time. Returns its id.
    pub fn send(&mut self, request_type: &str, service_us: u32) -> anyhow::Result<u32> {
        self.send_value(request_type, service_us, b"")
    }

    pub fn send_value(&mut self, request_type: &str, service_us: u32, value: &[u8]) -> anyhow::Result<u32> {
        let (id, key) = (self.next_id, key_name(7));
        let request_type = request_type.parse()?;
        let request = Request { request_type, id, service_ns: service_us * 1000, key: key.as_bytes(), value };
        let mut datagram = Vec::new();
        request.write(&mut datagram);
        // Sending fails when no orchestrator has the port.
        if self.socket.send(&datagram).is_ok() {
            self.sent += 1;
        }
        self.next_id += 1;
        Ok(id)
    }

    /// Receives the next response. Returns its request's id, the core that answered, and the number of pairs.
    pub fn receive(&self) -> Option<(u32, u16, usize)> {
        let mut buffer = [0; DATAGRAM_BYTES_MAX];
        let length = self.socket.recv(&mut buffer).ok()?;
        self.received.set(self.received.get() + 1);
        let (header, pairs) = parse_response(&buffer[..length]).expect("a response");
        Some((header.id.get(), header.worker.get(), pairs.len()))
    }

    /// Sends requests in bursts of 8, until each of these cores has answered.
    fn request_until_answered_by(&mut self, cores: &[u16]) {
        self.send_bursts_until_answered_by(8, cores);
    }

    fn send_bursts_until_answered_by(&mut self, burst: usize, cores: &[u16]) {
        let mut answered = [false; 4];
        eventually(*TIMEOUT, "each core answers", || {
            (0..burst).for_each(|_| _ = self.send("GET", 50).unwrap());
            while let Some((_, core, pairs)) = self.receive() {
                assert_eq!(pairs, 1);
                answered[usize::from(core)] = true;
                if answered.iter().filter(|answered| **answered).count() == cores.len() {
                    break;
                }
            }
            cores.iter().all(|core| answered[usize::from(*core)])
        });
    }

    /// Sends a burst and returns the number of responses received, including those to earlier requests.
    fn count_responses(&mut self, burst: usize) -> usize {
        (0..burst).for_each(|_| _ = self.send("GET", 50).unwrap());
        (0..burst).map_while(|_| self.receive()).count()
    }

    pub fn discard_responses(&self) {
        while self.receive().is_some() {}
    }
}

pub fn sum(report: &Value, count: &str) -> u64 {
    report["services"].as_array().unwrap().iter().map(|service| service[count].as_u64().unwrap()).sum()
}

/// Asserts that the report counts every received request under exactly one outcome.
pub fn check_accounts(report: &Value, received: u64) {
    let fates = ["dropped", "rejected", "completed", "lost", "waiting", "outstanding"].map(|count| sum(report, count));
    assert_eq!((sum(report, "received"), fates.iter().sum::<u64>()), (received, received), "{report}");
    for count in ["unclassified", "bad_messages", "bad_feedback", "damaged"] {
        assert_eq!(report[count], 0, "{count}: {report}");
    }
}

#[test]
fn requests_of_two_priorities_are_answered() -> anyhow::Result<()> {
    let setup = TestEnv::new()?;
    let orchestrator = setup.orchestrator()?;
    let server = setup.server("0,1,2,3")?;
    let mut client = Client::new(&setup)?;
    client.request_until_answered_by(&[0, 1, 2, 3]);
    client.discard_responses();
    let asked = client.sent;
    for _ in 0..500 {
        let ids = [client.send("GET", 0)?, client.send("SCAN18", 20)?];
        let mut answers: Vec<_> = (0..2).filter_map(|_| client.receive()).collect();
        answers.sort_unstable();
        let pairs: Vec<_> = answers.iter().map(|(id, _, pairs)| (*id, *pairs)).collect();
        assert_eq!(pairs, [(ids[0], 1), (ids[1], 18)]);
    }
    let served: u64 = server.end()?.as_array().unwrap().iter().map(|count| count.as_u64().unwrap()).sum();
    assert_eq!(served, client.sent);
    let report = orchestrator.end()?;
    check_accounts(&report, client.sent);
    assert_eq!((sum(&report, "completed"), sum(&report, "lost")), (client.sent, 0));
    assert_eq!(report["services"][1]["completed"], 500);
    assert_eq!((asked + 1000, &report["workers"]), (client.sent, &4.into()));
    Ok(())
}

/// The orchestrator drops its capabilities even if root has started it.
#[test]
fn orchestrator_drops_capabilities() -> anyhow::Result<()> {
    let setup = TestEnv::new()?;
    let orchestrator = setup.orchestrator()?;
    assert_eq!(effective_capabilities(orchestrator.0.id()) & !retained_capabilities(Component::Orchestrate), 0);
    orchestrator.end().map(drop)
}

#[test]
fn dead_and_stopped_workers_get_no_requests() -> anyhow::Result<()> {
    let setup = TestEnv::new()?;
    let orchestrator = setup.orchestrator()?;
    let (first, second) = (setup.server("0,1")?, setup.server("2,3")?);
    let mut client = Client::new(&setup)?;
    client.request_until_answered_by(&[0, 1, 2, 3]);
    client.discard_responses();
    second.signal(Signal::SIGSTOP);
    eventually(*TIMEOUT, "stopped workers have requests", || client.count_responses(8) < 8);
    second.signal(Signal::SIGKILL);
    drop(second);
    eventually(*TIMEOUT, "the other process answers all", || client.count_responses(8) == 8);
    let second = setup.server("2,3")?;
    client.request_until_answered_by(&[0, 1, 2, 3]);
    client.discard_responses();
    first.signal(Signal::SIGSTOP);
    eventually(*TIMEOUT, "stopped workers have requests", || client.count_responses(8) < 8);
    eventually(*TIMEOUT, "the other process answers all", || client.count_responses(8) == 8);
    // The worker answers its requests when it continues.
    first.signal(Signal::SIGCONT);
    client.request_until_answered_by(&[0, 1, 2, 3]);
    client.discard_responses();
    first.end()?;
    second.end()?;
    let report = orchestrator.end()?;
    check_accounts(&report, client.sent);
    assert!((1..=8).contains(&sum(&report, "lost")), "two cores with a depth of 4 had died: {report}");
    assert_eq!(report["workers"], 6);
    Ok(())
}

#[test]
fn workers_connect_to_the_next_orchestrator() -> anyhow::Result<()> {
    let setup = TestEnv::new()?;
    let mut client = Client::new(&setup)?;
    let server = setup.server("0,1,2,3")?;
    for signal in [Signal::SIGTERM, Signal::SIGKILL] {
        let orchestrator = setup.orchestrator()?;
        client.request_until_answered_by(&[0, 1, 2, 3]);
        client.discard_responses();
        orchestrator.signal(signal);
        drop(orchestrator);
    }
    server.end()?;
    Ok(())
}

#[test]
fn burst_opens_a_core_of_the_other_service() -> anyhow::Result<()> {
    let setup = TestEnv::new()?;
    let orchestrator = setup.orchestrator()?;
    // At first GET has cores 0 and 1. All other requests have cores 2 and 3 and keep one of them.
    let options = ["--assignment", "dedicated", "--reserved", "1", "--epoch-us", "200"];
    let server = setup.server_with("0,1,2,3", &options)?;
    let mut client = Client::new(&setup)?;
    client.send_bursts_until_answered_by(100, &[0, 1, 2]);
    client.discard_responses();
    client.send("SCAN18", 0)?;
    assert_eq!(client.receive().map(|(_, _, pairs)| pairs), Some(18), "some core runs the other service");
    server.end()?;
    let report = orchestrator.end()?;
    check_accounts(&report, client.sent);
    assert!(report["hints"].as_u64().unwrap() >= 1, "{report}");
    Ok(())
}

/// Kills, terminates, stops and resumes server processes, each of which runs a group of cores.
struct FaultInjector<'s> {
    env: &'s TestEnv,
    servers: Vec<Option<RunningProcess>>,
    generator: Xoshiro256PlusPlus,
}

impl FaultInjector<'_> {
    const CORES: [&'static str; 3] = ["0", "1,2", "3"];
    const ASSIGNMENTS: [&'static str; 3] = ["share", "dedicated", "hybrid"];

    fn draw(&mut self, below: u32) -> usize {
        uniform_below(&mut self.generator, below) as usize
    }

    fn start(&mut self, group: usize) -> anyhow::Result<()> {
        let assignment = Self::ASSIGNMENTS[self.draw(3)];
        let options = ["--assignment", assignment, "--epoch-us", "300"];
        self.servers[group] = Some(self.env.server_with(Self::CORES[group], &options)?);
        Ok(())
    }

    fn step(&mut self) -> anyhow::Result<()> {
        let group = self.draw(3);
        match self.draw(4) {
            0 => {
                self.servers[group] = None;
                self.start(group)?;
            }
            1 => {
                let server = self.servers[group].take().unwrap();
                server.signal(Signal::SIGCONT);
                server.end()?;
                self.start(group)?;
            }
            2 => self.servers[group].as_ref().unwrap().signal(Signal::SIGSTOP),
            _ => self.continue_all(),
        }
        Ok(())
    }

    fn continue_all(&self) {
        self.servers.iter().flatten().for_each(|server| server.signal(Signal::SIGCONT));
    }
}

#[test]
fn every_request_has_one_fate_while_workers_die() -> anyhow::Result<()> {
    let setup = TestEnv::new()?;
    let orchestrator = setup.orchestrator()?;
    let (servers, generator) = ([None, None, None].into(), seeded_rng(1, 0));
    let mut fault_injector = FaultInjector { env: &setup, servers, generator };
    (0..3).try_for_each(|group| fault_injector.start(group))?;
    let mut client = Client::new(&setup)?;
    // Some assignments run GET on no core.
    eventually(*TIMEOUT, "a core answers", || client.send("SCAN18", 0).is_ok() && client.receive().is_some());
    client.socket.set_read_timeout(Some(Duration::from_millis(1)))?;
    for _ in 0..24 {
        fault_injector.step()?;
        for number in 0..20 {
            (0..10).try_for_each(|_| client.send(["GET", "SCAN18"][number % 2], 50).map(drop))?;
            client.discard_responses();
        }
    }
    fault_injector.continue_all();
    client.socket.set_read_timeout(Some(RESPONSE_TIMEOUT))?;
    client.discard_responses();
    fault_injector.servers.drain(..).flatten().try_for_each(|server| server.end().map(drop))?;
    client.discard_responses();
    let report = orchestrator.end()?;
    // A full socket buffer drops requests before they are received.
    let received = sum(&report, "received");
    assert!(received <= client.sent && sum(&report, "lost") > 0, "{report}");
    check_accounts(&report, received);
    assert_eq!(sum(&report, "completed"), client.received.get(), "each completed request was answered: {report}");
    Ok(())
}
