//! Loading and maintenance of `bpf/dispatch/dispatch.bpf.c`, which dispatches a UDP service's requests to its workers.
//!
//! Each service has a directory of a bpffs with the pins `workers` (the array of sockets), `sockets` (each socket's
//! slot in that array), `state`, `requests`, `responses_link` and `drops_link`. [`DispatchPrograms`] manages the pinned
//! objects. [`RequestLedger`] reads and repairs the programs' counts. Both work while requests are dispatched.

mod options;
mod request_ledger;

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::Read as _;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd as _, AsRawFd as _, BorrowedFd, OwnedFd};
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context as _, ensure};
use coreward_intf as intf;
use coreward_model::dispatch::{OutstandingBoundsByClass, RoundedServiceTime};
use libbpf_rs::skel::{OpenSkel as _, SkelBuilder as _};
use libbpf_rs::{Iter, Link, MapCore as _, MapFlags, MapHandle, OpenObject};

pub use options::{
    DispatchOptions, DispatchPolicy, MAX_REQUEST_TYPES, MAX_RESPONSE_TIMEOUT, PayloadRequestType, RequestIdPosition,
    RequestTimeouts, UnknownDispatchPolicy, WORKER_QUEUE_POLL_INTERVAL,
};
pub use request_ledger::{RequestLedger, WorkerRequestCounts};

use crate::reuseport::{self, ReuseportSocketArray, SocketCookie};
use crate::skeleton::dispatch::{DispatchSkelBuilder, OpenDispatchSkel};

/// Names of the counters that [`RequestLedger::counters`] returns.
pub use coreward_intf::DISPATCH_COUNTER_NAMES as COUNTER_NAMES;

/// Maximum number of workers of one service.
pub const MAX_WORKERS_PER_SERVICE: usize = intf::MAX_DISPATCH_WORKERS as usize;
/// Maximum number of priority classes of one service.
pub const MAX_PRIORITY_CLASSES: usize = intf::MAX_DISPATCH_CLASSES as usize;

const WORKER_SOCKETS_PIN: &str = "workers";
const SLOTS_BY_SOCKET_PIN: &str = "sockets";
const DISPATCH_STATE_PIN: &str = "state";
const REQUESTS_PIN: &str = "requests";
const RESPONSES_LINK_PIN: &str = "responses_link";
const DROPS_LINK_PIN: &str = "drops_link";

/// BPF programs that dispatch one service's requests to its workers. They continue to run after the value is dropped.
#[derive(Debug)]
pub struct DispatchPrograms {
    selection_program: OwnedFd,
    response_program: OwnedFd,
    worker_sockets: ReuseportSocketArray,
    slots_by_socket: MapHandle,
    ledger: RequestLedger,
    queue_iterator_link: Link,
    _response_link: Link,
    _drop_link: Link,
    policy: DispatchPolicy,
    is_state_taken_over: bool,
}

impl DispatchPrograms {
    /// Loads the programs and starts to observe responses. `pin_directory` is the service's own directory. If it has
    /// pinned state, the programs take over the workers' sockets and the requests in flight. `cgroup` is a directory of
    /// a cgroup2 file system that contains all workers. The calling thread must be in the service's network namespace.
    /// Fails when `pin_directory` is not on a bpffs, the pins are of another version, or the kernel rejects a program.
    /// Panics when `options` has more than [`MAX_REQUEST_TYPES`] types.
    pub fn load(pin_directory: &Path, cgroup: &Path, options: &DispatchOptions) -> anyhow::Result<Self> {
        assert!(options.request_types.len() <= MAX_REQUEST_TYPES, "{} types", options.request_types.len());
        fs::create_dir_all(pin_directory).with_context(|| pin_directory.display().to_string())?;
        let is_state_taken_over = pin_directory.join(WORKER_SOCKETS_PIN).exists();
        let mut object_storage = MaybeUninit::uninit();
        let open_skeleton = open_object_with_pins(&mut object_storage, pin_directory, options)?;
        let version_mismatch_error =
            || format!("{} is of another version (end it with --detach first)", pin_directory.display());
        let loaded_skeleton = open_skeleton.load().with_context(|| {
            format!("the kernel rejected bpf/dispatch/dispatch.bpf.c, or {}", version_mismatch_error())
        })?;
        let ledger = RequestLedger::new(&loaded_skeleton.maps.bss_state, &loaded_skeleton.maps.bss_requests)?;
        if is_state_taken_over {
            ensure!(ledger.has_current_layout(), version_mismatch_error());
        } else {
            ledger.initialise_maps()?;
        }
        ledger.store_service_info(options);
        let response_link =
            attach_response_program(&loaded_skeleton.progs.responses, cgroup, &pin_directory.join(RESPONSES_LINK_PIN))?;
        let drop_link = attach_drop_program(&loaded_skeleton.progs.drops, &pin_directory.join(DROPS_LINK_PIN))?;
        Ok(Self {
            selection_program: loaded_skeleton.progs.dispatch.as_fd().try_clone_to_owned()?,
            response_program: loaded_skeleton.progs.responses.as_fd().try_clone_to_owned()?,
            worker_sockets: ReuseportSocketArray::new(
                (&loaded_skeleton.maps.workers).try_into()?,
                intf::MAX_DISPATCH_WORKERS,
            ),
            slots_by_socket: (&loaded_skeleton.maps.sockets).try_into()?,
            ledger,
            queue_iterator_link: loaded_skeleton
                .progs
                .queues
                .attach()
                .context("attaching the queue iterator (iter/udp)")?,
            _response_link: response_link,
            _drop_link: drop_link,
            policy: options.policy,
            is_state_taken_over,
        })
    }

