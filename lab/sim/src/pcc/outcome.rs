//! Results of simulations in which pools change.

use serde::Serialize;

use super::method::BalancingMethod;
use crate::output::PrintableResult;
use crate::seed_summary::SeedSummary;

/// Results of one method with one seed.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct PccSeedResult {
    /// Number of connections that ended after the warm-up.
    pub ended_connections: u64,
    /// Number of connections that ended after the warm-up and had been broken.
    pub broken_connections: u64,
    /// Imbalance (max/mean) between the servers' connection counts, averaged over time.
    pub mean_connection_imbalance: f64,
    /// Number of server and load balancer changes after the warm-up.
    pub cluster_update_count: u64,
    pub open_connections_at_end: usize,
    /// Results of each second after the warm-up. Empty unless [`super::PccSimulationConfig::keeps_per_second_counts`]
    /// is set.
    pub per_second_counts: Vec<PerSecondCounts>,
}

/// Results of a single second, for one method with one seed.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct PerSecondCounts {
    /// Number of connections that ended in this second without having been broken.
    pub completed_connections: u64,
    /// Number of connections whose clients noticed in this second that they were broken.
    pub broken_connections: u64,
    /// Number of servers in the pool at the end of the second.
    pub pool_server_count: usize,
}

impl PccSeedResult {
    /// Returns the percentage of the ended connections that were broken.
    pub fn broken_connection_pct(&self) -> f64 {
        if self.ended_connections == 0 {
            0.0
        } else {
            100.0 * self.broken_connections as f64 / self.ended_connections as f64
        }
    }
}

impl PerSecondCounts {
    /// Returns the number of broken connections as a percentage of the completed ones (Cheetah, NSDI'20, Fig. 9).
    pub fn broken_connection_pct(&self) -> f64 {
        100.0 * self.broken_connections as f64 / self.completed_connections.max(1) as f64
    }
}

/// Results of one method, summarized over all seeds.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct BalancingMethodOutcome {
    pub method: BalancingMethod,
    /// Percentage of connections that were mapped to two or more servers between their start and end.
    pub broken_pct: SeedSummary,
    /// Imbalance (max/mean) between the servers' connection counts, averaged over time. Perfect balance is 1.
    pub imbalance: SeedSummary,
    /// Number of connections that ended after the warm-up, in all seeds together.
    pub connections: u64,
    /// Number of server and load balancer changes after the warm-up, in all seeds together.
    pub updates: u64,
    /// Results of each seed, beginning with seed 1.
    #[serde(skip)]
    pub runs: Vec<PccSeedResult>,
}

impl BalancingMethodOutcome {
    /// Summarizes the results of all seeds. There must be at least one.
    pub(super) fn new(method: BalancingMethod, runs: Vec<PccSeedResult>) -> Self {
        let summarize = |to_value: fn(&PccSeedResult) -> f64| {
            SeedSummary::from_values(&runs.iter().map(to_value).collect::<Vec<_>>()).expect("at least one seed")
        };
        Self {
            method,
            broken_pct: summarize(PccSeedResult::broken_connection_pct),
            imbalance: summarize(|run| run.mean_connection_imbalance),
            connections: runs.iter().map(|run| run.ended_connections).sum(),
            updates: runs.iter().map(|run| run.cluster_update_count).sum(),
            runs,
        }
    }
}

/// Results of all compared methods.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct PccSimulationOutcome {
    /// Results of each method, in the order of [`super::PccSimulationConfig::methods`].
    pub methods: Vec<BalancingMethodOutcome>,
}

impl PrintableResult for PccSimulationOutcome {
    fn column_titles(&self) -> Vec<&'static str> {
        vec![
            "method",
            "broken %",
            "broken low",
            "broken high",
            "imbalance",
            "imbalance low",
            "imbalance high",
            "connections",
            "updates",
        ]
    }

    fn table_rows(&self) -> Vec<Vec<String>> {
        let format_method_row = |outcome: &BalancingMethodOutcome| {
            let format_pct = |value: f64| format!("{value:.3}");
            let format_ratio = |value: f64| format!("{value:.4}");
            let (broken, imbalance) = (outcome.broken_pct, outcome.imbalance);
            vec![
                outcome.method.to_string(),
                format_pct(broken.median),
                format_pct(broken.low),
                format_pct(broken.high),
                format_ratio(imbalance.median),
                format_ratio(imbalance.low),
                format_ratio(imbalance.high),
                outcome.connections.to_string(),
                outcome.updates.to_string(),
            ]
        };
        self.methods.iter().map(format_method_row).collect()
    }
}
