//! How quick the simulator is: requests at cores, and packets of a capture.

use std::time::Instant;

use anyhow::ensure;
use coreward_model::statistics::median;
use coreward_sim::rpc;

use crate::report::{Cell, Report, Table};

/// Options of `coreward-bench sim`.
#[derive(Debug, Clone, clap::Args)]
pub struct Args {
    /// Rounds, in each of which every case is measured once
    #[arg(long, default_value_t = 7, value_parser = clap::value_parser!(u32).range(1..))]
    rounds: u32,
    /// Requests of a case
    #[arg(long, default_value_t = 4_000_000, value_parser = clap::value_parser!(u64).range(1000..))]
    requests: u64,
}

impl Default for Args {
    fn default() -> Self {
        use clap::FromArgMatches as _;
        let command = <Self as clap::Args>::augment_args(clap::Command::new("sim"));
        Self::from_arg_matches(&command.get_matches_from(["sim"])).expect("every option has a default")
    }
}

/// One simulation whose speed is measured.
struct Case {
    name: String,
    config: rpc::Config,
    millions_per_second: Vec<f64>,
}

/// Measures.
///
/// # Errors
/// When a simulation refuses its configuration.
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
    let mut table = Table::new(&["requests at cores", "million requests/s", "least", "most", "ns per request"]);
    for case in &cases {
        let rates = &case.millions_per_second;
        let middle = median(rates).expect("at least one round");
        let (least, most) =
            (rates.iter().copied().fold(f64::INFINITY, f64::min), rates.iter().copied().fold(0.0, f64::max));
        table.row([case.name.clone().into(), middle.into(), least.into(), most.into(), Cell::Number(1e3 / middle)]);
    }
    Ok(Report {
        name: "sim",
        title: "The simulator",
        about: format!(
            "`coreward sim rpc` on one CPU, load 0.8: {} requests per case unless said otherwise, {} rounds, all cases one \
             after the other in each; medians. To reach: 8 million requests/s for JSQ on 16 cores.",
            args.requests, args.rounds
        ),
        tables: vec![table],
    })
}

fn cases(requests: u64) -> anyhow::Result<Vec<Case>> {
    let case = |name: &str, policy: &str, cores: u16, service: &str, latency: f64, requests: u64| {
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
        ("JSQ, 16 cores, exponential", "jsq", 16, "exp", 0.0, requests),
        ("JSQ, 16 cores, bimodal, latency", "jsq", 16, bimodal, 0.35, requests),
        ("the same, a fourth of the run", "jsq", 16, bimodal, 0.35, requests / 4),
        ("the same, four times the run", "jsq", 16, bimodal, 0.35, requests * 4),
        ("the same, 4 cores", "jsq", 4, bimodal, 0.35, requests),
        ("the same, 64 cores", "jsq", 64, bimodal, 0.35, requests),
        ("the same, 256 cores", "jsq", 256, bimodal, 0.35, requests),
        ("the same, 1024 cores", "jsq", 1024, bimodal, 0.35, requests),
        ("JLQ, 16 cores", "jlq", 16, bimodal, 0.35, requests),
        ("JBSRQ, 16 cores", "jbsrq", 16, bimodal, 0.35, requests),
        ("processor sharing, 16 cores", "ps", 16, bimodal, 0.0, requests),
    ]
    .into_iter()
    .map(|(name, policy, cores, service, latency, requests)| case(name, policy, cores, service, latency, requests))
    .collect()
}
