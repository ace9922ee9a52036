//! `coreward-lab figure path-live` sends datagrams through the load balancer to several servers, each of which runs
//! `coreward dispatch`. Every policy of the load balancer is combined with every policy of the dispatch.

use std::collections::HashMap;

use anyhow::{Context as _, ensure};
use coreward_sim::figure::live::{LiveFigureSample, ProgressCallback};
use coreward_sim::figure::scenario::FigureScenario;
use coreward_sim::figure::simulation_job::SimulationJob;
use coreward_sim::path;

use super::dispatcher::{RunningDispatcher, build_key_value_service_config};
use super::points::{self, find_measurement, measurement_key};
use super::requests::{RequestLoad, RequestLoadMeasurement, raise_open_file_limit};
use crate::addresses::SERVICE_ADDRESS;
use crate::fleet::{CoreLoadSource, Fleet, TestbedFleetOptions};
use crate::instance;
use crate::key_value::handle::KeyValueServer;
use crate::topology::{Testbed, TestbedOptions, find_missing_privilege};

/// Size of the receive buffer of each worker's socket (bytes), in the form of a command argument.
const WORKER_RECEIVE_BUFFER_BYTES: &str = "16000000";

/// Measures every series of `scenario`, which has the parameters of `coreward-lab sim path`. It has one request per
/// connection, because the load balancer places each datagram separately. Fails without root, with unsupported metrics,
/// or when a program cannot be started. Also fails when requests are lost or bypass the dispatchers, when the machine
/// is too busy, or when interrupted.
pub fn measure_path_figure(
    scenario: &FigureScenario,
    progress: ProgressCallback<'_>,
) -> anyhow::Result<Vec<LiveFigureSample>> {
    if let Some(privilege_error) = find_missing_privilege() {
        anyhow::bail!(privilege_error);
    }
    raise_open_file_limit()?;
    let seconds =
        scenario.live.as_ref().and_then(|live_settings| live_settings.seconds).context("[live]: expected `seconds`")?;
    let run_plan = points::plan_runs(scenario)?;
    let mut configs: Vec<&path::PathSimulationConfig> =
        run_plan.jobs.iter().filter_map(|job| as_path_config(job)).collect();
    // Sort by run first, so that disturbances of the machine affect all series alike, and then by policy to save
    // restarts.
    configs.sort_by_key(|config| (config.seeds.clone(), config.policies.clone()));
    let mut measurements_by_key: HashMap<String, RequestLoadMeasurement> = HashMap::new();
    progress(0, configs.len());
    let Some(first_config) = configs.first() else { return Ok(Vec::new()) };
    let has_same_fleet = |config: &&&path::PathSimulationConfig| {
        (config.server_count, config.cores_per_server) == (first_config.server_count, first_config.cores_per_server)
    };
    ensure!(
        configs.iter().all(|config| has_same_fleet(&config)),
        "servers and cores: expected the same for all series"
    );
    let env = PathFigureEnv::start(first_config)?;
    for group in configs.chunk_by(|a, b| (&a.seeds, &a.policies) == (&b.seeds, &b.policies)) {
        let _fleet = env.start_fleet(&group[0].policies)?;
        for config in group {
            measurements_by_key.insert(measurement_key(config), env.measure_config(config, seconds)?);
            progress(measurements_by_key.len(), configs.len());
        }
    }
    points::compute_figure_samples(scenario, &run_plan, |plot_point, job| match job {
        SimulationJob::Path(config) => {
            find_measurement(&measurements_by_key, config)?.metric_value(plot_point.query.metric)
        }
        other => anyhow::bail!("{other:?} is not measured behind a load balancer"),
    })
}

fn as_path_config(job: &SimulationJob) -> Option<&path::PathSimulationConfig> {
    if let SimulationJob::Path(config) = job { Some(config) } else { None }
}

/// Client, load balancer and servers. Fields are dropped in the order of their declaration, so servers end before the
/// testbed.
struct PathFigureEnv {
    _key_value_servers: Vec<KeyValueServer>,
    testbed: Testbed,
}

