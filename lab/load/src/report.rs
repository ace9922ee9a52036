//! Report of a load generator's run, for people and for programs.

use coreward_sim::output::PrintableResult;
use hdrhistogram::Histogram;
use serde::{Deserialize, Serialize};

use crate::request_type::RequestType;
use crate::results::{LoadRunResults, RequestClassResults};
use crate::transport::{AnsweringWorker, TransportErrorCounts};

/// Percentiles of measured times (us), which are `None` if nothing was measured.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct LatencyPercentiles {
    pub p50: Option<f64>,
    pub p90: Option<f64>,
    pub p99: Option<f64>,
    pub p999: Option<f64>,
    pub max: Option<f64>,
}

impl From<&Histogram<u64>> for LatencyPercentiles {
    fn from(histogram: &Histogram<u64>) -> Self {
        let nanoseconds_to_us = |nanoseconds: u64| (!histogram.is_empty()).then_some(nanoseconds as f64 / 1e3);
        let quantile_us = |quantile| nanoseconds_to_us(histogram.value_at_quantile(quantile));
        Self {
            p50: quantile_us(0.5),
            p90: quantile_us(0.9),
            p99: quantile_us(0.99),
            p999: quantile_us(0.999),
            max: nanoseconds_to_us(histogram.max()),
        }
    }
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct RequestClassReport {
    pub class: RequestType,
    /// Number of requests that were due in the measured time.
    pub requests: u64,
    /// Number of measured requests that were answered before the time-out.
    pub completed: u64,
    /// Number of measured requests that were not answered before the time-out.
    pub lost: u64,
    /// Number of responses that arrived in the measured time.
    pub arrived: u64,
    /// Percentiles of the time from a request's due time to its response (us).
    pub latency_us: LatencyPercentiles,
}

/// Number of requests that one worker has answered.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct WorkerReport {
    #[serde(flatten)]
    pub worker: AnsweringWorker,
    /// Number of measured requests that the worker answered.
    pub completed: u64,
}

/// Report of a load generator's run. Only `measure` and `workers` include the measuring stream (see the option
/// `--measure`).
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct LoadRunReport {
    /// Number of requests that were due per second.
    pub offered_rps: f64,
    /// Number of responses that arrived per second of the measured time.
    pub completed_rps: f64,
    /// Number of requests that were due in the measured time, and not answered before the time-out.
    pub lost: u64,
    /// Percentiles of the time from an answered request's due time to its response (us).
    pub latency_us: LatencyPercentiles,
    /// Length of the measured time (s).
    pub seconds: f64,
    /// Number of requests that were due in the measured time.
    pub requests: u64,
    /// Number of measured requests that were answered before the time-out.
    pub completed: u64,
    pub classes: Vec<RequestClassReport>,
    pub measure: Option<RequestClassReport>,
    /// Percentiles of the time from a request's due time to its sending (us). Large values, compared with the
    /// latencies, show that the machine was too busy.
    pub lateness_us: LatencyPercentiles,
    /// Number of requests that each worker answered, including those of the measuring stream.
    pub workers: Vec<WorkerReport>,
    /// Number of responses that repeat an earlier one.
    pub duplicate_responses: u64,
    /// Number of responses that arrived after the time-out.
    pub late_responses: u64,
    /// Number of responses with an id that no request had.
    pub unknown_responses: u64,
    #[serde(flatten)]
    pub transport_errors: TransportErrorCounts,
}

impl LoadRunReport {
    /// Creates a report from `results`. Its classes are `load_types`, followed by `measured_type` if the run has a
    /// measuring stream.
    pub fn new(results: &LoadRunResults, load_types: &[RequestType], measured_type: Option<RequestType>) -> Self {
        let build_class_report = |(class_results, class): (&RequestClassResults, &RequestType)| RequestClassReport {
            class: *class,
            requests: class_results.request_count,
            completed: class_results.completed_count,
            lost: class_results.lost_count,
            arrived: class_results.arrived_response_count,
            latency_us: LatencyPercentiles::from(&class_results.latency_ns),
        };
        let (load_results, measured_results) = results.classes.split_at(load_types.len());
        let seconds = (results.measured_window_ns.end - results.measured_window_ns.start) as f64 / 1e9;
        let sum_over_load_classes =
            |to_count: fn(&RequestClassResults) -> u64| load_results.iter().map(to_count).sum::<u64>();
        let mut load_latency_ns = results.lateness_ns.clone();
        load_latency_ns.reset();
        load_results
            .iter()
            .for_each(|class_results| load_latency_ns.add(&class_results.latency_ns).expect("made alike"));
        let worker_report = |(worker, completed_count): (&AnsweringWorker, &u64)| WorkerReport {
            worker: *worker,
            completed: *completed_count,
        };
        Self {
            offered_rps: sum_over_load_classes(|class| class.request_count) as f64 / seconds,
            completed_rps: sum_over_load_classes(|class| class.arrived_response_count) as f64 / seconds,
            lost: sum_over_load_classes(|class| class.lost_count),
            latency_us: LatencyPercentiles::from(&load_latency_ns),
            seconds,
            requests: sum_over_load_classes(|class| class.request_count),
            completed: sum_over_load_classes(|class| class.completed_count),
            classes: load_results.iter().zip(load_types).map(build_class_report).collect(),
            measure: measured_results.iter().zip(&measured_type).map(build_class_report).next(),
            lateness_us: LatencyPercentiles::from(&results.lateness_ns),
            workers: results.answer_count_by_worker.iter().map(worker_report).collect(),
            duplicate_responses: results.duplicate_responses,
            late_responses: results.late_responses,
            unknown_responses: results.unknown_responses,
            transport_errors: results.transport_errors,
        }
    }
}

