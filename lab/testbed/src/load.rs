//! Open-loop load generator that replays an arrival log to a VIP from the client's host.
//!
//! Every request has a due time, which does not depend on earlier requests, and its latency starts at that time. So a
//! stalled server cannot hide the latency of requests that it kept from being sent ("coordinated omission"). Source
//! addresses and ports come from the log, so that every policy gets the same 4-tuples.

use std::cmp::Reverse;
use std::collections::{BinaryHeap, HashMap};
use std::io::{self, Read as _, Write as _};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpStream};
use std::os::fd::AsFd as _;
use std::path::PathBuf;

use anyhow::{Context as _, ensure};
use coreward_model::arrival_log::{ArrivalLog, ConnectionArrival};
use hdrhistogram::Histogram;
use serde::{Deserialize, Serialize};
use socket2::{Domain, Socket, Type};
use zerocopy::IntoBytes as _;

use crate::connection_errors::{BrokenConnectionCounts, CONNECTION_DATA_TIMEOUT_NS, ConnectionFailure};
use coreward_load::event_loop::{Epoll, ReadyEvent, now_ns};
use coreward_load::paced_protocol::{PACED_MESSAGE_BYTES, PacedMessageBuffer, PacedRequest, PacedResponse};

/// Interval between checks for timed-out connections (ns).
const CONNECTION_TIMEOUT_CHECK_INTERVAL_NS: u64 = 500_000_000;
/// Time from the start of the replay to time 0 of the arrival log, if no start time is given (ns).
const DEFAULT_REPLAY_START_DELAY_NS: u64 = 50_000_000;

/// Options of `coreward-lab testbed load`.
#[derive(Debug, Clone, clap::Args)]
pub struct LoadClientArgs {
    /// Arrival log to replay
    #[arg(long, value_name = "FILE")]
    pub log: PathBuf,
    /// Service to load
    #[arg(long, value_name = "ADDRESS:PORT")]
    pub vip: SocketAddr,
    /// Client address for source address 0 of the log; further source addresses follow in order
    #[arg(long, value_name = "ADDRESS")]
    pub first_address: IpAddr,
    /// Time 0 of the log by CLOCK_MONOTONIC (ns), so that several clients can start together [default: now]
    #[arg(long, value_name = "NS")]
    pub start_at: Option<u64>,
}

/// Results of replaying an arrival log, printed as JSON.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
pub struct LoadClientReport {
    pub opened: u64,
    /// Number of connections that got a response to every request.
    pub completed: u64,
    /// Numbers of broken connections, by kind.
    pub broken: BrokenConnectionCounts,
    pub answered_requests: u64,
    /// Latency of requests, from a request's due time to its response.
    pub latency_us: DelayStatisticsUs,
    /// Lateness of the load generator, from a request's due time to its send time, on open connections. If it exceeds a
    /// millisecond, the machine is too busy for a measurement.
    pub lateness_us: DelayStatisticsUs,
    /// Number of connections that were answered by each core of each server.
    pub connections_by_core: Vec<CoreConnectionCount>,
}

/// Percentiles, maximum and mean of latencies or other delays (us).
#[derive(Debug, Clone, Copy, PartialEq, Default, Serialize, Deserialize)]
pub struct DelayStatisticsUs {
    pub p50: u64,
    pub p99: u64,
    pub max: u64,
    pub mean: f64,
}

impl From<&Histogram<u64>> for DelayStatisticsUs {
    fn from(h: &Histogram<u64>) -> Self {
        Self { p50: h.value_at_quantile(0.5), p99: h.value_at_quantile(0.99), max: h.max(), mean: h.mean() }
    }
}

/// Number of connections that one core of a server answered.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct CoreConnectionCount {
    /// Number of the server, taken from its responses.
    pub server: u8,
    /// Number of the core within the server.
    pub core: u8,
    pub connections: u64,
}

/// Replays the arrival log and prints the report as one line of JSON. Fails when the log cannot be read or parsed, or
/// when a source address and port cannot be bound.
pub fn run_load_client(args: &LoadClientArgs) -> anyhow::Result<()> {
    let text = std::fs::read_to_string(&args.log);
    let text = text.with_context(|| format!("cannot read the arrival log {}", args.log.display()))?;
    let arrival_log: ArrivalLog = text.parse().with_context(|| args.log.display().to_string())?;
    let report = replay_log(&arrival_log, args)?;
    println!("{}", serde_json::to_string(&report)?);
    Ok(())
}

