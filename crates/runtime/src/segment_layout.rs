//! Layout of the memory that a server's orchestrator and workers share.
//!
//! ```text
//! header | services (64 lines) | core 0 | core 1 | ...
//! core:    tails of the orchestrator | its heads | tails of the worker | its heads
//!          | messages to the orchestrator | messages to the worker | responses | requests of priority 0 | 1 | ...
//! ```
//!
//! Only one side writes each cache line. A slot and a message begin with their sequence number ([`mod@crate::ring`]),
//! and the reader polls the sequence number of the next slot or message.

use std::mem::size_of;
use std::sync::atomic::{AtomicU32, AtomicU64};

use coreward_model::dispatch::MAX_SCHEDULED_SERVICES;

/// Magic number in the first bytes of the shared memory, which identifies the file as coreward's.
pub(crate) const SHARED_MEMORY_MAGIC: u64 = u64::from_le_bytes(*b"coreward");
/// Version of this memory layout. A process rejects memory with another version.
pub const MEMORY_LAYOUT_VERSION: u32 = 2;
/// Size of a cache line in bytes. All parts of the memory are aligned to it.
pub(crate) const CACHE_LINE_BYTES: usize = 64;
/// Maximum number of request priorities (RingLeader, NSDI'23, Sect. 6).
pub const MAX_PRIORITIES: u8 = 8;
pub const MAX_CORES: u16 = 256;
/// Maximum number of requests in a core's queue for one priority.
pub const MAX_QUEUE_SLOTS: u32 = 1024;
/// Maximum size of a slot in bytes. The largest UDP payload fits into it.
pub const MAX_SLOT_BYTES: u32 = 1 << 16;
/// Size in bytes of the sequence number before a slot's or message's data. It is 8 to keep the data aligned.
pub(crate) const SEQUENCE_NUMBER_BYTES: usize = 8;
pub(crate) const MESSAGE_SLOT_BYTES: usize = SEQUENCE_NUMBER_BYTES + size_of::<RawWorkerMessage>();
/// Number of slots in a message ring. Each core has one message ring in each direction, between worker and
/// orchestrator.
pub(crate) const MESSAGE_RING_SLOTS: u32 = 256;

/// Header in the first cache line of the shared memory. The orchestrator writes it before the file gets its final name.
#[derive(Debug)]
#[repr(C, align(64))]
pub(crate) struct SegmentHeader {
    pub magic: AtomicU64,
    pub layout_version: AtomicU32,
    /// User id of the orchestrator and of all workers.
    pub owner_user_id: AtomicU32,
    pub segment_bytes: AtomicU64,
    pub core_count: AtomicU32,
    pub service_count: AtomicU32,
    pub priority_count: AtomicU32,
    pub slots_per_queue: AtomicU32,
    pub slot_bytes: AtomicU32,
}

#[derive(Debug)]
#[repr(C, align(64))]
pub(crate) struct ServiceRecord {
    pub address: AtomicU32,
    pub port: AtomicU32,
    pub priority: AtomicU32,
}

/// Tail cursors of the rings into which one side (orchestrator or worker) writes.
#[derive(Debug)]
#[repr(C, align(64))]
pub(crate) struct RingTails {
    /// In the orchestrator's cache line, the tails of the request rings, by priority. In the worker's cache line, the
    /// first element is the tail of the response ring, and the others are unused.
    pub data_tails: [AtomicU32; MAX_PRIORITIES as usize],
    pub message_tail: AtomicU32,
    /// In the worker's cache line, the number of the core's current worker, counted from 1. In the orchestrator's cache
    /// line, the number of the last accepted worker. The cursors of a worker continue from those of the previous
    /// worker.
    pub worker_number: AtomicU32,
}

/// Head cursors of the rings from which one side (orchestrator or worker) reads.
#[derive(Debug)]
#[repr(C, align(64))]
pub(crate) struct RingHeads {
    pub data_heads: [AtomicU32; MAX_PRIORITIES as usize],
    pub message_head: AtomicU32,
}

