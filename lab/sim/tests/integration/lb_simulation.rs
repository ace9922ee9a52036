//! Tests of `coreward-lab sim lb` as a whole, against the CrossRSS paper's Fig. 2, against other ways to the same
//! results, and with invalid input.

use coreward_model::arrival_log::ConnectionWorkload;
use coreward_model::policy::create_policy_by_name;
use coreward_model::replay::{ArrivalReplaySettings, ReplayPlacementMethod, replay_for_variances};
use coreward_sim::lb::{LbSimulationConfig, LbSimulationError, LbSimulationOutcome, PlacementPolicyOutcome, run};
use coreward_sim::trace::capture::{CaptureReadOptions, writer};
use coreward_sim::trace::{TraceError, TraceSource};

fn build_config(trace: &str, policies: &[&str], seeds: std::ops::RangeInclusive<u64>) -> LbSimulationConfig {
    LbSimulationConfig {
        trace: trace.parse().unwrap(),
        policies: policies.iter().map(|name| (*name).to_owned()).collect(),
        seeds: seeds.collect(),
        ..LbSimulationConfig::default()
    }
}

fn find_policy_outcome<'a>(outcome: &'a LbSimulationOutcome, policy: &str) -> &'a PlacementPolicyOutcome {
    outcome.policies.iter().find(|outcome| outcome.policy == policy).unwrap()
}

fn find_core_load_variance_pct(outcome: &LbSimulationOutcome, policy: &str) -> f64 {
    find_policy_outcome(outcome, policy).core_variance_pct.median
}

/// Compares the variances of the policies. In CrossRSS (CoNEXT'20, Fig. 2a), the variance between cores is 0.26 % with
/// crossrss, but 7.8 % with hash, 7.2 % with rr and 9.1 % with pow2. The variance between servers is 0.11 % with
/// crossrss and 0.31 % with rr.
#[test]
fn crossrss_has_less_variance_between_cores_than_other_policies() {
    let outcome = run(&build_config("campus", &["hash", "rr", "pow2", "crossrss", "crossrss-plus"], 1..=10)).unwrap();
    let best_other_variance = ["hash", "rr", "pow2"]
        .map(|policy| find_core_load_variance_pct(&outcome, policy))
        .into_iter()
        .fold(f64::INFINITY, f64::min);
    assert!(
        find_core_load_variance_pct(&outcome, "crossrss") * 15.0 <= best_other_variance,
        "{} against {best_other_variance}",
        find_core_load_variance_pct(&outcome, "crossrss")
    );
    let server_variance_pct = |policy| find_policy_outcome(&outcome, policy).server_variance_pct.median;
    assert!(server_variance_pct("crossrss") < server_variance_pct("rr"));
    assert!(outcome.policies.iter().all(|policy| policy.dropped_pct.high == 0.0));
}

/// Checks a cold start, in which a simulation begins amid the traffic, before any core has reported its load. Its seeds
/// were not used for tuning.
#[test]
fn crossrss_plus_variance_nears_oracle_after_cold_start() {
    let outcome =
        run(&build_config("campus:history=0,seconds=5", &["crossrss", "crossrss-plus", "oracle"], 11..=20)).unwrap();
    let [crossrss, plus, oracle] =
        ["crossrss", "crossrss-plus", "oracle"].map(|policy| find_core_load_variance_pct(&outcome, policy));
    assert!(oracle < plus && crossrss - plus >= 0.6 * (crossrss - oracle), "{crossrss} {plus} {oracle}");
}

#[test]
fn crossrss_plus_spreads_a_burst_no_worse_than_round_robin() {
    let outcome = run(&build_config("burst", &["rr", "crossrss", "crossrss-plus"], 1..=30)).unwrap();
    assert!(
        find_core_load_variance_pct(&outcome, "crossrss-plus") <= 1.05 * find_core_load_variance_pct(&outcome, "rr")
    );
    let max_over_mean = |policy| find_policy_outcome(&outcome, policy).max_over_mean.median;
    assert!(max_over_mean("crossrss-plus") <= 1.05 * max_over_mean("rr"));
    // The published policy sends the whole burst to one server, which is the reason for crossrss-plus.
    assert!(find_core_load_variance_pct(&outcome, "crossrss") > 10.0 * find_core_load_variance_pct(&outcome, "rr"));
}

