//! Ledger of one service's outstanding requests, which user space reads and adjusts while the BPF programs write it.
//!
//! All writers follow one rule (`bpf/dispatch/state.h`). A writer that removes an entry from `requests`
//! by compare-and-swap also subtracts that request from its worker's counts. User space removes the requests that will
//! get no response.

use std::collections::BTreeMap;
use std::mem::offset_of;
use std::net::{IpAddr, Ipv6Addr, SocketAddr};
use std::os::fd::AsFd;
use std::sync::atomic::Ordering;
use std::time::{Duration, SystemTime};

use anyhow::Context as _;
use coreward_intf as intf;
use coreward_model::dispatch::{RoundedServiceTime, WorkerStallDetector, expired_request_indexes};
use rand::TryRng as _;
use rand::rngs::SysRng;

use super::options::{DispatchOptions, RequestTimeouts, WORKER_QUEUE_POLL_INTERVAL};
use crate::mmap_array::MmapArray;
use crate::reuseport::SocketCookie;

type OutstandingRequestTable = [u64; intf::DISPATCH_REQUESTS as usize];

const MAX_WORKER_COUNT: usize = intf::MAX_DISPATCH_WORKERS as usize;
const MAX_CLASS_COUNT: usize = intf::MAX_DISPATCH_CLASSES as usize;
/// Expected service time of a request type before it is learned. With equal times, the policy `jlq` acts like `jsq`.
const INITIAL_SERVICE_TIME_ESTIMATE: Duration = Duration::from_micros(10);
/// Mask of the flag bits in a worker's `work` word. The expected work is in the bits below them.
const WORKER_WORK_FLAGS_MASK: u64 = !((1 << intf::DISPATCH_WORK_FLAGS_SHIFT) - 1);

/// Counts of one worker's requests, by their state.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct WorkerRequestCounts {
    /// Slot of the worker's socket in the array of sockets.
    pub socket_slot: u32,
    /// Id of the worker process, which reads the socket.
    pub worker_pid: u32,
    /// Number of requests that have no response yet.
    pub outstanding_requests: u32,
    /// Sum of the expected service times of all outstanding requests, which the policy `jlq` compares.
    pub outstanding_work: Duration,
    /// Number of requests dispatched to the worker.
    pub dispatched_requests: u64,
    /// Number of requests to which a response was observed.
    pub completed_requests: u64,
    /// Number of requests abandoned because they got no response, were dropped, or were sent to a former worker of the
    /// slot that has died.
    pub abandoned_requests: u64,
    /// Number of datagrams in the socket's receive queue at the last poll.
    pub queued_datagrams: u32,
    /// Number of datagrams dropped because the socket's receive buffer was full. The kernel counts them modulo 2^32.
    pub dropped_datagrams: u32,
    /// Whether the worker currently gets requests.
    pub is_eligible: bool,
}

/// Ledger of one service's outstanding requests, in memory that is shared with the BPF programs.
#[derive(Debug)]
pub struct RequestLedger {
    state: MmapArray<intf::dispatch_state>,
    requests: MmapArray<OutstandingRequestTable>,
    stall_detectors: BTreeMap<u32, WorkerStallDetector>,
}

/// Converts an address to the layout of `struct client` in bpf/dispatch/request.h. The unspecified address becomes 0.
pub(super) fn client_address_words(address: IpAddr) -> [u64; 2] {
    match address {
        IpAddr::V4(v4) => [0, u32::from_ne_bytes(v4.octets()).into()],
        IpAddr::V6(v6) => {
            let octets = v6.octets();
            [&octets[..8], &octets[8..]]
                .map(|address_half| u64::from_ne_bytes(address_half.try_into().expect("8 bytes")))
        }
    }
}

const fn outstanding_count_offset(slot: u32) -> usize {
    offset_of!(intf::dispatch_state, outstanding) + slot as usize * size_of::<u32>()
}

