//! Tests of every policy by name, and of RingLeader's core assignments (NSDI'23, Sect. 4.4).

use coreward_model::rss::IndirectionTable;
use coreward_sim::rpc::server::{
    QueueingServer, ResponseSink, ServerSpec, ServerVisitor, SimulatedRequest, SimulatedResponse,
};
use coreward_sim::rpc::{CoreSelectionPolicy, RpcSimulationConfig, RpcSimulationOutcome, run};
use proptest::prelude::*;

#[derive(Default)]
struct CollectedResponses(Vec<SimulatedResponse>);

impl ResponseSink for CollectedResponses {
    fn handle_response(&mut self, response: &SimulatedResponse) {
        self.0.push(*response);
    }
}

/// Visitor that passes the requests to the server, and returns the responses and each core's busy time.
struct RequestServingVisitor<'a>(&'a [SimulatedRequest]);

impl ServerVisitor<CollectedResponses> for RequestServingVisitor<'_> {
    type Output = (Vec<SimulatedResponse>, Vec<u64>);

    fn visit_server(self, mut server: impl QueueingServer<CollectedResponses>) -> Self::Output {
        let mut responses = CollectedResponses::default();
        for request in self.0 {
            server.advance(request.arrived_at, &mut responses);
            server.add_request(*request);
        }
        server.advance(u64::MAX - 1, &mut responses);
        assert_eq!(server.outstanding_request_count(), 0);
        let end_time = responses.0.last().map_or(0, |last| last.departed_at);
        let core_busy_times = server.core_busy_times(end_time);
        (responses.0, core_busy_times)
    }
}

/// Policies without overhead, under which cores are busy only with the work of requests.
const POLICIES_WITHOUT_OVERHEAD: [&str; 15] = [
    "cfcfs",
    "random",
    "rr",
    "jsq",
    "jlq",
    "jbsq:2",
    "jbsrq:depth=2,quantum=0.01",
    "jbsrq:priorities=none",
    "jbsrq:assignment=dedicated,interval=0.01",
    "jbsrq:assignment=hybrid,interval=0.01",
    "rss",
    "rss-rebalanced:0.02",
    "work-stealing:0",
    "ps",
    "dfcfs:2,2",
];

/// Resolution of the drawn times (ticks), 1/128 of the unit of service time. It is so small that arrivals are close
/// together, and quanta and intervals take effect.
const TIME_STEP_TICKS: u64 = 1 << 17;

proptest! {
    #[test]
    fn every_request_is_answered_once_and_no_work_is_lost(
        drawn_requests in prop::collection::vec((0u64..4, 1u64..20, any::<u32>(), 0u8..2), 1..80),
        interface_latency_steps in 0u64..3,
    ) {
        let mut arrived_at = 0;
        let mut requests: Vec<SimulatedRequest> = Vec::new();
        for (gap_steps, work_steps, request_hash, class_index) in drawn_requests {
            arrived_at += gap_steps * TIME_STEP_TICKS;
            let connection_number = requests.len() as u32;
            let (service_time, service) = (work_steps * TIME_STEP_TICKS, class_index);
            requests.push(SimulatedRequest {
                arrived_at, service_time, request_hash, flow_hash: request_hash, connection_number, class_index,
                service,
            });
        }
        let table = IndirectionTable::draw_balanced_entries(1, 16, 4).unwrap();
        for name in POLICIES_WITHOUT_OVERHEAD {
            let policy: CoreSelectionPolicy = name.parse().unwrap();
            let interface_latency = interface_latency_steps * TIME_STEP_TICKS;
            let spec =
                ServerSpec {
                    policy: &policy, core_count: 4, class_count: 2, interface_latency, indirection_table: &table,
                };
            let priorities = policy.class_priorities();
            let requests: Vec<SimulatedRequest> =
                requests
                    .iter()
                    .map(|r| SimulatedRequest { service: priorities.service_of_class(r.class_index), ..*r })
                    .collect();
            let (responses, core_busy_times) = spec.build_and_visit(RequestServingVisitor(&requests));
            prop_assert_eq!(responses.len(), requests.len(), "{}", name);
            prop_assert!(responses.is_sorted_by_key(|response| response.departed_at), "{}", name);
            let mut answered_connections: Vec<u32> =
                responses.iter().map(|response| response.request.connection_number).collect();
            answered_connections.sort_unstable();
            prop_assert!((0..).zip(&answered_connections).all(|(index, connection)| index == *connection), "{}", name);
            for SimulatedResponse { departed_at, request } in &responses {
                let earliest_departure = request.arrived_at + request.service_time + 2 * interface_latency;
                prop_assert!(*departed_at >= earliest_departure, "{}", name);
            }
            let total_busy_time: u64 = core_busy_times.iter().sum();
            let total_work: u64 = requests.iter().map(|request| request.service_time).sum();
            // If cores are shared, the total time is divided by the number of cores and rounded.
            prop_assert!(total_busy_time.abs_diff(total_work) < 4 * 80, "{}: busy for {}, work {}", name,
                total_busy_time, total_work);
        }
    }
}

