//! Results of a simulation of the whole path.

use serde::Serialize;

use crate::output::PrintableResult;
use crate::rpc::LatencySummary;
use crate::seed_summary::SeedSummary;

/// Results of one combination of policies with one seed.
#[derive(Debug, Clone, PartialEq)]
pub struct PathSeedResult {
    /// Latency of all requests after the warm-up, in units of service time. It is measured from the arrival at the
    /// server's NIC to the response's departure.
    pub latency: LatencySummary,
    /// Variance, over all servers, of a server's busy time divided by the mean (%), averaged over all windows.
    pub server_variance_pct: f64,
    /// Variance, over all cores, of a core's busy time divided by the mean (%), averaged over all windows.
    pub core_variance_pct: f64,
    pub request_count: u64,
}

/// Results of one combination of policies, summarized over all seeds. Latencies are in units of service time.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct PolicyCombinationOutcome {
    pub policy: String,
    /// Policy by which a server assigns requests to its cores.
    pub dispatch: String,
    pub mean: SeedSummary,
    /// Median of the latency.
    pub p50: SeedSummary,
    /// 90th percentile of the latency.
    pub p90: SeedSummary,
    /// 99th percentile of the latency.
    pub p99: SeedSummary,
    /// 99.9th percentile of the latency.
    pub p999: SeedSummary,
    pub server_variance_pct: SeedSummary,
    pub core_variance_pct: SeedSummary,
}

impl PolicyCombinationOutcome {
    /// Summarizes the results of all seeds, or returns `None` if there are none.
    pub fn new(policy: &str, dispatch: &str, seed_results: &[PathSeedResult]) -> Option<Self> {
        let summarize = |to_value: fn(&PathSeedResult) -> f64| {
            SeedSummary::from_values(&seed_results.iter().map(to_value).collect::<Vec<_>>())
        };
        Some(Self {
            policy: policy.to_owned(),
            dispatch: dispatch.to_owned(),
            mean: summarize(|seed| seed.latency.mean)?,
            p50: summarize(|seed| seed.latency.p50)?,
            p90: summarize(|seed| seed.latency.p90)?,
            p99: summarize(|seed| seed.latency.p99)?,
            p999: summarize(|seed| seed.latency.p999)?,
            server_variance_pct: summarize(|seed| seed.server_variance_pct)?,
            core_variance_pct: summarize(|seed| seed.core_variance_pct)?,
        })
    }
}

#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct PathSimulationOutcome {
    /// Results of each load balancer policy combined with each policy inside the servers.
    pub combinations: Vec<PolicyCombinationOutcome>,
    /// Number of requests that arrived, averaged over the seeds.
    pub requests: u64,
    /// Duration of the unit of service time (us).
    pub unit_us: f64,
}

impl PrintableResult for PathSimulationOutcome {
    fn column_titles(&self) -> Vec<&'static str> {
        vec!["policy", "dispatch", "mean", "p50", "p90", "p99", "p99.9", "server variance %", "core variance %"]
    }

    fn table_rows(&self) -> Vec<Vec<String>> {
        let format_combination_row = |combination: &PolicyCombinationOutcome| {
            let PolicyCombinationOutcome { mean, p50, p90, p99, p999, server_variance_pct, core_variance_pct, .. } =
                combination;
            let statistics = [mean, p50, p90, p99, p999, server_variance_pct, core_variance_pct];
            let names = [combination.policy.clone(), combination.dispatch.clone()];
            names.into_iter().chain(statistics.map(|statistic| format!("{:.3}", statistic.median))).collect()
        };
        self.combinations.iter().map(format_combination_row).collect()
    }

    fn table_remarks(&self) -> Vec<String> {
        vec![
            format!(
                "medians over the seeds; latency at the server, from the NIC in to the NIC out, in service times of \
                 the shortest class ({} us)",
                self.unit_us
            ),
            format!("{} requests per combination and seed", self.requests),
        ]
    }
}
