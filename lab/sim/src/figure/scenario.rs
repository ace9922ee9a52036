//! Scenario files, described in docs/simulator.md.
//!
//! The types reject invalid values with file, line and column; [`check`] checks combinations right after reading. So a
//! scenario that was read can be run, drawn and judged.

mod check;
mod read;

use std::fmt;

use coreward_config::Spanned;
use serde::Deserialize;

use super::axes::{Metric, SweepAxis};
use super::claim::Assertion;
use super::parameters::{Lb, Path, Pcc, Rpc};
use super::table::PublishedCell;

/// One experiment: what is simulated, what is drawn, what was published and what the paper states about it.
#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Scenario {
    /// One line for people.
    pub title: String,
    /// Authors, name and venue.
    pub paper: String,
    /// Place in the paper: "Figure 2b".
    pub figure: String,
    /// The paper's sentences that the claims judge, quoted.
    pub statement: String,
    /// Model of this simulation, and its differences from the paper's experiment.
    pub modelled: String,
    /// Seeds 1 to this number; every point is the median over them.
    pub seeds: Spanned<u64>,
    /// Requests at cores: parameters common to all series.
    pub rpc: Option<Rpc>,
    /// Packets of a trace at servers and cores.
    pub lb: Option<Lb>,
    /// Connections while the pool changes.
    pub pcc: Option<Pcc>,
    /// Connections placed by a load balancer, their requests queued at cores.
    pub path: Option<Path>,
    /// Measured on this machine ([`super::live`]): every series but those marked as simulated.
    pub live: Option<Live>,
    /// Compared curves.
    pub series: Vec<Series>,
    /// Panels, drawn side by side.
    pub panel: Vec<Panel>,
    /// Values of the paper's figure.
    #[serde(default)]
    pub published: Vec<Published>,
    /// The statements, as checks.
    #[serde(default)]
    pub claim: Vec<Assertion>,
}

/// Figure whose numbers are measured on this machine; its `seeds` are runs.
#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Live {
    /// About how long it takes, for `coreward-lab figure --list`.
    pub minutes: f64,
    /// Measured time of each point in each run, where the figure leaves that open (s).
    pub seconds: Option<f64>,
    /// Simulated unit of time here, where there is one (us).
    pub unit_us: Option<f64>,
}

impl fmt::Display for Live {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "live: measured on this machine, needs root, about {} min", self.minutes)
    }
}

/// One curve, or the bars of one colour.
#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Series {
    /// Name as the paper has it.
    pub label: Spanned<String>,
    /// In a live figure: simulated for comparison, not measured. Drawn like the last measured series before it, open
    /// and dashed.
    #[serde(default)]
    pub simulated: bool,
    /// Parameters of this series that differ from the common ones; of the scenario's kind.
    pub rpc: Option<Rpc>,
    /// See `rpc`.
    pub lb: Option<Lb>,
    /// See `rpc`.
    pub pcc: Option<Pcc>,
    /// See `rpc`.
    pub path: Option<Path>,
}

/// One system of axes.
#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Panel {
    /// Title; claims and published values name the panel by it.
    pub title: Spanned<String>,
    pub measure: Spanned<Metric>,
    /// Style of drawing.
    #[serde(default)]
    pub draw: Draw,
    /// Sweep; without it each series has one value.
    pub x: Option<Sweep>,
    pub y: Axis,
    /// Only these series; all when left out.
    #[serde(default)]
    pub series: Vec<Spanned<String>>,
    /// Horizontal lines with their names, as service level objectives.
    #[serde(default)]
    pub mark: Vec<Mark>,
    /// Parameters of this panel that differ from the common ones.
    pub rpc: Option<Rpc>,
    /// See `rpc`.
    pub lb: Option<Lb>,
    /// See `rpc`.
    pub pcc: Option<Pcc>,
    /// See `rpc`.
    pub path: Option<Path>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Draw {
    /// Points joined by lines, whiskers from the lowest to the highest seed.
    #[default]
    Lines,
    Bars,
}

