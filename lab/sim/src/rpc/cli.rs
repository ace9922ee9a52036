//! Arguments and output of `coreward-lab sim rpc` and `coreward-lab sim capacity`.

use std::num::NonZeroU32;
use std::time::Instant;

use serde::Serialize;

use super::{
    ClassLatency, CoreSelectionPolicy, LatencySummary, PeakLoadEstimate, PeakLoadSearchConfig, RpcSimulationConfig,
    RpcSimulationOutcome, ServiceTimeDistribution, SloRequestSelection, SloTimeUnit, WindowLatency, find_peak_load,
    run,
};
use crate::output::{PrintableResult, SimulationResultFormat};

/// Common arguments of `rpc` and `capacity`.
#[derive(Debug, clap::Args)]
struct SimulatedServerArgs {
    /// Policy that assigns requests to cores: cfcfs, random, rr, jsq, jlq, jbsq:N, jbsrq[:OPTION=VALUE,...], rss,
    /// rss-rebalanced:T, work-stealing[:COST], ps, dfcfs:X,Y
    #[arg(long)]
    policy: CoreSelectionPolicy,
    /// Number of cores of the server
    #[arg(long, default_value_t = 16)]
    cores: u16,
    /// Service times: fixed, exp, lognormal:SIGMA, bimodal:FRACTION:FACTOR, trimodal:FRACTION:FACTOR:FRACTION:FACTOR;
    /// the unit of time is the service time of the shortest class (fixed, exp, lognormal: the mean)
    #[arg(long, default_value = "exp")]
    service: ServiceTimeDistribution,
    /// Latency between NIC and cores, one way, in units of service time
    #[arg(long, default_value_t = 0.0)]
    latency: f64,
    /// Number of requests to simulate; the first tenth is warm-up
    #[arg(long, default_value_t = 1_000_000)]
    requests: u64,
    /// Number of connections that carry the requests [default: every request has its own]
    #[arg(long)]
    connections: Option<NonZeroU32>,
    /// Skew of the connections: the i-th most frequent has a share proportional to 1 / i^SKEW
    #[arg(long, default_value_t = 0.0, requires = "connections")]
    skew: f64,
    /// Format of the output
    #[arg(long, value_enum, default_value_t = SimulationResultFormat::Text)]
    format: SimulationResultFormat,
}

impl SimulatedServerArgs {
    fn to_config(&self) -> RpcSimulationConfig {
        RpcSimulationConfig {
            policy: self.policy.clone(),
            cores: self.cores,
            service_times: self.service.clone(),
            interface_latency: self.latency,
            request_count: self.requests,
            connection_count: self.connections,
            connection_skew: self.skew,
            ..RpcSimulationConfig::default()
        }
    }
}

/// Arguments of `coreward-lab sim rpc`.
#[derive(Debug, clap::Args)]
pub struct RpcSimulationArgs {
    #[command(flatten)]
    server: SimulatedServerArgs,
    /// Offered load as a fraction of what the cores could serve
    #[arg(long, default_value_t = 0.8)]
    load: f64,
    /// Seed: equal seeds give equal results
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// Maximum number of requests inside the server; further requests are dropped [default: unlimited]
    #[arg(long)]
    queue: Option<u64>,
    /// Also print latencies over time, in windows of this length (units of service time)
    #[arg(long)]
    window: Option<f64>,
}

/// Arguments of `coreward-lab sim capacity`.
#[derive(Debug, clap::Args)]
pub struct PeakLoadArgs {
    #[command(flatten)]
    server: SimulatedServerArgs,
    /// Limit of the 99th percentile of latency (SLO), as a multiple of the service time
    #[arg(long, default_value_t = 30.0)]
    slo: f64,
    /// Requests whose 99th percentile of latency is limited
    #[arg(long, value_enum, default_value_t)]
    measure: SloRequestSelection,
    /// Service time of which the SLO is a multiple
    #[arg(long, value_enum, default_value_t)]
    slo_unit: SloTimeUnit,
    /// Number of seeds; each seed from 1 to SEEDS has its own search
    #[arg(long, default_value_t = 5)]
    seeds: u64,
    /// Number of bisection steps: the load is exact to 2^-STEPS
    #[arg(long, default_value_t = 10)]
    steps: u32,
}

#[derive(Debug, Serialize)]
struct RpcSimulationResult {
    all: LatencySummary,
    classes: Vec<ClassLatency>,
    requests: u64,
    dropped_pct: f64,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    windows: Vec<WindowLatency>,
    events_per_second: f64,
}

impl RpcSimulationResult {
    /// Returns the printable result of a simulation that took `seconds`.
    fn new(outcome: RpcSimulationOutcome, seconds: f64) -> Self {
        let RpcSimulationOutcome {
            overall_latency: all,
            class_latencies: classes,
            request_count: requests,
            dropped_request_pct: dropped_pct,
            window_latencies: windows,
        } = outcome;
        Self { all, classes, requests, dropped_pct, windows, events_per_second: requests as f64 / seconds }
    }
}

