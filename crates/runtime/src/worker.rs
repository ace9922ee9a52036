//! The workers' side of the memory: a process connects, registers services, and runs one worker per core.

use std::collections::BTreeSet;
use std::net::SocketAddrV4;
use std::path::{Path, PathBuf};
use std::sync::atomic::Ordering::{Acquire, Relaxed, Release};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use crate::core_queues::slot_or_error;
use crate::error::RuntimeError;
use crate::layout::{MESSAGE_RING_SLOTS, SlotHeader};
use crate::message::{HintMessage, HintTrigger, Message};
use crate::ring::{Consumer, Producer};
use crate::segment::{LockByte, Segment, ServiceEntry};

/// Time limit for the orchestrator to accept a worker, or to empty a full ring.
pub const ORCHESTRATOR_TIMEOUT: Duration = Duration::from_secs(2);
const ANSWER_POLL_INTERVAL: Duration = Duration::from_micros(50);

/// Process that serves requests. It keeps the registrations of its services until it is dropped.
#[derive(Debug)]
pub struct Runtime {
    path: PathBuf,
    segment: Segment,
    registered_services: Mutex<BTreeSet<u8>>,
}

impl Runtime {
    /// Connects to the orchestrator whose shared memory is at `path`. Fails when the memory has another layout version
    /// or belongs to another user, or no orchestrator is running.
    pub fn connect(path: &Path) -> Result<Self, RuntimeError> {
        Ok(Self { path: path.to_owned(), segment: Segment::open(path)?, registered_services: Mutex::default() })
    }

    pub fn cores(&self) -> u16 {
        self.segment.geometry.core_count
    }

    pub fn payload_bytes(&self) -> usize {
        self.segment.geometry.payload_bytes()
    }

    /// Registers this process as the one that serves a service (RegisterService). Address and priority must be those of
    /// the orchestrator's configuration. Fails when the service is unknown or differs, its priority is out of range, or
    /// another process has registered it.
    pub fn register_service(&self, service: u8, address: SocketAddrV4, priority: u8) -> Result<(), RuntimeError> {
        let last = self.segment.geometry.priority_count - 1;
        if priority > last {
            return Err(RuntimeError::PriorityOutOfRange { priority, last });
        }
        let entry = self.segment.service(service)?;
        if (entry.address, entry.priority) != (address, priority) {
            let expected = format!("{} with priority {}", entry.address, entry.priority);
            return Err(RuntimeError::ServiceMismatch { service, address, priority, expected });
        }
        let mut registered = self.registrations();
        if registered.contains(&service) || !self.lock(LockByte::Service(service))? {
            return Err(RuntimeError::RegisteredTwice(service));
        }
        registered.insert(service);
        Ok(())
    }

    fn lock(&self, byte: LockByte) -> Result<bool, RuntimeError> {
        lock(&self.segment, &self.path, byte)
    }

    /// Attaches a worker to a core, on which no service is enabled at first. Fails when the core is out of range or has
    /// a worker, or the orchestrator does not accept this one.
    pub fn worker(&self, core: u16) -> Result<Worker<'_>, RuntimeError> {
        self.segment.check_core(core)?;
        let segment = Segment::open(&self.path)?;
        segment.check_core(core)?;
        if !lock(&segment, &self.path, LockByte::Core(core))? {
            return Err(RuntimeError::CoreTaken(core));
        }
        let lines = segment.core_cursors(core);
        let number = lines.worker_tails.worker_number.load(Acquire).wrapping_add(1).max(1);
        let geometry = segment.geometry;
        let request =
            |priority: u8| Consumer::new(geometry.slots, lines.worker_heads.data[usize::from(priority)].load(Relaxed));
        let rings = Rings {
            requests: (0..geometry.priority_count).map(request).collect(),
            hints: Consumer::new(MESSAGE_RING_SLOTS, lines.worker_heads.messages.load(Relaxed)),
            responses: Producer::new(geometry.response_slots(), lines.worker_tails.data[0].load(Relaxed)),
            messages: Producer::new(MESSAGE_RING_SLOTS, lines.worker_tails.messages.load(Relaxed)),
        };
        lines.worker_tails.worker_number.store(number, Release);
        let timeout = ORCHESTRATOR_TIMEOUT;
        if !wait_until(&segment, || lines.orchestrator_tails.worker_number.load(Acquire) == number)? {
            return Err(RuntimeError::WorkerNotAccepted { core, timeout });
        }
        Ok(Worker { runtime: self, core, number, rings, segment })
    }

    pub fn services(&self) -> Vec<ServiceEntry> {
        (0..=u8::MAX).map_while(|service| self.segment.service(service).ok()).collect()
    }

    fn registrations(&self) -> MutexGuard<'_, BTreeSet<u8>> {
        self.registered_services.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn lock(segment: &Segment, path: &Path, byte: LockByte) -> Result<bool, RuntimeError> {
    let io = |error: nix::Error| RuntimeError::Io { action: "lock", path: path.to_owned(), error: error.into() };
    segment.lock(byte).map_err(io)
}

