//! `coreward-lab demo` sends the same connections to testbeds of every policy at the same time.
//!
//! Each policy has its own testbed with the real controller, load balancer and agents, and the same arrival logs and
//! start times. In each seed's run one server joins the pool after a third of the time, and another drains after two
//! thirds. Only RSS, which veth lacks, and the cores are emulated. Each core is a paced worker.
//!
//! * [`options`]: command line
//! * [`policy_run`]: testbed of one policy
//! * [`timeline`]: times of the pool's changes, and seconds that count in the results
//! * [`load_variances`]: variances computed from busy times
//! * [`simulated_variances`]: the same arrival logs in the simulator
//! * [`results`]: the JSON and the table
//! * [`variance_picture`]: the SVG
//! * [`host_cpu`]: CPU load of the machine

pub mod host_cpu;
pub mod load_variances;
pub mod options;
pub mod policy_run;
pub mod results;
pub mod seed_summary;
pub mod simulated_variances;
pub mod timeline;
pub mod variance_picture;

use std::fs;
use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context as _, bail};
use coreward_model::arrival_log::{ArrivalLog, ConnectionWorkload};
use coreward_model::replay::{ArrivalReplaySettings, ReplayPlacementMethod, replay_for_variances};
use coreward_model::statistics::median;
use indicatif::{ProgressBar, ProgressStyle};

use crate::interrupt_flag;
use crate::topology::find_missing_privilege;
use coreward_load::event_loop::now_ns;
use host_cpu::HostCpuMeter;
use load_variances::SeedRunMeasures;
pub use options::{DemoOptions, DemoOutputFormat};
use policy_run::PolicyTestbed;
use results::{DemoResults, PolicyRuns};
use simulated_variances::SimulatedLoadVariances;
use timeline::PoolChangeTimeline;

/// Time from the start of the load generators to time 0 of the arrival log. The generators read the log meanwhile.
const LOAD_START_DELAY: Duration = Duration::from_millis(700);
/// Pause between the runs of two seeds, after which the load of one run does not affect the next.
const PAUSE_BETWEEN_SEEDS: Duration = Duration::from_secs(1);

/// Runs the demo and prints its results. Fails without root, when a testbed or a daemon does not start, or when
/// interrupted. It leaves no processes or network namespaces behind.
pub fn run_demo(options: &DemoOptions) -> anyhow::Result<()> {
    if !options.simulated
        && let Some(privilege_error) = find_missing_privilege()
    {
        bail!(privilege_error);
    }
    interrupt_flag::catch_signals()?;
    fs::create_dir_all(&options.out).with_context(|| format!("cannot create {}", options.out.display()))?;
    let log_files = write_arrival_logs(options)?;
    if options.simulated {
        println!(
            "{}",
            results::build_simulated_variance_table(&options.selected_policies(), &simulate_logs(options, &log_files))
        );
        return Ok(());
    }
    let progress_bar = create_progress_bar(options);
    let demo_results = run_simulation_and_testbeds(options, &log_files, &progress_bar)?;
    progress_bar.finish_and_clear();
    fs::write(options.out.join("demo.json"), demo_results.to_json()?)?;
    variance_picture::draw_picture(&demo_results, &options.out.join("demo.svg"))?;
    match options.format {
        DemoOutputFormat::Json => println!("{}", demo_results.to_json()?),
        DemoOutputFormat::Text => println!("{}", demo_results.to_text(&options.out)),
    }
    Ok(())
}

struct ArrivalLogFile {
    arrival_log: ArrivalLog,
    path: PathBuf,
}

fn write_arrival_logs(options: &DemoOptions) -> anyhow::Result<Vec<ArrivalLogFile>> {
    let workload = ConnectionWorkload {
        duration_us: options.seconds * 1_000_000,
        core_count: u32::from(options.servers) * u32::from(options.cores),
        ..ConnectionWorkload::default()
    };
    let write_arrival_log = |seed: &u64| {
        let arrival_log = workload.generate(*seed);
        let log_path = fs::canonicalize(&options.out)?.join(format!("arrivals-seed{seed}.txt"));
        fs::write(&log_path, arrival_log.to_string())
            .with_context(|| format!("cannot write {}", log_path.display()))?;
        Ok(ArrivalLogFile { arrival_log, path: log_path })
    };
    options.seeds.iter().map(write_arrival_log).collect()
}

