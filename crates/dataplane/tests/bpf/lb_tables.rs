//! Tests of placement tables: a switch during operation, in which every decision must follow one of the two tables, and
//! the replacement of candidates.

use std::collections::HashMap;
use std::net::Ipv4Addr;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use coreward_dataplane::mac::MacAddress;
use coreward_dataplane::test_run;
use coreward_model::placement::{
    BucketCount, Candidate, Member, PlacementRule, PlacementState, PlacementTable, ServerCore, rendezvous_table,
};
use coreward_model::policy::{LeastByMetric, Pool, PoolServer};
use coreward_model::rss::{RssKey, seeded_rng, uniform_below};
use coreward_model::{FourTuple, ServerId};
use rand::Rng as _;

use crate::support::balancer::{Balancer, VIP, XDP_TX, id, random_table};
use crate::support::{ACK, SYN, Tcp, aligned_timestamp, missing_bpf_rights, skip_if};

const SWITCH_COUNT: u64 = 1_000;
const DECISIONS_PER_TABLE: u64 = 30;
const TIME_LIMIT: Duration = Duration::from_secs(240);

/// Returns a table with the rule `Table`, in which each bucket of each group has a server drawn from `servers`.
fn table(
    generation: u64,
    buckets: u64,
    groups: usize,
    servers: &[ServerId],
    rng: &mut impl rand::Rng,
) -> PlacementTable {
    let bucket_count = BucketCount::new(buckets).unwrap();
    let mut candidate = |_| {
        let slot = uniform_below(rng, servers.len() as u32);
        Candidate { server: servers[slot as usize], load: uniform_below(rng, 1000), core_slot: slot as u16 }
    };
    let candidates = (0..groups as u64 * buckets).map(&mut candidate).collect();
    PlacementTable {
        generation,
        rule: PlacementRule::Table,
        bucket_count,
        groups: (0..groups).map(|_| RssKey::random(rng)).collect(),
        candidates_per_bucket: 1,
        candidates,
        assignment_cost: 0,
        core_slots: servers.iter().map(|server| ServerCore { server: *server, core: 0 }).collect(),
        members: servers.iter().map(|server| Member { server: *server, load: 0 }).collect(),
        consistent_servers: rendezvous_table(servers, bucket_count),
        previous_consistent_servers: Vec::new(),
        down_servers: Vec::new(),
        core_slot_ages: Vec::new(),
    }
}

#[test]
fn every_decision_belongs_to_one_table_while_tables_are_switched() {
    skip_if!(missing_bpf_rights());
    let mut rng = seeded_rng(31, 0);
    let mut balancer = Balancer::new(&[VIP], &mut rng);
    let ids = balancer.replace_servers(0, 2000, &mut rng);
    // The two tables differ in keys, groups, buckets and servers, so a mixture of both would select a third server.
    let tables = [table(1, 128, 1, &ids[..1000], &mut rng), table(2, 2048, 3, &ids[1000..], &mut rng)];
    let packets: Vec<(Vec<u8>, [ServerId; 2])> = (0..512)
        .map(|_| {
            let client = (Ipv4Addr::from(rng.next_u32()), rng.next_u32() as u16);
            let frame = Tcp { flags: SYN, options: aligned_timestamp(1, 0), ..Tcp::new(client, VIP) }.frame();
            let chosen = |table: &PlacementTable| {
                table.choose(&mut PlacementState::for_table(table), &FourTuple::ipv4(client, VIP)).unwrap()
            };
            (frame, [chosen(&tables[0]), chosen(&tables[1])])
        })
        .collect();
    balancer.install(0, &tables[0]);
    balancer.lb.end_comparison();
    let program = balancer.lb.program().try_clone_to_owned().unwrap();
    let server_of: HashMap<MacAddress, ServerId> =
        balancer.macs.iter().map(|((_, server), mac)| (*mac, *server)).collect();

    let (done, decided) = (AtomicBool::new(false), [AtomicU64::new(0), AtomicU64::new(0)]);
    let start = Instant::now();
    std::thread::scope(|scope| {
        let packets_pass = scope.spawn(|| {
            let mut strays = Vec::new();
            while !done.load(Ordering::Relaxed) && start.elapsed() < 2 * TIME_LIMIT {
                for (frame, expected) in &packets {
                    let outcome = test_run::run(std::os::fd::AsFd::as_fd(&program), frame, 1).unwrap();
                    let mac = MacAddress(outcome.packet[..6].try_into().unwrap());
                    let server = server_of.get(&mac).filter(|_| outcome.verdict == XDP_TX);
                    match expected.iter().position(|expected| Some(expected) == server) {
                        Some(table) => _ = decided[table].fetch_add(1, Ordering::Relaxed),
                        None => strays.push((outcome.verdict, mac, *expected)),
                    }
                }
            }
            strays
        });
        let decisions = || decided.iter().map(|count| count.load(Ordering::Relaxed)).sum::<u64>();
        let mut switches = 0;
        while switches < SWITCH_COUNT && start.elapsed() < TIME_LIMIT {
            switches += 1;
            // Each table stays in force for the same number of decisions, because one table is written faster than the
            // other.
            let stands_until = decisions() + DECISIONS_PER_TABLE;
            while decisions() < stands_until && start.elapsed() < TIME_LIMIT {
                std::thread::yield_now();
            }
            let generation = switches + 2;
            let next = PlacementTable { generation, ..tables[(switches % 2) as usize].clone() };
            balancer.install(0, &next);
        }
        done.store(true, Ordering::Relaxed);
        let strays = packets_pass.join().unwrap();
        assert!(strays.is_empty(), "{} decisions of neither table, first {:?}", strays.len(), strays[0]);
        assert_eq!(switches, SWITCH_COUNT, "in {TIME_LIMIT:?}");
    });
    let decided = decided.map(|count| count.load(Ordering::Relaxed));
    println!("{SWITCH_COUNT} switches, decisions by table {decided:?}");
    assert!(decided.iter().all(|count| *count > 10 * SWITCH_COUNT), "{decided:?}");
}

