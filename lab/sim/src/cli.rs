//! Command `coreward-lab sim`, with a sub-command per kind of simulation. Its arguments are defined next to its code.

/// Arguments of `coreward-lab sim`.
#[derive(Debug, clap::Args)]
pub struct SimArgs {
    #[command(subcommand)]
    command: SimCommand,
}

#[derive(Debug, clap::Subcommand)]
enum SimCommand {
    /// Simulate requests at the cores of one server: latencies under a policy
    Rpc(crate::rpc::cli::RpcSimulationArgs),
    /// Simulate load balancer and servers together: every combination of their policies
    Path(crate::path::cli::PathSimulationArgs),
    /// Find the highest load at which a server meets its SLO
    Capacity(crate::rpc::cli::PeakLoadArgs),
    /// Replay a trace through the load balancer under several policies
    Lb(crate::lb::cli::LbSimulationArgs),
    /// Simulate connections while the pool changes: broken connections and imbalance
    Pcc(crate::pcc::cli::PccSimulationArgs),
}

/// Runs the selected simulation and returns its result as text. An error names the invalid value and its position.
pub fn run(args: SimArgs) -> anyhow::Result<String> {
    match args.command {
        SimCommand::Rpc(args) => args.run(),
        SimCommand::Path(args) => args.run(),
        SimCommand::Capacity(args) => args.run(),
        SimCommand::Lb(args) => args.run(),
        SimCommand::Pcc(args) => args.run(),
    }
}
