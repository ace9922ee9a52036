//! `coreward-lab figure turbo-9-live`, `ringleader-bimodal-live` and others measure every policy in turn on one server
//! with paced cores. The policy `jbsrq` runs on `coreward orchestrate`, and the others on `coreward dispatch`.

use std::collections::HashMap;

use anyhow::{Context as _, ensure};
use coreward_load::workload::RequestMix;
use coreward_sim::figure::axes::FigureMetric;
use coreward_sim::figure::live::{LiveFigureSample, ProgressCallback};
use coreward_sim::figure::scenario::FigureScenario;
use coreward_sim::figure::simulation_job::SimulationJob;
use coreward_sim::rpc::{self, CoreSelectionPolicy};

use super::dispatcher::{RunningDispatcher, build_key_value_service_config};
use super::orchestrator::{FigureRequestKind, RunningOrchestrator};
use super::points::{self, differ_only_in_load, find_measurement, measurement_key};
use super::requests::{RequestLoad, RequestLoadMeasurement, raise_open_file_limit};
use crate::instance;
use crate::key_value::handle::KeyValueServer;
use crate::topology::{Testbed, find_missing_privilege};

/// Size of the receive buffer of each worker's socket (bytes), which is enough for the longest run.
const WORKER_RECEIVE_BUFFER_BYTES: &str = "16000000";

/// Measures every series of `scenario` with real processes instead of the simulator. Fails without root, when the
/// scenario has unsupported metrics, or when a program cannot be started. Also fails when requests are lost or bypass
/// the dispatcher, when the machine is too busy, or when interrupted.
pub fn measure_server_figure(
    scenario: &FigureScenario,
    progress: ProgressCallback<'_>,
) -> anyhow::Result<Vec<LiveFigureSample>> {
    if let Some(privilege_error) = find_missing_privilege() {
        anyhow::bail!(privilege_error);
    }
    raise_open_file_limit()?;
    let live_settings = scenario.live.as_ref().context("a live figure without [live]")?;
    let (unit_us, seconds) =
        live_settings.unit_us.zip(live_settings.seconds).context("[live]: expected `unit_us` and `seconds`")?;
    let mix = live_settings.mix.as_deref().map(str::parse).transpose().context("[live]: mix")?;
    let parameters = MeasurementParameters { unit_us, duration_s: seconds, request_mix: mix };
    let plan = points::plan_runs(scenario)?;
    let mut configs: Vec<&rpc::RpcSimulationConfig> = plan.jobs.iter().filter_map(|job| as_rpc_config(job)).collect();
    // Sort by run, so that disturbances of the machine affect all series alike.
    configs.sort_by_key(|config| config.seed);
    let mut measurements_by_key: HashMap<String, RequestLoadMeasurement> = HashMap::new();
    let mut env = None;
    progress(0, configs.len());
    for group in configs.chunk_by(|a, b| differ_only_in_load(a, b)) {
        ServerFigureEnv::reuse_or_start_env(&mut env, group[0])?.measure_series(
            group,
            &parameters,
            &mut |config, measurement| {
                measurements_by_key.insert(measurement_key(config), measurement);
                progress(measurements_by_key.len(), configs.len());
            },
        )?;
    }
    points::compute_figure_samples(scenario, &plan, |plot_point, job| match job {
        SimulationJob::Rpc(config) => {
            find_measurement(&measurements_by_key, config)?.metric_value(plot_point.query.metric)
        }
        SimulationJob::PeakLoadSearch(search) => {
            let config_of_seed = rpc::RpcSimulationConfig { seed: plot_point.seed, ..search.simulation_config.clone() };
            let curve = configs.iter().filter(|config| differ_only_in_load(config, &config_of_seed));
            let load_and_p99 = |config: &&&rpc::RpcSimulationConfig| {
                Ok((
                    config.offered_load,
                    find_measurement(&measurements_by_key, **config)?.metric_value(FigureMetric::ShortP99)?,
                ))
            };
            points::max_load_within_slo(
                curve.map(|config| load_and_p99(&config)).collect::<anyhow::Result<_>>()?,
                search.latency_bound_in_slo_units,
            )
        }
        other => anyhow::bail!("{other:?} is not measured at one server"),
    })
}

fn as_rpc_config(job: &SimulationJob) -> Option<&rpc::RpcSimulationConfig> {
    if let SimulationJob::Rpc(config) = job { Some(config) } else { None }
}

/// Parameters that all points of a figure share.
struct MeasurementParameters {
    /// Unit of service times (us).
    unit_us: f64,
    duration_s: f64,
    /// Mix of requests to a key-value store, or `None` if requests only occupy cores.
    request_mix: Option<RequestMix>,
}

/// Running `coreward dispatch` or `coreward orchestrate`, which distributes requests to the server's cores.
enum RequestDistributor<'a> {
    Dispatcher(RunningDispatcher<'a>),
    Orchestrator(RunningOrchestrator),
}

