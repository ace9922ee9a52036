//! The arguments of `coreward orchestrate`.

use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};

use anyhow::Context as _;

use crate::config::Config;
use crate::daemon::Daemon;

#[derive(Debug, Clone, clap::Args)]
pub struct OrchestrateArgs {
    /// Services and their scheduling (docs/orchestrate.md)
    #[arg(long, value_name = "FILE")]
    config: PathBuf,
}

/// Runs until SIGTERM or SIGINT. Returns the counters as JSON. Fails when the file has mistakes, or sockets or memory
/// are not available.
pub fn run(args: &OrchestrateArgs) -> anyhow::Result<String> {
    let config = Config::load(&args.config)?;
    let stop = Arc::new(AtomicBool::new(false));
    let signalled = stop.clone();
    ctrlc::set_handler(move || signalled.store(true, Relaxed)).context("SIGTERM and SIGINT")?;
    let mut daemon = Daemon::start(&config)?;
    let (memory, services) = (config.memory.display(), config.engine.services.len());
    let cores = config.engine.cores;
    tracing::info!(event = "orchestrator-started", %memory, services, cores, "orchestrator started");
    daemon.run(&stop)?;
    Ok(daemon.report().json().to_string())
}
