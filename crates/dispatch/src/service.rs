//! One service: search and maintenance of its workers.

use std::collections::BTreeSet;
use std::net::SocketAddr;
use std::os::fd::AsFd as _;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::Context as _;
use coreward_dataplane::dispatch::{self, DispatchPrograms};
use coreward_dataplane::listeners::{self, Listener};
use coreward_dataplane::reuseport;
use coreward_dataplane::sockets::Inode;
use coreward_model::dispatch::LearnedTime;

use crate::config;
use crate::status::ServiceStatus;

/// Interval of searches for new workers while no worker has died.
const WORKER_SEARCH_INTERVAL: Duration = Duration::from_secs(1);

/// Service whose requests are dispatched to workers. Its requests are still dispatched after a drop.
#[derive(Debug)]
pub struct Service {
    config: config::Service,
    dispatch: DispatchPrograms,
    started: Instant,
    last_worker_search: Option<Instant>,
    /// Time at which a worker last died.
    last_worker_death: Option<Instant>,
    /// Inodes of the workers' sockets that the last search found.
    known_inodes: BTreeSet<Inode>,
    learned_times: Vec<LearnedTime>,
    last_observed_times: Vec<(u64, u64)>,
    /// Last warning of the service, kept so that each warning is logged once.
    last_warning: Option<String>,
}

impl Service {
    /// Loads the service's BPF programs, or takes over running ones.
    pub fn start(config: &config::Service, pin_directory: &Path, cgroup: &Path) -> anyhow::Result<Self> {
        let listen = config.options.service;
        let dispatch = DispatchPrograms::load(&service_pin_directory(pin_directory, listen), cgroup, &config.options)
            .with_context(|| format!("service {listen}"))?;
        let learned_times: Vec<LearnedTime> = config
            .expected_service_times
            .iter()
            .map(|time| time.map_or_else(LearnedTime::default, LearnedTime::expected))
            .collect();
        tracing::info!(
            event = "dispatch-started",
            service = %listen,
            policy = config.options.policy.name(),
            taken_over = dispatch.is_taken_over(),
            "the dispatcher selects a worker for each request of the service"
        );
        let last_observed_times = dispatch.ledger().observed_times(learned_times.len());
        let service = Self {
            config: config.clone(),
            dispatch,
            started: Instant::now(),
            last_worker_search: None,
            last_worker_death: None,
            known_inodes: BTreeSet::new(),
            learned_times,
            last_observed_times,
            last_warning: None,
        };
        service.write_expected_times();
        Ok(service)
    }

    /// Performs the periodic maintenance of the service; called once per [`dispatch::POLL_INTERVAL`].
    pub fn poll(&mut self) {
        let polled = self.dispatch.poll(self.started.elapsed(), &self.config.timeouts);
        let died = polled.unwrap_or_else(|error| {
            self.record_warning(format!("{error:#}"));
            false
        });
        if self.config.options.observes_service_times {
            self.learn_service_times();
        }
        if died {
            self.last_worker_death = Some(Instant::now());
        }
        // A new worker may replace a dead one at any time.
        let soon = self.last_worker_death.is_some_and(|at| at.elapsed() < WORKER_SEARCH_INTERVAL * 2);
        if soon || self.last_worker_search.is_none_or(|at| at.elapsed() >= WORKER_SEARCH_INTERVAL) {
            self.last_worker_search = Some(Instant::now());
            match self.find_workers(died) {
                Ok(()) => self.last_warning = None,
                Err(error) => self.record_warning(format!("{error:#}")),
            }
        }
    }

    pub fn listen(&self) -> SocketAddr {
        self.config.options.service
    }

    pub fn status(&self) -> ServiceStatus {
        ServiceStatus::from(self.dispatch.ledger())
    }

    pub fn warning(&self) -> Option<String> {
        self.last_warning.as_ref().map(|warning| format!("dispatch of {}: {warning}", self.listen()))
    }

