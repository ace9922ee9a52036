//! Requests over UDP through the orchestrator's sockets, on loopback and over a veth.
//!
//! A burst of requests waits in the socket before the clock starts, and the responses are received after it stops: the
//! client shares the orchestrator's CPU and is not measured. Two servers that only return the datagrams are the
//! baseline. The delivery of a burst, from the client's system call into the server's socket, is measured separately.

use std::net::{SocketAddrV4, UdpSocket};
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::time::{Duration, Instant};

use anyhow::{Context as _, bail, ensure};
use coreward_orchestrator::classify::{Classifier, Pattern};
use coreward_orchestrator::config::Config;
use coreward_orchestrator::daemon::Daemon;
use coreward_orchestrator::intake::RequestIntake;
use coreward_orchestrator::socket::BatchSocket;
use coreward_runtime::worker::Runtime;

use super::{CPUS, PAYLOAD, config, connect, free_address, veth};
use crate::cpus::{THIS_THREAD, bind_to_cpu};

/// Number of requests that wait in the socket before the clock starts: they fit the kernel's default receive buffer.
const BURST: u64 = 256;
pub const CORE_COUNT: u16 = 16;
/// Maximum time for a burst, which normally takes less than a millisecond.
const TIMEOUT: Duration = Duration::from_secs(10);
const KSOFTIRQD_TIME: Duration = Duration::from_micros(50);

/// Mean times per request (ns): in the server, and for the delivery into its socket.
#[derive(Debug, Clone, Copy)]
pub struct Times {
    pub server_ns: f64,
    pub delivery_ns: f64,
}

fn loopback_client() -> anyhow::Result<BatchSocket> {
    Ok(BatchSocket::bind("127.0.0.1:0".parse()?, PAYLOAD.len())?)
}

/// Receives the responses to a burst, which ksoftirqd may have to deliver on this CPU if the client uses a veth.
fn receive_all(client: &mut BatchSocket) -> anyhow::Result<()> {
    let (started, mut answers) = (Instant::now(), 0);
    while answers < BURST {
        match client.receive(&mut |_, payload| assert_eq!(payload, PAYLOAD))? {
            0 => std::thread::sleep(KSOFTIRQD_TIME),
            received => answers += received as u64,
        }
        ensure!(started.elapsed() < TIMEOUT, "{answers} responses to {BURST} requests after {TIMEOUT:?}");
    }
    Ok(())
}

/// Measures a server with bursts of requests. Each call of `serve` returns the number of requests it has completed.
fn measure(
    client: &mut BatchSocket,
    server: SocketAddrV4,
    requests: u64,
    serve: &mut dyn FnMut() -> anyhow::Result<u64>,
) -> anyhow::Result<Times> {
    let (bursts, mut busy, mut delivery) = (requests.div_ceil(BURST), Duration::ZERO, Duration::ZERO);
    for _ in 0..bursts {
        let started = Instant::now();
        (0..BURST).for_each(|_| client.send(server, &PAYLOAD));
        client.flush();
        delivery += started.elapsed();
        let (started, mut completed) = (Instant::now(), 0);
        while completed < BURST {
            completed += serve()?;
            ensure!(started.elapsed() < TIMEOUT, "{completed} of {BURST} requests are completed after {TIMEOUT:?}");
        }
        busy += started.elapsed();
        receive_all(client)?;
    }
    let each = |time: Duration| time.as_nanos() as f64 / (bursts * BURST) as f64;
    Ok(Times { server_ns: each(busy), delivery_ns: each(delivery) })
}

/// Measures an echo server that uses two system calls per request.
pub fn echo_each(requests: u64) -> anyhow::Result<Times> {
    let socket = UdpSocket::bind("127.0.0.1:0")?;
    let std::net::SocketAddr::V4(address) = socket.local_addr()? else { unreachable!("bound to an IPv4 address") };
    measure(&mut loopback_client()?, address, requests, &mut || {
        let mut payload = [0; PAYLOAD.len() + 1];
        let (length, client) = socket.recv_from(&mut payload)?;
        socket.send_to(&payload[..length], client)?;
        Ok(1)
    })
}

