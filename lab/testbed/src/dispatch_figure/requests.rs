//! One measurement with `coreward-lab load`, which sends requests from the testbed's client.

use std::net::SocketAddrV4;
use std::process::Stdio;
use std::time::Duration;

use anyhow::{Context as _, ensure};
use coreward_load::event_loop::now_ns;
use coreward_load::report::LoadRunReport;
use coreward_load::workload::RequestMix;
use coreward_sim::figure::axes::FigureMetric;
use coreward_sim::rpc::ServiceTimeDistribution;
use nix::sys::resource::{Resource, getrlimit, setrlimit};

use super::build_real_time_priority_command;
use crate::addresses::SERVICE_ADDRESS;
use crate::fleet::lab_binary_path;
use crate::process::DEFAULT_WAIT_TIMEOUT;
use crate::topology::Testbed;

/// Number of source ports from which requests are sent. It is so large that a hash of the port gives 4 workers equal
/// shares within a few percent, as if each request were hashed.
const REQUEST_FLOW_COUNT: u16 = 8192;
/// First source port of the requests, the same in every run.
const FIRST_SOURCE_PORT: u16 = 20_000;
/// Number of keys in the key-value store when it starts.
pub const INITIAL_STORED_KEY_COUNT: u32 = 10_000;
const WARM_UP_S: f64 = 0.3;
const RESPONSE_TIMEOUT_S: f64 = 2.0;
/// Maximum 99th percentile of the delay with which the generator sends requests (us). If the percentile is higher, the
/// machine was too busy, and the measurement is repeated. A tenth of this limit is normal.
const MAX_LATENESS_US: f64 = 500.0;
/// Environment variable that replaces [`MAX_LATENESS_US`], for tests that count requests on a busy machine.
const MAX_LATENESS_ENV_VARIABLE: &str = "COREWARD_MAX_LATENESS_US";
/// Maximum number of attempts at a measurement while the machine is too busy. The pauses between them grow to a total
/// of four minutes, because a figure that takes many minutes should survive a few busy ones.
const MAX_MEASUREMENT_ATTEMPTS: u32 = 12;
const MEASUREMENT_RETRY_PAUSE: Duration = Duration::from_secs(1);
const MAX_MEASUREMENT_RETRY_PAUSE: Duration = Duration::from_secs(30);

/// Requests that the client sends in one run.
#[derive(Debug, Clone)]
pub struct RequestLoad {
    /// Distribution of the service times, as multiples of `unit_us`.
    pub service_times: ServiceTimeDistribution,
    /// Requests to a key-value store with the classes of `service`, or `None` if requests only occupy cores.
    pub request_mix: Option<RequestMix>,
    /// Unit of service times (us).
    pub unit_us: f64,
    /// Mean number of requests per second.
    pub rate_rps: f64,
    /// Duration of the measurement (s).
    pub duration_s: f64,
    /// Seed of the arrival times and the service times.
    pub seed: u64,
}

#[derive(Debug, Clone)]
pub struct RequestLoadMeasurement {
    report: LoadRunReport,
    unit_us: f64,
}

/// Raises the process's limit of open files, because every source port needs a socket. Fails when the limit cannot be
/// raised enough.
pub fn raise_open_file_limit() -> anyhow::Result<()> {
    let (soft_limit, hard_limit) = getrlimit(Resource::RLIMIT_NOFILE)?;
    let required_files = u64::from(REQUEST_FLOW_COUNT) + 100;
    ensure!(
        hard_limit >= required_files,
        "at most {hard_limit} open files (ulimit -Hn): expected {required_files}, for as many source ports"
    );
    Ok(setrlimit(Resource::RLIMIT_NOFILE, soft_limit.max(required_files), hard_limit)?)
}

impl RequestLoad {
    /// Sends all requests and waits for the responses. Repeats the measurement if the machine was too busy. Fails when
    /// the generator fails, the machine stays busy, or no request was answered.
    pub fn send_and_measure(&self, testbed: &Testbed) -> anyhow::Result<RequestLoadMeasurement> {
        let (workload, multiplier) = match &self.request_mix {
            None => (("--service", self.service_times.to_string()), self.unit_us),
            // The unit is the time of the shortest request in Turbo's table.
            Some(mix) => (
                ("--mix", mix.to_string()),
                self.unit_us / mix.shortest_turbo_service_us().context("a mix without times")?,
            ),
        };
        let options =
            [workload, ("--multiplier", multiplier.to_string()), ("--keys", INITIAL_STORED_KEY_COUNT.to_string())];
        let report =
            measure_while_machine_idle(testbed, SERVICE_ADDRESS, self.rate_rps, self.duration_s, self.seed, &options)?;
        Ok(RequestLoadMeasurement { report, unit_us: self.unit_us })
    }
}

