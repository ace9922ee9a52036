//! Steers the connections that RSS sends to core k to the worker of core k.
//!
//! The server application is unmodified and may already run. Once a second
//! [`ConnectionSteering::update_sockets_and_list_warnings`] compares its listening sockets with the steered ones. A
//! difference means that the application started, was reloaded with another number of workers, or respawned a worker.
//! Then the epoll sets of all processes are searched ([`coreward_dataplane::listeners`]), new sockets are stored in the
//! BPF array, and queues are assigned to them ([`socket_assignment`]).

pub mod socket_assignment;

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::net::{IpAddr, SocketAddr};
use std::os::fd::{AsFd as _, BorrowedFd};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::Context as _;
use coreward_dataplane::listeners::{self, ServiceSocket};
use coreward_dataplane::reuseport;
use coreward_dataplane::sockets::SocketInode;
use coreward_dataplane::sockets::counts::list_listening_sockets;
use coreward_dataplane::steer::{self, ConnectionSteeringCounters, ConnectionSteeringProgram as Program};
use coreward_intf as intf;
use coreward_model::ServiceAddress;

use crate::config::ConnectionSteeringMode;

/// Maximum interval between two searches for workers. They are repeated because workers may be pinned to other CPUs.
const MAX_WORKER_SEARCH_INTERVAL: Duration = Duration::from_secs(30);

/// Steering of the connections of all services on this server to workers. It remains active after this value is
/// dropped.
#[derive(Debug)]
pub struct ConnectionSteering {
    steering_mode: ConnectionSteeringMode,
    pin_directory: PathBuf,
    services: BTreeMap<SocketAddr, SteeredService>,
    /// Counters of all services that are or were steered. Former services are included, so that no total decreases.
    counters_by_service: BTreeMap<SocketAddr, ConnectionSteeringCounters>,
}

#[derive(Debug)]
struct SteeredService {
    steering_program: Program,
    /// Result of the last complete search: the sockets, their workers, the queues' CPUs and the time.
    steered_sockets: Option<SteeredSockets>,
    /// State of the repeated searches while some socket has no known worker, otherwise `None`.
    incomplete_search: Option<IncompleteWorkerSearch>,
}

/// Series of searches of /proc that did not find the worker of every socket.
/// The next search is due after a quarter of the time between the first and the last search. Searches are therefore
/// frequent after a reload, but rare if workers do not wait with epoll. This matters because each search reads the
/// descriptors of every process on the machine.
#[derive(Debug)]
struct IncompleteWorkerSearch {
    socket_inodes: BTreeSet<SocketInode>,
    cpu_of_queue: Vec<usize>,
    first_search_time: Instant,
    last_search_time: Instant,
}

impl IncompleteWorkerSearch {
    fn is_retry_due(&self, now: Instant) -> bool {
        now.duration_since(self.last_search_time)
            >= (self.last_search_time.duration_since(self.first_search_time) / 4).min(MAX_WORKER_SEARCH_INTERVAL)
    }
}

#[derive(Debug)]
struct SteeredSockets {
    socket_inodes: BTreeSet<SocketInode>,
    listeners: Vec<ServiceSocket>,
    cpu_of_queue: Vec<usize>,
    search_time: Instant,
}

impl ConnectionSteering {
    pub fn new(steering_mode: ConnectionSteeringMode, pin_directory: &Path) -> Self {
        // Counters with another layout version are skipped here, because `set_services` fails for them later.
        let read_pinned_counters = |address| {
            Some((address, ConnectionSteeringCounters::open_pinned(pin_directory, &service_pin_name(address)).ok()?))
        };
        let counters_by_service = pinned_service_addresses(pin_directory).filter_map(read_pinned_counters).collect();
        Self { steering_mode, pin_directory: pin_directory.to_owned(), services: BTreeMap::new(), counters_by_service }
    }