impl<'a> RequestDistributor<'a> {
    fn start(
        env: &'a ServerFigureEnv,
        config: &rpc::RpcSimulationConfig,
        parameters: &MeasurementParameters,
    ) -> anyhow::Result<Self> {
        if let CoreSelectionPolicy::RankedQueue(options) = &config.policy {
            let workload =
                parameters.request_mix.as_ref().map_or(FigureRequestKind::ServiceTimeOnly, FigureRequestKind::RocksDb);
            return Ok(Self::Orchestrator(RunningOrchestrator::start(
                &env.testbed,
                config,
                options,
                parameters.unit_us,
                workload,
            )?));
        }
        ensure!(parameters.request_mix.is_none(), "{}: expected jbsrq with a mix of key-value requests", config.policy);
        let service = build_key_value_service_config(&config.policy, &config.service_times, parameters.unit_us)?;
        Ok(Self::Dispatcher(RunningDispatcher::start(&env.testbed, 1, &service, config.cores)?))
    }

    /// Stops the distributor. Returns the number of requests that it has sent to cores.
    fn stop_and_count_requests(self) -> anyhow::Result<u64> {
        match self {
            Self::Dispatcher(dispatcher) => {
                let dispatched_count = dispatcher.query_dispatched_request_count()?;
                dispatcher.stop()?;
                Ok(dispatched_count)
            }
            Self::Orchestrator(orchestrator) => orchestrator.stop_and_count_requests(),
        }
    }
}

/// Client and server of the measurements. Fields are dropped in the order of their declaration, so the server ends
/// first.
pub(super) struct ServerFigureEnv {
    worker_count: u16,
    /// Key-value server, or `None` if [`RunningOrchestrator`](super::orchestrator::RunningOrchestrator) starts its own
    /// server.
    key_value_server: Option<KeyValueServer>,
    pub(super) testbed: Testbed,
}

impl ServerFigureEnv {
    /// Returns `current_env` if it fits the policy and the number of cores in `config`, or else starts a new one.
    pub(super) fn reuse_or_start_env<'a>(
        current_env: &'a mut Option<Self>,
        config: &rpc::RpcSimulationConfig,
    ) -> anyhow::Result<&'a Self> {
        let (worker_count, has_server) = (config.cores, !matches!(config.policy, CoreSelectionPolicy::RankedQueue(_)));
        let is_suitable = |env: &Self| env.worker_count == worker_count && env.key_value_server.is_some() == has_server;
        if !current_env.as_ref().is_some_and(is_suitable) {
            // Drop the old environment first, because its dispatcher must be gone.
            *current_env = None;
            *current_env = Some(Self::start(worker_count, has_server)?);
        }
        current_env.as_ref().context("just started")
    }

    fn start(workers: u16, has_server: bool) -> anyhow::Result<Self> {
        let testbed = Testbed::create_without_load_balancing(&instance::unique_testbed_name("dispatchfigure")?)?;
        let worker_count = workers.to_string();
        let options = ["--workers", &worker_count, "--paced", "--receive-buffer", WORKER_RECEIVE_BUFFER_BYTES];
        let server = has_server.then(|| testbed.start_key_value_server(1, &options)).transpose()?;
        Ok(Self { worker_count: workers, key_value_server: server, testbed })
    }

    /// Measures one series at all its loads. Fails when requests bypass the distributor.
    fn measure_series(
        &self,
        series: &[&rpc::RpcSimulationConfig],
        parameters: &MeasurementParameters,
        record_measurement: &mut dyn FnMut(&rpc::RpcSimulationConfig, RequestLoadMeasurement),
    ) -> anyhow::Result<()> {
        let distributor = RequestDistributor::start(self, series[0], parameters)?;
        let mut sent_count = 0;
        for config in series {
            let measurement = self.measure_config(config, parameters)?;
            sent_count += measurement.sent_and_lost_request_counts().0;
            record_measurement(config, measurement);
        }
        let (handled_count, policy) = (distributor.stop_and_count_requests()?, &series[0].policy);
        ensure!(handled_count >= sent_count, "{policy}: {handled_count} of {sent_count} requests passed coreward");
        Ok(())
    }

    fn measure_config(
        &self,
        config: &rpc::RpcSimulationConfig,
        parameters: &MeasurementParameters,
    ) -> anyhow::Result<RequestLoadMeasurement> {
        let &MeasurementParameters { unit_us, duration_s: seconds, request_mix: ref mix } = parameters;
        let rpc::RpcSimulationConfig { policy, service_times: service, offered_load: load, cores, seed, .. } = config;
        let rate_rps = load * f64::from(*cores) / (service.mean() * unit_us / 1e6);
        let (service, mix) = (service.clone(), mix.clone());
        let request_load = RequestLoad {
            service_times: service,
            request_mix: mix,
            unit_us,
            rate_rps,
            duration_s: seconds,
            seed: *seed,
        };
        let measurement = request_load.send_and_measure(&self.testbed)?;
        let (sent_count, lost_count) = measurement.sent_and_lost_request_counts();
        ensure!(lost_count == 0, "{policy} at a load of {load}: {lost_count} of {sent_count} requests were lost");
        let (short_p99, all_p99) =
            (measurement.metric_value(FigureMetric::ShortP99)?, measurement.metric_value(FigureMetric::P99)?);
        eprintln!(
            "run {seed}, {}, {policy}, load {load}: p99 of short requests {short_p99:.2}, of all {all_p99:.2} \
             ({sent_count})",
            config.service_times
        );
        Ok(measurement)
    }
}
