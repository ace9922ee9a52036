//! Tests `coreward dispatch` with a server of several processes, which are found, killed, stopped and detached under
//! load.

use std::collections::BTreeMap;
use std::net::{Ipv4Addr, SocketAddr, UdpSocket};
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use coreward_dataplane::dispatch::{
    self, DispatchPolicy, RequestTimeouts, WORKER_QUEUE_POLL_INTERVAL, WorkerRequestCounts,
};
use coreward_dataplane::test_run::{missing_bpf_rights, skip_if};
use coreward_dispatch::{config, service, status};
use nix::sched::{CloneFlags, unshare};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use socket2::{Domain, Protocol, Socket, Type};

const SERVICE_ADDRESS: SocketAddr = SocketAddr::new(std::net::IpAddr::V4(Ipv4Addr::LOCALHOST), 5300);
/// Timeouts that exceed all delays on a busy machine, so that no request is given up and no worker counts as stalled.
const NO_STALL_TIMEOUTS: ResponseAndStallTimeouts = [dispatch::MAX_RESPONSE_TIMEOUT, Duration::from_secs(600)];
const STALL_TIMEOUTS: ResponseAndStallTimeouts = [Duration::from_secs(2), Duration::from_millis(1500)];
/// Time after which a request is given up, and time without a response after which a worker counts as stalled.
type ResponseAndStallTimeouts = [Duration; 2];
/// Maximum time to wait for an event.
const CONDITION_TIMEOUT: Duration = Duration::from_secs(60);
const WORKER_ENV_VARIABLE: &str = "COREWARD_TEST_WORKER";

/// First byte of a request to which the worker responds with a copy of the request. The next four bytes are the id.
const ECHO_REQUEST_TYPE: u8 = 0;
const THREE_DATAGRAMS_REQUEST_TYPE: u8 = 1;
const NO_RESPONSE_REQUEST_TYPE: u8 = 2;

/// Runs a worker process, which is a simple UDP server without epoll. It is started by the tests and is no test itself.
#[test]
#[ignore = "started by the other tests"]
fn worker_process() {
    if std::env::var_os(WORKER_ENV_VARIABLE).is_none() {
        return;
    }
    let socket = Socket::new(Domain::IPV4, Type::DGRAM, Some(Protocol::UDP)).unwrap();
    socket.set_reuse_port(true).unwrap();
    socket.bind(&SERVICE_ADDRESS.into()).unwrap();
    let socket = UdpSocket::from(socket);
    let mut request = [0; 64];
    loop {
        let (length, client) = socket.recv_from(&mut request).unwrap();
        std::thread::sleep(Duration::from_micros(200));
        let response_count = match request[0] {
            NO_RESPONSE_REQUEST_TYPE => 0,
            THREE_DATAGRAMS_REQUEST_TYPE => 3,
            _ => 1,
        };
        (0..response_count).for_each(|_| drop(socket.send_to(&request[..length], client)));
    }
}

struct WorkerProcess(Child);

impl WorkerProcess {
    fn start() -> Self {
        // libtest names a test by its module path without the crate's name.
        let (_, module) = module_path!().split_once("::").unwrap();
        let mut worker_command = Command::new(std::env::current_exe().unwrap());
        worker_command.args(["--ignored", "--exact", &format!("{module}::worker_process")]);
        worker_command.env(WORKER_ENV_VARIABLE, "1").stdout(Stdio::null());
        Self(worker_command.spawn().unwrap())
    }

    fn send_signal(&self, signal: Signal) {
        kill(Pid::from_raw(self.0.id() as i32), signal).unwrap();
    }
}

impl Drop for WorkerProcess {
    fn drop(&mut self) {
        self.0.kill().unwrap();
        self.0.wait().unwrap();
    }
}

fn run_in_namespace(test: impl FnOnce() + Send) {
    std::thread::scope(|scope| {
        let test_thread = scope.spawn(|| {
            unshare(CloneFlags::CLONE_NEWNET).unwrap();
            assert!(Command::new("ip").args(["link", "set", "lo", "up"]).status().unwrap().success());
            test();
        });
        test_thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic));
    });
}

