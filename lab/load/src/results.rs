//! Outcomes of a run's requests, counted by request class.

use std::collections::BTreeMap;
use std::ops::Range;

use hdrhistogram::Histogram;

use crate::outstanding_requests::SentRequest;
use crate::transport::{AnsweringWorker, TransportErrorCounts};

/// Results of the requests in one class.
#[derive(Debug)]
pub struct RequestClassResults {
    /// Number of requests that were due in the measured time.
    pub request_count: u64,
    /// Number of measured requests that were answered before the time-out.
    pub completed_count: u64,
    /// Number of measured requests that were not answered before the time-out.
    pub lost_count: u64,
    /// Histogram of the times from requests' due times to their responses (ns).
    pub latency_ns: Histogram<u64>,
    /// Number of responses that arrived in the measured time, including those to requests that were due before it.
    pub arrived_response_count: u64,
}

#[derive(Debug)]
pub struct LoadRunResults {
    /// Start and end of the measured time (CLOCK_MONOTONIC, ns).
    pub measured_window_ns: Range<u64>,
    pub classes: Vec<RequestClassResults>,
    /// Histogram of the times from requests' due times to their sending (ns).
    pub lateness_ns: Histogram<u64>,
    /// Number of measured requests that each worker answered.
    pub answer_count_by_worker: BTreeMap<AnsweringWorker, u64>,
    /// Number of responses that repeat an earlier one.
    pub duplicate_responses: u64,
    /// Number of responses that arrived after the time-out.
    pub late_responses: u64,
    /// Number of responses with an id that no request had.
    pub unknown_responses: u64,
    pub transport_errors: TransportErrorCounts,
    /// Time when the last request was answered or lost (ns since the start).
    pub last_request_end_ns: u64,
    /// Latencies of each class in the current log interval. The vector is empty unless the run records intervals.
    interval_latencies_ns_by_class: Vec<Histogram<u64>>,
}

/// Returns an empty histogram for times from 1 ns to ten minutes, with three significant digits. Longer times count as
/// ten minutes.
fn new_time_histogram() -> anyhow::Result<Histogram<u64>> {
    Ok(Histogram::new_with_max(600_000_000_000, 3)?)
}

impl LoadRunResults {
    /// Creates empty results. If `records_intervals` is true, latencies are also recorded for each log interval. Fails
    /// when memory is short.
    pub fn new(class_count: usize, measured_window_ns: Range<u64>, records_intervals: bool) -> anyhow::Result<Self> {
        let build_empty_class = |_| {
            let latency_ns = new_time_histogram()?;
            Ok(RequestClassResults {
                request_count: 0,
                completed_count: 0,
                lost_count: 0,
                latency_ns,
                arrived_response_count: 0,
            })
        };
        Ok(Self {
            measured_window_ns,
            classes: (0..class_count).map(build_empty_class).collect::<anyhow::Result<_>>()?,
            lateness_ns: new_time_histogram()?,
            answer_count_by_worker: BTreeMap::new(),
            duplicate_responses: 0,
            late_responses: 0,
            unknown_responses: 0,
            transport_errors: TransportErrorCounts::default(),
            last_request_end_ns: 0,
            interval_latencies_ns_by_class: (0..if records_intervals { class_count } else { 0 })
                .map(|_| new_time_histogram())
                .collect::<anyhow::Result<_>>()?,
        })
    }

    /// Ends the measured time at `now_ns`, unless its planned end is earlier.
    pub fn end_measured_window(&mut self, now_ns: u64) {
        self.measured_window_ns.end = self.measured_window_ns.end.min(now_ns.max(self.measured_window_ns.start));
    }

    /// Returns the latency histogram of each class for the current log interval. The caller resets it for the next one.
    pub fn interval_latency_histograms(&mut self) -> impl Iterator<Item = &mut Histogram<u64>> {
        self.interval_latencies_ns_by_class.iter_mut()
    }

    pub(crate) fn record_sent_request(&mut self, sent_request: SentRequest, now_ns: u64) {
        if let Some(class) = self.measured_class_results_mut(sent_request) {
            class.request_count += 1;
            self.lateness_ns.saturating_record(now_ns.saturating_sub(sent_request.due_ns));
        }
    }

    pub(crate) fn record_answer(
        &mut self,
        sent_request: SentRequest,
        arrived_ns: u64,
        worker: Option<AnsweringWorker>,
    ) {
        if self.measured_window_ns.contains(&arrived_ns) {
            self.classes[usize::from(sent_request.class_index)].arrived_response_count += 1;
        }
        let latency_ns = arrived_ns.saturating_sub(sent_request.due_ns);
        if let Some(class) = self.measured_class_results_mut(sent_request) {
            class.completed_count += 1;
            class.latency_ns.saturating_record(latency_ns);
            if let Some(interval_latency_ns) =
                self.interval_latencies_ns_by_class.get_mut(usize::from(sent_request.class_index))
            {
                interval_latency_ns.saturating_record(latency_ns);
            }
            if let Some(worker) = worker {
                *self.answer_count_by_worker.entry(worker).or_default() += 1;
            }
        }
    }

    pub(crate) fn record_lost_request(&mut self, sent_request: SentRequest) {
        if let Some(class) = self.measured_class_results_mut(sent_request) {
            class.lost_count += 1;
        }
    }

    fn measured_class_results_mut(&mut self, sent_request: SentRequest) -> Option<&mut RequestClassResults> {
        self.measured_window_ns
            .contains(&sent_request.due_ns)
            .then(|| &mut self.classes[usize::from(sent_request.class_index)])
    }
}
