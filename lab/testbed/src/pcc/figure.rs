//! `coreward-lab figure cheetah-9-live` runs every method for the figure's panels.

use anyhow::{Context as _, anyhow};
use coreward_sim::figure::axes::FigureMetric;
use coreward_sim::figure::live::{LiveFigureSample, ProgressCallback};
use coreward_sim::figure::scenario::{FigurePanel, FigureScenario};

use super::method::PccMethod;
use super::run::PccRun;
use super::timeline;
use crate::interrupt_flag;
use crate::stream_connections::client::StreamWorkload;

/// Interrupts the measurement that is running at present.
pub fn interrupt_measurement() {
    interrupt_flag::request_interruption();
}

/// Measures every series of `scenario` with every seed. The label of a series must be the name of a method. Fails when
/// there is no such method, when a panel's metric is not supported, or when a run fails.
pub fn measure_pcc_figure(
    scenario: &FigureScenario,
    progress: ProgressCallback<'_>,
) -> anyhow::Result<Vec<LiveFigureSample>> {
    let methods: Vec<PccMethod> = scenario
        .series
        .iter()
        .map(|series| PccMethod::parse(series.label.get_ref()).map_err(|error| anyhow!(error)))
        .collect::<anyhow::Result<_>>()?;
    let seed_count = *scenario.seeds.get_ref();
    let stream_workload = StreamWorkload::default();
    let total_seconds =
        methods.len() * seed_count as usize * (stream_workload.warm_up_seconds + stream_workload.seconds) as usize;
    let elapsed_seconds = std::cell::Cell::new(0);
    let report_progress = || {
        elapsed_seconds.set(elapsed_seconds.get() + 1);
        progress(elapsed_seconds.get(), total_seconds);
    };
    let mut samples = Vec::new();
    // Sort by seed, so that disturbances of the machine affect all methods alike.
    for seed in 1..=seed_count {
        for method in &methods {
            let pcc_run =
                PccRun::measure_run(*method, &StreamWorkload { seed, ..stream_workload.clone() }, &report_progress)?;
            eprintln!("{}", pcc_run.summary_line());
            for panel in &scenario.panel {
                let is_in_panel = scenario.panel_series(panel).any(|series| series.label.get_ref() == method.name);
                if is_in_panel {
                    let points = compute_panel_points(panel, &pcc_run)?;
                    samples.extend(points.into_iter().map(|(x, y)| build_sample(panel, &pcc_run, x, y)));
                }
            }
        }
    }
    Ok(samples)
}

fn build_sample(panel: &FigurePanel, run: &PccRun, x: f64, y: f64) -> LiveFigureSample {
    LiveFigureSample {
        panel_title: panel.title.get_ref().clone(),
        series_label: run.method.to_owned(),
        x,
        run_number: run.seed,
        y,
    }
}

/// Returns the points (x, y) that a panel shows for a run. A point for one second of the run has the second's end as x.
fn compute_panel_points(panel: &FigurePanel, run: &PccRun) -> anyhow::Result<Vec<(f64, f64)>> {
    let ends_of_seconds = (1..).map(f64::from);
    let seconds = run.seconds.iter();
    match (*panel.measure.get_ref(), &panel.x) {
        (FigureMetric::BrokenPct, Some(_)) => {
            Ok(ends_of_seconds.zip(seconds.map(|second| second.broken_connection_pct())).collect())
        }
        (FigureMetric::BrokenPct, None) => Ok(vec![(0.0, run.total_counts().broken_connection_pct())]),
        (FigureMetric::CompletedPerSecond, Some(_)) => {
            Ok(ends_of_seconds.zip(seconds.map(|second| second.completed as f64)).collect())
        }
        (FigureMetric::PoolServers, Some(_)) => Ok(ends_of_seconds
            .zip((0..).zip(seconds).map(|(second, _)| f64::from(timeline::server_count_after(second))))
            .collect()),
        (other, _) => Err(anyhow!("{other:?} is not measured")).context(panel.title.get_ref().clone()),
    }
}
