//! A process and its workers, with RingLeader's interface (NSDI'23, Table 1).

use std::ffi::{CStr, OsStr, c_char, c_int};
use std::net::{Ipv4Addr, SocketAddrV4};
use std::num::NonZeroU64;
use std::os::unix::ffi::OsStrExt as _;
use std::path::Path;
use std::ptr::null_mut;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};

use coreward_model::dispatch::{LoadCheckInterval, LoadHint, ScaleDownCondition, ScaleUpCondition};
use coreward_runtime::RuntimeError;
use coreward_runtime::worker::{self, TakenRequest};
use coreward_runtime::worker_message::LoadHintTrigger;

use crate::call_result::{exclusive_ref, free_box, set_last_error, shared_ref, to_status_code};

/// A process that serves requests. It holds the registrations of its services.
#[derive(Debug)]
pub struct Runtime {
    pub(crate) shared_runtime: Arc<SharedRuntime>,
}

#[derive(Debug)]
pub(crate) struct SharedRuntime {
    runtime: worker::OrchestratorConnection,
    pub is_stop_requested: AtomicBool,
}

impl SharedRuntime {
    pub fn max_payload_bytes(&self) -> usize {
        self.runtime.max_payload_bytes()
    }
}

#[derive(Debug)]
pub struct Worker {
    /// Worker of the Rust library. It borrows from `shared_runtime`, so it is dropped first.
    pub(crate) worker: worker::Worker<'static>,
    pub(crate) shared_runtime: Arc<SharedRuntime>,
}

/// A request that was taken out of its core's queues.
#[derive(Debug)]
pub struct OwnedRequest {
    request: TakenRequest,
}

/// A hint to change the number of a service's cores (LoadHint).
#[repr(C)]
#[derive(Debug, Clone, Copy, Default)]
pub struct Hint {
    /// Bit mask of the services with requests that no core can take, in which bit s is service s.
    pub waiting: u64,
    pub service: u8,
    /// 1 if the service needs more cores, or 0 if fewer suffice.
    pub scale_up: u8,
}

/// Connects to the orchestrator whose shared memory is the file `path`. Returns null on an error.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn coreward_connect(path: *const c_char) -> *mut Runtime {
    if path.is_null() {
        set_last_error("a null pointer: expected the path of an orchestrator's memory");
        return null_mut();
    }
    // SAFETY: by the interface's contract.
    let path = Path::new(OsStr::from_bytes(unsafe { CStr::from_ptr(path) }.to_bytes()));
    match worker::OrchestratorConnection::connect(path) {
        Ok(runtime) => {
            let shared_runtime = Arc::new(SharedRuntime { runtime, is_stop_requested: AtomicBool::new(false) });
            Box::into_raw(Box::new(Runtime { shared_runtime }))
        }
        Err(error) => {
            set_last_error(error);
            null_mut()
        }
    }
}

/// Frees a runtime, unless it is null. Its workers keep the registrations until they are freed.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn coreward_runtime_free(runtime: *mut Runtime) {
    // SAFETY: by the interface's contract.
    unsafe { free_box(runtime) }
}

/// Makes `coreward_serve` return in all workers of the runtime. May be called in a signal handler.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn coreward_stop(runtime: *const Runtime) {
    // SAFETY: by the interface's contract.
    if let Some(runtime) = unsafe { runtime.as_ref() } {
        runtime.shared_runtime.is_stop_requested.store(true, Relaxed);
    }
}

/// Returns the number of cores that can have a worker, or 0 if `runtime` is null.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn coreward_cores(runtime: *const Runtime) -> u16 {
    // SAFETY: by the interface's contract.
    unsafe { shared_ref(runtime) }.map_or(0, |runtime| runtime.shared_runtime.runtime.core_count())
}

/// Returns the maximum length of requests and responses in bytes, or 0 if `runtime` is null.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn coreward_payload_bytes(runtime: *const Runtime) -> usize {
    // SAFETY: by the interface's contract.
    unsafe { shared_ref(runtime) }.map_or(0, |runtime| runtime.shared_runtime.runtime.max_payload_bytes())
}

