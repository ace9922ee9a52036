//! Command `coreward-lab bench`, which measures the cost of the packet path, the agent and the controller.

use std::path::{Path, PathBuf};

use anyhow::ensure;

use crate::environment::BackgroundLoadMeter;
use crate::page::GeneratedPagePart;
use crate::report::BenchReport;
use crate::xdp::{self, flood, server, throughput};
use crate::{
    agent, conn_count, controller, controller_process, cpu_load, dispatch, environment, idle_connections_bench,
    orchestrate, page, placement, racks, scale, sim, startup, test_env,
};

/// Arguments of `coreward-lab bench`.
#[derive(clap::Args)]
pub struct BenchArgs {
    #[command(subcommand)]
    command: BenchCommand,
    /// Print JSON, one line per report
    #[arg(long, global = true)]
    json: bool,
}

#[derive(clap::Subcommand)]
enum BenchCommand {
    /// Compare the policies in virtual time
    Placement(placement::PlacementBenchArgs),
    /// Measure the cost of the load balancer's program per packet (needs root)
    Xdp(xdp::XdpBenchArgs),
    /// Measure the cost of the server's programs per packet (needs root)
    Server(xdp::MeasurementLength),
    /// Measure how a SYN flood on one CPU affects established packets on another (needs root)
    Flood(xdp::MeasurementLength),
    /// Measure the rate of live frames through the load balancer's program (needs root)
    Throughput(throughput::ThroughputBenchArgs),
    /// Measure the cost of selecting the worker of a request (needs root)
    Dispatch(dispatch::DispatchBenchArgs),
    /// Measure requests to cores through shared memory: decisions, round trips, messages
    Orchestrate(orchestrate::OrchestrateBenchArgs),
    /// Measure the load of a core that receives packets, and the cost of that measurement (needs root)
    CpuLoad(cpu_load::CpuLoadBenchArgs),
    /// Measure the cost of the agent (needs root)
    Agent(agent::AgentBenchArgs),
    /// Measure the cost of idle connections for other connections at a server (needs root)
    Idle(idle_connections_bench::IdleBenchArgs),
    /// Measure the cost of the agent's count of connections (needs root)
    Counting(conn_count::CountingBenchArgs),
    /// Measure the cost of the controller, with emulated agents
    Controller(controller::ControllerBenchArgs),
    /// Measure the cost of the controller behind rack controllers, with emulated agents
    Racks(racks::RacksBenchArgs),
    #[command(hide = true)]
    ControllerProcess(controller_process::ControllerProcessArgs),
    /// Measure how many agents a controller on one CPU serves, and the delay of its tables (needs root)
    Scale(scale::ScaleBenchArgs),
    #[command(hide = true)]
    LoadBalancerProcess(test_env::LoadBalancerProcessArgs),
    /// Measure how soon a load balancer with many services forwards packets and applies a change (needs root)
    Start(startup::StartupBenchArgs),
    /// Measure the speed of the simulator
    Sim(sim::SimBenchArgs),
    /// Run all benches of docs/cost.md (needs root)
    All {
        /// Also write the reports into the generated sections of this Markdown file
        #[arg(long, value_name = "FILE")]
        write: Option<PathBuf>,
    },
}

