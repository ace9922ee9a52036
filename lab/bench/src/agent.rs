//! Measures the cost of the agent. A real agent, whose programs are attached to a virtual device with many queues,
//! reports to a real controller in another process. All run in a network namespace that ends with this process.

use std::fs;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use crate::default_args::parse_default_args;
use crate::namespace::{self, run_ip_command};
use crate::thread_cpus::thread_cpu_time;
use anyhow::{Context as _, ensure};
use coreward_agent::agent::Agent;
use coreward_agent::config::{self, AgentConfig, ConnectionSteeringMode};
use coreward_agent::daemon;
use coreward_intf as intf;
use libbpf_rs::{MapHandle, MapType, libbpf_sys};

use crate::controller;
use crate::controller_process::{ControllerProcess, ScratchDirectory};
use crate::report::{BenchReport, MeasurementGoal, ReportTable, goal_and_verdict_cells, median_min_max};

/// Options of `coreward-lab bench agent`.
#[derive(Debug, Clone, clap::Args)]
pub struct AgentBenchArgs {
    /// Number of cores (receive queues) of the server
    #[arg(long, default_value_t = 64, value_parser = clap::value_parser!(u16).range(1..=512))]
    cores: u16,
    /// Interval of reports (ms)
    #[arg(long, default_value_t = 100, value_parser = clap::value_parser!(u64).range(10..=1000))]
    report_interval_ms: u64,
    /// Number of measured windows
    #[arg(long, default_value_t = 5, value_parser = clap::value_parser!(u32).range(1..))]
    windows: u32,
    /// Length of a window (s)
    #[arg(long, default_value_t = 4, value_parser = clap::value_parser!(u64).range(1..))]
    window_seconds: u64,
}

impl Default for AgentBenchArgs {
    fn default() -> Self {
        parse_default_args()
    }
}

/// Measures the agent's cost in a new thread, which enters its own network namespace. Fails without root, or when the
/// agent or the controller does not start.
pub fn run_agent_bench(args: &AgentBenchArgs) -> anyhow::Result<BenchReport> {
    namespace::run_measurement_in_new_thread("agent", args, measure_agent_cost)
}

fn measure_agent_cost(args: &AgentBenchArgs) -> anyhow::Result<BenchReport> {
    namespace::enter_new_network_namespace()?;
    run_ip_command("link set lo up")?;
    let queue_options = format!("numrxqueues {0} numtxqueues {0}", args.cores);
    run_ip_command(&format!("link add eth0 {queue_options} type veth peer name eth1 {queue_options}"))?;
    let (scratch_directory, pin_directory) = (ScratchDirectory::new()?, BpfPinDirectory::new()?);
    let mut controller_args = controller::ControllerBenchArgs::default();
    (controller_args.agents, controller_args.report_interval_ms) = (1, args.report_interval_ms);
    let mut controller =
        ControllerProcess::start(&controller::build_fleet_document(&controller_args), None, &scratch_directory.0)?;
    let mut agent = Agent::start(build_agent_config(args, &controller, &scratch_directory.0, &pin_directory.0)?)?;
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let windows = runtime.block_on(async {
        tokio::select! {
            never = daemon::keep_agent_connected(&mut agent) => match never? {},
            windows = measure_agent_windows(args, &mut controller) => windows,
        }
    })?;
    agent.detach_programs()?;
    Ok(build_agent_report(args, &windows))
}

fn build_agent_config(
    args: &AgentBenchArgs,
    controller: &ControllerProcess,
    scratch_directory: &Path,
    pin_directory: &Path,
) -> anyhow::Result<AgentConfig> {
    let busy_times_path = scratch_directory.join("busy");
    fs::write(&busy_times_path, vec![1; usize::from(args.cores) * 8])?;
    let rss_map_path = pin_directory.join("emulated_rss");
    let map_options =
        libbpf_sys::bpf_map_create_opts { sz: size_of::<libbpf_sys::bpf_map_create_opts>() as _, ..Default::default() };
    let map_value_bytes = size_of::<intf::emulated_rss>() as u32;
    MapHandle::create(MapType::Array, Some("registers"), 4, map_value_bytes, 1, &map_options)?.pin(&rss_map_path)?;
    Ok(AgentConfig {
        server: "s0".to_owned(),
        controllers: controller.grpc_address.into(),
        interface: "eth0".to_owned(),
        pin_directory: pin_directory.join("agent"),
        manage_rss: true,
        manage_timestamps: true,
        steer: ConnectionSteeringMode::Affinity,
        load: config::CoreLoadSourceConfig::Published { path: busy_times_path },
        rss: config::RssSourceConfig::Testbed { path: rss_map_path, entries: 128 },
        metrics: None,
        tls: None,
        dispatch: None,
        decapsulate_from: None,
    })
}

