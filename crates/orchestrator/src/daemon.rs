//! One thread: UDP sockets in, decisions, queues of the cores, responses out.

use std::io::ErrorKind;
use std::net::{SocketAddr, SocketAddrV4, UdpSocket};
use std::os::fd::AsFd as _;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use anyhow::Context as _;
use coreward_daemon::metrics_endpoint;
use nix::poll::{PollFd, PollFlags, ppoll};
use nix::sys::time::TimeSpec;

use crate::classify::Classifier;
use crate::config::Config;
use crate::engine::{Engine, ServiceCounters};
use crate::report::{Report, ServiceReport};

/// Datagrams of one socket in a row.
const BATCH: usize = 32;
/// Interval at which workers are checked, in nanoseconds; a new worker is accepted no later.
const CHECK_INTERVAL: u64 = 10_000_000;
/// Time that the idle daemon polls before it sleeps, in nanoseconds.
const SPIN: u64 = 20_000;
/// Receive buffer of a socket in bytes, as far as the kernel allows it.
const RECEIVE_BUFFER: usize = 4 << 20;

#[derive(Debug)]
pub struct Daemon {
    engine: Engine,
    listeners: Vec<Listener>,
    listener_of: Vec<usize>,
    started: Instant,
    sleep: Duration,
    unclassified: u64,
    unsent: u64,
    /// The report for the metrics, if they are served.
    published: Option<Arc<Mutex<Report>>>,
}

#[derive(Debug)]
struct Listener {
    address: SocketAddrV4,
    socket: UdpSocket,
    classifier: Classifier,
}

impl Daemon {
    /// Binds the sockets and creates the memory for the workers. Fails when a socket cannot be bound or the memory
    /// cannot be created.
    pub fn start(config: &Config) -> anyhow::Result<Self> {
        let mut listeners = Vec::new();
        let mut listener_of = vec![0; config.engine.services.len()];
        for (address, classifier) in &config.listeners {
            let socket = open(*address).with_context(|| format!("cannot listen on {address}"))?;
            classifier.rules.iter().for_each(|(service, _)| listener_of[usize::from(*service)] = listeners.len());
            listeners.push(Listener { address: *address, socket, classifier: classifier.clone() });
        }
        let engine = Engine::new(&config.memory, &config.engine)?;
        let (started, sleep) = (Instant::now(), config.sleep);
        let (unclassified, unsent, published) = (0, 0, None);
        let mut daemon = Self { engine, listeners, listener_of, started, sleep, unclassified, unsent, published };
        if config.metrics.is_some() {
            let published = Arc::new(Mutex::new(daemon.report()));
            daemon.published = Some(published.clone());
            let snapshot = move || published.lock().unwrap_or_else(PoisonError::into_inner).snapshot();
            metrics_endpoint::serve(config.metrics, || (), snapshot)?;
        }
        Ok(daemon)
    }

    /// Runs until `stop` is set. Fails when a socket fails.
    pub fn run(&mut self, stop: &AtomicBool) -> anyhow::Result<()> {
        // The default of 50 us is as long as a sleep.
        nix::sys::prctl::set_timerslack(1).context("cannot set the timer slack")?;
        let (mut next_check, mut idle_since) = (0, 0);
        while !stop.load(Relaxed) {
            let now = self.now();
            let work = self.receive(now)? + self.poll(now);
            self.engine.check_monitors(now);
            if now >= next_check {
                next_check = now + CHECK_INTERVAL;
                self.check_workers(now);
                if let Some(published) = &self.published {
                    *published.lock().unwrap_or_else(PoisonError::into_inner) = self.report();
                }
            }
            if work > 0 {
                idle_since = now;
            } else if now - idle_since < SPIN || self.sleep.is_zero() {
                std::hint::spin_loop();
            } else {
                self.wait(now, next_check)?;
            }
        }
        Ok(())
    }

    fn now(&self) -> u64 {
        self.started.elapsed().as_nanos() as u64
    }

