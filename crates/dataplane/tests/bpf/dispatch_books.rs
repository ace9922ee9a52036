//! Accounting of outstanding requests in `bpf/dispatch/dispatch.bpf.c` under faults: every request is counted once, and
//! completed or abandoned once.

use std::net::{SocketAddr, UdpSocket};
use std::os::fd::AsFd as _;
use std::time::{Duration, Instant};

use coreward_dataplane::dispatch::{self, DispatchPrograms, Policy, RequestIdPosition, Timeouts};
use coreward_dataplane::reuseport;
use coreward_intf as intf;
use socket2::SockRef;

use crate::support::dispatch_env::{
    Pins, SERVICE, TestEnv, client, in_another_namespace, in_namespace, options, wait_for, worker_socket,
};
use crate::support::{missing_bpf_rights, skip_if};

const TIMEOUTS: Timeouts =
    Timeouts { response_timeout: Duration::from_millis(500), stall_after: Duration::from_millis(300) };

fn poll_times(env: &mut TestEnv, count: u32) {
    (0..count).for_each(|_| _ = env.poll(&TIMEOUTS));
}

fn unmatched(env: &TestEnv) -> u64 {
    env.counter(intf::DISPATCH_COUNTER_UNMATCHED)
}

#[test]
fn only_an_expected_response_completes_a_request() {
    skip_if!(missing_bpf_rights());
    in_namespace(|| {
        let env = TestEnv::new(1, &options(Policy::ShortestQueue));
        let (first, second) = (client(), client());
        env.send(&first, b"a");
        env.send(&second, b"b");
        let read = env.read(2);
        assert_eq!(env.outstanding(), [2]);
        env.answer(&read[0]);
        assert_eq!((env.outstanding(), unmatched(&env)), (vec![1], 0));
        // Further datagrams of the same response complete no other request.
        env.answer(&read[0]);
        env.answer(&read[0]);
        assert_eq!((env.outstanding(), unmatched(&env)), (vec![1], 2));
        // Two datagrams that are no responses: to a client without a request, and from a socket outside the service.
        let stranger = UdpSocket::bind("127.0.0.1:0").unwrap();
        env.workers[&0].send_to(b"x", stranger.local_addr().unwrap()).unwrap();
        stranger.send_to(b"x", second.local_addr().unwrap()).unwrap();
        assert_eq!((env.outstanding(), unmatched(&env)), (vec![1], 3));
        env.answer(&read[1]);
        let worker = env.counts(0);
        assert_eq!((worker.outstanding, worker.dispatched, worker.completed, worker.abandoned), (0, 2, 2, 0));
    });
}

#[test]
fn request_ids_distinguish_requests_of_one_client() {
    skip_if!(missing_bpf_rights());
    in_namespace(|| {
        let mut options = options(Policy::ShortestQueue);
        // Responses have one more byte before the request id than requests.
        options.request_id = Some(RequestIdPosition { offset: 1, response_offset: 2, bytes: 2 });
        let env = TestEnv::new(1, &options);
        let client = client();
        (0..3u8).for_each(|id| env.send(&client, &[9, id, 7]));
        env.read(3);
        let answer = |id: u8| {
            env.workers[&0].send_to(&[8, 8, id, 7, 1, 2, 3], client.local_addr().unwrap()).unwrap();
            env.outstanding()[0]
        };
        assert_eq!([answer(1), answer(1), answer(5), answer(0), answer(2)], [2, 2, 2, 1, 0]);
        assert_eq!(unmatched(&env), 2);
    });
}

#[test]
fn another_socket_of_the_service_may_answer() {
    skip_if!(missing_bpf_rights());
    in_namespace(|| {
        let env = TestEnv::new(2, &options(Policy::RoundRobin));
        let client = client();
        env.send(&client, b"to 0");
        env.send(&client, b"to 1");
        assert_eq!(env.outstanding(), [1, 1]);
        // Worker 1 responds for both workers: its first response completes its own request.
        let address = client.local_addr().unwrap();
        env.workers[&1].send_to(b"by 1", address).unwrap();
        assert_eq!(env.outstanding(), [1, 0]);
        // A socket at the service's port that is no worker completes the other worker's request.
        let answers = worker_socket(SERVICE);
        answers.send_to(b"for 0", address).unwrap();
        assert_eq!((env.outstanding(), unmatched(&env)), (vec![0, 0], 0));
    });
}

