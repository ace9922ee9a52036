//! Outcomes of the requests, by class.

use std::collections::BTreeMap;
use std::ops::Range;

use hdrhistogram::Histogram;

use crate::outstanding::SentRequest;
use crate::transport::{TransportErrorCounts, Worker};

/// Results of one class. All but `latency` count requests that were due in the measured time.
#[derive(Debug)]
pub struct ClassResults {
    /// Requests due in the measured time.
    pub requests: u64,
    /// Requests answered before the time-out.
    pub completed: u64,
    /// Not answered before the time-out.
    pub lost: u64,
    /// Time from the due time to the response (ns).
    pub latency_ns: Histogram<u64>,
    /// Responses that arrived in the measured time, to requests due before or in it.
    pub arrived: u64,
}

/// Results of all classes.
#[derive(Debug)]
pub struct Results {
    /// The measured time (CLOCK_MONOTONIC, ns).
    pub measured_window_ns: Range<u64>,
    pub classes: Vec<ClassResults>,
    /// Time from the due time to the send time (ns): lateness of the generator.
    pub lateness_ns: Histogram<u64>,
    /// Answered requests by worker.
    pub answers_by_worker: BTreeMap<Worker, u64>,
    /// Responses that repeat an earlier one.
    pub duplicates: u64,
    /// Responses after the time-out.
    pub late_responses: u64,
    /// Responses with an id that no request had.
    pub unknown_responses: u64,
    pub errors: TransportErrorCounts,
    /// Time when the last request was answered or lost (ns since the start).
    pub ended_ns: u64,
    /// Latencies of each class in the current interval; empty unless requested.
    intervals: Vec<Histogram<u64>>,
}

/// Returns a histogram with three significant digits from 1 ns to ten minutes; longer times count as ten minutes.
fn new_histogram() -> anyhow::Result<Histogram<u64>> {
    Ok(Histogram::new_with_max(600_000_000_000, 3)?)
}

impl Results {
    /// Returns empty results. Fails when memory is short.
    pub fn new(classes: usize, measured_window_ns: Range<u64>, intervals: bool) -> anyhow::Result<Self> {
        let class = |_| {
            let latency_ns = new_histogram()?;
            Ok(ClassResults { requests: 0, completed: 0, lost: 0, latency_ns, arrived: 0 })
        };
        Ok(Self {
            measured_window_ns,
            classes: (0..classes).map(class).collect::<anyhow::Result<_>>()?,
            lateness_ns: new_histogram()?,
            answers_by_worker: BTreeMap::new(),
            duplicates: 0,
            late_responses: 0,
            unknown_responses: 0,
            errors: TransportErrorCounts::default(),
            ended_ns: 0,
            intervals: (0..if intervals { classes } else { 0 })
                .map(|_| new_histogram())
                .collect::<anyhow::Result<_>>()?,
        })
    }

    /// Ends the measured time at `now_ns`, if it would last longer.
    pub fn stop(&mut self, now_ns: u64) {
        self.measured_window_ns.end = self.measured_window_ns.end.min(now_ns.max(self.measured_window_ns.start));
    }

    /// Returns each class's latencies since their last reset.
    pub fn intervals(&mut self) -> impl Iterator<Item = &mut Histogram<u64>> {
        self.intervals.iter_mut()
    }

    /// Records a request sent at `now_ns`.
    pub(crate) fn record_sent(&mut self, sent: SentRequest, now_ns: u64) {
        if let Some(class) = self.measured_class(sent) {
            class.requests += 1;
            self.lateness_ns.saturating_record(now_ns.saturating_sub(sent.due_ns));
        }
    }

    /// Records a response that arrived at `arrived_ns`.
    pub(crate) fn record_answer(&mut self, sent: SentRequest, arrived_ns: u64, worker: Option<Worker>) {
        if self.measured_window_ns.contains(&arrived_ns) {
            self.classes[usize::from(sent.class)].arrived += 1;
        }
        let latency_ns = arrived_ns.saturating_sub(sent.due_ns);
        if let Some(class) = self.measured_class(sent) {
            class.completed += 1;
            class.latency_ns.saturating_record(latency_ns);
            if let Some(interval) = self.intervals.get_mut(usize::from(sent.class)) {
                interval.saturating_record(latency_ns);
            }
            if let Some(worker) = worker {
                *self.answers_by_worker.entry(worker).or_default() += 1;
            }
        }
    }

    /// Records a request as lost.
    pub(crate) fn record_lost(&mut self, sent: SentRequest) {
        if let Some(class) = self.measured_class(sent) {
            class.lost += 1;
        }
    }

    fn measured_class(&mut self, sent: SentRequest) -> Option<&mut ClassResults> {
        self.measured_window_ns.contains(&sent.due_ns).then(|| &mut self.classes[usize::from(sent.class)])
    }
}
