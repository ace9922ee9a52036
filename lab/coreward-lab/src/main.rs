//! Command `coreward-lab`, each of whose sub-commands is implemented in its own crate.

#[cfg(test)]
mod documents;
mod live;

use std::process::ExitCode;

use clap::{CommandFactory as _, Parser as _};
use coreward_bench::cli::{self as bench, BenchArgs};
use coreward_cli::cli_documentation::CliDocumentationCommand;
use coreward_cli::{exit_status, print_to_stdout};
use coreward_fuzz::cli::{self as fuzz, FuzzArgs};
use coreward_load::cli::{self as load, LoadGeneratorArgs};
use coreward_sim::cli::{self as sim, SimArgs};
use coreward_sim::figure::cli::{self as figure, FigureArgs};
use coreward_testbed::cli::{self as testbed, TestbedArgs};
use coreward_testbed::demo::{self, DemoOptions};

#[derive(clap::Parser)]
#[command(name = "coreward-lab", version, about)]
struct LabCli {
    #[command(subcommand)]
    command: LabCommand,
}

#[derive(clap::Subcommand)]
enum LabCommand {
    /// Run the same connections under every policy at once, in network namespaces (needs root)
    Demo(DemoOptions),
    /// Simulate policies on a trace or on random arrivals
    Sim(SimArgs),
    /// Reproduce the papers' figures next to the published numbers, and check the papers' statements
    Figure(FigureArgs),
    /// Send requests to a service (open loop) and report the distribution of response times
    Load(LoadGeneratorArgs),
    /// Run parts of the testbed: servers, clients, experiments
    Testbed(TestbedArgs),
    /// Measure coreward on this machine
    Bench(BenchArgs),
    /// Compare the load balancer's BPF program with the reference model on generated packets (needs root)
    Fuzz(FuzzArgs),
    #[command(flatten)]
    Shell(CliDocumentationCommand),
}

fn main() -> ExitCode {
    let _ = coreward_cli::start_logging();
    exit_status("coreward-lab", run_lab_command(LabCli::parse().command))
}

fn run_lab_command(command: LabCommand) -> anyhow::Result<()> {
    match command {
        LabCommand::Demo(options) => demo::run_demo(&options),
        LabCommand::Sim(args) => print_to_stdout(&sim::run(args)?),
        LabCommand::Figure(args) => figure::run(args, live::LIVE_FIGURES),
        LabCommand::Load(args) => print_to_stdout(&load::run(&args)?),
        // Some of the testbed's servers fork, so this must happen before the first thread starts.
        LabCommand::Testbed(args) => testbed::run_testbed_command(&args),
        LabCommand::Bench(args) => bench::run_bench_command(&args),
        LabCommand::Fuzz(args) => fuzz::run_fuzz_command(args),
        LabCommand::Shell(shell) => shell.run(LabCli::command()),
    }
}
