//! Tests of queues whose exact solution is known. The theory must lie in the confidence interval of the simulated
//! values, which must be narrow enough to exclude a wrong model.

use coreward_sim::par_map_ordered;
use coreward_sim::rpc::{CoreSelectionPolicy, RpcSimulationConfig, RpcSimulationOutcome, ServiceTimeDistribution, run};

/// 99.95 % quantile of Student's t distribution with 9 degrees of freedom, for ten seeds and 99.9 % confidence. The
/// probability that all comparisons in these tests (about 24) hold is then 97 %.
const STUDENT_T_QUANTILE_9_DF: f64 = 4.781;

fn simulate_seeds(policy: &str, cores: u16, service: &str, latency: f64, load: f64) -> Vec<RpcSimulationOutcome> {
    let policy: CoreSelectionPolicy = policy.parse().unwrap();
    let service: ServiceTimeDistribution = service.parse().unwrap();
    let config = RpcSimulationConfig {
        policy,
        cores,
        service_times: service,
        interface_latency: latency,
        offered_load: load,
        request_count: 800_000,
        ..RpcSimulationConfig::default()
    };
    let seeds: Vec<u64> = (1..=10).collect();
    par_map_ordered(&seeds, |seed| run(&RpcSimulationConfig { seed: *seed, ..config.clone() }).unwrap())
}

/// Asserts that `theory` is in the 99.9 % confidence interval of `measure` over `outcomes`, and that half of the
/// interval's width is below `max_relative_width` times `theory`.
fn assert_outcomes_match_theory(
    outcomes: &[RpcSimulationOutcome],
    measure: impl Fn(&RpcSimulationOutcome) -> f64,
    theory: f64,
    max_relative_width: f64,
) {
    let measured_values: Vec<f64> = outcomes.iter().map(measure).collect();
    let value_count = measured_values.len() as f64;
    let mean = measured_values.iter().sum::<f64>() / value_count;
    let variance = measured_values.iter().map(|value| (value - mean).powi(2)).sum::<f64>() / (value_count - 1.0);
    let half_width = STUDENT_T_QUANTILE_9_DF * (variance / value_count).sqrt();
    assert!((mean - theory).abs() <= half_width, "{theory} is not in {mean} +- {half_width}");
    assert!(half_width <= max_relative_width * theory, "{mean} +- {half_width} proves nothing");
}

#[test]
fn m_m_1_sojourn_times_are_exponential() {
    let outcomes = simulate_seeds("jsq", 1, "exp", 0.0, 0.8);
    let mean = 1.0 / (1.0 - 0.8);
    assert_outcomes_match_theory(&outcomes, |o| o.overall_latency.mean, mean, 0.03);
    assert_outcomes_match_theory(&outcomes, |o| o.overall_latency.p50, mean * 2f64.ln(), 0.03);
    assert_outcomes_match_theory(&outcomes, |o| o.overall_latency.p90, mean * 10f64.ln(), 0.03);
    assert_outcomes_match_theory(&outcomes, |o| o.overall_latency.p99, mean * 100f64.ln(), 0.06);
}

/// Returns the mean sojourn time in M/M/c by Erlang's C formula, with mean service time 1.
fn m_m_c_mean_sojourn_time(cores: u16, load: f64) -> f64 {
    let offered_load = load * f64::from(cores);
    let mut series_term = 1.0;
    let mut series_sum = 0.0;
    for n in 0..cores {
        series_sum += series_term;
        series_term *= offered_load / f64::from(n + 1);
    }
    let queued_term = series_term / (1.0 - load);
    1.0 + queued_term / (series_sum + queued_term) / (f64::from(cores) * (1.0 - load))
}

#[test]
fn one_queue_for_sixteen_cores_matches_m_m_16() {
    assert!((m_m_c_mean_sojourn_time(1, 0.8) - 5.0).abs() < 1e-9);
    for policy in ["cfcfs", "dfcfs:1,16", "work-stealing:0", "ps"] {
        assert_outcomes_match_theory(
            &simulate_seeds(policy, 16, "exp", 0.0, 0.9),
            |o| o.overall_latency.mean,
            m_m_c_mean_sojourn_time(16, 0.9),
            0.015,
        );
    }
    assert_outcomes_match_theory(
        &simulate_seeds("dfcfs:4,4", 16, "exp", 0.0, 0.9),
        |o| o.overall_latency.mean,
        m_m_c_mean_sojourn_time(4, 0.9),
        0.04,
    );
}

