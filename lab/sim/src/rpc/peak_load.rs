//! Command `coreward-lab sim capacity`, which searches for the highest load at which the p99 latency is within a bound.

use std::ops::RangeInclusive;

use serde::Serialize;

use super::outcome::ResponseObserver;
use super::server::{ResponseSink, SimulatedResponse};
use super::ticks::{NEVER, Tick, time_units_to_ticks};
use super::{RpcSimulationConfig, RpcSimulationError, simulate_and_count_drops};
use crate::par_map_ordered;

/// Configuration of a search for the peak load.
#[derive(Debug, Clone, PartialEq)]
pub struct PeakLoadSearchConfig {
    /// Configuration of the simulated server. The search ignores its load and seed.
    pub simulation_config: RpcSimulationConfig,
    /// Upper bound of the 99th percentile of latency (service level objective), in multiples of
    /// [`PeakLoadSearchConfig::slo_unit`].
    pub latency_bound_in_slo_units: f64,
    /// Seeds of the searches. Each seed has its own search.
    pub seeds: RangeInclusive<u64>,
    /// Number of bisection steps, from 1 to 30, after which the load is exact to 2^-steps.
    pub bisection_steps: u32,
    /// Requests whose 99th percentile of latency the SLO bounds.
    pub slo_metric: SloRequestSelection,
    /// Service time of which the SLO is a multiple.
    pub slo_unit: SloTimeUnit,
}

/// Requests whose 99th percentile of latency the SLO bounds.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, clap::ValueEnum)]
pub enum SloRequestSelection {
    /// The requests of the shortest class
    #[default]
    Short,
    /// All requests
    All,
}

/// Service time that serves as the unit of an SLO.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, clap::ValueEnum)]
pub enum SloTimeUnit {
    /// The service time of the shortest class
    #[default]
    Short,
    /// The mean service time
    Mean,
}

