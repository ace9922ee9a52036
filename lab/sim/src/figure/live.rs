//! Live figures (`NAME-live`), which are measured on this machine instead of simulated.
//!
//! This crate produces the pages, pictures and verdicts. The crates that measure (bench, testbed) depend on it, so the
//! command passes their measurements to it as a list of [`LiveFigure`]. To add a live figure:
//!
//! 1. Write `lab/scenarios/live/NAME.toml`. It is like every other scenario, but has `[live]` in place of `[rpc]` and
//!    the like. Its `seeds` is the number of runs, and `modelled` states what is measured and how. A new measure is a
//!    new variant of [`FigureMetric`](super::axes::FigureMetric). If `[rpc]` or `[path]` is present next to `[live]`,
//!    series may be `simulated = true`. The simulator then produces these series from the same parameters, and pictures
//!    show both.
//! 2. Write a function `fn(&FigureScenario, ProgressCallback) -> anyhow::Result<Vec<LiveFigureSample>>` in the crate
//!    that measures. If rights are missing, its error names them in one sentence.
//! 3. Add an entry to `lab/coreward-lab/src/live.rs`, with the scenario by `include_str!`.
//!
//! A live figure is only produced when it is requested by name. `--all` leaves it out, because it needs root and its
//! bytes differ from run to run. Its files, page and claims are like those of other figures.

use std::collections::HashMap;

use anyhow::Context as _;

use super::embedded::EmbeddedScenario;
use super::figure_run::{self, SeedValue, build_table_from_values};
use super::scenario::{FigurePanel, FigureScenario};
use super::table::FigureTable;

/// Callback that receives the progress of a measurement: the number of finished steps and the number of all steps.
pub type ProgressCallback<'a> = &'a (dyn Fn(usize, usize) + Sync);

#[derive(Debug, Clone, Copy)]
pub struct LiveFigure {
    /// Name and scenario of the figure. The scenario has a `[live]` section.
    pub embedded_scenario: EmbeddedScenario,
    /// Function that measures all panels of the scenario, in as many runs as the scenario has seeds. It receives the
    /// scenario without its simulated series.
    pub measure: fn(&FigureScenario, ProgressCallback<'_>) -> anyhow::Result<Vec<LiveFigureSample>>,
    /// Function that another thread calls at SIGINT and SIGTERM. It makes `measure` clean up and fail soon. If it is
    /// absent, a signal ends the process at once.
    pub interrupt_measurement: Option<fn()>,
}

/// Value that one run measured at one point of a curve.
#[derive(Debug, Clone, PartialEq)]
pub struct LiveFigureSample {
    pub panel_title: String,
    pub series_label: String,
    /// Value of the swept parameter, or the time, in the unit of the scenario's `x.values`.
    pub x: f64,
    /// Number of the run, counted from 1.
    pub run_number: u64,
    /// Measured value, in the unit of the panel's metric.
    pub y: f64,
}

impl LiveFigure {
    pub fn find_by_name<'a>(live_figures: &'a [LiveFigure], name: &str) -> Option<&'a LiveFigure> {
        live_figures.iter().find(|live_figure| live_figure.embedded_scenario.name == name)
    }

    /// Measures the figure, simulates its simulated series, and returns the table with both.
    pub fn measure_table(
        &self,
        scenario: &FigureScenario,
        report_progress: ProgressCallback<'_>,
    ) -> anyhow::Result<FigureTable> {
        let measured_scenario =
            FigureScenario { live: scenario.live.clone(), ..scenario.filter_series_by_simulated(false) };
        let samples = match measured_scenario.series[..] {
            [] => Vec::new(),
            _ => (self.measure)(&measured_scenario, report_progress).with_context(|| self.embedded_scenario.name)?,
        };
        let mut values_by_curve: HashMap<(usize, usize), Vec<SeedValue>> = HashMap::new();
        for sample in &samples {
            let curve_indices = find_curve_indices(scenario, sample).with_context(|| {
                let LiveFigureSample { panel_title, series_label, x, run_number, .. } = sample;
                let name = self.embedded_scenario.name;
                format!("{name}: not in the scenario: panel {panel_title:?}, {series_label:?}, x {x}, run {run_number}")
            })?;
            let x = sample.x * x_display_scale(&scenario.panel[curve_indices.0]);
            values_by_curve.entry(curve_indices).or_default().push(SeedValue {
                x,
                seed: sample.run_number,
                y: sample.y,
            });
        }
        let mut table = build_table_from_values(scenario, values_by_curve);
        let simulated_scenario = scenario.filter_series_by_simulated(true);
        if !simulated_scenario.series.is_empty() {
            insert_simulated_curves(&mut table, figure_run::simulate_scenario(&simulated_scenario, &|_, _| {})?);
        }
        Ok(table)
    }
}

fn insert_simulated_curves(table: &mut FigureTable, simulated_table: FigureTable) {
    for simulated_panel in simulated_table.panels {
        let panel = table.panels.iter_mut().find(|panel| panel.title == simulated_panel.title);
        let curves = panel.map_or(&mut [][..], |panel| &mut panel.curves[..]);
        for curve in simulated_panel.curves {
            if let Some(measured_curve) = curves.iter_mut().find(|place| place.label == curve.label) {
                measured_curve.cells = curve.cells;
            }
        }
    }
}

fn find_curve_indices(scenario: &FigureScenario, sample: &LiveFigureSample) -> Option<(usize, usize)> {
    let panel_index = scenario.panel.iter().position(|panel| *panel.title.get_ref() == sample.panel_title)?;
    let sampled_series = scenario
        .panel_series(&scenario.panel[panel_index])
        .find(|series| *series.label.get_ref() == sample.series_label)?;
    let series_index = scenario.series.iter().position(|series| std::ptr::eq(series, sampled_series))?;
    (1..=*scenario.seeds.get_ref()).contains(&sample.run_number).then_some((panel_index, series_index))
}

fn x_display_scale(panel: &FigurePanel) -> f64 {
    panel.x.as_ref().map_or(1.0, |sweep| sweep.scale)
}

/// Describes this machine by its kernel version, number of CPUs and processor model, for the figure's page.
pub fn describe_machine() -> String {
    let read_or_empty = |path: &str| std::fs::read_to_string(path).unwrap_or_default();
    let kernel_release = read_or_empty("/proc/sys/kernel/osrelease");
    let cpuinfo = read_or_empty("/proc/cpuinfo");
    let model_line = cpuinfo.lines().find_map(|line| line.strip_prefix("model name")?.split_once(": "));
    let cpu_model = model_line.map_or_else(|| std::env::consts::ARCH.to_owned(), |(_, model)| model.to_owned());
    let cpu_count = std::thread::available_parallelism().map_or(1, usize::from);
    format!("Linux {}, {cpu_count} CPUs ({cpu_model})", kernel_release.trim())
}
