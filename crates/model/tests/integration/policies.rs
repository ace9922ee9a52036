//! Properties of the policies' tables.

use std::collections::{HashMap, HashSet};
use std::net::Ipv4Addr;

use coreward_model::placement::{BucketCount, PlacementRule, PlacementTable, PlacementTableState};
use coreward_model::policy::{
    POLICY_REGISTRY, PlacementPolicy, PoolServer, ServerCapacity, ServerPool, ServerWeight, TelemetryLevel,
    TrafficRates, create_policy_by_name, policy_names, required_telemetry_level,
};
use coreward_model::rss::{IndirectionTable, RssConfig, RssKey, seeded_rng};
use coreward_model::{FourTuple, ServerId};
use proptest::prelude::*;

fn server_id(number: u64) -> ServerId {
    ServerId::try_from(number).unwrap()
}

fn seeded_rss_key(seed: u64) -> RssKey {
    RssKey::random(&mut seeded_rng(seed, 99))
}

/// Returns a server with four cores and a balanced indirection table of 128 entries.
fn four_core_server(number: u64, rss_key: &RssKey, loads: Option<[f64; 4]>) -> PoolServer {
    PoolServer {
        loads: loads.map(|loads| Vec::from(loads).into()),
        rss: Some(RssConfig {
            key: rss_key.clone(),
            indirection_table: IndirectionTable::draw_balanced_entries(number, 128, 4).unwrap(),
        }),
        open_connection_count: 10,
        ..PoolServer::new(server_id(number))
    }
}

fn compute_table_with_128_buckets(
    policy: &mut dyn PlacementPolicy,
    pool: &ServerPool,
    generation: u32,
) -> PlacementTable {
    policy.compute_table(pool, BucketCount::PAPER_VALUE, generation.into())
}

fn four_tuples(count: u32) -> impl Iterator<Item = FourTuple> {
    (0..count).map(|n| {
        let client_address = Ipv4Addr::from(0x0a01_0007 + n / 500);
        FourTuple::ipv4((client_address, (1024 + (n * 7919) % 60_000) as u16), (Ipv4Addr::new(10, 200, 0, 1), 80))
    })
}

fn core_selected_by_rss(server: &PoolServer, tuple: &FourTuple) -> u16 {
    let rss = server.rss.as_ref().unwrap();
    rss.indirection_table.queue_for_hash(rss.key.toeplitz_hash(&tuple.bytes()))
}

#[test]
fn hash_policy_uses_all_cores_of_every_server() {
    let rss_key = seeded_rss_key(1);
    let pool = ServerPool::new((1..=4).map(|n| four_core_server(n, &rss_key, None)).collect(), 1);
    let table = create_policy_by_name("hash", 5).unwrap().compute_table(&pool, BucketCount::PAPER_VALUE, 1);
    let mut connection_count_by_core: HashMap<(ServerId, u16), u32> = HashMap::new();
    for tuple in four_tuples(16_000) {
        let selected_id = table.select_server(&mut PlacementTableState::default(), &tuple).unwrap();
        let server = pool.servers().iter().find(|server| server.id == selected_id).unwrap();
        *connection_count_by_core.entry((selected_id, core_selected_by_rss(server, &tuple))).or_default() += 1;
    }
    assert_eq!(connection_count_by_core.len(), 16);
    // 1,000 are expected on each core. A bucket by the servers' own hash would leave most cores of a server with none.
    assert!(
        connection_count_by_core.values().all(|count| (600..1_500).contains(count)),
        "{connection_count_by_core:?}"
    );
}

#[test]
fn crossrss_assigns_buckets_cyclically_before_the_first_report() {
    let rss_key = seeded_rss_key(1);
    let pool = ServerPool::new([9, 3, 5].map(|n| four_core_server(n, &rss_key, None)).to_vec(), 1);
    for policy in ["crossrss", "crossrss-plus"] {
        let table = compute_table_with_128_buckets(create_policy_by_name(policy, 1).unwrap().as_mut(), &pool, 1);
        for bucket in 0..128 {
            assert_eq!(
                table.bucket_candidates(0, bucket)[0].server,
                server_id([3, 5, 9][bucket as usize % 3]),
                "bucket {bucket}"
            );
        }
    }
}

