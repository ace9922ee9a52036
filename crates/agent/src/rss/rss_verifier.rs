//! Verifies that a NIC uses the RSS table that it shows, by the queues on which SYNs arrive.
//!
//! This is a sequential test (Wald, "Sequential Tests of Statistical Hypotheses", 1945) between two hypotheses. Either
//! nearly every SYN arrives on the predicted queue, or SYNs do so only by chance. The test decides when the SYNs are a
//! million times likelier under one hypothesis. Then it restarts in order to notice changes.

use coreward_model::rss::IndirectionTable;

/// Natural logarithm of the odds at which the verifier decides on a verdict.
const RSS_VERDICT_LOG_ODDS: f64 = 13.8; // ln 10^6
/// Expected fraction of SYNs on other queues than predicted, although the NIC uses the table. For example, a flow rule
/// may redirect them.
const EXPECTED_QUEUE_MISMATCH_FRACTION: f64 = 0.02;

/// Verdict on whether the NIC uses the indirection table that its driver reports.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, serde::Serialize)]
#[serde(rename_all = "snake_case")]
pub enum RssTableVerdict {
    /// Too few SYNs have arrived, or the table has only one queue.
    #[default]
    Undecided,
    InForce,
    /// SYNs arrive on queues that do not match the reported table.
    NotInForce,
}

impl std::fmt::Display for RssTableVerdict {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            RssTableVerdict::Undecided => "undecided",
            RssTableVerdict::InForce => "in force",
            RssTableVerdict::NotInForce => "shown, not in force",
        })
    }
}

#[derive(Debug, Clone, Default)]
pub struct RssTableVerifier {
    verdict: RssTableVerdict,
    /// Natural logarithm of the likelihood ratio between "the NIC does not use the table" and "the NIC uses the table".
    log_odds_against_table: f64,
    last_matched_and_mismatched_counts: Option<(u64, u64)>,
}

impl RssTableVerifier {
    /// Evaluates the total numbers of SYNs that arrived on the predicted queue and on other queues. Returns the
    /// verdict.
    pub fn observe_counts(
        &mut self,
        table: &IndirectionTable,
        matched_count: u64,
        mismatched_count: u64,
    ) -> RssTableVerdict {
        let (previous_matched_count, previous_mismatched_count) =
            self.last_matched_and_mismatched_counts.replace((matched_count, mismatched_count)).unwrap_or_default();
        let chance_probability = chance_match_probability(table);
        if chance_probability > 1.0 - EXPECTED_QUEUE_MISMATCH_FRACTION {
            return self.verdict;
        }
        let new_matches = matched_count.saturating_sub(previous_matched_count) as f64;
        let new_mismatches = mismatched_count.saturating_sub(previous_mismatched_count) as f64;
        self.log_odds_against_table += new_mismatches
            * ((1.0 - chance_probability) / EXPECTED_QUEUE_MISMATCH_FRACTION).ln()
            + new_matches * (chance_probability / (1.0 - EXPECTED_QUEUE_MISMATCH_FRACTION)).ln();
        if self.log_odds_against_table.abs() >= RSS_VERDICT_LOG_ODDS {
            self.verdict =
                if self.log_odds_against_table > 0.0 { RssTableVerdict::NotInForce } else { RssTableVerdict::InForce };
            self.log_odds_against_table = 0.0;
        }
        self.verdict
    }

    /// Restarts the verification after the table has changed. The current totals are the new starting point.
    pub fn restart(&mut self, matched_count: u64, mismatched_count: u64) {
        *self = Self { last_matched_and_mismatched_counts: Some((matched_count, mismatched_count)), ..Self::default() };
    }

    pub fn verdict(&self) -> RssTableVerdict {
        self.verdict
    }
}

/// Returns the probability that a SYN arrives on the predicted queue by chance if the NIC uses another table. In that
/// table, each queue has as many entries as in `table`.
fn chance_match_probability(table: &IndirectionTable) -> f64 {
    let mut entry_counts_by_queue = std::collections::BTreeMap::new();
    table.queue_by_entry().iter().for_each(|queue| *entry_counts_by_queue.entry(queue).or_insert(0u32) += 1);
    let entry_count = table.entry_count() as f64;
    entry_counts_by_queue.values().map(|count| (f64::from(*count) / entry_count).powi(2)).sum()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn four_queue_table() -> IndirectionTable {
        IndirectionTable::draw_balanced_entries(1, 128, 4).unwrap()
    }

    #[test]
    fn rss_table_verdict_requires_dozens_of_syns() {
        let mut verifier = RssTableVerifier::default();
        assert_eq!(verifier.observe_counts(&four_queue_table(), 9, 0), RssTableVerdict::Undecided);
        assert_eq!(verifier.observe_counts(&four_queue_table(), 20, 0), RssTableVerdict::InForce);
        // On kernel 6.1 with virtio, 20 of 64 SYNs matched, which is about what chance gives for four queues.
        let mut verifier = RssTableVerifier::default();
        assert_eq!(verifier.observe_counts(&four_queue_table(), 20, 44), RssTableVerdict::NotInForce);
        // A few stray SYNs do not change the verdict.
        let mut verifier = RssTableVerifier::default();
        assert_eq!(verifier.observe_counts(&four_queue_table(), 1000, 10), RssTableVerdict::InForce);
    }

    #[test]
    fn rss_table_change_is_detected_after_many_matches() {
        let mut verifier = RssTableVerifier::default();
        verifier.observe_counts(&four_queue_table(), 1_000_000, 0);
        assert_eq!(verifier.observe_counts(&four_queue_table(), 1_000_008, 24), RssTableVerdict::NotInForce);
        verifier.restart(1_000_008, 24);
        assert_eq!(verifier.verdict(), RssTableVerdict::Undecided);
        assert_eq!(verifier.observe_counts(&four_queue_table(), 1_000_030, 24), RssTableVerdict::InForce);
    }

    #[test]
    fn rss_table_verdict_is_undecided_with_one_queue() {
        let table = IndirectionTable::draw_balanced_entries(1, 128, 1).unwrap();
        assert_eq!(RssTableVerifier::default().observe_counts(&table, 100, 0), RssTableVerdict::Undecided);
    }
}