/// Waits until a condition holds. Returns `false` after the timeout.
fn wait_until(segment: &Segment, mut condition: impl FnMut() -> bool) -> Result<bool, RuntimeError> {
    let started = Instant::now();
    while !condition() {
        if !segment.is_orchestrator_running() {
            return Err(RuntimeError::OrchestratorGone);
        }
        if started.elapsed() >= ORCHESTRATOR_TIMEOUT {
            return Ok(false);
        }
        std::thread::sleep(ANSWER_POLL_INTERVAL);
    }
    Ok(true)
}

/// Worker of one core, with the calls of RingLeader's interface (NSDI'23, Table 1) and the queues of the core.
#[derive(Debug)]
pub struct Worker<'a> {
    pub(crate) runtime: &'a Runtime,
    pub(crate) core: u16,
    number: u32,
    pub(crate) rings: Rings,
    pub(crate) segment: Segment,
}

#[derive(Debug)]
pub(crate) struct Rings {
    pub requests: Vec<Consumer>,
    pub hints: Consumer,
    pub responses: Producer,
    pub messages: Producer,
}

/// Request that a server has taken out of its core's queues.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TakenRequest {
    header: SlotHeader,
    pub payload: Vec<u8>,
}

impl TakenRequest {
    pub fn service(&self) -> u8 {
        self.header.service as u8
    }
}