#[test]
fn crossrss_selects_the_least_loaded_core_and_the_lowest_id_of_equals() {
    let rss_key = seeded_rss_key(1);
    let loads = [[0.5, 0.2, 0.3, 0.4], [0.3, 0.3, 0.3, 0.3], [0.2, 0.2, 0.9, 0.9]];
    let servers: Vec<_> = (0..3).map(|n| four_core_server(n as u64 + 1, &rss_key, Some(loads[n]))).collect();
    let pool = ServerPool::new(servers, 1);
    let table = compute_table_with_128_buckets(create_policy_by_name("crossrss", 1).unwrap().as_mut(), &pool, 1);
    assert_eq!(table.rule, PlacementRule::Table);
    for bucket in 0..128 {
        let load_of_reachable_core = |server: &&PoolServer| {
            let core = server.rss.as_ref().unwrap().indirection_table.queue_for_hash(bucket);
            server.core_load(core, f64::NAN)
        };
        let least_load =
            pool.servers().iter().map(|server| load_of_reachable_core(&server)).fold(f64::INFINITY, f64::min);
        let expected_server =
            pool.servers().iter().find(|server| load_of_reachable_core(server) == least_load).unwrap();
        assert_eq!(table.bucket_candidates(0, bucket)[0].server, expected_server.id, "bucket {bucket}");
    }
}

#[test]
fn crossrss_plus_spreads_a_burst_of_connections_between_reports() {
    let rss_key = seeded_rss_key(1);
    let servers: Vec<_> = (1..=4).map(|n| four_core_server(n, &rss_key, Some([0.5 - n as f64 / 1000.0; 4]))).collect();
    let pool = ServerPool::new(servers, 1);
    let largest_connection_count = |policy: &str| {
        let table = compute_table_with_128_buckets(create_policy_by_name(policy, 1).unwrap().as_mut(), &pool, 1);
        let mut state = PlacementTableState::for_table(&table);
        let mut connection_count_by_server: HashMap<ServerId, u32> = HashMap::new();
        four_tuples(400).for_each(|tuple| {
            *connection_count_by_server.entry(table.select_server(&mut state, &tuple).unwrap()).or_default() += 1
        });
        connection_count_by_server.into_values().max().unwrap()
    };
    assert_eq!(largest_connection_count("crossrss"), 400);
    assert!(largest_connection_count("crossrss-plus") <= 110);
}

#[test]
fn crossrss_plus_spreads_connections_evenly_over_an_idle_pool() {
    let rss_key = seeded_rss_key(1);
    let idle_server = |n| PoolServer { open_connection_count: 0, ..four_core_server(n, &rss_key, Some([0.0; 4])) };
    let pool = ServerPool::new((1..=4).map(idle_server).collect(), 1);
    let table = compute_table_with_128_buckets(create_policy_by_name("crossrss-plus", 1).unwrap().as_mut(), &pool, 1);
    let mut state = PlacementTableState::for_table(&table);
    let mut connection_count_by_server: HashMap<ServerId, u32> = HashMap::new();
    four_tuples(400).for_each(|tuple| {
        *connection_count_by_server.entry(table.select_server(&mut state, &tuple).unwrap()).or_default() += 1
    });
    assert!(
        connection_count_by_server.len() == 4
            && connection_count_by_server.values().all(|count| (90..=110).contains(count)),
        "{connection_count_by_server:?}"
    );
}

#[test]
fn crossrss_plus_spreads_connections_evenly_over_cores_before_the_first_report() {
    let rss_key = seeded_rss_key(1);
    let pool = ServerPool::new((1..=4).map(|n| four_core_server(n, &rss_key, None)).collect(), 1);
    let table = compute_table_with_128_buckets(create_policy_by_name("crossrss-plus", 1).unwrap().as_mut(), &pool, 1);
    let mut state = PlacementTableState::for_table(&table);
    let mut connection_count_by_core: HashMap<(ServerId, u16), u32> = HashMap::new();
    for tuple in four_tuples(1_600) {
        let selected_id = table.select_server(&mut state, &tuple).unwrap();
        let server = pool.servers().iter().find(|server| server.id == selected_id).unwrap();
        *connection_count_by_core.entry((selected_id, core_selected_by_rss(server, &tuple))).or_default() += 1;
    }
    assert!(
        connection_count_by_core.len() == 16
            && connection_count_by_core.values().all(|count| (95..=105).contains(count)),
        "{connection_count_by_core:?}"
    );
}