/// Compares the policies hash and crossrss near saturation. In CrossRSS's Fig. 2b, a server with balanced cores drops
/// fewer packets at the same load.
#[test]
fn balanced_cores_serve_more_packets_near_saturation() {
    let loaded_config = LbSimulationConfig {
        core_capacity_pps: Some(19_500.0),
        ..build_config("campus:history=100,seconds=4", &["hash", "crossrss"], 1..=6)
    };
    let outcome = run(&loaded_config).unwrap();
    let (hash, crossrss) = (find_policy_outcome(&outcome, "hash"), find_policy_outcome(&outcome, "crossrss"));
    assert!(crossrss.throughput_pps.median > 1.02 * hash.throughput_pps.median);
    assert!(crossrss.dropped_pct.median < hash.dropped_pct.median);
    for (hash, crossrss) in hash.seeds.iter().zip(&crossrss.seeds) {
        // Every packet is served or dropped, except those in queues, of which each of 16 cores holds at most 128.
        let compute_offered_pps =
            |seed: &coreward_sim::lb::LbSeedResult| seed.throughput_pps / (1.0 - seed.dropped_pct / 100.0);
        assert!(
            (compute_offered_pps(hash) - compute_offered_pps(crossrss)).abs() < 2.0 * 128.0 * 16.0 / 3.0,
            "{hash:?} {crossrss:?}"
        );
        assert!(crossrss.throughput_pps <= 16.0 * 19_500.0 * 1.001);
    }
}

/// Compares the simulation of arrival logs with `replay_for_variances`, which the demo uses. Both simulate the same
/// fleet but count in different ways.
#[test]
fn simulation_of_arrival_logs_agrees_with_their_replay() {
    let directory = tempfile::tempdir().unwrap();
    let (mut simulated_variances, mut replayed_variances) = (Vec::new(), Vec::new());
    for seed in 1..=4 {
        let arrival_log = ConnectionWorkload::default().generate(seed);
        let path = directory.path().join(format!("{seed}.arrivals"));
        std::fs::write(&path, arrival_log.to_string()).unwrap();
        let outcome = run(&build_config(path.to_str().unwrap(), &["crossrss-plus", "rr"], seed..=seed)).unwrap();
        simulated_variances.push(["crossrss-plus", "rr"].map(|policy| find_core_load_variance_pct(&outcome, policy)));
        replayed_variances.push(["crossrss-plus", "rr"].map(|policy| {
            let mut policy = create_policy_by_name(policy, seed).unwrap();
            replay_for_variances(
                &arrival_log,
                ArrivalReplaySettings { seed, ..ArrivalReplaySettings::default() },
                ReplayPlacementMethod::Policy(policy.as_mut()),
            )
            .across_cores_pct
        }));
    }
    // Keys, tables and warm-ups differ, so the results agree only approximately.
    for policy in 0..2 {
        let mean_of_policy = |seed_variances: &[[f64; 2]]| {
            seed_variances.iter().map(|policy_variances| policy_variances[policy]).sum::<f64>()
                / seed_variances.len() as f64
        };
        let ratio = mean_of_policy(&simulated_variances) / mean_of_policy(&replayed_variances);
        assert!((0.5..2.0).contains(&ratio), "{simulated_variances:?} {replayed_variances:?}");
    }
}

