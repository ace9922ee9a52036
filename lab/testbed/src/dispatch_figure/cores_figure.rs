//! `coreward-lab figure ringleader-cores-live` measures two services on the cores of `coreward orchestrate`. One is
//! sensitive to latency and has bursts, and the other is a batch that always has requests.

use std::collections::HashMap;
use std::process::Stdio;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::time::Duration;

use anyhow::{Context as _, bail, ensure};
use coreward_load::event_loop::now_ns;
use coreward_sim::figure::axes::FigureMetric;
use coreward_sim::figure::live::{LiveFigureSample, ProgressCallback};
use coreward_sim::figure::scenario::FigureScenario;
use coreward_sim::figure::simulation_job::SimulationJob;
use coreward_sim::rpc::{CoreSelectionPolicy, RpcSimulationConfig};

use super::build_real_time_priority_command;
use super::orchestrator::{FigureRequestKind, RunningOrchestrator};
use super::points::{self, find_measurement, measurement_key};
use super::requests::{RequestLoad, RequestLoadMeasurement, raise_open_file_limit};
use super::server_figure::ServerFigureEnv;
use crate::addresses::SERVICE_ADDRESS;
use crate::fleet::lab_binary_path;
use crate::process::DEFAULT_WAIT_TIMEOUT;
use crate::topology::{Testbed, find_missing_privilege};

/// Load that each burst adds, as a fraction of the capacity of all cores.
const BURST_LOAD: f64 = 0.5;
const BURST_SECONDS: f64 = 0.1;
/// Interval between the starts of two bursts (ns).
const BURST_INTERVAL_NS: u64 = 1_000_000_000;
/// Number of source ports that bursts use. They differ from the ports of the measured requests.
const BURST_FLOW_COUNT: u16 = 64;
const BURST_FIRST_PORT: u16 = 40_000;
const BATCH_SERVICE_INDEX: usize = 1;
const BURST_STOP_POLL_INTERVAL: Duration = Duration::from_millis(5);

struct CoresFigureRun {
    short_request_measurement: RequestLoadMeasurement,
    /// Share of all cores' time that the batch service used (%).
    batch_cpu_pct: f64,
}

/// Measures every series of `scenario`, in which short requests compete with bursts and with a batch of long requests.
/// Fails without root, when a program cannot be started, when requests are lost, when the machine is too busy, or when
/// interrupted.
pub fn measure_cores_figure(
    scenario: &FigureScenario,
    progress: ProgressCallback<'_>,
) -> anyhow::Result<Vec<LiveFigureSample>> {
    if let Some(privilege_error) = find_missing_privilege() {
        bail!(privilege_error);
    }
    raise_open_file_limit()?;
    let live_settings = scenario.live.as_ref().context("a live figure without [live]")?;
    let (unit_us, seconds) =
        live_settings.unit_us.zip(live_settings.seconds).context("[live]: expected `unit_us` and `seconds`")?;
    let run_plan = points::plan_runs(scenario)?;
    let mut configs: Vec<&RpcSimulationConfig> = run_plan.jobs.iter().filter_map(as_rpc_config).collect();
    // Sort by run, so that disturbances of the machine affect all series alike.
    configs.sort_by_key(|config| config.seed);
    let mut runs_by_key: HashMap<String, CoresFigureRun> = HashMap::new();
    let mut env = None;
    progress(0, configs.len());
    for config in &configs {
        let run = measure_cores_run(
            &ServerFigureEnv::reuse_or_start_env(&mut env, config)?.testbed,
            config,
            unit_us,
            seconds,
        )?;
        runs_by_key.insert(measurement_key(config), run);
        progress(runs_by_key.len(), configs.len());
    }
    points::compute_figure_samples(scenario, &run_plan, |plot_point, job| {
        let run = find_measurement(&runs_by_key, as_rpc_config(job).context("expected [rpc]")?)?;
        match plot_point.query.metric {
            FigureMetric::BatchPct => Ok(run.batch_cpu_pct),
            metric => run.short_request_measurement.metric_value(metric),
        }
    })
}

fn as_rpc_config(job: &SimulationJob) -> Option<&RpcSimulationConfig> {
    if let SimulationJob::Rpc(config) = job { Some(config) } else { None }
}

