//! Tests of a SYN flood from one source prefix to a stateful service (`BPF_PROG_TEST_RUN`), in virtual time.

use std::net::Ipv4Addr;
use std::time::Duration;

use coreward_model::connection_table::{ConnectionEntry, ConnectionTimeouts, source_prefix_counter_index};
use coreward_model::rss::seeded_rng;
use rand::Rng as _;

use crate::support::balancer::{TestBalancer, XDP_TX};
use crate::support::stateful::{frame_with_cookie_index, read_cookie_index, stateful_balancer, syn_frame};
use crate::support::{missing_bpf_rights, skip_if};

const CONNECTION_ENTRY_COUNT: u32 = 16_384;
const TICK_INTERVAL: Duration = Duration::from_millis(100);
/// Number of ticks in which the whole connection table is searched for expired connections.
const TICKS_PER_SWEEP: u32 = 10;
const TICKS_PER_CONNECTION_RECOUNT: u32 = 100;
/// Number of SYNs per tick in a flood that would fill the table in two seconds.
const FLOOD_SYNS_PER_TICK: u32 = CONNECTION_ENTRY_COUNT / 20;
const GENUINE_SYNS_PER_TICK: u32 = 10;

/// Sends a SYN. Returns the entry's index for cookies, or `None` if the connection got no table entry.
fn open_connection(balancer: &TestBalancer, client: (Ipv4Addr, u16)) -> Option<u16> {
    let (xdp_action, forwarded_frame) = balancer.process_frame(&syn_frame(client));
    assert_eq!(xdp_action, XDP_TX);
    read_cookie_index(&forwarded_frame)
}

/// Searches the next part of the table for expired connections, and frees their entries.
fn free_expired_connections(balancer: &mut TestBalancer, timers: &ConnectionTimeouts) {
    let due_connections: Vec<ConnectionEntry> = balancer
        .lb
        .scan_expired_connections(timers, CONNECTION_ENTRY_COUNT / TICKS_PER_SWEEP)
        .into_iter()
        .map(|(connection, _)| connection)
        .collect();
    balancer.lb.free_connections(&due_connections).unwrap();
}

/// Returns the longest time that has passed since a connection's last packet, or `None` if there are no connections.
fn longest_connection_idle_time(balancer: &TestBalancer) -> Option<Duration> {
    let clock = balancer.lb.packet_clock_ticks();
    balancer
        .lb
        .connections(balancer.service_indexes[0])
        .map(|connection| clock.saturating_duration_since(connection.last_packet_at))
        .max()
}

#[test]
fn entries_of_a_flooding_prefix_are_limited_and_expire() {
    skip_if!(missing_bpf_rights());
    let mut rng = seeded_rng(131, 0);
    let (mut balancer, _) = stateful_balancer(CONNECTION_ENTRY_COUNT.into(), &mut rng);
    let (timers, prefix) = (ConnectionTimeouts::default(), Ipv4Addr::new(192, 0, 2, 0));
    let hash_key = balancer.lb.connection_hash_key();
    let source_shard_of = |address: Ipv4Addr| source_prefix_counter_index(&hash_key, address.into());
    let (mut now, mut refused_count) = (Duration::from_secs(1000), 0);
    for tick in 0..250u32 {
        now += TICK_INTERVAL;
        balancer.lb.tick_packet_clock(now);
        balancer.lb.update_source_prefix_limit();
        for n in 0..FLOOD_SYNS_PER_TICK {
            let syn_number = tick * FLOOD_SYNS_PER_TICK + n;
            open_connection(
                &balancer,
                (Ipv4Addr::from(u32::from(prefix) + syn_number % 256), (syn_number / 256) as u16),
            );
        }
        // Prefixes share counters by their hash. One prefix in 4,096 shares the flood's counter and is left out.
        let other_sources = std::iter::repeat_with(|| Ipv4Addr::from(0x0b00_0000 + (rng.next_u32() >> 8)))
            .filter(|address| source_shard_of(*address) != source_shard_of(prefix));
        for client in other_sources.take(GENUINE_SYNS_PER_TICK as usize).map(|address| (address, 4000)) {
            refused_count += u32::from(open_connection(&balancer, client).is_none());
        }
        let used_entries = balancer.lb.count_used_entries_by_scan();
        assert_eq!(balancer.lb.used_entry_count(), used_entries as u64, "the gauge is of now");
        assert!(
            used_entries < CONNECTION_ENTRY_COUNT as usize * 3 / 10,
            "{used_entries} entries in use after {tick} beats"
        );
        free_expired_connections(&mut balancer, &timers);
        let oldest_connection_age = longest_connection_idle_time(&balancer);
        assert!(
            oldest_connection_age
                .is_none_or(|oldest| oldest <= timers.half_open + TICK_INTERVAL * (TICKS_PER_SWEEP + 1)),
            "{oldest_connection_age:?}"
        );
    }
    assert_eq!(refused_count, 0, "of {} genuine connections", 250 * GENUINE_SYNS_PER_TICK);
    assert_eq!(balancer.event_count(0, "connection_table_full"), 0, "no partition was full");
    assert!(balancer.event_count(0, "connection_source_limited") > 0);
}

