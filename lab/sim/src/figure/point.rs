//! Points of a horizontal axis.

/// Whether two numbers name the same point of a horizontal axis: scaling may change the last digits.
pub fn same_point(a: f64, b: f64) -> bool {
    (a - b).abs() <= 1e-9 * a.abs().max(b.abs())
}
