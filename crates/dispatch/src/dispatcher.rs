//! Maintenance of all services of a configuration in a thread: finds new workers and gives up requests without a
//! response. Requests are dispatched without it, too.

use std::path::PathBuf;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::thread::JoinHandle;
use std::time::Instant;

use anyhow::{Context as _, anyhow};
use coreward_dataplane::dispatch::{POLL_INTERVAL, cgroup_root};
use parking_lot::Mutex;

use crate::config::Config;
use crate::service::{self, Service};
use crate::status::ServiceStatus;

/// Handle of the maintenance thread, which ends when the handle is dropped; requests are still dispatched.
#[derive(Debug)]
pub struct Dispatcher {
    /// Sender of new configurations to the thread; `None` only during the drop.
    config_sender: Option<Sender<ConfigChange>>,
    state: Arc<Mutex<DispatchState>>,
    thread: Option<JoinHandle<()>>,
}

/// New configuration, and the sender for the result of applying it.
type ConfigChange = (Config, Sender<anyhow::Result<()>>);

/// State of the dispatched services at the last poll.
#[derive(Debug, Clone, Default)]
pub struct DispatchState {
    pub services: Vec<ServiceStatus>,
    pub warnings: Vec<String>,
}

impl Dispatcher {
    /// Loads the programs, or takes over running ones, in the network namespace of the calling thread.
    pub fn start(config: &Config) -> anyhow::Result<Self> {
        let mut services = Services::start(config)?;
        let (sender, receiver) = channel();
        let seen = Arc::new(Mutex::new(DispatchState::default()));
        let reported = Arc::clone(&seen);
        // The thread inherits the network namespace.
        let thread = std::thread::Builder::new()
            .name("dispatch".to_owned())
            .spawn(move || services.maintenance_loop(&receiver, &reported))
            .context("cannot start the thread that maintains the services")?;
        Ok(Self { config_sender: Some(sender), state: seen, thread: Some(thread) })
    }

    /// Replaces the services. The kernel again selects sockets of removed services; others continue without
    /// interruption. A service whose program the kernel rejects stays unchanged. Fails when a program was rejected.
    pub fn replace_config(&self, config: Config) -> anyhow::Result<()> {
        let (sender, outcome) = channel();
        let gone = || anyhow!("the thread that maintains the services has ended: expected a restart");
        self.config_sender.as_ref().ok_or_else(gone)?.send((config, sender)).map_err(|_| gone())?;
        outcome.recv().map_err(|_| gone())?
    }

    pub fn state(&self) -> DispatchState {
        self.state.lock().clone()
    }

    /// Returns whether the maintenance thread is running.
    pub fn is_running(&self) -> bool {
        self.thread.as_ref().is_some_and(|thread| !thread.is_finished())
    }
}

/// Ends the dispatch of these services: the kernel selects again. Fails when something cannot be removed.
pub fn detach(config: &Config) -> anyhow::Result<()> {
    let pins =
        |named: &crate::config::Service| service::service_pin_directory(&config.pin_directory, named.options.service);
    config.services.iter().try_for_each(|named| service::detach(&pins(named)))?;
    // Other services may use the directory.
    let _ = std::fs::remove_dir(&config.pin_directory);
    Ok(())
}

impl Drop for Dispatcher {
    fn drop(&mut self) {
        self.config_sender = None;
        if self.thread.take().is_some_and(|thread| thread.join().is_err()) {
            tracing::error!(
                event = "thread-panicked",
                thread = "dispatch",
                "the thread that maintains the dispatcher's services has panicked: restart the daemon"
            );
        }
    }
}

struct Services {
    pin_directory: PathBuf,
    services: Vec<Service>,
}

impl Services {
    fn start(config: &Config) -> anyhow::Result<Self> {
        let mut all = Self { pin_directory: config.pin_directory.clone(), services: Vec::new() };
        all.replace(config)?;
        Ok(all)
    }

    fn maintenance_loop(&mut self, requests: &Receiver<ConfigChange>, seen: &Mutex<DispatchState>) {
        let mut next = Instant::now();
        loop {
            self.services.iter_mut().for_each(Service::poll);
            *seen.lock() = self.state();
            // Missed polls are not repeated: requests would seem older than they are.
            next = (next + POLL_INTERVAL).max(Instant::now());
            match requests.recv_timeout(next.saturating_duration_since(Instant::now())) {
                Err(RecvTimeoutError::Timeout) => {}
                Err(RecvTimeoutError::Disconnected) => break,
                Ok((config, outcome)) => {
                    let _ = outcome.send(self.replace(&config));
                    next = Instant::now();
                }
            }
        }
    }

    fn state(&self) -> DispatchState {
        DispatchState {
            services: self.services.iter().map(Service::status).collect(),
            warnings: self.services.iter().filter_map(Service::warning).collect(),
        }
    }

    fn replace(&mut self, config: &Config) -> anyhow::Result<()> {
        let cgroup = config.cgroup.clone().map_or_else(cgroup_root, Ok)?;
        let stays = |service: &Service| {
            config.pin_directory == self.pin_directory
                && config.services.iter().any(|named| named.options.service == service.listen())
        };
        let (staying, leaving): (Vec<_>, Vec<_>) = self.services.drain(..).partition(stays);
        self.services = staying;
        let mut outcome = Ok(());
        for service in leaving {
            let listen = service.listen();
            drop(service);
            outcome = outcome.and(service::detach(&service::service_pin_directory(&self.pin_directory, listen)));
        }
        self.pin_directory.clone_from(&config.pin_directory);
        for named in &config.services {
            let place = self.services.iter().position(|service| service.listen() == named.options.service);
            match (place, Service::start(named, &self.pin_directory, &cgroup)) {
                (Some(place), Ok(service)) => self.services[place] = service,
                (None, Ok(service)) => self.services.push(service),
                (_, Err(error)) => outcome = outcome.and(Err(error)),
            }
        }
        outcome
    }
}
