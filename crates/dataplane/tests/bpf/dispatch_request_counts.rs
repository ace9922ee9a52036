//! Tests that `bpf/dispatch/dispatch.bpf.c` counts requests correctly under faults. Each request must be counted once,
//! and then completed or abandoned once.

use std::net::{SocketAddr, UdpSocket};
use std::os::fd::AsFd as _;
use std::time::{Duration, Instant};

use coreward_dataplane::dispatch::{self, DispatchPolicy, DispatchPrograms, RequestIdPosition, RequestTimeouts};
use coreward_dataplane::reuseport;
use coreward_intf as intf;
use socket2::SockRef;

use crate::support::dispatch_env::{
    DispatchTestEnv, SERVICE_ADDRESS, TemporaryPinDirectory, dispatch_options, open_client_socket, open_worker_socket,
    run_in_namespace, run_in_new_namespace, wait_for_value,
};
use crate::support::{missing_bpf_rights, skip_if};

const TEST_REQUEST_TIMEOUTS: RequestTimeouts =
    RequestTimeouts { response_timeout: Duration::from_millis(500), stall_after: Duration::from_millis(300) };

fn poll_repeatedly(env: &mut DispatchTestEnv, poll_count: u32) {
    (0..poll_count).for_each(|_| _ = env.poll_dispatcher(&TEST_REQUEST_TIMEOUTS));
}

fn unmatched_response_count(env: &DispatchTestEnv) -> u64 {
    env.counter(intf::DISPATCH_COUNTER_UNMATCHED)
}

#[test]
fn only_an_expected_response_completes_a_request() {
    skip_if!(missing_bpf_rights());
    run_in_namespace(|| {
        let env = DispatchTestEnv::new(1, &dispatch_options(DispatchPolicy::ShortestQueue));
        let (first_client, second_client) = (open_client_socket(), open_client_socket());
        env.send_request(&first_client, b"a");
        env.send_request(&second_client, b"b");
        let requests = env.read_requests(2);
        assert_eq!(env.outstanding_request_counts(), [2]);
        env.send_response(&requests[0]);
        assert_eq!((env.outstanding_request_counts(), unmatched_response_count(&env)), (vec![1], 0));
        // Further datagrams of the same response complete no other request.
        env.send_response(&requests[0]);
        env.send_response(&requests[0]);
        assert_eq!((env.outstanding_request_counts(), unmatched_response_count(&env)), (vec![1], 2));
        // These datagrams are no responses. One goes to a client without a request, one comes from a foreign socket.
        let foreign_socket = UdpSocket::bind("127.0.0.1:0").unwrap();
        env.worker_sockets[&0].send_to(b"x", foreign_socket.local_addr().unwrap()).unwrap();
        foreign_socket.send_to(b"x", second_client.local_addr().unwrap()).unwrap();
        assert_eq!((env.outstanding_request_counts(), unmatched_response_count(&env)), (vec![1], 3));
        env.send_response(&requests[1]);
        let worker_counts = env.worker_request_counts(0);
        assert_eq!(
            (
                worker_counts.outstanding_requests,
                worker_counts.dispatched_requests,
                worker_counts.completed_requests,
                worker_counts.abandoned_requests
            ),
            (0, 2, 2, 0)
        );
    });
}

#[test]
fn request_ids_distinguish_requests_of_one_client() {
    skip_if!(missing_bpf_rights());
    run_in_namespace(|| {
        let mut options = dispatch_options(DispatchPolicy::ShortestQueue);
        // Responses have one more byte before the request id than requests.
        options.request_id_position =
            Some(RequestIdPosition { offset_in_request: 1, offset_in_response: 2, byte_count: 2 });
        let env = DispatchTestEnv::new(1, &options);
        let client = open_client_socket();
        (0..3u8).for_each(|id| env.send_request(&client, &[9, id, 7]));
        env.read_requests(3);
        let respond_with_request_id = |id: u8| {
            env.worker_sockets[&0].send_to(&[8, 8, id, 7, 1, 2, 3], client.local_addr().unwrap()).unwrap();
            env.outstanding_request_counts()[0]
        };
        assert_eq!(
            [
                respond_with_request_id(1),
                respond_with_request_id(1),
                respond_with_request_id(5),
                respond_with_request_id(0),
                respond_with_request_id(2)
            ],
            [2, 2, 2, 1, 0]
        );
        assert_eq!(unmatched_response_count(&env), 2);
    });
}

