//! Tests the C functions from one thread, with errors and with a server that has its own scheduler.

use std::ffi::{CStr, CString};
use std::net::{SocketAddr, SocketAddrV4};
use std::path::Path;
use std::ptr::{null, null_mut};
use std::sync::atomic::AtomicBool;
use std::time::Instant;

use coreward_runtime_c::{
    Hint, Runtime, coreward_allocator_new, coreward_connect, coreward_cores, coreward_enable_scale_up,
    coreward_enable_service, coreward_last_error, coreward_next_hint, coreward_payload_bytes,
    coreward_register_service, coreward_respond, coreward_runtime_free, coreward_serve, coreward_take_request,
    coreward_taken_free, coreward_worker_free, coreward_worker_new,
};

use crate::server::{RESPONSE_TIMEOUT, StopDaemonOnDrop, connected_client_socket, start_one_service_orchestrator};

fn last_error() -> String {
    // SAFETY: the text is valid until the next error of this thread.
    unsafe { CStr::from_ptr(coreward_last_error()) }.to_str().unwrap().to_owned()
}

fn connect_runtime(memory_path: &Path) -> *mut Runtime {
    let path = CString::new(memory_path.to_str().unwrap()).unwrap();
    // SAFETY: a string with a zero byte at its end.
    let runtime = unsafe { coreward_connect(path.as_ptr()) };
    assert!(!runtime.is_null(), "{}", last_error());
    runtime
}

#[test]
fn null_pointers_and_invalid_values_are_rejected() {
    let expected_prefix = "a null pointer: expected";
    // SAFETY: null pointers are permitted everywhere.
    unsafe {
        assert!(coreward_connect(null()).is_null() && last_error().starts_with(expected_prefix));
        assert!(coreward_worker_new(null(), 0).is_null() && last_error().starts_with(expected_prefix));
        assert_eq!((coreward_cores(null()), coreward_payload_bytes(null())), (0, 0));
        assert_eq!(coreward_enable_service(null_mut(), 0, 0), -1);
        assert_eq!(coreward_serve(null_mut(), None, null_mut(), null(), null_mut()), -1);
        assert_eq!(coreward_next_hint(null_mut(), null_mut()), -1);
        coreward_worker_free(null_mut());
        coreward_runtime_free(null_mut());
    }
    assert!(coreward_allocator_new(3, 1, 1).is_null());
    assert_eq!(last_error(), "assignment 3: expected 0 (share), 1 (dedicated) or 2 (hybrid)");
}

/// Registers service 0, after checking that a registration with another port fails.
///
/// # Safety
///
/// `runtime` must be connected, and no other thread may use it.
unsafe fn register_service(runtime: *mut Runtime, address: SocketAddrV4) {
    let address_bits = address.ip().to_bits();
    // SAFETY: the caller guarantees it.
    unsafe {
        assert_eq!(coreward_register_service(runtime, 0, address_bits, 1, 0), -1);
        assert!(last_error().contains(&address.to_string()), "{}", last_error());
        assert_eq!(coreward_register_service(runtime, 0, address_bits, address.port(), 0), 0, "{}", last_error());
    }
}

#[test]
fn server_with_its_own_scheduler_takes_and_answers_requests() {
    let directory = tempfile::tempdir().unwrap();
    let memory_path = directory.path().join("cores");
    let (mut daemon, listen) = start_one_service_orchestrator(&memory_path);
    let SocketAddr::V4(address) = listen else { unreachable!("an IPv4 address") };
    let stop_flag = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let _stop_guard = StopDaemonOnDrop(&stop_flag);
        scope.spawn(|| daemon.run_until_stopped(&stop_flag).unwrap());
        let runtime = connect_runtime(&memory_path);
        let client = connected_client_socket(listen);
        // SAFETY: the objects are used by this thread alone, and freed once.
        unsafe {
            register_service(runtime, address);
            let worker = coreward_worker_new(runtime, 1);
            assert_eq!(coreward_enable_service(worker, 0, 1), 0, "{}", last_error());
            assert_eq!(coreward_enable_scale_up(worker, 0, 0), -1);
            assert_eq!(coreward_next_hint(worker, &mut Hint::default()), 0);
            client.send(b"ping").unwrap();
            let (mut service, mut payload, mut length, mut error) = (9, null(), 0, 0);
            let start = Instant::now();
            let request = loop {
                let taken_request = coreward_take_request(worker, &mut service, &mut payload, &mut length, &mut error);
                assert!(error == 0 && start.elapsed() < RESPONSE_TIMEOUT, "{}", last_error());
                if !taken_request.is_null() {
                    break taken_request;
                }
            };
            assert_eq!((service, std::slice::from_raw_parts(payload, length)), (0, &b"ping"[..]));
            assert_eq!(coreward_respond(worker, request, b"pong".as_ptr(), 4), 0, "{}", last_error());
            coreward_taken_free(request);
            let mut response = [0; 10];
            assert_eq!(client.recv(&mut response).unwrap(), 4);
            coreward_runtime_free(runtime);
            coreward_worker_free(worker);
        }
    });
}