/// Measures an echo server that uses two system calls per batch of requests.
pub fn echo_batches(requests: u64) -> anyhow::Result<Times> {
    let mut socket = BatchSocket::bind("127.0.0.1:0".parse()?, PAYLOAD.len())?;
    let address = socket.local_address()?;
    let mut batch = Vec::new();
    measure(&mut loopback_client()?, address, requests, &mut || {
        batch.clear();
        let received = socket.receive(&mut |client, _| batch.push(client))?;
        batch.iter().for_each(|client| socket.send(*client, &PAYLOAD));
        socket.flush();
        Ok(received as u64)
    })
}

/// Measures the orchestrator over loopback, with UDP sockets.
pub fn orchestrate(requests: u64) -> anyhow::Result<Times> {
    orchestrate_at(free_address()?, None, &mut loopback_client()?, requests)
}

/// Measures the orchestrator over a veth, with UDP sockets.
pub fn orchestrate_veth(requests: u64) -> anyhow::Result<Times> {
    veth::with_client(|client| orchestrate_at(veth::SERVER, None, client, requests))
}

/// Measures the orchestrator over a veth, with AF_XDP in copy mode.
pub fn orchestrate_af_xdp(requests: u64) -> anyhow::Result<Times> {
    veth::with_client(|client| orchestrate_at(veth::SERVER, Some(veth::INTERFACE), client, requests))
}

/// Measures the orchestrator at `address`, with the workers of all cores in one thread on the other CPU.
fn orchestrate_at(
    address: SocketAddrV4,
    interface: Option<&str>,
    client: &mut BatchSocket,
    requests: u64,
) -> anyhow::Result<Times> {
    let directory = tempfile::tempdir_in("/dev/shm")?;
    let memory = directory.path().join("cores");
    let rules = vec![(0, Some(Pattern { offset: 0, bytes: vec![!PAYLOAD[0]] })), (1, None)];
    let listeners = vec![(address, Classifier { rules })];
    let (engine, af_xdp_interface, idle_sleep) =
        (config(CORE_COUNT, address), interface.map(str::to_owned), Duration::ZERO);
    let config = Config {
        shared_memory_path: memory.clone(),
        listeners,
        af_xdp_interface,
        engine,
        idle_sleep,
        metrics_address: None,
    };
    let intake = RequestIntake::open(&config);
    if let Some(reason) = intake.status().fallback_reason {
        bail!("no AF_XDP: {reason}");
    }
    let mut daemon = Daemon::start(&config, intake)?;
    let (runtime, stop) = (Runtime::connect(&memory)?, AtomicBool::new(false));
    std::thread::scope(|scope| {
        let workers = scope.spawn(|| answer_all(&runtime, address, &stop));
        while daemon.engine().attached_workers() < CORE_COUNT.into() {
            ensure!(!workers.is_finished(), "the workers ended early");
            daemon.run_once()?;
            // Lets the workers' thread start, which is on this CPU.
            std::thread::yield_now();
        }
        let completed =
            |daemon: &Daemon| daemon.engine().service_counters().iter().map(|service| service.completed).sum::<u64>();
        let mut before = 0;
        let times = measure(client, address, requests, &mut || {
            daemon.run_once()?;
            let after = completed(&daemon);
            Ok(after - std::mem::replace(&mut before, after))
        });
        stop.store(true, Relaxed);
        workers.join().expect("the workers' thread")?;
        times.context("the orchestrator")
    })
}

fn answer_all(runtime: &Runtime, address: SocketAddrV4, stop: &AtomicBool) -> anyhow::Result<()> {
    bind_to_cpu(THIS_THREAD, CPUS[1])?;
    let mut workers = connect(runtime, CORE_COUNT, address)?;
    while !stop.load(Relaxed) {
        for worker in &mut workers {
            while let Some(request) = worker.take_request()? {
                worker.respond(&request, &request.payload)?;
            }
        }
    }
    Ok(())
}
