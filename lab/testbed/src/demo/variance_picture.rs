//! Picture of the demo's results, with each policy's per-core variance in every second, and the medians.

use std::path::Path;

use anyhow::anyhow;
use coreward_model::statistics::median;
use plotters::coord::Shift;
use plotters::prelude::*;
use plotters::style::text_anchor::{HPos, Pos, VPos};

use super::results::{DemoResults, PolicyRuns};

const PICTURE_SIZE_PX: (u32, u32) = (1200, 560);
/// Width of the panel that shows the variance in each second of the run (pixels).
const TIME_PANEL_WIDTH_PX: u32 = 740;
const PICTURE_FONT: (&str, u32) = ("sans-serif", 14);
const SMALL_PICTURE_FONT: (&str, u32) = ("sans-serif", 12);
/// Height of one line of a label, as a fraction of the panel's height.
const LABEL_LINE_HEIGHT_FRACTION: f64 = 0.032;
/// Colours of the policies, which Okabe and Ito chose to be distinguishable with colour-blindness.
const POLICY_COLORS: [RGBColor; 6] = [
    RGBColor(213, 94, 0),
    RGBColor(230, 159, 0),
    RGBColor(86, 180, 233),
    RGBColor(0, 158, 115),
    RGBColor(0, 114, 178),
    RGBColor(204, 121, 167),
];
const EXCLUDED_SECOND_COLOR: RGBColor = RGBColor(235, 235, 235);

type SvgDrawingArea<'a> = DrawingArea<SVGBackend<'a>, Shift>;

/// Draws the picture of the results into the file `path`. Fails when the file cannot be written.
pub fn draw_picture(results: &DemoResults, path: &Path) -> anyhow::Result<()> {
    let picture_area = SVGBackend::new(path, PICTURE_SIZE_PX).into_drawing_area();
    let draw_result = (|| -> Result<(), DrawingAreaErrorKind<_>> {
        picture_area.fill(&WHITE)?;
        let title = format!(
            "coreward-lab demo: {} servers x {} cores (RSS and cores emulated), medians over {} seeds",
            results.server_count,
            results.cores_per_server,
            results.policy_runs[0].seed_measures.len()
        );
        let (time_panel, medians_panel) =
            picture_area.titled(&title, ("sans-serif", 20))?.split_horizontally(TIME_PANEL_WIDTH_PX);
        draw_variance_by_second(results, &time_panel)?;
        draw_median_variances(results, &medians_panel)?;
        picture_area.present()
    })();
    draw_result.map_err(|error| anyhow!("cannot write {}: {error}", path.display()))
}

fn policy_color(index: usize) -> RGBColor {
    POLICY_COLORS[index % POLICY_COLORS.len()]
}

/// Returns the range of variances (%) for the axes of both panels. The axes are logarithmic, because policies differ by
/// orders of magnitude.
fn variance_axis_range(results: &DemoResults) -> std::ops::Range<f64> {
    let live_variances = results.policy_runs.iter().map(|runs| runs.core_load_variance_pct());
    let simulated_variances =
        results.simulated_variances.iter().map(|policy_variances| policy_variances.core_load_variance_pct);
    let highest_variance = live_variances.chain(simulated_variances).map(|summary| summary.highest).fold(1.0, f64::max);
    (results.noise_floor_pct / 2.0).clamp(0.001, 0.5)..highest_variance * 3.0
}

/// Returns points (second, per-core variance) of one policy. Each variance is the median over the seeds.
fn variance_points_by_second(runs: &PolicyRuns, seconds: u64) -> Vec<(f64, f64)> {
    let median_of_second = |second: u64| {
        let seed_variances =
            runs.seed_measures.iter().filter_map(|seed| seed.windows.get(second as usize)?.core_load_variance_pct);
        Some((second as f64 + 0.5, median(&seed_variances.collect::<Vec<_>>())?))
    };
    (0..seconds).filter_map(median_of_second).collect()
}

type DrawResult = Result<(), DrawingAreaErrorKind<std::io::Error>>;

