//! The one command; each sub-command is a crate's, nothing is decided here.

mod apply;
mod audit;
mod check;
mod contact;
mod drain;
mod top;

use std::net::SocketAddr;
use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::Context as _;
use clap::{CommandFactory as _, Parser as _};
use coreward_agent::rss_command::RssArgs;
use coreward_api::types::{Explain, PacketKind};
use coreward_cli::shell::ShellCommand;
use coreward_cli::{exit_status, print};
use coreward_daemon::drop_capabilities::Daemon;
use coreward_dataplane::capabilities;
use coreward_dispatch::command::{self as dispatch, DispatchArgs};
use coreward_doctor::command::{self as doctor, DoctorArgs};
use coreward_lb::capture_command::CaptureArgs;
use coreward_lb::connections_command::{self, ConnectionsArgs};
use coreward_model::tuple::Protocol;
use coreward_orchestrator::command::{self as orchestrate, OrchestrateArgs};
use coreward_render as show;
use coreward_tls::command::{self as certs, CertsArgs};

use contact::ContactArgs;

#[derive(clap::Parser)]
#[command(name = "coreward", version, about)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(clap::Subcommand)]
enum Command {
    /// The controller: reports in, tables out (SIGHUP: read the files again)
    Controller(ConfigArgs),
    /// The load balancer: attaches the XDP program, or takes over the one at work, and follows the controller
    Lb(LbArgs),
    /// The agent of a server: attaches the programs, or takes over those at work, reports, follows the controller
    Agent(AgentArgs),
    /// The rack controller: agents connect to it, and it sends summaries of their reports
    Rack(ConfigArgs),
    /// At a server: which worker of a UDP service gets a request, for servers as they are
    Dispatch(DispatchArgs),
    /// At a server: send each request of UDP services to a core's priority queue, for servers that use the runtime
    Orchestrate(OrchestrateArgs),
    /// Services, servers, cores and their loads, tables, load balancers, as the controller sees them
    Status(StatusArgs),
    /// Explain the server of a new connection, and the reason
    Explain(ExplainArgs),
    /// The cookie keys: which one stamps, and their rotation
    Keys(KeysArgs),
    /// Whether configuration files are right: every mistake at once, with line, key and what was expected
    Check(check::CheckArgs),
    /// Apply another document of the fleet (servers and services), after showing its changes
    Apply(apply::ApplyArgs),
    /// The fleet's document that is in force
    Fleet(FleetArgs),
    /// Changes of the fleet, with author, origin and previous state
    Audit(audit::AuditArgs),
    /// Drain a server: it gets no new connections, whatever the fleet's document states; show the remaining ones
    Drain(drain::DrainArgs),
    /// Let it take new connections again, as far as the fleet's document lets it
    Undrain(drain::UndrainArgs),
    /// Services, servers, cores and load balancers on a page that follows them, in the terminal
    Top(top::TopArgs),
    /// The controller's store
    Store(StoreArgs),
    /// The fleet's own certificate authority, and the daemons' certificates
    Certs(CertsArgs),
    /// Packets at this load balancer with their decisions: XDP takes packets before tcpdump sees them
    Capture(CaptureArgs),
    /// The heaviest connections of a stateful service, live, from the load balancer's connection table
    Connections(ConnectionsArgs),
    /// Whether this machine is fit for its role, and how to fix it; 1 when it is not
    Doctor(DoctorArgs),
    /// Whether this kernel takes every BPF program
    CheckKernel,
    #[command(flatten)]
    Shell(ShellCommand),
}

#[derive(clap::Args)]
struct ConfigArgs {
    /// The daemon's file (docs/config.md)
    #[arg(long, value_name = "FILE")]
    config: PathBuf,
}

#[derive(clap::Args)]
#[command(args_conflicts_with_subcommands = true, subcommand_negates_reqs = true)]
struct LbArgs {
    #[command(subcommand)]
    command: Option<LbCommand>,
    /// The daemon's file (docs/config.md)
    #[arg(long, value_name = "FILE", required = true)]
    config: Option<PathBuf>,
    /// Take the program from the interface and remove what is pinned: forwarding ends
    #[arg(long)]
    detach: bool,
}

#[derive(clap::Subcommand)]
enum LbCommand {
    /// Have the controller forget a load balancer that is gone for good: its number is free for another one's
    /// connection table
    Forget {
        /// Its name
        name: String,
        #[command(flatten)]
        query: QueryArgs,
    },
}

#[derive(clap::Args)]
#[command(args_conflicts_with_subcommands = true, subcommand_negates_reqs = true)]
struct AgentArgs {
    #[command(subcommand)]
    command: Option<AgentCommand>,
    /// The daemon's file (docs/config.md)
    #[arg(long, value_name = "FILE", required = true)]
    config: Option<PathBuf>,
    /// Take everything off, put everything back (RSS, sysctl), remove what is pinned: the server's connections break
    #[arg(long)]
    detach: bool,
}

