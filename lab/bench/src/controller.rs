//! Cost of the controller. Emulated agents, each with its own TCP connection and gRPC stream, report to a real
//! controller in another process.

use std::time::Duration;

use anyhow::ensure;
use coreward_api::types::ReportState;
use tokio::time::{Instant, sleep};

use crate::controller_process::{Controller, ScratchDirectory, subscribe, take_tables};
use crate::default_args::parse_default_args;
use crate::fake_agent::{self, server_name};
use crate::report::{Cell, Goal, Report, Table, goal_cells, median_min_max};

/// Options of `coreward-lab bench controller`.
#[derive(Debug, Clone, clap::Args)]
pub struct Args {
    /// Number of agents, each with its own connection
    #[arg(long, default_value_t = 1000, value_parser = clap::value_parser!(u32).range(1..=16_384))]
    pub(crate) agents: u32,
    /// Number of cores of each server
    #[arg(long, default_value_t = 64, value_parser = clap::value_parser!(u16).range(1..=2048))]
    pub(crate) cores: u16,
    /// Interval of an agent's reports (ms)
    #[arg(long, default_value_t = 100, value_parser = clap::value_parser!(u64).range(10..=1000))]
    pub(crate) report_interval_ms: u64,
    /// Number of load balancers that get every table
    #[arg(long, default_value_t = 2)]
    pub(crate) load_balancers: u32,
    /// Number of services, each with an equal share of the servers
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=1024))]
    pub(crate) services: u32,
    /// Policy of every service
    #[arg(long, default_value = coreward_model::policy::DEFAULT_POLICY_NAME)]
    pub(crate) policy: String,
    /// Number of measured windows
    #[arg(long, default_value_t = 5, value_parser = clap::value_parser!(u32).range(1..))]
    pub(crate) windows: u32,
    /// Length of a window (s)
    #[arg(long, default_value_t = 2, value_parser = clap::value_parser!(u64).range(1..))]
    pub(crate) window_seconds: u64,
}

impl Default for Args {
    fn default() -> Self {
        parse_default_args()
    }
}

/// Runs the bench of the controller. Fails when the controller does not start, or an agent cannot connect.
pub fn run(args: &Args) -> anyhow::Result<Report> {
    coreward_control_server::server::raise_file_limit();
    let scratch_directory = ScratchDirectory::new()?;
    let mut controller = Controller::start(&fleet_document(args), None, &scratch_directory.0)?;
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let results = runtime.block_on(measure(args, &mut controller))?;
    Ok(build_report(args, &results))
}

/// Returns the bench's fleet document (TOML), in which each service has one VIP and an equal share of the servers.
pub(crate) fn fleet_document(args: &Args) -> String {
    let mut document = format!("report_interval = \"{}ms\"\n", args.report_interval_ms);
    for agent in 0..args.agents {
        let octets = agent.to_be_bytes();
        document +=
            &format!("[[server]]\nname = \"{}\"\naddress = \"10.2.{}.{}\"\n", server_name(agent), octets[2], octets[3]);
    }
    for service in 0..args.services {
        let server_names =
            (0..args.agents).filter(|agent| agent % args.services == service).map(server_name).collect::<Vec<_>>();
        let (vip, policy) = (vip(service), &args.policy);
        document += &format!(
            "[[service]]\nname = \"web{service}\"\nvip = \"{vip}\"\npolicy = {policy:?}\nservers = {server_names:?}\n"
        );
    }
    document
}

pub(crate) fn vip(service: u32) -> std::net::SocketAddrV4 {
    let octets = service.to_be_bytes();
    std::net::SocketAddrV4::new([10, 200, octets[2], octets[3]].into(), 80)
}

/// The controller's CPU use and its rate of accepted reports in one measured window.
pub(crate) struct WindowResult {
    pub(crate) user_pct: f64,
    pub(crate) system_pct: f64,
    cpu_per_report_us: f64,
    pub(crate) reports_per_second: f64,
}

struct ControllerResults {
    windows: Vec<WindowResult>,
    resident_mib: u64,
    /// Absolute difference between the report interval and the time from each table to the next one.
    table_jitter_ms: Vec<f64>,
    table_bytes: usize,
}

