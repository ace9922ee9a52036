//! `coreward dispatch` at a server of several processes, as it is: found, dispatched, killed, stopped, detached under
//! load.

use std::collections::BTreeMap;
use std::net::{Ipv4Addr, SocketAddr, UdpSocket};
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use coreward_dataplane::dispatch::{self, POLL_INTERVAL, Policy, Timeouts, WorkerCounts};
use coreward_dataplane::test_run::{missing_bpf_rights, skip_if};
use coreward_dispatch::{config, service, status};
use nix::sched::{CloneFlags, unshare};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use socket2::{Domain, Protocol, Socket, Type};

const SERVICE: SocketAddr = SocketAddr::new(std::net::IpAddr::V4(Ipv4Addr::LOCALHOST), 5300);
/// Timeouts that exceed the delays of a busy machine, so that no request is given up and no worker is barred.
const NO_STALLS: TimeoutPair = [dispatch::MAX_RESPONSE_TIMEOUT, Duration::from_secs(600)];
const STALLS: TimeoutPair = [Duration::from_secs(2), Duration::from_millis(1500)];
/// Timeout of a response, and time without one after which a worker counts as stalled.
type TimeoutPair = [Duration; 2];
/// Time limit of waits for events that come by themselves.
const TIMEOUT: Duration = Duration::from_secs(60);
const WORKER_VARIABLE: &str = "COREWARD_TEST_WORKER";

/// Type of a request, in its first byte; four bytes with the request id follow.
const ECHO: u8 = 0;
const THREE_DATAGRAMS: u8 = 1;
const NO_RESPONSE: u8 = 2;

/// Not a test but the body of a worker process: the loop of a stock UDP server, without epoll.
#[test]
#[ignore = "started by the other tests"]
fn worker_process() {
    if std::env::var_os(WORKER_VARIABLE).is_none() {
        return;
    }
    let socket = Socket::new(Domain::IPV4, Type::DGRAM, Some(Protocol::UDP)).unwrap();
    socket.set_reuse_port(true).unwrap();
    socket.bind(&SERVICE.into()).unwrap();
    let socket = UdpSocket::from(socket);
    let mut request = [0; 64];
    loop {
        let (length, client) = socket.recv_from(&mut request).unwrap();
        std::thread::sleep(Duration::from_micros(200));
        let datagrams = match request[0] {
            NO_RESPONSE => 0,
            THREE_DATAGRAMS => 3,
            _ => 1,
        };
        (0..datagrams).for_each(|_| drop(socket.send_to(&request[..length], client)));
    }
}

/// Worker process, which is killed on drop.
struct Worker(Child);

impl Worker {
    fn start() -> Self {
        // The test's name is its path without the executable's.
        let (_, module) = module_path!().split_once("::").unwrap();
        let mut command = Command::new(std::env::current_exe().unwrap());
        command.args(["--ignored", "--exact", &format!("{module}::worker_process")]);
        command.env(WORKER_VARIABLE, "1").stdout(Stdio::null());
        Self(command.spawn().unwrap())
    }

    fn signal(&self, signal: Signal) {
        kill(Pid::from_raw(self.0.id() as i32), signal).unwrap();
    }
}

impl Drop for Worker {
    fn drop(&mut self) {
        self.0.kill().unwrap();
        self.0.wait().unwrap();
    }
}

fn in_namespace(test: impl FnOnce() + Send) {
    std::thread::scope(|scope| {
        let thread = scope.spawn(|| {
            unshare(CloneFlags::CLONE_NEWNET).unwrap();
            assert!(Command::new("ip").args(["link", "set", "lo", "up"]).status().unwrap().success());
            test();
        });
        thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic));
    });
}

/// Dispatched service with its workers and clients, all driven from one thread.
struct TestEnv {
    workers: Vec<Worker>,
    service: Option<service::Service>,
    config: config::Service,
    directory: PathBuf,
    clients: Vec<UdpSocket>,
    /// Number of response datagrams by request id.
    responses_by_request: BTreeMap<u32, u32>,
    sent_count: u32,
    last_poll: Instant,
}

