//! Serves a core's requests with a handler function, in the order of their priorities.
//!
//! A handler calls [`HandlerContext::yield_point`] now and then. If it has used up its quantum and a request of higher
//! priority waits, that request is served inside the call, on the same stack. Then the handler continues. A request of
//! higher priority thus waits at most for one quantum and the time between two yield points. A handler without yield
//! points runs to its end, unless [`Worker::serve_with_timer`] preempts it.

mod timer;

use std::net::SocketAddrV4;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::time::{Duration, Instant};

use coreward_model::dispatch::MAX_SCHEDULED_SERVICES;

use crate::core_queues::slot_client_address;
use crate::error::RuntimeError;
use crate::segment_layout::SlotHeader;
use crate::worker::Worker;
use crate::worker_message::{LoadHintMessage, WorkerMessage};

/// Default quantum, which is the time for which a request runs before it yields (RingLeader, NSDI'23, Sect. 4.2).
pub const DEFAULT_REQUEST_QUANTUM: Duration = Duration::from_micros(5);

#[derive(Debug, Clone, Copy)]
pub struct HandlerRequest<'a> {
    pub client: SocketAddrV4,
    pub service: u8,
    pub payload: &'a [u8],
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum HandlerReplyAction {
    /// Send the response to the client.
    Send,
    /// Send no response. The worker reports requests completed in this way to the orchestrator in batches
    /// (LoadFeedback).
    NoReply,
}

/// Handler that serves requests and acts on load hints.
pub trait RequestHandler {
    /// Serves a request, and writes its response to `response`, which is empty at first.
    fn handle(
        &self,
        request: &HandlerRequest<'_>,
        response: &mut Vec<u8>,
        context: &mut HandlerContext<'_>,
    ) -> HandlerReplyAction;

    /// Acts on a load hint by enabling or disabling services on cores, and then rearms the load monitor. The worker
    /// calls it between two requests, or at a yield point of [`handle`](Self::handle). An error, such as one that
    /// [`Worker`] returned, ends the worker.
    fn handle_load_hint(&self, hint: LoadHintMessage, worker: &mut Worker<'_>) -> Result<(), RuntimeError> {
        worker.rearm_load_monitor(hint.service)
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ServeOptions {
    /// Time for which a request runs before it yields to one of higher priority.
    pub quantum: Duration,
    /// Time for which an idle worker polls before it sleeps.
    pub spin_time: Duration,
    /// Time for which an idle worker sleeps between two polls. With 0 it always polls.
    pub sleep_time: Duration,
    /// Maximum number of completed requests without a response that one LoadFeedback message reports. The message is
    /// sent earlier if no request waits.
    pub max_completions_per_feedback: u32,
}

impl Default for ServeOptions {
    fn default() -> Self {
        let (spin_time, sleep_time) = (Duration::from_micros(20), Duration::from_micros(50));
        Self { quantum: DEFAULT_REQUEST_QUANTUM, spin_time, sleep_time, max_completions_per_feedback: 4 }
    }
}

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct ServeCounters {
    pub served_requests: u64,
    /// Number of requests that were served while a request of lower priority was preempted.
    pub preempting_requests: u64,
    /// Number of responses that were not sent because they did not fit into a slot of the response ring.
    pub oversized_responses: u64,
}

const ORCHESTRATOR_CHECK_INTERVAL: Duration = Duration::from_millis(100);

struct RequestServer<'w, 'r, H: ?Sized> {
    worker: &'w mut Worker<'r>,
    handler: &'w H,
    serve_options: ServeOptions,
    running_slice: HandlerTimeSlice,
    /// Response buffers, one for each priority. This suffices, because at most one request of each priority runs at a
    /// time.
    response_buffers: Vec<Vec<u8>>,
    /// Number of requests of each service that were completed without a response and not reported yet.
    unreported_completions: [u32; MAX_SCHEDULED_SERVICES],
    /// Bit mask of the services with unreported completions.
    unreported_service_mask: u64,
    counters: ServeCounters,
}

/// Time slice in which a handler runs without yielding.
#[derive(Debug, Clone, Copy)]
struct HandlerTimeSlice {
    /// Priority of the running handler, which requests with a smaller number preempt. 0 if no handler runs or the
    /// handler cannot be preempted.
    priority: u8,
    started_at: Instant,
}

/// Execution context of a running handler, in which it can yield and find its core.
pub struct HandlerContext<'c> {
    server: &'c mut (dyn PreemptHandler + 'c),
    core: u16,
    first_error: Option<RuntimeError>,
}

