//! Clients of Cheetah's experiment (NSDI'20, Sect. 5.3) in one process. As in the simulator ([`ConnectionSource`]),
//! each connection has one request from the web server's mix, and a request repeats after its connection has ended.
//! Simulation and testbed therefore have the same load.
//!
//! A connection is broken when it ends before its last byte, when wrong bytes arrive, or when bytes that are due are
//! missing for [`DATA_TIMEOUT_NS`]. Source addresses and ports follow from the connection's number, so that a run under
//! another method has the same 4-tuples.

use std::collections::HashMap;
use std::fs::{self, File};
use std::io::{self, Read as _, Write as _};
use std::net::{IpAddr, SocketAddr, TcpStream};
use std::ops::Range;
use std::os::fd::AsFd as _;
use std::path::PathBuf;
use std::process::Command;
use std::time::Duration;

use anyhow::{Context as _, ensure};
use coreward_sim::pcc::{ArrivalProcess, ConnectionMix, ConnectionSource, RequestRateWave};
use hdrhistogram::Histogram;
use nix::sys::signal::Signal;
use serde::{Deserialize, Serialize};
use socket2::{Domain, Socket, Type};
use zerocopy::IntoBytes as _;

use super::{STREAM_REQUEST_BYTES, StreamRequest, raise_open_file_limit, stream_content_byte};
use crate::connection_errors::{BrokenConnectionCounts, ConnectionFailure, DATA_TIMEOUT_NS};
use crate::fleet::lab_binary_path;
use crate::interrupt;
use crate::load::{DelayStatisticsUs, new_delay_histogram, nth_address};
use crate::process::TestbedProcess;
use crate::topology::Testbed;
use coreward_load::event_loop::{Epoll, ReadyEvent, now_ns};

const NS_PER_SECOND: u64 = 1_000_000_000;
/// Lateness of a connection's bytes at the end of a run (ns) above which the run continues until the connection
/// recovers or breaks.
const MAX_END_LATENESS_NS: u64 = NS_PER_SECOND / 2;
/// Interval between searches for timed-out connections (ns).
const TIMEOUT_CHECK_INTERVAL_NS: u64 = NS_PER_SECOND / 4;
/// First source port of each client address, above the well-known ports.
const FIRST_SOURCE_PORT: u16 = 10_000;
const SOURCE_PORTS_PER_ADDRESS: u64 = 50_000;
/// Difference between the source ports of consecutive connections. It is coprime to the number of ports, so that all
/// are used.
const SOURCE_PORT_STEP: u64 = 7_919;
/// Duration of an endless run (s), for which two addresses have enough ports at 150 connections per second.
const ENDLESS_RUN_SECONDS: u32 = 600;

/// Options of `coreward-lab testbed stream-client`.
#[derive(Debug, Clone, clap::Args)]
pub struct StreamClientArgs {
    /// Address and port of the service
    #[arg(long, value_name = "ADDRESS:PORT")]
    pub vip: SocketAddr,
    /// First of the client's addresses
    #[arg(long, value_name = "ADDRESS")]
    pub first_address: IpAddr,
    /// Number of addresses; each allows 50,000 connections
    #[arg(long, default_value_t = 4, value_parser = clap::value_parser!(u16).range(1..=200))]
    pub addresses: u16,
    /// Start of the warm-up by CLOCK_MONOTONIC (ns) [default: now]
    #[arg(long, value_name = "NS")]
    pub start_at: Option<u64>,
    /// Requests and their times
    #[command(flatten)]
    pub streams: StreamWorkload,
}

/// Rate, number and duration of the connections that a stream client opens.
#[derive(Debug, Clone, PartialEq, clap::Args)]
pub struct StreamWorkload {
    /// Number of clients; each has the complete mix (908 requests) in progress at most once
    #[arg(long, default_value_t = Self::default().clients, value_parser = clap::value_parser!(u32).range(1..=1000))]
    pub clients: u32,
    /// Requests per second before the wave, at its start and at its end
    #[arg(long, default_value_t = Self::default().low)]
    pub low: f64,
    /// Requests per second in the middle of the wave
    #[arg(long, default_value_t = Self::default().high)]
    pub high: f64,
    /// Length of the wave, half a sine (s)
    #[arg(long, default_value_t = Self::default().wave_seconds)]
    pub wave_seconds: u32,
    /// Duration of the warm-up before the wave, in which connections begin (s)
    #[arg(long, default_value_t = Self::default().warm_up_seconds,
        value_parser = clap::value_parser!(u32).range(..=3600))]
    pub warm_up_seconds: u32,
    /// Time from the start of the wave to the end of the run (s)
    #[arg(long, default_value_t = Self::default().seconds, value_parser = clap::value_parser!(u32).range(1..=3600))]
    pub seconds: u32,
    /// Seed of times, requests and contents
    #[arg(long, default_value_t = Self::default().seed)]
    pub seed: u64,
}

