//! Results of a chaos test run, as text and JSON.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::atomic::Ordering;

use serde::Serialize;

use super::IMPERSONATED_SERVER_NUMBER;
use super::byzantine_agent::FalseReportCounters;
use super::byzantine_share::ByzantineConnectionShare;
use super::config_mutator::ConfigWriteCounts;
use super::invariants::{InvariantObservations, ProcessResourceUsage};
use super::traffic::ClientTrafficCounts;

/// Results of one run of the chaos test.
#[derive(Debug, Clone, Serialize)]
pub struct ChaosOutcome {
    /// Duration of the run (s).
    pub seconds: f64,
    pub seed: u64,
    pub fault_counts: BTreeMap<String, u64>,
    /// Numbers of false reports that impostors sent, and of connections that they opened.
    pub false_reports: FalseReportCounts,
    /// Share of new connections that a server got while an impostor reported idle cores, or `None` without impostors.
    pub byzantine_share: Option<ByzantineConnectionShare>,
    /// Recovery of the fleet after each round of faults, with its duration.
    pub recoveries: Vec<FleetRecovery>,
    pub write_counts: ConfigWriteCounts,
    pub observations: InvariantObservations,
    /// Numbers of good and broken client connections.
    pub traffic: ClientTrafficCounts,
    /// Resource usage of each daemon at the start of the run.
    pub usage_before: BTreeMap<String, ProcessResourceUsage>,
    /// Resource usage of each daemon at the end of the run.
    pub usage_after: BTreeMap<String, ProcessResourceUsage>,
    pub violations: Vec<String>,
}

/// Recovery of the fleet after a round of faults. It starts when the round's last fault ends, and ends when the fleet
/// has converged.
#[derive(Debug, Clone, Serialize)]
pub struct FleetRecovery {
    /// End of the round's last fault (seconds since the start of the run).
    pub start_s: f64,
    /// Names of the kinds of fault that were injected in the round.
    pub faults: Vec<String>,
    pub duration_s: f64,
    /// Description of the condition that the fleet was last to fulfil, or `None` if it had converged at once.
    pub last_condition: Option<String>,
}

/// Numbers of reports that the impostors sent, and of connections that they opened.
#[derive(Debug, Clone, Copy, Serialize)]
pub struct FalseReportCounts {
    pub reports: u64,
    pub connections: u64,
}

impl From<&FalseReportCounters> for FalseReportCounts {
    fn from(false_reports: &FalseReportCounters) -> Self {
        Self {
            reports: false_reports.sent_report_count.load(Ordering::Relaxed),
            connections: false_reports.flood_connection_count.load(Ordering::Relaxed),
        }
    }
}

impl ChaosOutcome {
    pub fn has_passed(&self) -> bool {
        self.traffic.total_broken_count() == 0 && self.violations.is_empty()
    }
}

/// Methods that write the parts of the outcome's text.
impl ChaosOutcome {
    fn fmt_faults(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { seconds, seed, fault_counts: faults, false_reports, .. } = self;
        let fault_counts: Vec<String> = faults.iter().map(|(kind, count)| format!("{kind} {count}")).collect();
        writeln!(
            f,
            "\nseed {seed}, {seconds:.0} s, {} faults: {}",
            faults.values().sum::<u64>(),
            fault_counts.join(", ")
        )?;
        writeln!(f, "  impostors    {} reports, {} connections", false_reports.reports, false_reports.connections)?;
        if let Some(byzantine_share) = &self.byzantine_share {
            writeln!(f, "  idle cores   reported in s{IMPERSONATED_SERVER_NUMBER}'s name drew {byzantine_share}")?;
        }
        Ok(())
    }

    fn fmt_traffic(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (name, count) in [
            ("downloads", self.traffic.downloads),
            ("keep-alive", self.traffic.requests),
            ("short", self.traffic.short_connections),
            ("kept", self.traffic.kept_connections),
            ("streams", self.traffic.streams),
        ] {
            writeln!(f, "  {name:<12} {} good, {} broken", count.successful, count.broken)?;
        }
        Ok(())
    }

    fn fmt_config_writes(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let writes = &self.write_counts;
        writeln!(
            f,
            "  changes      {} acknowledged, {} unanswered (of which {} in force), {} invalid and {} too early \
             rejected, {} status queries",
            writes.acknowledged_changes,
            writes.unanswered_changes,
            writes.unanswered_applied_changes,
            writes.invalid_documents,
            writes.early_rotations,
            writes.status_queries
        )?;
        writeln!(f, "  drains       {} acknowledged, {} not", writes.acknowledged_drains, writes.unanswered_drains)
    }

    /// Writes the durations of the median recovery and the slowest one, if there was any recovery.
    fn fmt_recoveries(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut recoveries: Vec<&FleetRecovery> = self.recoveries.iter().collect();
        recoveries.sort_by(|a, b| a.duration_s.total_cmp(&b.duration_s));
        let Some(slowest_recovery) = recoveries.last() else { return Ok(()) };
        writeln!(
            f,
            "  whole again  after {:.1} s (median of {}), {:.1} s at most (at {:.0} s, after {})",
            recoveries[recoveries.len() / 2].duration_s,
            recoveries.len(),
            slowest_recovery.duration_s,
            slowest_recovery.start_s,
            slowest_recovery.faults.join(", ")
        )?;
        if let Some(waited_for) = &slowest_recovery.last_condition {
            writeln!(f, "               then last: {waited_for}")?;
        }
        Ok(())
    }

    fn fmt_resource_usage(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (name, initial_usage) in &self.usage_before {
            if let Some(final_usage) = self.usage_after.get(name) {
                let [memory_before, memory_after] =
                    [initial_usage, final_usage].map(|usage| usage.memory_kb as f64 / 1024.0);
                let (files_before, files_after) = (initial_usage.open_files, final_usage.open_files);
                writeln!(
                    f,
                    "  {name:<12} {memory_before:.1} MB, then {memory_after:.1}; {files_before} open files, then \
                     {files_after}"
                )?;
            }
        }
        Ok(())
    }
}

impl fmt::Display for ChaosOutcome {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { observations, traffic, violations, .. } = self;
        self.fmt_faults(f)?;
        self.fmt_traffic(f)?;
        self.fmt_config_writes(f)?;
        writeln!(f, "  health       checks found a server down {} times", observations.down_verdicts)?;
        writeln!(
            f,
            "  tables       none for {:.1} s at most (until {:.0} s)",
            observations.longest_without_table_s, observations.longest_without_table_at_s
        )?;
        self.fmt_recoveries(f)?;
        self.fmt_resource_usage(f)?;
        for failure in &traffic.failures {
            writeln!(f, "BROKEN {failure}")?;
        }
        for violation in violations {
            writeln!(f, "DID NOT HOLD: {violation}")?;
        }
        write!(f, "{}", if self.has_passed() { "all held" } else { "NOT all held" })
    }
}
