//! Serves a core's requests with a C function.

use std::ffi::{c_int, c_void};
use std::ptr::{from_mut, null_mut};
use std::time::Duration;

use coreward_model::dispatch::{CoreAssignmentMode, ReservedCores};
use coreward_runtime::RuntimeError;
use coreward_runtime::allocation::SharedCoreAllocator;
use coreward_runtime::serve::{self, HandlerReplyAction};
use coreward_runtime::worker;
use coreward_runtime::worker_message::LoadHintMessage;

use crate::call_result::{exclusive_ref, free_box, set_last_error, to_status_code};
use crate::worker::Worker;

/// A request of a client, valid until the handler returns.
#[repr(C)]
#[derive(Debug)]
pub struct Request {
    pub payload: *const u8,
    pub length: usize,
    /// IPv4 address of the client, in host byte order.
    pub client_address: u32,
    pub client_port: u16,
    pub service: u8,
}

/// The core on which a handler runs, as passed to the handler.
#[derive(Debug)]
pub struct Context {
    _private: [u8; 0],
}

/// Serves a request. Writes at most `capacity` bytes to `response` and returns their number, or returns a negative
/// number to send no response. `user` is the pointer that was passed to `coreward_serve`.
pub type Handler = Option<
    unsafe extern "C" fn(
        request: *const Request,
        response: *mut u8,
        capacity: usize,
        context: *mut Context,
        user: *mut c_void,
    ) -> isize,
>;

/// Assignment of cores to services 0 and 1 (RingLeader, NSDI'23, Sect. 4.4) by which both services run on every core.
pub const COREWARD_COMPLETE_SHARE: c_int = 0;
/// Assignment by which each core runs one service, and hints move cores between the services.
pub const COREWARD_DEDICATED: c_int = 1;
/// Assignment by which both services share some cores, and hints change the number of service 0's own cores.
pub const COREWARD_HYBRID: c_int = 2;

/// Assignment of cores to services, which the workers of a process share.
#[derive(Debug)]
pub struct Allocator {
    allocator: SharedCoreAllocator,
}

/// Options of `coreward_serve`. A field of 0 has its default, which is given in parentheses.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct ServeOptions {
    /// Allocator that acts on hints, between requests and at yield points. If it is null, a hint only rearms its load
    /// monitor.
    pub allocator: *const Allocator,
    /// Time for which a request runs before it yields (5 us).
    pub quantum_ns: u64,
    /// Time for which an idle worker polls before it sleeps (20 us).
    pub spin_ns: u64,
    /// Time for which an idle worker sleeps between two polls (50 us).
    pub sleep_ns: u64,
    /// Period of a timer that also preempts handlers between yield points (no timer). Two threads of the core then call
    /// the handler, which must not hold a lock that requests of higher priority need.
    pub timer_ns: u64,
    /// Maximum number of requests without a response that one LoadFeedback message reports as completed (4).
    pub feedback_batch: u32,
}

#[repr(C)]
#[derive(Debug, Clone, Copy, Default)]
pub struct ServeCounters {
    /// Requests that were completed.
    pub served: u64,
    /// Requests that were served while a request of lower priority was preempted.
    pub preempting: u64,
    /// Responses that were not sent because they were too long for a slot.
    pub too_long: u64,
}

impl From<serve::ServeCounters> for ServeCounters {
    fn from(counters: serve::ServeCounters) -> Self {
        Self {
            served: counters.served_requests,
            preempting: counters.preempting_requests,
            too_long: counters.oversized_responses,
        }
    }
}

/// Creates an allocator for `cores` cores by the method `assignment`, such as COREWARD_HYBRID. Each service keeps
/// `reserved` cores for itself. Returns null if the method is unknown.
#[unsafe(no_mangle)]
pub extern "C" fn coreward_allocator_new(assignment: c_int, cores: u16, reserved: u16) -> *mut Allocator {
    let assignment = match assignment {
        COREWARD_COMPLETE_SHARE => CoreAssignmentMode::CompleteShare,
        COREWARD_DEDICATED => CoreAssignmentMode::Dedicated,
        COREWARD_HYBRID => CoreAssignmentMode::Hybrid,
        other => {
            set_last_error(format_args!("assignment {other}: expected 0 (share), 1 (dedicated) or 2 (hybrid)"));
            return null_mut();
        }
    };
    Box::into_raw(Box::new(Allocator {
        allocator: SharedCoreAllocator::new(assignment, cores, ReservedCores([reserved; 2])),
    }))
}

/// Frees an allocator, unless it is null. No worker may use it afterwards.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn coreward_allocator_free(allocator: *mut Allocator) {
    // SAFETY: by the interface's contract.
    unsafe { free_box(allocator) }
}

/// Argument `user` of `coreward_serve`, which is passed to every call of the handler.
struct HandlerUserData(*mut c_void);

// SAFETY: only the handler uses it, on the threads that the interface's contract names.
unsafe impl Sync for HandlerUserData {}

struct HandlerCallbacks<'a> {
    handler: unsafe extern "C" fn(*const Request, *mut u8, usize, *mut Context, *mut c_void) -> isize,
    user_data: HandlerUserData,
    allocator: Option<&'a SharedCoreAllocator>,
    response_capacity_bytes: usize,
}

