//! A dispatched UDP service in this process. It has a socket per worker, in a network namespace of the calling thread.

use std::collections::BTreeMap;
use std::net::{Ipv4Addr, SocketAddr, UdpSocket};
use std::os::fd::AsFd as _;
use std::path::PathBuf;
use std::process::Command;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use coreward_dataplane::dispatch::{
    self, DispatchOptions, DispatchPolicy, DispatchPrograms, RequestTimeouts, WorkerRequestCounts,
};
use nix::sched::{CloneFlags, unshare};
use parking_lot::Mutex;
use socket2::{Domain, Protocol, Socket, Type};

pub const SERVICE_ADDRESS: SocketAddr = SocketAddr::new(std::net::IpAddr::V4(Ipv4Addr::LOCALHOST), 5300);

/// Runs `test` in a new network namespace. Tests run one at a time, because child processes of another test would keep
/// this test's worker sockets open until their execve(2).
pub fn run_in_namespace(test: impl FnOnce() + Send) {
    static DISPATCH_TEST_LOCK: Mutex<()> = Mutex::new(());
    let _test_guard = DISPATCH_TEST_LOCK.lock();
    run_in_new_namespace(test);
}

/// Runs `action` in another thread, in a new network namespace whose loopback device is up.
pub fn run_in_new_namespace(action: impl FnOnce() + Send) {
    std::thread::scope(|scope| {
        let namespace_thread = scope.spawn(|| {
            unshare(CloneFlags::CLONE_NEWNET).unwrap();
            let exit_status = Command::new("ip").args(["link", "set", "lo", "up"]).status().unwrap();
            assert!(exit_status.success());
            action();
        });
        namespace_thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic));
    });
}

pub fn dispatch_options(policy: DispatchPolicy) -> DispatchOptions {
    DispatchOptions {
        service_address: SERVICE_ADDRESS,
        policy,
        request_id_position: None,
        type_offset: 0,
        request_types: Vec::new(),
        default_priority_class: 0,
        measures_service_times: false,
    }
}

pub fn open_worker_socket(service: SocketAddr) -> UdpSocket {
    let socket = Socket::new(Domain::for_address(service), Type::DGRAM, Some(Protocol::UDP)).unwrap();
    socket.set_reuse_port(true).unwrap();
    socket.bind(&service.into()).unwrap();
    socket.set_nonblocking(true).unwrap();
    socket.into()
}

pub struct TemporaryPinDirectory(pub PathBuf);

impl TemporaryPinDirectory {
    pub fn new() -> Self {
        static NEXT_PIN_DIRECTORY_NUMBER: AtomicU32 = AtomicU32::new(0);
        let directory_number = NEXT_PIN_DIRECTORY_NUMBER.fetch_add(1, Ordering::Relaxed);
        Self(PathBuf::from(format!("/sys/fs/bpf/coreward-dispatch-test-{}-{directory_number}", std::process::id())))
    }
}

impl Drop for TemporaryPinDirectory {
    fn drop(&mut self) {
        dispatch::remove_pins_and_programs(&self.0).unwrap();
    }
}

/// Service with dispatched requests. Its workers read and respond when the test calls
/// [`read_requests`](Self::read_requests) and [`send_response`](Self::send_response).
pub struct DispatchTestEnv {
    pub dispatch: DispatchPrograms,
    pub worker_sockets: BTreeMap<u32, UdpSocket>,
    pub pins: TemporaryPinDirectory,
    virtual_time: Duration,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ReceivedDatagram {
    pub worker_slot: u32,
    pub client_address: SocketAddr,
    pub payload: Vec<u8>,
}

impl DispatchTestEnv {
    pub fn new(worker_count: usize, options: &DispatchOptions) -> Self {
        let pins = TemporaryPinDirectory::new();
        let dispatch = DispatchPrograms::load(&pins.0, &dispatch::cgroup2_mount_point().unwrap(), options).unwrap();
        let mut env = Self { dispatch, worker_sockets: BTreeMap::new(), pins, virtual_time: Duration::ZERO };
        (0..worker_count).for_each(|_| _ = env.add_worker());
        env
    }