    /// Sets the services whose connections are steered. `rss_map` is the map with the RSS configuration of the server's
    /// BPF programs. Fails if the kernel rejects a program.
    pub fn set_services(&mut self, services: &[ServiceAddress], rss_map: BorrowedFd<'_>) -> anyhow::Result<()> {
        let service_addresses: BTreeSet<SocketAddr> = if self.steering_mode == ConnectionSteeringMode::Off {
            BTreeSet::new()
        } else {
            services.iter().map(|service| service.vip_and_port).collect()
        };
        self.services.retain(|address, _| service_addresses.contains(address));
        for address in service_addresses {
            if let std::collections::btree_map::Entry::Vacant(entry) = self.services.entry(address) {
                let pin_name = service_pin_name(address);
                let steering_program = Program::load(&self.pin_directory, &pin_name, rss_map)?;
                self.counters_by_service
                    .insert(address, ConnectionSteeringCounters::open_pinned(&self.pin_directory, &pin_name)?);
                entry.insert(SteeredService { steering_program, steered_sockets: None, incomplete_search: None });
            }
        }
        Ok(())
    }

    /// Updates the steered sockets and their assignment to queues. Called about once per second. `cpu_of_queue`
    /// contains the CPU that serves each receive queue. Returns warnings for the operator.
    pub fn update_sockets_and_list_warnings(&mut self, cpu_of_queue: &[usize]) -> Vec<String> {
        let mut warnings = Vec::new();
        if self.services.is_empty() {
            return warnings;
        }
        let listening_sockets = match list_listening_sockets() {
            Ok(sockets) => sockets,
            Err(error) => return vec![format!("connections are not steered: {error:#}")],
        };
        for (address, service) in &mut self.services {
            let socket_inodes = listeners::find_receiving_socket_inodes(*address, &listening_sockets);
            match service.update_sockets(self.steering_mode, socket_inodes, cpu_of_queue) {
                Ok(warning) => warnings.extend(warning.map(|warning| format!("{address}: {warning}"))),
                Err(error) => warnings.push(format!("connections to {address} are not steered: {error:#}")),
            }
        }
        warnings
    }

    pub fn named_counter_totals(&self) -> impl Iterator<Item = (&'static str, u64)> + '_ {
        let sum_over_services = |counter_index: usize| {
            self.counters_by_service.values().map(|counts| counts.counter_values()[counter_index]).sum()
        };
        steer::COUNTER_NAMES.iter().enumerate().map(move |(index, name)| (*name, sum_over_services(index)))
    }
}

/// Ends the steering by all agents that used this pin directory, so that the kernel selects the sockets again. Fails if
/// /proc or the pins cannot be read.
pub fn end_all_steering(pin_directory: &Path) -> anyhow::Result<()> {
    for address in pinned_service_addresses(pin_directory) {
        // If all sockets are closed, the kernel has already detached the program.
        for listener in
            listeners::find_processes_waiting_with_epoll(&listeners::tcp_listener_inodes(address)?)?.iter().take(1)
        {
            if let Err(error) =
                reuseport::detach_from_reuseport_group(listeners::duplicate_process_socket(listener)?.as_fd())
            {
                tracing::debug!(
                    event = "steering-kept",
                    service = %address,
                    error = format!("{error:#}"),
                    "the agent cannot detach its steering program from the service's sockets"
                );
            }
        }
    }
    let directory = pin_directory.join("steer");
    match fs::remove_dir_all(&directory) {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
            Err(error).context(directory.display().to_string())
        }
        _ => Ok(()),
    }
}

