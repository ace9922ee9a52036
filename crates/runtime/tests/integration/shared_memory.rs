//! Tests both sides of the memory together, and every reason for which memory or a call is rejected.

use std::fs::OpenOptions;
use std::net::SocketAddrV4;
use std::os::unix::fs::{FileExt as _, MetadataExt as _};
use std::path::{Path, PathBuf};

use coreward_model::dispatch::{LoadCheckInterval, LoadHint, ScaleUpCondition};
use coreward_runtime::core_queues::{CoreQueues, RequestHeader};
use coreward_runtime::segment_layout::SegmentGeometry;
use coreward_runtime::worker::{OrchestratorConnection, Worker};
use coreward_runtime::worker_message::{LoadHintMessage, LoadHintTrigger, WorkerMessage};
use coreward_runtime::{RuntimeError, SegmentServiceEntry};

pub const TEST_GEOMETRY: SegmentGeometry =
    SegmentGeometry { core_count: 2, priority_count: 2, slots_per_queue: 4, slot_bytes: 128 };
const CLIENT_ADDRESS: &str = "192.0.2.1:9";

pub fn loopback_address(port: u16) -> SocketAddrV4 {
    SocketAddrV4::new([127, 0, 0, 1].into(), port)
}

/// Creates an orchestrator with two services, in a temporary directory.
pub fn create_orchestrator() -> (tempfile::TempDir, PathBuf, CoreQueues) {
    let directory = tempfile::tempdir().unwrap();
    let memory_path = directory.path().join("cores");
    let service_entries = [0, 1].map(|priority| SegmentServiceEntry { address: loopback_address(4000), priority });
    let queues = CoreQueues::create(&memory_path, TEST_GEOMETRY, &service_entries).unwrap();
    (directory, memory_path, queues)
}

pub fn attach_worker<'a>(queues: &mut CoreQueues, runtime: &'a OrchestratorConnection, core: u16) -> Worker<'a> {
    std::thread::scope(|scope| {
        let worker_thread = scope.spawn(|| runtime.attach_worker(core));
        while !queues.has_new_worker(core) {
            std::thread::yield_now();
        }
        queues.accept_worker(core);
        worker_thread.join().unwrap().unwrap()
    })
}

pub fn build_request_header(service: u8) -> RequestHeader {
    RequestHeader { client: CLIENT_ADDRESS.parse().unwrap(), service, arrival_time_ns: 1 }
}

pub fn receive_all_messages(queues: &mut CoreQueues, core: u16) -> Vec<WorkerMessage> {
    let mut received_messages = Vec::new();
    queues.receive_messages(core, 100, |message| received_messages.push(message.unwrap()));
    received_messages
}

#[test]
fn worker_messages_and_hints_reach_their_receivers() {
    let (_directory, path, mut queues) = create_orchestrator();
    let runtime = OrchestratorConnection::connect(&path).unwrap();
    let mut worker = attach_worker(&mut queues, &runtime, 1);
    assert!(queues.has_worker(1) && !queues.has_worker(0) && !queues.has_new_worker(1));
    runtime.register_service(1, loopback_address(4000), 1).unwrap();
    let trigger =
        LoadHintTrigger::ScaleUp(ScaleUpCondition { epoch_length: LoadCheckInterval::power_of_two(14).unwrap() });
    worker.enable_service(1, 0).unwrap();
    worker.send_load_feedback(1, 0, 3).unwrap();
    worker.enable_load_monitor(1, trigger).unwrap();
    worker.rearm_load_monitor(1).unwrap();
    worker.disable_service(1, 0).unwrap();
    let expected_messages = [
        WorkerMessage::EnableService { service: 1, core: 0 },
        WorkerMessage::LoadFeedback { service: 1, core: 0, count: 3 },
        WorkerMessage::EnableLoadMonitor { service: 1, trigger },
        WorkerMessage::RearmLoadMonitor { service: 1 },
        WorkerMessage::DisableService { service: 1, core: 0 },
    ];
    assert_eq!(receive_all_messages(&mut queues, 1), expected_messages);
    let hint_message = LoadHintMessage { service: 1, hint: LoadHint::ScaleUp, waiting_service_mask: 0b10 };
    queues.send_hint(1, hint_message).unwrap();
    assert_eq!((worker.next_hint(), worker.next_hint()), (Some(hint_message), None));
}