impl PrintableResult for LoadRunReport {
    fn column_titles(&self) -> Vec<&'static str> {
        vec!["class", "requests", "completed", "lost", "p50 us", "p90 us", "p99 us", "p99.9 us", "max us"]
    }

    fn table_rows(&self) -> Vec<Vec<String>> {
        let format_class_row = |name: String, class: &RequestClassReport| {
            format_row(name, [class.requests, class.completed, class.lost], class.latency_us)
        };
        let mut rows: Vec<_> =
            self.classes.iter().map(|class| format_class_row(class.class.to_string(), class)).collect();
        if self.classes.len() > 1 {
            rows.push(format_row("all".to_owned(), [self.requests, self.completed, self.lost], self.latency_us));
        }
        rows.extend(self.measure.iter().map(|class| format_class_row(format!("{} (measuring)", class.class), class)));
        rows
    }

    fn table_remarks(&self) -> Vec<String> {
        let (offered_rps, completed_rps, lateness_us) = (self.offered_rps, self.completed_rps, self.lateness_us);
        let mut remarks = vec![
            format!(
                "{offered_rps:.0} requests a second were due, {completed_rps:.0} were answered, for {} s.",
                self.seconds
            ),
            format!(
                "Sent late by {} us (p99), {} us at worst.",
                format_latency_us(lateness_us.p99),
                format_latency_us(lateness_us.max)
            ),
        ];
        if !self.workers.is_empty() {
            let format_worker_report = |worker_report: &WorkerReport| {
                format!("{}/{}: {}", worker_report.worker.server, worker_report.worker.worker, worker_report.completed)
            };
            let workers: Vec<String> = self.workers.iter().map(format_worker_report).collect();
            remarks.push(format!("Answered by server/worker: {}.", workers.join(", ")));
        }
        let irregular_counts = [
            (self.duplicate_responses, "duplicate responses"),
            (self.late_responses, "responses after the time-out"),
            (self.unknown_responses, "responses to no request"),
            (self.transport_errors.refused, "refusals (no listener)"),
            (self.transport_errors.not_sent, "requests that the kernel did not take"),
            (self.transport_errors.failed, "requests that the server could not do"),
            (self.transport_errors.malformed, "malformed responses"),
            (self.transport_errors.broken_connections, "broken connections"),
        ];
        remarks.extend(
            irregular_counts
                .iter()
                .filter(|(count, _)| *count > 0)
                .map(|(count, description)| format!("{count} {description}.")),
        );
        remarks
    }
}

fn format_row(name: String, [requests, completed, lost]: [u64; 3], latency: LatencyPercentiles) -> Vec<String> {
    let count_cells = [requests, completed, lost].map(|count| count.to_string());
    let latency_cells = [latency.p50, latency.p90, latency.p99, latency.p999, latency.max].map(format_latency_us);
    std::iter::once(name).chain(count_cells).chain(latency_cells).collect()
}

fn format_latency_us(microseconds: Option<f64>) -> String {
    microseconds.map_or_else(|| "-".to_owned(), |number| format!("{number:.1}"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::outstanding_requests::SentRequest;

    #[test]
    fn report_is_deserialized_from_json_without_loss() {
        let mut results = LoadRunResults::new(2, 0..1_000_000_000, false).unwrap();
        let sent_request = SentRequest { due_ns: 1_000, class_index: 0 };
        results.record_sent_request(sent_request, 2_000);
        results.record_answer(sent_request, 9_000, Some(AnsweringWorker { server: 3, worker: 1 }));
        results.transport_errors.failed = 7;
        let report =
            LoadRunReport::new(&results, &[RequestType::GET, RequestType::with_scan_pair_count(18).unwrap()], None);
        let report_json = serde_json::to_string(&report).unwrap();
        assert_eq!(serde_json::from_str::<LoadRunReport>(&report_json).unwrap(), report);
    }
}
