//! Connections while the pool changes.

use serde::Deserialize;

use super::{NamedChoice, ParameterError, ParsedText, parameters, to_integer};
use crate::figure::axes::{Metric, SweepAxis};
use crate::figure::job::{Job, ValueQuery};
use crate::pcc::{Arrivals, Config, INDEX_BITS_MAX, LoadInfo, Method, TAG_BITS_MAX, Updates};

/// Name of this kind of simulation in scenario files.
pub const SIMULATION_KIND: &str = "pcc";

/// Published experiment whose settings are the defaults of a scenario.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Experiment {
    /// Cluster simulated in Cheetah's paper (NSDI'20, Sect. 2.1).
    CheetahSimulations,
    /// Experiment of Cheetah's Figure 9, with its times of server changes; results are per second.
    #[serde(rename = "cheetah-figure-9")]
    CheetahFigure9,
}

parameters! {
    /// Parameters of `[pcc]`, with the names of `coreward-lab sim pcc --help`.
    pub struct PccParameters {
        /// Experiment that gives the defaults of all other parameters.
        pub experiment: Experiment,
        /// Method by which load balancers find a connection's server.
        pub method: ParsedText<Method>,
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
        /// Age of the load information that policies have.
        pub load_info: NamedChoice<LoadInfo>,
    }
}

impl PccParameters {
    pub fn with_parameter(&self, swept: SweepAxis, value: f64) -> Result<Self, ParameterError> {
        let mut with = self.clone();
        match swept {
            SweepAxis::Servers => with.servers = Some(to_integer(swept, value)?),
            SweepAxis::Connections => with.connections = Some(value),
            SweepAxis::UpdatesPerMinute => with.updates_per_minute = Some(value),
            SweepAxis::ThresholdPct => with.method = Some(ParsedText(with_threshold(with.method, value)?)),
            SweepAxis::TagBits | SweepAxis::IndexBits => {
                with.method = Some(ParsedText(with_bits(with.method, swept, value)?))
            }
            SweepAxis::Time => {}
            _ => return Err(ParameterError::NotSwept { kind: SIMULATION_KIND, swept, detail: "" }),
        }
        Ok(with)
    }

    /// Returns the run for a metric, and the query that selects its value. One run simulates all seeds.
    pub fn job(&self, measure: Metric, seed: u64, seeds: u64) -> Result<Option<(Job, ValueQuery)>, ParameterError> {
        let missing = |parameter| ParameterError::Missing { kind: SIMULATION_KIND, parameter };
        if !matches!(
            measure,
            Metric::BrokenPct | Metric::ImbalancePct | Metric::PoolServers | Metric::CompletedPerSecond
        ) {
            return Err(ParameterError::NotMeasured { kind: SIMULATION_KIND, measure });
        }
        let base = match self.experiment.ok_or(missing("experiment"))? {
            Experiment::CheetahSimulations => Config::default(),
            Experiment::CheetahFigure9 => Config::cheetah_figure_9(),
        };
        let updates = match base.updates {
            Updates::PerMinute { servers, load_balancers } => Updates::PerMinute {
                servers: self.updates_per_minute.unwrap_or(servers),
                load_balancers: self.lb_updates_per_minute.unwrap_or(load_balancers),
            },
            at @ Updates::Scheduled(_) => at,
        };
        let config = Config {
            servers: self.servers.unwrap_or(base.servers),
            arrivals: self.connections.map_or(base.arrivals, |connections| Arrivals::Open { connections }),
            updates,
            minutes: self.minutes.unwrap_or(base.minutes),
            load_balancers: self.load_balancers.unwrap_or(base.load_balancers),
            methods: vec![self.method.clone().ok_or(missing("method"))?.0],
            load_info: self.load_info.map_or(base.load_info, |load_info| load_info.0),
            seeds,
            ..base
        };
        Ok(Some((Job::Pcc(config), ValueQuery { seed, ..ValueQuery::of(measure) })))
    }
}

fn with_threshold(method: Option<ParsedText<Method>>, percent: f64) -> Result<Method, ParameterError> {
    let swept = SweepAxis::ThresholdPct;
    match method {
        Some(ParsedText(Method::Beamer { .. })) if percent > 0.0 => {
            Ok(Method::Beamer { threshold: Some(percent / 100.0) })
        }
        Some(ParsedText(Method::Beamer { .. })) => Err(ParameterError::Value { swept, value: percent }),
        _ => Err(ParameterError::NotSwept { kind: SIMULATION_KIND, swept, detail: ": the method is not beamer" }),
    }
}

fn with_bits(method: Option<ParsedText<Method>>, swept: SweepAxis, value: f64) -> Result<Method, ParameterError> {
    let bits: u8 = to_integer(swept, value)?;
    let unfit = ParameterError::Value { swept, value };
    let up_to = |most: u8| if bits <= most { Ok(bits) } else { Err(unfit) };
    match (swept, method) {
        (SweepAxis::TagBits, Some(ParsedText(Method::HistoryTag { renews_tags, layout, .. }))) => {
            Ok(Method::HistoryTag { bits: up_to(TAG_BITS_MAX)?, renews_tags, layout })
        }
        (SweepAxis::TagBits, Some(ParsedText(Method::HashIndex { bits, layout, .. }))) => {
            Ok(Method::HashIndex { bits, tag_bits: up_to(TAG_BITS_MAX)?, layout })
        }
        (SweepAxis::IndexBits, Some(ParsedText(Method::HashIndex { tag_bits, layout, .. }))) => {
            Ok(Method::HashIndex { bits: up_to(INDEX_BITS_MAX)?, tag_bits, layout })
        }
        _ => Err(ParameterError::NotSwept {
            kind: SIMULATION_KIND,
            swept,
            detail: ": the method's cookie has no such bits",
        }),
    }
}
