//! Measures requests over UDP through the orchestrator's sockets, on loopback and over a veth.
//!
//! A burst of requests waits in the socket before the clock starts, and the responses are received after it stops. The
//! client shares the orchestrator's CPU, but is therefore not measured. Two servers that only return the datagrams are
//! the baseline. The delivery of a burst, from the client's system call into the server's socket, is measured
//! separately.

use std::net::{SocketAddrV4, UdpSocket};
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::time::{Duration, Instant};

use anyhow::{Context as _, bail, ensure};
use coreward_orchestrator::classify::{PayloadPattern, RequestClassifier};
use coreward_orchestrator::config::OrchestratorConfig;
use coreward_orchestrator::daemon::OrchestratorDaemon;
use coreward_orchestrator::intake::RequestIntake;
use coreward_orchestrator::socket::UdpBatchSocket;
use coreward_runtime::worker::OrchestratorConnection;

use super::{
    ORCHESTRATOR_AND_WORKER_CPU, REQUEST_PAYLOAD, build_engine_config, connect_workers, find_free_loopback_address,
    veth,
};
use crate::thread_cpus::{CALLING_THREAD_PID, bind_to_cpu};

/// Number of requests sent before the server's time is measured. They fit the socket's default receive buffer.
const REQUESTS_PER_BURST: u64 = 256;
pub const CORE_COUNT: u16 = 16;
/// Maximum time for a burst, which normally takes less than a millisecond.
const BURST_TIMEOUT: Duration = Duration::from_secs(10);
const KSOFTIRQD_WAIT: Duration = Duration::from_micros(50);

/// Mean times per request (ns) for its processing by the server, and for its delivery into the server's socket.
#[derive(Debug, Clone, Copy)]
pub struct MeanRequestTimes {
    pub serving_ns: f64,
    pub delivery_ns: f64,
}

fn bind_loopback_client() -> anyhow::Result<UdpBatchSocket> {
    Ok(UdpBatchSocket::bind("127.0.0.1:0".parse()?, REQUEST_PAYLOAD.len())?)
}

/// Receives the responses to a burst. If the client uses a veth, ksoftirqd may have to deliver them on this CPU.
fn receive_burst_responses(client: &mut UdpBatchSocket) -> anyhow::Result<()> {
    let (start, mut response_count) = (Instant::now(), 0);
    while response_count < REQUESTS_PER_BURST {
        match client.receive_batch(&mut |_, payload| assert_eq!(payload, REQUEST_PAYLOAD))? {
            0 => std::thread::sleep(KSOFTIRQD_WAIT),
            received_count => response_count += received_count as u64,
        }
        ensure!(
            start.elapsed() < BURST_TIMEOUT,
            "{response_count} responses to {REQUESTS_PER_BURST} requests after {BURST_TIMEOUT:?}"
        );
    }
    Ok(())
}

/// Measures a server with bursts of requests. Each call of `serve` lets the server run, and returns the number of
/// requests that it completed.
fn measure_mean_request_times(
    client: &mut UdpBatchSocket,
    server: SocketAddrV4,
    request_count: u64,
    serve: &mut dyn FnMut() -> anyhow::Result<u64>,
) -> anyhow::Result<MeanRequestTimes> {
    let (burst_count, mut serving_time, mut delivery_time) =
        (request_count.div_ceil(REQUESTS_PER_BURST), Duration::ZERO, Duration::ZERO);
    for _ in 0..burst_count {
        let start = Instant::now();
        (0..REQUESTS_PER_BURST).for_each(|_| client.queue_datagram(server, &REQUEST_PAYLOAD));
        client.flush();
        delivery_time += start.elapsed();
        let (start, mut completed_count) = (Instant::now(), 0);
        while completed_count < REQUESTS_PER_BURST {
            completed_count += serve()?;
            ensure!(
                start.elapsed() < BURST_TIMEOUT,
                "{completed_count} of {REQUESTS_PER_BURST} requests are completed after {BURST_TIMEOUT:?}"
            );
        }
        serving_time += start.elapsed();
        receive_burst_responses(client)?;
    }
    let ns_per_request = |time: Duration| time.as_nanos() as f64 / (burst_count * REQUESTS_PER_BURST) as f64;
    Ok(MeanRequestTimes { serving_ns: ns_per_request(serving_time), delivery_ns: ns_per_request(delivery_time) })
}

/// Measures an echo server that uses two system calls per request.
pub fn measure_per_request_echo_server(request_count: u64) -> anyhow::Result<MeanRequestTimes> {
    let socket = UdpSocket::bind("127.0.0.1:0")?;
    let std::net::SocketAddr::V4(address) = socket.local_addr()? else { unreachable!("bound to an IPv4 address") };
    measure_mean_request_times(&mut bind_loopback_client()?, address, request_count, &mut || {
        let mut payload = [0; REQUEST_PAYLOAD.len() + 1];
        let (length, client_address) = socket.recv_from(&mut payload)?;
        socket.send_to(&payload[..length], client_address)?;
        Ok(1)
    })
}