#[test]
fn response_from_another_socket_of_the_service_completes_a_request() {
    skip_if!(missing_bpf_rights());
    run_in_namespace(|| {
        let env = DispatchTestEnv::new(2, &dispatch_options(DispatchPolicy::RoundRobin));
        let client = open_client_socket();
        env.send_request(&client, b"to 0");
        env.send_request(&client, b"to 1");
        assert_eq!(env.outstanding_request_counts(), [1, 1]);
        // Worker 1 responds for both workers. Its first response completes its own request.
        let client_address = client.local_addr().unwrap();
        env.worker_sockets[&1].send_to(b"by 1", client_address).unwrap();
        assert_eq!(env.outstanding_request_counts(), [1, 0]);
        // A socket at the service's port that is no worker completes the other worker's request.
        let other_socket = open_worker_socket(SERVICE_ADDRESS);
        other_socket.send_to(b"for 0", client_address).unwrap();
        assert_eq!((env.outstanding_request_counts(), unmatched_response_count(&env)), (vec![0, 0], 0));
    });
}

#[test]
fn same_address_in_another_namespace_is_another_service() {
    skip_if!(missing_bpf_rights());
    run_in_namespace(|| {
        let env = DispatchTestEnv::new(1, &dispatch_options(DispatchPolicy::ShortestQueue));
        let client = open_client_socket();
        env.send_request(&client, b"a");
        let client_port = client.local_addr().unwrap().port();
        // In the other namespace, service and client have the same addresses.
        run_in_new_namespace(|| {
            let other_socket = open_worker_socket(SERVICE_ADDRESS);
            other_socket.send_to(b"b", ("127.0.0.1", client_port)).unwrap();
        });
        assert_eq!((env.outstanding_request_counts(), unmatched_response_count(&env)), (vec![1], 0));
    });
}

#[test]
fn unanswered_request_is_abandoned_after_timeout() {
    skip_if!(missing_bpf_rights());
    run_in_namespace(|| {
        let mut env = DispatchTestEnv::new(1, &dispatch_options(DispatchPolicy::ShortestQueue));
        let clients: Vec<UdpSocket> = (0..5).map(|_| open_client_socket()).collect();
        clients.iter().for_each(|client| env.send_request(client, b"a"));
        // Requests in a worker's receive queue are never abandoned.
        poll_repeatedly(&mut env, 20);
        assert_eq!((env.outstanding_request_counts(), env.worker_request_counts(0).queued_datagrams), (vec![5], 5));
        let requests = env.read_requests(5);
        env.send_response(&requests[0]);
        // The worker has read all requests. Four responses are missing, and these four requests have timed out.
        poll_repeatedly(&mut env, 1);
        let worker_counts = env.worker_request_counts(0);
        assert_eq!(
            (
                worker_counts.outstanding_requests,
                worker_counts.completed_requests,
                worker_counts.abandoned_requests,
                worker_counts.queued_datagrams
            ),
            (0, 1, 4, 0)
        );
        // A response to an abandoned request does not change the number of outstanding requests.
        env.send_response(&requests[1]);
        assert_eq!((env.outstanding_request_counts(), unmatched_response_count(&env)), (vec![0], 1));
        // A new request is outstanding until its timeout.
        env.send_request(&clients[0], b"a");
        env.read_one_request();
        poll_repeatedly(&mut env, 5);
        assert_eq!(env.outstanding_request_counts(), [1]);
        poll_repeatedly(&mut env, 1);
        assert_eq!((env.outstanding_request_counts(), env.worker_request_counts(0).abandoned_requests), (vec![0], 5));
    });
}