const fn outstanding_work_offset(slot: u32) -> usize {
    offset_of!(intf::dispatch_state, work) + slot as usize * size_of::<u64>()
}

const fn worker_entry_offset(slot: u32) -> usize {
    offset_of!(intf::dispatch_state, workers) + slot as usize * size_of::<intf::dispatch_worker>()
}

#[derive(Debug, Clone, Copy)]
struct OutstandingRequestEntry(u64);

impl OutstandingRequestEntry {
    fn worker_slot(self) -> u32 {
        (self.0 >> intf::DISPATCH_WORKER_SHIFT) as u32 & intf::DISPATCH_WORKER_MASK
    }

    /// Returns the request's age as the number of polls since it was dispatched, modulo 256.
    fn age_in_polls(self, epoch: u64) -> u32 {
        epoch.wrapping_sub(self.0 >> intf::DISPATCH_EPOCH_SHIFT) as u32 & intf::DISPATCH_EPOCH_MASK
    }

    fn expected_work_ns(self) -> u64 {
        RoundedServiceTime::from_bits(self.0 as u16).as_ns()
    }
}

impl RequestLedger {
    pub(super) fn new(state: &impl AsFd, requests: &impl AsFd) -> anyhow::Result<Self> {
        Ok(Self {
            state: MmapArray::new(state).context("mapping dispatch_state (of another version?)")?,
            requests: MmapArray::new(requests).context("mapping the requests in flight (of another version?)")?,
            stall_detectors: BTreeMap::new(),
        })
    }

    pub(super) fn has_current_layout(&self) -> bool {
        self.state.load(offset_of!(intf::dispatch_state, layout_version)) == u64::from(intf::DISPATCH_LAYOUT_VERSION)
    }

    /// Initialises the maps after their creation. Fails when the kernel provides no random numbers.
    pub(super) fn initialise_maps(&self) -> anyhow::Result<()> {
        let mut random_seed = [0; 8];
        SysRng.try_fill_bytes(&mut random_seed).context("random numbers of the kernel")?;
        self.state.store(offset_of!(intf::dispatch_state, seed), u64::from_ne_bytes(random_seed));
        (0..intf::MAX_DISPATCH_WORKERS)
            .for_each(|slot| self.disable_worker(slot, intf::DISPATCH_GONE | intf::DISPATCH_DISABLED));
        (0..intf::MAX_DISPATCH_TYPES as usize).for_each(|type_number| {
            self.set_expected_service_time(type_number, RoundedServiceTime::new(INITIAL_SERVICE_TIME_ESTIMATE))
        });
        let layout_version = intf::DISPATCH_LAYOUT_VERSION.into();
        self.state.store(offset_of!(intf::dispatch_state, layout_version), layout_version);
        Ok(())
    }

    /// Stores the service's address and policy, for commands that read the pinned maps.
    pub(super) fn store_service_info(&self, options: &DispatchOptions) {
        let state_word32_at = |field_offset| self.state.atomic_u32(field_offset);
        state_word32_at(offset_of!(intf::dispatch_state, policy)).store(options.policy.bpf_number(), Ordering::Relaxed);
        state_word32_at(offset_of!(intf::dispatch_state, port))
            .store(options.service_address.port().into(), Ordering::Relaxed);
        let address_octets = match options.service_address.ip() {
            IpAddr::V4(v4) => v4.to_ipv6_mapped().octets(),
            IpAddr::V6(v6) => v6.octets(),
        };
        self.state.write(offset_of!(intf::dispatch_state, address), &address_octets);
    }

    /// Returns the service's address and the name of its policy.
    pub fn service_address_and_policy_name(&self) -> (SocketAddr, &'static str) {
        let address_octets = self.state.read::<[u8; 16]>(offset_of!(intf::dispatch_state, address));
        let load_word32 = |field_offset| self.state.atomic_u32(field_offset).load(Ordering::Relaxed);
        let policy_number = load_word32(offset_of!(intf::dispatch_state, policy)) as usize;
        let port = load_word32(offset_of!(intf::dispatch_state, port)) as u16;
        let policy_name = intf::DISPATCH_POLICY_NAMES.get(policy_number).copied().unwrap_or("unknown");
        (SocketAddr::new(Ipv6Addr::from(*address_octets).to_canonical(), port), policy_name)
    }

