//! Smoothed loads of cores, computed from reports of absolute values.

use std::ops::Deref;
use std::sync::Arc;

/// Weight `alpha` of the newest value in a moving average: load = alpha x new + (1 - alpha) x old, with 0 < alpha <= 1.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct SmoothingWeight(f64);

/// Error returned for a [`SmoothingWeight`] that is not above 0 and at most 1.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
#[error("alpha {0}: expected a number above 0, at most 1")]
pub struct SmoothingWeightOutOfRange(pub f64);

impl SmoothingWeight {
    /// Weight in the CrossRSS paper, which is the default.
    pub const PAPER_VALUE: SmoothingWeight = SmoothingWeight(0.5);

    /// Returns the weight `value`. Fails unless `value` is above 0 and at most 1.
    pub fn new(value: f64) -> Result<Self, SmoothingWeightOutOfRange> {
        if value > 0.0 && value <= 1.0 { Ok(Self(value)) } else { Err(SmoothingWeightOutOfRange(value)) }
    }

    /// Returns the weight as a number.
    pub fn get(self) -> f64 {
        self.0
    }
}

/// Absolute busy times of a server's cores, as in one report of its agent.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CoreBusyTimeReadings {
    /// Sequence number, which grows with every report of one agent process.
    pub report_sequence_number: u64,
    /// Time of the measurement on the server's monotonic clock (ns).
    pub measured_at_ns: u64,
    /// Busy time of each core since a fixed time (ns).
    pub busy_ns_by_core: Vec<u64>,
}

/// Reason for which the readings of a report are rejected.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum BusyTimeReadingsRejection {
    /// The report is late, or was sent twice.
    #[error("report {sequence} after report {newest}: out of order")]
    OutOfOrder {
        /// Sequence number of the rejected report.
        sequence: u64,
        /// Sequence number of the newest accepted report.
        newest: u64,
    },
    /// The server's clock stopped or went back, although the sequence number grew.
    #[error("measured at {measured_ns} ns, not after the previous report's {newest_ns} ns")]
    ClockStalled {
        /// Time of measurement of the rejected report (ns).
        measured_ns: u64,
        /// Time of measurement of the newest accepted report (ns).
        newest_ns: u64,
    },
    /// The report has no cores.
    #[error("a report without cores")]
    NoCores,
    /// A core was busy for longer than is possible between two reports.
    #[error("core {core} was busy for {load:.1} times the time that passed: expected at most {MAX_ACCEPTED_CORE_LOAD}")]
    ImpossibleLoad {
        /// Index of the core.
        core: usize,
        /// Load of the core as a fraction of its capacity.
        load: f64,
    },
}

/// Maximum load of a core between two accepted reports, as a fraction of its capacity. Reports with a higher load are
/// rejected. A core is never busier than 1, but the kernel may count busy time late (once a second on a CPU without
/// ticks). After a rejection, the interval is longer, so the late time is then within the limit. A false report cannot
/// raise the average by more than the limit allows.
pub const MAX_ACCEPTED_CORE_LOAD: f64 = 16.0;

/// Loads of one server's cores by receive queue, as fractions of their capacity. They are created once per report.
/// Clones share the same loads, so that a comparison costs nothing.
#[derive(Debug, Clone)]
pub struct CoreLoads {
    load_by_core: Arc<[f64]>,
    load_sum: f64,
}

impl CoreLoads {
    /// Returns the sum of the cores' loads, added in order so that the controller and rack controllers get the same
    /// number.
    pub fn load_sum(&self) -> f64 {
        self.load_sum
    }
}

impl From<Vec<f64>> for CoreLoads {
    fn from(load_by_core: Vec<f64>) -> Self {
        Self { load_sum: load_by_core.iter().sum(), load_by_core: load_by_core.into() }
    }
}

impl FromIterator<f64> for CoreLoads {
    fn from_iter<I: IntoIterator<Item = f64>>(loads: I) -> Self {
        Vec::from_iter(loads).into()
    }
}

impl Deref for CoreLoads {
    type Target = [f64];

    fn deref(&self) -> &[f64] {
        &self.load_by_core
    }
}

impl PartialEq for CoreLoads {
    fn eq(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.load_by_core, &other.load_by_core) || self.load_by_core == other.load_by_core
    }
}

/// Tracker that computes the smoothed loads of one server's cores from its reports.
#[derive(Debug, Clone, Default)]
pub struct CoreLoadTracker {
    newest_readings: Option<CoreBusyTimeReadings>,
    loads: Option<CoreLoads>,
    /// Whether the previous readings may come from an earlier stream of reports, because the agent restarted.
    is_new_report_stream: bool,
}

