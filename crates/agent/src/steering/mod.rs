//! Steering: the connections that RSS sends to core k are served by the worker of core k.
//!
//! The server is unmodified and already running. Once a second [`Steering::update`] compares its listening sockets with
//! the steered ones. After a change (a start, a reload with another number of workers, a respawned worker) it searches
//! the epoll sets of all processes ([`coreward_dataplane::listeners`]), stores new sockets in the array, and assigns
//! queues ([`assign`]).

pub mod assign;

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::net::{IpAddr, SocketAddr};
use std::os::fd::{AsFd as _, BorrowedFd};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::Context as _;
use coreward_dataplane::listeners::{self, Listener};
use coreward_dataplane::reuseport;
use coreward_dataplane::sockets::Inode;
use coreward_dataplane::sockets::counts::listening_sockets;
use coreward_dataplane::steer::{self, SteerCounters, SteerProgram as Program};
use coreward_intf as intf;
use coreward_model::ServiceAddress;

use crate::config::Steer;

/// Maximum time between two searches of the epoll sets: a worker may have been pinned to another CPU.
const SEARCH_INTERVAL: Duration = Duration::from_secs(30);

/// Steering of the connections of all services of this server. Dropping it leaves the steering active.
#[derive(Debug)]
pub struct Steering {
    mode: Steer,
    pin_directory: PathBuf,
    services: BTreeMap<SocketAddr, SteeredService>,
    /// Counters of all services that are or were steered, so that no counter decreases.
    counts: BTreeMap<SocketAddr, SteerCounters>,
}

#[derive(Debug)]
struct SteeredService {
    program: Program,
    /// Result of the last complete search: sockets with their workers, CPUs of the queues, and time of the search.
    last_search: Option<SteeredSockets>,
    /// State of the searches while they find sockets without a worker.
    incomplete_search: Option<IncompleteSearch>,
}

/// Searches of /proc that did not find the worker of every socket.
///
/// The next search is due after a quarter of the time since the first: soon after a reload, but rarely where workers do
/// not wait by epoll. Each search reads the descriptors of every process of the machine.
#[derive(Debug)]
struct IncompleteSearch {
    inodes: BTreeSet<Inode>,
    cpu_of_queue: Vec<usize>,
    first_search_at: Instant,
    last_search_at: Instant,
}

impl IncompleteSearch {
    fn is_due(&self, now: Instant) -> bool {
        now.duration_since(self.last_search_at)
            >= (self.last_search_at.duration_since(self.first_search_at) / 4).min(SEARCH_INTERVAL)
    }
}

#[derive(Debug)]
struct SteeredSockets {
    inodes: BTreeSet<Inode>,
    listeners: Vec<Listener>,
    cpu_of_queue: Vec<usize>,
    searched_at: Instant,
}

impl Steering {
    pub fn new(mode: Steer, pin_directory: &Path) -> Self {
        // Counts with another layout version are skipped: setting the service rejects them.
        let counts = |address| Some((address, SteerCounters::open_pinned(pin_directory, &pin_name(address)).ok()?));
        let counts = pinned_addresses(pin_directory).filter_map(counts).collect();
        Self { mode, pin_directory: pin_directory.to_owned(), services: BTreeMap::new(), counts }
    }

    /// Sets the steered services. `rss_map` is a map of the server's BPF programs. Fails when the kernel rejects a
    /// program.
    pub fn set_services(&mut self, services: &[ServiceAddress], rss_map: BorrowedFd<'_>) -> anyhow::Result<()> {
        let addresses: BTreeSet<SocketAddr> = if self.mode == Steer::Off {
            BTreeSet::new()
        } else {
            services.iter().map(|service| service.socket).collect()
        };
        self.services.retain(|address, _| addresses.contains(address));
        for address in addresses {
            if let std::collections::btree_map::Entry::Vacant(entry) = self.services.entry(address) {
                let name = pin_name(address);
                let program = Program::load(&self.pin_directory, &name, rss_map)?;
                self.counts.insert(address, SteerCounters::open_pinned(&self.pin_directory, &name)?);
                entry.insert(SteeredService { program, last_search: None, incomplete_search: None });
            }
        }
        Ok(())
    }

