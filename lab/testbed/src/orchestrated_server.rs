//! `coreward-lab testbed orchestrated-server` is a key-value server on the cores of `coreward orchestrate`.
//!
//! It answers GET, PUT and SCAN like [`crate::key_value`], with one database for all cores. A request with a service
//! time first computes (or sleeps if paced) for that time, and yields to requests of higher priority. When the
//! orchestrator ends, the threads of the cores reconnect.

mod batch;
mod core_clock;

use std::num::NonZeroU64;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::Relaxed};
use std::time::{Duration, Instant};

use coreward_load::key_value::{KeyValueRequest, KeyValueResponseWriter};
use coreward_model::dispatch::{
    CoreAssignmentMode, LoadCheckInterval, MAX_SCHEDULED_SERVICES, ReservedCores, ScaleDownCondition, ScaleUpCondition,
};
use coreward_runtime::RuntimeError;
use coreward_runtime::allocation::SharedCoreAllocator;
use coreward_runtime::serve::{self, HandlerReplyAction, HandlerRequest, RequestHandler, ServeCounters, ServeOptions};
use coreward_runtime::worker::{OrchestratorConnection, Worker};
use coreward_runtime::worker_message::{LoadHintMessage, LoadHintTrigger};

use crate::core_load_file::SharedCounterFile;
use crate::interrupt_flag;
use crate::key_value::rocksdb::RocksDb;
use crate::key_value::store::{InMemoryStore, KeyValueDatabase, MAX_ADDED_PAIR_COUNT};
use core_clock::CoreClock;

const POLL_OR_RECONNECT_INTERVAL: Duration = Duration::from_millis(20);
/// Maximum duration of a `yield_point` call in which no other request is served.
const MAX_IDLE_YIELD_DURATION: Duration = Duration::from_micros(1);

/// Options of `coreward-lab testbed orchestrated-server`.
#[derive(Debug, Clone, clap::Args)]
pub struct OrchestratedServerArgs {
    /// File of the orchestrator's shared memory
    #[arg(long, value_name = "FILE")]
    memory: PathBuf,
    /// Numbers of the cores to run, each with a thread
    #[arg(long, value_delimiter = ',', required = true, value_name = "CORE,...")]
    cores: Vec<u16>,
    /// Number of keys at the start, which are named user0000000000 and so on
    #[arg(long, default_value_t = 10_000)]
    keys: u32,
    /// Length of the values (bytes)
    #[arg(long, default_value_t = 32)]
    value_bytes: u16,
    /// Directory of a RocksDB database with the keys [default: in memory]
    #[arg(long, value_name = "DIRECTORY")]
    rocksdb: Option<PathBuf>,
    /// Time after which a request yields to a request of higher priority (us)
    #[arg(long, default_value_t = 5)]
    quantum_us: u64,
    /// Assignment of the cores to services 0 and 1, changed by load hints of service 0: share, dedicated or hybrid
    #[arg(long, default_value_t = CoreAssignmentMode::CompleteShare)]
    assignment: CoreAssignmentMode,
    /// Cores that are reserved for services 0 and 1: one number for both, or two as in 2:0
    #[arg(long, default_value_t = ReservedCores([1, 1]))]
    reserved: ReservedCores,
    /// Interval of the load monitor's checks (us); after four checks without waiting requests, a core is given up
    #[arg(long, default_value_t = 1000, value_parser = clap::value_parser!(u64).range(1..1_000_000_000))]
    epoch_us: u64,
    /// Emulate service times: cores sleep for the service time, so that many cores fit on few CPUs
    #[arg(long)]
    paced: bool,
    /// Time that an idle core sleeps between two polls (us)
    #[arg(long, default_value_t = 50, value_parser = clap::value_parser!(u64).range(1..=1_000_000))]
    sleep_us: u64,
    /// Time that a paced core needs to switch to a request of another service (us)
    #[arg(long, default_value_t = 0, requires = "paced")]
    switch_us: u64,
    /// Service time of a batch that keeps two requests of service 1 per core under way (us) [default: no batch]
    #[arg(long, value_parser = clap::value_parser!(u32).range(1..=4_000_000))]
    batch_us: Option<u32>,
    /// File of a little-endian u64 for each of 64 services: the service's time on the cores (ns); created when all
    /// cores are connected
    #[arg(long, value_name = "FILE")]
    busy_file: Option<PathBuf>,
}

impl OrchestratedServerArgs {
    fn build_serve_options(&self) -> ServeOptions {
        let (quantum, sleep) = (Duration::from_micros(self.quantum_us), Duration::from_micros(self.sleep_us));
        let options = ServeOptions { quantum, sleep_time: sleep, ..ServeOptions::default() };
        if !self.paced {
            return options;
        }
        // The core's clock ends a slice. The worker may wake slightly before the runtime's quantum ends, so the quantum
        // is halved.
        ServeOptions { quantum: quantum / 2, spin_time: Duration::ZERO, ..options }
    }

