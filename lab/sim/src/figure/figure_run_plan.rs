//! Expands a scenario into its distinct runs, one for every combination of panel, series, point and seed.

use std::collections::HashMap;

use super::axes::SweepAxis;
use super::parameters::ScenarioParameterError;
use super::scenario::{FigurePanel, FigureScenario, FigureSeries};
use super::simulation_job::{OutcomeValueQuery, SimulationJob};

/// All runs that a scenario needs, and the places in the figure where their values appear.
#[derive(Debug)]
pub struct FigureRunPlan {
    /// Distinct runs. Points that need equal runs share one, so that it is simulated only once.
    pub jobs: Vec<SimulationJob>,
    /// Places of all values in the figure, ordered by panel, then series, then x, then seed.
    pub plot_points: Vec<PlotPoint>,
}

/// Place of one value in the figure, and the run that yields the value.
#[derive(Debug)]
pub struct PlotPoint {
    pub panel_index: usize,
    pub series_index: usize,
    /// Value of x as shown on the horizontal axis, or 0 if the axis shows the time or the panel has none.
    pub x: f64,
    /// Seed from which the value is computed, counted from 1.
    pub seed: u64,
    /// Index of the run in [`FigureRunPlan::jobs`].
    pub job_index: usize,
    pub query: OutcomeValueQuery,
    /// Whether the run yields a curve over time instead of one value.
    pub is_time_series: bool,
}

/// Error for invalid parameters of a scenario, with the panel and series in which they were found.
#[derive(Debug, PartialEq)]
pub struct FigureRunPlanError {
    pub panel_index: usize,
    pub series_index: usize,
    pub cause: ScenarioParameterError,
}

impl FigureScenario {
    /// Returns the runs that the scenario needs. Fails at the first panel and series with invalid parameters.
    pub fn plan_runs(&self) -> Result<FigureRunPlan, FigureRunPlanError> {
        let mut plan = FigureRunPlan { jobs: Vec::new(), plot_points: Vec::new() };
        // Configurations contain floating-point numbers, which cannot be hashed. Their text is therefore the key.
        let mut job_index_by_text: HashMap<String, usize> = HashMap::new();
        for (panel_index, panel) in self.panel.iter().enumerate() {
            for series in self.panel_series(panel) {
                let series_index = self.series.iter().position(|other| std::ptr::eq(other, series)).unwrap_or(0);
                let run_plan_error = |cause| FigureRunPlanError { panel_index, series_index, cause };
                for (x, swept_parameter) in swept_points(panel) {
                    for seed in 1..=*self.seeds.get_ref() {
                        let Some((job, query)) =
                            self.build_simulation_job(panel, series, swept_parameter, seed).map_err(run_plan_error)?
                        else {
                            continue;
                        };
                        let job_index = *job_index_by_text.entry(format!("{job:?}")).or_insert_with(|| {
                            plan.jobs.push(job);
                            plan.jobs.len() - 1
                        });
                        let is_time_series = matches!(swept_parameter, Some((SweepAxis::Time, _)));
                        let plot_point =
                            PlotPoint { panel_index, series_index, x, seed, job_index, query, is_time_series };
                        plan.plot_points.push(plot_point);
                    }
                }
            }
        }
        Ok(plan)
    }

    fn build_simulation_job(
        &self,
        panel: &FigurePanel,
        series: &FigureSeries,
        swept_parameter: Option<(SweepAxis, f64)>,
        seed: u64,
    ) -> Result<Option<(SimulationJob, OutcomeValueQuery)>, ScenarioParameterError> {
        let metric = *panel.measure.get_ref();
        /// Combines the parameters of the scenario, panel, series and horizontal axis. Later ones in this list override
        /// earlier ones.
        macro_rules! parameters {
            ($kind:ident) => {
                self.$kind.as_ref().map(|common| {
                    let parameters = common.overridden_by(panel.$kind.as_ref()).overridden_by(series.$kind.as_ref());
                    swept_parameter
                        .map_or(Ok(parameters.clone()), |(axis, value)| parameters.with_parameter(axis, value))
                })
            };
        }
        if let Some(rpc) = parameters!(rpc) {
            return rpc?.build_simulation_job(metric, seed);
        }
        if let Some(lb) = parameters!(lb) {
            return lb?.build_simulation_job(metric, seed, *self.seeds.get_ref(), &self.lb_policies());
        }
        if let Some(pcc) = parameters!(pcc) {
            return pcc?.build_simulation_job(metric, seed, *self.seeds.get_ref());
        }
        if let Some(path) = parameters!(path) {
            return path?.build_simulation_job(metric, seed);
        }
        Ok(None)
    }

    /// Returns the distinct load balancing policies of all series. A single run replays the traffic for all of them.
    fn lb_policies(&self) -> Vec<String> {
        let mut policies: Vec<String> = Vec::new();
        for policy in self.series.iter().filter_map(|series| series.lb.as_ref()?.policy.clone()) {
            if !policies.contains(&policy) {
                policies.push(policy);
            }
        }
        policies
    }
}

/// Returns the points of the panel's horizontal axis. Each has the displayed x, and the swept parameter with its value.
fn swept_points(panel: &FigurePanel) -> Vec<(f64, Option<(SweepAxis, f64)>)> {
    match &panel.x {
        None => vec![(0.0, None)],
        Some(sweep) if *sweep.parameter.get_ref() == SweepAxis::Time => vec![(0.0, Some((SweepAxis::Time, 0.0)))],
        Some(sweep) => {
            let parameter = *sweep.parameter.get_ref();
            sweep.values.iter().map(|value| (value * sweep.scale, Some((parameter, *value)))).collect()
        }
    }
}
