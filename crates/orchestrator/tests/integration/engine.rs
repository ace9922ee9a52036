//! The engine with workers in the same process, in virtual time.

use std::net::SocketAddrV4;
use std::num::NonZeroU16;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering::SeqCst};
use std::time::{Duration, Instant};

use coreward_model::dispatch::{
    Epoch, FeoConfig, Lambda, LoadHint, RankRule, RateLimit, ScaleDownCondition, ScaleUpCondition,
};
use coreward_orchestrator::engine::{Engine, EngineConfig, ServiceConfig, ServiceCounters};
use coreward_runtime::message::HintTrigger;
use coreward_runtime::serve::{Context, Handler, Reply, Request, ServeOptions};
use coreward_runtime::worker::{Runtime, Worker};
use coreward_runtime::{RuntimeError, ServiceEntry};

const STALL_AFTER_NS: u64 = 1_000_000;
pub const TIMEOUT: Duration = Duration::from_secs(20);

fn address() -> SocketAddrV4 {
    SocketAddrV4::new([127, 0, 0, 1].into(), 4000)
}

/// Returns a configuration with two services in strict priority on 2 cores, and a rank bound of 2.
pub fn config() -> EngineConfig {
    let service =
        |priority| ServiceConfig { entry: ServiceEntry { address: address(), priority }, lambda: Lambda::PUBLISHED };
    EngineConfig {
        core_count: 2,
        rank_bound: NonZeroU16::new(2).unwrap(),
        rank_rule: RankRule::Ranked,
        services: vec![service(0), service(1)],
        scheduler: FeoConfig { capacity: 4, ..FeoConfig::strict_priority(0..2) },
        payload_bytes: 100,
        stall_after: Duration::from_nanos(STALL_AFTER_NS),
    }
}

pub struct TestEngine {
    pub engine: Engine,
    path: PathBuf,
    cores: u16,
    _directory: tempfile::TempDir,
}

impl TestEngine {
    pub fn new(config: &EngineConfig) -> Self {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("cores");
        Self { engine: Engine::new(&path, config).unwrap(), path, cores: config.core_count, _directory: directory }
    }

    pub fn runtime(&self) -> Runtime {
        let runtime = Runtime::connect(&self.path).unwrap();
        (0..2).for_each(|service| runtime.register_service(service, address(), service).unwrap());
        runtime
    }

    pub fn poll(&mut self, now: u64) -> Vec<Vec<u8>> {
        let mut answers = Vec::new();
        self.engine.poll(now, &mut |_, _, payload| answers.push(payload.to_vec()));
        answers
    }

    /// Attaches a worker that runs no service.
    pub fn attach<'r>(&mut self, runtime: &'r Runtime, core: u16) -> Worker<'r> {
        std::thread::scope(|scope| {
            let worker = scope.spawn(|| runtime.worker(core));
            while !worker.is_finished() {
                self.poll(0);
            }
            worker.join().unwrap().unwrap()
        })
    }

    /// Attaches a worker on which both services are enabled, but which does not serve requests by itself.
    fn worker<'r>(&mut self, runtime: &'r Runtime, core: u16) -> Worker<'r> {
        let mut worker = self.attach(runtime, core);
        (0..2).for_each(|service| worker.enable_service(service, core).unwrap());
        self.poll(0);
        worker
    }

    pub fn submit(&mut self, now: u64, service: u8, payload: &[u8]) {
        self.engine.submit(now, service, "192.0.2.1:9".parse().unwrap(), payload);
        self.check_accounts();
    }

    fn check_workers(&mut self, now: u64) {
        self.engine.check_workers(now, &mut |_, _, _| ());
        self.check_accounts();
    }

    fn outstanding(&self) -> [u32; 2] {
        [0, 1].map(|core| self.engine.dispatch_policy().ranks().core_request_count(core))
    }

    pub fn counters(&self, service: usize) -> ServiceCounters {
        self.engine.service_counters()[service]
    }

    /// Checks that each received request is counted in exactly one other state.
    pub fn check_accounts(&self) {
        for (service, counters) in self.engine.service_counters().iter().enumerate() {
            let ServiceCounters { received, dropped, rejected, completed, lost } = counters;
            let ranks = self.engine.dispatch_policy().ranks();
            let outstanding: u32 = (0..self.cores).map(|core| ranks.outstanding(service as u8, core)).sum();
            let waiting = self.engine.dispatch_policy().waiting_count(service as u8);
            assert_eq!(*received, dropped + rejected + completed + lost + waiting + u64::from(outstanding));
        }
    }
}

/// Takes requests of a service at the worker, and completes them without a response.
fn complete(worker: &mut Worker<'_>, service: u8, count: u32) {
    for _ in 0..count {
        assert_eq!(worker.take_request().unwrap().unwrap().service(), service);
    }
    worker.load_feedback(service, worker.core(), count).unwrap();
}

/// Handler that responds with the core's number and the request's payload.
struct Echo;

impl Handler for Echo {
    fn handle(&self, request: &Request<'_>, response: &mut Vec<u8>, context: &mut Context<'_>) -> Reply {
        response.push(context.core() as u8);
        response.extend_from_slice(request.payload);
        Reply::Send
    }
}

