//! Command line of the load generator, `coreward-lab load`.

use std::net::{IpAddr, SocketAddr};
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use anyhow::{Context as _, bail, ensure};
use clap::ValueEnum;
use coreward_sim::output::{PrintableResult as _, SimulationResultFormat};
use indicatif::{ProgressBar, ProgressStyle};

use crate::arrival_schedule::{RequestArrivalProcess, RequestArrivalSchedule};
use crate::dns::DnsQuery;
use crate::event_loop::now_ns;
use crate::generator::{self, LoadRunPhaseDurations, RequestStream};
use crate::histogram_log::{HistogramLogOutput, LatencyHistogramLog};
use crate::key_value::MAX_VALUE_BYTES;
use crate::report::LoadRunReport;
use crate::request_type::{RequestType, ServiceTimesByType};
use crate::results::{LoadRunResults, RequestClassResults};
use crate::transport::{
    ConnectionPool, DatagramProtocol, FlowSources, HttpGetClient, KeyValueRequestSettings, PacedProtocol,
    RequestTransport, UdpTransport,
};
use crate::workload::{RequestMix, RequestWorkload, ScaledServiceTimeDistribution};

const RNG_STREAM_ARRIVALS: u64 = 0x6c6f_6111;
const RNG_STREAM_REQUESTS: u64 = 0x6c6f_6112;
const RNG_STREAM_MEASURED_ARRIVALS: u64 = 0x6c6f_6113;
const RNG_STREAM_MEASURED_REQUESTS: u64 = 0x6c6f_6114;

/// Whether SIGINT or SIGTERM was received. The run then stops early, and reports the results that it has so far.
static IS_LOAD_RUN_INTERRUPTED: AtomicBool = AtomicBool::new(false);