    pub fn add_worker(&mut self) -> u32 {
        let socket = open_worker_socket(self.dispatch.ledger().service_address_and_policy_name().0);
        let slot = self.dispatch.add_worker(socket.as_fd(), std::process::id()).unwrap();
        self.dispatch.attach_to_socket_group(socket.as_fd()).unwrap();
        self.worker_sockets.insert(slot, socket);
        slot
    }

    /// Sends a request from the socket `client`, and waits until it is dispatched.
    pub fn send_request(&self, client: &UdpSocket, payload: &[u8]) {
        let read_dispatched_count = || {
            self.dispatch.ledger().worker_request_counts().iter().map(|worker| worker.dispatched_requests).sum::<u64>()
        };
        let dispatched_count_before = read_dispatched_count();
        client.send(payload).unwrap();
        wait_for_value("a request to be dispatched", || {
            (read_dispatched_count() > dispatched_count_before).then_some(())
        });
    }

    /// Reads and returns all datagrams in the workers' queues, of which there must be `expected_count`.
    pub fn read_requests(&self, expected_count: usize) -> Vec<ReceivedDatagram> {
        let mut requests = Vec::new();
        wait_for_value("datagrams at the workers", || {
            self.read_available_requests(&mut requests);
            (requests.len() >= expected_count).then_some(())
        });
        self.read_available_requests(&mut requests);
        assert_eq!(requests.len(), expected_count, "{requests:?}");
        requests
    }

    fn read_available_requests(&self, requests: &mut Vec<ReceivedDatagram>) {
        for (slot, socket) in &self.worker_sockets {
            let mut buffer = [0; 2048];
            while let Ok((length, client)) = socket.recv_from(&mut buffer) {
                requests.push(ReceivedDatagram {
                    worker_slot: *slot,
                    client_address: client,
                    payload: buffer[..length].to_vec(),
                });
            }
        }
    }

    /// Reads and returns the only datagram in the workers' queues.
    pub fn read_one_request(&self) -> ReceivedDatagram {
        self.read_requests(1).remove(0)
    }

    /// Sends a response with the payload of the request `request` from the worker that has read it.
    pub fn send_response(&self, request: &ReceivedDatagram) {
        self.worker_sockets[&request.worker_slot].send_to(&request.payload, request.client_address).unwrap();
    }

    /// Advances the virtual time by 100 ms, and then runs the periodic maintenance once. Returns whether it has found a
    /// dead worker.
    pub fn poll_dispatcher(&mut self, timeouts: &RequestTimeouts) -> bool {
        self.virtual_time += dispatch::WORKER_QUEUE_POLL_INTERVAL;
        self.dispatch.maintain_service(self.virtual_time, timeouts).unwrap()
    }

    pub fn worker_request_counts(&self, slot: u32) -> WorkerRequestCounts {
        let workers = self.dispatch.ledger().worker_request_counts();
        workers.into_iter().find(|worker| worker.socket_slot == slot).unwrap()
    }

    pub fn outstanding_request_counts(&self) -> Vec<u32> {
        self.dispatch.ledger().worker_request_counts().iter().map(|worker| worker.outstanding_requests).collect()
    }

    pub fn counter(&self, counter_value: coreward_intf::dispatch_counter) -> u64 {
        self.dispatch.ledger().counters()[counter_value as usize]
    }
}

pub fn open_client_socket() -> UdpSocket {
    let socket = UdpSocket::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
    socket.connect(SERVICE_ADDRESS).unwrap();
    socket.set_nonblocking(true).unwrap();
    socket
}

/// Calls `read_value` repeatedly until it returns a value, and returns that value. Panics with `description` after 30
/// s.
pub fn wait_for_value<T>(description: &str, mut read_value: impl FnMut() -> Option<T>) -> T {
    let deadline = Instant::now() + Duration::from_secs(30);
    loop {
        if let Some(outcome) = read_value() {
            return outcome;
        }
        assert!(Instant::now() < deadline, "waited in vain for {description}");
        std::thread::yield_now();
    }
}
