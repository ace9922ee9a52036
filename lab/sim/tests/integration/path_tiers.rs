//! Tests of the whole path against theory, the server alone, and statements of Cheetah (NSDI'20, Sect. 5.2).

use coreward_sim::path::{CombinationOutcome, Config, run};
use coreward_sim::rpc;

fn run_combinations(config: &Config) -> Vec<CombinationOutcome> {
    run(config).unwrap().combinations
}

fn single_request_config() -> Config {
    Config { requests_per_connection: 1.0, policies: vec!["hash".to_owned()], ..Config::default() }
}

#[test]
fn one_core_has_the_mean_latency_of_m_m_1() {
    let config = Config { servers: 1, cores_per_server: 1, load: 0.7, seconds: 100.0, ..single_request_config() };
    for combination in run_combinations(&config) {
        let (mean, theory) = (combination.mean.mean, 1.0 / 0.3);
        assert!((mean / theory - 1.0).abs() < 0.02, "{}: {mean} against {theory}", combination.dispatch);
    }
}

#[test]
fn one_server_behind_a_load_balancer_equals_the_server_alone() {
    let latency = 0.35;
    let jsq: rpc::Policy = "jsq".parse().unwrap();
    let path_config = Config {
        servers: 1,
        cores_per_server: 16,
        interface_latency: latency,
        load: 0.8,
        dispatch_policies: vec![jsq.clone()],
        ..single_request_config()
    };
    let path_combinations = run_combinations(&Config { seconds: 5.0, ..path_config });
    let server_outcome =
        rpc::run(&rpc::Config { policy: jsq, interface_latency: latency, load: 0.8, ..rpc::Config::default() })
            .unwrap();
    for (path, alone) in
        [(path_combinations[0].mean, server_outcome.all.mean), (path_combinations[0].p99, server_outcome.all.p99)]
    {
        assert!((path.mean / alone - 1.0).abs() < 0.02, "{path:?} against {alone}");
    }
}

#[test]
fn requests_per_connection_and_load_are_as_configured() {
    let policies = vec!["rr".to_owned()];
    let config = Config {
        seconds: 30.0,
        seeds: vec![1],
        policies,
        dispatch_policies: vec![rpc::Policy::Rss],
        ..Config::default()
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
    let pool_config = Config {
        servers: 64,
        cores_per_server: 1,
        policies: ["hash", "rr", "awrr", "pow2"].map(str::to_owned).to_vec(),
        dispatch_policies: vec![rpc::Policy::Rss],
        report_interval_ms: 10.0,
        load: 0.6,
        seeds: vec![1, 2, 3],
        ..single_request_config()
    };
    let policy_p99s = |config: &Config| run_combinations(config).iter().map(|c| c.p99.median).collect::<Vec<_>>();
    // In Cheetah's Fig. 6, all requests need the same work.
    let equal_work_config =
        Config { service: "fixed".parse().unwrap(), unit_us: 6_000.0, seconds: 10.0, ..pool_config.clone() };
    let [hash, rr, ..] = policy_p99s(&equal_work_config)[..] else { panic!("four policies") };
    assert!(hash > 2.0 * rr, "hash {hash}, rr {rr}");
    // In Fig. 8, 10 % of the requests take 500 ms and the others 500 us.
    let skewed_work_config = Config {
        service: "bimodal:0.1:1000".parse().unwrap(),
        unit_us: 500.0,
        seconds: 80.0,
        report_interval_ms: 20.0,
        ..pool_config
    };
    let [hash, rr, awrr, pow2] = policy_p99s(&skewed_work_config)[..] else { panic!("four policies") };
    assert!(awrr < 0.7 * hash && pow2 < 0.7 * hash && rr > 1.2 * awrr, "{hash}, {rr}, {awrr}, {pow2}");
}

#[test]
fn path_results_do_not_depend_on_threads() {
    let config = Config { seconds: 3.0, seeds: vec![1, 2], load: 0.3, ..Config::default() };
    let run_with_threads = |threads| {
        let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
        pool.install(|| run(&config).unwrap())
    };
    assert_eq!(run_with_threads(1), run_with_threads(3));
}

#[test]
fn invalid_path_configurations_are_rejected() {
    let run_error = |config: Config| run(&config).unwrap_err().to_string();
    let default_config = Config::default;
    assert!(run_error(Config { servers: 0, ..default_config() }).contains("servers 0: expected 1 to 16384"));
    assert!(run_error(Config { load: 1.0, ..default_config() }).contains("load 1: expected less than 1"));
    assert!(
        run_error(Config { policies: vec!["crosrss".to_owned()], ..default_config() })
            .contains("did you mean crossrss")
    );
    assert!(run_error(Config { seconds: 0.5, ..default_config() }).contains("0.5 s: expected at least"));
    assert!(run_error(Config { request_gap: f64::NAN, ..default_config() }).contains("request-gap NaN"));
    let grouped_policies = vec!["dfcfs:3,3".parse().unwrap()];
    assert!(
        run_error(Config { dispatch_policies: grouped_policies, ..default_config() })
            .contains("its groups have 9 cores, the server has 4")
    );
}
