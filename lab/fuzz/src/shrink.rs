//! Shrinks an epoch with a difference to a short sequence of steps that still shows it.

use std::time::{Duration, Instant};

use crate::fuzz_epoch::{FuzzEpoch, FuzzEpochStep};
use crate::harness::{FuzzHarness, FuzzHarnessSetup};
use crate::mutate::MIN_FRAME_BYTES;
use crate::state_change::ModelDifference;

/// Maximum duration of the shrinking, after which the smallest sequence found so far is returned.
const SHRINK_TIMEOUT: Duration = Duration::from_secs(90);

/// Sequence of steps after which program and reference model differ. It is the shortest one found so far.
#[derive(Debug)]
pub struct FailingStepSequence {
    /// Steps in their order, of which the last one is a packet.
    pub steps: Vec<FuzzEpochStep>,
    pub difference: ModelDifference,
}

struct StepSequenceShrinker {
    setup: FuzzHarnessSetup,
    deadline: Instant,
}

impl StepSequenceShrinker {
    /// Runs `steps` on a new harness. Returns the difference between program and model after the last step, if any.
    fn find_difference(&self, steps: &[FuzzEpochStep]) -> anyhow::Result<Option<ModelDifference>> {
        let mut harness = FuzzHarness::new(self.setup, true)?;
        let mut last_difference = None;
        for step in steps {
            last_difference = match step {
                // A change may be invalid without earlier steps, because its server's service may not exist.
                FuzzEpochStep::Change(change) if harness.is_applicable(change) => {
                    harness.apply_change(change).map(|_| None)?
                }
                FuzzEpochStep::Change(_) => None,
                FuzzEpochStep::Packet(frame) => harness.process_packet(frame)?.1,
            };
        }
        match last_difference.or_else(|| harness.compare_state()) {
            Some(difference) => Ok(Some(difference)),
            None => harness.compare_large_tables(),
        }
    }

    /// Returns the length of the shortest prefix of `steps` after which program and model differ. A difference in the
    /// state may be found long after its cause.
    fn shortest_failing_prefix_length(&self, steps: &[FuzzEpochStep]) -> anyhow::Result<usize> {
        let (mut longest_passing_length, mut shortest_failing_length) = (0, steps.len());
        while longest_passing_length + 1 < shortest_failing_length {
            let tried_length = longest_passing_length.midpoint(shortest_failing_length);
            match self.find_difference(&steps[..tried_length])? {
                Some(_) => shortest_failing_length = tried_length,
                None => longest_passing_length = tried_length,
            }
        }
        Ok(shortest_failing_length)
    }

    fn has_time_left(&self) -> bool {
        Instant::now() < self.deadline
    }

    /// Removes unnecessary steps in ever smaller chunks, by delta debugging (Zeller and Hildebrandt, TSE 2002).
    fn remove_needless_steps(&self, sequence: &mut FailingStepSequence) -> anyhow::Result<()> {
        let mut chunk_length = sequence.steps.len().div_ceil(2);
        while chunk_length > 0 && self.has_time_left() {
            let mut chunk_start = 0;
            while chunk_start + 1 < sequence.steps.len() && self.has_time_left() {
                let chunk_end = (chunk_start + chunk_length).min(sequence.steps.len() - 1);
                let remaining_steps = [&sequence.steps[..chunk_start], &sequence.steps[chunk_end..]].concat();
                match self.find_difference(&remaining_steps)? {
                    Some(difference) => *sequence = FailingStepSequence { steps: remaining_steps, difference },
                    None => chunk_start = chunk_end,
                }
            }
            chunk_length /= 2;
        }
        Ok(())
    }

    /// Shortens the last packet and zeroes its bytes. Keeps each change only if program and model still differ.
    fn simplify_last_packet(&self, sequence: &mut FailingStepSequence) -> anyhow::Result<()> {
        let replace_if_still_failing = |sequence: &mut FailingStepSequence, frame: Vec<u8>| -> anyhow::Result<()> {
            let mut steps = sequence.steps.clone();
            *steps.last_mut().expect("a packet at the end") = FuzzEpochStep::Packet(frame);
            if let Some(difference) = self.find_difference(&steps)? {
                *sequence = FailingStepSequence { steps, difference };
            }
            Ok(())
        };
        let copy_last_frame = |sequence: &FailingStepSequence| match sequence.steps.last() {
            Some(FuzzEpochStep::Packet(frame)) => frame.clone(),
            _ => Vec::new(),
        };
        for cut_bytes in [256, 64, 16, 4, 1] {
            let frame = copy_last_frame(sequence);
            if frame.len() > MIN_FRAME_BYTES + cut_bytes && self.has_time_left() {
                replace_if_still_failing(sequence, frame[..frame.len() - cut_bytes].to_vec())?;
            }
        }
        let mut offset = 0;
        while offset < copy_last_frame(sequence).len() && self.has_time_left() {
            let mut frame = copy_last_frame(sequence);
            let end = (offset + 2).min(frame.len());
            if frame[offset..end].iter().any(|byte| *byte != 0) {
                frame[offset..end].fill(0);
                replace_if_still_failing(sequence, frame)?;
            }
            offset = end;
        }
        Ok(())
    }
}

/// Shrinks the steps of an epoch in which packet number `failing_packet_number` shows a difference. Returns `None` if
/// the difference cannot be reproduced.
pub fn shrink_failing_epoch(seed: u64, failing_packet_number: u64) -> anyhow::Result<Option<FailingStepSequence>> {
    let (setup, mut steps) = FuzzEpoch::record_steps(seed, failing_packet_number)?;
    let shrinker = StepSequenceShrinker { setup, deadline: Instant::now() + SHRINK_TIMEOUT };
    if shrinker.find_difference(&steps)?.is_none() {
        return Ok(None);
    }
    let failing_length = shrinker.shortest_failing_prefix_length(&steps)?;
    steps.truncate(failing_length);
    let Some(difference) = shrinker.find_difference(&steps)? else { return Ok(None) };
    let mut sequence = FailingStepSequence { steps, difference };
    // Most differences need no earlier packet, so changes and the last packet are tried alone first.
    let last_index = sequence.steps.len() - 1;
    let changes_and_last_step = sequence
        .steps
        .iter()
        .enumerate()
        .filter(|(step_index, step)| *step_index == last_index || matches!(step, FuzzEpochStep::Change(_)));
    let shortened_steps: Vec<FuzzEpochStep> = changes_and_last_step.map(|(_, step)| step.clone()).collect();
    if let Some(difference) = shrinker.find_difference(&shortened_steps)? {
        sequence = FailingStepSequence { steps: shortened_steps, difference };
    }
    shrinker.remove_needless_steps(&mut sequence)?;
    shrinker.simplify_last_packet(&mut sequence)?;
    Ok(Some(sequence))
}