#[derive(Debug)]
#[repr(C, align(64))]
pub(crate) struct CoreCursors {
    pub orchestrator_tails: RingTails,
    pub orchestrator_heads: RingHeads,
    pub worker_tails: RingTails,
    pub worker_heads: RingHeads,
}

/// Header of a request or response. In a slot, it follows the sequence number and precedes the payload.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
#[repr(C)]
pub(crate) struct SlotHeader {
    pub client_address: u32,
    pub client_port: u16,
    pub service_number: u16,
    pub payload_length: u32,
    /// Number of the service's requests that this response completes.
    pub completed_count: u32,
    /// Arrival time of a request, in nanoseconds on the orchestrator's clock.
    pub arrived_ns: u64,
}

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
#[repr(C)]
pub(crate) struct RawWorkerMessage {
    pub message_kind: u8,
    pub service: u8,
    pub core: u16,
    pub count: u32,
    pub epoch: u64,
    pub threshold: u64,
}

/// Configurable sizes of the shared memory and its parts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SegmentGeometry {
    /// Number of cores, from 1 to [`MAX_CORES`]. Each has one worker.
    pub core_count: u16,
    /// Number of priorities, from 1 to [`MAX_PRIORITIES`].
    pub priority_count: u8,
    /// Maximum number of requests in a core's queue for one priority. It is a power of two up to [`MAX_QUEUE_SLOTS`].
    pub slots_per_queue: u32,
    /// Size of a slot in bytes. It is a positive multiple of 64 up to [`MAX_SLOT_BYTES`].
    pub slot_bytes: u32,
}

#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{name} {value}: expected {expected}")]
pub struct SegmentGeometryError {
    name: &'static str,
    value: u32,
    expected: &'static str,
}

impl SegmentGeometry {
    /// Checks the sizes. Fails if one of them is out of range.
    pub fn check_sizes(&self) -> Result<(), SegmentGeometryError> {
        let size_error = |name, value, expected| Err(SegmentGeometryError { name, value, expected });
        if !(1..=MAX_CORES).contains(&self.core_count) {
            return size_error("cores", self.core_count.into(), "1 to 256");
        }
        if !(1..=MAX_PRIORITIES).contains(&self.priority_count) {
            return size_error("priorities", self.priority_count.into(), "1 to 8");
        }
        if !self.slots_per_queue.is_power_of_two() || self.slots_per_queue > MAX_QUEUE_SLOTS {
            return size_error("slots", self.slots_per_queue, "a power of two up to 1024");
        }
        let bytes = self.slot_bytes;
        if bytes == 0 || bytes > MAX_SLOT_BYTES || !bytes.is_multiple_of(CACHE_LINE_BYTES as u32) {
            return size_error("slot_bytes", bytes, "a multiple of 64 from 64 to 65536");
        }
        Ok(())
    }

    /// Returns the size in bytes of the smallest slot that can contain payloads of up to `payload` bytes.
    pub fn slot_bytes_for_payload(payload: u16) -> u32 {
        (SEQUENCE_NUMBER_BYTES + size_of::<SlotHeader>() + usize::from(payload)).next_multiple_of(CACHE_LINE_BYTES)
            as u32
    }

    /// Returns the maximum length in bytes of a payload in a slot.
    pub fn max_payload_bytes(&self) -> usize {
        self.slot_bytes as usize - SEQUENCE_NUMBER_BYTES - size_of::<SlotHeader>()
    }

    /// Returns the number of slots in a core's response ring, which suffices for all requests that can be at the core.
    pub(crate) fn response_slot_count(&self) -> u32 {
        (self.slots_per_queue * u32::from(self.priority_count)).next_power_of_two()
    }

    fn message_ring_bytes() -> usize {
        MESSAGE_RING_SLOTS as usize * MESSAGE_SLOT_BYTES
    }

    fn bytes_per_core(&self) -> usize {
        let slot_count = self.response_slot_count() + self.slots_per_queue * u32::from(self.priority_count);
        size_of::<CoreCursors>() + 2 * Self::message_ring_bytes() + slot_count as usize * self.slot_bytes as usize
    }

