//! C interface of [`coreward_runtime`], declared in `include/coreward_runtime.h`.

// The contract of all functions is at the head of the header, which cbindgen.toml contains.
#![allow(clippy::missing_safety_doc)]

mod call_result;
mod server;
mod worker;

pub use call_result::coreward_last_error;
pub use server::{
    Allocator, COREWARD_COMPLETE_SHARE, COREWARD_DEDICATED, COREWARD_HYBRID, Context, Handler, Request, ServeCounters,
    ServeOptions, coreward_allocator_free, coreward_allocator_new, coreward_serve, coreward_yield_point,
};
pub use worker::{
    Hint, OwnedRequest, Runtime, Worker, coreward_connect, coreward_cores, coreward_disable_service,
    coreward_enable_scale_down, coreward_enable_scale_up, coreward_enable_service, coreward_load_feedback,
    coreward_next_hint, coreward_payload_bytes, coreward_rearm_load_monitor, coreward_register_service,
    coreward_respond, coreward_runtime_free, coreward_services, coreward_stop, coreward_take_request,
    coreward_taken_free, coreward_worker_free, coreward_worker_new,
};
