//! Ledger of one service: its workers' outstanding requests, read and adjusted while the programs write.
//!
//! All writers follow one rule (`bpf/dispatch/state.h`): the writer that removes an entry from `requests` by
//! compare-and-swap subtracts its contribution. User space removes requests that will have no response.

use std::collections::BTreeMap;
use std::mem::offset_of;
use std::net::{IpAddr, Ipv6Addr, SocketAddr};
use std::os::fd::AsFd;
use std::sync::atomic::Ordering;
use std::time::{Duration, SystemTime};

use anyhow::Context as _;
use coreward_intf as intf;
use coreward_model::dispatch::{RoundedServiceTime, StallDetector, expired_requests};
use rand::TryRng as _;
use rand::rngs::SysRng;

use super::options::{Options, POLL_INTERVAL, Timeouts};
use crate::mmap_array::MmapArray;
use crate::reuseport::SocketCookie;

type RequestEntries = [u64; intf::DISPATCH_REQUESTS as usize];

const WORKER_COUNT: usize = intf::MAX_DISPATCH_WORKERS as usize;
const CLASS_COUNT: usize = intf::MAX_DISPATCH_CLASSES as usize;
/// Expected service time of all types before any is configured. As it is equal, `jlq` then acts like `jsq`.
const INITIAL_SERVICE_TIME: Duration = Duration::from_micros(10);
/// Mask of the flag bits above the expected work in a worker's word.
const WORK_FLAGS: u64 = !((1 << intf::DISPATCH_WORK_FLAGS_SHIFT) - 1);

/// Counts of the requests of one worker.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct WorkerCounts {
    /// Slot of the worker's socket in the array.
    pub slot: u32,
    /// Id of the process that reads the socket.
    pub pid: u32,
    /// Number of requests that have no response yet.
    pub outstanding: u32,
    /// Expected service time of all outstanding requests (used by `jlq`).
    pub outstanding_work: Duration,
    /// Number of requests dispatched to the worker.
    pub dispatched: u64,
    /// Number of requests whose response was observed.
    pub completed: u64,
    /// Number of requests given up: without a response, dropped, or sent to a dead former worker of the slot.
    pub abandoned: u64,
    /// Number of datagrams in the socket's queue at the last poll.
    pub queued: u32,
    /// Number of datagrams dropped because the socket's receive buffer was full, by the kernel's 32-bit counter.
    pub dropped: u32,
    /// Whether the worker gets requests.
    pub is_eligible: bool,
}

/// Ledger of one service's outstanding requests, in memory shared with the BPF programs.
#[derive(Debug)]
pub struct RequestLedger {
    state: MmapArray<intf::dispatch_state>,
    requests: MmapArray<RequestEntries>,
    liveness: BTreeMap<u32, StallDetector>,
}

/// Converts an address to the layout of `struct client` in bpf/dispatch/request.h; the unspecified address becomes 0.
pub(super) fn client_words(address: IpAddr) -> [u64; 2] {
    match address {
        IpAddr::V4(v4) => [0, u32::from_ne_bytes(v4.octets()).into()],
        IpAddr::V6(v6) => {
            let octets = v6.octets();
            [&octets[..8], &octets[8..]].map(|half| u64::from_ne_bytes(half.try_into().expect("8 bytes")))
        }
    }
}

const fn outstanding_offset(slot: u32) -> usize {
    offset_of!(intf::dispatch_state, outstanding) + slot as usize * size_of::<u32>()
}

const fn work_offset(slot: u32) -> usize {
    offset_of!(intf::dispatch_state, work) + slot as usize * size_of::<u64>()
}

const fn worker_offset(slot: u32) -> usize {
    offset_of!(intf::dispatch_state, workers) + slot as usize * size_of::<intf::dispatch_worker>()
}

#[derive(Debug, Clone, Copy)]
struct RequestEntry(u64);

impl RequestEntry {
    fn slot(self) -> u32 {
        (self.0 >> intf::DISPATCH_WORKER_SHIFT) as u32 & intf::DISPATCH_WORKER_MASK
    }