    /// Returns the time since the last poll, by the wall clock. If it exceeds [`WORKER_QUEUE_POLL_INTERVAL`] by far, no
    /// process maintains the service.
    pub fn time_since_last_poll(&self) -> Duration {
        let last_poll_ms = self.state.load(offset_of!(intf::dispatch_state, polled_ms));
        Duration::from_millis(wall_clock_ms().saturating_sub(last_poll_ms))
    }

    /// Returns the programs' counters in the order of [`super::COUNTER_NAMES`].
    pub fn counters(&self) -> [u64; intf::DISPATCH_COUNTER_COUNT as usize] {
        *self.state.read(offset_of!(intf::dispatch_state, counters))
    }

    /// Returns the request counts of each slot that has or had a worker.
    pub fn worker_request_counts(&self) -> Vec<WorkerRequestCounts> {
        (0..intf::MAX_DISPATCH_WORKERS).filter_map(|slot| self.worker_counts_of_slot(slot)).collect()
    }

    fn worker_counts_of_slot(&self, slot: u32) -> Option<WorkerRequestCounts> {
        let outstanding_word = self.state.atomic_u32(outstanding_count_offset(slot)).load(Ordering::Relaxed);
        let worker_entry = self.state.read::<intf::dispatch_worker>(worker_entry_offset(slot));
        // The number is computed, because a separate counter would cost each request an atomic operation.
        let in_flight_requests = (outstanding_word & intf::DISPATCH_COUNT_MASK).saturating_sub(worker_entry.surplus);
        let dispatched_requests =
            worker_entry.untracked + worker_entry.completed + worker_entry.abandoned + u64::from(in_flight_requests);
        (worker_entry.socket != 0 || dispatched_requests != 0).then(|| WorkerRequestCounts {
            socket_slot: slot,
            worker_pid: worker_entry.pid,
            outstanding_requests: outstanding_word & intf::DISPATCH_COUNT_MASK,
            outstanding_work: Duration::from_nanos(
                self.state.load(outstanding_work_offset(slot)) & !WORKER_WORK_FLAGS_MASK,
            ),
            dispatched_requests,
            completed_requests: worker_entry.completed,
            abandoned_requests: worker_entry.abandoned,
            queued_datagrams: worker_entry.queued,
            dropped_datagrams: worker_entry.dropped,
            is_eligible: outstanding_word & !intf::DISPATCH_COUNT_MASK == 0,
        })
    }

    /// Returns the sum (in ns) and the number of the service times measured for each of the first `type_count` types.
    pub fn service_time_sums_and_counts(&self, type_count: usize) -> Vec<(u64, u64)> {
        let read_sum_and_count = |type_number: usize| {
            let type_entry = self.state.read::<intf::dispatch_type>(request_type_entry_offset(type_number));
            (type_entry.observed_ns, type_entry.observed)
        };
        (0..type_count).map(read_sum_and_count).collect()
    }

    pub(super) fn set_expected_service_time(&self, type_number: usize, service_time: RoundedServiceTime) {
        assert!(type_number < intf::MAX_DISPATCH_TYPES as usize, "type {type_number}");
        let weight_offset = request_type_entry_offset(type_number) + offset_of!(intf::dispatch_type, weight);
        self.state.store(weight_offset, service_time.to_bits().into());
    }

