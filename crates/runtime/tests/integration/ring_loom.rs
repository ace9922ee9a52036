//! Producer and consumer of a ring in every order that the memory model allows, tried by loom.

use coreward_runtime::ring::{Consumer, Cursor, Producer};
use loom::cell::UnsafeCell;
use loom::sync::Arc;
use loom::sync::atomic::{AtomicU32, Ordering};
use loom::thread;

const SLOT_COUNT: usize = 2;

struct LoomCursor(AtomicU32);

impl Cursor for LoomCursor {
    fn load(&self) -> u32 {
        self.0.load(Ordering::Acquire)
    }

    fn store(&self, value: u32) {
        self.0.store(value, Ordering::Release);
    }
}

/// Ring for loom, which fails when threads access a slot at once, or without synchronisation.
struct Ring {
    head: LoomCursor,
    tail: LoomCursor,
    sequences: [LoomCursor; SLOT_COUNT],
    slots: [UnsafeCell<u32>; SLOT_COUNT],
}

impl Ring {
    fn new() -> Self {
        let cursor = || LoomCursor(AtomicU32::new(0));
        let slots = [UnsafeCell::new(0), UnsafeCell::new(0)];
        Self { head: cursor(), tail: cursor(), sequences: [cursor(), cursor()], slots }
    }

    fn push(&self, producer: &mut Producer, value: u32) -> bool {
        let Some(slot) = producer.free_slot(&self.head).unwrap() else { return false };
        // SAFETY: the slot is the producer's until it is published, which loom checks.
        self.slots[slot as usize].with_mut(|slot| unsafe { *slot = value });
        producer.publish(&self.sequences[slot as usize], &self.tail);
        true
    }

    fn pop(&self, consumer: &mut Consumer) -> Option<u32> {
        let slot = consumer.oldest_slot(|slot| &self.sequences[slot as usize])?;
        // SAFETY: the slot is the consumer's until it is returned, which loom checks.
        let value = self.slots[slot as usize].with(|slot| unsafe { *slot });
        consumer.advance();
        consumer.publish(&self.head);
        Some(value)
    }
}

#[test]
fn values_arrive_once_and_in_order() {
    loom::model(|| {
        let ring = Arc::new(Ring::new());
        let shared = ring.clone();
        let sender = thread::spawn(move || {
            let mut producer = Producer::new(SLOT_COUNT as u32, 0);
            (1..=4).fold(0, |sent, _| sent + u32::from(shared.push(&mut producer, sent + 1)))
        });
        let mut consumer = Consumer::new(SLOT_COUNT as u32, 0);
        let mut received: Vec<u32> = (0..4).filter_map(|_| ring.pop(&mut consumer)).collect();
        let sent = sender.join().unwrap();
        received.extend(std::iter::from_fn(|| ring.pop(&mut consumer)));
        assert!(sent >= SLOT_COUNT as u32);
        assert_eq!(received, Vec::from_iter(1..=sent), "all that was sent, once, in order");
    });
}
