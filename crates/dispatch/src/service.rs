//! Maintains one dispatched service, and searches for its workers.

use std::collections::BTreeSet;
use std::net::SocketAddr;
use std::os::fd::AsFd as _;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::Context as _;
use coreward_dataplane::dispatch::{self, DispatchPrograms};
use coreward_dataplane::listeners::{self, ServiceSocket};
use coreward_dataplane::reuseport;
use coreward_dataplane::sockets::SocketInode;
use coreward_model::dispatch::LearnedServiceTime;

use crate::config;
use crate::status::DispatchServiceStatus;

/// Interval between searches for new workers, unless a worker has died recently.
const WORKER_SEARCH_INTERVAL: Duration = Duration::from_secs(1);

/// Service whose requests are dispatched to workers. Requests are still dispatched after this value is dropped.
#[derive(Debug)]
pub struct DispatchedService {
    service_config: config::DispatchServiceConfig,
    dispatch_programs: DispatchPrograms,
    started_at: Instant,
    last_worker_search_at: Option<Instant>,
    last_worker_death_at: Option<Instant>,
    /// Inodes of the worker sockets that the last search found.
    worker_socket_inodes: BTreeSet<SocketInode>,
    learned_service_times: Vec<LearnedServiceTime>,
    previous_time_sums_and_counts: Vec<(u64, u64)>,
    /// The service's last warning, which is kept so that each warning is logged only once.
    last_warning: Option<String>,
}

impl DispatchedService {
    /// Loads the service's BPF programs or takes over running ones.
    pub fn start(config: &config::DispatchServiceConfig, pin_directory: &Path, cgroup: &Path) -> anyhow::Result<Self> {
        let listen_address = config.program_options.service_address;
        let dispatch_programs = DispatchPrograms::load(
            &service_pin_directory(pin_directory, listen_address),
            cgroup,
            &config.program_options,
        )
        .with_context(|| format!("service {listen_address}"))?;
        let learned_service_times: Vec<LearnedServiceTime> = config
            .expected_service_times
            .iter()
            .map(|time| time.map_or_else(LearnedServiceTime::default, LearnedServiceTime::with_expected_time))
            .collect();
        tracing::info!(
            event = "dispatch-started",
            service = %listen_address,
            policy = config.program_options.policy.name(),
            taken_over = dispatch_programs.is_state_taken_over(),
            "the dispatcher selects a worker for each request of the service"
        );
        let last_observed_service_times =
            dispatch_programs.ledger().service_time_sums_and_counts(learned_service_times.len());
        let service = Self {
            service_config: config.clone(),
            dispatch_programs,
            started_at: Instant::now(),
            last_worker_search_at: None,
            last_worker_death_at: None,
            worker_socket_inodes: BTreeSet::new(),
            learned_service_times,
            previous_time_sums_and_counts: last_observed_service_times,
            last_warning: None,
        };
        service.write_expected_service_times();
        Ok(service)
    }

    /// Performs the service's periodic maintenance. Called once per [`dispatch::WORKER_QUEUE_POLL_INTERVAL`].
    pub fn poll(&mut self) {
        let poll_result = self
            .dispatch_programs
            .maintain_service(self.started_at.elapsed(), &self.service_config.user_space_timeouts);
        let has_worker_died = poll_result.unwrap_or_else(|error| {
            self.record_warning(format!("{error:#}"));
            false
        });
        if self.service_config.program_options.measures_service_times {
            self.learn_service_times();
        }
        if has_worker_died {
            self.last_worker_death_at = Some(Instant::now());
        }
        // After a death, every poll searches, because a new worker may replace the dead one at any time.
        let has_worker_died_recently =
            self.last_worker_death_at.is_some_and(|at| at.elapsed() < WORKER_SEARCH_INTERVAL * 2);
        if has_worker_died_recently
            || self.last_worker_search_at.is_none_or(|at| at.elapsed() >= WORKER_SEARCH_INTERVAL)
        {
            self.last_worker_search_at = Some(Instant::now());
            match self.find_and_add_workers(has_worker_died) {
                Ok(()) => self.last_warning = None,
                Err(error) => self.record_warning(format!("{error:#}")),
            }
        }
    }

