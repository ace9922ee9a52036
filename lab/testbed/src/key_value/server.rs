//! `coreward-lab testbed key-value-server`, whose master process starts and restarts the workers.

use std::net::{SocketAddr, UdpSocket};
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::time::Duration;

use anyhow::{Context as _, bail};
use coreward_load::key_value::MAX_VALUE_BYTES;
use coreward_load::request_type::ServiceTimesByType;
use nix::errno::Errno;
use nix::sys::wait::{WaitPidFlag, WaitStatus, waitpid};
use nix::unistd::Pid;
use serde::Serialize;
use socket2::{Domain, Socket, Type};

use super::store::{InMemoryStore, MAX_ADDED_PAIR_COUNT};
use super::worker::{KeyValueWorker, ServiceTimeSource, SharedWorkerCounters, set_receive_buffer_size};
use crate::core_load_file::SharedCounterFile;
use crate::emulated_server::fork_worker;
use crate::interrupt_flag;

/// Interval between the master process's checks for ended workers and for signals.
const WORKER_PROCESS_POLL_INTERVAL: Duration = Duration::from_millis(20);

/// Options of `coreward-lab testbed key-value-server`.
#[derive(Debug, Clone, clap::Args)]
pub struct KeyValueServerArgs {
    /// UDP address and port to listen on
    #[arg(long, value_name = "ADDRESS:PORT")]
    pub listen: SocketAddr,
    /// Number of workers, each with its own socket
    #[arg(long, default_value_t = 4, value_parser = clap::value_parser!(u8).range(1..=64))]
    pub workers: u8,
    /// Initial number of keys, which are named user0000000000 and so on
    #[arg(long, default_value_t = 10_000)]
    pub keys: u32,
    /// Length of the initial values (bytes)
    #[arg(long, default_value_t = 32, value_parser = clap::value_parser!(u16).range(..=MAX_VALUE_BYTES as i64))]
    pub value_bytes: u16,
    /// Use threads with one store, instead of processes with one store each
    #[arg(long)]
    pub threads: bool,
    /// Emulate service times: a request takes the time that it carries, or else the time of its type
    #[arg(long)]
    pub paced: bool,
    /// Service times of request types (us) [default: the times of Turbo's Figure 7]
    #[arg(long, value_name = "TYPE=US,...", requires = "paced")]
    pub service_us: Option<ServiceTimesByType>,
    /// Factor of the service times of Turbo's Figure 7 (GET 0.975 us, PUT 1.35, SCAN18 4.7, SCAN46 9.18, SCAN105 17.7)
    #[arg(long, default_value_t = 1.0, requires = "paced")]
    pub multiplier: f64,
    /// Receive buffer of each socket (bytes), in which requests wait [default: the kernel's]
    #[arg(long, value_name = "BYTES")]
    pub receive_buffer: Option<usize>,
    /// Restart a worker when it ends
    #[arg(long, conflicts_with = "threads")]
    pub restart: bool,
    /// Keep the workers' sockets open in the master, too, as nginx does: requests for a dead worker wait for its
    /// successor
    #[arg(long, conflicts_with = "threads")]
    pub keep_sockets: bool,
    /// File of four little-endian u64 per worker (received, answered, refused, busy ns), created when all sockets are
    /// bound
    #[arg(long, value_name = "FILE")]
    pub counter_file: Option<PathBuf>,
    /// File of one little-endian u64 per worker, its busy time (ns), for an agent; created when all sockets are bound
    #[arg(long, value_name = "FILE")]
    pub busy_file: Option<PathBuf>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize)]
pub struct KeyValueWorkerCounters {
    /// Number of datagrams that the worker read.
    pub received: u64,
    /// Number of requests that the worker answered.
    pub answered: u64,
    /// Number of datagrams that the worker did not answer, because they were invalid or had no service time.
    pub refused: u64,
    /// Time that the worker has spent on requests (ns).
    pub busy_ns: u64,
}

impl From<&[u64; SharedWorkerCounters::COUNTERS_PER_WORKER]> for KeyValueWorkerCounters {
    fn from(&[received, answered, refused, busy_ns]: &[u64; SharedWorkerCounters::COUNTERS_PER_WORKER]) -> Self {
        Self { received, answered, refused, busy_ns }
    }
}

