//! The books of the dispatch against what the kernel counts by itself.
//!
//! The kernel's counters of the two network namespaces (RFC 4113) and of the dead sockets account for every request, to
//! the datagram: read by a worker, dropped at a full receive buffer, received without a listener, or queued at a killed
//! worker. A request can be lost in no other way.

use coreward_load::report::Report;
use serde::Serialize;
use serde_json::Value;

use super::fault_injector::FaultCounts;
use super::test_env::{TestEnv, WORKERS, eligible};
use crate::counters::{self, Counters};

/// Everything at one moment.
#[derive(Debug)]
pub struct Reading {
    ledger: Value,
    client: Counters,
    server: Counters,
    purged: u64,
    /// Datagrams that workers read and had no response to.
    refused: u64,
}

impl Reading {
    /// Now. Fails when something cannot be read.
    pub fn take(env: &TestEnv) -> anyhow::Result<Self> {
        Ok(Self {
            ledger: env.ledger()?,
            client: counters::read(env.testbed().client())?,
            server: counters::read(env.testbed().server(1)?)?,
            purged: env.purged()?,
            refused: env.server().counters()?.iter().map(|worker| worker.refused).sum(),
        })
    }

    /// Everything that shows that requests are still on their way, or that a worker gets none.
    pub fn describe_unfinished(&self) -> Vec<String> {
        let mut found = Vec::new();
        let (outstanding, queued) = (self.sum("outstanding"), self.sum("queued"));
        if outstanding != 0 || queued != 0 {
            found.push(format!("{outstanding} outstanding, {queued} queued: {}", self.ledger));
        }
        let eligible = eligible(&self.ledger);
        if eligible != Some(WORKERS) {
            found.push(format!("{eligible:?} workers are eligible: {}", self.ledger));
        }
        for worker in self.ledger["workers"].as_array().into_iter().flatten() {
            let count = |name: &str| worker[name].as_u64().unwrap_or(u64::MAX);
            if count("dispatched") != count("completed").saturating_add(count("abandoned")) {
                found.push(format!("dispatched, but neither completed nor abandoned: {worker}"));
            }
        }
        found
    }

    /// Sum over all workers.
    fn sum(&self, count: &str) -> u64 {
        let workers = self.ledger["workers"].as_array().into_iter().flatten();
        workers.filter_map(|worker| worker[count].as_u64()).sum()
    }

    fn counter(&self, name: &str) -> u64 {
        self.ledger["counters"][name].as_u64().unwrap_or(0)
    }

    fn server(&self, name: &str) -> u64 {
        self.server.get(name).copied().unwrap_or(0)
    }

    fn client(&self, name: &str) -> u64 {
        self.client.get(name).copied().unwrap_or(0)
    }
}

/// A segment's events, as differences of the counts before and after.
#[derive(Debug, Serialize)]
pub struct Segment {
    /// From 0.
    pub number: u32,
    /// Faults that were made.
    pub faults: FaultCounts,
    /// Datagrams that the client sent to the service.
    pub sent: u64,
    /// Requests that workers read.
    pub read: u64,
    /// Dropped at full receive buffers.
    pub dropped: u64,
    /// Received without a listener.
    pub without_listener: u64,
    /// Queued at workers that were killed.
    pub purged: u64,
    /// Read by workers that were killed before they answered.
    pub killed_in_service: i64,
    /// Responses that workers sent.
    pub responses: u64,
    /// The ledger; `None` after a restart of it.
    pub ledger: Option<RequestLedger>,
    pub load_requests: u64,
    /// Requests without a response.
    pub load_lost: u64,
    /// Violations.
    pub violations: Vec<String>,
}

/// The counters of a segment.
#[derive(Debug, Serialize)]
pub struct RequestLedger {
    /// Requests that went to workers.
    pub dispatched: u64,
    /// Requests with a response.
    pub completed: u64,
    /// Given up.
    pub abandoned: u64,
    /// Datagrams from the service's port that answered nothing.
    pub unmatched: u64,
    /// Responses to requests that had been given up.
    pub late: i64,
}

