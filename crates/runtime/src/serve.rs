//! Service of a core's requests by function handlers, highest priority first.
//!
//! A handler calls [`Context::yield_point`] now and then. When its quantum is used up and a request of higher priority
//! waits, that request is served there, on the same stack, before the handler continues. So a request of higher
//! priority waits at most for one quantum and the time between two yield points. A handler without yield points runs to
//! its end.

use std::net::SocketAddrV4;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::time::{Duration, Instant};

use coreward_model::dispatch::MAX_SERVICES;

use crate::core_queues::client_address;
use crate::error::RuntimeError;
use crate::layout::SlotHeader;
use crate::message::{HintMessage, Message};
use crate::worker::Worker;

/// Time that a request runs before it yields (RingLeader, NSDI'23, Sect. 4.2).
pub const DEFAULT_QUANTUM: Duration = Duration::from_micros(5);

#[derive(Debug, Clone, Copy)]
pub struct Request<'a> {
    pub client: SocketAddrV4,
    pub service: u8,
    pub payload: &'a [u8],
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Reply {
    /// The response is sent to the client.
    Send,
    /// No response is sent. The orchestrator gets the completions by LoadFeedback, in batches.
    Nothing,
}

/// Functions that serve requests and act on hints.
pub trait Handler {
    /// Serves a request. `response` is empty.
    fn handle(&self, request: &Request<'_>, response: &mut Vec<u8>, context: &mut Context<'_>) -> Reply;

    /// Acts on a hint: enables or disables services on cores, then rearms the monitor. Called between two requests, and
    /// at a yield point of [`handle`](Self::handle). Errors, as those of the calls of [`Worker`], end the worker.
    fn load_hint(&self, hint: HintMessage, worker: &mut Worker<'_>) -> Result<(), RuntimeError> {
        worker.rearm_load_monitor(hint.service)
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ServeOptions {
    /// Time that a request runs before it yields to one of higher priority.
    pub quantum: Duration,
    /// Time that an idle worker polls before it sleeps.
    pub spin: Duration,
    /// Time that an idle worker sleeps between two polls; 0: it always polls.
    pub sleep: Duration,
    /// Requests without a response in one LoadFeedback, at most. It is sent earlier when none waits.
    pub feedback_batch: u32,
}

impl Default for ServeOptions {
    fn default() -> Self {
        let (spin, sleep) = (Duration::from_micros(20), Duration::from_micros(50));
        Self { quantum: DEFAULT_QUANTUM, spin, sleep, feedback_batch: 4 }
    }
}

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct ServeCounters {
    /// Requests that ended.
    pub served: u64,
    /// Requests that were served inside another one of lower priority.
    pub preempting: u64,
    /// Responses that fit no slot and were not sent.
    pub too_long: u64,
}

const ORCHESTRATOR_CHECK_INTERVAL: Duration = Duration::from_millis(100);

struct Server<'w, 'r> {
    worker: &'w mut Worker<'r>,
    handler: &'w dyn Handler,
    options: ServeOptions,
    /// Response buffer of each priority: at most one request of each priority runs at a time.
    response_buffers: Vec<Vec<u8>>,
    /// Number of each service's completed requests without a response that were not reported.
    unreported_counts: [u32; MAX_SERVICES],
    /// Bit mask of the services with unreported requests.
    unreported_services: u64,
    counters: ServeCounters,
}

/// A handler's view of its core.
pub struct Context<'c> {
    server: &'c mut (dyn Preempt + 'c),
    priority: u8,
    quantum: Duration,
    slice_started: Instant,
    error: Option<RuntimeError>,
}

trait Preempt {
    fn is_preempted(&mut self, priority: u8) -> bool;
    fn serve_higher_priorities(&mut self, priority: u8) -> Result<(), RuntimeError>;
    fn core(&self) -> u16;
}

impl Context<'_> {
    /// Acts on a hint and serves waiting requests of higher priority if the handler's quantum is used up.
    pub fn yield_point(&mut self) {
        if self.error.is_none()
            && let Err(error) = self.try_yield()
        {
            // Returned to the caller of `serve` when the handler ends.
            self.error = Some(error);
        }
    }

    fn try_yield(&mut self) -> Result<(), RuntimeError> {
        if self.server.is_preempted(self.priority) && self.slice_started.elapsed() >= self.quantum {
            self.server.serve_higher_priorities(self.priority)?;
            self.slice_started = Instant::now();
        }
        Ok(())
    }

    pub fn core(&self) -> u16 {
        self.server.core()
    }
}

impl Worker<'_> {
    /// Serves requests until `stop` is set. Then it disables all services at this core and serves the rest. Fails when
    /// the orchestrator ended, or the memory is damaged. Connect again then.
    pub fn serve(
        &mut self,
        handler: &dyn Handler,
        options: ServeOptions,
        stop: &AtomicBool,
    ) -> Result<ServeCounters, RuntimeError> {
        let response_buffers = vec![Vec::new(); self.segment.geometry.priority_count.into()];
        let (unreported_counts, unreported_services, counters) = ([0; MAX_SERVICES], 0, ServeCounters::default());
        let mut server = Server {
            worker: self,
            handler,
            options,
            response_buffers,
            unreported_counts,
            unreported_services,
            counters,
        };
        server.run(stop)?;
        server.drain_and_detach()?;
        Ok(server.counters)
    }
}

