//! Clients of the chaos test, which make downloads, keep-alive requests, short connections, persistent connections, and
//! streams with checked bytes. No fault hits the clients or servers themselves, so no connection may break.

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

use crate::conformance::{download_once, parse_wrk_counts};
use crate::connection_errors::BrokenConnectionCounts;
use crate::http::{HttpConnection, WorkerIdentity};
use crate::nginx::WORKER_IDENTITY_PATH;
use crate::stream_connections::client::{StreamClientProcess, StreamWorkload};
use crate::topology::Testbed;

/// Returns the address of the stream service. The web service (nginx) has [`Testbed::service_address`] instead.
pub fn stream_service_address(testbed: &Testbed) -> SocketAddr {
    SocketAddr::new(testbed.service_address().ip(), 9000)
}
/// Number of simultaneous downloads, each of which is limited to [`DOWNLOAD_RATE_LIMIT`].
const DOWNLOADER_COUNT: u32 = 3;
/// Rate limit of each download (bytes/s). At this rate a megabyte takes more than three seconds, long enough for faults
/// to happen during downloads.
const DOWNLOAD_RATE_LIMIT: &str = "300k";
/// Number of persistent connections. Each sends one request per [`PERSISTENT_QUERY_INTERVAL`].
const PERSISTENT_CONNECTION_COUNT: usize = 16;
const PERSISTENT_QUERY_INTERVAL: Duration = Duration::from_millis(500);
/// Interval between the starts of short connections, each of which sends only one request.
const SHORT_CONNECTION_INTERVAL: Duration = Duration::from_millis(30);
/// Duration of each run of wrk, the HTTP load generator (s). It is short because wrk prints its results only at the
/// end.
const WRK_RUN_SECONDS: u64 = 10;
/// Pause between requests on each of wrk's connections (ms), which limits the CPU time that wrk takes.
const WRK_DELAY_MS: u32 = 20;
/// Number of new streams per second. Each client address has ports for 50,000 streams.
const STREAMS_PER_SECOND: f64 = 40.0;
const MAX_RECORDED_CONNECTION_FAILURES: usize = 20;
/// Maximum time for which streams may stay open after the end of the run.
const STREAMS_END_TIMEOUT: Duration = Duration::from_secs(60);

/// Numbers of good and broken downloads, requests, connections and streams.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize)]
pub struct ClientTrafficCounts {
    /// Counts of 1 MB downloads by curl, each on its own connection.
    pub downloads: ClientResultCounts,
    /// Counts of wrk's requests on keep-alive connections.
    pub requests: ClientResultCounts,
    /// Counts of short connections with one request each.
    pub short_connections: ClientResultCounts,
    /// Counts of responses on connections that stay open for the whole run. All responses on a connection must come
    /// from the same worker.
    pub kept_connections: ClientResultCounts,
    /// Counts of streams, which are connections that last up to minutes and whose bytes are checked.
    pub streams: ClientResultCounts,
    /// Counts of broken streams, by kind of error.
    pub broken_streams: BrokenConnectionCounts,
    /// Descriptions of the first failures, each with its time (seconds since the start of the run).
    pub failures: Vec<String>,
}

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize)]
pub struct ClientResultCounts {
    pub successful: u64,
    pub broken: u64,
}

impl ClientTrafficCounts {
    pub fn total_broken_count(&self) -> u64 {
        let Self { downloads, requests, short_connections: short, kept_connections: kept, streams, .. } = self;
        [downloads, requests, short, kept, streams].iter().map(|count| count.broken).sum()
    }

    pub fn total_successful_count(&self) -> u64 {
        let Self { downloads, requests, short_connections: short, kept_connections: kept, streams, .. } = self;
        [downloads, requests, short, kept, streams].iter().map(|count| count.successful).sum()
    }
}

#[derive(Debug)]
pub struct TrafficClients<'a> {
    testbed: &'a Testbed,
    run_start: Instant,
    counts: Mutex<ClientTrafficCounts>,
    stream_client: Option<StreamClientProcess>,
    wrk_delay_script_path: PathBuf,
}

type ClientCountSelector = fn(&mut ClientTrafficCounts) -> &mut ClientResultCounts;

impl<'a> TrafficClients<'a> {
    /// Starts the stream client, which opens connections for `seconds` seconds. Fails when its process cannot be
    /// started.
    pub fn start(testbed: &'a Testbed, seconds: u32, seed: u64) -> anyhow::Result<Self> {
        let delay_script_path = testbed.directory().join("delay.lua");
        fs::write(&delay_script_path, format!("function delay() return {WRK_DELAY_MS} end\n"))?;
        // Address 0 is for the other clients, which let the kernel choose their ports.
        let client_addresses = 1..testbed.options().client_address_count;
        let stream_workload = StreamWorkload { seed, ..StreamWorkload::with_steady_rate(STREAMS_PER_SECOND, seconds) };
        let stream_client = testbed.start_stream_client_at_address(
            stream_service_address(testbed),
            client_addresses,
            &stream_workload,
            None,
        )?;
        Ok(Self {
            testbed,
            run_start: Instant::now(),
            counts: Mutex::default(),
            stream_client: Some(stream_client),
            wrk_delay_script_path: delay_script_path,
        })
    }

    /// Returns the counts so far, except those of streams, which are counted only at the end.
    pub fn traffic_counts(&self) -> ClientTrafficCounts {
        self.counts.lock().expect("no client panics").clone()
    }