#[test]
fn connection_cost_is_1_5_times_the_deficit_per_connection() {
    let rss_key = seeded_rss_key(1);
    // The mean is 0.5, and two cores lack 0.2 and 0.1.
    let loads = [[0.3, 0.5, 0.5, 0.7], [0.5, 0.4, 0.5, 0.6]];
    let create_pool =
        || ServerPool::new((0..2).map(|n| four_core_server(n as u64 + 1, &rss_key, Some(loads[n]))).collect(), 2);
    let mut policy = create_policy_by_name("crossrss-plus", 1).unwrap();
    // The loads do not change, so newest and recent loads are the same.
    let mut assignment_cost_for = |opened_connection_count| {
        let table = policy.compute_table(
            &create_pool().with_opened_connection_count(opened_connection_count),
            BucketCount::PAPER_VALUE,
            1,
        );
        f64::from(table.assignment_cost) / f64::from(coreward_intf::LOAD_ONE)
    };
    // The cost is 1.5 x 0.3 over 30 connections, of which each of the two load balancers gets half.
    assert!((assignment_cost_for(30) - 0.03).abs() < 1e-5);
    // The expected number changes slowly, to 0.1 x 130 + 0.9 x 30.
    assert!((assignment_cost_for(130) - 0.0225).abs() < 1e-5);
}

/// Checks that each policy whose tables depend on the number of opened connections requests it from load balancers.
#[test]
fn policies_that_use_opened_connection_counts_request_telemetry() {
    let rss_key = seeded_rss_key(1);
    let loads = [[0.3, 0.5, 0.5, 0.7], [0.5, 0.4, 0.5, 0.6]];
    let pool = ServerPool::new((0..2).map(|n| four_core_server(n as u64 + 1, &rss_key, Some(loads[n]))).collect(), 1);
    let mut dependent_policies = Vec::new();
    for (name, make_policy) in POLICY_REGISTRY {
        let cost_and_candidates_for = |opened_connection_count| {
            let table = make_policy(1).compute_table(
                &pool.clone().with_opened_connection_count(opened_connection_count),
                BucketCount::PAPER_VALUE,
                1,
            );
            (table.assignment_cost, table.candidates)
        };
        if cost_and_candidates_for(10) != cost_and_candidates_for(1000) {
            assert_ne!(required_telemetry_level(name), TelemetryLevel::Nothing, "{name}");
            dependent_policies.push(name);
        }
    }
    assert_eq!(dependent_policies, ["crossrss-plus"]);
}

#[test]
fn cost_of_a_request_is_the_mean_load_per_request() {
    let rss_key = seeded_rss_key(1);
    let loads = [[0.3, 0.5, 0.5, 0.7], [0.5, 0.4, 0.5, 0.6]];
    let pool = ServerPool::new((0..2).map(|n| four_core_server(n as u64 + 1, &rss_key, Some(loads[n]))).collect(), 2);
    let pool = pool.with_opened_connection_count(400).with_placements_counted_as_requests();
    let table = compute_table_with_128_buckets(create_policy_by_name("crossrss-plus", 1).unwrap().as_mut(), &pool, 1);
    // The cost is all load (4) over an interval's requests, of which each of the two load balancers gets half.
    let assignment_cost = f64::from(table.assignment_cost) / f64::from(coreward_intf::LOAD_ONE);
    assert!((assignment_cost - 0.02).abs() < 1e-5, "{assignment_cost}");
}

#[test]
fn servers_outside_the_four_largest_rss_groups_use_mean_load() {
    // Six keys give four groups, and the servers of the other two keys count with their mean load. One server's RSS is
    // unknown.
    let mut servers: Vec<_> = (1..=7).map(|n| four_core_server(n, &seeded_rss_key(n.min(6)), Some([0.5; 4]))).collect();
    servers.push(PoolServer { rss: None, ..four_core_server(8, &seeded_rss_key(1), Some([0.0, 0.0, 0.2, 0.2])) });
    let pool = ServerPool::new(servers, 1);
    let table = compute_table_with_128_buckets(create_policy_by_name("crossrss", 1).unwrap().as_mut(), &pool, 1);
    assert_eq!(table.rss_key_by_group.len(), 4);
    assert_eq!(table.rss_key_by_group[0], seeded_rss_key(6));
    let selected_ids: HashSet<_> = four_tuples(100)
        .map(|tuple| table.select_server(&mut PlacementTableState::default(), &tuple).unwrap())
        .collect();
    assert_eq!(selected_ids, HashSet::from([server_id(8)]));
}