impl Default for StreamWorkload {
    /// Default workload, which is that of Cheetah's experiment (NSDI'20, Sect. 5.3), where four machines generated it.
    fn default() -> Self {
        Self { clients: 4, low: 1_500.0, high: 2_500.0, wave_seconds: 40, warm_up_seconds: 15, seconds: 45, seed: 1 }
    }
}

impl StreamWorkload {
    /// Returns a workload with a constant rate of requests per second, without warm-up.
    pub fn with_steady_rate(requests_per_second: f64, seconds: u32) -> Self {
        Self { low: requests_per_second, high: requests_per_second, warm_up_seconds: 0, seconds, ..Self::default() }
    }

    /// Returns a workload with a constant rate of requests per second, which lasts until
    /// [`StreamClientProcess::terminate_and_report`].
    pub fn endless(requests_per_second: f64) -> Self {
        Self::with_steady_rate(requests_per_second, ENDLESS_RUN_SECONDS)
    }
}

/// Results of a run of the stream client, printed as JSON.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
pub struct StreamReport {
    /// Results of each second, counted from the start of the warm-up.
    pub seconds: Vec<StreamSecondCounts>,
    /// Number of unbroken connections that were still open at the end.
    pub open_at_end: u64,
    /// Lateness of the client, from the due time of a connection to its opening.
    pub lateness_us: DelayStatisticsUs,
}

impl StreamReport {
    pub fn sum_of_seconds(&self) -> StreamSecondCounts {
        StreamSecondCounts::sum_seconds(&self.seconds)
    }
}

/// Numbers of connections opened, completed and broken in one second.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct StreamSecondCounts {
    pub opened: u64,
    /// Number of connections that received their whole response.
    pub completed: u64,
    pub broken: BrokenConnectionCounts,
}

impl StreamSecondCounts {
    pub fn sum_seconds(seconds: &[Self]) -> Self {
        let mut sums = Self::default();
        for second in seconds {
            sums.opened += second.opened;
            sums.completed += second.completed;
            sums.broken += second.broken;
        }
        sums
    }

    /// Returns the number of broken connections in percent of the completed ones (Cheetah, NSDI'20, Fig. 9).
    pub fn broken_pct(&self) -> f64 {
        100.0 * self.broken.total_count() as f64 / self.completed.max(1) as f64
    }
}

/// Runs the client and prints the report as one line of JSON. SIGTERM and SIGINT end the client early. Fails when the
/// client lacks an address, or when its addresses have too few ports for the run.
pub fn run_stream_client(args: &StreamClientArgs) -> anyhow::Result<()> {
    raise_open_file_limit()?;
    interrupt::catch_signals()?;
    let mut event_loop = ClientEventLoop::new(args)?;
    while event_loop.process_due_events()? {
        if interrupt::ensure_not_interrupted().is_err() {
            event_loop.end_after_current_second(now_ns());
        }
    }
    println!("{}", serde_json::to_string(&event_loop.into_report())?);
    Ok(())
}

struct StreamConnection {
    stream: TcpStream,
    request: StreamRequest,
    /// Index of the request's kind in the mix. A request of this kind is due again after the connection has ended.
    mix_index: u8,
    opened_at_ns: u64,
    is_connected: bool,
    received_bytes: u64,
}

impl StreamConnection {
    /// Returns the time at which the next byte of the response is due (ns).
    fn next_byte_due_ns(&self) -> u64 {
        let next_packet_index = self.received_bytes / super::STREAM_PACKET_BYTES as u64;
        self.opened_at_ns + self.request.packet_due_ns(next_packet_index as u32)
    }
}

struct ClientEventLoop<'a> {
    args: &'a StreamClientArgs,
    connection_source: ConnectionSource,
    request_mix: ConnectionMix,
    start_ns: u64,
    epoll: Epoll,
    connections: HashMap<u64, StreamConnection>,
    next_connection_id: u64,
    next_timeout_check_ns: u64,
    lateness_histogram: Histogram<u64>,
    stream_report: StreamReport,
}