impl Default for PeakLoadSearchConfig {
    fn default() -> Self {
        Self {
            simulation_config: RpcSimulationConfig::default(),
            latency_bound_in_slo_units: 30.0,
            seeds: 1..=5,
            bisection_steps: 10,
            slo_metric: SloRequestSelection::default(),
            slo_unit: SloTimeUnit::default(),
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

/// Searches for the peak load by bisection. For each seed, all loads get the same requests, and only the gaps between
/// them are scaled. An error names the value that is out of range, and the allowed range.
pub fn find_peak_load(search: &PeakLoadSearchConfig) -> Result<PeakLoadEstimate, RpcSimulationError> {
    if !(search.latency_bound_in_slo_units > 0.0 && search.latency_bound_in_slo_units.is_finite()) {
        return Err(RpcSimulationError::InvalidSlo(search.latency_bound_in_slo_units));
    }
    if !(1..=30).contains(&search.bisection_steps) {
        return Err(RpcSimulationError::InvalidBisectionStepCount(search.bisection_steps));
    }
    if search.seeds.is_empty() {
        return Err(RpcSimulationError::NoSeeds);
    }
    // The run at the search's lowest load lasts longest in simulated time, so its ranges are checked.
    RpcSimulationConfig {
        offered_load: 0.5f64.powi(search.bisection_steps as i32),
        ..search.simulation_config.clone()
    }
    .check_value_ranges()?;
    let configs: Vec<RpcSimulationConfig> = search
        .seeds
        .clone()
        .map(|seed| RpcSimulationConfig {
            seed,
            max_requests_in_server: None,
            latency_window_length: None,
            ..search.simulation_config.clone()
        })
        .collect();
    let peak_loads = par_map_ordered(&configs, |config| bisect_peak_load(search, config));
    Ok(compute_mean_and_confidence_interval(&peak_loads, 0.5f64.powi(search.bisection_steps as i32)))
}

fn bisect_peak_load(search: &PeakLoadSearchConfig, config: &RpcSimulationConfig) -> f64 {
    let (mut met_load, mut missed_load) = (0.0, 1.0);
    for _ in 0..search.bisection_steps {
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
fn meets_slo(search: &PeakLoadSearchConfig, config: &RpcSimulationConfig, load: f64) -> bool {
    let slo_unit_time = if search.slo_unit == SloTimeUnit::Mean { config.service_times.mean() } else { 1.0 };
    let measured_requests = config.request_count - config.request_count / 10;
    let mut observer = SloObserver {
        measurement_start: NEVER,
        latency_bound: time_units_to_ticks(search.latency_bound_in_slo_units * slo_unit_time),
        first_uncounted_class_index: if search.slo_metric == SloRequestSelection::Short { 1 } else { u8::MAX },
        max_late_response_count: measured_requests / 100,
        counted_response_count: 0,
        late_response_count: 0,
    };
    simulate_and_count_drops(config, load, &mut observer);
    // The 99th percentile is within the bound if at most 1 % of the responses are late.
    observer.late_response_count * 100 <= observer.counted_response_count
}

/// Counter of responses whose latency exceeds the SLO. It ends a simulation as soon as the SLO is certainly missed.
struct SloObserver {
    measurement_start: Tick,
    latency_bound: Tick,
    /// Index of the first class whose requests are not counted.
    first_uncounted_class_index: u8,
    /// Number of late responses above which the SLO is missed, which is 1 % of all counted requests.
    max_late_response_count: u64,
    counted_response_count: u64,
    late_response_count: u64,
}

impl ResponseSink for SloObserver {
    #[inline]
    fn handle_response(&mut self, response: &SimulatedResponse) {
        if response.request.arrived_at >= self.measurement_start
            && response.request.class_index < self.first_uncounted_class_index
        {
            self.counted_response_count += 1;
            self.late_response_count +=
                u64::from(response.departed_at - response.request.arrived_at > self.latency_bound);
        }
    }
}

impl ResponseObserver for SloObserver {
    fn begin_measurement_at(&mut self, start_time: Tick) {
        self.measurement_start = start_time;
    }

    #[inline]
    fn can_end_simulation_early(&self) -> bool {
        self.late_response_count > self.max_late_response_count
    }
}

/// Returns the mean of `values` with its 95 % confidence interval, widened by half of `step`, the resolution of the
/// values.
fn compute_mean_and_confidence_interval(values: &[f64], step: f64) -> PeakLoadEstimate {
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
    const STUDENT_T_QUANTILES: [(usize, f64); 20] = [
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
    STUDENT_T_QUANTILES.iter().rev().find(|(row, _)| *row <= degrees_of_freedom).map_or(0.0, |(_, t)| *t)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn confidence_interval_equals_hand_computed_interval() {
        // For 1, 2 and 3, the mean is 2, the standard error 1 / sqrt(3), and t(2) = 4.303.
        let peak = compute_mean_and_confidence_interval(&[0.1, 0.2, 0.3], 0.0);
        assert!((peak.peak_load - 0.2).abs() < 1e-12);
        let half_width = 4.303 * 0.1 / 3f64.sqrt();
        assert!(
            (peak.low - (0.2f64 - half_width).max(0.0)).abs() < 1e-12 && (peak.high - (0.2 + half_width)).abs() < 1e-12
        );
        assert_eq!(
            compute_mean_and_confidence_interval(&[0.5], 0.1),
            PeakLoadEstimate { peak_load: 0.5, low: 0.45, high: 0.55 }
        );
    }

    #[test]
    fn invalid_search_settings_are_rejected() {
        let expect_search_error = |search: PeakLoadSearchConfig| find_peak_load(&search).unwrap_err().to_string();
        let zero_slo = PeakLoadSearchConfig { latency_bound_in_slo_units: 0.0, ..PeakLoadSearchConfig::default() };
        assert_eq!(expect_search_error(zero_slo), "SLO 0: expected a number above 0, in multiples of the service time");
        assert!(
            expect_search_error(PeakLoadSearchConfig { bisection_steps: 0, ..PeakLoadSearchConfig::default() })
                .contains("expected 1 to 30")
        );
        #[expect(clippy::reversed_empty_ranges)]
        let no_seeds = PeakLoadSearchConfig { seeds: 2..=1, ..PeakLoadSearchConfig::default() };
        assert_eq!(expect_search_error(no_seeds), "no seeds: expected at least one");
    }
}
