//! Command `coreward-lab sim capacity`, which searches for the highest load at which the p99 latency is within a bound.

use std::ops::RangeInclusive;

use serde::Serialize;

use super::outcome::Observer;
use super::server::{Response, ResponseSink};
use super::ticks::{NEVER, Tick, to_ticks};
use super::{Config, Error, simulate};
use crate::par_map_ordered;

/// Configuration of a search for the peak load.
#[derive(Debug, Clone, PartialEq)]
pub struct PeakConfig {
    /// Configuration of the simulated server. The search ignores its load and seed.
    pub config: Config,
    /// Upper bound of the 99th percentile (service level objective), in multiples of [`PeakConfig::slo_unit`].
    pub slo: f64,
    /// Seeds of the searches. Each seed has its own search.
    pub seeds: RangeInclusive<u64>,
    /// Number of bisection steps, from 1 to 30, after which the load is exact to 2^-steps.
    pub steps: u32,
    /// Requests whose 99th percentile the SLO bounds.
    pub slo_metric: SloMetric,
    /// Service time of which the SLO is a multiple.
    pub slo_unit: SloUnit,
}

/// Requests whose 99th percentile of latency the SLO bounds.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, clap::ValueEnum)]
pub enum SloMetric {
    /// The requests of the shortest class
    #[default]
    Short,
    /// All requests
    All,
}

/// Service time that serves as the unit of an SLO.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, clap::ValueEnum)]
pub enum SloUnit {
    /// The service time of the shortest class
    #[default]
    Short,
    /// The mean service time
    Mean,
}

impl Default for PeakConfig {
    fn default() -> Self {
        Self {
            config: Config::default(),
            slo: 30.0,
            seeds: 1..=5,
            steps: 10,
            slo_metric: SloMetric::default(),
            slo_unit: SloUnit::default(),
        }
    }
}

/// Estimated peak load with its confidence interval, as fractions of the cores' capacity.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct PeakLoadEstimate {
    /// Mean of the peak loads of all seeds. A seed's peak load is 0 if the SLO is missed at every load.
    pub peak_load: f64,
    /// Lower end of the mean's 95 % confidence interval (Student's t over the seeds, and half a step of bisection).
    pub low: f64,
    /// Upper end of the mean's 95 % confidence interval.
    pub high: f64,
}

/// Searches for the peak load by bisection. At every load, a seed yields the same requests, only with scaled gaps
/// between them. An error names the value that is out of range, and the allowed range.
pub fn find_peak_load(search: &PeakConfig) -> Result<PeakLoadEstimate, Error> {
    if !(search.slo > 0.0 && search.slo.is_finite()) {
        return Err(Error::InvalidSlo(search.slo));
    }
    if !(1..=30).contains(&search.steps) {
        return Err(Error::InvalidStepCount(search.steps));
    }
    if search.seeds.is_empty() {
        return Err(Error::NoSeeds);
    }
    // The run at the search's lowest load lasts longest in simulated time, so its ranges are checked.
    Config { load: 0.5f64.powi(search.steps as i32), ..search.config.clone() }.check_ranges()?;
    let configs: Vec<Config> = search
        .seeds
        .clone()
        .map(|seed| Config { seed, queue_limit: None, window_length: None, ..search.config.clone() })
        .collect();
    let peak_loads = par_map_ordered(&configs, |config| bisect_peak_load(search, config));
    Ok(estimate_with_confidence_interval(&peak_loads, 0.5f64.powi(search.steps as i32)))
}

fn bisect_peak_load(search: &PeakConfig, config: &Config) -> f64 {
    let (mut met_load, mut missed_load) = (0.0, 1.0);
    for _ in 0..search.steps {
        let load = (met_load + missed_load) / 2.0;
        if meets_slo(search, config, load) {
            met_load = load;
        } else {
            missed_load = load;
        }
    }
    met_load
}

/// Returns whether the 99th percentile of latency is within the SLO at `load`.
fn meets_slo(search: &PeakConfig, config: &Config, load: f64) -> bool {
    let slo_unit_time = if search.slo_unit == SloUnit::Mean { config.service.mean() } else { 1.0 };
    let measured_requests = config.request_count - config.request_count / 10;
    let mut observer = SloObserver {
        measurement_start: NEVER,
        latency_bound: to_ticks(search.slo * slo_unit_time),
        first_uncounted_class: if search.slo_metric == SloMetric::Short { 1 } else { u8::MAX },
        max_late_response_count: measured_requests / 100,
        response_count: 0,
        late_response_count: 0,
    };
    simulate(config, load, &mut observer);
    // The 99th percentile is within the bound if at most 1 % of the responses are late.
    observer.late_response_count * 100 <= observer.response_count
}

