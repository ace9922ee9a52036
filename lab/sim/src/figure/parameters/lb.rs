//! Parameters of simulations that replay a trace's packets through the load balancer to servers and cores.

use coreward_model::fleet::IndirectionTableFillRule;
use serde::Deserialize;

use super::{ParsedTextParameter, ScenarioParameterError, parameters, to_integer};
use crate::figure::axes::{FigureMetric, SweepAxis};
use crate::figure::simulation_job::{OutcomeValueQuery, SimulationJob};
use crate::lb::LbSimulationConfig;
use crate::trace::TraceSource;

/// Name of load balancer simulations in scenario files.
pub const SIMULATION_KIND: &str = "lb";

/// Method by which the entries of a server's RSS indirection table are assigned to the server's cores.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum IndirectionTableFillName {
    /// Each core has the same number of entries.
    Balanced,
    /// Each entry has an independently drawn random core, as in CrossRSS.
    Independent,
}

parameters! {
    /// Parameters in a scenario's `[lb]` section. Their names are those of `coreward-lab sim lb --help`.
    pub struct LbParameters {
        /// Policy by which the load balancer assigns connections to servers.
        pub policy: String,
        /// Capture, arrival log or generator from which the traffic comes.
        pub trace: ParsedTextParameter<TraceSource>,
        /// Number of servers behind the load balancer.
        pub servers: u16,
        pub cores: u16,
        /// Number of packets that each core can serve per second. Unlimited by default.
        pub core_capacity: f64,
        /// Assignment of the entries of a server's RSS indirection table to its cores. The default is `balanced`.
        pub indirection_tables: IndirectionTableFillName,
        /// Replay speed relative to the recorded speed of the trace.
        pub replay_speed: f64,
        /// Number of rack controllers between the servers and the controller. There are none by default.
        pub racks: u16,
        /// Maximum number of candidate cores that a rack controller reports for each bucket.
        pub rack_candidates: u8,
        /// Delay from the servers' reports until the load balancer uses the table computed from them (ms).
        pub table_delay_ms: u32,
    }
}

impl LbParameters {
    pub fn with_parameter(&self, sweep_axis: SweepAxis, value: f64) -> Result<Self, ScenarioParameterError> {
        let mut parameters = self.clone();
        match sweep_axis {
            SweepAxis::SpeedPct => parameters.replay_speed = Some(value / 100.0),
            SweepAxis::RackCandidates => parameters.rack_candidates = Some(to_integer(sweep_axis, value)?),
            SweepAxis::TableDelayMs => parameters.table_delay_ms = Some(to_integer(sweep_axis, value)?),
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

    /// Returns the run that measures a metric, and the query that selects its value from the outcome. The run replays
    /// the traffic for every policy in `policies`, and for all seeds if the traffic does not depend on them.
    pub fn build_simulation_job(
        &self,
        measure: FigureMetric,
        seed: u64,
        seeds: u64,
        policies: &[String],
    ) -> Result<Option<(SimulationJob, OutcomeValueQuery)>, ScenarioParameterError> {
        let build_missing_error =
            |parameter| ScenarioParameterError::MissingParameter { kind: SIMULATION_KIND, parameter };
        let policy = self.policy.clone().ok_or(build_missing_error("policy"))?;
        let default_config = LbSimulationConfig::default();
        let trace = self.trace.clone().ok_or(build_missing_error("trace"))?.0;
        let config = LbSimulationConfig {
            seeds: if trace.varies_with_seed() { vec![seed] } else { (1..=seeds).collect() },
            trace,
            server_count: self.servers.ok_or(build_missing_error("servers"))?,
            cores_per_server: self.cores.ok_or(build_missing_error("cores"))?,
            core_capacity_pps: self.core_capacity,
            replay_speed: self.replay_speed.unwrap_or(default_config.replay_speed),
            indirection_table_fill_rule: match self.indirection_tables {
                Some(IndirectionTableFillName::Independent) => IndirectionTableFillRule::Independent,
                Some(IndirectionTableFillName::Balanced) | None => IndirectionTableFillRule::Balanced,
            },
            policies: policies.to_vec(),
            rack_controller_count: self.racks,
            // Without racks the value has no effect. The default makes otherwise equal runs share one simulation.
            rack_candidates_per_bucket: self
                .racks
                .and(self.rack_candidates)
                .unwrap_or(default_config.rack_candidates_per_bucket),
            table_delay_ms: self.table_delay_ms.unwrap_or(default_config.table_delay_ms),
            ..default_config
        };
        config.check().map_err(|error| ScenarioParameterError::RejectedConfig(error.to_string()))?;
        let is_measured = matches!(
            measure,
            FigureMetric::ServerVariancePct | FigureMetric::CoreVariancePct | FigureMetric::ServedPct
        );
        if !is_measured {
            return Err(ScenarioParameterError::UnsupportedMetric { kind: SIMULATION_KIND, measure });
        }
        Ok(Some((
            SimulationJob::Lb(config),
            OutcomeValueQuery { policy: Some(policy), seed, ..OutcomeValueQuery::for_metric(measure) },
        )))
    }
}