    pub fn listen_address(&self) -> SocketAddr {
        self.service_config.program_options.service_address
    }

    pub fn status(&self) -> DispatchServiceStatus {
        DispatchServiceStatus::from(self.dispatch_programs.ledger())
    }

    pub fn current_warning(&self) -> Option<String> {
        self.last_warning.as_ref().map(|warning| format!("dispatch of {}: {warning}", self.listen_address()))
    }

    fn record_warning(&mut self, warning: String) {
        if self.last_warning.as_ref() != Some(&warning) {
            let service = self.service_config.program_options.service_address;
            tracing::warn!(
                event = "dispatch-problem",
                %service,
                error = warning,
                "the dispatcher cannot maintain the service's workers and retries"
            );
            self.last_warning = Some(warning);
        }
    }

    fn learn_service_times(&mut self) {
        let observed_service_times =
            self.dispatch_programs.ledger().service_time_sums_and_counts(self.learned_service_times.len());
        let expected_service_times = self.service_config.expected_service_times.iter();
        for (((learned_time, previous_observation), new_observation), expected_time) in self
            .learned_service_times
            .iter_mut()
            .zip(&self.previous_time_sums_and_counts)
            .zip(&observed_service_times)
            .zip(expected_service_times)
        {
            // Service times are learned only if none is configured.
            if expected_time.is_none() {
                learned_time.add_service_times(
                    new_observation.0.wrapping_sub(previous_observation.0),
                    new_observation.1.wrapping_sub(previous_observation.1),
                );
            }
        }
        self.previous_time_sums_and_counts = observed_service_times;
        self.write_expected_service_times();
    }

    fn write_expected_service_times(&self) {
        let known_service_times: Vec<Duration> =
            self.learned_service_times.iter().filter_map(|learned_time| learned_time.expected_service_time()).collect();
        // A request type that has had no response yet gets the mean of the other types.
        let mean_service_time = known_service_times
            .iter()
            .sum::<Duration>()
            .checked_div(known_service_times.len() as u32)
            .unwrap_or(Duration::from_micros(10));
        let expected_service_times: Vec<Duration> = self
            .learned_service_times
            .iter()
            .map(|learned_time| learned_time.expected_service_time().unwrap_or(mean_service_time))
            .collect();
        self.dispatch_programs.set_expected_service_times(&expected_service_times);
    }

    fn find_and_add_workers(&mut self, has_worker_died: bool) -> anyhow::Result<()> {
        let listen_address = self.service_config.program_options.service_address;
        let socket_inodes = listeners::udp_socket_inodes(listen_address)?;
        if socket_inodes == self.worker_socket_inodes && !has_worker_died {
            return Ok(());
        }
        self.worker_socket_inodes.clear();
        anyhow::ensure!(
            !socket_inodes.is_empty(),
            "no UDP socket receives at {listen_address}: expected a running server"
        );
        let socket_readers = find_socket_readers(&socket_inodes)?;
        let steered_socket_cookies: BTreeSet<u64> =
            self.dispatch_programs.socket_cookies_by_slot().into_values().collect();
        let mut problem = None;
        let mut is_search_complete = socket_readers.len() == socket_inodes.len();
        for listener in &socket_readers {
            match self.add_worker_if_new(listener, &steered_socket_cookies) {
                Ok(()) => {}
                Err(error) => {
                    is_search_complete = false;
                    problem = Some(error);
                }
            }
        }
        self.dispatch_programs.set_request_limits(|workers| self.service_config.outstanding_bounds_by_class(workers));
        if is_search_complete {
            self.worker_socket_inodes = socket_inodes;
        }
        problem.map_or(Ok(()), Err)
    }

