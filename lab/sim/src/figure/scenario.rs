//! Scenario files, whose format docs/simulator.md describes.
//!
//! Values of the wrong type or range are rejected with file, line and column. [`check`] then rejects invalid
//! combinations. A parsed scenario can therefore always be run, drawn and judged.

mod check;
mod read;

use std::fmt;

use coreward_config::Spanned;
use serde::Deserialize;

use super::axes::{FigureMetric, SweepAxis};
use super::figure_claim::Assertion;
use super::parameters::{LbParameters, PathParameters, PccParameters, RpcParameters};
use super::table::PublishedCell;

/// Scenario of one figure: an experiment of a paper, its simulation and drawing, and the paper's published values and
/// claims.
#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct FigureScenario {
    /// Title of the figure, on one line.
    pub title: String,
    /// Authors, title and venue of the paper.
    pub paper: String,
    /// Reference to the figure in the paper, such as "Figure 2b".
    pub figure: String,
    /// Sentences quoted from the paper, which the claims check.
    pub statement: String,
    /// Description of the model and of its differences from the paper's experiment.
    pub modelled: String,
    /// Number of seeds, which are numbered from 1. Every point shows the median over them.
    pub seeds: Spanned<u64>,
    /// Parameters of all series, if the scenario simulates requests at the cores of one server.
    pub rpc: Option<RpcParameters>,
    /// Parameters of all series, if the scenario replays a trace's packets at servers and cores.
    pub lb: Option<LbParameters>,
    /// Parameters of all series, if the scenario simulates connections while the server pool changes.
    pub pcc: Option<PccParameters>,
    /// Parameters of all series, if the scenario simulates connections and their requests at cores.
    pub path: Option<PathParameters>,
    /// Parameters of a live figure ([`super::live`]), whose series are measured unless they are marked as simulated.
    pub live: Option<LiveFigureParameters>,
    /// Series that the figure compares with each other.
    pub series: Vec<FigureSeries>,
    /// Panels of the figure, which are drawn side by side.
    pub panel: Vec<FigurePanel>,
    /// Values from the paper that are drawn for comparison.
    #[serde(default)]
    pub published: Vec<PublishedValues>,
    /// Claims of the paper, which are checked on the figure's table.
    #[serde(default)]
    pub claim: Vec<Assertion>,
}

/// Parameters of a figure that is measured on this machine. The scenario's `seeds` is then the number of runs.
#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct LiveFigureParameters {
    /// Approximate duration of the whole measurement (minutes), which `coreward-lab figure --list` shows.
    pub minutes: f64,
    /// Measured time of each point in each run (s), unless the measurement determines it.
    pub seconds: Option<f64>,
    /// Real duration of the simulation's unit of time (us), if the scenario has such a unit.
    pub unit_us: Option<f64>,
    /// Mix of requests to a key-value store on RocksDB, written as for `coreward-lab load --mix`. Its classes are those
    /// of `rpc.service`. Without a mix, a request only occupies a core for its service time.
    pub mix: Option<String>,
}

impl fmt::Display for LiveFigureParameters {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "live: measured on this machine, needs root, about {} min", self.minutes)
    }
}

/// Series of values that is drawn as one curve, or as bars of one colour.
#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct FigureSeries {
    /// Name of the series, as in the paper.
    pub label: Spanned<String>,
    /// Whether this series of a live figure is simulated for comparison. It is drawn like the preceding measured
    /// series, but with open markers and dashed lines.
    #[serde(default)]
    pub simulated: bool,
    /// Parameters of this series that override the scenario's and the panel's, as do `lb`, `pcc` and `path`.
    pub rpc: Option<RpcParameters>,
    pub lb: Option<LbParameters>,
    pub pcc: Option<PccParameters>,
    pub path: Option<PathParameters>,
}

#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct FigurePanel {
    /// Title of the panel, by which claims and published values refer to it.
    pub title: Spanned<String>,
    pub measure: Spanned<FigureMetric>,
    /// Whether values are drawn as lines or as bars, by default as lines.
    #[serde(default)]
    pub draw: PlotType,
    /// Parameter that is swept along the x axis. If absent, each series has a single value.
    pub x: Option<ParameterSweep>,
    pub y: VerticalAxis,
    /// Labels of the series that the panel draws. If empty, it draws all series.
    #[serde(default)]
    pub series: Vec<Spanned<String>>,
    /// Labelled horizontal lines, for instance at a service level objective.
    #[serde(default)]
    pub mark: Vec<ReferenceLine>,
    /// Parameters of this panel that override the scenario's, as do `lb`, `pcc` and `path`.
    pub rpc: Option<RpcParameters>,
    pub lb: Option<LbParameters>,
    pub pcc: Option<PccParameters>,
    pub path: Option<PathParameters>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum PlotType {
    /// Points joined by lines. Whiskers show the lowest and highest value over all seeds.
    #[default]
    Lines,
    Bars,
}

