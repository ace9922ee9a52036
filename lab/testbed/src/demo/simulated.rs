//! Simulation of the demo's arrival logs under the same policies, for comparison with the live measurement.
//!
//! A live run is one random draw: the controller draws server ids and the RSS key, which decide which connections share
//! a core. The phases of the agents' reports are random too. The simulator therefore replays the same logs with many
//! draws, the same changes of the pool and the same windows. The compared value is the median over the seeds; its range
//! over the draws is the noise.

use std::sync::atomic::{AtomicUsize, Ordering};

use coreward_model::arrivals::ArrivalLog;
use coreward_model::policy;
use coreward_model::replay::{PoolChange, ReplaySettings, ReportPhase, replay_by_second};
use coreward_model::statistics::median;

use super::options::DemoOptions;
use super::samples::{BusyTimeSample, MeanVariances, windows};
use super::seed_summary::SeedSummary;
use super::timeline::{PoolEvent, Timeline};

/// Number of random draws of the simulation. If the simulator is right, a live median is outside their range once in 10
/// times. Each of the 20 values is the lowest or the highest with equal probability.
pub const SIMULATED_RUN_COUNT: usize = 19;

#[derive(Debug, Clone, PartialEq)]
pub struct SimulatedVariances {
    /// Per-core variance (%) as the median over the seeds, summarized over the draws.
    pub core_variance_pct: SeedSummary,
    pub server_variance_pct: SeedSummary,
}

