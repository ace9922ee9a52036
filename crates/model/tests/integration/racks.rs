//! Compares the tables of a pool whose servers are in racks with the tables of the same pool without racks.

use std::sync::Arc;

use coreward_model::ServerId;
use coreward_model::placement::BucketCount;
use coreward_model::policy::{
    PoolServer, RackSummary, ServerCapacity, ServerLoads, ServerPool, ServerWeight, TrafficRates,
    create_policy_by_name, policy_names,
};
use coreward_model::rss::{IndirectionTable, RssConfig, RssKey, seeded_rng};
use proptest::prelude::*;

/// Number of reports in a test. It is more than one because policies keep loads from report to report.
const REPORTS_PER_TEST: u64 = 4;

/// Server, with the index of its rack, or `None` if the server's agent reports directly to the controller.
#[derive(Debug, Clone)]
struct RackServer {
    server: PoolServer,
    rack_index: Option<usize>,
}

prop_compose! {
    fn any_rack_server()(
        eligible in prop::bool::weighted(0.9),
        // Few values, so that many loads are equal.
        loads in prop::option::weighted(
            0.9,
            prop::collection::vec((0u32..12).prop_map(|tenths| f64::from(tenths) / 10.0), 1..9),
        ),
        key in prop::option::weighted(0.9, 0u64..6),
        table_bits in 0u32..9, queues in 1u16..9,
        open_connection_count in 0u32..50,
        weight in prop_oneof![3 => Just(1u64), 1 => 2..5u64],
        slow_start_fraction in prop_oneof![4 => Just(1.0), 1 => Just(0.3)],
        capacity in prop::option::weighted(0.2, (1u32..9).prop_map(f64::from)),
        traffic in prop::option::of((0.0..1e6, 0.0..1e9)),
        rack_index in prop::option::weighted(0.8, 0usize..4),
        seed: u64,
    ) -> RackServer {
        let rss = key.map(|key| RssConfig {
            key: RssKey::random(&mut seeded_rng(key, 99)),
            indirection_table: IndirectionTable::draw_independent_entries(seed, 1 << table_bits, queues).unwrap(),
        });
        let server = PoolServer {
            is_eligible: eligible,
            loads: loads.map(ServerLoads::from),
            rss,
            open_connection_count,
            weight: ServerWeight::new(weight).unwrap(),
            slow_start_fraction,
            capacity: capacity.map(|capacity| ServerCapacity::new(capacity).unwrap()),
            traffic: traffic.map(|(packets_per_second, bytes_per_second)| {
                TrafficRates { packets_per_second, bytes_per_second }
            }),
            ..PoolServer::new(ServerId::try_from(0).unwrap())
        };
        RackServer { server, rack_index }
    }
}

fn create_pool(servers: &[PoolServer], counts_placements_as_requests: bool) -> ServerPool {
    let pool = ServerPool::new(servers.to_vec(), 2).with_opened_connection_count(300);
    if counts_placements_as_requests { pool.with_placements_counted_as_requests() } else { pool }
}

fn servers_in_rack(servers: &[RackServer], rack: usize) -> Vec<PoolServer> {
    let is_in_rack = |server_in_rack: &&RackServer| server_in_rack.rack_index == Some(rack);
    servers.iter().filter(is_in_rack).map(|server_in_rack| server_in_rack.server.clone()).collect()
}

/// Returns all servers. Only servers that report directly to the controller have loads.
fn servers_with_direct_loads(servers: &[RackServer]) -> Vec<PoolServer> {
    let with_direct_loads = |server_in_rack: &RackServer| PoolServer {
        loads: server_in_rack.server.loads.clone().filter(|_| server_in_rack.rack_index.is_none()),
        ..server_in_rack.server.clone()
    };
    servers.iter().map(with_direct_loads).collect()
}

