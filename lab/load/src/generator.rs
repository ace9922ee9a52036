//! Open-loop load generator, which sends each request at its due time, whether or not earlier requests were answered.
//!
//! A latency starts at the *due* time, not at the send time. A stalled server or a late generator therefore cannot hide
//! requests that were not sent meanwhile ("coordinated omission"). A latency ends at the kernel's time stamp of the
//! response, so a generator that reads late does not add to it.

use std::io;

use crate::arrival_schedule::RequestArrivalSchedule;
use crate::event_loop::now_ns;
use crate::outstanding_requests::{OutstandingRequests, RequestAnswerOutcome, SentRequest};
use crate::results::LoadRunResults;
use crate::transport::{RequestTransport, TransportAnswer};
use crate::workload::RequestWorkload;

/// Time between the start of a run and the start of its arrival schedules (ns).
const DELAY_BEFORE_FIRST_REQUEST_NS: u64 = 10_000_000;
/// Maximum number of overdue requests that are sent in a row before responses are read.
const MAX_OVERDUE_REQUESTS_PER_BATCH: usize = 64;
const PROGRESS_REPORT_INTERVAL_NS: u64 = 100_000_000;
/// Interval between two searches for timed-out requests, once the last request was sent (ns).
const REQUEST_TIMEOUT_CHECK_INTERVAL_NS: u64 = 10_000_000;

#[derive(Debug)]
pub struct RequestStream {
    pub schedule: RequestArrivalSchedule,
    pub workload: RequestWorkload,
    pub first_class_index: u8,
}

/// Durations of a run's phases, and the time-out of its requests (ns).
#[derive(Debug, Clone, Copy)]
pub struct LoadRunPhaseDurations {
    /// Duration of the warm-up, in which nothing is measured.
    pub warm_up_ns: u64,
    /// Duration of the measurement, which follows the warm-up.
    pub measurement_ns: u64,
    /// Time after its due time at which an unanswered request counts as lost.
    pub timeout_ns: u64,
}

struct LoadGenerator<'a> {
    streams: Vec<RequestStream>,
    transport: &'a mut dyn RequestTransport,
    phase_durations: LoadRunPhaseDurations,
    outstanding_requests: OutstandingRequests,
    /// Buffer for received answers, which is kept (empty) between calls to avoid new allocations.
    answer_buffer: Vec<TransportAnswer>,
    start_ns: u64,
    results: LoadRunResults,
}

/// Sends the requests of all streams over `transport`, and returns when the last one is answered or lost. `progress`
/// receives the time since the start (ns) and the results so far, and may end the run early by
/// [`LoadRunResults::end_measured_window`]. If `records_intervals` is true, latencies are also recorded for each log
/// interval. Fails when the transport fails permanently.
pub fn run_open_loop_load(
    streams: Vec<RequestStream>,
    transport: &mut dyn RequestTransport,
    durations: LoadRunPhaseDurations,
    records_intervals: bool,
    mut progress: impl FnMut(u64, &mut LoadRunResults) -> anyhow::Result<()>,
) -> anyhow::Result<LoadRunResults> {
    // The kernel's default timer slack would delay every request by 50 us (prctl(2), PR_SET_TIMERSLACK).
    nix::sys::prctl::set_timerslack(1)?;
    let start_ns = now_ns() + DELAY_BEFORE_FIRST_REQUEST_NS;
    let class_count = streams.iter().map(|stream| stream.workload.request_types().len()).sum();
    let measured_window_ns =
        start_ns + durations.warm_up_ns..start_ns + durations.warm_up_ns + durations.measurement_ns;
    let results = LoadRunResults::new(class_count, measured_window_ns, records_intervals)?;
    let outstanding_requests = OutstandingRequests::default();
    let mut generator = LoadGenerator {
        streams,
        transport,
        phase_durations: durations,
        outstanding_requests,
        answer_buffer: Vec::new(),
        start_ns,
        results,
    };
    let mut next_progress_ns = start_ns;
    while generator.send_and_receive_once()? {
        if now_ns() >= next_progress_ns {
            next_progress_ns += PROGRESS_REPORT_INTERVAL_NS;
            progress(now_ns().saturating_sub(start_ns), &mut generator.results)?;
        }
    }
    generator.results.last_request_end_ns = now_ns().saturating_sub(start_ns);
    generator.results.transport_errors = generator.transport.error_counts();
    Ok(generator.results)
}

impl LoadGenerator<'_> {
    /// Sends a batch of due requests, then receives responses. Returns `false` once every request is answered or lost.
    fn send_and_receive_once(&mut self) -> io::Result<bool> {
        let window_end_ns = self.results.measured_window_ns.end;
        let mut next_request = self.next_due_stream(window_end_ns);
        for _ in 0..MAX_OVERDUE_REQUESTS_PER_BATCH {
            let Some((stream_index, due_ns)) = next_request.filter(|(_, due_ns)| *due_ns <= now_ns()) else { break };
            self.send_request(stream_index, due_ns);
            next_request = self.next_due_stream(window_end_ns);
        }
        let results = &mut self.results;
        self.outstanding_requests
            .remove_expired_requests(now_ns().saturating_sub(self.phase_durations.timeout_ns), |lost_request| {
                results.record_lost_request(lost_request)
            });
        let Some(until_ns) = next_request.map(|(_, due_ns)| due_ns).or_else(|| {
            let has_unanswered_requests = self.outstanding_requests.unanswered_request_count() > 0;
            has_unanswered_requests.then(|| now_ns() + REQUEST_TIMEOUT_CHECK_INTERVAL_NS)
        }) else {
            return Ok(false);
        };
        let mut received_answers = std::mem::take(&mut self.answer_buffer);
        self.transport.receive(until_ns.min(now_ns() + PROGRESS_REPORT_INTERVAL_NS), &mut received_answers)?;
        received_answers.drain(..).for_each(|answer| self.handle_answer(answer));
        self.answer_buffer = received_answers;
        Ok(true)
    }

    /// Returns the index of the stream whose next request is due first, and that due time. Returns `None` when all
    /// streams have ended.
    fn next_due_stream(&self, window_end_ns: u64) -> Option<(usize, u64)> {
        let due_times = self.streams.iter().map(|stream| self.start_ns + stream.schedule.next_due_ns());
        due_times.enumerate().filter(|(_, due_ns)| *due_ns < window_end_ns).min_by_key(|(_, due_ns)| *due_ns)
    }

    fn send_request(&mut self, stream_index: usize, due_ns: u64) {
        let stream = &mut self.streams[stream_index];
        stream.schedule.advance_to_next_request();
        let request = stream.workload.next_request();
        let sent_request = SentRequest { due_ns, class_index: stream.first_class_index + request.class_index };
        let request_id = self.outstanding_requests.add_request(sent_request);
        self.results.record_sent_request(sent_request, now_ns());
        self.transport.send(&request, request_id, due_ns + self.phase_durations.timeout_ns);
    }

    fn handle_answer(&mut self, answer: TransportAnswer) {
        let (part_index, part_count) = answer.part_index_and_count;
        match self.outstanding_requests.record_response_part(answer.request_id, part_index, part_count) {
            RequestAnswerOutcome::Complete(sent_request) => {
                self.results.record_answer(sent_request, answer.arrived_ns, answer.worker)
            }
            RequestAnswerOutcome::Partial => {}
            RequestAnswerOutcome::Duplicate => self.results.duplicate_responses += 1,
            RequestAnswerOutcome::Late => self.results.late_responses += 1,
            RequestAnswerOutcome::Unknown => self.results.unknown_responses += 1,
        }
    }
}
