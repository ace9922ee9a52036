//! Table with the numbers of a figure. Each series of each panel has one point per x, with its spread over the seeds.

use serde::{Deserialize, Serialize};

use super::axis_points::is_same_x;
use crate::output::format_csv;
use crate::seed_summary::SeedSummary;

/// All values of one figure, in the displayed units.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct FigureTable {
    /// Number of seeds (or of runs, in a live figure) from which each point is computed.
    pub seeds: u64,
    /// Tables of the panels, in the scenario's order.
    pub panels: Vec<PanelTable>,
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct PanelTable {
    pub title: String,
    /// Curves of the panel's series, in the scenario's order.
    pub curves: Vec<FigureCurve>,
}

/// Values of one series in one panel.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct FigureCurve {
    pub label: String,
    /// Points of the curve, in ascending order of x.
    pub cells: Vec<CurveCell>,
    /// Values that the paper publishes for this series.
    pub published: Vec<PublishedCell>,
}

/// Point of a curve, with the value for each seed.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct CurveCell {
    /// Value of x as shown on the horizontal axis, or 0 if the panel has no such axis.
    pub x: f64,
    pub seeds: Vec<f64>,
    pub spread: SeedSummary,
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct PublishedCell {
    /// Value of x as shown on the horizontal axis.
    pub x: f64,
    pub y: f64,
    pub spread: Option<(f64, f64)>,
}

impl FigureCurve {
    fn published_cell_at(&self, x: f64) -> Option<&PublishedCell> {
        self.published.iter().find(|published_cell| is_same_x(published_cell.x, x))
    }
}

/// Names of the columns in a figure's CSV file.
pub const FIGURE_CSV_COLUMNS: [&str; 7] = ["panel", "series", "x", "median", "low", "high", "published"];

impl FigureTable {
    /// Returns the rows of the table, one per point, with the columns [`FIGURE_CSV_COLUMNS`]. A published point without
    /// a simulated one has no median.
    pub fn csv_rows(&self) -> Vec<Vec<String>> {
        let curves = self.panels.iter().flat_map(|panel| panel.curves.iter().map(move |curve| (panel, curve)));
        curves.flat_map(|(panel, curve)| curve_csv_rows(panel, curve)).collect()
    }

    /// Returns the [`FigureTable::csv_rows`] as CSV with a header line.
    pub fn to_csv(&self) -> String {
        format_csv(&FIGURE_CSV_COLUMNS, &self.csv_rows())
    }
}

fn curve_csv_rows(panel: &PanelTable, curve: &FigureCurve) -> Vec<Vec<String>> {
    let format_leading_cells = |x: f64| vec![panel.title.clone(), curve.label.clone(), format_number(x)];
    let mut rows: Vec<(f64, Vec<String>)> = Vec::new();
    for cell in &curve.cells {
        let SeedSummary { median, low, high, .. } = cell.spread;
        let published_cell =
            curve.published_cell_at(cell.x).map_or(String::new(), |published| format_number(published.y));
        let value_cells = [median, low, high].map(format_number).into_iter().chain([published_cell]);
        rows.push((cell.x, format_leading_cells(cell.x).into_iter().chain(value_cells).collect()));
    }
    for published_cell in &curve.published {
        if !curve.cells.iter().any(|cell| is_same_x(cell.x, published_cell.x)) {
            let value_cells = [String::new(), String::new(), String::new(), format_number(published_cell.y)];
            rows.push((
                published_cell.x,
                format_leading_cells(published_cell.x).into_iter().chain(value_cells).collect(),
            ));
        }
    }
    rows.sort_by(|(a, _), (b, _)| a.total_cmp(b));
    rows.into_iter().map(|(_, row)| row).collect()
}

/// Formats a number with six significant digits and without trailing zeros.
pub fn format_number(value: f64) -> String {
    if value == 0.0 || !value.is_finite() {
        return format!("{value}");
    }
    let magnitude = value.abs().log10().floor() as i32;
    let decimals = (5 - magnitude).clamp(0, 12) as usize;
    let text = format!("{value:.decimals$}");
    if text.contains('.') { text.trim_end_matches('0').trim_end_matches('.').to_owned() } else { text }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_have_six_significant_digits_without_trailing_zeros() {
        let cases = [
            (0.0, "0"),
            (1.0, "1"),
            (0.1 + 0.2, "0.3"),
            (123_456.789, "123457"),
            (1_234_567.0, "1234567"),
            (0.000_123_456_789, "0.000123457"),
            (-2.5, "-2.5"),
            (100.0, "100"),
        ];
        for (value, text) in cases {
            assert_eq!(format_number(value), text);
        }
    }

    #[test]
    fn unsimulated_published_point_has_a_row() {
        let cell = CurveCell { x: 1.0, seeds: vec![2.0], spread: SeedSummary::from_values(&[2.0]).unwrap() };
        let build_published_cell = |x, y| PublishedCell { x, y, spread: None };
        let curve = FigureCurve {
            label: "a".into(),
            cells: vec![cell],
            published: vec![build_published_cell(0.5, 9.0), build_published_cell(1.0, 2.5)],
        };
        let table = FigureTable { seeds: 1, panels: vec![PanelTable { title: "p".into(), curves: vec![curve] }] };
        assert_eq!(table.to_csv(), "panel,series,x,median,low,high,published\np,a,0.5,,,,9\np,a,1,2,2,2,2.5\n");
    }
}
