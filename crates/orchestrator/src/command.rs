//! The arguments of `coreward orchestrate`, and what the command does.

use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};

use anyhow::Context as _;

use crate::config::OrchestratorConfig;
use crate::daemon::OrchestratorDaemon;
use crate::intake::RequestIntake;

#[derive(Debug, Clone, clap::Args)]
pub struct OrchestrateArgs {
    /// Configuration file (docs/orchestrate.md)
    #[arg(long, value_name = "FILE")]
    config: PathBuf,
}

/// Daemon that has opened its privileged resources. The process can drop its capabilities before [`run_orchestrator`].
#[derive(Debug)]
pub struct PreparedOrchestrator {
    config: OrchestratorConfig,
    request_intake: RequestIntake,
}

/// Reads the configuration file and opens all resources that need capabilities. Fails when the file has mistakes.
pub fn prepare_orchestrator(args: &OrchestrateArgs) -> anyhow::Result<PreparedOrchestrator> {
    let config = OrchestratorConfig::load(&args.config)?;
    let request_intake = RequestIntake::open(&config);
    Ok(PreparedOrchestrator { config, request_intake })
}

/// Runs the daemon until SIGTERM or SIGINT, and then returns its counters as JSON. Fails when sockets or the shared
/// memory are unavailable.
pub fn run_orchestrator(prepared_daemon: PreparedOrchestrator) -> anyhow::Result<String> {
    let PreparedOrchestrator { config, request_intake: intake } = prepared_daemon;
    let stop_flag = Arc::new(AtomicBool::new(false));
    let signal_flag = stop_flag.clone();
    ctrlc::set_handler(move || signal_flag.store(true, Relaxed)).context("cannot handle SIGTERM and SIGINT")?;
    let mut daemon = OrchestratorDaemon::start(&config, intake)?;
    let (memory, services) = (config.shared_memory_path.display(), config.engine_config.services.len());
    let core_count = config.engine_config.core_count;
    tracing::info!(
        event = "orchestrator-started",
        %memory,
        services,
        cores = core_count,
        "the orchestrator accepts requests and workers"
    );
    daemon.run_until_stopped(&stop_flag)?;
    Ok(daemon.current_status().to_json().to_string())
}
