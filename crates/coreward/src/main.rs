//! The one command; each sub-command is a crate's, nothing is decided here.

use clap::Parser as _;
use coreward_testbed::{cli as testbed, demo};

#[derive(clap::Parser)]
#[command(name = "coreward", version, about)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(clap::Subcommand)]
enum Command {
    /// Watch the whole system work: the same connections under every policy, side by side (needs root)
    Demo(demo::DemoOptions),
    /// Pieces of the testbed
    Testbed(testbed::TestbedArgs),
}

fn main() -> anyhow::Result<()> {
    match Cli::parse().command {
        Command::Demo(options) => demo::run(&options),
        // Before any thread is started: the paced server forks.
        Command::Testbed(args) => testbed::run(&args),
    }
}
