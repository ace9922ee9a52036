//! Checks the hash of connections against a sender that knows the code but not the key. Structured sets of tuples must
//! collide only as often as by chance.

use std::collections::HashMap;
use std::net::{Ipv4Addr, SocketAddr};

use coreward_model::connection_table::ConnectionHash;
use coreward_model::cookie::CookieKey;
use coreward_model::rss::seeded_rng;
use rand::Rng as _;

/// Number of tuples in each set. Random hashes of as many tuples cause 128 collisions in a table of 4,096 positions.
const TUPLES_PER_CLIENT_SET: u32 = 1024;
const HASH_KEY_COUNT: u64 = 200;
/// Number of hash bits that select a table position in this test. coreward selects a source's counter by 12 bits, a
/// hint by 14, and a set of the flow table by 17.
const TABLE_POSITION_BITS: u32 = 12;
/// Ratio of a set's collisions to those expected by chance, above which the hash fails to spread the set.
const MAX_COLLISION_RATIO: f64 = 1.25;

/// Name of a set of clients, and function that returns a client of the set by its number.
type ClientSet = (&'static str, fn(u32) -> SocketAddr);

fn client_address(address: u32, port: u32) -> SocketAddr {
    SocketAddr::new(Ipv4Addr::from(address).into(), port as u16)
}

/// Sets of clients whose addresses and ports differ in low or high bits that a sender can choose. They are counters,
/// strides and Gray codes, which change one bit at a time.
const CLIENT_SETS: [ClientSet; 9] = [
    ("ports in a row", |n| client_address(0xc000_0201, 1024 + n)),
    ("ports in steps of 64", |n| client_address(0xc000_0201, n << 6)),
    ("ports by a Gray code", |n| client_address(0xc000_0201, n ^ n >> 1)),
    ("addresses in a row", |n| client_address(0xc000_0000 + n, 4000)),
    ("addresses in steps of 2^22", |n| client_address(n << 22, 4000)),
    ("addresses by a Gray code", |n| client_address((n ^ n >> 1) << 12, 4000)),
    ("first byte and high bits of the port", |n| client_address(n << 24, (n >> 8) << 14)),
    ("port and address alike", |n| client_address(n, n)),
    ("port against address", |n| client_address(0xc000_0000 + n, 65_535 - n)),
];

/// Returns the ratio of the set's colliding pairs to the number expected by chance, averaged over many keys. A pair
/// collides if both tuples have the same table position.
fn collision_ratio_relative_to_chance(hash: fn(&CookieKey, SocketAddr) -> u64, set: ClientSet, hash_shift: u32) -> f64 {
    let mut rng = seeded_rng(171, hash_shift.into());
    let mut colliding_pair_count = 0u64;
    for _ in 0..HASH_KEY_COUNT {
        let key = CookieKey { k0: rng.next_u64(), k1: rng.next_u64() };
        let mut tuple_count_by_position: HashMap<u64, u64> = HashMap::new();
        for n in 0..TUPLES_PER_CLIENT_SET {
            *tuple_count_by_position
                .entry(hash(&key, set.1(n)) >> hash_shift & ((1 << TABLE_POSITION_BITS) - 1))
                .or_default() += 1;
        }
        colliding_pair_count += tuple_count_by_position.values().map(|count| count * (count - 1) / 2).sum::<u64>();
    }
    let pair_count = f64::from(TUPLES_PER_CLIENT_SET) * f64::from(TUPLES_PER_CLIENT_SET - 1) / 2.0;
    colliding_pair_count as f64 / HASH_KEY_COUNT as f64 / (pair_count / f64::from(1 << TABLE_POSITION_BITS))
}

/// Returns the connection hash. Its low half selects table positions, and its upper half is the tag in the table entry.
fn connection_hash(key: &CookieKey, client: SocketAddr) -> u64 {
    let hash = ConnectionHash::new(key, 3, client);
    u64::from(hash.entry_tag()) << 32 | u64::from(hash.low_half())
}

/// Returns a hash from one multiplication without a fold, for which table positions depend only on the low bits of the
/// tuple.
fn single_multiplication_hash(key: &CookieKey, client: SocketAddr) -> u64 {
    let SocketAddr::V4(client) = client else { unreachable!("sets are of IPv4") };
    let tuple_word = u64::from(client.port().swap_bytes()) << 32 | u64::from(u32::from(*client.ip()).swap_bytes());
    (tuple_word ^ key.k0).wrapping_mul(key.k1 | 1)
}

#[test]
fn structured_tuples_collide_only_as_often_as_by_chance() {
    // The lowest bits, the bits of a set of the flow table above them, and both ends of the tag.
    for shift in [0, 5, 32, 52] {
        for set in CLIENT_SETS {
            let collision_ratio = collision_ratio_relative_to_chance(connection_hash, set, shift);
            println!("{} at bit {shift}: {collision_ratio:.2} times chance", set.0);
            assert!(
                collision_ratio < MAX_COLLISION_RATIO,
                "{} at bit {shift}: {collision_ratio:.2} times chance",
                set.0
            );
        }
    }
}

#[test]
fn single_multiplication_hash_collides_more_often_than_by_chance() {
    let max_collision_ratio = CLIENT_SETS
        .map(|set| collision_ratio_relative_to_chance(single_multiplication_hash, set, 0))
        .into_iter()
        .fold(0.0, f64::max);
    println!("{max_collision_ratio:.0} times chance");
    assert!(
        max_collision_ratio > 100.0,
        "the sets would not show a hash that is too simple: {max_collision_ratio:.2} times chance"
    );
}
