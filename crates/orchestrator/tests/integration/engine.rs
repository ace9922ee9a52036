//! Tests the engine with workers in the same process, in virtual time.

use std::net::SocketAddrV4;
use std::num::NonZeroU16;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering::SeqCst};
use std::time::{Duration, Instant};

use coreward_model::dispatch::{
    CoreRankRule, DispatchRateLimit, FirstEligibleOutConfig, LoadCheckInterval, LoadHint, RankLambda,
    ScaleDownCondition, ScaleUpCondition,
};
use coreward_orchestrator::dispatch_engine::{
    DispatchEngine, DispatchEngineConfig, EngineServiceConfig, ServiceRequestCounters,
};
use coreward_runtime::serve::{HandlerContext, HandlerReplyAction, HandlerRequest, RequestHandler, ServeOptions};
use coreward_runtime::worker::{OrchestratorConnection, Worker};
use coreward_runtime::worker_message::LoadHintTrigger;
use coreward_runtime::{RuntimeError, SegmentServiceEntry};

const WORKER_STALL_TIMEOUT_NS: u64 = 1_000_000;
pub const CONDITION_TIMEOUT: Duration = Duration::from_secs(20);

fn service_address() -> SocketAddrV4 {
    SocketAddrV4::new([127, 0, 0, 1].into(), 4000)
}

/// Returns a configuration with two services in strict priority on 2 cores, and a rank bound of 2.
pub fn two_service_engine_config() -> DispatchEngineConfig {
    let new_service_config = |priority| EngineServiceConfig {
        service_entry: SegmentServiceEntry { address: service_address(), priority },
        lambda: RankLambda::PAPER_VALUE,
    };
    DispatchEngineConfig {
        core_count: 2,
        rank_bound: NonZeroU16::new(2).unwrap(),
        rank_rule: CoreRankRule::Ranked,
        services: vec![new_service_config(0), new_service_config(1)],
        scheduler_config: FirstEligibleOutConfig {
            max_waiting_requests: 4,
            ..FirstEligibleOutConfig::strict_priority(0..2)
        },
        max_payload_bytes: 100,
        stall_after: Duration::from_nanos(WORKER_STALL_TIMEOUT_NS),
    }
}

pub struct TestEngine {
    pub engine: DispatchEngine,
    memory_path: PathBuf,
    core_count: u16,
    _directory: tempfile::TempDir,
}

impl TestEngine {
    pub fn new(config: &DispatchEngineConfig) -> Self {
        let directory = tempfile::tempdir().unwrap();
        let memory_path = directory.path().join("cores");
        Self {
            engine: DispatchEngine::new(&memory_path, config).unwrap(),
            memory_path,
            core_count: config.core_count,
            _directory: directory,
        }
    }

    pub fn connect_runtime(&self) -> OrchestratorConnection {
        let runtime = OrchestratorConnection::connect(&self.memory_path).unwrap();
        (0..2).for_each(|service| runtime.register_service(service, service_address(), service).unwrap());
        runtime
    }

    pub fn poll(&mut self, now_ns: u64) -> Vec<Vec<u8>> {
        let mut responses = Vec::new();
        self.engine.poll(now_ns, &mut |_, _, payload| responses.push(payload.to_vec()));
        responses
    }

