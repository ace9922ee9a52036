//! Tests a worker's loop, with its yields, its feedback in batches, and its end.

use std::path::Path;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering::SeqCst};
use std::time::{Duration, Instant};

use coreward_model::dispatch::LoadHint;
use coreward_runtime::RuntimeError;
use coreward_runtime::core_queues::CoreQueues;
use coreward_runtime::serve::{
    HandlerContext, HandlerReplyAction, HandlerRequest, RequestHandler, ServeCounters, ServeOptions,
};
use coreward_runtime::worker::{OrchestratorConnection, Worker};
use coreward_runtime::worker_message::{LoadHintMessage, WorkerMessage};

use crate::shared_memory::{
    TEST_GEOMETRY, attach_worker, build_request_header, create_orchestrator, loopback_address, receive_all_messages,
};

/// Handler that records the start and end of requests of two services, and the load hints.
#[derive(Default)]
struct RecordingHandler {
    recorded_events: Mutex<Vec<&'static str>>,
    has_low_priority_request_started: AtomicBool,
    is_high_priority_request_sent: AtomicBool,
}

impl RecordingHandler {
    fn record_event(&self, event: &'static str) {
        self.recorded_events.lock().unwrap().push(event);
    }
}

impl RequestHandler for RecordingHandler {
    fn handle(
        &self,
        request: &HandlerRequest<'_>,
        response: &mut Vec<u8>,
        context: &mut HandlerContext<'_>,
    ) -> HandlerReplyAction {
        if request.service == 0 {
            self.record_event("high");
            response.extend_from_slice(request.payload);
            return HandlerReplyAction::Send;
        }
        self.record_event("low starts");
        self.has_low_priority_request_started.store(true, SeqCst);
        while !self.is_high_priority_request_sent.load(SeqCst) {
            std::thread::yield_now();
        }
        context.yield_point();
        self.record_event("low ends");
        HandlerReplyAction::NoReply
    }

    fn handle_load_hint(&self, hint: LoadHintMessage, worker: &mut Worker<'_>) -> Result<(), RuntimeError> {
        self.record_event("hint");
        worker.enable_service(hint.service, worker.core())?;
        worker.rearm_load_monitor(hint.service)
    }
}

/// Serves requests until `work` returns, while the orchestrator reads all rings. Returns the counters, the messages and
/// the responses.
fn serve_until_work_ends(
    queues: &mut CoreQueues,
    path: &Path,
    handler: &(dyn RequestHandler + Sync),
    options: ServeOptions,
    timer_period: Option<Duration>,
    work: impl FnOnce(&mut CoreQueues),
) -> (ServeCounters, Vec<WorkerMessage>, Vec<Vec<u8>>) {
    let runtime = OrchestratorConnection::connect(path).unwrap();
    (0..2).for_each(|service| runtime.register_service(service, loopback_address(4000), service).unwrap());
    let mut attached_worker = attach_worker(queues, &runtime, 0);
    let stop_flag = AtomicBool::new(false);
    let (mut sent_messages, mut responses) = (Vec::new(), Vec::new());
    let serve_counters = std::thread::scope(|scope| {
        let server_thread = scope.spawn(|| match timer_period {
            None => attached_worker.serve(handler, options, &stop_flag).unwrap(),
            Some(period) => attached_worker.serve_with_timer(handler, options, period, &stop_flag).unwrap(),
        });
        work(queues);
        stop_flag.store(true, SeqCst);
        while !server_thread.is_finished() {
            sent_messages.extend(receive_all_messages(queues, 0));
            queues.receive_responses(0, 9, |_, payload| responses.push(payload.unwrap().to_vec()));
        }
        server_thread.join().unwrap()
    });
    (serve_counters, sent_messages, responses)
}

fn record_events_with_quantum(quantum: Duration, timer_period: Option<Duration>) -> (Vec<&'static str>, u64) {
    let (_directory, path, mut queues) = create_orchestrator();
    let recording_handler = RecordingHandler::default();
    let options = ServeOptions { quantum, ..ServeOptions::default() };
    let (counters, sent_messages, responses) =
        serve_until_work_ends(&mut queues, &path, &recording_handler, options, timer_period, |queues| {
            queues.send_request(0, 1, &build_request_header(1), b"low").unwrap();
            while !recording_handler.has_low_priority_request_started.load(SeqCst) {
                std::thread::yield_now();
            }
            queues.send_request(0, 0, &build_request_header(0), b"answer").unwrap();
            recording_handler.is_high_priority_request_sent.store(true, SeqCst);
        });
    assert_eq!((counters.served_requests, &responses[..]), (2, &[b"answer".to_vec()][..]));
    assert!(
        sent_messages.contains(&WorkerMessage::LoadFeedback { service: 1, core: 0, count: 1 }),
        "{sent_messages:?}"
    );
    (recording_handler.recorded_events.into_inner().unwrap(), counters.preempting_requests)
}