/// Options of `coreward-lab load`.
#[derive(Debug, Clone, clap::Args)]
pub struct LoadGeneratorArgs {
    /// Address and port of the service
    #[arg(value_name = "ADDRESS:PORT")]
    pub target: SocketAddr,
    /// Transport of requests
    #[arg(long, value_enum, default_value_t = TransportName::Udp)]
    pub transport: TransportName,
    /// Requests due per second
    #[arg(long, value_parser = parse_positive_number)]
    pub rate: f64,
    /// Distribution of the gaps between requests
    #[arg(long, value_enum, default_value_t = RequestArrivalProcess::Poisson)]
    pub arrivals: RequestArrivalProcess,
    /// Duration of the measurement (s)
    #[arg(long, value_parser = parse_positive_number, default_value_t = 10.0)]
    pub seconds: f64,
    /// Duration of the warm-up before the measurement (s)
    #[arg(long, value_parser = parse_non_negative_number, default_value_t = 1.0)]
    pub warm_up: f64,
    /// Time after which an unanswered request is lost, counted from its due time (s)
    #[arg(long, value_parser = parse_positive_number, default_value_t = 2.0)]
    pub timeout: f64,
    /// Number of source ports (sockets or connections); each request uses a random one
    #[arg(long, default_value_t = 64, value_parser = clap::value_parser!(u16).range(1..=16_384))]
    pub flows: u16,
    /// Source addresses of the target's family, which flows use in rotation [default: the kernel's choice]
    #[arg(long, value_name = "ADDRESS,...", value_delimiter = ',')]
    pub sources: Vec<IpAddr>,
    /// Source port of the first flow; the other flows use the ports after it, the same in every run [default: the
    /// kernel's choice]
    #[arg(long, value_name = "PORT")]
    pub first_port: Option<u16>,
    /// Request types and their shares: GET=0.5,PUT=0.4,SCAN46=0.1, or a mix of Turbo's Figure 7: turbo-7a (half GET,
    /// half PUT), turbo-7b (10 % SCAN18), turbo-7c (40 % SCAN46), turbo-7d (a third each of GET, SCAN46, SCAN105)
    #[arg(long, value_name = "MIX", default_value = "GET=1", conflicts_with = "service")]
    pub mix: RequestMix,
    /// Distribution of the service times that requests ask paced servers for: exp:US; ringleader-bimodal (95 % 5 us, 5
    /// % 100 us), ringleader-high-bimodal (99 % 3 us, 1 % 100 us); or one of `coreward-lab sim rpc` (fixed, exp,
    /// lognormal:SIGMA, bimodal:FRACTION:FACTOR, trimodal:...), with a unit of 1 us
    #[arg(long, value_name = "DISTRIBUTION")]
    pub service: Option<ScaledServiceTimeDistribution>,
    /// Factor by which the service times of --service are multiplied. With --mix, requests ask for the service times of
    /// Turbo's Figure 7 (GET 0.975 us ...) times this factor, instead of leaving service times to the server
    #[arg(long, value_name = "FACTOR", value_parser = parse_positive_number)]
    pub multiplier: Option<f64>,
    /// Rate (1/s) of an additional Poisson stream of short requests, which is measured separately: the first type of
    /// --mix, or the shortest of --service
    #[arg(long, value_name = "RATE", value_parser = parse_positive_number)]
    pub measure: Option<f64>,
    /// Number of keys, which requests draw uniformly: user0000000000 and on
    #[arg(long, default_value_t = 10_000, value_parser = clap::value_parser!(u32).range(1..))]
    pub keys: u32,
    /// Length of the values that PUT writes (bytes)
    #[arg(long, default_value_t = 32, value_parser = clap::value_parser!(u16).range(..=MAX_VALUE_BYTES as i64))]
    pub value_bytes: u16,
    /// Seed of the random arrivals, request types, service times, keys and flows
    #[arg(long, default_value_t = 1)]
    pub seed: u64,
    /// DNS query for each class of --mix, in the same order (with --transport dns): NAME/TYPE, or NAME/TYPE/dnssec to
    /// request signatures
    #[arg(long, value_name = "QUERY,...", value_delimiter = ',')]
    pub query: Vec<DnsQuery>,
    /// Path of HTTP requests
    #[arg(long, default_value = "/", value_parser = parse_http_path)]
    pub path: String,
    /// Write the latencies of each second and class to this file, in HdrHistogram's log format
    #[arg(long, value_name = "FILE")]
    pub histogram_log: Option<PathBuf>,
    /// Format of the output
    #[arg(long, value_enum, default_value_t = SimulationResultFormat::Text)]
    pub format: SimulationResultFormat,
}

impl LoadGeneratorArgs {
    fn phase_durations(&self) -> LoadRunPhaseDurations {
        LoadRunPhaseDurations {
            warm_up_ns: seconds_to_ns(self.warm_up),
            measurement_ns: seconds_to_ns(self.seconds),
            timeout_ns: seconds_to_ns(self.timeout),
        }
    }
}

/// Transport of requests.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum TransportName {
    /// The key-value server's protocol, one request per datagram
    Udp,
    /// The paced server's protocol on persistent connections; each request states its service time in whole us
    Tcp,
    /// DNS: the --query of each class of --mix, one per datagram
    Dns,
    /// HTTP/1.1 with keep-alive: GET of --path on a free connection
    Http,
}

fn parse_number_in_range(text: &str, is_in_range: fn(f64) -> bool, expected_range: &str) -> Result<f64, String> {
    let number = text.parse().ok().filter(|number: &f64| number.is_finite() && is_in_range(*number));
    number.ok_or_else(|| format!("expected a number {expected_range}"))
}

fn parse_positive_number(text: &str) -> Result<f64, String> {
    parse_number_in_range(text, |number| number > 0.0 && number <= 1e7, "above 0, at most 10000000")
}

fn parse_non_negative_number(text: &str) -> Result<f64, String> {
    parse_number_in_range(text, |number| (0.0..=1e6).contains(&number), "from 0 to 1000000")
}

fn parse_http_path(text: &str) -> Result<String, String> {
    let is_valid = text.starts_with('/') && text.bytes().all(|byte| byte.is_ascii_graphic());
    if is_valid { Ok(text.to_owned()) } else { Err("expected a path from / on, without blanks".to_owned()) }
}

