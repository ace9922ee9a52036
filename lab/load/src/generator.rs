//! Open-loop generator: sends each request at its due time, whether or not earlier requests were answered.
//!
//! A latency starts at the *due* time, not at the send time. A stalled server or a late generator therefore cannot hide
//! requests that were not sent meanwhile ("coordinated omission"). A latency ends at the kernel's time stamp of the
//! response, so a generator that reads late does not add to it.

use std::io;

use crate::arrivals::ArrivalSchedule;
use crate::event_loop::now_ns;
use crate::outstanding::{AnswerMatch, Outstanding, SentRequest};
use crate::results::Results;
use crate::transport::{Answer, Transport};
use crate::workload::Workload;

/// Time between the start of the run and the start of the schedules (ns).
const START_DELAY_NS: u64 = 10_000_000;
/// Maximum number of overdue requests that are sent before responses are read again.
const BATCH_SIZE: usize = 64;
/// Interval between two progress reports (ns).
const PROGRESS_INTERVAL_NS: u64 = 100_000_000;
/// Interval between two searches for lost requests after the last due time (ns).
const EXPIRE_INTERVAL_NS: u64 = 10_000_000;

#[derive(Debug)]
pub struct RequestStream {
    pub schedule: ArrivalSchedule,
    pub workload: Workload,
    pub first_class: u8,
}

/// Durations of the parts of a run, and time-out of a request (ns).
#[derive(Debug, Clone, Copy)]
pub struct Durations {
    /// Duration of the warm-up, in which nothing is measured.
    pub warm_up_ns: u64,
    /// Duration of the measurement, which follows the warm-up.
    pub measured_ns: u64,
    /// Time after which an unanswered request is lost, counted from its due time.
    pub timeout_ns: u64,
}

struct Generator<'a> {
    streams: Vec<RequestStream>,
    transport: &'a mut dyn Transport,
    durations: Durations,
    outstanding: Outstanding,
    /// Buffer for received answers, which is empty between calls but keeps its allocation.
    answers: Vec<Answer>,
    start_ns: u64,
    results: Results,
}

/// Sends the requests of the streams over `transport`, and returns when the last one is answered or lost. `progress`
/// receives the time since the start (ns) and the results so far, which it may [`Results::stop`]. `intervals`: also
/// record latencies by interval. Fails when the transport fails permanently.
pub fn run(
    streams: Vec<RequestStream>,
    transport: &mut dyn Transport,
    durations: Durations,
    intervals: bool,
    mut progress: impl FnMut(u64, &mut Results) -> anyhow::Result<()>,
) -> anyhow::Result<Results> {
    // The default slack of 50 us would delay every request by 50 us (prctl(2), PR_SET_TIMERSLACK).
    nix::sys::prctl::set_timerslack(1)?;
    let start_ns = now_ns() + START_DELAY_NS;
    let classes = streams.iter().map(|stream| stream.workload.request_types().len()).sum();
    let window = start_ns + durations.warm_up_ns..start_ns + durations.warm_up_ns + durations.measured_ns;
    let results = Results::new(classes, window, intervals)?;
    let outstanding = Outstanding::default();
    let mut generator =
        Generator { streams, transport, durations, outstanding, answers: Vec::new(), start_ns, results };
    let mut next_progress_ns = start_ns;
    while generator.step()? {
        if now_ns() >= next_progress_ns {
            next_progress_ns += PROGRESS_INTERVAL_NS;
            progress(now_ns().saturating_sub(start_ns), &mut generator.results)?;
        }
    }
    generator.results.ended_ns = now_ns().saturating_sub(start_ns);
    generator.results.errors = generator.transport.errors();
    Ok(generator.results)
}

impl Generator<'_> {
    /// Sends all due requests and receives responses. Returns `false` once every request is answered or lost.
    fn step(&mut self) -> io::Result<bool> {
        let end_ns = self.results.measured_window_ns.end;
        let mut next = self.next_stream(end_ns);
        for _ in 0..BATCH_SIZE {
            let Some((stream, due_ns)) = next.filter(|(_, due_ns)| *due_ns <= now_ns()) else { break };
            self.send(stream, due_ns);
            next = self.next_stream(end_ns);
        }
        let results = &mut self.results;
        self.outstanding.expire(now_ns().saturating_sub(self.durations.timeout_ns), |sent| results.record_lost(sent));
        let Some(until_ns) = next.map(|(_, due_ns)| due_ns).or_else(|| {
            let unanswered = self.outstanding.unanswered_count() > 0;
            unanswered.then(|| now_ns() + EXPIRE_INTERVAL_NS)
        }) else {
            return Ok(false);
        };
        let mut answers = std::mem::take(&mut self.answers);
        self.transport.receive(until_ns.min(now_ns() + PROGRESS_INTERVAL_NS), &mut answers)?;
        answers.drain(..).for_each(|answer| self.handle_answer(answer));
        self.answers = answers;
        Ok(true)
    }

    /// Returns the index of the stream whose request is due first, and the due time; `None` when all have ended.
    fn next_stream(&self, end_ns: u64) -> Option<(usize, u64)> {
        let due = self.streams.iter().map(|stream| self.start_ns + stream.schedule.next_due_ns());
        due.enumerate().filter(|(_, due_ns)| *due_ns < end_ns).min_by_key(|(_, due_ns)| *due_ns)
    }

    fn send(&mut self, stream: usize, due_ns: u64) {
        let stream = &mut self.streams[stream];
        stream.schedule.advance();
        let demand = stream.workload.draw();
        let sent = SentRequest { due_ns, class: stream.first_class + demand.class };
        let id = self.outstanding.add(sent);
        self.results.record_sent(sent, now_ns());
        self.transport.send(&demand, id, due_ns + self.durations.timeout_ns);
    }

    fn handle_answer(&mut self, answer: Answer) {
        let (part, parts) = answer.part;
        match self.outstanding.match_answer(answer.id, part, parts) {
            AnswerMatch::Complete(sent) => self.results.record_answer(sent, answer.arrived_ns, answer.worker),
            AnswerMatch::Partial => {}
            AnswerMatch::Duplicate => self.results.duplicates += 1,
            AnswerMatch::Late => self.results.late_responses += 1,
            AnswerMatch::Unknown => self.results.unknown_responses += 1,
        }
    }
}