impl Segment {
    /// `before` and `after`: a second after the last request, when nothing was on its way. `at_once`: `after`, but
    /// sooner.
    pub fn new(
        number: u32,
        before: &Reading,
        at_once: &Reading,
        after: &Reading,
        made: &FaultCounts,
        load: &Report,
    ) -> Self {
        let server = |name: &str| after.server(name) - before.server(name);
        let (read, responses) = (server("UdpInDatagrams"), server("UdpOutDatagrams"));
        let refused = after.refused - before.refused;
        let began_anew = made.detachments + made.restarts > 0;
        let mut segment = Self {
            number,
            faults: made.clone(),
            sent: after.client("UdpOutDatagrams") - before.client("UdpOutDatagrams"),
            read,
            dropped: server("UdpRcvbufErrors") + server("UdpMemErrors"),
            without_listener: server("UdpNoPorts"),
            purged: after.purged - before.purged,
            killed_in_service: read as i64 - responses as i64 - refused as i64,
            responses,
            ledger: (!began_anew).then(|| RequestLedger::new(before, after, made)),
            load_requests: load.requests,
            load_lost: load.lost,
            violations: Vec::new(),
        };
        at_once.describe_unfinished().into_iter().for_each(|violation| segment.record_violation(&violation));
        segment.check_datagrams();
        segment.check_ledger(before, after);
        segment
    }

    /// One line.
    pub fn summary(&self) -> String {
        let Self { sent, read, dropped, without_listener, purged, killed_in_service, load_lost, .. } = self;
        format!(
            "{sent} datagrams: {read} read ({killed_in_service} of them by workers killed then), {dropped} dropped, \
             {purged} queued at killed workers, {without_listener} reached no worker; {load_lost} lost; {} violations",
            self.violations.len()
        )
    }

    fn require(&mut self, holds: bool, what: impl FnOnce() -> String) {
        if !holds {
            self.record_violation(&what());
        }
    }

    fn record_violation(&mut self, what: &str) {
        self.violations.push(format!("segment {}: {what}", self.number));
    }

    /// Every datagram is accounted for, and was lost only where something was done that loses datagrams.
    fn check_datagrams(&mut self) {
        let known = self.read + self.dropped + self.without_listener + self.purged;
        let (sent, made) = (self.sent, self.faults.clone());
        let (dropped, without_listener, purged) = (self.dropped, self.without_listener, self.purged);
        let killed = made.kills + made.restarts * WORKERS;
        // One may arrive while the socket is being closed.
        let accounted = (known..=known + killed).contains(&sent);
        self.require(accounted, || format!("{sent} datagrams were sent, {known} are accounted for"));
        self.require(dropped == 0 || made.floods > 0, || format!("{dropped} datagrams dropped without a flood"));
        self.require(without_listener == 0 || made.restarts > 0, || {
            format!("{without_listener} reached no worker without a restart")
        });
        self.require(purged == 0 || killed > 0, || format!("{purged} were purged without a kill"));
        // The worker counts after a read, and after an answer: a kill may come between.
        let in_service = self.killed_in_service;
        let possible = -(killed as i64)..=killed as i64;
        self.require(possible.contains(&in_service), || format!("{in_service} requests were read and not answered"));
        let (lost, reasons) = (self.load_lost, dropped + without_listener + purged + killed);
        self.require(lost <= reasons, || format!("{lost} requests of the load are lost, {reasons} with a reason"));
    }

    fn check_ledger(&mut self, before: &Reading, after: &Reading) {
        let Some(ledger) = &self.ledger else { return };
        let (dispatched, answers) = (ledger.dispatched, ledger.completed + ledger.unmatched);
        let (arrived, made) = (self.read + self.dropped + self.purged, self.faults.clone());
        let given = self.responses + made.spoofed + made.answered_by_others;
        let (abandoned, late) = (ledger.abandoned, ledger.late);
        let uncounted = ["untracked", "no_worker"].map(|name| after.counter(name) - before.counter(name));
        let agree = (arrived..=arrived + made.kills).contains(&dispatched);
        self.require(agree, || format!("{dispatched} dispatched, the workers' sockets were given {arrived}"));
        self.require(answers == given, || format!("{answers} completed or unmatched, {given} responses were sent"));
        self.require(uncounted == [0, 0], || format!("{uncounted:?} untracked, without a worker"));
        self.require(abandoned >= self.dropped + self.purged, || format!("{abandoned} abandoned"));
        self.require(late >= 0, || format!("{late} responses late"));
    }
}

impl RequestLedger {
    fn new(before: &Reading, after: &Reading, made: &FaultCounts) -> Self {
        let sum = |name: &str| after.sum(name) - before.sum(name);
        let unmatched = after.counter("unmatched") - before.counter("unmatched");
        Self {
            dispatched: sum("dispatched"),
            completed: sum("completed"),
            abandoned: sum("abandoned"),
            unmatched,
            late: unmatched as i64 - made.spoofed as i64,
        }
    }
}
