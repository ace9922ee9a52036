//! Axis: maps values to pixels, and places ticks.

/// Linear or logarithmic scale of an axis, which maps a range of values to a range of pixels.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct AxisScale {
    low: f64,
    high: f64,
    is_log: bool,
    /// Pixel positions of the values `low` and `high`.
    pixel_range: (i32, i32),
}

/// Approximate number of ticks on a linear axis.
const TICK_COUNT: f64 = 6.0;
/// Number of decades below which a logarithmic axis also has ticks between the powers of ten.
const MINOR_TICK_MAX_DECADES: f64 = 2.2;

impl AxisScale {
    /// Returns a scale that covers `values` with a margin, or exactly `range` if given. With `from_zero`, a linear
    /// scale starts at 0 unless a value is negative.
    pub fn new(
        values: &[f64],
        range: Option<[f64; 2]>,
        is_log: bool,
        from_zero: bool,
        pixel_range: (i32, i32),
    ) -> Self {
        let usable = values.iter().copied().filter(|value| value.is_finite() && (!is_log || *value > 0.0));
        let (least, greatest) =
            usable.fold((f64::INFINITY, f64::NEG_INFINITY), |(low, high), value| (low.min(value), high.max(value)));
        let (low, high) = match range {
            Some([low, high]) => (low, high),
            None if least > greatest => (if is_log { 0.1 } else { 0.0 }, 1.0),
            None if is_log => (least / 1.25, greatest * 1.25),
            None => {
                let room = if greatest > least { (greatest - least) * 0.05 } else { greatest.abs().max(1.0) * 0.05 };
                let low = if from_zero && least >= 0.0 { 0.0 } else { least - room };
                (low, greatest + room)
            }
        };
        Self { low, high, is_log, pixel_range }
    }

    /// Returns the scale with its upper end raised by a fraction of the axis' length.
    pub fn extended_by(self, part: f64) -> Self {
        Self { high: self.value_at(1.0 + part), ..self }
    }

    /// Returns the value at the lower end of the axis.
    pub fn low(&self) -> f64 {
        self.low
    }

    fn fraction_of(&self, value: f64) -> f64 {
        let axis = |value: f64| if self.is_log { value.max(f64::MIN_POSITIVE).ln() } else { value };
        (axis(value) - axis(self.low)) / (axis(self.high) - axis(self.low))
    }

    fn value_at(&self, position: f64) -> f64 {
        if self.is_log {
            self.low * (self.high / self.low).powf(position)
        } else {
            self.low + (self.high - self.low) * position
        }
    }

    /// Returns the pixel position of a value; that of the nearer end for values outside of the axis.
    pub fn pixel(&self, value: f64) -> i32 {
        let (from, to) = self.pixel_range;
        from + (f64::from(to - from) * self.fraction_of(value).clamp(0.0, 1.0)).round() as i32
    }

    pub fn is_visible(&self, value: f64) -> bool {
        const EDGE_TOLERANCE: f64 = 1e-9;
        value.is_finite() && (-EDGE_TOLERANCE..=1.0 + EDGE_TOLERANCE).contains(&self.fraction_of(value))
    }

    /// Returns the values of the ticks, each with its label.
    pub fn ticks(&self) -> Vec<(f64, String)> {
        let values = if self.is_log { self.log_ticks() } else { self.linear_ticks() };
        values.into_iter().filter(|value| self.is_visible(*value)).map(|value| (value, format_tick(value))).collect()
    }

    fn linear_ticks(&self) -> Vec<f64> {
        let minimum_step = (self.high - self.low) / TICK_COUNT;
        let magnitude = 10f64.powf(minimum_step.log10().floor());
        let step = [1.0, 2.0, 5.0, 10.0].map(|nice| nice * magnitude).into_iter().find(|step| *step >= minimum_step);
        let step = step.unwrap_or(10.0 * magnitude);
        let first = (self.low / step).ceil() as i64;
        let last = (self.high / step).floor() as i64;
        (first..=last).map(|index| index as f64 * step).collect()
    }