impl CoreLoadTracker {
    /// Processes the readings of a report. Loads exist from the second report on, because a rate needs two readings.
    /// Fails if the report is older than the newest one, the server's clock did not advance, or the report has no
    /// cores. Readings of an earlier stream never cause a rejection, because they may have been wrong.
    ///
    /// Tracking restarts if the number of cores changed, or if a busy time decreased because the server was rebooted.
    pub fn record_report(
        &mut self,
        readings: CoreBusyTimeReadings,
        alpha: SmoothingWeight,
    ) -> Result<(), BusyTimeReadingsRejection> {
        if readings.busy_ns_by_core.is_empty() {
            return Err(BusyTimeReadingsRejection::NoCores);
        }
        if let Some(newest_readings) = &self.newest_readings {
            match core_loads_between_readings(newest_readings, &readings, self.is_new_report_stream) {
                Ok(Some(new_loads)) => self.update_smoothed_loads(new_loads, alpha),
                Ok(None) => self.loads = None,
                Err(_) if self.is_new_report_stream => self.loads = None,
                Err(rejection) => return Err(rejection),
            }
        }
        self.is_new_report_stream = false;
        self.newest_readings = Some(readings);
        Ok(())
    }

    /// Starts a new stream of reports, with new sequence numbers, because the agent restarted. The loads are kept.
    pub fn start_report_stream(&mut self) {
        self.is_new_report_stream = true;
    }

    /// Returns the smoothed load of each core as a fraction of its capacity, or `None` before the second report.
    pub fn smoothed_loads(&self) -> Option<&CoreLoads> {
        self.loads.as_ref()
    }

    fn update_smoothed_loads(&mut self, new_loads: Vec<f64>, alpha: SmoothingWeight) {
        self.loads = Some(match &self.loads {
            Some(old_loads) => {
                let smoothed_load =
                    |(old_load, new_load): (&f64, f64)| alpha.get() * new_load + (1.0 - alpha.get()) * old_load;
                old_loads.iter().zip(new_loads).map(smoothed_load).collect()
            }
            None => new_loads.into(),
        });
    }
}

/// Returns whether the server was rebooted since `newest_readings`: its core count changed, or a busy time decreased.
fn has_server_rebooted(newest_readings: &CoreBusyTimeReadings, new_readings: &CoreBusyTimeReadings) -> bool {
    newest_readings.busy_ns_by_core.len() != new_readings.busy_ns_by_core.len()
        || newest_readings.busy_ns_by_core.iter().zip(&new_readings.busy_ns_by_core).any(|(old, new)| new < old)
}

/// Returns the load of each core between two readings, or `None` if the server was rebooted meanwhile.
fn core_loads_between_readings(
    newest_readings: &CoreBusyTimeReadings,
    new_readings: &CoreBusyTimeReadings,
    is_new_stream: bool,
) -> Result<Option<Vec<f64>>, BusyTimeReadingsRejection> {
    if !is_new_stream && new_readings.report_sequence_number <= newest_readings.report_sequence_number {
        return Err(BusyTimeReadingsRejection::OutOfOrder {
            sequence: new_readings.report_sequence_number,
            newest: newest_readings.report_sequence_number,
        });
    }
    if has_server_rebooted(newest_readings, new_readings) {
        return Ok(None);
    }
    if new_readings.measured_at_ns <= newest_readings.measured_at_ns {
        let (measured_ns, newest_ns) = (new_readings.measured_at_ns, newest_readings.measured_at_ns);
        return Err(BusyTimeReadingsRejection::ClockStalled { measured_ns, newest_ns });
    }
    let core_loads = core_busy_fractions(newest_readings, new_readings);
    match core_loads.iter().copied().enumerate().find(|(_, load)| *load > MAX_ACCEPTED_CORE_LOAD) {
        Some((core, load)) => Err(BusyTimeReadingsRejection::ImpossibleLoad { core, load }),
        None => Ok(Some(core_loads)),
    }
}

/// Returns the fraction of time for which each core was busy between two readings. The server must not have rebooted
/// between them.
fn core_busy_fractions(newest_readings: &CoreBusyTimeReadings, new_readings: &CoreBusyTimeReadings) -> Vec<f64> {
    let elapsed_ns = (new_readings.measured_at_ns - newest_readings.measured_at_ns) as f64;
    newest_readings
        .busy_ns_by_core
        .iter()
        .zip(&new_readings.busy_ns_by_core)
        .map(|(old, new)| (new - old) as f64 / elapsed_ns)
        .collect()
}

/// Returns a load in the data plane's fixed-point format, where 1.0 is `LOAD_ONE`. Loads outside 0 to 4095 are clamped.
pub fn load_to_fixed_point(load: f64) -> u32 {
    (load * f64::from(coreward_intf::LOAD_ONE)) as u32
}

#[cfg(test)]
mod tests {
    use super::*;

    fn build_core_readings(report_sequence: u64, measured_ms: u64, busy_ms: &[u64]) -> CoreBusyTimeReadings {
        let busy_ns = busy_ms.iter().map(|ms| ms * 1_000_000).collect();
        CoreBusyTimeReadings {
            report_sequence_number: report_sequence,
            measured_at_ns: measured_ms * 1_000_000,
            busy_ns_by_core: busy_ns,
        }
    }