    pub fn segment_bytes(&self) -> usize {
        self.core_offset(self.core_count)
    }

    pub(crate) fn service_record_offset(service: u8) -> usize {
        size_of::<SegmentHeader>() + usize::from(service) * size_of::<ServiceRecord>()
    }

    /// Returns the offset of a core's part of the memory, which begins with its [`CoreCursors`].
    pub(crate) fn core_offset(&self, core: u16) -> usize {
        Self::service_record_offset(MAX_SCHEDULED_SERVICES as u8) + usize::from(core) * self.bytes_per_core()
    }

    pub(crate) fn uplink_message_offset(&self, core: u16, slot: u32) -> usize {
        self.core_offset(core) + size_of::<CoreCursors>() + slot as usize * MESSAGE_SLOT_BYTES
    }

    pub(crate) fn downlink_message_offset(&self, core: u16, slot: u32) -> usize {
        self.uplink_message_offset(core, slot) + Self::message_ring_bytes()
    }

    pub(crate) fn response_offset(&self, core: u16, slot: u32) -> usize {
        let first_response_offset = self.core_offset(core) + size_of::<CoreCursors>() + 2 * Self::message_ring_bytes();
        first_response_offset + slot as usize * self.slot_bytes as usize
    }

    pub(crate) fn request_offset(&self, core: u16, priority: u8, slot: u32) -> usize {
        self.response_offset(core, self.response_slot_count() + u32::from(priority) * self.slots_per_queue + slot)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn segment_parts_are_aligned_and_do_not_overlap() {
        let geometry = SegmentGeometry { core_count: 3, priority_count: 2, slots_per_queue: 4, slot_bytes: 128 };
        let mut parts = Vec::new();
        for core in 0..3 {
            parts.push((geometry.core_offset(core), size_of::<CoreCursors>()));
            for slot in 0..MESSAGE_RING_SLOTS {
                parts.push((geometry.uplink_message_offset(core, slot), MESSAGE_SLOT_BYTES));
                parts.push((geometry.downlink_message_offset(core, slot), MESSAGE_SLOT_BYTES));
            }
            parts.extend((0..8).map(|slot| (geometry.response_offset(core, slot), 128)));
            for priority in 0..2 {
                parts.extend((0..4).map(|slot| (geometry.request_offset(core, priority, slot), 128)));
            }
        }
        parts.sort_unstable();
        assert!(parts.iter().all(|(offset, bytes)| offset % bytes.min(&CACHE_LINE_BYTES) == 0));
        let mut previous_end = size_of::<SegmentHeader>() + MAX_SCHEDULED_SERVICES * size_of::<ServiceRecord>();
        for (offset, bytes) in parts {
            assert_eq!(offset, previous_end, "no hole, no overlap");
            previous_end += bytes;
        }
        assert_eq!(previous_end, geometry.segment_bytes());
    }

    #[test]
    fn error_names_the_size_that_is_out_of_range() {
        let largest_geometry =
            SegmentGeometry { core_count: 256, priority_count: 8, slots_per_queue: 1024, slot_bytes: 65536 };
        let check_error_text = |geometry: SegmentGeometry| geometry.check_sizes().unwrap_err().to_string();
        assert_eq!(largest_geometry.check_sizes(), Ok(()));
        assert_eq!(
            check_error_text(SegmentGeometry { core_count: 257, ..largest_geometry }),
            "cores 257: expected 1 to 256"
        );
        assert_eq!(
            check_error_text(SegmentGeometry { priority_count: 9, ..largest_geometry }),
            "priorities 9: expected 1 to 8"
        );
        assert_eq!(
            check_error_text(SegmentGeometry { slots_per_queue: 3, ..largest_geometry }),
            "slots 3: expected a power of two up to 1024"
        );
        let text = "slot_bytes 100: expected a multiple of 64 from 64 to 65536";
        assert_eq!(check_error_text(SegmentGeometry { slot_bytes: 100, ..largest_geometry }), text);
    }
}
