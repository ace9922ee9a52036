//! Impostor that sends false reports in place of a server's agent. They contain false cores, NICs, times and
//! identities. The impostor also floods the controller with silent or malformed connections.

use std::io::Write as _;
use std::net::{SocketAddr, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, SystemTime};

use coreward_model::rss::{seeded_rng, uniform_below};
use coreward_rpc::v1::control_client::ControlClient;
use coreward_tls::connect::GrpcConnector;
use coreward_tls::{FleetRole, ReloadableTlsCredentials, TlsCredentialFiles};
use coreward_wire::v1;
use coreward_wire::v1::agent_message::Message;
use rand_xoshiro::Xoshiro256PlusPlus;
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;
use tonic::transport::Endpoint;

use crate::namespace::NetworkNamespace;

/// Number of the [`seeded_rng`] stream from which the contents of false reports are drawn.
const RNG_STREAM_FALSE_REPORTS: u64 = 0x6368_6103;
/// Interval between false reports, which is a hundredth of an honest agent's interval.
const FALSE_REPORT_INTERVAL: Duration = Duration::from_millis(1);
const HONEST_REPORT_INTERVAL: Duration = Duration::from_millis(100);
/// Interval between an impostor's attempts to register. The controller rejects them as long as the real agent reports.
const REGISTRATION_RETRY_INTERVAL: Duration = Duration::from_millis(100);
const FLOOD_CONNECT_TIMEOUT: Duration = Duration::from_secs(1);
/// Maximum duration of an impostor's stream to a controller. The impostor then closes it and registers again.
const MAX_IMPOSTOR_STREAM_DURATION: Duration = Duration::from_secs(2);
/// Number of connections that a flood keeps open at the same time. Each sends nothing or random bytes.
const FLOOD_CONNECTION_COUNT: usize = 64;

/// Counters of the reports and connections that impostors have sent.
#[derive(Debug, Default)]
pub struct FalseReportCounters {
    pub sent_report_count: AtomicU64,
    pub flood_connection_count: AtomicU64,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FalseReportKind {
    /// All kinds of false reports, under the names of several servers, and a flood of connections.
    AllKinds,
    /// False loads only. The reports have an honest agent's interval and claim idle cores, which attracts new
    /// connections to the server.
    IdleCores,
}

/// Impostor that uses the certificate of a server's real agent.
#[derive(Debug)]
pub struct ByzantineAgent {
    pub server_number: u16,
    pub stolen_credentials: TlsCredentialFiles,
    pub controller_addresses: Vec<SocketAddr>,
    pub report_kind: FalseReportKind,
}

impl ByzantineAgent {
    /// Sends false reports from the server's namespace until `stop_flag` is set. Call it in its own thread, because it
    /// blocks. Fails when the namespace cannot be entered, or when a system call fails unexpectedly.
    pub fn run_until_stopped(
        self,
        server_namespace: &NetworkNamespace,
        false_reports: &FalseReportCounters,
        stop_flag: &AtomicBool,
    ) -> anyhow::Result<()> {
        let tls = ReloadableTlsCredentials::load_from_files(self.stolen_credentials.clone())?;
        server_namespace.run_within(|| {
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
            runtime.block_on(async {
                let mut rng = seeded_rng(self.server_number.into(), RNG_STREAM_FALSE_REPORTS);
                while !stop_flag.load(Ordering::Relaxed) {
                    let controller_address = self.controller_addresses
                        [uniform_below(&mut rng, self.controller_addresses.len() as u32) as usize];
                    let _ = self.run_report_stream(controller_address, &tls, &mut rng, false_reports, stop_flag).await;
                    tokio::time::sleep(REGISTRATION_RETRY_INTERVAL).await;
                }
            });
            Ok(())
        })
    }

    /// Registers at a controller and sends reports on one stream. Impostors of the kind [`FalseReportKind::AllKinds`]
    /// also register as other or unknown servers.
    async fn run_report_stream(
        &self,
        controller_address: SocketAddr,
        tls: &Arc<ReloadableTlsCredentials>,
        rng: &mut Xoshiro256PlusPlus,
        false_reports: &FalseReportCounters,
        stop_flag: &AtomicBool,
    ) -> anyhow::Result<()> {
        if self.report_kind == FalseReportKind::IdleCores {
            let reports = (1..).map(|sequence| v1::Report {
                rss: Some(build_false_rss_config(40, vec![0, 1])),
                ..build_idle_report(sequence)
            });
            return send_reports(
                self.server_name(),
                controller_address,
                tls,
                (reports, HONEST_REPORT_INTERVAL),
                false_reports,
                stop_flag,
            )
            .await;
        }
        flood_with_connections(controller_address, rng, false_reports);
        let registered_name = self.choose_claimed_server_name(rng);
        let is_idle = uniform_below(rng, 2) == 0;
        let reports = (1..)
            .map(|sequence| if is_idle { build_idle_report(sequence) } else { build_random_report(sequence, rng) });
        let report_stream = send_reports(
            registered_name,
            controller_address,
            tls,
            (reports, FALSE_REPORT_INTERVAL),
            false_reports,
            stop_flag,
        );
        tokio::time::timeout(MAX_IMPOSTOR_STREAM_DURATION, report_stream).await?
    }

