//! Reader of the ring of SYN samples that `sample_rss()` of `bpf/server/rss.h` writes.

use std::mem::{offset_of, size_of};
use std::sync::atomic::Ordering::{Acquire, SeqCst};
use std::sync::atomic::fence;

use coreward_intf as intf;

use crate::mmap_array::MmapArray;

/// Returns the sequence number of the newest SYN sample, or 0 if no SYN has been sampled.
pub fn newest_sample_sequence(state: &MmapArray<intf::server_state>) -> u32 {
    state.atomic_u32(offset_of!(intf::server_state, sample_sequence)).load(Acquire)
}

/// Returns the SYN samples with sequence numbers after `previous_sequence` (0 for all), the oldest first. Only the last
/// [`RSS_SAMPLES`](intf::RSS_SAMPLES) samples are stored, so older samples may be missing. The list ends before the
/// first sample that a program is still writing, so that the next call returns it.
pub fn rss_samples_after_sequence(
    state: &MmapArray<intf::server_state>,
    previous_sequence: u32,
) -> Vec<intf::rss_sample> {
    let newest_sequence = newest_sample_sequence(state);
    let stored_count = newest_sequence.wrapping_sub(previous_sequence).min(intf::RSS_SAMPLES);
    (0..stored_count).rev().map_while(|age| read_sample(state, newest_sequence.wrapping_sub(age))).collect()
}

/// Returns the byte offset in the state of the sample with the sequence number `sequence`.
fn sample_offset(sequence: u32) -> usize {
    let slot = sequence.wrapping_sub(1) % intf::RSS_SAMPLES;
    offset_of!(intf::server_state, samples) + slot as usize * size_of::<intf::rss_sample>()
}

/// Returns the sample with the sequence number `sequence`, or `None` if a program is writing it or has replaced it.
fn read_sample(state: &MmapArray<intf::server_state>, sequence: u32) -> Option<intf::rss_sample> {
    let offset = sample_offset(sequence);
    let stored_sequence = state.atomic_u32(offset + offset_of!(intf::rss_sample, sequence));
    if stored_sequence.load(Acquire) != sequence {
        return None;
    }
    let sample = state.read::<intf::rss_sample>(offset);
    fence(SeqCst);
    (stored_sequence.load(Acquire) == sequence).then_some(*sample)
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::AtomicBool;
    use std::sync::atomic::Ordering::Relaxed;

    use nix::sys::memfd::{MFdFlags, memfd_create};

    use super::*;

    /// Returns a server state in new memory, in which no SYN has been sampled.
    fn new_empty_state() -> MmapArray<intf::server_state> {
        let memory_file = memfd_create("state", MFdFlags::MFD_CLOEXEC).unwrap();
        nix::unistd::ftruncate(&memory_file, size_of::<intf::server_state>() as i64).unwrap();
        MmapArray::new(memory_file).unwrap()
    }

    fn claim_sample_sequence(state: &MmapArray<intf::server_state>) -> u32 {
        state.atomic_u32(offset_of!(intf::server_state, sample_sequence)).fetch_add(1, SeqCst) + 1
    }

    /// Writes a sample whose fields all equal its sequence number. The order of the writes is that of `sample_rss()`.
    fn write_sample(state: &MmapArray<intf::server_state>, sequence: u32) {
        let offset = sample_offset(sequence);
        let stored_sequence = state.atomic_u32(offset + offset_of!(intf::rss_sample, sequence));
        stored_sequence.swap(0, SeqCst);
        for word in 0..offset_of!(intf::rss_sample, predicted_queue) / size_of::<u32>() {
            state.atomic_u32(offset + word * size_of::<u32>()).store(sequence, Relaxed);
        }
        stored_sequence.swap(sequence, SeqCst);
    }

    fn sequence_numbers(samples: &[intf::rss_sample]) -> Vec<u32> {
        samples.iter().map(|sample| sample.sequence).collect()
    }

    #[test]
    fn samples_after_an_unfinished_sample_are_returned_later() {
        let state = new_empty_state();
        assert_eq!(sequence_numbers(&rss_samples_after_sequence(&state, 0)), []);
        let claimed_sequences = [(); 3].map(|()| claim_sample_sequence(&state));
        assert_eq!(claimed_sequences, [1, 2, 3]);
        write_sample(&state, 1);
        write_sample(&state, 3);
        assert_eq!(sequence_numbers(&rss_samples_after_sequence(&state, 0)), [1]);
        write_sample(&state, 2);
        assert_eq!(sequence_numbers(&rss_samples_after_sequence(&state, 1)), [2, 3]);
        assert_eq!(sequence_numbers(&rss_samples_after_sequence(&state, 3)), []);
    }

    #[test]
    fn only_the_newest_samples_are_stored() {
        let state = new_empty_state();
        for _ in 0..intf::RSS_SAMPLES + 10 {
            write_sample(&state, claim_sample_sequence(&state));
        }
        let expected_sequences: Vec<u32> = (11..=intf::RSS_SAMPLES + 10).collect();
        assert_eq!(sequence_numbers(&rss_samples_after_sequence(&state, 0)), expected_sequences);
        assert_eq!(
            sequence_numbers(&rss_samples_after_sequence(&state, intf::RSS_SAMPLES + 8)),
            expected_sequences[254..]
        );
    }

    #[test]
    fn samples_read_while_a_program_writes_are_complete() {
        const RSS_SAMPLE_COUNT: u32 = 200_000;
        let (state, is_written) = (new_empty_state(), AtomicBool::new(false));
        std::thread::scope(|scope| {
            scope.spawn(|| {
                for _ in 0..RSS_SAMPLE_COUNT {
                    write_sample(&state, claim_sample_sequence(&state));
                }
                is_written.store(true, SeqCst);
            });
            let mut last_sequence = 0;
            while !is_written.load(SeqCst) || last_sequence != RSS_SAMPLE_COUNT {
                for sample in rss_samples_after_sequence(&state, last_sequence) {
                    let sequence = sample.sequence;
                    assert!(sequence > last_sequence, "{sequence} after {last_sequence}");
                    assert_eq!(sample.source_address, [sequence; 4]);
                    assert_eq!(sample.destination_address, [sequence; 4]);
                    assert_eq!(sample.hash, sequence);
                    last_sequence = sequence;
                }
            }
        });
    }
}
