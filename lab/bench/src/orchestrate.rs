//! Measures the cost of `coreward orchestrate`: its decisions, round trips through shared memory, messages and sockets.

mod sockets;
mod veth;

use std::collections::VecDeque;
use std::net::{SocketAddr, SocketAddrV4, UdpSocket};
use std::num::NonZeroU16;
use std::path::PathBuf;
use std::sync::atomic::Ordering::{Acquire, Relaxed, Release};
use std::sync::atomic::{AtomicBool, AtomicU64};
use std::time::{Duration, Instant};

use anyhow::{Context as _, ensure};
use coreward_model::dispatch::{
    CoreRankRule, FirstEligibleOutConfig, JoinBoundedShortestRankedQueue, LoadHint, RankArrays, RankLambda,
    RankedService,
};
use coreward_model::statistics::median;
use coreward_orchestrator::dispatch_engine::{DispatchEngine, DispatchEngineConfig, EngineServiceConfig};
use coreward_runtime::core_queues::CoreQueues;
use coreward_runtime::segment_layout::SegmentGeometry;
use coreward_runtime::serve::{HandlerContext, HandlerReplyAction, HandlerRequest, RequestHandler, ServeOptions};
use coreward_runtime::worker::{OrchestratorConnection, Worker};
use coreward_runtime::worker_message::LoadHintMessage;
use coreward_runtime::{RuntimeError, SegmentServiceEntry};

use crate::report::{
    BenchReport, MeasurementGoal, ReportTable, ReportTableCell, goal_and_verdict_cells, median_min_max,
};
use crate::thread_cpus::{CALLING_THREAD_PID, bind_to_cpu};

/// Options of `coreward-lab bench orchestrate`.
#[derive(Debug, Clone, clap::Args)]
pub struct OrchestrateBenchArgs {
    /// Number of rounds; each measures every case once
    #[arg(long, default_value_t = 7, value_parser = clap::value_parser!(u32).range(1..))]
    rounds: u32,
    /// Number of decisions, round trips or messages per case
    #[arg(long, default_value_t = 1_000_000, value_parser = clap::value_parser!(u64).range(1000..))]
    operations: u64,
}

impl Default for OrchestrateBenchArgs {
    fn default() -> Self {
        Self { rounds: 7, operations: 1_000_000 }
    }
}

const SERVICE_COUNT: u8 = 2;
const MAX_OUTSTANDING_REQUESTS_PER_CORE: NonZeroU16 = NonZeroU16::new(4).unwrap();
const REQUEST_PAYLOAD: [u8; 16] = [7; 16];
const ORCHESTRATOR_AND_WORKER_CPU: [usize; 2] = [0, 1];

/// Runs the bench of the orchestrator in a new thread. Fails with fewer than two CPUs, or when the shared memory cannot
/// be created.
pub fn run_orchestrate_bench(args: &OrchestrateBenchArgs) -> anyhow::Result<BenchReport> {
    // A new thread is used, because the caller must not stay bound to one CPU.
    std::thread::scope(|scope| {
        scope.spawn(|| measure_orchestrator_performance(args)).join().expect("the measuring thread")
    })
}

fn measure_orchestrator_performance(args: &OrchestrateBenchArgs) -> anyhow::Result<BenchReport> {
    bind_to_cpu(CALLING_THREAD_PID, ORCHESTRATOR_AND_WORKER_CPU[0])?;
    let tables = vec![measure_operation_rates(args)?, measure_round_trips(args)?, measure_udp_servers(args)?];
    Ok(BenchReport {
        name: "orchestrate",
        heading: "Requests to cores through shared memory",
        method_description: format!(
            "The orchestrator distributes requests by RingLeader's JBSRQ (join bounded shortest ranked queue) and FEO \
             (first eligible out). There are {SERVICE_COUNT} services, up to {MAX_OUTSTANDING_REQUESTS_PER_CORE} \
             outstanding requests per core, and {} bytes of payload. Only the last table uses sockets, for {} cores. \
             The orchestrator runs on CPU {}, and all workers share a thread on CPU {}. If the workers are slower than \
             the orchestrator, they limit the rate. A decision consists of sending a request to a core and processing \
             the core's feedback. Values are medians of {} rounds with {} operations per case.",
            REQUEST_PAYLOAD.len(),
            sockets::CORE_COUNT,
            ORCHESTRATOR_AND_WORKER_CPU[0],
            ORCHESTRATOR_AND_WORKER_CPU[1],
            args.rounds,
            args.operations
        ),
        tables,
    })
}

