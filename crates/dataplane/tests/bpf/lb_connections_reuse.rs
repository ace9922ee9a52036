//! Tests of the reuse of expired connection table entries by new connections (`BPF_PROG_TEST_RUN`).

use std::net::Ipv4Addr;
use std::time::{Duration, Instant};

use coreward_dataplane::lb::Options;
use coreward_model::connection_table::{ClockTicks, Connection, TableSize, Timeouts};
use coreward_model::placement::PlacementRule;
use coreward_model::rss::seeded_rng;
use rand::Rng;

use crate::support::balancer::{Balancer, Identification, random_table, service};
use crate::support::stateful::{
    Client, OpenConnection, STATEFUL, VIP, balancer, client, established, ipv4_client, own_number, packet,
};
use crate::support::{ACK, FIN, missing_bpf_rights, skip_if};

const ENTRY_COUNT: u64 = 2048;
/// Number of new connections that together examine every entry of a partition, as each examines 4 entries.
const PER_ROUND: usize = 1024 / 4;

/// Returns a balancer with a full connection table, and the connections, whose last packets were at `start`.
fn full_table(start: Duration, rng: &mut impl Rng) -> (Balancer, Vec<OpenConnection>) {
    let (mut balancer, _) = balancer(ENTRY_COUNT, rng);
    balancer.lb.tick(start);
    let opened = fill(&balancer, rng);
    (balancer, opened)
}

/// Opens connections until no entry is free. Returns those that got an entry.
fn fill(balancer: &Balancer, rng: &mut impl Rng) -> Vec<OpenConnection> {
    let mut opened = Vec::new();
    while balancer.lb.connections_in_use() < ENTRY_COUNT as usize {
        let client = client(rng);
        let (server, number) = balancer.open(client);
        opened.extend(number.map(|number| OpenConnection { client, server, number }));
    }
    opened
}

/// Opens `count` connections. Returns those that got an entry.
fn entries_of(balancer: &Balancer, count: usize, rng: &mut impl Rng) -> Vec<OpenConnection> {
    let open = |client: Client| {
        let (server, number) = balancer.open(client);
        number.map(|number| OpenConnection { client, server, number })
    };
    (0..count).filter_map(|_| open(client(rng))).collect()
}

#[test]
fn new_connection_reuses_an_expired_entry_without_a_sweeper() {
    skip_if!(missing_bpf_rights());
    let mut rng = seeded_rng(141, 0);
    let start = Duration::from_secs(1000);
    let (mut balancer, before) = full_table(start, &mut rng);
    let refused = balancer.events(0, "connection_table_full");
    balancer.lb.tick(start + Duration::from_millis(9900));
    assert_eq!(entries_of(&balancer, 100, &mut rng).len(), 0, "a SYN may be sent again until then");
    balancer.lb.tick(start + Timeouts::default().half_open);
    let new = entries_of(&balancer, 200, &mut rng);
    assert_eq!(new.len(), 200);
    assert_eq!(
        (balancer.events(0, "connection_table_full"), balancer.events(0, "connection_reused")),
        (refused + 100, 200)
    );

    new.iter().for_each(|opened| balancer.expect_by_index(opened));
    assert_eq!((balancer.lb.occupancy(), balancer.lb.connections_in_use()), (ENTRY_COUNT, ENTRY_COUNT as usize));
    let lost: Vec<_> = before.iter().filter(|opened| balancer.entry(opened.client).is_none()).collect();
    assert_eq!(lost.len(), 200);
    let frame = established(&balancer, lost[0].client, lost[0].number);
    balancer.expect_broadcast_or(0, &frame, Identification::Unchanged, "drop_unknown_cookie");
}