impl PathFigureEnv {
    fn start(config: &path::PathSimulationConfig) -> anyhow::Result<Self> {
        let instance = instance::unique_testbed_name("pathfigure")?;
        let (servers, cores) = (config.server_count, config.cores_per_server);
        let testbed = Testbed::create(TestbedOptions {
            instance_name: instance,
            server_count: servers,
            core_count: cores,
            ..TestbedOptions::default()
        })?;
        let worker_count = cores.to_string();
        let options = ["--workers", &worker_count, "--paced", "--receive-buffer", WORKER_RECEIVE_BUFFER_BYTES];
        let server_numbers = testbed.server_numbers().into_iter();
        let key_value_servers = server_numbers.map(|number| testbed.start_key_value_server(number, &options));
        let key_value_servers = key_value_servers.collect::<anyhow::Result<_>>()?;
        Ok(Self { _key_value_servers: key_value_servers, testbed })
    }

    /// Starts controller, load balancer and agents. The load balancer places each datagram by the given policy.
    fn start_fleet(&self, policies: &[String]) -> anyhow::Result<Fleet> {
        let [policy] = policies else { anyhow::bail!("policies of one run: expected one") };
        let service_lines = format!(
            "\n[[service]]\nname = \"requests\"\nvip = \"{SERVICE_ADDRESS}\"\nprotocol = \"udp\"\nudp = \"packet\"\n\
             policy = \"{policy}\"\n"
        );
        let load_source = CoreLoadSource::PacedServer;
        Fleet::start(
            &self.testbed,
            TestbedFleetOptions {
                policy_name: policy.clone(),
                core_load_source: load_source,
                steers_connections: false,
                extra_fleet_text: service_lines,
                makes_tables_per_interval: true,
                ..TestbedFleetOptions::default()
            },
        )
    }

    fn measure_config(
        &self,
        config: &path::PathSimulationConfig,
        seconds: f64,
    ) -> anyhow::Result<RequestLoadMeasurement> {
        let path::PathSimulationConfig {
            service_times: service,
            unit_us,
            offered_load: load,
            cores_per_server: cores,
            server_count: servers,
            ..
        } = config;
        ensure!(config.requests_per_connection == 1.0, "requests_per_connection: expected 1");
        let [policy] = &config.dispatch_policies[..] else {
            anyhow::bail!("dispatch policies of one run: expected one")
        };
        let service_config = build_key_value_service_config(policy, service, *unit_us)?;
        let server_numbers = self.testbed.server_numbers().into_iter();
        let dispatchers =
            server_numbers.map(|number| RunningDispatcher::start(&self.testbed, number, &service_config, *cores));
        let dispatchers: Vec<RunningDispatcher<'_>> = dispatchers.collect::<anyhow::Result<_>>()?;
        let rate_rps = load * f64::from(*cores) * f64::from(*servers) / (service.mean() * unit_us / 1e6);
        let seed = *config.seeds.first().context("a run without a seed")?;
        let request_load = RequestLoad {
            service_times: service.clone(),
            request_mix: None,
            unit_us: *unit_us,
            rate_rps,
            duration_s: seconds,
            seed,
        };
        let measurement = request_load.send_and_measure(&self.testbed)?;
        let dispatched_by_server = dispatchers
            .iter()
            .map(RunningDispatcher::query_dispatched_request_count)
            .collect::<anyhow::Result<Vec<u64>>>()?;
        dispatchers.into_iter().try_for_each(RunningDispatcher::stop)?;
        let (sent_count, lost_count) = measurement.sent_and_lost_request_counts();
        let dispatched_count: u64 = dispatched_by_server.iter().sum();
        let policy_names = format!("{} and {policy}", config.policies.concat());
        ensure!(
            dispatched_count >= sent_count,
            "{policy_names}: {dispatched_count} of {sent_count} requests were dispatched by coreward dispatch"
        );
        ensure!(lost_count == 0, "{policy_names}: {lost_count} of {sent_count} requests were lost");
        let p99_latency = measurement.metric_value(coreward_sim::figure::axes::FigureMetric::P99)?;
        eprintln!(
            "run {seed}, {policy_names}: p99 {p99_latency:.2} ({sent_count}; by server {dispatched_by_server:?})"
        );
        Ok(measurement)
    }
}