impl SteeredService {
    /// Finds the service's sockets and steers to them. Returns a warning if some queue still has no worker.
    fn update_sockets(
        &mut self,
        steering_mode: ConnectionSteeringMode,
        socket_inodes: BTreeSet<SocketInode>,
        cpu_of_queue: &[usize],
    ) -> anyhow::Result<Option<String>> {
        if socket_inodes.is_empty() {
            (self.steered_sockets, self.incomplete_search) = (None, None);
            return Ok(Some("no process listens".to_owned()));
        }
        if !self.are_steered_sockets_current(&socket_inodes, cpu_of_queue)
            && self.is_worker_search_due(&socket_inodes, cpu_of_queue)
        {
            self.find_and_steer_listeners(steering_mode, socket_inodes, cpu_of_queue)?;
        }
        let Some(steered_sockets) = &self.steered_sockets else {
            return Ok(Some("not every listening socket has a worker".to_owned()));
        };
        let queues_without_worker =
            socket_assignment::assign_listeners_to_queues(steering_mode, &steered_sockets.listeners, cpu_of_queue)
                .iter()
                .filter(|listener_index| listener_index.is_none())
                .count();
        Ok((queues_without_worker > 0).then(|| {
            format!(
                "{queues_without_worker} of {} receive queues have no worker pinned to their CPU",
                cpu_of_queue.len()
            )
        }))
    }

    /// Searches /proc for the workers of the sockets, and steers to the workers found. Records if a worker is missing.
    fn find_and_steer_listeners(
        &mut self,
        steering_mode: ConnectionSteeringMode,
        socket_inodes: BTreeSet<SocketInode>,
        cpu_of_queue: &[usize],
    ) -> anyhow::Result<()> {
        let waiting_listeners = listeners::find_processes_waiting_with_epoll(&socket_inodes)?;
        self.steered_sockets = None;
        self.steer_listeners(steering_mode, &waiting_listeners, cpu_of_queue)?;
        let (cpu_of_queue, now) = (cpu_of_queue.to_vec(), Instant::now());
        // A new worker's socket has no waiting worker directly after a reload. The next search finds that worker.
        if waiting_listeners.len() == socket_inodes.len() {
            self.incomplete_search = None;
            self.steered_sockets =
                Some(SteeredSockets { socket_inodes, listeners: waiting_listeners, cpu_of_queue, search_time: now });
        } else {
            let first_search_time =
                self.incomplete_search.as_ref().map_or(now, |incomplete| incomplete.first_search_time);
            self.incomplete_search =
                Some(IncompleteWorkerSearch { socket_inodes, cpu_of_queue, first_search_time, last_search_time: now });
        }
        Ok(())
    }

    /// Returns whether to search /proc for workers: at once if sockets or queues have changed, or else if a retry is
    /// due.
    fn is_worker_search_due(&mut self, socket_inodes: &BTreeSet<SocketInode>, cpu_of_queue: &[usize]) -> bool {
        let is_same_search =
            |old: &mut IncompleteWorkerSearch| old.socket_inodes == *socket_inodes && old.cpu_of_queue == cpu_of_queue;
        if self.incomplete_search.take_if(|incomplete| !is_same_search(incomplete)).is_some() {
            return true;
        }
        self.incomplete_search.as_ref().is_none_or(|incomplete| incomplete.is_retry_due(Instant::now()))
    }

    fn are_steered_sockets_current(&self, socket_inodes: &BTreeSet<SocketInode>, cpu_of_queue: &[usize]) -> bool {
        let is_process_alive = |listener: &ServiceSocket| Path::new("/proc").join(listener.pid.to_string()).exists();
        self.steered_sockets.as_ref().is_some_and(|steered_sockets| {
            steered_sockets.socket_inodes == *socket_inodes
                && steered_sockets.cpu_of_queue == cpu_of_queue
                && steered_sockets.search_time.elapsed() < MAX_WORKER_SEARCH_INTERVAL
                && steered_sockets.listeners.iter().all(is_process_alive)
        })
    }