impl serve::RequestHandler for HandlerCallbacks<'_> {
    fn handle(
        &self,
        request: &serve::HandlerRequest<'_>,
        response: &mut Vec<u8>,
        context: &mut serve::HandlerContext<'_>,
    ) -> HandlerReplyAction {
        let c_request = Request {
            payload: request.payload.as_ptr(),
            length: request.payload.len(),
            client_address: request.client.ip().to_bits(),
            client_port: request.client.port(),
            service: request.service,
        };
        response.reserve(self.response_capacity_bytes);
        let mut context = context;
        let context = from_mut(&mut context).cast::<Context>();
        // SAFETY: the handler keeps to its contract, and `context` lives until it returns.
        let response_length = unsafe {
            (self.handler)(
                &raw const c_request,
                response.as_mut_ptr(),
                self.response_capacity_bytes,
                context,
                self.user_data.0,
            )
        };
        let Ok(length) = usize::try_from(response_length) else { return HandlerReplyAction::NoReply };
        // SAFETY: the handler has written so many bytes, or only as many as the capacity if its response was longer.
        unsafe { response.set_len(length.min(self.response_capacity_bytes)) };
        if length > self.response_capacity_bytes { HandlerReplyAction::NoReply } else { HandlerReplyAction::Send }
    }

    fn handle_load_hint(&self, hint: LoadHintMessage, worker: &mut worker::Worker<'_>) -> Result<(), RuntimeError> {
        match self.allocator {
            Some(allocator) => allocator.apply_hint(hint, worker),
            None => worker.rearm_load_monitor(hint.service),
        }
    }
}

/// Serves waiting requests of higher priority, if the handler has used up its quantum.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn coreward_yield_point(context: *mut Context) {
    // SAFETY: the handler was given a pointer to this reference.
    if let Some(context) = unsafe { context.cast::<&mut serve::HandlerContext<'_>>().as_mut() } {
        context.yield_point();
    }
}

/// Serves requests until `coreward_stop` is called. Then it disables all services at this core and serves the remaining
/// requests. With an allocator, it first enables the services that are assigned to the core. `options` and `counters`
/// may be null. Fails when the orchestrator has ended or the memory is damaged. In this case, free the worker and
/// connect again.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn coreward_serve(
    worker: *mut Worker,
    handler: Handler,
    user: *mut c_void,
    options: *const ServeOptions,
    counters: *mut ServeCounters,
) -> c_int {
    // SAFETY: by the interface's contract.
    let Some(worker) = (unsafe { exclusive_ref(worker) }) else { return -1 };
    let Some(handler) = handler else {
        set_last_error("a null pointer: expected a handler");
        return -1;
    };
    // SAFETY: by the interface's contract.
    let options = unsafe { options.as_ref() };
    // SAFETY: by the interface's contract.
    let allocator = options.and_then(|options| unsafe { shared_allocator_of_options(options) });
    let Worker { worker, shared_runtime } = worker;
    let response_capacity = shared_runtime.max_payload_bytes();
    let callbacks = HandlerCallbacks {
        handler,
        user_data: HandlerUserData(user),
        allocator,
        response_capacity_bytes: response_capacity,
    };
    let enable_result = allocator.map_or(Ok(()), |allocator| allocator.enable_assigned_services(worker));
    let timer_ns = options.map_or(0, |options| options.timer_ns);
    let (options, stop) = (serve_options_or_defaults(options), &shared_runtime.is_stop_requested);
    let result = enable_result.and_then(|()| match timer_ns {
        0 => worker.serve(&callbacks, options, stop),
        _ => worker.serve_with_timer(&callbacks, options, Duration::from_nanos(timer_ns), stop),
    });
    to_status_code(result.map(|serve_counters| {
        // SAFETY: by the interface's contract.
        if let Some(counters_out) = unsafe { counters.as_mut() } {
            *counters_out = serve_counters.into();
        }
    }))
}

/// Returns the allocator in the options, or `None` if it is null.
///
/// # Safety
///
/// The pointer in `options` is null, or points to an allocator that is not freed during `'a`.
unsafe fn shared_allocator_of_options<'a>(options: &ServeOptions) -> Option<&'a SharedCoreAllocator> {
    // SAFETY: by this function's contract.
    unsafe { options.allocator.as_ref() }.map(|c_allocator| &c_allocator.allocator)
}

fn serve_options_or_defaults(options: Option<&ServeOptions>) -> serve::ServeOptions {
    let default_options = serve::ServeOptions::default();
    let Some(options) = options else { return default_options };
    let duration_or_default =
        |nanoseconds, default| if nanoseconds == 0 { default } else { Duration::from_nanos(nanoseconds) };
    serve::ServeOptions {
        quantum: duration_or_default(options.quantum_ns, default_options.quantum),
        spin_time: duration_or_default(options.spin_ns, default_options.spin_time),
        sleep_time: duration_or_default(options.sleep_ns, default_options.sleep_time),
        max_completions_per_feedback: if options.feedback_batch == 0 {
            default_options.max_completions_per_feedback
        } else {
            options.feedback_batch
        },
    }
}