impl<'a> ClientEventLoop<'a> {
    fn new(args: &'a StreamClientArgs) -> anyhow::Result<Self> {
        let stream_workload = &args.streams;
        let (mix, warm_up_ns) =
            (ConnectionMix::for_web_server(), u64::from(stream_workload.warm_up_seconds) * NS_PER_SECOND);
        let requests_per_second = RequestRateWave {
            base_per_s: stream_workload.low,
            peak_per_s: stream_workload.high,
            duration_s: stream_workload.wave_seconds.into(),
        };
        let arrivals =
            ArrivalProcess::ClosedLoop { clients: stream_workload.clients, request_rate: requests_per_second };
        let total_seconds = stream_workload.warm_up_seconds + stream_workload.seconds;
        let start_ns = args.start_at.unwrap_or_else(now_ns);
        Ok(Self {
            args,
            connection_source: ConnectionSource::new(arrivals, &mix, warm_up_ns, stream_workload.seed),
            request_mix: mix,
            start_ns,
            epoll: Epoll::new()?,
            connections: HashMap::new(),
            next_connection_id: 0,
            next_timeout_check_ns: start_ns,
            lateness_histogram: new_delay_histogram()?,
            stream_report: StreamReport {
                seconds: vec![StreamSecondCounts::default(); total_seconds as usize],
                ..Default::default()
            },
        })
    }

    fn run_end_ns(&self) -> u64 {
        self.start_ns + self.stream_report.seconds.len() as u64 * NS_PER_SECOND
    }

    /// Makes the current second the last one of the run.
    fn end_after_current_second(&mut self, now_ns: u64) {
        let current_second = now_ns.saturating_sub(self.start_ns) / NS_PER_SECOND;
        self.stream_report.seconds.truncate(current_second as usize + 1);
    }

    fn stream_second_at(&mut self, now_ns: u64) -> &mut StreamSecondCounts {
        let last_index = self.stream_report.seconds.len() - 1;
        let second_index = (now_ns.saturating_sub(self.start_ns) / NS_PER_SECOND) as usize;
        &mut self.stream_report.seconds[second_index.min(last_index)]
    }

    /// Waits for the next event, and processes all events that are due. Returns false at the end of the run.
    fn process_due_events(&mut self) -> anyhow::Result<bool> {
        let next_connection_ns = self.next_connection_due_ns().unwrap_or(u64::MAX);
        let events: Vec<ReadyEvent> =
            self.epoll.wait(Some(next_connection_ns.min(self.next_timeout_check_ns)))?.collect();
        for event in events {
            if let Err(failure) = self.handle_socket_event(event) {
                self.count_broken_connection(event.token, &failure);
            }
        }
        let now_ns = now_ns();
        while let Some(due_ns) = self.next_connection_due_ns().filter(|due_ns| *due_ns <= now_ns) {
            if let Some((identity, mix_index)) = self.connection_source.pop_connection() {
                self.lateness_histogram.saturating_record((now_ns - due_ns) / 1_000);
                self.open_connection(identity as u32, mix_index, now_ns)?;
            }
        }
        if now_ns >= self.next_timeout_check_ns {
            self.next_timeout_check_ns = now_ns + TIMEOUT_CHECK_INTERVAL_NS;
            self.fail_timed_out_connections(now_ns);
        }
        // Continue until the connections that were late at the run's end have recovered or broken, even if others
        // become late in the meantime.
        let latest_end_ns = self.run_end_ns() + DATA_TIMEOUT_NS + TIMEOUT_CHECK_INTERVAL_NS;
        let is_too_late = |connection: &StreamConnection| connection.next_byte_due_ns() + MAX_END_LATENESS_NS < now_ns;
        Ok(now_ns < self.run_end_ns() || (now_ns < latest_end_ns && self.connections.values().any(is_too_late)))
    }

    /// Returns the time at which the next connection is due (ns), or `None` after the end of the run.
    fn next_connection_due_ns(&self) -> Option<u64> {
        Some(self.start_ns + self.connection_source.next_start_time()).filter(|due_ns| *due_ns < self.run_end_ns())
    }

    /// Returns the source address and port of a connection, which no other connection has.
    fn source_address(&self, connection_id: u64) -> anyhow::Result<SocketAddr> {
        let address_index = connection_id / SOURCE_PORTS_PER_ADDRESS;
        ensure!(
            address_index < u64::from(self.args.addresses),
            "{connection_id} connections: {} addresses are all in use",
            self.args.addresses
        );
        let source_port = FIRST_SOURCE_PORT + (connection_id * SOURCE_PORT_STEP % SOURCE_PORTS_PER_ADDRESS) as u16;
        Ok(SocketAddr::new(nth_address(self.args.first_address, address_index as u16), source_port))
    }