/// Returns how many services the orchestrator has, or 0 if `runtime` is null.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn coreward_services(runtime: *const Runtime) -> u8 {
    // SAFETY: by the interface's contract.
    unsafe { shared_ref(runtime) }.map_or(0, |runtime| runtime.shared_runtime.runtime.service_entries().len() as u8)
}

/// Registers this process as the one that serves a service (RegisterService). Address (in host byte order), port and
/// priority must be those of the orchestrator's configuration.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn coreward_register_service(
    runtime: *const Runtime,
    service: u8,
    address: u32,
    port: u16,
    priority: u8,
) -> c_int {
    // SAFETY: by the interface's contract.
    let Some(runtime) = (unsafe { shared_ref(runtime) }) else { return -1 };
    let address = SocketAddrV4::new(Ipv4Addr::from_bits(address), port);
    to_status_code(runtime.shared_runtime.runtime.register_service(service, address, priority))
}

/// Attaches a worker to a core, on which no service is enabled at first. Returns null on an error.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn coreward_worker_new(runtime: *const Runtime, core: u16) -> *mut Worker {
    // SAFETY: by the interface's contract.
    let Some(runtime) = (unsafe { shared_ref(runtime) }) else { return null_mut() };
    let shared_runtime = runtime.shared_runtime.clone();
    // SAFETY: the reference counter keeps the runtime in its place until the worker has been dropped.
    let runtime: &'static SharedRuntime = unsafe { &*Arc::as_ptr(&shared_runtime) };
    match runtime.runtime.attach_worker(core) {
        Ok(worker) => Box::into_raw(Box::new(Worker { worker, shared_runtime })),
        Err(error) => {
            set_last_error(error);
            null_mut()
        }
    }
}

/// Ends a worker, unless it is null. Requests in its queues are lost.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn coreward_worker_free(worker: *mut Worker) {
    // SAFETY: by the interface's contract.
    unsafe { free_box(worker) }
}

/// Calls `call` with the worker that the pointer points to. Fails when the pointer is null.
unsafe fn call_with_worker(
    worker: *mut Worker,
    call: impl FnOnce(&mut worker::Worker<'static>) -> Result<(), RuntimeError>,
) -> c_int {
    // SAFETY: by the interface's contract.
    let Some(worker) = (unsafe { exclusive_ref(worker) }) else { return -1 };
    to_status_code(call(&mut worker.worker))
}

/// Enables a service on `core`, so that the core gets its requests (EnableService).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn coreward_enable_service(worker: *mut Worker, service: u8, core: u16) -> c_int {
    // SAFETY: by the interface's contract.
    unsafe { call_with_worker(worker, |worker| worker.enable_service(service, core)) }
}

/// Disables a service on `core`, so that no new requests are sent there (DisableService). Requests in its queues
/// remain.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn coreward_disable_service(worker: *mut Worker, service: u8, core: u16) -> c_int {
    // SAFETY: by the interface's contract.
    unsafe { call_with_worker(worker, |worker| worker.disable_service(service, core)) }
}

/// Reports `count` requests that `core` completed without a response (LoadFeedback).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn coreward_load_feedback(worker: *mut Worker, service: u8, core: u16, count: u32) -> c_int {
    // SAFETY: by the interface's contract.
    unsafe { call_with_worker(worker, |worker| worker.send_load_feedback(service, core, count)) }
}

/// Enables hints to scale a service up (EnableLoadMonitor). A hint is sent if a request waits at two consecutive
/// checks, which are `epoch_ns` apart.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn coreward_enable_scale_up(worker: *mut Worker, service: u8, epoch_ns: u64) -> c_int {
    let Some(epoch) = epoch_from_nanoseconds(epoch_ns) else { return -1 };
    // SAFETY: by the interface's contract.
    unsafe {
        call_with_worker(worker, |worker| {
            worker.enable_load_monitor(service, LoadHintTrigger::ScaleUp(ScaleUpCondition { epoch_length: epoch }))
        })
    }
}