/// Horizontal axis, along which one parameter is swept.
#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ParameterSweep {
    /// Parameter whose value changes from point to point.
    pub parameter: Spanned<SweepAxis>,
    /// Values of the parameter. The list is empty for `time`, whose values result from the run.
    #[serde(default)]
    pub values: Vec<f64>,
    /// Label of the axis, including the unit.
    pub label: String,
    /// Factor by which the values are multiplied for display. Claims and published points use the displayed values.
    #[serde(default = "default_scale")]
    pub scale: f64,
    /// Whether the axis is logarithmic.
    #[serde(default)]
    pub log: bool,
}

#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct VerticalAxis {
    /// Label of the axis, including the unit.
    pub label: String,
    /// Factor by which simulated or measured values are multiplied for display.
    #[serde(default = "default_scale")]
    pub scale: f64,
    /// Whether the axis is logarithmic.
    #[serde(default)]
    pub log: bool,
    /// Drawn range of the axis, by default that of the data. Points outside it still appear in the tables.
    pub range: Option<[f64; 2]>,
}

/// Horizontal reference line in a panel.
#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ReferenceLine {
    /// Height of the line in displayed units.
    pub y: f64,
    pub label: String,
}

/// Values that the paper publishes for one series of one panel, in a figure or in its text.
#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct PublishedValues {
    /// Title of the panel, which may be omitted if the figure has only one.
    pub panel: Option<Spanned<String>>,
    pub series: Spanned<String>,
    /// Part of the paper or of its artifact that contains the numbers.
    pub source: String,
    /// Published points in the panel's displayed units.
    pub points: Vec<PublishedPoint>,
}

/// Published point, written as `[x, y]` or `[x, y, low, high]`.
#[derive(Debug, Clone, Copy, PartialEq, Deserialize)]
#[serde(from = "PublishedNumbers")]
pub struct PublishedPoint {
    pub x: f64,
    pub y: f64,
    pub spread: Option<(f64, f64)>,
}

#[derive(Deserialize)]
#[serde(untagged, expecting = "expected [x, y] or [x, y, low, high]")]
enum PublishedNumbers {
    Point([f64; 2]),
    PointAndRange([f64; 4]),
}

impl From<PublishedNumbers> for PublishedPoint {
    fn from(numbers: PublishedNumbers) -> Self {
        match numbers {
            PublishedNumbers::Point([x, y]) => Self { x, y, spread: None },
            PublishedNumbers::PointAndRange([x, y, low, high]) => Self { x, y, spread: Some((low, high)) },
        }
    }
}

fn default_scale() -> f64 {
    1.0
}

impl FigureScenario {
    /// Returns the series that `panel` shows, in the order of the file.
    pub fn panel_series(&self, panel: &FigurePanel) -> impl Iterator<Item = &FigureSeries> {
        let shown_labels: Vec<&str> = panel.series.iter().map(|label| label.get_ref().as_str()).collect();
        self.series
            .iter()
            .filter(move |series| shown_labels.is_empty() || shown_labels.contains(&series.label.get_ref().as_str()))
    }

    /// Returns the scenario with only its simulated series or only its measured series, and without published values
    /// and claims.
    #[must_use]
    pub fn filter_series_by_simulated(&self, is_simulated: bool) -> Self {
        let series = self.series.iter().filter(|series| series.simulated == is_simulated);
        let panel = self.panel.iter().filter_map(|panel| {
            let panel_series = self.panel_series(panel).filter(|series| series.simulated == is_simulated);
            let series: Vec<_> = panel_series.map(|series| series.label.clone()).collect();
            (!series.is_empty()).then(|| FigurePanel { series, ..panel.clone() })
        });
        let (series, panel) = (series.cloned().collect(), panel.collect());
        Self { series, panel, live: None, published: Vec::new(), claim: Vec::new(), ..self.clone() }
    }

    /// Returns the index of the series whose colour and shape series `index` uses, and whether series `index` has open
    /// markers. A simulated series uses the colour and shape of the measured series before it.
    pub fn series_style(&self, index: usize) -> (usize, bool) {
        let is_open = self.series[index].simulated;
        let measured_series_index =
            self.series[..=index].iter().rposition(|series| !series.simulated).filter(|_| is_open);
        (measured_series_index.unwrap_or(index), is_open)
    }

    /// Returns the published points of a series in a panel, by ascending x.
    pub fn published_points(&self, panel: &str, label: &str) -> Vec<PublishedCell> {
        let published_curves = self.published.iter().filter(|published_curve| {
            let is_in_panel = published_curve.panel.as_ref().is_none_or(|title| title.get_ref() == panel);
            is_in_panel && published_curve.series.get_ref() == label
        });
        let points = published_curves.flat_map(|published_curve| &published_curve.points);
        let mut cells: Vec<PublishedCell> =
            points.map(|point| PublishedCell { x: point.x, y: point.y, spread: point.spread }).collect();
        cells.sort_by(|a, b| a.x.total_cmp(&b.x));
        cells
    }

    /// Returns the panel with this title. If no title is given, returns the figure's panel if it has only one.
    pub fn find_panel(&self, title: Option<&str>) -> Option<&FigurePanel> {
        match title {
            Some(title) => self.panel.iter().find(|panel| panel.title.get_ref() == title),
            None if self.panel.len() == 1 => self.panel.first(),
            None => None,
        }
    }
}

#[cfg(test)]
mod tests;