/// Replays the arrival logs under each policy, on all CPUs. Returns the results in the order of `policies`.
pub fn simulate(
    options: &DemoOptions,
    policies: &[&'static str],
    logs: &[&ArrivalLog],
    timeline: &Timeline,
) -> Vec<SimulatedVariances> {
    let jobs: Vec<(&str, usize)> =
        policies.iter().flat_map(|policy| (0..SIMULATED_RUN_COUNT).map(move |draw| (*policy, draw))).collect();
    let medians = par_map(&jobs, |(policy, draw)| simulate_draw(options, policy, *draw as u64 + 1, logs, timeline));
    let spread = |draws: &[MeanVariances], value: fn(&MeanVariances) -> f64| {
        SeedSummary::of(&draws.iter().map(value).collect::<Vec<_>>())
    };
    let of_policy = |draws: &[MeanVariances]| SimulatedVariances {
        core_variance_pct: spread(draws, |draw| draw.core_variance_pct),
        server_variance_pct: spread(draws, |draw| draw.server_variance_pct),
    };
    medians.chunks(SIMULATED_RUN_COUNT).map(of_policy).collect()
}

/// Replays all logs on the same fleet, as in the live run. Returns the medians of the variances over the logs.
fn simulate_draw(
    options: &DemoOptions,
    policy: &str,
    draw: u64,
    logs: &[&ArrivalLog],
    timeline: &Timeline,
) -> MeanVariances {
    let of_log = |(position, log): (usize, &&ArrivalLog)| {
        let report_phase = ReportPhase::Random;
        let server_count = options.servers + 1;
        let pools = ReplaySettings {
            server_count,
            core_count: options.cores,
            seed: draw,
            report_phase,
            ..ReplaySettings::default()
        };
        let changes = planned_pool_changes(options.servers, position as u16, timeline);
        let mut policy = policy::policy_by_name(policy, draw).expect("the demo has run it");
        let busy_ns = replay_by_second(log, pools, &changes, policy.as_mut());
        let samples: Vec<BusyTimeSample> =
            (0..).zip(&busy_ns).map(|(second, busy_ns)| sample(busy_ns, options.cores, &changes, second)).collect();
        MeanVariances::of(&windows(&samples), timeline)
    };
    let all: Vec<MeanVariances> = logs.iter().enumerate().map(of_log).collect();
    let median_of =
        |value: fn(&MeanVariances) -> f64| median(&all.iter().map(value).collect::<Vec<_>>()).unwrap_or(f64::NAN);
    MeanVariances {
        core_variance_pct: median_of(|run| run.core_variance_pct),
        server_variance_pct: median_of(|run| run.server_variance_pct),
    }
}

/// Returns the changes of the pool during the arrival log of index `position`. Servers join in a cyclic order, and the
/// server that has been in the pool longest drains.
fn planned_pool_changes(servers: u16, position: u16, timeline: &Timeline) -> Vec<PoolChange> {
    let waiting = (servers + position) % (servers + 1);
    let mut changes = vec![PoolChange { at_us: 0, server: waiting, eligible: false }];
    changes.extend(timeline.changes().map(|(second, event)| {
        let (server, eligible) = match event {
            PoolEvent::Join => (waiting, true),
            PoolEvent::Drain => ((waiting + 1) % (servers + 1), false),
        };
        PoolChange { at_us: second * 1_000_000, server, eligible }
    }));
    changes
}

/// Returns the sample at the start of `second`, before any change at that time.
fn sample(busy_ns: &[u64], cores: u16, changes: &[PoolChange], second: u64) -> BusyTimeSample {
    let made = |change: &&PoolChange| change.at_us == 0 || change.at_us < second * 1_000_000;
    let eligible = |server: u16| {
        changes.iter().filter(made).rfind(|change| change.server == server).is_none_or(|change| change.eligible)
    };
    let servers = (0..).zip(busy_ns.chunks(usize::from(cores))).filter(|(server, _)| eligible(*server));
    servers.map(|(server, busy_ns)| (server + 1, busy_ns.to_vec())).collect()
}

/// Calls `run` for every job, on one thread per CPU. Returns the results in the order of the jobs.
fn par_map<J: Sync, R: Send>(jobs: &[J], run: impl Fn(&J) -> R + Sync) -> Vec<R> {
    let next = AtomicUsize::new(0);
    let worker = || {
        let mut done = Vec::new();
        while let Some((index, job)) = jobs.iter().enumerate().nth(next.fetch_add(1, Ordering::Relaxed)) {
            done.push((index, run(job)));
        }
        done
    };
    let threads = std::thread::available_parallelism().map_or(1, usize::from);
    let mut all: Vec<(usize, R)> = std::thread::scope(|scope| {
        let workers: Vec<_> = (0..threads).map(|_| scope.spawn(worker)).collect();
        workers.into_iter().flat_map(|worker| worker.join().expect("a simulation does not panic")).collect()
    });
    all.sort_by_key(|(index, _)| *index);
    all.into_iter().map(|(_, result)| result).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn simulated_servers_join_and_drain_as_live() {
        let timeline = Timeline::new(18);
        let change = |second: u64, server, eligible| PoolChange { at_us: second * 1_000_000, server, eligible };
        assert_eq!(
            planned_pool_changes(4, 0, &timeline),
            [change(0, 4, false), change(6, 4, true), change(12, 0, false)]
        );
        assert_eq!(
            planned_pool_changes(4, 1, &timeline),
            [change(0, 0, false), change(6, 0, true), change(12, 1, false)]
        );
        let busy_ns: Vec<u64> = (0..10).collect();
        let in_pool = |second| {
            sample(&busy_ns, 2, &planned_pool_changes(4, 0, &timeline), second).into_keys().collect::<Vec<_>>()
        };
        assert_eq!([in_pool(0), in_pool(6)], [[1, 2, 3, 4], [1, 2, 3, 4]]);
        assert_eq!((in_pool(7), in_pool(13)), (vec![1, 2, 3, 4, 5], vec![2, 3, 4, 5]));
        assert_eq!(sample(&busy_ns, 2, &planned_pool_changes(4, 0, &timeline), 7)[&5], [8, 9]);
    }

    #[test]
    fn jobs_keep_their_order() {
        let jobs: Vec<u64> = (0..100).collect();
        assert_eq!(par_map(&jobs, |job| job * 2), jobs.iter().map(|job| job * 2).collect::<Vec<_>>());
    }
}
