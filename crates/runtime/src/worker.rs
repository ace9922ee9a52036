//! The workers' side of the shared memory. A process connects, registers services, and runs one worker per core.

use std::collections::BTreeSet;
use std::net::SocketAddrV4;
use std::path::{Path, PathBuf};
use std::sync::atomic::Ordering::{Acquire, Relaxed, Release};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use crate::core_queues::require_free_slot;
use crate::error::RuntimeError;
use crate::ring::{RingConsumer, RingProducer};
use crate::segment::{LivenessLock, SegmentServiceEntry, SharedSegment};
use crate::segment_layout::{MESSAGE_RING_SLOTS, SlotHeader};
use crate::worker_message::{LoadHintMessage, LoadHintTrigger, WorkerMessage};

/// Maximum time that the orchestrator may take to accept a worker, or to make room in a full ring.
pub const ORCHESTRATOR_ANSWER_TIMEOUT: Duration = Duration::from_secs(2);
const ORCHESTRATOR_POLL_INTERVAL: Duration = Duration::from_micros(50);

/// Connection of this process to the orchestrator. Services that the process registers stay registered until the
/// connection is dropped.
#[derive(Debug)]
pub struct OrchestratorConnection {
    memory_path: PathBuf,
    segment: SharedSegment,
    registered_services: Mutex<BTreeSet<u8>>,
}

impl OrchestratorConnection {
    /// Connects to the orchestrator whose shared memory is at `path`. Fails when the memory has another layout version
    /// or belongs to another user, or no orchestrator is running.
    pub fn connect(path: &Path) -> Result<Self, RuntimeError> {
        Ok(Self {
            memory_path: path.to_owned(),
            segment: SharedSegment::open(path)?,
            registered_services: Mutex::default(),
        })
    }

    pub fn core_count(&self) -> u16 {
        self.segment.geometry.core_count
    }

    pub fn max_payload_bytes(&self) -> usize {
        self.segment.geometry.max_payload_bytes()
    }

    /// Registers this process as the one that serves a service (RegisterService). Address and priority must be those of
    /// the orchestrator's configuration. Fails when they differ, the service is unknown, the priority is out of range,
    /// or the service is already registered.
    pub fn register_service(&self, service: u8, address: SocketAddrV4, priority: u8) -> Result<(), RuntimeError> {
        let lowest_priority = self.segment.geometry.priority_count - 1;
        if priority > lowest_priority {
            return Err(RuntimeError::PriorityOutOfRange { priority, last: lowest_priority });
        }
        let service_entry = self.segment.service_entry(service)?;
        if (service_entry.address, service_entry.priority) != (address, priority) {
            let expected_registration = format!("{} with priority {}", service_entry.address, service_entry.priority);
            return Err(RuntimeError::ServiceSettingsMismatch {
                service,
                address,
                priority,
                expected: expected_registration,
            });
        }
        let mut registered_services = self.lock_registered_services();
        if registered_services.contains(&service) || !self.try_lock(LivenessLock::Service(service))? {
            return Err(RuntimeError::ServiceRegisteredTwice(service));
        }
        registered_services.insert(service);
        Ok(())
    }

    fn try_lock(&self, lock: LivenessLock) -> Result<bool, RuntimeError> {
        try_lock_byte(&self.segment, &self.memory_path, lock)
    }

