//! Measures the speed of the simulator, for requests at cores and for packets of a capture.

use std::fs::File;
use std::io::BufWriter;
use std::path::Path;
use std::time::Instant;

use anyhow::{Context as _, ensure};
use coreward_sim::trace::TraceSource;
use coreward_sim::trace::capture::{CaptureReadOptions, writer};
use coreward_sim::{lb, rpc};

use crate::default_args::parse_default_args;
use crate::report::{
    BenchReport, MeasurementGoal, ReportTable, ReportTableCell, goal_and_verdict_cells, median_min_max,
};

/// Options of `coreward-lab bench sim`.
#[derive(Debug, Clone, clap::Args)]
pub struct SimBenchArgs {
    /// Number of rounds; each measures every case once
    #[arg(long, default_value_t = 7, value_parser = clap::value_parser!(u32).range(1..))]
    rounds: u32,
    /// Number of requests per case
    #[arg(long, default_value_t = 4_000_000, value_parser = clap::value_parser!(u64).range(1000..))]
    requests: u64,
    /// Length of the campus traffic in the capture (s)
    #[arg(long, default_value_t = 20, value_parser = clap::value_parser!(u32).range(2..=600))]
    capture_seconds: u32,
}

impl Default for SimBenchArgs {
    fn default() -> Self {
        parse_default_args()
    }
}

/// Simulation whose speed is measured, with the request rates of all rounds.
struct SimulationCase {
    name: String,
    config: rpc::RpcSimulationConfig,
    million_requests_per_second: Vec<f64>,
}

/// Runs the bench of the simulator. Fails when a simulation rejects its configuration.
pub fn run_sim_bench(args: &SimBenchArgs) -> anyhow::Result<BenchReport> {
    let mut cases = simulation_cases(args.requests)?;
    for _ in 0..args.rounds {
        for case in &mut cases {
            let start = Instant::now();
            let simulation_result = rpc::run(&case.config)?;
            ensure!(simulation_result.request_count == case.config.request_count, "{}: requests were lost", case.name);
            case.million_requests_per_second
                .push(simulation_result.request_count as f64 / 1e6 / start.elapsed().as_secs_f64());
        }
    }
    let mut table = ReportTable::new(&["requests at cores", "million requests/s", "least", "most", "goal", "verdict"]);
    for (case_index, case) in cases.iter().enumerate() {
        let goal = (case_index == 0).then_some(MeasurementGoal::AtLeast(8.0));
        table.add_row(
            std::iter::once(case.name.clone().into())
                .chain(request_rate_cells(&case.million_requests_per_second, goal)),
        );
    }
    Ok(BenchReport {
        name: "sim",
        heading: "The simulator",
        method_description: format!(
            "`coreward-lab sim rpc` runs on one CPU at load 0.8, for {1} interleaved rounds of {0} requests (medians). \
             `coreward-lab sim lb` reads {2} s of captured campus traffic ({CAPTURED_BYTES_PER_PACKET} bytes of each \
             packet) from the page cache, on both CPUs.",
            args.requests, args.rounds, args.capture_seconds
        ),
        tables: vec![table, measure_capture_simulation(args)?],
    })
}

/// Returns cells with the median, minimum and maximum of the rates, the goal, and whether the median meets it.
fn request_rate_cells(millions_per_second: &[f64], goal: Option<MeasurementGoal>) -> [ReportTableCell; 5] {
    let [median_rate, min_rate, max_rate] = median_min_max(millions_per_second.iter().copied());
    let [goal_cell, verdict_cell] = goal_and_verdict_cells(goal, median_rate);
    [median_rate.into(), min_rate.into(), max_rate.into(), goal_cell, verdict_cell]
}

/// Number of bytes of each packet that are written to the capture, enough for all headers up to the ports.
const CAPTURED_BYTES_PER_PACKET: usize = 96;

