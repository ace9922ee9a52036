//! Whether the RSS table that a NIC shows is the one in force, judged by the SYNs that arrived.
//!
//! A sequential test (Wald, "Sequential Tests of Statistical Hypotheses", 1945): either nearly every SYN comes by the
//! predicted queue, or they match as often as chance has it. It decides as soon as the SYNs seen are a million times
//! more likely under one than under the other, then begins anew, so that a change is noticed.

use coreward_model::rss::IndirectionTable;

/// Log of the odds at which it decides.
const CERTAIN: f64 = 13.8; // ln 10^6
/// With the table in force some SYNs still come by another queue: a rule for one flow, a change in between.
const STRAYS: f64 = 0.02;

/// What the SYNs say.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, serde::Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Verdict {
    /// Too few, or a table with one queue, which says nothing.
    #[default]
    Undecided,
    /// The table shown is the one in force.
    InForce,
    /// SYNs arrive as if by another table.
    NotInForce,
}

impl std::fmt::Display for Verdict {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Verdict::Undecided => "undecided",
            Verdict::InForce => "in force",
            Verdict::NotInForce => "shown, not in force",
        })
    }
}

/// Watches the counters of matching and mismatching SYNs.
#[derive(Debug, Clone, Default)]
pub struct RssVerifier {
    verdict: Verdict,
    /// Log of how much likelier "not in force" has become.
    log_odds: f64,
    counted: Option<(u64, u64)>,
}

impl RssVerifier {
    /// Takes the counters as they stand (absolute). The table is the one shown while they were counted.
    pub fn observe(&mut self, table: &IndirectionTable, matched: u64, mismatched: u64) -> Verdict {
        let (matched_before, mismatched_before) = self.counted.replace((matched, mismatched)).unwrap_or_default();
        let chance = chance_to_match(table);
        if chance > 1.0 - STRAYS {
            return self.verdict;
        }
        let new_matches = matched.saturating_sub(matched_before) as f64;
        let new_mismatches = mismatched.saturating_sub(mismatched_before) as f64;
        self.log_odds += new_mismatches * ((1.0 - chance) / STRAYS).ln() + new_matches * (chance / (1.0 - STRAYS)).ln();
        if self.log_odds.abs() >= CERTAIN {
            self.verdict = if self.log_odds > 0.0 { Verdict::NotInForce } else { Verdict::InForce };
            self.log_odds = 0.0;
        }
        self.verdict
    }

    /// Begins anew: the table has changed. The counters are taken as they stand.
    pub fn table_changed(&mut self, matched: u64, mismatched: u64) {
        *self = Self { counted: Some((matched, mismatched)), ..Self::default() };
    }

    /// The last verdict.
    pub fn verdict(&self) -> Verdict {
        self.verdict
    }
}

/// How often a SYN comes by the predicted queue when another table with the same shares is in force.
fn chance_to_match(table: &IndirectionTable) -> f64 {
    let mut counts = std::collections::BTreeMap::new();
    table.queues().iter().for_each(|queue| *counts.entry(queue).or_insert(0u32) += 1);
    let entries = table.entry_count() as f64;
    counts.values().map(|count| (f64::from(*count) / entries).powi(2)).sum()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn four_queues() -> IndirectionTable {
        IndirectionTable::balanced(1, 128, 4).unwrap()
    }

    #[test]
    fn a_few_dozen_syns_decide() {
        let mut verifier = RssVerifier::default();
        assert_eq!(verifier.observe(&four_queues(), 9, 0), Verdict::Undecided);
        assert_eq!(verifier.observe(&four_queues(), 20, 0), Verdict::InForce);
        // As virtio on kernel 6.1 was seen: 20 of 64, which is chance.
        let mut verifier = RssVerifier::default();
        assert_eq!(verifier.observe(&four_queues(), 20, 44), Verdict::NotInForce);
        // A stray now and then changes nothing.
        let mut verifier = RssVerifier::default();
        assert_eq!(verifier.observe(&four_queues(), 1000, 10), Verdict::InForce);
    }

    #[test]
    fn a_change_is_noticed_after_any_history() {
        let mut verifier = RssVerifier::default();
        verifier.observe(&four_queues(), 1_000_000, 0);
        assert_eq!(verifier.observe(&four_queues(), 1_000_008, 24), Verdict::NotInForce);
        verifier.table_changed(1_000_008, 24);
        assert_eq!(verifier.verdict(), Verdict::Undecided);
        assert_eq!(verifier.observe(&four_queues(), 1_000_030, 24), Verdict::InForce);
    }

    #[test]
    fn rss_verdict_undecided_with_single_queue() {
        let table = IndirectionTable::balanced(1, 128, 1).unwrap();
        assert_eq!(RssVerifier::default().observe(&table, 100, 0), Verdict::Undecided);
    }
}