fn replay_log(log: &ArrivalLog, args: &LoadClientArgs) -> anyhow::Result<LoadClientReport> {
    ensure!(
        args.vip.is_ipv4() == args.first_address.is_ipv4(),
        "--vip {} and --first-address {}: expected addresses of one family",
        args.vip,
        args.first_address
    );
    let start_ns = args.start_at.unwrap_or_else(|| now_ns() + DEFAULT_REPLAY_START_DELAY_NS);
    let mut load_client = LoadClient {
        arrival_log: log,
        service_address: args.vip,
        first_address: args.first_address,
        start_ns,
        epoll: Epoll::new()?,
        connections: HashMap::new(),
        next_request_due_times: BinaryHeap::new(),
        next_arrival_index: 0,
        next_timeout_check_ns: start_ns + CONNECTION_TIMEOUT_CHECK_INTERVAL_NS,
        report: LoadClientReport::default(),
        latency_histogram: new_delay_histogram()?,
        lateness_histogram: new_delay_histogram()?,
        connection_count_by_core: HashMap::new(),
    };
    while load_client.process_due_events()? {}
    Ok(load_client.into_report())
}

/// Returns the IP address `first_address` + `index`.
pub(crate) fn nth_address(first_address: IpAddr, index: u16) -> IpAddr {
    match first_address {
        IpAddr::V4(first) => Ipv4Addr::from_bits(first.to_bits() + u32::from(index)).into(),
        IpAddr::V6(first) => Ipv6Addr::from_bits(first.to_bits() + u128::from(index)).into(),
    }
}

/// Returns an empty histogram of delays with three significant digits, from 1 us to a minute. Longer delays count as a
/// minute.
pub(crate) fn new_delay_histogram() -> anyhow::Result<Histogram<u64>> {
    Ok(Histogram::new_with_max(60_000_000, 3)?)
}

/// Returns a non-blocking TCP socket that is bound to `source_address` and not connected.
fn bind_client_socket(source_address: SocketAddr) -> anyhow::Result<Socket> {
    let socket = Socket::new(Domain::for_address(source_address), Type::STREAM, None)?;
    // An earlier connection from this port may still be in TIME-WAIT.
    socket.set_reuse_address(true)?;
    socket.set_nonblocking(true)?;
    socket.set_tcp_nodelay(true)?;
    socket.bind(&source_address.into()).with_context(|| format!("cannot bind the source {source_address}"))?;
    Ok(socket)
}

#[derive(Debug)]
struct LoadClientConnection {
    stream: TcpStream,
    is_connected: bool,
    message_buffer: PacedMessageBuffer,
    /// Number of requests that have been due so far. `answered_request_count` <= `sent_request_count` <=
    /// `due_request_count`.
    due_request_count: u32,
    sent_request_count: u32,
    answered_request_count: u32,
    /// Numbers of the server and core that sent the first response. All further responses must come from this core.
    serving_server_and_core: Option<(u8, u8)>,
}

struct LoadClient<'a> {
    arrival_log: &'a ArrivalLog,
    service_address: SocketAddr,
    first_address: IpAddr,
    start_ns: u64,
    epoll: Epoll,
    /// Open connections, by index in the arrival log.
    connections: HashMap<usize, LoadClientConnection>,
    /// Next request of each open connection, as (due time (ns), connection index). The earliest comes first.
    next_request_due_times: BinaryHeap<Reverse<(u64, usize)>>,
    next_arrival_index: usize,
    next_timeout_check_ns: u64,
    report: LoadClientReport,
    latency_histogram: Histogram<u64>,
    lateness_histogram: Histogram<u64>,
    connection_count_by_core: HashMap<(u8, u8), u64>,
}