fn measure_capture_simulation(args: &SimBenchArgs) -> anyhow::Result<ReportTable> {
    let directory = tempfile::tempdir().context("a directory for the capture")?;
    let capture_path = directory.path().join("campus.pcap");
    write_campus_capture(&capture_path, args.capture_seconds)?;
    let policy_sets: [(&str, &[&str]); 3] = [
        ("hash", &["hash"]),
        ("crossrss-plus", &["crossrss-plus"]),
        ("hash, rr, pow2, crossrss, crossrss-plus", &["hash", "rr", "pow2", "crossrss", "crossrss-plus"]),
    ];
    let mut millions_per_second = vec![Vec::new(); policy_sets.len()];
    for _ in 0..args.rounds {
        for ((_, policies), set_rates) in policy_sets.iter().zip(&mut millions_per_second) {
            let config = lb::LbSimulationConfig {
                trace: capture_path.to_str().context("a path in UTF-8")?.parse()?,
                policies: policies.iter().map(|name| (*name).to_owned()).collect(),
                seeds: vec![1],
                ..lb::LbSimulationConfig::default()
            };
            let start = Instant::now();
            let simulation_result = lb::run(&config)?;
            set_rates.push(simulation_result.packets as f64 / 1e6 / start.elapsed().as_secs_f64());
        }
    }
    let column_names = ["packets of a capture, by policy", "million packets/s", "least", "most", "goal", "verdict"];
    let mut table = ReportTable::new(&column_names);
    for ((name, policies), millions_per_second) in policy_sets.iter().zip(&millions_per_second) {
        let goal = (policies.len() == 1).then_some(MeasurementGoal::AtLeast(20.0));
        table.add_row(std::iter::once((*name).into()).chain(request_rate_cells(millions_per_second, goal)));
    }
    Ok(table)
}

/// Writes a capture file of campus traffic. The file then remains in the page cache, so that reading it is fast.
fn write_campus_capture(path: &Path, seconds: u32) -> anyhow::Result<()> {
    let mut trace =
        format!("campus:seconds={seconds}").parse::<TraceSource>()?.open_trace(1, CaptureReadOptions::default())?;
    let capture_file = File::create(path).with_context(|| path.display().to_string())?;
    writer::write_capture(trace.as_mut(), CAPTURED_BYTES_PER_PACKET, BufWriter::with_capacity(1 << 20, capture_file))?;
    Ok(())
}

fn simulation_cases(requests: u64) -> anyhow::Result<Vec<SimulationCase>> {
    let new_case = |name: &str, policy: &str, cores: u16, service: &str, latency: f64| {
        let config = rpc::RpcSimulationConfig {
            policy: policy.parse()?,
            cores,
            service_times: service.parse()?,
            interface_latency: latency,
            request_count: requests,
            ..rpc::RpcSimulationConfig::default()
        };
        Ok(SimulationCase { name: name.to_owned(), config, million_requests_per_second: Vec::new() })
    };
    let bimodal_service_times = "bimodal:0.1:5";
    [
        ("JSQ, 16 cores, exponential", "jsq", 16, "exp", 0.0),
        ("JSQ, 16 cores, bimodal, latency", "jsq", 16, bimodal_service_times, 0.35),
        ("the same, 4 cores", "jsq", 4, bimodal_service_times, 0.35),
        ("the same, 64 cores", "jsq", 64, bimodal_service_times, 0.35),
        ("the same, 256 cores", "jsq", 256, bimodal_service_times, 0.35),
        ("the same, 1024 cores", "jsq", 1024, bimodal_service_times, 0.35),
        ("JLQ, 16 cores", "jlq", 16, bimodal_service_times, 0.35),
        ("JBSRQ, 16 cores", "jbsrq", 16, bimodal_service_times, 0.35),
        ("processor sharing, 16 cores", "ps", 16, bimodal_service_times, 0.0),
    ]
    .into_iter()
    .map(|(name, policy, cores, service, latency)| new_case(name, policy, cores, service, latency))
    .collect()
}
