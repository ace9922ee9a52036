//! The command `coreward`, whose sub-commands are implemented in other crates.

mod apply;
mod audit;
mod check;
mod controller_contact;
mod drain;
mod top;

use std::net::SocketAddr;
use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::Context as _;
use clap::{CommandFactory as _, Parser as _};
use coreward_agent::rss_command::RssCommandArgs;
use coreward_api::types::{Explain, PacketKind};
use coreward_cli::cli_documentation::CliDocumentationCommand;
use coreward_cli::{exit_status, print_to_stdout};
use coreward_daemon::drop_capabilities;
use coreward_dataplane::capabilities;
use coreward_dispatch::command::{self as dispatch, DispatchArgs};
use coreward_doctor::command::{self as doctor, DoctorArgs};
use coreward_lb::capture_command::CaptureArgs;
use coreward_lb::connections_command::{self, ConnectionListArgs};
use coreward_metrics::metric_declarations::Component;
use coreward_model::tuple::TransportProtocol;
use coreward_orchestrator::command::{self as orchestrate, OrchestrateArgs};
use coreward_render as show;
use coreward_tls::command::{self as certs, CertsArgs};

use controller_contact::ControllerContactArgs;

#[derive(clap::Parser)]
#[command(name = "coreward", version, about)]
struct Cli {
    #[command(subcommand)]
    command: CorewardCommand,
}

#[derive(clap::Subcommand)]
enum CorewardCommand {
    /// Run the controller: it makes placement tables from agents' reports (SIGHUP reloads its files)
    Controller(DaemonConfigArgs),
    /// Run the load balancer: attach the XDP program, or take over the pinned one, and follow the controller
    Lb(LoadBalancerArgs),
    /// Run a server's agent: attach the programs, or take over the pinned ones, and report core loads
    Agent(AgentArgs),
    /// Run a rack controller: it sends summaries of its agents' reports to the controller
    Rack(DaemonConfigArgs),
    /// Select the worker of each request to a UDP service, for unmodified servers
    Dispatch(DispatchArgs),
    /// Send each request of UDP services to a core's priority queue, for servers that use the runtime library
    Orchestrate(OrchestrateArgs),
    /// Show services, servers, core loads, tables and load balancers, from the controller
    Status(StatusArgs),
    /// Explain which server gets a packet, and why
    Explain(ExplainArgs),
    /// Show or rotate the cookie keys
    Keys(CookieKeysArgs),
    /// Check configuration files: print every mistake with its line, key and expected value
    Check(check::CheckConfigArgs),
    /// Apply a changed fleet document (servers and services) after showing the changes
    Apply(apply::ApplyArgs),
    /// Show the fleet document in force
    Fleet(FleetArgs),
    /// List changes of the fleet: who made them, from where, and the previous state
    Audit(audit::AuditArgs),
    /// Drain a server, whatever the fleet document states: it gets no new connections; show the remaining ones
    Drain(drain::DrainArgs),
    /// End a drain: the server gets new connections again, unless the fleet document drains it
    Undrain(drain::UndrainArgs),
    /// Show services, servers, cores and load balancers live in the terminal
    Top(top::TopArgs),
    /// Copy the records of a controller's store to another store
    Store(StoreArgs),
    /// Manage the fleet's certificate authority and the daemons' certificates
    Certs(CertsArgs),
    /// Capture packets at this load balancer with its decisions: tcpdump does not see packets that XDP forwards
    Capture(CaptureArgs),
    /// List the busiest connections of a stateful service, from the load balancer's connection table
    Connections(ConnectionListArgs),
    /// Check that this machine fits its role, and show remedies; exit status 1: a check found a fault
    Doctor(DoctorArgs),
    /// Check that this kernel loads every BPF program
    CheckKernel,
    #[command(flatten)]
    Shell(CliDocumentationCommand),
}

#[derive(clap::Args)]
struct DaemonConfigArgs {
    /// Configuration file of the daemon (docs/config.md)
    #[arg(long, value_name = "FILE")]
    config: PathBuf,
}

