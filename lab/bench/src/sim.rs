//! Speed of the simulator: requests at cores, and packets of a capture.

use std::fs::File;
use std::io::BufWriter;
use std::path::Path;
use std::time::Instant;

use anyhow::{Context as _, ensure};
use coreward_sim::trace::TraceSource;
use coreward_sim::trace::capture::{ReadOptions, writer};
use coreward_sim::{lb, rpc};

use crate::default_args::default_args;
use crate::report::{Cell, Goal, Report, Table, goal_cells, summarize};

/// Options of `coreward-lab bench sim`.
#[derive(Debug, Clone, clap::Args)]
pub struct Args {
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

impl Default for Args {
    fn default() -> Self {
        default_args()
    }
}

/// Configuration of one simulation whose speed is measured, and its measured rates.
struct Case {
    name: String,
    config: rpc::Config,
    millions_per_second: Vec<f64>,
}

/// Runs the bench of the simulator. Fails when a simulation rejects its configuration.
pub fn run(args: &Args) -> anyhow::Result<Report> {
    let mut cases = cases(args.requests)?;
    for _ in 0..args.rounds {
        for case in &mut cases {
            let start = Instant::now();
            let outcome = rpc::run(&case.config)?;
            ensure!(outcome.requests == case.config.requests, "{}: requests were lost", case.name);
            case.millions_per_second.push(outcome.requests as f64 / 1e6 / start.elapsed().as_secs_f64());
        }
    }
    let mut table = Table::new(&["requests at cores", "million requests/s", "least", "most", "goal", "verdict"]);
    for (number, case) in cases.iter().enumerate() {
        let goal = (number == 0).then_some(Goal::AtLeast(8.0));
        table.add_row(std::iter::once(case.name.clone().into()).chain(rates(&case.millions_per_second, goal)));
    }
    Ok(Report {
        name: "sim",
        title: "The simulator",
        about: format!(
            "`coreward-lab sim rpc` on one CPU, load 0.8: {} requests per case, {} rounds, interleaved; medians. \
             `coreward-lab sim lb` on both CPUs: a capture of {} s of campus traffic, {SNAP_LENGTH} bytes of each \
             packet, from the page cache.",
            args.requests, args.rounds, args.capture_seconds
        ),
        tables: vec![table, captures(args)?],
    })
}

/// Returns cells with the median, minimum and maximum of the rates, the goal, and whether the median meets it.
fn rates(millions_per_second: &[f64], goal: Option<Goal>) -> [Cell; 5] {
    let [middle, least, most] = summarize(millions_per_second.iter().copied());
    let [goal, verdict] = goal_cells(goal, middle);
    [middle.into(), least.into(), most.into(), goal, verdict]
}

/// Number of bytes captured of each packet: enough for all headers up to the ports.
const SNAP_LENGTH: usize = 96;

fn captures(args: &Args) -> anyhow::Result<Table> {
    let directory = tempfile::tempdir().context("a directory for the capture")?;
    let path = directory.path().join("campus.pcap");
    write_capture(&path, args.capture_seconds)?;
    let cases: [(&str, &[&str]); 3] = [
        ("hash", &["hash"]),
        ("crossrss-plus", &["crossrss-plus"]),
        ("hash, rr, pow2, crossrss, crossrss-plus", &["hash", "rr", "pow2", "crossrss", "crossrss-plus"]),
    ];
    let mut millions_per_second = vec![Vec::new(); cases.len()];
    for _ in 0..args.rounds {
        for ((_, policies), rates) in cases.iter().zip(&mut millions_per_second) {
            let config = lb::Config {
                trace: path.to_str().context("a path in UTF-8")?.parse()?,
                policies: policies.iter().map(|name| (*name).to_owned()).collect(),
                seeds: vec![1],
                ..lb::Config::default()
            };
            let start = Instant::now();
            let outcome = lb::run(&config)?;
            rates.push(outcome.packets as f64 / 1e6 / start.elapsed().as_secs_f64());
        }
    }
    let head = ["packets of a capture, by policy", "million packets/s", "least", "most", "goal", "verdict"];
    let mut table = Table::new(&head);
    for ((name, policies), millions_per_second) in cases.iter().zip(&millions_per_second) {
        let goal = (policies.len() == 1).then_some(Goal::AtLeast(20.0));
        table.add_row(std::iter::once((*name).into()).chain(rates(millions_per_second, goal)));
    }
    Ok(table)
}

/// Writes a capture file of campus traffic, which then remains in the page cache.
fn write_capture(path: &Path, seconds: u32) -> anyhow::Result<()> {
    let mut trace = format!("campus:seconds={seconds}").parse::<TraceSource>()?.open(1, ReadOptions::default())?;
    let out = File::create(path).with_context(|| path.display().to_string())?;
    writer::write(trace.as_mut(), SNAP_LENGTH, BufWriter::with_capacity(1 << 20, out))?;
    Ok(())
}

fn cases(requests: u64) -> anyhow::Result<Vec<Case>> {
    let case = |name: &str, policy: &str, cores: u16, service: &str, latency: f64| {
        let config = rpc::Config {
            policy: policy.parse()?,
            cores,
            service: service.parse()?,
            latency,
            requests,
            ..rpc::Config::default()
        };
        Ok(Case { name: name.to_owned(), config, millions_per_second: Vec::new() })
    };
    let bimodal = "bimodal:0.1:5";
    [
        ("JSQ, 16 cores, exponential", "jsq", 16, "exp", 0.0),
        ("JSQ, 16 cores, bimodal, latency", "jsq", 16, bimodal, 0.35),
        ("the same, 4 cores", "jsq", 4, bimodal, 0.35),
        ("the same, 64 cores", "jsq", 64, bimodal, 0.35),
        ("the same, 256 cores", "jsq", 256, bimodal, 0.35),
        ("the same, 1024 cores", "jsq", 1024, bimodal, 0.35),
        ("JLQ, 16 cores", "jlq", 16, bimodal, 0.35),
        ("JBSRQ, 16 cores", "jbsrq", 16, bimodal, 0.35),
        ("processor sharing, 16 cores", "ps", 16, bimodal, 0.0),
    ]
    .into_iter()
    .map(|(name, policy, cores, service, latency)| case(name, policy, cores, service, latency))
    .collect()
}