/// Dispatched service with its workers and clients, which one thread controls.
struct DispatchTestEnv {
    worker_processes: Vec<WorkerProcess>,
    service: Option<service::DispatchedService>,
    service_config: config::DispatchServiceConfig,
    pin_directory: PathBuf,
    clients: Vec<UdpSocket>,
    response_counts_by_request_id: BTreeMap<u32, u32>,
    sent_request_count: u32,
    last_polled_at: Instant,
}

impl DispatchTestEnv {
    fn start(policy: DispatchPolicy, worker_count: usize, timeouts: ResponseAndStallTimeouts) -> Self {
        static TEST_ENV_COUNT: AtomicU32 = AtomicU32::new(0);
        let instance_number = TEST_ENV_COUNT.fetch_add(1, Ordering::Relaxed);
        let mut service_config = config::DispatchServiceConfig::new(SERVICE_ADDRESS, policy);
        service_config.program_options.request_id_position =
            Some(dispatch::RequestIdPosition { offset_in_request: 1, offset_in_response: 1, byte_count: 4 });
        let new_client_socket = |_| {
            let socket = UdpSocket::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
            socket.connect(SERVICE_ADDRESS).unwrap();
            socket.set_nonblocking(true).unwrap();
            socket
        };
        let mut env = Self {
            worker_processes: (0..worker_count).map(|_| WorkerProcess::start()).collect(),
            service: None,
            service_config,
            pin_directory: format!("/sys/fs/bpf/coreward-processes-test-{}-{instance_number}", std::process::id())
                .into(),
            clients: (0..32).map(new_client_socket).collect(),
            response_counts_by_request_id: BTreeMap::new(),
            sent_request_count: 0,
            last_polled_at: Instant::now(),
        };
        env.set_timeouts(timeouts);
        env.attach_dispatch();
        env.wait_until("all workers are found", |env| env.eligible_worker_count() == worker_count);
        env
    }

    /// Sets the timeouts, which apply after the next [`attach_dispatch`](Self::attach_dispatch).
    fn set_timeouts(&mut self, [response_timeout, stall_after]: ResponseAndStallTimeouts) {
        self.service_config.user_space_timeouts = RequestTimeouts { response_timeout, stall_after };
    }

    fn attach_dispatch(&mut self) {
        let cgroup = dispatch::cgroup2_mount_point().unwrap();
        self.service =
            Some(service::DispatchedService::start(&self.service_config, &self.pin_directory, &cgroup).unwrap());
    }

    fn detach_dispatch(&mut self) {
        self.service = None;
        service::stop_dispatching(&self.pin_directory_of_service()).unwrap();
    }

    fn pin_directory_of_service(&self) -> PathBuf {
        service::service_pin_directory(&self.pin_directory, SERVICE_ADDRESS)
    }

    fn worker_request_counts(&self) -> Vec<WorkerRequestCounts> {
        dispatch::open_pinned_ledger(&self.pin_directory_of_service()).unwrap().worker_request_counts()
    }

    fn eligible_worker_count(&self) -> usize {
        self.worker_request_counts().iter().filter(|worker| worker.is_eligible).count()
    }

    /// Sends one request, reads the responses that have arrived, and polls the service if this is due.
    fn send_request(&mut self, request_type: u8) {
        let id = self.sent_request_count;
        self.sent_request_count += 1;
        let client = &self.clients[id as usize % self.clients.len()];
        // A closed socket is answered with ICMP, and the client's next call returns that error.
        if client.send(&[&[request_type][..], &id.to_le_bytes()].concat()).is_err() {
            client.send(&[&[request_type][..], &id.to_le_bytes()].concat()).unwrap();
        }
        self.sleep_and_poll_service(Duration::from_micros(300));
    }

    fn sleep_and_poll_service(&mut self, time: Duration) {
        std::thread::sleep(time);
        let mut response_bytes = [0; 64];
        for client in &self.clients {
            while let Ok(length) = client.recv(&mut response_bytes) {
                assert_eq!(length, 5);
                *self
                    .response_counts_by_request_id
                    .entry(u32::from_le_bytes(response_bytes[1..5].try_into().unwrap()))
                    .or_default() += 1;
            }
        }
        if self.last_polled_at.elapsed() >= WORKER_QUEUE_POLL_INTERVAL {
            self.last_polled_at = Instant::now();
            self.service.iter_mut().for_each(service::DispatchedService::poll);
        }
    }