trait PreemptHandler {
    fn try_yield(&mut self) -> Result<(), RuntimeError>;
}

/// Exclusive access to a [`RequestServer`], either through a mutable reference or by locking a mutex.
trait RequestServerAccess<'w, 'r: 'w>: PreemptHandler {
    type Handler: RequestHandler + ?Sized + 'w;

    fn call_with_server<T>(&mut self, call: impl FnOnce(&mut RequestServer<'w, 'r, Self::Handler>) -> T) -> T;
}

impl<'w, 'r: 'w, H: RequestHandler + ?Sized> RequestServerAccess<'w, 'r> for RequestServer<'w, 'r, H> {
    type Handler = H;

    #[inline]
    fn call_with_server<T>(&mut self, call: impl FnOnce(&mut Self) -> T) -> T {
        call(self)
    }
}

impl HandlerContext<'_> {
    /// Acts on a waiting load hint and serves waiting requests of higher priority, if the handler has used up its
    /// quantum.
    pub fn yield_point(&mut self) {
        if self.first_error.is_none()
            && let Err(error) = self.server.try_yield()
        {
            // The caller of `serve` gets this error when the handler has ended.
            self.first_error = Some(error);
        }
    }

    pub fn core(&self) -> u16 {
        self.core
    }
}

impl Worker<'_> {
    /// Serves requests until `stop_flag` is set. Then disables all services on this core and serves the remaining
    /// requests. Fails when the orchestrator has ended or the shared memory is damaged. After a failure, the worker
    /// must connect again.
    pub fn serve(
        &mut self,
        handler: &dyn RequestHandler,
        options: ServeOptions,
        stop_flag: &AtomicBool,
    ) -> Result<ServeCounters, RuntimeError> {
        let mut server = RequestServer::new(self, handler, options);
        serve_until_stopped(&mut server, options, stop_flag)?;
        server.serve_remaining_requests_and_detach()?;
        Ok(server.counters)
    }
}

impl<H: RequestHandler + ?Sized> PreemptHandler for RequestServer<'_, '_, H> {
    fn try_yield(&mut self) -> Result<(), RuntimeError> {
        try_yield(self)
    }
}

#[inline]
fn try_yield<'w, 'r: 'w>(server: &mut impl RequestServerAccess<'w, 'r>) -> Result<(), RuntimeError> {
    let Some(priority) = server.call_with_server(|server| server.running_priority_if_yield_due()) else {
        return Ok(());
    };
    serve_higher_priority_requests(server, priority)?;
    server.call_with_server(|server| server.running_slice.started_at = Instant::now());
    Ok(())
}

fn serve_until_stopped<'w, 'r: 'w>(
    server: &mut impl RequestServerAccess<'w, 'r>,
    options: ServeOptions,
    stop_flag: &AtomicBool,
) -> Result<(), RuntimeError> {
    let mut idle_since = Instant::now();
    let mut orchestrator_checked_at = idle_since;
    while !stop_flag.load(Relaxed) {
        if serve_one_request(server)? {
            idle_since = Instant::now();
            continue;
        }
        server.call_with_server(|server| server.report_all_completions())?;
        if orchestrator_checked_at.elapsed() >= ORCHESTRATOR_CHECK_INTERVAL {
            server.call_with_server(|server| server.worker.check_orchestrator_accepts_worker())?;
            orchestrator_checked_at = Instant::now();
        }
        if idle_since.elapsed() < options.spin_time || options.sleep_time.is_zero() {
            std::hint::spin_loop();
        } else {
            std::thread::sleep(options.sleep_time);
        }
    }
    Ok(())
}

