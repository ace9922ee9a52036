//! Scale of an axis, which maps values to pixels and places the ticks.

/// Linear or logarithmic scale of an axis, which maps values to pixels.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct AxisScale {
    min_value: f64,
    max_value: f64,
    is_logarithmic: bool,
    /// Pixel positions of the values `min_value` and `max_value`.
    pixel_range: (i32, i32),
}

/// Approximate number of ticks on a linear axis.
const LINEAR_TICK_COUNT: f64 = 6.0;
/// Number of decades below which a logarithmic axis also gets ticks between the powers of ten.
const MAX_DECADES_WITH_MINOR_TICKS: f64 = 2.2;

impl AxisScale {
    /// Returns a scale that covers `values` with a margin, or exactly `range` if given. If `starts_at_zero` is set, a
    /// linear scale starts at 0 unless a value is negative.
    pub fn new(
        values: &[f64],
        range: Option<[f64; 2]>,
        is_logarithmic: bool,
        starts_at_zero: bool,
        pixel_range: (i32, i32),
    ) -> Self {
        let usable_values =
            values.iter().copied().filter(|value| value.is_finite() && (!is_logarithmic || *value > 0.0));
        let (least, greatest) = usable_values.fold((f64::INFINITY, f64::NEG_INFINITY), |(least, greatest), value| {
            (least.min(value), greatest.max(value))
        });
        let (min_value, max_value) = match range {
            Some([min_value, max_value]) => (min_value, max_value),
            None if least > greatest => (if is_logarithmic { 0.1 } else { 0.0 }, 1.0),
            None if is_logarithmic => (least / 1.25, greatest * 1.25),
            None => {
                let margin = if greatest > least { (greatest - least) * 0.05 } else { greatest.abs().max(1.0) * 0.05 };
                let min_value = if starts_at_zero && least >= 0.0 { 0.0 } else { least - margin };
                (min_value, greatest + margin)
            }
        };
        Self { min_value, max_value, is_logarithmic, pixel_range }
    }

    /// Returns the scale with its upper end raised by the given fraction of the axis's length.
    pub fn with_raised_end(self, fraction: f64) -> Self {
        Self { max_value: self.value_at_fraction(1.0 + fraction), ..self }
    }

    pub fn min_value(&self) -> f64 {
        self.min_value
    }

    fn axis_fraction(&self, value: f64) -> f64 {
        let to_linear = |value: f64| if self.is_logarithmic { value.max(f64::MIN_POSITIVE).ln() } else { value };
        (to_linear(value) - to_linear(self.min_value)) / (to_linear(self.max_value) - to_linear(self.min_value))
    }

    fn value_at_fraction(&self, fraction: f64) -> f64 {
        if self.is_logarithmic {
            self.min_value * (self.max_value / self.min_value).powf(fraction)
        } else {
            self.min_value + (self.max_value - self.min_value) * fraction
        }
    }

    /// Returns the pixel position of a value, or that of the nearer end if the value is outside the axis.
    pub fn to_pixel(self, value: f64) -> i32 {
        let (start_pixel, end_pixel) = self.pixel_range;
        start_pixel + (f64::from(end_pixel - start_pixel) * self.axis_fraction(value).clamp(0.0, 1.0)).round() as i32
    }

    pub fn is_visible(&self, value: f64) -> bool {
        const AXIS_EDGE_TOLERANCE: f64 = 1e-9;
        value.is_finite() && (-AXIS_EDGE_TOLERANCE..=1.0 + AXIS_EDGE_TOLERANCE).contains(&self.axis_fraction(value))
    }

    /// Returns the values at which the axis has ticks, each with its label.
    pub fn labelled_ticks(&self) -> Vec<(f64, String)> {
        let values = if self.is_logarithmic { self.log_ticks() } else { self.linear_ticks() };
        values.into_iter().filter(|value| self.is_visible(*value)).map(|value| (value, format_tick(value))).collect()
    }

    fn linear_ticks(&self) -> Vec<f64> {
        let min_step = (self.max_value - self.min_value) / LINEAR_TICK_COUNT;
        let magnitude = 10f64.powf(min_step.log10().floor());
        let step = [1.0, 2.0, 5.0, 10.0].map(|nice| nice * magnitude).into_iter().find(|step| *step >= min_step);
        let step = step.unwrap_or(10.0 * magnitude);
        let first_index = (self.min_value / step).ceil() as i64;
        let last_index = (self.max_value / step).floor() as i64;
        (first_index..=last_index).map(|index| index as f64 * step).collect()
    }