/// Changes the servers to their state at the next report: loads change, some servers do not report, and some join or
/// leave.
fn advance_servers_to_next_report(servers: &mut [RackServer], report_index: u64) {
    for (position, RackServer { server, .. }) in servers.iter_mut().enumerate() {
        let change_number = (position as u64).wrapping_mul(0x9e37_79b9).wrapping_add(report_index * 7) % 23;
        match change_number {
            0 => server.is_eligible = !server.is_eligible,
            1 => server.loads = None,
            2 => server.loads = Some(vec![0.3; 4].into()),
            3 => server.slow_start_fraction = 1.0,
            _ => {
                let core_loads = server.loads.as_ref().and_then(ServerLoads::core_loads).map(|cores| {
                    cores
                        .iter()
                        .enumerate()
                        .map(|(core, load)| (load * 3.0 + core as f64 * 0.1 + change_number as f64 * 0.05) % 1.3)
                });
                server.loads = core_loads.map(|cores| ServerLoads::Local(cores.collect()));
            }
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 96, ..ProptestConfig::default() })]

    /// For every policy, the placement table from racks' summaries equals the table from the servers' own reports.
    #[test]
    fn tables_with_and_without_racks_are_equal(
        mut servers in prop::collection::vec(any_rack_server(), 0..24), bits in 0u32..8,
        counts_placements_as_requests: bool
    ) {
        for (position, server_in_rack) in servers.iter_mut().enumerate() {
            server_in_rack.server.id = ServerId::try_from(position as u64 * 31).unwrap();
        }
        let bucket_count = BucketCount::new(1 << bits).unwrap();
        for name in policy_names() {
            let mut servers = servers.clone();
            let create_policy = || create_policy_by_name(name, 7).unwrap();
            let (mut policy_without_racks, mut policy_above_racks, mut rack_policies) =
                (create_policy(), create_policy(), std::array::from_fn::<_, 4, _>(|_| create_policy()));
            // As in the controller, one pool is updated from table to table.
            let (mut continued_policy, mut continued_pool) = (create_policy(), None);
            for report in 1..=REPORTS_PER_TEST {
                let rack_summaries = rack_policies.iter_mut().enumerate().map(|(rack, policy)| {
                    let pool = create_pool(&servers_in_rack(&servers, rack), counts_placements_as_requests);
                    Arc::new(RackSummary::from_pool(&pool, policy.as_mut(), bucket_count, usize::MAX))
                }).collect::<Vec<_>>();
                let all_servers: Vec<PoolServer> =
                    servers.iter().map(|server_in_rack| server_in_rack.server.clone()).collect();
                let reporting_servers = servers_with_direct_loads(&servers);
                let pool = create_pool(&all_servers, counts_placements_as_requests);
                let table_without_racks = policy_without_racks.compute_table(&pool, bucket_count, report);
                let pool = create_pool(&reporting_servers, counts_placements_as_requests)
                    .with_rack_summaries(rack_summaries.clone());
                let table_with_racks = policy_above_racks.compute_table(&pool, bucket_count, report);
                prop_assert_eq!(&table_with_racks, &table_without_racks, "{}, report {}", name, report);
                let mut pool =
                    continued_pool
                        .take()
                        .unwrap_or_else(|| create_pool(&reporting_servers, counts_placements_as_requests));
                reporting_servers.iter().for_each(|server| pool.replace_server(server.clone()));
                let pool = pool.for_next_table(2).with_opened_connection_count(300);
                let pool = match counts_placements_as_requests {
                    true => pool.with_placements_counted_as_requests(),
                    false => pool,
                };
                let pool = pool.with_rack_summaries(rack_summaries);
                let continued_table = continued_policy.compute_table(&pool, bucket_count, report);
                prop_assert_eq!(&continued_table, &table_without_racks, "{}, report {}, going on", name, report);
                continued_pool = Some(pool);
                advance_servers_to_next_report(&mut servers, report);
            }
        }
    }

    /// Checks that a rack's list has its least loaded cores, up to the maximum number. The k least loaded cores of all
    /// racks are among the k least loaded of each rack.
    #[test]
    fn shortened_candidate_lists_have_the_least_loaded_cores(
        loads in prop::collection::vec(0.0..1.0f64, 2..12),
        max_candidate_count in 1usize..9,
    ) {
        let key = RssKey::microsoft_verification_key();
        let server_with_load = |(id, load): (usize, &f64)| PoolServer {
            loads: Some(vec![*load].into()),
            rss: Some(RssConfig {
                key: key.clone(),
                indirection_table: IndirectionTable::draw_balanced_entries(1, 1, 1).unwrap(),
            }),
            ..PoolServer::new(ServerId::try_from(id as u64).unwrap())
        };
        let servers: Vec<PoolServer> = loads.iter().enumerate().map(server_with_load).collect();
        let bucket_count = BucketCount::new(1).unwrap();
        let mut policy = create_policy_by_name("crossrss-plus", 1).unwrap();
        let summary =
            RackSummary::from_pool(&ServerPool::new(servers, 1), policy.as_mut(), bucket_count, max_candidate_count);
        let mut least_loads = loads.clone();
        least_loads.sort_by(f64::total_cmp);
        least_loads.truncate(max_candidate_count.min(8));
        let listed_loads: Vec<f64> =
            summary.candidate_lists[0].candidates_of_bucket(0).iter().map(|(_, load)| *load).collect();
        prop_assert_eq!(listed_loads, least_loads);
    }
}
