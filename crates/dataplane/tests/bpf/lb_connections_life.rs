//! Tests of the connection table with concurrent packets on several CPUs and user space, and across take-overs.

use std::collections::{BTreeMap, BTreeSet};
use std::net::Ipv4Addr;
use std::os::fd::AsFd as _;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use coreward_dataplane::lb::connections::PinnedConnections;
use coreward_dataplane::lb::{LoadBalancer, Options, Server, XdpMode};
use coreward_dataplane::mac::MacAddress;
use coreward_dataplane::test_run;
use coreward_intf as intf;
use coreward_model::ServerId;
use coreward_model::connection_table::{ClockTicks, Connection, TableSize};
use coreward_model::cookie::CookieKey;
use coreward_model::placement::PlacementRule;
use coreward_model::rss::{seeded_rng, uniform_below};
use libbpf_rs::{MapCore as _, MapFlags, MapHandle};
use rand::Rng;

use crate::support::balancer::{Balancer, Identification, OWN_MAC, XDP_TX, id, service};
use crate::support::network::{PinDirectory, VethPair};
use crate::support::stateful::{
    STATEFUL, VIP, balancer, client, established, ipv4_client, number_of, own_number, owner, syn,
};
use crate::support::{self, SYN, Tcp, missing_bpf_rights, skip_if, timestamp};

const ENTRY_COUNT: u64 = 4096;
const THREAD_COUNT: u32 = 4;

/// Returns the client of connection `number` of a thread. Each connection has another client.
fn client_of(thread: u32, number: u32) -> (Ipv4Addr, u16) {
    (Ipv4Addr::from(0x0a00_0000 | thread << 20 | number >> 8), 1024 + (number & 0xff) as u16)
}

#[test]
fn concurrent_cpus_and_user_space_neither_lose_nor_duplicate_slots() {
    skip_if!(missing_bpf_rights());
    // Each thread sends at least this number of SYNs, and continues until enough slots were reused.
    const PER_THREAD: u32 = 20_000;
    const MIN_OPERATIONS: u64 = 2 * ENTRY_COUNT;
    const TIME_LIMIT: Duration = Duration::from_secs(120);
    let mut rng = seeded_rng(120, 0);
    let (mut balancer, _) = balancer(ENTRY_COUNT, &mut rng);
    balancer.lb.end_comparison();
    let program = balancer.lb.program().try_clone_to_owned().unwrap();
    let done = AtomicBool::new(false);
    let (sent, with_entry, started) = (AtomicU64::new(0), AtomicU64::new(0), Instant::now());
    let go_on = |number: u32| {
        number < PER_THREAD || (with_entry.load(Ordering::Relaxed) <= MIN_OPERATIONS && started.elapsed() < TIME_LIMIT)
    };
    let mut freed: BTreeMap<(Ipv4Addr, u16), u32> = BTreeMap::new();
    let taken: BTreeSet<(Ipv4Addr, u16)> = std::thread::scope(|scope| {
        let senders: Vec<_> = (0..THREAD_COUNT)
            .map(|thread| {
                let (program, go_on, sent, with_entry) = (program.as_fd(), &go_on, &sent, &with_entry);
                scope.spawn(move || {
                    let clients = (0..).take_while(|number| go_on(*number)).map(|number| client_of(thread, number));
                    let taken = clients.filter(|client| {
                        let outcome = test_run::run(program, &syn(*client), 1).unwrap();
                        assert_eq!(outcome.verdict, XDP_TX);
                        let has_entry = number_of(&outcome.packet).is_some();
                        sent.fetch_add(1, Ordering::Relaxed);
                        with_entry.fetch_add(u64::from(has_entry), Ordering::Relaxed);
                        has_entry
                    });
                    taken.collect::<Vec<_>>()
                })
            })
            .collect();
        let waiter = scope.spawn(|| {
            let taken = senders.into_iter().flat_map(|sender| sender.join().unwrap()).collect();
            done.store(true, Ordering::Relaxed);
            taken
        });
        while !done.load(Ordering::Relaxed) {
            // About a third of all entries is freed, each entry twice.
            let index = balancer.services[0];
            let some: Vec<Connection> =
                balancer.lb.connections(index).filter(|_| uniform_below(&mut rng, 3) == 0).collect();
            let before = balancer.lb.connections_in_use();
            let twice: Vec<Connection> = some.iter().chain(&some).copied().collect();
            // The entries are unchanged, because their clients send only one SYN.
            assert_eq!(balancer.lb.free_connections(&twice).unwrap(), some.len());
            assert!(before <= ENTRY_COUNT as usize);
            for connection in some {
                *freed.entry(ipv4_client(&connection)).or_default() += 1;
            }
        }
        waiter.join().unwrap()
    });
    // Every connection that got an entry still has the entry, or it was freed once: none was overwritten.
    let left: BTreeSet<_> =
        balancer.lb.connections(balancer.services[0]).map(|connection| ipv4_client(&connection)).collect();
    assert!(freed.values().all(|times| *times == 1), "an entry was freed twice");
    let gone: BTreeSet<_> = freed.keys().copied().collect();
    assert!(left.is_disjoint(&gone));
    assert_eq!(left.union(&gone).copied().collect::<BTreeSet<_>>(), taken);
    assert_eq!(balancer.lb.connections_in_use(), left.len());
    let sent = sent.into_inner();
    assert!(taken.len() as u64 > MIN_OPERATIONS, "{} of {sent} got an entry", taken.len());
    let contended = balancer.events(0, "connection_contended");
    let full = balancer.events(0, "connection_table_full");
    // The threads share a row of counters, so increments may be lost.
    assert!(contended + full <= sent - taken.len() as u64);

    // No slot was lost: the table can be filled completely.
    let mut more = BTreeSet::new();
    for number in 0..20_000 {
        let client = client_of(THREAD_COUNT, number);
        if balancer.open(client).1.is_some() {
            more.insert(client);
        }
    }
    assert_eq!((left.len() + more.len()) as u64, ENTRY_COUNT);
    assert_eq!(balancer.lb.connections_in_use() as u64, ENTRY_COUNT);
}