    pub fn attach_worker<'r>(&mut self, runtime: &'r OrchestratorConnection, core: u16) -> Worker<'r> {
        std::thread::scope(|scope| {
            let worker_thread = scope.spawn(|| runtime.attach_worker(core));
            while !worker_thread.is_finished() {
                self.poll(0);
            }
            worker_thread.join().unwrap().unwrap()
        })
    }

    /// Attaches a worker on which both services are enabled. It completes only requests that the test takes explicitly.
    fn attach_serving_worker<'r>(&mut self, runtime: &'r OrchestratorConnection, core: u16) -> Worker<'r> {
        let mut worker = self.attach_worker(runtime, core);
        (0..2).for_each(|service| worker.enable_service(service, core).unwrap());
        self.poll(0);
        worker
    }

    pub fn submit_request(&mut self, now_ns: u64, service: u8, payload: &[u8]) {
        self.engine.submit_request(now_ns, service, "192.0.2.1:9".parse().unwrap(), payload);
        self.assert_request_counts_add_up();
    }

    fn check_workers(&mut self, now_ns: u64) {
        self.engine.check_workers(now_ns, &mut |_, _, _| ());
        self.assert_request_counts_add_up();
    }

    fn outstanding_request_counts_by_core(&self) -> [u32; 2] {
        [0, 1].map(|core| self.engine.dispatch_policy().ranks().core_outstanding_request_count(core))
    }

    pub fn service_counters(&self, service: usize) -> ServiceRequestCounters {
        self.engine.service_counters()[service]
    }

    /// Checks that each received request is counted in exactly one other state, such as dropped, waiting or completed.
    pub fn assert_request_counts_add_up(&self) {
        for (service, counters) in self.engine.service_counters().iter().enumerate() {
            let ServiceRequestCounters {
                received_requests,
                dropped_requests,
                rejected_requests,
                completed_requests,
                lost_requests,
            } = counters;
            let ranks = self.engine.dispatch_policy().ranks();
            let outstanding_request_count: u32 =
                (0..self.core_count).map(|core| ranks.service_outstanding_request_count(service as u8, core)).sum();
            let waiting_request_count = self.engine.dispatch_policy().waiting_request_count(service as u8);
            assert_eq!(
                *received_requests,
                dropped_requests
                    + rejected_requests
                    + completed_requests
                    + lost_requests
                    + waiting_request_count
                    + u64::from(outstanding_request_count)
            );
        }
    }
}

fn take_and_complete_requests(worker: &mut Worker<'_>, service: u8, request_count: u32) {
    for _ in 0..request_count {
        assert_eq!(worker.take_request().unwrap().unwrap().service(), service);
    }
    worker.send_load_feedback(service, worker.core(), request_count).unwrap();
}

struct EchoHandler;

impl RequestHandler for EchoHandler {
    fn handle(
        &self,
        request: &HandlerRequest<'_>,
        response: &mut Vec<u8>,
        context: &mut HandlerContext<'_>,
    ) -> HandlerReplyAction {
        response.push(context.core() as u8);
        response.extend_from_slice(request.payload);
        HandlerReplyAction::Send
    }
}

#[test]
fn requests_are_distributed_to_both_cores_and_answered() {
    let mut test_engine = TestEngine::new(&two_service_engine_config());
    let runtime = test_engine.connect_runtime();
    let mut workers = [0, 1].map(|core| test_engine.attach_serving_worker(&runtime, core));
    for number in 0..6 {
        test_engine.submit_request(1, 1, &[number]);
    }
    assert_eq!(
        (
            test_engine.outstanding_request_counts_by_core(),
            test_engine.engine.dispatch_policy().waiting_request_count(1)
        ),
        ([2, 2], 2)
    );
    let (stop, started) = (AtomicBool::new(false), Instant::now());
    let mut responses = Vec::new();
    std::thread::scope(|scope| {
        for worker in &mut workers {
            scope.spawn(|| worker.serve(&EchoHandler, ServeOptions::default(), &stop).unwrap());
        }
        while responses.len() < 6 && started.elapsed() < CONDITION_TIMEOUT {
            responses.extend(test_engine.poll(2));
        }
        stop.store(true, SeqCst);
        // The workers disable their services before they end.
        while test_engine.engine.dispatch_policy().ranks().eligible_service_mask() != 0
            && started.elapsed() < CONDITION_TIMEOUT
        {
            test_engine.poll(3);
        }
    });
    test_engine.assert_request_counts_add_up();
    responses.sort_by_key(|answer| answer[1]);
    assert_eq!(responses.iter().map(|answer| answer[1]).collect::<Vec<_>>(), [0, 1, 2, 3, 4, 5]);
    assert_eq!(responses[..4].iter().map(|answer| answer[0]).collect::<Vec<_>>(), [0, 1, 0, 1]);
    assert_eq!(
        (
            test_engine.service_counters(1).completed_requests,
            test_engine.engine.dispatch_policy().ranks().eligible_service_mask()
        ),
        (6, 0)
    );
}

