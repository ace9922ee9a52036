//! Tests of the connection table while several CPUs and user space change it concurrently, and across take-overs.

use std::collections::{BTreeMap, BTreeSet};
use std::net::Ipv4Addr;
use std::os::fd::AsFd as _;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use coreward_dataplane::lb::connections::PinnedConnectionTable;
use coreward_dataplane::lb::{LoadBalancer, LoadBalancerOptions, Server, XdpMode};
use coreward_dataplane::mac::MacAddress;
use coreward_dataplane::test_run;
use coreward_intf as intf;
use coreward_model::ServerId;
use coreward_model::connection_table::{ConnectionEntry, ConnectionTableSize, DecisecondTicks};
use coreward_model::cookie::CookieKey;
use coreward_model::placement::PlacementRule;
use coreward_model::rss::{seeded_rng, uniform_below};
use libbpf_rs::{MapCore as _, MapFlags, MapHandle};
use rand::Rng;

use crate::support::balancer::{
    ExpectedIdentification, LOAD_BALANCER_MAC, TestBalancer, XDP_TX, server_id_from_number, service_address,
};
use crate::support::network::{PinDirectory, VethPair};
use crate::support::stateful::{
    EstablishedConnection, STATEFUL_SERVICE_SETTINGS, VIP, frame_with_cookie_index, ipv4_client_endpoint,
    random_client, read_cookie_index, stateful_balancer, syn_frame, table_owner_number, tested_lb_owner_number,
};
use crate::support::{self, SYN, TcpPacket, missing_bpf_rights, skip_if, timestamp_option};

const CONNECTION_ENTRY_COUNT: u64 = 4096;
const THREAD_COUNT: u32 = 4;

fn client_of_thread(thread: u32, number: u32) -> (Ipv4Addr, u16) {
    (Ipv4Addr::from(0x0a00_0000 | thread << 20 | number >> 8), 1024 + (number & 0xff) as u16)
}

