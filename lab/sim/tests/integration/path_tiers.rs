//! The complete path against theory, against the server alone, and against statements of Cheetah (NSDI'20, Sect. 5.2).

use coreward_sim::path::{Combination, Config, run};
use coreward_sim::rpc;

fn combinations(config: &Config) -> Vec<Combination> {
    run(config).unwrap().combinations
}

fn single_requests() -> Config {
    Config { requests_per_connection: 1.0, policies: vec!["hash".to_owned()], ..Config::default() }
}

#[test]
fn one_server_of_one_core_is_m_m_1() {
    let config = Config { servers: 1, cores: 1, load: 0.7, seconds: 100.0, ..single_requests() };
    for combination in combinations(&config) {
        let (mean, theory) = (combination.mean.mean, 1.0 / 0.3);
        assert!((mean / theory - 1.0).abs() < 0.02, "{}: {mean} against {theory}", combination.dispatch);
    }
}

#[test]
fn one_server_behind_a_load_balancer_is_the_server_alone() {
    let latency = 0.35;
    let jsq: rpc::Policy = "jsq".parse().unwrap();
    let path =
        Config { servers: 1, cores: 16, latency, load: 0.8, dispatch_policies: vec![jsq.clone()], ..single_requests() };
    let path = combinations(&Config { seconds: 5.0, ..path });
    let alone = rpc::run(&rpc::Config { policy: jsq, latency, load: 0.8, ..rpc::Config::default() }).unwrap();
    for (path, alone) in [(path[0].mean, alone.all.mean), (path[0].p99, alone.all.p99)] {
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
    // 0.7 of 16 cores and requests of 100 us give 112,000 requests per second.
    let expected = 112_000.0 * 30.0;
    assert!((outcome.requests as f64 / expected - 1.0).abs() < 0.03, "{} of {expected}", outcome.requests);
}

#[test]
fn round_robin_beats_hashing_and_feedback_beats_round_robin() {
    let pool = Config {
        servers: 64,
        cores: 1,
        policies: ["hash", "rr", "awrr", "pow2"].map(str::to_owned).to_vec(),
        dispatch_policies: vec![rpc::Policy::Rss],
        report_ms: 10.0,
        load: 0.6,
        seeds: vec![1, 2, 3],
        ..single_requests()
    };
    let p99 = |config: &Config| combinations(config).iter().map(|c| c.p99.median).collect::<Vec<_>>();
    // Cheetah, Fig. 6: all requests need the same work.
    let equal = Config { service: "fixed".parse().unwrap(), unit_us: 6_000.0, seconds: 10.0, ..pool.clone() };
    let [hash, rr, ..] = p99(&equal)[..] else { panic!("four policies") };
    assert!(hash > 2.0 * rr, "hash {hash}, rr {rr}");
    // Fig. 8: 10 % of the requests take 500 ms, the others 500 us.
    let skewed =
        Config { service: "bimodal:0.1:1000".parse().unwrap(), unit_us: 500.0, seconds: 80.0, report_ms: 20.0, ..pool };
    let [hash, rr, awrr, pow2] = p99(&skewed)[..] else { panic!("four policies") };
    assert!(awrr < 0.7 * hash && pow2 < 0.7 * hash && rr > 1.2 * awrr, "{hash}, {rr}, {awrr}, {pow2}");
}

#[test]
fn path_results_do_not_depend_on_threads() {
    let config = Config { seconds: 3.0, seeds: vec![1, 2], load: 0.3, ..Config::default() };
    let on = |threads| {
        let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
        pool.install(|| run(&config).unwrap())
    };
    assert_eq!(on(1), on(3));
}

#[test]
fn invalid_paths_are_rejected() {
    let error = |config: Config| run(&config).unwrap_err().to_string();
    let default = Config::default;
    assert!(error(Config { servers: 0, ..default() }).contains("servers 0: expected 1 to 16384"));
    assert!(error(Config { load: 1.0, ..default() }).contains("load 1: expected less than 1"));
    assert!(error(Config { policies: vec!["crosrss".to_owned()], ..default() }).contains("did you mean crossrss"));
    assert!(error(Config { seconds: 0.5, ..default() }).contains("0.5 s: expected at least"));
    assert!(error(Config { request_gap: f64::NAN, ..default() }).contains("request-gap NaN"));
    let grouped = vec!["dfcfs:3,3".parse().unwrap()];
    assert!(
        error(Config { dispatch_policies: grouped, ..default() }).contains("its groups have 9 cores, the server has 4")
    );
}