#[test]
fn requests_of_an_ended_worker_are_lost_and_counted() {
    let mut test_engine = TestEngine::new(&two_service_engine_config());
    let runtime = test_engine.connect_runtime();
    let first_worker = test_engine.attach_serving_worker(&runtime, 0);
    (0..5).for_each(|_| test_engine.submit_request(1, 1, b"x"));
    assert_eq!(
        (
            test_engine.outstanding_request_counts_by_core(),
            test_engine.engine.dispatch_policy().waiting_request_count(1)
        ),
        ([2, 0], 3)
    );
    test_engine.check_workers(2);
    assert_eq!(test_engine.outstanding_request_counts_by_core(), [2, 0], "the worker lives");
    drop(first_worker);
    test_engine.check_workers(3);
    assert_eq!(
        (test_engine.outstanding_request_counts_by_core(), test_engine.service_counters(1).lost_requests),
        ([0, 0], 2)
    );
    assert_eq!(test_engine.engine.dispatch_policy().ranks().eligible_service_mask(), 0);
    // A new worker at this core gets the waiting requests. A second one replaces it before the next check.
    let second_worker = test_engine.attach_serving_worker(&runtime, 0);
    assert_eq!(
        (
            test_engine.outstanding_request_counts_by_core(),
            test_engine.engine.dispatch_policy().waiting_request_count(1)
        ),
        ([2, 0], 1)
    );
    drop(second_worker);
    let _third_worker = test_engine.attach_serving_worker(&runtime, 0);
    assert_eq!(
        (test_engine.outstanding_request_counts_by_core(), test_engine.service_counters(1).lost_requests),
        ([1, 0], 4)
    );
    assert_eq!(
        (test_engine.engine.core_counters().accepted_workers, test_engine.engine.core_counters().ended_workers),
        (3, 2)
    );
    test_engine.assert_request_counts_add_up();
}

#[test]
fn stalled_worker_loses_eligibility_until_it_completes_a_request() {
    let mut test_engine = TestEngine::new(&two_service_engine_config());
    let runtime = test_engine.connect_runtime();
    let (mut stalls, mut other) =
        (test_engine.attach_serving_worker(&runtime, 0), test_engine.attach_serving_worker(&runtime, 1));
    test_engine.submit_request(1, 0, b"x");
    assert_eq!(test_engine.outstanding_request_counts_by_core(), [1, 0]);
    test_engine.check_workers(2);
    test_engine.check_workers(2 + WORKER_STALL_TIMEOUT_NS);
    assert_eq!(test_engine.engine.core_counters().worker_stalls, 1);
    (0..2).for_each(|_| test_engine.submit_request(3, 0, b"x"));
    assert_eq!(test_engine.outstanding_request_counts_by_core(), [1, 2], "the other core takes all");
    test_engine.submit_request(4, 0, b"x");
    assert_eq!(
        (
            test_engine.outstanding_request_counts_by_core(),
            test_engine.engine.dispatch_policy().waiting_request_count(0)
        ),
        ([1, 2], 1)
    );
    take_and_complete_requests(&mut other, 0, 2);
    take_and_complete_requests(&mut stalls, 0, 1);
    test_engine.poll(5 + WORKER_STALL_TIMEOUT_NS);
    assert_eq!(test_engine.outstanding_request_counts_by_core(), [0, 1]);
    test_engine.check_workers(6 + WORKER_STALL_TIMEOUT_NS);
    test_engine.submit_request(7 + WORKER_STALL_TIMEOUT_NS, 0, b"x");
    assert_eq!(
        (test_engine.outstanding_request_counts_by_core(), test_engine.engine.core_counters().worker_stalls),
        ([1, 1], 1)
    );
}