#[test]
fn request_dropped_by_a_full_receive_buffer_is_abandoned_at_once() {
    skip_if!(missing_bpf_rights());
    for policy in DispatchPolicy::all() {
        run_in_namespace(|| {
            let mut env = DispatchTestEnv::new(2, &dispatch_options(policy));
            for worker in env.worker_sockets.values() {
                SockRef::from(worker).set_recv_buffer_size(0).unwrap();
            }
            let clients: Vec<UdpSocket> = (0..100).map(|_| open_client_socket()).collect();
            clients.iter().for_each(|client| env.send_request(client, &[0; 200]));
            // Drops are noticed without a poll, but the kernel drops a datagram shortly after it was dispatched.
            let total_outstanding_requests =
                |env: &DispatchTestEnv| env.outstanding_request_counts().iter().sum::<u32>();
            let waiting_requests = wait_for_value("what is dropped to be given up", || {
                let abandoned_requests: u64 =
                    (0..2).map(|slot| env.worker_request_counts(slot).abandoned_requests).sum();
                let waiting_requests = total_outstanding_requests(&env);
                (u64::from(waiting_requests) + abandoned_requests == 100).then_some(waiting_requests)
            });
            assert!(waiting_requests < 50, "{policy:?}: {waiting_requests}");
            poll_repeatedly(&mut env, 1);
            for slot in 0..2 {
                let worker_counts = env.worker_request_counts(slot);
                let outstanding_and_abandoned = (worker_counts.outstanding_requests, worker_counts.abandoned_requests);
                assert_eq!(
                    outstanding_and_abandoned,
                    (worker_counts.queued_datagrams, u64::from(worker_counts.dropped_datagrams)),
                    "{policy:?}: {worker_counts:?}"
                );
            }
            // Only the dropped requests were abandoned, so every response finds its request.
            env.read_requests(waiting_requests as usize).iter().for_each(|request| env.send_response(request));
            assert_eq!((total_outstanding_requests(&env), unmatched_response_count(&env)), (0, 0), "{policy:?}");
        });
    }
}

#[test]
fn untracked_queued_requests_are_counted_at_the_next_poll() {
    skip_if!(missing_bpf_rights());
    run_in_namespace(|| {
        let mut env = DispatchTestEnv::new(1, &dispatch_options(DispatchPolicy::ShortestQueue));
        // One client port sends more requests than the table's sets can hold for it.
        let client = open_client_socket();
        (0..40u8).for_each(|number| env.send_request(&client, &[number]));
        assert_eq!((env.outstanding_request_counts(), env.counter(intf::DISPATCH_COUNTER_UNTRACKED)), (vec![32], 8));
        poll_repeatedly(&mut env, 1);
        assert_eq!(env.outstanding_request_counts(), [40]);
        let requests = env.read_requests(40);
        requests[..8].iter().for_each(|request| env.send_response(request));
        poll_repeatedly(&mut env, 1);
        assert_eq!(env.outstanding_request_counts(), [24]);
        requests[8..].iter().for_each(|request| env.send_response(request));
        assert_eq!((env.outstanding_request_counts(), unmatched_response_count(&env)), (vec![0], 8));
    });
}

#[test]
fn stalled_worker_is_disabled_until_it_responds() {
    skip_if!(missing_bpf_rights());
    for policy in [
        DispatchPolicy::ShortestQueue,
        DispatchPolicy::LightestQueue,
        DispatchPolicy::RoundRobin,
        DispatchPolicy::RankedQueue,
    ] {
        run_in_namespace(|| {
            let mut env = DispatchTestEnv::new(2, &dispatch_options(policy));
            let client = open_client_socket();
            env.send_request(&client, b"a");
            let slot_of_waiting_request =
                env.outstanding_request_counts().iter().position(|count| *count > 0).unwrap() as u32;
            poll_repeatedly(&mut env, 3);
            assert!(env.worker_request_counts(slot_of_waiting_request).is_eligible);
            poll_repeatedly(&mut env, 1);
            assert!(
                !env.worker_request_counts(slot_of_waiting_request).is_eligible
                    && env.worker_request_counts(1 - slot_of_waiting_request).is_eligible
            );
            (0..5).for_each(|_| env.send_request(&client, b"b"));
            assert_eq!(
                env.worker_request_counts(1 - slot_of_waiting_request).outstanding_requests,
                5,
                "{policy:?}: {:?}",
                env.outstanding_request_counts()
            );
            // Both workers are stalled, so requests are dispatched to them nevertheless.
            poll_repeatedly(&mut env, 5);
            env.send_request(&client, b"c");
            assert_eq!(env.outstanding_request_counts().iter().sum::<u32>(), 7);
            // The first stalled worker responds to a request of its queue.
            let requests = env.read_requests(7);
            env.send_response(requests.iter().find(|request| request.worker_slot == slot_of_waiting_request).unwrap());
            assert!(env.worker_request_counts(slot_of_waiting_request).is_eligible, "{policy:?}");
        });
    }
}