#[derive(clap::Args)]
#[command(args_conflicts_with_subcommands = true, subcommand_negates_reqs = true)]
struct LoadBalancerArgs {
    #[command(subcommand)]
    command: Option<LoadBalancerCommand>,
    /// Configuration file of the daemon (docs/config.md)
    #[arg(long, value_name = "FILE", required = true)]
    config: Option<PathBuf>,
    /// Detach the XDP program and remove its pins: forwarding ends
    #[arg(long)]
    detach: bool,
}

#[derive(clap::Subcommand)]
enum LoadBalancerCommand {
    /// Forget a load balancer that is gone for good: the controller may give its number in cookies to another one
    Forget {
        /// Name of the load balancer
        name: String,
        #[command(flatten)]
        query: ControllerQueryArgs,
    },
}

#[derive(clap::Args)]
#[command(args_conflicts_with_subcommands = true, subcommand_negates_reqs = true)]
struct AgentArgs {
    #[command(subcommand)]
    command: Option<AgentCommand>,
    /// Configuration file of the daemon (docs/config.md)
    #[arg(long, value_name = "FILE", required = true)]
    config: Option<PathBuf>,
    /// Detach the programs, remove their pins, and restore RSS and sysctls: stamped connections break
    #[arg(long)]
    detach: bool,
}

#[derive(clap::Subcommand)]
enum AgentCommand {
    /// Show the RSS settings of a NIC, and the queues at which SYNs actually arrive
    Rss(RssCommandArgs),
}

#[derive(clap::Args)]
struct ControllerQueryArgs {
    #[command(flatten)]
    contact: ControllerContactArgs,
    /// Format of the output
    #[arg(long, value_enum, default_value_t = CommandOutputFormat::Text)]
    format: CommandOutputFormat,
}

#[derive(clap::Args)]
struct StatusArgs {
    #[command(flatten)]
    query: ControllerQueryArgs,
    /// Show complete RSS keys in the JSON output. Keys are secret, because they allow clients to aim at a core
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
    /// Print the document in its original text
    Show(ControllerQueryArgs),
}

#[derive(clap::Args)]
struct StoreArgs {
    #[command(subcommand)]
    command: StoreCommand,
}

#[derive(clap::Subcommand)]
enum StoreCommand {
    /// Copy all records from one controller's store to another controller's: from a file to etcd, or back
    Copy {
        /// Controller file of the store to copy from
        #[arg(long, value_name = "FILE")]
        from: PathBuf,
        /// Controller file of the store to copy to
        #[arg(long, value_name = "FILE")]
        to: PathBuf,
        /// Overwrite the records that the target already has
        #[arg(long)]
        replace: bool,
    },
}

#[derive(clap::Args)]
struct CookieKeysArgs {
    #[command(subcommand)]
    command: CookieKeysCommand,
}

#[derive(clap::Subcommand)]
enum CookieKeysCommand {
    /// Show the stamping key, the time since it came into force, and the state of a rotation
    Show(ControllerQueryArgs),
    /// Rotate the keys: distribute the next key, which stamps when all daemons have confirmed it
    Rotate {
        #[command(flatten)]
        query: ControllerQueryArgs,
        /// Rotate although the current key is young, and without waiting for disconnected daemons: connections may
        /// break
        #[arg(long)]
        force: bool,
    },
}