#[test]
fn concurrent_access_neither_loses_nor_duplicates_slots() {
    skip_if!(missing_bpf_rights());
    // Each thread sends at least this number of SYNs, and continues until enough slots were reused.
    const MIN_SYNS_PER_THREAD: u32 = 20_000;
    const MIN_TAKEN_ENTRY_COUNT: u64 = 2 * CONNECTION_ENTRY_COUNT;
    const TEST_TIME_LIMIT: Duration = Duration::from_secs(120);
    let mut rng = seeded_rng(120, 0);
    let (mut balancer, _) = stateful_balancer(CONNECTION_ENTRY_COUNT, &mut rng);
    balancer.lb.drop_model();
    let program = balancer.lb.program_fd().try_clone_to_owned().unwrap();
    let is_done = AtomicBool::new(false);
    let (syn_counter, entry_counter, start_time) = (AtomicU64::new(0), AtomicU64::new(0), Instant::now());
    let must_continue = |number: u32| {
        number < MIN_SYNS_PER_THREAD
            || (entry_counter.load(Ordering::Relaxed) <= MIN_TAKEN_ENTRY_COUNT
                && start_time.elapsed() < TEST_TIME_LIMIT)
    };
    let mut freed_counts_by_client: BTreeMap<(Ipv4Addr, u16), u32> = BTreeMap::new();
    let clients_with_entry: BTreeSet<(Ipv4Addr, u16)> = std::thread::scope(|scope| {
        let sender_threads: Vec<_> = (0..THREAD_COUNT)
            .map(|thread| {
                let (program, must_continue, syn_counter, entry_counter) =
                    (program.as_fd(), &must_continue, &syn_counter, &entry_counter);
                scope.spawn(move || {
                    let clients = (0..)
                        .take_while(|number| must_continue(*number))
                        .map(|number| client_of_thread(thread, number));
                    let clients_with_entry = clients.filter(|client| {
                        let outcome = test_run::run_program(program, &syn_frame(*client), 1).unwrap();
                        assert_eq!(outcome.verdict, XDP_TX);
                        let has_entry = read_cookie_index(&outcome.packet).is_some();
                        syn_counter.fetch_add(1, Ordering::Relaxed);
                        entry_counter.fetch_add(u64::from(has_entry), Ordering::Relaxed);
                        has_entry
                    });
                    clients_with_entry.collect::<Vec<_>>()
                })
            })
            .collect();
        let freeing_thread = scope.spawn(|| {
            let clients_with_entry = sender_threads.into_iter().flat_map(|sender| sender.join().unwrap()).collect();
            is_done.store(true, Ordering::Relaxed);
            clients_with_entry
        });
        while !is_done.load(Ordering::Relaxed) {
            // About a third of all entries is freed, each of them twice.
            let service_index = balancer.service_indexes[0];
            let some_connections: Vec<ConnectionEntry> =
                balancer.lb.connections(service_index).filter(|_| uniform_below(&mut rng, 3) == 0).collect();
            let used_entry_count = balancer.lb.count_used_entries_by_scan();
            let duplicated_connections: Vec<ConnectionEntry> =
                some_connections.iter().chain(&some_connections).copied().collect();
            // The entries are unchanged, because their clients send only one SYN.
            assert_eq!(balancer.lb.free_connections(&duplicated_connections).unwrap(), some_connections.len());
            assert!(used_entry_count <= CONNECTION_ENTRY_COUNT as usize);
            for connection in some_connections {
                *freed_counts_by_client.entry(ipv4_client_endpoint(&connection)).or_default() += 1;
            }
        }
        freeing_thread.join().unwrap()
    });
    // Every connection that got an entry still has it or was freed once, so no entry was overwritten.
    let remaining_clients: BTreeSet<_> = balancer
        .lb
        .connections(balancer.service_indexes[0])
        .map(|connection| ipv4_client_endpoint(&connection))
        .collect();
    assert!(freed_counts_by_client.values().all(|times| *times == 1), "an entry was freed twice");
    let clients_with_freed_slots: BTreeSet<_> = freed_counts_by_client.keys().copied().collect();
    assert!(remaining_clients.is_disjoint(&clients_with_freed_slots));
    assert_eq!(
        remaining_clients.union(&clients_with_freed_slots).copied().collect::<BTreeSet<_>>(),
        clients_with_entry
    );
    assert_eq!(balancer.lb.count_used_entries_by_scan(), remaining_clients.len());
    let sent_count = syn_counter.into_inner();
    assert!(
        clients_with_entry.len() as u64 > MIN_TAKEN_ENTRY_COUNT,
        "{} of {sent_count} got an entry",
        clients_with_entry.len()
    );
    let contended_count = balancer.event_count(0, "connection_contended");
    let full_count = balancer.event_count(0, "connection_table_full");
    // The threads share a counter row, so increments may be lost.
    assert!(contended_count + full_count <= sent_count - clients_with_entry.len() as u64);

    // No slot was lost if the table can be filled completely.
    let mut further_clients = BTreeSet::new();
    for number in 0..20_000 {
        let client = client_of_thread(THREAD_COUNT, number);
        if balancer.send_syn(client).1.is_some() {
            further_clients.insert(client);
        }
    }
    assert_eq!((remaining_clients.len() + further_clients.len()) as u64, CONNECTION_ENTRY_COUNT);
    assert_eq!(balancer.lb.count_used_entries_by_scan() as u64, CONNECTION_ENTRY_COUNT);
}

fn lb_options_with_pins(pins: &PinDirectory, entry_count: u64) -> LoadBalancerOptions {
    let connection_table_size = ConnectionTableSize::try_from(entry_count).unwrap();
    LoadBalancerOptions { pin_directory: Some(pins.path()), connection_table_size, ..LoadBalancerOptions::default() }
}

fn syn_frame_to_own_mac(client: (Ipv4Addr, u16)) -> Vec<u8> {
    TcpPacket {
        flags: SYN,
        tcp_options: timestamp_option(77, 0),
        destination_mac: LOAD_BALANCER_MAC.0,
        ..TcpPacket::new(client, VIP)
    }
    .to_frame()
}

/// Opens a connection at a load balancer. Returns the entry's index for cookies, or `None` if the connection got no
/// table entry.
fn open_connection(lb: &mut LoadBalancer, client: (Ipv4Addr, u16)) -> Option<u16> {
    lb.set_own_mac(LOAD_BALANCER_MAC);
    let outcome = test_run::run_program(lb.program_fd(), &syn_frame_to_own_mac(client), 1).unwrap();
    assert_eq!(outcome.verdict, XDP_TX);
    read_cookie_index(&outcome.packet)
}