#[test]
fn full_buffer_drops_requests_of_the_lowest_priority() {
    let mut test_engine = TestEngine::new(&two_service_engine_config());
    for service in [1, 1, 0, 0, 0, 1, 0] {
        test_engine.submit_request(1, service, b"x");
    }
    assert_eq!([0, 1].map(|service| test_engine.engine.dispatch_policy().waiting_request_count(service)), [4, 0]);
    assert_eq!([0, 1].map(|service| test_engine.service_counters(service).dropped_requests), [0, 3]);
    test_engine.submit_request(1, 0, b"x");
    test_engine.submit_request(1, 0, &[0; 101]);
    assert_eq!(
        (test_engine.service_counters(0).dropped_requests, test_engine.service_counters(0).rejected_requests),
        (1, 1)
    );
}

#[test]
fn feedback_for_requests_that_were_not_sent_is_rejected_and_counted() {
    let mut test_engine = TestEngine::new(&two_service_engine_config());
    let runtime = test_engine.connect_runtime();
    let mut worker = test_engine.attach_serving_worker(&runtime, 0);
    test_engine.submit_request(1, 0, b"x");
    worker.send_load_feedback(0, 0, 2).unwrap();
    worker.send_load_feedback(1, 0, 1).unwrap();
    worker.send_load_feedback(0, 1, u32::MAX).unwrap();
    worker.enable_service(0, 1).unwrap();
    test_engine.poll(2);
    let counters = test_engine.engine.core_counters();
    assert_eq!((counters.rejected_feedback, counters.invalid_messages), (3, 0));
    assert_eq!(counters.enable_messages_without_worker, 1, "core 1 has no worker");
    assert_eq!(
        (test_engine.outstanding_request_counts_by_core(), test_engine.service_counters(0).completed_requests),
        ([1, 0], 0)
    );
    worker.send_load_feedback(0, 0, 1).unwrap();
    test_engine.poll(3);
    assert_eq!(
        (test_engine.outstanding_request_counts_by_core(), test_engine.service_counters(0).completed_requests),
        ([0, 0], 1)
    );
}

#[test]
fn hint_is_sent_once_to_the_least_loaded_core_until_monitor_is_rearmed() {
    let mut test_engine = TestEngine::new(&two_service_engine_config());
    let runtime = test_engine.connect_runtime();
    let mut workers = [0, 1].map(|core| test_engine.attach_serving_worker(&runtime, core));
    let monitor_epoch = LoadCheckInterval::power_of_two(4).unwrap();
    workers[0]
        .enable_load_monitor(1, LoadHintTrigger::ScaleUp(ScaleUpCondition { epoch_length: monitor_epoch }))
        .unwrap();
    test_engine.poll(0);
    (0..5).for_each(|_| test_engine.submit_request(1, 1, b"x"));
    assert_eq!(
        (
            test_engine.outstanding_request_counts_by_core(),
            test_engine.engine.dispatch_policy().waiting_request_count(1)
        ),
        ([2, 2], 1)
    );
    assert_eq!(test_engine.engine.next_timer_due_ns(4), Some(16));
    test_engine.engine.check_load_monitors(16);
    test_engine.engine.check_load_monitors(32);
    test_engine.engine.check_load_monitors(48);
    let hint = workers[0].next_hint().unwrap();
    assert_eq!(
        (hint.service, hint.hint, hint.waiting_service_mask),
        (1, LoadHint::ScaleUp, 0b10),
        "core 0 is the first of equals"
    );
    assert_eq!((workers[0].next_hint(), workers[1].next_hint()), (None, None));
    workers[0].rearm_load_monitor(1).unwrap();
    test_engine.poll(50);
    test_engine.engine.check_load_monitors(64);
    assert!(workers[0].next_hint().is_some());
    // The worker ends before it acts on the hint, so the hint no longer counts as awaiting action.
    let [first, mut second] = workers;
    drop(first);
    test_engine.check_workers(65);
    assert_eq!(test_engine.service_counters(1).lost_requests, 2);
    test_engine.engine.check_load_monitors(80);
    assert_eq!(second.next_hint().map(|hint| hint.hint), Some(LoadHint::ScaleUp));
    let scale_down_condition =
        ScaleDownCondition { epoch_length: monitor_epoch, max_calm_queue_length: 0, required_calm_epochs: 1 };
    second.enable_load_monitor(0, LoadHintTrigger::ScaleDown(scale_down_condition)).unwrap();
    test_engine.poll(81);
    drop(second);
    test_engine.check_workers(82);
    test_engine.engine.check_load_monitors(97);
    assert_eq!(test_engine.engine.core_counters().sent_hints, 3, "no core runs service 0: nothing is sent");
}

