//! The clients: downloads, keep-alive, connections of a moment, connections that are kept, and connections that carry
//! bytes which are checked. None of what goes wrong here is the clients' or the servers' fault, so that no connection
//! may break.

use std::fs;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::process::Command;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::Scope;
use std::time::{Duration, Instant};

use anyhow::ensure;
use serde::Serialize;

use crate::conformance::{download_once, parse_wrk};
use crate::connection_errors::Broken;
use crate::http::{Answerer, Connection};
use crate::nginx::WORKER_PATH;
use crate::stream::client::{StreamClient, Streams};
use crate::topology::Testbed;

/// Returns the address of the stream servers; nginx has that of [`Testbed::service`].
pub fn stream_service(testbed: &Testbed) -> SocketAddr {
    SocketAddr::new(testbed.service().ip(), 9000)
}
/// Downloads at a time, at [`DOWNLOAD_RATE`].
const DOWNLOADERS: u32 = 3;
/// Bytes per second: a megabyte lasts long enough to meet a fault.
const DOWNLOAD_RATE: &str = "300k";
/// Connections that are kept, each asked once in [`KEPT_INTERVAL`].
const KEPT_CONNECTIONS: usize = 16;
const KEPT_INTERVAL: Duration = Duration::from_millis(500);
/// Between two connections of a moment.
const SHORT_INTERVAL: Duration = Duration::from_millis(30);
/// wrk reports its results at its end: seconds per run.
const WRK_SECONDS: u64 = 10;
/// Between two requests of each of wrk's connections (ms): the machine is to have time for the rest.
const WRK_DELAY_MS: u32 = 20;
/// New connections per second with bytes that are checked; each address of the client has ports for 50,000.
const STREAMS_PER_SECOND: f64 = 40.0;
const MAX_FAILURES: usize = 20;
/// After the end of the run, for connections that are under way.
const STREAMS_LIMIT: Duration = Duration::from_secs(60);

/// The clients' counts.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize)]
pub struct TrafficCounts {
    /// Downloads of a megabyte by curl, each with a connection of its own.
    pub downloads: Count,
    /// Requests of wrk on connections that are kept.
    pub requests: Count,
    /// Connections for one request.
    pub short: Count,
    /// Answers on the connections that are kept for the whole run: always by the same worker.
    pub kept: Count,
    /// Connections of up to minutes whose bytes are checked.
    pub streams: Count,
    /// Broken streams by the kind of their end.
    pub streams_broken: Broken,
    /// The first failures, in words, with the second of the run.
    pub failures: Vec<String>,
}

/// Counts of one kind of client.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize)]
pub struct Count {
    pub good: u64,
    pub broken: u64,
}

impl TrafficCounts {
    /// All kinds together.
    pub fn broken(&self) -> u64 {
        let Self { downloads, requests, short, kept, streams, .. } = self;
        [downloads, requests, short, kept, streams].iter().map(|count| count.broken).sum()
    }

    /// All kinds together.
    pub fn good(&self) -> u64 {
        let Self { downloads, requests, short, kept, streams, .. } = self;
        [downloads, requests, short, kept, streams].iter().map(|count| count.good).sum()
    }
}

/// The clients of a run.
#[derive(Debug)]
pub struct Traffic<'a> {
    testbed: &'a Testbed,
    start: Instant,
    counts: Mutex<TrafficCounts>,
    streams: Option<StreamClient>,
    delay_script: PathBuf,
}

type CountOf = fn(&mut TrafficCounts) -> &mut Count;

impl<'a> Traffic<'a> {
    /// The streams begin. `seconds`: how long new ones do. Fails when something cannot be started.
    pub fn start(testbed: &'a Testbed, seconds: u32, seed: u64) -> anyhow::Result<Self> {
        let delay_script = testbed.directory().join("delay.lua");
        fs::write(&delay_script, format!("function delay() return {WRK_DELAY_MS} end\n"))?;
        // Address 0 is the other clients', whose kernel chooses their ports.
        let addresses = 1..testbed.options().client_addresses;
        let streams = Streams { seed, ..Streams::steady(STREAMS_PER_SECOND, seconds) };
        let streams = testbed.start_stream_client_at(stream_service(testbed), addresses, &streams, None)?;
        Ok(Self { testbed, start: Instant::now(), counts: Mutex::default(), streams: Some(streams), delay_script })
    }

    /// Counts so far; of the streams nothing before [`Traffic::finish`].
    pub fn counts(&self) -> TrafficCounts {
        self.counts.lock().expect("no client panics").clone()
    }