#[test]
fn new_process_recovers_slots_and_resizes_empty_table() {
    skip_if!(missing_bpf_rights());
    let (veth_pair, pins) = (VethPair::new(), PinDirectory::new());
    let mut rng = seeded_rng(121, 0);
    let start_lb_process = |entries| -> anyhow::Result<LoadBalancer> {
        let mut lb = LoadBalancer::load(lb_options_with_pins(&pins, entries))?;
        veth_pair.server.run_in_namespace(|| lb.attach("eth0", XdpMode::Auto))?;
        Ok(lb)
    };
    let mut lb = start_lb_process(2048).unwrap();
    let service_index = lb.set_services(&[(service_address(VIP), STATEFUL_SERVICE_SETTINGS)]).unwrap()[0];
    let server_ids = [server_id_from_number(7), server_id_from_number(8)];
    for server in server_ids {
        lb.set_server(service_index, server, Server { mac: Some(MacAddress([2, 0, 0, 0, 0, 9])), is_eligible: true });
    }
    let table = support::balancer::random_placement_table(PlacementRule::Table, 1, 1, &server_ids, &mut rng);
    lb.install_table(service_index, &table).unwrap();
    lb.set_owner_number(Some(tested_lb_owner_number()));
    lb.tick_packet_clock(Duration::from_secs(60));
    let hash_key = lb.connection_hash_key();
    let clients: Vec<_> = (0..100).map(|_| random_client(&mut rng)).collect();
    clients.iter().for_each(|client| assert!(open_connection(&mut lb, *client).is_some()));
    let connections_before: Vec<ConnectionEntry> = lb.connections(service_index).collect();
    assert_eq!(connections_before.len(), 100);
    let table_size = lb.connection_table_size();
    drop(lb);

    // Clears entries without freeing their slots, like a process that dies between both steps.
    let connections_map = MapHandle::from_pinned_path(pins.path().join("lb/connections")).unwrap();
    for connection in &connections_before[..10] {
        let zeroed_entry = vec![0; size_of::<intf::connection>()];
        let entry_position = connection.index.position(table_size);
        connections_map.update(&entry_position.to_ne_bytes(), &zeroed_entry, MapFlags::ANY).unwrap();
    }
    let mut lb = start_lb_process(2048).unwrap();
    assert!(lb.is_state_taken_over());
    assert_eq!(
        (lb.owner_number(), lb.packet_clock_ticks(), lb.connection_hash_key() == hash_key),
        (Some(tested_lb_owner_number()), DecisecondTicks(600), true)
    );
    assert_eq!(lb.connections(service_index).collect::<Vec<_>>(), connections_before[10..]);
    let pinned_connections = PinnedConnectionTable::open(&pins.path()).unwrap();
    assert_eq!(pinned_connections.connections(service_address(VIP)).collect::<Vec<_>>(), connections_before[10..]);
    assert_eq!(pinned_connections.connections(service_address((VIP.0, 81))).next(), None);
    assert_eq!(
        (pinned_connections.packet_clock_ticks(), pinned_connections.table_size().entry_count()),
        (DecisecondTicks(600), 2048)
    );
    let first_opened_count =
        (0..20_000).filter(|number| open_connection(&mut lb, client_of_thread(1, *number)).is_some()).count();
    assert_eq!(first_opened_count, 2048 - 90, "every slot is free or in use");
    drop(lb);

    // Another size is rejected while the table is in use. An empty table is replaced, also in the attached program.
    let resize_error = format!("{:#}", start_lb_process(4096).unwrap_err());
    let expected_error = "has 2048 entries, not 4096, and 2048 of them are in use: give it the old size";
    assert!(resize_error.contains(expected_error), "{resize_error}");
    let mut lb = start_lb_process(2048).unwrap();
    let connections_after: Vec<_> = lb.connections(service_index).collect();
    assert_eq!(lb.free_connections(&connections_after).unwrap(), 2048);
    drop(lb);
    for entries in [8192, 1024] {
        let mut lb = start_lb_process(entries).unwrap();
        assert!(lb.is_state_taken_over());
        assert_eq!(u64::from(lb.connection_table_size().entry_count()), entries);
        let opened_count =
            (0..40_000).filter(|number| open_connection(&mut lb, client_of_thread(2, *number)).is_some()).count();
        assert_eq!(opened_count as u64, entries);
        let connections_after: Vec<_> = lb.connections(service_index).collect();
        assert_eq!(lb.free_connections(&connections_after).unwrap() as u64, entries);
    }
    start_lb_process(1024).unwrap().detach().unwrap();
}