#[test]
fn missing_loads_count_as_neutral_and_draining_server_is_excluded() {
    let rss_key = seeded_rss_key(1);
    let mut servers: Vec<_> =
        [[0.1; 4], [0.9; 4]].iter().zip(1..).map(|(loads, n)| four_core_server(n, &rss_key, Some(*loads))).collect();
    servers.push(four_core_server(3, &rss_key, None));
    let server_of_bucket_0 = |servers: &[PoolServer]| {
        let pool = ServerPool::new(servers.to_vec(), 1);
        let table = compute_table_with_128_buckets(create_policy_by_name("crossrss", 1).unwrap().as_mut(), &pool, 1);
        table.bucket_candidates(0, 0)[0].server
    };
    assert_eq!(server_of_bucket_0(&servers), server_id(1));
    servers[0].is_eligible = false;
    // Neutral is now the mean of the remaining servers, which is 0.9 on both, and the lower id wins.
    assert_eq!(server_of_bucket_0(&servers), server_id(2));
    servers[1].loads = Some(vec![0.95, 0.95, 0.9, 0.9].into());
    let pool = ServerPool::new(servers.clone(), 1);
    assert!((pool.neutral_load() - 0.925).abs() < 1e-9);
}

proptest! {
    #[test]
    fn every_policy_selects_only_eligible_servers(
        is_eligible_by_server in proptest::collection::vec(any::<bool>(), 1..20),
        seed: u64, bits in 0u32..9, core_count in 1u16..9,
        has_loads_by_server in proptest::collection::vec(any::<bool>(), 20),
    ) {
        let servers: Vec<PoolServer> = is_eligible_by_server.iter().enumerate().map(|(n, eligible)| PoolServer {
            is_eligible: *eligible,
            loads: has_loads_by_server[n]
                .then(|| (0..core_count).map(|core| f64::from(core) / 10.0).collect::<Vec<_>>().into()),
            rss: (n % 5 != 0).then(|| RssConfig {
                key: seeded_rss_key(n as u64 % 6),
                indirection_table: IndirectionTable::draw_independent_entries(n as u64, 1 << (n % 8), core_count)
                    .unwrap(),
            }),
            open_connection_count: n as u32,
            weight: ServerWeight::new(n as u64 % 4 + 1).unwrap(),
            slow_start_fraction: if n % 3 == 0 { 0.2 } else { 1.0 },
            capacity: (n % 4 == 0).then(|| ServerCapacity::new(n as f64 + 0.5).unwrap()),
            traffic: has_loads_by_server[n].then(|| TrafficRates {
                packets_per_second: n as f64 * 1e3,
                bytes_per_second: 1e9 / (n + 1) as f64,
            }),
            ..PoolServer::new(server_id(n as u64 * 37))
        }).collect();
        let eligible_ids: HashSet<ServerId> = servers.iter().filter(|s| s.is_eligible).map(|s| s.id).collect();
        let pool = ServerPool::new(servers, 2);
        for name in policy_names() {
            let bucket_count = BucketCount::new(1 << bits).unwrap();
            let table = create_policy_by_name(name, seed).unwrap().compute_table(&pool, bucket_count, 1);
            let mut state = PlacementTableState::for_table(&table);
            for tuple in four_tuples(50) {
                let selected_id = table.select_server(&mut state, &tuple);
                prop_assert_eq!(selected_id.is_none(), eligible_ids.is_empty());
                prop_assert!(selected_id.is_none_or(|server| eligible_ids.contains(&server)), "{}: {:?}", name,
                    selected_id);
                let server = table.select_consistent_server(&tuple);
                prop_assert!(server.is_none_or(|server| eligible_ids.contains(&server)));
            }
        }
    }
}

#[test]
fn tables_depend_on_loads_exactly_if_policy_reads_loads() {
    let rss_key = seeded_rss_key(1);
    let pools = [(0, [0.0; 4]), (40, [0.9, 0.1, 0.5, 0.2])].map(|(open_connections, loads)| {
        let traffic_rates =
            |rate: u32| Some(TrafficRates { packets_per_second: rate.into(), bytes_per_second: rate.into() });
        let busy_server = |n| PoolServer {
            open_connection_count: open_connections,
            traffic: traffic_rates(open_connections),
            ..four_core_server(n, &rss_key, Some(loads))
        };
        let idle_server =
            |n| PoolServer { traffic: traffic_rates(10), ..four_core_server(n, &rss_key, Some([0.5; 4])) };
        ServerPool::new((1..=20).map(|n| if n % 2 == 0 { busy_server(n) } else { idle_server(n) }).collect(), 1)
    });
    for name in policy_names() {
        let mut policy = create_policy_by_name(name, 1).unwrap();
        let [idle_pool_table, loaded_pool_table] = pools.each_ref().map(|pool| {
            let table = policy.compute_table(pool, BucketCount::PAPER_VALUE, 1);
            let members: Vec<ServerId> = table.members.iter().map(|member| member.server).collect();
            let loads: Vec<u32> = table.members.iter().map(|member| member.fixed_point_load).collect();
            (table.candidates, members, if table.rule == PlacementRule::PowerOfTwo { loads } else { Vec::new() })
        });
        assert_eq!(idle_pool_table != loaded_pool_table, policy.reads_loads(), "{name}");
    }
}