#[test]
fn dead_worker_loses_no_request_and_its_slot_is_reused() {
    skip_if!(missing_bpf_rights());
    for policy in DispatchPolicy::all() {
        run_in_namespace(|| {
            let mut env = DispatchTestEnv::new(3, &dispatch_options(policy));
            let clients: Vec<UdpSocket> = (0..30).map(|_| open_client_socket()).collect();
            clients.iter().for_each(|client| env.send_request(client, b"a"));
            let lost_requests = u64::from(env.worker_request_counts(1).outstanding_requests);
            drop(env.worker_sockets.remove(&1));
            // These requests arrive before user space has noticed that a worker died.
            clients.iter().for_each(|client| env.send_request(client, b"b"));
            env.read_requests(60 - lost_requests as usize);
            assert!(env.poll_dispatcher(&TEST_REQUEST_TIMEOUTS));
            let dead_worker_counts = env.worker_request_counts(1);
            assert_eq!(
                (
                    dead_worker_counts.outstanding_requests,
                    dead_worker_counts.abandoned_requests,
                    dead_worker_counts.is_eligible
                ),
                (0, lost_requests, false),
                "{policy:?}"
            );
            assert!(!env.poll_dispatcher(&TEST_REQUEST_TIMEOUTS), "it dies once");
            assert_eq!(env.add_worker(), 1);
            assert!(env.worker_request_counts(1).is_eligible);
            (0..60).for_each(|_| env.send_request(&open_client_socket(), b"c"));
            let requests = env.read_requests(60);
            assert!(requests.iter().any(|request| request.worker_slot == 1), "{policy:?}");
        });
    }
}

#[test]
fn upgrade_takes_over_sockets_and_requests_in_flight() {
    skip_if!(missing_bpf_rights());
    run_in_namespace(|| {
        let mut env = DispatchTestEnv::new(2, &dispatch_options(DispatchPolicy::ShortestQueue));
        assert!(!env.dispatch.is_state_taken_over());
        let clients: Vec<UdpSocket> = (0..4).map(|_| open_client_socket()).collect();
        clients.iter().for_each(|client| env.send_request(client, b"a"));
        let sockets_before = env.dispatch.socket_cookies_by_slot();
        // A second instance with another policy takes over while the first one is still running.
        env.dispatch = DispatchPrograms::load(
            &env.pins.0,
            &dispatch::cgroup2_mount_point().unwrap(),
            &dispatch_options(DispatchPolicy::RoundRobin),
        )
        .unwrap();
        assert!(env.dispatch.is_state_taken_over());
        assert_eq!(
            (env.dispatch.socket_cookies_by_slot(), env.outstanding_request_counts()),
            (sockets_before, vec![2, 2])
        );
        env.read_requests(4).iter().for_each(|request| env.send_response(request));
        assert_eq!((env.outstanding_request_counts(), unmatched_response_count(&env)), (vec![0, 0], 0));
        env.dispatch.attach_to_socket_group(env.worker_sockets[&0].as_fd()).unwrap();
        (0..4).for_each(|_| env.send_request(&clients[0], b"b"));
        assert_eq!(env.outstanding_request_counts(), [2, 2]);
        poll_repeatedly(&mut env, 1);
    });
}