/// Measures how many decisions, requests and messages one CPU can handle per second.
fn measure_operation_rates(args: &OrchestrateBenchArgs) -> anyhow::Result<ReportTable> {
    let mut table =
        ReportTable::new(&["per second on one CPU", "millions", "least", "most", "ns each", "goal", "verdict"]);
    let mut add_rate_row = |name: &str, goal: f64, measure: &dyn Fn() -> anyhow::Result<f64>| -> anyhow::Result<()> {
        let millions_per_second = (0..args.rounds).map(|_| measure()).collect::<anyhow::Result<Vec<f64>>>()?;
        let (median_rate, [median_cell, min_cell, max_cell, ns_cell]) =
            build_rate_cells_with_median(&millions_per_second, 1e3);
        let [goal_cell, verdict_cell] = goal_and_verdict_cells(Some(MeasurementGoal::AtLeast(goal)), median_rate);
        table.add_row([name.into(), median_cell, min_cell, max_cell, ns_cell, goal_cell, verdict_cell]);
        Ok(())
    };
    for (cores, goal) in [(16, 3.0), (64, 1.5)] {
        add_rate_row(&format!("decisions of the model, {cores} cores"), goal, &|| {
            Ok(measure_decision_rate(cores, args.operations))
        })?;
        add_rate_row(&format!("requests through the memory, {cores} cores"), goal, &|| {
            measure_request_rate(cores, args.operations)
        })?;
    }
    add_rate_row("feedback messages of one core", 20.0, &|| measure_feedback_rate(args.operations))?;
    add_rate_row("hints to one core", 20.0, &|| measure_load_hint_rate(args.operations))?;
    Ok(table)
}

/// Function that measures the given number of round trips. Returns their median and 99th percentile (ns).
type MeasureRoundTrips = fn(u64) -> anyhow::Result<[f64; 2]>;

const ROUND_TRIP_CASES: [(&str, Option<MeasurementGoal>, MeasureRoundTrips); 4] = [
    ("request and response", Some(MeasurementGoal::AtMost(400.0)), |trip_count| {
        measure_request_round_trips(trip_count, None)
    }),
    ("one cache line there, another one back: the machine's floor", None, measure_cache_line_round_trips),
    ("during a handler of 1 ms that yields every 1 us, quantum 5 us", None, |trip_count| {
        measure_request_round_trips(trip_count / 100, Some(LowPriorityInterruption::Yielding))
    }),
    ("during a handler of 1 ms without yield points, timer of 50 us", None, |trip_count| {
        measure_request_round_trips(trip_count / 100, Some(LowPriorityInterruption::PreemptedByTimer))
    }),
];

/// Measures all cases of round trips, one after the other in each round.
fn measure_round_trips(args: &OrchestrateBenchArgs) -> anyhow::Result<ReportTable> {
    let mut quantiles_by_case = vec![Vec::new(); ROUND_TRIP_CASES.len()];
    for _ in 0..args.rounds {
        for ((_, _, measure), quantiles_by_round) in ROUND_TRIP_CASES.iter().zip(&mut quantiles_by_case) {
            quantiles_by_round.push(measure(args.operations.min(200_000))?);
        }
    }
    let mut table = ReportTable::new(&["round trip, ns", "median", "p99", "goal", "verdict"]);
    for ((name, goal, _), quantiles_by_round) in ROUND_TRIP_CASES.into_iter().zip(&quantiles_by_case) {
        let median_of_quantile = |quantile_index: usize| {
            median(
                &quantiles_by_round.iter().map(|round_quantiles| round_quantiles[quantile_index]).collect::<Vec<f64>>(),
            )
        };
        let (median_ns, p99_ns) =
            (median_of_quantile(0).context("a round")?, median_of_quantile(1).context("a round")?);
        let [goal_cell, verdict_cell] = goal_and_verdict_cells(goal, median_ns);
        table.add_row([name.into(), median_ns.into(), p99_ns.into(), goal_cell, verdict_cell]);
    }
    Ok(table)
}