#[test]
fn handler_yields_to_higher_priority_after_its_quantum() {
    const UNREACHED_QUANTUM: Duration = Duration::from_secs(3600);
    for timer in [None, Some(Duration::from_millis(1))] {
        let (events, preempting) = record_events_with_quantum(Duration::ZERO, timer);
        assert_eq!((events, preempting), (vec!["low starts", "high", "low ends"], 1), "{timer:?}");
        let (events, preempting) = record_events_with_quantum(UNREACHED_QUANTUM, timer);
        assert_eq!((events, preempting), (vec!["low starts", "low ends", "high"], 0), "{timer:?}");
    }
}

/// Handler that serves a request of service 1 without yield points until a request of service 0 has been served.
#[derive(Default)]
struct EndlessHandler {
    has_low_priority_request_started: AtomicBool,
    has_high_priority_request_ended: AtomicBool,
}

impl RequestHandler for EndlessHandler {
    fn handle(
        &self,
        request: &HandlerRequest<'_>,
        _response: &mut Vec<u8>,
        _context: &mut HandlerContext<'_>,
    ) -> HandlerReplyAction {
        if request.service == 0 {
            self.has_high_priority_request_ended.store(true, SeqCst);
            return HandlerReplyAction::NoReply;
        }
        self.has_low_priority_request_started.store(true, SeqCst);
        let started_at = Instant::now();
        while !self.has_high_priority_request_ended.load(SeqCst) {
            assert!(started_at.elapsed() < Duration::from_secs(10), "not preempted");
            std::hint::spin_loop();
        }
        HandlerReplyAction::NoReply
    }
}

#[test]
fn timer_preempts_a_handler_without_yield_points() {
    let (_directory, path, mut queues) = create_orchestrator();
    let (handler, period) = (EndlessHandler::default(), Duration::from_micros(50));
    let (counters, ..) =
        serve_until_work_ends(&mut queues, &path, &handler, ServeOptions::default(), Some(period), |queues| {
            queues.send_request(0, 1, &build_request_header(1), b"low").unwrap();
            while !handler.has_low_priority_request_started.load(SeqCst) {
                std::thread::yield_now();
            }
            queues.send_request(0, 0, &build_request_header(0), b"high").unwrap();
        });
    assert_eq!((counters.served_requests, counters.preempting_requests), (2, 1));
}

/// Handler that computes for some time, and then responds with the request's payload.
struct ComputingEchoHandler;

impl RequestHandler for ComputingEchoHandler {
    fn handle(
        &self,
        request: &HandlerRequest<'_>,
        response: &mut Vec<u8>,
        context: &mut HandlerContext<'_>,
    ) -> HandlerReplyAction {
        let computation_rounds = if request.service == 0 { 10 } else { 2000 };
        for round in 0..computation_rounds {
            std::hint::black_box(round);
            if round == 1000 {
                context.yield_point();
            }
        }
        response.extend_from_slice(request.payload);
        HandlerReplyAction::Send
    }
}

#[test]
fn every_request_is_answered_once_while_a_timer_preempts() {
    let (_directory, path, mut queues) = create_orchestrator();
    let options = ServeOptions { quantum: Duration::from_nanos(1), ..ServeOptions::default() };
    let mut response_payloads = Vec::new();
    let (counters, _, remaining_responses) = serve_until_work_ends(
        &mut queues,
        &path,
        &ComputingEchoHandler,
        options,
        Some(Duration::from_micros(1)),
        |queues| {
            for number in 0..20_000_u32 {
                let service = (number % 2) as u8;
                // There are at most as many requests as the response ring has slots.
                while number as usize - response_payloads.len()
                    >= usize::from(TEST_GEOMETRY.priority_count) * TEST_GEOMETRY.slots_per_queue as usize
                    || queues.send_request(0, service, &build_request_header(service), &number.to_le_bytes()).is_err()
                {
                    queues.receive_responses(0, 9, |_, payload| response_payloads.push(payload.unwrap().to_vec()));
                    std::thread::yield_now();
                }
            }
        },
    );
    response_payloads.extend(remaining_responses);
    let request_numbers_of_service = |service: u32| {
        let all_request_numbers =
            response_payloads.iter().map(|payload| u32::from_le_bytes(payload[..].try_into().unwrap()));
        all_request_numbers.filter(|number| number % 2 == service).collect::<Vec<_>>()
    };
    assert_eq!((counters.served_requests, response_payloads.len()), (20_000, 20_000));
    for service in [0, 1] {
        assert_eq!(
            request_numbers_of_service(service),
            (service..20_000).step_by(2).collect::<Vec<_>>(),
            "in the order of arrival"
        );
    }
}