#[test]
fn full_queues_and_too_long_requests_are_rejected() {
    let (_directory, path, mut queues) = create_orchestrator();
    let runtime = OrchestratorConnection::connect(&path).unwrap();
    let worker = attach_worker(&mut queues, &runtime, 0);
    let payload = [7; 96];
    assert_eq!((TEST_GEOMETRY.max_payload_bytes(), runtime.max_payload_bytes()), (96, 96));
    (0..4).for_each(|_| queues.send_request(0, 1, &build_request_header(1), &payload).unwrap());
    assert_eq!(
        (worker.queued_request_count(1, 0), worker.queued_request_count(0, 0), worker.queued_request_count(1, 1)),
        (4, 0, 0)
    );
    let send_error_text = |send_result: Result<(), RuntimeError>| send_result.unwrap_err().to_string();
    assert_eq!(
        send_error_text(queues.send_request(0, 1, &build_request_header(1), &payload)),
        "core 0: the ring of requests is full"
    );
    assert_eq!(
        send_error_text(queues.send_request(0, 0, &build_request_header(0), &[0; 97])),
        "97 bytes: a slot holds 96"
    );
    assert_eq!(
        send_error_text(queues.send_request(0, 2, &build_request_header(0), &[])),
        "priority 2: expected 0 to 1"
    );
    queues.send_request(0, 0, &build_request_header(0), &[0; 96]).unwrap();
    assert_eq!((worker.queued_request_count(1, 0), worker.queued_request_count(0, 0)), (4, 1));
}

#[test]
fn new_worker_starts_with_empty_queues() {
    let (_directory, path, mut queues) = create_orchestrator();
    let runtime = OrchestratorConnection::connect(&path).unwrap();
    runtime.register_service(0, loopback_address(4000), 0).unwrap();
    for _ in 0..3 {
        let mut worker = attach_worker(&mut queues, &runtime, 0);
        assert_eq!(worker.queued_request_count(0, 0), 0);
        (0..3).for_each(|_| queues.send_request(0, 0, &build_request_header(0), b"lost").unwrap());
        worker.enable_service(0, 0).unwrap();
        assert_eq!(receive_all_messages(&mut queues, 0), [WorkerMessage::EnableService { service: 0, core: 0 }]);
        worker.send_load_feedback(0, 0, 1).unwrap();
        drop(worker);
        assert!(!queues.has_worker(0));
    }
    drop(attach_worker(&mut queues, &runtime, 0));
    assert_eq!(receive_all_messages(&mut queues, 0), [], "those of the previous worker are discarded");
}

#[test]
fn calls_with_invalid_arguments_are_rejected() {
    let (_directory, path, mut queues) = create_orchestrator();
    let runtime = OrchestratorConnection::connect(&path).unwrap();
    let second_runtime = OrchestratorConnection::connect(&path).unwrap();
    let mut worker = attach_worker(&mut queues, &runtime, 0);
    let call_error_text = |result: Result<(), RuntimeError>| result.unwrap_err().to_string();
    let second_worker_result = second_runtime.attach_worker(0).map(drop);
    assert_eq!(call_error_text(second_worker_result), "core 0 has a worker already");
    assert_eq!(call_error_text(runtime.attach_worker(2).map(drop)), "core 2: expected 0 to 1");
    let error = call_error_text(worker.enable_service(1, 0));
    assert_eq!(error, "core 0: service 1 is not registered");
    runtime.register_service(1, loopback_address(4000), 1).unwrap();
    for runtime in [&runtime, &second_runtime] {
        let error = call_error_text(runtime.register_service(1, loopback_address(4000), 1));
        assert_eq!(error, "service 1 is registered already");
    }
    let register_error =
        |service, port, priority| call_error_text(runtime.register_service(service, loopback_address(port), priority));
    assert_eq!(register_error(0, 4000, 2), "priority 2: expected 0 to 1");
    assert_eq!(register_error(2, 4000, 0), "service 2: the orchestrator has 2 services");
    let expected_error =
        "service 0 at 127.0.0.1:4001 with priority 1: the orchestrator has 127.0.0.1:4000 with priority 0";
    assert_eq!(register_error(0, 4001, 1), expected_error);
    assert_eq!(call_error_text(worker.send_load_feedback(1, 2, 1)), "core 2: expected 0 to 1");
    assert_eq!(call_error_text(worker.rearm_load_monitor(2)), "service 2: the orchestrator has 2 services");
    assert_eq!(receive_all_messages(&mut queues, 0), []);
    drop(worker);
    // Workers in other processes may run the service as long as it is registered.
    let mut worker = attach_worker(&mut queues, &second_runtime, 0);
    worker.enable_service(1, 0).unwrap();
    drop(runtime);
    assert_eq!(call_error_text(worker.enable_service(1, 0)), "core 0: service 1 is not registered");
    second_runtime.register_service(1, loopback_address(4000), 1).unwrap();
    worker.enable_service(1, 0).unwrap();
}

