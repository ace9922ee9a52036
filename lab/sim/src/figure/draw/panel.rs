//! Drawing of one panel, that is its frame, axes and data.

use plotters::prelude::*;

use super::canvas::{
    DrawResult, SvgArea, TextAnchor, draw_dashed_line, draw_line, draw_marker, draw_text, draw_whisker,
};
use super::scale::AxisScale;
use super::style::{
    self, GRID_COLOUR, REFERENCE_LINE_COLOUR, SMALL_FONT_SIZE_PX, TEXT_COLOUR, TEXT_FONT_SIZE_PX, series_colour,
    series_marker_shape,
};
use crate::figure::scenario::{FigurePanel, FigureScenario, PlotType};
use crate::figure::table::{CurveCell, FigureCurve, PanelTable, PublishedCell, format_number};

/// Margin above the area that shows the data (pixels).
const PANEL_TOP_MARGIN_PX: i32 = 34;
const PANEL_RIGHT_MARGIN_PX: i32 = 18;
const PANEL_BOTTOM_MARGIN_PX: i32 = 62;
/// Distance from the panel's left edge to the middle of the vertical axis's label (pixels).
const Y_LABEL_OFFSET_PX: i32 = 18;
const REFERENCE_LINE_RIGHT_MARGIN_PX: i32 = 52;
const BAR_HEADROOM_FRACTION: f64 = 0.1;
/// Maximum number of points of a curve drawn with markers and whiskers. A curve with more points is a line with a band.
const MAX_MARKER_POINTS: usize = 40;
/// Gap between two groups of bars, as a fraction of a group's width.
const BAR_GROUP_GAP_FRACTION: f64 = 0.2;
/// Maximum number of bars in a panel for which each bar's value is written above it.
const MAX_LABELLED_BARS: usize = 18;

/// Panel of a figure, prepared for drawing with its position in the picture and the scales of its axes.
pub struct PanelFrame<'a> {
    panel: &'a FigurePanel,
    panel_table: &'a PanelTable,
    /// Style of each curve: the index of the series whose colour and shape it uses, and whether its markers are open.
    curve_styles: Vec<(usize, bool)>,
    x_scale: AxisScale,
    y_scale: AxisScale,
    /// Left, top, right and bottom edges of the area that shows the data (pixels).
    data_area_px: (i32, i32, i32, i32),
    origin_px: (i32, i32),
}

/// Bar of a panel, with its value and its style.
struct PanelBar {
    bar_value: f64,
    /// Lowest and highest value over the seeds, between which a whisker is drawn on the bar.
    value_range: Option<(f64, f64)>,
    series_index: usize,
    /// Whether the bar is drawn as an outline instead of a filled area.
    is_outline_only: bool,
}

impl<'a> PanelFrame<'a> {
    /// Computes the layout of a panel of `size` pixels, whose top left corner is at `origin_px`.
    pub fn new(
        scenario: &FigureScenario,
        panel: &'a FigurePanel,
        panel_table: &'a PanelTable,
        origin_px: (i32, i32),
        size: (i32, i32),
    ) -> Self {
        let curve_styles = panel_table.curves.iter().map(|curve| {
            let has_label_of_curve =
                |series: &crate::figure::scenario::FigureSeries| *series.label.get_ref() == curve.label;
            scenario.series_style(scenario.series.iter().position(has_label_of_curve).unwrap_or(0))
        });
        let (top_y, bottom_y) = (origin_px.1 + PANEL_TOP_MARGIN_PX, origin_px.1 + size.1 - PANEL_BOTTOM_MARGIN_PX);
        let reference_line_heights = panel.mark.iter().map(|reference_line| reference_line.y);
        let y_values: Vec<f64> =
            panel_table.curves.iter().flat_map(axis_y_values).chain(reference_line_heights).collect();
        let mut y_scale = AxisScale::new(&y_values, panel.y.range, panel.y.log, true, (bottom_y, top_y));
        if panel.draw == PlotType::Bars && panel.y.range.is_none() {
            y_scale = y_scale.with_raised_end(BAR_HEADROOM_FRACTION);
        }
        let widest_label = y_scale
            .labelled_ticks()
            .iter()
            .map(|(_, label)| style::estimate_text_width_px(label, SMALL_FONT_SIZE_PX))
            .max()
            .unwrap_or(0);
        let right_margin = if panel.mark.is_empty() { PANEL_RIGHT_MARGIN_PX } else { REFERENCE_LINE_RIGHT_MARGIN_PX };
        let (left_x, right_x) =
            (origin_px.0 + Y_LABEL_OFFSET_PX + 20 + widest_label, origin_px.0 + size.0 - right_margin);
        Self {
            panel,
            panel_table,
            curve_styles: curve_styles.collect(),
            x_scale: x_axis_scale(panel, panel_table, (left_x, right_x)),
            y_scale,
            data_area_px: (left_x, top_y, right_x, bottom_y),
            origin_px,
        }
    }