    fn steer_listeners(
        &self,
        steering_mode: ConnectionSteeringMode,
        waiting_listeners: &[ServiceSocket],
        cpu_of_queue: &[usize],
    ) -> anyhow::Result<()> {
        let slots_by_cookie: BTreeMap<u64, u32> =
            self.steering_program.socket_cookies_by_slot().into_iter().map(|(slot, cookie)| (cookie, slot)).collect();
        let mut listener_slots = Vec::with_capacity(waiting_listeners.len());
        let mut is_any_socket_attached = false;
        for listener in waiting_listeners {
            let socket = listeners::duplicate_process_socket(listener)?;
            let socket_cookie = reuseport::socket_cookie(socket.as_fd())?;
            listener_slots.push(match slots_by_cookie.get(&socket_cookie) {
                Some(slot) => *slot,
                None => self.steering_program.add_listening_socket(socket.as_fd())?,
            });
            if !is_any_socket_attached {
                self.steering_program
                    .attach_to_socket_group(socket.as_fd())
                    .context("the service must listen with SO_REUSEPORT")?;
                is_any_socket_attached = true;
            }
        }
        let queue_count = cpu_of_queue.len().min(intf::MAX_STEERED_QUEUES as usize);
        let listener_of_queue = socket_assignment::assign_listeners_to_queues(
            steering_mode,
            waiting_listeners,
            &cpu_of_queue[..queue_count],
        );
        let slot_of_queue: Vec<Option<u32>> = listener_of_queue
            .into_iter()
            .map(|listener_index| listener_index.map(|index| listener_slots[index]))
            .collect();
        self.steering_program.set_socket_slots_by_queue(&slot_of_queue);
        Ok(())
    }
}

fn pinned_service_addresses(pin_directory: &Path) -> impl Iterator<Item = SocketAddr> {
    let pin_entries = fs::read_dir(pin_directory.join("steer")).into_iter().flatten().flatten();
    pin_entries.filter_map(|entry| parse_service_pin_name(entry.file_name().to_str()?))
}

/// Returns the service address that [`service_pin_name`] has encoded in the name of a pin, or `None` if the name is
/// invalid.
fn parse_service_pin_name(name: &str) -> Option<SocketAddr> {
    let (address, port) = name.rsplit_once('_')?;
    let address: IpAddr = address.replace('_', ".").parse().ok()?;
    Some(SocketAddr::new(address, port.parse().ok()?))
}

/// Returns the name of a service's pin. The name has no dots, because bpffs does not allow them.
fn service_pin_name(address: SocketAddr) -> String {
    format!("{}_{}", address.ip().to_string().replace('.', "_"), address.port())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn worker_search_interval_grows_while_sockets_lack_workers() {
        let (first_searched_at, mut search_seconds) = (Instant::now(), Vec::new());
        let mut incomplete_search = IncompleteWorkerSearch {
            socket_inodes: BTreeSet::new(),
            cpu_of_queue: vec![],
            first_search_time: first_searched_at,
            last_search_time: first_searched_at,
        };
        for second in 1..=600 {
            let now = first_searched_at + Duration::from_secs(second);
            if incomplete_search.is_retry_due(now) {
                incomplete_search.last_search_time = now;
                search_seconds.push(second);
            }
        }
        assert_eq!(search_seconds[..6], [1, 2, 3, 4, 5, 7], "soon after a reload");
        assert!(search_seconds.len() < 40, "{search_seconds:?}");
        assert!(
            search_seconds
                .windows(2)
                .all(|adjacent_seconds| adjacent_seconds[1] - adjacent_seconds[0]
                    <= MAX_WORKER_SEARCH_INTERVAL.as_secs()),
            "{search_seconds:?}"
        );
    }

    #[test]
    fn service_pin_name_round_trips_address() {
        let service_address = "10.200.0.1:80".parse().unwrap();
        assert_eq!(service_pin_name(service_address), "10_200_0_1_80");
        assert_eq!(parse_service_pin_name("10_200_0_1_80"), Some(service_address));
        assert_eq!(parse_service_pin_name("10_200_0_80"), None);
        let service_address = "[2001:db8::c8:1]:80".parse().unwrap();
        assert_eq!(service_pin_name(service_address), "2001:db8::c8:1_80");
        assert_eq!(parse_service_pin_name("2001:db8::c8:1_80"), Some(service_address));
    }
}
