//! Tests of Turbo's statements (HPCA'23) that the simulator supports, with fewer requests than in the figures.

use coreward_sim::rpc::{PeakLoadSearchConfig, RpcSimulationConfig, find_peak_load, run};

/// Latency between NIC and cores (multiples of the service time): 550 ns for requests of 2 us (Turbo, HPCA'23, Sect.
/// VII-D).
const INTERFACE_LATENCY_SERVICE_TIMES: f64 = 0.275;

fn find_policy_peak_load(policy: &str, cores: u16, service: &str, latency: f64, slo: f64) -> f64 {
    let (policy, service) = (policy.parse().unwrap(), service.parse().unwrap());
    let config = RpcSimulationConfig {
        policy,
        cores,
        service_times: service,
        interface_latency: latency,
        request_count: 200_000,
        ..RpcSimulationConfig::default()
    };
    find_peak_load(&PeakLoadSearchConfig {
        simulation_config: config,
        latency_bound_in_slo_units: slo,
        seeds: 1..=3,
        bisection_steps: 9,
        ..PeakLoadSearchConfig::default()
    })
    .unwrap()
    .peak_load
}

#[test]
fn jsq_peak_load_exceeds_that_of_other_policies_as_in_turbo_figure_2b() {
    // There are 16 cores. 10 % of requests take 5 times as long. The latency is 25 % of the mean service time of 1.4.
    let search_peak_load = |policy, slo| find_policy_peak_load(policy, 16, "bimodal:0.1:5", 0.35, slo);
    for (slo, published_ratios) in [(30.0, [1.5, 1.2, 1.1]), (10.0, [1.5, 2.0, 1.4])] {
        let jsq_peak_load = search_peak_load("jsq", slo);
        for (policy, published_ratio) in ["cfcfs", "random", "rr"].into_iter().zip(published_ratios) {
            let ratio = jsq_peak_load / search_peak_load(policy, slo);
            assert!(
                (ratio / published_ratio - 1.0).abs() < 0.1,
                "SLO {slo}: jsq over {policy} {ratio:.3}, {published_ratio}"
            );
        }
    }
}

#[test]
fn rebalanced_rss_has_a_longer_tail_than_jsq_as_in_turbo_figure_11() {
    let simulate_policy_p99 = |policy: &str| {
        let policy = policy.parse().unwrap();
        let request_count = 1_000_000;
        run(&RpcSimulationConfig {
            policy,
            cores: 12,
            interface_latency: INTERFACE_LATENCY_SERVICE_TIMES,
            offered_load: 0.8,
            request_count,
            ..RpcSimulationConfig::default()
        })
        .unwrap()
        .overall_latency
        .p99
    };
    let [jsq, rr, random] = ["jsq", "rr", "random"].map(simulate_policy_p99);
    // The intervals are 100 us and 1 ms, in service times of 2 us.
    let [short_interval_p99, long_interval_p99] = ["rss-rebalanced:50", "rss-rebalanced:500"].map(simulate_policy_p99);
    assert!(
        (long_interval_p99 / random - 1.0).abs() < 0.1,
        "1 ms is like random: {long_interval_p99} against {random}"
    );
    assert!(
        (2.5..3.0).contains(&(short_interval_p99 / jsq)),
        "100 us has almost three times jsq's tail: {}",
        short_interval_p99 / jsq
    );
    assert!(
        rr < short_interval_p99 && short_interval_p99 < long_interval_p99,
        "rr is below both: {rr}, {short_interval_p99}, {long_interval_p99}"
    );
}

#[test]
fn jsq_and_jlq_are_near_processor_sharing_as_in_turbo_figure_12() {
    let search_peak_load =
        |policy, service| find_policy_peak_load(policy, 16, service, INTERFACE_LATENCY_SERVICE_TIMES, 30.0);
    for (service, jsq_tolerance, jlq_tolerance) in
        [("bimodal:0.4:20", 0.20, 0.11), ("bimodal:0.2:20", 0.20, 0.11), ("bimodal:0.2:8", 0.05, 0.05)]
    {
        let [jsq, jlq, ps] = ["jsq", "jlq", "ps"].map(|policy| search_peak_load(policy, service));
        assert!(jsq >= (1.0 - jsq_tolerance) * ps, "{service}: jsq {jsq}, ps {ps}");
        assert!(jlq >= (1.0 - jlq_tolerance) * ps && jlq >= jsq, "{service}: jlq {jlq}, jsq {jsq}, ps {ps}");
    }
}