    fn build_core_clock(&self) -> Option<CoreClock> {
        let times = [self.quantum_us, self.sleep_us, self.switch_us];
        let [slice, sleep, switch] = times.map(Duration::from_micros);
        self.paced.then(|| CoreClock::new(slice, sleep, switch))
    }
}

struct SharedServerState {
    database: Box<dyn KeyValueDatabase>,
    /// Allocator that assigns cores to services, or `None` if every service runs on every core.
    core_allocator: Option<SharedCoreAllocator>,
    /// Number of workers that have connected so far.
    connected_worker_count: AtomicUsize,
    /// Core load file that contains, for each service, its total time on all cores.
    core_load_file: Option<SharedCounterFile>,
}

impl SharedServerState {
    fn add_busy_time(&self, service: u8, time: Duration) {
        let Some(core_load_file) = &self.core_load_file else { return };
        let add_time = |number| Some((u64::from_le(number) + time.as_nanos() as u64).to_le());
        // Readers need no ordering with other memory.
        let _ = core_load_file.counters()[usize::from(service)].fetch_update(Relaxed, Relaxed, add_time);
    }
}

/// Request handler of one core.
struct CoreRequestHandler<'s> {
    shared_state: &'s SharedServerState,
    /// Clock of a paced core, or `None` if the core really executes for the service time.
    core_clock: Option<CoreClock>,
}

impl RequestHandler for CoreRequestHandler<'_> {
    fn handle(
        &self,
        request: &HandlerRequest<'_>,
        response: &mut Vec<u8>,
        context: &mut serve::HandlerContext<'_>,
    ) -> HandlerReplyAction {
        let service = request.service;
        let Ok(request) = KeyValueRequest::parse(request.payload) else { return HandlerReplyAction::NoReply };
        let time = Duration::from_nanos(request.service_ns.into());
        match &self.core_clock {
            Some(clock) => clock.serve_request(service, time, || context.yield_point()),
            None => keep_core_busy_for(time, context),
        }
        self.shared_state.add_busy_time(service, time);
        let mut writer = KeyValueResponseWriter::default();
        self.shared_state.database.answer_request(&request, context.core(), &mut writer);
        let mut datagrams = writer.finish_response();
        let (Some(single_datagram), None) = (datagrams.next(), datagrams.next()) else {
            return HandlerReplyAction::NoReply;
        };
        response.extend_from_slice(single_datagram);
        HandlerReplyAction::Send
    }

    fn handle_load_hint(&self, hint: LoadHintMessage, worker: &mut Worker<'_>) -> Result<(), RuntimeError> {
        match &self.shared_state.core_allocator {
            Some(allocator) => allocator.apply_hint(hint, worker),
            None => worker.rearm_load_monitor(hint.service),
        }
    }
}

/// Keeps the core busy with the present request for `time`, not counting the time of requests that preempt it.
fn keep_core_busy_for(time: Duration, context: &mut serve::HandlerContext<'_>) {
    let mut deadline = Instant::now() + time;
    loop {
        let yield_start = Instant::now();
        if yield_start >= deadline {
            return;
        }
        context.yield_point();
        let yield_duration = yield_start.elapsed();
        if yield_duration > MAX_IDLE_YIELD_DURATION {
            deadline += yield_duration;
        }
    }
}

fn open_database(args: &OrchestratedServerArgs) -> anyhow::Result<Box<dyn KeyValueDatabase>> {
    let value_length = args.value_bytes.into();
    Ok(match &args.rocksdb {
        Some(directory) => Box::new(RocksDb::open(directory, args.keys, value_length)?),
        None => Box::new(InMemoryStore::with_keys(args.keys, value_length, args.keys as usize + MAX_ADDED_PAIR_COUNT)),
    })
}

