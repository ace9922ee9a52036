//! Median and range of a value over several seeds or random draws.

use coreward_model::statistics::median;
use serde::Serialize;

/// Median and range of a value, over the seeds or over the draws of the simulation.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct MedianAndRange {
    pub median: f64,
    pub lowest: f64,
    pub highest: f64,
}

impl MedianAndRange {
    pub fn from_values(values: &[f64]) -> Self {
        Self {
            median: median(values).unwrap_or(f64::NAN),
            lowest: values.iter().copied().fold(f64::INFINITY, f64::min),
            highest: values.iter().copied().fold(f64::NEG_INFINITY, f64::max),
        }
    }

    pub fn range_contains(&self, value: f64) -> bool {
        (self.lowest..=self.highest).contains(&value)
    }

    pub fn format_table_cell(&self, digits: usize) -> String {
        format!("{:.digits$} ({:.digits$}-{:.digits$})", self.median, self.lowest, self.highest)
    }
}
