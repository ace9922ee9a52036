//! Colours, marker shapes and font sizes of the pictures.

use plotters::style::RGBColor;

/// Colours of the series: the palette of Okabe and Ito, which colour-blind readers can distinguish, without its yellow,
/// which is too pale on white.
const SERIES_COLOURS: [RGBColor; 7] = [
    RGBColor(0, 114, 178),
    RGBColor(213, 94, 0),
    RGBColor(0, 158, 115),
    RGBColor(204, 121, 167),
    RGBColor(230, 159, 0),
    RGBColor(86, 180, 233),
    RGBColor(0, 0, 0),
];

/// Colour of text and of the axes.
pub const TEXT_COLOUR: RGBColor = RGBColor(40, 40, 40);
/// Colour of the grid lines behind the data.
pub const GRID_COLOUR: RGBColor = RGBColor(225, 225, 225);
pub const REFERENCE_LINE_COLOUR: RGBColor = RGBColor(110, 110, 110);

/// Font size of titles, as passed to the `plotters` crate, which divides it by 1.24 in the SVG.
pub const TITLE_FONT_SIZE_PX: u32 = 20;
/// Font size of axis and legend labels, in the unit of [`TITLE_FONT_SIZE_PX`].
pub const TEXT_FONT_SIZE_PX: u32 = 17;
/// Font size of small labels, in the unit of [`TITLE_FONT_SIZE_PX`].
pub const SMALL_FONT_SIZE_PX: u32 = 15;

/// Returns the colour of the series with this index. Colours repeat after the last.
pub fn series_colour(index: usize) -> RGBColor {
    SERIES_COLOURS[index % SERIES_COLOURS.len()]
}

/// Shape of a series' markers, which distinguishes the series in print without colour.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum MarkerShape {
    /// Circle with the marker's radius.
    Circle,
    /// Square with horizontal sides.
    Square,
    /// Square that rests on a corner.
    Diamond,
    TriangleUp,
    TriangleDown,
}

pub fn series_marker_shape(index: usize) -> MarkerShape {
    [MarkerShape::Circle, MarkerShape::Square, MarkerShape::TriangleUp, MarkerShape::Diamond, MarkerShape::TriangleDown]
        [index % 5]
}

impl MarkerShape {
    /// Returns the corners of a marker centred at (0, 0) and about twice `radius` wide. A circle has none.
    pub fn corners(self, radius: i32) -> Vec<(i32, i32)> {
        match self {
            Self::Circle => Vec::new(),
            Self::Square => vec![(-radius, -radius), (radius, -radius), (radius, radius), (-radius, radius)],
            Self::Diamond => vec![(0, -radius - 1), (radius + 1, 0), (0, radius + 1), (-radius - 1, 0)],
            Self::TriangleUp => vec![(0, -radius - 1), (radius + 1, radius), (-radius - 1, radius)],
            Self::TriangleDown => vec![(0, radius + 1), (radius + 1, -radius), (-radius - 1, -radius)],
        }
    }
}

/// Returns the estimated width of a text (pixels). It includes a margin because the SVG's viewer chooses the font.
pub fn estimate_text_width_px(text: &str, font_size: u32) -> i32 {
    (text.chars().count() as f64 * f64::from(font_size) * 0.5).ceil() as i32
}

/// Breaks `text` into lines that are each at most about `max_width` pixels wide.
pub fn wrap_text(text: &str, font_size: u32, max_width: i32) -> Vec<String> {
    let mut lines: Vec<String> = Vec::new();
    for word in text.split_whitespace() {
        match lines.last_mut() {
            Some(line)
                if estimate_text_width_px(line, font_size)
                    + estimate_text_width_px(word, font_size)
                    + estimate_text_width_px(" ", font_size)
                    <= max_width =>
            {
                line.push(' ');
                line.push_str(word);
            }
            _ => lines.push(word.to_owned()),
        }
    }
    lines
}

/// Breaks `text` into as many lines as [`wrap_text`], but of similar length, so that the last is not a single word.
pub fn wrap_text_evenly(text: &str, font_size: u32, max_width: i32) -> Vec<String> {
    let line_count = wrap_text(text, font_size, max_width).len() as i32;
    let min_width = estimate_text_width_px(text, font_size) / line_count;
    let fitting_width = (min_width..max_width)
        .step_by(font_size as usize)
        .find(|line_width| wrap_text(text, font_size, *line_width).len() as i32 <= line_count);
    wrap_text(text, font_size, fitting_width.unwrap_or(max_width))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn text_is_wrapped_at_words() {
        assert_eq!(wrap_text("one two three", 10, 50), ["one two", "three"]);
        assert_eq!(wrap_text("indivisible", 10, 5), ["indivisible"]);
        assert_eq!(wrap_text("one two three four", 10, 70), ["one two three", "four"]);
        assert_eq!(wrap_text_evenly("one two three four", 10, 70), ["one two", "three four"]);
    }
}