    /// Attaches a worker to a core, on which no service is enabled at first. Fails when the core is out of range or
    /// already has a worker, or the orchestrator does not accept the new worker.
    pub fn attach_worker(&self, core: u16) -> Result<Worker<'_>, RuntimeError> {
        self.segment.check_core_is_in_range(core)?;
        let segment = SharedSegment::open(&self.memory_path)?;
        segment.check_core_is_in_range(core)?;
        if !try_lock_byte(&segment, &self.memory_path, LivenessLock::Core(core))? {
            return Err(RuntimeError::CoreHasWorker(core));
        }
        let core_cursors = segment.core_cursors(core);
        let worker_number = core_cursors.worker_tails.worker_number.load(Acquire).wrapping_add(1).max(1);
        let geometry = segment.geometry;
        let request_consumers = |priority: u8| {
            RingConsumer::new(
                geometry.slots_per_queue,
                core_cursors.worker_heads.data_heads[usize::from(priority)].load(Relaxed),
            )
        };
        let worker_rings = WorkerRings {
            request_consumers: (0..geometry.priority_count).map(request_consumers).collect(),
            hint_consumer: RingConsumer::new(MESSAGE_RING_SLOTS, core_cursors.worker_heads.message_head.load(Relaxed)),
            response_producer: RingProducer::new(
                geometry.response_slot_count(),
                core_cursors.worker_tails.data_tails[0].load(Relaxed),
            ),
            message_producer: RingProducer::new(
                MESSAGE_RING_SLOTS,
                core_cursors.worker_tails.message_tail.load(Relaxed),
            ),
        };
        core_cursors.worker_tails.worker_number.store(worker_number, Release);
        let timeout = ORCHESTRATOR_ANSWER_TIMEOUT;
        if !wait_until(&segment, || core_cursors.orchestrator_tails.worker_number.load(Acquire) == worker_number)? {
            return Err(RuntimeError::WorkerNotAccepted { core, timeout });
        }
        Ok(Worker { runtime: self, core, worker_number, rings: worker_rings, segment })
    }

    pub fn service_entries(&self) -> Vec<SegmentServiceEntry> {
        (0..=u8::MAX).map_while(|service| self.segment.service_entry(service).ok()).collect()
    }

    fn lock_registered_services(&self) -> MutexGuard<'_, BTreeSet<u8>> {
        self.registered_services.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn try_lock_byte(segment: &SharedSegment, path: &Path, lock: LivenessLock) -> Result<bool, RuntimeError> {
    let to_runtime_error =
        |error: nix::Error| RuntimeError::Io { action: "lock", path: path.to_owned(), error: error.into() };
    segment.try_lock(lock).map_err(to_runtime_error)
}

/// Waits until `condition` returns `true`. Returns `false` if this takes longer than [`ORCHESTRATOR_ANSWER_TIMEOUT`].
fn wait_until(segment: &SharedSegment, mut condition: impl FnMut() -> bool) -> Result<bool, RuntimeError> {
    let started_at = Instant::now();
    while !condition() {
        if !segment.is_orchestrator_running() {
            return Err(RuntimeError::OrchestratorNotRunning);
        }
        if started_at.elapsed() >= ORCHESTRATOR_ANSWER_TIMEOUT {
            return Ok(false);
        }
        std::thread::sleep(ORCHESTRATOR_POLL_INTERVAL);
    }
    Ok(true)
}

/// Worker on one core, which uses the core's queues by the calls of RingLeader's interface (NSDI'23, Table 1).
#[derive(Debug)]
pub struct Worker<'a> {
    pub(crate) runtime: &'a OrchestratorConnection,
    pub(crate) core: u16,
    worker_number: u32,
    pub(crate) rings: WorkerRings,
    pub(crate) segment: SharedSegment,
}

#[derive(Debug)]
pub(crate) struct WorkerRings {
    pub request_consumers: Vec<RingConsumer>,
    pub hint_consumer: RingConsumer,
    pub response_producer: RingProducer,
    pub message_producer: RingProducer,
}

/// Request that a server with its own scheduler has taken out of its core's queues.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TakenRequest {
    slot_header: SlotHeader,
    pub payload: Vec<u8>,
}

impl TakenRequest {
    pub fn service(&self) -> u8 {
        self.slot_header.service_number as u8
    }
}

