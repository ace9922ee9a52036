//! The orchestrator's side of the memory, which sends requests and hints, and receives responses and messages.

use std::net::{Ipv4Addr, SocketAddrV4};
use std::path::Path;
use std::sync::atomic::AtomicU32;
use std::sync::atomic::Ordering::{Acquire, Release};

use crate::error::RuntimeError;
use crate::ring::{DamagedRingCursor, RingConsumer, RingProducer};
use crate::segment::{LivenessLock, SegmentServiceEntry, SharedSegment};
use crate::segment_layout::{MESSAGE_RING_SLOTS, RawWorkerMessage, SEQUENCE_NUMBER_BYTES, SegmentGeometry, SlotHeader};
use crate::worker_message::{LoadHintMessage, WorkerMessage};

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RequestHeader {
    pub client: SocketAddrV4,
    pub service: u8,
    /// Arrival time of the request, in nanoseconds on the orchestrator's clock.
    pub arrival_time_ns: u64,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ResponseHeader {
    pub client: SocketAddrV4,
    pub service: u8,
    /// Number of the service's requests that this response completes.
    pub completed_count: u32,
}

pub(crate) fn slot_client_address(slot: &SlotHeader) -> SocketAddrV4 {
    SocketAddrV4::new(Ipv4Addr::from(slot.client_address), slot.client_port)
}

/// Returns the index of the free slot in a core's ring. Fails if the ring is full or damaged.
#[inline]
pub(crate) fn require_free_slot(
    slot: Result<Option<u32>, DamagedRingCursor>,
    core: u16,
    ring_name: &'static str,
) -> Result<u32, RuntimeError> {
    slot.map_err(|cursors| RuntimeError::DamagedQueue { core, cursors })?
        .ok_or(RuntimeError::RingFull { core, ring: ring_name })
}

#[derive(Debug)]
pub struct CoreQueues {
    segment: SharedSegment,
    rings_by_core: Vec<CoreRings>,
}

#[derive(Debug)]
struct CoreRings {
    /// Number of the worker that was last accepted, or 0 if there was none.
    accepted_worker_number: u32,
    request_producers: Vec<RingProducer>,
    hint_producer: RingProducer,
    response_consumer: RingConsumer,
    message_consumer: RingConsumer,
}

impl CoreQueues {
    /// Creates the shared memory at `path`, without workers. The index of a service in `services` is its number. Fails
    /// if a size or a priority is out of range, another orchestrator uses the path, or the file cannot be created.
    pub fn create(
        path: &Path,
        geometry: SegmentGeometry,
        services: &[SegmentServiceEntry],
    ) -> Result<Self, RuntimeError> {
        let segment = SharedSegment::create(path, geometry, services)?;
        let rings_by_core = (0..geometry.core_count).map(|_| CoreRings {
            accepted_worker_number: 0,
            request_producers: (0..geometry.priority_count)
                .map(|_| RingProducer::new(geometry.slots_per_queue, 0))
                .collect(),
            hint_producer: RingProducer::new(MESSAGE_RING_SLOTS, 0),
            response_consumer: RingConsumer::new(geometry.response_slot_count(), 0),
            message_consumer: RingConsumer::new(MESSAGE_RING_SLOTS, 0),
        });
        Ok(Self { rings_by_core: rings_by_core.collect(), segment })
    }

    /// Returns the sizes of the shared memory's parts, as they were when it was created.
    pub fn segment_geometry(&self) -> &SegmentGeometry {
        &self.segment.geometry
    }

    /// Returns whether the core has a living worker. Makes a system call.
    pub fn has_worker(&self, core: u16) -> bool {
        // If the lock cannot be read, the worker is kept, because its requests must not count as lost without proof.
        self.segment.is_locked(LivenessLock::Core(core)).unwrap_or(true)
    }

    #[inline]
    pub fn has_new_worker(&self, core: u16) -> bool {
        self.segment.core_cursors(core).worker_tails.worker_number.load(Acquire)
            != self.rings_by_core[usize::from(core)].accepted_worker_number
    }

    /// Accepts the new worker of a core. Discards the messages and unanswered requests of the previous worker.
    pub fn accept_worker(&mut self, core: u16) {
        let core_cursors = self.segment.core_cursors(core);
        let core_rings = &mut self.rings_by_core[usize::from(core)];
        let geometry = &self.segment.geometry;
        let copy_cursor = |own_cursor: &AtomicU32, other_cursor: &AtomicU32| {
            let position = other_cursor.load(Acquire);
            own_cursor.store(position, Release);
            position
        };
        let (tails, heads) = (&core_cursors.orchestrator_tails, &core_cursors.orchestrator_heads);
        for (priority, producer) in (0..).zip(&mut core_rings.request_producers) {
            let priority_index = usize::from(priority);
            *producer = RingProducer::new(
                geometry.slots_per_queue,
                copy_cursor(&tails.data_tails[priority_index], &core_cursors.worker_heads.data_heads[priority_index]),
            );
            producer.mark_all_slots_unpublished(|slot| {
                self.segment.sequence_number_at(geometry.request_offset(core, priority, slot))
            });
        }
        core_rings.hint_producer = RingProducer::new(
            MESSAGE_RING_SLOTS,
            copy_cursor(&tails.message_tail, &core_cursors.worker_heads.message_head),
        );
        core_rings.hint_producer.mark_all_slots_unpublished(|slot| {
            self.segment.sequence_number_at(geometry.downlink_message_offset(core, slot))
        });
        let response_position = copy_cursor(&heads.data_heads[0], &core_cursors.worker_tails.data_tails[0]);
        core_rings.response_consumer = RingConsumer::new(geometry.response_slot_count(), response_position);
        core_rings.message_consumer = RingConsumer::new(
            MESSAGE_RING_SLOTS,
            copy_cursor(&heads.message_head, &core_cursors.worker_tails.message_tail),
        );
        core_rings.accepted_worker_number = core_cursors.worker_tails.worker_number.load(Acquire);
        tails.worker_number.store(core_rings.accepted_worker_number, Release);
    }

    /// Releases the core from its worker. If the worker is alive, its next check detects this.
    pub fn release_core(&mut self, core: u16) {
        self.segment.core_cursors(core).orchestrator_tails.worker_number.store(0, Release);
    }

    /// Adds a request to a core's queue for the given priority. Fails without sending it if the payload is too long,
    /// the priority has no queue, or the queue is full or damaged.
    #[inline]
    pub fn send_request(
        &mut self,
        core: u16,
        priority: u8,
        header: &RequestHeader,
        payload: &[u8],
    ) -> Result<(), RuntimeError> {
        let Self { segment, rings_by_core: rings } = self;
        let geometry = &segment.geometry;
        let (length, limit) = (payload.len(), geometry.max_payload_bytes());
        if length > limit {
            return Err(RuntimeError::PayloadTooLong { length, limit });
        }
        let Some(producer) = rings[usize::from(core)].request_producers.get_mut(usize::from(priority)) else {
            return Err(RuntimeError::PriorityOutOfRange { priority, last: geometry.priority_count - 1 });
        };
        let core_cursors = segment.core_cursors(core);
        let free_slot = require_free_slot(
            producer.next_free_slot(&core_cursors.worker_heads.data_heads[usize::from(priority)]),
            core,
            "requests",
        )?;
        let header = SlotHeader {
            client_address: (*header.client.ip()).into(),
            client_port: header.client.port(),
            service_number: header.service.into(),
            payload_length: length as u32,
            completed_count: 0,
            arrived_ns: header.arrival_time_ns,
        };
        let slot_offset = geometry.request_offset(core, priority, free_slot);
        segment.write_slot(slot_offset, header, payload);
        producer.publish_slot(
            segment.sequence_number_at(slot_offset),
            &core_cursors.orchestrator_tails.data_tails[usize::from(priority)],
        );
        Ok(())
    }

    /// Sends a hint to the core's worker. Fails if the hint ring is full or damaged.
    pub fn send_hint(&mut self, core: u16, hint: LoadHintMessage) -> Result<(), RuntimeError> {
        let core_cursors = self.segment.core_cursors(core);
        let hint_producer = &mut self.rings_by_core[usize::from(core)].hint_producer;
        let free_slot =
            require_free_slot(hint_producer.next_free_slot(&core_cursors.worker_heads.message_head), core, "hints")?;
        let message_offset = self.segment.geometry.downlink_message_offset(core, free_slot);
        self.segment.write_message(message_offset, hint.into());
        hint_producer.publish_slot(
            self.segment.sequence_number_at(message_offset),
            &core_cursors.orchestrator_tails.message_tail,
        );
        Ok(())
    }

    /// Receives up to `limit` responses from the core, passes each to `receive`, and returns their number. A response's
    /// payload is `None` if its length is out of range.
    #[inline]
    pub fn receive_responses(
        &mut self,
        core: u16,
        limit: usize,
        mut receive: impl FnMut(ResponseHeader, Option<&[u8]>),
    ) -> usize {
        let Self { segment, rings_by_core: rings } = self;
        let (core_cursors, consumer) = (segment.core_cursors(core), &mut rings[usize::from(core)].response_consumer);
        let mut received_count = 0;
        while received_count < limit
            && let Some(slot) =
                consumer.oldest_slot(|slot| segment.sequence_number_at(segment.geometry.response_offset(core, slot)))
        {
            let (header, payload) = segment.read_slot(segment.geometry.response_offset(core, slot));
            let service_number = u8::try_from(header.service_number).unwrap_or(u8::MAX);
            receive(
                ResponseHeader {
                    client: slot_client_address(&header),
                    service: service_number,
                    completed_count: header.completed_count,
                },
                payload,
            );
            consumer.advance();
            consumer.release_read_slots(&core_cursors.orchestrator_heads.data_heads[0]);
            received_count += 1;
        }
        received_count
    }

    /// Receives up to `limit` messages from the core, passes each to `receive`, and returns their number. A message of
    /// unknown kind is passed as `None`.
    #[inline]
    pub fn receive_messages(
        &mut self,
        core: u16,
        limit: usize,
        mut receive: impl FnMut(Option<WorkerMessage>),
    ) -> usize {
        let Self { segment, rings_by_core: rings } = self;
        let (core_cursors, consumer) = (segment.core_cursors(core), &mut rings[usize::from(core)].message_consumer);
        let mut received_count = 0;
        while received_count < limit
            && let Some(slot) = consumer
                .oldest_slot(|slot| segment.sequence_number_at(segment.geometry.uplink_message_offset(core, slot)))
        {
            receive(segment.read_message(segment.geometry.uplink_message_offset(core, slot)).to_message());
            consumer.advance();
            received_count += 1;
        }
        if received_count > 0 {
            consumer.release_read_slots(&core_cursors.orchestrator_heads.message_head);
        }
        received_count
    }
}

impl SharedSegment {
    /// Writes a slot, which must belong to the caller's side of the ring. The payload must fit into the slot.
    #[inline]
    pub(crate) fn write_slot(&self, offset: usize, header: SlotHeader, payload: &[u8]) {
        let header_pointer: *mut SlotHeader =
            self.slot_pointer(offset + SEQUENCE_NUMBER_BYTES, size_of::<SlotHeader>() + payload.len());
        // SAFETY: inside the mapping and aligned (`slot_pointer`); only this side accesses an unpublished slot.
        unsafe {
            header_pointer.write(header);
            header_pointer.add(1).cast::<u8>().copy_from_nonoverlapping(payload.as_ptr(), payload.len());
        }
    }

    /// Reads a slot, which must belong to the caller's side of the ring. The payload is `None` if its length is out of
    /// range. It must not be used after the slot is returned to the ring's other side.
    #[inline]
    pub(crate) fn read_slot<'a>(&self, offset: usize) -> (SlotHeader, Option<&'a [u8]>) {
        let max_slot_content_bytes = self.geometry.slot_bytes as usize - SEQUENCE_NUMBER_BYTES;
        let header_pointer: *mut SlotHeader = self.slot_pointer(offset + SEQUENCE_NUMBER_BYTES, max_slot_content_bytes);
        // SAFETY: inside the mapping and aligned (`slot_pointer`); any bit pattern is a header.
        let header = unsafe { header_pointer.read() };
        let payload_length = header.payload_length as usize;
        let is_length_in_range = payload_length <= self.geometry.max_payload_bytes();
        // SAFETY: inside the slot, which no other side writes until it is returned.
        let payload = is_length_in_range
            .then(|| unsafe { std::slice::from_raw_parts(header_pointer.add(1).cast::<u8>(), payload_length) });
        (header, payload)
    }

    #[inline]
    pub(crate) fn write_message(&self, offset: usize, message: RawWorkerMessage) {
        // SAFETY: as in `write_slot`.
        unsafe {
            self.slot_pointer::<RawWorkerMessage>(offset + SEQUENCE_NUMBER_BYTES, size_of::<RawWorkerMessage>())
                .write(message)
        }
    }

    #[inline]
    pub(crate) fn read_message(&self, offset: usize) -> RawWorkerMessage {
        // SAFETY: as in `read_slot`.
        unsafe {
            self.slot_pointer::<RawWorkerMessage>(offset + SEQUENCE_NUMBER_BYTES, size_of::<RawWorkerMessage>()).read()
        }
    }
}