    /// Updates the steered sockets and the queues, about once a second. `cpu_of_queue` has the CPU that serves each
    /// receive queue. Returns warnings for the operator.
    pub fn update(&mut self, cpu_of_queue: &[usize]) -> Vec<String> {
        let mut warnings = Vec::new();
        if self.services.is_empty() {
            return warnings;
        }
        let sockets = match listening_sockets() {
            Ok(sockets) => sockets,
            Err(error) => return vec![format!("connections are not steered: {error:#}")],
        };
        for (address, service) in &mut self.services {
            let inodes = listeners::most_specific(*address, &sockets);
            match service.update(self.mode, inodes, cpu_of_queue) {
                Ok(warning) => warnings.extend(warning.map(|warning| format!("{address}: {warning}"))),
                Err(error) => warnings.push(format!("connections to {address} are not steered: {error:#}")),
            }
        }
        warnings
    }

    pub fn counters(&self) -> impl Iterator<Item = (&'static str, u64)> + '_ {
        let sum = |index: usize| self.counts.values().map(|counts| counts.values()[index]).sum();
        steer::COUNTER_NAMES.iter().enumerate().map(move |(index, name)| (*name, sum(index)))
    }
}

/// Ends all steering by an agent with this pin directory, after which the kernel selects the sockets. Fails when /proc
/// or the pins cannot be read.
pub fn remove(pin_directory: &Path) -> anyhow::Result<()> {
    for address in pinned_addresses(pin_directory) {
        // Closed sockets have taken the program with them.
        for listener in listeners::find_waiters(&listeners::tcp_listener_inodes(address)?)?.iter().take(1) {
            if let Err(error) = reuseport::detach(listeners::duplicate_socket(listener)?.as_fd()) {
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
    /// Updates the sockets of a service. Returns a warning if the kernel still selects the worker for some queue.
    fn update(
        &mut self,
        mode: Steer,
        inodes: BTreeSet<Inode>,
        cpu_of_queue: &[usize],
    ) -> anyhow::Result<Option<String>> {
        if inodes.is_empty() {
            (self.last_search, self.incomplete_search) = (None, None);
            return Ok(Some("no process listens".to_owned()));
        }
        if !self.is_current(&inodes, cpu_of_queue) && self.is_due(&inodes, cpu_of_queue) {
            let found = listeners::find_waiters(&inodes)?;
            self.last_search = None;
            self.steer(mode, &found, cpu_of_queue)?;
            let (cpu_of_queue, now) = (cpu_of_queue.to_vec(), Instant::now());
            // Between a reload and the first wait of a new worker a socket belongs to no worker: the next search finds
            // it.
            if found.len() == inodes.len() {
                self.incomplete_search = None;
                self.last_search = Some(SteeredSockets { inodes, listeners: found, cpu_of_queue, searched_at: now });
            } else {
                let first_search_at =
                    self.incomplete_search.as_ref().map_or(now, |incomplete| incomplete.first_search_at);
                self.incomplete_search =
                    Some(IncompleteSearch { inodes, cpu_of_queue, first_search_at, last_search_at: now });
            }
        }
        let Some(steered) = &self.last_search else {
            return Ok(Some("not every listening socket has a worker".to_owned()));
        };
        let without =
            assign::assign(mode, &steered.listeners, cpu_of_queue).iter().filter(|slot| slot.is_none()).count();
        Ok((without > 0)
            .then(|| format!("{without} of {} receive queues have no worker pinned to their CPU", cpu_of_queue.len())))
    }

    /// Returns whether a search of /proc is due. Failed searches for other sockets or other queues do not delay it.
    fn is_due(&mut self, inodes: &BTreeSet<Inode>, cpu_of_queue: &[usize]) -> bool {
        let same = |old: &mut IncompleteSearch| old.inodes == *inodes && old.cpu_of_queue == cpu_of_queue;
        if self.incomplete_search.take_if(|incomplete| !same(incomplete)).is_some() {
            return true;
        }
        self.incomplete_search.as_ref().is_none_or(|incomplete| incomplete.is_due(Instant::now()))
    }

    fn is_current(&self, inodes: &BTreeSet<Inode>, cpu_of_queue: &[usize]) -> bool {
        let alive = |listener: &Listener| Path::new("/proc").join(listener.pid.to_string()).exists();
        self.last_search.as_ref().is_some_and(|steered| {
            steered.inodes == *inodes
                && steered.cpu_of_queue == cpu_of_queue
                && steered.searched_at.elapsed() < SEARCH_INTERVAL
                && steered.listeners.iter().all(alive)
        })
    }

    fn steer(&self, mode: Steer, found: &[Listener], cpu_of_queue: &[usize]) -> anyhow::Result<()> {
        let steered: BTreeMap<u64, u32> =
            self.program.sockets().into_iter().map(|(slot, cookie)| (cookie, slot)).collect();
        let mut slots = Vec::with_capacity(found.len());
        let mut attached = false;
        for listener in found {
            let socket = listeners::duplicate_socket(listener)?;
            let cookie = reuseport::socket_cookie(socket.as_fd())?;
            slots.push(match steered.get(&cookie) {
                Some(slot) => *slot,
                None => self.program.add_socket(socket.as_fd())?,
            });
            if !attached {
                self.program.attach(socket.as_fd()).context("the service must listen with SO_REUSEPORT")?;
                attached = true;
            }
        }
        let queues = cpu_of_queue.len().min(intf::MAX_STEERED_QUEUES as usize);
        let assigned = assign::assign(mode, found, &cpu_of_queue[..queues]);
        let slots: Vec<Option<u32>> = assigned.into_iter().map(|position| position.map(|at| slots[at])).collect();
        self.program.set_queues(&slots);
        Ok(())
    }
}

fn pinned_addresses(pin_directory: &Path) -> impl Iterator<Item = SocketAddr> {
    let entries = fs::read_dir(pin_directory.join("steer")).into_iter().flatten().flatten();
    entries.filter_map(|entry| parse_pin_name(entry.file_name().to_str()?))
}

/// Returns the service address that [`pin_name`] encoded in a pin's name.
fn parse_pin_name(name: &str) -> Option<SocketAddr> {
    let (address, port) = name.rsplit_once('_')?;
    let address: IpAddr = address.replace('_', ".").parse().ok()?;
    Some(SocketAddr::new(address, port.parse().ok()?))
}

/// Returns the name of a service's pin, without dots, which bpffs does not allow in names.
fn pin_name(address: SocketAddr) -> String {
    format!("{}_{}", address.ip().to_string().replace('.', "_"), address.port())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn proc_scan_backs_off_while_sockets_have_no_worker() {
        let (first_search_at, mut looks) = (Instant::now(), Vec::new());
        let mut incomplete = IncompleteSearch {
            inodes: BTreeSet::new(),
            cpu_of_queue: vec![],
            first_search_at,
            last_search_at: first_search_at,
        };
        for second in 1..=600 {
            let now = first_search_at + Duration::from_secs(second);
            if incomplete.is_due(now) {
                incomplete.last_search_at = now;
                looks.push(second);
            }
        }
        assert_eq!(looks[..6], [1, 2, 3, 4, 5, 7], "soon after a reload");
        assert!(looks.len() < 40, "{looks:?}");
        assert!(looks.windows(2).all(|pair| pair[1] - pair[0] <= SEARCH_INTERVAL.as_secs()), "{looks:?}");
    }

    #[test]
    fn pin_names_contain_addresses() {
        let address = "10.200.0.1:80".parse().unwrap();
        assert_eq!(pin_name(address), "10_200_0_1_80");
        assert_eq!(parse_pin_name("10_200_0_1_80"), Some(address));
        assert_eq!(parse_pin_name("10_200_0_80"), None);
        let address = "[2001:db8::c8:1]:80".parse().unwrap();
        assert_eq!(pin_name(address), "2001:db8::c8:1_80");
        assert_eq!(parse_pin_name("2001:db8::c8:1_80"), Some(address));
    }
}