/// Serves requests until SIGINT or SIGTERM, and then prints the number of requests that each core served, as JSON.
/// Fails when signals cannot be handled, or when the database cannot be opened.
pub fn run_orchestrated_server(args: &OrchestratedServerArgs) -> anyhow::Result<()> {
    interrupt_flag::catch_signals()?;
    let database = open_database(args)?;
    let core_count = args.cores.iter().max().map_or(0, |last| last + 1);
    let needs_allocator = args.assignment != CoreAssignmentMode::CompleteShare;
    let allocator = needs_allocator.then(|| SharedCoreAllocator::new(args.assignment, core_count, args.reserved));
    let core_load_file =
        args.busy_file.as_ref().map(|path| SharedCounterFile::create(path, MAX_SCHEDULED_SERVICES)).transpose()?;
    let server = SharedServerState {
        database,
        core_allocator: allocator,
        connected_worker_count: AtomicUsize::new(0),
        core_load_file,
    };
    let stop_flag = AtomicBool::new(false);
    let served_count_by_core: Vec<u64> = std::thread::scope(|scope| {
        let (server, stop_flag) = (&server, &stop_flag);
        let start_core_thread = |core: &u16| {
            let core = *core;
            scope.spawn(move || serve_core(args, core, server, stop_flag))
        };
        let threads: Vec<_> = args.cores.iter().map(start_core_thread).collect();
        if let Some(service_us) = args.batch_us {
            let (memory, window) = (&args.memory, 2 * args.cores.len());
            scope.spawn(move || batch::run_batch_client(memory, window, service_us, stop_flag));
        }
        let wait_result = wait_for_signal(args, server);
        stop_flag.store(true, Relaxed);
        let served_counts = threads.into_iter().map(|thread| thread.join().expect("the thread of a core"));
        wait_result.map(|()| served_counts.collect())
    })?;
    println!("{}", serde_json::to_string(&served_count_by_core)?);
    Ok(())
}

/// Waits for SIGINT or SIGTERM. In the meantime, moves the core load file to its final path as soon as all cores are
/// connected.
fn wait_for_signal(args: &OrchestratedServerArgs, shared_state: &SharedServerState) -> anyhow::Result<()> {
    let mut unpublished_file = shared_state.core_load_file.as_ref().zip(args.busy_file.as_ref());
    while interrupt_flag::ensure_not_interrupted().is_ok() {
        if shared_state.connected_worker_count.load(Relaxed) >= args.cores.len()
            && let Some((core_load_file, path)) = unpublished_file.take()
        {
            core_load_file.publish(path)?;
        }
        std::thread::sleep(POLL_OR_RECONNECT_INTERVAL);
    }
    Ok(())
}

/// Serves the requests of one core, and reconnects after each error. Returns the number of requests served.
fn serve_core(
    args: &OrchestratedServerArgs,
    core: u16,
    shared_state: &SharedServerState,
    stop_flag: &AtomicBool,
) -> u64 {
    if args.paced {
        // The default timer slack of 50 us delays each wake-up. If setting it fails, the core only wakes later.
        let _ = nix::sys::prctl::set_timerslack(1);
    }
    let server = CoreRequestHandler { shared_state, core_clock: args.build_core_clock() };
    let mut served_count = 0;
    while !stop_flag.load(Relaxed) {
        match connect_and_serve(args, core, &server, stop_flag) {
            Ok(counters) => served_count += counters.served_requests,
            Err(error) => {
                tracing::info!(event = "reconnecting", core, %error, "orchestrator unavailable: connecting again");
                std::thread::sleep(POLL_OR_RECONNECT_INTERVAL);
            }
        }
    }
    served_count
}

fn connect_and_serve(
    args: &OrchestratedServerArgs,
    core: u16,
    server: &CoreRequestHandler<'_>,
    stop_flag: &AtomicBool,
) -> Result<ServeCounters, RuntimeError> {
    let runtime = OrchestratorConnection::connect(&args.memory)?;
    let services = runtime.service_entries();
    for (service, entry) in (0..).zip(&services) {
        match runtime.register_service(service, entry.address, entry.priority) {
            // Another core's thread has already registered the service.
            Ok(()) | Err(RuntimeError::ServiceRegisteredTwice(_)) => (),
            Err(error) => return Err(error),
        }
    }
    let mut worker = runtime.attach_worker(core)?;
    match &server.shared_state.core_allocator {
        None => (0..services.len() as u8).try_for_each(|service| worker.enable_service(service, core))?,
        Some(allocator) => {
            allocator.enable_assigned_services(&mut worker)?;
            if args.cores.first() == Some(&core) {
                enable_load_monitor(args, &mut worker)?;
            }
        }
    }
    server.shared_state.connected_worker_count.fetch_add(1, Relaxed);
    worker.serve(server, args.build_serve_options(), stop_flag)
}

/// Enables the load monitor of service 0 on this worker.
fn enable_load_monitor(args: &OrchestratedServerArgs, worker: &mut Worker<'_>) -> Result<(), RuntimeError> {
    let epoch_length = LoadCheckInterval::new(NonZeroU64::new(args.epoch_us * 1000).expect("an epoch of 1 us or more"));
    let scale_down = ScaleDownCondition { epoch_length, max_calm_queue_length: 0, required_calm_epochs: 4 };
    worker.enable_load_monitor(0, LoadHintTrigger::ScaleUp(ScaleUpCondition { epoch_length }))?;
    worker.enable_load_monitor(0, LoadHintTrigger::ScaleDown(scale_down))
}