/// Runs a bench, and prints or writes its report. Fails when the bench cannot run on this machine, or a file cannot be
/// written.
pub fn run_bench_command(arguments: &BenchArgs) -> anyhow::Result<()> {
    match &arguments.command {
        BenchCommand::Placement(args) => {
            placement::print_variance_table(args);
            Ok(())
        }
        BenchCommand::Xdp(args) => arguments.print_report(&xdp::run_xdp_bench(args)?),
        BenchCommand::Server(args) => arguments.print_report(&server::run_server_bench(args)?),
        BenchCommand::Flood(args) => arguments.print_report(&flood::run_flood_bench(args)?),
        BenchCommand::Throughput(args) => arguments.print_report(&throughput::run_throughput_bench(args)?),
        BenchCommand::Dispatch(args) => arguments.print_report(&dispatch::run_dispatch_bench(args)?),
        BenchCommand::Orchestrate(args) => arguments.print_report(&orchestrate::run_orchestrate_bench(args)?),
        BenchCommand::CpuLoad(args) => arguments.print_report(&cpu_load::run_cpu_load_bench(args)?),
        BenchCommand::Agent(args) => arguments.print_report(&agent::run_agent_bench(args)?),
        BenchCommand::Idle(args) => arguments.print_report(&idle_connections_bench::run_idle_bench(args)?),
        BenchCommand::Counting(args) => arguments.print_report(&conn_count::run_connection_counting_bench(args)?),
        BenchCommand::Controller(args) => arguments.print_report(&controller::run_controller_bench(args)?),
        BenchCommand::Racks(args) => arguments.print_report(&racks::run_racks_bench(args)?),
        BenchCommand::ControllerProcess(args) => controller_process::run_controller_process(args),
        BenchCommand::Scale(args) => arguments.print_report(&scale::run_scale_bench(args)?),
        BenchCommand::LoadBalancerProcess(args) => test_env::run_load_balancer_process(args),
        BenchCommand::Start(args) => arguments.print_report(&startup::run_startup_bench(args)?),
        BenchCommand::Sim(args) => arguments.print_report(&sim::run_sim_bench(args)?),
        BenchCommand::All { write } => arguments.run_cost_page_benches(write.as_deref()),
    }
}

type BenchFunction = fn() -> anyhow::Result<BenchReport>;

/// Names and functions of the benches in docs/cost.md, in the order of that page.
const COST_PAGE_BENCHES: [(&str, BenchFunction); 12] = [
    ("xdp", || xdp::run_xdp_bench(&xdp::XdpBenchArgs::default())),
    ("server", || server::run_server_bench(&xdp::MeasurementLength::default())),
    ("flood", || flood::run_flood_bench(&xdp::MeasurementLength::default())),
    ("throughput", || throughput::run_throughput_bench(&throughput::ThroughputBenchArgs::default())),
    ("dispatch", || dispatch::run_dispatch_bench(&dispatch::DispatchBenchArgs::default())),
    ("orchestrate", || orchestrate::run_orchestrate_bench(&orchestrate::OrchestrateBenchArgs::default())),
    ("cpu-load", || cpu_load::run_cpu_load_bench(&cpu_load::CpuLoadBenchArgs::default())),
    ("agent", || agent::run_agent_bench(&agent::AgentBenchArgs::default())),
    ("idle", || idle_connections_bench::run_idle_bench(&idle_connections_bench::IdleBenchArgs::default())),
    ("counting", || conn_count::run_connection_counting_bench(&conn_count::CountingBenchArgs::default())),
    ("controller", || controller::run_controller_bench(&controller::ControllerBenchArgs::default())),
    ("sim", || sim::run_sim_bench(&sim::SimBenchArgs::default())),
];

impl BenchArgs {
    fn print_report(&self, report: &BenchReport) -> anyhow::Result<()> {
        let report = &BenchReport {
            method_description: format!(
                "{} {}",
                report.method_description,
                environment::describe_measurement_environment()
            ),
            ..report.clone()
        };
        if self.json {
            println!("{}", report.to_json())
        } else {
            println!("{report}")
        }
        Ok(())
    }

    /// Runs all benches of docs/cost.md. Writes the page only at the end, so that it never contains results of two
    /// runs. If a bench fails, the page shows its error.
    fn run_cost_page_benches(&self, page: Option<&Path>) -> anyhow::Result<()> {
        let (environment, background_load) =
            (environment::describe_measurement_environment(), BackgroundLoadMeter::start()?);
        let (mut page_parts, mut failed_benches) = (Vec::new(), Vec::new());
        for (name, measure) in COST_PAGE_BENCHES {
            match measure() {
                Ok(report) => {
                    self.print_report(&report)?;
                    page_parts.push(GeneratedPagePart { name, markdown_text: report.to_string() });
                }
                Err(error) => {
                    eprintln!("bench {name}: {error:#}");
                    page_parts.push(GeneratedPagePart {
                        name,
                        markdown_text: format!("`bench {name}` failed in this run: {error:#}."),
                    });
                    failed_benches.push(name);
                }
            }
        }
        if let Some(page) = page {
            page::replace_generated_parts_in_file(
                page,
                &format!("{environment} {}", background_load.describe_background_load()?),
                page_parts,
            )?;
        }
        ensure!(failed_benches.is_empty(), "failed: {}", failed_benches.join(", "));
        Ok(())
    }
}
