//! `coreward-lab sim`: one sub-command per kind of simulation. Each has its arguments next to its code.

/// Arguments of `coreward-lab sim`.
#[derive(Debug, clap::Args)]
pub struct SimArgs {
    #[command(subcommand)]
    command: SimCommand,
}

#[derive(Debug, clap::Subcommand)]
enum SimCommand {
    /// Requests at the cores of one server: latencies under a policy
    Rpc(crate::rpc::cli::RpcArgs),
    /// Load balancer and servers together: what each tier gives, and both
    Path(crate::path::cli::PathArgs),
    /// The highest load at which a server keeps its SLO
    Capacity(crate::rpc::cli::PeakArgs),
    /// A trace through the load balancer, under several policies
    Lb(crate::lb::cli::LbArgs),
    /// Connections and reconfiguration: what breaks, and how evenly connections lie on the servers
    Pcc(crate::pcc::cli::PccArgs),
}

/// Runs the simulation; its result, to be printed. The error names the mistake and its place.
pub fn run(args: SimArgs) -> anyhow::Result<String> {
    match args.command {
        SimCommand::Rpc(args) => args.run(),
        SimCommand::Path(args) => args.run(),
        SimCommand::Capacity(args) => args.run(),
        SimCommand::Lb(args) => args.run(),
        SimCommand::Pcc(args) => args.run(),
    }
}