    /// Sets the maximum number of outstanding requests of each worker. `limits_by_class` has a row for each priority
    /// class, with a limit for each of `slots`. If `slot_0_limit` is given, it replaces the limit of slot 0.
    pub(super) fn set_request_limits(&self, slots: &[u32], limits_by_class: &[Vec<u32>], slot_0_limit: Option<u32>) {
        for (class, class_limits) in limits_by_class.iter().take(MAX_CLASS_COUNT).enumerate() {
            let request_limit_word = |slot: u32| {
                let limit_index = class * MAX_WORKER_COUNT + slot as usize;
                self.state.atomic_u32(offset_of!(intf::dispatch_state, bound) + limit_index * size_of::<u32>())
            };
            slots
                .iter()
                .zip(class_limits)
                .for_each(|(slot, limit)| request_limit_word(*slot).store(*limit, Ordering::Relaxed));
            slot_0_limit.into_iter().for_each(|limit| request_limit_word(0).store(limit, Ordering::Relaxed));
        }
    }

    /// Assigns a slot to a worker. The slot gets no requests until the worker's socket is in the socket array.
    pub(super) fn assign_slot(&self, slot: u32, socket: SocketCookie, pid: u32) {
        self.abandon_all_requests(slot);
        self.state.store(worker_entry_offset(slot) + offset_of!(intf::dispatch_worker, socket), socket);
        self.state
            .atomic_u32(worker_entry_offset(slot) + offset_of!(intf::dispatch_worker, pid))
            .store(pid, Ordering::Relaxed);
    }

    /// Releases the slot of a worker that has ended.
    pub(super) fn release_slot(&self, slot: u32) {
        self.disable_worker(slot, intf::DISPATCH_GONE | intf::DISPATCH_DISABLED);
        self.abandon_all_requests(slot);
        self.state.store(worker_entry_offset(slot) + offset_of!(intf::dispatch_worker, socket), 0);
        for field_offset in [offset_of!(intf::dispatch_worker, queued), offset_of!(intf::dispatch_worker, dropped)] {
            self.state.atomic_u32(worker_entry_offset(slot) + field_offset).store(0, Ordering::Relaxed);
        }
    }

    pub(super) fn enable_slot(&self, slot: u32) {
        self.enable_worker(slot);
        self.update_round_robin_order();
    }

    /// Begins a poll, which increases the age of all outstanding requests by one poll.
    pub(super) fn increment_request_ages(&self) {
        self.state.atomic_u64(offset_of!(intf::dispatch_state, epoch)).fetch_add(1, Ordering::AcqRel);
        self.state.store(offset_of!(intf::dispatch_state, polled_ms), wall_clock_ms());
    }

    /// Adjusts slots and counts after a poll of the queues: abandons expired requests, disables stalled workers, and
    /// releases slots of dead workers. `cookies_by_slot` are the cookies in the socket array. Returns whether a worker
    /// has died.
    pub(super) fn reconcile_workers(
        &mut self,
        cookies_by_slot: &BTreeMap<u32, SocketCookie>,
        now: Duration,
        timeouts: &RequestTimeouts,
    ) -> bool {
        let mut entries_by_slot: Vec<Vec<(usize, OutstandingRequestEntry)>> = vec![Vec::new(); MAX_WORKER_COUNT];
        self.outstanding_request_entries().for_each(|(request_index, entry)| {
            entries_by_slot[entry.worker_slot() as usize].push((request_index, entry))
        });
        let mut has_worker_died = false;
        for (slot, entries) in (0..).zip(&entries_by_slot) {
            let socket_cookie = self.state.load(worker_entry_offset(slot) + offset_of!(intf::dispatch_worker, socket));
            if socket_cookie == 0 {
                // Another CPU dispatched these requests while the worker died.
                entries.iter().for_each(|(request_index, entry)| self.abandon_request(*request_index, *entry));
                continue;
            }
            if cookies_by_slot.get(&slot) != Some(&socket_cookie) {
                tracing::info!(
                    event = "worker-gone",
                    service = %self.service_address_and_policy_name().0,
                    slot,
                    pid = self.worker_pid(slot),
                    "the worker's socket is closed: the dispatcher counts its outstanding requests as abandoned"
                );
                self.stall_detectors.remove(&slot);
                self.release_slot(slot);
                has_worker_died = true;
                continue;
            }
            self.enable_or_disable_worker(slot, now, timeouts);
            self.abandon_expired_requests(slot, entries, timeouts.response_timeout);
        }
        self.update_round_robin_order();
        has_worker_died
    }