    /// Returns the number of polls since the request was dispatched, modulo 256.
    fn age(self, epoch: u64) -> u32 {
        epoch.wrapping_sub(self.0 >> intf::DISPATCH_EPOCH_SHIFT) as u32 & intf::DISPATCH_EPOCH_MASK
    }

    fn work(self) -> u64 {
        RoundedServiceTime::from_bits(self.0 as u16).as_ns()
    }
}

impl RequestLedger {
    pub(super) fn new(state: &impl AsFd, requests: &impl AsFd) -> anyhow::Result<Self> {
        Ok(Self {
            state: MmapArray::new(state).context("mapping dispatch_state (of another version?)")?,
            requests: MmapArray::new(requests).context("mapping the requests in flight (of another version?)")?,
            liveness: BTreeMap::new(),
        })
    }

    pub(super) fn has_this_version(&self) -> bool {
        self.state.load(offset_of!(intf::dispatch_state, layout_version)) == u64::from(intf::DISPATCH_LAYOUT_VERSION)
    }

    /// Initialises the newly created maps. Fails when the kernel provides no random numbers.
    pub(super) fn start(&self) -> anyhow::Result<()> {
        let mut seed = [0; 8];
        SysRng.try_fill_bytes(&mut seed).context("random numbers of the kernel")?;
        self.state.store(offset_of!(intf::dispatch_state, seed), u64::from_ne_bytes(seed));
        (0..intf::MAX_DISPATCH_WORKERS)
            .for_each(|slot| self.disable_worker(slot, intf::DISPATCH_GONE | intf::DISPATCH_DISABLED));
        (0..intf::MAX_DISPATCH_TYPES as usize)
            .for_each(|number| self.set_weight(number, RoundedServiceTime::new(INITIAL_SERVICE_TIME)));
        let version = intf::DISPATCH_LAYOUT_VERSION.into();
        self.state.store(offset_of!(intf::dispatch_state, layout_version), version);
        Ok(())
    }

    /// Stores the service's address and policy, for commands that read the pinned maps.
    pub(super) fn store_service_info(&self, options: &Options) {
        let at = |field| self.state.word32(field);
        at(offset_of!(intf::dispatch_state, policy)).store(options.policy.number(), Ordering::Relaxed);
        at(offset_of!(intf::dispatch_state, port)).store(options.service.port().into(), Ordering::Relaxed);
        let octets = match options.service.ip() {
            IpAddr::V4(v4) => v4.to_ipv6_mapped().octets(),
            IpAddr::V6(v6) => v6.octets(),
        };
        self.state.write(offset_of!(intf::dispatch_state, address), &octets);
    }

    /// Returns the service's address and the name of its policy.
    pub fn service(&self) -> (SocketAddr, &'static str) {
        let octets = self.state.read::<[u8; 16]>(offset_of!(intf::dispatch_state, address));
        let at = |field| self.state.word32(field).load(Ordering::Relaxed);
        let policy = at(offset_of!(intf::dispatch_state, policy)) as usize;
        let port = at(offset_of!(intf::dispatch_state, port)) as u16;
        let name = intf::DISPATCH_POLICY_NAMES.get(policy).copied().unwrap_or("unknown");
        (SocketAddr::new(Ipv6Addr::from(*octets).to_canonical(), port), name)
    }

    /// Returns the wall-clock time since the last poll. If it is more than a few [`POLL_INTERVAL`]s, no process
    /// maintains the service.
    pub fn since_last_poll(&self) -> Duration {
        let polled = self.state.load(offset_of!(intf::dispatch_state, polled_ms));
        Duration::from_millis(wall_clock_ms().saturating_sub(polled))
    }

    /// Returns the counters of the programs, in the order of [`super::COUNTER_NAMES`].
    pub fn counters(&self) -> [u64; intf::DISPATCH_COUNTER_COUNT as usize] {
        *self.state.read(offset_of!(intf::dispatch_state, counters))
    }

    /// Returns the counts of each slot that has a worker or had one.
    pub fn workers(&self) -> Vec<WorkerCounts> {
        (0..intf::MAX_DISPATCH_WORKERS).filter_map(|slot| self.worker(slot)).collect()
    }

