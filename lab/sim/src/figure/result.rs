//! Finished figure with its numbers, verdicts and provenance.

use serde::{Deserialize, Serialize};

use super::figure_claim::ClaimVerdict;
use super::scenario::FigureScenario;
use super::table::{FigureTable, format_number};

/// Result of a simulated or measured figure: its values, the verdicts on the paper's claims, and their provenance.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct FigureResult {
    /// Name of the figure, as in `coreward-lab figure --list`.
    pub name: String,
    pub provenance: FigureProvenance,
    pub table: FigureTable,
    /// Verdicts on the paper's claims.
    pub claims: Vec<ClaimVerdict>,
}

/// Information from which a figure can be reproduced.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct FigureProvenance {
    /// Command that produces the figure.
    pub command: String,
    /// Version of coreward that produced the figure.
    pub version: String,
    /// Hash of the scenario's text (64-bit FNV-1a), which detects a changed scenario.
    pub scenario: String,
    /// Machine on which the figure was measured, or `None` for a simulation, which is identical on every machine.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub measured_on: Option<String>,
}

impl FigureProvenance {
    /// Returns the provenance of the figure that `command` produces from a scenario with this `text`.
    pub fn new(command: String, text: &str) -> Self {
        let version = env!("CARGO_PKG_VERSION").to_owned();
        Self { command, version, scenario: format!("{:016x}", fnv1a_hash(text.as_bytes())), measured_on: None }
    }

    pub fn with_machine(self, machine: String) -> Self {
        Self { measured_on: Some(machine), ..self }
    }

    /// Returns whether both figures come from the same inputs, even if on different machines. If so, the stored figure
    /// can be used again.
    pub fn has_same_inputs(&self, other: &Self) -> bool {
        (&self.command, &self.version, &self.scenario) == (&other.command, &other.version, &other.scenario)
    }
}

/// Returns the 64-bit FNV-1a hash of `bytes`, by Fowler, Noll and Vo (draft-eastlake-fnv).
fn fnv1a_hash(bytes: &[u8]) -> u64 {
    bytes.iter().fold(0xcbf2_9ce4_8422_2325, |hash, byte| (hash ^ u64::from(*byte)).wrapping_mul(0x0100_0000_01b3))
}

impl FigureResult {
    /// Returns the result of a figure whose values are `table`, and judges the claims of `scenario` on them.
    pub fn new(name: &str, provenance: FigureProvenance, scenario: &FigureScenario, table: FigureTable) -> Self {
        let claims = scenario.claim.iter().map(|claim| claim.evaluate(&table)).collect();
        Self { name: name.to_owned(), provenance, table, claims }
    }

    pub fn holding_claim_count(&self) -> usize {
        self.claims.iter().filter(|claim| claim.holds).count()
    }

    /// Returns one line of text for each claim, with the verdict, the statement and the numbers.
    pub fn claim_lines(&self) -> Vec<String> {
        self.claims
            .iter()
            .map(|claim| format!("  {}: {}: {}", claim.verdict_text(), claim.statement, claim.format_numbers()))
            .collect()
    }
}

impl ClaimVerdict {
    pub fn verdict_text(&self) -> &'static str {
        if self.holds { "holds" } else { "does not hold here" }
    }

    /// Returns the measured value, its bounds and the published value as text.
    pub fn format_numbers(&self) -> String {
        let measured_text = match self.measured {
            None => "not reached here".to_owned(),
            Some(value_range) if self.points == 1 => format!("{} here", format_range(value_range)),
            Some(value_range) => format!("{} here, {} values", format_range(value_range), self.points),
        };
        let seeds_text = match self.seeds {
            Some(value_range) if Some(value_range) != self.measured => {
                format!(" (single seeds {})", format_range(value_range))
            }
            _ => String::new(),
        };
        let published_text =
            self.published.map_or(String::new(), |value| format!("; published {}", format_number(value)));
        format!("{measured_text}{seeds_text}; required {}{published_text}", self.bound)
    }
}

fn format_range((low, high): (f64, f64)) -> String {
    let format_value = |value: f64| match value.abs() {
        magnitude if magnitude < 1e-9 => "0".to_owned(),
        magnitude if magnitude < 0.01 => format!("{value:.1e}"),
        magnitude if magnitude < 10.0 => format!("{value:.3}"),
        magnitude if magnitude < 1000.0 => format!("{value:.1}"),
        _ => format!("{value:.0}"),
    };
    let (low_text, high_text) = (format_value(low), format_value(high));
    if low_text == high_text { low_text } else { format!("{low_text} to {high_text}") }
}