/// Function that measures one UDP server with the given number of requests. Returns the mean times of one request.
type MeasureUdpServer = fn(u64) -> anyhow::Result<sockets::MeanRequestTimes>;

const LOOPBACK_SERVER_MEASUREMENTS: [(&str, MeasureUdpServer); 3] = [
    ("loopback: echo, one datagram at a time", sockets::measure_per_request_echo_server),
    ("loopback: echo in batches", sockets::measure_batch_echo_server),
    ("loopback: orchestrator", sockets::measure_loopback_orchestrator),
];
/// Names of the servers that are measured over a veth (which needs root), with their functions.
const VETH_SERVER_MEASUREMENTS: [(&str, MeasureUdpServer); 2] = [
    ("veth: orchestrator, UDP socket", sockets::measure_veth_orchestrator),
    ("veth: orchestrator, AF_XDP in copy mode", sockets::measure_af_xdp_orchestrator),
];

/// Measures the orchestrator and its baselines over UDP, one after the other in each round.
fn measure_udp_servers(args: &OrchestrateBenchArgs) -> anyhow::Result<ReportTable> {
    let veth_servers: &[_] = if nix::unistd::geteuid().is_root() { &VETH_SERVER_MEASUREMENTS } else { &[] };
    let servers: Vec<_> = LOOPBACK_SERVER_MEASUREMENTS.iter().chain(veth_servers).collect();
    let mut times_by_server = vec![Vec::new(); servers.len()];
    for _ in 0..args.rounds {
        for ((_, server), server_times) in servers.iter().zip(&mut times_by_server) {
            server_times.push(server(args.operations.min(200_000))?);
        }
    }
    let column_names =
        ["over UDP, per second on one CPU", "thousands", "least", "most", "ns each", "delivery, ns each"];
    let mut table = ReportTable::new(&column_names);
    for ((name, _), server_times) in servers.iter().zip(&times_by_server) {
        let requests_per_ms: Vec<f64> =
            server_times.iter().map(|request_times| 1e6 / request_times.serving_ns).collect();
        let median_delivery_ns =
            median(&server_times.iter().map(|request_times| request_times.delivery_ns).collect::<Vec<_>>())
                .context("a round")?;
        let (_, [median_cell, min_cell, max_cell, ns_cell]) = build_rate_cells_with_median(&requests_per_ms, 1e6);
        table.add_row([(*name).into(), median_cell, min_cell, max_cell, ns_cell, median_delivery_ns.into()]);
    }
    Ok(table)
}

/// Returns the median of `rates`, and cells with their median, minimum and maximum and the time per operation (ns) at
/// the median. `rate_unit_ns` is the time per operation (ns) at a rate of 1.
fn build_rate_cells_with_median(rates: &[f64], rate_unit_ns: f64) -> (f64, [ReportTableCell; 4]) {
    let [median_rate, min_rate, max_rate] = median_min_max(rates.iter().copied());
    (median_rate, [median_rate.into(), min_rate.into(), max_rate.into(), (rate_unit_ns / median_rate).into()])
}

fn compute_millions_per_second(operation_count: u64, start: Instant) -> f64 {
    operation_count as f64 / 1e6 / start.elapsed().as_secs_f64()
}