/// Sends requests to a service and returns the report. Fails when an option is invalid, a source address or port cannot
/// be bound, or the target is unreachable.
pub fn run(args: &LoadGeneratorArgs) -> anyhow::Result<String> {
    let report = run_measurement(args)?;
    Ok(report.render(args.format))
}

fn run_measurement(args: &LoadGeneratorArgs) -> anyhow::Result<LoadRunReport> {
    let main_workload = build_workload(args, RNG_STREAM_REQUESTS)?;
    let request_types = main_workload.request_types().to_vec();
    let schedule = RequestArrivalSchedule::new(args.arrivals, args.rate, args.seed, RNG_STREAM_ARRIVALS);
    let mut streams = vec![RequestStream { schedule, workload: main_workload, first_class_index: 0 }];
    let measured_type = request_types[0];
    if let Some(rate) = args.measure {
        let schedule =
            RequestArrivalSchedule::new(RequestArrivalProcess::Poisson, rate, args.seed, RNG_STREAM_MEASURED_ARRIVALS);
        let workload = build_workload(args, RNG_STREAM_MEASURED_REQUESTS)?.with_first_type_only();
        streams.push(RequestStream { schedule, workload, first_class_index: request_types.len() as u8 });
    }
    let mut transport = open_transport(args)?;
    let durations = args.phase_durations();
    let progress_bar = new_progress_bar(args.warm_up + args.seconds)?;
    let mut class_tags: Vec<String> = request_types.iter().map(RequestType::to_string).collect();
    class_tags.push(format!("{measured_type}-measuring"));
    let mut log_output = HistogramLogOutput::create(args.histogram_log.as_deref())?;
    let mut histogram_log =
        LatencyHistogramLog::begin(&mut log_output, class_tags, &format!("coreward-lab load {}", args.target))?;
    let records_intervals = args.histogram_log.is_some();
    ctrlc::set_handler(|| IS_LOAD_RUN_INTERRUPTED.store(true, Ordering::Relaxed))?;
    let mut results = generator::run_open_loop_load(
        streams,
        transport.as_mut(),
        durations,
        records_intervals,
        |since_ns, results| {
            if IS_LOAD_RUN_INTERRUPTED.load(Ordering::Relaxed) {
                results.end_measured_window(now_ns());
            }
            show_progress(&progress_bar, since_ns, results);
            histogram_log.write_interval_if_ended(since_ns, results)
        },
    )?;
    histogram_log.write_last_interval(results.last_request_end_ns, &mut results)?;
    log_output.flush()?;
    progress_bar.finish_and_clear();
    ensure!(!results.measured_window_ns.is_empty(), "interrupted before anything was measured");
    Ok(LoadRunReport::new(&results, &request_types, args.measure.map(|_| measured_type)))
}

fn seconds_to_ns(seconds: f64) -> u64 {
    Duration::from_secs_f64(seconds).as_nanos() as u64
}

fn build_workload(args: &LoadGeneratorArgs, rng_stream: u64) -> anyhow::Result<RequestWorkload> {
    if let Some(service) = &args.service {
        return Ok(RequestWorkload::from_service_times(service, args.multiplier.unwrap_or(1.0), args.seed, rng_stream));
    }
    // Requests over TCP carry only service times, so they need some even without --multiplier.
    let multiplier = args.multiplier.or((args.transport == TransportName::Tcp).then_some(1.0));
    let service_times =
        multiplier.map_or_else(|| Ok(ServiceTimesByType::default()), ServiceTimesByType::scaled_turbo_times)?;
    let workload = RequestWorkload::from_mix(&args.mix, &service_times, args.seed, rng_stream);
    let type_without_time =
        workload.request_types().iter().find(|class| !service_times.is_empty() && service_times.get(**class).is_none());
    ensure!(
        type_without_time.is_none(),
        "Turbo's Figure 7 has no service time of {}: expected GET, PUT, SCAN18, SCAN46 and SCAN105",
        type_without_time.unwrap_or(&RequestType::GET)
    );
    Ok(workload)
}