    pub fn draw(&self, area: &SvgArea<'_>) -> DrawResult {
        self.draw_axes(area)?;
        match self.panel.draw {
            PlotType::Lines => {
                for (curve, (style_index, is_open)) in self.panel_table.curves.iter().zip(&self.curve_styles) {
                    self.draw_published_cells(area, &curve.published, *style_index)?;
                    self.draw_curve(area, &curve.cells, *style_index, *is_open)?;
                }
                Ok(())
            }
            PlotType::Bars => self.draw_bars(area),
        }
    }

    fn draw_axes(&self, area: &SvgArea<'_>) -> DrawResult {
        let (left_x, top_y, right_x, bottom_y) = self.data_area_px;
        let middle_x = (left_x + right_x) / 2;
        draw_text(
            area,
            self.panel.title.get_ref(),
            (middle_x, self.origin_px.1 + 10),
            TEXT_FONT_SIZE_PX,
            TEXT_COLOUR,
            TextAnchor::Top,
        )?;
        for (value, label) in self.y_scale.labelled_ticks() {
            let y = self.y_scale.to_pixel(value);
            draw_line(area, vec![(left_x, y), (right_x, y)], GRID_COLOUR.stroke_width(1))?;
            draw_text(area, &label, (left_x - 8, y), SMALL_FONT_SIZE_PX, TEXT_COLOUR, TextAnchor::Right)?;
        }
        draw_text(
            area,
            &self.panel.y.label,
            (self.origin_px.0 + Y_LABEL_OFFSET_PX, (top_y + bottom_y) / 2),
            TEXT_FONT_SIZE_PX,
            TEXT_COLOUR,
            TextAnchor::CentreOfUpwardText,
        )?;
        for (x, label) in self.x_ticks() {
            if self.panel.draw == PlotType::Lines {
                draw_line(area, vec![(x, bottom_y), (x, bottom_y + 5)], TEXT_COLOUR.stroke_width(1))?;
            }
            draw_text(area, &label, (x, bottom_y + 9), SMALL_FONT_SIZE_PX, TEXT_COLOUR, TextAnchor::Top)?;
        }
        if let Some(sweep) = &self.panel.x {
            draw_text(area, &sweep.label, (middle_x, bottom_y + 32), TEXT_FONT_SIZE_PX, TEXT_COLOUR, TextAnchor::Top)?;
        }
        draw_line(area, vec![(left_x, top_y), (left_x, bottom_y), (right_x, bottom_y)], TEXT_COLOUR.stroke_width(1))?;
        self.draw_reference_lines(area)
    }

    fn draw_reference_lines(&self, area: &SvgArea<'_>) -> DrawResult {
        let (left_x, _, right_x, _) = self.data_area_px;
        for reference_line in self.panel.mark.iter().filter(|mark| self.y_scale.is_visible(mark.y)) {
            let y = self.y_scale.to_pixel(reference_line.y);
            draw_dashed_line(area, &[(left_x, y), (right_x, y)], REFERENCE_LINE_COLOUR.stroke_width(1))?;
            draw_text(
                area,
                &reference_line.label,
                (right_x + 6, y),
                SMALL_FONT_SIZE_PX,
                REFERENCE_LINE_COLOUR,
                TextAnchor::Left,
            )?;
        }
        Ok(())
    }

    fn x_ticks(&self) -> Vec<(i32, String)> {
        match (self.panel.draw, &self.panel.x) {
            (PlotType::Lines, _) => {
                self.x_scale.labelled_ticks().into_iter().map(|(x, label)| (self.x_scale.to_pixel(x), label)).collect()
            }
            (PlotType::Bars, None) => Vec::new(),
            (PlotType::Bars, Some(_)) => {
                let groups = bar_x_values(self.panel_table).into_iter().enumerate();
                groups
                    .map(|(group_index, x)| (self.x_scale.to_pixel(group_index as f64 + 0.5), format_number(x)))
                    .collect()
            }
        }
    }

