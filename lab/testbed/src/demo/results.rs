//! Results of the demo, as JSON and as a table.

use std::path::Path;

use comfy_table::{CellAlignment, Table, presets};
use serde::Serialize;

use super::load_variances::SeedRunMeasures;
use super::seed_summary::MedianAndRange;
use super::simulated_variances::{SIMULATION_DRAW_COUNT, SimulatedLoadVariances};
use super::timeline::{POOL_SETTLE_SECONDS, PoolChangeTimeline};

/// Maximum busy share of the machine's CPU time (%) at which measured results are reliable.
const MAX_MACHINE_BUSY_PCT: f64 = 50.0;

#[derive(Debug, Clone)]
pub struct PolicyRuns {
    pub policy: &'static str,
    pub seed_measures: Vec<SeedRunMeasures>,
    /// Number of forwarding tables that the controller made for this policy during the runs of all seeds.
    pub created_table_count: u64,
}

impl PolicyRuns {
    pub fn new(policy: &'static str) -> Self {
        Self { policy, seed_measures: Vec::new(), created_table_count: 0 }
    }

    fn summarize_seeds(&self, value: impl Fn(&SeedRunMeasures) -> f64) -> MedianAndRange {
        MedianAndRange::from_values(&self.seed_measures.iter().map(value).collect::<Vec<_>>())
    }

    pub fn core_load_variance_pct(&self) -> MedianAndRange {
        self.summarize_seeds(|seed| seed.core_load_variance_pct)
    }

    pub fn server_load_variance_pct(&self) -> MedianAndRange {
        self.summarize_seeds(|seed| seed.server_load_variance_pct)
    }

    /// Returns the median latency of requests (ms), summarized over the seeds.
    pub fn latency_p50_ms(&self) -> MedianAndRange {
        self.summarize_seeds(|seed| seed.load_report.latency_us.p50 as f64 / 1_000.0)
    }

    /// Returns the 99th percentile of the request latency (ms), summarized over the seeds.
    pub fn latency_p99_ms(&self) -> MedianAndRange {
        self.summarize_seeds(|seed| seed.load_report.latency_us.p99 as f64 / 1_000.0)
    }

    fn opened_connection_count(&self) -> u64 {
        self.seed_measures.iter().map(|seed| seed.load_report.opened).sum()
    }

    fn broken_connection_count(&self) -> u64 {
        self.seed_measures.iter().map(|seed| seed.load_report.broken.total_count()).sum()
    }

    /// Describes the numbers of broken connections by kind. Returns an empty string if none broke.
    fn describe_broken_connections(&self) -> String {
        let sum_over_seeds = |select_count: fn(&crate::connection_errors::BrokenConnectionCounts) -> u64| {
            self.seed_measures.iter().map(|seed| select_count(&seed.load_report.broken)).sum()
        };
        let counts_and_kinds: [(u64, &str); 6] = [
            (sum_over_seeds(|b| b.refused), "refused"),
            (sum_over_seeds(|b| b.reset), "reset"),
            (sum_over_seeds(|b| b.timed_out), "timed out"),
            (sum_over_seeds(|b| b.closed_early), "closed early"),
            (sum_over_seeds(|b| b.wrong_answer), "wrong answer"),
            (sum_over_seeds(|b| b.other_errors), "other"),
        ];
        let occurred_kinds: Vec<String> = counts_and_kinds
            .iter()
            .filter(|(count, _)| *count > 0)
            .map(|(count, kind)| format!("{count} {kind}"))
            .collect();
        occurred_kinds.join(", ")
    }
}

#[derive(Debug, Clone)]
pub struct DemoResults {
    /// Results of each policy, in the order in which the model lists the policies.
    pub policy_runs: Vec<PolicyRuns>,
    /// Simulated variances of the same policies, in the order of `policy_runs`.
    pub simulated_variances: Vec<SimulatedLoadVariances>,
    /// Per-core variance of the best possible placement (%), as the median over the seeds.
    pub noise_floor_pct: f64,
    /// Duration of each seed's run (s).
    pub run_seconds: u64,
    pub server_count: u16,
    pub cores_per_server: u16,
    /// Times at which the pool changes during each seed's run.
    pub timeline: PoolChangeTimeline,
    /// Share of the machine's CPU time that was busy during the runs (%).
    pub machine_busy_pct: f64,
}

