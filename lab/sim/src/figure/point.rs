//! Comparison of points on a horizontal axis.

/// Returns whether two x values are the same point of a horizontal axis, apart from rounding errors of its scaling.
pub fn is_same_x(a: f64, b: f64) -> bool {
    (a - b).abs() <= 1e-9 * a.abs().max(b.abs())
}