    fn wait_until(&mut self, condition_name: &str, is_met: impl Fn(&Self) -> bool) {
        let deadline = Instant::now() + CONDITION_TIMEOUT;
        while !is_met(self) {
            assert!(
                Instant::now() < deadline,
                "{condition_name}: not within {CONDITION_TIMEOUT:?}; {:?}",
                self.worker_request_counts()
            );
            self.sleep_and_poll_service(Duration::from_millis(5));
        }
    }

    /// Waits until every request is completed or given up. Returns the workers' counts.
    fn wait_until_all_requests_end(&mut self) -> Vec<WorkerRequestCounts> {
        self.wait_until("nothing is outstanding", |env| {
            env.worker_request_counts().iter().all(|worker| worker.outstanding_requests == 0)
        });
        let worker_counts = self.worker_request_counts();
        for worker in &worker_counts {
            assert_eq!(
                worker.dispatched_requests,
                worker.completed_requests + worker.abandoned_requests,
                "{worker_counts:?}"
            );
        }
        worker_counts
    }
}

impl Drop for DispatchTestEnv {
    fn drop(&mut self) {
        // The result is ignored, because an error here would hide the failure that ended the test.
        let _ = service::stop_dispatching(&self.pin_directory_of_service());
        let _ = std::fs::remove_dir(&self.pin_directory);
    }
}

fn sum_field_over_workers(counts: &[WorkerRequestCounts], field: impl Fn(&WorkerRequestCounts) -> u64) -> u64 {
    counts.iter().map(field).sum()
}

#[test]
fn request_counts_are_exact_with_any_number_of_response_datagrams() {
    skip_if!(missing_bpf_rights());
    for policy in DispatchPolicy::all() {
        run_in_namespace(|| {
            let mut env = DispatchTestEnv::start(policy, 3, NO_STALL_TIMEOUTS);
            for number in 0..600 {
                env.send_request(match number % 10 {
                    3 => THREE_DATAGRAMS_REQUEST_TYPE,
                    7 => NO_RESPONSE_REQUEST_TYPE,
                    _ => ECHO_REQUEST_TYPE,
                });
            }
            env.wait_until("all responses are there", |env| env.response_counts_by_request_id.len() == 540);
            // The remaining requests are never answered, and from now on they are given up soon.
            env.set_timeouts(STALL_TIMEOUTS);
            env.attach_dispatch();
            let worker_counts = env.wait_until_all_requests_end();
            assert_eq!(
                sum_field_over_workers(&worker_counts, |worker| worker.dispatched_requests),
                600,
                "{policy:?} {worker_counts:?}"
            );
            assert_eq!(
                sum_field_over_workers(&worker_counts, |worker| worker.completed_requests),
                540,
                "{policy:?} {worker_counts:?}"
            );
            assert_eq!(env.response_counts_by_request_id.len(), 540);
            assert_eq!(env.response_counts_by_request_id.values().filter(|datagrams| **datagrams == 3).count(), 60);
            let service_statuses = status::read_pinned_status(&[env.pin_directory_of_service()]).unwrap();
            let status_json = status::status_json(&service_statuses);
            assert_eq!(status_json["services"][0]["listen"], "127.0.0.1:5300");
            assert_eq!(status_json["services"][0]["policy"], policy.name());
            assert_eq!(status_json["services"][0]["workers"].as_array().unwrap().len(), 3);
            assert_eq!(status_json["services"][0]["counters"]["unmatched"], 120);
            let text = status::format_status(&service_statuses);
            assert!(text.starts_with(&format!("127.0.0.1:5300: {}\n", policy.name())), "{text}");
        });
    }
}

