//! Comparison of `bpf/dispatch/dispatch.bpf.c` with `coreward_model::dispatch` after every request and response.

use std::net::UdpSocket;
use std::time::Duration;

use coreward_dataplane::dispatch::{DispatchPolicy, PayloadRequestType, RequestIdPosition};
use coreward_intf as intf;
use coreward_model::dispatch::{
    ClassBoundedShortestQueue, DispatchHeader, JoinLightestQueue, JoinShortestQueue, OutstandingBoundsByClass,
    RequestDispatcher, RoundRobinDispatcher, RoundedServiceTime,
};
use coreward_model::rss::seeded_rng;
use rand::Rng as _;

use crate::support::dispatch_env::{
    DispatchTestEnv, ReceivedDatagram, dispatch_options, open_client_socket, run_in_namespace,
};
use crate::support::{missing_bpf_rights, skip_if};

const REQUEST_COUNT: u32 = 3000;
const SERVICE_TIMES: [Duration; 3] =
    [Duration::from_micros(10), Duration::from_micros(37), Duration::from_micros(1000)];

/// Sends requests and responds in random order, and asserts that the program selects the same workers as the model.
/// Responses are slower than requests at first, and faster when many requests are outstanding.
fn assert_selects_workers_as_model(env: &DispatchTestEnv, model: &mut impl RequestDispatcher, clients: &[UdpSocket]) {
    let mut rng = seeded_rng(7, 1);
    let mut unanswered_requests: Vec<(ReceivedDatagram, DispatchHeader)> = Vec::new();
    for request_id in 0..REQUEST_COUNT {
        let class = rng.next_u32() as u8 % 3;
        let expected_service_time = RoundedServiceTime::new(SERVICE_TIMES[usize::from(class)]).as_ns();
        let header = DispatchHeader { service: class.min(1), expected_service_time, request_hash: 0, flow_hash: 0 };
        let chosen_client = &clients[rng.next_u32() as usize % clients.len()];
        env.send_request(chosen_client, &[&request_id.to_le_bytes()[..], b"type", &[class]].concat());
        let request = env.read_one_request();
        assert_eq!(
            model.place_request(0, &header),
            Some(request.worker_slot as u16),
            "request {request_id} of class {class}"
        );
        unanswered_requests.push((request, header));
        let responds_faster = unanswered_requests.len() > 40;
        while !unanswered_requests.is_empty() && rng.next_u32() % 16 < if responds_faster { 9 } else { 6 } {
            let (answered_request, header) =
                unanswered_requests.swap_remove(rng.next_u32() as usize % unanswered_requests.len());
            env.send_response(&answered_request);
            model.record_completion(answered_request.worker_slot as u16, &header);
        }
    }
    assert_eq!(env.outstanding_request_counts().iter().sum::<u32>() as usize, unanswered_requests.len());
    for (request, _) in &unanswered_requests {
        env.send_response(request);
    }
    let worker_counts = env.dispatch.ledger().worker_request_counts();
    assert!(
        worker_counts.iter().all(|worker| worker.outstanding_requests == 0 && worker.outstanding_work.is_zero()),
        "{worker_counts:?}"
    );
    assert_eq!(worker_counts.iter().map(|worker| worker.dispatched_requests).sum::<u64>(), u64::from(REQUEST_COUNT));
    assert!(
        worker_counts
            .iter()
            .all(|worker| worker.dispatched_requests == worker.completed_requests && worker.abandoned_requests == 0),
        "{worker_counts:?}"
    );
    assert_eq!(env.counter(intf::DISPATCH_COUNTER_UNTRACKED), 0);
    assert_eq!(env.counter(intf::DISPATCH_COUNTER_UNMATCHED), 0);
}

fn start_test_env(worker_count: usize, policy: DispatchPolicy) -> DispatchTestEnv {
    let mut options = dispatch_options(policy);
    options.request_id_position =
        Some(RequestIdPosition { offset_in_request: 0, offset_in_response: 0, byte_count: 4 });
    options.type_offset = 4;
    let new_request_type = |number: u8, class| PayloadRequestType {
        payload_value: [b't', b'y', b'p', b'e', number, 0, 0, 0],
        payload_mask: [255, 255, 255, 255, 255, 0, 0, 0],
        priority_class: class,
    };
    // Requests that match neither type also have class 1.
    options.request_types = vec![new_request_type(0, 0), new_request_type(1, 1)];
    options.default_priority_class = 1;
    let env = DispatchTestEnv::new(worker_count, &options);
    env.dispatch.set_expected_service_times(&SERVICE_TIMES);
    env
}

