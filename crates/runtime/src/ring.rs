//! Positions in a ring with one producer and one consumer. The caller provides the slots.
//!
//! Positions count slots since the start, modulo 2^32. After each slot's contents, the producer stores the slot's
//! *sequence*, which is its position plus 1. The consumer reads only that, so passing a value moves one cache line
//! between CPUs. Both sides also store their own position, which serves the other side and a successor. The producer
//! reads the consumer's position when the ring looks full. Each word is written by one side only, so neither side waits
//! for the other. `tests/integration/ring_loom.rs` runs both sides in every order that the memory model allows.

use std::sync::atomic::{AtomicU32, Ordering};

/// Cursor of a ring, in memory that producer and consumer share. Only one of these two stores values in it.
pub trait RingCursor {
    /// Returns the cursor's value. All memory accesses of the other side before its store are then visible (acquire).
    fn load(&self) -> u32;
    /// Stores a value. All earlier memory accesses of this side become visible with it (release).
    fn store(&self, value: u32);
}

impl RingCursor for AtomicU32 {
    #[inline]
    fn load(&self) -> u32 {
        AtomicU32::load(self, Ordering::Acquire)
    }

    #[inline]
    fn store(&self, value: u32) {
        AtomicU32::store(self, value, Ordering::Release);
    }
}

/// Error for a cursor value that the other side of the ring cannot have stored according to the protocol.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("a ring of {slot_count} slots with {used_slot_count} in use: the other side's cursor is damaged")]
pub struct DamagedRingCursor {
    pub slot_count: u32,
    /// Number of used slots, as the difference of the two cursors.
    pub used_slot_count: u32,
}

#[derive(Debug, Clone)]
pub struct RingProducer {
    slot_count: u32,
    own_tail: u32,
    /// Consumer's head cursor when the producer last read it.
    last_read_head: u32,
}

impl RingProducer {
    /// Returns the producer of an empty ring with both cursors at `start`. `slot_count` must be a power of two.
    pub fn new(slot_count: u32, start: u32) -> Self {
        assert!(slot_count.is_power_of_two(), "{slot_count} slots: expected a power of two");
        Self { slot_count, own_tail: start, last_read_head: start }
    }

    /// Returns the index of the next free slot, into which the producer may write, or `None` if the ring is full. Fails
    /// if the consumer's cursor is ahead of the producer's.
    #[inline]
    pub fn next_free_slot(&mut self, head: &impl RingCursor) -> Result<Option<u32>, DamagedRingCursor> {
        if self.own_tail.wrapping_sub(self.last_read_head) == self.slot_count {
            let loaded_head = head.load();
            let (slots, used) = (self.slot_count, self.own_tail.wrapping_sub(loaded_head));
            if used > slots {
                return Err(DamagedRingCursor { slot_count: slots, used_slot_count: used });
            }
            self.last_read_head = loaded_head;
            if used == slots {
                return Ok(None);
            }
        }
        Ok(Some(self.own_tail & (self.slot_count - 1)))
    }

    pub fn is_empty(&self, head: &impl RingCursor) -> bool {
        head.load() == self.own_tail
    }

    /// Publishes to the consumer the slot that [`next_free_slot`](Self::next_free_slot) has returned.
    #[inline]
    pub fn publish_slot(&mut self, sequence: &impl RingCursor, tail: &impl RingCursor) {
        self.own_tail = self.own_tail.wrapping_add(1);
        // The position is stored first. If this process ends now, its successor skips the slot, and none is read twice.
        tail.store(self.own_tail);
        sequence.store(self.own_tail);
    }

    /// Marks all slots as unpublished, because an earlier producer may have published some. A producer must call this
    /// when it starts.
    pub fn mark_all_slots_unpublished<'a, C: RingCursor + 'a>(&self, sequence_of_slot: impl Fn(u32) -> &'a C) {
        for position in (0..self.slot_count).map(|offset| self.own_tail.wrapping_add(offset)) {
            sequence_of_slot(position & (self.slot_count - 1)).store(position);
        }
    }
}

#[derive(Debug, Clone)]
pub struct RingConsumer {
    slot_count: u32,
    own_head: u32,
}

impl RingConsumer {
    /// Returns the consumer of an empty ring with both cursors at `start`. `slot_count` must be a power of two.
    pub fn new(slot_count: u32, start: u32) -> Self {
        assert!(slot_count.is_power_of_two(), "{slot_count} slots: expected a power of two");
        Self { slot_count, own_head: start }
    }