#[test]
fn rate_limit_delays_requests() {
    let mut rate_limited_config = two_service_engine_config();
    rate_limited_config.scheduler_config.queues[0].parameters.rate_limit =
        Some(DispatchRateLimit { token_interval: 100, burst_tokens: 1 });
    let mut test_engine = TestEngine::new(&rate_limited_config);
    let runtime = test_engine.connect_runtime();
    let _worker = test_engine.attach_serving_worker(&runtime, 0);
    (0..2).for_each(|_| test_engine.submit_request(1000, 0, b"x"));
    assert_eq!(
        (test_engine.outstanding_request_counts_by_core(), test_engine.engine.next_timer_due_ns(1000)),
        ([1, 0], Some(1100))
    );
    test_engine.engine.dispatch_waiting_requests(1099);
    assert_eq!(test_engine.outstanding_request_counts_by_core(), [1, 0]);
    test_engine.engine.dispatch_waiting_requests(1100);
    assert_eq!(test_engine.outstanding_request_counts_by_core(), [2, 0]);
}

#[test]
fn core_of_a_worker_with_damaged_queues_is_released() {
    use std::os::unix::fs::FileExt as _;
    let mut test_engine = TestEngine::new(&two_service_engine_config());
    let runtime = test_engine.connect_runtime();
    let mut worker = test_engine.attach_serving_worker(&runtime, 0);
    // The orchestrator reads the worker's cursor only when the queue looks full.
    for _ in 0..two_service_engine_config().rank_bound.get().next_power_of_two() {
        test_engine.submit_request(1, 0, b"x");
        let request = worker.take_request().unwrap().unwrap();
        worker.respond(&request, b"y").unwrap();
        test_engine.poll(2);
    }
    // The header, 64 services, and three cache lines of the core precede the worker's heads.
    let file = std::fs::OpenOptions::new().write(true).open(&test_engine.memory_path).unwrap();
    file.write_all_at(&(1u32 << 31).to_ne_bytes(), 64 * 68).unwrap();
    test_engine.submit_request(3, 0, b"x");
    let error = worker.serve(&EchoHandler, ServeOptions::default(), &AtomicBool::new(false)).unwrap_err();
    assert!(matches!(error, RuntimeError::CoreWorkerReleased(0)), "{error}");
    assert_eq!(
        (test_engine.engine.core_counters().damaged_queues, test_engine.service_counters(0).rejected_requests),
        (1, 1)
    );
    drop(worker);
    let _next_worker = test_engine.attach_serving_worker(&runtime, 0);
    test_engine.submit_request(3, 0, b"x");
    assert_eq!(test_engine.outstanding_request_counts_by_core(), [1, 0], "the next worker adopts the cursors");
}
