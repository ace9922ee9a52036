//! Shrinks an epoch with a difference to a small sequence of steps that shows it.

use std::time::{Duration, Instant};

use crate::change::Difference;
use crate::epoch::{Epoch, Step};
use crate::harness::{Harness, HarnessSetup};
use crate::mutate::MIN_FRAME_BYTES;

/// Maximum duration of the shrinking, after which the smallest sequence found so far is returned.
const TIMEOUT: Duration = Duration::from_secs(90);

/// Smallest sequence of steps that was found to end with a difference.
#[derive(Debug)]
pub struct ShrunkSequence {
    /// Steps in their order; the last one is a packet.
    pub steps: Vec<Step>,
    /// Difference that is found after the last step.
    pub difference: Difference,
}

struct Shrinker {
    setup: HarnessSetup,
    deadline: Instant,
}

impl Shrinker {
    /// Runs `steps` on a new harness. Returns the difference after the last step, in the packet or the state.
    fn difference(&self, steps: &[Step]) -> anyhow::Result<Option<Difference>> {
        let mut harness = Harness::new(self.setup, true)?;
        let mut last = None;
        for step in steps {
            last = match step {
                // Without earlier steps a change may be invalid: its server's service may not exist.
                Step::Change(change) if harness.is_applicable(change) => harness.change(change).map(|_| None)?,
                Step::Change(_) => None,
                Step::Packet(frame) => harness.process_packet(frame)?.1,
            };
        }
        match last.or_else(|| harness.compare_state()) {
            Some(difference) => Ok(Some(difference)),
            None => harness.compare_tables(),
        }
    }

    /// Returns the length of the shortest prefix of `steps` that ends with a difference. A difference of the state may
    /// be found long after the packet that caused it.
    fn shortest_failing_prefix(&self, steps: &[Step]) -> anyhow::Result<usize> {
        let (mut same, mut differ) = (0, steps.len());
        while same + 1 < differ {
            let middle = same.midpoint(differ);
            match self.difference(&steps[..middle])? {
                Some(_) => differ = middle,
                None => same = middle,
            }
        }
        Ok(differ)
    }

    fn has_time_left(&self) -> bool {
        Instant::now() < self.deadline
    }

    /// Removes unnecessary steps, in ever smaller chunks (delta debugging: Zeller and Hildebrandt, TSE 2002).
    fn remove_needless_steps(&self, shrunk: &mut ShrunkSequence) -> anyhow::Result<()> {
        let mut part = shrunk.steps.len().div_ceil(2);
        while part > 0 && self.has_time_left() {
            let mut start = 0;
            while start + 1 < shrunk.steps.len() && self.has_time_left() {
                let end = (start + part).min(shrunk.steps.len() - 1);
                let fewer = [&shrunk.steps[..start], &shrunk.steps[end..]].concat();
                match self.difference(&fewer)? {
                    Some(difference) => *shrunk = ShrunkSequence { steps: fewer, difference },
                    None => start = end,
                }
            }
            part /= 2;
        }
        Ok(())
    }

    /// Shortens the last packet, and zeroes all bytes that do not affect the difference.
    fn simplify_packet(&self, shrunk: &mut ShrunkSequence) -> anyhow::Result<()> {
        let with = |shrunk: &mut ShrunkSequence, frame: Vec<u8>| -> anyhow::Result<()> {
            let mut steps = shrunk.steps.clone();
            *steps.last_mut().expect("a packet at the end") = Step::Packet(frame);
            if let Some(difference) = self.difference(&steps)? {
                *shrunk = ShrunkSequence { steps, difference };
            }
            Ok(())
        };
        let last = |shrunk: &ShrunkSequence| match shrunk.steps.last() {
            Some(Step::Packet(frame)) => frame.clone(),
            _ => Vec::new(),
        };
        for part in [256, 64, 16, 4, 1] {
            let frame = last(shrunk);
            if frame.len() > MIN_FRAME_BYTES + part && self.has_time_left() {
                with(shrunk, frame[..frame.len() - part].to_vec())?;
            }
        }
        let mut at = 0;
        while at < last(shrunk).len() && self.has_time_left() {
            let mut frame = last(shrunk);
            let end = (at + 2).min(frame.len());
            if frame[at..end].iter().any(|byte| *byte != 0) {
                frame[at..end].fill(0);
                with(shrunk, frame)?;
            }
            at = end;
        }
        Ok(())
    }
}

/// Shrinks the steps of an epoch whose packet number `packets` shows a difference. Returns `None` if the difference
/// cannot be reproduced.
pub fn shrink(seed: u64, packets: u64) -> anyhow::Result<Option<ShrunkSequence>> {
    let (setup, mut steps) = Epoch::steps(seed, packets)?;
    let shrinker = Shrinker { setup, deadline: Instant::now() + TIMEOUT };
    if shrinker.difference(&steps)?.is_none() {
        return Ok(None);
    }
    let earliest = shrinker.shortest_failing_prefix(&steps)?;
    steps.truncate(earliest);
    let Some(difference) = shrinker.difference(&steps)? else { return Ok(None) };
    let mut shrunk = ShrunkSequence { steps, difference };
    // Most differences need no earlier packet.
    let last = shrunk.steps.len() - 1;
    let alone = shrunk.steps.iter().enumerate().filter(|(at, step)| *at == last || matches!(step, Step::Change(_)));
    let alone: Vec<Step> = alone.map(|(_, step)| step.clone()).collect();
    if let Some(difference) = shrinker.difference(&alone)? {
        shrunk = ShrunkSequence { steps: alone, difference };
    }
    shrinker.remove_needless_steps(&mut shrunk)?;
    shrinker.simplify_packet(&mut shrunk)?;
    Ok(Some(shrunk))
}