    fn log_ticks(&self) -> Vec<f64> {
        let decades = (self.low.log10().floor() as i32)..=(self.high.log10().ceil() as i32);
        let within: &[f64] =
            if (self.high / self.low).log10() < MINOR_TICK_MAX_DECADES { &[1.0, 2.0, 5.0] } else { &[1.0] };
        decades.flat_map(|decade| within.iter().map(move |digit| digit * 10f64.powi(decade))).collect()
    }

    /// Returns the parts of the line through `points` that are within the vertical axis. All x must be within the
    /// horizontal axis.
    pub fn clip(&self, points: &[(f64, f64)]) -> Vec<Vec<(f64, f64)>> {
        let mut pieces: Vec<Vec<(f64, f64)>> = Vec::new();
        let mut piece: Vec<(f64, f64)> = Vec::new();
        for (index, &(x, y)) in points.iter().enumerate() {
            let position = self.fraction_of(y);
            let inside = (0.0..=1.0).contains(&position);
            if let Some(&(before_x, before_y)) = index.checked_sub(1).and_then(|before| points.get(before)) {
                let before = self.fraction_of(before_y);
                let was_inside = (0.0..=1.0).contains(&before);
                if inside != was_inside {
                    let edge = if position.max(before) > 1.0 { 1.0 } else { 0.0 };
                    let part = (edge - before) / (position - before);
                    piece.push((before_x + (x - before_x) * part, self.value_at(edge)));
                    if was_inside {
                        pieces.push(std::mem::take(&mut piece));
                    }
                }
            }
            if inside {
                piece.push((x, y));
            }
        }
        pieces.push(piece);
        pieces.retain(|piece| piece.len() > 1);
        pieces
    }
}

/// Returns a short label for a tick, with `k` for thousands and `M` for millions.
fn format_tick(value: f64) -> String {
    let value = if value.abs() < 1e-12 { 0.0 } else { value };
    match value.abs() {
        magnitude if magnitude >= 1e6 => format!("{}M", super::super::table::format_number(value / 1e6)),
        magnitude if magnitude >= 1e4 => format!("{}k", super::super::table::format_number(value / 1e3)),
        _ => super::super::table::format_number(value),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn labels(scale: &AxisScale) -> Vec<String> {
        scale.ticks().into_iter().map(|(_, label)| label).collect()
    }

    #[test]
    fn ticks_are_round() {
        let linear = AxisScale::new(&[0.0, 97.0], None, false, true, (0, 100));
        assert_eq!(labels(&linear), ["0", "20", "40", "60", "80", "100"]);
        let log = AxisScale::new(&[0.02, 30.0], None, true, true, (0, 100));
        assert_eq!(labels(&log), ["0.1", "1", "10"]);
        let short = AxisScale::new(&[2.0, 64.0], None, true, true, (0, 100));
        assert_eq!(labels(&short), ["2", "5", "10", "20", "50"]);
        let large = AxisScale::new(&[20_000.0, 200_000.0], None, false, false, (0, 100));
        assert_eq!(labels(&large), ["50k", "100k", "150k", "200k"]);
    }

    #[test]
    fn pixels_run_from_end_to_end() {
        let scale = AxisScale::new(&[], Some([1.0, 100.0]), true, true, (200, 0));
        assert_eq!([1.0, 10.0, 100.0, 1000.0].map(|value| scale.pixel(value)), [200, 100, 0, 0]);
        assert!(scale.is_visible(100.0) && !scale.is_visible(100.1));
    }

    #[test]
    fn lines_are_clipped_at_the_edge() {
        let scale = AxisScale::new(&[], Some([0.0, 10.0]), false, true, (100, 0));
        let points = [(0.0, 5.0), (1.0, 15.0), (2.0, 15.0), (3.0, 5.0), (4.0, 5.0)];
        assert_eq!(scale.clip(&points), [vec![(0.0, 5.0), (0.5, 10.0)], vec![(2.5, 10.0), (3.0, 5.0), (4.0, 5.0)]]);
        assert_eq!(scale.clip(&[(0.0, 20.0), (1.0, 30.0)]), Vec::<Vec<(f64, f64)>>::new());
    }
}
