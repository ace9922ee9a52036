//! Parameters of simulations in which a load balancer places connections and servers queue their requests at cores.

use super::{ParsedTextParameter, ScenarioParameterError, parameters, to_integer};
use crate::figure::axes::{FigureMetric, SweepAxis};
use crate::figure::simulation_job::{OutcomeValueQuery, SimulationJob};
use crate::path::{PathSimulationConfig, ReportPhase};
use crate::rpc::{CoreSelectionPolicy, ServiceTimeDistribution};

/// Name of simulations of the whole request path in scenario files.
pub const SIMULATION_KIND: &str = "path";

parameters! {
    /// Parameters in a scenario's `[path]` section. Their names are those of `coreward-lab sim path --help`. Times
    /// without a unit are in units of service time (see [`ServiceTimeDistribution`]).
    pub struct PathParameters {
        /// Policy by which the load balancer assigns connections to servers.
        pub policy: String,
        /// Policy by which a server assigns requests to its cores.
        pub dispatch: ParsedTextParameter<CoreSelectionPolicy>,
        /// Number of servers behind the load balancer.
        pub servers: u16,
        pub cores: u16,
        /// Distribution of the requests' service times.
        pub service: ParsedTextParameter<ServiceTimeDistribution>,
        /// Duration of the unit of service time (us).
        pub unit_us: f64,
        /// One-way latency between NIC and cores, in units of service time.
        pub latency: f64,
        /// Offered load as a fraction of the total capacity of all cores.
        pub load: f64,
        pub requests_per_connection: f64,
        /// Mean time between two successive requests of a connection, in units of service time.
        pub request_gap: f64,
        /// Interval between two reports of a server (ms).
        pub report_ms: f64,
        /// Time at which agents read their cores' loads, either `aligned` (all at once) or `random` (each at its own
        /// time).
        pub report_phase: ReportPhase,
        /// Duration of the windows for the variances between servers and between cores (ms).
        pub window_ms: f64,
        /// Time during which connections arrive (s).
        pub seconds: f64,
    }
}

impl PathParameters {
    pub fn with_parameter(&self, sweep_axis: SweepAxis, value: f64) -> Result<Self, ScenarioParameterError> {
        let mut parameters = self.clone();
        match sweep_axis {
            SweepAxis::Load => parameters.load = Some(value),
            SweepAxis::Servers => parameters.servers = Some(to_integer(sweep_axis, value)?),
            SweepAxis::Cores => parameters.cores = Some(to_integer(sweep_axis, value)?),
            SweepAxis::RequestsPerServer => parameters.load = Some(self.request_rate_to_load(value)?),
            _ => {
                return Err(ScenarioParameterError::UnsupportedSweepAxis {
                    kind: SIMULATION_KIND,
                    sweep_axis,
                    detail: "",
                });
            }
        }
        Ok(parameters)
    }

    /// Returns the load, as a fraction of capacity, that `requests_per_s` requests per second cause on each server.
    fn request_rate_to_load(&self, requests_per_s: f64) -> Result<f64, ScenarioParameterError> {
        let build_missing_error =
            |parameter| ScenarioParameterError::MissingParameter { kind: SIMULATION_KIND, parameter };
        let mean_service_time = self.service.as_ref().ok_or(build_missing_error("service"))?.0.mean();
        let mean_service_us = mean_service_time * self.unit_us.ok_or(build_missing_error("unit_us"))?;
        Ok(requests_per_s * mean_service_us / 1e6 / f64::from(self.cores.ok_or(build_missing_error("cores"))?))
    }

    /// Returns the run that measures a metric, and the query that selects its value from the outcome.
    pub fn build_simulation_job(
        &self,
        measure: FigureMetric,
        seed: u64,
    ) -> Result<Option<(SimulationJob, OutcomeValueQuery)>, ScenarioParameterError> {
        let build_missing_error =
            |parameter| ScenarioParameterError::MissingParameter { kind: SIMULATION_KIND, parameter };
        if !matches!(
            measure,
            FigureMetric::P99 | FigureMetric::Mean | FigureMetric::ServerVariancePct | FigureMetric::CoreVariancePct
        ) {
            return Err(ScenarioParameterError::UnsupportedMetric { kind: SIMULATION_KIND, measure });
        }
        let default_config = PathSimulationConfig::default();
        let config = PathSimulationConfig {
            policies: vec![self.policy.clone().ok_or(build_missing_error("policy"))?],
            dispatch_policies: vec![self.dispatch.clone().ok_or(build_missing_error("dispatch"))?.0],
            server_count: self.servers.ok_or(build_missing_error("servers"))?,
            cores_per_server: self.cores.ok_or(build_missing_error("cores"))?,
            service_times: self.service.clone().ok_or(build_missing_error("service"))?.0,
            unit_us: self.unit_us.ok_or(build_missing_error("unit_us"))?,
            offered_load: self.load.ok_or(build_missing_error("load"))?,
            interface_latency: self.latency.unwrap_or(default_config.interface_latency),
            requests_per_connection: self.requests_per_connection.unwrap_or(default_config.requests_per_connection),
            mean_request_gap: self.request_gap.unwrap_or(default_config.mean_request_gap),
            report_interval_ms: self.report_ms.unwrap_or(default_config.report_interval_ms),
            report_phase: self.report_phase.unwrap_or(default_config.report_phase),
            window_ms: self.window_ms.unwrap_or(default_config.window_ms),
            connection_arrival_seconds: self.seconds.ok_or(build_missing_error("seconds"))?,
            seeds: vec![seed],
            ..default_config
        };
        config.check().map_err(|error| ScenarioParameterError::RejectedConfig(error.to_string()))?;
        Ok(Some((SimulationJob::Path(config), OutcomeValueQuery { seed, ..OutcomeValueQuery::for_metric(measure) })))
    }
}
