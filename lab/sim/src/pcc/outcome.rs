//! Results of simulations.

use serde::Serialize;

use super::method::Method;
use crate::output::Printable;
use crate::seed_summary::SeedSummary;

/// Results of one method with one seed.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct SeedOutcome {
    /// Connections that ended after the warm-up.
    pub ended: u64,
    /// Number of broken connections.
    pub broken: u64,
    /// Max/mean of the servers' connections, averaged over time.
    pub imbalance: f64,
    /// Changes of servers and load balancers after the warm-up.
    pub updates: u64,
    pub open_at_end: usize,
    /// Results of each second after the warm-up, if [`super::Config::by_second`] is set.
    pub second_counts: Vec<SecondCounts>,
}

/// Results of one second of one method with one seed.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct SecondCounts {
    /// Connections that ended unbroken.
    pub completed: u64,
    /// Connections whose client noticed the break.
    pub broken: u64,
    /// Servers in the pool at the end of the second.
    pub servers: usize,
}

impl SeedOutcome {
    /// Returns the broken connections in percent of the ended ones.
    pub fn broken_pct(&self) -> f64 {
        if self.ended == 0 { 0.0 } else { 100.0 * self.broken as f64 / self.ended as f64 }
    }
}

impl SecondCounts {
    /// Returns the broken connections in percent of the completed ones (Cheetah, NSDI'20, Fig. 9).
    pub fn broken_pct(&self) -> f64 {
        100.0 * self.broken as f64 / self.completed.max(1) as f64
    }
}

/// Results of one method over all seeds.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct MethodOutcome {
    pub method: Method,
    /// Connections that were mapped to at least two servers between their start and end, in percent of all.
    pub broken_pct: SeedSummary,
    /// Max/mean of the servers' connections, averaged over time; 1 is perfect.
    pub imbalance: SeedSummary,
    /// Connections that ended after the warm-up, of all seeds.
    pub connections: u64,
    /// Changes of servers and load balancers after the warm-up, of all seeds.
    pub updates: u64,
    /// Results of each seed, in order.
    #[serde(skip)]
    pub runs: Vec<SeedOutcome>,
}

impl MethodOutcome {
    /// Returns the results of at least one run.
    pub(super) fn of(method: Method, runs: Vec<SeedOutcome>) -> Self {
        let spread = |value: fn(&SeedOutcome) -> f64| {
            SeedSummary::of(&runs.iter().map(value).collect::<Vec<_>>()).expect("at least one seed")
        };
        Self {
            method,
            broken_pct: spread(SeedOutcome::broken_pct),
            imbalance: spread(|run| run.imbalance),
            connections: runs.iter().map(|run| run.ended).sum(),
            updates: runs.iter().map(|run| run.updates).sum(),
            runs,
        }
    }
}

/// Results of a configuration.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Outcome {
    /// In the order of [`super::Config::methods`].
    pub methods: Vec<MethodOutcome>,
}

impl Printable for Outcome {
    fn columns(&self) -> Vec<&'static str> {
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

    fn rows(&self) -> Vec<Vec<String>> {
        let row = |outcome: &MethodOutcome| {
            let pct = |value: f64| format!("{value:.3}");
            let ratio = |value: f64| format!("{value:.4}");
            let (broken, imbalance) = (outcome.broken_pct, outcome.imbalance);
            vec![
                outcome.method.to_string(),
                pct(broken.median),
                pct(broken.low),
                pct(broken.high),
                ratio(imbalance.median),
                ratio(imbalance.low),
                ratio(imbalance.high),
                outcome.connections.to_string(),
                outcome.updates.to_string(),
            ]
        };
        self.methods.iter().map(row).collect()
    }
}
