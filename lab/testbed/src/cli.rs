//! The sub-commands of `coreward-lab testbed`.

use crate::{
    chaos, conformance, dispatch_soak, instance, key_value, knot_benchmark, load, orchestrated_server, paced_server,
    pcc, stream_connections,
};

/// Options of `coreward-lab testbed`.
#[derive(Debug, Clone, clap::Args)]
pub struct TestbedArgs {
    #[command(subcommand)]
    command: TestbedCommand,
}

#[derive(Debug, Clone, clap::Subcommand)]
enum TestbedCommand {
    /// Run a server with emulated cores: each worker serves one request at a time and sleeps for its service time
    PacedServer(paced_server::PacedServerArgs),
    /// Run a key-value server (GET, PUT, SCAN; UDP), at full speed or with emulated service times
    KeyValueServer(key_value::server::KeyValueServerArgs),
    /// Run a key-value server on cores of `coreward orchestrate`
    OrchestratedServer(orchestrated_server::OrchestratedServerArgs),
    /// Replay an arrival log against a service and print the results as JSON
    Load(load::LoadClientArgs),
    /// Serve long connections, in several network namespaces at once
    StreamServer(stream_connections::server::StreamServerArgs),
    /// Open long connections and print their results per second as JSON
    StreamClient(stream_connections::client::StreamClientArgs),
    /// Count broken connections while servers and load balancers join and leave; print one run as JSON
    Pcc(pcc::PccMeasurementArgs),
    /// Run curl, wrk and nginx through the load balancer while tables and pool change; print the results as JSON
    Conformance(conformance::ConformanceArgs),
    /// Inject faults under load; fails when a connection breaks or an acknowledged change is lost
    Chaos(chaos::ChaosArgs),
    /// Run `coreward dispatch` under load while workers end and stop, and while it is detached and attached; print the
    /// results as JSON
    DispatchSoak(dispatch_soak::DispatchSoakArgs),
    /// Compare the kernel's choice of a worker with `coreward dispatch`, for Knot DNS and queries of unequal cost
    KnotBenchmark(knot_benchmark::KnotBenchmarkArgs),
    /// Remove network namespaces, pins and files of killed testbeds
    Clean {
        /// Names of testbeds [default: all]; testbeds in use stay
        #[arg(value_name = "NAME")]
        names: Vec<String>,
    },
}

/// Runs a sub-command of `coreward-lab testbed`. Call it before any thread is started, because some servers fork.
pub fn run_testbed_command(args: &TestbedArgs) -> anyhow::Result<()> {
    match &args.command {
        TestbedCommand::PacedServer(args) => paced_server::run_paced_server(args),
        TestbedCommand::KeyValueServer(args) => key_value::server::run_key_value_server(args),
        TestbedCommand::OrchestratedServer(args) => orchestrated_server::run_orchestrated_server(args),
        TestbedCommand::Load(args) => load::run_load_client(args),
        TestbedCommand::StreamServer(args) => stream_connections::server::run_stream_server(args),
        TestbedCommand::StreamClient(args) => stream_connections::client::run_stream_client(args),
        TestbedCommand::Pcc(args) => pcc::main(args),
        TestbedCommand::Conformance(options) => conformance::main(*options),
        TestbedCommand::Chaos(options) => chaos::main(options),
        TestbedCommand::DispatchSoak(options) => dispatch_soak::main(*options),
        TestbedCommand::KnotBenchmark(args) => knot_benchmark::main(args),
        TestbedCommand::Clean { names } => {
            instance::remove_killed_testbeds(names)?.iter().for_each(|name| println!("removed testbed {name}"));
            Ok(())
        }
    }
}