impl Preempt for Server<'_, '_> {
    #[inline]
    fn is_preempted(&mut self, priority: u8) -> bool {
        self.worker.highest_priority_request(priority).is_some() || self.worker.has_hint()
    }

    fn serve_higher_priorities(&mut self, priority: u8) -> Result<(), RuntimeError> {
        // Requests of higher priority may not end, and a service has one hint in flight: it would get no further core.
        self.act_on_hint()?;
        while let Some((higher, slot)) = self.worker.highest_priority_request(priority) {
            self.counters.preempting += 1;
            self.serve_request(higher, slot)?;
            self.act_on_hint()?;
        }
        Ok(())
    }

    fn core(&self) -> u16 {
        self.worker.core
    }
}

impl Server<'_, '_> {
    fn run(&mut self, stop: &AtomicBool) -> Result<(), RuntimeError> {
        let mut idle_since = Instant::now();
        let mut checked = idle_since;
        while !stop.load(Relaxed) {
            if self.serve_one()? {
                idle_since = Instant::now();
                continue;
            }
            self.report_all_completions()?;
            if checked.elapsed() >= ORCHESTRATOR_CHECK_INTERVAL {
                self.worker.check_orchestrator()?;
                checked = Instant::now();
            }
            if idle_since.elapsed() < self.options.spin || self.options.sleep.is_zero() {
                std::hint::spin_loop();
            } else {
                std::thread::sleep(self.options.sleep);
            }
        }
        Ok(())
    }

    /// Acts on a waiting hint, and serves a waiting request. Returns whether a request was served.
    #[inline]
    fn serve_one(&mut self) -> Result<bool, RuntimeError> {
        self.act_on_hint()?;
        let Some((priority, slot)) = self.worker.highest_priority_request(u8::MAX) else { return Ok(false) };
        self.serve_request(priority, slot)?;
        Ok(true)
    }

    #[inline]
    fn act_on_hint(&mut self) -> Result<(), RuntimeError> {
        match self.worker.next_hint() {
            Some(hint) => self.handler.load_hint(hint, self.worker),
            None => Ok(()),
        }
    }

    fn drain_and_detach(&mut self) -> Result<(), RuntimeError> {
        let core = self.worker.core;
        for service in 0..self.worker.runtime.services().len() as u8 {
            self.worker.disable_service(service, core)?;
        }
        self.worker.wait_until_messages_are_read()?;
        while let Some((priority, slot)) = self.worker.highest_priority_request(u8::MAX) {
            self.serve_request(priority, slot)?;
        }
        self.report_all_completions()?;
        self.worker.wait_until_messages_are_read()?;
        self.worker.wait_until_responses_are_read()
    }

    fn serve_request(&mut self, priority: u8, slot: u32) -> Result<(), RuntimeError> {
        let (header, payload) = self.worker.read_request(priority, slot)?;
        let request = Request { client: client_address(&header), service: header.service as u8, payload };
        let mut response = std::mem::take(&mut self.response_buffers[usize::from(priority)]);
        response.clear();
        let (handler, quantum, slice_started) = (self.handler, self.options.quantum, Instant::now());
        let mut context = Context { server: self, priority, quantum, slice_started, error: None };
        let reply = handler.handle(&request, &mut response, &mut context);
        if let Some(error) = context.error {
            return Err(error);
        }
        self.worker.return_slot(priority);
        self.counters.served += 1;
        let is_sent = reply == Reply::Send && self.send_response(header, &response)?;
        self.response_buffers[usize::from(priority)] = response;
        if is_sent { Ok(()) } else { self.complete_without_response(request.service) }
    }

    /// Sends a response, which also completes the unreported requests of its service. Returns whether it fits a slot.
    fn send_response(&mut self, header: SlotHeader, response: &[u8]) -> Result<bool, RuntimeError> {
        if response.len() > self.worker.segment.geometry.payload_bytes() {
            self.counters.too_long += 1;
            return Ok(false);
        }
        let unreported = self.unreported_counts.get_mut(usize::from(header.service)).map_or(0, std::mem::take);
        self.unreported_services &= !(1 << (header.service % MAX_SERVICES as u16));
        let header = SlotHeader { length: response.len() as u32, completed_count: 1 + unreported, ..header };
        self.worker.send_response(header, response)?;
        Ok(true)
    }

    fn complete_without_response(&mut self, service: u8) -> Result<(), RuntimeError> {
        let Some(unreported) = self.unreported_counts.get_mut(usize::from(service)) else { return Ok(()) };
        *unreported += 1;
        self.unreported_services |= 1 << service;
        if *unreported >= self.options.feedback_batch { self.report_completions(service) } else { Ok(()) }
    }

    fn report_completions(&mut self, service: u8) -> Result<(), RuntimeError> {
        let (core, count) = (self.worker.core, std::mem::take(&mut self.unreported_counts[usize::from(service)]));
        self.unreported_services &= !(1 << service);
        self.worker.send(Message::LoadFeedback { service, core, count })
    }

    #[inline]
    fn report_all_completions(&mut self) -> Result<(), RuntimeError> {
        while self.unreported_services != 0 {
            self.report_completions(self.unreported_services.trailing_zeros() as u8)?;
        }
        Ok(())
    }
}
