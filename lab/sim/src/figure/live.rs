//! Live figures (`NAME-live`), which are measured on this machine instead of simulated.
//!
//! This crate makes pages, pictures and verdicts. The crates that measure (bench, testbed) depend on it, so the command
//! passes their measurements as a list of [`LiveFigure`]. To add a live figure:
//!
//! 1. `lab/scenarios/live/NAME.toml`: as every scenario, with `[live]` in place of `[rpc]` and the like, `seeds` =
//!    runs, `modelled` = what is measured and how. A new measure is a new variant of
//!    [`Metric`](super::axes::Metric). With `[rpc]` or `[path]` next to `[live]` series may be `simulated = true`:
//!    the simulator gives those, with the same parameters, and pictures have both.
//! 2. A function `fn(&Scenario, Progress) -> anyhow::Result<Vec<Sample>>` in the crate that measures. Its error states
//!    missing rights in one sentence.
//! 3. An entry in `lab/coreward-lab/src/live.rs`, with the scenario by `include_str!`.
//!
//! A live figure is only made by name, not by `--all`: it needs root, and its bytes differ from run to run. Its files,
//! page and claims are like those of other figures.

use std::collections::HashMap;

use anyhow::Context as _;

use super::embedded::EmbeddedScenario;
use super::run::{self, SeedValue, build_value_table};
use super::scenario::{Panel, Scenario};
use super::table::FigureTable;

/// Callback for the progress of a measurement, with the numbers of finished and of all steps.
pub type Progress<'a> = &'a (dyn Fn(usize, usize) + Sync);

/// Figure that is measured on this machine.
#[derive(Debug, Clone, Copy)]
pub struct LiveFigure {
    /// Name of the figure, and its scenario, which has a `[live]` section.
    pub embedded_scenario: EmbeddedScenario,
    /// Measures all panels of the scenario, with as many runs as the scenario has seeds. The scenario is passed without
    /// its simulated series.
    pub measure: fn(&Scenario, Progress<'_>) -> anyhow::Result<Vec<Sample>>,
    /// Called from another thread at SIGINT and SIGTERM, to make `measure` clean up and fail soon. Without this
    /// function a signal ends the process.
    pub interrupt: Option<fn()>,
}

/// Measured value of one run at one point of a curve.
#[derive(Debug, Clone, PartialEq)]
pub struct Sample {
    /// Title of the panel.
    pub panel: String,
    pub series: String,
    /// Value of the swept parameter, or time, in the unit of the scenario's `x.values`.
    pub x: f64,
    /// Number of the run: 1, 2, ...
    pub run: u64,
    /// Measured value, in the unit of the panel's metric.
    pub y: f64,
}

impl LiveFigure {
    pub fn find_by_name<'a>(live: &'a [LiveFigure], name: &str) -> Option<&'a LiveFigure> {
        live.iter().find(|live| live.embedded_scenario.name == name)
    }

    /// Measures the figure and returns its table.
    pub fn measure_table(&self, scenario: &Scenario, progress: Progress<'_>) -> anyhow::Result<FigureTable> {
        let measured = Scenario { live: scenario.live.clone(), ..scenario.filter_simulated(false) };
        let samples = match measured.series[..] {
            [] => Vec::new(),
            _ => (self.measure)(&measured, progress).with_context(|| self.embedded_scenario.name)?,
        };
        let mut values: HashMap<(usize, usize), Vec<SeedValue>> = HashMap::new();
        for sample in &samples {
            let place = find_position(scenario, sample).with_context(|| {
                format!("{}: the scenario has no place for {sample:?}", self.embedded_scenario.name)
            })?;
            let x = sample.x * x_scale(&scenario.panel[place.0]);
            values.entry(place).or_default().push(SeedValue { x, seed: sample.run, y: sample.y });
        }
        let mut table = build_value_table(scenario, values);
        let beside = scenario.filter_simulated(true);
        if !beside.series.is_empty() {
            insert_simulated_curves(&mut table, run::run(&beside, &|_, _| {})?);
        }
        Ok(table)
    }
}

fn insert_simulated_curves(table: &mut FigureTable, part: FigureTable) {
    for simulated in part.panels {
        let panel = table.panels.iter_mut().find(|panel| panel.title == simulated.title);
        let curves = panel.map_or(&mut [][..], |panel| &mut panel.curves[..]);
        for curve in simulated.curves {
            if let Some(place) = curves.iter_mut().find(|place| place.label == curve.label) {
                place.cells = curve.cells;
            }
        }
    }
}

fn find_position(scenario: &Scenario, sample: &Sample) -> Option<(usize, usize)> {
    let panel = scenario.panel.iter().position(|panel| *panel.title.get_ref() == sample.panel)?;
    let shown =
        scenario.panel_series(&scenario.panel[panel]).find(|series| *series.label.get_ref() == sample.series)?;
    let series = scenario.series.iter().position(|series| std::ptr::eq(series, shown))?;
    (1..=*scenario.seeds.get_ref()).contains(&sample.run).then_some((panel, series))
}

fn x_scale(panel: &Panel) -> f64 {
    panel.x.as_ref().map_or(1.0, |sweep| sweep.scale)
}

/// Describes this machine for the page: kernel, number of CPUs and processor model.
pub fn describe_machine() -> String {
    let read = |path: &str| std::fs::read_to_string(path).unwrap_or_default();
    let kernel = read("/proc/sys/kernel/osrelease");
    let processors = read("/proc/cpuinfo");
    let model = processors.lines().find_map(|line| line.strip_prefix("model name")?.split_once(": "));
    let model = model.map_or_else(|| std::env::consts::ARCH.to_owned(), |(_, model)| model.to_owned());
    let count = std::thread::available_parallelism().map_or(1, usize::from);
    format!("Linux {}, {count} CPUs ({model})", kernel.trim())
}
