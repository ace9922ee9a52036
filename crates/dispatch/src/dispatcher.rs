//! Maintains all configured services in a thread, which finds new workers and gives up requests without a response.
//! Requests are dispatched even if the thread does not run.

use std::path::PathBuf;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::thread::JoinHandle;
use std::time::Instant;

use anyhow::{Context as _, anyhow};
use coreward_dataplane::dispatch::{WORKER_QUEUE_POLL_INTERVAL, cgroup2_mount_point};
use parking_lot::Mutex;

use crate::config::DispatchConfig;
use crate::service::{self, DispatchedService};
use crate::status::DispatchServiceStatus;

/// Handle of the maintenance thread. The thread ends when the handle is dropped, but requests are still dispatched.
#[derive(Debug)]
pub struct DispatcherHandle {
    /// Sender of new configurations to the thread. It is `None` only while the handle is dropped.
    config_change_sender: Option<Sender<DispatchConfigChange>>,
    shared_state: Arc<Mutex<DispatchedServicesState>>,
    maintenance_thread: Option<JoinHandle<()>>,
}

/// New configuration, and a channel's sender, through which the thread returns the result of applying it.
type DispatchConfigChange = (DispatchConfig, Sender<anyhow::Result<()>>);

/// State of the dispatched services when they were last polled.
#[derive(Debug, Clone, Default)]
pub struct DispatchedServicesState {
    pub service_statuses: Vec<DispatchServiceStatus>,
    pub warnings: Vec<String>,
}

impl DispatcherHandle {
    /// Loads the services' BPF programs or takes over running ones, in the calling thread's network namespace.
    pub fn start(config: &DispatchConfig) -> anyhow::Result<Self> {
        let mut services = MaintainedServices::start(config)?;
        let (config_change_sender, config_change_receiver) = channel();
        let shared_state = Arc::new(Mutex::new(DispatchedServicesState::default()));
        let published_state = Arc::clone(&shared_state);
        // A new thread inherits the network namespace of its parent.
        let maintenance_thread = std::thread::Builder::new()
            .name("dispatch".to_owned())
            .spawn(move || services.run_maintenance_loop(&config_change_receiver, &published_state))
            .context("cannot start the thread that maintains the services")?;
        Ok(Self {
            config_change_sender: Some(config_change_sender),
            shared_state,
            maintenance_thread: Some(maintenance_thread),
        })
    }

    /// Replaces the services. For removed services, the kernel selects the socket again. Services that remain are not
    /// interrupted. Fails when the kernel rejects a service's program, and then this service stays unchanged.
    pub fn replace_config(&self, config: DispatchConfig) -> anyhow::Result<()> {
        let (result_sender, result_receiver) = channel();
        let thread_ended_error = || anyhow!("the thread that maintains the services has ended: expected a restart");
        self.config_change_sender
            .as_ref()
            .ok_or_else(thread_ended_error)?
            .send((config, result_sender))
            .map_err(|_| thread_ended_error())?;
        result_receiver.recv().map_err(|_| thread_ended_error())?
    }

    pub fn state(&self) -> DispatchedServicesState {
        self.shared_state.lock().clone()
    }

    pub fn is_running(&self) -> bool {
        self.maintenance_thread.as_ref().is_some_and(|thread| !thread.is_finished())
    }
}

/// Stops dispatching for these services, so that the kernel selects workers again. Fails when a service's programs or
/// pins cannot be removed.
pub fn detach_services(config: &DispatchConfig) -> anyhow::Result<()> {
    let to_pin_directory = |service_config: &crate::config::DispatchServiceConfig| {
        service::service_pin_directory(&config.pin_directory, service_config.program_options.service_address)
    };
    config
        .services
        .iter()
        .try_for_each(|service_config| service::stop_dispatching(&to_pin_directory(service_config)))?;
    // An error is ignored, because other services may still use the directory.
    let _ = std::fs::remove_dir(&config.pin_directory);
    Ok(())
}

impl Drop for DispatcherHandle {
    fn drop(&mut self) {
        self.config_change_sender = None;
        if self.maintenance_thread.take().is_some_and(|thread| thread.join().is_err()) {
            tracing::error!(
                event = "thread-panicked",
                thread = "dispatch",
                "the thread that maintains the dispatcher's services has panicked: restart the daemon"
            );
        }
    }
}

struct MaintainedServices {
    pin_directory: PathBuf,
    services: Vec<DispatchedService>,
}

impl MaintainedServices {
    fn start(config: &DispatchConfig) -> anyhow::Result<Self> {
        let mut maintained_services = Self { pin_directory: config.pin_directory.clone(), services: Vec::new() };
        maintained_services.replace_services(config)?;
        Ok(maintained_services)
    }

    fn run_maintenance_loop(
        &mut self,
        config_change_receiver: &Receiver<DispatchConfigChange>,
        shared_state: &Mutex<DispatchedServicesState>,
    ) {
        let mut next_poll_at = Instant::now();
        loop {
            self.services.iter_mut().for_each(DispatchedService::poll);
            *shared_state.lock() = self.current_state();
            // Missed polls are skipped, because a burst of polls would make requests seem older than they are.
            next_poll_at = (next_poll_at + WORKER_QUEUE_POLL_INTERVAL).max(Instant::now());
            match config_change_receiver.recv_timeout(next_poll_at.saturating_duration_since(Instant::now())) {
                Err(RecvTimeoutError::Timeout) => {}
                Err(RecvTimeoutError::Disconnected) => break,
                Ok((config, result_sender)) => {
                    let _ = result_sender.send(self.replace_services(&config));
                    next_poll_at = Instant::now();
                }
            }
        }
    }

    fn current_state(&self) -> DispatchedServicesState {
        DispatchedServicesState {
            service_statuses: self.services.iter().map(DispatchedService::status).collect(),
            warnings: self.services.iter().filter_map(DispatchedService::current_warning).collect(),
        }
    }

    fn replace_services(&mut self, config: &DispatchConfig) -> anyhow::Result<()> {
        let cgroup = config.cgroup.clone().map_or_else(cgroup2_mount_point, Ok)?;
        let is_kept = |service: &DispatchedService| {
            config.pin_directory == self.pin_directory
                && config
                    .services
                    .iter()
                    .any(|service_config| service_config.program_options.service_address == service.listen_address())
        };
        let (kept_services, removed_services): (Vec<_>, Vec<_>) = self.services.drain(..).partition(is_kept);
        self.services = kept_services;
        let mut replace_result = Ok(());
        for service in removed_services {
            let listen_address = service.listen_address();
            drop(service);
            replace_result = replace_result
                .and(service::stop_dispatching(&service::service_pin_directory(&self.pin_directory, listen_address)));
        }
        self.pin_directory.clone_from(&config.pin_directory);
        for service_config in &config.services {
            let service_index = self
                .services
                .iter()
                .position(|service| service.listen_address() == service_config.program_options.service_address);
            match (service_index, DispatchedService::start(service_config, &self.pin_directory, &cgroup)) {
                (Some(index), Ok(service)) => self.services[index] = service,
                (None, Ok(service)) => self.services.push(service),
                (_, Err(error)) => replace_result = replace_result.and(Err(error)),
            }
        }
        replace_result
    }
}