#[derive(clap::Args)]
struct ExplainArgs {
    #[command(flatten)]
    query: ControllerQueryArgs,
    /// VIP and port of the service
    #[arg(long, value_name = "ADDRESS:PORT")]
    vip: SocketAddr,
    /// Protocol of the service
    #[arg(long, default_value = TransportProtocol::Tcp.name())]
    protocol: TransportProtocol,
    /// Address and port of the client
    #[arg(long, value_name = "ADDRESS:PORT")]
    client: SocketAddr,
    /// Explain an established packet with this TSecr (`ecr` in tcpdump), instead of a new connection
    #[arg(long, value_name = "TSECR")]
    tsecr: Option<u32>,
    /// Explain an established packet without timestamps
    #[arg(long, conflicts_with = "tsecr")]
    without_timestamps: bool,
    /// Explain a reset
    #[arg(long)]
    reset: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
enum CommandOutputFormat {
    /// Text for people
    Text,
    /// One JSON object, for programs
    Json,
}

impl From<CommandOutputFormat> for show::RenderedOutputFormat {
    fn from(format: CommandOutputFormat) -> Self {
        match format {
            CommandOutputFormat::Text => Self::Text,
            CommandOutputFormat::Json => Self::Json,
        }
    }
}

/// Returns the definition of the command line, with the names, options and help of all subcommands.
#[must_use]
pub fn command_definition() -> clap::Command {
    Cli::command()
}

/// Runs the command that this process's arguments specify.
#[must_use]
pub fn main() -> ExitCode {
    let set_debug = coreward_cli::start_logging();
    coreward_daemon::log_level::register_debug_log_setter(set_debug);
    exit_status("coreward", run_command(Cli::parse().command))
}

impl CorewardCommand {
    /// Returns whether the subcommand is a daemon, which runs until a signal and itself handles signals and secrets.
    fn is_daemon(&self) -> bool {
        match self {
            Self::Controller(_) | Self::Rack(_) => true,
            Self::Lb(args) => args.command.is_none() && !args.detach,
            Self::Agent(args) => args.command.is_none() && !args.detach,
            _ => false,
        }
    }
}

fn run_command(command: CorewardCommand) -> anyhow::Result<()> {
    if command.is_daemon() {
        coreward_daemon::block_signals()?;
        coreward_config::enable_secret_owner_check();
    }
    match command {
        CorewardCommand::Controller(args) => run_controller(&args),
        CorewardCommand::Lb(args) => run_lb_command(args),
        CorewardCommand::Agent(args) => run_agent_command(args),
        CorewardCommand::Rack(args) => run_rack(&args),
        CorewardCommand::Dispatch(args) => run_dispatch(&args),
        CorewardCommand::Orchestrate(args) => run_orchestrate(&args),
        CorewardCommand::Status(StatusArgs { query, rss_keys }) => {
            print_to_stdout(&show::fetch_status(&query.contact.build_client()?, rss_keys, query.format.into())?)
        }
        CorewardCommand::Check(args) => check::run_check(&args),
        CorewardCommand::Certs(args) => print_to_stdout(&certs::run_certs_command(&args)?),
        CorewardCommand::Apply(args) => apply::run_apply(&args),
        CorewardCommand::Fleet(FleetArgs { command: FleetCommand::Show(query) }) => {
            print_to_stdout(&show::fleet::fetch_document(&query.contact.build_client()?, query.format.into())?)
        }
        CorewardCommand::Audit(args) => audit::print_audit_log(&args),
        CorewardCommand::Drain(args) => drain::run_drain(&args),
        CorewardCommand::Undrain(args) => drain::run_undrain(&args),
        CorewardCommand::Top(args) => top::run(&args),
        CorewardCommand::Store(StoreArgs { command: StoreCommand::Copy { from, to, replace } }) => {
            print_to_stdout(&coreward_control_server::copy::copy_store(&from, &to, replace)?)
        }
        CorewardCommand::Explain(args) => print_to_stdout(&explain_packet(&args)?),
        CorewardCommand::Connections(args) => print_connections(&args),
        CorewardCommand::Capture(args) => run_capture(&args),
        CorewardCommand::Keys(args) => show_or_rotate_keys(args),
        CorewardCommand::Doctor(args) => run_doctor(&args),
        CorewardCommand::CheckKernel => check_kernel_loads_programs(),
        CorewardCommand::Shell(shell) => shell.run(Cli::command()),
    }
}

fn run_controller(args: &DaemonConfigArgs) -> anyhow::Result<()> {
    drop_capabilities::drop_other_capabilities(Component::Controller)?;
    coreward_control_server::server::run_controller(&args.config)
}

fn run_rack(args: &DaemonConfigArgs) -> anyhow::Result<()> {
    drop_capabilities::drop_other_capabilities(Component::Rack)?;
    coreward_rack::daemon::run_rack_controller(&args.config)
}

fn run_dispatch(args: &DispatchArgs) -> anyhow::Result<()> {
    capabilities::check_capabilities("coreward dispatch")?;
    drop_capabilities::drop_other_capabilities(Component::Dispatch)?;
    dispatch::run(args)?.map_or(Ok(()), |text| print_to_stdout(&text))
}

fn run_orchestrate(args: &OrchestrateArgs) -> anyhow::Result<()> {
    let prepared_daemon = orchestrate::prepare_orchestrator(args)?;
    drop_capabilities::drop_other_capabilities(Component::Orchestrate)?;
    print_to_stdout(&orchestrate::run_orchestrator(prepared_daemon)?)
}

fn print_connections(args: &ConnectionListArgs) -> anyhow::Result<()> {
    capabilities::check_capabilities("coreward connections")?;
    print_to_stdout(&connections_command::run_connections_command(args)?)
}

fn run_capture(args: &CaptureArgs) -> anyhow::Result<()> {
    capabilities::check_capabilities("coreward capture")?;
    coreward_lb::capture_command::run_capture_command(args)
}

fn show_or_rotate_keys(args: CookieKeysArgs) -> anyhow::Result<()> {
    match args.command {
        CookieKeysCommand::Show(query) => {
            print_to_stdout(&show::fetch_keys(&query.contact.build_client()?, query.format.into())?)
        }
        CookieKeysCommand::Rotate { query, force } => {
            print_to_stdout(&show::rotate_keys(&query.contact.build_client()?, force, query.format.into())?)
        }
    }
}

fn explain_packet(args: &ExplainArgs) -> anyhow::Result<String> {
    let (client, format) = (args.query.contact.build_client()?, args.query.format.into());
    let packet = match (args.reset, args.tsecr.is_some() || args.without_timestamps) {
        (true, _) => PacketKind::Reset,
        (false, true) => PacketKind::Established,
        (false, false) => PacketKind::NewConnection,
    };
    let request = Explain { vip: args.vip, protocol: args.protocol, client: args.client, packet, tsecr: args.tsecr };
    show::fetch_explanation(&client, &request, format)
}

fn run_lb_command(args: LoadBalancerArgs) -> anyhow::Result<()> {
    if let Some(LoadBalancerCommand::Forget { name, query }) = args.command {
        let load_balancers = show::block_on(query.contact.build_client()?.forget_load_balancer(&name))?;
        return match query.format {
            CommandOutputFormat::Json => print_to_stdout(&serde_json::to_string_pretty(&load_balancers)?),
            CommandOutputFormat::Text => print_to_stdout(&format!(
                "load balancer {name} is forgotten; {} are left",
                load_balancers.load_balancers.len()
            )),
        };
    }
    capabilities::check_capabilities("coreward lb")?;
    let config = args.config.context("--config FILE is missing")?;
    drop_capabilities::drop_other_capabilities(Component::Lb)?;
    if args.detach {
        coreward_lb::daemon::detach_load_balancer(&config)
    } else {
        coreward_lb::daemon::run_load_balancer(&config)
    }
}

fn run_agent_command(args: AgentArgs) -> anyhow::Result<()> {
    capabilities::check_capabilities("coreward agent")?;
    match (args.command, args.config) {
        (Some(AgentCommand::Rss(args)), _) => {
            let is_in_force = coreward_agent::rss_command::run_rss_command(&args)?;
            anyhow::ensure!(is_in_force, "the RSS table that {} shows is not in force", args.interface);
            Ok(())
        }
        (None, config) => {
            let config = config.context("--config FILE is missing")?;
            drop_capabilities::drop_other_capabilities(Component::Agent)?;
            if args.detach {
                coreward_agent::daemon::detach_agent(&config)
            } else {
                coreward_agent::daemon::run_agent(&config)
            }
        }
    }
}

fn run_doctor(args: &DoctorArgs) -> anyhow::Result<()> {
    let (text, has_no_fault) = doctor::run(args)?;
    print_to_stdout(&text)?;
    anyhow::ensure!(has_no_fault, "this machine has faults: expected the remedies above to be applied");
    Ok(())
}

fn check_kernel_loads_programs() -> anyhow::Result<()> {
    let mut rejected_count = 0;
    for (program, outcome) in coreward_dataplane::verifier_check::try_load_every_program() {
        let outcome_text = outcome.map_or_else(|error| format!("rejected: {error:#}"), |()| "ok".to_owned());
        rejected_count += usize::from(outcome_text != "ok");
        print_to_stdout(&format!("{program}: {outcome_text}"))?;
    }
    anyhow::ensure!(
        rejected_count == 0,
        "this kernel rejects {rejected_count} of the programs: expected all of them to load"
    );
    Ok(())
}