fn measure_cores_run(
    testbed: &Testbed,
    config: &RpcSimulationConfig,
    unit_us: f64,
    seconds: f64,
) -> anyhow::Result<CoresFigureRun> {
    let RpcSimulationConfig { policy, service_times: service, offered_load: load, cores, seed, .. } = config;
    let CoreSelectionPolicy::RankedQueue(options) = policy else { bail!("policy {policy}: expected jbsrq") };
    let batch_service_time = service.class_service_times().get(BATCH_SERVICE_INDEX).copied();
    let batch_service_time = batch_service_time
        .filter(|_| service.mean() == 1.0)
        .context("service: expected bimodal:0:FACTOR, for the batch")?;
    let orchestrator = RunningOrchestrator::start(
        testbed,
        config,
        options,
        unit_us,
        FigureRequestKind::ServiceTimeWithBatch(batch_service_time),
    )?;
    let requests_per_second = |load: f64| load * f64::from(*cores) / (unit_us / 1e6);
    let request_load = RequestLoad {
        service_times: service.clone(),
        request_mix: None,
        unit_us,
        rate_rps: requests_per_second(*load),
        duration_s: seconds,
        seed: *seed,
    };
    let burst_load =
        RequestLoad { rate_rps: requests_per_second(BURST_LOAD), duration_s: BURST_SECONDS, ..request_load.clone() };
    let stop_flag = AtomicBool::new(false);
    let (batch_result, burst_result) = std::thread::scope(|scope| {
        let burst_thread = scope.spawn(|| send_request_bursts(testbed, &burst_load, &stop_flag));
        let batch_result = measure_with_batch_service(&orchestrator, *cores, || request_load.send_and_measure(testbed));
        stop_flag.store(true, Relaxed);
        (batch_result, burst_thread.join().expect("the thread of bursts"))
    });
    burst_result?;
    let (measurement, batch_pct) = batch_result?;
    orchestrator.stop_and_count_requests()?;
    let (sent_count, lost_count) = measurement.sent_and_lost_request_counts();
    ensure!(lost_count == 0, "{policy} at a load of {load}: {lost_count} of {sent_count} requests were lost");
    let short_request_p99 = measurement.metric_value(FigureMetric::ShortP99)?;
    eprintln!(
        "run {seed}, {policy}, load {load}: p99 {short_request_p99:.2} ({sent_count}), batch {batch_pct:.1} % of the \
         cores"
    );
    Ok(CoresFigureRun { short_request_measurement: measurement, batch_cpu_pct: batch_pct })
}

/// Calls `send` while the batch service runs. Returns the measurement of `send`, and the share of all cores' time that
/// the batch service used meanwhile (%).
fn measure_with_batch_service(
    orchestrator: &RunningOrchestrator,
    cores: u16,
    send: impl FnOnce() -> anyhow::Result<RequestLoadMeasurement>,
) -> anyhow::Result<(RequestLoadMeasurement, f64)> {
    let (begin_ns, busy_before_ns) = (now_ns(), orchestrator.service_busy_ns(BATCH_SERVICE_INDEX)?);
    let measurement = send()?;
    let (end_ns, busy_after_ns) = (now_ns(), orchestrator.service_busy_ns(BATCH_SERVICE_INDEX)?);
    let total_core_ns = (end_ns - begin_ns) as f64 * f64::from(cores);
    Ok((measurement, (busy_after_ns - busy_before_ns) as f64 / total_core_ns * 100.0))
}

/// Sends a burst of requests once per [`BURST_INTERVAL_NS`] until `stop_flag` is set. Each burst has its own seed.
fn send_request_bursts(testbed: &Testbed, burst_load: &RequestLoad, stop_flag: &AtomicBool) -> anyhow::Result<()> {
    let mut next_burst_ns = now_ns() + BURST_INTERVAL_NS;
    for burst_number in 1.. {
        while now_ns() < next_burst_ns {
            if stop_flag.load(Relaxed) {
                return Ok(());
            }
            std::thread::sleep(BURST_STOP_POLL_INTERVAL);
        }
        next_burst_ns += BURST_INTERVAL_NS;
        let mut command = build_real_time_priority_command(lab_binary_path()?);
        command.args(["load", &SERVICE_ADDRESS.to_string(), "--service", &burst_load.service_times.to_string()]);
        command.args(["--multiplier", &burst_load.unit_us.to_string(), "--rate", &burst_load.rate_rps.to_string()]);
        command.args(["--seconds", &burst_load.duration_s.to_string(), "--warm-up", "0"]);
        command.args(["--flows", &BURST_FLOW_COUNT.to_string(), "--first-port", &BURST_FIRST_PORT.to_string()]);
        command.args(["--seed", &(burst_load.seed * 1000 + burst_number).to_string()]);
        command.stdin(Stdio::null()).stdout(Stdio::null());
        let exit_status = testbed.spawn(testbed.client(), command)?.wait_for_exit(*DEFAULT_WAIT_TIMEOUT)?;
        ensure!(exit_status.success(), "coreward-lab load of a burst failed: {exit_status}");
    }
    Ok(())
}