impl Worker<'_> {
    pub fn core(&self) -> u16 {
        self.core
    }

    /// Runs a service on `core` from now on (EnableService). Fails when no process has registered the service, or the
    /// core is out of range.
    pub fn enable_service(&mut self, service: u8, core: u16) -> Result<(), RuntimeError> {
        self.check(service, core)?;
        let is_registered = self.runtime.registrations().contains(&service)
            || self.segment.is_locked(LockByte::Service(service)).unwrap_or(false);
        if !is_registered {
            return Err(RuntimeError::NotRegistered { service, core });
        }
        self.send(Message::EnableService { service, core })
    }

    /// Disables a service on `core` for new requests (DisableService). Its present requests remain. Fails when the
    /// service or the core is out of range.
    pub fn disable_service(&mut self, service: u8, core: u16) -> Result<(), RuntimeError> {
        self.check(service, core)?;
        self.send(Message::DisableService { service, core })
    }

    /// Reports `count` requests that `core` completed without a response (LoadFeedback). The orchestrator rejects and
    /// counts feedback for requests that it has not sent there. Fails when the service or the core is out of range.
    pub fn load_feedback(&mut self, service: u8, core: u16, count: u32) -> Result<(), RuntimeError> {
        self.check(service, core)?;
        self.send(Message::LoadFeedback { service, core, count })
    }

    /// Enables the load monitor of a service, or changes its condition (EnableLoadMonitor). Fails when the service is
    /// out of range.
    pub fn enable_load_monitor(&mut self, service: u8, trigger: HintTrigger) -> Result<(), RuntimeError> {
        self.check(service, self.core)?;
        self.send(Message::EnableLoadMonitor { service, trigger })
    }

    /// Rearms the load monitor of a service, after the cores have acted on its last hint (RearmLoadMonitor). Fails when
    /// the service is out of range.
    pub fn rearm_load_monitor(&mut self, service: u8) -> Result<(), RuntimeError> {
        self.check(service, self.core)?;
        self.send(Message::RearmLoadMonitor { service })
    }

    /// Returns the next waiting hint for this core (LoadHint), if there is any. Skips hints of unknown kind.
    pub fn next_hint(&mut self) -> Option<HintMessage> {
        let slot = self.hint_slot()?;
        let Self { segment, core, rings, .. } = self;
        let message = segment.read_message(segment.geometry.downlink_message_offset(*core, slot));
        rings.hints.advance();
        rings.hints.publish(&segment.core_cursors(*core).worker_heads.messages);
        message.hint()
    }

    pub(crate) fn has_hint(&self) -> bool {
        self.hint_slot().is_some()
    }

    #[inline]
    fn hint_slot(&self) -> Option<u32> {
        let sequence = |slot| self.segment.sequence(self.segment.geometry.downlink_message_offset(self.core, slot));
        self.rings.hints.oldest_slot(sequence)
    }

    /// Takes the oldest request of the highest priority out of the queues, for servers with their own scheduler. It
    /// must be completed by [`respond`](Self::respond) or [`load_feedback`](Self::load_feedback). Fails when the length
    /// of the request is out of range.
    pub fn take_request(&mut self) -> Result<Option<TakenRequest>, RuntimeError> {
        let Some((priority, slot)) = self.highest_priority_request(u8::MAX) else { return Ok(None) };
        let (header, payload) = self.read_request(priority, slot)?;
        let taken = TakenRequest { header, payload: payload.to_vec() };
        self.return_slot(priority);
        Ok(Some(taken))
    }

    /// Sends a response, which completes its request. Fails when it fits no slot, or the ring is full or damaged.
    pub fn respond(&mut self, request: &TakenRequest, response: &[u8]) -> Result<(), RuntimeError> {
        let (length, limit) = (response.len(), self.segment.geometry.payload_bytes());
        if length > limit {
            return Err(RuntimeError::TooLong { length, limit });
        }
        self.send_response(SlotHeader { length: length as u32, completed_count: 1, ..request.header }, response)
    }

    /// Returns priority and slot of the oldest request of the highest priority above `limit`.
    #[inline]
    pub(crate) fn highest_priority_request(&self, limit: u8) -> Option<(u8, u32)> {
        let sequence =
            |priority, slot| self.segment.sequence(self.segment.geometry.request_offset(self.core, priority, slot));
        (0..limit).zip(&self.rings.requests).find_map(|(priority, consumer)| {
            let slot = consumer.oldest_slot(|slot| sequence(priority, slot))?;
            Some((priority, slot))
        })
    }

    /// Reads the request in a slot of [`Self::highest_priority_request`]; valid until the slot is returned.
    pub(crate) fn read_request<'p>(&self, priority: u8, slot: u32) -> Result<(SlotHeader, &'p [u8]), RuntimeError> {
        let geometry = &self.segment.geometry;
        let (header, payload) = self.segment.read_slot(geometry.request_offset(self.core, priority, slot));
        let limit = geometry.payload_bytes();
        let payload = payload.ok_or(RuntimeError::TooLong { length: header.length as usize, limit })?;
        Ok((header, payload))
    }

    pub(crate) fn return_slot(&mut self, priority: u8) {
        let head = &self.segment.core_cursors(self.core).worker_heads.data[usize::from(priority)];
        let consumer = &mut self.rings.requests[usize::from(priority)];
        consumer.advance();
        consumer.publish(head);
    }

    /// Returns the number of requests at a core, waiting or being served, in the queue of a service's priority; 0 if
    /// the service is out of range. Panics if the core is out of range.
    pub fn load(&self, service: u8, core: u16) -> u32 {
        let lines = self.segment.core_cursors(core);
        let Ok(ServiceEntry { priority, .. }) = self.segment.service(service) else { return 0 };
        let (tails, heads) = (&lines.orchestrator_tails.data, &lines.worker_heads.data);
        let queue = tails.get(usize::from(priority)).zip(heads.get(usize::from(priority)));
        queue.map_or(0, |(tail, head)| tail.load(Relaxed).wrapping_sub(head.load(Relaxed)))
    }

    fn check(&self, service: u8, core: u16) -> Result<(), RuntimeError> {
        self.segment.check_core(core)?;
        self.segment.service(service).map(drop)
    }

    /// Checks that the orchestrator is alive and this worker is the one it accepted. Makes a system call.
    pub(crate) fn check_orchestrator(&self) -> Result<(), RuntimeError> {
        if !self.segment.is_orchestrator_running() {
            return Err(RuntimeError::OrchestratorGone);
        }
        let accepted = self.segment.core_cursors(self.core).orchestrator_tails.worker_number.load(Acquire);
        if accepted == self.number { Ok(()) } else { Err(RuntimeError::WorkerReleased(self.core)) }
    }

    pub(crate) fn send_response(&mut self, header: SlotHeader, payload: &[u8]) -> Result<(), RuntimeError> {
        let (core, lines) = (self.core, self.segment.core_cursors(self.core));
        let producer = &mut self.rings.responses;
        // The ring has a slot for each request that the core can have.
        let slot = slot_or_error(producer.free_slot(&lines.orchestrator_heads.data[0]), core, "responses")?;
        let offset = self.segment.geometry.response_offset(core, slot);
        self.segment.write_slot(offset, header, payload);
        producer.publish(self.segment.sequence(offset), &lines.worker_tails.data[0]);
        Ok(())
    }

    pub(crate) fn wait_until_messages_are_read(&self) -> Result<(), RuntimeError> {
        let heads = &self.segment.core_cursors(self.core).orchestrator_heads;
        self.wait_until_read("messages", || self.rings.messages.is_empty(&heads.messages))
    }

    pub(crate) fn wait_until_responses_are_read(&self) -> Result<(), RuntimeError> {
        let heads = &self.segment.core_cursors(self.core).orchestrator_heads;
        self.wait_until_read("responses", || self.rings.responses.is_empty(&heads.data[0]))
    }

    fn wait_until_read(&self, ring: &'static str, is_empty: impl Fn() -> bool) -> Result<(), RuntimeError> {
        if wait_until(&self.segment, is_empty)? {
            Ok(())
        } else {
            Err(RuntimeError::RingFull { core: self.core, ring })
        }
    }

    pub(crate) fn send(&mut self, message: Message) -> Result<(), RuntimeError> {
        let (core, lines) = (self.core, self.segment.core_cursors(self.core));
        let producer = &mut self.rings.messages;
        let mut free = Ok(None);
        wait_until(&self.segment, || {
            free = producer.free_slot(&lines.orchestrator_heads.messages);
            free != Ok(None)
        })?;
        let slot = slot_or_error(free, core, "messages")?;
        let offset = self.segment.geometry.uplink_message_offset(core, slot);
        self.segment.write_message(offset, message.into());
        producer.publish(self.segment.sequence(offset), &lines.worker_tails.messages);
        Ok(())
    }
}