    fn convert_to_pixels(&self, points: &[(f64, f64)]) -> Vec<(i32, i32)> {
        points.iter().map(|(x, y)| (self.x_scale.to_pixel(*x), self.y_scale.to_pixel(*y))).collect()
    }

    fn draw_curve(&self, area: &SvgArea<'_>, cells: &[CurveCell], series_index: usize, is_open: bool) -> DrawResult {
        let colour = series_colour(series_index);
        let medians: Vec<(f64, f64)> = cells.iter().map(|cell| (cell.x, cell.spread.median)).collect();
        if cells.len() > MAX_MARKER_POINTS {
            let upper_edge = cells.iter().map(|cell| (cell.x, cell.spread.high));
            let lower_edge = cells.iter().rev().map(|cell| (cell.x, cell.spread.low));
            let outline = self.convert_to_pixels(&upper_edge.chain(lower_edge).collect::<Vec<_>>());
            area.draw(&Polygon::new(outline, colour.mix(0.15).filled()))?;
        }
        for segment in self.y_scale.clip_line(&medians) {
            if is_open {
                draw_dashed_line(area, &self.convert_to_pixels(&segment), colour.stroke_width(1))?;
            } else {
                draw_line(area, self.convert_to_pixels(&segment), colour.stroke_width(2))?;
            }
        }
        if cells.len() > MAX_MARKER_POINTS {
            return Ok(());
        }
        for cell in cells {
            let x = self.x_scale.to_pixel(cell.x);
            if self.y_scale.is_visible(cell.spread.low) {
                self.draw_value_range(area, x, (cell.spread.low, cell.spread.high), colour)?;
            }
            if self.y_scale.is_visible(cell.spread.median) {
                let position = (x, self.y_scale.to_pixel(cell.spread.median));
                draw_marker(area, position, series_marker_shape(series_index), colour, is_open)?;
            }
        }
        Ok(())
    }

    fn draw_value_range(&self, area: &SvgArea<'_>, x: i32, (low, high): (f64, f64), colour: RGBColor) -> DrawResult {
        draw_whisker(area, x, self.y_scale.to_pixel(low), self.y_scale.to_pixel(high), colour)
    }

    fn draw_published_cells(
        &self,
        area: &SvgArea<'_>,
        published_cells: &[PublishedCell],
        series_index: usize,
    ) -> DrawResult {
        let colour = series_colour(series_index);
        let points: Vec<(f64, f64)> = published_cells.iter().map(|cell| (cell.x, cell.y)).collect();
        for segment in self.y_scale.clip_line(&points) {
            draw_dashed_line(area, &self.convert_to_pixels(&segment), colour.stroke_width(1))?;
        }
        if published_cells.len() > MAX_MARKER_POINTS {
            return Ok(());
        }
        for cell in published_cells.iter().filter(|cell| self.y_scale.is_visible(cell.y)) {
            if let Some(value_range) = cell.spread {
                self.draw_value_range(area, self.x_scale.to_pixel(cell.x), value_range, colour)?;
            }
            draw_marker(
                area,
                (self.x_scale.to_pixel(cell.x), self.y_scale.to_pixel(cell.y)),
                series_marker_shape(series_index),
                colour,
                true,
            )?;
        }
        Ok(())
    }

    /// Draws a bar for each series in each group, followed by an open bar for the paper's value if there is one.
    fn draw_bars(&self, area: &SvgArea<'_>) -> DrawResult {
        let group_x_values = bar_x_values(self.panel_table);
        let has_published_values = self.panel_table.curves.iter().any(|curve| !curve.published.is_empty());
        let bars_per_group = self.panel_table.curves.len() * if has_published_values { 2 } else { 1 };
        let bar_width = (1.0 - BAR_GROUP_GAP_FRACTION) / bars_per_group as f64;
        let are_bars_labelled = bars_per_group * group_x_values.len() <= MAX_LABELLED_BARS;
        for (group_index, x) in group_x_values.iter().enumerate() {
            let mut bar_left = group_index as f64 + BAR_GROUP_GAP_FRACTION / 2.0;
            for (curve, &(series_index, is_open)) in self.panel_table.curves.iter().zip(&self.curve_styles) {
                if let Some(cell) = curve.cells.iter().find(|cell| cell.x == *x) {
                    let value_range = Some((cell.spread.low, cell.spread.high));
                    let bar =
                        PanelBar { bar_value: cell.spread.median, value_range, series_index, is_outline_only: is_open };
                    self.draw_bar(area, (bar_left, bar_left + bar_width), &bar, are_bars_labelled)?;
                }
                bar_left += bar_width;
                if has_published_values {
                    if let Some(cell) = curve.published.iter().find(|cell| cell.x == *x) {
                        let bar = PanelBar {
                            bar_value: cell.y,
                            value_range: cell.spread,
                            series_index,
                            is_outline_only: true,
                        };
                        self.draw_bar(area, (bar_left, bar_left + bar_width), &bar, are_bars_labelled)?;
                    }
                    bar_left += bar_width;
                }
            }
        }
        Ok(())
    }

