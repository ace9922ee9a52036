//! One independent run of a simulation, and the selection of a value from its outcome.

use super::axes::Metric;
use super::parameters::throughput;
use crate::{lb, path, pcc, rpc};

/// Independent run of a simulation. Equal jobs have equal outcomes, because simulations are deterministic.
#[derive(Debug, Clone, PartialEq)]
pub enum Job {
    /// Simulation of requests at the cores of one server.
    Rpc(rpc::Config),
    /// Search for the highest load at which one server meets its latency objective (SLO).
    Peak(rpc::PeakConfig),
    /// Replay of a trace's packets through the load balancer to servers and cores.
    Lb(lb::Config),
    /// Simulation of connections while the server pool changes.
    Pcc(pcc::Config),
    /// Simulation of connections and their requests, through the load balancer to the servers' cores.
    Path(path::Config),
}

/// Selection of one value from the outcome of a run.
#[derive(Debug, Clone, PartialEq)]
pub struct ValueQuery {
    pub metric: Metric,
    /// Maximum throughput of a dispatcher in front of the cores (requests per short service time), or `None` if
    /// unlimited.
    pub throughput_limit: Option<f64>,
    /// Policy whose value is selected from a run that simulates several policies.
    pub policy: Option<String>,
    /// Seed whose value is selected from a run that simulates several seeds.
    pub seed: u64,
}

impl ValueQuery {
    /// Returns a query that selects the value of a metric for the first seed.
    pub fn for_metric(metric: Metric) -> Self {
        Self { metric, throughput_limit: None, policy: None, seed: 1 }
    }
}

#[derive(Debug, Clone)]
pub enum Outcome {
    Rpc(rpc::Outcome),
    /// Outcome of [`Job::Peak`], followed by the cores' throughput at full load (requests per short service time).
    PeakWithFullLoadThroughput(rpc::PeakLoadEstimate, f64),
    /// Outcome of [`Job::Lb`], followed by the run's seeds.
    LbWithSeeds(lb::Outcome, Vec<u64>),
    Pcc(pcc::Outcome),
    Path(path::Outcome),
}

impl Job {
    pub fn run(&self) -> anyhow::Result<Outcome> {
        Ok(match self {
            Self::Rpc(config) => Outcome::Rpc(rpc::run(config)?),
            Self::Peak(config) => {
                Outcome::PeakWithFullLoadThroughput(rpc::find_peak_load(config)?, throughput(&config.config, 1.0))
            }
            Self::Lb(config) => Outcome::LbWithSeeds(lb::run(config)?, config.seeds.clone()),
            Self::Pcc(config) => Outcome::Pcc(pcc::run(config)?),
            Self::Path(config) => Outcome::Path(path::run(config)?),
        })
    }
}

impl Outcome {
    /// Returns the queried value, or `None` if the run did not yield it, for instance if a class has no requests.
    pub fn value(&self, query: &ValueQuery) -> Option<f64> {
        match self {
            Self::Rpc(outcome) => select_rpc_value(outcome, query.metric),
            Self::PeakWithFullLoadThroughput(peak, full_load_throughput) => {
                let max_throughput = query.throughput_limit.unwrap_or(f64::INFINITY);
                let throughput = (peak.peak_load * full_load_throughput).min(max_throughput);
                Some(if query.metric == Metric::PeakLoad { throughput / full_load_throughput } else { throughput })
            }
            Self::LbWithSeeds(outcome, seeds) => select_lb_value(outcome, seeds, query),
            Self::Pcc(outcome) => {
                let seed_result = find_seed_result(outcome, query.seed)?;
                match query.metric {
                    Metric::BrokenPct => Some(seed_result.broken_pct()),
                    Metric::ImbalancePct => Some((seed_result.imbalance - 1.0) * 100.0),
                    _ => None,
                }
            }
            // The run has only one combination and one seed, so every statistic over the seeds equals this one value.
            Self::Path(outcome) => {
                let combination = outcome.combinations.first()?;
                let statistic = match query.metric {
                    Metric::P99 => combination.p99,
                    Metric::Mean => combination.mean,
                    Metric::ServerVariancePct => combination.server_variance_pct,
                    Metric::CoreVariancePct => combination.core_variance_pct,
                    _ => return None,
                };
                Some(statistic.median)
            }
        }
    }

    pub fn time_series(&self, query: &ValueQuery) -> Option<Vec<(f64, f64)>> {
        match self {
            Self::Rpc(outcome) if query.metric == Metric::P99 => {
                Some(outcome.windows.iter().map(|window| (window.from, window.quantiles.p99)).collect())
            }
            Self::Pcc(outcome) => {
                let value_from_counts: fn(&pcc::PerSecondCounts) -> f64 = match query.metric {
                    Metric::BrokenPct => pcc::PerSecondCounts::broken_pct,
                    Metric::PoolServers => |second| second.pool_servers as f64,
                    Metric::CompletedPerSecond => |second| second.completed_connections as f64,
                    _ => return None,
                };
                // The value for a second is drawn at the end of that second.
                let second_end_times_s = (1..).map(f64::from);
                Some(
                    second_end_times_s
                        .zip(find_seed_result(outcome, query.seed)?.per_second_counts.iter().map(value_from_counts))
                        .collect(),
                )
            }
            _ => None,
        }
    }
}

/// Returns the result for `seed`, counted from 1, of a run that simulated a single method.
fn find_seed_result(outcome: &pcc::Outcome, seed: u64) -> Option<&pcc::SeedResult> {
    outcome.methods.first()?.runs.get(seed as usize - 1)
}

/// Returns the value that `query` selects from the outcome of a run with these `seeds`.
fn select_lb_value(outcome: &lb::Outcome, seeds: &[u64], query: &ValueQuery) -> Option<f64> {
    let policy_outcome = outcome.policies.iter().find(|policy| Some(&policy.policy) == query.policy.as_ref())?;
    let seed_result = policy_outcome.seeds.get(seeds.iter().position(|seed| *seed == query.seed)?)?;
    match query.metric {
        Metric::ServerVariancePct => Some(seed_result.server_variance_pct),
        Metric::CoreVariancePct => Some(seed_result.core_variance_pct),
        Metric::ServedPct => Some(100.0 - seed_result.dropped_pct),
        _ => None,
    }
}

fn select_rpc_value(outcome: &rpc::Outcome, metric: Metric) -> Option<f64> {
    match metric {
        Metric::P99 => Some(outcome.all.p99),
        Metric::Mean => Some(outcome.all.mean),
        Metric::ShortP99 => Some(outcome.classes.first()?.quantiles.p99),
        Metric::LongP99 => Some(outcome.classes.last()?.quantiles.p99),
        // All classes have the same percentage, because figures have no queue limit and so no request is dropped.
        Metric::LongAnsweredPct => Some(100.0 - outcome.dropped_pct),
        _ => None,
    }
}
