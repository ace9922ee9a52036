//! The sub-commands of `coreward-lab testbed`.

use crate::{
    chaos, conformance, dispatch_soak, instance, key_value, knot_benchmark, load, orchestrated_server, paced_server,
    pcc, stream,
};

/// Options of `coreward-lab testbed`.
#[derive(Debug, Clone, clap::Args)]
pub struct TestbedArgs {
    #[command(subcommand)]
    command: TestbedCommand,
}

#[derive(Debug, Clone, clap::Subcommand)]
enum TestbedCommand {
    /// Serve requests by the clock, one at a time per worker: a server with emulated cores
    PacedServer(paced_server::PacedServerArgs),
    /// Serve GET, PUT and SCAN by UDP, one socket per worker, as fast as it can or by the clock
    KeyValueServer(key_value::server::KeyValueServerArgs),
    /// Serve GET, PUT and SCAN on cores of `coreward orchestrate`
    OrchestratedServer(orchestrated_server::OrchestratedServerArgs),
    /// Replay an arrival log against a service and print what became of it as JSON
    Load(load::LoadArgs),
    /// Serve connections that last, in several network namespaces at once
    StreamServer(stream::server::StreamServerArgs),
    /// Open connections that last and print what became of them, by second, as JSON
    StreamClient(stream::client::StreamClientArgs),
    /// Count broken connections while servers and load balancers come and go; one run, printed as JSON
    Pcc(pcc::PccArgs),
    /// Stock curl, wrk and nginx through the load balancer while tables and pool change; prints what was seen as JSON
    Conformance(conformance::Options),
    /// Inject faults while clients connect: no connection may break, no acknowledged change be lost
    Chaos(chaos::Options),
    /// `coreward dispatch` under load while workers die and stop, and it is detached and attached; prints what was seen as JSON
    DispatchSoak(dispatch_soak::Options),
    /// Stock Knot DNS under queries of unequal cost: the kernel's choice of a worker against `coreward dispatch`'s
    KnotBenchmark(knot_benchmark::KnotBenchmarkArgs),
    /// Remove what killed testbeds left behind
    Clean {
        /// Only these testbeds; those in use stay
        #[arg(value_name = "NAME")]
        names: Vec<String>,
    },
}

/// Runs a sub-command of `coreward-lab testbed`. Call it before any thread is started: some servers fork.
pub fn run(args: &TestbedArgs) -> anyhow::Result<()> {
    match &args.command {
        TestbedCommand::PacedServer(args) => paced_server::run(args),
        TestbedCommand::KeyValueServer(args) => key_value::server::run(args),
        TestbedCommand::OrchestratedServer(args) => orchestrated_server::run(args),
        TestbedCommand::Load(args) => load::run(args),
        TestbedCommand::StreamServer(args) => stream::server::run(args),
        TestbedCommand::StreamClient(args) => stream::client::run(args),
        TestbedCommand::Pcc(args) => pcc::main(args),
        TestbedCommand::Conformance(options) => conformance::main(*options),
        TestbedCommand::Chaos(options) => chaos::main(options),
        TestbedCommand::DispatchSoak(options) => dispatch_soak::main(*options),
        TestbedCommand::KnotBenchmark(args) => knot_benchmark::main(args),
        TestbedCommand::Clean { names } => {
            instance::clean(names)?.iter().for_each(|name| println!("removed testbed {name}"));
            Ok(())
        }
    }
}