    /// Returns whether the programs have taken over the pinned state of an earlier process.
    pub fn is_state_taken_over(&self) -> bool {
        self.is_state_taken_over
    }

    /// Returns the file descriptor of the program that selects a worker's socket for each request.
    pub fn selection_program_fd(&self) -> BorrowedFd<'_> {
        self.selection_program.as_fd()
    }

    /// Returns the file descriptor of the program that observes the workers' responses.
    pub fn response_program_fd(&self) -> BorrowedFd<'_> {
        self.response_program.as_fd()
    }

    /// Returns the ledger, which contains the outstanding requests and all counters.
    pub fn ledger(&self) -> &RequestLedger {
        &self.ledger
    }

    /// Attaches the selecting program to the SO_REUSEPORT group that contains `socket`, and replaces the group's
    /// program. Fails when the socket is in no such group.
    pub fn attach_to_socket_group(&self, socket: BorrowedFd<'_>) -> anyhow::Result<()> {
        reuseport::attach_to_reuseport_group(self.selection_program.as_fd(), socket)
    }

    /// Returns the cookie of each worker's socket, by slot. The kernel removes a closed socket from its slot.
    pub fn socket_cookies_by_slot(&self) -> BTreeMap<u32, SocketCookie> {
        self.worker_sockets.socket_cookies_by_slot()
    }

    /// Adds the process that reads `socket` as a worker, which then gets requests. Returns the worker's slot. `pid` is
    /// used only for display. Fails when no slot is free, the socket is in another array, or it has no SO_REUSEPORT.
    pub fn add_worker(&self, socket: BorrowedFd<'_>, pid: u32) -> anyhow::Result<u32> {
        let slot = self.worker_sockets.find_free_slot()?;
        let socket_cookie = reuseport::socket_cookie(socket)?;
        let socket_key = socket.as_raw_fd().to_ne_bytes();
        self.slots_by_socket
            .update(&socket_key, &slot.to_ne_bytes(), MapFlags::ANY)
            .context("storage of the socket's slot")?;
        self.ledger.assign_slot(slot, socket_cookie, pid);
        if let Err(error) = self.worker_sockets.insert_socket(slot, socket) {
            self.ledger.release_slot(slot);
            return Err(error);
        }
        self.ledger.enable_slot(slot);
        Ok(slot)
    }

    /// Sets the maximum number of outstanding requests of each worker, by priority class. The policy `jsq` uses only
    /// the first class. `limits_for_worker_count` takes the number of workers, and returns their limits in the order of
    /// slots. Panics when it returns more than [`MAX_WORKERS_PER_SERVICE`] limits.
    pub fn set_request_limits(&self, limits_for_worker_count: impl Fn(u16) -> OutstandingBoundsByClass) {
        let used_slots: Vec<u32> = self.socket_cookies_by_slot().into_keys().collect();
        let class_bounds = limits_for_worker_count(used_slots.len().max(1) as u16);
        let limits_by_class: Vec<Vec<u32>> =
            (0..MAX_PRIORITY_CLASSES as u8).map(|class| class_bounds.core_bounds_for_class(class).to_vec()).collect();
        // The policy jsq reads only the limit of slot 0, even if that slot has no worker.
        let slot_0_limit = (self.policy == DispatchPolicy::ShortestQueue).then(|| limits_by_class[0][0]);
        self.ledger.set_request_limits(&used_slots, &limits_by_class, slot_0_limit);
    }

    /// Sets the expected service time of each request type, in the order of [`DispatchOptions::request_types`]. The
    /// additional last time is for requests that match no type. Panics when there are more times than possible types.
    pub fn set_expected_service_times(&self, service_times: &[Duration]) {
        for (type_number, service_time) in service_times.iter().enumerate() {
            self.ledger.set_expected_service_time(type_number, RoundedServiceTime::new(*service_time));
        }
    }

    /// Maintains the service. It must be called once per [`WORKER_QUEUE_POLL_INTERVAL`]. Reads the lengths of the
    /// sockets' queues, abandons requests without a response, and disables workers that do not read. Returns whether a
    /// worker has died since the last call. `now` may come from any monotonic clock. Fails when the queues cannot be
    /// read.
    pub fn maintain_service(&mut self, now: Duration, timeouts: &RequestTimeouts) -> anyhow::Result<bool> {
        self.ledger.increment_request_ages();
        self.update_queue_counts()?;
        Ok(self.ledger.reconcile_workers(&self.worker_sockets.socket_cookies_by_slot(), now, timeouts))
    }

    /// Updates the lengths of the sockets' queues, by running the program `queues` in `bpf/dispatch/dispatch.bpf.c` on
    /// all UDP sockets of this network namespace.
    fn update_queue_counts(&self) -> anyhow::Result<()> {
        let mut queue_iterator = Iter::new(&self.queue_iterator_link).context("looking at the queues")?;
        let mut read_buffer = [0; 8];
        // The program prints nothing, so reading only runs it over all sockets.
        while queue_iterator.read(&mut read_buffer).context("reading the queues")? > 0 {}
        Ok(())
    }
}