/// Simulates decisions for requests of alternating services. While more than two requests per core are outstanding,
/// each decision is followed by the completion of the oldest request. Returns millions of decisions per second.
fn measure_decision_rate(core_count: u16, decision_count: u64) -> f64 {
    let ranked_services: Vec<_> =
        (0..SERVICE_COUNT).map(|priority| RankedService { priority, lambda: RankLambda::PAPER_VALUE }).collect();
    let rank_arrays =
        RankArrays::new(core_count, &ranked_services, CoreRankRule::Ranked, MAX_OUTSTANDING_REQUESTS_PER_CORE);
    let mut balancer = JoinBoundedShortestRankedQueue::with_ranks(
        rank_arrays,
        &FirstEligibleOutConfig::strict_priority(0..SERVICE_COUNT),
    )
    .expect("a valid configuration");
    let mut outstanding_requests = VecDeque::new();
    let start = Instant::now();
    for request_number in 0..decision_count {
        let sent_requests = balancer
            .submit_request(request_number, (request_number % u64::from(SERVICE_COUNT)) as u8, request_number as u32)
            .sent_request;
        outstanding_requests.extend(sent_requests.map(|(release, _)| release));
        if outstanding_requests.len() > 2 * usize::from(core_count)
            && let Some(oldest) = outstanding_requests.pop_front()
        {
            balancer.record_feedback(oldest.service, oldest.core, 1).expect("it is outstanding");
        }
    }
    compute_millions_per_second(decision_count, start)
}

fn service_address() -> SocketAddrV4 {
    SocketAddrV4::new([127, 0, 0, 1].into(), 4000)
}

fn find_free_loopback_address() -> anyhow::Result<SocketAddrV4> {
    match UdpSocket::bind("127.0.0.1:0")?.local_addr()? {
        SocketAddr::V4(address) => Ok(address),
        SocketAddr::V6(_) => unreachable!("bound to an IPv4 address"),
    }
}

fn build_engine_config(core_count: u16, address: SocketAddrV4) -> DispatchEngineConfig {
    let service_config_with_priority = |priority| {
        let entry = SegmentServiceEntry { address, priority };
        EngineServiceConfig { service_entry: entry, lambda: RankLambda::PAPER_VALUE }
    };
    DispatchEngineConfig {
        core_count,
        rank_bound: MAX_OUTSTANDING_REQUESTS_PER_CORE,
        rank_rule: CoreRankRule::Ranked,
        services: (0..SERVICE_COUNT).map(service_config_with_priority).collect(),
        scheduler_config: FirstEligibleOutConfig {
            max_waiting_requests: 1024,
            ..FirstEligibleOutConfig::strict_priority(0..SERVICE_COUNT)
        },
        max_payload_bytes: 64,
        stall_after: Duration::from_secs(10),
    }
}

fn create_engine(core_count: u16) -> anyhow::Result<(tempfile::TempDir, PathBuf, DispatchEngine)> {
    let directory = tempfile::tempdir_in("/dev/shm")?;
    let memory_path = directory.path().join("cores");
    let engine = DispatchEngine::new(&memory_path, &build_engine_config(core_count, service_address()))?;
    Ok((directory, memory_path, engine))
}

fn submit_request(engine: &mut DispatchEngine, now_ns: u64, service: u8) {
    engine.submit_request(now_ns, service, service_address(), &REQUEST_PAYLOAD);
}

/// Connects one worker per core and enables all services for it. Meanwhile another thread must poll the orchestrator.
fn connect_workers(
    runtime: &OrchestratorConnection,
    core_count: u16,
    address: SocketAddrV4,
) -> Result<Vec<Worker<'_>>, RuntimeError> {
    (0..SERVICE_COUNT).try_for_each(|service| runtime.register_service(service, address, service))?;
    let mut workers = (0..core_count).map(|core| runtime.attach_worker(core)).collect::<Result<Vec<_>, _>>()?;
    for worker in &mut workers {
        (0..SERVICE_COUNT).try_for_each(|service| worker.enable_service(service, worker.core()))?;
    }
    Ok(workers)
}

