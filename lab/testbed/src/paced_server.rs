//! A server whose cores are emulated: each worker serves one request at a time, by the clock instead of by work, so
//! that two CPUs carry sixteen cores.
//!
//! Built like nginx with `reuseport`, as far as the agent can see: one listening socket per worker, opened by the
//! master and inherited by all; each worker is a process and waits only for its own. Worker K is called `coreK`.
//!
//! A worker's queue is a virtual clock: a request that arrives at t completes at max(t, busy until) + its service time,
//! until which the worker is busy. The answer is sent at that time. A late wake-up (some 50 us) delays answers but
//! takes nothing away from the core's capacity.

use std::collections::VecDeque;
use std::fs;
use std::io::{self, Read as _, Write as _};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::os::fd::AsFd as _;
use std::path::PathBuf;
use std::process::Command;
use std::sync::atomic::{AtomicU64, Ordering};

use anyhow::{Context as _, bail};
use nix::sys::wait::wait;
use nix::unistd::{ForkResult, Pid, fork};
use socket2::{Domain, Socket, Type};
use zerocopy::IntoBytes as _;

use crate::core_load_file::{BusyFile, VirtualCore, read_busy_file};
use crate::fleet;
use crate::process::Process;
use crate::topology::Testbed;
use coreward_load::event_loop::{Epoll, accept, now_ns};
use coreward_load::paced::{MESSAGE_BYTES, Messages, Request, Response, SERVICE_MAX_US};

/// A burst of connections to one core must not overflow its accept queue (cut by net.core.somaxconn, 4096).
const BACKLOG: i32 = 4096;

/// Options of `coreward-lab testbed paced-server`.
#[derive(Debug, Clone, clap::Args)]
pub struct PacedServerArgs {
    /// Address and port
    #[arg(long, value_name = "ADDRESS:PORT")]
    pub listen: SocketAddr,
    /// Number of workers, each an emulated core
    #[arg(long, default_value_t = 4, value_parser = clap::value_parser!(u8).range(1..=64))]
    pub workers: u8,
    /// File of one little-endian u64 per worker: its busy time (ns); created when all sockets listen
    #[arg(long, value_name = "FILE")]
    pub busy_file: PathBuf,
    /// Number of this server, which its answers contain
    #[arg(long, default_value_t = 1)]
    pub server: u8,
}

/// Serves until killed. Fails when it cannot listen, when the core load file cannot be made, or when a worker ends.
pub fn run(args: &PacedServerArgs) -> anyhow::Result<()> {
    let listeners: Vec<TcpListener> = (0..args.workers)
        .map(|_| listen(args.listen))
        .collect::<io::Result<_>>()
        .with_context(|| format!("cannot listen on {}", args.listen))?;
    let busy = BusyFile::create(&args.busy_file, args.workers.into())?;
    if fs::read_dir("/proc/self/task")?.count() != 1 {
        bail!("the paced server must be started from a process with a single thread: it forks");
    }
    let mut workers = Vec::new();
    for (core, listener) in (0..).zip(&listeners) {
        // SAFETY: there is one thread, so no lock can be held by another in the child.
        match unsafe { fork() }.context("cannot fork a worker")? {
            ForkResult::Parent { child } => workers.push(child),
            ForkResult::Child => {
                let outcome = work(core, listener, &busy, args.server);
                eprintln!("paced server: worker {core}: {:#}", outcome.unwrap_err());
                std::process::exit(1);
            }
        }
    }
    busy.publish(&args.busy_file)?;
    // Workers never end by themselves; whichever does takes the others with it (PR_SET_PDEATHSIG).
    let ended = wait()?;
    bail!("a worker of the paced server ended: {ended:?}");
}

fn listen(address: SocketAddr) -> io::Result<TcpListener> {
    let socket = Socket::new(Domain::for_address(address), Type::STREAM, None)?;
    socket.set_reuse_address(true)?;
    socket.set_reuse_port(true)?;
    socket.bind(&address.into())?;
    socket.listen(BACKLOG)?;
    socket.set_nonblocking(true)?;
    Ok(socket.into())
}

fn work(core: u8, listener: &TcpListener, busy: &BusyFile, server: u8) -> anyhow::Result<std::convert::Infallible> {
    nix::sys::prctl::set_pdeathsig(nix::sys::signal::Signal::SIGKILL)?;
    if nix::unistd::getppid() == Pid::from_raw(1) {
        bail!("the master has ended");
    }
    nix::sys::prctl::set_name(&std::ffi::CString::new(format!("core{core}"))?)?;
    let mut worker = Worker::new(server, core, listener)?;
    loop {
        worker.turn(&busy.numbers()[usize::from(core)])?;
    }
}

#[derive(Debug)]
struct Connection {
    stream: TcpStream,
    messages: Messages,
    /// Requests taken and not yet answered.
    pending: u32,
    /// The client sends no further bytes.
    ended: bool,
}

/// A request being served or waiting: in the order of completion, which is that of arrival.
#[derive(Debug)]
struct Job {
    done_ns: u64,
    connection: u64,
    id: u32,
}

struct Worker<'a> {
    server: u8,
    core: u8,
    listener: &'a TcpListener,
    epoll: Epoll,
    /// By number; numbers are never used again, so that a late job cannot answer on another's connection.
    connections: std::collections::HashMap<u64, Connection>,
    next_connection: u64,
    jobs: VecDeque<Job>,
    clock: VirtualCore,
}

