//! Metrics by which policies compare servers.

use super::{Pool, PoolServer};

/// Metric by which servers are compared.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LoadMetric {
    /// Number of open connections.
    Connections,
    /// Packets per second that load balancers send to the server.
    Packets,
    /// Frame bytes per second that load balancers send to the server.
    Bytes,
    /// Mean load of the cores of the server.
    Cpu,
}

impl LoadMetric {
    /// Returns the telemetry about servers that load balancers must collect for the metric.
    pub fn telemetry_level(self) -> TelemetryLevel {
        match self {
            LoadMetric::Connections => TelemetryLevel::Connections,
            LoadMetric::Packets | LoadMetric::Bytes => TelemetryLevel::All,
            LoadMetric::Cpu => TelemetryLevel::Nothing,
        }
    }

    /// Returns the metric of each eligible server, by id. A server without data counts as the mean of the others.
    pub fn server_loads(self, pool: &Pool) -> Vec<f64> {
        let neutral_load = pool.neutral_load();
        let metric_of = |server: &PoolServer| match self {
            LoadMetric::Connections => Some(f64::from(server.open_connections)),
            LoadMetric::Packets => server.traffic.map(|traffic| traffic.packets_per_second),
            LoadMetric::Bytes => server.traffic.map(|traffic| traffic.bytes_per_second),
            LoadMetric::Cpu => Some(server.mean_load(neutral_load)),
        };
        let known_values: Vec<f64> = pool.eligible_servers().filter_map(metric_of).collect();
        let mean_value = crate::statistics::mean(&known_values).unwrap_or(0.0);
        pool.eligible_servers().map(|server| metric_of(server).unwrap_or(mean_value)).collect()
    }

    /// Returns the share by which each eligible server is compared. A server with twice the share may have twice as
    /// much. Capacity does not count for core loads, which are relative to it already.
    pub fn comparison_shares(self, pool: &Pool) -> Vec<f64> {
        let weights = pool.eligible_servers().map(|server| f64::from(server.weight.get()));
        match self {
            LoadMetric::Cpu => weights.collect(),
            _ => weights.zip(pool.capacities()).map(|(weight, capacity)| weight * capacity).collect(),
        }
    }
}

/// Telemetry that a policy needs from load balancers about each server.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord)]
pub enum TelemetryLevel {
    /// No telemetry, because the policy uses only reports of agents, or no loads at all.
    #[default]
    Nothing,
    /// Numbers of connections opened and closed.
    Connections,
    /// Also packets and bytes, whose counting costs the data plane a little.
    All,
}

impl TelemetryLevel {
    /// All levels in ascending order, where each includes the previous one.
    pub const ALL: [TelemetryLevel; 3] = [TelemetryLevel::Nothing, TelemetryLevel::Connections, TelemetryLevel::All];

    /// Returns the name of this level in messages.
    pub fn name(self) -> &'static str {
        match self {
            TelemetryLevel::Nothing => "nothing",
            TelemetryLevel::Connections => "connections",
            TelemetryLevel::All => "all",
        }
    }
}
