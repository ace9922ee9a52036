//! Simulation of the demo's arrival logs under the same policies, for comparison with the live measurement.
//!
//! A live run is one random draw, because the controller draws server ids and the RSS key, which decide which
//! connections share a core. The phases of the agents' reports are random too. The simulator therefore replays the same
//! logs with many draws, the same pool changes and the same windows. Each draw gives a median over the seeds, and the
//! range of these medians is the noise.

use std::sync::atomic::{AtomicUsize, Ordering};

use coreward_model::arrival_log::ArrivalLog;
use coreward_model::policy;
use coreward_model::replay::{ArrivalReplaySettings, ReplayPoolChange, ReplayReportPhase, replay_for_busy_times};
use coreward_model::statistics::median;

use super::load_variances::{BusyTimeSample, MeanLoadVariances, compute_variance_windows};
use super::options::DemoOptions;
use super::seed_summary::MedianAndRange;
use super::timeline::{PoolChangeEvent, PoolChangeTimeline};

/// Number of draws, which are simulations that differ only in their random numbers. If the simulator is correct, the
/// median of the live run is outside the draws' range once in 10 times. Each of the 20 values is then equally likely to
/// be the lowest or the highest.
pub const SIMULATION_DRAW_COUNT: usize = 19;

#[derive(Debug, Clone, PartialEq)]
pub struct SimulatedLoadVariances {
    /// Per-core variance (%). Each draw yields the median over the seeds, and this is the summary over the draws.
    pub core_load_variance_pct: MedianAndRange,
    pub server_load_variance_pct: MedianAndRange,
}