/// Enables hints to scale a service down (EnableLoadMonitor). A hint is sent if at most `threshold` requests wait
/// during `calm_epochs` epochs of `epoch_ns`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn coreward_enable_scale_down(
    worker: *mut Worker,
    service: u8,
    epoch_ns: u64,
    threshold: u64,
    calm_epochs: u32,
) -> c_int {
    let Some(epoch) = epoch_from_nanoseconds(epoch_ns) else { return -1 };
    let trigger = LoadHintTrigger::ScaleDown(ScaleDownCondition {
        epoch_length: epoch,
        max_calm_queue_length: threshold,
        required_calm_epochs: calm_epochs,
    });
    // SAFETY: by the interface's contract.
    unsafe { call_with_worker(worker, |worker| worker.enable_load_monitor(service, trigger)) }
}

fn epoch_from_nanoseconds(nanoseconds: u64) -> Option<LoadCheckInterval> {
    let epoch = NonZeroU64::new(nanoseconds).map(LoadCheckInterval::new);
    if epoch.is_none() {
        set_last_error("an epoch of 0 ns: expected 1 ns or more");
    }
    epoch
}

/// Rearms a service's load monitor after the cores have acted on its last hint (RearmLoadMonitor).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn coreward_rearm_load_monitor(worker: *mut Worker, service: u8) -> c_int {
    // SAFETY: by the interface's contract.
    unsafe { call_with_worker(worker, |worker| worker.rearm_load_monitor(service)) }
}

/// Reads the next hint for this core (LoadHint). Returns 1 if there was a hint, and 0 otherwise.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn coreward_next_hint(worker: *mut Worker, hint: *mut Hint) -> c_int {
    // SAFETY: by the interface's contract.
    let (Some(worker), Some(hint_out)) = (unsafe { exclusive_ref(worker) }, unsafe { exclusive_ref(hint) }) else {
        return -1;
    };
    let Some(hint_message) = worker.worker.next_hint() else { return 0 };
    let scale_up = u8::from(hint_message.hint == LoadHint::ScaleUp);
    *hint_out = Hint { waiting: hint_message.waiting_service_mask, service: hint_message.service, scale_up };
    1
}

/// Takes the oldest request of the highest priority, for servers with their own scheduler. `coreward_respond` or
/// `coreward_load_feedback` must complete it, and `coreward_taken_free` must free it. Returns null if no request waits
/// (`error` is 0) or on an error (`error` is -1). `service`, `payload` and `length` are only set with a request.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn coreward_take_request(
    worker: *mut Worker,
    service: &mut u8,
    payload: &mut *const u8,
    length: &mut usize,
    error: &mut c_int,
) -> *mut OwnedRequest {
    *error = -1;
    // SAFETY: by the interface's contract.
    let Some(worker) = (unsafe { exclusive_ref(worker) }) else { return null_mut() };
    match worker.worker.take_request() {
        Ok(taken_request) => {
            *error = 0;
            let Some(request) = taken_request else { return null_mut() };
            let owned_request = Box::new(OwnedRequest { request });
            (*service, *payload) = (owned_request.request.service(), owned_request.request.payload.as_ptr());
            *length = owned_request.request.payload.len();
            Box::into_raw(owned_request)
        }
        Err(take_error) => {
            set_last_error(take_error);
            null_mut()
        }
    }
}

/// Sends the response to a request from `coreward_take_request`, which completes the request.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn coreward_respond(
    worker: *mut Worker,
    request: *const OwnedRequest,
    response: *const u8,
    length: usize,
) -> c_int {
    // SAFETY: by the interface's contract.
    let (Some(worker), Some(owned_request)) = (unsafe { exclusive_ref(worker) }, unsafe { shared_ref(request) }) else {
        return -1;
    };
    let response = match length {
        0 => &[],
        // SAFETY: by the interface's contract.
        _ => unsafe { std::slice::from_raw_parts(response, length) },
    };
    to_status_code(worker.worker.respond(&owned_request.request, response))
}

/// Frees a request from `coreward_take_request`, unless it is null.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn coreward_taken_free(request: *mut OwnedRequest) {
    // SAFETY: by the interface's contract.
    unsafe { free_box(request) }
}