/// Serves requests until SIGINT or SIGTERM, and then prints the counters of each worker as one line of JSON. Fails when
/// it cannot listen, when an option is invalid, or when all workers have ended.
pub fn run_key_value_server(args: &KeyValueServerArgs) -> anyhow::Result<()> {
    interrupt_flag::catch_signals()?;
    let mut server = KeyValueMaster::new(args)?;
    let serve_result = if args.threads { server.serve_with_threads() } else { server.serve_with_processes() };
    println!("{}", serde_json::to_string(&server.read_all_counters())?);
    serve_result
}

struct KeyValueMaster<'a> {
    args: &'a KeyValueServerArgs,
    store: Arc<InMemoryStore>,
    service_time_source: ServiceTimeSource,
    counter_file: SharedCounterFile,
    /// Core load file with the workers' busy times, to be read by an agent.
    core_load_file: Option<SharedCounterFile>,
    /// Master's copy of each worker's socket, or `None` if only the worker process has the socket.
    worker_sockets: Vec<Option<UdpSocket>>,
}

impl<'a> KeyValueMaster<'a> {
    fn new(args: &'a KeyValueServerArgs) -> anyhow::Result<Self> {
        let store =
            InMemoryStore::with_keys(args.keys, args.value_bytes.into(), args.keys as usize + MAX_ADDED_PAIR_COUNT);
        let service_time = if args.paced {
            let specified_times = args.service_us.clone().unwrap_or_default();
            ServiceTimeSource::EmulatedTime(
                ServiceTimesByType::scaled_turbo_times(args.multiplier)?.with_overrides(&specified_times),
            )
        } else {
            ServiceTimeSource::RealWork
        };
        let temporary_counter_path = std::env::temp_dir().join(format!("coreward-key-value-{}", std::process::id()));
        let counter_file_path = args.counter_file.as_ref().unwrap_or(&temporary_counter_path);
        let counter_file = SharedCounterFile::create(
            counter_file_path,
            usize::from(args.workers) * SharedWorkerCounters::COUNTERS_PER_WORKER,
        )?;
        if args.counter_file.is_none() {
            counter_file.unlink()?;
        }
        let core_load_file =
            args.busy_file.as_ref().map(|path| SharedCounterFile::create(path, args.workers.into())).transpose()?;
        Ok(Self {
            args,
            store: Arc::new(store),
            service_time_source: service_time,
            counter_file,
            core_load_file,
            worker_sockets: Vec::new(),
        })
    }