#[derive(Serialize)]
struct JsonDemoResults<'a> {
    policies: Vec<JsonPolicyResults<'a>>,
    noise_floor_pct: f64,
    seconds: u64,
    servers: u16,
    cores: u16,
}

#[derive(Serialize)]
struct JsonPolicyResults<'a> {
    policy: &'a str,
    server_variance_pct: f64,
    core_variance_pct: f64,
    latency_ms: JsonRequestLatency,
    connections: JsonConnectionCounts,
    table_generations: u64,
    simulated: JsonSimulatedVariances,
}

#[derive(Serialize)]
struct JsonSimulatedVariances {
    server_variance_pct: JsonVarianceComparison,
    core_variance_pct: JsonVarianceComparison,
}

#[derive(Serialize)]
struct JsonVarianceComparison {
    #[serde(flatten)]
    simulated: MedianAndRange,
    live_is_within: bool,
}

#[derive(Serialize)]
struct JsonRequestLatency {
    p50: f64,
    p99: f64,
}

#[derive(Serialize)]
struct JsonConnectionCounts {
    opened: u64,
    broken: u64,
}

impl DemoResults {
    /// Returns the results as JSON, with medians over the seeds and with total numbers of connections and tables. Fails
    /// when a value is not a number.
    pub fn to_json(&self) -> anyhow::Result<String> {
        let compare_variances = |live_summary: MedianAndRange, simulated: MedianAndRange| JsonVarianceComparison {
            simulated,
            live_is_within: simulated.range_contains(live_summary.median),
        };
        let to_json_policy =
            |(runs, simulated_variances): (&'_ PolicyRuns, &SimulatedLoadVariances)| JsonPolicyResults {
                simulated: JsonSimulatedVariances {
                    server_variance_pct: compare_variances(
                        runs.server_load_variance_pct(),
                        simulated_variances.server_load_variance_pct,
                    ),
                    core_variance_pct: compare_variances(
                        runs.core_load_variance_pct(),
                        simulated_variances.core_load_variance_pct,
                    ),
                },
                policy: runs.policy,
                server_variance_pct: runs.server_load_variance_pct().median,
                core_variance_pct: runs.core_load_variance_pct().median,
                latency_ms: JsonRequestLatency { p50: runs.latency_p50_ms().median, p99: runs.latency_p99_ms().median },
                connections: JsonConnectionCounts {
                    opened: runs.opened_connection_count(),
                    broken: runs.broken_connection_count(),
                },
                table_generations: runs.created_table_count,
            };
        let Self { noise_floor_pct, run_seconds: seconds, server_count: servers, cores_per_server: cores, .. } = *self;
        let policies_json = self.policy_runs.iter().zip(&self.simulated_variances).map(to_json_policy).collect();
        Ok(serde_json::to_string_pretty(&JsonDemoResults {
            policies: policies_json,
            noise_floor_pct,
            seconds,
            servers,
            cores,
        })?)
    }

    /// Returns the results as text tables with explanations. The text shows the path of the picture in
    /// `output_directory`.
    pub fn to_text(&self, output_directory: &Path) -> String {
        let mut lines = vec![self.build_live_results_table().to_string(), String::new()];
        lines.extend(self.method_notes());
        for runs in self.policy_runs.iter().filter(|runs| runs.broken_connection_count() > 0) {
            lines.push(format!("Broken under {}: {}.", runs.policy, runs.describe_broken_connections()));
        }
        lines.extend(["".to_owned(), self.build_comparison_table().to_string()]);
        lines.push(format!(
            "Live against simulated: the same logs under the same policies in the simulator; medians over the seeds, \
             in\n\
             brackets their range over {SIMULATION_DRAW_COUNT} draws of server ids, RSS key, the moments of agents' \
             reports and whose turn is\n\
             first. A live run is one such draw: if both are the same, one of {} live medians lies outside.",
            SIMULATION_DRAW_COUNT.div_ceil(2)
        ));
        lines.extend(self.measurement_note());
        lines.push(format!(
            "Picture: {}; arrival logs and JSON in the same directory.",
            output_directory.join("demo.svg").display()
        ));
        lines.join("\n")
    }

