//! Parameters for simulations of requests at one server's cores.

use std::num::NonZeroU32;

use super::{NamedChoice, ParameterError, ParsedText, parameters, to_integer};
use crate::figure::axes::{Metric, SweepAxis};
use crate::figure::job::{Job, ValueQuery};
use crate::rpc::{self, Config, JbsrqOptions, PeakConfig, Policy, ServiceTimeDistribution};
use coreward_model::dispatch::Lambda;

/// Name of server simulations in scenario files.
pub const SIMULATION_KIND: &str = "rpc";

parameters! {
    /// Parameters in a scenario's `[rpc]` section. Their names are those of `coreward-lab sim rpc --help`. Times are in
    /// short service times.
    pub struct RpcParameters {
        /// Policy that assigns requests to cores.
        pub policy: ParsedText<Policy>,
        pub cores: u16,
        /// Distribution of the requests' service times.
        pub service: ParsedText<ServiceTimeDistribution>,
        /// One-way latency between NIC and cores.
        pub latency: f64,
        /// Offered load as a fraction of the cores' total capacity.
        pub load: f64,
        /// Number of requests in each run, of which the first tenth is the warm-up.
        pub requests: u64,
        /// Number of connections over which the requests are distributed.
        pub connections: NonZeroU32,
        /// Duration of the time windows for which a figure over time shows latencies.
        pub window: f64,
        /// Maximum number of requests that a dispatcher in front of the cores can process per short service time. Below
        /// this limit it adds no delay.
        pub dispatcher_limit: f64,
        /// Upper bound of the p99 latency in searches for the peak load (SLO).
        pub slo: f64,
        /// Requests whose p99 latency the SLO bounds, either `short` (default) or `all`.
        pub slo_of: NamedChoice<rpc::SloMetric>,
        /// Service time of which the SLO is a multiple, either `short` (default) or `mean`.
        pub slo_unit: NamedChoice<rpc::SloUnit>,
        /// Number of bisection steps in a search for the peak load.
        pub steps: u32,
    }
}

impl RpcParameters {
    pub fn with_parameter(&self, sweep_axis: SweepAxis, value: f64) -> Result<Self, ParameterError> {
        let mut parameters = self.clone();
        match sweep_axis {
            SweepAxis::Load => parameters.load = Some(value),
            SweepAxis::Slo => parameters.slo = Some(value),
            SweepAxis::Cores => parameters.cores = Some(to_integer(sweep_axis, value)?),
            SweepAxis::Latency => parameters.latency = Some(value),
            SweepAxis::LongFactor => {
                parameters.service = Some(ParsedText(with_long_factor(parameters.service, value)?))
            }
            SweepAxis::Lambda | SweepAxis::Switch => {
                parameters.policy = Some(ParsedText(with_policy_option(parameters.policy, sweep_axis, value)?))
            }
            SweepAxis::Time => {}
            _ => return Err(ParameterError::NotSwept { kind: SIMULATION_KIND, sweep_axis, detail: "" }),
        }
        Ok(parameters)
    }

    /// Returns the run that measures a metric, and the query that selects its value. Returns `None` if the offered load
    /// exceeds the policy's capacity. Latency is unbounded there, so the point is not drawn.
    pub fn build_job(&self, measure: Metric, seed: u64) -> Result<Option<(Job, ValueQuery)>, ParameterError> {
        let is_peak_search = matches!(measure, Metric::PeakLoad | Metric::PeakThroughput);
        let config = Config {
            policy: self.policy.clone().ok_or(missing_error("policy"))?.0,
            cores: self.cores.ok_or(missing_error("cores"))?,
            service: self.service.clone().ok_or(missing_error("service"))?.0,
            interface_latency: self.latency.ok_or(missing_error("latency"))?,
            load: if is_peak_search { Config::default().load } else { self.load.ok_or(missing_error("load"))? },
            request_count: self.requests.ok_or(missing_error("requests"))?,
            seed,
            connection_count: self.connections,
            skew: 0.0,
            queue_limit: None,
            window_length: self.window,
        };
        let job = match measure {
            Metric::PeakLoad | Metric::PeakThroughput => Job::Peak(self.peak_config(config, seed)?),
            Metric::P99
            | Metric::ShortP99
            | Metric::LongP99
            | Metric::Mean
            | Metric::LongAnsweredPct
            | Metric::BatchPct => {
                let policy_capacity = config.policy.capacity(config.service.mean(), config.interface_latency);
                let dispatcher_limit = self.dispatcher_limit.unwrap_or(f64::INFINITY);
                if config.load >= policy_capacity || throughput(&config, config.load) >= dispatcher_limit {
                    return Ok(None);
                }
                Job::Rpc(config)
            }
            _ => return Err(ParameterError::NotMeasured { kind: SIMULATION_KIND, measure }),
        };
        Ok(Some((job, ValueQuery { throughput_limit: self.dispatcher_limit, seed, ..ValueQuery::for_metric(measure) })))
    }

    /// Returns the configuration of a peak-load search that runs simulations with `config`.
    fn peak_config(&self, config: Config, seed: u64) -> Result<PeakConfig, ParameterError> {
        Ok(PeakConfig {
            config,
            slo: self.slo.ok_or(missing_error("slo"))?,
            seeds: seed..=seed,
            steps: self.steps.ok_or(missing_error("steps"))?,
            slo_metric: self.slo_of.unwrap_or_default().0,
            slo_unit: self.slo_unit.unwrap_or_default().0,
        })
    }
}

fn missing_error(parameter: &'static str) -> ParameterError {
    ParameterError::Missing { kind: SIMULATION_KIND, parameter }
}

/// Returns the throughput of all cores at the given load (requests per short service time).
pub fn throughput(config: &Config, load: f64) -> f64 {
    load * f64::from(config.cores) / config.service.mean()
}

fn with_long_factor(
    service: Option<ParsedText<ServiceTimeDistribution>>,
    factor: f64,
) -> Result<ServiceTimeDistribution, ParameterError> {
    let sweep_axis = SweepAxis::LongFactor;
    match service {
        Some(ParsedText(ServiceTimeDistribution::Classes(mut classes))) if factor >= 1.0 => {
            classes[0].factor = factor;
            Ok(ServiceTimeDistribution::Classes(classes))
        }
        Some(ParsedText(ServiceTimeDistribution::Classes(_))) => {
            Err(ParameterError::InvalidValue { sweep_axis, value: factor })
        }
        _ => Err(ParameterError::NotSwept {
            kind: SIMULATION_KIND,
            sweep_axis,
            detail: ": the service times have no long class",
        }),
    }
}

fn with_policy_option(
    policy: Option<ParsedText<Policy>>,
    sweep_axis: SweepAxis,
    value: f64,
) -> Result<Policy, ParameterError> {
    let Some(ParsedText(Policy::RankedQueue(options))) = policy else {
        let detail = ": the policy is not jbsrq";
        return Err(ParameterError::NotSwept { kind: SIMULATION_KIND, sweep_axis, detail });
    };
    let invalid_value = || ParameterError::InvalidValue { sweep_axis, value };
    let options = match sweep_axis {
        SweepAxis::Switch if value >= 0.0 => JbsrqOptions { switch_cost: value, ..options },
        SweepAxis::Switch => return Err(invalid_value()),
        _ => JbsrqOptions { lambda: Lambda::new(value).map_err(|_| invalid_value())?, ..options },
    };
    Ok(Policy::RankedQueue(options))
}
