//! Tests of placement tables. After a switch during operation, every decision must follow one of the two tables. The
//! replacement of candidates is also tested.

use std::collections::HashMap;
use std::net::Ipv4Addr;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use coreward_dataplane::mac::MacAddress;
use coreward_dataplane::test_run;
use coreward_model::placement::{
    BucketCount, CandidateCore, PlacementRule, PlacementTable, PlacementTableMember, PlacementTableState, ServerCore,
    rendezvous_table,
};
use coreward_model::policy::{LeastPolicy, PoolServer, ServerPool};
use coreward_model::rss::{RssKey, seeded_rng, uniform_below};
use coreward_model::{FourTuple, ServerId};
use rand::Rng as _;

use crate::support::balancer::{TestBalancer, VIP, XDP_TX, random_placement_table, server_id_from_number};
use crate::support::{ACK, SYN, TcpPacket, aligned_timestamp_option, missing_bpf_rights, skip_if};

const TABLE_SWITCH_COUNT: u64 = 1_000;
const DECISIONS_BETWEEN_TABLE_SWITCHES: u64 = 30;
const TEST_TIME_LIMIT: Duration = Duration::from_secs(240);

/// Returns a placement table with [`PlacementRule::Table`], in which each bucket of each RSS group has a random server
/// of `servers`.
fn table_with_random_candidates(
    generation: u64,
    buckets: u64,
    group_count: usize,
    servers: &[ServerId],
    rng: &mut impl rand::Rng,
) -> PlacementTable {
    let bucket_count = BucketCount::new(buckets).unwrap();
    let mut draw_random_candidate = |_| {
        let core_slot = uniform_below(rng, servers.len() as u32);
        CandidateCore {
            server: servers[core_slot as usize],
            fixed_point_load: uniform_below(rng, 1000),
            core_slot: core_slot as u16,
        }
    };
    let candidates = (0..group_count as u64 * buckets).map(&mut draw_random_candidate).collect();
    PlacementTable {
        generation,
        rule: PlacementRule::Table,
        bucket_count,
        rss_key_by_group: (0..group_count).map(|_| RssKey::random(rng)).collect(),
        candidates_per_bucket: 1,
        candidates,
        assignment_cost: 0,
        core_slots: servers.iter().map(|server| ServerCore { server: *server, core: 0 }).collect(),
        members: servers.iter().map(|server| PlacementTableMember { server: *server, fixed_point_load: 0 }).collect(),
        consistent_server_by_bucket: rendezvous_table(servers, bucket_count),
        previous_consistent_server_by_bucket: Vec::new(),
        down_servers: Vec::new(),
        load_age_by_core_slot: Vec::new(),
    }
}

#[test]
fn each_decision_follows_one_table_during_switches() {
    skip_if!(missing_bpf_rights());
    let mut rng = seeded_rng(31, 0);
    let mut balancer = TestBalancer::new(&[VIP], &mut rng);
    let server_ids = balancer.replace_servers(0, 2000, &mut rng);
    // The two tables differ in keys, groups, buckets and servers, so a mixture of both would select a third server.
    let tables = [
        table_with_random_candidates(1, 128, 1, &server_ids[..1000], &mut rng),
        table_with_random_candidates(2, 2048, 3, &server_ids[1000..], &mut rng),
    ];
    let frames_with_choices: Vec<(Vec<u8>, [ServerId; 2])> = (0..512)
        .map(|_| {
            let client = (Ipv4Addr::from(rng.next_u32()), rng.next_u32() as u16);
            let frame =
                TcpPacket { flags: SYN, tcp_options: aligned_timestamp_option(1, 0), ..TcpPacket::new(client, VIP) }
                    .to_frame();
            let choose_server = |table: &PlacementTable| {
                table.select_server(&mut PlacementTableState::for_table(table), &FourTuple::ipv4(client, VIP)).unwrap()
            };
            (frame, [choose_server(&tables[0]), choose_server(&tables[1])])
        })
        .collect();
    balancer.install_table(0, &tables[0]);
    balancer.lb.drop_model();
    let program = balancer.lb.program_fd().try_clone_to_owned().unwrap();
    let servers_by_mac: HashMap<MacAddress, ServerId> =
        balancer.server_macs.iter().map(|((_, server), mac)| (*mac, *server)).collect();

    let (is_done, decision_counters) = (AtomicBool::new(false), [AtomicU64::new(0), AtomicU64::new(0)]);
    let start_time = Instant::now();
    std::thread::scope(|scope| {
        let packet_thread = scope.spawn(|| {
            let mut decisions_of_neither_table = Vec::new();
            while !is_done.load(Ordering::Relaxed) && start_time.elapsed() < 2 * TEST_TIME_LIMIT {
                for (frame, expected_servers) in &frames_with_choices {
                    let outcome = test_run::run_program(std::os::fd::AsFd::as_fd(&program), frame, 1).unwrap();
                    let mac = MacAddress(outcome.packet[..6].try_into().unwrap());
                    let server = servers_by_mac.get(&mac).filter(|_| outcome.verdict == XDP_TX);
                    match expected_servers.iter().position(|expected| Some(expected) == server) {
                        Some(table) => _ = decision_counters[table].fetch_add(1, Ordering::Relaxed),
                        None => decisions_of_neither_table.push((outcome.verdict, mac, *expected_servers)),
                    }
                }
            }
            decisions_of_neither_table
        });
        let sum_decision_counts = || decision_counters.iter().map(|count| count.load(Ordering::Relaxed)).sum::<u64>();
        let mut switch_count = 0;
        while switch_count < TABLE_SWITCH_COUNT && start_time.elapsed() < TEST_TIME_LIMIT {
            switch_count += 1;
            // Each table is active for the same number of decisions, because one table is written faster than the
            // other.
            let next_switch_count = sum_decision_counts() + DECISIONS_BETWEEN_TABLE_SWITCHES;
            while sum_decision_counts() < next_switch_count && start_time.elapsed() < TEST_TIME_LIMIT {
                std::thread::yield_now();
            }
            let generation = switch_count + 2;
            let next_table = PlacementTable { generation, ..tables[(switch_count % 2) as usize].clone() };
            balancer.install_table(0, &next_table);
        }
        is_done.store(true, Ordering::Relaxed);
        let stray_decisions = packet_thread.join().unwrap();
        assert!(
            stray_decisions.is_empty(),
            "{} decisions of neither table, first {:?}",
            stray_decisions.len(),
            stray_decisions[0]
        );
        assert_eq!(switch_count, TABLE_SWITCH_COUNT, "in {TEST_TIME_LIMIT:?}");
    });
    let decisions_by_table = decision_counters.map(|count| count.load(Ordering::Relaxed));
    println!("{TABLE_SWITCH_COUNT} switches, decisions by table {decisions_by_table:?}");
    assert!(decisions_by_table.iter().all(|count| *count > 10 * TABLE_SWITCH_COUNT), "{decisions_by_table:?}");
}

