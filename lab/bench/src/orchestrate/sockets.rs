//! Requests to the whole orchestrator over UDP sockets on loopback.
//!
//! A burst of requests waits in the socket before the clock starts, and the responses are taken after it stops: the
//! client shares the orchestrator's CPU and is not measured. Two servers that only return the datagrams are the floor.

use std::net::{SocketAddrV4, UdpSocket};
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::time::{Duration, Instant};

use anyhow::{Context as _, ensure};
use coreward_orchestrator::classify::{Classifier, Pattern};
use coreward_orchestrator::config::Config;
use coreward_orchestrator::daemon::Daemon;
use coreward_orchestrator::socket::BatchSocket;
use coreward_runtime::worker::Runtime;

use super::{CPUS, PAYLOAD, config, connect, free_address};
use crate::cpus::{THIS_THREAD, bind};

/// Requests that wait in the socket: they fit the kernel's default receive buffer.
const BURST: u64 = 256;
pub const CORES: u16 = 16;
/// A burst takes less than a millisecond.
const TIMEOUT: Duration = Duration::from_secs(10);

/// Returns the thousands of requests per second that a server answers. `serve` returns the number of requests that it
/// has completed.
fn rate(server: SocketAddrV4, requests: u64, serve: &mut dyn FnMut() -> anyhow::Result<u64>) -> anyhow::Result<f64> {
    let mut client = BatchSocket::bind(SocketAddrV4::new(*server.ip(), 0), PAYLOAD.len())?;
    let (bursts, mut busy) = (requests.div_ceil(BURST), Duration::ZERO);
    for _ in 0..bursts {
        (0..BURST).for_each(|_| client.send(server, &PAYLOAD));
        client.flush();
        let (started, mut completed) = (Instant::now(), 0);
        while completed < BURST {
            completed += serve()?;
            ensure!(started.elapsed() < TIMEOUT, "{completed} of {BURST} requests are completed after {TIMEOUT:?}");
        }
        busy += started.elapsed();
        let mut answers = 0;
        loop {
            match client.receive(&mut |_, payload| assert_eq!(payload, PAYLOAD))? {
                0 => break,
                received => answers += received as u64,
            }
        }
        ensure!(answers == BURST, "{answers} responses to {BURST} requests");
    }
    Ok((bursts * BURST) as f64 / 1e3 / busy.as_secs_f64())
}

/// A server with two system calls for each request.
pub fn echo_each(requests: u64) -> anyhow::Result<f64> {
    let socket = UdpSocket::bind("127.0.0.1:0")?;
    let std::net::SocketAddr::V4(address) = socket.local_addr()? else { unreachable!("bound to an IPv4 address") };
    rate(address, requests, &mut || {
        let mut payload = [0; PAYLOAD.len() + 1];
        let (length, client) = socket.recv_from(&mut payload)?;
        socket.send_to(&payload[..length], client)?;
        Ok(1)
    })
}

/// A server with two system calls for each batch of requests.
pub fn echo_batches(requests: u64) -> anyhow::Result<f64> {
    let mut socket = BatchSocket::bind("127.0.0.1:0".parse()?, PAYLOAD.len())?;
    let address = socket.local_address()?;
    let mut batch = Vec::new();
    rate(address, requests, &mut || {
        batch.clear();
        let received = socket.receive(&mut |client, _| batch.push(client))?;
        batch.iter().for_each(|client| socket.send(*client, &PAYLOAD));
        socket.flush();
        Ok(received as u64)
    })
}

/// The orchestrator; the workers of all cores share a thread on the other CPU.
pub fn orchestrate(requests: u64) -> anyhow::Result<f64> {
    let directory = tempfile::tempdir_in("/dev/shm")?;
    let (memory, address) = (directory.path().join("cores"), free_address()?);
    let rules = vec![(0, Some(Pattern { offset: 0, bytes: vec![!PAYLOAD[0]] })), (1, None)];
    let listeners = vec![(address, Classifier { rules })];
    let engine = config(CORES, address);
    let config = Config { memory: memory.clone(), listeners, engine, sleep: Duration::ZERO, metrics: None };
    let mut daemon = Daemon::start(&config)?;
    let (runtime, stop) = (Runtime::connect(&memory)?, AtomicBool::new(false));
    std::thread::scope(|scope| {
        let workers = scope.spawn(|| answer_all(&runtime, address, &stop));
        while daemon.report().workers < CORES.into() {
            ensure!(!workers.is_finished(), "the workers ended early");
            daemon.turn()?;
            // The workers' thread starts on this CPU.
            std::thread::yield_now();
        }
        let completed =
            |daemon: &Daemon| daemon.report().services.iter().map(|service| service.counters.completed).sum::<u64>();
        let mut before = 0;
        let rate = rate(address, requests, &mut || {
            daemon.turn()?;
            let after = completed(&daemon);
            Ok(after - std::mem::replace(&mut before, after))
        });
        stop.store(true, Relaxed);
        workers.join().expect("the workers' thread")?;
        rate.context("the orchestrator")
    })
}

fn answer_all(runtime: &Runtime, address: SocketAddrV4, stop: &AtomicBool) -> anyhow::Result<()> {
    bind(THIS_THREAD, CPUS[1])?;
    let mut workers = connect(runtime, CORES, address)?;
    while !stop.load(Relaxed) {
        for worker in &mut workers {
            while let Some(request) = worker.take_request()? {
                worker.respond(&request, &request.payload)?;
            }
        }
    }
    Ok(())
}
