//! Variances of the load during a run, computed from the cores' busy times.

use std::collections::BTreeMap;

use coreward_model::statistics::{mean, variance_pct};

use crate::load::LoadClientReport;

use super::timeline::PoolChangeTimeline;

/// Busy times of the cores of each server in the pool at one moment, by server number. A core's busy time is counted
/// from the core's start (ns).
pub type BusyTimeSample = BTreeMap<u16, Vec<u64>>;

/// Variances of the servers' and cores' work in one second of a run (see [`variance_pct`]). Only servers that are in
/// the pool for the whole second count.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct LoadVarianceWindow {
    /// Number of this second, counted from the start of the run.
    pub second_number: u64,
    /// Variance, over all servers, of a server's work divided by the mean (%), or `None` if no server did any work.
    pub server_load_variance_pct: Option<f64>,
    /// Variance, over all cores, of a core's work divided by the mean (%), or `None` if no core did any work.
    pub core_load_variance_pct: Option<f64>,
}

/// Results of one seed's run under one policy.
#[derive(Debug, Clone, PartialEq)]
pub struct SeedRunMeasures {
    pub seed: u64,
    pub windows: Vec<LoadVarianceWindow>,
    /// Mean of [`LoadVarianceWindow::server_load_variance_pct`] over the counted windows of one second (%).
    pub server_load_variance_pct: f64,
    /// Mean of [`LoadVarianceWindow::core_load_variance_pct`] over the counted windows of one second (%).
    pub core_load_variance_pct: f64,
    pub load_report: LoadClientReport,
}

impl SeedRunMeasures {
    /// Computes the results from `samples`. One sample was taken at the start of each second, and one at the run's end.
    pub fn new(
        seed: u64,
        samples: &[BusyTimeSample],
        timeline: &PoolChangeTimeline,
        load_report: LoadClientReport,
    ) -> Self {
        let variance_windows = compute_variance_windows(samples);
        let MeanLoadVariances { server_load_variance_pct, core_load_variance_pct } =
            MeanLoadVariances::from_windows(&variance_windows, timeline);
        Self { seed, windows: variance_windows, server_load_variance_pct, core_load_variance_pct, load_report }
    }
}

/// Variances during a run, as means over those windows of one second that are counted.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct MeanLoadVariances {
    /// Mean of [`LoadVarianceWindow::server_load_variance_pct`] (%).
    pub server_load_variance_pct: f64,
    /// Mean of [`LoadVarianceWindow::core_load_variance_pct`] (%).
    pub core_load_variance_pct: f64,
}

impl MeanLoadVariances {
    /// Computes the mean variances over those windows that `timeline` counts.
    pub fn from_windows(windows: &[LoadVarianceWindow], timeline: &PoolChangeTimeline) -> Self {
        let mean_over_counted_windows = |value: fn(&LoadVarianceWindow) -> Option<f64>| {
            let counted_values = windows.iter().filter(|window| timeline.is_second_counted(window.second_number));
            mean(&counted_values.filter_map(value).collect::<Vec<_>>()).unwrap_or(f64::NAN)
        };
        Self {
            server_load_variance_pct: mean_over_counted_windows(|window| window.server_load_variance_pct),
            core_load_variance_pct: mean_over_counted_windows(|window| window.core_load_variance_pct),
        }
    }
}

/// Returns one window with the variances of the work for each pair of consecutive samples.
pub fn compute_variance_windows(samples: &[BusyTimeSample]) -> Vec<LoadVarianceWindow> {
    (0..)
        .zip(samples.windows(2))
        .map(|(second, sample_pair)| compute_variance_window(second, &sample_pair[0], &sample_pair[1]))
        .collect()
}

fn compute_variance_window(
    second: u64,
    sample_before: &BusyTimeSample,
    sample_after: &BusyTimeSample,
) -> LoadVarianceWindow {
    let core_work_ns = |(number, busy_ns_after): (&u16, &Vec<u64>)| -> Option<Vec<f64>> {
        let busy_ns_before = sample_before.get(number)?;
        Some(
            busy_ns_after
                .iter()
                .zip(busy_ns_before)
                .map(|(core_ns_after, core_ns_before)| (core_ns_after - core_ns_before) as f64)
                .collect(),
        )
    };
    let core_work_by_server: Vec<Vec<f64>> = sample_after.iter().filter_map(core_work_ns).collect();
    let server_work: Vec<f64> = core_work_by_server.iter().map(|cores| cores.iter().sum()).collect();
    LoadVarianceWindow {
        second_number: second,
        server_load_variance_pct: variance_pct(&server_work),
        core_load_variance_pct: variance_pct(&core_work_by_server.concat()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn variance_includes_only_servers_in_both_samples() {
        let sample_before = BusyTimeSample::from([(1, vec![10, 10]), (2, vec![0, 0]), (3, vec![5, 5])]);
        let sample_after = BusyTimeSample::from([(1, vec![11, 13]), (2, vec![1, 3]), (4, vec![900, 900])]);
        let window = compute_variance_window(7, &sample_before, &sample_after);
        // The cores served 1, 3, 1 and 3, which is 0.5 or 1.5 times the mean. The servers served 4 and 4.
        assert_eq!(
            window,
            LoadVarianceWindow {
                second_number: 7,
                server_load_variance_pct: Some(0.0),
                core_load_variance_pct: Some(25.0)
            }
        );
    }

    #[test]
    fn windows_after_pool_changes_are_not_counted() {
        let timeline = PoolChangeTimeline::new(18);
        let mut samples = vec![BusyTimeSample::from([(1, vec![0, 0])])];
        for second in 0..18 {
            let last_busy_times = samples[samples.len() - 1][&1].clone();
            let busy_time_growth = if timeline.is_second_counted(second) { [100, 300] } else { [0, 700] };
            samples.push(BusyTimeSample::from([(
                1,
                vec![last_busy_times[0] + busy_time_growth[0], last_busy_times[1] + busy_time_growth[1]],
            )]));
        }
        let measures = SeedRunMeasures::new(1, &samples, &timeline, LoadClientReport::default());
        assert_eq!((measures.core_load_variance_pct, measures.server_load_variance_pct), (25.0, 0.0));
        assert_eq!(measures.windows.len(), 18);
    }
}