fn options(pins: &PinDirectory, entries: u64) -> Options {
    let connection_table_size = TableSize::try_from(entries).unwrap();
    Options { pin_directory: Some(pins.path()), connection_table_size, ..Options::default() }
}

fn syn_to_own_mac(client: (Ipv4Addr, u16)) -> Vec<u8> {
    Tcp { flags: SYN, options: timestamp(77, 0), destination_mac: OWN_MAC.0, ..Tcp::new(client, VIP) }.frame()
}

/// Opens a connection at a load balancer. Returns the index for its cookies; `None`: it got no table entry.
fn open(lb: &mut LoadBalancer, client: (Ipv4Addr, u16)) -> Option<u16> {
    lb.set_own_mac(OWN_MAC);
    let outcome = test_run::run(lb.program(), &syn_to_own_mac(client), 1).unwrap();
    assert_eq!(outcome.verdict, XDP_TX);
    number_of(&outcome.packet)
}

#[test]
fn next_process_recovers_slots_and_resizes_an_empty_table() {
    skip_if!(missing_bpf_rights());
    let (pair, pins) = (VethPair::new(), PinDirectory::new());
    let mut rng = seeded_rng(121, 0);
    let start = |entries| -> anyhow::Result<LoadBalancer> {
        let mut lb = LoadBalancer::load(options(&pins, entries))?;
        pair.server.run_inside(|| lb.attach("eth0", XdpMode::Auto))?;
        Ok(lb)
    };
    let mut lb = start(2048).unwrap();
    let index = lb.set_services(&[(service(VIP), STATEFUL)]).unwrap()[0];
    let servers = [id(7), id(8)];
    for server in servers {
        lb.set_server(index, server, Server { mac: Some(MacAddress([2, 0, 0, 0, 0, 9])), is_eligible: true });
    }
    let table = support::balancer::random_table(PlacementRule::Table, 1, 1, &servers, &mut rng);
    lb.install_table(index, &table).unwrap();
    lb.set_owner_number(Some(own_number()));
    lb.tick(Duration::from_secs(60));
    let key = lb.connection_key();
    let clients: Vec<_> = (0..100).map(|_| client(&mut rng)).collect();
    clients.iter().for_each(|client| assert!(open(&mut lb, *client).is_some()));
    let before: Vec<Connection> = lb.connections(index).collect();
    assert_eq!(before.len(), 100);
    let size = lb.connection_table_size();
    drop(lb);

    // Clear entries without freeing their slots, as a process does that dies between both steps.
    let entries = MapHandle::from_pinned_path(pins.path().join("lb/connections")).unwrap();
    for connection in &before[..10] {
        let zeros = vec![0; size_of::<intf::connection>()];
        let position = connection.index.position(size);
        entries.update(&position.to_ne_bytes(), &zeros, MapFlags::ANY).unwrap();
    }
    let mut lb = start(2048).unwrap();
    assert!(lb.is_taken_over());
    assert_eq!(
        (lb.owner_number(), lb.clock(), lb.connection_key() == key),
        (Some(own_number()), ClockTicks(600), true)
    );
    assert_eq!(lb.connections(index).collect::<Vec<_>>(), before[10..]);
    // A reader of the pins gets the same connections.
    let pinned = PinnedConnections::open(&pins.path()).unwrap();
    assert_eq!(pinned.connections(service(VIP)).collect::<Vec<_>>(), before[10..]);
    assert_eq!(pinned.connections(service((VIP.0, 81))).next(), None);
    assert_eq!((pinned.clock(), pinned.size().entry_count()), (ClockTicks(600), 2048));
    let more = (0..20_000).filter(|number| open(&mut lb, client_of(1, *number)).is_some()).count();
    assert_eq!(more, 2048 - 90, "every slot is free or in use");
    drop(lb);

    // Another size is rejected while the table is in use. An empty table is replaced, also in the attached program.
    let refused = format!("{:#}", start(4096).unwrap_err());
    let expected = "has 2048 entries, not 4096, and 2048 of them are in use: give it the old size";
    assert!(refused.contains(expected), "{refused}");
    let mut lb = start(2048).unwrap();
    let all: Vec<_> = lb.connections(index).collect();
    assert_eq!(lb.free_connections(&all).unwrap(), 2048);
    drop(lb);
    for entries in [8192, 1024] {
        let mut lb = start(entries).unwrap();
        assert!(lb.is_taken_over());
        assert_eq!(u64::from(lb.connection_table_size().entry_count()), entries);
        let taken = (0..40_000).filter(|number| open(&mut lb, client_of(2, *number)).is_some()).count();
        assert_eq!(taken as u64, entries);
        let all: Vec<_> = lb.connections(index).collect();
        assert_eq!(lb.free_connections(&all).unwrap() as u64, entries);
    }
    start(1024).unwrap().detach().unwrap();
}

