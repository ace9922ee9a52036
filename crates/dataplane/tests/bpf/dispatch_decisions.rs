//! Comparison of `bpf/dispatch/dispatch.bpf.c` with `coreward_model::dispatch` after every request and response.

use std::net::UdpSocket;
use std::time::Duration;

use coreward_dataplane::dispatch::{Policy, RequestIdPosition, RequestType};
use coreward_intf as intf;
use coreward_model::dispatch::{
    ClassBoundedShortestQueue, ClassBounds, DispatchHeader, Dispatcher, JoinLightestQueue, JoinShortestQueue,
    RoundRobinCore, RoundedServiceTime,
};
use coreward_model::rss::seeded_rng;
use rand::Rng as _;

use crate::support::dispatch_env::{ReceivedDatagram, TestEnv, client, in_namespace, options};
use crate::support::{missing_bpf_rights, skip_if};

const REQUEST_COUNT: u32 = 3000;
const TIMES: [Duration; 3] = [Duration::from_micros(10), Duration::from_micros(37), Duration::from_micros(1000)];

/// Asserts that workers are selected as by the model, while requests are sent and workers respond in random order.
/// Until many requests are outstanding, responses are slower than requests, then faster.
fn assert_equals_model(env: &TestEnv, model: &mut impl Dispatcher, clients: &[UdpSocket]) {
    let mut rng = seeded_rng(7, 1);
    let mut under_way: Vec<(ReceivedDatagram, DispatchHeader)> = Vec::new();
    for id in 0..REQUEST_COUNT {
        let class = rng.next_u32() as u8 % 3;
        let expected_service_time = RoundedServiceTime::new(TIMES[usize::from(class)]).as_ns();
        let header = DispatchHeader { service: class.min(1), expected_service_time, hash: 0, flow_hash: 0 };
        let from = &clients[rng.next_u32() as usize % clients.len()];
        env.send(from, &[&id.to_le_bytes()[..], b"type", &[class]].concat());
        let read = env.read_one();
        assert_eq!(model.place(0, &header), Some(read.slot as u16), "request {id} of class {class}");
        under_way.push((read, header));
        let busy = under_way.len() > 40;
        while !under_way.is_empty() && rng.next_u32() % 16 < if busy { 9 } else { 6 } {
            let (read, header) = under_way.swap_remove(rng.next_u32() as usize % under_way.len());
            env.answer(&read);
            model.record_completion(read.slot as u16, &header);
        }
    }
    assert_eq!(env.outstanding().iter().sum::<u32>() as usize, under_way.len());
    for (read, _) in &under_way {
        env.answer(read);
    }
    let workers = env.dispatch.ledger().workers();
    assert!(workers.iter().all(|worker| worker.outstanding == 0 && worker.outstanding_work.is_zero()), "{workers:?}");
    assert_eq!(workers.iter().map(|worker| worker.dispatched).sum::<u64>(), u64::from(REQUEST_COUNT));
    assert!(workers.iter().all(|worker| worker.dispatched == worker.completed && worker.abandoned == 0), "{workers:?}");
    assert_eq!(env.counter(intf::DISPATCH_COUNTER_UNTRACKED), 0);
    assert_eq!(env.counter(intf::DISPATCH_COUNTER_UNMATCHED), 0);
}

fn start_env(workers: usize, policy: Policy) -> TestEnv {
    let mut options = options(policy);
    options.request_id = Some(RequestIdPosition { offset: 0, response_offset: 0, bytes: 4 });
    options.type_offset = 4;
    let kind = |number: u8, class| RequestType {
        value: [b't', b'y', b'p', b'e', number, 0, 0, 0],
        mask: [255, 255, 255, 255, 255, 0, 0, 0],
        class,
    };
    // Requests that match neither type have class 1, too.
    options.types = vec![kind(0, 0), kind(1, 1)];
    options.other_class = 1;
    let env = TestEnv::new(workers, &options);
    env.dispatch.set_expected_times(&TIMES);
    env
}

fn clients() -> Vec<UdpSocket> {
    (0..12).map(|_| client()).collect()
}

#[test]
fn jsq_equals_the_model() {
    skip_if!(missing_bpf_rights());
    for workers in [1, 3, 16, 64] {
        in_namespace(|| {
            let env = start_env(workers, Policy::ShortestQueue);
            env.dispatch.set_bounds(|workers| ClassBounds::with_reserved_cores(workers, 1, 0, 4, 0));
            assert_equals_model(&env, &mut JoinShortestQueue::unbounded(workers as u16), &clients());
        });
    }
}

#[test]
fn jlq_equals_the_model() {
    skip_if!(missing_bpf_rights());
    for workers in [2, 5, 64] {
        in_namespace(|| {
            let env = start_env(workers, Policy::LightestQueue);
            assert_equals_model(&env, &mut JoinLightestQueue::new(workers as u16), &clients());
        });
    }
}

#[test]
fn rr_equals_the_model() {
    skip_if!(missing_bpf_rights());
    in_namespace(|| assert_equals_model(&start_env(5, Policy::RoundRobin), &mut RoundRobinCore::new(5), &clients()));
}

#[test]
fn jbsrq_equals_the_model() {
    skip_if!(missing_bpf_rights());
    for (workers, reserved, bound, reserved_bound) in [(4, 1, 4, 0), (7, 2, 3, 1), (1, 1, 1, 0)] {
        in_namespace(|| {
            let env = start_env(workers, Policy::RankedQueue);
            let bounds = |workers| ClassBounds::with_reserved_cores(workers, 2, reserved, bound, reserved_bound);
            env.dispatch.set_bounds(bounds);
            let mut model = ClassBoundedShortestQueue::new(bounds(workers as u16));
            assert_equals_model(&env, &mut model, &clients());
            assert_eq!(env.counter(intf::DISPATCH_COUNTER_OVER_BOUND), model.over_bound());
            assert!(model.over_bound() > 0);
        });
    }
}

#[test]
fn random_selects_by_flow_and_reaches_all_workers() {
    skip_if!(missing_bpf_rights());
    in_namespace(|| {
        let env = TestEnv::new(4, &options(Policy::Random));
        let mut reached = [0; 4];
        for _ in 0..200 {
            let client = client();
            let slots = [0, 1].map(|number: u8| {
                env.send(&client, &[number]);
                env.read_one().slot
            });
            assert_eq!(slots[0], slots[1]);
            reached[slots[0] as usize] += 1;
        }
        assert!(reached.iter().all(|count| *count > 20), "{reached:?}");
    });
}

#[test]
fn request_above_the_bound_is_counted() {
    skip_if!(missing_bpf_rights());
    in_namespace(|| {
        let env = TestEnv::new(2, &options(Policy::ShortestQueue));
        env.dispatch.set_bounds(|workers| ClassBounds::with_reserved_cores(workers, 1, 0, 4, 0));
        let client = client();
        (0..8u8).for_each(|number| env.send(&client, &[number]));
        assert_eq!((env.outstanding(), env.counter(intf::DISPATCH_COUNTER_OVER_BOUND)), (vec![4, 4], 0));
        env.send(&client, &[8]);
        assert_eq!((env.outstanding(), env.counter(intf::DISPATCH_COUNTER_OVER_BOUND)), (vec![5, 4], 1));
    });
}
