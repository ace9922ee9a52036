//! All services, until a signal. Requests are dispatched without the daemon, too: what it does is to find new workers and to
//! give up requests without a response.

use std::sync::mpsc::{RecvTimeoutError, channel};
use std::time::Instant;

use anyhow::Context as _;
use coreward_dataplane::dispatch::{LOOK_INTERVAL, cgroup_root};

use crate::config::Config;
use crate::service::Service;

/// Runs until SIGTERM or SIGINT. What packets need is pinned and stays at work.
///
/// # Errors
/// When the kernel refuses the programs.
pub fn run(config: &Config) -> anyhow::Result<()> {
    let (sender, signal) = channel();
    ctrlc::set_handler(move || _ = sender.send(())).context("SIGTERM and SIGINT")?;
    let cgroup = config.cgroup.clone().map_or_else(cgroup_root, Ok)?;
    let start = |service| Service::start(service, &config.pin_directory, &cgroup);
    let mut services = config.services.iter().map(start).collect::<anyhow::Result<Vec<Service>>>()?;
    let mut next = Instant::now();
    loop {
        services.iter_mut().for_each(Service::look);
        // A look that is late is not made up for: requests would look older than they are.
        next = (next + LOOK_INTERVAL).max(Instant::now());
        match signal.recv_timeout(next.saturating_duration_since(Instant::now())) {
            Err(RecvTimeoutError::Timeout) => {}
            Ok(()) | Err(RecvTimeoutError::Disconnected) => break,
        }
    }
    tracing::info!("requests go on being dispatched; `coreward dispatch --detach` ends that");
    Ok(())
}