impl TestEnv {
    fn start(policy: Policy, workers: usize, timeouts: TimeoutPair) -> Self {
        static NUMBER: AtomicU32 = AtomicU32::new(0);
        let number = NUMBER.fetch_add(1, Ordering::Relaxed);
        let mut config = config::Service::new(SERVICE, policy);
        config.options.request_id = Some(dispatch::RequestIdPosition { offset: 1, response_offset: 1, bytes: 4 });
        let client = |_| {
            let socket = UdpSocket::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
            socket.connect(SERVICE).unwrap();
            socket.set_nonblocking(true).unwrap();
            socket
        };
        let mut env = Self {
            workers: (0..workers).map(|_| Worker::start()).collect(),
            service: None,
            config,
            directory: format!("/sys/fs/bpf/coreward-processes-test-{}-{number}", std::process::id()).into(),
            clients: (0..32).map(client).collect(),
            responses_by_request: BTreeMap::new(),
            sent_count: 0,
            last_poll: Instant::now(),
        };
        env.set_timeouts(timeouts);
        env.attach();
        env.wait_until("all workers are found", |env| env.eligible_count() == workers);
        env
    }

    /// Sets the timeouts, which apply from the next [`attach_dispatch`](Self::attach_dispatch) on.
    fn set_timeouts(&mut self, [response_timeout, stall_after]: TimeoutPair) {
        self.config.timeouts = Timeouts { response_timeout, stall_after };
    }

    fn attach(&mut self) {
        let cgroup = dispatch::cgroup_root().unwrap();
        self.service = Some(service::Service::start(&self.config, &self.directory, &cgroup).unwrap());
    }

    fn detach(&mut self) {
        self.service = None;
        service::detach(&self.pins()).unwrap();
    }

    fn pins(&self) -> PathBuf {
        service::service_pin_directory(&self.directory, SERVICE)
    }

    fn counts(&self) -> Vec<WorkerCounts> {
        dispatch::pinned_ledger(&self.pins()).unwrap().workers()
    }

    fn eligible_count(&self) -> usize {
        self.counts().iter().filter(|worker| worker.is_eligible).count()
    }

    /// Sends one request, reads the responses that have arrived, and polls the service if a poll is due.
    fn send_request(&mut self, kind: u8) {
        let id = self.sent_count;
        self.sent_count += 1;
        let client = &self.clients[id as usize % self.clients.len()];
        // A closed socket is answered by ICMP, which shows at the next call.
        if client.send(&[&[kind][..], &id.to_le_bytes()].concat()).is_err() {
            client.send(&[&[kind][..], &id.to_le_bytes()].concat()).unwrap();
        }
        self.wait(Duration::from_micros(300));
    }

    fn wait(&mut self, time: Duration) {
        std::thread::sleep(time);
        let mut response = [0; 64];
        for client in &self.clients {
            while let Ok(length) = client.recv(&mut response) {
                assert_eq!(length, 5);
                *self
                    .responses_by_request
                    .entry(u32::from_le_bytes(response[1..5].try_into().unwrap()))
                    .or_default() += 1;
            }
        }
        if self.last_poll.elapsed() >= POLL_INTERVAL {
            self.last_poll = Instant::now();
            self.service.iter_mut().for_each(service::Service::poll);
        }
    }

    fn wait_until(&mut self, what: &str, holds: impl Fn(&Self) -> bool) {
        let end = Instant::now() + TIMEOUT;
        while !holds(self) {
            assert!(Instant::now() < end, "{what}: not within {TIMEOUT:?}; {:?}", self.counts());
            self.wait(Duration::from_millis(5));
        }
    }

    /// Waits until no request is outstanding: each was completed or given up. Returns the counts.
    fn wait_until_settled(&mut self) -> Vec<WorkerCounts> {
        self.wait_until("nothing is outstanding", |env| env.counts().iter().all(|worker| worker.outstanding == 0));
        let counts = self.counts();
        for worker in &counts {
            assert_eq!(worker.dispatched, worker.completed + worker.abandoned, "{counts:?}");
        }
        counts
    }
}

impl Drop for TestEnv {
    fn drop(&mut self) {
        // Also after a failure, which is not to be hidden by another one.
        let _ = service::detach(&self.pins());
        let _ = std::fs::remove_dir(&self.directory);
    }
}

fn sum_counts(counts: &[WorkerCounts], field: impl Fn(&WorkerCounts) -> u64) -> u64 {
    counts.iter().map(field).sum()
}

