//! Measurements that a scenario needs, their order, and where each value belongs in the figure.

use std::collections::HashMap;

use anyhow::{Context as _, bail};
use coreward_sim::figure::figure_run_plan::{FigureRunPlan, PlotPoint};
use coreward_sim::figure::live::LiveFigureSample;
use coreward_sim::figure::scenario::FigureScenario;
use coreward_sim::figure::simulation_job::SimulationJob;
use coreward_sim::rpc;

/// Returns the runs that the simulator would make for the scenario. Fails when the scenario's parameters are invalid.
pub fn plan_runs(scenario: &FigureScenario) -> anyhow::Result<FigureRunPlan> {
    scenario.plan_runs().map_err(|failure| anyhow::anyhow!("{}", failure.cause))
}

/// Returns the figure samples for all points of a plan. `point_value` returns the y value of a point.
pub fn compute_figure_samples(
    scenario: &FigureScenario,
    plan: &FigureRunPlan,
    point_value: impl Fn(&PlotPoint, &SimulationJob) -> anyhow::Result<f64>,
) -> anyhow::Result<Vec<LiveFigureSample>> {
    let compute_sample = |plot_point: &PlotPoint| {
        let (panel, series) = (&scenario.panel[plot_point.panel_index], &scenario.series[plot_point.series_index]);
        let (panel_title, label) = (panel.title.get_ref().clone(), series.label.get_ref().clone());
        let y = point_value(plot_point, &plan.jobs[plot_point.job_index])
            .with_context(|| format!("panel {panel_title:?}, series {label:?}"))?;
        let x_scale = panel.x.as_ref().map_or(1.0, |sweep| sweep.scale);
        Ok(LiveFigureSample {
            panel_title,
            series_label: label,
            x: plot_point.x / x_scale,
            run_number: plot_point.seed,
            y,
        })
    };
    plan.plot_points.iter().map(compute_sample).collect()
}

/// Returns the map key for the measurement with the parameters in `config`.
pub fn measurement_key(config: &impl std::fmt::Debug) -> String {
    format!("{config:?}")
}

/// Returns the measurement with the parameters in `config`. Fails when `measurements` lacks it.
pub fn find_measurement<'a, T>(
    measurements: &'a HashMap<String, T>,
    config: &impl std::fmt::Debug,
) -> anyhow::Result<&'a T> {
    measurements.get(&measurement_key(config)).with_context(|| format!("not measured: {config:?}"))
}

pub fn differ_only_in_load(a: &rpc::RpcSimulationConfig, b: &rpc::RpcSimulationConfig) -> bool {
    let remove_load =
        |config: &rpc::RpcSimulationConfig| rpc::RpcSimulationConfig { offered_load: 0.0, ..config.clone() };
    remove_load(a) == remove_load(b)
}

/// Returns the highest load at which the 99th percentile (p99) is within `slo`, as `coreward-lab sim capacity` defines
/// it. The points of `curve` are (load, p99). The crossing is interpolated on the logarithm of the p99. Returns 0 when
/// the first point exceeds `slo`, and the last load when no point does. Fails without points.
pub fn max_load_within_slo(mut curve: Vec<(f64, f64)>, slo: f64) -> anyhow::Result<f64> {
    curve.sort_by(|a, b| a.0.total_cmp(&b.0));
    let (Some(first), Some(last)) = (curve.first(), curve.last()) else { bail!("a peak without a curve") };
    if first.1 > slo {
        return Ok(0.0);
    }
    let crossing_segment = curve.windows(2).find(|curve_segment| curve_segment[1].1 > slo);
    Ok(crossing_segment.map_or(last.0, |curve_segment| {
        let (point_below, point_above) = (curve_segment[0], curve_segment[1]);
        point_below.0
            + (point_above.0 - point_below.0) * (slo / point_below.1).ln() / (point_above.1 / point_below.1).ln()
    }))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn max_load_is_where_the_curve_first_crosses_the_slo() {
        let compute_max_load = |curve: &[(f64, f64)]| max_load_within_slo(curve.to_vec(), 10.0).unwrap();
        // On the logarithmic scale 10 is half-way from 1 to 100.
        assert!((compute_max_load(&[(0.4, 100.0), (0.2, 1.0)]) - 0.3).abs() < 1e-12);
        assert_eq!(compute_max_load(&[(0.1, 5.0), (0.2, 10.0), (0.3, 20.0), (0.4, 9.0), (0.5, 30.0)]), 0.2);
        assert_eq!(compute_max_load(&[(0.1, 11.0), (0.2, 9.0)]), 0.0);
        assert_eq!(compute_max_load(&[(0.1, 2.0), (0.9, 9.0)]), 0.9);
    }
}