/// Checks the flows' sources. Fails when a source port is out of range, or a source address has another family than the
/// target.
fn check_flow_sources(args: &LoadGeneratorArgs) -> anyhow::Result<()> {
    if let Some(first_port) = args.first_port {
        let last_port = u32::from(first_port) + u32::from(args.flows) - 1;
        ensure!(
            first_port > 0 && last_port <= 65_535,
            "ports {first_port} to {last_port} of {} flows: expected 1 to 65535",
            args.flows
        );
    }
    let is_of_other_family = |address: &&IpAddr| address.is_ipv4() != args.target.is_ipv4();
    if let Some(source) = args.sources.iter().find(is_of_other_family) {
        bail!("source {source} of target {}: expected an address of the same family", args.target);
    }
    Ok(())
}

/// Returns the DNS query of each class of --mix. Fails when the number of queries differs from that of the classes, or
/// with --service or --multiplier.
fn dns_queries_by_class(args: &LoadGeneratorArgs) -> anyhow::Result<Vec<DnsQuery>> {
    let class_count = build_workload(args, RNG_STREAM_REQUESTS)?.request_types().len();
    ensure!(args.service.is_none() && args.multiplier.is_none(), "--transport dns: expected --mix and --query only");
    ensure!(
        args.query.len() == class_count,
        "{} of --query: expected one for each of {class_count} classes",
        args.query.len()
    );
    Ok(args.query.clone())
}

fn open_transport(args: &LoadGeneratorArgs) -> anyhow::Result<Box<dyn RequestTransport>> {
    check_flow_sources(args)?;
    let flow_sources =
        FlowSources { addresses: args.sources.clone(), flow_count: args.flows, first_source_port: args.first_port };
    let key_value_settings = KeyValueRequestSettings { key_count: args.keys, value_bytes: args.value_bytes };
    Ok(match args.transport {
        TransportName::Udp => Box::new(UdpTransport::open(
            args.target,
            &flow_sources,
            DatagramProtocol::KeyValue(key_value_settings),
            args.seed,
        )?),
        TransportName::Dns => {
            let protocol = DatagramProtocol::Dns(dns_queries_by_class(args)?);
            Box::new(UdpTransport::open(args.target, &flow_sources, protocol, args.seed)?)
        }
        TransportName::Tcp => Box::new(ConnectionPool::open(PacedProtocol, args.target, flow_sources, args.seed)?),
        TransportName::Http => {
            let has_default_requests =
                args.service.is_none() && args.multiplier.is_none() && args.mix.to_string() == "GET=1";
            ensure!(
                has_default_requests,
                "--transport http asks for --path only: expected no --mix, --service or --multiplier"
            );
            let http_client = HttpGetClient::new(&args.path, &args.target.to_string());
            Box::new(ConnectionPool::open(http_client, args.target, flow_sources, args.seed)?)
        }
    })
}

fn show_progress(progress_bar: &ProgressBar, elapsed_ns: u64, results: &LoadRunResults) {
    let sum_of_classes = |to_count: fn(&RequestClassResults) -> u64| results.classes.iter().map(to_count).sum::<u64>();
    progress_bar.set_position(elapsed_ns / 1_000_000);
    progress_bar.set_message(format!(
        "{} answered, {} lost",
        sum_of_classes(|class| class.completed_count),
        sum_of_classes(|class| class.lost_count)
    ));
}

/// Returns a progress bar, which is hidden unless stderr is a terminal.
fn new_progress_bar(seconds: f64) -> anyhow::Result<ProgressBar> {
    let style = ProgressStyle::with_template("{wide_bar} {elapsed} of {prefix} s, {msg}").context("progress bar")?;
    Ok(ProgressBar::new((seconds * 1e3) as u64).with_style(style).with_prefix(format!("{seconds}")))
}