    /// Returns the index of the oldest published slot, or `None` if the ring is empty. `sequence` returns a slot's
    /// sequence number.
    #[inline]
    pub fn oldest_slot<'a, C: RingCursor + 'a>(&self, sequence: impl FnOnce(u32) -> &'a C) -> Option<u32> {
        let slot_index = self.own_head & (self.slot_count - 1);
        (sequence(slot_index).load() == self.own_head.wrapping_add(1)).then_some(slot_index)
    }

    /// Advances the consumer past the slot that [`oldest_slot`](Self::oldest_slot) has returned. The producer may reuse
    /// the slot after [`release_read_slots`](Self::release_read_slots).
    #[inline]
    pub fn advance(&mut self) {
        self.own_head = self.own_head.wrapping_add(1);
    }

    /// Releases all slots that the consumer has read, so that the producer may reuse them.
    #[inline]
    pub fn release_read_slots(&self, head: &impl RingCursor) {
        head.store(self.own_head);
    }
}

#[cfg(test)]
mod tests {
    use std::collections::VecDeque;

    use proptest::prelude::*;

    use super::*;

    proptest! {
        /// Checks that the ring behaves like a bounded FIFO queue, even if its cursors wrap.
        #[test]
        fn ring_behaves_like_a_bounded_fifo_queue(
            (slot_count_log2, start) in (0u32..4, prop_oneof![Just(0), u32::MAX - 9..u32::MAX]),
            steps in prop::collection::vec(any::<bool>(), 1..200),
        ) {
            let slot_count = 1 << slot_count_log2;
            let (head, tail) = (AtomicU32::new(start), AtomicU32::new(start));
            let sequences: Vec<AtomicU32> = (0..slot_count).map(|_| AtomicU32::new(start.wrapping_add(1))).collect();
            let mut producer = RingProducer::new(slot_count, start);
            producer.mark_all_slots_unpublished(|slot| &sequences[slot as usize]);
            let mut consumer = RingConsumer::new(slot_count, start);
            let (mut memory, mut expected) = (vec![0; slot_count as usize], VecDeque::new());
            for (value, produces) in steps.into_iter().enumerate() {
                if produces {
                    let slot = producer.next_free_slot(&head).unwrap();
                    if let Some(slot) = slot {
                        memory[slot as usize] = value;
                        expected.push_back(value);
                        producer.publish_slot(&sequences[slot as usize], &tail);
                    }
                    prop_assert!(slot.is_some() || expected.len() == slot_count as usize);
                } else {
                    let slot = consumer.oldest_slot(|slot| &sequences[slot as usize]);
                    prop_assert_eq!(slot.is_some(), !expected.is_empty());
                    if let Some(slot) = slot {
                        prop_assert_eq!(Some(memory[slot as usize]), expected.pop_front());
                        consumer.advance();
                        consumer.release_read_slots(&head);
                    }
                }
            }
        }
    }

    #[test]
    fn damaged_head_cursor_causes_error() {
        let [head, tail, sequence] = [0; 3].map(AtomicU32::new);
        let mut producer = RingProducer::new(4, 0);
        for _ in 0..4 {
            assert!(producer.next_free_slot(&head).unwrap().is_some());
            producer.publish_slot(&sequence, &tail);
        }
        head.store(5, Ordering::Relaxed);
        let head_ahead_of_tail_error = DamagedRingCursor { slot_count: 4, used_slot_count: u32::MAX };
        assert_eq!(producer.next_free_slot(&head), Err(head_ahead_of_tail_error), "more was consumed than produced");
    }

    #[test]
    fn new_consumer_reads_no_slots_marked_as_unpublished() {
        let sequences: Vec<AtomicU32> = (0..4).map(|_| AtomicU32::new(0)).collect();
        let sequence_of_slot = |slot: u32| &sequences[slot as usize];
        let [head, tail] = [0; 2].map(AtomicU32::new);
        let mut producer = RingProducer::new(4, 0);
        for _ in 0..3 {
            let slot = producer.next_free_slot(&head).unwrap().unwrap();
            producer.publish_slot(sequence_of_slot(slot), &tail);
        }
        assert_eq!(RingConsumer::new(4, 1).oldest_slot(sequence_of_slot), Some(1), "published and not consumed");
        RingProducer::new(4, 1).mark_all_slots_unpublished(sequence_of_slot);
        assert_eq!(RingConsumer::new(4, 1).oldest_slot(sequence_of_slot), None);
    }
}
