//! Parameters for simulations of requests at one server's cores.

use std::num::NonZeroU32;

use super::{NamedChoiceParameter, ParsedTextParameter, ScenarioParameterError, parameters, to_integer};
use crate::figure::axes::{FigureMetric, SweepAxis};
use crate::figure::simulation_job::{OutcomeValueQuery, SimulationJob};
use crate::rpc::{
    self, CoreSelectionPolicy, JbsrqOptions, PeakLoadSearchConfig, RpcSimulationConfig, ServiceTimeDistribution,
};
use coreward_model::dispatch::RankLambda;

/// Name of server simulations in scenario files.
pub const SIMULATION_KIND: &str = "rpc";

parameters! {
    /// Parameters in a scenario's `[rpc]` section. Their names are those of `coreward-lab sim rpc --help`. Times are in
    /// units of service time (see [`ServiceTimeDistribution`]).
    pub struct RpcParameters {
        /// Policy that assigns requests to cores.
        pub policy: ParsedTextParameter<CoreSelectionPolicy>,
        pub cores: u16,
        /// Distribution of the requests' service times.
        pub service: ParsedTextParameter<ServiceTimeDistribution>,
        /// One-way latency between NIC and cores, in units of service time.
        pub latency: f64,
        /// Offered load as a fraction of the cores' total capacity.
        pub load: f64,
        /// Number of requests in each run, of which the first tenth is the warm-up.
        pub requests: u64,
        /// Number of connections over which the requests are distributed.
        pub connections: NonZeroU32,
        /// Duration of each time window in a figure of latencies over time, in units of service time.
        pub window: f64,
        /// Maximum number of requests that a dispatcher in front of the cores can process per unit of service time.
        /// Below this limit it adds no delay.
        pub dispatcher_limit: f64,
        /// Upper bound of the p99 latency in searches for the peak load (SLO), as a multiple of `slo_unit`.
        pub slo: f64,
        /// Requests whose p99 latency the SLO bounds, either `short` (default) or `all`.
        pub slo_of: NamedChoiceParameter<rpc::SloRequestSelection>,
        /// Service time of which the SLO is a multiple, either `short` (default) or `mean`.
        pub slo_unit: NamedChoiceParameter<rpc::SloTimeUnit>,
        /// Number of bisection steps in a search for the peak load.
        pub steps: u32,
    }
}

