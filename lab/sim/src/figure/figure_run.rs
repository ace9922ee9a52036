//! Runs all simulations of a scenario on all CPUs and builds its table.

use std::collections::HashMap;

use anyhow::Context;
use rayon::prelude::*;

use super::figure_run_plan::{FigureRunPlan, PlotPoint};
use super::scenario::FigureScenario;
use super::simulation_job::SimulationJobOutcome;
use super::table::{CurveCell, FigureCurve, FigureTable, PanelTable};
use crate::seed_summary::SeedSummary;

/// Runs all simulations of `scenario` and returns the figure's table. `report_progress` receives the number of finished
/// runs and of all runs. Fails when a simulation fails.
///
/// The table does not depend on the number of threads, because runs are independent and ordered.
pub fn simulate_scenario(
    scenario: &FigureScenario,
    report_progress: &(impl Fn(usize, usize) + Sync),
) -> anyhow::Result<FigureTable> {
    let plan = scenario.plan_runs().map_err(|run_plan_error| anyhow::anyhow!("{}", run_plan_error.cause))?;
    let job_count = plan.jobs.len();
    let finished_count = std::sync::atomic::AtomicUsize::new(0);
    report_progress(0, job_count);
    let outcomes: anyhow::Result<Vec<SimulationJobOutcome>> = plan
        .jobs
        .par_iter()
        .with_max_len(1)
        .map(|job| {
            let outcome = job.run()?;
            report_progress(finished_count.fetch_add(1, std::sync::atomic::Ordering::Relaxed) + 1, job_count);
            Ok(outcome)
        })
        .collect();
    let outcomes = outcomes.with_context(|| format!("{} of {}", scenario.figure, scenario.paper))?;
    Ok(build_table(scenario, &plan, &outcomes))
}

fn build_table(scenario: &FigureScenario, plan: &FigureRunPlan, outcomes: &[SimulationJobOutcome]) -> FigureTable {
    let mut values_by_curve: HashMap<(usize, usize), Vec<SeedValue>> = HashMap::new();
    for plot_point in &plan.plot_points {
        let x_scale = scenario.panel[plot_point.panel_index].x.as_ref().map_or(1.0, |sweep| sweep.scale);
        let values_of_curve = values_by_curve.entry((plot_point.panel_index, plot_point.series_index)).or_default();
        values_of_curve.extend(values_of_plot_point(plot_point, x_scale, &outcomes[plot_point.job_index]));
    }
    build_table_from_values(scenario, values_by_curve)
}

/// Value that one seed or run yields at one x of a curve.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct SeedValue {
    /// Value of x as shown on the horizontal axis.
    pub x: f64,
    /// Number of the seed (or of the run, in a live figure), counted from 1.
    pub seed: u64,
    /// Simulated or measured value, not yet scaled for display.
    pub y: f64,
}

/// Builds the figure's table from `values_by_curve`, whose keys are the indices of panel and series.
pub fn build_table_from_values(
    scenario: &FigureScenario,
    mut values_by_curve: HashMap<(usize, usize), Vec<SeedValue>>,
) -> FigureTable {
    let seed_count = *scenario.seeds.get_ref();
    let panels = scenario.panel.iter().enumerate().map(|(panel_index, panel)| {
        let curves = scenario.panel_series(panel).map(|series| {
            let series_index = scenario.series.iter().position(|other| std::ptr::eq(other, series)).unwrap_or(0);
            let label = series.label.get_ref().clone();
            let published = scenario.published_points(panel.title.get_ref(), &label);
            let curve_values = values_by_curve.remove(&(panel_index, series_index)).unwrap_or_default();
            FigureCurve { cells: build_cells(curve_values, seed_count, panel.y.scale), label, published }
        });
        PanelTable { title: panel.title.get_ref().clone(), curves: curves.collect() }
    });
    FigureTable { seeds: seed_count, panels: panels.collect() }
}

fn values_of_plot_point(plot_point: &PlotPoint, x_scale: f64, outcome: &SimulationJobOutcome) -> Vec<SeedValue> {
    let PlotPoint { x, seed, is_time_series, .. } = *plot_point;
    if is_time_series {
        let points = outcome.time_series(&plot_point.query).unwrap_or_default();
        return points.into_iter().map(|(x, y)| SeedValue { x: x * x_scale, seed, y }).collect();
    }
    outcome.select_value(&plot_point.query).map(|y| SeedValue { x, seed, y }).into_iter().collect()
}

/// Groups values into one cell per x. Omits an x that lacks the value of a seed, because its median would be biased.
fn build_cells(mut values: Vec<SeedValue>, seed_count: u64, y_scale: f64) -> Vec<CurveCell> {
    values.sort_by(|a, b| a.x.total_cmp(&b.x).then(a.seed.cmp(&b.seed)));
    let complete_groups = values.chunk_by(|a, b| a.x == b.x).filter(|group| group.len() as u64 == seed_count);
    let build_cell = |group: &[SeedValue]| {
        let seeds: Vec<f64> = group.iter().map(|value| value.y * y_scale).collect();
        Some(CurveCell { x: group[0].x, spread: SeedSummary::from_values(&seeds)?, seeds })
    };
    complete_groups.filter_map(build_cell).collect()
}