/// Sends requests to all cores, whose workers complete them without a response. Returns millions of requests per
/// second.
fn measure_request_rate(core_count: u16, request_count: u64) -> anyhow::Result<f64> {
    let (_directory, memory_path, mut engine) = create_engine(core_count)?;
    let runtime = OrchestratorConnection::connect(&memory_path)?;
    let should_stop = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let worker_thread = scope.spawn(|| complete_requests_until_stopped(&runtime, core_count, &should_stop));
        while engine.core_counters().accepted_workers < core_count.into() {
            ensure!(!worker_thread.is_finished(), "the workers ended early");
            engine.poll(0, &mut |_, _, _| ());
            // Lets the workers' thread start, which is still on this CPU.
            std::thread::yield_now();
        }
        let completed_request_count = |engine: &DispatchEngine| {
            engine.service_counters().iter().map(|count| count.completed_requests).sum::<u64>()
        };
        let mut sent_request_count = 0;
        let start = Instant::now();
        while completed_request_count(&engine) < request_count {
            // The limit is the number of requests that one loop of the daemon receives.
            while sent_request_count < request_count
                && sent_request_count - completed_request_count(&engine) < 2 * u64::from(core_count)
            {
                submit_request(&mut engine, sent_request_count, (sent_request_count % u64::from(SERVICE_COUNT)) as u8);
                sent_request_count += 1;
            }
            engine.poll(sent_request_count, &mut |_, _, _| ());
        }
        let request_rate = compute_millions_per_second(request_count, start);
        should_stop.store(true, Relaxed);
        worker_thread.join().expect("the workers' thread")?;
        Ok(request_rate)
    })
}

/// Runs the workers of all cores in the calling thread, which is bound to the workers' CPU, until `should_stop` is set.
fn complete_requests_until_stopped(
    runtime: &OrchestratorConnection,
    core_count: u16,
    should_stop: &AtomicBool,
) -> anyhow::Result<()> {
    bind_to_cpu(CALLING_THREAD_PID, ORCHESTRATOR_AND_WORKER_CPU[1])?;
    let mut workers = connect_workers(runtime, core_count, service_address())?;
    while !should_stop.load(Relaxed) {
        for worker in &mut workers {
            while let Some(request) = worker.take_request()? {
                worker.send_load_feedback(request.service(), worker.core(), 1)?;
            }
        }
    }
    Ok(())
}

/// Way in which low-priority requests are interrupted while the round trips of other requests are measured.
#[derive(Clone, Copy, PartialEq)]
enum LowPriorityInterruption {
    Yielding,
    PreemptedByTimer,
}

const LOW_PRIORITY_HANDLER_TIME: Duration = Duration::from_millis(1);
const YIELD_INTERVAL: Duration = Duration::from_micros(1);
const PREEMPTION_TIMER_PERIOD: Duration = Duration::from_micros(50);

/// Handler that echoes requests of service 0 at once, and computes for 1 ms for each request of service 1.
struct EchoOrComputeHandler(Option<LowPriorityInterruption>);

impl RequestHandler for EchoOrComputeHandler {
    fn handle(
        &self,
        request: &HandlerRequest<'_>,
        response: &mut Vec<u8>,
        context: &mut HandlerContext<'_>,
    ) -> HandlerReplyAction {
        if request.service == 0 {
            response.extend_from_slice(request.payload);
            return HandlerReplyAction::Send;
        }
        let start = Instant::now();
        while start.elapsed() < LOW_PRIORITY_HANDLER_TIME {
            let slice_start = Instant::now();
            while slice_start.elapsed() < YIELD_INTERVAL {
                std::hint::spin_loop();
            }
            if self.0 == Some(LowPriorityInterruption::Yielding) {
                context.yield_point();
            }
        }
        HandlerReplyAction::NoReply
    }
}

/// Submits a low-priority request unless one is outstanding. Then polls the engine for one to eight tenths of
/// [`LOW_PRIORITY_HANDLER_TIME`], depending on `trip_number`.
fn keep_low_priority_service_busy(engine: &mut DispatchEngine, trip_number: u64) {
    let low_priority_counters = engine.service_counters()[1];
    if low_priority_counters.completed_requests == low_priority_counters.received_requests {
        submit_request(engine, trip_number, 1);
    }
    let (start, tenths) = (Instant::now(), (trip_number % 8) as u32 + 1);
    while start.elapsed() < LOW_PRIORITY_HANDLER_TIME / 10 * tenths {
        engine.poll(trip_number, &mut |_, _, _| ());
    }
}

