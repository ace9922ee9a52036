//! Command `coreward-lab`, each of whose sub-commands is implemented in its own crate.

#[cfg(test)]
mod documents;
mod live;

use std::process::ExitCode;

use clap::{CommandFactory as _, Parser as _};
use coreward_bench::cli::{self as bench, BenchArgs};
use coreward_cli::shell::CliDocumentationCommand;
use coreward_cli::{exit_status, print};
use coreward_fuzz::cli::{self as fuzz, FuzzArgs};
use coreward_load::cli::{self as load, LoadArgs};
use coreward_sim::cli::{self as sim, SimArgs};
use coreward_sim::figure::cli::{self as figure, FigureArgs};
use coreward_testbed::cli::{self as testbed, TestbedArgs};
use coreward_testbed::demo::{self, DemoOptions};

#[derive(clap::Parser)]
#[command(name = "coreward-lab", version, about)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(clap::Subcommand)]
enum Command {
    /// Run the same connections under every policy at once, in network namespaces (needs root)
    Demo(DemoOptions),
    /// Simulate policies on a trace or on random arrivals
    Sim(SimArgs),
    /// Reproduce the papers' figures next to the published numbers, and check the papers' statements
    Figure(FigureArgs),
    /// Send requests to a service (open loop) and report the distribution of response times
    Load(LoadArgs),
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
    exit_status("coreward-lab", run(Cli::parse().command))
}

fn run(command: Command) -> anyhow::Result<()> {
    match command {
        Command::Demo(options) => demo::run(&options),
        Command::Sim(args) => print(&sim::run(args)?),
        Command::Figure(args) => figure::run(args, live::LIVE_FIGURES),
        Command::Load(args) => print(&load::run(&args)?),
        // Some of the testbed's servers fork, so this must happen before the first thread starts.
        Command::Testbed(args) => testbed::run(&args),
        Command::Bench(args) => bench::run(&args),
        Command::Fuzz(args) => fuzz::run(args),
        Command::Shell(shell) => shell.run(Cli::command()),
    }
}
