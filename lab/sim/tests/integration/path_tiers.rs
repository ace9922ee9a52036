//! Tests of the whole path against theory, the server alone, and statements of Cheetah (NSDI'20, Sect. 5.2).

use coreward_sim::path::{PathSimulationConfig, PolicyCombinationOutcome, run};
use coreward_sim::rpc;

fn simulate_policy_combinations(config: &PathSimulationConfig) -> Vec<PolicyCombinationOutcome> {
    run(config).unwrap().combinations
}

fn build_single_request_config() -> PathSimulationConfig {
    PathSimulationConfig {
        requests_per_connection: 1.0,
        policies: vec!["hash".to_owned()],
        ..PathSimulationConfig::default()
    }
}

#[test]
fn one_core_has_the_mean_latency_of_m_m_1() {
    let config = PathSimulationConfig {
        server_count: 1,
        cores_per_server: 1,
        offered_load: 0.7,
        connection_arrival_seconds: 100.0,
        ..build_single_request_config()
    };
    for combination in simulate_policy_combinations(&config) {
        let (mean, theory) = (combination.mean.mean, 1.0 / 0.3);
        assert!((mean / theory - 1.0).abs() < 0.02, "{}: {mean} against {theory}", combination.dispatch);
    }
}

#[test]
fn lb_with_one_server_matches_server_alone() {
    let latency = 0.35;
    let jsq: rpc::CoreSelectionPolicy = "jsq".parse().unwrap();
    let path_config = PathSimulationConfig {
        server_count: 1,
        cores_per_server: 16,
        interface_latency: latency,
        offered_load: 0.8,
        dispatch_policies: vec![jsq.clone()],
        ..build_single_request_config()
    };
    let path_combinations =
        simulate_policy_combinations(&PathSimulationConfig { connection_arrival_seconds: 5.0, ..path_config });
    let server_outcome = rpc::run(&rpc::RpcSimulationConfig {
        policy: jsq,
        interface_latency: latency,
        offered_load: 0.8,
        ..rpc::RpcSimulationConfig::default()
    })
    .unwrap();
    for (path, alone) in [
        (path_combinations[0].mean, server_outcome.overall_latency.mean),
        (path_combinations[0].p99, server_outcome.overall_latency.p99),
    ] {
        assert!((path.mean / alone - 1.0).abs() < 0.02, "{path:?} against {alone}");
    }
}

#[test]
fn requests_per_connection_and_load_are_as_configured() {
    let policies = vec!["rr".to_owned()];
    let config = PathSimulationConfig {
        connection_arrival_seconds: 30.0,
        seeds: vec![1],
        policies,
        dispatch_policies: vec![rpc::CoreSelectionPolicy::Rss],
        ..PathSimulationConfig::default()
    };
    let outcome = run(&config).unwrap();
    // At a load of 0.7, 16 cores and requests of 100 us yield 112,000 requests per second.
    let expected_requests = 112_000.0 * 30.0;
    assert!(
        (outcome.requests as f64 / expected_requests - 1.0).abs() < 0.03,
        "{} of {expected_requests}",
        outcome.requests
    );
}

#[test]
fn round_robin_beats_hashing_and_feedback_beats_round_robin() {
    let pool_config = PathSimulationConfig {
        server_count: 64,
        cores_per_server: 1,
        policies: ["hash", "rr", "awrr", "pow2"].map(str::to_owned).to_vec(),
        dispatch_policies: vec![rpc::CoreSelectionPolicy::Rss],
        report_interval_ms: 10.0,
        offered_load: 0.6,
        seeds: vec![1, 2, 3],
        ..build_single_request_config()
    };
    let simulate_policy_p99s = |config: &PathSimulationConfig| {
        simulate_policy_combinations(config).iter().map(|c| c.p99.median).collect::<Vec<_>>()
    };
    // In Cheetah's Fig. 6, all requests need the same work.
    let equal_work_config = PathSimulationConfig {
        service_times: "fixed".parse().unwrap(),
        unit_us: 6_000.0,
        connection_arrival_seconds: 10.0,
        ..pool_config.clone()
    };
    let [hash, rr, ..] = simulate_policy_p99s(&equal_work_config)[..] else { panic!("four policies") };
    assert!(hash > 2.0 * rr, "hash {hash}, rr {rr}");
    // In Fig. 8, 10 % of the requests take 500 ms and the others 500 us.
    let skewed_work_config = PathSimulationConfig {
        service_times: "bimodal:0.1:1000".parse().unwrap(),
        unit_us: 500.0,
        connection_arrival_seconds: 80.0,
        report_interval_ms: 20.0,
        ..pool_config
    };
    let [hash, rr, awrr, pow2] = simulate_policy_p99s(&skewed_work_config)[..] else { panic!("four policies") };
    assert!(awrr < 0.7 * hash && pow2 < 0.7 * hash && rr > 1.2 * awrr, "{hash}, {rr}, {awrr}, {pow2}");
}

#[test]
fn path_results_do_not_depend_on_threads() {
    let config = PathSimulationConfig {
        connection_arrival_seconds: 3.0,
        seeds: vec![1, 2],
        offered_load: 0.3,
        ..PathSimulationConfig::default()
    };
    let run_with_threads = |threads| {
        let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
        pool.install(|| run(&config).unwrap())
    };
    assert_eq!(run_with_threads(1), run_with_threads(3));
}

#[test]
fn invalid_path_configurations_are_rejected() {
    let config_error_text = |config: PathSimulationConfig| run(&config).unwrap_err().to_string();
    let default_config = PathSimulationConfig::default;
    assert!(
        config_error_text(PathSimulationConfig { server_count: 0, ..default_config() })
            .contains("servers 0: expected 1 to 16384")
    );
    assert!(
        config_error_text(PathSimulationConfig { offered_load: 1.0, ..default_config() })
            .contains("load 1: expected less than 1")
    );
    assert!(
        config_error_text(PathSimulationConfig { policies: vec!["crosrss".to_owned()], ..default_config() })
            .contains("did you mean crossrss")
    );
    assert!(
        config_error_text(PathSimulationConfig { connection_arrival_seconds: 0.5, ..default_config() })
            .contains("0.5 s: expected at least")
    );
    assert!(
        config_error_text(PathSimulationConfig { mean_request_gap: f64::NAN, ..default_config() })
            .contains("request-gap NaN")
    );
    let grouped_policies = vec!["dfcfs:3,3".parse().unwrap()];
    assert!(
        config_error_text(PathSimulationConfig { dispatch_policies: grouped_policies, ..default_config() })
            .contains("its groups have 9 cores, the server has 4")
    );
}