fn new_client_sockets() -> Vec<UdpSocket> {
    (0..12).map(|_| open_client_socket()).collect()
}

#[test]
fn jsq_chooses_workers_as_the_model_does() {
    skip_if!(missing_bpf_rights());
    for workers in [1, 3, 16, 64] {
        run_in_namespace(|| {
            let env = start_test_env(workers, DispatchPolicy::ShortestQueue);
            env.dispatch
                .set_request_limits(|workers| OutstandingBoundsByClass::with_reserved_cores(workers, 1, 0, 4, 0));
            assert_selects_workers_as_model(
                &env,
                &mut JoinShortestQueue::unbounded(workers as u16),
                &new_client_sockets(),
            );
        });
    }
}

#[test]
fn jlq_chooses_workers_as_the_model_does() {
    skip_if!(missing_bpf_rights());
    for workers in [2, 5, 64] {
        run_in_namespace(|| {
            let env = start_test_env(workers, DispatchPolicy::LightestQueue);
            assert_selects_workers_as_model(&env, &mut JoinLightestQueue::new(workers as u16), &new_client_sockets());
        });
    }
}

#[test]
fn rr_chooses_workers_as_the_model_does() {
    skip_if!(missing_bpf_rights());
    run_in_namespace(|| {
        assert_selects_workers_as_model(
            &start_test_env(5, DispatchPolicy::RoundRobin),
            &mut RoundRobinDispatcher::new(5),
            &new_client_sockets(),
        )
    });
}

#[test]
fn jbsrq_chooses_workers_as_the_model_does() {
    skip_if!(missing_bpf_rights());
    for (workers, reserved_cores, queue_bound, reserved_bound) in [(4, 1, 4, 0), (7, 2, 3, 1), (1, 1, 1, 0)] {
        run_in_namespace(|| {
            let env = start_test_env(workers, DispatchPolicy::RankedQueue);
            let class_bounds = |workers| {
                OutstandingBoundsByClass::with_reserved_cores(workers, 2, reserved_cores, queue_bound, reserved_bound)
            };
            env.dispatch.set_request_limits(class_bounds);
            let mut model = ClassBoundedShortestQueue::new(class_bounds(workers as u16));
            assert_selects_workers_as_model(&env, &mut model, &new_client_sockets());
            assert_eq!(env.counter(intf::DISPATCH_COUNTER_OVER_BOUND), model.over_bound_request_count());
            assert!(model.over_bound_request_count() > 0);
        });
    }
}

#[test]
fn random_policy_selects_worker_by_flow() {
    skip_if!(missing_bpf_rights());
    run_in_namespace(|| {
        let env = DispatchTestEnv::new(4, &dispatch_options(DispatchPolicy::Random));
        let mut flows_by_worker = [0; 4];
        for _ in 0..200 {
            let client = open_client_socket();
            let slots_of_requests = [0, 1].map(|number: u8| {
                env.send_request(&client, &[number]);
                env.read_one_request().worker_slot
            });
            assert_eq!(slots_of_requests[0], slots_of_requests[1]);
            flows_by_worker[slots_of_requests[0] as usize] += 1;
        }
        assert!(flows_by_worker.iter().all(|count| *count > 20), "{flows_by_worker:?}");
    });
}

#[test]
fn request_above_the_limit_is_counted() {
    skip_if!(missing_bpf_rights());
    run_in_namespace(|| {
        let env = DispatchTestEnv::new(2, &dispatch_options(DispatchPolicy::ShortestQueue));
        env.dispatch.set_request_limits(|workers| OutstandingBoundsByClass::with_reserved_cores(workers, 1, 0, 4, 0));
        let client = open_client_socket();
        (0..8u8).for_each(|number| env.send_request(&client, &[number]));
        assert_eq!((env.outstanding_request_counts(), env.counter(intf::DISPATCH_COUNTER_OVER_BOUND)), (vec![4, 4], 0));
        env.send_request(&client, &[8]);
        assert_eq!((env.outstanding_request_counts(), env.counter(intf::DISPATCH_COUNTER_OVER_BOUND)), (vec![5, 4], 1));
    });
}
