//! `coreward-lab testbed knot-benchmark` measures what an unmodified server gains by `coreward dispatch`. Debian's Knot
//! DNS answers queries of unequal cost, most of them from memory and some with a signature made on demand.

pub mod knot;

use anyhow::ensure;
use coreward_load::report::LoadRunReport;
use coreward_sim::output::{PrintableResult, SimulationResultFormat};
use coreward_sim::seed_summary::SeedSummary;
use serde::Serialize;

use crate::dispatch_figure::dispatcher::RunningDispatcher;
use crate::dispatch_figure::requests::{measure_while_machine_idle, raise_open_file_limit};
use crate::topology::{Testbed, find_missing_privilege};
use crate::{instance, interrupt_flag};
use knot::{DNS_SERVICE_ADDRESS, PLAIN_DNS_QUERY, SIGNED_DNS_QUERY};

/// Value in [`KnotBenchmarkArgs::policies`] for runs without `coreward dispatch`, in which the kernel selects the
/// worker.
const KERNEL_POLICY_NAME: &str = "kernel";

/// Options of `coreward-lab testbed knot-benchmark`.
#[derive(Debug, Clone, clap::Args)]
pub struct KnotBenchmarkArgs {
    /// Policies that select the worker: kernel (no dispatch), random, rr, jsq
    #[arg(long, value_name = "POLICY,...", value_delimiter = ',', default_value = "kernel,rr,jsq",
        value_parser = [KERNEL_POLICY_NAME, "random", "rr", "jsq"])]
    pub policies: Vec<String>,
    /// Number of UDP workers of knotd
    #[arg(long, default_value_t = 2, value_parser = clap::value_parser!(u16).range(1..=64))]
    pub workers: u16,
    /// Queries per second
    #[arg(long, default_value_t = 600.0, value_parser = parse_rate)]
    pub rate: f64,
    /// Share of the queries whose answer is signed on demand
    #[arg(long, default_value_t = 0.2, value_parser = parse_share)]
    pub signed: f64,
    /// Duration of each run (s)
    #[arg(long, default_value_t = 8.0, value_parser = parse_seconds)]
    pub seconds: f64,
    /// Number of runs of each policy, interleaved; the seeds are 1 to RUNS
    #[arg(long, default_value_t = 5, value_parser = clap::value_parser!(u64).range(1..=100))]
    pub runs: u64,
    /// Format of the output
    #[arg(long, value_enum, default_value_t = SimulationResultFormat::Text)]
    pub format: SimulationResultFormat,
}

fn parse_number_between(text: &str, minimum: f64, maximum: f64) -> Result<f64, String> {
    let number = text.parse().ok().filter(|number| (minimum..=maximum).contains(number));
    number.ok_or_else(|| format!("expected a number from {minimum} to {maximum}"))
}

fn parse_rate(text: &str) -> Result<f64, String> {
    parse_number_between(text, 1.0, 30_000.0)
}

fn parse_share(text: &str) -> Result<f64, String> {
    parse_number_between(text, 0.001, 0.999)
}

fn parse_seconds(text: &str) -> Result<f64, String> {
    parse_number_between(text, 0.1, 600.0)
}

/// Results of one policy, each with median and range over the runs.
#[derive(Debug, Clone, Serialize)]
pub struct KnotPolicyMeasurement {
    /// Name of the dispatch policy, or `kernel` without `coreward dispatch`.
    pub policy: String,
    pub answered_rps: SeedSummary,
    /// Median latency of queries answered from memory (us).
    pub plain_p50_us: SeedSummary,
    /// 99th percentile of the latency of queries answered from memory (us).
    pub plain_p99_us: SeedSummary,
    /// 99th percentile of the latency of signed queries (us).
    pub signed_p99_us: SeedSummary,
    /// Number of unanswered queries in all runs.
    pub lost: u64,
}

/// Results of the benchmark, for all policies.
#[derive(Debug, Clone, Serialize)]
pub struct KnotPolicyComparison {
    /// Number of UDP workers of knotd.
    pub workers: u16,
    /// Number of queries that are due per second.
    pub queries_per_second: f64,
    /// Share of queries whose answer knotd signs on demand (0 to 1).
    pub signed_share: f64,
    /// Results of the policies, in the requested order.
    pub policies: Vec<KnotPolicyMeasurement>,
}

pub fn main(args: &KnotBenchmarkArgs) -> anyhow::Result<()> {
    interrupt_flag::catch_signals()?;
    print!("{}", compare_policies(args)?.render(args.format));
    Ok(())
}