    fn worker(&self, slot: u32) -> Option<WorkerCounts> {
        let outstanding = self.state.word32(outstanding_offset(slot)).load(Ordering::Relaxed);
        let worker = self.state.read::<intf::dispatch_worker>(worker_offset(slot));
        // Computed from the counts of requests: a counter of its own would cost every request an atomic operation.
        let in_flight = (outstanding & intf::DISPATCH_COUNT_MASK).saturating_sub(worker.surplus);
        let dispatched = worker.untracked + worker.completed + worker.abandoned + u64::from(in_flight);
        (worker.socket != 0 || dispatched != 0).then(|| WorkerCounts {
            slot,
            pid: worker.pid,
            outstanding: outstanding & intf::DISPATCH_COUNT_MASK,
            outstanding_work: Duration::from_nanos(self.state.load(work_offset(slot)) & !WORK_FLAGS),
            dispatched,
            completed: worker.completed,
            abandoned: worker.abandoned,
            queued: worker.queued,
            dropped: worker.dropped,
            is_eligible: outstanding & !intf::DISPATCH_COUNT_MASK == 0,
        })
    }

    /// Returns the sum in ns and the number of measured service times, for each of the first `types` types.
    pub fn observed_times(&self, types: usize) -> Vec<(u64, u64)> {
        let read = |number: usize| {
            let kind = self.state.read::<intf::dispatch_type>(type_entry_offset(number));
            (kind.observed_ns, kind.observed)
        };
        (0..types).map(read).collect()
    }

    pub(super) fn set_weight(&self, number: usize, weight: RoundedServiceTime) {
        assert!(number < intf::MAX_DISPATCH_TYPES as usize, "type {number}");
        let at = type_entry_offset(number) + offset_of!(intf::dispatch_type, weight);
        self.state.store(at, weight.bits().into());
    }

    /// Sets the bounds. `rows` has a bound by class and worker of `slots`; `first` is the bound of slot 0.
    pub(super) fn set_bounds(&self, slots: &[u32], rows: &[Vec<u32>], first: Option<u32>) {
        for (class, row) in rows.iter().take(CLASS_COUNT).enumerate() {
            let at = |slot: u32| {
                let place = class * WORKER_COUNT + slot as usize;
                self.state.word32(offset_of!(intf::dispatch_state, bound) + place * size_of::<u32>())
            };
            slots.iter().zip(row).for_each(|(slot, bound)| at(*slot).store(*bound, Ordering::Relaxed));
            first.into_iter().for_each(|bound| at(0).store(bound, Ordering::Relaxed));
        }
    }

    /// Assigns a slot to a worker. The slot stays closed, because the worker's socket is not in the array yet.
    pub(super) fn assign_slot(&self, slot: u32, socket: SocketCookie, pid: u32) {
        self.abandon_all(slot);
        self.state.store(worker_offset(slot) + offset_of!(intf::dispatch_worker, socket), socket);
        self.state.word32(worker_offset(slot) + offset_of!(intf::dispatch_worker, pid)).store(pid, Ordering::Relaxed);
    }

    /// Releases the slot of a worker that has ended.
    pub(super) fn release_slot(&self, slot: u32) {
        self.disable_worker(slot, intf::DISPATCH_GONE | intf::DISPATCH_DISABLED);
        self.abandon_all(slot);
        self.state.store(worker_offset(slot) + offset_of!(intf::dispatch_worker, socket), 0);
        for field in [offset_of!(intf::dispatch_worker, queued), offset_of!(intf::dispatch_worker, dropped)] {
            self.state.word32(worker_offset(slot) + field).store(0, Ordering::Relaxed);
        }
    }

    /// Opens a slot, so that its worker gets requests from now on.
    pub(super) fn open_slot(&self, slot: u32) {
        self.enable_worker(slot);
        self.update_rotation();
    }

