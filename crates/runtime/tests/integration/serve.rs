//! A worker's loop: yields, feedback in batches, and its end.

use std::path::Path;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering::SeqCst};
use std::time::{Duration, Instant};

use coreward_model::dispatch::LoadHint;
use coreward_runtime::RuntimeError;
use coreward_runtime::core_queues::CoreQueues;
use coreward_runtime::message::{HintMessage, Message};
use coreward_runtime::serve::{Context, Handler, Reply, Request, ServeCounters, ServeOptions};
use coreward_runtime::worker::{Runtime, Worker};

use crate::shared_memory::{GEOMETRY, address, attach_worker, orchestrator, receive_all_messages, request};

/// Handler of two services that records events.
#[derive(Default)]
struct Recorder {
    events: Mutex<Vec<&'static str>>,
    low_has_started: AtomicBool,
    is_high_sent: AtomicBool,
}

impl Recorder {
    fn record(&self, event: &'static str) {
        self.events.lock().unwrap().push(event);
    }
}

impl Handler for Recorder {
    fn handle(&self, request: &Request<'_>, response: &mut Vec<u8>, context: &mut Context<'_>) -> Reply {
        if request.service == 0 {
            self.record("high");
            response.extend_from_slice(request.payload);
            return Reply::Send;
        }
        self.record("low starts");
        self.low_has_started.store(true, SeqCst);
        while !self.is_high_sent.load(SeqCst) {
            std::thread::yield_now();
        }
        context.yield_point();
        self.record("low ends");
        Reply::Nothing
    }

    fn load_hint(&self, hint: HintMessage, worker: &mut Worker<'_>) -> Result<(), RuntimeError> {
        self.record("hint");
        worker.enable_service(hint.service, worker.core())?;
        worker.rearm_load_monitor(hint.service)
    }
}

/// Serves requests until `work` returns, while the orchestrator reads all rings. Returns the messages and responses.
fn serve(
    queues: &mut CoreQueues,
    path: &Path,
    handler: &(dyn Handler + Sync),
    options: ServeOptions,
    timer: Option<Duration>,
    work: impl FnOnce(&mut CoreQueues),
) -> (ServeCounters, Vec<Message>, Vec<Vec<u8>>) {
    let runtime = Runtime::connect(path).unwrap();
    (0..2).for_each(|service| runtime.register_service(service, address(4000), service).unwrap());
    let mut worker = attach_worker(queues, &runtime, 0);
    let stop = AtomicBool::new(false);
    let (mut sent, mut responses) = (Vec::new(), Vec::new());
    let counters = std::thread::scope(|scope| {
        let server = scope.spawn(|| match timer {
            None => worker.serve(handler, options, &stop).unwrap(),
            Some(period) => worker.serve_with_timer(handler, options, period, &stop).unwrap(),
        });
        work(queues);
        stop.store(true, SeqCst);
        while !server.is_finished() {
            sent.extend(receive_all_messages(queues, 0));
            queues.receive_responses(0, 9, |_, payload| responses.push(payload.unwrap().to_vec()));
        }
        server.join().unwrap()
    });
    (counters, sent, responses)
}

fn events_with_quantum(quantum: Duration, timer: Option<Duration>) -> (Vec<&'static str>, u64) {
    let (_directory, path, mut queues) = orchestrator();
    let handler = Recorder::default();
    let options = ServeOptions { quantum, ..ServeOptions::default() };
    let (counters, sent, responses) = serve(&mut queues, &path, &handler, options, timer, |queues| {
        queues.send(0, 1, &request(1), b"low").unwrap();
        while !handler.low_has_started.load(SeqCst) {
            std::thread::yield_now();
        }
        queues.send(0, 0, &request(0), b"answer").unwrap();
        handler.is_high_sent.store(true, SeqCst);
    });
    assert_eq!((counters.served, &responses[..]), (2, &[b"answer".to_vec()][..]));
    assert!(sent.contains(&Message::LoadFeedback { service: 1, core: 0, count: 1 }), "{sent:?}");
    (handler.events.into_inner().unwrap(), counters.preempting)
}

