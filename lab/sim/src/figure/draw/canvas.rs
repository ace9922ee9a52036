//! Functions that draw lines, markers and text at pixel positions.

use plotters::coord::Shift;
use plotters::prelude::*;
use plotters::style::text_anchor::{HPos, Pos, VPos};

use super::style::MarkerShape;

/// Area of an SVG picture in which shapes are placed by pixel.
pub type SvgArea<'a> = DrawingArea<SVGBackend<'a>, Shift>;
/// Result of a drawing function. Writing an SVG into memory cannot fail, so an error means an impossible shape (a bug).
pub type DrawResult = Result<(), DrawingAreaErrorKind<std::io::Error>>;

/// Half of a marker's width and height (pixels).
const MARKER_RADIUS_PX: i32 = 4;

/// Point of a text that [`draw_text`] places at the given position.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum TextAnchor {
    /// Middle of the text's left edge.
    Left,
    /// Middle of the text's top edge.
    Top,
    /// Middle of the text's bottom edge.
    Bottom,
    /// Middle of the text's right edge.
    Right,
    /// Centre of the text, which runs upwards.
    CentreOfUpwardText,
}

/// Writes `text` with a font of `size_px` pixels, so that its anchor is at `position`.
pub fn draw_text(
    area: &SvgArea<'_>,
    text: &str,
    position: (i32, i32),
    size_px: u32,
    colour: RGBColor,
    anchor: TextAnchor,
) -> DrawResult {
    let alignment = match anchor {
        TextAnchor::Left => Pos::new(HPos::Left, VPos::Center),
        TextAnchor::Top => Pos::new(HPos::Center, VPos::Top),
        TextAnchor::Bottom => Pos::new(HPos::Center, VPos::Bottom),
        TextAnchor::Right => Pos::new(HPos::Right, VPos::Center),
        TextAnchor::CentreOfUpwardText => Pos::new(HPos::Center, VPos::Center),
    };
    let font = ("sans-serif", size_px).into_font();
    let font = if anchor == TextAnchor::CentreOfUpwardText { font.transform(FontTransform::Rotate270) } else { font };
    let style = TextStyle::from(font).color(&colour).pos(alignment);
    area.draw(&Text::new(text.to_owned(), position, style))
}

pub fn draw_line(area: &SvgArea<'_>, points: Vec<(i32, i32)>, style: ShapeStyle) -> DrawResult {
    area.draw(&PathElement::new(points, style))
}

pub fn draw_dashed_line(area: &SvgArea<'_>, points: &[(i32, i32)], style: ShapeStyle) -> DrawResult {
    area.draw(&plotters::element::DashedPathElement::new(points.to_vec(), 6, 4, style))
}

/// Draws a marker at `centre`, with a white interior if `is_open` is set and a coloured one otherwise.
pub fn draw_marker(
    area: &SvgArea<'_>,
    centre: (i32, i32),
    shape: MarkerShape,
    colour: RGBColor,
    is_open: bool,
) -> DrawResult {
    let fill_colour = if is_open { WHITE } else { colour };
    let corners: Vec<(i32, i32)> =
        shape.corners(MARKER_RADIUS_PX).into_iter().map(|(x, y)| (centre.0 + x, centre.1 + y)).collect();
    if corners.is_empty() {
        area.draw(&Circle::new(centre, MARKER_RADIUS_PX, fill_colour.filled()))?;
        return area.draw(&Circle::new(centre, MARKER_RADIUS_PX, colour.stroke_width(2)));
    }
    area.draw(&Polygon::new(corners.clone(), fill_colour.filled()))?;
    let outline = corners.iter().chain(corners.first()).copied().collect();
    draw_line(area, outline, colour.stroke_width(2))
}

/// Draws a vertical line with caps at both ends, from a point's lowest to its highest value over all seeds.
pub fn draw_whisker(area: &SvgArea<'_>, x: i32, low_y: i32, high_y: i32, colour: RGBColor) -> DrawResult {
    if low_y == high_y {
        return Ok(());
    }
    let style = colour.stroke_width(1);
    draw_line(area, vec![(x, low_y), (x, high_y)], style)?;
    for y in [low_y, high_y] {
        draw_line(area, vec![(x - 3, y), (x + 3, y)], style)?;
    }
    Ok(())
}