/// Returns a load balancer with the servers, cookie keys and MAC addresses of `previous_balancer`, but with an empty
/// connection table.
fn restart_with_empty_table(previous_balancer: &TestBalancer, ids: &[ServerId], rng: &mut impl Rng) -> TestBalancer {
    let connection_key = Some(CookieKey { k0: rng.next_u64(), k1: rng.next_u64() });
    let mut restarted_balancer = TestBalancer::with_model(
        &[(service_address(VIP), STATEFUL_SERVICE_SETTINGS)],
        LoadBalancerOptions {
            connection_table_size: previous_balancer.lb.connection_table_size(),
            connection_hash_key: connection_key,
            ..LoadBalancerOptions::default()
        },
        rng,
    );
    restarted_balancer.lb.set_cookie_keys(&previous_balancer.fleet_keys);
    restarted_balancer.fleet_keys = previous_balancer.fleet_keys;
    for server in ids {
        let mac = previous_balancer.server_macs[&(0, *server)];
        restarted_balancer.lb.set_server(
            restarted_balancer.service_indexes[0],
            *server,
            Server { mac: Some(mac), is_eligible: true },
        );
        restarted_balancer.server_macs.insert((0, *server), mac);
    }
    let table = support::balancer::random_placement_table(PlacementRule::RoundRobin, 2, 1, ids, rng);
    restarted_balancer.install_table(0, &table);
    restarted_balancer
}

#[test]
fn new_maps_have_a_new_random_hash_key() {
    skip_if!(missing_bpf_rights());
    let new_hash_key = || LoadBalancer::load(LoadBalancerOptions::default()).unwrap().connection_hash_key();
    assert_ne!(
        new_hash_key(),
        new_hash_key(),
        "entries of new connections could be taken for those from before a reboot"
    );
}

/// Asserts that packets of the established `connections` are broadcast, or dropped above the rate limit.
fn expect_packets_broadcast(
    tested_balancer: &TestBalancer,
    connections: &[EstablishedConnection],
    source_mac: Option<MacAddress>,
) {
    for connection in connections {
        let mut frame = frame_with_cookie_index(tested_balancer, connection.client, connection.cookie_index);
        if let Some(MacAddress(source)) = source_mac {
            frame[6..12].copy_from_slice(&source);
        }
        tested_balancer.expect_broadcast_or_dropped(
            0,
            &frame,
            ExpectedIdentification::Unchanged,
            "drop_unknown_cookie",
        );
    }
}

#[test]
fn packets_of_connections_before_a_reboot_are_broadcast() {
    skip_if!(missing_bpf_rights());
    let mut rng = seeded_rng(122, 0);
    let (previous_balancer, ids) = stateful_balancer(CONNECTION_ENTRY_COUNT, &mut rng);
    let old_connections: Vec<_> =
        (0..3000).map(|_| previous_balancer.open_connection_with_entry(random_client(&mut rng))).collect();
    let mut restarted_balancer = restart_with_empty_table(&previous_balancer, &ids, &mut rng);
    // The controller has not sent the owner number yet.
    expect_packets_broadcast(&restarted_balancer, &old_connections, None);
    assert_eq!(restarted_balancer.event_count(0, "connection_unknown"), 0);
    // The balancer has its former owner number, and every former index names an entry of another connection.
    restarted_balancer.lb.set_owner_number(Some(tested_lb_owner_number()));
    while restarted_balancer.lb.count_used_entries_by_scan() < CONNECTION_ENTRY_COUNT as usize {
        restarted_balancer.send_syn(random_client(&mut rng));
    }
    expect_packets_broadcast(&restarted_balancer, &old_connections, None);
    assert_eq!(restarted_balancer.event_count(0, "connection_unknown"), old_connections.len() as u64);

    // A peer sends packets with such an index to the owner, which broadcasts the packets instead of returning them.
    let (mut peer, owner_mac, peer_mac) = (
        restart_with_empty_table(&previous_balancer, &ids, &mut rng),
        MacAddress([2, 0, 0, 0, 5, 5]),
        LOAD_BALANCER_MAC,
    );
    peer.lb.set_owner_number(Some(table_owner_number(9)));
    peer.lb.set_owner_mac(tested_lb_owner_number(), Some(owner_mac));
    for connection in &old_connections {
        peer.expect_sent_to_mac(
            &frame_with_cookie_index(&peer, connection.client, connection.cookie_index),
            owner_mac,
            "to_owner",
        );
    }
    restarted_balancer.lb.set_owner_mac(table_owner_number(9), Some(peer_mac));
    expect_packets_broadcast(&restarted_balancer, &old_connections, Some(peer_mac));
}
