//! One independent run of a simulation, and what of its outcome a figure wants.

use super::parameters::throughput;
use super::scenario::Measure;
use crate::{lb, rpc};

/// A run; the same job gives the same outcome.
#[derive(Debug, Clone, PartialEq)]
pub enum Job {
    /// Requests at cores.
    Rpc(rpc::Config),
    /// Requests at cores, at the highest load within a bound.
    Peak(rpc::PeakConfig),
    /// Packets of a trace.
    Lb(lb::Config),
}

/// What of an outcome is wanted.
#[derive(Debug, Clone, PartialEq)]
pub struct Wanted {
    /// The measure.
    pub measure: Measure,
    /// What something outside of the simulated cores lets pass at most (throughput).
    pub at_most: Option<f64>,
    /// Of this policy, where a run has several.
    pub policy: Option<String>,
}

/// What a run gave.
#[derive(Debug, Clone)]
pub enum Outcome {
    /// Of [`Job::Rpc`].
    Rpc(rpc::Outcome),
    /// Of [`Job::Peak`], with the cores' mean service rate: requests in a short service time at full load.
    Peak(rpc::Peak, f64),
    /// Of [`Job::Lb`].
    Lb(lb::Outcome),
}

impl Job {
    /// Runs the simulation.
    ///
    /// # Errors
    /// What the simulation refuses, in its words.
    pub fn run(&self) -> anyhow::Result<Outcome> {
        Ok(match self {
            Self::Rpc(config) => Outcome::Rpc(rpc::run(config)?),
            Self::Peak(config) => Outcome::Peak(rpc::peak(config)?, throughput(&config.config, 1.0)),
            Self::Lb(config) => Outcome::Lb(lb::run(config)?),
        })
    }
}

impl Outcome {
    /// The wanted value; `None` when the run has none (a policy without peak, a class without requests).
    pub fn value(&self, wanted: &Wanted) -> Option<f64> {
        match self {
            Self::Rpc(outcome) => of_requests(outcome, wanted.measure),
            Self::Peak(peak, full) => {
                let most = wanted.at_most.unwrap_or(f64::INFINITY);
                let throughput = (peak.peak_load * full).min(most);
                Some(if wanted.measure == Measure::PeakLoad { throughput / full } else { throughput })
            }
            Self::Lb(outcome) => {
                let policy = outcome.policies.iter().find(|policy| Some(&policy.policy) == wanted.policy.as_ref())?;
                match wanted.measure {
                    Measure::ServerVariancePct => Some(policy.server_variance_pct.median),
                    Measure::CoreVariancePct => Some(policy.core_variance_pct.median),
                    Measure::ServedPct => Some(100.0 - policy.dropped_pct.median),
                    _ => None,
                }
            }
        }
    }

    /// The wanted value over time.
    pub fn over_time(&self, wanted: &Wanted) -> Option<Vec<(f64, f64)>> {
        match self {
            Self::Rpc(outcome) if wanted.measure == Measure::P99 => {
                Some(outcome.windows.iter().map(|window| (window.from, window.quantiles.p99)).collect())
            }
            _ => None,
        }
    }
}

fn of_requests(outcome: &rpc::Outcome, measure: Measure) -> Option<f64> {
    match measure {
        Measure::P99 => Some(outcome.all.p99),
        Measure::Mean => Some(outcome.all.mean),
        Measure::ShortP99 => Some(outcome.classes.first()?.quantiles.p99),
        Measure::LongP99 => Some(outcome.classes.last()?.quantiles.p99),
        _ => None,
    }
}