impl RpcParameters {
    pub fn with_parameter(&self, sweep_axis: SweepAxis, value: f64) -> Result<Self, ScenarioParameterError> {
        let mut parameters = self.clone();
        match sweep_axis {
            SweepAxis::Load => parameters.load = Some(value),
            SweepAxis::Slo => parameters.slo = Some(value),
            SweepAxis::Cores => parameters.cores = Some(to_integer(sweep_axis, value)?),
            SweepAxis::Latency => parameters.latency = Some(value),
            SweepAxis::LongFactor => {
                parameters.service = Some(ParsedTextParameter(override_long_service_factor(parameters.service, value)?))
            }
            SweepAxis::Lambda | SweepAxis::Switch => {
                parameters.policy =
                    Some(ParsedTextParameter(override_ranked_queue_option(parameters.policy, sweep_axis, value)?))
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

    /// Returns the run that measures a metric, and the query that selects its value. Returns `None` if the offered load
    /// exceeds the policy's capacity. Latency is unbounded there, so the point is not drawn.
    pub fn build_simulation_job(
        &self,
        measure: FigureMetric,
        seed: u64,
    ) -> Result<Option<(SimulationJob, OutcomeValueQuery)>, ScenarioParameterError> {
        let is_peak_search = matches!(measure, FigureMetric::PeakLoad | FigureMetric::PeakThroughput);
        let config = RpcSimulationConfig {
            policy: self.policy.clone().ok_or(build_missing_parameter_error("policy"))?.0,
            cores: self.cores.ok_or(build_missing_parameter_error("cores"))?,
            service_times: self.service.clone().ok_or(build_missing_parameter_error("service"))?.0,
            interface_latency: self.latency.ok_or(build_missing_parameter_error("latency"))?,
            offered_load: if is_peak_search {
                RpcSimulationConfig::default().offered_load
            } else {
                self.load.ok_or(build_missing_parameter_error("load"))?
            },
            request_count: self.requests.ok_or(build_missing_parameter_error("requests"))?,
            seed,
            connection_count: self.connections,
            connection_skew: 0.0,
            max_requests_in_server: None,
            latency_window_length: self.window,
        };
        let job = match measure {
            FigureMetric::PeakLoad | FigureMetric::PeakThroughput => {
                SimulationJob::PeakLoadSearch(self.build_peak_search_config(config, seed)?)
            }
            FigureMetric::P99
            | FigureMetric::ShortP99
            | FigureMetric::LongP99
            | FigureMetric::Mean
            | FigureMetric::LongAnsweredPct
            | FigureMetric::BatchPct => {
                let policy_capacity =
                    config.policy.max_stable_load(config.service_times.mean(), config.interface_latency);
                let dispatcher_limit = self.dispatcher_limit.unwrap_or(f64::INFINITY);
                if config.offered_load >= policy_capacity
                    || throughput_at_load(&config, config.offered_load) >= dispatcher_limit
                {
                    return Ok(None);
                }
                SimulationJob::Rpc(config)
            }
            _ => return Err(ScenarioParameterError::UnsupportedMetric { kind: SIMULATION_KIND, measure }),
        };
        Ok(Some((
            job,
            OutcomeValueQuery {
                throughput_limit: self.dispatcher_limit,
                seed,
                ..OutcomeValueQuery::for_metric(measure)
            },
        )))
    }

    /// Returns the configuration of a peak-load search that runs simulations with `config`.
    fn build_peak_search_config(
        &self,
        config: RpcSimulationConfig,
        seed: u64,
    ) -> Result<PeakLoadSearchConfig, ScenarioParameterError> {
        Ok(PeakLoadSearchConfig {
            simulation_config: config,
            latency_bound_in_slo_units: self.slo.ok_or(build_missing_parameter_error("slo"))?,
            seeds: seed..=seed,
            bisection_steps: self.steps.ok_or(build_missing_parameter_error("steps"))?,
            slo_metric: self.slo_of.unwrap_or_default().0,
            slo_unit: self.slo_unit.unwrap_or_default().0,
        })
    }
}

fn build_missing_parameter_error(parameter: &'static str) -> ScenarioParameterError {
    ScenarioParameterError::MissingParameter { kind: SIMULATION_KIND, parameter }
}

/// Returns the throughput of all cores at the given load (requests per short service time).
pub fn throughput_at_load(config: &RpcSimulationConfig, load: f64) -> f64 {
    load * f64::from(config.cores) / config.service_times.mean()
}

fn override_long_service_factor(
    service: Option<ParsedTextParameter<ServiceTimeDistribution>>,
    factor: f64,
) -> Result<ServiceTimeDistribution, ScenarioParameterError> {
    let sweep_axis = SweepAxis::LongFactor;
    match service {
        Some(ParsedTextParameter(ServiceTimeDistribution::Multimodal(mut classes))) if factor >= 1.0 => {
            classes[0].service_time_factor = factor;
            Ok(ServiceTimeDistribution::Multimodal(classes))
        }
        Some(ParsedTextParameter(ServiceTimeDistribution::Multimodal(_))) => {
            Err(ScenarioParameterError::InvalidSweepValue { sweep_axis, value: factor })
        }
        _ => Err(ScenarioParameterError::UnsupportedSweepAxis {
            kind: SIMULATION_KIND,
            sweep_axis,
            detail: ": the service times have no long class",
        }),
    }
}

fn override_ranked_queue_option(
    policy: Option<ParsedTextParameter<CoreSelectionPolicy>>,
    sweep_axis: SweepAxis,
    value: f64,
) -> Result<CoreSelectionPolicy, ScenarioParameterError> {
    let Some(ParsedTextParameter(CoreSelectionPolicy::RankedQueue(options))) = policy else {
        let detail = ": the policy is not jbsrq";
        return Err(ScenarioParameterError::UnsupportedSweepAxis { kind: SIMULATION_KIND, sweep_axis, detail });
    };
    let build_invalid_value_error = || ScenarioParameterError::InvalidSweepValue { sweep_axis, value };
    let options = match sweep_axis {
        SweepAxis::Switch if value >= 0.0 => JbsrqOptions { service_switch_time: value, ..options },
        SweepAxis::Switch => return Err(build_invalid_value_error()),
        _ => JbsrqOptions {
            lower_priority_weight: RankLambda::new(value).map_err(|_| build_invalid_value_error())?,
            ..options
        },
    };
    Ok(CoreSelectionPolicy::RankedQueue(options))
}
