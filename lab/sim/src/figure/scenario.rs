//! Scenario files, described in docs/simulator.md.
//!
//! The types reject invalid values with file, line and column; [`check`] checks combinations right after reading. A
//! parsed scenario can therefore be run, drawn and checked.

mod check;
mod read;

use std::fmt;

use coreward_config::Spanned;
use serde::Deserialize;

use super::axes::{Metric, SweepAxis};
use super::claim::Assertion;
use super::parameters::{LbParameters, PathParameters, PccParameters, RpcParameters};
use super::table::PublishedCell;

/// Experiment of a paper: its simulation, drawing, published values and claims.
#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Scenario {
    /// Title of the figure in one line.
    pub title: String,
    /// Authors, title and venue of the paper.
    pub paper: String,
    /// Reference to the figure in the paper, such as "Figure 2b".
    pub figure: String,
    /// Quoted sentences of the paper that the claims check.
    pub statement: String,
    /// Description of the model, and how it differs from the paper's experiment.
    pub modelled: String,
    /// Number of seeds, which are 1 to this number; every point is the median over them.
    pub seeds: Spanned<u64>,
    /// Common parameters of a simulation of requests at cores.
    pub rpc: Option<RpcParameters>,
    /// Common parameters of a replay of a trace's packets at servers and cores.
    pub lb: Option<LbParameters>,
    /// Common parameters of a simulation of connections while the server pool changes.
    pub pcc: Option<PccParameters>,
    /// Common parameters of a simulation of connections and of their requests at cores.
    pub path: Option<PathParameters>,
    /// Parameters of a live figure ([`super::live`]): every series is measured, except those marked as simulated.
    pub live: Option<LiveParameters>,
    /// Series that the figure compares.
    pub series: Vec<Series>,
    /// Panels, drawn side by side.
    pub panel: Vec<Panel>,
    /// Values that the paper gives, drawn for comparison.
    #[serde(default)]
    pub published: Vec<PublishedValues>,
    /// Claims of the paper, which are checked on the figure's table.
    #[serde(default)]
    pub claim: Vec<Assertion>,
}

/// Parameters of a figure that is measured on this machine; the scenario's `seeds` are then runs.
#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct LiveParameters {
    /// Approximate duration of the measurement (minutes), shown by `coreward-lab figure --list`.
    pub minutes: f64,
    /// Measured time of each point in each run (s), if the measurement does not fix it.
    pub seconds: Option<f64>,
    /// Duration of the simulated unit of time in the measurement (us), if the scenario has such a unit.
    pub unit_us: Option<f64>,
    /// Mix of requests to a key-value store over RocksDB, as for `coreward-lab load --mix`; its classes are those of
    /// `rpc.service`. Without a mix, requests only take time.
    pub mix: Option<String>,
}

impl fmt::Display for LiveParameters {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "live: measured on this machine, needs root, about {} min", self.minutes)
    }
}

/// Series of values, drawn as a curve or as bars of one colour.
#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Series {
    /// Name of the series in the paper.
    pub label: Spanned<String>,
    /// Whether a series of a live figure is simulated for comparison. It is drawn like the preceding measured series,
    /// but open and dashed.
    #[serde(default)]
    pub simulated: bool,
    /// Parameters of this series that differ from the common ones, in the scenario's kind.
    pub rpc: Option<RpcParameters>,
    /// See `rpc`.
    pub lb: Option<LbParameters>,
    /// See `rpc`.
    pub pcc: Option<PccParameters>,
    /// See `rpc`.
    pub path: Option<PathParameters>,
}

/// Panel of a figure, with its axes.
#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Panel {
    /// Title, by which claims and published values refer to the panel.
    pub title: Spanned<String>,
    pub measure: Spanned<Metric>,
    /// Whether values are drawn as lines or as bars.
    #[serde(default)]
    pub draw: PlotType,
    /// Parameter swept along the x axis; without it, each series has a single value.
    pub x: Option<Sweep>,
    pub y: Axis,
    /// Labels of the series to draw; all series if empty.
    #[serde(default)]
    pub series: Vec<Spanned<String>>,
    /// Horizontal lines with labels, such as service level objectives.
    #[serde(default)]
    pub mark: Vec<ReferenceLine>,
    /// Parameters of this panel that differ from the common ones.
    pub rpc: Option<RpcParameters>,
    /// See `rpc`.
    pub lb: Option<LbParameters>,
    /// See `rpc`.
    pub pcc: Option<PccParameters>,
    /// See `rpc`.
    pub path: Option<PathParameters>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum PlotType {
    /// Points joined by lines, with whiskers from the lowest to the highest value of all seeds.
    #[default]
    Lines,
    Bars,
}

