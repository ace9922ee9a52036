//! Legend below the panels, with one entry per series and a remark that explains filled and open markers.

use plotters::style::Color;

use super::canvas::{DrawResult, SvgArea, TextAnchor, draw_dashed_line, draw_line, draw_marker, draw_text};
use super::style::{self, SMALL_FONT_SIZE_PX, TEXT_FONT_SIZE_PX};
use crate::figure::scenario::FigureScenario;
use crate::figure::table::FigureTable;

/// Height of a legend row (pixels).
const LEGEND_ROW_HEIGHT_PX: i32 = 22;
const LEGEND_SAMPLE_WIDTH_PX: i32 = 34;
const LEGEND_ENTRY_SPACING_PX: i32 = 22;

pub struct FigureLegend {
    /// Entries of the legend, each with the index of its series, its label, and its position in pixels.
    series_entries: Vec<(usize, String, (i32, i32))>,
    /// Style of each series in the scenario, as [`FigureScenario::series_style`] returns it.
    series_styles: Vec<(usize, bool)>,
    /// Lines of text below the entries that explain the markers.
    remark_lines: Vec<String>,
    row_count: i32,
}

impl FigureLegend {
    /// Computes the legend for all series that appear in the panels, in rows of `width` pixels.
    pub fn new(scenario: &FigureScenario, table: &FigureTable, width: i32) -> Self {
        let (mut x, mut row, mut series_entries) = (0, 0, Vec::new());
        for (index, series) in scenario.series.iter().enumerate() {
            let label = series.label.get_ref().clone();
            let entry_width = LEGEND_SAMPLE_WIDTH_PX + style::estimate_text_width_px(&label, TEXT_FONT_SIZE_PX);
            if x > 0 && x + entry_width > width {
                (x, row) = (0, row + 1);
            }
            series_entries.push((index, label, (x, row * LEGEND_ROW_HEIGHT_PX)));
            x += entry_width + LEGEND_ENTRY_SPACING_PX;
        }
        let series_styles = (0..scenario.series.len()).map(|index| scenario.series_style(index)).collect();
        Self {
            series_entries,
            series_styles,
            remark_lines: style::wrap_text(&explain_markers(scenario, table), SMALL_FONT_SIZE_PX, width),
            row_count: row + 1,
        }
    }

    /// Returns the legend's height (pixels).
    pub fn height_px(&self) -> i32 {
        (self.row_count + self.remark_lines.len() as i32) * LEGEND_ROW_HEIGHT_PX
    }

    /// Draws the legend with its top left corner at `origin`.
    pub fn draw(&self, area: &SvgArea<'_>, origin: (i32, i32)) -> DrawResult {
        for (index, label, offset) in &self.series_entries {
            let (x, y) = (origin.0 + offset.0, origin.1 + offset.1 + LEGEND_ROW_HEIGHT_PX / 2);
            let (style_index, is_open) = self.series_styles[*index];
            let colour = style::series_colour(style_index);
            if is_open {
                draw_dashed_line(area, &[(x, y), (x + LEGEND_SAMPLE_WIDTH_PX - 8, y)], colour.stroke_width(1))?;
            } else {
                draw_line(area, vec![(x, y), (x + LEGEND_SAMPLE_WIDTH_PX - 8, y)], colour.stroke_width(2))?;
            }
            draw_marker(
                area,
                (x + (LEGEND_SAMPLE_WIDTH_PX - 8) / 2, y),
                style::series_marker_shape(style_index),
                colour,
                is_open,
            )?;
            draw_text(
                area,
                label,
                (x + LEGEND_SAMPLE_WIDTH_PX, y),
                TEXT_FONT_SIZE_PX,
                style::TEXT_COLOUR,
                TextAnchor::Left,
            )?;
        }
        for (index, remark_line) in self.remark_lines.iter().enumerate() {
            let y = origin.1 + (self.row_count + index as i32) * LEGEND_ROW_HEIGHT_PX + LEGEND_ROW_HEIGHT_PX / 2;
            draw_text(
                area,
                remark_line,
                (origin.0, y),
                SMALL_FONT_SIZE_PX,
                style::REFERENCE_LINE_COLOUR,
                TextAnchor::Left,
            )?;
        }
        Ok(())
    }
}

fn explain_markers(scenario: &FigureScenario, table: &FigureTable) -> String {
    let (verb, singular, plural) =
        if scenario.live.is_some() { ("measured", "run", "runs") } else { ("simulated", "seed", "seeds") };
    let mut explanation = match table.seeds {
        1 => format!("filled: {verb} here (one {singular})"),
        count => format!("filled: {verb} here, median of {count} {plural}, lowest to highest as whiskers or band"),
    };
    if scenario.series.iter().any(|series| series.simulated) {
        explanation += "; open, dashed: simulated";
    }
    if table.panels.iter().flat_map(|panel| &panel.curves).any(|curve| !curve.published.is_empty()) {
        explanation += "; open, dashed: published";
    }
    let logarithmic_panels = scenario.panel.iter().zip(&table.panels).filter(|(panel, _)| panel.y.log);
    let mut cells = logarithmic_panels.flat_map(|(_, panel_table)| &panel_table.curves).flat_map(|curve| &curve.cells);
    if cells.any(|cell| cell.spread.median <= 0.0) {
        explanation += "; a logarithmic axis does not show zeros: see the table";
    }
    explanation
}