#[test]
fn handler_yields_to_higher_priority_after_its_quantum() {
    const HOUR: Duration = Duration::from_secs(3600);
    for timer in [None, Some(Duration::from_millis(1))] {
        let (events, preempting) = events_with_quantum(Duration::ZERO, timer);
        assert_eq!((events, preempting), (vec!["low starts", "high", "low ends"], 1), "{timer:?}");
        let (events, preempting) = events_with_quantum(HOUR, timer);
        assert_eq!((events, preempting), (vec!["low starts", "low ends", "high"], 0), "{timer:?}");
    }
}

/// Handler that serves service 1 without yield points until a request of service 0 has been served.
#[derive(Default)]
struct Endless {
    low_has_started: AtomicBool,
    high_has_ended: AtomicBool,
}

impl Handler for Endless {
    fn handle(&self, request: &Request<'_>, _response: &mut Vec<u8>, _context: &mut Context<'_>) -> Reply {
        if request.service == 0 {
            self.high_has_ended.store(true, SeqCst);
            return Reply::Nothing;
        }
        self.low_has_started.store(true, SeqCst);
        let started = Instant::now();
        while !self.high_has_ended.load(SeqCst) {
            assert!(started.elapsed() < Duration::from_secs(10), "not preempted");
            std::hint::spin_loop();
        }
        Reply::Nothing
    }
}

#[test]
fn timer_preempts_a_handler_without_yield_points() {
    let (_directory, path, mut queues) = orchestrator();
    let (handler, period) = (Endless::default(), Duration::from_micros(50));
    let (counters, ..) = serve(&mut queues, &path, &handler, ServeOptions::default(), Some(period), |queues| {
        queues.send(0, 1, &request(1), b"low").unwrap();
        while !handler.low_has_started.load(SeqCst) {
            std::thread::yield_now();
        }
        queues.send(0, 0, &request(0), b"high").unwrap();
    });
    assert_eq!((counters.served, counters.preempting), (2, 1));
}

/// Handler that computes for some time, and responds with the request's payload.
struct Echo;

impl Handler for Echo {
    fn handle(&self, request: &Request<'_>, response: &mut Vec<u8>, context: &mut Context<'_>) -> Reply {
        let rounds = if request.service == 0 { 10 } else { 2000 };
        for round in 0..rounds {
            std::hint::black_box(round);
            if round == 1000 {
                context.yield_point();
            }
        }
        response.extend_from_slice(request.payload);
        Reply::Send
    }
}

#[test]
fn every_request_is_answered_once_with_a_timer() {
    let (_directory, path, mut queues) = orchestrator();
    let options = ServeOptions { quantum: Duration::from_nanos(1), ..ServeOptions::default() };
    let mut answered = Vec::new();
    let (counters, _, rest) = serve(&mut queues, &path, &Echo, options, Some(Duration::from_micros(1)), |queues| {
        for number in 0..20_000_u32 {
            let service = (number % 2) as u8;
            // As many requests as the ring of responses has slots.
            while number as usize - answered.len() >= usize::from(GEOMETRY.priority_count) * GEOMETRY.slots as usize
                || queues.send(0, service, &request(service), &number.to_le_bytes()).is_err()
            {
                queues.receive_responses(0, 9, |_, payload| answered.push(payload.unwrap().to_vec()));
                std::thread::yield_now();
            }
        }
    });
    answered.extend(rest);
    let numbers = |service: u32| {
        let numbers = answered.iter().map(|payload| u32::from_le_bytes(payload[..].try_into().unwrap()));
        numbers.filter(|number| number % 2 == service).collect::<Vec<_>>()
    };
    assert_eq!((counters.served, answered.len()), (20_000, 20_000));
    for service in [0, 1] {
        assert_eq!(numbers(service), (service..20_000).step_by(2).collect::<Vec<_>>(), "in the order of arrival");
    }
}