/// The horizontal axis and what is swept along it.
#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Sweep {
    /// Parameter that changes from point to point.
    pub parameter: Spanned<SweepAxis>,
    /// Its values; none for `time`, whose values follow from the run.
    #[serde(default)]
    pub values: Vec<f64>,
    /// Label of the axis, with its unit.
    pub label: String,
    /// A value is shown (and named by claims and published points) times this.
    #[serde(default = "default_scale")]
    pub scale: f64,
    /// Logarithmic.
    #[serde(default)]
    pub log: bool,
}

#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Axis {
    /// With its unit.
    pub label: String,
    /// Every measured value is multiplied by this.
    #[serde(default = "default_scale")]
    pub scale: f64,
    /// Logarithmic.
    #[serde(default)]
    pub log: bool,
    /// Drawn range; from the data when left out. Points outside stay in the tables.
    pub range: Option<[f64; 2]>,
}

/// A horizontal line.
#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Mark {
    /// At this height.
    pub y: f64,
    pub label: String,
}

/// Values of the paper's figure or text for one series of one panel.
#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Published {
    /// The panel's title; may be left out when there is one panel.
    pub panel: Option<Spanned<String>>,
    pub series: Spanned<String>,
    /// Source of the numbers.
    pub source: String,
    /// In the panel's shown units.
    pub points: Vec<PublishedPoint>,
}

/// `[x, y]`, or `[x, y, low, high]`.
#[derive(Debug, Clone, Copy, PartialEq, Deserialize)]
#[serde(from = "PublishedNumbers")]
pub struct PublishedPoint {
    /// On the panel's horizontal axis.
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
    /// The series that `panel` shows, in the order of the file.
    pub fn series_of(&self, panel: &Panel) -> impl Iterator<Item = &Series> {
        let only: Vec<&str> = panel.series.iter().map(|label| label.get_ref().as_str()).collect();
        self.series.iter().filter(move |series| only.is_empty() || only.contains(&series.label.get_ref().as_str()))
    }

    /// The simulated or the measured part of a live figure: a scenario of its own, without published values and claims.
    #[must_use]
    pub fn part(&self, simulated: bool) -> Self {
        let series = self.series.iter().filter(|series| series.simulated == simulated);
        let panel = self.panel.iter().filter_map(|panel| {
            let of_panel = self.series_of(panel).filter(|series| series.simulated == simulated);
            let series: Vec<_> = of_panel.map(|series| series.label.clone()).collect();
            (!series.is_empty()).then(|| Panel { series, ..panel.clone() })
        });
        let (series, panel) = (series.cloned().collect(), panel.collect());
        Self { series, panel, live: None, published: Vec::new(), claim: Vec::new(), ..self.clone() }
    }

    /// The index of the series whose colour and shape the series at `index` has, and whether it is drawn open.
    pub fn appearance(&self, index: usize) -> (usize, bool) {
        let open = self.series[index].simulated;
        let like = self.series[..=index].iter().rposition(|series| !series.simulated).filter(|_| open);
        (like.unwrap_or(index), open)
    }

    /// The published points of this series in this panel.
    pub fn published_points(&self, panel: &str, label: &str) -> Vec<PublishedCell> {
        let of_curve = self.published.iter().filter(|published| {
            let in_panel = published.panel.as_ref().is_none_or(|title| title.get_ref() == panel);
            in_panel && published.series.get_ref() == label
        });
        let points = of_curve.flat_map(|published| &published.points);
        let mut cells: Vec<PublishedCell> =
            points.map(|point| PublishedCell { x: point.x, y: point.y, spread: point.spread }).collect();
        cells.sort_by(|a, b| a.x.total_cmp(&b.x));
        cells
    }

    /// The panel of that title, or the only one.
    pub fn panel_named(&self, title: Option<&str>) -> Option<&Panel> {
        match title {
            Some(title) => self.panel.iter().find(|panel| panel.title.get_ref() == title),
            None if self.panel.len() == 1 => self.panel.first(),
            None => None,
        }
    }
}

#[cfg(test)]
mod tests;