/// Simulates the arrival logs under each policy, on all CPUs. Returns the results in the order of `policies`.
pub fn simulate_policies(
    options: &DemoOptions,
    policies: &[&'static str],
    logs: &[&ArrivalLog],
    timeline: &PoolChangeTimeline,
) -> Vec<SimulatedLoadVariances> {
    let policy_draws: Vec<(&str, usize)> =
        policies.iter().flat_map(|policy| (0..SIMULATION_DRAW_COUNT).map(move |draw| (*policy, draw))).collect();
    let draw_medians = map_in_parallel(&policy_draws, |(policy, draw)| {
        simulate_logs_for_draw(options, policy, *draw as u64 + 1, logs, timeline)
    });
    let summarize_draws = |draws: &[MeanLoadVariances], value: fn(&MeanLoadVariances) -> f64| {
        MedianAndRange::from_values(&draws.iter().map(value).collect::<Vec<_>>())
    };
    let summarize_policy_variances = |draws: &[MeanLoadVariances]| SimulatedLoadVariances {
        core_load_variance_pct: summarize_draws(draws, |draw| draw.core_load_variance_pct),
        server_load_variance_pct: summarize_draws(draws, |draw| draw.server_load_variance_pct),
    };
    draw_medians.chunks(SIMULATION_DRAW_COUNT).map(summarize_policy_variances).collect()
}

/// Simulates one draw, in which all logs are replayed on the same fleet, as in the live run. Returns the medians of the
/// variances over the logs.
fn simulate_logs_for_draw(
    options: &DemoOptions,
    policy: &str,
    draw: u64,
    logs: &[&ArrivalLog],
    timeline: &PoolChangeTimeline,
) -> MeanLoadVariances {
    let mean_variances_of_log = |(log_index, log): (usize, &&ArrivalLog)| {
        let report_phase = ReplayReportPhase::Random;
        let server_count = options.servers + 1;
        let replay_settings = ArrivalReplaySettings {
            server_count,
            cores_per_server: options.cores,
            seed: draw,
            report_phase,
            ..ArrivalReplaySettings::default()
        };
        let pool_changes = plan_pool_changes(options.servers, log_index as u16, timeline);
        let mut policy = policy::create_policy_by_name(policy, draw).expect("the demo has run it");
        let core_busy_ns = replay_for_busy_times(log, replay_settings, &pool_changes, policy.as_mut());
        let samples: Vec<BusyTimeSample> = (0..)
            .zip(&core_busy_ns)
            .map(|(second, busy_ns)| build_busy_time_sample(busy_ns, options.cores, &pool_changes, second))
            .collect();
        MeanLoadVariances::from_windows(&compute_variance_windows(&samples), timeline)
    };
    let log_variances: Vec<MeanLoadVariances> = logs.iter().enumerate().map(mean_variances_of_log).collect();
    let median_over_logs = |value: fn(&MeanLoadVariances) -> f64| {
        median(&log_variances.iter().map(value).collect::<Vec<_>>()).unwrap_or(f64::NAN)
    };
    MeanLoadVariances {
        core_load_variance_pct: median_over_logs(|run| run.core_load_variance_pct),
        server_load_variance_pct: median_over_logs(|run| run.server_load_variance_pct),
    }
}

/// Returns the pool's changes while the arrival log at index `log_index` is replayed. Servers join in a cyclic order,
/// and the server that has been in the pool longest drains.
fn plan_pool_changes(servers: u16, log_index: u16, timeline: &PoolChangeTimeline) -> Vec<ReplayPoolChange> {
    let waiting_server = (servers + log_index) % (servers + 1);
    let mut pool_changes = vec![ReplayPoolChange { time_us: 0, server_index: waiting_server, is_eligible: false }];
    pool_changes.extend(timeline.pool_changes().map(|(second, event)| {
        let (server, eligible) = match event {
            PoolChangeEvent::AddServer => (waiting_server, true),
            PoolChangeEvent::DrainServer => ((waiting_server + 1) % (servers + 1), false),
        };
        ReplayPoolChange { time_us: second * 1_000_000, server_index: server, is_eligible: eligible }
    }));
    pool_changes
}

/// Returns the busy times of all cores in the pool at the start of `second`, before any pool change at that moment.
fn build_busy_time_sample(
    core_busy_ns: &[u64],
    cores: u16,
    changes: &[ReplayPoolChange],
    second: u64,
) -> BusyTimeSample {
    let is_made_before = |change: &&ReplayPoolChange| change.time_us == 0 || change.time_us < second * 1_000_000;
    let is_eligible = |server: u16| {
        changes
            .iter()
            .filter(is_made_before)
            .rfind(|change| change.server_index == server)
            .is_none_or(|change| change.is_eligible)
    };
    let eligible_servers =
        (0..).zip(core_busy_ns.chunks(usize::from(cores))).filter(|(server, _)| is_eligible(*server));
    eligible_servers.map(|(server, busy_ns)| (server + 1, busy_ns.to_vec())).collect()
}

/// Calls `run` for every job, on one thread per CPU. Returns the results in the order of the jobs.
fn map_in_parallel<J: Sync, R: Send>(jobs: &[J], run: impl Fn(&J) -> R + Sync) -> Vec<R> {
    let next_job_index = AtomicUsize::new(0);
    let run_jobs = || {
        let mut thread_results = Vec::new();
        while let Some((index, job)) = jobs.iter().enumerate().nth(next_job_index.fetch_add(1, Ordering::Relaxed)) {
            thread_results.push((index, run(job)));
        }
        thread_results
    };
    let thread_count = std::thread::available_parallelism().map_or(1, usize::from);
    let mut indexed_results: Vec<(usize, R)> = std::thread::scope(|scope| {
        let worker_threads: Vec<_> = (0..thread_count).map(|_| scope.spawn(run_jobs)).collect();
        worker_threads.into_iter().flat_map(|worker| worker.join().expect("a simulation does not panic")).collect()
    });
    indexed_results.sort_by_key(|(index, _)| *index);
    indexed_results.into_iter().map(|(_, result)| result).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn simulated_servers_join_and_drain_as_in_the_live_run() {
        let timeline = PoolChangeTimeline::new(18);
        let build_pool_change = |second: u64, server, eligible| ReplayPoolChange {
            time_us: second * 1_000_000,
            server_index: server,
            is_eligible: eligible,
        };
        assert_eq!(
            plan_pool_changes(4, 0, &timeline),
            [build_pool_change(0, 4, false), build_pool_change(6, 4, true), build_pool_change(12, 0, false)]
        );
        assert_eq!(
            plan_pool_changes(4, 1, &timeline),
            [build_pool_change(0, 0, false), build_pool_change(6, 0, true), build_pool_change(12, 1, false)]
        );
        let core_busy_ns: Vec<u64> = (0..10).collect();
        let servers_in_pool = |second| {
            build_busy_time_sample(&core_busy_ns, 2, &plan_pool_changes(4, 0, &timeline), second)
                .into_keys()
                .collect::<Vec<_>>()
        };
        assert_eq!([servers_in_pool(0), servers_in_pool(6)], [[1, 2, 3, 4], [1, 2, 3, 4]]);
        assert_eq!((servers_in_pool(7), servers_in_pool(13)), (vec![1, 2, 3, 4, 5], vec![2, 3, 4, 5]));
        assert_eq!(build_busy_time_sample(&core_busy_ns, 2, &plan_pool_changes(4, 0, &timeline), 7)[&5], [8, 9]);
    }

    #[test]
    fn parallel_results_are_in_the_order_of_the_jobs() {
        let jobs: Vec<u64> = (0..100).collect();
        assert_eq!(map_in_parallel(&jobs, |job| job * 2), jobs.iter().map(|job| job * 2).collect::<Vec<_>>());
    }
}