#[test]
fn open_connections_lose_entries_only_without_a_sweeper() {
    skip_if!(missing_bpf_rights());
    let mut rng = seeded_rng(142, 0);
    let (start, timers) = (Duration::from_secs(1000), Timeouts::default());
    let (mut balancer, opened) = full_table(start, &mut rng);
    let (closing, open) = opened.split_at(opened.len() / 2);
    open.iter().for_each(|opened| balancer.expect_by_index(opened));
    for opened in closing {
        let fin = packet(&balancer.keys, opened.client, opened.number, ACK | FIN).frame();
        balancer.expect_sent_to(0, &fin, opened.server, "connection_table");
    }
    // Time since the last packet, whether user space has just swept, number of entries that may be reused.
    let cases = [
        (timers.closing - Duration::from_millis(100), false, 0),
        (timers.closing, true, 0),
        (timers.closing + Duration::from_millis(59_900), false, 0),
        (timers.closing + Duration::from_secs(60), false, closing.len()),
        (timers.idle - Duration::from_millis(100), false, 0),
        (timers.idle, true, 0),
        (timers.idle + Duration::from_secs(60), false, open.len()),
    ];
    for (idle, sweeps, expected) in cases {
        balancer.lb.tick(start + idle);
        if sweeps {
            balancer.lb.due_connections(&timers, 0);
        }
        let reused = entries_of(&balancer, 8 * PER_ROUND, &mut rng);
        assert_eq!(reused.len(), expected, "after {idle:?}");
        // A packet establishes the new connections, so that they are idle for less time than the others.
        reused.iter().for_each(|opened| balancer.expect_by_index(opened));
    }
}

#[test]
fn reuse_counts_the_entry_for_its_new_source() {
    skip_if!(missing_bpf_rights());
    let mut rng = seeded_rng(143, 0);
    let start = Duration::from_secs(1000);
    let (mut balancer, _) = balancer(ENTRY_COUNT, &mut rng);
    balancer.lb.tick(start);
    let flood = |number: u32| (Ipv4Addr::from(0xc000_0200 + number % 256), (number / 256) as u16);
    for number in 0..20_000 {
        balancer.open(flood(number));
    }
    assert_eq!(balancer.lb.connections_in_use(), ENTRY_COUNT as usize, "one prefix holds all: no limit is set yet");
    balancer.lb.guard_connection_table();
    balancer.lb.tick(start + Timeouts::default().half_open);
    assert_eq!(balancer.open(flood(20_000)).1, None);
    assert_eq!(balancer.events(0, "connection_source_limited"), 1, "a full table gives each prefix one entry");
    let is_flood = |connection: &Connection| ipv4_client(connection).0.octets()[..3] == [192, 0, 2];
    while balancer.lb.connections(balancer.services[0]).any(|held| is_flood(&held)) {
        balancer.open(client(&mut rng));
    }
    balancer.lb.tick(start + 2 * Timeouts::default().half_open);
    assert!(balancer.open(flood(20_001)).1.is_some(), "the prefix holds none");
    assert_eq!(balancer.open(flood(20_002)).1, None, "it holds one");
    assert_eq!((balancer.lb.occupancy(), balancer.lb.connections_in_use()), (ENTRY_COUNT, ENTRY_COUNT as usize));
}

#[test]
fn packets_read_the_clock_without_a_daemon() {
    skip_if!(missing_bpf_rights());
    let mut rng = seeded_rng(144, 0);
    let options = Options {
        connection_table_size: TableSize::try_from(1024).unwrap(),
        packets_read_clock: true,
        ..Options::default()
    };
    let mut balancer = Balancer::with(&[(service(VIP), STATEFUL)], options, &mut rng);
    let ids = balancer.replace_servers(0, 3, &mut rng);
    balancer.install(0, &random_table(PlacementRule::RoundRobin, 1, 1, &ids, &mut rng));
    balancer.lb.set_owner_number(Some(own_number()));
    let (opened, began) = (balancer.open_with_entry(client(&mut rng)), Instant::now());
    let first = balancer.lb.clock();
    assert_ne!(first, ClockTicks(0), "the SYN read the clock");
    while began.elapsed() < Duration::from_secs(1) {
        balancer.expect_by_index(&opened);
    }
    let passed = balancer.lb.clock().since(first);
    assert!(
        passed >= Duration::from_millis(900) && passed <= began.elapsed() + Duration::from_millis(200),
        "{passed:?}"
    );
    assert_eq!(balancer.entry(opened.client).unwrap().last_seen, balancer.lb.clock());
}