#[test]
fn capture_gives_same_results_as_its_generated_trace() {
    let source: TraceSource = "campus:seed=3,flows=500,seconds=4,history=0".parse().unwrap();
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("campus.pcap");
    let mut trace = source.open_trace(1, CaptureReadOptions::default()).unwrap();
    writer::write_capture(trace.as_mut(), 96, std::fs::File::create(&path).unwrap()).unwrap();
    let policies = ["hash", "rr", "pow2", "crossrss"];
    let generated_outcome =
        run(&build_config("campus:seed=3,flows=500,seconds=4,history=0", &policies, 1..=3)).unwrap();
    let captured_outcome = run(&build_config(path.to_str().unwrap(), &policies, 1..=3)).unwrap();
    assert_eq!(generated_outcome.packets, captured_outcome.packets);
    assert_eq!(generated_outcome.flows, captured_outcome.flows);
    for policy in policies {
        // The capture starts at its first packet, some microseconds later.
        let ratio = find_core_load_variance_pct(&captured_outcome, policy)
            / find_core_load_variance_pct(&generated_outcome, policy);
        assert!((0.9..1.1).contains(&ratio), "{policy}: {ratio}");
    }
    // Copies are shifted in time, so the sum of several copies is smoother.
    let overlaid_config =
        LbSimulationConfig { trace_copy_count: 8, ..build_config(path.to_str().unwrap(), &["hash"], 1..=3) };
    let overlaid_outcome = run(&overlaid_config).unwrap();
    assert_eq!(overlaid_outcome.packets, 8 * captured_outcome.packets);
    assert!(
        find_core_load_variance_pct(&overlaid_outcome, "hash")
            < 0.6 * find_core_load_variance_pct(&captured_outcome, "hash")
    );
}

#[test]
fn equal_seeds_give_equal_results_on_any_number_of_threads() {
    let config = build_config("campus:seconds=3,history=20", &["pow2", "crossrss-plus", "oracle"], 1..=4);
    let run_with_threads = |count| {
        let pool = rayon::ThreadPoolBuilder::new().num_threads(count).build().unwrap();
        serde_json::to_string(&pool.install(|| run(&config)).unwrap()).unwrap()
    };
    let single_threaded_json = run_with_threads(1);
    assert_eq!(single_threaded_json, run_with_threads(3));
    let json: serde_json::Value = serde_json::from_str(&single_threaded_json).unwrap();
    for key in ["server_variance_pct", "core_variance_pct", "max_over_mean", "dropped_pct"] {
        assert!(
            json["policies"][0][key]["median"].is_number() && json["policies"][0][key]["high"].is_number(),
            "{key}"
        );
    }
    assert!(json["packets"].is_u64() && json["flows"].is_u64() && json["skipped"].is_object());
}

#[test]
fn faster_replay_offers_a_higher_packet_rate() {
    let slow_config = build_config("campus:seed=1,seconds=6,history=0", &["hash"], 1..=1);
    let fast_config = LbSimulationConfig { replay_speed: 2.0, ..slow_config.clone() };
    let (slow_outcome, fast_outcome) = (run(&slow_config).unwrap(), run(&fast_config).unwrap());
    assert_eq!(slow_outcome.packets, fast_outcome.packets);
    let ratio = fast_outcome.policies[0].throughput_pps.median / slow_outcome.policies[0].throughput_pps.median;
    assert!((1.8..2.2).contains(&ratio), "{ratio}");
}

/// Checks two policies with racks. For each bucket, crossrss needs one candidate from each rack, and crossrss-plus
/// needs all eight.
#[test]
fn racks_with_enough_candidates_do_not_change_tables() {
    let config_without_racks = LbSimulationConfig {
        server_count: 12,
        ..build_config("campus:seconds=3,history=20", &["crossrss", "crossrss-plus"], 1..=1)
    };
    let outcome_without_racks = run(&config_without_racks).unwrap();
    let run_with_racks = |racks, rack_candidates| {
        run(&LbSimulationConfig {
            rack_controller_count: Some(racks),
            rack_candidates_per_bucket: rack_candidates,
            ..config_without_racks.clone()
        })
        .unwrap()
    };
    assert_eq!(run_with_racks(3, 8).policies, outcome_without_racks.policies);
    let outcome_with_one_candidate = run_with_racks(3, 1);
    assert_eq!(
        find_policy_outcome(&outcome_with_one_candidate, "crossrss"),
        find_policy_outcome(&outcome_without_racks, "crossrss")
    );
    assert_ne!(
        find_policy_outcome(&outcome_with_one_candidate, "crossrss-plus"),
        find_policy_outcome(&outcome_without_racks, "crossrss-plus")
    );
}

