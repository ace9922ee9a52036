//! Drawing of a figure as SVG, with its panels in a grid and one legend below them. No chart library draws the axes,
//! because labels must be measured before the layout so that nothing overlaps.

mod canvas;
mod legend;
mod panel;
mod scale;
mod style;

use plotters::prelude::*;

use super::scenario::FigureScenario;
use super::table::FigureTable;
use canvas::{DrawResult, SvgArea, TextAnchor, draw_text};

const PANEL_SIZE_PX: (i32, i32) = (520, 390);
const SINGLE_PANEL_SIZE_PX: (i32, i32) = (900, 460);
/// Maximum number of panels side by side in a picture.
const MAX_PANEL_COLUMNS: usize = 2;
const FIGURE_MARGIN_PX: i32 = 14;

pub fn render_svg(scenario: &FigureScenario, table: &FigureTable) -> String {
    let (width, title_lines) = picture_width_and_title_lines(scenario);
    let panel_size = if scenario.panel.len() == 1 { SINGLE_PANEL_SIZE_PX } else { PANEL_SIZE_PX };
    let row_count = scenario.panel.len().div_ceil(MAX_PANEL_COLUMNS) as i32;
    let legend = legend::FigureLegend::new(scenario, table, width - 2 * FIGURE_MARGIN_PX);
    let title_height = title_lines.len() as i32 * (style::TITLE_FONT_SIZE_PX as i32 + 5) + FIGURE_MARGIN_PX;
    let height = title_height + row_count * panel_size.1 + legend.height_px() + FIGURE_MARGIN_PX;
    let mut svg = String::new();
    {
        let area = SVGBackend::with_string(&mut svg, (width as u32, height as u32)).into_drawing_area();
        // Drawing into a string can fail only if a position was computed wrongly here. The tests draw every scenario.
        draw_figure(&area, scenario, table, &title_lines, title_height, panel_size, &legend)
            .expect("an SVG is drawn into memory");
    }
    svg
}

/// Returns the picture's width (pixels) and the lines into which its title is broken.
fn picture_width_and_title_lines(scenario: &FigureScenario) -> (i32, Vec<String>) {
    let width = match scenario.panel.len() {
        1 => SINGLE_PANEL_SIZE_PX.0,
        panel_count => PANEL_SIZE_PX.0 * panel_count.min(MAX_PANEL_COLUMNS) as i32,
    };
    (width, style::wrap_text_evenly(&scenario.title, style::TITLE_FONT_SIZE_PX, width - 2 * FIGURE_MARGIN_PX))
}

fn draw_figure(
    area: &SvgArea<'_>,
    scenario: &FigureScenario,
    table: &FigureTable,
    title_lines: &[String],
    title_height: i32,
    panel_size: (i32, i32),
    legend: &legend::FigureLegend,
) -> DrawResult {
    area.fill(&WHITE)?;
    let middle_x = area.dim_in_pixel().0 as i32 / 2;
    for (index, line) in title_lines.iter().enumerate() {
        let y = FIGURE_MARGIN_PX + index as i32 * (style::TITLE_FONT_SIZE_PX as i32 + 5);
        draw_text(area, line, (middle_x, y), style::TITLE_FONT_SIZE_PX, style::TEXT_COLOUR, TextAnchor::Top)?;
    }
    for (index, (panel, panel_table)) in scenario.panel.iter().zip(&table.panels).enumerate() {
        let (column, row) = ((index % MAX_PANEL_COLUMNS) as i32, (index / MAX_PANEL_COLUMNS) as i32);
        let origin = (column * panel_size.0, title_height + row * panel_size.1);
        panel::PanelFrame::new(scenario, panel, panel_table, origin, panel_size).draw(area)?;
    }
    let row_count = scenario.panel.len().div_ceil(MAX_PANEL_COLUMNS) as i32;
    legend.draw(area, (FIGURE_MARGIN_PX, title_height + row_count * panel_size.1))?;
    area.present()
}