/// Serves the requests of one core with an [`EchoOrComputeHandler`] on the workers' CPU, until `should_stop` is set.
fn serve_echo_requests(
    runtime: &OrchestratorConnection,
    low_priority_handling: Option<LowPriorityInterruption>,
    should_stop: &AtomicBool,
) -> anyhow::Result<()> {
    bind_to_cpu(CALLING_THREAD_PID, ORCHESTRATOR_AND_WORKER_CPU[1])?;
    let mut workers = connect_workers(runtime, 1, service_address())?;
    let handler = EchoOrComputeHandler(low_priority_handling);
    let options = ServeOptions { sleep_time: Duration::ZERO, ..ServeOptions::default() };
    match low_priority_handling {
        Some(LowPriorityInterruption::PreemptedByTimer) => {
            workers[0].serve_with_timer(&handler, options, PREEMPTION_TIMER_PERIOD, should_stop)?
        }
        _ => workers[0].serve(&handler, options, should_stop)?,
    };
    Ok(())
}

/// Sends one request at a time. Returns the median and 99th percentile of the time from request to response (ns).
fn measure_request_round_trips(
    trip_count: u64,
    low_priority_handling: Option<LowPriorityInterruption>,
) -> anyhow::Result<[f64; 2]> {
    let (_directory, memory_path, mut engine) = create_engine(1)?;
    let runtime = OrchestratorConnection::connect(&memory_path)?;
    let should_stop = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let worker_thread = scope.spawn(|| serve_echo_requests(&runtime, low_priority_handling, &should_stop));
        let mut round_trip_ns = Vec::with_capacity(trip_count as usize);
        while engine.core_counters().accepted_workers == 0 && !worker_thread.is_finished() {
            engine.poll(0, &mut |_, _, _| ());
            std::thread::yield_now();
        }
        for trip_number in 0..trip_count {
            if low_priority_handling.is_some() {
                keep_low_priority_service_busy(&mut engine, trip_number);
            }
            let start = Instant::now();
            submit_request(&mut engine, trip_number, 0);
            let mut response_count = 0;
            while response_count == 0 {
                engine.poll(trip_number, &mut |_, _, _| response_count += 1);
                if worker_thread.is_finished() {
                    worker_thread.join().expect("the worker's thread")?;
                    anyhow::bail!("the worker ended early");
                }
            }
            round_trip_ns.push(start.elapsed().as_nanos() as f64);
        }
        should_stop.store(true, Relaxed);
        while !worker_thread.is_finished() {
            engine.poll(trip_count, &mut |_, _, _| ());
        }
        worker_thread.join().expect("the worker's thread")?;
        Ok(median_and_p99(round_trip_ns))
    })
}

/// Returns the median and the 99th percentile of `times_ns`, which must not be empty.
fn median_and_p99(mut times_ns: Vec<f64>) -> [f64; 2] {
    times_ns.sort_unstable_by(f64::total_cmp);
    [times_ns[times_ns.len() / 2], times_ns[times_ns.len() * 99 / 100]]
}

/// Atomic integer on its own cache line.
#[derive(Default)]
#[repr(align(64))]
struct CacheLineAtomic(AtomicU64);

/// Returns the median and 99th percentile of the round trip between two CPUs (ns). One CPU writes a value to a cache
/// line, and the other one copies it to a second line.
fn measure_cache_line_round_trips(trip_count: u64) -> anyhow::Result<[f64; 2]> {
    let [forward_line, return_line] = [CacheLineAtomic::default(), CacheLineAtomic::default()];
    let wait_for_value = |cache_line: &CacheLineAtomic, value: u64| {
        while cache_line.0.load(Acquire) != value {
            std::hint::spin_loop();
        }
    };
    std::thread::scope(|scope| {
        let other_cpu_thread = scope.spawn(|| -> anyhow::Result<()> {
            let bind_result = bind_to_cpu(CALLING_THREAD_PID, ORCHESTRATOR_AND_WORKER_CPU[1]);
            return_line.0.store(u64::MAX, Release);
            for trip_number in 1..=trip_count {
                wait_for_value(&forward_line, trip_number);
                return_line.0.store(trip_number, Release);
            }
            bind_result
        });
        let mut round_trip_ns = Vec::with_capacity(trip_count as usize);
        // Lets the other thread start, because a real-time thread would keep this CPU.
        while return_line.0.load(Acquire) != u64::MAX {
            std::thread::yield_now();
        }
        for trip_number in 1..=trip_count {
            let start = Instant::now();
            forward_line.0.store(trip_number, Release);
            wait_for_value(&return_line, trip_number);
            round_trip_ns.push(start.elapsed().as_nanos() as f64);
        }
        other_cpu_thread.join().expect("the other thread")?;
        Ok(median_and_p99(round_trip_ns))
    })
}

