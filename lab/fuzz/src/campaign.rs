//! Fuzzing campaign, which runs many epochs on several threads until a limit or a difference from the reference model.

use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use coreward_intf as intf;
use coreward_model::rss::seeded_rng;
use rand::Rng as _;

use crate::fuzz_epoch::{self, FuzzEpoch};
use crate::state_change::ModelDifference;

/// Limit at which a fuzz campaign ends, unless it finds a difference between program and model earlier.
#[derive(Debug, Clone, Copy)]
pub enum FuzzCampaignLimit {
    MaxPacketCount(u64),
    /// Time since the start of the campaign. When it is over, epochs in progress also stop.
    MaxDuration(Duration),
}

#[derive(Debug, Clone, Copy)]
pub struct FuzzCampaign {
    /// Seed of the campaign, from which the seeds of all epochs are derived. They do not depend on the number of
    /// threads.
    pub seed: u64,
    pub first_epoch_number: u64,
    pub limit: FuzzCampaignLimit,
    /// Number of threads, each of which tests its own load balancer.
    pub thread_count: usize,
}

/// Difference between the BPF program and its reference model, with the epoch in which it was found.
#[derive(Debug)]
pub struct FuzzEpochFailure {
    pub epoch_number: u64,
    /// Number of packets in the epoch up to the one that shows the difference.
    pub packets_until_failure: u64,
    pub difference: ModelDifference,
}

#[derive(Debug)]
pub struct FuzzCampaignSummary {
    pub packet_count: u64,
    pub epoch_count: u64,
    pub elapsed: Duration,
    /// Number of packets with each outcome, indexed by the value of `enum lb_counter`.
    pub packets_by_outcome: Vec<u64>,
    pub failure: Option<FuzzEpochFailure>,
}

impl FuzzCampaign {
    pub fn epoch_seed(&self, epoch_number: u64) -> u64 {
        seeded_rng(self.seed, epoch_number).next_u64()
    }

    /// Runs all epochs of the campaign. After each epoch, calls `progress` with the total number of packets so far.
    pub fn run_campaign(&self, progress: impl Fn(u64) + Sync) -> anyhow::Result<FuzzCampaignSummary> {
        let start = Instant::now();
        let (next_epoch, has_ended) = (AtomicU64::new(0), AtomicBool::new(false));
        let summary = Mutex::new(FuzzCampaignSummary {
            packet_count: 0,
            epoch_count: 0,
            elapsed: Duration::ZERO,
            packets_by_outcome: vec![0; intf::LB_COUNTER_COUNT as usize],
            failure: None,
        });
        let run_epochs = || -> anyhow::Result<()> {
            while !has_ended.load(Ordering::Relaxed) {
                let epoch_offset = next_epoch.fetch_add(1, Ordering::Relaxed);
                let Some(packet_limit) = self.epoch_packet_count(epoch_offset, start) else { break };
                let mut packets_by_outcome = vec![0; intf::LB_COUNTER_COUNT as usize];
                let (compared_packets, mismatch) =
                    self.run_epoch(epoch_offset, packet_limit, start, &has_ended, &mut packets_by_outcome)?;
                let mut summary = summary.lock().expect("no thread panicked");
                summary.packet_count += compared_packets;
                summary.epoch_count += 1;
                summary.packets_by_outcome.iter_mut().zip(&packets_by_outcome).for_each(|(sum, count)| *sum += count);
                progress(summary.packet_count);
                if let Some(mismatch) = mismatch {
                    has_ended.store(true, Ordering::Relaxed);
                    let epoch_number = self.first_epoch_number + epoch_offset;
                    let failure = FuzzEpochFailure {
                        epoch_number,
                        packets_until_failure: mismatch.processed_packet_count,
                        difference: mismatch.difference,
                    };
                    summary.failure.get_or_insert(failure);
                }
            }
            Ok(())
        };
        std::thread::scope(|scope| {
            let threads: Vec<_> = (0..self.thread_count).map(|_| scope.spawn(run_epochs)).collect();
            threads.into_iter().try_for_each(|thread| thread.join().expect("no thread panicked"))
        })?;
        let mut summary = summary.into_inner().expect("no thread panicked");
        summary.elapsed = start.elapsed();
        Ok(summary)
    }

    /// Returns the number of packets in epoch `epoch_offset` of this campaign, or `None` when the campaign ends before
    /// that epoch.
    fn epoch_packet_count(&self, epoch_offset: u64, start: Instant) -> Option<u64> {
        match self.limit {
            FuzzCampaignLimit::MaxPacketCount(packet_total) => {
                let packets_before_epoch = epoch_offset * fuzz_epoch::PACKETS_PER_EPOCH;
                (packets_before_epoch < packet_total)
                    .then(|| fuzz_epoch::PACKETS_PER_EPOCH.min(packet_total - packets_before_epoch))
            }
            FuzzCampaignLimit::MaxDuration(max_duration) => {
                (start.elapsed() < max_duration).then_some(fuzz_epoch::PACKETS_PER_EPOCH)
            }
        }
    }

    /// Runs an epoch in parts, so that the time limit can end it. Returns the number of processed packets, and the
    /// difference if one was found.
    fn run_epoch(
        &self,
        epoch_offset: u64,
        packet_limit: u64,
        start: Instant,
        has_ended: &AtomicBool,
        counts_by_outcome: &mut [u64],
    ) -> anyhow::Result<(u64, Option<fuzz_epoch::ModelMismatch>)> {
        const PACKETS_PER_LIMIT_CHECK: u64 = 8192;
        let mut epoch = FuzzEpoch::new(self.epoch_seed(self.first_epoch_number + epoch_offset), true)?;
        let mut compared_packet_count = 0;
        while compared_packet_count < packet_limit && !has_ended.load(Ordering::Relaxed) {
            compared_packet_count = packet_limit.min(compared_packet_count + PACKETS_PER_LIMIT_CHECK);
            let mismatch = epoch.run_until_packet_number(compared_packet_count, |outcome| {
                counts_by_outcome[outcome.counter as usize] += 1
            })?;
            if let Some(mismatch) = mismatch {
                return Ok((mismatch.processed_packet_count, Some(mismatch)));
            }
            if matches!(self.limit, FuzzCampaignLimit::MaxDuration(max_duration) if start.elapsed() >= max_duration) {
                break;
            }
        }
        Ok((compared_packet_count, epoch.compare_large_tables()?))
    }
}