    /// Begins a poll, which increases the age of all requests by one.
    pub(super) fn begin_poll(&self) {
        self.state.word(offset_of!(intf::dispatch_state, epoch)).fetch_add(1, Ordering::AcqRel);
        self.state.store(offset_of!(intf::dispatch_state, polled_ms), wall_clock_ms());
    }

    /// Repairs the counts after a read of the queues. `sockets`: those of the array. Returns whether a worker has died.
    pub(super) fn repair(&mut self, sockets: &BTreeMap<u32, SocketCookie>, now: Duration, timeouts: &Timeouts) -> bool {
        let mut entries: Vec<Vec<(usize, RequestEntry)>> = vec![Vec::new(); WORKER_COUNT];
        self.entries().for_each(|(place, entry)| entries[entry.slot() as usize].push((place, entry)));
        let mut died = false;
        for (slot, entries) in (0..).zip(&entries) {
            let socket = self.state.load(worker_offset(slot) + offset_of!(intf::dispatch_worker, socket));
            if socket == 0 {
                // Another CPU dispatched these requests while the worker died.
                entries.iter().for_each(|(place, entry)| self.abandon(*place, *entry));
                continue;
            }
            if sockets.get(&slot) != Some(&socket) {
                tracing::info!(
                    event = "worker-gone",
                    service = %self.service().0,
                    slot,
                    pid = self.pid(slot),
                    "the worker's socket is closed: the dispatcher gives up the worker's outstanding requests"
                );
                self.liveness.remove(&slot);
                self.release_slot(slot);
                died = true;
                continue;
            }
            self.check_liveness(slot, now, timeouts);
            self.abandon_expired(slot, entries, timeouts.response_timeout);
        }
        self.update_rotation();
        died
    }

