//! All services of a configuration, looked after in a thread. Requests are dispatched without it, too: what it does is to
//! find new workers and to give up requests without a response.

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

/// A thread that looks after services. Dropping it ends the thread; requests go on being dispatched.
#[derive(Debug)]
pub struct Dispatcher {
    /// `None` while it ends.
    requests: Option<Sender<Request>>,
    seen: Arc<Mutex<DispatchState>>,
    thread: Option<JoinHandle<()>>,
}

/// Another configuration, and where the outcome goes.
type Request = (Config, Sender<anyhow::Result<()>>);

/// What the last look saw.
#[derive(Debug, Clone, Default)]
pub struct DispatchState {
    /// Every service that is looked after.
    pub services: Vec<ServiceStatus>,
    /// What is wrong, in words.
    pub warnings: Vec<String>,
}

impl Dispatcher {
    /// Loads the programs, or takes over from those at work, in the network namespace of the calling thread.
    pub fn start(config: &Config) -> anyhow::Result<Self> {
        let mut services = Services::start(config)?;
        let (sender, receiver) = channel();
        let seen = Arc::new(Mutex::new(DispatchState::default()));
        let told = Arc::clone(&seen);
        // It inherits the network namespace.
        let thread = std::thread::Builder::new()
            .name("dispatch".to_owned())
            .spawn(move || services.maintenance_loop(&receiver, &told))
            .context("a thread for the dispatch")?;
        Ok(Self { requests: Some(sender), seen, thread: Some(thread) })
    }

    /// From now on these services. Those that are no longer named are the kernel's again, the others go on without a
    /// gap; one whose program is refused stays as it was. Fails when something was refused.
    pub fn replace(&self, config: Config) -> anyhow::Result<()> {
        let (sender, outcome) = channel();
        let gone = || anyhow!("nobody looks after the services any more");
        self.requests.as_ref().ok_or_else(gone)?.send((config, sender)).map_err(|_| gone())?;
        outcome.recv().map_err(|_| gone())?
    }

    /// What the last look saw.
    pub fn seen(&self) -> DispatchState {
        self.seen.lock().clone()
    }

    /// Whether services are looked after.
    pub fn is_running(&self) -> bool {
        self.thread.as_ref().is_some_and(|thread| !thread.is_finished())
    }
}

/// Ends the dispatch of these services: the kernel picks by itself again. Fails when something cannot be taken away.
pub fn detach(config: &Config) -> anyhow::Result<()> {
    let pins = |named: &crate::config::Service| service::pins(&config.pin_directory, named.options.service);
    config.services.iter().try_for_each(|named| service::detach(&pins(named)))?;
    // Others may be dispatched from there.
    let _ = std::fs::remove_dir(&config.pin_directory);
    Ok(())
}

impl Drop for Dispatcher {
    fn drop(&mut self) {
        self.requests = None;
        if self.thread.take().is_some_and(|thread| thread.join().is_err()) {
            tracing::error!(event = "thread-panicked", "the thread of the services has panicked");
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

    fn maintenance_loop(&mut self, requests: &Receiver<Request>, seen: &Mutex<DispatchState>) {
        let mut next = Instant::now();
        loop {
            self.services.iter_mut().for_each(Service::poll);
            *seen.lock() = self.seen();
            // A look that is late is not made up for: requests would look older than they are.
            next = (next + POLL_INTERVAL).max(Instant::now());
            match requests.recv_timeout(next.saturating_duration_since(Instant::now())) {
                Err(RecvTimeoutError::Timeout) => {}
                Err(RecvTimeoutError::Disconnected) => break,
                Ok((config, outcome)) => {
                    // Who asked may have gone meanwhile.
                    let _ = outcome.send(self.replace(&config));
                    next = Instant::now();
                }
            }
        }
    }

    fn seen(&self) -> DispatchState {
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
            outcome = outcome.and(service::detach(&service::pins(&self.pin_directory, listen)));
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