#[derive(clap::Subcommand)]
enum AgentCommand {
    /// RSS of a NIC, and the queues at which SYNs actually arrive
    Rss(RssArgs),
}

#[derive(clap::Args)]
struct QueryArgs {
    #[command(flatten)]
    contact: ContactArgs,
    /// Format of the output
    #[arg(long, value_enum, default_value_t = Format::Text)]
    format: Format,
}

#[derive(clap::Args)]
struct StatusArgs {
    #[command(flatten)]
    query: QueryArgs,
    /// With whole RSS keys in JSON: who knows one can aim at a core
    #[arg(long)]
    rss_keys: bool,
}

#[derive(clap::Args)]
struct FleetArgs {
    #[command(subcommand)]
    command: FleetCommand,
}

#[derive(clap::Subcommand)]
enum FleetCommand {
    /// Print it, as it was written
    Show(QueryArgs),
}

#[derive(clap::Args)]
struct StoreArgs {
    #[command(subcommand)]
    command: StoreCommand,
}

#[derive(clap::Subcommand)]
enum StoreCommand {
    /// From the store of one controller's file to that of another's: from one controller to several on etcd, or back
    Copy {
        /// The controller's file that names the store with the records
        #[arg(long, value_name = "FILE")]
        from: PathBuf,
        /// The controller's file that names the store that is to have them
        #[arg(long, value_name = "FILE")]
        to: PathBuf,
        /// Also when there are records already, which are lost
        #[arg(long)]
        replace: bool,
    },
}

#[derive(clap::Args)]
struct KeysArgs {
    #[command(subcommand)]
    command: KeysCommand,
}

#[derive(clap::Subcommand)]
enum KeysCommand {
    /// The key that stamps, its age, and the state of a rotation
    Show(QueryArgs),
    /// Begin a rotation: the next key goes to everybody, and stamps when all have confirmed it
    Rotate {
        #[command(flatten)]
        query: QueryArgs,
        /// Also when the present key is young, and without those that are not connected: connections may break
        #[arg(long)]
        force: bool,
    },
}