impl LoadClient<'_> {
    fn connection_arrival(&self, connection_index: usize) -> &ConnectionArrival {
        &self.arrival_log.arrivals[connection_index]
    }

    fn request_due_ns(&self, connection_index: usize, request_index: u32) -> u64 {
        self.start_ns + self.connection_arrival(connection_index).request_due_us(request_index) * 1_000
    }

    /// Waits for the next event, and processes all events that are due. Returns false when the replay is finished.
    fn process_due_events(&mut self) -> anyhow::Result<bool> {
        let next_arrival_ns = (self.next_arrival_index < self.arrival_log.arrivals.len())
            .then(|| self.request_due_ns(self.next_arrival_index, 0));
        if next_arrival_ns.is_none() && self.connections.is_empty() {
            return Ok(false);
        }
        let next_request_ns = self.next_request_due_times.peek().map(|Reverse((due_ns, _))| *due_ns);
        let wake_ns =
            [next_arrival_ns, next_request_ns].into_iter().flatten().fold(self.next_timeout_check_ns, u64::min);
        let events: Vec<ReadyEvent> = self.epoll.wait(Some(wake_ns))?.collect();
        for event in events {
            let connection_index = event.token as usize;
            if let Err(failure) = self.handle_socket_event(connection_index, event) {
                self.count_broken_connection(connection_index, failure);
            }
        }
        let now_ns = now_ns();
        while self.next_arrival_index < self.arrival_log.arrivals.len()
            && self.request_due_ns(self.next_arrival_index, 0) <= now_ns
        {
            self.open_connection(self.next_arrival_index)?;
            self.next_arrival_index += 1;
        }
        while let Some(Reverse((due_ns, index))) =
            self.next_request_due_times.peek().copied().filter(|Reverse((next_due_ns, _))| *next_due_ns <= now_ns)
        {
            self.next_request_due_times.pop();
            self.handle_due_request(index, due_ns);
        }
        if now_ns >= self.next_timeout_check_ns {
            self.next_timeout_check_ns = now_ns + CONNECTION_TIMEOUT_CHECK_INTERVAL_NS;
            self.fail_timed_out_connections(now_ns);
        }
        Ok(true)
    }

    /// Opens the connection with this index in the arrival log. Its source address and port are those in the log.
    fn open_connection(&mut self, connection_index: usize) -> anyhow::Result<()> {
        let arrival = *self.connection_arrival(connection_index);
        let source_address =
            SocketAddr::new(nth_address(self.first_address, arrival.source_address_index), arrival.source_port);
        let socket = bind_client_socket(source_address)?;
        self.report.opened += 1;
        let connect_result = socket.connect(&self.service_address.into());
        let stream = TcpStream::from(socket);
        let connection = LoadClientConnection {
            stream,
            is_connected: false,
            message_buffer: PacedMessageBuffer::default(),
            due_request_count: 0,
            sent_request_count: 0,
            answered_request_count: 0,
            serving_server_and_core: None,
        };
        self.connections.insert(connection_index, connection);
        match connect_result {
            Err(error) if error.raw_os_error() == Some(libc::EADDRNOTAVAIL) => {
                return Err(error)
                    .with_context(|| format!("{source_address} was used for {} a moment ago", self.service_address));
            }
            Err(error) if error.raw_os_error() != Some(libc::EINPROGRESS) => {
                self.count_broken_connection(connection_index, error.into())
            }
            _ => {
                let stream = &self.connections[&connection_index].stream;
                // Edge-triggered epoll reports one event when the connection is established, then one per arrival of
                // data.
                let flags = libc::EPOLLIN | libc::EPOLLOUT | libc::EPOLLRDHUP | libc::EPOLLET;
                self.epoll.add(stream.as_fd(), connection_index as u64, flags)?;
                self.next_request_due_times.push(Reverse((self.request_due_ns(connection_index, 0), connection_index)));
            }
        }
        Ok(())
    }

    fn handle_due_request(&mut self, connection_index: usize, due_ns: u64) {
        let request_count = self.connection_arrival(connection_index).request_count;
        let Some(connection) = self.connections.get_mut(&connection_index) else { return };
        connection.due_request_count += 1;
        if connection.due_request_count < request_count {
            let next_request_ns =
                self.request_due_ns(connection_index, self.connections[&connection_index].due_request_count);
            self.next_request_due_times.push(Reverse((next_request_ns, connection_index)));
        }
        if self.connections[&connection_index].is_connected {
            let lateness_us = now_ns().saturating_sub(due_ns) / 1_000;
            self.lateness_histogram.saturating_record(lateness_us);
            if let Err(failure) = self.send_due_requests(connection_index) {
                self.count_broken_connection(connection_index, failure);
            }
        }
    }

    fn send_due_requests(&mut self, connection_index: usize) -> Result<(), ConnectionFailure> {
        let service_us = self.connection_arrival(connection_index).service_us.into();
        let Some(connection) = self.connections.get_mut(&connection_index) else { return Ok(()) };
        while connection.sent_request_count < connection.due_request_count {
            let request = PacedRequest { service_us, id: connection.sent_request_count.into() };
            // A few unanswered requests of 8 bytes always fit the send buffer, so a short write is a failure.
            if connection.stream.write(request.as_bytes())? != PACED_MESSAGE_BYTES {
                return Err(io::Error::from(io::ErrorKind::WriteZero).into());
            }
            connection.sent_request_count += 1;
        }
        Ok(())
    }

    fn handle_socket_event(&mut self, connection_index: usize, event: ReadyEvent) -> Result<(), ConnectionFailure> {
        let Some(connection) = self.connections.get_mut(&connection_index) else { return Ok(()) };
        if event.has_flags(libc::EPOLLERR)
            && let Some(error) = connection.stream.take_error()?
        {
            return Err(error.into());
        }
        if !connection.is_connected && event.has_flags(libc::EPOLLOUT) {
            connection.is_connected = true;
            self.send_due_requests(connection_index)?;
        }
        if event.has_flags(libc::EPOLLIN) {
            self.receive_responses(connection_index, event.has_flags(libc::EPOLLRDHUP))
        } else {
            Ok(())
        }
    }

    /// Reads all available responses. A short read means that no data is left in the socket (epoll(7), question 9),
    /// unless the end of the stream follows the data.
    fn receive_responses(&mut self, connection_index: usize, is_stream_ended: bool) -> Result<(), ConnectionFailure> {
        let now_ns = now_ns();
        let (start_ns, arrival) = (self.start_ns, self.arrival_log.arrivals[connection_index]);
        let Some(connection) = self.connections.get_mut(&connection_index) else { return Ok(()) };
        let mut buffer = [0; 1024];
        let mut may_have_more = true;
        while may_have_more && connection.answered_request_count < arrival.request_count {
            let length = match connection.stream.read(&mut buffer) {
                Ok(0) => return Err(ConnectionFailure::ClosedEarly),
                Ok(length) => length,
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => break,
                Err(error) => return Err(error.into()),
            };
            may_have_more = is_stream_ended || length == buffer.len();
            let mut is_right_answer = true;
            connection.message_buffer.for_each_message(&buffer[..length], |response: PacedResponse| {
                let serving_core =
                    *connection.serving_server_and_core.get_or_insert((response.server_number, response.core_number));
                is_right_answer &= response.id.get() == connection.answered_request_count
                    && connection.answered_request_count < connection.sent_request_count
                    && serving_core == (response.server_number, response.core_number);
                let due_ns = start_ns + arrival.request_due_us(connection.answered_request_count) * 1_000;
                self.latency_histogram.saturating_record(now_ns.saturating_sub(due_ns) / 1_000);
                connection.answered_request_count += 1;
            });
            if !is_right_answer {
                return Err(ConnectionFailure::WrongAnswer);
            }
        }
        if connection.answered_request_count == arrival.request_count {
            let completed_connection = self.connections.remove(&connection_index).expect("just used");
            self.report.completed += 1;
            self.count_finished_connection(&completed_connection);
        }
        Ok(())
    }

    fn count_finished_connection(&mut self, connection: &LoadClientConnection) {
        self.report.answered_requests += u64::from(connection.answered_request_count);
        if let Some(serving_core) = connection.serving_server_and_core {
            *self.connection_count_by_core.entry(serving_core).or_default() += 1;
        }
    }

    fn count_broken_connection(&mut self, connection_index: usize, failure: ConnectionFailure) {
        let Some(connection) = self.connections.remove(&connection_index) else { return };
        self.report.broken.count_failure(&failure, connection_index);
        self.count_finished_connection(&connection);
    }

    /// Counts connections as broken if their oldest unanswered request has timed out.
    fn fail_timed_out_connections(&mut self, now_ns: u64) {
        let timed_out_index = |(index, connection): (&usize, &LoadClientConnection)| {
            let has_unanswered_request = connection.answered_request_count < connection.due_request_count;
            (has_unanswered_request
                && self.request_due_ns(*index, connection.answered_request_count) + CONNECTION_DATA_TIMEOUT_NS < now_ns)
                .then_some(*index)
        };
        let timed_out_indexes: Vec<usize> = self.connections.iter().filter_map(timed_out_index).collect();
        for index in timed_out_indexes {
            self.count_broken_connection(index, io::Error::from(io::ErrorKind::TimedOut).into());
        }
    }

    fn into_report(self) -> LoadClientReport {
        let connections_by_core = self.connection_count_by_core.into_iter();
        let mut connections_by_core: Vec<CoreConnectionCount> = connections_by_core
            .map(|((server, core), connections)| CoreConnectionCount { server, core, connections })
            .collect();
        connections_by_core.sort_by_key(|core_connections| (core_connections.server, core_connections.core));
        let (latency_us, lateness_us) =
            (DelayStatisticsUs::from(&self.latency_histogram), DelayStatisticsUs::from(&self.lateness_histogram));
        LoadClientReport { latency_us, lateness_us, connections_by_core, ..self.report }
    }
}