#[test]
fn unknown_policy_is_rejected_with_the_list_of_policies() {
    assert_eq!(
        create_policy_by_name("crosrss", 1).err().unwrap().to_string(),
        "policy \"crosrss\" does not exist: expected one of hash, consistent-hash, maglev, bounded-load, rr, wrr, \
         awrr, pow2, pow2:connections, pow2:packets, pow2:bytes, least, least:packets, least:bytes, least:cpu, \
         crossrss, crossrss-plus"
    );
}

/// Returns the fraction of new connections over 50 s that a server of weight 2 gets in a pool with two servers of
/// weight 1. The load of a core is `base_load`, plus `load_per_connection` for each connection that it got in the last
/// interval.
fn connection_fraction_of_heavy_server(policy_name: &str, base_load: f64, load_per_connection: f64) -> f64 {
    const CONNECTIONS_PER_REPORT_INTERVAL: u32 = 60;
    let rss_key = seeded_rss_key(7);
    let mut policy = create_policy_by_name(policy_name, 5).unwrap();
    let mut core_loads_by_server = [[base_load; 4]; 3];
    let mut connection_count_by_server = [0u32; 3];
    for generation in 1..=500u32 {
        let servers: Vec<PoolServer> = (0..3)
            .map(|n| PoolServer {
                weight: ServerWeight::new(if n == 0 { 2 } else { 1 }).unwrap(),
                ..four_core_server(n as u64 + 1, &rss_key, Some(core_loads_by_server[n]))
            })
            .collect();
        let pool =
            ServerPool::new(servers.clone(), 1).with_opened_connection_count(CONNECTIONS_PER_REPORT_INTERVAL.into());
        let table = compute_table_with_128_buckets(policy.as_mut(), &pool, generation);
        let mut state = PlacementTableState::for_table(&table);
        core_loads_by_server = [[base_load; 4]; 3];
        for tuple in four_tuples(CONNECTIONS_PER_REPORT_INTERVAL * (generation + 1))
            .skip((CONNECTIONS_PER_REPORT_INTERVAL * generation) as usize)
        {
            let server_index = usize::from(table.select_server(&mut state, &tuple).unwrap().get()) - 1;
            core_loads_by_server[server_index][usize::from(core_selected_by_rss(&servers[server_index], &tuple))] +=
                load_per_connection;
            connection_count_by_server[server_index] += 1;
        }
    }
    f64::from(connection_count_by_server[0]) / f64::from(connection_count_by_server.iter().sum::<u32>())
}

#[test]
fn server_with_half_of_the_weight_gets_half_of_the_connections() {
    // Connections make the load.
    for policy in ["crossrss-plus", "crossrss", "least:cpu", "hash", "awrr", "pow2"] {
        let connection_fraction = connection_fraction_of_heavy_server(policy, 0.0, 0.02);
        assert!((0.42..0.52).contains(&connection_fraction), "{policy}: {connection_fraction}");
    }
    // Connections cause nearly no load, with policies that do not level loads.
    for policy in ["hash", "awrr", "pow2", "least:cpu"] {
        let fraction = connection_fraction_of_heavy_server(policy, 0.2, 0.001);
        assert!((0.42..0.6).contains(&fraction), "{policy}: {fraction}");
    }
}

/// As docs/policies.md states, crossrss never adapts loads to weights if connections cause nearly no load.
#[test]
fn crossrss_ignores_weights_if_connections_cause_nearly_no_load() {
    for policy in ["crossrss-plus", "crossrss"] {
        let connection_fraction = connection_fraction_of_heavy_server(policy, 0.02, 0.001);
        assert!(connection_fraction > 0.8, "{policy}: {connection_fraction}: the limit is gone");
    }
}
