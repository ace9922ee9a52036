//! Claims, which check a paper's statements on the figure's table. A claim compares quantities with bounds.

use coreward_config::Spanned;
use serde::{Deserialize, Serialize};

use super::axis_points::is_same_x;
use super::table::{CurveCell, FigureCurve, FigureTable, PanelTable};

/// Statement of a paper, and the check that decides whether it holds for a value, a ratio of two values, or an order.
#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Assertion {
    /// Statement of the paper, in its own words or close to them.
    pub statement: Spanned<String>,
    pub published: Option<f64>,
    pub value: Option<FigureQuantity>,
    /// Ratio to check, instead of `value`.
    pub ratio: Option<QuantityRatio>,
    /// Order of several series to check, instead of `value`.
    pub ascending: Option<AscendingSeriesClaim>,
    /// Lower bound that all checked values must meet.
    pub at_least: Option<f64>,
    /// Upper bound that all checked values must meet.
    pub at_most: Option<f64>,
}

/// Quotient of two quantities, computed point by point if they have several values.
#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct QuantityRatio {
    /// Dividend of the ratio.
    pub of: FigureQuantity,
    /// Divisor of the ratio, which has one value or as many values as the dividend.
    pub to: FigureQuantity,
    /// Second ratio, by which this one is divided before the check, for instance to show that a gap grows.
    pub than: Option<Box<QuantityRatio>>,
    /// Function that reduces several quotients to one. All quotients are checked if absent.
    pub take: Option<ValueReduction>,
}

/// Values from the figure's table. They come from all points of all panels, except as the fields below restrict them.
#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct FigureQuantity {
    pub panel: Option<Spanned<String>>,
    pub series: Option<Spanned<String>>,
    #[serde(default)]
    pub least_of: Vec<Spanned<String>>,
    #[serde(default)]
    pub greatest_of: Vec<Spanned<String>>,
    /// Only x at which values are used, as shown on the horizontal axis.
    pub at: Option<Spanned<f64>>,
    /// Smallest x at which values are used.
    pub from: Option<f64>,
    /// Largest x at which values are used.
    pub to: Option<f64>,
    /// Height (y) on a curve. If present, the quantity is the (interpolated) x at which the curve first reaches this
    /// height.
    pub reaches: Option<f64>,
    /// Function that reduces several values to one. All values are used if absent.
    pub take: Option<ValueReduction>,
}

/// Function that reduces several values to one.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum ValueReduction {
    Least,
    Greatest,
    Mean,
}

/// Claim that at every selected x, the values of the listed series ascend from the first series to the last.
#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct AscendingSeriesClaim {
    /// Labels of the series, beginning with the one that has the lowest values.
    pub series: Vec<Spanned<String>>,
    pub panel: Option<Spanned<String>>,
    /// Only x at which the series are compared.
    pub at: Option<Spanned<f64>>,
    /// Smallest x at which the series are compared.
    pub from: Option<f64>,
    /// Largest x at which the series are compared.
    pub to: Option<f64>,
}

/// Result of checking a claim on a figure's table.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct ClaimVerdict {
    pub statement: String,
    pub holds: bool,
    /// Minimum and maximum of the checked values (medians over the seeds). Absent if there is nothing to check, for
    /// instance because a curve never reaches the height in `reaches`. The claim then does not hold.
    pub measured: Option<(f64, f64)>,
    /// Minimum and maximum of the checked values, computed for each seed instead of from medians over the seeds.
    pub seeds: Option<(f64, f64)>,
    pub points: usize,
    /// Bounds of the checked values, as text for the reader.
    pub bound: String,
    /// Value that the paper states, if any.
    pub published: Option<f64>,
}

/// Selection of the number in a table cell that a claim checks: the median over the seeds, or a single seed's value.
#[derive(Clone, Copy)]
enum CellValueSelector {
    Median,
    SeedWithIndex(usize),
}

impl CellValueSelector {
    fn select_cell_value(self, cell: &CurveCell) -> Option<f64> {
        match self {
            Self::Median => Some(cell.spread.median),
            Self::SeedWithIndex(seed) => cell.seeds.get(seed).copied(),
        }
    }
}