    fn record_warning(&mut self, warning: String) {
        if self.last_warning.as_ref() != Some(&warning) {
            let service = self.config.options.service;
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
        let observed = self.dispatch.ledger().observed_times(self.learned_times.len());
        let expected = self.config.expected_service_times.iter();
        for (((learned, before), now), expected) in
            self.learned_times.iter_mut().zip(&self.last_observed_times).zip(&observed).zip(expected)
        {
            // A configured time is not learned.
            if expected.is_none() {
                learned.observe(now.0.wrapping_sub(before.0), now.1.wrapping_sub(before.1));
            }
        }
        self.last_observed_times = observed;
        self.write_expected_times();
    }

    fn write_expected_times(&self) {
        let known: Vec<Duration> = self.learned_times.iter().filter_map(|learned| learned.expected_time()).collect();
        // A type without a response so far gets the mean of the other types.
        let mean = known.iter().sum::<Duration>().checked_div(known.len() as u32).unwrap_or(Duration::from_micros(10));
        let times: Vec<Duration> =
            self.learned_times.iter().map(|learned| learned.expected_time().unwrap_or(mean)).collect();
        self.dispatch.set_expected_times(&times);
    }

    fn find_workers(&mut self, died: bool) -> anyhow::Result<()> {
        let listen = self.config.options.service;
        let inodes = listeners::udp_socket_inodes(listen)?;
        if inodes == self.known_inodes && !died {
            return Ok(());
        }
        self.known_inodes.clear();
        anyhow::ensure!(!inodes.is_empty(), "no UDP socket receives at {listen}: expected a running server");
        let found = find_readers(&inodes)?;
        let steered: BTreeSet<u64> = self.dispatch.sockets().into_values().collect();
        let mut problem = None;
        let mut complete = found.len() == inodes.len();
        for listener in &found {
            match self.add_if_unsteered(listener, &steered) {
                Ok(()) => {}
                Err(error) => {
                    complete = false;
                    problem = Some(error);
                }
            }
        }
        self.dispatch.set_bounds(|workers| self.config.class_bounds(workers));
        if complete {
            self.known_inodes = inodes;
        }
        problem.map_or(Ok(()), Err)
    }

    fn add_if_unsteered(&self, listener: &Listener, steered: &BTreeSet<u64>) -> anyhow::Result<()> {
        let socket = listeners::duplicate_socket(listener)?;
        if !steered.contains(&reuseport::socket_cookie(socket.as_fd())?) {
            let slot = self.dispatch.add_worker(socket.as_fd(), listener.pid as u32)?;
            let service = self.config.options.service;
            tracing::info!(
                event = "worker-added",
                %service,
                slot,
                pid = listener.pid,
                "the dispatcher has found a new worker, which gets requests from now on"
            );
        }
        // A restarted server has several groups, and each needs the program.
        self.dispatch.attach(socket.as_fd()).context("the service must open its sockets with SO_REUSEPORT")
    }
}

/// Returns the process that reads each socket: one that waits for it by epoll, or else one that has it open.
fn find_readers(inodes: &BTreeSet<Inode>) -> anyhow::Result<Vec<Listener>> {
    let mut found = listeners::find_waiters(inodes)?;
    let without: BTreeSet<Inode> =
        inodes.iter().copied().filter(|inode| found.iter().all(|listener| listener.inode != *inode)).collect();
    if !without.is_empty() {
        found.extend(listeners::find_owners(&without)?);
    }
    // Sorted by the start of the workers.
    found.sort_by_key(|listener| (listener.descriptor, listener.pid, listener.inode));
    Ok(found)
}

/// Ends the dispatch of a service, so that the kernel selects workers again. Fails when something cannot be removed.
pub fn detach(pins: &Path) -> anyhow::Result<()> {
    if let Ok(ledger) = dispatch::pinned_ledger(pins) {
        let listen = ledger.service().0;
        // Closed sockets have taken the program with them.
        for listener in find_readers(&listeners::udp_socket_inodes(listen)?)? {
            if let Err(error) =
                listeners::duplicate_socket(&listener).and_then(|socket| reuseport::detach(socket.as_fd()))
            {
                tracing::debug!(
                    event = "not-detached",
                    service = %listen,
                    pid = listener.pid,
                    error = format!("{error:#}"),
                    "the dispatcher cannot detach its program from a worker's socket"
                );
            }
        }
        tracing::info!(
            event = "dispatch-ended",
            service = %listen,
            "the dispatcher has ended: the kernel selects the service's sockets again"
        );
    }
    dispatch::remove(pins)
}

/// Returns the pin directory of a service. Its name has no dots, which bpffs does not allow.
pub fn service_pin_directory(pin_directory: &Path, listen: SocketAddr) -> PathBuf {
    let address = listen.ip().to_string().replace(['.', ':'], "_");
    pin_directory.join(format!("{address}_{}", listen.port()))
}

pub fn service_pin_directories(pin_directory: &Path) -> Vec<PathBuf> {
    let entries = std::fs::read_dir(pin_directory).into_iter().flatten().flatten();
    let mut found: Vec<PathBuf> = entries.map(|entry| entry.path()).filter(|path| path.is_dir()).collect();
    found.sort();
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pin_names_have_no_dots() {
        let at = |listen: &str| service_pin_directory(Path::new("/d"), listen.parse().unwrap());
        assert_eq!(at("10.0.0.1:53"), Path::new("/d/10_0_0_1_53"));
        assert_eq!(at("[::]:53"), Path::new("/d/___53"));
    }
}