    fn log_ticks(&self) -> Vec<f64> {
        let exponents = (self.min_value.log10().floor() as i32)..=(self.max_value.log10().ceil() as i32);
        let leading_digits: &[f64] = if (self.max_value / self.min_value).log10() < MAX_DECADES_WITH_MINOR_TICKS {
            &[1.0, 2.0, 5.0]
        } else {
            &[1.0]
        };
        exponents.flat_map(|decade| leading_digits.iter().map(move |digit| digit * 10f64.powi(decade))).collect()
    }

    /// Returns the parts of the line through `points` that lie within the range of the vertical axis. All x must be
    /// within the horizontal axis.
    pub fn clip_line(&self, points: &[(f64, f64)]) -> Vec<Vec<(f64, f64)>> {
        let mut segments: Vec<Vec<(f64, f64)>> = Vec::new();
        let mut segment: Vec<(f64, f64)> = Vec::new();
        for (index, &(x, y)) in points.iter().enumerate() {
            let fraction = self.axis_fraction(y);
            let is_inside = (0.0..=1.0).contains(&fraction);
            if let Some(&(previous_x, previous_y)) =
                index.checked_sub(1).and_then(|previous_index| points.get(previous_index))
            {
                let previous_fraction = self.axis_fraction(previous_y);
                let was_inside = (0.0..=1.0).contains(&previous_fraction);
                if is_inside != was_inside {
                    let edge_fraction = if fraction.max(previous_fraction) > 1.0 { 1.0 } else { 0.0 };
                    let interpolation_weight = (edge_fraction - previous_fraction) / (fraction - previous_fraction);
                    segment.push((
                        previous_x + (x - previous_x) * interpolation_weight,
                        self.value_at_fraction(edge_fraction),
                    ));
                    if was_inside {
                        segments.push(std::mem::take(&mut segment));
                    }
                }
            }
            if is_inside {
                segment.push((x, y));
            }
        }
        segments.push(segment);
        segments.retain(|segment| segment.len() > 1);
        segments
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

    fn tick_labels(scale: &AxisScale) -> Vec<String> {
        scale.labelled_ticks().into_iter().map(|(_, label)| label).collect()
    }

    #[test]
    fn ticks_are_at_round_values() {
        let linear_scale = AxisScale::new(&[0.0, 97.0], None, false, true, (0, 100));
        assert_eq!(tick_labels(&linear_scale), ["0", "20", "40", "60", "80", "100"]);
        let log_scale = AxisScale::new(&[0.02, 30.0], None, true, true, (0, 100));
        assert_eq!(tick_labels(&log_scale), ["0.1", "1", "10"]);
        let two_decade_scale = AxisScale::new(&[2.0, 64.0], None, true, true, (0, 100));
        assert_eq!(tick_labels(&two_decade_scale), ["2", "5", "10", "20", "50"]);
        let large_scale = AxisScale::new(&[20_000.0, 200_000.0], None, false, false, (0, 100));
        assert_eq!(tick_labels(&large_scale), ["50k", "100k", "150k", "200k"]);
    }

    #[test]
    fn values_are_mapped_to_pixels_along_the_axis() {
        let scale = AxisScale::new(&[], Some([1.0, 100.0]), true, true, (200, 0));
        assert_eq!([1.0, 10.0, 100.0, 1000.0].map(|value| scale.to_pixel(value)), [200, 100, 0, 0]);
        assert!(scale.is_visible(100.0) && !scale.is_visible(100.1));
    }

    #[test]
    fn lines_are_clipped_at_the_ends_of_the_axis() {
        let scale = AxisScale::new(&[], Some([0.0, 10.0]), false, true, (100, 0));
        let points = [(0.0, 5.0), (1.0, 15.0), (2.0, 15.0), (3.0, 5.0), (4.0, 5.0)];
        assert_eq!(
            scale.clip_line(&points),
            [vec![(0.0, 5.0), (0.5, 10.0)], vec![(2.5, 10.0), (3.0, 5.0), (4.0, 5.0)]]
        );
        assert_eq!(scale.clip_line(&[(0.0, 20.0), (1.0, 30.0)]), Vec::<Vec<(f64, f64)>>::new());
    }
}
