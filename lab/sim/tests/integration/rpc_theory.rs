//! Queues with known exact solutions. The theory must lie in the confidence interval of the simulated values, and the
//! interval must be narrow enough to exclude a wrong model.

use coreward_sim::par_map_ordered;
use coreward_sim::rpc::{Config, Outcome, Policy, ServiceTimeDistribution, run};

/// The 99.95 % quantile of Student's t with 9 degrees of freedom: ten seeds, 99.9 % confidence. So all of the two dozen
/// comparisons below hold with a probability of 97 %.
const STUDENT_T_9: f64 = 4.781;

fn outcomes(policy: &str, cores: u16, service: &str, latency: f64, load: f64) -> Vec<Outcome> {
    let policy: Policy = policy.parse().unwrap();
    let service: ServiceTimeDistribution = service.parse().unwrap();
    let config = Config { policy, cores, service, latency, load, requests: 800_000, ..Config::default() };
    let seeds: Vec<u64> = (1..=10).collect();
    par_map_ordered(&seeds, |seed| run(&Config { seed: *seed, ..config.clone() }).unwrap())
}

/// Asserts that `theory` lies in the 99.9 % confidence interval of `measure`, and that the interval's half-width is
/// below `max_relative_width` times the theory.
fn assert_agrees(outcomes: &[Outcome], measure: impl Fn(&Outcome) -> f64, theory: f64, width: f64) {
    let values: Vec<f64> = outcomes.iter().map(measure).collect();
    let count = values.len() as f64;
    let mean = values.iter().sum::<f64>() / count;
    let variance = values.iter().map(|value| (value - mean).powi(2)).sum::<f64>() / (count - 1.0);
    let half = STUDENT_T_9 * (variance / count).sqrt();
    assert!((mean - theory).abs() <= half, "{theory} is not in {mean} +- {half}");
    assert!(half <= width * theory, "{mean} +- {half} proves nothing");
}

#[test]
fn m_m_1_has_exponential_sojourn_times() {
    let outcomes = outcomes("jsq", 1, "exp", 0.0, 0.8);
    let mean = 1.0 / (1.0 - 0.8);
    assert_agrees(&outcomes, |o| o.all.mean, mean, 0.03);
    assert_agrees(&outcomes, |o| o.all.p50, mean * 2f64.ln(), 0.03);
    assert_agrees(&outcomes, |o| o.all.p90, mean * 10f64.ln(), 0.03);
    assert_agrees(&outcomes, |o| o.all.p99, mean * 100f64.ln(), 0.06);
}

/// Returns the mean sojourn time in M/M/c by Erlang's C formula, with mean service time 1.
fn m_m_c(cores: u16, load: f64) -> f64 {
    let offered = load * f64::from(cores);
    let mut term = 1.0;
    let mut sum = 0.0;
    for n in 0..cores {
        sum += term;
        term *= offered / f64::from(n + 1);
    }
    let queued = term / (1.0 - load);
    1.0 + queued / (sum + queued) / (f64::from(cores) * (1.0 - load))
}

#[test]
fn one_queue_for_sixteen_cores_is_m_m_16() {
    assert!((m_m_c(1, 0.8) - 5.0).abs() < 1e-9);
    for policy in ["cfcfs", "dfcfs:1,16", "work-stealing:0", "ps"] {
        assert_agrees(&outcomes(policy, 16, "exp", 0.0, 0.9), |o| o.all.mean, m_m_c(16, 0.9), 0.015);
    }
    assert_agrees(&outcomes("dfcfs:4,4", 16, "exp", 0.0, 0.9), |o| o.all.mean, m_m_c(4, 0.9), 0.04);
}

#[test]
fn random_is_m_m_1_at_every_core() {
    let interface = 0.25;
    let theory = 1.0 / 0.3 + 2.0 * interface;
    for policy in ["random", "rss"] {
        assert_agrees(&outcomes(policy, 16, "exp", interface, 0.7), |o| o.all.mean, theory, 0.02);
    }
}

#[test]
fn fixed_service_times_are_m_d_1() {
    assert_agrees(&outcomes("rr", 1, "fixed", 0.0, 0.8), |o| o.all.mean, 1.0 + 0.8 / (2.0 * 0.2), 0.02);
}

#[test]
fn fifo_is_m_g_1() {
    // Pollaczek and Khinchine: mean wait = lambda E[S^2] / (2 (1 - rho)). Here E[S] = 1.4, E[S^2] = 0.9 + 2.5.
    let wait = 0.7 / 1.4 * 3.4 / (2.0 * 0.3);
    let outcomes = outcomes("jlq", 1, "bimodal:0.1:5", 0.0, 0.7);
    assert_agrees(&outcomes, |o| o.classes[0].quantiles.mean, 1.0 + wait, 0.03);
    assert_agrees(&outcomes, |o| o.classes[1].quantiles.mean, 5.0 + wait, 0.03);
}

#[test]
fn m_g_1_processor_sharing_slows_every_class_alike() {
    let outcomes = outcomes("ps", 1, "bimodal:0.1:5", 0.0, 0.8);
    assert_agrees(&outcomes, |o| o.all.mean, 1.4 / 0.2, 0.03);
    assert_agrees(&outcomes, |o| o.classes[0].quantiles.mean, 1.0 / 0.2, 0.03);
    assert_agrees(&outcomes, |o| o.classes[1].quantiles.mean, 5.0 / 0.2, 0.03);
}

#[test]
fn cfcfs_bubble_is_m_d_1_with_longer_service() {
    let (interface, load) = (0.25, 0.5);
    let (service, busy) = (1.0 + 2.0 * interface, load * (1.0 + 2.0 * interface));
    let theory = service * (1.0 + busy / (2.0 * (1.0 - busy)));
    assert_agrees(&outcomes("cfcfs", 1, "fixed", interface, load), |o| o.all.mean, theory, 0.02);
}

#[test]
fn priorities_follow_theory_without_and_with_preemption() {
    // Two classes in M/G/1: 90 % of requests take 1 and 10 % take 5 at rho 0.7; rho_1 = 0.45.
    let rate = 0.7 / 1.4;
    let (rho_1, rho) = (rate * 0.9, 0.7);
    // Cobham (1954), without preemption: class 1 waits the residual work R over (1 - rho_1), class 2 waits R over (1 -
    // rho_1)(1 - rho).
    let residual = rate * 3.4 / 2.0;
    let without = outcomes("jbsrq:depth=65535,quantum=1000000", 1, "bimodal:0.1:5", 0.0, 0.7);
    assert_agrees(&without, |o| o.classes[0].quantiles.mean, 1.0 + residual / (1.0 - rho_1), 0.02);
    assert_agrees(&without, |o| o.classes[1].quantiles.mean, 5.0 + residual / ((1.0 - rho_1) * (1.0 - rho)), 0.03);
    // Preemptive resume: class 1 behaves as in an M/D/1 alone; class 2: S / (1 - rho_1) + R / ((1 - rho_1)(1 - rho)).
    let with = outcomes("jbsrq:depth=65535,quantum=0.001", 1, "bimodal:0.1:5", 0.0, 0.7);
    assert_agrees(&with, |o| o.classes[0].quantiles.mean, 1.0 + rho_1 / (2.0 * (1.0 - rho_1)), 0.01);
    let long = 5.0 / (1.0 - rho_1) + residual / ((1.0 - rho_1) * (1.0 - rho));
    assert_agrees(&with, |o| o.classes[1].quantiles.mean, long, 0.03);
}