#[test]
fn hint_is_acted_on_at_a_yield_point() {
    let (_directory, path, mut queues) = orchestrator();
    let handler = Recorder::default();
    let options = ServeOptions { quantum: Duration::ZERO, ..ServeOptions::default() };
    serve(&mut queues, &path, &handler, options, None, |queues| {
        queues.send(0, 1, &request(1), b"low").unwrap();
        while !handler.low_has_started.load(SeqCst) {
            std::thread::yield_now();
        }
        queues.send_hint(0, HintMessage { service: 1, hint: LoadHint::ScaleUp, waiting_services: 0 }).unwrap();
        handler.is_high_sent.store(true, SeqCst);
    });
    assert_eq!(handler.events.into_inner().unwrap(), ["low starts", "hint", "low ends"]);
}

/// Handler that sends no response to requests of service 0, and a too long one to those of service 1.
struct Silent;

impl Handler for Silent {
    fn handle(&self, request: &Request<'_>, response: &mut Vec<u8>, _context: &mut Context<'_>) -> Reply {
        response.resize(1000, 0);
        if request.service == 0 { Reply::Nothing } else { Reply::Send }
    }
}

#[test]
fn feedback_is_batched_and_sent_before_the_end() {
    for (feedback_batch, expected) in [(10, vec![3]), (2, vec![2, 1]), (1, vec![1, 1, 1])] {
        let (_directory, path, mut queues) = orchestrator();
        let options = ServeOptions { feedback_batch, ..ServeOptions::default() };
        let runtime = Runtime::connect(&path).unwrap();
        runtime.register_service(0, address(4000), 0).unwrap();
        let mut worker = attach_worker(&mut queues, &runtime, 0);
        (0..3).for_each(|_| queues.send(0, 0, &request(0), b"no answer").unwrap());
        // A worker that is to end serves all that was sent before.
        let stop = AtomicBool::new(true);
        let mut counts = Vec::new();
        std::thread::scope(|scope| {
            let server = scope.spawn(|| worker.serve(&Silent, options, &stop).unwrap());
            while !server.is_finished() {
                counts.extend(receive_all_messages(&mut queues, 0).into_iter().filter_map(|message| match message {
                    Message::LoadFeedback { count, .. } => Some(count),
                    _ => None,
                }));
            }
            assert_eq!(server.join().unwrap().served, 3);
        });
        assert_eq!(counts, expected);
    }
}

#[test]
fn response_without_room_completes_its_request() {
    let (_directory, path, mut queues) = orchestrator();
    let (counters, sent, responses) = serve(&mut queues, &path, &Silent, ServeOptions::default(), None, |queues| {
        queues.send(0, 1, &request(1), b"").unwrap();
    });
    assert_eq!((counters.too_long, counters.served, responses), (1, 1, vec![]));
    let disabled = [0, 1].map(|service| Message::DisableService { service, core: 0 });
    assert!(disabled.iter().all(|message| sent.contains(message)), "{sent:?}");
    assert!(sent.contains(&Message::LoadFeedback { service: 1, core: 0, count: 1 }), "{sent:?}");
}

#[test]
fn hints_reach_the_handler() {
    let (_directory, path, mut queues) = orchestrator();
    let handler = Recorder::default();
    let (_, sent, _) = serve(&mut queues, &path, &handler, ServeOptions::default(), None, |queues| {
        queues.send_hint(0, HintMessage { service: 1, hint: LoadHint::ScaleUp, waiting_services: 0 }).unwrap();
        while handler.events.lock().unwrap().is_empty() {
            std::thread::yield_now();
        }
    });
    let expected = [Message::EnableService { service: 1, core: 0 }, Message::RearmLoadMonitor { service: 1 }];
    assert_eq!(&sent[..2], expected);
}