/// Removes all pins in `pin_directory`, and thus all programs except the one attached to the sockets' SO_REUSEPORT
/// group ([`reuseport::detach_from_reuseport_group`]). The sockets may then join another array, and responses are no
/// longer observed. Fails when a pin or a program cannot be removed.
pub fn remove_pins_and_programs(pin_directory: &Path) -> anyhow::Result<()> {
    if let Ok(map) = MapHandle::from_pinned_path(pin_directory.join(WORKER_SOCKETS_PIN)) {
        let worker_sockets = ReuseportSocketArray::new(map, intf::MAX_DISPATCH_WORKERS);
        worker_sockets.socket_cookies_by_slot().into_keys().for_each(|slot| worker_sockets.clear_slot(slot));
    }
    let response_link_path = pin_directory.join(RESPONSES_LINK_PIN);
    if response_link_path.exists() {
        // An error means that the cgroup was removed, which also ended the program.
        if let Err(error) = Link::open(&response_link_path).and_then(|link| link.detach()) {
            tracing::debug!(
                event = "link-not-detached",
                pin = %response_link_path.display(),
                %error,
                "the dispatcher cannot detach its program that counts responses: the cgroup may be gone"
            );
        }
    }
    match fs::remove_dir_all(pin_directory) {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
            Err(error).context(pin_directory.display().to_string())
        }
        _ => Ok(()),
    }
}

/// Opens a service's pinned ledger for reading. Fails when no ledger of this version is pinned in `pin_directory`.
pub fn open_pinned_ledger(pin_directory: &Path) -> anyhow::Result<RequestLedger> {
    let open_pinned_map = |name| {
        MapHandle::from_pinned_path(pin_directory.join(name))
            .with_context(|| pin_directory.join(name).display().to_string())
    };
    let ledger = RequestLedger::new(&open_pinned_map(DISPATCH_STATE_PIN)?, &open_pinned_map(REQUESTS_PIN)?)?;
    ensure!(ledger.has_current_layout(), "{} is of another version", pin_directory.display());
    Ok(ledger)
}

/// Returns the mount point of the cgroup2 file system, which contains all processes. It is read from /proc/mounts.
/// Fails when no cgroup2 file system is mounted.
pub fn cgroup2_mount_point() -> anyhow::Result<PathBuf> {
    let mounts = fs::read_to_string("/proc/mounts").context("/proc/mounts")?;
    let parse_cgroup2_mount = |line: &str| {
        let mut mount_fields = line.split(' ');
        let (mount_point, file_system_type) = (mount_fields.nth(1)?, mount_fields.next()?);
        (file_system_type == "cgroup2").then(|| PathBuf::from(mount_point))
    };
    mounts
        .lines()
        .find_map(parse_cgroup2_mount)
        .context("no cgroup2 file system is mounted: expected one, as responses are seen there")
}

