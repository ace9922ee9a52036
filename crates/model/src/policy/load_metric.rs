//! Metrics by which policies compare servers.

use super::{PoolServer, ServerPool};

/// Metric by which policies compare the loads of servers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LoadMetric {
    /// Number of open connections.
    Connections,
    /// Number of packets per second that load balancers send to the server.
    Packets,
    /// Number of frame bytes per second that load balancers send to the server.
    Bytes,
    /// Mean load of the server's cores.
    Cpu,
}

impl LoadMetric {
    /// Returns the telemetry about servers that load balancers must collect for this metric.
    pub fn telemetry_level(self) -> TelemetryLevel {
        match self {
            LoadMetric::Connections => TelemetryLevel::Connections,
            LoadMetric::Packets | LoadMetric::Bytes => TelemetryLevel::All,
            LoadMetric::Cpu => TelemetryLevel::Nothing,
        }
    }

    /// Returns the metric's value for each eligible server, by id. A server without data has the mean of the other
    /// servers.
    pub fn server_loads(self, pool: &ServerPool) -> Vec<f64> {
        let neutral_load = pool.neutral_load();
        let known_metric_value = |server: &PoolServer| match self {
            LoadMetric::Connections => Some(f64::from(server.open_connection_count)),
            LoadMetric::Packets => server.traffic.map(|traffic| traffic.packets_per_second),
            LoadMetric::Bytes => server.traffic.map(|traffic| traffic.bytes_per_second),
            LoadMetric::Cpu => Some(server.mean_load(neutral_load)),
        };
        let known_metric_values: Vec<f64> = pool.eligible_servers().filter_map(known_metric_value).collect();
        let mean_metric_value = crate::statistics::mean(&known_metric_values).unwrap_or(0.0);
        pool.eligible_servers().map(|server| known_metric_value(server).unwrap_or(mean_metric_value)).collect()
    }

    /// Returns the share relative to which each eligible server's value is compared. A server with twice the share may
    /// have twice the value. Capacity does not count for core loads, because they are relative to it already.
    pub fn fair_metric_shares(self, pool: &ServerPool) -> Vec<f64> {
        let weights = pool.eligible_servers().map(|server| f64::from(server.weight.get()));
        match self {
            LoadMetric::Cpu => weights.collect(),
            _ => weights.zip(pool.server_capacities()).map(|(weight, capacity)| weight * capacity).collect(),
        }
    }
}

/// Amount of telemetry about each server that a policy needs from load balancers.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord)]
pub enum TelemetryLevel {
    /// No telemetry, because the policy uses only reports of agents, or no loads at all.
    #[default]
    Nothing,
    /// Numbers of connections that were opened and closed.
    Connections,
    /// Numbers of connections, packets and bytes. Counting packets and bytes costs the data plane a little.
    All,
}

impl TelemetryLevel {
    /// All levels in ascending order. Each level includes the previous one.
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
