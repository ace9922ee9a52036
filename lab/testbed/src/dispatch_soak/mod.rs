//! `coreward-lab testbed dispatch-soak` runs `coreward dispatch` under load and faults. Workers are killed, stopped and
//! restarted, the dispatch is detached and attached, and spoofed responses arrive. At the end the dispatch's request
//! counters (its ledger) must be exact, and each lost request must have been queued or dropped by the kernel.
//!
//! A run consists of segments. In each one `coreward-lab load` sends continuously while [`fault_injector`] runs. One
//! second after the last request [`counter_audit`] compares the ledger with the kernel's counters. In every second
//! segment the dispatch is also detached and attached, and the server restarted, which resets the ledger.

pub mod counter_audit;
pub mod fault_injector;
pub mod response_spoofer;
pub mod test_env;

use std::time::{Duration, Instant};

use anyhow::{Context as _, ensure};
use coreward_model::rss::seeded_rng;
use rand_xoshiro::Xoshiro256PlusPlus;
use serde::Serialize;

use crate::process::DEFAULT_WAIT_TIMEOUT;
use crate::{instance, interrupt_flag};
use counter_audit::{RequestCounterReading, SoakSegment};
use fault_injector::{FaultCounts, FaultInjector};
use test_env::SoakTestEnv;

/// Number of the [`seeded_rng`] stream from which the faults are drawn.
const RNG_STREAM_FAULTS: u64 = 0x6469_7301;
const SOAK_SEGMENT_DURATION: Duration = Duration::from_secs(50);
/// Minimum time between the last request and the comparison of the counters. Late responses have arrived by then.
const MIN_SETTLE_TIME: Duration = Duration::from_secs(1);
/// Minimum duration of a segment, long enough for some faults.
const MIN_SOAK_SEGMENT_DURATION: Duration = Duration::from_secs(4);

/// Options of `coreward-lab testbed dispatch-soak`.
#[derive(Debug, Clone, Copy, clap::Args)]
pub struct DispatchSoakArgs {
    /// Duration of the load (s)
    #[arg(long, default_value_t = 300, value_parser = clap::value_parser!(u32).range(8..=86_400))]
    pub seconds: u32,
    /// Seed of the faults
    #[arg(long, default_value_t = 1)]
    pub seed: u64,
    /// Time after the last request within which all counters must agree (ms); the first comparison is after 1,000 ms
    #[arg(long, default_value_t = 1_000, value_parser = clap::value_parser!(u32).range(1_000..=60_000))]
    pub settle_ms: u32,
}

/// Results of a run of the soak test.
#[derive(Debug, Serialize)]
pub struct DispatchSoakOutcome {
    pub segments: Vec<SoakSegment>,
    pub fault_counts: FaultCounts,
    /// Number of requests and other datagrams that were sent to the service.
    pub sent_datagrams: u64,
    /// Number of requests that the load generator sent.
    pub load_requests: u64,
    /// Number of requests from the load generator that got no response.
    pub load_lost: u64,
    pub violations: Vec<String>,
}

/// Runs the soak test and prints its results. Fails when the setup fails or an invariant is violated.
pub fn main(options: DispatchSoakArgs) -> anyhow::Result<()> {
    interrupt_flag::catch_signals()?;
    let outcome = run_soak_test(&instance::unique_testbed_name("dispatchsoak")?, options)?;
    println!("{}", serde_json::to_string_pretty(&outcome)?);
    ensure!(outcome.violations.is_empty(), "what must hold did not: {}", outcome.violations.join("; "));
    Ok(())
}

/// Runs the soak test in a new testbed named `instance`. Fails when the setup fails, or when a signal interrupts the
/// run. Does not fail for violated invariants, which are part of the outcome.
pub fn run_soak_test(instance: &str, options: DispatchSoakArgs) -> anyhow::Result<DispatchSoakOutcome> {
    let mut env = SoakTestEnv::start(instance)?;
    let mut rng = seeded_rng(options.seed, RNG_STREAM_FAULTS);
    let total_duration = Duration::from_secs(options.seconds.into());
    let segment_count = total_duration.div_duration_f64(SOAK_SEGMENT_DURATION).ceil().max(2.0) as u32;
    let segment_duration = (total_duration / segment_count).max(MIN_SOAK_SEGMENT_DURATION);
    let mut segments = Vec::new();
    let mut total_faults = FaultCounts::default();
    for number in 0..segment_count {
        let (segment, segment_faults) = run_soak_segment(&mut env, &mut rng, number, segment_duration, options)?;
        tracing::info!(event = "segment-finished", number, count = segment_count, "{}", segment.summary_line());
        total_faults.add_counts(&segment_faults);
        segments.push(segment);
    }
    let sum_over_segments = |select_count: fn(&SoakSegment) -> u64| segments.iter().map(select_count).sum();
    Ok(DispatchSoakOutcome {
        sent_datagrams: sum_over_segments(|segment| segment.sent_datagrams),
        load_requests: sum_over_segments(|segment| segment.load_requests),
        load_lost: sum_over_segments(|segment| segment.load_lost),
        violations: segments.iter().flat_map(|segment| segment.violations.iter().cloned()).collect(),
        fault_counts: total_faults,
        segments,
    })
}

/// Runs one segment of the test. Fails when its load, a fault or a reading of the counters fails.
fn run_soak_segment(
    env: &mut SoakTestEnv,
    rng: &mut Xoshiro256PlusPlus,
    number: u32,
    duration: Duration,
    options: DispatchSoakArgs,
) -> anyhow::Result<(SoakSegment, FaultCounts)> {
    let mut fault_injector = FaultInjector::new(env, rng, number % 2 == 1)?;
    let counters_before = RequestCounterReading::read_from_env(fault_injector.env())?;
    let load_process = fault_injector.env().start_load_generator(duration, options.seed.wrapping_add(number.into()))?;
    let faults_end = Instant::now() + duration;
    fault_injector.inject_faults_until(faults_end).with_context(|| format!("segment {number}"))?;
    let fault_counts = fault_injector.resume_workers_and_take_counts()?;
    let settle_deadline = Instant::now() + Duration::from_millis(options.settle_ms.into());
    std::thread::sleep(MIN_SETTLE_TIME);
    let mut settled_counters = RequestCounterReading::read_from_env(env)?;
    while !settled_counters.describe_pending_requests().is_empty() && Instant::now() < settle_deadline {
        std::thread::sleep(Duration::from_millis(100));
        settled_counters = RequestCounterReading::read_from_env(env)?;
    }
    let report = load_process.wait_for_json(*DEFAULT_WAIT_TIMEOUT)?;
    let counters_after = RequestCounterReading::read_from_env(env)?;
    let segment =
        SoakSegment::new(number, &counters_before, &settled_counters, &counters_after, &fault_counts, &report);
    Ok((segment, fault_counts))
}