/// Runs `coreward-lab load TARGET` on the testbed's client at a rate for a duration, with additional options. Repeats
/// the measurement if the machine was too busy. Fails when the generator fails, or the machine stays busy.
pub fn measure_while_machine_idle(
    testbed: &Testbed,
    target: SocketAddrV4,
    rate_rps: f64,
    seconds: f64,
    seed: u64,
    options: &[(&str, String)],
) -> anyhow::Result<LoadRunReport> {
    let common_options = [
        ("--rate", rate_rps.to_string()),
        ("--seconds", seconds.to_string()),
        ("--warm-up", WARM_UP_S.to_string()),
        ("--timeout", RESPONSE_TIMEOUT_S.to_string()),
        ("--flows", REQUEST_FLOW_COUNT.to_string()),
        ("--first-port", FIRST_SOURCE_PORT.to_string()),
        ("--seed", seed.to_string()),
    ];
    let options: Vec<&str> =
        common_options.iter().chain(options).flat_map(|(name, value)| [*name, value.as_str()]).collect();
    let time_limit = Duration::from_secs_f64(WARM_UP_S + seconds + RESPONSE_TIMEOUT_S) + *DEFAULT_WAIT_TIMEOUT;
    let max_lateness_us = read_allowed_send_lateness_us()?;
    for attempt in 0..MAX_MEASUREMENT_ATTEMPTS {
        if attempt > 0 {
            let pause = (MEASUREMENT_RETRY_PAUSE * attempt * attempt).min(MAX_MEASUREMENT_RETRY_PAUSE);
            crate::interrupt_flag::sleep_until(now_ns() + pause.as_nanos() as u64)?;
        }
        crate::interrupt_flag::ensure_not_interrupted()?;
        let report = run_load_generator(testbed, target, &options, time_limit)?;
        let lateness_us = report.lateness_us.p99.context("no request was sent")?;
        if lateness_us <= max_lateness_us {
            return Ok(report);
        }
        eprintln!("disturbed: requests were sent {lateness_us:.0} us late (p99); once more");
    }
    anyhow::bail!(
        "the machine is too busy: {MAX_MEASUREMENT_ATTEMPTS} times requests were sent more than {max_lateness_us} us \
         late (p99)"
    )
}

fn read_allowed_send_lateness_us() -> anyhow::Result<f64> {
    let Ok(text) = std::env::var(MAX_LATENESS_ENV_VARIABLE) else { return Ok(MAX_LATENESS_US) };
    text.parse().with_context(|| format!("{MAX_LATENESS_ENV_VARIABLE}: {text:?}: expected a number"))
}

fn run_load_generator(
    testbed: &Testbed,
    target: SocketAddrV4,
    options: &[&str],
    time_limit: Duration,
) -> anyhow::Result<LoadRunReport> {
    let mut command = build_real_time_priority_command(lab_binary_path()?);
    command.args(["load", &target.to_string(), "--format", "json"]).args(options);
    command.stdin(Stdio::null()).stdout(Stdio::piped());
    testbed.spawn(testbed.client(), command)?.wait_for_json(time_limit)
}

impl RequestLoadMeasurement {
    /// Returns the value of a metric, where times are in units of service time. Fails when the generator does not
    /// measure the metric, or when no request was answered.
    pub fn metric_value(&self, metric: FigureMetric) -> anyhow::Result<f64> {
        let (first_class, last_class) = (self.report.classes.first(), self.report.classes.last());
        let latency_percentiles = match metric {
            FigureMetric::P99 => Some(&self.report.latency_us),
            FigureMetric::ShortP99 => first_class.map(|class| &class.latency_us),
            FigureMetric::LongP99 => last_class.map(|class| &class.latency_us),
            FigureMetric::LongAnsweredPct => {
                let long_class = last_class.context("a report without classes")?;
                return Ok(long_class.arrived as f64 / long_class.requests as f64 * 100.0);
            }
            other => anyhow::bail!("{other:?} is not measured"),
        };
        let p99_us = latency_percentiles.and_then(|latency| latency.p99).context("nothing was answered")?;
        Ok(p99_us / self.unit_us)
    }

    /// Returns the number of requests that were due in the measured time, and the number of them that were lost.
    pub fn sent_and_lost_request_counts(&self) -> (u64, u64) {
        (self.report.requests, self.report.lost)
    }
}
