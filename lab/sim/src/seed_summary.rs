//! Summary of a result over several seeds.

use coreward_model::statistics::{mean, median};
use serde::Serialize;

/// Median, mean and range of a result over several seeds.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, serde::Deserialize)]
pub struct SeedSummary {
    pub median: f64,
    pub mean: f64,
    pub low: f64,
    pub high: f64,
}

impl SeedSummary {
    /// Returns the summary of `values`, or `None` if there are none.
    pub fn from_values(values: &[f64]) -> Option<Self> {
        Some(Self {
            median: median(values)?,
            mean: mean(values)?,
            low: values.iter().copied().fold(f64::INFINITY, f64::min),
            high: values.iter().copied().fold(f64::NEG_INFINITY, f64::max),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn summary_has_the_median_mean_and_range_of_the_seeds() {
        let expected = SeedSummary { median: 2.0, mean: 3.0, low: 1.0, high: 6.0 };
        assert_eq!(SeedSummary::from_values(&[6.0, 1.0, 2.0]), Some(expected));
        assert_eq!(SeedSummary::from_values(&[]), None);
    }
}