    fn worker_busy_time_counter(&self, worker: u8) -> Option<&'static AtomicU64> {
        self.core_load_file.as_ref()?.counters().get(usize::from(worker))
    }

    fn shared_worker_counters(&self, worker: u8) -> SharedWorkerCounters {
        let (counter_chunks, _) = self.counter_file.counters().as_chunks();
        SharedWorkerCounters(&counter_chunks[usize::from(worker)])
    }

    fn read_all_counters(&self) -> Vec<KeyValueWorkerCounters> {
        (0..self.args.workers)
            .map(|worker| KeyValueWorkerCounters::from(&self.shared_worker_counters(worker).read_counters()))
            .collect()
    }

    fn open_socket(&self) -> anyhow::Result<UdpSocket> {
        let open_and_bind = || -> anyhow::Result<UdpSocket> {
            let socket = Socket::new(Domain::for_address(self.args.listen), Type::DGRAM, None)?;
            socket.set_reuse_port(true)?;
            socket.bind(&self.args.listen.into())?;
            let socket = UdpSocket::from(socket);
            if let Some(bytes) = self.args.receive_buffer {
                set_receive_buffer_size(&socket, bytes)?;
            }
            Ok(socket)
        };
        open_and_bind().with_context(|| format!("cannot listen on {}", self.args.listen))
    }

    fn publish_counter_files(&self) -> anyhow::Result<()> {
        if let (Some(path), Some(core_load_file)) = (&self.args.busy_file, &self.core_load_file) {
            core_load_file.publish(path)?;
        }
        if let Some(path) = &self.args.counter_file {
            self.counter_file.publish(path)?;
        }
        tracing::info!(
            event = "listening",
            workers = self.args.workers,
            address = %self.args.listen,
            "the key-value server listens"
        );
        Ok(())
    }

    fn serve_with_threads(&mut self) -> anyhow::Result<()> {
        let (error_sender, error_receiver) = std::sync::mpsc::channel();
        for worker in 0..self.args.workers {
            let (socket, counters, busy_ns) =
                (self.open_socket()?, self.shared_worker_counters(worker), self.worker_busy_time_counter(worker));
            let (store, service_time, error_sender) =
                (Arc::clone(&self.store), self.service_time_source.clone(), error_sender.clone());
            let run_worker = move || {
                let worker = KeyValueWorker {
                    worker_number: worker.into(),
                    socket: &socket,
                    store: &store,
                    service_time_source: &service_time,
                    counters,
                    published_busy_ns: busy_ns,
                };
                // Sending fails only if the master has ended.
                let _ = error_sender.send(worker.run().unwrap_err());
            };
            std::thread::Builder::new().name(format!("core{worker}")).spawn(run_worker)?;
        }
        self.publish_counter_files()?;
        while interrupt_flag::ensure_not_interrupted().is_ok() {
            if let Ok(failure) = error_receiver.recv_timeout(WORKER_PROCESS_POLL_INTERVAL) {
                return Err(failure);
            }
        }
        Ok(())
    }

    fn serve_with_processes(&mut self) -> anyhow::Result<()> {
        let mut worker_pids = Vec::new();
        for worker in 0..self.args.workers {
            // Start in order, because the kernel numbers the sockets of a group in the order in which they are bound.
            self.worker_sockets.push(None);
            worker_pids.push(self.fork_worker_process(worker)?);
        }
        self.publish_counter_files()?;
        // Poll instead of calling wait(2), because a signal just before wait(2) would not end the call.
        while interrupt_flag::ensure_not_interrupted().is_ok() {
            match waitpid(None, Some(WaitPidFlag::WNOHANG)) {
                Ok(WaitStatus::Exited(pid, _) | WaitStatus::Signaled(pid, ..)) => {
                    let Some(worker) = worker_pids.iter().position(|worker| *worker == Some(pid)) else { continue };
                    tracing::warn!(event = "worker-ended", worker, %pid, "a worker ended");
                    worker_pids[worker] =
                        if self.args.restart { self.fork_worker_process(worker as u8)? } else { None };
                    if worker_pids.iter().all(Option::is_none) {
                        bail!("all workers have ended");
                    }
                }
                Ok(_) | Err(Errno::EINTR) => std::thread::sleep(WORKER_PROCESS_POLL_INTERVAL),
                Err(error) => return Err(error).context("cannot wait for the workers"),
            }
        }
        Ok(())
    }

    /// Forks a worker process with the master's copy of the worker's socket, or with a new socket if there is no copy.
    fn fork_worker_process(&mut self, number: u8) -> anyhow::Result<Option<Pid>> {
        let worker_index = usize::from(number);
        let socket = self.worker_sockets[worker_index].take().map_or_else(|| self.open_socket(), Ok)?;
        let worker_pid = fork_worker("key-value server", number, || self.run_worker(number, &socket))?;
        // Without a copy in the master, the socket is closed when its worker ends, and leaves the group.
        self.worker_sockets[worker_index] = self.args.keep_sockets.then_some(socket);
        Ok(Some(worker_pid))
    }

    fn run_worker(&self, number: u8, socket: &UdpSocket) -> anyhow::Result<std::convert::Infallible> {
        interrupt_flag::reset_signals_in_child()?;
        let (counters, busy_ns) = (self.shared_worker_counters(number), self.worker_busy_time_counter(number));
        KeyValueWorker {
            worker_number: number.into(),
            socket,
            store: &self.store,
            service_time_source: &self.service_time_source,
            counters,
            published_busy_ns: busy_ns,
        }
        .run()
    }
}