#[test]
fn random_dispatch_matches_m_m_1_at_every_core() {
    let interface_latency = 0.25;
    let theoretical_mean = 1.0 / 0.3 + 2.0 * interface_latency;
    for policy in ["random", "rss"] {
        assert_outcomes_match_theory(
            &simulate_seeds(policy, 16, "exp", interface_latency, 0.7),
            |o| o.overall_latency.mean,
            theoretical_mean,
            0.02,
        );
    }
}

#[test]
fn fixed_service_times_match_m_d_1() {
    assert_outcomes_match_theory(
        &simulate_seeds("rr", 1, "fixed", 0.0, 0.8),
        |o| o.overall_latency.mean,
        1.0 + 0.8 / (2.0 * 0.2),
        0.02,
    );
}

#[test]
fn fifo_queue_matches_m_g_1() {
    // By Pollaczek and Khinchine, the mean wait is lambda E[S^2] / (2 (1 - rho)). Here E[S] = 1.4, E[S^2] = 0.9 + 2.5.
    let mean_wait = 0.7 / 1.4 * 3.4 / (2.0 * 0.3);
    let outcomes = simulate_seeds("jlq", 1, "bimodal:0.1:5", 0.0, 0.7);
    assert_outcomes_match_theory(&outcomes, |o| o.class_latencies[0].quantiles.mean, 1.0 + mean_wait, 0.03);
    assert_outcomes_match_theory(&outcomes, |o| o.class_latencies[1].quantiles.mean, 5.0 + mean_wait, 0.03);
}

#[test]
fn m_g_1_processor_sharing_slows_every_class_alike() {
    let outcomes = simulate_seeds("ps", 1, "bimodal:0.1:5", 0.0, 0.8);
    assert_outcomes_match_theory(&outcomes, |o| o.overall_latency.mean, 1.4 / 0.2, 0.03);
    assert_outcomes_match_theory(&outcomes, |o| o.class_latencies[0].quantiles.mean, 1.0 / 0.2, 0.03);
    assert_outcomes_match_theory(&outcomes, |o| o.class_latencies[1].quantiles.mean, 5.0 / 0.2, 0.03);
}

#[test]
fn cfcfs_idle_time_lengthens_service_in_m_d_1() {
    let (interface_latency, load) = (0.25, 0.5);
    let (service_time, utilisation) = (1.0 + 2.0 * interface_latency, load * (1.0 + 2.0 * interface_latency));
    let theoretical_mean = service_time * (1.0 + utilisation / (2.0 * (1.0 - utilisation)));
    assert_outcomes_match_theory(
        &simulate_seeds("cfcfs", 1, "fixed", interface_latency, load),
        |o| o.overall_latency.mean,
        theoretical_mean,
        0.02,
    );
}

#[test]
fn priorities_follow_theory_without_and_with_preemption() {
    // In M/G/1 with two classes and rho 0.7, 90 % of requests take 1 and 10 % take 5. Class 1 has rho_1 = 0.45.
    let arrival_rate = 0.7 / 1.4;
    let (rho_1, rho) = (arrival_rate * 0.9, 0.7);
    // By Cobham (1954), without preemption, class 1 waits for R / (1 - rho_1), where R is the residual work. Class 2
    // waits for R / ((1 - rho_1)(1 - rho)).
    let residual_work = arrival_rate * 3.4 / 2.0;
    let outcomes_without_preemption = simulate_seeds("jbsrq:depth=65535,quantum=1000000", 1, "bimodal:0.1:5", 0.0, 0.7);
    assert_outcomes_match_theory(
        &outcomes_without_preemption,
        |o| o.class_latencies[0].quantiles.mean,
        1.0 + residual_work / (1.0 - rho_1),
        0.02,
    );
    assert_outcomes_match_theory(
        &outcomes_without_preemption,
        |o| o.class_latencies[1].quantiles.mean,
        5.0 + residual_work / ((1.0 - rho_1) * (1.0 - rho)),
        0.03,
    );
    // With preemption, class 1 is an M/D/1 alone, and class 2 takes S / (1 - rho_1) + R / ((1 - rho_1)(1 - rho)).
    let outcomes_with_preemption = simulate_seeds("jbsrq:depth=65535,quantum=0.001", 1, "bimodal:0.1:5", 0.0, 0.7);
    assert_outcomes_match_theory(
        &outcomes_with_preemption,
        |o| o.class_latencies[0].quantiles.mean,
        1.0 + rho_1 / (2.0 * (1.0 - rho_1)),
        0.01,
    );
    let long_class_mean = 5.0 / (1.0 - rho_1) + residual_work / ((1.0 - rho_1) * (1.0 - rho));
    assert_outcomes_match_theory(
        &outcomes_with_preemption,
        |o| o.class_latencies[1].quantiles.mean,
        long_class_mean,
        0.03,
    );
}