/// Creates the shared memory for one core, without an engine that uses it.
fn create_single_core_queues() -> anyhow::Result<(tempfile::TempDir, PathBuf, CoreQueues)> {
    let directory = tempfile::tempdir_in("/dev/shm")?;
    let memory_path = directory.path().join("cores");
    let geometry = SegmentGeometry { core_count: 1, priority_count: 1, slots_per_queue: 4, slot_bytes: 128 };
    let queues =
        CoreQueues::create(&memory_path, geometry, &[SegmentServiceEntry { address: service_address(), priority: 0 }])?;
    Ok((directory, memory_path, queues))
}

fn accept_worker(
    queues: &mut CoreQueues,
    worker_thread: &std::thread::ScopedJoinHandle<'_, anyhow::Result<()>>,
) -> anyhow::Result<()> {
    while !queues.has_new_worker(0) {
        ensure!(!worker_thread.is_finished(), "the worker ended early");
        std::thread::yield_now();
    }
    queues.accept_worker(0);
    Ok(())
}

fn measure_feedback_rate(message_count: u64) -> anyhow::Result<f64> {
    let (_directory, memory_path, mut queues) = create_single_core_queues()?;
    let runtime = OrchestratorConnection::connect(&memory_path)?;
    std::thread::scope(|scope| {
        let worker_thread = scope.spawn(|| -> anyhow::Result<()> {
            bind_to_cpu(CALLING_THREAD_PID, ORCHESTRATOR_AND_WORKER_CPU[1])?;
            let mut worker = runtime.attach_worker(0)?;
            for _ in 0..message_count {
                worker.send_load_feedback(0, 0, 1)?;
            }
            Ok(())
        });
        accept_worker(&mut queues, &worker_thread)?;
        let (start, mut received_count) = (Instant::now(), 0);
        while received_count < message_count {
            received_count += queues.receive_messages(0, 64, |message| assert!(message.is_some())) as u64;
        }
        let message_rate = compute_millions_per_second(message_count, start);
        worker_thread.join().expect("the worker's thread")?;
        Ok(message_rate)
    })
}

fn measure_load_hint_rate(message_count: u64) -> anyhow::Result<f64> {
    let (_directory, memory_path, mut queues) = create_single_core_queues()?;
    let runtime = OrchestratorConnection::connect(&memory_path)?;
    std::thread::scope(|scope| {
        let worker_thread = scope.spawn(|| -> anyhow::Result<()> {
            bind_to_cpu(CALLING_THREAD_PID, ORCHESTRATOR_AND_WORKER_CPU[1])?;
            let mut worker = runtime.attach_worker(0)?;
            let mut received_hint_count = 0;
            while received_hint_count < message_count {
                received_hint_count += u64::from(worker.next_hint().is_some());
            }
            Ok(())
        });
        accept_worker(&mut queues, &worker_thread)?;
        let (start, hint) =
            (Instant::now(), LoadHintMessage { service: 0, hint: LoadHint::ScaleUp, waiting_service_mask: 0 });
        let mut sent_hint_count = 0;
        while sent_hint_count < message_count {
            match queues.send_hint(0, hint) {
                Ok(()) => sent_hint_count += 1,
                Err(RuntimeError::RingFull { .. }) => std::hint::spin_loop(),
                Err(error) => return Err(error.into()),
            }
        }
        worker_thread.join().expect("the worker's thread")?;
        Ok(compute_millions_per_second(message_count, start))
    })
}