    #[test]
    fn report_with_an_impossible_load_is_rejected() {
        let mut tracker = CoreLoadTracker::default();
        tracker.record_report(build_core_readings(1, 0, &[0, 0]), SmoothingWeight::PAPER_VALUE).unwrap();
        let rejection =
            tracker.record_report(build_core_readings(2, 100, &[0, 2000]), SmoothingWeight::PAPER_VALUE).unwrap_err();
        assert_eq!(rejection.to_string(), "core 1 was busy for 20.0 times the time that passed: expected at most 16");
        assert_eq!(tracker.smoothed_loads(), None);
        tracker.record_report(build_core_readings(3, 200, &[0, 2000]), SmoothingWeight::PAPER_VALUE).unwrap();
        assert_eq!(tracker.smoothed_loads(), Some(&[0.0, 10.0].into_iter().collect()));
    }

    #[test]
    fn loads_are_moving_averages_of_busy_fractions() {
        let mut tracker = CoreLoadTracker::default();
        tracker.record_report(build_core_readings(1, 0, &[0, 0]), SmoothingWeight::PAPER_VALUE).unwrap();
        assert_eq!(tracker.smoothed_loads(), None);
        tracker.record_report(build_core_readings(2, 100, &[50, 0]), SmoothingWeight::PAPER_VALUE).unwrap();
        assert_eq!(tracker.smoothed_loads(), Some(&[0.5, 0.0].into_iter().collect()));
        tracker.record_report(build_core_readings(3, 200, &[50, 100]), SmoothingWeight::PAPER_VALUE).unwrap();
        assert_eq!(tracker.smoothed_loads(), Some(&[0.25, 0.5].into_iter().collect()));
        // A report was lost. Values are absolute, so the next report gives correct loads.
        tracker.record_report(build_core_readings(5, 400, &[50, 300]), SmoothingWeight::new(1.0).unwrap()).unwrap();
        assert_eq!(tracker.smoothed_loads(), Some(&[0.0, 1.0].into_iter().collect()));
    }

    #[test]
    fn late_report_is_rejected_and_changes_nothing() {
        let mut tracker = CoreLoadTracker::default();
        tracker.record_report(build_core_readings(7, 0, &[0]), SmoothingWeight::PAPER_VALUE).unwrap();
        tracker.record_report(build_core_readings(8, 100, &[10]), SmoothingWeight::PAPER_VALUE).unwrap();
        let rejection =
            tracker.record_report(build_core_readings(8, 200, &[100]), SmoothingWeight::PAPER_VALUE).unwrap_err();
        assert_eq!(rejection, BusyTimeReadingsRejection::OutOfOrder { sequence: 8, newest: 8 });
        assert!(tracker.record_report(build_core_readings(9, 100, &[20]), SmoothingWeight::PAPER_VALUE).is_err());
        assert!(tracker.record_report(build_core_readings(9, 300, &[]), SmoothingWeight::PAPER_VALUE).is_err());
        assert_eq!(tracker.smoothed_loads(), Some(&[0.1].into_iter().collect()));
    }

    #[test]
    fn each_stream_of_reports_has_its_own_sequence_numbers() {
        let mut tracker = CoreLoadTracker::default();
        tracker.record_report(build_core_readings(1, 0, &[0]), SmoothingWeight::PAPER_VALUE).unwrap();
        let last_possible_readings = CoreBusyTimeReadings {
            report_sequence_number: u64::MAX,
            measured_at_ns: u64::MAX,
            busy_ns_by_core: vec![0],
        };
        tracker.record_report(last_possible_readings, SmoothingWeight::PAPER_VALUE).unwrap();
        assert!(tracker.record_report(build_core_readings(2, 100, &[10]), SmoothingWeight::PAPER_VALUE).is_err());
        tracker.start_report_stream();
        tracker.record_report(build_core_readings(1, 200, &[20]), SmoothingWeight::PAPER_VALUE).unwrap();
        assert_eq!(tracker.smoothed_loads(), None);
        tracker.record_report(build_core_readings(2, 300, &[70]), SmoothingWeight::PAPER_VALUE).unwrap();
        assert_eq!(tracker.smoothed_loads(), Some(&[0.5].into_iter().collect()));
        tracker.start_report_stream();
        tracker.record_report(build_core_readings(1, 400, &[120]), SmoothingWeight::PAPER_VALUE).unwrap();
        assert_eq!(tracker.smoothed_loads(), Some(&[0.5].into_iter().collect()));
    }

    #[test]
    fn reboot_restarts_load_tracking() {
        let mut tracker = CoreLoadTracker::default();
        tracker.record_report(build_core_readings(1, 0, &[1000]), SmoothingWeight::PAPER_VALUE).unwrap();
        tracker.record_report(build_core_readings(2, 100, &[1100]), SmoothingWeight::PAPER_VALUE).unwrap();
        tracker.start_report_stream();
        tracker.record_report(build_core_readings(1, 5, &[5]), SmoothingWeight::PAPER_VALUE).unwrap();
        assert_eq!(tracker.smoothed_loads(), None);
    }

    #[test]
    fn alpha_out_of_range_is_rejected() {
        assert_eq!(SmoothingWeight::new(0.0).unwrap_err().to_string(), "alpha 0: expected a number above 0, at most 1");
        assert!(SmoothingWeight::new(f64::NAN).is_err());
        assert!(SmoothingWeight::new(1.0).is_ok());
    }
}
