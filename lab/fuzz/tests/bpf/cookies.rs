//! Counts the servers that forged TSecr values reach, with ten million values on the reference model and fewer on BPF.

use coreward_dataplane::test_run::{missing_bpf_rights, skip_if};
use coreward_fuzz::cookies::{BitFlipCounts, CookieTester};

/// Maximum distance from the expected result, in standard deviations. About one seed in a million exceeds it.
const MAX_Z_SCORE: f64 = 5.0;

fn check_bit_flip_counts(flip_counts: &BitFlipCounts, server_count: f64) {
    // A flip in the low 16 bits gives a random value, so the packet rarely reaches the same server.
    assert!(flip_counts.same_server_counts_by_bit[..16].iter().all(|count| *count <= 3), "{flip_counts:?}");
    let expected_packet_count = flip_counts.cookie_count as f64 * server_count / 32_768.0;
    let is_near_expectation = |packet_count: &u64| {
        (*packet_count as f64 - expected_packet_count).abs() < MAX_Z_SCORE * expected_packet_count.sqrt() + 1.0
    };
    assert!(
        flip_counts.other_server_counts_by_bit[..16].iter().all(is_near_expectation),
        "{expected_packet_count} expected: {flip_counts:?}"
    );
    // The upper half is the time, so a flip in it does not change the server.
    assert!(
        flip_counts.same_server_counts_by_bit[16..].iter().all(|count| *count == flip_counts.cookie_count),
        "{flip_counts:?}"
    );
}

#[test]
fn random_tsecrs_reach_all_known_servers_equally_often() {
    let all_ids_coverage = CookieTester::new(1, 16_384, false).unwrap().send_random_tsecrs(5_000_000).unwrap();
    assert!(all_ids_coverage.chi_square_z_score().abs() < MAX_Z_SCORE, "{}", all_ids_coverage.chi_square_z_score());
    let small_pool_coverage = CookieTester::new(2, 300, false).unwrap().send_random_tsecrs(5_000_000).unwrap();
    assert!(
        small_pool_coverage.chi_square_z_score().abs() < MAX_Z_SCORE,
        "{}",
        small_pool_coverage.chi_square_z_score()
    );
}

#[test]
fn replayed_and_altered_cookies_reach_servers_only_by_chance() {
    let replay_coverage =
        CookieTester::new(3, 300, false).unwrap().replay_cookies_on_other_connections(1_000_000).unwrap();
    assert!(replay_coverage.chi_square_z_score().abs() < MAX_Z_SCORE, "{}", replay_coverage.chi_square_z_score());
    check_bit_flip_counts(&CookieTester::new(4, 300, false).unwrap().flip_cookie_bits(50_000).unwrap(), 300.0);
}

#[test]
fn forged_cookies_reach_bpf_servers_only_by_chance() {
    skip_if!(missing_bpf_rights());
    let mut cookie_tester = CookieTester::new(5, 4_000, true).unwrap();
    let random_coverage = cookie_tester.send_random_tsecrs(400_000).unwrap();
    assert!(random_coverage.chi_square_z_score().abs() < MAX_Z_SCORE, "{}", random_coverage.chi_square_z_score());
    let replay_coverage = cookie_tester.replay_cookies_on_other_connections(200_000).unwrap();
    assert!(replay_coverage.chi_square_z_score().abs() < MAX_Z_SCORE, "{}", replay_coverage.chi_square_z_score());
    check_bit_flip_counts(&cookie_tester.flip_cookie_bits(3_000).unwrap(), 4_000.0);
}
