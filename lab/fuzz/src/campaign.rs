//! Campaign: many epochs on several threads, until a limit or the first difference from the reference model.

use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use coreward_intf as intf;
use coreward_model::rss::seeded_rng;
use rand::Rng as _;

use crate::change::Difference;
use crate::epoch::{self, Epoch};

/// Condition on which a campaign ends, unless it finds a difference before.
#[derive(Debug, Clone, Copy)]
pub enum RunLimit {
    Packets(u64),
    /// Duration of the campaign, after which running epochs also end.
    Elapsed(Duration),
}

#[derive(Debug, Clone, Copy)]
pub struct Campaign {
    /// Seed from which the seeds of all epochs are derived, whatever the number of threads.
    pub seed: u64,
    pub first_epoch: u64,
    pub limit: RunLimit,
    /// Number of threads, each of which tests its own load balancer.
    pub threads: usize,
}

/// Difference between BPF program and reference model, and the epoch in which it was found.
#[derive(Debug)]
pub struct Failure {
    pub epoch: u64,
    /// Number of packets from the start of the epoch up to the one that shows the difference.
    pub packets: u64,
    pub difference: Difference,
}

/// Counts and result of a finished campaign.
#[derive(Debug)]
pub struct Summary {
    pub packets: u64,
    pub epochs: u64,
    /// Duration of the whole campaign.
    pub elapsed: Duration,
    /// Number of packets by their outcome, indexed by `enum lb_counter`.
    pub outcomes: Vec<u64>,
    /// First difference that was found, if any.
    pub failure: Option<Failure>,
}

impl Campaign {
    /// Returns the seed of the epoch with this number.
    pub fn epoch_seed(&self, number: u64) -> u64 {
        seeded_rng(self.seed, number).next_u64()
    }

    /// Runs all epochs of the campaign. After each one, calls `progress` with the number of packets so far.
    pub fn run(&self, progress: impl Fn(u64) + Sync) -> anyhow::Result<Summary> {
        let start = Instant::now();
        let (next, ended) = (AtomicU64::new(0), AtomicBool::new(false));
        let summary = Mutex::new(Summary {
            packets: 0,
            epochs: 0,
            elapsed: Duration::ZERO,
            outcomes: vec![0; intf::LB_COUNTER_COUNT as usize],
            failure: None,
        });
        let work = || -> anyhow::Result<()> {
            while !ended.load(Ordering::Relaxed) {
                let number = next.fetch_add(1, Ordering::Relaxed);
                let Some(packets) = self.packets_of(number, start) else { break };
                let mut outcomes = vec![0; intf::LB_COUNTER_COUNT as usize];
                let (given, found) = self.run_epoch(number, packets, start, &ended, &mut outcomes)?;
                let mut summary = summary.lock().expect("no thread panicked");
                summary.packets += given;
                summary.epochs += 1;
                summary.outcomes.iter_mut().zip(&outcomes).for_each(|(sum, count)| *sum += count);
                progress(summary.packets);
                if let Some(found) = found {
                    ended.store(true, Ordering::Relaxed);
                    let epoch = self.first_epoch + number;
                    let failure = Failure { epoch, packets: found.packets, difference: found.difference };
                    summary.failure.get_or_insert(failure);
                }
            }
            Ok(())
        };
        std::thread::scope(|scope| {
            let threads: Vec<_> = (0..self.threads).map(|_| scope.spawn(work)).collect();
            threads.into_iter().try_for_each(|thread| thread.join().expect("no thread panicked"))
        })?;
        let mut summary = summary.into_inner().expect("no thread panicked");
        summary.elapsed = start.elapsed();
        Ok(summary)
    }

    /// Returns the number of packets of an epoch in this campaign; `None` when the campaign ends before that epoch.
    fn packets_of(&self, number: u64, start: Instant) -> Option<u64> {
        match self.limit {
            RunLimit::Packets(total) => {
                let before = number * epoch::PACKET_COUNT;
                (before < total).then(|| epoch::PACKET_COUNT.min(total - before))
            }
            RunLimit::Elapsed(time) => (start.elapsed() < time).then_some(epoch::PACKET_COUNT),
        }
    }

    /// Runs an epoch in parts, so that the time limit can end it. Returns the number of packets and the difference.
    fn run_epoch(
        &self,
        number: u64,
        packets: u64,
        start: Instant,
        ended: &AtomicBool,
        outcomes: &mut [u64],
    ) -> anyhow::Result<(u64, Option<epoch::Mismatch>)> {
        const PART: u64 = 8192;
        let mut epoch = Epoch::new(self.epoch_seed(self.first_epoch + number), true)?;
        let mut given = 0;
        while given < packets && !ended.load(Ordering::Relaxed) {
            given = packets.min(given + PART);
            let found = epoch.run(given, |outcome| outcomes[outcome.counter as usize] += 1)?;
            if let Some(found) = found {
                return Ok((found.packets, Some(found)));
            }
            if matches!(self.limit, RunLimit::Elapsed(time) if start.elapsed() >= time) {
                break;
            }
        }
        Ok((given, epoch.compare_large_tables()?))
    }
}