impl Assertion {
    pub fn evaluate(&self, table: &FigureTable) -> ClaimVerdict {
        let median_values = self.checked_values(table, CellValueSelector::Median).filter(|values| !values.is_empty());
        let seed_values = (0..table.seeds as usize)
            .filter_map(|seed| self.checked_values(table, CellValueSelector::SeedWithIndex(seed)))
            .flatten();
        let (lower_bound, upper_bound) = self.allowed_value_range();
        let holds = median_values
            .as_ref()
            .is_some_and(|values| values.iter().all(|value| (lower_bound..=upper_bound).contains(value)));
        ClaimVerdict {
            statement: self.statement.get_ref().clone(),
            holds,
            measured: median_values.as_deref().and_then(min_and_max),
            seeds: min_and_max(&seed_values.collect::<Vec<_>>()),
            points: median_values.map_or(0, |values| values.len()),
            bound: self.describe_bounds(),
            published: self.published,
        }
    }

    /// Returns the least and greatest allowed value. For ascending series, the least allowed quotient of neighbours is
    /// 1 by default.
    fn allowed_value_range(&self) -> (f64, f64) {
        let default_minimum = if self.ascending.is_some() { 1.0 } else { f64::NEG_INFINITY };
        (self.at_least.unwrap_or(default_minimum), self.at_most.unwrap_or(f64::INFINITY))
    }

    fn describe_bounds(&self) -> String {
        let bound_text = match (self.at_least, self.at_most) {
            (Some(low), Some(high)) => format!("{low} to {high}"),
            (Some(low), None) => format!("at least {low}"),
            (None, Some(high)) => format!("at most {high}"),
            (None, None) => "at least 1".to_owned(),
        };
        match &self.ascending {
            Some(order) => {
                let labels: Vec<&str> = order.series.iter().map(|label| label.get_ref().as_str()).collect();
                format!("each over the one before, {}: {bound_text}", labels.join(" <= "))
            }
            None => bound_text,
        }
    }

    fn checked_values(&self, table: &FigureTable, selector: CellValueSelector) -> Option<Vec<f64>> {
        if let Some(quantity) = &self.value {
            quantity.values(table, selector)
        } else if let Some(ratio) = &self.ratio {
            ratio.quotients(table, selector)
        } else {
            self.ascending.as_ref()?.neighbour_quotients(table, selector)
        }
    }
}

impl QuantityRatio {
    fn quotients(&self, table: &FigureTable, selector: CellValueSelector) -> Option<Vec<f64>> {
        let (dividends, divisors) = (self.of.values(table, selector)?, self.to.values(table, selector)?);
        let quotients: Vec<f64> = match divisors[..] {
            [divisor] => dividends.iter().map(|dividend| dividend / divisor).collect(),
            _ if divisors.len() == dividends.len() => {
                dividends.iter().zip(&divisors).map(|(dividend, divisor)| dividend / divisor).collect()
            }
            _ => return None,
        };
        let quotients = match &self.than {
            None => quotients,
            Some(reference_ratio) => match reference_ratio.quotients(table, selector)?[..] {
                [reference_quotient] => quotients.into_iter().map(|quotient| quotient / reference_quotient).collect(),
                _ => return None,
            },
        };
        Some(reduce_values(quotients, self.take))
    }

    /// Returns all quantities in this ratio, and in the ratio by which it is divided.
    pub fn quantities(&self) -> Vec<&FigureQuantity> {
        let nested_quantities = self.than.as_deref().map(QuantityRatio::quantities).unwrap_or_default();
        [&self.of, &self.to].into_iter().chain(nested_quantities).collect()
    }
}

impl AscendingSeriesClaim {
    /// Returns the value of each listed series divided by that of the series listed before it, at every selected x.
    fn neighbour_quotients(&self, table: &FigureTable, selector: CellValueSelector) -> Option<Vec<f64>> {
        let curve_values: Option<Vec<Vec<f64>>> =
            self.series.iter().map(|label| self.series_quantity(label).values(table, selector)).collect();
        let curve_values = curve_values?;
        let quotients = curve_values.windows(2).flat_map(|adjacent_curves| {
            adjacent_curves[1]
                .iter()
                .zip(&adjacent_curves[0])
                .map(|(upper_value, lower_value)| upper_value / lower_value)
        });
        Some(quotients.collect())
    }