#[test]
fn requests_are_spread_and_answered() {
    let mut bench = TestEngine::new(&config());
    let runtime = bench.runtime();
    let mut workers = [0, 1].map(|core| bench.worker(&runtime, core));
    for number in 0..6 {
        bench.submit(1, 1, &[number]);
    }
    assert_eq!((bench.outstanding(), bench.engine.dispatch_policy().waiting_count(1)), ([2, 2], 2));
    let (stop, started) = (AtomicBool::new(false), Instant::now());
    let mut answers = Vec::new();
    std::thread::scope(|scope| {
        for worker in &mut workers {
            scope.spawn(|| worker.serve(&Echo, ServeOptions::default(), &stop).unwrap());
        }
        while answers.len() < 6 && started.elapsed() < TIMEOUT {
            answers.extend(bench.poll(2));
        }
        stop.store(true, SeqCst);
        // The workers disable their services before they end.
        while bench.engine.dispatch_policy().ranks().eligible_services() != 0 && started.elapsed() < TIMEOUT {
            bench.poll(3);
        }
    });
    bench.check_accounts();
    answers.sort_by_key(|answer| answer[1]);
    assert_eq!(answers.iter().map(|answer| answer[1]).collect::<Vec<_>>(), [0, 1, 2, 3, 4, 5]);
    assert_eq!(answers[..4].iter().map(|answer| answer[0]).collect::<Vec<_>>(), [0, 1, 0, 1]);
    assert_eq!((bench.counters(1).completed, bench.engine.dispatch_policy().ranks().eligible_services()), (6, 0));
}

#[test]
fn requests_of_an_ended_worker_are_lost_and_counted() {
    let mut bench = TestEngine::new(&config());
    let runtime = bench.runtime();
    let first = bench.worker(&runtime, 0);
    (0..5).for_each(|_| bench.submit(1, 1, b"x"));
    assert_eq!((bench.outstanding(), bench.engine.dispatch_policy().waiting_count(1)), ([2, 0], 3));
    bench.check_workers(2);
    assert_eq!(bench.outstanding(), [2, 0], "the worker lives");
    drop(first);
    bench.check_workers(3);
    assert_eq!((bench.outstanding(), bench.counters(1).lost), ([0, 0], 2));
    assert_eq!(bench.engine.dispatch_policy().ranks().eligible_services(), 0);
    // A worker at the same core gets the requests that waited, and a second one that replaces it before the check.
    let second = bench.worker(&runtime, 0);
    assert_eq!((bench.outstanding(), bench.engine.dispatch_policy().waiting_count(1)), ([2, 0], 1));
    drop(second);
    let _third = bench.worker(&runtime, 0);
    assert_eq!((bench.outstanding(), bench.counters(1).lost), ([1, 0], 4));
    assert_eq!((bench.engine.core_counters().workers, bench.engine.core_counters().ended), (3, 2));
    bench.check_accounts();
}

#[test]
fn stalled_worker_loses_eligibility_until_it_completes_a_request() {
    let mut bench = TestEngine::new(&config());
    let runtime = bench.runtime();
    let (mut stalls, mut other) = (bench.worker(&runtime, 0), bench.worker(&runtime, 1));
    bench.submit(1, 0, b"x");
    assert_eq!(bench.outstanding(), [1, 0]);
    bench.check_workers(2);
    bench.check_workers(2 + STALL_AFTER_NS);
    assert_eq!(bench.engine.core_counters().stalls, 1);
    (0..2).for_each(|_| bench.submit(3, 0, b"x"));
    assert_eq!(bench.outstanding(), [1, 2], "the other core takes all");
    bench.submit(4, 0, b"x");
    assert_eq!((bench.outstanding(), bench.engine.dispatch_policy().waiting_count(0)), ([1, 2], 1));
    complete(&mut other, 0, 2);
    complete(&mut stalls, 0, 1);
    bench.poll(5 + STALL_AFTER_NS);
    assert_eq!(bench.outstanding(), [0, 1]);
    bench.check_workers(6 + STALL_AFTER_NS);
    bench.submit(7 + STALL_AFTER_NS, 0, b"x");
    assert_eq!((bench.outstanding(), bench.engine.core_counters().stalls), ([1, 1], 1));
}

#[test]
fn full_buffer_drops_the_lowest_priority() {
    let mut bench = TestEngine::new(&config());
    for service in [1, 1, 0, 0, 0, 1, 0] {
        bench.submit(1, service, b"x");
    }
    assert_eq!([0, 1].map(|service| bench.engine.dispatch_policy().waiting_count(service)), [4, 0]);
    assert_eq!([0, 1].map(|service| bench.counters(service).dropped), [0, 3]);
    bench.submit(1, 0, b"x");
    bench.submit(1, 0, &[0; 101]);
    assert_eq!((bench.counters(0).dropped, bench.counters(0).rejected), (1, 1));
}