    /// Returns explanations of how the numbers in the live table were obtained.
    fn method_notes(&self) -> [String; 4] {
        let seed_numbers: Vec<String> =
            self.policy_runs[0].seed_measures.iter().map(|seed| seed.seed.to_string()).collect();
        let [(join_second, _), (drain_second, _)] = self.timeline.pool_changes();
        [
            format!(
                "Medians over the seeds {} (lowest-highest); {} servers of {} cores, {} s each.",
                seed_numbers.join(", "),
                self.server_count,
                self.cores_per_server,
                self.run_seconds
            ),
            format!(
                "Noise floor of the per-core variance: {:.3} %: what is left when each connection goes to the core \
                 where all\n\
                 that it will ever send fits best. Requests come in pieces.",
                self.noise_floor_pct
            ),
            format!(
                "Variance %: population variance of work served / mean, in windows of 1 s. In each run a server joins \
                 after\n{join_second} s and another drains after {drain_second} s; {POOL_SETTLE_SECONDS} s after start \
                 and changes are left out."
            ),
            "Emulated: RSS (virtual Ethernet has none) and cores (paced workers).\n\
             Real: packets, TCP, load balancer, agents, controller."
                .to_owned(),
        ]
    }

    fn measurement_note(&self) -> Option<String> {
        let max_lateness_p99_us = self
            .policy_runs
            .iter()
            .flat_map(|runs| &runs.seed_measures)
            .map(|seed| seed.load_report.lateness_us.p99)
            .max()?;
        let machine_state = format!(
            "Profile {}. The machine's CPUs were {:.0} % busy; requests were sent {:.1} ms late at worst (p99)",
            env!("COREWARD_PROFILE"),
            self.machine_busy_pct,
            max_lateness_p99_us as f64 / 1_000.0
        );
        Some(if self.machine_busy_pct > MAX_MACHINE_BUSY_PCT {
            format!(
                "WARNING: {machine_state}.\nAbove {MAX_MACHINE_BUSY_PCT:.0} % latencies are the machine's more than \
                 the policy's."
            )
        } else {
            format!("{machine_state}.")
        })
    }

    fn build_comparison_table(&self) -> Table {
        let mut table = Table::new();
        table.load_style(presets::UTF8_FULL_CONDENSED);
        table.set_header(["policy", "per-core variance %", "simulated", "", "server variance %", "simulated", ""]);
        let build_comparison_cells = |live_summary: MedianAndRange, simulated_summary: MedianAndRange| {
            let comparison_text = if simulated_summary.range_contains(live_summary.median) {
                "within the noise"
            } else {
                "NOT within the noise"
            };
            [format!("{:.2}", live_summary.median), simulated_summary.format_table_cell(2), comparison_text.to_owned()]
        };
        for (runs, simulated_variances) in self.policy_runs.iter().zip(&self.simulated_variances) {
            let core_cells =
                build_comparison_cells(runs.core_load_variance_pct(), simulated_variances.core_load_variance_pct);
            let server_cells =
                build_comparison_cells(runs.server_load_variance_pct(), simulated_variances.server_load_variance_pct);
            table.add_row([runs.policy.to_owned()].into_iter().chain(core_cells).chain(server_cells));
        }
        table
    }

    fn build_live_results_table(&self) -> Table {
        let mut table = Table::new();
        table.load_style(presets::UTF8_FULL_CONDENSED);
        table.set_header([
            "policy",
            "per-core variance %",
            "server variance %",
            "p50 ms",
            "p99 ms",
            "connections",
            "broken",
            "tables",
        ]);
        for runs in &self.policy_runs {
            table.add_row([
                runs.policy.to_owned(),
                runs.core_load_variance_pct().format_table_cell(2),
                runs.server_load_variance_pct().format_table_cell(2),
                runs.latency_p50_ms().format_table_cell(1),
                runs.latency_p99_ms().format_table_cell(1),
                runs.opened_connection_count().to_string(),
                runs.broken_connection_count().to_string(),
                runs.created_table_count.to_string(),
            ]);
        }
        for column in table.column_iter_mut().skip(1) {
            column.set_cell_alignment(CellAlignment::Right);
        }
        table
    }
}

