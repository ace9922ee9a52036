//! Servers reached by forged TSecr values: ten million on the reference model, fewer on the BPF program.

use coreward_dataplane::test_run::{missing_bpf_rights, skip_if};
use coreward_fuzz::cookies::{BitFlipCounts, CookieTester};

/// Maximum distance from the expected result in standard deviations, which one seed in a million exceeds.
const MAX_Z_SCORE: f64 = 5.0;

fn check_flips(flips: &BitFlipCounts, servers: f64) {
    // A flip in the low 16 bits gives a random value, whatever the server and its id.
    assert!(flips.same_server_counts[..16].iter().all(|count| *count <= 3), "{flips:?}");
    let guesses = flips.cookies as f64 * servers / 32_768.0;
    let is_guess = |found: &u64| (*found as f64 - guesses).abs() < MAX_Z_SCORE * guesses.sqrt() + 1.0;
    assert!(flips.other_server_counts[..16].iter().all(is_guess), "{guesses} expected: {flips:?}");
    // The upper half is the time: a flip does not change the server.
    assert!(flips.same_server_counts[16..].iter().all(|count| *count == flips.cookies), "{flips:?}");
}

#[test]
fn random_tsecr_reaches_known_servers_evenly() {
    let all = CookieTester::new(1, 16_384, false).unwrap().send_random_tsecrs(5_000_000).unwrap();
    assert!(all.z_score().abs() < MAX_Z_SCORE, "{}", all.z_score());
    let pool = CookieTester::new(2, 300, false).unwrap().send_random_tsecrs(5_000_000).unwrap();
    assert!(pool.z_score().abs() < MAX_Z_SCORE, "{}", pool.z_score());
}

#[test]
fn foreign_cookies_and_flipped_bits_hit_by_chance_only() {
    let replayed = CookieTester::new(3, 300, false).unwrap().replay_cookies(1_000_000).unwrap();
    assert!(replayed.z_score().abs() < MAX_Z_SCORE, "{}", replayed.z_score());
    check_flips(&CookieTester::new(4, 300, false).unwrap().flip_cookie_bits(50_000).unwrap(), 300.0);
}

#[test]
fn bpf_cookies_reveal_no_more_than_the_models() {
    skip_if!(missing_bpf_rights());
    let mut cookies = CookieTester::new(5, 4_000, true).unwrap();
    let random = cookies.send_random_tsecrs(400_000).unwrap();
    assert!(random.z_score().abs() < MAX_Z_SCORE, "{}", random.z_score());
    let replayed = cookies.replay_cookies(200_000).unwrap();
    assert!(replayed.z_score().abs() < MAX_Z_SCORE, "{}", replayed.z_score());
    check_flips(&cookies.flip_cookie_bits(3_000).unwrap(), 4_000.0);
}
