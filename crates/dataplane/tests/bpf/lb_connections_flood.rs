//! Tests of a SYN flood from one source prefix to a stateful service (`BPF_PROG_TEST_RUN`), in virtual time.

use std::net::Ipv4Addr;
use std::time::Duration;

use coreward_model::connection_table::{Connection, Timeouts, source_shard};
use coreward_model::rss::seeded_rng;
use rand::Rng as _;

use crate::support::balancer::XDP_TX;
use crate::support::stateful::{balancer, established, number_of, syn};
use crate::support::{missing_bpf_rights, skip_if};

const ENTRY_COUNT: u32 = 16_384;
/// Interval between two ticks, as in the daemon.
const TICK: Duration = Duration::from_millis(100);
/// Number of ticks in which the whole table is swept for expired connections.
const TICKS_PER_SWEEP: u32 = 10;
/// Number of ticks between two exact counts of the table's entries.
const TICKS_PER_COUNT: u32 = 100;
/// Number of SYNs per tick, which would fill the table in two seconds.
const FLOOD: u32 = ENTRY_COUNT / 20;
const GENUINE: u32 = 10;

#[test]
fn flood_of_one_prefix_leaves_entries_to_others_and_is_freed_on_time() {
    skip_if!(missing_bpf_rights());
    let mut rng = seeded_rng(131, 0);
    let (mut balancer, _) = balancer(ENTRY_COUNT.into(), &mut rng);
    let (timers, prefix) = (Timeouts::default(), Ipv4Addr::new(192, 0, 2, 0));
    let key = balancer.lb.connection_key();
    let shard = |address: Ipv4Addr| source_shard(&key, address.into());
    let (mut now, mut refused) = (Duration::from_secs(1000), 0);
    for tick in 0..250u32 {
        now += TICK;
        balancer.lb.tick(now);
        balancer.lb.guard_connection_table();
        let reported = |client| {
            let (verdict, forwarded) = balancer.run(&syn(client));
            assert_eq!(verdict, XDP_TX);
            number_of(&forwarded)
        };
        for n in 0..FLOOD {
            let number = tick * FLOOD + n;
            reported((Ipv4Addr::from(u32::from(prefix) + number % 256), (number / 256) as u16));
        }
        // Prefixes share counters by their hash: one prefix in 4,096 has the flood's counter, and is left out.
        let other = std::iter::repeat_with(|| Ipv4Addr::from(0x0b00_0000 + (rng.next_u32() >> 8)))
            .filter(|address| shard(*address) != shard(prefix));
        for client in other.take(GENUINE as usize).map(|address| (address, 4000)) {
            refused += u32::from(reported(client).is_none());
        }
        let in_use = balancer.lb.connections_in_use();
        assert_eq!(balancer.lb.occupancy(), in_use as u64, "the gauge is of now");
        assert!(in_use < ENTRY_COUNT as usize * 3 / 10, "{in_use} entries in use after {tick} beats");
        let due: Vec<Connection> = balancer
            .lb
            .due_connections(&timers, ENTRY_COUNT / TICKS_PER_SWEEP)
            .into_iter()
            .map(|(due, _)| due)
            .collect();
        balancer.lb.free_connections(&due).unwrap();
        let clock = balancer.lb.clock();
        let oldest = balancer.lb.connections(balancer.services[0]).map(|held| clock.since(held.last_seen)).max();
        assert!(oldest.is_none_or(|oldest| oldest <= timers.half_open + TICK * (TICKS_PER_SWEEP + 1)), "{oldest:?}");
    }
    assert_eq!(refused, 0, "of {} genuine connections", 250 * GENUINE);
    assert_eq!(balancer.events(0, "connection_table_full"), 0, "no partition was full");
    assert!(balancer.events(0, "connection_source_limited") > 0);
}

/// Returns the percentage of the table that one source prefix holds after `beats` ticks with `per_beat` SYNs each. With
/// `is_slow` each connection is also established.
fn held_by_prefix(addresses: u32, per_beat: u32, beats: u32, is_slow: bool) -> f64 {
    let mut rng = seeded_rng(132, 0);
    let (mut balancer, _) = balancer(ENTRY_COUNT.into(), &mut rng);
    let timers = Timeouts::default();
    let mut now = Duration::from_secs(1000);
    for tick in 0..beats {
        now += TICK;
        balancer.lb.tick(now);
        if tick % TICKS_PER_COUNT == 0 {
            balancer.lb.count_connections();
        }
        balancer.lb.guard_connection_table();
        for n in tick * per_beat..(tick + 1) * per_beat {
            let client = (Ipv4Addr::from(0xc000_0200 + n % addresses), (n / addresses) as u16);
            let (_, forwarded) = balancer.run(&syn(client));
            if let Some(number) = number_of(&forwarded).filter(|_| is_slow) {
                balancer.run(&established(&balancer, client, number));
            }
        }
        let due = balancer.lb.due_connections(&timers, ENTRY_COUNT / TICKS_PER_SWEEP);
        let due: Vec<Connection> = due.into_iter().map(|(due, _)| due).collect();
        balancer.lb.free_connections(&due).unwrap();
    }
    balancer.lb.connections_in_use() as f64 * 100.0 / f64::from(ENTRY_COUNT)
}

#[test]
fn one_prefix_holds_a_quarter_of_the_table_at_most() {
    skip_if!(missing_bpf_rights());
    // SYNs per tick: 1.9 million a second at a table of 262,144 entries, scaled to this table.
    let flood = (190_000 / (262_144 / u64::from(ENTRY_COUNT))) as u32;
    let held = [
        ("one address", held_by_prefix(1, flood, 20, false)),
        ("a /24", held_by_prefix(256, flood, 20, false)),
        ("handshakes of a /24, slowly", held_by_prefix(256, 8, 3000, true)),
    ];
    println!("{held:?} % of the table");
    assert!(held.iter().all(|(_, held)| *held <= 25.5), "{held:?}");
}