#[test]
fn equal_address_in_another_namespace_is_another_service() {
    skip_if!(missing_bpf_rights());
    in_namespace(|| {
        let env = TestEnv::new(1, &options(Policy::ShortestQueue));
        let client = client();
        env.send(&client, b"a");
        let port = client.local_addr().unwrap().port();
        // The other namespace has the same addresses of service and client.
        in_another_namespace(|| {
            let answers = worker_socket(SERVICE);
            answers.send_to(b"b", ("127.0.0.1", port)).unwrap();
        });
        assert_eq!((env.outstanding(), unmatched(&env)), (vec![1], 0));
    });
}

#[test]
fn unqueued_request_without_response_is_abandoned() {
    skip_if!(missing_bpf_rights());
    in_namespace(|| {
        let mut env = TestEnv::new(1, &options(Policy::ShortestQueue));
        let clients: Vec<UdpSocket> = (0..5).map(|_| client()).collect();
        clients.iter().for_each(|client| env.send(client, b"a"));
        // Requests in a worker's receive queue are never abandoned.
        poll_times(&mut env, 20);
        assert_eq!((env.outstanding(), env.counts(0).queued), (vec![5], 5));
        let read = env.read(5);
        env.answer(&read[0]);
        // The worker has read all requests: four responses are missing, and all four requests have timed out.
        poll_times(&mut env, 1);
        let worker = env.counts(0);
        assert_eq!((worker.outstanding, worker.completed, worker.abandoned, worker.queued), (0, 1, 4, 0));
        // A response to an abandoned request changes no count of outstanding requests.
        env.answer(&read[1]);
        assert_eq!((env.outstanding(), unmatched(&env)), (vec![0], 1));
        // A new request is outstanding until its timeout.
        env.send(&clients[0], b"a");
        env.read_one();
        poll_times(&mut env, 5);
        assert_eq!(env.outstanding(), [1]);
        poll_times(&mut env, 1);
        assert_eq!((env.outstanding(), env.counts(0).abandoned), (vec![0], 5));
    });
}

#[test]
fn request_dropped_by_a_full_receive_buffer_is_abandoned_at_once() {
    skip_if!(missing_bpf_rights());
    for policy in Policy::all() {
        in_namespace(|| {
            let mut env = TestEnv::new(2, &options(policy));
            for worker in env.workers.values() {
                SockRef::from(worker).set_recv_buffer_size(0).unwrap();
            }
            let clients: Vec<UdpSocket> = (0..100).map(|_| client()).collect();
            clients.iter().for_each(|client| env.send(client, &[0; 200]));
            // Drops are noticed without a poll, but the kernel drops a datagram shortly after it was dispatched.
            let sum = |env: &TestEnv| env.outstanding().iter().sum::<u32>();
            let waiting = wait_for("what is dropped to be given up", || {
                let abandoned: u64 = (0..2).map(|slot| env.counts(slot).abandoned).sum();
                let waiting = sum(&env);
                (u64::from(waiting) + abandoned == 100).then_some(waiting)
            });
            assert!(waiting < 50, "{policy:?}: {waiting}");
            poll_times(&mut env, 1);
            for slot in 0..2 {
                let worker = env.counts(slot);
                let kept = (worker.outstanding, worker.abandoned);
                assert_eq!(kept, (worker.queued, u64::from(worker.dropped)), "{policy:?}: {worker:?}");
            }
            // Exactly the dropped requests were abandoned: every response finds its request.
            env.read(waiting as usize).iter().for_each(|read| env.answer(read));
            assert_eq!((sum(&env), unmatched(&env)), (0, 0), "{policy:?}");
        });
    }
}

