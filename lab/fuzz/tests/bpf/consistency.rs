//! Consistency checks with fewer connections than `make consistency`.

use coreward_dataplane::test_run::{missing_bpf_rights, skip_if};
use coreward_fuzz::consistency::{
    ConsistencyCheckConfig, ConsistencyCheckReport, MAX_CONNECTION_IDLE_MS, simulate_and_check_consistency,
};
use coreward_model::consistency::ConsistencyMode;
use coreward_model::forwarding::ForwardingMode;

fn run_and_check_guarantees(config: ConsistencyCheckConfig) -> ConsistencyCheckReport {
    let report = simulate_and_check_consistency(config).unwrap();
    println!("{report}");
    assert!(report.are_guarantees_kept());
    // If a load balancer loses a connection's entry, the packets cannot be broadcast across routers (docs/limits.md).
    let loses_entries = config.consistency == ConsistencyMode::Stateful && config.forwarding.encapsulates();
    let min_finished_pct = if loses_entries { 85 } else { 99 };
    // The check has a meaning only if nearly all connections complete, and nearly all changes happen.
    assert!(
        report.completed_connections + report.connections_lost_with_server
            > u64::from(config.connection_count) * min_finished_pct / 100
    );
    let expected_changes = u64::from(config.arrival_minutes * config.changes_per_minute);
    assert!(report.change_count() >= expected_changes - 1, "{} of {expected_changes}", report.change_count());
    assert!(report.key_switches >= u64::from(config.arrival_minutes) / 2 && report.load_balancers_restarted > 0);
    report
}

#[test]
fn connections_keep_their_server_in_the_reference_model() {
    for (seed, consistency) in
        [(1, ConsistencyMode::Stateless), (2, ConsistencyMode::Stateful), (3, ConsistencyMode::Stateful)]
    {
        let shared_config = ConsistencyCheckConfig {
            connection_count: 60_000,
            arrival_minutes: 5,
            runs_bpf_program: false,
            ..ConsistencyCheckConfig::default()
        };
        let report = run_and_check_guarantees(ConsistencyCheckConfig { seed, consistency, ..shared_config });
        // Without timestamps, consistency is not guaranteed, but fewer than 2 % of the connections should break.
        assert!(report.broken_untimestamped_connections * 50 < report.connections_without_timestamps, "{report}");
    }
}

#[test]
fn connections_keep_their_server_in_the_bpf_program() {
    skip_if!(missing_bpf_rights());
    for consistency in [ConsistencyMode::Stateless, ConsistencyMode::Stateful] {
        for (forwarding, is_ipv6) in [
            (ForwardingMode::L2, false),
            (ForwardingMode::L2, true),
            (ForwardingMode::Gue, false),
            (ForwardingMode::Gue, true),
        ] {
            println!("{}, {}, IPv6: {is_ipv6}", consistency.name(), forwarding.name());
            run_and_check_guarantees(ConsistencyCheckConfig {
                connection_count: 5_000,
                arrival_minutes: 2,
                consistency,
                forwarding,
                has_ipv6_vip: is_ipv6,
                ..ConsistencyCheckConfig::default()
            });
        }
    }
}

#[test]
fn too_frequent_key_rotation_breaks_the_guarantees() {
    // Keys rotate faster than connections send, so other keys decode their cookies.
    let config = ConsistencyCheckConfig {
        connection_count: 60_000,
        arrival_minutes: 5,
        key_rotation_interval_ms: MAX_CONNECTION_IDLE_MS / 20,
        runs_bpf_program: false,
        ..ConsistencyCheckConfig::default()
    };
    assert!(!simulate_and_check_consistency(config).unwrap().are_guarantees_kept());
}