    /// Returns the server's own name in half of the cases. Otherwise, it returns another server's name or an unknown
    /// name.
    fn choose_claimed_server_name(&self, rng: &mut Xoshiro256PlusPlus) -> String {
        match uniform_below(rng, 4) {
            0 => "nobody".to_owned(),
            1 => format!("s{}", 1 + self.server_number % 4),
            _ => self.server_name(),
        }
    }

    fn server_name(&self) -> String {
        format!("s{}", self.server_number)
    }
}

/// Opens many connections, sends up to 199 random bytes on each, and finally closes them all at once.
fn flood_with_connections(address: SocketAddr, rng: &mut Xoshiro256PlusPlus, false_reports: &FalseReportCounters) {
    let mut open_connections = Vec::with_capacity(FLOOD_CONNECTION_COUNT);
    for _ in 0..FLOOD_CONNECTION_COUNT {
        let Ok(mut stream) = TcpStream::connect_timeout(&address, FLOOD_CONNECT_TIMEOUT) else { return };
        let random_bytes: Vec<u8> = (0..uniform_below(rng, 200)).map(|_| uniform_below(rng, 256) as u8).collect();
        // The controller may close the connection immediately.
        let _ = stream.write_all(&random_bytes);
        false_reports.flood_connection_count.fetch_add(1, Ordering::Relaxed);
        open_connections.push(stream);
    }
}

/// Sends a report once per interval on one stream, until the controller ends the stream or `stop_flag` is set.
async fn send_reports(
    name: String,
    controller_address: SocketAddr,
    tls: &Arc<ReloadableTlsCredentials>,
    (mut reports, interval): (impl Iterator<Item = v1::Report>, Duration),
    false_reports: &FalseReportCounters,
    stop_flag: &AtomicBool,
) -> anyhow::Result<()> {
    let endpoint =
        Endpoint::from_shared(format!("http://{controller_address}"))?.connect_timeout(FLOOD_CONNECT_TIMEOUT);
    let connector =
        GrpcConnector::new(controller_address, Some((tls.clone(), &[FleetRole::Controller, FleetRole::Rack])));
    let mut client = ControlClient::new(endpoint.connect_with_connector(connector).await?);
    let (message_sender, receiver) = mpsc::channel(16);
    let build_agent_message = |message| v1::AgentMessage { message: Some(message) };
    message_sender
        .send(build_agent_message(Message::Registration(v1::AgentRegistration {
            server: name,
            version: "0.0.0".to_owned(),
        })))
        .await?;
    let mut updates = client.agent(ReceiverStream::new(receiver)).await?.into_inner();
    while !stop_flag.load(Ordering::Relaxed) {
        tokio::select! {
            update = updates.message() => if update?.is_none() { return Ok(()) },
            () = tokio::time::sleep(interval) => {
                let report = reports.next().expect("reports have no end");
                // A report is dropped when the controller does not read the stream fast enough.
                if message_sender.try_send(build_agent_message(Message::Report(report))).is_ok() {
                    false_reports.sent_report_count.fetch_add(1, Ordering::Relaxed);
                }
            }
        }
    }
    Ok(())
}

/// Returns a report that is correct except that it claims idle cores, which attract new connections.
fn build_idle_report(sequence: u64) -> v1::Report {
    let now_unix_ns = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default().as_nanos() as u64;
    v1::Report {
        sequence,
        sent_unix_ns: now_unix_ns,
        time_to_live_ms: 300,
        measured_ns: now_unix_ns,
        core_busy_ns: vec![0; 2],
        rss_generation: 1,
        ..v1::Report::default()
    }
}

fn build_false_rss_config(key_length: usize, queues: Vec<u32>) -> v1::Rss {
    v1::Rss { source: "false".to_owned(), key: vec![0xaa; key_length], indirection_table: queues, input_transform: 0 }
}

fn build_random_report(sequence: u64, rng: &mut Xoshiro256PlusPlus) -> v1::Report {
    let busy_ns = sequence * u64::from(uniform_below(rng, 1_000_000));
    let mut report = v1::Report { core_busy_ns: vec![busy_ns, 0], ..build_idle_report(sequence) };
    match uniform_below(rng, 16) {
        0 => report.core_busy_ns = vec![u64::MAX; 2],
        1 => report.core_busy_ns = vec![0; 2],
        2 => report.core_busy_ns.clear(),
        3 => report.core_busy_ns = vec![busy_ns; 20_000],
        4 => report.sequence = 0,
        5 => report.sequence = u64::MAX,
        6 => report.measured_ns = 0,
        7 => report.measured_ns = u64::MAX,
        8 => report.sent_unix_ns = u64::MAX,
        9 => report.sent_unix_ns = 0,
        10 => report.time_to_live_ms = 0,
        11 => report.time_to_live_ms = u32::MAX,
        12 => report.rss = Some(build_false_rss_config(5, vec![0, 1, 2])),
        13 => {
            report.rss =
                Some(v1::Rss { input_transform: u32::MAX, ..build_false_rss_config(40, vec![u32::MAX; 2_048]) })
        }
        14 => {
            report.open_connections = u32::MAX;
            report.configuration_generation = u64::MAX;
        }
        _ => {
            report.counters = (0..2_000).map(|number| (format!("false {number}"), u64::MAX)).collect();
            report.warnings = vec!["false\u{1b}[2J".repeat(1_000)];
        }
    }
    report
}
