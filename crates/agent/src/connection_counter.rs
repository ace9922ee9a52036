//! Counts the open connections of each service. This runs in a separate thread, because the kernel takes so long to
//! list 100,000 sockets that reports would be late.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use anyhow::anyhow;
use coreward_dataplane::sockets::counts::count_connections;
use coreward_model::tuple::TransportProtocol;
use coreward_wire::{AgentConfiguration, CountedConnections};

/// Interval between the starts of two connection counts, while the server does not drain.
const CONNECTION_COUNT_INTERVAL: Duration = Duration::from_secs(5);
/// Interval between the starts of two connection counts, while the server drains.
const DRAINING_CONNECTION_COUNT_INTERVAL: Duration = Duration::from_secs(1);
/// Minimum interval between the starts of two counts, as a multiple of a count's duration, so that counting uses at
/// most 1/20 of a CPU.
const MIN_INTERVAL_PER_COUNT_DURATION: u32 = 20;

/// Counter of the open connections of each service. It holds the newest count and the thread of the current count.
#[derive(Default)]
pub struct ConnectionCounter {
    newest_count: Option<FinishedConnectionCount>,
    counting_thread: Option<JoinHandle<anyhow::Result<FinishedConnectionCount>>>,
    counting_error: Option<String>,
    last_count_start_and_duration: Option<(Instant, Duration)>,
}

struct FinishedConnectionCount {
    start_time: Instant,
    counting_duration: Duration,
    configuration_generation: u64,
    counts_by_service: BTreeMap<String, u32>,
}

impl ConnectionCounter {
    /// Stores the result of a finished count, and starts the next count when it is due.
    pub fn store_result_and_start_count(&mut self, configuration: Option<&AgentConfiguration>) {
        if let Some(finished_thread) = self.counting_thread.take_if(|thread| thread.is_finished()) {
            let count_result = finished_thread.join().unwrap_or_else(|_| Err(anyhow!("the thread has panicked")));
            self.record_count_result(count_result);
        }
        let Some(configuration) = configuration else { return };
        if self.counting_thread.is_none() && self.is_count_due(configuration.is_draining) {
            self.start_counting(configuration);
        }
    }

    fn is_count_due(&self, is_draining: bool) -> bool {
        let interval = if is_draining { DRAINING_CONNECTION_COUNT_INTERVAL } else { CONNECTION_COUNT_INTERVAL };
        self.last_count_start_and_duration.is_none_or(|(last_start, last_duration)| {
            last_start.elapsed() >= interval.max(last_duration * MIN_INTERVAL_PER_COUNT_DURATION)
        })
    }

    fn start_counting(&mut self, configuration: &AgentConfiguration) {
        let start_time = Instant::now();
        self.last_count_start_and_duration = Some((start_time, Duration::ZERO));
        let configuration_generation = configuration.generation;
        let tcp_services =
            configuration.services.iter().filter(|service| service.address.protocol == TransportProtocol::Tcp);
        let (service_names, service_addresses): (Vec<String>, Vec<SocketAddr>) =
            tcp_services.map(|service| (service.name.clone(), service.address.vip_and_port)).unzip();
        let count_connections = move || {
            let counts_by_service = service_names.into_iter().zip(count_connections(&service_addresses)?).collect();
            Ok(FinishedConnectionCount {
                start_time,
                counting_duration: start_time.elapsed(),
                configuration_generation,
                counts_by_service,
            })
        };
        match std::thread::Builder::new().name("counting".to_owned()).spawn(count_connections) {
            Ok(thread) => self.counting_thread = Some(thread),
            Err(error) => self.record_count_result(Err(error.into())),
        }
    }

    fn record_count_result(&mut self, count_result: anyhow::Result<FinishedConnectionCount>) {
        if let (Some((_, last_duration)), Ok(connection_count)) =
            (&mut self.last_count_start_and_duration, &count_result)
        {
            *last_duration = connection_count.counting_duration;
        }
        let problem = count_result.as_ref().err().map(|error| format!("connections are not counted: {error:#}"));
        if let Err(error) = &count_result
            && self.counting_error != problem
        {
            tracing::warn!(
                event = "connections-uncounted",
                error = format!("{error:#}"),
                "the agent cannot count the services' open connections: its reports omit these counts"
            );
        }
        self.counting_error = problem;
        self.newest_count = count_result.ok();
    }

    /// Starts a stream to a controller. Discards older counts, which belong to configurations of the previous stream.
    pub fn begin_controller_stream(&mut self) {
        *self = Self { counting_error: self.counting_error.take(), ..Self::default() };
    }

    pub fn newest_counted_connections(&self) -> Option<CountedConnections> {
        self.newest_count.as_ref().map(|connection_count| CountedConnections {
            count_age: connection_count.start_time.elapsed(),
            configuration_generation: connection_count.configuration_generation,
            connection_count_by_service: connection_count.counts_by_service.clone(),
        })
    }

    /// Returns the reason why connections could not be counted, for `coreward status`, or `None` if they were counted.
    pub fn uncounted_connections_warning(&self) -> Option<String> {
        self.counting_error.clone()
    }
}
