//! Results of a trace simulation.

use serde::Serialize;

use crate::output::PrintableResult;
use crate::seed_summary::SeedSummary;
use crate::trace::PacketSkipCounts;

/// Results of one policy with one seed, as means over all complete windows except the first.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct LbSeedResult {
    /// Variance, over all servers, of a server's received packets divided by the mean (%).
    pub server_variance_pct: f64,
    /// Variance, over all cores, of a core's served packets divided by the mean (%).
    pub core_variance_pct: f64,
    /// Number of packets that the busiest core served, divided by the mean of all cores.
    pub max_over_mean: f64,
    /// Percentage of packets that were dropped because they found a full queue.
    pub dropped_pct: f64,
    /// Number of packets that all cores together served per second.
    pub throughput_pps: f64,
    /// Throughput of all cores together (Gbit/s), or 0 if the trace has no packet sizes.
    pub throughput_gbps: f64,
}

/// Results of one policy, in which each field of [`LbSeedResult`] is summarized over all seeds.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct PlacementPolicyOutcome {
    pub policy: String,
    pub server_variance_pct: SeedSummary,
    pub core_variance_pct: SeedSummary,
    pub max_over_mean: SeedSummary,
    pub dropped_pct: SeedSummary,
    pub throughput_pps: SeedSummary,
    pub throughput_gbps: SeedSummary,
    /// Results of each seed, in the order of the configuration.
    pub seeds: Vec<LbSeedResult>,
}

impl PlacementPolicyOutcome {
    /// Summarizes the results of all seeds, or returns `None` if there are none.
    pub fn new(policy: &str, seeds: Vec<LbSeedResult>) -> Option<Self> {
        let summarize = |to_value: fn(&LbSeedResult) -> f64| {
            SeedSummary::from_values(&seeds.iter().map(to_value).collect::<Vec<_>>())
        };
        Some(Self {
            policy: policy.to_owned(),
            server_variance_pct: summarize(|seed| seed.server_variance_pct)?,
            core_variance_pct: summarize(|seed| seed.core_variance_pct)?,
            max_over_mean: summarize(|seed| seed.max_over_mean)?,
            dropped_pct: summarize(|seed| seed.dropped_pct)?,
            throughput_pps: summarize(|seed| seed.throughput_pps)?,
            throughput_gbps: summarize(|seed| seed.throughput_gbps)?,
            seeds,
        })
    }
}

#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct LbSimulationOutcome {
    /// Results of the policies, in the order of the configuration.
    pub policies: Vec<PlacementPolicyOutcome>,
    /// Number of simulated packets. It is the mean over the seeds if each seed has its own traffic.
    pub packets: u64,
    /// Number of flows that began, averaged over the seeds if each has its own traffic.
    pub flows: u64,
    /// Duration of the trace (s), averaged over the seeds if each has its own traffic.
    pub seconds: f64,
    /// Number of skipped packets for each reason, averaged over the seeds if each has its own traffic.
    pub skipped: PacketSkipCounts,
    /// Number of packets whose time stamp was earlier than that of the packet before. Both packets count as
    /// simultaneous.
    pub reordered: u64,
}

impl PrintableResult for LbSimulationOutcome {
    fn column_titles(&self) -> Vec<&'static str> {
        vec![
            "policy",
            "server variance %",
            "low",
            "high",
            "core variance %",
            "low",
            "high",
            "max/mean",
            "dropped %",
            "packets/s",
            "Gbit/s",
        ]
    }

    fn table_rows(&self) -> Vec<Vec<String>> {
        let format_policy_row = |policy: &PlacementPolicyOutcome| {
            let (server, core) = (policy.server_variance_pct, policy.core_variance_pct);
            vec![
                policy.policy.clone(),
                format!("{:.4}", server.median),
                format!("{:.4}", server.low),
                format!("{:.4}", server.high),
                format!("{:.4}", core.median),
                format!("{:.4}", core.low),
                format!("{:.4}", core.high),
                format!("{:.4}", policy.max_over_mean.median),
                format!("{:.4}", policy.dropped_pct.median),
                format!("{:.0}", policy.throughput_pps.median),
                format!("{:.4}", policy.throughput_gbps.median),
            ]
        };
        self.policies.iter().map(format_policy_row).collect()
    }

    fn table_remarks(&self) -> Vec<String> {
        let seed_count = self.policies.first().map_or(0, |policy| policy.seeds.len());
        let mut remarks = vec![format!(
            "{} packets of {} flows in {:.2} s; medians over {seed_count} seed{}, low and high: the extreme seeds",
            self.packets,
            self.flows,
            self.seconds,
            if seed_count == 1 { "" } else { "s" }
        )];
        remarks.extend(self.skipped.iter().map(|(reason, count)| format!("left out: {count} packets ({reason})")));
        if self.reordered > 0 {
            remarks.push(format!("{} packets came a little out of order", self.reordered));
        }
        remarks
    }
}
