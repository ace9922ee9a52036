//! Consistency checks with fewer connections than `make consistency`.

use coreward_dataplane::test_run::{missing_bpf_rights, skip_if};
use coreward_fuzz::consistency::{Config, MAX_IDLE_MS, Report, run};
use coreward_model::consistency::Consistency;
use coreward_model::forwarding::Forwarding;

fn run_and_check_guarantees(config: Config) -> Report {
    let report = run(config).unwrap();
    println!("{report}");
    assert!(report.are_guarantees_kept());
    // If a load balancer loses a connection's entry, the packets cannot be broadcast across routers (docs/limits.md).
    let loses_entries = config.consistency == Consistency::Stateful && config.forwarding.encapsulates();
    let min_finished_pct = if loses_entries { 85 } else { 99 };
    // The check has a meaning only if nearly all connections complete, and nearly all changes happen.
    assert!(
        report.completed_connections + report.connections_lost_with_server
            > u64::from(config.connection_count) * min_finished_pct / 100
    );
    let expected_changes = u64::from(config.minutes * config.changes_per_minute);
    assert!(report.change_count() >= expected_changes - 1, "{} of {expected_changes}", report.change_count());
    assert!(report.key_switches >= u64::from(config.minutes) / 2 && report.load_balancers_restarted > 0);
    report
}

#[test]
fn connections_keep_their_server_in_the_reference_model() {
    for (seed, consistency) in [(1, Consistency::Stateless), (2, Consistency::Stateful), (3, Consistency::Stateful)] {
        let shared_config =
            Config { connection_count: 60_000, minutes: 5, runs_bpf_program: false, ..Config::default() };
        let report = run_and_check_guarantees(Config { seed, consistency, ..shared_config });
        // Without timestamps, consistency is not guaranteed, but fewer than 2 % of the connections should break.
        assert!(report.broken_untimestamped_connections * 50 < report.connections_without_timestamps, "{report}");
    }
}

#[test]
fn connections_keep_their_server_in_the_bpf_program() {
    skip_if!(missing_bpf_rights());
    for consistency in [Consistency::Stateless, Consistency::Stateful] {
        for (forwarding, is_ipv6) in
            [(Forwarding::L2, false), (Forwarding::L2, true), (Forwarding::Gue, false), (Forwarding::Gue, true)]
        {
            println!("{}, {}, IPv6: {is_ipv6}", consistency.name(), forwarding.name());
            run_and_check_guarantees(Config {
                connection_count: 5_000,
                minutes: 2,
                consistency,
                forwarding,
                has_ipv6_vip: is_ipv6,
                ..Config::default()
            });
        }
    }
}

#[test]
fn too_frequent_key_rotation_breaks_the_guarantees() {
    // Keys rotate faster than connections send, so other keys decode their cookies.
    let config = Config {
        connection_count: 60_000,
        minutes: 5,
        key_rotation_ms: MAX_IDLE_MS / 20,
        runs_bpf_program: false,
        ..Config::default()
    };
    assert!(!run(config).unwrap().are_guarantees_kept());
}