#[derive(clap::Args)]
struct ExplainArgs {
    #[command(flatten)]
    query: QueryArgs,
    /// VIP and port of the service
    #[arg(long, value_name = "ADDRESS:PORT")]
    vip: SocketAddr,
    /// Protocol of the service
    #[arg(long, default_value = Protocol::Tcp.name())]
    protocol: Protocol,
    /// Address and port of the client
    #[arg(long, value_name = "ADDRESS:PORT")]
    client: SocketAddr,
    /// A packet of an established connection that echoes this (TSecr, `ecr` in tcpdump), instead of a first one
    #[arg(long, value_name = "TSECR")]
    tsecr: Option<u32>,
    /// A packet of an established connection without timestamps
    #[arg(long, conflicts_with = "tsecr")]
    without_timestamps: bool,
    /// It is a reset
    #[arg(long)]
    reset: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
enum Format {
    /// For people
    Text,
    /// One object, for programs
    Json,
}

impl From<Format> for show::Format {
    fn from(format: Format) -> Self {
        match format {
            Format::Text => Self::Text,
            Format::Json => Self::Json,
        }
    }
}

/// Returns the command's definition: names, options and help of every sub-command.
#[must_use]
pub fn command() -> clap::Command {
    Cli::command()
}

/// Runs the command with this process's arguments.
#[must_use]
pub fn main() -> ExitCode {
    let set_debug = coreward_cli::start_logging();
    coreward_daemon::log_level::set_by(set_debug);
    exit_status("coreward", run(Cli::parse().command))
}

impl Command {
    /// Returns whether it runs until a signal, with its own handling of signals and secrets.
    fn is_daemon(&self) -> bool {
        match self {
            Self::Controller(_) | Self::Rack(_) => true,
            Self::Lb(args) => args.command.is_none() && !args.detach,
            Self::Agent(args) => args.command.is_none() && !args.detach,
            _ => false,
        }
    }
}

fn run(command: Command) -> anyhow::Result<()> {
    if command.is_daemon() {
        coreward_daemon::hold_signals()?;
        coreward_config::reject_foreign_secrets();
    }
    match command {
        Command::Controller(args) => {
            Daemon::Controller.confine()?;
            coreward_control_server::server::run(&args.config)
        }
        Command::Lb(args) => lb(args),
        Command::Agent(args) => agent(args),
        Command::Rack(args) => {
            Daemon::Rack.confine()?;
            coreward_rack::daemon::run(&args.config)
        }
        Command::Dispatch(args) => {
            capabilities::require("coreward dispatch")?;
            Daemon::Dispatch.confine()?;
            dispatch::run(&args)?.map_or(Ok(()), |text| print(&text))
        }
        Command::Orchestrate(args) => {
            Daemon::Orchestrate.confine()?;
            print(&orchestrate::run(&args)?)
        }
        Command::Status(StatusArgs { query, rss_keys }) => {
            print(&show::status(&query.contact.client()?, rss_keys, query.format.into())?)
        }
        Command::Check(args) => check::run(&args),
        Command::Certs(args) => print(&certs::run(&args)?),
        Command::Apply(args) => apply::run(&args),
        Command::Fleet(FleetArgs { command: FleetCommand::Show(query) }) => {
            print(&show::fleet::show(&query.contact.client()?, query.format.into())?)
        }
        Command::Audit(args) => audit::audit(&args),
        Command::Drain(args) => drain::drain(&args),
        Command::Undrain(args) => drain::undrain(&args),
        Command::Top(args) => top::run(&args),
        Command::Store(StoreArgs { command: StoreCommand::Copy { from, to, replace } }) => {
            print(&coreward_control_server::copy::copy(&from, &to, replace)?)
        }
        Command::Explain(args) => print(&explain(&args)?),
        Command::Connections(args) => {
            capabilities::require("coreward connections")?;
            print(&connections_command::run(&args)?)
        }
        Command::Capture(args) => {
            capabilities::require("coreward capture")?;
            coreward_lb::capture_command::run(&args)
        }
        Command::Keys(KeysArgs { command: KeysCommand::Show(query) }) => {
            print(&show::keys(&query.contact.client()?, query.format.into())?)
        }
        Command::Keys(KeysArgs { command: KeysCommand::Rotate { query, force } }) => {
            print(&show::rotate_keys(&query.contact.client()?, force, query.format.into())?)
        }
        Command::Doctor(args) => doctor(&args),
        Command::CheckKernel => check_kernel(),
        Command::Shell(shell) => shell.run(Cli::command()),
    }
}

fn explain(args: &ExplainArgs) -> anyhow::Result<String> {
    let (client, format) = (args.query.contact.client()?, args.query.format.into());
    let packet = match (args.reset, args.tsecr.is_some() || args.without_timestamps) {
        (true, _) => PacketKind::Reset,
        (false, true) => PacketKind::Established,
        (false, false) => PacketKind::First,
    };
    let question = Explain { vip: args.vip, protocol: args.protocol, client: args.client, packet, tsecr: args.tsecr };
    show::explain(&client, &question, format)
}

fn lb(args: LbArgs) -> anyhow::Result<()> {
    if let Some(LbCommand::Forget { name, query }) = args.command {
        let left = show::block_on(query.contact.client()?.forget_load_balancer(&name))?;
        return match query.format {
            Format::Json => print(&serde_json::to_string_pretty(&left)?),
            Format::Text => {
                print(&format!("load balancer {name} is forgotten; {} are left", left.load_balancers.len()))
            }
        };
    }
    capabilities::require("coreward lb")?;
    let config = args.config.context("--config is missing")?;
    Daemon::Lb.confine()?;
    if args.detach { coreward_lb::daemon::detach(&config) } else { coreward_lb::daemon::run(&config) }
}

fn agent(args: AgentArgs) -> anyhow::Result<()> {
    capabilities::require("coreward agent")?;
    match (args.command, args.config) {
        (Some(AgentCommand::Rss(args)), _) => {
            let fits = coreward_agent::rss_command::run(&args)?;
            anyhow::ensure!(fits, "the RSS table of {} is shown, not in force", args.interface);
            Ok(())
        }
        (None, config) => {
            let config = config.context("--config is missing")?;
            Daemon::Agent.confine()?;
            if args.detach { coreward_agent::daemon::detach(&config) } else { coreward_agent::daemon::run(&config) }
        }
    }
}

fn doctor(args: &DoctorArgs) -> anyhow::Result<()> {
    let (text, fit) = doctor::run(args)?;
    print(&text)?;
    anyhow::ensure!(fit, "this machine is not fit: see the faults");
    Ok(())
}

fn check_kernel() -> anyhow::Result<()> {
    let mut refused = 0;
    for (program, outcome) in coreward_dataplane::check::load_every_program() {
        let answer = outcome.map_or_else(|error| format!("refused: {error:#}"), |()| "ok".to_owned());
        refused += usize::from(answer != "ok");
        print(&format!("{program}: {answer}"))?;
    }
    anyhow::ensure!(refused == 0, "this kernel refuses {refused} of the programs");
    Ok(())
}