/// Oldest published busy time of a busy core (ns): with reports of 100 ms, 4 %. Each publication costs a wake-up; the
/// demo's requests of 7.5 ms need one each.
const PUBLISH_INTERVAL_NS: u64 = 4_000_000;

/// The listener's token; connections count from 1.
const LISTENER: u64 = 0;

impl<'a> Worker<'a> {
    fn new(server: u8, core: u8, listener: &'a TcpListener) -> anyhow::Result<Self> {
        let epoll = Epoll::new()?;
        epoll.add(listener.as_fd(), LISTENER, libc::EPOLLIN)?;
        Ok(Self {
            server,
            core,
            listener,
            epoll,
            connections: Default::default(),
            next_connection: LISTENER + 1,
            jobs: VecDeque::new(),
            clock: VirtualCore::default(),
        })
    }

    /// Waits for the next request or completion and deals with all that are due.
    fn turn(&mut self, busy: &AtomicU64) -> anyhow::Result<()> {
        // Readers of the busy time see it grow in the midst of a request, as that of a real core.
        let wake_ns = self.jobs.front().map(|job| job.done_ns.min(now_ns() + PUBLISH_INTERVAL_NS));
        let events: Vec<_> = self.epoll.wait(wake_ns)?.collect();
        let now_ns = now_ns();
        for event in events {
            if event.token == LISTENER { self.accept_all()? } else { self.read(event.token, now_ns)? }
        }
        while self.jobs.front().is_some_and(|job| job.done_ns <= now_ns) {
            let job = self.jobs.pop_front().expect("just seen");
            self.answer(&job);
        }
        // One writer; readers need no order with other memory.
        busy.store(self.clock.busy_ns(now_ns).to_le(), Ordering::Relaxed);
        Ok(())
    }

    fn accept_all(&mut self) -> anyhow::Result<()> {
        while let Some(stream) = accept(self.listener).context("cannot accept")? {
            let number = self.next_connection;
            self.next_connection += 1;
            self.epoll.add(stream.as_fd(), number, libc::EPOLLIN)?;
            let connection = Connection { stream, messages: Messages::default(), pending: 0, ended: false };
            self.connections.insert(number, connection);
        }
        Ok(())
    }

    fn read(&mut self, number: u64, now_ns: u64) -> anyhow::Result<()> {
        let Some(connection) = self.connections.get_mut(&number) else { return Ok(()) };
        let mut buffer = [0; 4096];
        let mut acceptable = true;
        match connection.stream.read(&mut buffer) {
            Ok(0) => connection.ended = true,
            Ok(length) => connection.messages.take(&buffer[..length], |request: Request| {
                let service_us = request.service_us.get();
                acceptable &= service_us <= SERVICE_MAX_US;
                let done_ns = self.clock.accept(now_ns, u64::from(service_us.min(SERVICE_MAX_US)) * 1_000);
                self.jobs.push_back(Job { done_ns, connection: number, id: request.id.get() });
                connection.pending += 1;
            }),
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
            Err(_) => acceptable = false,
        }
        if !acceptable || (connection.ended && connection.pending == 0) {
            self.connections.remove(&number);
        } else if connection.ended {
            // Level-triggered: an end that stays unread would wake us until the last answer is out.
            self.epoll.remove(connection.stream.as_fd())?;
        }
        Ok(())
    }

    fn answer(&mut self, job: &Job) {
        let Some(connection) = self.connections.get_mut(&job.connection) else { return };
        let response = Response { id: job.id.into(), server: self.server, core: self.core, reserved: [0; 2] };
        let written = connection.stream.write(response.as_bytes());
        connection.pending -= 1;
        // A client that leaves a full buffer of answers unread is given up.
        if !matches!(written, Ok(MESSAGE_BYTES)) || (connection.ended && connection.pending == 0) {
            self.connections.remove(&job.connection);
        }
    }
}

/// A paced server on a testbed's server; killed when dropped.
#[derive(Debug)]
pub struct PacedServer {
    process: Process,
    busy_file: PathBuf,
}

impl PacedServer {
    /// Process id of the master.
    pub fn pid(&self) -> u32 {
        self.process.pid()
    }

    /// Busy time of each core (ns). Fails when the core load file cannot be read.
    pub fn busy_ns(&self) -> anyhow::Result<Vec<u64>> {
        read_busy_file(&self.busy_file)
    }
}

impl Testbed {
    /// Starts a paced server with one worker per core on a server. Fails when there is no such server, or it does not
    /// listen in time.
    pub fn start_paced_server(&self, number: u16) -> anyhow::Result<PacedServer> {
        let busy_file = fleet::busy_file(self, number);
        let mut command = Command::new(fleet::lab_command()?);
        command.args(["testbed", "paced-server", "--listen", &self.service().to_string()]);
        command.args(["--workers", &self.options().cores.to_string(), "--server", &number.to_string()]);
        command.arg("--busy-file").arg(&busy_file);
        let mut process = self.spawn(self.server(number)?, command)?;
        process.wait_for_file(&format!("the paced server of server {number}"), &busy_file)?;
        Ok(PacedServer { process, busy_file })
    }
}