#[test]
fn uncounted_waiting_request_becomes_outstanding() {
    skip_if!(missing_bpf_rights());
    in_namespace(|| {
        let mut env = TestEnv::new(1, &options(Policy::ShortestQueue));
        // These are more requests from one client port than the sets of the table hold.
        let client = client();
        (0..40u8).for_each(|number| env.send(&client, &[number]));
        assert_eq!((env.outstanding(), env.counter(intf::DISPATCH_COUNTER_UNTRACKED)), (vec![32], 8));
        poll_times(&mut env, 1);
        assert_eq!(env.outstanding(), [40]);
        let read = env.read(40);
        read[..8].iter().for_each(|read| env.answer(read));
        poll_times(&mut env, 1);
        assert_eq!(env.outstanding(), [24]);
        read[8..].iter().for_each(|read| env.answer(read));
        assert_eq!((env.outstanding(), unmatched(&env)), (vec![0], 8));
    });
}

#[test]
fn stalled_worker_is_disabled_until_it_responds() {
    skip_if!(missing_bpf_rights());
    for policy in [Policy::ShortestQueue, Policy::LightestQueue, Policy::RoundRobin, Policy::RankedQueue] {
        in_namespace(|| {
            let mut env = TestEnv::new(2, &options(policy));
            let client = client();
            env.send(&client, b"a");
            let waits = env.outstanding().iter().position(|count| *count > 0).unwrap() as u32;
            poll_times(&mut env, 3);
            assert!(env.counts(waits).is_eligible);
            poll_times(&mut env, 1);
            assert!(!env.counts(waits).is_eligible && env.counts(1 - waits).is_eligible);
            (0..5).for_each(|_| env.send(&client, b"b"));
            assert_eq!(env.counts(1 - waits).outstanding, 5, "{policy:?}: {:?}", env.outstanding());
            // Both workers are stalled: requests are dispatched nevertheless.
            poll_times(&mut env, 5);
            env.send(&client, b"c");
            assert_eq!(env.outstanding().iter().sum::<u32>(), 7);
            // The first stalled worker responds to a request of its queue.
            let read = env.read(7);
            env.answer(read.iter().find(|read| read.slot == waits).unwrap());
            assert!(env.counts(waits).is_eligible, "{policy:?}");
        });
    }
}

#[test]
fn dead_worker_loses_no_request_and_its_slot_is_reused() {
    skip_if!(missing_bpf_rights());
    for policy in Policy::all() {
        in_namespace(|| {
            let mut env = TestEnv::new(3, &options(policy));
            let clients: Vec<UdpSocket> = (0..30).map(|_| client()).collect();
            clients.iter().for_each(|client| env.send(client, b"a"));
            let lost = u64::from(env.counts(1).outstanding);
            drop(env.workers.remove(&1));
            // These requests come before user space has noticed the dead worker.
            clients.iter().for_each(|client| env.send(client, b"b"));
            env.read(60 - lost as usize);
            assert!(env.poll(&TIMEOUTS));
            let dead = env.counts(1);
            assert_eq!((dead.outstanding, dead.abandoned, dead.is_eligible), (0, lost, false), "{policy:?}");
            assert!(!env.poll(&TIMEOUTS), "it dies once");
            assert_eq!(env.add_worker(), 1);
            assert!(env.counts(1).is_eligible);
            (0..60).for_each(|_| env.send(&client(), b"c"));
            let read = env.read(60);
            assert!(read.iter().any(|read| read.slot == 1), "{policy:?}");
        });
    }
}

#[test]
fn upgrade_takes_over_sockets_and_requests_in_flight() {
    skip_if!(missing_bpf_rights());
    in_namespace(|| {
        let mut env = TestEnv::new(2, &options(Policy::ShortestQueue));
        assert!(!env.dispatch.is_taken_over());
        let clients: Vec<UdpSocket> = (0..4).map(|_| client()).collect();
        clients.iter().for_each(|client| env.send(client, b"a"));
        let sockets = env.dispatch.sockets();
        // A second instance with another policy takes over while the first instance still runs.
        env.dispatch =
            DispatchPrograms::load(&env.pins.0, &dispatch::cgroup_root().unwrap(), &options(Policy::RoundRobin))
                .unwrap();
        assert!(env.dispatch.is_taken_over());
        assert_eq!((env.dispatch.sockets(), env.outstanding()), (sockets, vec![2, 2]));
        env.read(4).iter().for_each(|read| env.answer(read));
        assert_eq!((env.outstanding(), unmatched(&env)), (vec![0, 0], 0));
        env.dispatch.attach(env.workers[&0].as_fd()).unwrap();
        (0..4).for_each(|_| env.send(&clients[0], b"b"));
        assert_eq!(env.outstanding(), [2, 2]);
        poll_times(&mut env, 1);
    });
}