/// Horizontal axis with its swept parameter.
#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Sweep {
    /// Parameter that changes from point to point.
    pub parameter: Spanned<SweepAxis>,
    /// Values of the parameter; none for `time`, whose values follow from the run.
    #[serde(default)]
    pub values: Vec<f64>,
    /// Label of the axis, with its unit.
    pub label: String,
    /// Factor by which values are multiplied for display. Claims and published points use the displayed values.
    #[serde(default = "default_scale")]
    pub scale: f64,
    /// Whether the axis is logarithmic.
    #[serde(default)]
    pub log: bool,
}

#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Axis {
    /// Label of the axis, with its unit.
    pub label: String,
    /// Factor by which simulated or measured values are multiplied for display.
    #[serde(default = "default_scale")]
    pub scale: f64,
    /// Whether the axis is logarithmic.
    #[serde(default)]
    pub log: bool,
    /// Range of the axis to draw; by default that of the data. Points outside of it are still in the tables.
    pub range: Option<[f64; 2]>,
}

/// Horizontal reference line in a panel.
#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ReferenceLine {
    /// Displayed y value at which the line is drawn.
    pub y: f64,
    pub label: String,
}

/// Values of the paper's figure or text for one series of one panel.
#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct PublishedValues {
    /// Title of the panel; may be omitted if the figure has a single panel.
    pub panel: Option<Spanned<String>>,
    pub series: Spanned<String>,
    /// Part of the paper, or of its artifact, with the numbers.
    pub source: String,
    /// Points in the displayed units of the panel.
    pub points: Vec<PublishedPoint>,
}

/// Published point, written as `[x, y]` or `[x, y, low, high]`.
#[derive(Debug, Clone, Copy, PartialEq, Deserialize)]
#[serde(from = "PublishedNumbers")]
pub struct PublishedPoint {
    /// x on the panel's horizontal axis.
    pub x: f64,
    pub y: f64,
    pub spread: Option<(f64, f64)>,
}

#[derive(Deserialize)]
#[serde(untagged, expecting = "expected [x, y] or [x, y, low, high]")]
enum PublishedNumbers {
    Plain([f64; 2]),
    WithRange([f64; 4]),
}

impl From<PublishedNumbers> for PublishedPoint {
    fn from(numbers: PublishedNumbers) -> Self {
        match numbers {
            PublishedNumbers::Plain([x, y]) => Self { x, y, spread: None },
            PublishedNumbers::WithRange([x, y, low, high]) => Self { x, y, spread: Some((low, high)) },
        }
    }
}

fn default_scale() -> f64 {
    1.0
}

impl Scenario {
    /// Returns the series that `panel` shows, in the order of the file.
    pub fn panel_series(&self, panel: &Panel) -> impl Iterator<Item = &Series> {
        let shown_labels: Vec<&str> = panel.series.iter().map(|label| label.get_ref().as_str()).collect();
        self.series
            .iter()
            .filter(move |series| shown_labels.is_empty() || shown_labels.contains(&series.label.get_ref().as_str()))
    }

    /// Returns the simulated or the measured part of a live figure, without published values and claims.
    #[must_use]
    pub fn filter_simulated(&self, is_simulated: bool) -> Self {
        let series = self.series.iter().filter(|series| series.simulated == is_simulated);
        let panel = self.panel.iter().filter_map(|panel| {
            let panel_series = self.panel_series(panel).filter(|series| series.simulated == is_simulated);
            let series: Vec<_> = panel_series.map(|series| series.label.clone()).collect();
            (!series.is_empty()).then(|| Panel { series, ..panel.clone() })
        });
        let (series, panel) = (series.cloned().collect(), panel.collect());
        Self { series, panel, live: None, published: Vec::new(), claim: Vec::new(), ..self.clone() }
    }

    /// Returns the index of the series whose colour and shape series `index` uses, and whether the series is drawn
    /// open.
    pub fn series_style(&self, index: usize) -> (usize, bool) {
        let is_open = self.series[index].simulated;
        let measured_series = self.series[..=index].iter().rposition(|series| !series.simulated).filter(|_| is_open);
        (measured_series.unwrap_or(index), is_open)
    }

    /// Returns the published points of a series in a panel.
    pub fn published_points(&self, panel: &str, label: &str) -> Vec<PublishedCell> {
        let published_values = self.published.iter().filter(|published| {
            let is_in_panel = published.panel.as_ref().is_none_or(|title| title.get_ref() == panel);
            is_in_panel && published.series.get_ref() == label
        });
        let points = published_values.flat_map(|published| &published.points);
        let mut cells: Vec<PublishedCell> =
            points.map(|point| PublishedCell { x: point.x, y: point.y, spread: point.spread }).collect();
        cells.sort_by(|a, b| a.x.total_cmp(&b.x));
        cells
    }

    /// Returns the panel with this title; without a title, the figure's only panel.
    pub fn find_panel(&self, title: Option<&str>) -> Option<&Panel> {
        match title {
            Some(title) => self.panel.iter().find(|panel| panel.title.get_ref() == title),
            None if self.panel.len() == 1 => self.panel.first(),
            None => None,
        }
    }
}

#[cfg(test)]
mod tests;
