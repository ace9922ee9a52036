//! One independent run of a simulation, and the selection of a value from its outcome.

use super::axes::FigureMetric;
use super::parameters::throughput_at_load;
use crate::{lb, path, pcc, rpc};

/// Independent run of a simulation. Equal jobs have equal outcomes, because simulations are deterministic.
#[derive(Debug, Clone, PartialEq)]
pub enum SimulationJob {
    /// Simulation of requests at the cores of one server.
    Rpc(rpc::RpcSimulationConfig),
    /// Search for the highest load at which one server meets its latency objective (SLO).
    PeakLoadSearch(rpc::PeakLoadSearchConfig),
    /// Replay of a trace's packets through the load balancer to servers and cores.
    Lb(lb::LbSimulationConfig),
    /// Simulation of connections while the server pool changes.
    Pcc(pcc::PccSimulationConfig),
    /// Simulation of connections and their requests, through the load balancer to the servers' cores.
    Path(path::PathSimulationConfig),
}

/// Selection of one value from the outcome of a run.
#[derive(Debug, Clone, PartialEq)]
pub struct OutcomeValueQuery {
    pub metric: FigureMetric,
    /// Maximum throughput of a dispatcher in front of the cores (requests per short service time), or `None` if
    /// unlimited.
    pub throughput_limit: Option<f64>,
    /// Policy whose value is selected from a run that simulates several policies.
    pub policy: Option<String>,
    /// Seed whose value is selected from a run that simulates several seeds.
    pub seed: u64,
}

impl OutcomeValueQuery {
    /// Returns a query that selects the value of a metric for the first seed.
    pub fn for_metric(metric: FigureMetric) -> Self {
        Self { metric, throughput_limit: None, policy: None, seed: 1 }
    }
}

#[derive(Debug, Clone)]
pub enum SimulationJobOutcome {
    Rpc(rpc::RpcSimulationOutcome),
    /// Outcome of [`SimulationJob::PeakLoadSearch`], followed by the cores' throughput at full load (requests per short
    /// service time).
    PeakWithFullLoadThroughput(rpc::PeakLoadEstimate, f64),
    /// Outcome of [`SimulationJob::Lb`], followed by the seeds that the run simulated.
    LbWithSeeds(lb::LbSimulationOutcome, Vec<u64>),
    Pcc(pcc::PccSimulationOutcome),
    Path(path::PathSimulationOutcome),
}

impl SimulationJob {
    pub fn run(&self) -> anyhow::Result<SimulationJobOutcome> {
        Ok(match self {
            Self::Rpc(config) => SimulationJobOutcome::Rpc(rpc::run(config)?),
            Self::PeakLoadSearch(config) => SimulationJobOutcome::PeakWithFullLoadThroughput(
                rpc::find_peak_load(config)?,
                throughput_at_load(&config.simulation_config, 1.0),
            ),
            Self::Lb(config) => SimulationJobOutcome::LbWithSeeds(lb::run(config)?, config.seeds.clone()),
            Self::Pcc(config) => SimulationJobOutcome::Pcc(pcc::run(config)?),
            Self::Path(config) => SimulationJobOutcome::Path(path::run(config)?),
        })
    }
}

impl SimulationJobOutcome {
    /// Returns the queried value, or `None` if the run did not yield it, for instance if a class has no requests.
    pub fn select_value(&self, query: &OutcomeValueQuery) -> Option<f64> {
        match self {
            Self::Rpc(outcome) => select_rpc_value(outcome, query.metric),
            Self::PeakWithFullLoadThroughput(peak, full_load_throughput) => {
                let max_throughput = query.throughput_limit.unwrap_or(f64::INFINITY);
                let throughput = (peak.peak_load * full_load_throughput).min(max_throughput);
                Some(if query.metric == FigureMetric::PeakLoad {
                    throughput / full_load_throughput
                } else {
                    throughput
                })
            }
            Self::LbWithSeeds(outcome, seeds) => select_lb_value(outcome, seeds, query),
            Self::Pcc(outcome) => {
                let seed_result = find_seed_result(outcome, query.seed)?;
                match query.metric {
                    FigureMetric::BrokenPct => Some(seed_result.broken_connection_pct()),
                    FigureMetric::ImbalancePct => Some((seed_result.mean_connection_imbalance - 1.0) * 100.0),
                    _ => None,
                }
            }
            // The run has only one combination and one seed, so every statistic over the seeds equals this one value.
            Self::Path(outcome) => {
                let combination = outcome.combinations.first()?;
                let statistic = match query.metric {
                    FigureMetric::P99 => combination.p99,
                    FigureMetric::Mean => combination.mean,
                    FigureMetric::ServerVariancePct => combination.server_variance_pct,
                    FigureMetric::CoreVariancePct => combination.core_variance_pct,
                    _ => return None,
                };
                Some(statistic.median)
            }
        }
    }

    pub fn time_series(&self, query: &OutcomeValueQuery) -> Option<Vec<(f64, f64)>> {
        match self {
            Self::Rpc(outcome) if query.metric == FigureMetric::P99 => {
                Some(outcome.window_latencies.iter().map(|window| (window.from, window.quantiles.p99)).collect())
            }
            Self::Pcc(outcome) => {
                let value_from_counts: fn(&pcc::PerSecondCounts) -> f64 = match query.metric {
                    FigureMetric::BrokenPct => pcc::PerSecondCounts::broken_connection_pct,
                    FigureMetric::PoolServers => |second| second.pool_server_count as f64,
                    FigureMetric::CompletedPerSecond => |second| second.completed_connections as f64,
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

/// Returns the result for `seed` (counted from 1), from the outcome of a run with a single balancing method.
fn find_seed_result(outcome: &pcc::PccSimulationOutcome, seed: u64) -> Option<&pcc::PccSeedResult> {
    outcome.methods.first()?.runs.get(seed as usize - 1)
}

/// Returns the value that `query` selects from the outcome of a run with these `seeds`.
fn select_lb_value(outcome: &lb::LbSimulationOutcome, seeds: &[u64], query: &OutcomeValueQuery) -> Option<f64> {
    let policy_outcome = outcome.policies.iter().find(|policy| Some(&policy.policy) == query.policy.as_ref())?;
    let seed_result = policy_outcome.seeds.get(seeds.iter().position(|seed| *seed == query.seed)?)?;
    match query.metric {
        FigureMetric::ServerVariancePct => Some(seed_result.server_variance_pct),
        FigureMetric::CoreVariancePct => Some(seed_result.core_variance_pct),
        FigureMetric::ServedPct => Some(100.0 - seed_result.dropped_pct),
        _ => None,
    }
}

fn select_rpc_value(outcome: &rpc::RpcSimulationOutcome, metric: FigureMetric) -> Option<f64> {
    match metric {
        FigureMetric::P99 => Some(outcome.overall_latency.p99),
        FigureMetric::Mean => Some(outcome.overall_latency.mean),
        FigureMetric::ShortP99 => Some(outcome.class_latencies.first()?.quantiles.p99),
        FigureMetric::LongP99 => Some(outcome.class_latencies.last()?.quantiles.p99),
        // All classes have the same percentage, because figures have no queue limit and so no request is dropped.
        FigureMetric::LongAnsweredPct => Some(100.0 - outcome.dropped_request_pct),
        _ => None,
    }
}