/// Opens the BPF object without loading it. Sets its constants from `options`, and the paths at which its maps are or
/// will be pinned.
fn open_object_with_pins<'obj>(
    storage: &'obj mut MaybeUninit<OpenObject>,
    pin_directory: &Path,
    options: &DispatchOptions,
) -> anyhow::Result<OpenDispatchSkel<'obj>> {
    let mut open_skeleton = DispatchSkelBuilder::default().open(storage).context("bpf/dispatch/dispatch.bpf.c")?;
    set_program_constants(&mut open_skeleton, options)?;
    open_skeleton.maps.workers.set_pin_path(pin_directory.join(WORKER_SOCKETS_PIN))?;
    open_skeleton.maps.sockets.set_pin_path(pin_directory.join(SLOTS_BY_SOCKET_PIN))?;
    open_skeleton.maps.bss_state.set_pin_path(pin_directory.join(DISPATCH_STATE_PIN))?;
    open_skeleton.maps.bss_requests.set_pin_path(pin_directory.join(REQUESTS_PIN))?;
    Ok(open_skeleton)
}

/// Sets the read-only constants of a service's programs, which is possible only before the programs are loaded.
pub(crate) fn set_program_constants(
    open_skeleton: &mut OpenDispatchSkel<'_>,
    options: &DispatchOptions,
) -> anyhow::Result<()> {
    let network_namespace = fs::metadata("/proc/thread-self/ns/net").context("this network namespace")?;
    let constants = open_skeleton.maps.rodata_data.as_deref_mut().context("dispatch.bpf.o has no constants")?;
    constants.policy = options.policy.bpf_number();
    constants.service_port = options.service_address.port().to_be();
    constants.service_address = request_ledger::client_address_words(options.service_address.ip());
    constants.network_namespace = network_namespace.ino() as u32;
    constants.observes_service_times = options.measures_service_times;
    if let Some(id_position) = options.request_id_position {
        constants.request_id_bytes = id_position.byte_count.into();
        constants.request_id_offset = id_position.offset_in_request.into();
        constants.response_id_offset = id_position.offset_in_response.into();
    }
    constants.type_count = options.request_types.len() as u32;
    constants.type_offset = options.type_offset.into();
    let type_patterns = open_skeleton.maps.data_types_data.as_deref_mut().context("dispatch.bpf.o has no types")?;
    for ((type_number, type_pattern), request_type) in (0..).zip(&mut type_patterns.types).zip(&options.request_types) {
        type_pattern.value = u64::from_ne_bytes(request_type.payload_value);
        type_pattern.mask = u64::from_ne_bytes(request_type.payload_mask);
        type_pattern.class = request_type.priority_class.into();
        type_pattern.number = type_number;
    }
    let fallback_type = &mut type_patterns.types[options.request_types.len()];
    (fallback_type.class, fallback_type.number) =
        (options.default_priority_class.into(), options.request_types.len() as u32);
    Ok(())
}

fn attach_response_program(
    program: &libbpf_rs::ProgramMut<'_>,
    cgroup: &Path,
    pin_path: &Path,
) -> anyhow::Result<Link> {
    if pin_path.exists() {
        let mut link = Link::open(pin_path).with_context(|| pin_path.display().to_string())?;
        if link.update_prog(program).is_ok() {
            return Ok(link);
        }
        fs::remove_file(pin_path).with_context(|| format!("removing {}", pin_path.display()))?;
    }
    let cgroup_directory = File::open(cgroup).with_context(|| cgroup.display().to_string())?;
    let mut link = program.attach_cgroup(cgroup_directory.as_raw_fd()).with_context(|| {
        format!("seeing responses at {}: expected a directory of a cgroup2 file system", cgroup.display())
    })?;
    link.pin(pin_path).with_context(|| format!("pinning {}", pin_path.display()))?;
    Ok(link)
}

/// Attaches the program that observes dropped datagrams. It replaces an earlier program, which may use another map.
fn attach_drop_program(program: &libbpf_rs::ProgramMut<'_>, pin_path: &Path) -> anyhow::Result<Link> {
    if pin_path.exists() {
        fs::remove_file(pin_path).with_context(|| format!("removing {}", pin_path.display()))?;
    }
    let mut link = program.attach().context("seeing drops (tracepoint udp_fail_queue_rcv_skb)")?;
    link.pin(pin_path).with_context(|| format!("pinning {}", pin_path.display()))?;
    Ok(link)
}
