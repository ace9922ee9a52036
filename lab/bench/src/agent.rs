//! Cost of the agent: a real agent, with its programs attached to a virtual device of many queues, reports to a real
//! controller in another process. All run in a network namespace that ends with this process.

use std::fs;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use crate::cpus::thread_cpu_time;
use crate::default_args::default_args;
use crate::namespace::{self, ip};
use anyhow::{Context as _, ensure};
use coreward_agent::agent::Agent;
use coreward_agent::config::{self, Config, Steer};
use coreward_agent::daemon;
use coreward_intf as intf;
use libbpf_rs::{MapHandle, MapType, libbpf_sys};

use crate::controller;
use crate::controller_process::{Controller, ScratchDirectory};
use crate::report::{Goal, Report, Table, goal_cells, summarize};

/// Options of `coreward-lab bench agent`.
#[derive(Debug, Clone, clap::Args)]
pub struct Args {
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

impl Default for Args {
    fn default() -> Self {
        default_args()
    }
}

/// Measures the cost of the agent in a new thread, because a network namespace belongs to a thread. Fails without root,
/// or when the agent or the controller does not start.
pub fn run(args: &Args) -> anyhow::Result<Report> {
    namespace::measure_in_thread("agent", args, measure)
}

fn measure(args: &Args) -> anyhow::Result<Report> {
    namespace::enter_new()?;
    ip("link set lo up")?;
    let queues = format!("numrxqueues {0} numtxqueues {0}", args.cores);
    ip(&format!("link add eth0 {queues} type veth peer name eth1 {queues}"))?;
    let (scratch, pins) = (ScratchDirectory::new()?, PinDirectory::new()?);
    let mut one_agent = controller::Args::default();
    (one_agent.agents, one_agent.report_interval_ms) = (1, args.report_interval_ms);
    let mut controller = Controller::start(&controller::fleet(&one_agent), None, &scratch.0)?;
    let mut agent = Agent::start(configuration(args, &controller, &scratch.0, &pins.0)?)?;
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let windows = runtime.block_on(async {
        tokio::select! {
            never = daemon::serve(&mut agent) => match never? {},
            windows = measure_windows(args, &mut controller) => windows,
        }
    })?;
    agent.detach()?;
    Ok(report(args, &windows))
}

fn configuration(args: &Args, controller: &Controller, scratch: &Path, pins: &Path) -> anyhow::Result<Config> {
    let busy = scratch.join("busy");
    fs::write(&busy, vec![1; usize::from(args.cores) * 8])?;
    let registers = pins.join("emulated_rss");
    let options =
        libbpf_sys::bpf_map_create_opts { sz: size_of::<libbpf_sys::bpf_map_create_opts>() as _, ..Default::default() };
    let bytes = size_of::<intf::emulated_rss>() as u32;
    MapHandle::create(MapType::Array, Some("registers"), 4, bytes, 1, &options)?.pin(&registers)?;
    Ok(Config {
        server: "s0".to_owned(),
        controllers: controller.address.into(),
        interface: "eth0".to_owned(),
        pin_directory: pins.join("agent"),
        manage_rss: true,
        manage_timestamps: true,
        steer: Steer::Affinity,
        load: config::Load::Published { path: busy },
        rss: config::Rss::Testbed { path: registers, entries: 128 },
        metrics: None,
        tls: None,
        dispatch: None,
        decapsulate_from: None,
    })
}

/// Directory of BPF pins on bpffs, which is removed when this value is dropped.
pub(crate) struct PinDirectory(pub(crate) PathBuf);

impl PinDirectory {
    pub(crate) fn new() -> anyhow::Result<Self> {
        let path = PathBuf::from(format!("/sys/fs/bpf/coreward-bench-{}", std::process::id()));
        fs::create_dir(&path).with_context(|| format!("{} (is bpffs mounted?)", path.display()))?;
        Ok(Self(path))
    }
}

impl Drop for PinDirectory {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

/// CPU use of the agent and rate of its reports in one measured window.
struct WindowResult {
    cpu_pct: f64,
    cpu_per_report_us: f64,
    reports_per_second: f64,
}

async fn accepted_reports(controller: &mut Controller) -> anyhow::Result<u64> {
    Ok(controller.status().await?.accepted_reports)
}

async fn measure_windows(args: &Args, controller: &mut Controller) -> anyhow::Result<Vec<WindowResult>> {
    // Until the agent has its configuration and reports regularly.
    tokio::time::sleep(Duration::from_secs(2)).await;
    let mut windows = Vec::new();
    for _ in 0..args.windows {
        let (reports, cpu, start) = (accepted_reports(controller).await?, thread_cpu_time(), Instant::now());
        tokio::time::sleep(Duration::from_secs(args.window_seconds)).await;
        let (cpu, elapsed) = (thread_cpu_time() - cpu, start.elapsed().as_secs_f64());
        let reports = accepted_reports(controller).await? - reports;
        ensure!(reports > 0, "no report reached the controller");
        windows.push(WindowResult {
            cpu_pct: cpu.as_secs_f64() / elapsed * 100.0,
            cpu_per_report_us: cpu.as_secs_f64() * 1e6 / reports as f64,
            reports_per_second: reports as f64 / elapsed,
        });
    }
    Ok(windows)
}

fn report(args: &Args, windows: &[WindowResult]) -> Report {
    let mut table = Table::new(&["", "median", "least", "most", "goal", "verdict"]);
    let mut row = |what: &str, of: fn(&WindowResult) -> f64, goal: Option<Goal>| {
        let summary = summarize(windows.iter().map(of));
        // One decimal is not enough for a percentage below 1.
        let values = summary.map(|value| format!("{value:.2}").into());
        table.add_row([what.into()].into_iter().chain(values).chain(goal_cells(goal, summary[0])));
    };
    row("CPU of the agent, % of one", |window| window.cpu_pct, Some(Goal::AtMost(1.0)));
    row("CPU per report (its share of the looks included), us", |window| window.cpu_per_report_us, None);
    row("reports taken per second", |window| window.reports_per_second, None);
    Report {
        name: "agent",
        title: "The agent",
        about: format!(
            "The agent, with its programs at a veth device of {} receive queues, reports {} cores every {} ms to a \
             controller by gRPC; once a second it checks RSS, interrupts and workers. CPU time of its thread in {} \
             windows of {} s.",
            args.cores, args.cores, args.report_interval_ms, args.windows, args.window_seconds,
        ),
        tables: vec![table],
    }
}