    fn series_quantity(&self, label: &Spanned<String>) -> FigureQuantity {
        FigureQuantity {
            panel: self.panel.clone(),
            series: Some(label.clone()),
            least_of: Vec::new(),
            greatest_of: Vec::new(),
            at: self.at.clone(),
            from: self.from,
            to: self.to,
            reaches: None,
            take: None,
        }
    }
}

impl FigureQuantity {
    pub fn series_labels(&self) -> impl Iterator<Item = &Spanned<String>> {
        self.series.iter().chain(&self.least_of).chain(&self.greatest_of)
    }

    fn values(&self, table: &FigureTable, selector: CellValueSelector) -> Option<Vec<f64>> {
        let used_panels = table.panels.iter().filter(|panel| self.uses_panel(panel));
        let mut values = Vec::new();
        for panel in used_panels {
            values.extend(self.panel_values(panel, selector)?);
        }
        Some(reduce_values(values, self.take))
    }

    fn uses_panel(&self, panel: &PanelTable) -> bool {
        self.panel.as_ref().is_none_or(|title| *title.get_ref() == panel.title)
    }

    fn panel_values(&self, panel: &PanelTable, selector: CellValueSelector) -> Option<Vec<f64>> {
        let curve_values: Vec<Vec<f64>> = self
            .series_labels()
            .filter_map(|label| panel.curves.iter().find(|curve| curve.label == *label.get_ref()))
            .map(|curve| self.curve_values(curve, selector))
            .collect::<Option<_>>()?;
        let min_or_max = if self.greatest_of.is_empty() { f64::min } else { f64::max };
        curve_values
            .into_iter()
            .reduce(|best_values, series_values| {
                best_values.into_iter().zip(series_values).map(|(a, b)| min_or_max(a, b)).collect()
            })
            .or(Some(Vec::new()))
    }

    fn curve_values(&self, curve: &FigureCurve, selector: CellValueSelector) -> Option<Vec<f64>> {
        if let Some(height) = self.reaches {
            let points: Option<Vec<(f64, f64)>> =
                curve.cells.iter().map(|cell| Some((cell.x, selector.select_cell_value(cell)?))).collect();
            return first_crossing_x(&points?, height).map(|x| vec![x]);
        }
        let used_cells = curve.cells.iter().filter(|cell| self.uses_x(cell.x));
        used_cells.map(|cell| selector.select_cell_value(cell)).collect()
    }

    fn uses_x(&self, x: f64) -> bool {
        let is_at_claimed_x = self.at.as_ref().is_none_or(|claimed_x| is_same_x(*claimed_x.get_ref(), x));
        is_at_claimed_x
            && self.from.is_none_or(|min_x| x >= min_x || is_same_x(x, min_x))
            && self.to.is_none_or(|max_x| x <= max_x || is_same_x(x, max_x))
    }
}

fn reduce_values(values: Vec<f64>, reduction: Option<ValueReduction>) -> Vec<f64> {
    let reduced_value = match reduction {
        None => return values,
        Some(ValueReduction::Least) => values.into_iter().reduce(f64::min),
        Some(ValueReduction::Greatest) => values.into_iter().reduce(f64::max),
        Some(ValueReduction::Mean) => coreward_model::statistics::mean(&values),
    };
    reduced_value.into_iter().collect()
}

/// Returns the minimum and maximum of `values`. Returns `None` if `values` is empty or has a number that JSON cannot
/// represent, such as a quotient by zero.
fn min_and_max(values: &[f64]) -> Option<(f64, f64)> {
    let minimum = values.iter().copied().reduce(f64::min)?;
    values.iter().all(|value| value.is_finite()).then_some((minimum, values.iter().copied().reduce(f64::max)?))
}

/// Returns the first x at which a curve crosses `height` from below, interpolated between its points.
fn first_crossing_x(points: &[(f64, f64)], height: f64) -> Option<f64> {
    let (point_below, point_above) = points
        .windows(2)
        .map(|adjacent_points| (adjacent_points[0], adjacent_points[1]))
        .find(|(a, b)| a.1 <= height && b.1 > height)?;
    Some(point_below.0 + (point_above.0 - point_below.0) * (height - point_below.1) / (point_above.1 - point_below.1))
}

#[cfg(test)]
mod tests;