    fn open_connection(&mut self, content_seed: u32, mix_index: u8, now_ns: u64) -> anyhow::Result<()> {
        let connection_id = self.next_connection_id;
        self.next_connection_id += 1;
        let source_address = self.source_address(connection_id)?;
        let socket = Socket::new(Domain::for_address(source_address), Type::STREAM, None)?;
        socket.set_nonblocking(true)?;
        socket.set_tcp_nodelay(true)?;
        socket.bind(&source_address.into()).with_context(|| format!("cannot bind the source {source_address}"))?;
        let connect_result = socket.connect(&self.args.vip.into());
        let mix_request = self.request_mix.kinds()[usize::from(mix_index)];
        let request = StreamRequest {
            content_seed: content_seed.into(),
            packet_count: mix_request.packet_count.into(),
            duration_us: ((mix_request.duration / 1_000) as u32).into(),
        };
        self.stream_second_at(now_ns).opened += 1;
        let stream = TcpStream::from(socket);
        // Edge-triggered epoll reports one event when the connection is established, then one per arrival of data.
        let flags = libc::EPOLLIN | libc::EPOLLOUT | libc::EPOLLRDHUP | libc::EPOLLET;
        self.epoll.add(stream.as_fd(), connection_id, flags)?;
        let connection = StreamConnection {
            stream,
            request,
            mix_index,
            opened_at_ns: now_ns,
            is_connected: false,
            received_bytes: 0,
        };
        self.connections.insert(connection_id, connection);
        match connect_result {
            Err(error) if error.raw_os_error() != Some(libc::EINPROGRESS) => {
                self.count_broken_connection(connection_id, &error.into())
            }
            _ => {}
        }
        Ok(())
    }

    fn handle_socket_event(&mut self, event: ReadyEvent) -> Result<(), ConnectionFailure> {
        let Some(connection) = self.connections.get_mut(&event.token) else { return Ok(()) };
        if event.has_flags(libc::EPOLLERR)
            && let Some(error) = connection.stream.take_error()?
        {
            return Err(error.into());
        }
        if !connection.is_connected && event.has_flags(libc::EPOLLOUT) {
            connection.is_connected = true;
            if connection.stream.write(connection.request.as_bytes())? != STREAM_REQUEST_BYTES {
                return Err(io::Error::from(io::ErrorKind::WriteZero).into());
            }
        }
        if event.has_flags(libc::EPOLLIN) { self.receive_response(event.token) } else { Ok(()) }
    }

    /// Reads all available bytes, and the end of the stream if it has arrived. Fails on a wrong byte.
    fn receive_response(&mut self, connection_id: u64) -> Result<(), ConnectionFailure> {
        let Some(connection) = self.connections.get_mut(&connection_id) else { return Ok(()) };
        let (seed, expected_bytes) = (connection.request.content_seed.get(), connection.request.response_byte_count());
        let mut buffer = [0; 2048];
        loop {
            let length = match connection.stream.read(&mut buffer) {
                Ok(0) if connection.received_bytes == expected_bytes => break,
                Ok(0) => return Err(ConnectionFailure::ClosedEarly),
                Ok(length) => length,
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(()),
                Err(error) => return Err(error.into()),
            };
            let is_right_byte =
                |(offset, byte): (u64, &u8)| *byte == stream_content_byte(seed, connection.received_bytes + offset);
            if connection.received_bytes + length as u64 > expected_bytes
                || !(0..).zip(&buffer[..length]).all(is_right_byte)
            {
                return Err(ConnectionFailure::WrongAnswer);
            }
            connection.received_bytes += length as u64;
        }
        let mix_index = connection.mix_index;
        self.connections.remove(&connection_id);
        self.connection_source.on_connection_ended(mix_index);
        let now_ns = now_ns();
        if now_ns < self.run_end_ns() {
            self.stream_second_at(now_ns).completed += 1;
        }
        Ok(())
    }

    fn count_broken_connection(&mut self, connection_id: u64, failure: &ConnectionFailure) {
        let Some(connection) = self.connections.remove(&connection_id) else { return };
        self.stream_second_at(now_ns()).broken.count_failure(failure, connection_id as usize);
        self.connection_source.on_connection_ended(connection.mix_index);
    }

    /// Counts connections as broken if their next byte has been due for more than [`DATA_TIMEOUT_NS`].
    fn fail_timed_out_connections(&mut self, now_ns: u64) {
        let timed_out_connections =
            self.connections.iter().filter(|(_, connection)| connection.next_byte_due_ns() + DATA_TIMEOUT_NS < now_ns);
        let timed_out_ids: Vec<u64> = timed_out_connections.map(|(connection_id, _)| *connection_id).collect();
        for connection_id in timed_out_ids {
            self.count_broken_connection(connection_id, &io::Error::from(io::ErrorKind::TimedOut).into());
        }
    }