/// Acts on a load hint and serves a request, if there are any. Returns whether a request was served.
#[inline]
fn serve_one_request<'w, 'r: 'w>(server: &mut impl RequestServerAccess<'w, 'r>) -> Result<bool, RuntimeError> {
    let Some((priority, slot)) = server.call_with_server(|server| server.handle_hint_and_find_request(u8::MAX))? else {
        return Ok(false);
    };
    serve_request(server, priority, slot)?;
    Ok(true)
}

fn serve_higher_priority_requests<'w, 'r: 'w>(
    server: &mut impl RequestServerAccess<'w, 'r>,
    priority: u8,
) -> Result<(), RuntimeError> {
    while let Some((higher_priority, slot)) =
        server.call_with_server(|server| server.handle_hint_and_find_request(priority))?
    {
        server.call_with_server(|server| server.counters.preempting_requests += 1);
        serve_request(server, higher_priority, slot)?;
    }
    Ok(())
}

fn serve_request<'w, 'r: 'w>(
    server: &mut impl RequestServerAccess<'w, 'r>,
    priority: u8,
    slot: u32,
) -> Result<(), RuntimeError> {
    let StartedRequest {
        slot_header: header,
        payload,
        response_buffer: mut response,
        handler,
        core,
        interrupted_slice: interrupted,
    } = server.call_with_server(|server| server.start_request(priority, slot))?;
    let request =
        HandlerRequest { client: slot_client_address(&header), service: header.service_number as u8, payload };
    let mut context = HandlerContext { server, core, first_error: None };
    let reply = handler.handle(&request, &mut response, &mut context);
    if let Some(error) = context.first_error {
        return Err(error);
    }
    server.call_with_server(|server| server.end_request(priority, header, reply, response, interrupted))
}

struct StartedRequest<'w, H: ?Sized> {
    slot_header: SlotHeader,
    payload: &'w [u8],
    response_buffer: Vec<u8>,
    handler: &'w H,
    core: u16,
    interrupted_slice: HandlerTimeSlice,
}