#[test]
fn detach_returns_sockets_to_the_kernels_choice() {
    skip_if!(missing_bpf_rights());
    in_namespace(|| {
        let mut env = TestEnv::new(2, &options(Policy::ShortestQueue));
        let pins = Pins::new();
        let options = options(Policy::ShortestQueue);
        let again = DispatchPrograms::load(&pins.0, &dispatch::cgroup_root().unwrap(), &options).unwrap();
        let socket = env.workers[&0].try_clone().unwrap();
        let error = again.add_worker(socket.as_fd(), 1).unwrap_err().to_string();
        assert!(error.contains("is it in another one"), "{error}");
        reuseport::detach(socket.as_fd()).unwrap();
        dispatch::remove(&env.pins.0).unwrap();
        let from: Vec<UdpSocket> = (0..50).map(|_| client()).collect();
        from.iter().for_each(|client| _ = client.send(b"a").unwrap());
        let read = env.read(50);
        assert!((0..2).all(|slot| read.iter().any(|read| read.slot == slot)));
        assert_eq!(env.outstanding(), [0, 0]);
        assert_eq!(again.add_worker(socket.as_fd(), 1).unwrap(), 0);
        env.workers.clear();
    });
}

#[test]
fn ipv6_clients_are_counted() {
    skip_if!(missing_bpf_rights());
    in_namespace(|| {
        let service: SocketAddr = "[::]:5300".parse().unwrap();
        let env = TestEnv::new(2, &dispatch::Options { service, ..options(Policy::ShortestQueue) });
        let clients = ["[::1]:0", "127.0.0.1:0"].map(|address| UdpSocket::bind(address).unwrap());
        clients[0].connect("[::1]:5300").unwrap();
        clients[1].connect("127.0.0.1:5300").unwrap();
        clients.iter().for_each(|client| env.send(client, b"a"));
        assert_eq!(env.outstanding(), [1, 1]);
        env.read(2).iter().for_each(|read| env.answer(read));
        assert_eq!((env.outstanding(), unmatched(&env)), (vec![0, 0], 0));
        assert_eq!(env.counter(intf::DISPATCH_COUNTER_UNTRACKED), 0);
    });
}

#[test]
fn service_times_are_observed_by_type() {
    skip_if!(missing_bpf_rights());
    in_namespace(|| {
        let mut options = options(Policy::LightestQueue);
        options.observes_service_times = true;
        options.types =
            vec![dispatch::RequestType { value: *b"slow\0\0\0\0", mask: [255, 255, 255, 255, 0, 0, 0, 0], class: 0 }];
        let env = TestEnv::new(1, &options);
        let client = client();
        // Lower and upper limit of the sum of each type's service times (ns), however slow the machine is.
        let (mut at_least, mut at_most) = ([0, 0], [0, 0]);
        for (payload, kind, time) in [(&b"slow"[..], 0, 20), (b"fast", 1, 1), (b"slow", 0, 20), (b"fast", 1, 1)] {
            let time = Duration::from_millis(time);
            let began = Instant::now();
            env.send(&client, payload);
            let read = env.read_one();
            std::thread::sleep(time);
            env.answer(&read);
            at_least[kind] += time.as_nanos() as u64;
            at_most[kind] += began.elapsed().as_nanos() as u64;
        }
        let observed = env.dispatch.ledger().observed_times(2);
        assert_eq!(observed.iter().map(|(_, count)| *count).collect::<Vec<_>>(), [2, 2]);
        for (kind, (sum, _)) in observed.iter().enumerate() {
            let possible = at_least[kind]..=at_most[kind];
            assert!(possible.contains(sum), "{observed:?}: {kind} took {possible:?}");
        }
    });
}