    fn add_worker_if_new(
        &self,
        listener: &ServiceSocket,
        steered_socket_cookies: &BTreeSet<u64>,
    ) -> anyhow::Result<()> {
        let socket = listeners::duplicate_process_socket(listener)?;
        if !steered_socket_cookies.contains(&reuseport::socket_cookie(socket.as_fd())?) {
            let slot = self.dispatch_programs.add_worker(socket.as_fd(), listener.pid as u32)?;
            let service = self.service_config.program_options.service_address;
            tracing::info!(
                event = "worker-added",
                %service,
                slot,
                pid = listener.pid,
                "the dispatcher has found a new worker, which gets requests from now on"
            );
        }
        // Sockets of a restarted server may be in several reuseport groups, and each group needs the program.
        self.dispatch_programs
            .attach_to_socket_group(socket.as_fd())
            .context("the service must open its sockets with SO_REUSEPORT")
    }
}

/// Returns for each socket the process that reads it: one that waits for it with epoll, or else one that has it open.
fn find_socket_readers(socket_inodes: &BTreeSet<SocketInode>) -> anyhow::Result<Vec<ServiceSocket>> {
    let mut socket_readers = listeners::find_processes_waiting_with_epoll(socket_inodes)?;
    let inodes_without_waiter: BTreeSet<SocketInode> = socket_inodes
        .iter()
        .copied()
        .filter(|inode| socket_readers.iter().all(|listener| listener.inode != *inode))
        .collect();
    if !inodes_without_waiter.is_empty() {
        socket_readers.extend(listeners::find_owning_processes(&inodes_without_waiter)?);
    }
    // The readers are in the order in which the workers started.
    socket_readers.sort_by_key(|listener| (listener.file_descriptor, listener.pid, listener.inode));
    Ok(socket_readers)
}

/// Stops dispatching for a service, so that the kernel selects workers again. Fails when its programs or pins cannot be
/// removed.
pub fn stop_dispatching(pin_directory: &Path) -> anyhow::Result<()> {
    if let Ok(ledger) = dispatch::open_pinned_ledger(pin_directory) {
        let listen_address = ledger.service_address_and_policy_name().0;
        // If all sockets are closed, the kernel has already detached the program.
        for listener in find_socket_readers(&listeners::udp_socket_inodes(listen_address)?)? {
            if let Err(error) = listeners::duplicate_process_socket(&listener)
                .and_then(|socket| reuseport::detach_from_reuseport_group(socket.as_fd()))
            {
                tracing::debug!(
                    event = "not-detached",
                    service = %listen_address,
                    pid = listener.pid,
                    error = format!("{error:#}"),
                    "the dispatcher cannot detach its program from a worker's socket"
                );
            }
        }
        tracing::info!(
            event = "dispatch-ended",
            service = %listen_address,
            "the dispatcher has ended: the kernel again selects the socket of each request"
        );
    }
    dispatch::remove_pins_and_programs(pin_directory)
}

/// Returns the pin directory of a service. Its name has no dots, because bpffs does not allow them.
pub fn service_pin_directory(pin_directory: &Path, listen_address: SocketAddr) -> PathBuf {
    let address_without_dots = listen_address.ip().to_string().replace(['.', ':'], "_");
    pin_directory.join(format!("{address_without_dots}_{}", listen_address.port()))
}

pub fn service_pin_directories(pin_directory: &Path) -> Vec<PathBuf> {
    let directory_entries = std::fs::read_dir(pin_directory).into_iter().flatten().flatten();
    let mut pin_directories: Vec<PathBuf> =
        directory_entries.map(|entry| entry.path()).filter(|path| path.is_dir()).collect();
    pin_directories.sort();
    pin_directories
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pin_directory_names_have_no_dots() {
        let format_pin_directory = |listen: &str| service_pin_directory(Path::new("/d"), listen.parse().unwrap());
        assert_eq!(format_pin_directory("10.0.0.1:53"), Path::new("/d/10_0_0_1_53"));
        assert_eq!(format_pin_directory("[::]:53"), Path::new("/d/___53"));
    }
}