impl Worker<'_> {
    pub fn core(&self) -> u16 {
        self.core
    }

    /// Enables a service on `core`, so that the core gets its requests (EnableService). Fails when no process has
    /// registered the service, or the core is out of range.
    pub fn enable_service(&mut self, service: u8, core: u16) -> Result<(), RuntimeError> {
        self.check_service_and_core_exist(service, core)?;
        let is_service_registered = self.runtime.lock_registered_services().contains(&service)
            || self.segment.is_locked(LivenessLock::Service(service)).unwrap_or(false);
        if !is_service_registered {
            return Err(RuntimeError::ServiceNotRegistered { service, core });
        }
        self.send_message(WorkerMessage::EnableService { service, core })
    }

    /// Disables a service on `core`, so that no new requests are sent there (DisableService). Requests in its queues
    /// remain. Fails when the service or the core is out of range.
    pub fn disable_service(&mut self, service: u8, core: u16) -> Result<(), RuntimeError> {
        self.check_service_and_core_exist(service, core)?;
        self.send_message(WorkerMessage::DisableService { service, core })
    }

    /// Reports `completed_count` requests that `core` completed without a response (LoadFeedback). The orchestrator
    /// rejects and counts feedback about requests that it has not sent to the core. Fails when the service or the core
    /// is out of range.
    pub fn send_load_feedback(&mut self, service: u8, core: u16, completed_count: u32) -> Result<(), RuntimeError> {
        self.check_service_and_core_exist(service, core)?;
        self.send_message(WorkerMessage::LoadFeedback { service, core, count: completed_count })
    }

    /// Enables a service's load monitor, or changes the condition for its hints (EnableLoadMonitor). Fails when the
    /// service is out of range.
    pub fn enable_load_monitor(&mut self, service: u8, trigger: LoadHintTrigger) -> Result<(), RuntimeError> {
        self.check_service_and_core_exist(service, self.core)?;
        self.send_message(WorkerMessage::EnableLoadMonitor { service, trigger })
    }

    /// Rearms a service's load monitor, after the cores have acted on its last hint (RearmLoadMonitor). Fails when the
    /// service is out of range.
    pub fn rearm_load_monitor(&mut self, service: u8) -> Result<(), RuntimeError> {
        self.check_service_and_core_exist(service, self.core)?;
        self.send_message(WorkerMessage::RearmLoadMonitor { service })
    }

    /// Returns the next hint for this core (LoadHint), or `None` if there is none. Skips hints of unknown kind.
    pub fn next_hint(&mut self) -> Option<LoadHintMessage> {
        let hint_slot = self.oldest_hint_slot()?;
        let Self { segment, core, rings, .. } = self;
        let message = segment.read_message(segment.geometry.downlink_message_offset(*core, hint_slot));
        rings.hint_consumer.advance();
        rings.hint_consumer.release_read_slots(&segment.core_cursors(*core).worker_heads.message_head);
        message.to_hint()
    }

    pub(crate) fn has_hint(&self) -> bool {
        self.oldest_hint_slot().is_some()
    }

    #[inline]
    fn oldest_hint_slot(&self) -> Option<u32> {
        let sequence_of_slot =
            |slot| self.segment.sequence_number_at(self.segment.geometry.downlink_message_offset(self.core, slot));
        self.rings.hint_consumer.oldest_slot(sequence_of_slot)
    }

    /// Takes the oldest request of the highest priority out of the queues, for servers with their own scheduler.
    /// [`respond`](Self::respond) or [`send_load_feedback`](Self::send_load_feedback) must complete it. Fails when the
    /// request's length is out of range.
    pub fn take_request(&mut self) -> Result<Option<TakenRequest>, RuntimeError> {
        let Some((priority, slot)) = self.highest_priority_request_slot(u8::MAX) else { return Ok(None) };
        let (slot_header, payload) = self.read_request(priority, slot)?;
        let taken_request = TakenRequest { slot_header, payload: payload.to_vec() };
        self.return_request_slot(priority);
        Ok(Some(taken_request))
    }

    /// Sends a response, which completes its request. Fails when the response does not fit into a slot, or the response
    /// ring is full or damaged.
    pub fn respond(&mut self, request: &TakenRequest, response: &[u8]) -> Result<(), RuntimeError> {
        let (length, limit) = (response.len(), self.segment.geometry.max_payload_bytes());
        if length > limit {
            return Err(RuntimeError::PayloadTooLong { length, limit });
        }
        self.send_response(
            SlotHeader { payload_length: length as u32, completed_count: 1, ..request.slot_header },
            response,
        )
    }

    /// Returns the priority and slot of the oldest request of the highest priority whose number is below
    /// `priority_limit`.
    #[inline]
    pub(crate) fn highest_priority_request_slot(&self, priority_limit: u8) -> Option<(u8, u32)> {
        let sequence_of_slot = |priority, slot| {
            self.segment.sequence_number_at(self.segment.geometry.request_offset(self.core, priority, slot))
        };
        (0..priority_limit).zip(&self.rings.request_consumers).find_map(|(priority, consumer)| {
            let oldest_slot = consumer.oldest_slot(|slot| sequence_of_slot(priority, slot))?;
            Some((priority, oldest_slot))
        })
    }

    /// Reads the request in a slot from [`Self::highest_priority_request_slot`]. The returned payload is valid until
    /// the slot is returned to the queue.
    pub(crate) fn read_request<'p>(&self, priority: u8, slot: u32) -> Result<(SlotHeader, &'p [u8]), RuntimeError> {
        let geometry = &self.segment.geometry;
        let (header, payload) = self.segment.read_slot(geometry.request_offset(self.core, priority, slot));
        let max_payload_bytes = geometry.max_payload_bytes();
        let payload = payload
            .ok_or(RuntimeError::PayloadTooLong { length: header.payload_length as usize, limit: max_payload_bytes })?;
        Ok((header, payload))
    }

    pub(crate) fn return_request_slot(&mut self, priority: u8) {
        let head = &self.segment.core_cursors(self.core).worker_heads.data_heads[usize::from(priority)];
        let request_consumer = &mut self.rings.request_consumers[usize::from(priority)];
        request_consumer.advance();
        request_consumer.release_read_slots(head);
    }

    /// Returns how many requests with the priority of `service` wait at a core or are being served there. Returns 0 if
    /// the service is out of range. Panics if the core is out of range.
    pub fn queued_request_count(&self, service: u8, core: u16) -> u32 {
        let core_cursors = self.segment.core_cursors(core);
        let Ok(SegmentServiceEntry { priority, .. }) = self.segment.service_entry(service) else { return 0 };
        let (tails, heads) = (&core_cursors.orchestrator_tails.data_tails, &core_cursors.worker_heads.data_heads);
        let tail_and_head = tails.get(usize::from(priority)).zip(heads.get(usize::from(priority)));
        tail_and_head.map_or(0, |(tail, head)| tail.load(Relaxed).wrapping_sub(head.load(Relaxed)))
    }

    fn check_service_and_core_exist(&self, service: u8, core: u16) -> Result<(), RuntimeError> {
        self.segment.check_core_is_in_range(core)?;
        self.segment.service_entry(service).map(drop)
    }

    /// Checks that the orchestrator is alive and has accepted this worker. This takes a system call.
    pub(crate) fn check_orchestrator_accepts_worker(&self) -> Result<(), RuntimeError> {
        if !self.segment.is_orchestrator_running() {
            return Err(RuntimeError::OrchestratorNotRunning);
        }
        let accepted_worker_number =
            self.segment.core_cursors(self.core).orchestrator_tails.worker_number.load(Acquire);
        if accepted_worker_number == self.worker_number {
            Ok(())
        } else {
            Err(RuntimeError::CoreWorkerReleased(self.core))
        }
    }

    pub(crate) fn send_response(&mut self, header: SlotHeader, payload: &[u8]) -> Result<(), RuntimeError> {
        let (core, core_cursors) = (self.core, self.segment.core_cursors(self.core));
        let response_producer = &mut self.rings.response_producer;
        // The ring is not full, because it has a slot for each request that the core can have.
        let free_slot = require_free_slot(
            response_producer.next_free_slot(&core_cursors.orchestrator_heads.data_heads[0]),
            core,
            "responses",
        )?;
        let slot_offset = self.segment.geometry.response_offset(core, free_slot);
        self.segment.write_slot(slot_offset, header, payload);
        response_producer
            .publish_slot(self.segment.sequence_number_at(slot_offset), &core_cursors.worker_tails.data_tails[0]);
        Ok(())
    }

    pub(crate) fn wait_until_messages_are_read(&self) -> Result<(), RuntimeError> {
        let orchestrator_heads = &self.segment.core_cursors(self.core).orchestrator_heads;
        self.wait_until_ring_is_read("messages", || {
            self.rings.message_producer.is_empty(&orchestrator_heads.message_head)
        })
    }

    pub(crate) fn wait_until_responses_are_read(&self) -> Result<(), RuntimeError> {
        let orchestrator_heads = &self.segment.core_cursors(self.core).orchestrator_heads;
        self.wait_until_ring_is_read("responses", || {
            self.rings.response_producer.is_empty(&orchestrator_heads.data_heads[0])
        })
    }

    fn wait_until_ring_is_read(
        &self,
        ring_name: &'static str,
        is_empty: impl Fn() -> bool,
    ) -> Result<(), RuntimeError> {
        if wait_until(&self.segment, is_empty)? {
            Ok(())
        } else {
            Err(RuntimeError::RingFull { core: self.core, ring: ring_name })
        }
    }

    pub(crate) fn send_message(&mut self, message: WorkerMessage) -> Result<(), RuntimeError> {
        let (core, core_cursors) = (self.core, self.segment.core_cursors(self.core));
        let message_producer = &mut self.rings.message_producer;
        let mut free_slot_result = Ok(None);
        wait_until(&self.segment, || {
            free_slot_result = message_producer.next_free_slot(&core_cursors.orchestrator_heads.message_head);
            free_slot_result != Ok(None)
        })?;
        let free_slot = require_free_slot(free_slot_result, core, "messages")?;
        let message_offset = self.segment.geometry.uplink_message_offset(core, free_slot);
        self.segment.write_message(message_offset, message.into());
        message_producer
            .publish_slot(self.segment.sequence_number_at(message_offset), &core_cursors.worker_tails.message_tail);
        Ok(())
    }
}
