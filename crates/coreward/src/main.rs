//! The one command; each sub-command is a crate's, nothing is decided here.

use std::path::PathBuf;

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
    /// The controller: reports in, tables out (SIGHUP: read the file again)
    Controller(ConfigArgs),
    /// The load balancer: attaches the XDP program, or takes over the one at work, and follows the controller
    Lb(LbArgs),
    /// Watch the whole system work: the same connections under every policy, side by side (needs root)
    Demo(demo::DemoOptions),
    /// Pieces of the testbed
    Testbed(testbed::TestbedArgs),
}

#[derive(clap::Args)]
struct ConfigArgs {
    /// The daemon's file (docs/config.md)
    #[arg(long, value_name = "FILE")]
    config: PathBuf,
}

#[derive(clap::Args)]
struct LbArgs {
    #[command(flatten)]
    config: ConfigArgs,
    /// Take the program from the interface and remove what is pinned: forwarding ends
    #[arg(long)]
    detach: bool,
}

fn main() -> anyhow::Result<()> {
    start_logging();
    match Cli::parse().command {
        Command::Controller(args) => coreward_control::server::run(&args.config),
        Command::Lb(args) if args.detach => coreward_lb::daemon::detach(&args.config.config),
        Command::Lb(args) => coreward_lb::daemon::run(&args.config.config),
        Command::Demo(options) => demo::run(&options),
        // Before any thread is started: the paced server forks.
        Command::Testbed(args) => testbed::run(&args),
    }
}

/// To standard error; `RUST_LOG` says how much (default: info).
fn start_logging() {
    let filter = tracing_subscriber::EnvFilter::try_from_default_env()
        .unwrap_or_else(|_| tracing_subscriber::EnvFilter::new("info"));
    tracing_subscriber::fmt().with_env_filter(filter).with_writer(std::io::stderr).with_target(false).init();
}