async fn measure(args: &Args, controller: &mut Controller) -> anyhow::Result<ControllerResults> {
    let mut tables = Vec::new();
    for balancer in 0..args.load_balancers {
        tables.push(tokio::spawn(take_tables(subscribe(controller, balancer).await?)));
    }
    let interval = Duration::from_millis(args.report_interval_ms);
    fake_agent::start_all(controller, args.agents, args.cores, interval).await?;
    // The first reports are not measured, because they also carry RSS keys and tables.
    sleep(Duration::from_secs(2)).await;
    let mut windows = Vec::new();
    for _ in 0..args.windows {
        windows.push(measure_window(controller, Duration::from_secs(args.window_seconds)).await?);
    }
    let resident_mib = controller.resident_mib()?;
    let status = controller.status().await?;
    let reporting = status.servers.iter().filter(|server| server.reports == ReportState::Fresh).count();
    ensure!(reporting == args.agents as usize, "{reporting} of {} agents report", args.agents);
    let refused: u64 = status.refused_reports.values().sum();
    ensure!(refused == 0, "{refused} reports were refused: {:?}", status.refused_reports);
    controller.process.kill()?;
    let mut measured = ControllerResults { windows, resident_mib, table_jitter_ms: Vec::new(), table_bytes: 0 };
    for taken in tables {
        let (arrivals, bytes) = taken.await?;
        let expected = args.report_interval_ms as f64;
        let gaps = arrivals.windows(2).skip(20).map(|pair| (pair[1] - pair[0]).as_secs_f64() * 1e3 - expected);
        measured.table_jitter_ms.extend(gaps.map(f64::abs));
        measured.table_bytes = bytes;
    }
    Ok(measured)
}

pub(crate) async fn measure_window(controller: &mut Controller, length: Duration) -> anyhow::Result<WindowResult> {
    let asking = controller.operator_client().await?;
    let accepted = async || anyhow::Ok((asking.status(false).await?.accepted_reports as f64, Instant::now()));
    let (reports_before, first) = accepted().await?;
    let (before, start) = (controller.cpu_seconds()?, Instant::now());
    sleep(length).await;
    let (after, elapsed) = (controller.cpu_seconds()?, start.elapsed().as_secs_f64());
    let (reports_after, last) = accepted().await?;
    let rate = (reports_after - reports_before) / (last - first).as_secs_f64();
    let (user, system) = (after.0 - before.0, after.1 - before.1);
    Ok(WindowResult {
        user_pct: user / elapsed * 100.0,
        system_pct: system / elapsed * 100.0,
        cpu_per_report_us: (user + system) / elapsed / rate * 1e6,
        reports_per_second: rate,
    })
}

fn build_report(args: &Args, results: &ControllerResults) -> Report {
    let mut table = Table::new(&["", "median", "least", "most", "goal", "verdict"]);
    let mut add_result_row = |what: &str, of: fn(&WindowResult) -> f64, goal: Option<Goal>| {
        let median_min_max = median_min_max(results.windows.iter().map(of));
        table.add_row(
            [what.into()]
                .into_iter()
                .chain(median_min_max.map(Cell::Decimal))
                .chain(goal_cells(goal, median_min_max[0])),
        );
    };
    let half_cpu_goal = Some(Goal::AtMost(50.0));
    add_result_row("CPU of the controller, % of one", |window| window.user_pct + window.system_pct, half_cpu_goal);
    add_result_row("  of it in the kernel (TCP), %", |window| window.system_pct, None);
    add_result_row("CPU per report (its share of tables included), us", |window| window.cpu_per_report_us, None);
    add_result_row("reports taken per second", |window| window.reports_per_second, None);
    let jitter_row_name = "tables early or late at the load balancers, ms";
    table.add_summary_row(jitter_row_name, results.table_jitter_ms.iter().copied(), goal_cells(None, 0.0));
    Report {
        name: "controller",
        heading: "The controller",
        method: format!(
            "{} agents of {} cores report every {} ms, each over its own connection (loopback); {} load balancers \
             receive a table of {} ({} bytes) at the same rate. CPU by /proc/PID/stat in {} windows of {} s; resident \
             memory {} MiB.",
            args.agents,
            args.cores,
            args.report_interval_ms,
            args.load_balancers,
            args.policy,
            results.table_bytes,
            args.windows,
            args.window_seconds,
            results.resident_mib,
        ),
        tables: vec![table],
    }
}
