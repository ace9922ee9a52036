//! Statistics of the papers and the demo.

/// Returns the variance % of the values in one window, which is the population variance of x / mean, times 100
/// (CrossRSS, CoNEXT'20, Sect. 3, Fig. 2a). Returns `None` without values, or if their mean is 0.
pub fn variance_pct(values: &[f64]) -> Option<f64> {
    let mean = mean(values)?;
    if mean <= 0.0 {
        return None;
    }
    Some(values.iter().map(|x| (x / mean - 1.0).powi(2)).sum::<f64>() / values.len() as f64 * 100.0)
}

/// Returns the arithmetic mean of the values, or `None` if there are no values.
pub fn mean(values: &[f64]) -> Option<f64> {
    if values.is_empty() { None } else { Some(values.iter().sum::<f64>() / values.len() as f64) }
}

/// Returns the median of the values, or `None` without values. It is the mean of the two middle values if their number
/// is even.
pub fn median(values: &[f64]) -> Option<f64> {
    let mut sorted_values = values.to_vec();
    sorted_values.sort_by(f64::total_cmp);
    let middle = sorted_values.len() / 2;
    match sorted_values.len() {
        0 => None,
        n if n % 2 == 1 => Some(sorted_values[middle]),
        _ => Some((sorted_values[middle - 1] + sorted_values[middle]) / 2.0),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn variance_pct_matches_values_calculated_by_hand() {
        assert_eq!(variance_pct(&[1.0, 1.0, 1.0]), Some(0.0));
        assert_eq!(variance_pct(&[1.0, 3.0]), Some(25.0));
        assert_eq!(variance_pct(&[]), None);
        assert_eq!(variance_pct(&[0.0, 0.0]), None);
    }

    #[test]
    fn median_of_even_count_is_mean_of_middle_two() {
        assert_eq!(median(&[3.0, 1.0, 2.0]), Some(2.0));
        assert_eq!(median(&[4.0, 1.0, 2.0, 3.0]), Some(2.5));
        assert_eq!(median(&[]), None);
    }
}