/// Returns a placement table that prefers the first servers in `ids`, because each server has as many open connections
/// as its position in `ids`.
fn table_preferring_first_servers(ids: &[ServerId], buckets: BucketCount) -> PlacementTable {
    let new_pool_server = |(open_connections, id): (usize, &ServerId)| PoolServer {
        open_connection_count: open_connections as u32,
        ..PoolServer::new(*id)
    };
    LeastPolicy::new(3)
        .build_candidate_table(&ServerPool::new(ids.iter().enumerate().map(new_pool_server).collect(), 1), buckets)
}

/// Asserts that a SYN from `client` is sent to the server that `table` selects.
fn expect_syn_follows_table(
    balancer: &TestBalancer,
    table: &PlacementTable,
    placement_state: &mut PlacementTableState,
    client: (Ipv4Addr, u16),
) {
    let syn_frame =
        TcpPacket { flags: SYN, tcp_options: aligned_timestamp_option(1, 0), ..TcpPacket::new(client, VIP) }.to_frame();
    let chosen_server = table.select_server(placement_state, &FourTuple::ipv4(client, VIP)).unwrap();
    assert_eq!(balancer.forward_frame(&syn_frame), balancer.server_macs[&(0, chosen_server)], "SYN of {client:?}");
}

#[test]
fn replaced_candidates_affect_only_new_connections() {
    skip_if!(missing_bpf_rights());
    let mut rng = seeded_rng(32, 0);
    for groups in [1, 3] {
        let mut balancer = TestBalancer::new(&[VIP], &mut rng);
        let server_ids = balancer.replace_servers(0, 12, &mut rng);
        let table = random_placement_table(PlacementRule::Table, 7, groups, &server_ids, &mut rng);
        balancer.install_table(0, &table);
        let service_index = balancer.service_indexes[0];
        balancer
            .lb
            .replace_candidates(service_index, |present_table| {
                table_preferring_first_servers(&server_ids[..6], present_table.bucket_count)
            })
            .unwrap();
        assert_eq!(balancer.lb.placement_table_generation(service_index), Some(7));
        let expected_table = PlacementTable {
            rss_key_by_group: table.rss_key_by_group[..1].to_vec(),
            ..table_preferring_first_servers(&server_ids[..6], table.bucket_count)
        };
        let mut placement_state = PlacementTableState::for_table(&expected_table);
        for port in 0..500 {
            let client = (Ipv4Addr::from(rng.next_u32()), 1024 + port);
            expect_syn_follows_table(&balancer, &expected_table, &mut placement_state, client);
            // A connection without timestamps (from another port) follows its bucket.
            let client = (client.0, 40_000 + port);
            let ack_frame = TcpPacket { flags: ACK, ..TcpPacket::new(client, VIP) }.to_frame();
            let consistent_server = table.select_consistent_server(&FourTuple::ipv4(client, VIP)).unwrap();
            assert_eq!(balancer.forward_frame(&ack_frame), balancer.server_macs[&(0, consistent_server)], "ACK {port}");
        }
        // The controller's next table replaces the table whose candidates were replaced.
        let next_table = random_placement_table(PlacementRule::Table, 8, groups, &server_ids, &mut rng);
        balancer.install_table(0, &next_table);
        let client = (Ipv4Addr::from(rng.next_u32()), 7);
        expect_syn_follows_table(&balancer, &next_table, &mut PlacementTableState::for_table(&next_table), client);
    }
}

#[test]
fn candidates_are_not_replaced_without_a_table_or_candidates() {
    skip_if!(missing_bpf_rights());
    let mut rng = seeded_rng(33, 0);
    let mut balancer = TestBalancer::new(&[VIP], &mut rng);
    let service_index = balancer.service_indexes[0];
    balancer.lb.replace_candidates(service_index, |_| panic!("no table")).unwrap();
    let server_ids = balancer.replace_servers(0, 3, &mut rng);
    balancer.install_table(0, &random_placement_table(PlacementRule::LeastAssigned, 4, 1, &server_ids, &mut rng));
    balancer
        .lb
        .replace_candidates(service_index, |present_table| PlacementTable::empty(present_table.bucket_count))
        .unwrap();
    assert_eq!(balancer.lb.placement_table_generation(service_index), Some(4));
    let table_of_foreign_server =
        table_preferring_first_servers(&[server_id_from_number(1)], BucketCount::new(2048).unwrap());
    balancer.lb.replace_candidates(service_index, |_| table_of_foreign_server).unwrap_err();
}