/// Returns a table that prefers the first servers: each server's number of open connections is its position in `ids`.
fn least(ids: &[ServerId], buckets: BucketCount) -> PlacementTable {
    let server = |(open_connections, id): (usize, &ServerId)| PoolServer {
        open_connections: open_connections as u32,
        ..PoolServer::new(*id)
    };
    LeastByMetric::new(3).candidate_table(&Pool::new(ids.iter().enumerate().map(server).collect(), 1), buckets)
}

#[test]
fn replaced_candidates_decide_new_connections_only() {
    skip_if!(missing_bpf_rights());
    let mut rng = seeded_rng(32, 0);
    for groups in [1, 3] {
        let mut balancer = Balancer::new(&[VIP], &mut rng);
        let ids = balancer.replace_servers(0, 12, &mut rng);
        let table = random_table(PlacementRule::Table, 7, groups, &ids, &mut rng);
        balancer.install(0, &table);
        let service = balancer.services[0];
        balancer.lb.replace_candidates(service, |in_force| least(&ids[..6], in_force.bucket_count)).unwrap();
        assert_eq!(balancer.lb.table_generation(service), Some(7));
        let expected = PlacementTable { groups: table.groups[..1].to_vec(), ..least(&ids[..6], table.bucket_count) };
        let mut state = PlacementState::for_table(&expected);
        for port in 0..500 {
            let client = (Ipv4Addr::from(rng.next_u32()), 1024 + port);
            let tuple = FourTuple::ipv4(client, VIP);
            let syn = Tcp { flags: SYN, options: aligned_timestamp(1, 0), ..Tcp::new(client, VIP) }.frame();
            let chosen = expected.choose(&mut state, &tuple).unwrap();
            assert_eq!(balancer.destination(&syn), balancer.macs[&(0, chosen)], "SYN {port}");
            // A connection without timestamps (from another port) follows the bucket.
            let client = (client.0, 40_000 + port);
            let ack = Tcp { flags: ACK, ..Tcp::new(client, VIP) }.frame();
            let consistent = table.choose_consistent(&FourTuple::ipv4(client, VIP)).unwrap();
            assert_eq!(balancer.destination(&ack), balancer.macs[&(0, consistent)], "ACK {port}");
        }
        // The controller's next table replaces the table with replaced candidates.
        let next = random_table(PlacementRule::Table, 8, groups, &ids, &mut rng);
        balancer.install(0, &next);
        let client = (Ipv4Addr::from(rng.next_u32()), 7);
        let syn = Tcp { flags: SYN, options: aligned_timestamp(1, 0), ..Tcp::new(client, VIP) }.frame();
        let chosen = next.choose(&mut PlacementState::for_table(&next), &FourTuple::ipv4(client, VIP)).unwrap();
        assert_eq!(balancer.destination(&syn), balancer.macs[&(0, chosen)]);
    }
}

#[test]
fn nothing_is_replaced_without_table_or_candidates() {
    skip_if!(missing_bpf_rights());
    let mut rng = seeded_rng(33, 0);
    let mut balancer = Balancer::new(&[VIP], &mut rng);
    let service = balancer.services[0];
    balancer.lb.replace_candidates(service, |_| panic!("no table")).unwrap();
    let ids = balancer.replace_servers(0, 3, &mut rng);
    balancer.install(0, &random_table(PlacementRule::LeastAssigned, 4, 1, &ids, &mut rng));
    balancer.lb.replace_candidates(service, |in_force| PlacementTable::empty(in_force.bucket_count)).unwrap();
    assert_eq!(balancer.lb.table_generation(service), Some(4));
    let stranger = least(&[id(1)], BucketCount::new(2048).unwrap());
    balancer.lb.replace_candidates(service, |_| stranger).unwrap_err();
}