/// Sends `syns_per_tick` SYNs in each of `tick_count` ticks from one source prefix. Returns the percentage of table
/// entries that the prefix then occupies. With `completes_handshakes`, each connection is also established.
fn table_percentage_held_by_prefix(
    address_count: u32,
    syns_per_tick: u32,
    tick_count: u32,
    completes_handshakes: bool,
) -> f64 {
    let mut rng = seeded_rng(132, 0);
    let (mut balancer, _) = stateful_balancer(CONNECTION_ENTRY_COUNT.into(), &mut rng);
    let timeouts = ConnectionTimeouts::default();
    let mut now = Duration::from_secs(1000);
    for tick in 0..tick_count {
        now += TICK_INTERVAL;
        balancer.lb.tick_packet_clock(now);
        if tick % TICKS_PER_CONNECTION_RECOUNT == 0 {
            balancer.lb.recount_connections();
        }
        balancer.lb.update_source_prefix_limit();
        for n in tick * syns_per_tick..(tick + 1) * syns_per_tick {
            let client = (Ipv4Addr::from(0xc000_0200 + n % address_count), (n / address_count) as u16);
            let (_, forwarded_frame) = balancer.process_frame(&syn_frame(client));
            if let Some(cookie_index) = read_cookie_index(&forwarded_frame).filter(|_| completes_handshakes) {
                balancer.process_frame(&frame_with_cookie_index(&balancer, client, cookie_index));
            }
        }
        let expired_connections =
            balancer.lb.scan_expired_connections(&timeouts, CONNECTION_ENTRY_COUNT / TICKS_PER_SWEEP);
        let connections_to_free: Vec<ConnectionEntry> =
            expired_connections.into_iter().map(|(connection, _)| connection).collect();
        balancer.lb.free_connections(&connections_to_free).unwrap();
    }
    balancer.lb.count_used_entries_by_scan() as f64 * 100.0 / f64::from(CONNECTION_ENTRY_COUNT)
}

#[test]
fn one_prefix_holds_at_most_a_quarter_of_the_table() {
    skip_if!(missing_bpf_rights());
    // The number of SYNs per tick is scaled to this table from 1.9 million a second for a table of 262,144 entries.
    let flood_syns_per_tick = (190_000 / (262_144 / u64::from(CONNECTION_ENTRY_COUNT))) as u32;
    let table_percentages = [
        ("one address", table_percentage_held_by_prefix(1, flood_syns_per_tick, 20, false)),
        ("a /24", table_percentage_held_by_prefix(256, flood_syns_per_tick, 20, false)),
        ("handshakes of a /24, slowly", table_percentage_held_by_prefix(256, 8, 3000, true)),
    ];
    println!("{table_percentages:?} % of the table");
    assert!(table_percentages.iter().all(|(_, percentage)| *percentage <= 25.5), "{table_percentages:?}");
}
