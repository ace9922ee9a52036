//! `coreward-lab bench`: cost of the packet path, the agent and the controller.

use std::path::{Path, PathBuf};

use anyhow::ensure;

use crate::environment::BackgroundLoad;
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

/// Runs a bench, and prints or writes its report. Fails when the bench cannot measure here or a file cannot be written.
pub fn run(arguments: &BenchArgs) -> anyhow::Result<()> {
    match &arguments.command {
        Command::Placement(args) => {
            placement::run(args);
            Ok(())
        }
        Command::Xdp(args) => arguments.show(&xdp::run(args)?),
        Command::Server(args) => arguments.show(&server::run(args)?),
        Command::Flood(args) => arguments.show(&flood::run(args)?),
        Command::Throughput(args) => arguments.show(&throughput::run(args)?),
        Command::Dispatch(args) => arguments.show(&dispatch::run(args)?),
        Command::Orchestrate(args) => arguments.show(&orchestrate::run(args)?),
        Command::CpuLoad(args) => arguments.show(&cpu_load::run(args)?),
        Command::Agent(args) => arguments.show(&agent::run(args)?),
        Command::Idle(args) => arguments.show(&idle::run(args)?),
        Command::Counting(args) => arguments.show(&conn_count::run(args)?),
        Command::Controller(args) => arguments.show(&controller::run(args)?),
        Command::Racks(args) => arguments.show(&racks::run(args)?),
        Command::ControllerProcess(args) => controller_process::run_process(args),
        Command::Scale(args) => arguments.show(&scale::run(args)?),
        Command::LoadBalancerProcess(args) => test_env::run_process(args),
        Command::Start(args) => arguments.show(&startup::run(args)?),
        Command::Sim(args) => arguments.show(&sim::run(args)?),
        Command::All { write } => arguments.run_all(write.as_deref()),
    }
}

type Bench = fn() -> anyhow::Result<Report>;

/// Names and functions of the benches of docs/cost.md, in the order of that page.
const BENCHES: [(&str, Bench); 12] = [
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
    fn show(&self, report: &Report) -> anyhow::Result<()> {
        let report = &Report { about: format!("{} {}", report.about, environment::describe()), ..report.clone() };
        if self.json {
            println!("{}", report.json())
        } else {
            println!("{report}")
        }
        Ok(())
    }

    /// Runs all benches of docs/cost.md. Writes the page only at the end, so that it never mixes two runs. For a failed
    /// bench, the page shows its error.
    fn run_all(&self, page: Option<&Path>) -> anyhow::Result<()> {
        let (environment, load) = (environment::describe(), BackgroundLoad::start()?);
        let (mut parts, mut failed) = (Vec::new(), Vec::new());
        for (name, measure) in BENCHES {
            match measure() {
                Ok(report) => {
                    self.show(&report)?;
                    parts.push(GeneratedPart { name, text: report.to_string() });
                }
                Err(error) => {
                    eprintln!("bench {name}: {error:#}");
                    parts.push(GeneratedPart { name, text: format!("`bench {name}` failed in this run: {error:#}.") });
                    failed.push(name);
                }
            }
        }
        if let Some(page) = page {
            page::write(page, &format!("{environment} {}", load.describe()?), parts)?;
        }
        ensure!(failed.is_empty(), "failed: {}", failed.join(", "));
        Ok(())
    }
}