    fn draw_bar(
        &self,
        area: &SvgArea<'_>,
        (bar_left, bar_right): (f64, f64),
        bar: &PanelBar,
        is_labelled: bool,
    ) -> DrawResult {
        let (left_x, right_x) = (self.x_scale.to_pixel(bar_left) + 1, self.x_scale.to_pixel(bar_right) - 1);
        let (base_y, top_y) = (self.y_scale.to_pixel(self.y_scale.min_value()), self.y_scale.to_pixel(bar.bar_value));
        let corners = [(left_x, top_y), (right_x, base_y)];
        if bar.is_outline_only {
            area.draw(&Rectangle::new(corners, series_colour(bar.series_index).stroke_width(2)))?;
        } else {
            area.draw(&Rectangle::new(corners, series_colour(bar.series_index).filled()))?;
        }
        let middle_x = (left_x + right_x) / 2;
        let mut label_y = top_y;
        if let Some((low, high)) = bar.value_range {
            label_y = label_y.min(self.y_scale.to_pixel(high));
            self.draw_value_range(area, middle_x, (low, high), TEXT_COLOUR)?;
        }
        if is_labelled {
            draw_text(
                area,
                &format_bar_value(bar.bar_value),
                (middle_x, label_y - 3),
                SMALL_FONT_SIZE_PX,
                TEXT_COLOUR,
                TextAnchor::Bottom,
            )?;
        }
        Ok(())
    }
}

/// Returns the scale of the panel's horizontal axis, drawn over `pixel_range`. In a bar chart, each group of bars has
/// width 1.
fn x_axis_scale(panel: &FigurePanel, panel_table: &PanelTable, pixel_range: (i32, i32)) -> AxisScale {
    match panel.draw {
        PlotType::Lines => {
            let x_values: Vec<f64> = panel_table.curves.iter().flat_map(x_values).collect();
            let is_logarithmic = panel.x.as_ref().is_some_and(|sweep| sweep.log);
            AxisScale::new(&x_values, None, is_logarithmic, false, pixel_range)
        }
        PlotType::Bars => {
            AxisScale::new(&[], Some([0.0, bar_x_values(panel_table).len() as f64]), false, true, pixel_range)
        }
    }
}

/// Returns a bar's value as text, with one to three significant digits if it is below 1000.
fn format_bar_value(value: f64) -> String {
    match value.abs() {
        magnitude if magnitude >= 100.0 => format!("{value:.0}"),
        magnitude if magnitude >= 10.0 => format!("{value:.1}"),
        magnitude if magnitude >= 0.1 || magnitude == 0.0 => format!("{value:.2}"),
        magnitude if magnitude >= 0.01 => format!("{value:.3}"),
        magnitude => format!("{value:.*}", -magnitude.log10().floor() as usize),
    }
}

/// Returns all y values of a curve, measured and published, that the vertical axis must include.
fn axis_y_values(curve: &FigureCurve) -> impl Iterator<Item = f64> + '_ {
    let cell_values = curve.cells.iter().flat_map(|cell| [cell.spread.low, cell.spread.median, cell.spread.high]);
    let published_values = curve.published.iter().flat_map(|cell| {
        let (low, high) = cell.spread.unwrap_or((cell.y, cell.y));
        [low, cell.y, high]
    });
    cell_values.chain(published_values)
}

fn x_values(curve: &FigureCurve) -> impl Iterator<Item = f64> + '_ {
    curve.cells.iter().map(|cell| cell.x).chain(curve.published.iter().map(|cell| cell.x))
}

/// Returns the x values at which the panel has bars, in ascending order.
fn bar_x_values(panel_table: &PanelTable) -> Vec<f64> {
    let mut x_values: Vec<f64> = panel_table.curves.iter().flat_map(x_values).collect();
    x_values.sort_by(f64::total_cmp);
    x_values.dedup();
    x_values
}