    fn outstanding_request_entries(&self) -> impl Iterator<Item = (usize, OutstandingRequestEntry)> + '_ {
        let load_entry = |request_index| {
            Some((request_index, OutstandingRequestEntry(self.requests.load(request_index * size_of::<u64>()))))
        };
        (0..intf::DISPATCH_REQUESTS as usize).filter_map(load_entry).filter(|(_, entry)| entry.0 != 0)
    }

    fn queued_datagram_count(&self, slot: u32) -> usize {
        self.state
            .atomic_u32(worker_entry_offset(slot) + offset_of!(intf::dispatch_worker, queued))
            .load(Ordering::Relaxed) as usize
    }

    fn worker_pid(&self, slot: u32) -> u32 {
        self.state
            .atomic_u32(worker_entry_offset(slot) + offset_of!(intf::dispatch_worker, pid))
            .load(Ordering::Relaxed)
    }

    /// Disables a worker that does not read its requests, or enables it when it reads again. The BPF programs also
    /// enable a worker when it responds. They do not notice a response through another socket, or a queue that was
    /// emptied without responses.
    fn enable_or_disable_worker(&mut self, slot: u32, now: Duration, timeouts: &RequestTimeouts) {
        let response_count = self.state.load(worker_entry_offset(slot) + offset_of!(intf::dispatch_worker, responses));
        let completed_count = self.state.load(worker_entry_offset(slot) + offset_of!(intf::dispatch_worker, completed));
        let progress_count = response_count.wrapping_add(completed_count);
        let queued = self.queued_datagram_count(slot);
        let stall_detector =
            self.stall_detectors.entry(slot).or_insert_with(|| WorkerStallDetector::new(now, progress_count));
        let is_stalled = stall_detector.detect_stall(now, progress_count, queued, timeouts.stall_after);
        let is_disabled = self.state.atomic_u32(outstanding_count_offset(slot)).load(Ordering::Relaxed)
            & intf::DISPATCH_DISABLED
            != 0;
        match (is_stalled, is_disabled) {
            (true, false) => {
                tracing::warn!(
                    event = "worker-stalled",
                    service = %self.service_address_and_policy_name().0,
                    slot,
                    pid = self.worker_pid(slot),
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

    fn abandon_expired_requests(&self, slot: u32, entries: &[(usize, OutstandingRequestEntry)], timeout: Duration) {
        let current_epoch = self.state.load(offset_of!(intf::dispatch_state, epoch));
        let ages_in_polls: Vec<u32> = entries.iter().map(|(_, entry)| entry.age_in_polls(current_epoch)).collect();
        let timeout_in_polls = timeout.div_duration_f64(WORKER_QUEUE_POLL_INTERVAL).ceil() as u32;
        for entry_index in expired_request_indexes(&ages_in_polls, self.queued_datagram_count(slot), timeout_in_polls) {
            self.abandon_request(entries[entry_index].0, entries[entry_index].1);
        }
    }

    fn abandon_all_requests(&self, slot: u32) {
        let entries_of_slot: Vec<_> =
            self.outstanding_request_entries().filter(|(_, entry)| entry.worker_slot() == slot).collect();
        entries_of_slot.into_iter().for_each(|(request_index, entry)| self.abandon_request(request_index, entry));
        let surplus_requests =
            self.state.atomic_u32(worker_entry_offset(slot) + offset_of!(intf::dispatch_worker, surplus));
        let surplus_work =
            self.state.atomic_u64(worker_entry_offset(slot) + offset_of!(intf::dispatch_worker, surplus_work));
        self.subtract_outstanding(
            slot,
            surplus_requests.swap(0, Ordering::Relaxed),
            surplus_work.swap(0, Ordering::Relaxed),
        );
    }

    fn abandon_request(&self, request_index: usize, entry: OutstandingRequestEntry) {
        // A response may have removed the entry meanwhile.
        if self.requests.compare_exchange(request_index * size_of::<u64>(), entry.0, 0) {
            self.subtract_outstanding(entry.worker_slot(), 1, entry.expected_work_ns());
            let abandoned_count_offset =
                worker_entry_offset(entry.worker_slot()) + offset_of!(intf::dispatch_worker, abandoned);
            self.state.atomic_u64(abandoned_count_offset).fetch_add(1, Ordering::Relaxed);
        }
    }

    fn subtract_outstanding(&self, slot: u32, request_count: u32, work_ns: u64) {
        self.state.atomic_u32(outstanding_count_offset(slot)).fetch_sub(request_count, Ordering::AcqRel);
        self.state.atomic_u64(outstanding_work_offset(slot)).fetch_sub(work_ns, Ordering::AcqRel);
    }

    fn disable_worker(&self, slot: u32, flags: u32) {
        let shifted_work_flags = u64::from(flags >> intf::DISPATCH_FLAGS_SHIFT) << intf::DISPATCH_WORK_FLAGS_SHIFT;
        self.state.atomic_u32(outstanding_count_offset(slot)).fetch_or(flags, Ordering::AcqRel);
        self.state.atomic_u64(outstanding_work_offset(slot)).fetch_or(shifted_work_flags, Ordering::AcqRel);
    }

    fn enable_worker(&self, slot: u32) {
        self.state.atomic_u32(outstanding_count_offset(slot)).fetch_and(intf::DISPATCH_COUNT_MASK, Ordering::AcqRel);
        self.state.atomic_u64(outstanding_work_offset(slot)).fetch_and(!WORKER_WORK_FLAGS_MASK, Ordering::AcqRel);
    }

    /// Updates the round-robin order of workers, and the number of slots up to the highest slot with a worker.
    fn update_round_robin_order(&self) {
        let load_worker_flags = |slot| {
            self.state.atomic_u32(outstanding_count_offset(slot)).load(Ordering::Relaxed) & !intf::DISPATCH_COUNT_MASK
        };
        let present_slots: Vec<u32> = (0..intf::MAX_DISPATCH_WORKERS)
            .filter(|slot| load_worker_flags(*slot) & intf::DISPATCH_GONE == 0)
            .collect();
        // With the policy `random` the kernel chooses, which also selects stalled workers.
        let is_random_policy = self.state.atomic_u32(offset_of!(intf::dispatch_state, policy)).load(Ordering::Relaxed)
            == intf::DISPATCH_POLICY_RANDOM;
        let mut round_robin_order = [0u8; MAX_WORKER_COUNT];
        let eligible_slots = present_slots.iter().filter(|slot| is_random_policy || load_worker_flags(**slot) == 0);
        let round_robin_length = round_robin_order
            .iter_mut()
            .zip(eligible_slots)
            .map(|(order_entry, slot)| *order_entry = *slot as u8)
            .count();
        self.state.write(offset_of!(intf::dispatch_state, order), &round_robin_order);
        let slot_count = present_slots.last().map_or(0, |slot| slot + 1);
        self.state.atomic_u32(offset_of!(intf::dispatch_state, slots)).store(slot_count, Ordering::Release);
        self.state
            .atomic_u32(offset_of!(intf::dispatch_state, order_count))
            .store(round_robin_length as u32, Ordering::Release);
    }
}

fn request_type_entry_offset(type_number: usize) -> usize {
    offset_of!(intf::dispatch_state, types) + type_number * size_of::<intf::dispatch_type>()
}

fn wall_clock_ms() -> u64 {
    SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default().as_millis() as u64
}