impl<'w, 'r: 'w, H: RequestHandler + ?Sized> RequestServer<'w, 'r, H> {
    fn new(worker: &'w mut Worker<'r>, handler: &'w H, serve_options: ServeOptions) -> Self {
        let response_buffers = vec![Vec::new(); worker.segment.geometry.priority_count.into()];
        Self {
            worker,
            handler,
            serve_options,
            running_slice: HandlerTimeSlice { priority: 0, started_at: Instant::now() },
            response_buffers,
            unreported_completions: [0; MAX_SCHEDULED_SERVICES],
            unreported_service_mask: 0,
            counters: ServeCounters::default(),
        }
    }

    /// Returns the running handler's priority if the handler must yield. It must yield if its quantum is used up and a
    /// hint or a request of higher priority waits.
    #[inline]
    fn running_priority_if_yield_due(&self) -> Option<u8> {
        let HandlerTimeSlice { priority, started_at: started } = self.running_slice;
        let is_work_waiting = self.worker.highest_priority_request_slot(priority).is_some() || self.worker.has_hint();
        (is_work_waiting && started.elapsed() >= self.serve_options.quantum).then_some(priority)
    }

    fn start_request(&mut self, priority: u8, slot: u32) -> Result<StartedRequest<'w, H>, RuntimeError> {
        let (slot_header, payload) = self.worker.read_request(priority, slot)?;
        let mut response_buffer = std::mem::take(&mut self.response_buffers[usize::from(priority)]);
        response_buffer.clear();
        let interrupted_slice =
            std::mem::replace(&mut self.running_slice, HandlerTimeSlice { priority, started_at: Instant::now() });
        let (handler, core) = (self.handler, self.worker.core);
        Ok(StartedRequest { slot_header, payload, response_buffer, handler, core, interrupted_slice })
    }

    fn end_request(
        &mut self,
        priority: u8,
        header: SlotHeader,
        reply: HandlerReplyAction,
        response: Vec<u8>,
        interrupted: HandlerTimeSlice,
    ) -> Result<(), RuntimeError> {
        self.running_slice = interrupted;
        self.worker.return_request_slot(priority);
        self.counters.served_requests += 1;
        let is_response_sent = reply == HandlerReplyAction::Send && self.send_response(header, &response)?;
        self.response_buffers[usize::from(priority)] = response;
        if is_response_sent { Ok(()) } else { self.record_unreported_completion(header.service_number as u8) }
    }

    /// Acts on a waiting load hint. Returns the priority and slot of the next request whose priority is higher than
    /// `priority_limit`.
    #[inline]
    fn handle_hint_and_find_request(&mut self, priority_limit: u8) -> Result<Option<(u8, u32)>, RuntimeError> {
        // Hints are handled before each request, because requests of higher priority may never stop arriving. A service
        // gets no further core until its hint is handled, because only one hint is sent at a time.
        if let Some(hint) = self.worker.next_hint() {
            self.handler.handle_load_hint(hint, self.worker)?;
        }
        Ok(self.worker.highest_priority_request_slot(priority_limit))
    }

    fn serve_remaining_requests_and_detach(&mut self) -> Result<(), RuntimeError> {
        let core = self.worker.core;
        for service in 0..self.worker.runtime.service_entries().len() as u8 {
            self.worker.disable_service(service, core)?;
        }
        self.worker.wait_until_messages_are_read()?;
        while let Some((priority, slot)) = self.worker.highest_priority_request_slot(u8::MAX) {
            serve_request(self, priority, slot)?;
        }
        self.report_all_completions()?;
        self.worker.wait_until_messages_are_read()?;
        self.worker.wait_until_responses_are_read()
    }

    /// Sends a response, which also reports the service's unreported completions. Returns whether the response fits
    /// into a slot of the response ring.
    fn send_response(&mut self, header: SlotHeader, response: &[u8]) -> Result<bool, RuntimeError> {
        if response.len() > self.worker.segment.geometry.max_payload_bytes() {
            self.counters.oversized_responses += 1;
            return Ok(false);
        }
        let unreported_completion_count =
            self.unreported_completions.get_mut(usize::from(header.service_number)).map_or(0, std::mem::take);
        self.unreported_service_mask &= !(1 << (header.service_number % MAX_SCHEDULED_SERVICES as u16));
        let header = SlotHeader {
            payload_length: response.len() as u32,
            completed_count: 1 + unreported_completion_count,
            ..header
        };
        self.worker.send_response(header, response)?;
        Ok(true)
    }

    fn record_unreported_completion(&mut self, service: u8) -> Result<(), RuntimeError> {
        let Some(unreported_count) = self.unreported_completions.get_mut(usize::from(service)) else { return Ok(()) };
        *unreported_count += 1;
        self.unreported_service_mask |= 1 << service;
        if *unreported_count >= self.serve_options.max_completions_per_feedback {
            self.report_completions(service)
        } else {
            Ok(())
        }
    }

    fn report_completions(&mut self, service: u8) -> Result<(), RuntimeError> {
        let (core, count) = (self.worker.core, std::mem::take(&mut self.unreported_completions[usize::from(service)]));
        self.unreported_service_mask &= !(1 << service);
        self.worker.send_message(WorkerMessage::LoadFeedback { service, core, count })
    }

    #[inline]
    fn report_all_completions(&mut self) -> Result<(), RuntimeError> {
        while self.unreported_service_mask != 0 {
            self.report_completions(self.unreported_service_mask.trailing_zeros() as u8)?;
        }
        Ok(())
    }
}
