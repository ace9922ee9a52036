//! Parameters of simulations in which servers and load balancers join and leave while connections are open.

use serde::Deserialize;

use super::{NamedChoiceParameter, ParsedTextParameter, ScenarioParameterError, parameters, to_integer};
use crate::figure::axes::{FigureMetric, SweepAxis};
use crate::figure::simulation_job::{OutcomeValueQuery, SimulationJob};
use crate::pcc::{
    BalancingMethod, ConnectionArrivalProcess, LoadInfo, MAX_HASH_INDEX_BITS, MAX_HISTORY_TAG_BITS,
    PccSimulationConfig, PlannedClusterChanges,
};

/// Name of simulations of per-connection consistency in scenario files.
pub const SIMULATION_KIND: &str = "pcc";

/// Published experiment that supplies the default parameters of a scenario.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum PublishedExperiment {
    /// Cluster that Cheetah's paper simulates (NSDI'20, Sect. 2.1).
    CheetahSimulations,
    /// Experiment of Cheetah's Figure 9, in which servers change at the paper's times and results are per second.
    #[serde(rename = "cheetah-figure-9")]
    CheetahFigure9,
}

parameters! {
    /// Parameters in a scenario's `[pcc]` section. Their names are those of `coreward-lab sim pcc --help`.
    pub struct PccParameters {
        /// Published experiment that supplies the defaults of all other parameters.
        pub experiment: PublishedExperiment,
        /// Method by which load balancers find the server of a connection.
        pub method: ParsedTextParameter<BalancingMethod>,
        /// Mean number of servers in the pool.
        pub servers: usize,
        /// Mean number of open connections.
        pub connections: f64,
        /// Number of servers added or removed per minute.
        pub updates_per_minute: f64,
        /// Number of load balancers added or removed per minute.
        pub lb_updates_per_minute: f64,
        /// Number of load balancers behind an equal-cost multi-path router.
        pub load_balancers: usize,
        /// Duration of each run after its warm-up (minutes).
        pub minutes: f64,
        /// Age of the load information that policies use, either `current` or `reported`.
        pub load_info: NamedChoiceParameter<LoadInfo>,
    }
}