#[test]
fn worker_acts_on_a_hint_at_a_yield_point() {
    let (_directory, path, mut queues) = create_orchestrator();
    let recording_handler = RecordingHandler::default();
    let options = ServeOptions { quantum: Duration::ZERO, ..ServeOptions::default() };
    serve_until_work_ends(&mut queues, &path, &recording_handler, options, None, |queues| {
        queues.send_request(0, 1, &build_request_header(1), b"low").unwrap();
        while !recording_handler.has_low_priority_request_started.load(SeqCst) {
            std::thread::yield_now();
        }
        queues.send_hint(0, LoadHintMessage { service: 1, hint: LoadHint::ScaleUp, waiting_service_mask: 0 }).unwrap();
        recording_handler.is_high_priority_request_sent.store(true, SeqCst);
    });
    assert_eq!(recording_handler.recorded_events.into_inner().unwrap(), ["low starts", "hint", "low ends"]);
}

/// Handler that sends no response to requests of service 0, and too long responses to requests of service 1.
struct FeedbackHandler;

impl RequestHandler for FeedbackHandler {
    fn handle(
        &self,
        request: &HandlerRequest<'_>,
        response: &mut Vec<u8>,
        _context: &mut HandlerContext<'_>,
    ) -> HandlerReplyAction {
        response.resize(1000, 0);
        if request.service == 0 { HandlerReplyAction::NoReply } else { HandlerReplyAction::Send }
    }
}

#[test]
fn feedback_is_sent_in_batches_and_before_serving_ends() {
    for (feedback_batch, expected) in [(10, vec![3]), (2, vec![2, 1]), (1, vec![1, 1, 1])] {
        let (_directory, path, mut queues) = create_orchestrator();
        let options = ServeOptions { max_completions_per_feedback: feedback_batch, ..ServeOptions::default() };
        let runtime = OrchestratorConnection::connect(&path).unwrap();
        runtime.register_service(0, loopback_address(4000), 0).unwrap();
        let mut worker = attach_worker(&mut queues, &runtime, 0);
        (0..3).for_each(|_| queues.send_request(0, 0, &build_request_header(0), b"no answer").unwrap());
        // A worker that must end serves all requests that were sent before.
        let stop_flag = AtomicBool::new(true);
        let mut feedback_counts = Vec::new();
        std::thread::scope(|scope| {
            let server_thread = scope.spawn(|| worker.serve(&FeedbackHandler, options, &stop_flag).unwrap());
            while !server_thread.is_finished() {
                feedback_counts.extend(receive_all_messages(&mut queues, 0).into_iter().filter_map(|message| {
                    match message {
                        WorkerMessage::LoadFeedback { count, .. } => Some(count),
                        _ => None,
                    }
                }));
            }
            assert_eq!(server_thread.join().unwrap().served_requests, 3);
        });
        assert_eq!(feedback_counts, expected);
    }
}

#[test]
fn too_long_response_is_not_sent_but_completes_its_request() {
    let (_directory, path, mut queues) = create_orchestrator();
    let (counters, sent_messages, responses) =
        serve_until_work_ends(&mut queues, &path, &FeedbackHandler, ServeOptions::default(), None, |queues| {
            queues.send_request(0, 1, &build_request_header(1), b"").unwrap();
        });
    assert_eq!((counters.oversized_responses, counters.served_requests, responses), (1, 1, vec![]));
    let disable_messages = [0, 1].map(|service| WorkerMessage::DisableService { service, core: 0 });
    assert!(disable_messages.iter().all(|message| sent_messages.contains(message)), "{sent_messages:?}");
    assert!(
        sent_messages.contains(&WorkerMessage::LoadFeedback { service: 1, core: 0, count: 1 }),
        "{sent_messages:?}"
    );
}

#[test]
fn hints_are_passed_to_the_handler() {
    let (_directory, path, mut queues) = create_orchestrator();
    let recording_handler = RecordingHandler::default();
    let (_, sent_messages, _) =
        serve_until_work_ends(&mut queues, &path, &recording_handler, ServeOptions::default(), None, |queues| {
            queues
                .send_hint(0, LoadHintMessage { service: 1, hint: LoadHint::ScaleUp, waiting_service_mask: 0 })
                .unwrap();
            while recording_handler.recorded_events.lock().unwrap().is_empty() {
                std::thread::yield_now();
            }
        });
    let expected_messages =
        [WorkerMessage::EnableService { service: 1, core: 0 }, WorkerMessage::RearmLoadMonitor { service: 1 }];
    assert_eq!(&sent_messages[..2], expected_messages);
}