    /// Starts all clients except the stream client. They end soon after `stop_flag` is set.
    pub fn spawn_clients<'scope>(&'scope self, scope: &'scope Scope<'scope, '_>, stop_flag: &'scope AtomicBool) {
        let is_running = move || !stop_flag.load(Ordering::Relaxed);
        for _ in 0..DOWNLOADER_COUNT {
            scope.spawn(move || {
                while is_running() {
                    let result = download_once(self.testbed, &["--limit-rate", DOWNLOAD_RATE_LIMIT]);
                    self.record_result(|counts| &mut counts.downloads, "download", result);
                }
            });
        }
        scope.spawn(move || {
            while is_running() {
                self.run_wrk();
            }
        });
        scope.spawn(move || {
            while is_running() {
                let result = self.run_in_client_namespace(|| {
                    HttpConnection::open_to(self.testbed.service_address(), None)?.query_worker().map(drop)
                });
                self.record_result(|counts| &mut counts.short_connections, "short connection", result);
                std::thread::sleep(SHORT_CONNECTION_INTERVAL);
            }
        });
        scope.spawn(move || self.keep_querying_persistent_connections(is_running));
    }

    /// Waits for the end of all streams and returns the final counts. Fails when the stream client fails.
    pub fn wait_for_final_counts(mut self) -> anyhow::Result<ClientTrafficCounts> {
        let mut traffic_counts = self.traffic_counts();
        if let Some(streams) = self.stream_client.take() {
            let report = streams.wait_and_report(STREAMS_END_TIMEOUT)?;
            let stream_totals = report.total_counts();
            traffic_counts.streams = ClientResultCounts {
                successful: stream_totals.completed + report.open_at_end,
                broken: stream_totals.broken.total_count(),
            };
            traffic_counts.broken_streams = stream_totals.broken;
            for (second, second_counts) in
                (0..).zip(&report.seconds).filter(|(_, second)| second.broken.total_count() > 0)
            {
                self.report_failure(
                    &mut traffic_counts.failures,
                    Duration::from_secs(second),
                    format!("stream: {:?}", second_counts.broken),
                );
            }
        }
        Ok(traffic_counts)
    }

    fn run_in_client_namespace<T: Send>(&self, action: impl FnOnce() -> anyhow::Result<T> + Send) -> anyhow::Result<T> {
        self.testbed.client().run_within(action)
    }

    fn record_result(&self, select_counts: ClientCountSelector, client_name: &str, outcome: anyhow::Result<()>) {
        let mut traffic_counts = self.counts.lock().expect("no client panics");
        match outcome {
            Ok(()) => select_counts(&mut traffic_counts).successful += 1,
            Err(error) => {
                select_counts(&mut traffic_counts).broken += 1;
                self.report_failure(
                    &mut traffic_counts.failures,
                    self.run_start.elapsed(),
                    format!("{client_name}: {error:#}"),
                );
            }
        }
    }

    fn report_failure(&self, failures: &mut Vec<String>, elapsed: Duration, description: String) {
        if failures.len() < MAX_RECORDED_CONNECTION_FAILURES {
            failures.push(format!("{:.1} s: {description}", elapsed.as_secs_f64()));
        }
    }

    fn run_wrk(&self) {
        let mut command = Command::new("wrk");
        command.args(["--threads", "1", "--connections", "8", "--timeout", "10s", "--duration"]);
        command.arg(format!("{WRK_RUN_SECONDS}s")).arg("--script").arg(&self.wrk_delay_script_path);
        command.arg(format!("http://{}{WORKER_IDENTITY_PATH}", self.testbed.service_address()));
        let wrk_output = self.testbed.run_command(self.testbed.client(), command);
        match wrk_output.and_then(|output| parse_wrk_counts(&String::from_utf8_lossy(&output.stdout))) {
            Ok((requests, errors)) => {
                let mut traffic_counts = self.counts.lock().expect("no client panics");
                traffic_counts.requests.successful += requests;
                traffic_counts.requests.broken += errors;
                if errors > 0 {
                    self.report_failure(
                        &mut traffic_counts.failures,
                        self.run_start.elapsed(),
                        format!("wrk: {errors} errors"),
                    );
                }
            }
            Err(error) => self.record_result(|counts| &mut counts.requests, "wrk", Err(error)),
        }
    }

    /// Sends requests on the persistent connections in turn, as long as `is_running` returns true.
    fn keep_querying_persistent_connections(&self, is_running: impl Fn() -> bool) {
        let mut persistent_connections: Vec<Option<(HttpConnection, WorkerIdentity)>> =
            (0..PERSISTENT_CONNECTION_COUNT).map(|_| None).collect();
        while is_running() {
            for connection_slot in &mut persistent_connections {
                let query_start = Instant::now();
                let query_result = self.run_in_client_namespace(|| {
                    check_same_worker_answers(connection_slot, self.testbed.service_address())
                });
                if query_result.is_err() {
                    *connection_slot = None;
                }
                self.record_result(|counts| &mut counts.kept_connections, "kept connection", query_result);
                std::thread::sleep(
                    (PERSISTENT_QUERY_INTERVAL / PERSISTENT_CONNECTION_COUNT as u32)
                        .saturating_sub(query_start.elapsed()),
                );
            }
        }
    }
}

/// Sends a request on a persistent connection, which it opens if necessary. Fails when the answering worker is not that
/// of the first request.
fn check_same_worker_answers(
    connection_slot: &mut Option<(HttpConnection, WorkerIdentity)>,
    service: SocketAddr,
) -> anyhow::Result<()> {
    match connection_slot {
        None => {
            let mut connection = HttpConnection::open_to(service, None)?;
            let first_worker = connection.query_worker()?;
            *connection_slot = Some((connection, first_worker));
        }
        Some((connection, first_worker)) => {
            let current_worker = connection.query_worker()?;
            ensure!(
                current_worker == *first_worker,
                "answered by {first_worker:?} at first, by {current_worker:?} now"
            );
        }
    }
    Ok(())
}