fn simulate_policy(policy: &str, cores: u16, service: &str, load: f64) -> RpcSimulationOutcome {
    let (policy, service) = (policy.parse().unwrap(), service.parse().unwrap());
    run(&RpcSimulationConfig {
        policy,
        cores,
        service_times: service,
        offered_load: load,
        request_count: 1_000_000,
        ..RpcSimulationConfig::default()
    })
    .unwrap()
}

/// Simulates a policy, and returns the mean latency of the short requests, followed by that of the long ones.
fn simulate_class_mean_latencies(policy: &str, service: &str, load: f64) -> [f64; 2] {
    let outcome = simulate_policy(policy, 16, service, load);
    [0, 1].map(|class| outcome.class_latencies[class].quantiles.mean)
}

#[test]
fn dedicated_cores_behave_like_two_separate_servers() {
    // All cores are reserved, 8 for each service. 90 % of the requests are short (1) and 10 % are long (9). Each class
    // therefore needs 0.5 of 8 cores.
    let class_means = simulate_class_mean_latencies("jbsrq:assignment=dedicated,reserved=8", "bimodal:0.1:9", 0.5);
    let separate_server_mean = simulate_policy("jbsq:4", 8, "fixed", 0.5).overall_latency.mean;
    assert!(
        (class_means[0] / separate_server_mean - 1.0).abs() < 0.01,
        "{class_means:?}, alone {separate_server_mean}"
    );
    assert!(
        (class_means[1] / (9.0 * separate_server_mean) - 1.0).abs() < 0.02,
        "{class_means:?}, alone {separate_server_mean}"
    );
}

#[test]
fn allocator_core_does_not_change_latency_at_worker_cores() {
    // All 16 worker cores are reserved, 8 for each service. Core 17 belongs to the allocator.
    let outcome_without_allocator_core =
        simulate_policy("jbsrq:assignment=dedicated,reserved=8", 16, "bimodal:0.1:9", 0.5);
    let policy = "jbsrq:assignment=dedicated,reserved=8,allocator=core";
    let outcome_with_allocator_core = simulate_policy(policy, 17, "bimodal:0.1:9", 0.5 * 16.0 / 17.0);
    assert_eq!(outcome_without_allocator_core.class_latencies, outcome_with_allocator_core.class_latencies);
    let build_config = |load| RpcSimulationConfig {
        policy: "jbsrq:assignment=dedicated,allocator=core".parse().unwrap(),
        service_times: "bimodal:0.1:9".parse().unwrap(),
        offered_load: load,
        ..RpcSimulationConfig::default()
    };
    let error = run(&build_config(0.95)).unwrap_err().to_string();
    assert!(error.contains("load 0.95: expected less than 0.9375"), "{error}");
}

#[test]
fn load_hints_move_cores_to_the_loaded_service() {
    // The long requests need 9.3 cores, which is more than half of 16.
    let service = "bimodal:0.2:20";
    let fixed_core_latencies = simulate_class_mean_latencies("jbsrq:assignment=dedicated,reserved=8", service, 0.7);
    let [share, dedicated, hybrid] = ["share", "dedicated", "hybrid"]
        .map(|name| simulate_class_mean_latencies(&format!("jbsrq:assignment={name}"), service, 0.7));
    assert!(fixed_core_latencies[1] > 1_000.0, "8 cores are too few: {fixed_core_latencies:?}");
    for class_means in [share, dedicated, hybrid] {
        assert!(class_means[1] < 60.0 && class_means[0] < 3.0, "{class_means:?}");
    }
}

#[test]
fn priorities_keep_short_requests_from_waiting_behind_long_ones() {
    // In RingLeader's Bimodal(95-5, 5-100), both the unit and the quantum are 5 us.
    let simulate_short_p99 =
        |policy| simulate_policy(policy, 16, "bimodal:0.05:20", 0.7).class_latencies[0].quantiles.p99;
    let (jbsq, jbsrq) = (simulate_short_p99("jbsq:4"), simulate_short_p99("jbsrq:quantum=1"));
    assert!(jbsrq < 3.0 && jbsq > 3.0 * jbsrq, "jbsq {jbsq}, jbsrq {jbsrq}");
}