impl RpcSimulationArgs {
    /// Runs the simulation and returns its result as text.
    pub(crate) fn run(self) -> anyhow::Result<String> {
        let config = RpcSimulationConfig {
            offered_load: self.load,
            seed: self.seed,
            max_requests_in_server: self.queue,
            latency_window_length: self.window,
            ..self.server.to_config()
        };
        let start = Instant::now();
        let outcome = run(&config)?;
        let result = RpcSimulationResult::new(outcome, start.elapsed().as_secs_f64());
        Ok(result.render(self.server.format))
    }
}

impl PeakLoadArgs {
    /// Searches for the peak load and returns the estimate as text.
    pub(crate) fn run(self) -> anyhow::Result<String> {
        let estimate = find_peak_load(&PeakLoadSearchConfig {
            simulation_config: self.server.to_config(),
            latency_bound_in_slo_units: self.slo,
            seeds: 1..=self.seeds,
            bisection_steps: self.steps,
            slo_metric: self.measure,
            slo_unit: self.slo_unit,
        })?;
        Ok(estimate.render(self.server.format))
    }
}

impl PrintableResult for RpcSimulationResult {
    fn column_titles(&self) -> Vec<&'static str> {
        vec!["requests", "service", "mean", "p50", "p90", "p99", "p99.9"]
    }

    fn table_rows(&self) -> Vec<Vec<String>> {
        let format_latency_row = |row_label: String, service: String, quantiles: &LatencySummary| {
            let LatencySummary { mean, p50, p90, p99, p999 } = *quantiles;
            let latencies = [mean, p50, p90, p99, p999].map(|latency| format!("{latency:.4}"));
            [row_label, service].into_iter().chain(latencies).collect()
        };
        let class_rows = self.classes.iter().map(|class| {
            format_latency_row(format!("of {}", class.service), class.service.to_string(), &class.quantiles)
        });
        let window_rows = self
            .windows
            .iter()
            .map(|window| format_latency_row(format!("from {}", window.from), String::new(), &window.quantiles));
        std::iter::once(format_latency_row("all".to_owned(), String::new(), &self.all))
            .chain(class_rows)
            .chain(window_rows)
            .collect()
    }

    fn table_remarks(&self) -> Vec<String> {
        let mut remarks = vec![
            "latency from the NIC in to the NIC out, in service times of the shortest class".to_owned(),
            format!("{} requests, {:.1} million per second", self.requests, self.events_per_second / 1e6),
        ];
        if self.dropped_pct > 0.0 {
            remarks.push(format!("{:.2} % dropped: the server was full", self.dropped_pct));
        }
        remarks
    }
}

impl PrintableResult for PeakLoadEstimate {
    fn column_titles(&self) -> Vec<&'static str> {
        vec!["peak_load", "low", "high"]
    }

    fn table_rows(&self) -> Vec<Vec<String>> {
        vec![[self.peak_load, self.low, self.high].map(|load| format!("{load:.4}")).to_vec()]
    }

    fn table_remarks(&self) -> Vec<String> {
        vec!["load as a fraction of what the cores could serve; low to high: 95 % confidence".to_owned()]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn json_output_has_the_documented_fields() {
        let outcome = run(&RpcSimulationConfig {
            service_times: "bimodal:0.1:5".parse().unwrap(),
            latency_window_length: Some(1_000.0),
            request_count: 50_000,
            ..RpcSimulationConfig::default()
        })
        .unwrap();
        let result = RpcSimulationResult::new(outcome, 50_000.0);
        let json: serde_json::Value = serde_json::from_str(&result.render(SimulationResultFormat::Json)).unwrap();
        for quantiles in [&json["all"], &json["classes"][0], &json["classes"][1], &json["windows"][0]] {
            for name in ["mean", "p50", "p90", "p99", "p999"] {
                assert!(quantiles[name].as_f64().unwrap() > 0.0, "{name} in {quantiles}");
            }
        }
        assert_eq!(json["classes"][1]["service"], 5.0);
        assert_eq!(json["requests"], 50_000);
        assert_eq!(json["events_per_second"], 1.0);
        let rows = result.table_rows();
        assert!(rows.len() > 4 && rows.iter().all(|row| row.len() == result.column_titles().len()));
        let peak = PeakLoadEstimate { peak_load: 0.5, low: 0.4, high: 0.6 };
        let json: serde_json::Value = serde_json::from_str(&peak.render(SimulationResultFormat::Json)).unwrap();
        assert_eq!(json, serde_json::json!({"peak_load": 0.5, "low": 0.4, "high": 0.6}));
    }
}