#[test]
fn kernel_selects_sockets_after_detach() {
    skip_if!(missing_bpf_rights());
    run_in_namespace(|| {
        let mut env = DispatchTestEnv::new(2, &dispatch_options(DispatchPolicy::ShortestQueue));
        let other_pins = TemporaryPinDirectory::new();
        let options = dispatch_options(DispatchPolicy::ShortestQueue);
        let second_dispatch =
            DispatchPrograms::load(&other_pins.0, &dispatch::cgroup2_mount_point().unwrap(), &options).unwrap();
        let socket = env.worker_sockets[&0].try_clone().unwrap();
        let error = second_dispatch.add_worker(socket.as_fd(), 1).unwrap_err().to_string();
        assert!(error.contains("is it in another one"), "{error}");
        reuseport::detach_from_reuseport_group(socket.as_fd()).unwrap();
        dispatch::remove_pins_and_programs(&env.pins.0).unwrap();
        let clients: Vec<UdpSocket> = (0..50).map(|_| open_client_socket()).collect();
        clients.iter().for_each(|client| _ = client.send(b"a").unwrap());
        let requests = env.read_requests(50);
        assert!((0..2).all(|slot| requests.iter().any(|request| request.worker_slot == slot)));
        assert_eq!(env.outstanding_request_counts(), [0, 0]);
        assert_eq!(second_dispatch.add_worker(socket.as_fd(), 1).unwrap(), 0);
        env.worker_sockets.clear();
    });
}

#[test]
fn requests_of_ipv6_clients_are_counted() {
    skip_if!(missing_bpf_rights());
    run_in_namespace(|| {
        let service: SocketAddr = "[::]:5300".parse().unwrap();
        let env = DispatchTestEnv::new(
            2,
            &dispatch::DispatchOptions { service_address: service, ..dispatch_options(DispatchPolicy::ShortestQueue) },
        );
        let clients = ["[::1]:0", "127.0.0.1:0"].map(|address| UdpSocket::bind(address).unwrap());
        clients[0].connect("[::1]:5300").unwrap();
        clients[1].connect("127.0.0.1:5300").unwrap();
        clients.iter().for_each(|client| env.send_request(client, b"a"));
        assert_eq!(env.outstanding_request_counts(), [1, 1]);
        env.read_requests(2).iter().for_each(|request| env.send_response(request));
        assert_eq!((env.outstanding_request_counts(), unmatched_response_count(&env)), (vec![0, 0], 0));
        assert_eq!(env.counter(intf::DISPATCH_COUNTER_UNTRACKED), 0);
    });
}

#[test]
fn service_times_are_measured_by_request_type() {
    skip_if!(missing_bpf_rights());
    run_in_namespace(|| {
        let mut options = dispatch_options(DispatchPolicy::LightestQueue);
        options.measures_service_times = true;
        options.request_types = vec![dispatch::PayloadRequestType {
            payload_value: *b"slow\0\0\0\0",
            payload_mask: [255, 255, 255, 255, 0, 0, 0, 0],
            priority_class: 0,
        }];
        let env = DispatchTestEnv::new(1, &options);
        let client = open_client_socket();
        // Lower and upper bounds on the sum of each type's service times (ns), which hold on any slow machine.
        let (mut min_times_ns, mut max_times_ns) = ([0, 0], [0, 0]);
        for (payload, type_index, time_ms) in
            [(&b"slow"[..], 0, 20), (b"fast", 1, 1), (b"slow", 0, 20), (b"fast", 1, 1)]
        {
            let service_time = Duration::from_millis(time_ms);
            let start_time = Instant::now();
            env.send_request(&client, payload);
            let request = env.read_one_request();
            std::thread::sleep(service_time);
            env.send_response(&request);
            min_times_ns[type_index] += service_time.as_nanos() as u64;
            max_times_ns[type_index] += start_time.elapsed().as_nanos() as u64;
        }
        let observed_times = env.dispatch.ledger().service_time_sums_and_counts(2);
        assert_eq!(observed_times.iter().map(|(_, count)| *count).collect::<Vec<_>>(), [2, 2]);
        for (type_index, (sum, _)) in observed_times.iter().enumerate() {
            let expected_range = min_times_ns[type_index]..=max_times_ns[type_index];
            assert!(expected_range.contains(sum), "{observed_times:?}: {type_index} took {expected_range:?}");
        }
    });
}