#[test]
fn counts_are_exact_with_responses_of_all_kinds() {
    skip_if!(missing_bpf_rights());
    for policy in Policy::all() {
        in_namespace(|| {
            let mut env = TestEnv::start(policy, 3, NO_STALLS);
            for number in 0..600 {
                env.send_request(match number % 10 {
                    3 => THREE_DATAGRAMS,
                    7 => NO_RESPONSE,
                    _ => ECHO,
                });
            }
            env.wait_until("all responses are there", |env| env.responses_by_request.len() == 540);
            // The rest is never answered: given up soon from here on.
            env.set_timeouts(STALLS);
            env.attach();
            let counts = env.wait_until_settled();
            assert_eq!(sum_counts(&counts, |worker| worker.dispatched), 600, "{policy:?} {counts:?}");
            assert_eq!(sum_counts(&counts, |worker| worker.completed), 540, "{policy:?} {counts:?}");
            assert_eq!(env.responses_by_request.len(), 540);
            assert_eq!(env.responses_by_request.values().filter(|datagrams| **datagrams == 3).count(), 60);
            let services = status::read_pinned_status(&[env.pins()]).unwrap();
            let status = status::json(&services);
            assert_eq!(status["services"][0]["listen"], "127.0.0.1:5300");
            assert_eq!(status["services"][0]["policy"], policy.name());
            assert_eq!(status["services"][0]["workers"].as_array().unwrap().len(), 3);
            assert_eq!(status["services"][0]["counters"]["unmatched"], 120);
            let text = status::format_status(&services);
            assert!(text.starts_with(&format!("127.0.0.1:5300: {}\n", policy.name())), "{text}");
        });
    }
}

#[test]
fn counts_stay_exact_while_workers_die_and_stop() {
    skip_if!(missing_bpf_rights());
    in_namespace(|| {
        let mut env = TestEnv::start(Policy::ShortestQueue, 4, STALLS);
        (0..200).for_each(|_| env.send_request(ECHO));
        let killed = env.workers.remove(0);
        let pid = killed.0.id();
        // Nothing is sent until it is gone: it can only have fewer then.
        let had = env.counts().iter().find(|worker| worker.pid == pid).expect("a worker").outstanding;
        drop(killed);
        (0..300).for_each(|_| env.send_request(ECHO));
        env.workers[0].signal(Signal::SIGSTOP);
        // It is found out when it has got one more request than it had, and some time has passed.
        let end = Instant::now() + TIMEOUT;
        while env.eligible_count() > 2 {
            assert!(Instant::now() < end, "{:?}", env.counts());
            env.send_request(ECHO);
        }
        (0..300).for_each(|_| env.send_request(ECHO));
        assert_eq!(env.eligible_count(), 2, "{:?}", env.counts());
        let stopped = env.counts().into_iter().filter(|worker| worker.queued > 0).max_by_key(|w| w.queued).unwrap();
        assert!(!stopped.is_eligible && stopped.outstanding >= stopped.queued, "{stopped:?}");
        env.workers[0].signal(Signal::SIGCONT);
        env.workers.push(Worker::start());
        let all_back = |env: &TestEnv| env.eligible_count() == 4;
        env.wait_until("all workers are back", all_back);
        (0..300).for_each(|_| env.send_request(ECHO));
        let counts = env.wait_until_settled();
        assert_eq!(sum_counts(&counts, |worker| worker.dispatched), u64::from(env.sent_count), "{counts:?}");
        // Only requests of the killed worker are lost: the one in service and those in its queue.
        let all = env.sent_count as usize;
        env.wait_until("all others are answered", |env| env.responses_by_request.len() + had as usize >= all);
        let lost = all - env.responses_by_request.len();
        assert!(lost as u64 <= sum_counts(&counts, |worker| worker.abandoned), "{lost} lost, {counts:?}");
    });
}

#[test]
fn detach_and_attach_under_load_lose_no_request() {
    skip_if!(missing_bpf_rights());
    in_namespace(|| {
        let mut env = TestEnv::start(Policy::ShortestQueue, 3, NO_STALLS);
        for _ in 0..5 {
            (0..60).for_each(|_| env.send_request(ECHO));
            env.detach();
            (0..60).for_each(|_| env.send_request(ECHO));
            env.attach();
            env.wait_until("all workers are found", |env| env.eligible_count() == 3);
            // A new version takes over while requests are in flight.
            (0..60).for_each(|_| env.send_request(ECHO));
            env.attach();
        }
        let counts = env.wait_until_settled();
        assert!(sum_counts(&counts, |worker| worker.dispatched) >= 60, "{counts:?}");
        env.wait_until("all responses are there", |env| env.responses_by_request.len() == env.sent_count as usize);
    });
}