#[test]
fn feedback_for_requests_never_sent_is_counted() {
    let mut bench = TestEngine::new(&config());
    let runtime = bench.runtime();
    let mut worker = bench.worker(&runtime, 0);
    bench.submit(1, 0, b"x");
    worker.load_feedback(0, 0, 2).unwrap();
    worker.load_feedback(1, 0, 1).unwrap();
    worker.load_feedback(0, 1, u32::MAX).unwrap();
    worker.enable_service(0, 1).unwrap();
    bench.poll(2);
    let counters = bench.engine.core_counters();
    assert_eq!((counters.bad_feedback, counters.bad_messages), (3, 0));
    assert_eq!(counters.enabled_without_worker, 1, "core 1 has no worker");
    assert_eq!((bench.outstanding(), bench.counters(0).completed), ([1, 0], 0));
    worker.load_feedback(0, 0, 1).unwrap();
    bench.poll(3);
    assert_eq!((bench.outstanding(), bench.counters(0).completed), ([0, 0], 1));
}

#[test]
fn hint_reaches_the_least_loaded_core_once_until_rearmed() {
    let mut bench = TestEngine::new(&config());
    let runtime = bench.runtime();
    let mut workers = [0, 1].map(|core| bench.worker(&runtime, core));
    let epoch = Epoch::power_of_two(4).unwrap();
    workers[0].enable_load_monitor(1, HintTrigger::ScaleUp(ScaleUpCondition { epoch })).unwrap();
    bench.poll(0);
    (0..5).for_each(|_| bench.submit(1, 1, b"x"));
    assert_eq!((bench.outstanding(), bench.engine.dispatch_policy().waiting_count(1)), ([2, 2], 1));
    assert_eq!(bench.engine.next_timer_ns(4), Some(16));
    bench.engine.check_monitors(16);
    bench.engine.check_monitors(32);
    bench.engine.check_monitors(48);
    let hint = workers[0].next_hint().unwrap();
    assert_eq!(
        (hint.service, hint.hint, hint.waiting_services),
        (1, LoadHint::ScaleUp, 0b10),
        "core 0 is the first of equals"
    );
    assert_eq!((workers[0].next_hint(), workers[1].next_hint()), (None, None));
    workers[0].rearm_load_monitor(1).unwrap();
    bench.poll(50);
    bench.engine.check_monitors(64);
    assert!(workers[0].next_hint().is_some());
    // The worker ends before it acts: its hint is not in flight then.
    let [first, mut second] = workers;
    drop(first);
    bench.check_workers(65);
    assert_eq!(bench.counters(1).lost, 2);
    bench.engine.check_monitors(80);
    assert_eq!(second.next_hint().map(|hint| hint.hint), Some(LoadHint::ScaleUp));
    let down = ScaleDownCondition { epoch, threshold: 0, calm_epochs: 1 };
    second.enable_load_monitor(0, HintTrigger::ScaleDown(down)).unwrap();
    bench.poll(81);
    drop(second);
    bench.check_workers(82);
    bench.engine.check_monitors(97);
    assert_eq!(bench.engine.core_counters().hints, 3, "no core runs service 0: nothing is sent");
}

#[test]
fn rate_limit_holds_requests_back() {
    let mut limited = config();
    limited.scheduler.queues[0].member.limit = Some(RateLimit { interval: 100, burst: 1 });
    let mut bench = TestEngine::new(&limited);
    let runtime = bench.runtime();
    let _worker = bench.worker(&runtime, 0);
    (0..2).for_each(|_| bench.submit(1000, 0, b"x"));
    assert_eq!((bench.outstanding(), bench.engine.next_timer_ns(1000)), ([1, 0], Some(1100)));
    bench.engine.dispatch_waiting(1099);
    assert_eq!(bench.outstanding(), [1, 0]);
    bench.engine.dispatch_waiting(1100);
    assert_eq!(bench.outstanding(), [2, 0]);
}

#[test]
fn worker_with_damaged_queues_is_released() {
    use std::os::unix::fs::FileExt as _;
    let mut bench = TestEngine::new(&config());
    let runtime = bench.runtime();
    let mut worker = bench.worker(&runtime, 0);
    // The orchestrator reads the worker's cursor when the queue looks full.
    for _ in 0..config().rank_bound.get().next_power_of_two() {
        bench.submit(1, 0, b"x");
        let request = worker.take_request().unwrap().unwrap();
        worker.respond(&request, b"y").unwrap();
        bench.poll(2);
    }
    // The header, 64 services, and three lines of the core come before the worker's heads.
    let file = std::fs::OpenOptions::new().write(true).open(&bench.path).unwrap();
    file.write_all_at(&(1u32 << 31).to_ne_bytes(), 64 * 68).unwrap();
    bench.submit(3, 0, b"x");
    let error = worker.serve(&Echo, ServeOptions::default(), &AtomicBool::new(false)).unwrap_err();
    assert!(matches!(error, RuntimeError::WorkerReleased(0)), "{error}");
    assert_eq!((bench.engine.core_counters().damaged_queues, bench.counters(0).rejected), (1, 1));
    drop(worker);
    let _next = bench.worker(&runtime, 0);
    bench.submit(3, 0, b"x");
    assert_eq!(bench.outstanding(), [1, 0], "the next worker adopts the cursors");
}