/// Measures an echo server that uses two system calls per batch of requests.
pub fn measure_batch_echo_server(request_count: u64) -> anyhow::Result<MeanRequestTimes> {
    let mut socket = UdpBatchSocket::bind("127.0.0.1:0".parse()?, REQUEST_PAYLOAD.len())?;
    let address = socket.local_address()?;
    let mut client_addresses = Vec::new();
    measure_mean_request_times(&mut bind_loopback_client()?, address, request_count, &mut || {
        client_addresses.clear();
        let received_request_count =
            socket.receive_batch(&mut |client_address, _| client_addresses.push(client_address))?;
        client_addresses.iter().for_each(|client_address| socket.queue_datagram(*client_address, &REQUEST_PAYLOAD));
        socket.flush();
        Ok(received_request_count as u64)
    })
}

pub fn measure_loopback_orchestrator(request_count: u64) -> anyhow::Result<MeanRequestTimes> {
    measure_orchestrator_over_udp(find_free_loopback_address()?, None, &mut bind_loopback_client()?, request_count)
}

pub fn measure_veth_orchestrator(request_count: u64) -> anyhow::Result<MeanRequestTimes> {
    veth::run_with_client_socket(|client| {
        measure_orchestrator_over_udp(veth::SERVER_ADDRESS, None, client, request_count)
    })
}

/// Measures the orchestrator over a veth, with AF_XDP in copy mode.
pub fn measure_af_xdp_orchestrator(request_count: u64) -> anyhow::Result<MeanRequestTimes> {
    veth::run_with_client_socket(|client| {
        measure_orchestrator_over_udp(veth::SERVER_ADDRESS, Some(veth::VETH_DEVICE_NAME), client, request_count)
    })
}

/// Returns the configuration of an orchestrator without idle sleep, whose second service gets all requests.
fn build_orchestrator_config(memory_path: &Path, address: SocketAddrV4, interface: Option<&str>) -> OrchestratorConfig {
    let services_and_patterns =
        vec![(0, Some(PayloadPattern { byte_offset: 0, expected_bytes: vec![!REQUEST_PAYLOAD[0]] })), (1, None)];
    OrchestratorConfig {
        shared_memory_path: memory_path.to_owned(),
        listeners: vec![(address, RequestClassifier { services_and_patterns })],
        af_xdp_interface: interface.map(str::to_owned),
        engine_config: build_engine_config(CORE_COUNT, address),
        idle_sleep: Duration::ZERO,
        metrics_address: None,
    }
}

/// Measures the orchestrator at `address`, with the workers of all cores in one thread on the other CPU.
fn measure_orchestrator_over_udp(
    address: SocketAddrV4,
    interface: Option<&str>,
    client: &mut UdpBatchSocket,
    request_count: u64,
) -> anyhow::Result<MeanRequestTimes> {
    let directory = tempfile::tempdir_in("/dev/shm")?;
    let memory_path = directory.path().join("cores");
    let config = build_orchestrator_config(&memory_path, address, interface);
    let request_intake = RequestIntake::open(&config);
    if let Some(reason) = request_intake.status().fallback_reason {
        bail!("no AF_XDP: {reason}");
    }
    let mut daemon = OrchestratorDaemon::start(&config, request_intake)?;
    let (runtime, should_stop) = (OrchestratorConnection::connect(&memory_path)?, AtomicBool::new(false));
    std::thread::scope(|scope| {
        let worker_thread = scope.spawn(|| answer_requests(&runtime, address, &should_stop));
        while daemon.engine().attached_worker_count() < CORE_COUNT.into() {
            ensure!(!worker_thread.is_finished(), "the workers ended early");
            daemon.run_one_iteration()?;
            // Lets the workers' thread start, which is still on this CPU.
            std::thread::yield_now();
        }
        let completed_request_count = |daemon: &OrchestratorDaemon| {
            daemon.engine().service_counters().iter().map(|service| service.completed_requests).sum::<u64>()
        };
        let mut last_completed_count = 0;
        let request_times = measure_mean_request_times(client, address, request_count, &mut || {
            daemon.run_one_iteration()?;
            let completed_count = completed_request_count(&daemon);
            Ok(completed_count - std::mem::replace(&mut last_completed_count, completed_count))
        });
        should_stop.store(true, Relaxed);
        worker_thread.join().expect("the workers' thread")?;
        request_times.context("the orchestrator")
    })
}

fn answer_requests(
    runtime: &OrchestratorConnection,
    address: SocketAddrV4,
    should_stop: &AtomicBool,
) -> anyhow::Result<()> {
    bind_to_cpu(CALLING_THREAD_PID, ORCHESTRATOR_AND_WORKER_CPU[1])?;
    let mut workers = connect_workers(runtime, CORE_COUNT, address)?;
    while !should_stop.load(Relaxed) {
        for worker in &mut workers {
            while let Some(request) = worker.take_request()? {
                worker.respond(&request, &request.payload)?;
            }
        }
    }
    Ok(())
}