/// Counter of responses that exceed the SLO. It needs no histogram, and ends a run as soon as the SLO is missed.
struct SloObserver {
    measurement_start: Tick,
    latency_bound: Tick,
    /// Index of the first class whose requests are not counted.
    first_uncounted_class: u8,
    /// Number of late responses above which the SLO is missed, which is 1 % of all counted requests.
    max_late_response_count: u64,
    response_count: u64,
    late_response_count: u64,
}

impl ResponseSink for SloObserver {
    #[inline]
    fn handle_response(&mut self, response: &Response) {
        if response.request.arrived_at >= self.measurement_start && response.request.class < self.first_uncounted_class
        {
            self.response_count += 1;
            self.late_response_count +=
                u64::from(response.departed_at - response.request.arrived_at > self.latency_bound);
        }
    }
}

impl Observer for SloObserver {
    fn measure_from(&mut self, start_time: Tick) {
        self.measurement_start = start_time;
    }

    #[inline]
    fn is_result_decided(&self) -> bool {
        self.late_response_count > self.max_late_response_count
    }
}

/// Returns the mean of `values` with its 95 % confidence interval. Each value has a resolution of `step`.
fn estimate_with_confidence_interval(values: &[f64], step: f64) -> PeakLoadEstimate {
    let value_count = values.len() as f64;
    let mean = values.iter().sum::<f64>() / value_count;
    let sum_of_squares: f64 = values.iter().map(|value| (value - mean) * (value - mean)).sum();
    let standard_error =
        if values.len() > 1 { (sum_of_squares / (value_count - 1.0) / value_count).sqrt() } else { 0.0 };
    let half_width = student_t_quantile(values.len().saturating_sub(1)) * standard_error + step / 2.0;
    PeakLoadEstimate { peak_load: mean, low: (mean - half_width).max(0.0), high: (mean + half_width).min(1.0) }
}

/// Returns the 97.5 % quantile of Student's t distribution from a standard table. Between two rows, the one with fewer
/// degrees of freedom is used, which widens the interval.
fn student_t_quantile(degrees_of_freedom: usize) -> f64 {
    const QUANTILE_TABLE: [(usize, f64); 20] = [
        (1, 12.706),
        (2, 4.303),
        (3, 3.182),
        (4, 2.776),
        (5, 2.571),
        (6, 2.447),
        (7, 2.365),
        (8, 2.306),
        (9, 2.262),
        (10, 2.228),
        (12, 2.179),
        (14, 2.145),
        (16, 2.120),
        (18, 2.101),
        (20, 2.086),
        (25, 2.060),
        (30, 2.042),
        (40, 2.021),
        (60, 2.000),
        (120, 1.980),
    ];
    QUANTILE_TABLE.iter().rev().find(|(row, _)| *row <= degrees_of_freedom).map_or(0.0, |(_, t)| *t)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn confidence_interval_equals_hand_computed_interval() {
        // For 1, 2 and 3, the mean is 2, the standard error 1 / sqrt(3), and t(2) = 4.303.
        let peak = estimate_with_confidence_interval(&[0.1, 0.2, 0.3], 0.0);
        assert!((peak.peak_load - 0.2).abs() < 1e-12);
        let half_width = 4.303 * 0.1 / 3f64.sqrt();
        assert!(
            (peak.low - (0.2f64 - half_width).max(0.0)).abs() < 1e-12 && (peak.high - (0.2 + half_width)).abs() < 1e-12
        );
        assert_eq!(
            estimate_with_confidence_interval(&[0.5], 0.1),
            PeakLoadEstimate { peak_load: 0.5, low: 0.45, high: 0.55 }
        );
    }

    #[test]
    fn invalid_search_settings_are_rejected() {
        let search_error = |search: PeakConfig| find_peak_load(&search).unwrap_err().to_string();
        let zero_slo = PeakConfig { slo: 0.0, ..PeakConfig::default() };
        assert_eq!(search_error(zero_slo), "SLO 0: expected a number above 0, in multiples of the service time");
        assert!(search_error(PeakConfig { steps: 0, ..PeakConfig::default() }).contains("expected 1 to 30"));
        #[expect(clippy::reversed_empty_ranges)]
        let no_seeds = PeakConfig { seeds: 2..=1, ..PeakConfig::default() };
        assert_eq!(search_error(no_seeds), "no seeds: expected at least one");
    }
}