#[test]
fn delayed_tables_change_connection_placement() {
    let immediate_config = build_config("campus:seconds=3,history=20", &["crossrss"], 1..=1);
    let delayed_config = LbSimulationConfig { table_delay_ms: 99, ..immediate_config.clone() };
    let [immediate_outcomes, delayed_outcomes] =
        [immediate_config, delayed_config].map(|config| run(&config).unwrap().policies);
    assert_ne!(immediate_outcomes, delayed_outcomes);
}

#[test]
fn invalid_configurations_are_rejected() {
    let config_error_text = |config: LbSimulationConfig| run(&config).unwrap_err().to_string();
    let build_campus_config = || build_config("campus:seconds=2,history=0", &["hash"], 1..=1);
    assert_eq!(
        config_error_text(LbSimulationConfig { server_count: 0, ..build_campus_config() }),
        "servers 0: expected 1 to 16384"
    );
    assert_eq!(
        config_error_text(LbSimulationConfig { cores_per_server: 0, ..build_campus_config() }),
        "cores 0: expected at least 1"
    );
    let too_many_cores = LbSimulationConfig { server_count: 1_000, cores_per_server: 100, ..build_campus_config() };
    assert_eq!(config_error_text(too_many_cores), "servers x cores 100000: expected at most 65536 cores in all");
    assert_eq!(
        config_error_text(LbSimulationConfig { report_interval_ms: 0, ..build_campus_config() }),
        "report-ms 0: expected 1 to 10000"
    );
    assert_eq!(
        config_error_text(LbSimulationConfig { rack_controller_count: Some(5), ..build_campus_config() }),
        "racks 5: expected 1 to 4, the number of servers"
    );
    assert_eq!(
        config_error_text(LbSimulationConfig { rack_candidates_per_bucket: 9, ..build_campus_config() }),
        "rack-candidates 9: expected 1 to 8"
    );
    assert_eq!(
        config_error_text(LbSimulationConfig { table_delay_ms: 100, ..build_campus_config() }),
        "table-delay-ms 100: expected less than the 100 ms between reports"
    );
    assert!(
        config_error_text(LbSimulationConfig { core_capacity_pps: Some(0.0), ..build_campus_config() })
            .starts_with("core-capacity 0: expected 1 to")
    );
    let unknown_policy_error =
        config_error_text(LbSimulationConfig { policies: vec!["crosrss".to_owned()], ..build_campus_config() });
    assert!(unknown_policy_error.contains("did you mean crossrss"), "{unknown_policy_error}");
    let short_trace_error = config_error_text(LbSimulationConfig { window_ms: 1_500, ..build_campus_config() });
    assert!(
        short_trace_error.contains("the trace lasts 2.000 s") && short_trace_error.contains("at least 3000 ms"),
        "{short_trace_error}"
    );
}

#[test]
fn invalid_traces_are_rejected() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("empty.pcap");
    let header: Vec<u8> =
        [0xa1b2_c3d4u32, 0x0004_0002, 0, 0, 65_535, 1].into_iter().flat_map(u32::to_le_bytes).collect();
    std::fs::write(&path, &header).unwrap();
    let path = path.to_str().unwrap();
    assert!(matches!(run(&build_config(path, &["hash"], 1..=1)), Err(LbSimulationError::NoPackets(_))));
    let missing_file_result = run(&build_config("/nonexistent/trace.pcap", &["hash"], 1..=1));
    assert!(matches!(missing_file_result, Err(LbSimulationError::InvalidTrace(TraceError::UnreadableFile { .. }))));
    let mut trace = "campus:seed=1,flows=50,seconds=3,history=0"
        .parse::<TraceSource>()
        .unwrap()
        .open_trace(1, CaptureReadOptions::default())
        .unwrap();
    writer::write_capture(trace.as_mut(), 64, std::fs::File::create(path).unwrap()).unwrap();
    assert!(matches!(run(&build_config(path, &["oracle"], 1..=1)), Err(LbSimulationError::OracleNeedsRates)));
}