/// Directory for pinned BPF objects on bpffs, which is removed when this value is dropped.
pub(crate) struct BpfPinDirectory(pub(crate) PathBuf);

impl BpfPinDirectory {
    pub(crate) fn new() -> anyhow::Result<Self> {
        let path = PathBuf::from(format!("/sys/fs/bpf/coreward-bench-{}", std::process::id()));
        fs::create_dir(&path).with_context(|| format!("{} (is bpffs mounted?)", path.display()))?;
        Ok(Self(path))
    }
}

impl Drop for BpfPinDirectory {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

/// CPU use of the agent and its rate of reports in one measured window.
struct AgentMeasurementWindow {
    cpu_pct: f64,
    cpu_per_report_us: f64,
    reports_per_second: f64,
}

async fn fetch_accepted_report_count(controller: &mut ControllerProcess) -> anyhow::Result<u64> {
    Ok(controller.fetch_status().await?.accepted_reports)
}

async fn measure_agent_windows(
    args: &AgentBenchArgs,
    controller: &mut ControllerProcess,
) -> anyhow::Result<Vec<AgentMeasurementWindow>> {
    // The wait lasts until the agent has its configuration and reports regularly.
    tokio::time::sleep(Duration::from_secs(2)).await;
    let mut windows = Vec::new();
    for _ in 0..args.windows {
        let (reports_before, cpu_time_before, start) =
            (fetch_accepted_report_count(controller).await?, thread_cpu_time(), Instant::now());
        tokio::time::sleep(Duration::from_secs(args.window_seconds)).await;
        let (cpu_time, elapsed_seconds) = (thread_cpu_time() - cpu_time_before, start.elapsed().as_secs_f64());
        let report_count = fetch_accepted_report_count(controller).await? - reports_before;
        ensure!(report_count > 0, "no report reached the controller");
        windows.push(AgentMeasurementWindow {
            cpu_pct: cpu_time.as_secs_f64() / elapsed_seconds * 100.0,
            cpu_per_report_us: cpu_time.as_secs_f64() * 1e6 / report_count as f64,
            reports_per_second: report_count as f64 / elapsed_seconds,
        });
    }
    Ok(windows)
}

fn build_agent_report(args: &AgentBenchArgs, windows: &[AgentMeasurementWindow]) -> BenchReport {
    let mut table = ReportTable::new(&["", "median", "least", "most", "goal", "verdict"]);
    let mut add_result_row =
        |row_name: &str, to_value: fn(&AgentMeasurementWindow) -> f64, goal: Option<MeasurementGoal>| {
            let median_min_max = median_min_max(windows.iter().map(to_value));
            // One decimal is not enough, because the percentage is below 1.
            let value_cells = median_min_max.map(|value| format!("{value:.2}").into());
            table.add_row(
                [row_name.into()].into_iter().chain(value_cells).chain(goal_and_verdict_cells(goal, median_min_max[0])),
            );
        };
    add_result_row("CPU of the agent, % of one", |window| window.cpu_pct, Some(MeasurementGoal::AtMost(1.0)));
    add_result_row("CPU per report (its share of the checks included), us", |window| window.cpu_per_report_us, None);
    add_result_row("reports taken per second", |window| window.reports_per_second, None);
    BenchReport {
        name: "agent",
        heading: "The agent",
        method_description: format!(
            "The agent at a veth device of {} receive queues reports {} cores every {} ms to a controller by gRPC. \
             Once a second it checks RSS, interrupts and workers. Its thread's CPU time is measured in {} windows of \
             {} s.",
            args.cores, args.cores, args.report_interval_ms, args.windows, args.window_seconds,
        ),
        tables: vec![table],
    }
}
