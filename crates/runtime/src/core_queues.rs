//! The orchestrator's side of the memory: sends requests and hints to cores, receives responses and messages.

use std::net::{Ipv4Addr, SocketAddrV4};
use std::path::Path;
use std::sync::atomic::AtomicU32;
use std::sync::atomic::Ordering::{Acquire, Release};

use crate::error::RuntimeError;
use crate::layout::{Geometry, MESSAGE_RING_SLOTS, RawMessage, SEQUENCE_BYTES, SlotHeader};
use crate::message::{HintMessage, Message};
use crate::ring::{Consumer, DamagedCursor, Producer};
use crate::segment::{LockByte, Segment, ServiceEntry};

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RequestHeader {
    /// Address and port of the client.
    pub client: SocketAddrV4,
    pub service: u8,
    /// Time of arrival in nanoseconds of the orchestrator's clock.
    pub arrived_ns: u64,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ResponseHeader {
    /// Address and port of the client.
    pub client: SocketAddrV4,
    pub service: u8,
    /// Number of requests of the service that the response completes.
    pub completed_count: u32,
}

pub(crate) fn client_address(slot: &SlotHeader) -> SocketAddrV4 {
    SocketAddrV4::new(Ipv4Addr::from(slot.address), slot.port)
}

/// Returns the free slot of a core's ring, or an error if the ring is full or damaged.
#[inline]
pub(crate) fn slot_or_error(
    slot: Result<Option<u32>, DamagedCursor>,
    core: u16,
    ring: &'static str,
) -> Result<u32, RuntimeError> {
    slot.map_err(|cursors| RuntimeError::DamagedQueue { core, cursors })?.ok_or(RuntimeError::RingFull { core, ring })
}

#[derive(Debug)]
pub struct CoreQueues {
    segment: Segment,
    rings: Vec<Rings>,
}

#[derive(Debug)]
struct Rings {
    /// Number of the worker that was accepted last, or 0 if there was none.
    worker_number: u32,
    requests: Vec<Producer>,
    hints: Producer,
    responses: Consumer,
    messages: Consumer,
}

impl CoreQueues {
    /// Creates the memory at `path`, without workers. `services` are numbered by their position. Fails when a size or a
    /// priority is out of range, another orchestrator uses the path, or the file cannot be created.
    pub fn create(path: &Path, geometry: Geometry, services: &[ServiceEntry]) -> Result<Self, RuntimeError> {
        let segment = Segment::create(path, geometry, services)?;
        let rings = (0..geometry.core_count).map(|_| Rings {
            worker_number: 0,
            requests: (0..geometry.priority_count).map(|_| Producer::new(geometry.slots, 0)).collect(),
            hints: Producer::new(MESSAGE_RING_SLOTS, 0),
            responses: Consumer::new(geometry.response_slots(), 0),
            messages: Consumer::new(MESSAGE_RING_SLOTS, 0),
        });
        Ok(Self { rings: rings.collect(), segment })
    }

    /// Returns the sizes of the parts of the shared memory.
    pub fn geometry(&self) -> &Geometry {
        &self.segment.geometry
    }

    /// Returns whether the core has a living worker. Makes a system call.
    pub fn has_worker(&self, core: u16) -> bool {
        // If the lock cannot be read the worker stays: its requests are not lost without proof.
        self.segment.is_locked(LockByte::Core(core)).unwrap_or(true)
    }

    #[inline]
    pub fn has_new_worker(&self, core: u16) -> bool {
        self.segment.core_cursors(core).worker_tails.worker_number.load(Acquire)
            != self.rings[usize::from(core)].worker_number
    }

    /// Accepts the new worker of a core. Discards the messages of the previous worker, and the requests that it has not
    /// answered.
    pub fn accept_worker(&mut self, core: u16) {
        let lines = self.segment.core_cursors(core);
        let rings = &mut self.rings[usize::from(core)];
        let geometry = &self.segment.geometry;
        let adopt = |own: &AtomicU32, other: &AtomicU32| {
            let position = other.load(Acquire);
            own.store(position, Release);
            position
        };
        let (tails, heads) = (&lines.orchestrator_tails, &lines.orchestrator_heads);
        for (priority, producer) in (0..).zip(&mut rings.requests) {
            let index = usize::from(priority);
            *producer = Producer::new(geometry.slots, adopt(&tails.data[index], &lines.worker_heads.data[index]));
            producer.clear(|slot| self.segment.sequence(geometry.request_offset(core, priority, slot)));
        }
        rings.hints = Producer::new(MESSAGE_RING_SLOTS, adopt(&tails.messages, &lines.worker_heads.messages));
        rings.hints.clear(|slot| self.segment.sequence(geometry.downlink_message_offset(core, slot)));
        let responses = adopt(&heads.data[0], &lines.worker_tails.data[0]);
        rings.responses = Consumer::new(geometry.response_slots(), responses);
        rings.messages = Consumer::new(MESSAGE_RING_SLOTS, adopt(&heads.messages, &lines.worker_tails.messages));
        rings.worker_number = lines.worker_tails.worker_number.load(Acquire);
        tails.worker_number.store(rings.worker_number, Release);
    }

    /// Releases the core. A living worker notices this at its next check.
    pub fn release(&mut self, core: u16) {
        self.segment.core_cursors(core).orchestrator_tails.worker_number.store(0, Release);
    }

    /// Puts a request into a queue of the core. Fails, without sending it, when the payload is too long, the priority
    /// has no queue, or the queue is full or damaged.
    #[inline]
    pub fn send(
        &mut self,
        core: u16,
        priority: u8,
        header: &RequestHeader,
        payload: &[u8],
    ) -> Result<(), RuntimeError> {
        let Self { segment, rings } = self;
        let geometry = &segment.geometry;
        let (length, limit) = (payload.len(), geometry.payload_bytes());
        if length > limit {
            return Err(RuntimeError::TooLong { length, limit });
        }
        let Some(producer) = rings[usize::from(core)].requests.get_mut(usize::from(priority)) else {
            return Err(RuntimeError::PriorityOutOfRange { priority, last: geometry.priority_count - 1 });
        };
        let lines = segment.core_cursors(core);
        let slot =
            slot_or_error(producer.free_slot(&lines.worker_heads.data[usize::from(priority)]), core, "requests")?;
        let header = SlotHeader {
            address: (*header.client.ip()).into(),
            port: header.client.port(),
            service: header.service.into(),
            length: length as u32,
            completed_count: 0,
            arrived_ns: header.arrived_ns,
        };
        let offset = geometry.request_offset(core, priority, slot);
        segment.write_slot(offset, header, payload);
        producer.publish(segment.sequence(offset), &lines.orchestrator_tails.data[usize::from(priority)]);
        Ok(())
    }

    /// Sends a hint to the worker of the core. Fails when the ring is full or damaged.
    pub fn send_hint(&mut self, core: u16, hint: HintMessage) -> Result<(), RuntimeError> {
        let lines = self.segment.core_cursors(core);
        let producer = &mut self.rings[usize::from(core)].hints;
        let slot = slot_or_error(producer.free_slot(&lines.worker_heads.messages), core, "hints")?;
        let offset = self.segment.geometry.downlink_message_offset(core, slot);
        self.segment.write_message(offset, hint.into());
        producer.publish(self.segment.sequence(offset), &lines.orchestrator_tails.messages);
        Ok(())
    }

    /// Receives up to `limit` responses of the core, and returns their number. The payload of a response is `None` if
    /// its length is out of range.
    #[inline]
    pub fn receive_responses(
        &mut self,
        core: u16,
        limit: usize,
        mut receive: impl FnMut(ResponseHeader, Option<&[u8]>),
    ) -> usize {
        let Self { segment, rings } = self;
        let (lines, consumer) = (segment.core_cursors(core), &mut rings[usize::from(core)].responses);
        let mut received = 0;
        while received < limit
            && let Some(slot) =
                consumer.oldest_slot(|slot| segment.sequence(segment.geometry.response_offset(core, slot)))
        {
            let (header, payload) = segment.read_slot(segment.geometry.response_offset(core, slot));
            let service = u8::try_from(header.service).unwrap_or(u8::MAX);
            receive(
                ResponseHeader { client: client_address(&header), service, completed_count: header.completed_count },
                payload,
            );
            consumer.advance();
            consumer.publish(&lines.orchestrator_heads.data[0]);
            received += 1;
        }
        received
    }

    /// Receives up to `limit` messages of the core, and returns their number. A message of unknown kind is passed as
    /// `None`.
    #[inline]
    pub fn receive_messages(&mut self, core: u16, limit: usize, mut receive: impl FnMut(Option<Message>)) -> usize {
        let Self { segment, rings } = self;
        let (lines, consumer) = (segment.core_cursors(core), &mut rings[usize::from(core)].messages);
        let mut received = 0;
        while received < limit
            && let Some(slot) =
                consumer.oldest_slot(|slot| segment.sequence(segment.geometry.uplink_message_offset(core, slot)))
        {
            receive(segment.read_message(segment.geometry.uplink_message_offset(core, slot)).message());
            consumer.advance();
            received += 1;
        }
        if received > 0 {
            consumer.publish(&lines.orchestrator_heads.messages);
        }
        received
    }
}

impl Segment {
    /// Writes a slot, which must belong to this side. The payload must fit the slot.
    #[inline]
    pub(crate) fn write_slot(&self, offset: usize, header: SlotHeader, payload: &[u8]) {
        let start: *mut SlotHeader = self.slot(offset + SEQUENCE_BYTES, size_of::<SlotHeader>() + payload.len());
        // SAFETY: inside the mapping and aligned (`Segment::slot`); only this side accesses an unpublished slot.
        unsafe {
            start.write(header);
            start.add(1).cast::<u8>().copy_from_nonoverlapping(payload.as_ptr(), payload.len());
        }
    }

    /// Reads a slot, which must belong to this side. Returns `None` as the payload if its length is out of range. The
    /// payload must not be used after the slot was returned.
    #[inline]
    pub(crate) fn read_slot<'a>(&self, offset: usize) -> (SlotHeader, Option<&'a [u8]>) {
        let bytes = self.geometry.slot_bytes as usize - SEQUENCE_BYTES;
        let start: *mut SlotHeader = self.slot(offset + SEQUENCE_BYTES, bytes);
        // SAFETY: inside the mapping and aligned (`Segment::slot`); any bit pattern is a header.
        let header = unsafe { start.read() };
        let length = header.length as usize;
        let fits = length <= self.geometry.payload_bytes();
        // SAFETY: inside the slot, which no other side writes until it is returned.
        let payload = fits.then(|| unsafe { std::slice::from_raw_parts(start.add(1).cast::<u8>(), length) });
        (header, payload)
    }

    #[inline]
    pub(crate) fn write_message(&self, offset: usize, message: RawMessage) {
        // SAFETY: as in `write_slot`.
        unsafe { self.slot::<RawMessage>(offset + SEQUENCE_BYTES, size_of::<RawMessage>()).write(message) }
    }

    #[inline]
    pub(crate) fn read_message(&self, offset: usize) -> RawMessage {
        // SAFETY: as in `read_slot`.
        unsafe { self.slot::<RawMessage>(offset + SEQUENCE_BYTES, size_of::<RawMessage>()).read() }
    }
}