fn connect_error_after_write(path: &Path, offset: u64, bytes: &[u8]) -> String {
    let memory_file = OpenOptions::new().read(true).write(true).open(path).unwrap();
    let mut original_bytes = vec![0; bytes.len()];
    memory_file.read_exact_at(&mut original_bytes, offset).unwrap();
    memory_file.write_all_at(bytes, offset).unwrap();
    let error = OrchestratorConnection::connect(path).unwrap_err().to_string();
    memory_file.write_all_at(&original_bytes, offset).unwrap();
    error
}

#[test]
fn memory_with_another_owner_version_or_size_is_rejected() {
    let (directory, path, queues) = create_orchestrator();
    assert_eq!(connect_error_after_write(&path, 0, b"x"), "not the memory of an orchestrator");
    let version_error = "layout version 9: expected 2; run both sides from one release";
    assert_eq!(connect_error_after_write(&path, 8, &9u32.to_ne_bytes()), version_error);
    let error = connect_error_after_write(&path, 12, &4_000_000u32.to_ne_bytes());
    assert!(error.starts_with("the memory belongs to user 4000000: expected user "), "{error}");
    let error = connect_error_after_write(&path, 24, &1u32.to_ne_bytes());
    let expected_segment_bytes = SegmentGeometry { core_count: 1, ..TEST_GEOMETRY }.segment_bytes();
    assert_eq!(error, format!("{} bytes of memory: expected {expected_segment_bytes}", TEST_GEOMETRY.segment_bytes()));
    assert_eq!(connect_error_after_write(&path, 24, &0u32.to_ne_bytes()), "cores 0: expected 1 to 256");
    let second_orchestrator_error = CoreQueues::create(&path, TEST_GEOMETRY, &[]).unwrap_err();
    assert_eq!(second_orchestrator_error.to_string(), "another orchestrator is running with this memory");
    let short_file_path = directory.path().join("short");
    std::fs::write(&short_file_path, b"coreward").unwrap();
    assert_eq!(
        OrchestratorConnection::connect(&short_file_path).unwrap_err().to_string(),
        "not the memory of an orchestrator"
    );
    OrchestratorConnection::connect(&path).unwrap();
    drop(queues);
    assert_eq!(OrchestratorConnection::connect(&path).unwrap_err().to_string(), "the orchestrator is not running");
}

/// Checks that the file system has allocated all pages of the file. A write to a page without space would end the
/// process with SIGBUS.
#[test]
fn space_of_the_memory_file_is_reserved_when_it_is_created() {
    let (_directory, path, _queues) = create_orchestrator();
    let reserved_bytes = std::fs::metadata(&path).unwrap().blocks() * 512;
    assert!(
        reserved_bytes >= TEST_GEOMETRY.segment_bytes() as u64,
        "{reserved_bytes} of {} bytes",
        TEST_GEOMETRY.segment_bytes()
    );
}

#[test]
fn worker_detects_that_the_orchestrator_has_ended() {
    let (_directory, path, queues) = create_orchestrator();
    let runtime = OrchestratorConnection::connect(&path).unwrap();
    drop(queues);
    assert!(matches!(runtime.attach_worker(0), Err(RuntimeError::OrchestratorNotRunning)));
    let service_entries = [SegmentServiceEntry { address: loopback_address(4000), priority: 2 }];
    let error = CoreQueues::create(&path, TEST_GEOMETRY, &service_entries).unwrap_err();
    assert_eq!(error.to_string(), "priority 2: expected 0 to 1");
    let mut queues = CoreQueues::create(&path, TEST_GEOMETRY, &[]).unwrap();
    let runtime = OrchestratorConnection::connect(&path).unwrap();
    drop(attach_worker(&mut queues, &runtime, 1));
}