impl PccParameters {
    pub fn with_parameter(&self, sweep_axis: SweepAxis, value: f64) -> Result<Self, ScenarioParameterError> {
        let mut parameters = self.clone();
        match sweep_axis {
            SweepAxis::Servers => parameters.servers = Some(to_integer(sweep_axis, value)?),
            SweepAxis::Connections => parameters.connections = Some(value),
            SweepAxis::UpdatesPerMinute => parameters.updates_per_minute = Some(value),
            SweepAxis::ThresholdPct => {
                parameters.method = Some(ParsedTextParameter(override_beamer_threshold(parameters.method, value)?))
            }
            SweepAxis::TagBits | SweepAxis::IndexBits => {
                parameters.method =
                    Some(ParsedTextParameter(override_cookie_bits(parameters.method, sweep_axis, value)?))
            }
            SweepAxis::Time => {}
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

    /// Returns the run that measures a metric, and the query that selects its value. One run simulates all seeds.
    pub fn build_simulation_job(
        &self,
        measure: FigureMetric,
        seed: u64,
        seeds: u64,
    ) -> Result<Option<(SimulationJob, OutcomeValueQuery)>, ScenarioParameterError> {
        let build_missing_error =
            |parameter| ScenarioParameterError::MissingParameter { kind: SIMULATION_KIND, parameter };
        if !matches!(
            measure,
            FigureMetric::BrokenPct
                | FigureMetric::ImbalancePct
                | FigureMetric::PoolServers
                | FigureMetric::CompletedPerSecond
        ) {
            return Err(ScenarioParameterError::UnsupportedMetric { kind: SIMULATION_KIND, measure });
        }
        let default_config = match self.experiment.ok_or(build_missing_error("experiment"))? {
            PublishedExperiment::CheetahSimulations => PccSimulationConfig::default(),
            PublishedExperiment::CheetahFigure9 => PccSimulationConfig::for_cheetah_figure_9(),
        };
        let updates = match default_config.updates {
            PlannedClusterChanges::PerMinute { servers, load_balancers } => PlannedClusterChanges::PerMinute {
                servers: self.updates_per_minute.unwrap_or(servers),
                load_balancers: self.lb_updates_per_minute.unwrap_or(load_balancers),
            },
            scheduled_updates @ PlannedClusterChanges::Scheduled(_) => scheduled_updates,
        };
        let config = PccSimulationConfig {
            server_count: self.servers.unwrap_or(default_config.server_count),
            arrivals: self.connections.map_or(default_config.arrivals, |connections| {
                ConnectionArrivalProcess::OpenLoop { mean_open_connections: connections }
            }),
            updates,
            measured_minutes: self.minutes.unwrap_or(default_config.measured_minutes),
            load_balancer_count: self.load_balancers.unwrap_or(default_config.load_balancer_count),
            methods: vec![self.method.clone().ok_or(build_missing_error("method"))?.0],
            load_info: self.load_info.map_or(default_config.load_info, |load_info| load_info.0),
            seed_count: seeds,
            ..default_config
        };
        Ok(Some((SimulationJob::Pcc(config), OutcomeValueQuery { seed, ..OutcomeValueQuery::for_metric(measure) })))
    }
}

fn override_beamer_threshold(
    method: Option<ParsedTextParameter<BalancingMethod>>,
    threshold_pct: f64,
) -> Result<BalancingMethod, ScenarioParameterError> {
    let sweep_axis = SweepAxis::ThresholdPct;
    match method {
        Some(ParsedTextParameter(BalancingMethod::Beamer { .. })) if threshold_pct > 0.0 => {
            Ok(BalancingMethod::Beamer { threshold: Some(threshold_pct / 100.0) })
        }
        Some(ParsedTextParameter(BalancingMethod::Beamer { .. })) => {
            Err(ScenarioParameterError::InvalidSweepValue { sweep_axis, value: threshold_pct })
        }
        _ => Err(ScenarioParameterError::UnsupportedSweepAxis {
            kind: SIMULATION_KIND,
            sweep_axis,
            detail: ": the method is not beamer",
        }),
    }
}

fn override_cookie_bits(
    method: Option<ParsedTextParameter<BalancingMethod>>,
    sweep_axis: SweepAxis,
    value: f64,
) -> Result<BalancingMethod, ScenarioParameterError> {
    let bits: u8 = to_integer(sweep_axis, value)?;
    let invalid_value_error = ScenarioParameterError::InvalidSweepValue { sweep_axis, value };
    let check_max_bits = |max_bits: u8| if bits <= max_bits { Ok(bits) } else { Err(invalid_value_error) };
    match (sweep_axis, method) {
        (SweepAxis::TagBits, Some(ParsedTextParameter(BalancingMethod::HistoryTag { renews_tags, layout, .. }))) => {
            Ok(BalancingMethod::HistoryTag { tag_bits: check_max_bits(MAX_HISTORY_TAG_BITS)?, renews_tags, layout })
        }
        (
            SweepAxis::TagBits,
            Some(ParsedTextParameter(BalancingMethod::HashIndex { index_bits: bits, layout, .. })),
        ) => {
            Ok(BalancingMethod::HashIndex { index_bits: bits, tag_bits: check_max_bits(MAX_HISTORY_TAG_BITS)?, layout })
        }
        (SweepAxis::IndexBits, Some(ParsedTextParameter(BalancingMethod::HashIndex { tag_bits, layout, .. }))) => {
            Ok(BalancingMethod::HashIndex { index_bits: check_max_bits(MAX_HASH_INDEX_BITS)?, tag_bits, layout })
        }
        _ => Err(ScenarioParameterError::UnsupportedSweepAxis {
            kind: SIMULATION_KIND,
            sweep_axis,
            detail: ": the method's cookie has no such bits",
        }),
    }
}
