//! `coreward-lab testbed orchestrated-server`: a key-value server on the cores of `coreward orchestrate`.
//!
//! It answers GET, PUT and SCAN as [`crate::key_value`] does, with one store for all its cores. A request with a
//! service time of its own first computes for so long and yields to requests of higher priority meanwhile. The thread
//! of a core connects again when the orchestrator ends.

use std::num::NonZeroU64;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::time::{Duration, Instant};

use coreward_load::key_value::{Request as KeyValueRequest, ResponseWriter};
use coreward_model::dispatch::{Assignment, Epoch, ScaleDown, ScaleUp};
use coreward_runtime::RuntimeError;
use coreward_runtime::allocation::CoreAllocator;
use coreward_runtime::message::{HintMessage, Trigger};
use coreward_runtime::serve::{Context, Handler, Reply, Request, ServeCounters, ServeOptions};
use coreward_runtime::worker::{Runtime, Worker};

use crate::interrupt;
use crate::key_value::store::Store;

/// Keys that clients may add.
const MORE_PAIRS: usize = 1_000_000;
const RETRY_INTERVAL: Duration = Duration::from_millis(20);
/// A call of `yield_point` that takes longer has served another request.
const YIELD_TIME: Duration = Duration::from_micros(1);

/// Options of `coreward-lab testbed orchestrated-server`.
#[derive(Debug, Clone, clap::Args)]
pub struct OrchestratedServerArgs {
    /// File of the orchestrator's shared memory
    #[arg(long, value_name = "FILE")]
    memory: PathBuf,
    /// Numbers of the cores, each with a thread
    #[arg(long, value_delimiter = ',', required = true, value_name = "CORE,...")]
    cores: Vec<u16>,
    /// Number of keys at the start: user0000000000 and on
    #[arg(long, default_value_t = 10_000)]
    keys: u32,
    /// Length of their values (bytes)
    #[arg(long, default_value_t = 32)]
    value_bytes: u16,
    /// Time after which a request yields to one of higher priority (us)
    #[arg(long, default_value_t = 5)]
    quantum_us: u64,
    /// Assignment of the cores to services 0 and 1, changed by load hints of service 0: share, dedicated or hybrid
    #[arg(long, default_value_t = Assignment::CompleteShare)]
    assignment: Assignment,
    /// Cores that each service keeps for itself
    #[arg(long, default_value_t = 1)]
    reserved: u16,
    /// Interval of the load monitor's checks (us); it scales down after four calm ones
    #[arg(long, default_value_t = 1000, value_parser = clap::value_parser!(u64).range(1..1_000_000_000))]
    epoch_us: u64,
}

struct KeyValue {
    store: Store,
    /// `None`: every service runs on every core.
    allocator: Option<CoreAllocator>,
}

impl Handler for KeyValue {
    fn handle(&self, request: &Request<'_>, response: &mut Vec<u8>, context: &mut Context<'_>) -> Reply {
        let Ok(request) = KeyValueRequest::parse(request.payload) else { return Reply::Nothing };
        compute(Duration::from_nanos(request.service_ns.into()), context);
        let mut writer = ResponseWriter::default();
        self.store.answer(&request, context.core(), &mut writer);
        let mut datagrams = writer.finish();
        let (Some(only), None) = (datagrams.next(), datagrams.next()) else { return Reply::Nothing };
        response.extend_from_slice(only);
        Reply::Send
    }

    fn load_hint(&self, hint: HintMessage, worker: &mut Worker<'_>) -> Result<(), RuntimeError> {
        match &self.allocator {
            Some(allocator) => allocator.act(hint, worker),
            None => worker.rearm_load_monitor(hint.service),
        }
    }
}

/// Computes for so long, without the time of the requests that preempt it.
fn compute(time: Duration, context: &mut Context<'_>) {
    let mut end = Instant::now() + time;
    loop {
        let before = Instant::now();
        if before >= end {
            return;
        }
        context.yield_point();
        let yielded = before.elapsed();
        if yielded > YIELD_TIME {
            end += yielded;
        }
    }
}

/// Serves until SIGINT or SIGTERM, then prints the number of requests that each core served, as JSON. Fails when
/// signals cannot be handled.
pub fn run(args: &OrchestratedServerArgs) -> anyhow::Result<()> {
    interrupt::catch()?;
    let store = Store::with_keys(args.keys, args.value_bytes.into(), args.keys as usize + MORE_PAIRS);
    let cores = args.cores.iter().max().map_or(0, |last| last + 1);
    let is_allocated = args.assignment != Assignment::CompleteShare;
    let allocator = is_allocated.then(|| CoreAllocator::new(args.assignment, cores, args.reserved));
    let server = KeyValue { store, allocator };
    let stop = AtomicBool::new(false);
    let served: Vec<u64> = std::thread::scope(|scope| {
        let serve = |core: &u16| {
            let core = *core;
            let (server, stop) = (&server, &stop);
            scope.spawn(move || serve_core(args, core, server, stop))
        };
        let threads: Vec<_> = args.cores.iter().map(serve).collect();
        while interrupt::check().is_ok() {
            std::thread::sleep(RETRY_INTERVAL);
        }
        stop.store(true, Relaxed);
        threads.into_iter().map(|thread| thread.join().expect("the thread of a core")).collect()
    });
    println!("{}", serde_json::to_string(&served)?);
    Ok(())
}

/// Serves a core and connects again after each error. Returns the number of served requests.
fn serve_core(args: &OrchestratedServerArgs, core: u16, server: &KeyValue, stop: &AtomicBool) -> u64 {
    let mut served = 0;
    while !stop.load(Relaxed) {
        match connect_and_serve(args, core, server, stop) {
            Ok(counters) => served += counters.served,
            Err(error) => {
                tracing::info!(event = "reconnecting", core, %error, "connecting again");
                std::thread::sleep(RETRY_INTERVAL);
            }
        }
    }
    served
}

fn connect_and_serve(
    args: &OrchestratedServerArgs,
    core: u16,
    server: &KeyValue,
    stop: &AtomicBool,
) -> Result<ServeCounters, RuntimeError> {
    let runtime = Runtime::connect(&args.memory)?;
    let services = runtime.services();
    for (service, entry) in (0..).zip(&services) {
        match runtime.register_service(service, entry.address, entry.priority) {
            // The thread of another core has registered it.
            Ok(()) | Err(RuntimeError::RegisteredTwice(_)) => (),
            Err(error) => return Err(error),
        }
    }
    let mut worker = runtime.worker(core)?;
    match &server.allocator {
        None => (0..services.len() as u8).try_for_each(|service| worker.enable_service(service, core))?,
        Some(allocator) => {
            allocator.attach(&mut worker)?;
            if args.cores.first() == Some(&core) {
                enable_monitor(args, &mut worker)?;
            }
        }
    }
    let options = ServeOptions { quantum: Duration::from_micros(args.quantum_us), ..ServeOptions::default() };
    worker.serve(server, options, stop)
}

/// Enables the load monitor of service 0.
fn enable_monitor(args: &OrchestratedServerArgs, worker: &mut Worker<'_>) -> Result<(), RuntimeError> {
    let epoch = Epoch::new(NonZeroU64::new(args.epoch_us * 1000).expect("an epoch of 1 us or more"));
    let down = ScaleDown { epoch, threshold: 0, calm_epochs: 4 };
    worker.enable_load_monitor(0, Trigger::ScaleUp(ScaleUp { epoch }))?;
    worker.enable_load_monitor(0, Trigger::ScaleDown(down))
}