/// Runs knotd on a server of a new testbed, and measures all policies in turn. Fails without root or knotd, when a
/// process does not start, when an answer has an error, or when the machine is too busy.
pub fn compare_policies(args: &KnotBenchmarkArgs) -> anyhow::Result<KnotPolicyComparison> {
    if let Some(privilege_error) = find_missing_privilege() {
        anyhow::bail!(privilege_error);
    }
    raise_open_file_limit()?;
    let testbed = Testbed::create_without_load_balancing(&instance::unique_testbed_name("stockserver")?)?;
    let _knot_server = testbed.start_knot(1, args.workers)?;
    let mut reports_by_policy: Vec<Vec<LoadRunReport>> = vec![Vec::new(); args.policies.len()];
    for seed in 1..=args.runs {
        for (policy, reports) in args.policies.iter().zip(&mut reports_by_policy) {
            reports.push(measure_policy(&testbed, policy, args, seed)?);
        }
    }
    let policy_measurements = args
        .policies
        .iter()
        .zip(&reports_by_policy)
        .map(|(policy, reports)| KnotPolicyMeasurement::new(policy, reports));
    let policy_measurements = policy_measurements.collect::<anyhow::Result<_>>()?;
    Ok(KnotPolicyComparison {
        workers: args.workers,
        queries_per_second: args.rate,
        signed_share: args.signed,
        policies: policy_measurements,
    })
}

/// Returns the `coreward dispatch` configuration of the DNS service. The DNS message id is the request id, which
/// matches an answer with its query.
fn build_dns_service_config(policy: &str) -> String {
    format!("listen = \"{DNS_SERVICE_ADDRESS}\"\npolicy = \"{policy}\"\nrequest_id = {{ offset = 0, bytes = 2 }}\n")
}

fn measure_policy(
    testbed: &Testbed,
    policy: &str,
    args: &KnotBenchmarkArgs,
    seed: u64,
) -> anyhow::Result<LoadRunReport> {
    let dispatcher = match policy {
        KERNEL_POLICY_NAME => None,
        policy => Some(RunningDispatcher::start(testbed, 1, &build_dns_service_config(policy), args.workers)?),
    };
    let options = [
        ("--transport", "dns".to_owned()),
        ("--mix", format!("WORK0={},WORK1={}", 1.0 - args.signed, args.signed)),
        ("--query", format!("{PLAIN_DNS_QUERY},{SIGNED_DNS_QUERY}")),
    ];
    let report = measure_while_machine_idle(testbed, DNS_SERVICE_ADDRESS, args.rate, args.seconds, seed, &options)?;
    ensure!(
        report.transport_errors.failed == 0,
        "knotd answered {} queries with an error",
        report.transport_errors.failed
    );
    if let Some(dispatcher) = dispatcher {
        let dispatched_query_count = dispatcher.query_dispatched_request_count()?;
        let sent_query_count = report.requests;
        ensure!(
            dispatched_query_count >= sent_query_count,
            "{policy}: {dispatched_query_count} of {sent_query_count} queries were dispatched by coreward dispatch"
        );
        dispatcher.stop()?;
    }
    Ok(report)
}

impl KnotPolicyMeasurement {
    fn new(policy: &str, reports: &[LoadRunReport]) -> anyhow::Result<Self> {
        let summarize_runs = |value: &dyn Fn(&LoadRunReport) -> Option<f64>| {
            let values: Vec<f64> = reports.iter().filter_map(value).collect();
            ensure!(values.len() == reports.len(), "{policy}: queries of one kind were not answered");
            SeedSummary::from_values(&values).ok_or_else(|| anyhow::anyhow!("no run"))
        };
        Ok(Self {
            policy: policy.to_owned(),
            answered_rps: summarize_runs(&|report| Some(report.completed_rps))?,
            plain_p50_us: summarize_runs(&|report| report.classes.first()?.latency_us.p50)?,
            plain_p99_us: summarize_runs(&|report| report.classes.first()?.latency_us.p99)?,
            signed_p99_us: summarize_runs(&|report| report.classes.last()?.latency_us.p99)?,
            lost: reports.iter().map(|report| report.lost).sum(),
        })
    }
}

impl PrintableResult for KnotPolicyComparison {
    fn column_titles(&self) -> Vec<&'static str> {
        vec!["policy", "answered/s", "plain p50 us", "plain p99 us", "signed p99 us", "lost"]
    }

    fn table_rows(&self) -> Vec<Vec<String>> {
        let build_policy_row = |measurement: &KnotPolicyMeasurement| {
            let summaries = [
                &measurement.answered_rps,
                &measurement.plain_p50_us,
                &measurement.plain_p99_us,
                &measurement.signed_p99_us,
            ];
            let summaries =
                summaries.map(|summary| format!("{:.0} ({:.0}-{:.0})", summary.median, summary.low, summary.high));
            std::iter::once(measurement.policy.clone()).chain(summaries).chain([measurement.lost.to_string()]).collect()
        };
        self.policies.iter().map(build_policy_row).collect()
    }

    fn table_remarks(&self) -> Vec<String> {
        let Self { workers, queries_per_second: rate, signed_share: signed, .. } = self;
        vec![format!(
            "knotd with {workers} UDP workers, {rate} queries a second, {:.0} % of them signed when they are asked \
             for. Medians over the runs (lowest to highest); latency from when a query was due.",
            signed * 100.0
        )]
    }
}
