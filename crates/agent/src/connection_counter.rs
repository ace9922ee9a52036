//! Counts of the services' connections, in a thread of its own: the kernel lists 100,000 sockets for so long that
//! reports would be late.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use anyhow::anyhow;
use coreward_dataplane::sockets::counts::connection_counts;
use coreward_model::tuple::Protocol;
use coreward_wire::{AgentConfiguration, CountedConnections};

/// Interval between the starts of two connection counts.
const COUNT_INTERVAL: Duration = Duration::from_secs(5);
/// Interval between the starts of two connection counts while a server drains.
const DRAINING_COUNT_INTERVAL: Duration = Duration::from_secs(1);
/// Minimum pause after a count as a multiple of its duration, so that counting uses at most a twentieth of one CPU.
const PAUSE_FACTOR: u32 = 20;

/// Counter of the services' open connections, with its newest result and the count in progress.
#[derive(Default)]
pub struct ConnectionCounter {
    newest_result: Option<CountResult>,
    running: Option<JoinHandle<anyhow::Result<CountResult>>>,
    problem: Option<String>,
    last_run: Option<(Instant, Duration)>,
}

struct CountResult {
    started_at: Instant,
    duration: Duration,
    configuration_generation: u64,
    counts_by_service: BTreeMap<String, u32>,
}

impl ConnectionCounter {
    /// Collects a finished count, and starts the next one when it is due.
    pub fn poll(&mut self, configuration: Option<&AgentConfiguration>) {
        if let Some(ended) = self.running.take_if(|thread| thread.is_finished()) {
            let outcome = ended.join().unwrap_or_else(|_| Err(anyhow!("the thread has panicked")));
            self.record_result(outcome);
        }
        let Some(configuration) = configuration else { return };
        if self.running.is_none() && self.is_due(configuration.is_draining) {
            self.begin(configuration);
        }
    }

    fn is_due(&self, draining: bool) -> bool {
        let interval = if draining { DRAINING_COUNT_INTERVAL } else { COUNT_INTERVAL };
        self.last_run.is_none_or(|(began, took)| began.elapsed() >= interval.max(took * PAUSE_FACTOR))
    }

    fn begin(&mut self, configuration: &AgentConfiguration) {
        let began = Instant::now();
        self.last_run = Some((began, Duration::ZERO));
        let configuration_generation = configuration.generation;
        let of_tcp = configuration.services.iter().filter(|service| service.address.protocol == Protocol::Tcp);
        let (names, addresses): (Vec<String>, Vec<SocketAddr>) =
            of_tcp.map(|service| (service.name.clone(), service.address.socket)).unzip();
        let count = move || {
            let counts_by_service = names.into_iter().zip(connection_counts(&addresses)?).collect();
            Ok(CountResult {
                started_at: began,
                duration: began.elapsed(),
                configuration_generation,
                counts_by_service,
            })
        };
        match std::thread::Builder::new().name("counting".to_owned()).spawn(count) {
            Ok(thread) => self.running = Some(thread),
            Err(error) => self.record_result(Err(error.into())),
        }
    }

    fn record_result(&mut self, outcome: anyhow::Result<CountResult>) {
        if let (Some((_, took)), Ok(counted)) = (&mut self.last_run, &outcome) {
            *took = counted.duration;
        }
        let problem = outcome.as_ref().err().map(|error| format!("connections are not counted: {error:#}"));
        if let Err(error) = &outcome
            && self.problem != problem
        {
            tracing::warn!(
                event = "connections-uncounted",
                error = format!("{error:#}"),
                "the agent cannot count the services' open connections: reports omit the counts"
            );
        }
        self.problem = problem;
        self.newest_result = outcome.ok();
    }

    /// Begins a stream to a controller. Discards older counts, which refer to configurations of the previous stream.
    pub fn begin_stream(&mut self) {
        *self = Self { problem: self.problem.take(), ..Self::default() };
    }

    pub fn newest(&self) -> Option<CountedConnections> {
        self.newest_result.as_ref().map(|counted| CountedConnections {
            elapsed: counted.started_at.elapsed(),
            configuration_generation: counted.configuration_generation,
            services: counted.counts_by_service.clone(),
        })
    }

    /// Returns the reason why there is no connection count, as text for `coreward status`.
    pub fn warning(&self) -> Option<String> {
        self.problem.clone()
    }
}
