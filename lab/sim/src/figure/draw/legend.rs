//! Legend below the panels: one entry per series, and the meaning of filled and open markers.

use plotters::style::Color;

use super::canvas::{Anchor, Area, DrawResult, draw_dashed_line, draw_line, draw_marker, draw_text};
use super::style::{self, SMALL_SIZE, TEXT_SIZE};
use crate::figure::scenario::Scenario;
use crate::figure::table::FigureTable;

/// Height of a row, width of a series' sample line, and gap between two entries (pixels).
const ROW_HEIGHT_PX: i32 = 22;
const SAMPLE_WIDTH_PX: i32 = 34;
const ENTRY_SPACING_PX: i32 = 22;

/// Layout of the legend: its entries with their positions, and the lines of the remark.
pub struct Legend {
    /// For each entry, the index of its series, its label and its position.
    entries: Vec<(usize, String, (i32, i32))>,
    /// [`Scenario::series_style`] of each series.
    styles: Vec<(usize, bool)>,
    /// Lines of the remark below the entries.
    remark_lines: Vec<String>,
    row_count: i32,
}

impl Legend {
    /// Computes the legend of all series in the panels, in rows of `width` pixels.
    pub fn of(scenario: &Scenario, table: &FigureTable, width: i32) -> Self {
        let (mut x, mut row, mut entries) = (0, 0, Vec::new());
        for (index, series) in scenario.series.iter().enumerate() {
            let label = series.label.get_ref().clone();
            let wide = SAMPLE_WIDTH_PX + style::text_width(&label, TEXT_SIZE);
            if x > 0 && x + wide > width {
                (x, row) = (0, row + 1);
            }
            entries.push((index, label, (x, row * ROW_HEIGHT_PX)));
            x += wide + ENTRY_SPACING_PX;
        }
        let styles = (0..scenario.series.len()).map(|index| scenario.series_style(index)).collect();
        Self {
            entries,
            styles,
            remark_lines: style::wrap_text(&remark(scenario, table), SMALL_SIZE, width),
            row_count: row + 1,
        }
    }

    /// Returns the legend's height (pixels).
    pub fn height(&self) -> i32 {
        (self.row_count + self.remark_lines.len() as i32) * ROW_HEIGHT_PX
    }

    /// Draws the legend with its top left corner at `origin`.
    pub fn draw(&self, area: &Area<'_>, origin: (i32, i32)) -> DrawResult {
        for (index, label, place) in &self.entries {
            let (x, y) = (origin.0 + place.0, origin.1 + place.1 + ROW_HEIGHT_PX / 2);
            let (like, open) = self.styles[*index];
            let colour = style::series_colour(like);
            if open {
                draw_dashed_line(area, &[(x, y), (x + SAMPLE_WIDTH_PX - 8, y)], colour.stroke_width(1))?;
            } else {
                draw_line(area, vec![(x, y), (x + SAMPLE_WIDTH_PX - 8, y)], colour.stroke_width(2))?;
            }
            draw_marker(area, (x + (SAMPLE_WIDTH_PX - 8) / 2, y), style::series_shape(like), colour, open)?;
            draw_text(area, label, (x + SAMPLE_WIDTH_PX, y), TEXT_SIZE, style::TEXT_COLOUR, Anchor::Left)?;
        }
        for (index, remark) in self.remark_lines.iter().enumerate() {
            let y = origin.1 + (self.row_count + index as i32) * ROW_HEIGHT_PX + ROW_HEIGHT_PX / 2;
            draw_text(area, remark, (origin.0, y), SMALL_SIZE, style::MARK, Anchor::Left)?;
        }
        Ok(())
    }
}

fn remark(scenario: &Scenario, table: &FigureTable) -> String {
    let (verb, singular, plural) =
        if scenario.live.is_some() { ("measured", "run", "runs") } else { ("simulated", "seed", "seeds") };
    let mut remark = match table.seeds {
        1 => format!("filled: {verb} here (one {singular})"),
        count => format!("filled: {verb} here, median of {count} {plural}, lowest to highest as whiskers or band"),
    };
    if scenario.series.iter().any(|series| series.simulated) {
        remark += "; open, dashed: simulated";
    }
    if table.panels.iter().flat_map(|panel| &panel.curves).any(|curve| !curve.published.is_empty()) {
        remark += "; open, dashed: published";
    }
    let logarithmic = scenario.panel.iter().zip(&table.panels).filter(|(panel, _)| panel.y.log);
    let mut cells = logarithmic.flat_map(|(_, numbers)| &numbers.curves).flat_map(|curve| &curve.cells);
    if cells.any(|cell| cell.spread.median <= 0.0) {
        remark += "; a logarithmic axis does not show zeros: see the table";
    }
    remark
}