fn draw_variance_by_second(results: &DemoResults, area: &SvgDrawingArea<'_>) -> DrawResult {
    let variance_range = variance_axis_range(results);
    let mut chart = ChartBuilder::on(area)
        .caption("per-core variance % of the work served, by second (colours as on the right)", PICTURE_FONT)
        .margin(12)
        .x_label_area_size(40)
        .y_label_area_size(56)
        .build_cartesian_2d(0.0..results.run_seconds as f64, variance_range.clone().log_scale())?;
    let excluded_seconds = (0..results.run_seconds).filter(|second| !results.timeline.is_second_counted(*second));
    chart.draw_series(excluded_seconds.map(|second| {
        let rectangle_corners = [(second as f64, variance_range.start), (second as f64 + 1.0, variance_range.end)];
        Rectangle::new(rectangle_corners, EXCLUDED_SECOND_COLOR.filled())
    }))?;
    chart.configure_mesh().disable_x_mesh().x_desc("s (grey: left out)").label_style(PICTURE_FONT).draw()?;
    for (event_second, event) in results.timeline.pool_changes() {
        let event_label = format!("a server {}", event.action_verb());
        let event_label_position = (event_second as f64 + 0.2, variance_range.end / 1.1);
        chart.draw_series(std::iter::once(Text::new(event_label, event_label_position, PICTURE_FONT)))?;
    }
    for (index, runs) in results.policy_runs.iter().enumerate() {
        let variance_line =
            LineSeries::new(variance_points_by_second(runs, results.run_seconds), policy_color(index).stroke_width(2));
        chart.draw_series(variance_line)?;
    }
    let noise_floor_line =
        [0.0, results.run_seconds as f64].map(|x| (x, results.noise_floor_pct.max(variance_range.start)));
    chart.draw_series(DashedLineSeries::new(noise_floor_line, 6, 4, BLACK.stroke_width(1)))?;
    let text = format!("noise floor {:.3}", results.noise_floor_pct);
    let noise_floor_label_position = (0.2, results.noise_floor_pct.max(variance_range.start * 1.5) / 1.05);
    chart.draw_series(std::iter::once(Text::new(text, noise_floor_label_position, PICTURE_FONT))).map(drop)
}

/// Draws each policy's median variance as a bar, the range over the seeds as a line, and the simulated range as a box.
fn draw_median_variances(results: &DemoResults, area: &SvgDrawingArea<'_>) -> DrawResult {
    let (count, scale) = (results.policy_runs.len(), variance_axis_range(results));
    let mut chart = ChartBuilder::on(area)
        .caption("per-core variance %: live by seed (bar, line), simulated by draw (box)", PICTURE_FONT)
        .margin(12)
        .x_label_area_size(40)
        .y_label_area_size(56)
        .build_cartesian_2d(0.0..count as f64, scale.clone().log_scale())?;
    chart.configure_mesh().disable_x_mesh().disable_x_axis().label_style(PICTURE_FONT).draw()?;
    for (index, runs) in results.policy_runs.iter().enumerate() {
        let (summary, left_x) = (runs.core_load_variance_pct(), index as f64);
        let bar_corners = [(left_x + 0.15, scale.start), (left_x + 0.85, summary.median)];
        chart.draw_series(std::iter::once(Rectangle::new(bar_corners, policy_color(index).filled())))?;
        let bar_center = left_x + 0.5;
        let whisker_line = [(bar_center, summary.lowest.max(scale.start)), (bar_center, summary.highest)];
        chart.draw_series(LineSeries::new(whisker_line, BLACK.stroke_width(2)))?;
        let simulated_summary = results.simulated_variances[index].core_load_variance_pct;
        let (box_left_x, box_right_x) = (left_x + 0.62, left_x + 0.8);
        let box_corners = [
            (box_left_x, simulated_summary.lowest.max(scale.start)),
            (box_right_x, simulated_summary.highest.max(scale.start)),
        ];
        for style in [WHITE.filled(), BLACK.stroke_width(1)] {
            chart.draw_series(std::iter::once(Rectangle::new(box_corners, style)))?;
        }
        let median_line = [box_left_x, box_right_x].map(|x| (x, simulated_summary.median.max(scale.start)));
        chart.draw_series(LineSeries::new(median_line, BLACK.stroke_width(2)))?;
        let label_style =
            SMALL_PICTURE_FONT.into_font().into_text_style(area).pos(Pos::new(HPos::Center, VPos::Bottom));
        for (line_number, text) in [(1.0, runs.policy.to_owned()), (0.0, format!("{:.2}", summary.median))] {
            let highest_value = summary.highest.max(simulated_summary.highest);
            let label_position = (
                bar_center,
                highest_value * 1.1 * (scale.end / scale.start).powf(LABEL_LINE_HEIGHT_FRACTION * line_number),
            );
            chart.draw_series(std::iter::once(Text::new(text, label_position, label_style.clone())))?;
        }
    }
    let noise_floor_line = [0.0, count as f64].map(|x| (x, results.noise_floor_pct.max(scale.start)));
    chart.draw_series(DashedLineSeries::new(noise_floor_line, 6, 4, BLACK.stroke_width(1))).map(drop)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn picture_names_every_policy() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("demo.svg");
        draw_picture(&super::super::results::tests::build_example_results(), &path).unwrap();
        let picture_text = std::fs::read_to_string(path).unwrap();
        for expected_text in [
            "hash",
            "8.00",
            "1.00",
            "noise floor 0.125",
            "RSS and cores emulated",
            "a server joins",
            "simulated",
            "</svg>",
        ] {
            assert!(picture_text.contains(expected_text), "{expected_text:?} is missing");
        }
    }
}