pub fn build_simulated_variance_table(policies: &[&str], simulated_variances: &[SimulatedLoadVariances]) -> Table {
    let mut table = Table::new();
    table.load_style(presets::UTF8_FULL_CONDENSED);
    table.set_header(["policy", "simulated per-core variance %", "simulated server variance %"]);
    for (policy, policy_variances) in policies.iter().zip(simulated_variances) {
        let variance_summaries = [policy_variances.core_load_variance_pct, policy_variances.server_load_variance_pct];
        table.add_row(
            [(*policy).to_owned()].into_iter().chain(variance_summaries.map(|summary| summary.format_table_cell(2))),
        );
    }
    table
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;
    use crate::connection_errors::BrokenConnectionCounts;
    use crate::demo::load_variances::LoadVarianceWindow;
    use crate::load::{DelayStatisticsUs, LoadClientReport};

    fn build_example_seed_measures(seed: u64, core_variance_pct: f64) -> SeedRunMeasures {
        SeedRunMeasures {
            seed,
            windows: (0..18)
                .map(|second| LoadVarianceWindow {
                    second_number: second,
                    server_load_variance_pct: Some(0.5),
                    core_load_variance_pct: Some(core_variance_pct),
                })
                .collect(),
            server_load_variance_pct: 0.5,
            core_load_variance_pct: core_variance_pct,
            load_report: LoadClientReport {
                opened: 100,
                completed: 99,
                broken: BrokenConnectionCounts { reset: u64::from(seed == 2), ..BrokenConnectionCounts::default() },
                latency_us: DelayStatisticsUs { p50: 5_100, p99: 20_000, max: 30_000, mean: 6_000.0 },
                ..LoadClientReport::default()
            },
        }
    }

    /// Returns invented results of two policies with three seeds each.
    pub fn build_example_results() -> DemoResults {
        let build_policy_runs = |policy, variances: [f64; 3]| PolicyRuns {
            policy,
            seed_measures: (1..)
                .zip(variances)
                .map(|(seed, variance)| build_example_seed_measures(seed, variance))
                .collect(),
            created_table_count: 540,
        };
        let build_seed_summary = |median, lowest, highest| MedianAndRange { median, lowest, highest };
        let build_simulated_variances = |core_variance_pct| SimulatedLoadVariances {
            core_load_variance_pct: core_variance_pct,
            server_load_variance_pct: build_seed_summary(0.6, 0.4, 0.7),
        };
        DemoResults {
            simulated_variances: vec![
                build_simulated_variances(build_seed_summary(9.0, 7.0, 11.0)),
                build_simulated_variances(build_seed_summary(0.5, 0.4, 0.9)),
            ],
            policy_runs: vec![
                build_policy_runs("hash", [8.0, 7.0, 12.0]),
                build_policy_runs("crossrss", [1.0, 0.5, 2.0]),
            ],
            noise_floor_pct: 0.125,
            run_seconds: 18,
            server_count: 4,
            cores_per_server: 4,
            timeline: PoolChangeTimeline::new(18),
            machine_busy_pct: 40.0,
        }
    }

    #[test]
    fn json_has_the_documented_keys_and_medians() {
        let json: serde_json::Value = serde_json::from_str(&build_example_results().to_json().unwrap()).unwrap();
        let expected_json = serde_json::json!({
            "policy": "hash", "server_variance_pct": 0.5, "core_variance_pct": 8.0,
            "latency_ms": {"p50": 5.1, "p99": 20.0}, "connections": {"opened": 300, "broken": 1},
            "table_generations": 540,
            "simulated": {
                "server_variance_pct": {"median": 0.6, "lowest": 0.4, "highest": 0.7, "live_is_within": true},
                "core_variance_pct": {"median": 9.0, "lowest": 7.0, "highest": 11.0, "live_is_within": true}
            }
        });
        assert_eq!(json["policies"][0], expected_json);
        assert_eq!(json["policies"][1]["simulated"]["core_variance_pct"]["live_is_within"], false);
        let keys: Vec<&String> = json.as_object().unwrap().keys().collect();
        assert_eq!(keys, ["cores", "noise_floor_pct", "policies", "seconds", "servers"]);
        assert_eq!(json["noise_floor_pct"], 0.125);
    }

    #[test]
    fn text_mentions_emulated_cores_and_broken_connections() {
        let text = build_example_results().to_text(Path::new("out"));
        for expected_text in [
            "8.00 (7.00-12.00)",
            "Emulated: RSS",
            "Broken under hash: 1 reset.",
            "Noise floor",
            "0.125 %",
            "9.00 (7.00-11.00)",
            "NOT within the noise",
        ] {
            assert!(text.contains(expected_text), "{expected_text:?} is missing in:\n{text}");
        }
        assert!(!text.contains("WARNING"));
        assert!(
            DemoResults { machine_busy_pct: 51.0, ..build_example_results() }
                .to_text(Path::new("out"))
                .contains("WARNING")
        );
    }
}