    fn entries(&self) -> impl Iterator<Item = (usize, RequestEntry)> + '_ {
        let entry = |place| Some((place, RequestEntry(self.requests.load(place * size_of::<u64>()))));
        (0..intf::DISPATCH_REQUESTS as usize).filter_map(entry).filter(|(_, entry)| entry.0 != 0)
    }

    fn queued_count(&self, slot: u32) -> usize {
        self.state.word32(worker_offset(slot) + offset_of!(intf::dispatch_worker, queued)).load(Ordering::Relaxed)
            as usize
    }

    /// Returns the id of the process whose socket is in the slot.
    fn pid(&self, slot: u32) -> u32 {
        self.state.word32(worker_offset(slot) + offset_of!(intf::dispatch_worker, pid)).load(Ordering::Relaxed)
    }

    /// Disables a worker that does not read its requests, or enables it again. The programs enable it by its first
    /// response, but that may come from another socket, or the queue may be emptied without a response.
    fn check_liveness(&mut self, slot: u32, now: Duration, timeouts: &Timeouts) {
        let responses = self.state.load(worker_offset(slot) + offset_of!(intf::dispatch_worker, responses));
        let completed = self.state.load(worker_offset(slot) + offset_of!(intf::dispatch_worker, completed));
        let signs = responses.wrapping_add(completed);
        let queued = self.queued_count(slot);
        let liveness = self.liveness.entry(slot).or_insert_with(|| StallDetector::new(now, signs));
        let stalled = liveness.is_stalled(now, signs, queued, timeouts.stall_after);
        let disabled =
            self.state.word32(outstanding_offset(slot)).load(Ordering::Relaxed) & intf::DISPATCH_DISABLED != 0;
        match (stalled, disabled) {
            (true, false) => {
                tracing::warn!(
                    event = "worker-stalled",
                    service = %self.service().0,
                    slot,
                    pid = self.pid(slot),
                    queued,
                    stall_after = ?timeouts.stall_after,
                    "the worker does not read its requests: the dispatcher sends the worker no new requests"
                );
                self.disable_worker(slot, intf::DISPATCH_DISABLED);
            }
            (false, true) => self.enable_worker(slot),
            _ => {}
        }
    }

    fn abandon_expired(&self, slot: u32, entries: &[(usize, RequestEntry)], timeout: Duration) {
        let epoch = self.state.load(offset_of!(intf::dispatch_state, epoch));
        let ages: Vec<u32> = entries.iter().map(|(_, entry)| entry.age(epoch)).collect();
        let looks = timeout.div_duration_f64(POLL_INTERVAL).ceil() as u32;
        for at in expired_requests(&ages, self.queued_count(slot), looks) {
            self.abandon(entries[at].0, entries[at].1);
        }
    }

    /// Gives up all outstanding requests of a slot's worker.
    fn abandon_all(&self, slot: u32) {
        let of_slot: Vec<_> = self.entries().filter(|(_, entry)| entry.slot() == slot).collect();
        of_slot.into_iter().for_each(|(place, entry)| self.abandon(place, entry));
        let surplus = self.state.word32(worker_offset(slot) + offset_of!(intf::dispatch_worker, surplus));
        let surplus_work = self.state.word(worker_offset(slot) + offset_of!(intf::dispatch_worker, surplus_work));
        self.subtract_outstanding(slot, surplus.swap(0, Ordering::Relaxed), surplus_work.swap(0, Ordering::Relaxed));
    }

    fn abandon(&self, place: usize, entry: RequestEntry) {
        // A response may have removed the entry meanwhile.
        if self.requests.compare_exchange(place * size_of::<u64>(), entry.0, 0) {
            self.subtract_outstanding(entry.slot(), 1, entry.work());
            let abandoned = worker_offset(entry.slot()) + offset_of!(intf::dispatch_worker, abandoned);
            self.state.word(abandoned).fetch_add(1, Ordering::Relaxed);
        }
    }

    fn subtract_outstanding(&self, slot: u32, requests: u32, work: u64) {
        self.state.word32(outstanding_offset(slot)).fetch_sub(requests, Ordering::AcqRel);
        self.state.word(work_offset(slot)).fetch_sub(work, Ordering::AcqRel);
    }

    fn disable_worker(&self, slot: u32, flags: u32) {
        let above_work = u64::from(flags >> intf::DISPATCH_FLAGS_SHIFT) << intf::DISPATCH_WORK_FLAGS_SHIFT;
        self.state.word32(outstanding_offset(slot)).fetch_or(flags, Ordering::AcqRel);
        self.state.word(work_offset(slot)).fetch_or(above_work, Ordering::AcqRel);
    }

    fn enable_worker(&self, slot: u32) {
        self.state.word32(outstanding_offset(slot)).fetch_and(intf::DISPATCH_COUNT_MASK, Ordering::AcqRel);
        self.state.word(work_offset(slot)).fetch_and(!WORK_FLAGS, Ordering::AcqRel);
    }

    /// Updates the order in which slots take turns, and the number of slots up to the highest one with a worker.
    fn update_rotation(&self) {
        let flags =
            |slot| self.state.word32(outstanding_offset(slot)).load(Ordering::Relaxed) & !intf::DISPATCH_COUNT_MASK;
        let present: Vec<u32> =
            (0..intf::MAX_DISPATCH_WORKERS).filter(|slot| flags(*slot) & intf::DISPATCH_GONE == 0).collect();
        // The kernel's own choice also selects stalled workers.
        let random = self.state.word32(offset_of!(intf::dispatch_state, policy)).load(Ordering::Relaxed)
            == intf::DISPATCH_POLICY_RANDOM;
        let mut order = [0u8; WORKER_COUNT];
        let turns = present.iter().filter(|slot| random || flags(**slot) == 0);
        let count = order.iter_mut().zip(turns).map(|(place, slot)| *place = *slot as u8).count();
        self.state.write(offset_of!(intf::dispatch_state, order), &order);
        let slots = present.last().map_or(0, |slot| slot + 1);
        self.state.word32(offset_of!(intf::dispatch_state, slots)).store(slots, Ordering::Release);
        self.state.word32(offset_of!(intf::dispatch_state, order_count)).store(count as u32, Ordering::Release);
    }
}

fn type_entry_offset(number: usize) -> usize {
    offset_of!(intf::dispatch_state, types) + number * size_of::<intf::dispatch_type>()
}

fn wall_clock_ms() -> u64 {
    SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default().as_millis() as u64
}
