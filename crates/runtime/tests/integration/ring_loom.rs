//! Runs a ring's producer and consumer in every order that the memory model allows, with loom.

use coreward_runtime::ring::{RingConsumer, RingCursor, RingProducer};
use loom::cell::UnsafeCell;
use loom::sync::Arc;
use loom::sync::atomic::{AtomicU32, Ordering};
use loom::thread;

const RING_SLOT_COUNT: usize = 2;

struct LoomCursor(AtomicU32);

impl RingCursor for LoomCursor {
    fn load(&self) -> u32 {
        self.0.load(Ordering::Acquire)
    }

    fn store(&self, value: u32) {
        self.0.store(value, Ordering::Release);
    }
}

/// Ring for the model checker loom. The test fails if threads access a slot at the same time or without
/// synchronisation.
struct LoomRing {
    head: LoomCursor,
    tail: LoomCursor,
    sequences: [LoomCursor; RING_SLOT_COUNT],
    slots: [UnsafeCell<u32>; RING_SLOT_COUNT],
}

impl LoomRing {
    fn new() -> Self {
        let new_zero_cursor = || LoomCursor(AtomicU32::new(0));
        let empty_slots = [UnsafeCell::new(0), UnsafeCell::new(0)];
        Self {
            head: new_zero_cursor(),
            tail: new_zero_cursor(),
            sequences: [new_zero_cursor(), new_zero_cursor()],
            slots: empty_slots,
        }
    }

    fn push_value(&self, producer: &mut RingProducer, value: u32) -> bool {
        let Some(slot) = producer.next_free_slot(&self.head).unwrap() else { return false };
        // SAFETY: the slot is the producer's until it is published, which loom checks.
        self.slots[slot as usize].with_mut(|slot| unsafe { *slot = value });
        producer.publish_slot(&self.sequences[slot as usize], &self.tail);
        true
    }

    fn pop_value(&self, consumer: &mut RingConsumer) -> Option<u32> {
        let oldest_slot = consumer.oldest_slot(|slot| &self.sequences[slot as usize])?;
        // SAFETY: the slot is the consumer's until it is returned, which loom checks.
        let value = self.slots[oldest_slot as usize].with(|slot| unsafe { *slot });
        consumer.advance();
        consumer.release_read_slots(&self.head);
        Some(value)
    }
}

#[test]
fn ring_delivers_values_once_and_in_order() {
    loom::model(|| {
        let ring = Arc::new(LoomRing::new());
        let shared_ring = ring.clone();
        let producer_thread = thread::spawn(move || {
            let mut producer = RingProducer::new(RING_SLOT_COUNT as u32, 0);
            (1..=4)
                .fold(0, |sent_count, _| sent_count + u32::from(shared_ring.push_value(&mut producer, sent_count + 1)))
        });
        let mut consumer = RingConsumer::new(RING_SLOT_COUNT as u32, 0);
        let mut received_values: Vec<u32> = (0..4).filter_map(|_| ring.pop_value(&mut consumer)).collect();
        let sent_value_count = producer_thread.join().unwrap();
        received_values.extend(std::iter::from_fn(|| ring.pop_value(&mut consumer)));
        assert!(sent_value_count >= RING_SLOT_COUNT as u32);
        assert_eq!(received_values, Vec::from_iter(1..=sent_value_count), "all that was sent, once, in order");
    });
}
