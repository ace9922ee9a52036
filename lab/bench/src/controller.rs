//! Measures the cost of the controller. Emulated agents, each with its own TCP connection and gRPC stream, report to a
//! real controller in another process.

use std::time::Duration;

use anyhow::ensure;
use coreward_api::types::ReportState;
use tokio::time::{Instant, sleep};

use crate::controller_process::{ControllerProcess, ScratchDirectory, receive_tables_until_end, subscribe_to_tables};
use crate::default_args::parse_default_args;
use crate::fake_agent::{self, server_name_of_agent};
use crate::report::{
    BenchReport, MeasurementGoal, ReportTable, ReportTableCell, goal_and_verdict_cells, median_min_max,
};

/// Options of `coreward-lab bench controller`.
#[derive(Debug, Clone, clap::Args)]
pub struct ControllerBenchArgs {
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

impl Default for ControllerBenchArgs {
    fn default() -> Self {
        parse_default_args()
    }
}

/// Runs the bench of the controller. Fails when the controller does not start, or an agent cannot connect.
pub fn run_controller_bench(args: &ControllerBenchArgs) -> anyhow::Result<BenchReport> {
    coreward_control_server::server::raise_open_file_limit();
    let scratch_directory = ScratchDirectory::new()?;
    let mut controller = ControllerProcess::start(&build_fleet_document(args), None, &scratch_directory.0)?;
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let results = runtime.block_on(measure_controller_cost(args, &mut controller))?;
    Ok(build_controller_report(args, &results))
}

/// Returns the bench's fleet document (TOML), in which each service has one VIP and an equal share of the servers.
pub(crate) fn build_fleet_document(args: &ControllerBenchArgs) -> String {
    let mut document = format!("report_interval = \"{}ms\"\n", args.report_interval_ms);
    for agent in 0..args.agents {
        let address_octets = agent.to_be_bytes();
        document += &format!(
            "[[server]]\nname = \"{}\"\naddress = \"10.2.{}.{}\"\n",
            server_name_of_agent(agent),
            address_octets[2],
            address_octets[3]
        );
    }
    for service in 0..args.services {
        let server_names = (0..args.agents)
            .filter(|agent| agent % args.services == service)
            .map(server_name_of_agent)
            .collect::<Vec<_>>();
        let (vip, policy) = (service_vip(service), &args.policy);
        document += &format!(
            "[[service]]\nname = \"web{service}\"\nvip = \"{vip}\"\npolicy = {policy:?}\nservers = {server_names:?}\n"
        );
    }
    document
}

pub(crate) fn service_vip(service: u32) -> std::net::SocketAddrV4 {
    let address_octets = service.to_be_bytes();
    std::net::SocketAddrV4::new([10, 200, address_octets[2], address_octets[3]].into(), 80)
}

/// CPU use of the controller and its rate of accepted reports in one measured window.
pub(crate) struct ControllerMeasurementWindow {
    pub(crate) user_cpu_pct: f64,
    pub(crate) system_cpu_pct: f64,
    cpu_per_report_us: f64,
    pub(crate) reports_per_second: f64,
}

struct ControllerBenchResults {
    windows: Vec<ControllerMeasurementWindow>,
    resident_mib: u64,
    /// Absolute differences between the report interval and the times from one placement table to the next, at all load
    /// balancers.
    table_interval_deviations_ms: Vec<f64>,
    table_bytes: usize,
}

async fn measure_controller_cost(
    args: &ControllerBenchArgs,
    controller: &mut ControllerProcess,
) -> anyhow::Result<ControllerBenchResults> {
    let mut table_tasks = Vec::new();
    for balancer in 0..args.load_balancers {
        table_tasks.push(tokio::spawn(receive_tables_until_end(subscribe_to_tables(controller, balancer).await?)));
    }
    let report_interval = Duration::from_millis(args.report_interval_ms);
    fake_agent::start_fake_agents(controller, args.agents, args.cores, report_interval).await?;
    // The first reports are not measured, because they also carry RSS keys and tables.
    sleep(Duration::from_secs(2)).await;
    let mut windows = Vec::new();
    for _ in 0..args.windows {
        windows.push(measure_controller_window(controller, Duration::from_secs(args.window_seconds)).await?);
    }
    let resident_mib = controller.resident_mib()?;
    let status = controller.fetch_status().await?;
    let reporting_server_count =
        status.servers.iter().filter(|server| server.report_state == ReportState::Fresh).count();
    ensure!(
        reporting_server_count == args.agents as usize,
        "{reporting_server_count} of {} agents report",
        args.agents
    );
    let rejected_report_count: u64 = status.rejected_reports.values().sum();
    ensure!(rejected_report_count == 0, "{rejected_report_count} reports were rejected: {:?}", status.rejected_reports);
    controller.child.kill()?;
    let mut results =
        ControllerBenchResults { windows, resident_mib, table_interval_deviations_ms: Vec::new(), table_bytes: 0 };
    for table_task in table_tasks {
        let (arrival_times, table_bytes) = table_task.await?;
        let expected_table_gap_ms = args.report_interval_ms as f64;
        let table_gap_errors_ms = arrival_times.windows(2).skip(20).map(|adjacent_arrivals| {
            (adjacent_arrivals[1] - adjacent_arrivals[0]).as_secs_f64() * 1e3 - expected_table_gap_ms
        });
        results.table_interval_deviations_ms.extend(table_gap_errors_ms.map(f64::abs));
        results.table_bytes = table_bytes;
    }
    Ok(results)
}

pub(crate) async fn measure_controller_window(
    controller: &mut ControllerProcess,
    length: Duration,
) -> anyhow::Result<ControllerMeasurementWindow> {
    let api_client = controller.connect_operator_client().await?;
    let accepted_count_and_time =
        async || anyhow::Ok((api_client.status(false).await?.accepted_reports as f64, Instant::now()));
    let (reports_before, first_time) = accepted_count_and_time().await?;
    let (cpu_before, start) = (controller.user_and_system_cpu_seconds()?, Instant::now());
    sleep(length).await;
    let (cpu_after, elapsed_seconds) = (controller.user_and_system_cpu_seconds()?, start.elapsed().as_secs_f64());
    let (reports_after, last_time) = accepted_count_and_time().await?;
    let report_rate = (reports_after - reports_before) / (last_time - first_time).as_secs_f64();
    let (user_seconds, system_seconds) = (cpu_after.0 - cpu_before.0, cpu_after.1 - cpu_before.1);
    Ok(ControllerMeasurementWindow {
        user_cpu_pct: user_seconds / elapsed_seconds * 100.0,
        system_cpu_pct: system_seconds / elapsed_seconds * 100.0,
        cpu_per_report_us: (user_seconds + system_seconds) / elapsed_seconds / report_rate * 1e6,
        reports_per_second: report_rate,
    })
}

fn build_controller_report(args: &ControllerBenchArgs, results: &ControllerBenchResults) -> BenchReport {
    let mut table = ReportTable::new(&["", "median", "least", "most", "goal", "verdict"]);
    let mut add_result_row =
        |row_name: &str, to_value: fn(&ControllerMeasurementWindow) -> f64, goal: Option<MeasurementGoal>| {
            let median_min_max = median_min_max(results.windows.iter().map(to_value));
            table.add_row(
                [row_name.into()]
                    .into_iter()
                    .chain(median_min_max.map(ReportTableCell::Decimal))
                    .chain(goal_and_verdict_cells(goal, median_min_max[0])),
            );
        };
    let half_cpu_goal = Some(MeasurementGoal::AtMost(50.0));
    add_result_row(
        "CPU of the controller, % of one",
        |window| window.user_cpu_pct + window.system_cpu_pct,
        half_cpu_goal,
    );
    add_result_row("  of it in the kernel (TCP), %", |window| window.system_cpu_pct, None);
    add_result_row("CPU per report (its share of tables included), us", |window| window.cpu_per_report_us, None);
    add_result_row("reports taken per second", |window| window.reports_per_second, None);
    let jitter_row_name = "tables early or late at the load balancers, ms";
    table.add_summary_row(
        jitter_row_name,
        results.table_interval_deviations_ms.iter().copied(),
        goal_and_verdict_cells(None, 0.0),
    );
    BenchReport {
        name: "controller",
        heading: "The controller",
        method_description: format!(
            "{} agents of {} cores report every {} ms, each over its own connection (loopback). At the same rate {} \
             load balancers receive a table of {} ({} bytes). CPU times are from /proc/PID/stat in {} windows of {} s. \
             Resident memory is {} MiB.",
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