fn run_simulation_and_testbeds(
    options: &DemoOptions,
    logs: &[ArrivalLogFile],
    progress: &ProgressBar,
) -> anyhow::Result<DemoResults> {
    let timeline = PoolChangeTimeline::new(options.seconds);
    let noise_floors: Vec<f64> = logs.iter().map(|log| simulate_noise_floor_pct(options, &log.arrival_log)).collect();
    // Simulate before the testbeds run, because the simulation's CPU load would disturb the measurements.
    show_progress_step(progress, "simulating the same logs under the same policies".to_owned());
    let simulated_variances = simulate_logs(options, logs);
    interrupt_flag::ensure_not_interrupted()?;
    let mut policy_testbeds = start_testbeds(options, logs[0].arrival_log.source_address_count, progress)?;
    let mut cpu_meter = HostCpuMeter::new()?;
    let mut policy_runs: Vec<PolicyRuns> =
        policy_testbeds.iter().map(|testbed| PolicyRuns::new(testbed.policy_name())).collect();
    let first_generations = query_table_generations(&policy_testbeds)?;
    for (log_index, log) in logs.iter().enumerate() {
        let seed_measures =
            replay_log_on_testbeds(&mut policy_testbeds, log_index, log, &timeline, &mut cpu_meter, progress)?;
        policy_runs.iter_mut().zip(seed_measures).for_each(|(runs, measures)| runs.seed_measures.push(measures));
    }
    for ((runs, generation_before), generation_after) in
        policy_runs.iter_mut().zip(first_generations).zip(query_table_generations(&policy_testbeds)?)
    {
        runs.created_table_count = generation_after - generation_before;
    }
    Ok(DemoResults {
        policy_runs,
        simulated_variances,
        noise_floor_pct: median(&noise_floors).context("no seed")?,
        run_seconds: options.seconds,
        server_count: options.servers,
        cores_per_server: options.cores,
        timeline,
        machine_busy_pct: cpu_meter.busy_pct(),
    })
}

fn start_testbeds(
    options: &DemoOptions,
    client_addresses_per_log: u16,
    progress: &ProgressBar,
) -> anyhow::Result<Vec<PolicyTestbed>> {
    let start_testbed = |policy: &'static str| {
        show_progress_step(progress, format!("starting testbed, controller, load balancer, agents: {policy}"));
        let testbed = PolicyTestbed::start(policy, options, client_addresses_per_log)?;
        progress.inc(1);
        interrupt_flag::ensure_not_interrupted()?;
        Ok(testbed)
    };
    options.selected_policies().into_iter().map(start_testbed).collect()
}

fn simulate_logs(options: &DemoOptions, logs: &[ArrivalLogFile]) -> Vec<SimulatedLoadVariances> {
    let arrival_logs: Vec<&ArrivalLog> = logs.iter().map(|log| &log.arrival_log).collect();
    simulated_variances::simulate_policies(
        options,
        &options.selected_policies(),
        &arrival_logs,
        &PoolChangeTimeline::new(options.seconds),
    )
}

/// Returns the per-core variance (%) of a simulated load balancer that knows all future requests. No real load balancer
/// can do better. The variance is not 0, because requests are indivisible.
fn simulate_noise_floor_pct(options: &DemoOptions, log: &ArrivalLog) -> f64 {
    let warm_up_us = timeline::POOL_SETTLE_SECONDS * 1_000_000;
    let replay_settings = ArrivalReplaySettings {
        server_count: options.servers,
        cores_per_server: options.cores,
        warm_up_time_us: warm_up_us,
        ..ArrivalReplaySettings::default()
    };
    replay_for_variances(log, replay_settings, ReplayPlacementMethod::Oracle).across_cores_pct
}

fn query_table_generations(testbeds: &[PolicyTestbed]) -> anyhow::Result<Vec<u64>> {
    testbeds.iter().map(PolicyTestbed::query_table_generation).collect()
}

fn replay_log_on_testbeds(
    testbeds: &mut [PolicyTestbed],
    log_index: usize,
    log: &ArrivalLogFile,
    timeline: &PoolChangeTimeline,
    cpu_meter: &mut HostCpuMeter,
    progress: &ProgressBar,
) -> anyhow::Result<Vec<SeedRunMeasures>> {
    let seed = log.arrival_log.seed;
    let start_ns = now_ns() + LOAD_START_DELAY.as_nanos() as u64;
    for testbed in &mut *testbeds {
        testbed.start_load_generator(log_index, &log.path, start_ns)?;
    }
    show_progress_step(progress, format!("seed {seed}"));
    cpu_meter.start_period()?;
    for second in 0..=timeline.run_seconds() {
        interrupt_flag::sleep_until(start_ns + second * 1_000_000_000)?;
        for testbed in &mut *testbeds {
            testbed.record_busy_times()?;
        }
        if let Some(event) = timeline.pool_change_at(second) {
            for testbed in &mut *testbeds {
                testbed.change_pool(event)?;
            }
            show_progress_step(progress, format!("seed {seed}: a server {}", event.action_verb()));
        }
        progress.inc(u64::from(second > 0));
    }
    cpu_meter.end_period()?;
    let seed_measures = testbeds.iter_mut().map(|testbed| testbed.finish_seed_run(seed, timeline)).collect();
    std::thread::sleep(PAUSE_BETWEEN_SEEDS);
    seed_measures
}

/// Shows `message` about the current step in the progress bar, or prints it as a line if there is no bar.
fn show_progress_step(progress: &ProgressBar, message: String) {
    if progress.is_hidden() {
        eprintln!("{message}");
    }
    progress.set_message(message);
}

fn create_progress_bar(options: &DemoOptions) -> ProgressBar {
    let step_count = options.selected_policies().len() as u64 + options.seconds * options.seeds.len() as u64;
    let style = ProgressStyle::with_template("{elapsed_precise} [{bar:40}] {percent:>3} % {msg}");
    ProgressBar::new(step_count).with_style(style.expect("a template that is known to be right"))
}