/// Returns a balancer with the servers, cookie keys and MAC addresses of `before`, and an empty connection table.
fn rebooted(before: &Balancer, ids: &[ServerId], rng: &mut impl Rng) -> Balancer {
    let connection_key = Some(CookieKey { k0: rng.next_u64(), k1: rng.next_u64() });
    let mut after = Balancer::with(
        &[(service(VIP), STATEFUL)],
        Options { connection_table_size: before.lb.connection_table_size(), connection_key, ..Options::default() },
        rng,
    );
    after.lb.set_keys(&before.keys);
    after.keys = before.keys;
    for server in ids {
        let mac = before.macs[&(0, *server)];
        after.lb.set_server(after.services[0], *server, Server { mac: Some(mac), is_eligible: true });
        after.macs.insert((0, *server), mac);
    }
    let table = support::balancer::random_table(PlacementRule::RoundRobin, 2, 1, ids, rng);
    after.install(0, &table);
    after
}

#[test]
fn new_maps_have_a_new_connection_key() {
    skip_if!(missing_bpf_rights());
    let key = || LoadBalancer::load(Options::default()).unwrap().connection_key();
    assert_ne!(key(), key(), "entries of new connections could be taken for those from before a reboot");
}

#[test]
fn connections_from_before_a_reboot_are_broadcast_and_reach_no_wrong_server() {
    skip_if!(missing_bpf_rights());
    let mut rng = seeded_rng(122, 0);
    let (before, ids) = balancer(ENTRY_COUNT, &mut rng);
    let old: Vec<_> = (0..3000).map(|_| before.open_with_entry(client(&mut rng))).collect();
    let expect_broadcast = |after: &Balancer, came_from: Option<MacAddress>| {
        for opened in &old {
            let mut frame = established(after, opened.client, opened.number);
            if let Some(MacAddress(source)) = came_from {
                frame[6..12].copy_from_slice(&source);
            }
            after.expect_broadcast_or(0, &frame, Identification::Unchanged, "drop_unknown_cookie");
        }
    };
    let mut after = rebooted(&before, &ids, &mut rng);
    // The controller has not sent the owner number yet.
    expect_broadcast(&after, None);
    assert_eq!(after.events(0, "connection_unknown"), 0);
    // The balancer has its former owner number, and every former index names an entry of another connection.
    after.lb.set_owner_number(Some(own_number()));
    while after.lb.connections_in_use() < ENTRY_COUNT as usize {
        after.open(client(&mut rng));
    }
    expect_broadcast(&after, None);
    assert_eq!(after.events(0, "connection_unknown"), old.len() as u64);

    // A peer sends packets with such an index to the owner. The owner broadcasts the packets and does not return them.
    let (mut peer, owner_mac, peer_mac) = (rebooted(&before, &ids, &mut rng), MacAddress([2, 0, 0, 0, 5, 5]), OWN_MAC);
    peer.lb.set_owner_number(Some(owner(9)));
    peer.lb.set_owner_mac(own_number(), Some(owner_mac));
    for opened in &old {
        peer.expect_to(&established(&peer, opened.client, opened.number), owner_mac, "to_owner");
    }
    after.lb.set_owner_mac(owner(9), Some(peer_mac));
    expect_broadcast(&after, Some(peer_mac));
}
