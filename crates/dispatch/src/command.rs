//! The arguments of `coreward dispatch`, and what the command does.

use std::net::SocketAddr;
use std::path::PathBuf;

use coreward_dataplane::dispatch::DispatchPolicy;

use crate::config::{DEFAULT_PIN_DIRECTORY, DispatchConfig, DispatchServiceConfig};
use crate::{daemon, service, status};

#[derive(Debug, Clone, clap::Args)]
#[group(id = "which", required = true, multiple = true, args = ["config", "listen", "detach", "status"])]
pub struct DispatchArgs {
    /// Configuration file (docs/dispatch.md)
    #[arg(long, value_name = "FILE")]
    config: Option<PathBuf>,
    /// Dispatch one service: the address and port of its UDP sockets
    #[arg(long, value_name = "ADDRESS:PORT", conflicts_with = "config")]
    listen: Option<SocketAddr>,
    /// Policy of the service of --listen: random, rr, jsq, jlq or jbsrq
    #[arg(long, default_value = "jsq", requires = "listen", conflicts_with = "config")]
    policy: DispatchPolicy,
    /// Pin directory in a BPF file system
    #[arg(long, value_name = "DIRECTORY", conflicts_with = "config")]
    pin_directory: Option<PathBuf>,
    /// Stop dispatching for the given services, or for all, so that the kernel selects the worker again
    #[arg(long)]
    detach: bool,
    /// Show the outstanding, dispatched, completed and abandoned requests of each worker
    #[arg(long, conflicts_with = "detach")]
    status: bool,
    /// Format of the output of --status
    #[arg(long, value_enum, default_value_t = DispatchOutputFormat::Text, requires = "status")]
    format: DispatchOutputFormat,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
enum DispatchOutputFormat {
    /// Text for people
    Text,
    /// One JSON object, for programs
    Json,
}

/// Runs the command and returns its output, if any. Fails when the configuration file is invalid or the kernel rejects
/// a program or a map.
pub fn run(args: &DispatchArgs) -> anyhow::Result<Option<String>> {
    let config = args.load_config()?;
    let pin_directory = match &config {
        Some(config) => config.pin_directory.clone(),
        None => args.pin_directory.clone().unwrap_or_else(|| DEFAULT_PIN_DIRECTORY.into()),
    };
    let service_pin_directories: Vec<PathBuf> = match &config {
        Some(config) => config
            .services
            .iter()
            .map(|service_config| {
                service::service_pin_directory(&pin_directory, service_config.program_options.service_address)
            })
            .collect(),
        None => service::service_pin_directories(&pin_directory),
    };
    match config {
        _ if args.detach => {
            service_pin_directories.iter().try_for_each(|directory| service::stop_dispatching(directory)).map(|()| None)
        }
        _ if args.status => {
            let service_statuses = status::read_pinned_status(&service_pin_directories)?;
            Ok(Some(match args.format {
                DispatchOutputFormat::Json => status::status_json(&service_statuses).to_string(),
                DispatchOutputFormat::Text => status::format_status(&service_statuses),
            }))
        }
        Some(config) => daemon::run_daemon(&config).map(|()| None),
        None => anyhow::bail!("expected --config FILE or --listen ADDRESS:PORT"),
    }
}

impl DispatchArgs {
    /// Returns the configuration from the file or for the one service on the command line, or `None` if neither is
    /// given.
    fn load_config(&self) -> anyhow::Result<Option<DispatchConfig>> {
        if let Some(path) = &self.config {
            return Ok(Some(DispatchConfig::load(path)?));
        }
        let Some(listen) = self.listen else { return Ok(None) };
        anyhow::ensure!(listen.port() != 0, "--listen {listen}: expected a port from 1 to 65535");
        Ok(Some(DispatchConfig {
            pin_directory: self.pin_directory.clone().unwrap_or_else(|| DEFAULT_PIN_DIRECTORY.into()),
            cgroup: None,
            metrics: None,
            services: vec![DispatchServiceConfig::new(listen, self.policy)],
        }))
    }
}
