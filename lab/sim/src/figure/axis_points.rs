//! Comparison of points on a horizontal axis.

/// Returns whether two x values are equal, apart from rounding errors (a relative difference up to 1e-9).
pub fn is_same_x(a: f64, b: f64) -> bool {
    (a - b).abs() <= 1e-9 * a.abs().max(b.abs())
}