    /// Starts all clients but the streams'; they end soon after `done`.
    pub fn spawn<'scope>(&'scope self, scope: &'scope Scope<'scope, '_>, done: &'scope AtomicBool) {
        let going = move || !done.load(Ordering::Relaxed);
        for _ in 0..DOWNLOADERS {
            scope.spawn(move || {
                while going() {
                    let outcome = download_once(self.testbed, &["--limit-rate", DOWNLOAD_RATE]);
                    self.count(|seen| &mut seen.downloads, "download", outcome);
                }
            });
        }
        scope.spawn(move || {
            while going() {
                self.wrk();
            }
        });
        scope.spawn(move || {
            while going() {
                let outcome =
                    self.in_client(|| Connection::open_to(self.testbed.service(), None)?.query_worker().map(drop));
                self.count(|seen| &mut seen.short, "short connection", outcome);
                std::thread::sleep(SHORT_INTERVAL);
            }
        });
        scope.spawn(move || self.query_kept_connections(going));
    }

    /// Waits for the streams. Fails when their client fails.
    pub fn finish(mut self) -> anyhow::Result<TrafficCounts> {
        let mut seen = self.counts();
        if let Some(streams) = self.streams.take() {
            let report = streams.finish(STREAMS_LIMIT)?;
            let total = report.total();
            seen.streams = Count { good: total.completed + report.open_at_end, broken: total.broken.total() };
            seen.streams_broken = total.broken;
            for (second, broken) in (0..).zip(&report.seconds).filter(|(_, second)| second.broken.total() > 0) {
                self.report_failure(
                    &mut seen.failures,
                    Duration::from_secs(second),
                    format!("stream: {:?}", broken.broken),
                );
            }
        }
        Ok(seen)
    }

    fn in_client<T: Send>(&self, action: impl FnOnce() -> anyhow::Result<T> + Send) -> anyhow::Result<T> {
        self.testbed.client().within(action)
    }

    fn count(&self, of: CountOf, what: &str, outcome: anyhow::Result<()>) {
        let mut seen = self.counts.lock().expect("no client panics");
        match outcome {
            Ok(()) => of(&mut seen).good += 1,
            Err(error) => {
                of(&mut seen).broken += 1;
                self.report_failure(&mut seen.failures, self.start.elapsed(), format!("{what}: {error:#}"));
            }
        }
    }

    fn report_failure(&self, failures: &mut Vec<String>, at: Duration, what: String) {
        if failures.len() < MAX_FAILURES {
            failures.push(format!("{:.1} s: {what}", at.as_secs_f64()));
        }
    }

    fn wrk(&self) {
        let mut command = Command::new("wrk");
        command.args(["--threads", "1", "--connections", "8", "--timeout", "10s", "--duration"]);
        command.arg(format!("{WRK_SECONDS}s")).arg("--script").arg(&self.delay_script);
        command.arg(format!("http://{}{WORKER_PATH}", self.testbed.service()));
        let outcome = self.testbed.run(self.testbed.client(), command);
        match outcome.and_then(|output| parse_wrk(&String::from_utf8_lossy(&output.stdout))) {
            Ok((requests, errors)) => {
                let mut seen = self.counts.lock().expect("no client panics");
                seen.requests.good += requests;
                seen.requests.broken += errors;
                if errors > 0 {
                    self.report_failure(&mut seen.failures, self.start.elapsed(), format!("wrk: {errors} errors"));
                }
            }
            Err(error) => self.count(|seen| &mut seen.requests, "wrk", Err(error)),
        }
    }

    /// The connections that are kept, one after the other.
    fn query_kept_connections(&self, going: impl Fn() -> bool) {
        let mut kept: Vec<Option<(Connection, Answerer)>> = (0..KEPT_CONNECTIONS).map(|_| None).collect();
        while going() {
            for place in &mut kept {
                let asked = Instant::now();
                let outcome = self.in_client(|| query_same_worker(place, self.testbed.service()));
                if outcome.is_err() {
                    *place = None;
                }
                self.count(|seen| &mut seen.kept, "kept connection", outcome);
                std::thread::sleep((KEPT_INTERVAL / KEPT_CONNECTIONS as u32).saturating_sub(asked.elapsed()));
            }
        }
    }
}

/// Opens the connection where there is none; it is always the same worker that answers.
fn query_same_worker(place: &mut Option<(Connection, Answerer)>, service: SocketAddr) -> anyhow::Result<()> {
    match place {
        None => {
            let mut connection = Connection::open_to(service, None)?;
            let first = connection.query_worker()?;
            *place = Some((connection, first));
        }
        Some((connection, first)) => {
            let now = connection.query_worker()?;
            ensure!(now == *first, "answered by {first:?} at first, by {now:?} now");
        }
    }
    Ok(())
}