    fn into_report(self) -> StreamReport {
        StreamReport {
            open_at_end: self.connections.len() as u64,
            lateness_us: DelayStatisticsUs::from(&self.lateness_histogram),
            ..self.stream_report
        }
    }
}

/// Running stream client in a testbed, which is killed when dropped.
#[derive(Debug)]
pub struct StreamClientProcess {
    client_process: TestbedProcess,
    report_path: PathBuf,
}

impl Testbed {
    /// Starts a client that uses all addresses of the client host. Its warm-up starts at `start_ns`. Fails when it
    /// cannot be started.
    pub fn start_stream_client(
        &self,
        streams: &StreamWorkload,
        start_ns: Option<u64>,
    ) -> anyhow::Result<StreamClientProcess> {
        self.start_stream_client_at_address(
            self.service_address(),
            0..self.options().client_address_count,
            streams,
            start_ns,
        )
    }

    /// Starts a client of the service at `service`, which uses the client host's addresses with indices in `addresses`.
    /// Fails when it cannot be started.
    pub fn start_stream_client_at_address(
        &self,
        service: impl Into<SocketAddr>,
        addresses: Range<u16>,
        streams: &StreamWorkload,
        start_ns: Option<u64>,
    ) -> anyhow::Result<StreamClientProcess> {
        let mut command = Command::new(lab_binary_path()?);
        command.args(["testbed", "stream-client", "--vip", &service.into().to_string()]);
        command.args(["--first-address", &self.client_address(addresses.start).to_string()]);
        command.args(["--addresses", &addresses.len().to_string()]);
        let StreamWorkload { clients, low, high, wave_seconds, warm_up_seconds, seconds, seed } = streams;
        command.args(["--clients", &clients.to_string(), "--low", &low.to_string(), "--high", &high.to_string()]);
        command.args(["--wave-seconds", &wave_seconds.to_string()]);
        command.args(["--warm-up-seconds", &warm_up_seconds.to_string(), "--seconds", &seconds.to_string()]);
        command.args(["--seed", &seed.to_string()]);
        if let Some(start_ns) = start_ns {
            command.args(["--start-at", &start_ns.to_string()]);
        }
        let report_path = self.directory().join("streams.json");
        command.stdout(File::create(&report_path)?);
        Ok(StreamClientProcess { client_process: self.spawn(self.client(), command)?, report_path })
    }
}

impl StreamClientProcess {
    /// Sends SIGTERM, which ends the client within a second, and waits for its report. Fails when the client has ended
    /// before, has failed, or still runs after `limit`.
    pub fn terminate_and_report(mut self, limit: Duration) -> anyhow::Result<StreamReport> {
        let exit_status = self.client_process.try_wait()?;
        ensure!(exit_status.is_none(), "the stream client has ended before: {exit_status:?}");
        self.client_process.send_signal(Signal::SIGTERM)?;
        self.wait_and_report(limit)
    }

    /// Waits for the end of the client and returns its report. Fails when it failed or still runs after `limit`.
    pub fn wait_and_report(mut self, limit: Duration) -> anyhow::Result<StreamReport> {
        let exit_status = self.client_process.wait_for_exit(limit)?;
        ensure!(exit_status.success(), "the stream client failed: {exit_status}");
        Ok(serde_json::from_slice(&fs::read(&self.report_path)?)?)
    }
}

#[cfg(test)]
mod tests {
    use std::net::Ipv4Addr;

    use super::*;
    use crate::addresses::SERVICE_ADDRESS;

    #[test]
    fn terminated_client_completes_its_current_second() {
        let stream_workload = StreamWorkload::with_steady_rate(1.0, 10);
        let (vip, first_address) = (SERVICE_ADDRESS.into(), Ipv4Addr::LOCALHOST.into());
        let start_at = Some(NS_PER_SECOND);
        let args = StreamClientArgs { vip, first_address, addresses: 1, start_at, streams: stream_workload };
        let mut event_loop = ClientEventLoop::new(&args).unwrap();
        assert_eq!(event_loop.run_end_ns(), 11 * NS_PER_SECOND);
        event_loop.end_after_current_second(NS_PER_SECOND + 2 * NS_PER_SECOND + 1);
        assert_eq!(event_loop.run_end_ns(), 4 * NS_PER_SECOND);
        // A second call does not prolong the run.
        event_loop.end_after_current_second(NS_PER_SECOND + 5 * NS_PER_SECOND);
        assert_eq!(event_loop.run_end_ns(), 4 * NS_PER_SECOND);
    }
}