#[test]
fn bounded_queue_accepts_any_load_and_drops_excess_requests() {
    let policy: CoreSelectionPolicy = "jsq".parse().unwrap();
    let config = RpcSimulationConfig {
        policy,
        cores: 1,
        offered_load: 2.0,
        max_requests_in_server: Some(1),
        ..RpcSimulationConfig::default()
    };
    // The server holds only the request in service. Erlang's B formula for one server yields 2 / (1 + 2).
    let outcome = run(&config).unwrap();
    assert!((outcome.dropped_request_pct - 200.0 / 3.0).abs() < 0.3, "{}", outcome.dropped_request_pct);
    assert!((outcome.overall_latency.mean - 1.0).abs() < 0.01, "{:?}", outcome.overall_latency);
    let error = run(&RpcSimulationConfig { max_requests_in_server: None, ..config }).unwrap_err().to_string();
    assert!(error.starts_with("load 2: expected less than 1, which is what jsq can carry"), "{error}");
}

#[test]
fn latency_windows_cover_run_after_warm_up() {
    let outcome = run(&RpcSimulationConfig {
        latency_window_length: Some(500.0),
        request_count: 200_000,
        ..RpcSimulationConfig::default()
    })
    .unwrap();
    assert_eq!(outcome.window_latencies.iter().map(|window| window.responses).sum::<u64>(), 180_000);
    assert!(outcome.window_latencies.is_sorted_by(|a, b| a.from + 500.0 <= b.from));
    let mean_over_windows = |to_value: fn(&coreward_sim::rpc::WindowLatency) -> f64| {
        outcome.window_latencies.iter().map(to_value).sum::<f64>() / outcome.window_latencies.len() as f64
    };
    assert!((mean_over_windows(|window| window.quantiles.mean) / outcome.overall_latency.mean - 1.0).abs() < 0.02);
}

#[test]
fn invalid_configurations_are_rejected() {
    let config_error_text = |config: RpcSimulationConfig| run(&config).unwrap_err().to_string();
    let config_with_policy =
        |policy: &str| RpcSimulationConfig { policy: policy.parse().unwrap(), ..RpcSimulationConfig::default() };
    assert_eq!(
        config_error_text(RpcSimulationConfig { cores: 0, ..config_with_policy("jsq") }),
        "0 cores: expected 1 to 65535"
    );
    assert_eq!(
        config_error_text(RpcSimulationConfig { offered_load: f64::NAN, ..config_with_policy("jsq") }),
        "load NaN: expected a number above 0"
    );
    assert!(
        config_error_text(RpcSimulationConfig { interface_latency: -1.0, ..config_with_policy("jsq") })
            .starts_with("latency -1: expected a number from 0")
    );
    assert!(
        config_error_text(RpcSimulationConfig { interface_latency: 0.5, ..config_with_policy("cfcfs") })
            .contains("expected less than 0.5, which is what cfcfs")
    );
    assert!(
        config_error_text(RpcSimulationConfig { request_count: 5, ..config_with_policy("jsq") })
            .starts_with("5 requests: expected 10 to")
    );
    assert!(
        config_error_text(RpcSimulationConfig { latency_window_length: Some(0.0), ..config_with_policy("jsq") })
            .starts_with("window 0: expected")
    );
    // Most of the 300 cores have 2 buckets out of 512, so each receives 1/256 of all requests.
    assert!(
        config_error_text(RpcSimulationConfig { cores: 300, offered_load: 0.9, ..config_with_policy("rss") })
            .contains("expected less than 0.853")
    );
    assert!(config_error_text(config_with_policy("dfcfs:3,4")).contains("its groups have 12 cores, the server has 16"));
    assert!(
        config_error_text(config_with_policy("jbsrq:assignment=hybrid"))
            .contains("1 services on 16 cores: expected two services")
    );
    let two_core_config = RpcSimulationConfig {
        service_times: "bimodal:0.1:9".parse().unwrap(),
        cores: 2,
        ..config_with_policy("jbsrq:assignment=dedicated")
    };
    run(&two_core_config).unwrap();
    let policy: CoreSelectionPolicy = "jbsrq:assignment=dedicated,allocator=core".parse().unwrap();
    assert!(
        config_error_text(RpcSimulationConfig { policy, ..two_core_config })
            .contains("2 services on 1 cores: expected two services")
    );
    assert!(
        config_error_text(config_with_policy("jbsrq:allocator=core"))
            .ends_with("expected assignment=dedicated or hybrid")
    );
}