    /// Submits the requests that are in the sockets. Returns their number.
    fn receive(&mut self, now: u64) -> anyhow::Result<usize> {
        let mut received = 0;
        for listener in &self.listeners {
            for _ in 0..BATCH {
                let (length, client) = match listener.socket.recv_from(self.engine.incoming()) {
                    Ok((length, SocketAddr::V4(client))) => (length, client),
                    Err(error) if error.kind() == ErrorKind::WouldBlock => break,
                    // An ICMP error about an earlier response, or a signal.
                    Err(error) if matches!(error.kind(), ErrorKind::ConnectionRefused | ErrorKind::Interrupted) => {
                        continue;
                    }
                    other => anyhow::bail!("{}: cannot receive: {other:?}", listener.address),
                };
                received += 1;
                match listener.classifier.service(&self.engine.incoming()[..length]) {
                    Some(service) => self.engine.submit(now, service, client, length),
                    None => self.unclassified += 1,
                }
            }
        }
        Ok(received)
    }

    fn poll(&mut self, now: u64) -> usize {
        let Self { engine, listeners, listener_of, unsent, .. } = self;
        engine.poll(now, &mut |service, client, response| {
            send(&listeners[listener_of[usize::from(service)]], client, response, unsent);
        })
    }

    fn check_workers(&mut self, now: u64) {
        let Self { engine, listeners, listener_of, unsent, .. } = self;
        engine.check_workers(now, &mut |service, client, response| {
            send(&listeners[listener_of[usize::from(service)]], client, response, unsent);
        });
    }

    /// Sleeps until a request arrives or something is due. Responses of workers wake no one, so the sleep is short
    /// while cores have requests.
    fn wait(&self, now: u64, next_check: u64) -> anyhow::Result<()> {
        let timer = self.engine.next_timer(now).unwrap_or(u64::MAX).min(next_check);
        let mut timeout = Duration::from_nanos(timer.saturating_sub(now));
        if self.engine.has_outstanding() {
            timeout = timeout.min(self.sleep);
        }
        let mut sockets: Vec<PollFd<'_>> =
            self.listeners.iter().map(|listener| PollFd::new(listener.socket.as_fd(), PollFlags::POLLIN)).collect();
        match ppoll(&mut sockets, Some(TimeSpec::from_duration(timeout)), None) {
            Ok(_) | Err(nix::errno::Errno::EINTR) => Ok(()),
            Err(error) => Err(error).context("cannot wait for requests"),
        }
    }

    /// The counters and gauges of this moment.
    pub fn report(&self) -> Report {
        let balancer = self.engine.balancer();
        let cores = 0..balancer.ranks().cores();
        let service = |(service, counters): (u8, &ServiceCounters)| ServiceReport {
            listen: self.listeners[self.listener_of[usize::from(service)]].address,
            counters: *counters,
            waiting: balancer.waiting(service),
            outstanding: cores.clone().map(|core| u64::from(balancer.ranks().outstanding(service, core))).sum(),
        };
        Report {
            services: (0..).zip(&self.engine.service_counters()).map(service).collect(),
            cores: *self.engine.core_counters(),
            workers: self.engine.attached_workers(),
            unclassified: self.unclassified,
            unsent: self.unsent,
        }
    }
}

fn send(listener: &Listener, client: SocketAddrV4, response: &[u8], unsent: &mut u64) {
    // A full send buffer or a client that is gone: the response is lost, as any datagram may be.
    if listener.socket.send_to(response, client).is_err() {
        *unsent += 1;
    }
}

fn open(address: SocketAddrV4) -> anyhow::Result<UdpSocket> {
    let socket = socket2::Socket::new(socket2::Domain::IPV4, socket2::Type::DGRAM, None)?;
    socket.set_recv_buffer_size(RECEIVE_BUFFER)?;
    socket.bind(&address.into())?;
    socket.set_nonblocking(true)?;
    Ok(socket.into())
}