#[test]
fn request_counts_stay_exact_while_workers_die_or_stop() {
    skip_if!(missing_bpf_rights());
    run_in_namespace(|| {
        let mut env = DispatchTestEnv::start(DispatchPolicy::ShortestQueue, 4, STALL_TIMEOUTS);
        (0..200).for_each(|_| env.send_request(ECHO_REQUEST_TYPE));
        let killed_worker = env.worker_processes.remove(0);
        let killed_pid = killed_worker.0.id();
        // No request is sent before the worker is gone, so its outstanding requests can only decrease.
        let outstanding_requests_at_kill = env
            .worker_request_counts()
            .iter()
            .find(|worker| worker.worker_pid == killed_pid)
            .expect("a worker")
            .outstanding_requests;
        drop(killed_worker);
        (0..300).for_each(|_| env.send_request(ECHO_REQUEST_TYPE));
        env.worker_processes[0].send_signal(Signal::SIGSTOP);
        // The worker counts as stalled when it has got one more request and some time has passed.
        let deadline = Instant::now() + CONDITION_TIMEOUT;
        while env.eligible_worker_count() > 2 {
            assert!(Instant::now() < deadline, "{:?}", env.worker_request_counts());
            env.send_request(ECHO_REQUEST_TYPE);
        }
        (0..300).for_each(|_| env.send_request(ECHO_REQUEST_TYPE));
        assert_eq!(env.eligible_worker_count(), 2, "{:?}", env.worker_request_counts());
        let stopped_pid = env.worker_processes[0].0.id();
        let worker_counts = env.worker_request_counts();
        let stopped_worker = worker_counts.iter().find(|worker| worker.worker_pid == stopped_pid).unwrap();
        assert!(
            !stopped_worker.is_eligible
                && stopped_worker.queued_datagrams > 0
                && stopped_worker.outstanding_requests >= stopped_worker.queued_datagrams,
            "{worker_counts:?}"
        );
        env.worker_processes[0].send_signal(Signal::SIGCONT);
        env.worker_processes.push(WorkerProcess::start());
        let are_all_workers_eligible = |env: &DispatchTestEnv| env.eligible_worker_count() == 4;
        env.wait_until("all workers are back", are_all_workers_eligible);
        (0..300).for_each(|_| env.send_request(ECHO_REQUEST_TYPE));
        let worker_counts = env.wait_until_all_requests_end();
        assert_eq!(
            sum_field_over_workers(&worker_counts, |worker| worker.dispatched_requests),
            u64::from(env.sent_request_count),
            "{worker_counts:?}"
        );
        // Only the killed worker's requests are lost, which are the one in service and those in its queue.
        let sent_request_count = env.sent_request_count as usize;
        env.wait_until("all others are answered", |env| {
            env.response_counts_by_request_id.len() + outstanding_requests_at_kill as usize >= sent_request_count
        });
        let lost_request_count = sent_request_count - env.response_counts_by_request_id.len();
        assert!(
            lost_request_count as u64 <= sum_field_over_workers(&worker_counts, |worker| worker.abandoned_requests),
            "{lost_request_count} lost, {worker_counts:?}"
        );
    });
}

#[test]
fn detach_and_attach_under_load_lose_no_request() {
    skip_if!(missing_bpf_rights());
    run_in_namespace(|| {
        let mut env = DispatchTestEnv::start(DispatchPolicy::ShortestQueue, 3, NO_STALL_TIMEOUTS);
        for _ in 0..5 {
            (0..60).for_each(|_| env.send_request(ECHO_REQUEST_TYPE));
            env.detach_dispatch();
            (0..60).for_each(|_| env.send_request(ECHO_REQUEST_TYPE));
            env.attach_dispatch();
            env.wait_until("all workers are found", |env| env.eligible_worker_count() == 3);
            // A new version takes over while requests are outstanding.
            (0..60).for_each(|_| env.send_request(ECHO_REQUEST_TYPE));
            env.attach_dispatch();
        }
        let worker_counts = env.wait_until_all_requests_end();
        assert!(sum_field_over_workers(&worker_counts, |worker| worker.dispatched_requests) >= 60, "{worker_counts:?}");
        env.wait_until("all responses are there", |env| {
            env.response_counts_by_request_id.len() == env.sent_request_count as usize
        });
    });
}
