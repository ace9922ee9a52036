//! Command `coreward-lab bench`, which measures the cost of the packet path, the agent and the controller.

use std::path::{Path, PathBuf};

use anyhow::ensure;

use crate::environment::BackgroundLoadMeter;
use crate::page::GeneratedPart;
use crate::report::Report;
use crate::xdp::{self, flood, server, throughput};
use crate::{
    agent, conn_count, controller, controller_process, cpu_load, dispatch, environment, idle, orchestrate, page,
    placement, racks, scale, sim, startup, test_env,
};

/// Arguments of `coreward-lab bench`.
#[derive(clap::Args)]
pub struct BenchArgs {
    #[command(subcommand)]
    command: Command,
    /// Print JSON, one line per report
    #[arg(long, global = true)]
    json: bool,
}

#[derive(clap::Subcommand)]
enum Command {
    /// Compare the policies in virtual time
    Placement(placement::Args),
    /// Measure the cost of the load balancer's program per packet (needs root)
    Xdp(xdp::Args),
    /// Measure the cost of the server's programs per packet (needs root)
    Server(xdp::MeasurementLength),
    /// Measure how a SYN flood on one CPU affects established packets on another (needs root)
    Flood(xdp::MeasurementLength),
    /// Measure the rate of live frames through the load balancer's program (needs root)
    Throughput(throughput::Args),
    /// Measure the cost of selecting the worker of a request (needs root)
    Dispatch(dispatch::Args),
    /// Measure requests to cores through shared memory: decisions, round trips, messages
    Orchestrate(orchestrate::Args),
    /// Measure the load of a core that receives packets, and the cost of that measurement (needs root)
    CpuLoad(cpu_load::Args),
    /// Measure the cost of the agent (needs root)
    Agent(agent::Args),
    /// Measure the cost of idle connections for other connections at a server (needs root)
    Idle(idle::Args),
    /// Measure the cost of the agent's count of connections (needs root)
    Counting(conn_count::Args),
    /// Measure the cost of the controller, with emulated agents
    Controller(controller::Args),
    /// Measure the cost of the controller behind rack controllers, with emulated agents
    Racks(racks::Args),
    #[command(hide = true)]
    ControllerProcess(controller_process::ProcessArgs),
    /// Measure how many agents a controller on one CPU serves, and the delay of its tables (needs root)
    Scale(scale::Args),
    #[command(hide = true)]
    LoadBalancerProcess(test_env::ProcessArgs),
    /// Measure how soon a load balancer with many services forwards packets and applies a change (needs root)
    Start(startup::Args),
    /// Measure the speed of the simulator
    Sim(sim::Args),
    /// Run all benches of docs/cost.md (needs root)
    All {
        /// Also write the reports into the generated sections of this Markdown file
        #[arg(long, value_name = "FILE")]
        write: Option<PathBuf>,
    },
}

/// Runs a bench, and prints or writes its report. Fails when the bench cannot run on this machine, or a file cannot be
/// written.
pub fn run(arguments: &BenchArgs) -> anyhow::Result<()> {
    match &arguments.command {
        Command::Placement(args) => {
            placement::print_variance_table(args);
            Ok(())
        }
        Command::Xdp(args) => arguments.print_report(&xdp::run(args)?),
        Command::Server(args) => arguments.print_report(&server::run(args)?),
        Command::Flood(args) => arguments.print_report(&flood::run(args)?),
        Command::Throughput(args) => arguments.print_report(&throughput::run(args)?),
        Command::Dispatch(args) => arguments.print_report(&dispatch::run(args)?),
        Command::Orchestrate(args) => arguments.print_report(&orchestrate::run(args)?),
        Command::CpuLoad(args) => arguments.print_report(&cpu_load::run(args)?),
        Command::Agent(args) => arguments.print_report(&agent::run(args)?),
        Command::Idle(args) => arguments.print_report(&idle::run(args)?),
        Command::Counting(args) => arguments.print_report(&conn_count::run(args)?),
        Command::Controller(args) => arguments.print_report(&controller::run(args)?),
        Command::Racks(args) => arguments.print_report(&racks::run(args)?),
        Command::ControllerProcess(args) => controller_process::run_process(args),
        Command::Scale(args) => arguments.print_report(&scale::run(args)?),
        Command::LoadBalancerProcess(args) => test_env::run_process(args),
        Command::Start(args) => arguments.print_report(&startup::run(args)?),
        Command::Sim(args) => arguments.print_report(&sim::run(args)?),
        Command::All { write } => arguments.run_cost_page_benches(write.as_deref()),
    }
}

type BenchFunction = fn() -> anyhow::Result<Report>;

/// Names and functions of the benches in docs/cost.md, in the order of that page.
const COST_PAGE_BENCHES: [(&str, BenchFunction); 12] = [
    ("xdp", || xdp::run(&xdp::Args::default())),
    ("server", || server::run(&xdp::MeasurementLength::default())),
    ("flood", || flood::run(&xdp::MeasurementLength::default())),
    ("throughput", || throughput::run(&throughput::Args::default())),
    ("dispatch", || dispatch::run(&dispatch::Args::default())),
    ("orchestrate", || orchestrate::run(&orchestrate::Args::default())),
    ("cpu-load", || cpu_load::run(&cpu_load::Args::default())),
    ("agent", || agent::run(&agent::Args::default())),
    ("idle", || idle::run(&idle::Args::default())),
    ("counting", || conn_count::run(&conn_count::Args::default())),
    ("controller", || controller::run(&controller::Args::default())),
    ("sim", || sim::run(&sim::Args::default())),
];

impl BenchArgs {
    fn print_report(&self, report: &Report) -> anyhow::Result<()> {
        let report =
            &Report { method: format!("{} {}", report.method, environment::describe_measurement()), ..report.clone() };
        if self.json {
            println!("{}", report.to_json())
        } else {
            println!("{report}")
        }
        Ok(())
    }

    /// Runs all benches of docs/cost.md. Writes the page only at the end, so that it never mixes two runs. If a bench
    /// fails, the page shows its error.
    fn run_cost_page_benches(&self, page: Option<&Path>) -> anyhow::Result<()> {
        let (environment, background_load) = (environment::describe_measurement(), BackgroundLoadMeter::start()?);
        let (mut page_parts, mut failed_benches) = (Vec::new(), Vec::new());
        for (name, measure) in COST_PAGE_BENCHES {
            match measure() {
                Ok(report) => {
                    self.print_report(&report)?;
                    page_parts.push(GeneratedPart { name, text: report.to_string() });
                }
                Err(error) => {
                    eprintln!("bench {name}: {error:#}");
                    page_parts
                        .push(GeneratedPart { name, text: format!("`bench {name}` failed in this run: {error:#}.") });
                    failed_benches.push(name);
                }
            }
        }
        if let Some(page) = page {
            page::replace_parts_in_file(page, &format!("{environment} {}", background_load.describe()?), page_parts)?;
        }
        ensure!(failed_benches.is_empty(), "failed: {}", failed_benches.join(", "));
        Ok(())
    }
}
