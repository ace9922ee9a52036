//! Tests of the connection table of `bpf/lb/lb.bpf.c` (`BPF_PROG_TEST_RUN`): allocation, look-up, identity, freeing and
//! reuse of entries.

use std::collections::{BTreeMap, BTreeSet};
use std::net::Ipv4Addr;
use std::time::Duration;

use coreward_dataplane::lb::{BroadcastRates, Options, PacketRate, Server};
use coreward_dataplane::mac::MacAddress;
use coreward_intf as intf;
use coreward_model::connection_table::{
    ClockTicks, ExpiryReason, TableSize, Timeouts, decode_cookie_index, encode_cookie_index, encode_syn_tsecr,
};
use coreward_model::consistency::ServiceMode;
use coreward_model::cookie::{self, Cookie};
use coreward_model::placement::PlacementRule;
use coreward_model::rss::{seeded_rng, uniform_below};
use rand::Rng as _;

use crate::support::balancer::{Balancer, Identification, OWN_MAC, XDP_DROP, XDP_TX, random_table, service};
use crate::support::stateful::{
    STATEFUL, VIP, balancer, client, established, ipv4_client, own_number, owner, packet, syn, syn_with_tsecr,
    tsecr_of, tuple,
};
use crate::support::{
    self, ACK, FIN, RST, SYN, Tcp, aligned_timestamp, missing_bpf_rights, skip_if, tcp_sum, timestamp,
};

#[test]
fn new_connection_takes_an_entry_that_later_packets_find() {
    skip_if!(missing_bpf_rights());
    let mut rng = seeded_rng(101, 0);
    let (mut balancer, ids) = balancer(4096, &mut rng);
    balancer.lb.tick(Duration::from_millis(12_345));
    let opened: Vec<_> = (0..500).map(|_| balancer.open_with_entry(client(&mut rng))).collect();
    let servers: BTreeSet<_> = opened.iter().map(|opened| opened.server).collect();
    assert_eq!(servers, ids.iter().copied().collect(), "the rule is obeyed");
    for opened in &opened {
        let entry = balancer.entry(opened.client).unwrap();
        assert_eq!(entry.identity.server, opened.server);
        assert_eq!(decode_cookie_index(opened.number), (own_number(), entry.index.slot()));
        let hash = balancer.hash(opened.client);
        let size = TableSize::try_from(4096).unwrap();
        assert_eq!((entry.index.partition(), entry.identity.tag), (hash.partition(size), hash.tag()));
        assert_eq!((entry.packets, entry.bytes), (1, syn(opened.client).len() as u64));
        assert_eq!((entry.opened_at, entry.last_seen, entry.is_closing), (ClockTicks(123), ClockTicks(123), false));
    }
    let indexes: BTreeSet<_> = opened.iter().map(|opened| balancer.entry(opened.client).unwrap().index).collect();
    assert_eq!(indexes.len(), opened.len());

    // The result does not depend on table, keys and path (fast or slow).
    balancer.lb.tick(Duration::from_secs(20));
    let table = random_table(PlacementRule::Table, 2, 1, &ids, &mut rng);
    balancer.install(0, &table);
    balancer.new_keys(&mut rng);
    let odd = [&[1][..], &timestamp(1, 0), &[0]].concat();
    for opened in &opened {
        balancer.expect_by_index(opened);
        let mut slow_path = packet(&balancer.keys, opened.client, opened.number, ACK);
        let tsecr = cookie::stamp_tsval(
            &balancer.keys,
            &support::TIME_KEY,
            &tuple(opened.client),
            Cookie::TableIndex(opened.number),
            5,
        );
        slow_path.options = odd.clone();
        slow_path.options[7..11].copy_from_slice(&tsecr.to_be_bytes());
        let slow_path = slow_path.frame();
        balancer.expect_sent_to(0, &slow_path, opened.server, "connection_table");
        let entry = balancer.entry(opened.client).unwrap();
        let bytes = syn(opened.client).len() + slow_path.len() + established(&balancer, opened.client, 0).len();
        assert_eq!((entry.packets, entry.bytes), (3, bytes as u64));
        assert_eq!((entry.opened_at, entry.last_seen), (ClockTicks(123), ClockTicks(200)));
    }
    // FIN and RST mark an entry as closing; a SYN removes the mark.
    for (opened, flags) in opened.iter().zip([ACK | FIN, ACK | RST].into_iter().cycle()) {
        let frame = packet(&balancer.keys, opened.client, opened.number, flags).frame();
        let closed = || balancer.lb.traffic(opened.server).closed;
        let before = closed();
        for _ in 0..3 {
            balancer.expect_sent_to(0, &frame, opened.server, "connection_table");
        }
        assert_eq!(closed(), before + 1, "sent again it closes nothing");
        assert!(balancer.entry(opened.client).unwrap().is_closing);
        assert_eq!(balancer.open(opened.client).1, Some(opened.number));
        assert!(!balancer.entry(opened.client).unwrap().is_closing);
    }
    assert_eq!(balancer.events(0, "connection_unknown"), 0);
}

#[test]
fn server_learns_the_index_at_any_option_offset() {
    skip_if!(missing_bpf_rights());
    let mut rng = seeded_rng(102, 0);
    let (balancer, _) = balancer(65_536, &mut rng);
    for round in 0..2000 {
        let client = client(&mut rng);
        // Up to 7 bytes of NOPs, and an option of 5 bytes, move the timestamp to even and odd offsets.
        let mut before = vec![1; round % 8];
        if round % 3 == 0 {
            before.splice(0..0, [254, 5, 1, 2, 3]);
        }
        let behind: &[u8] = if round % 2 == 0 { &[3, 3, 7] } else { &[] };
        let ip_options = vec![1; 4 * (round / 8 % 11)];
        // A SYN's TSecr should be 0, but some clients send another value.
        let tsecr = if round % 5 == 0 { rng.next_u32() } else { 0 };
        let with = |tsecr: u32| {
            let options = [&before[..], &timestamp(rng.clone().next_u32(), tsecr), behind].concat();
            let tcp = Tcp { flags: SYN, options, ip_options: ip_options.clone(), ..Tcp::new(client, VIP) };
            tcp.frame_with_sequence(77, 0)
        };
        let (verdict, forwarded) = balancer.run_expecting_counter(&with(tsecr), Some(0), "new_connection");
        let entry = balancer.entry(client).expect("it got an entry");
        let mut expected = with(encode_syn_tsecr(own_number(), entry.index.slot()));
        expected[..6].copy_from_slice(&balancer.macs[&(0, entry.identity.server)].0);
        expected[6..12].copy_from_slice(&OWN_MAC.0);
        assert_eq!(verdict, XDP_TX);
        assert_eq!(tcp_sum(&forwarded), 0xffff, "round {round}: the checksum is wrong");
        // `tcp_sum` alone would accept 0 and 0xffff as the same sum.
        assert_eq!(forwarded, expected, "round {round}");
        rng.next_u32();
    }
}

#[test]
fn retransmitted_syn_gets_its_entry_while_its_server_is_eligible() {
    skip_if!(missing_bpf_rights());
    let mut rng = seeded_rng(103, 0);
    let (mut balancer, _) = balancer(4096, &mut rng);
    let first = balancer.open_with_entry(client(&mut rng));
    for _ in 0..50 {
        balancer.open_with_entry(client(&mut rng));
    }
    balancer.lb.tick(Duration::from_secs(3));
    assert_eq!(balancer.open(first.client), (first.server, Some(first.number)));
    let entry = balancer.entry(first.client).unwrap();
    assert_eq!((entry.packets, entry.last_seen), (1, ClockTicks(30)), "it is still half-open");
    assert_eq!(balancer.lb.connections_in_use(), 51);

    let draining = Server { mac: Some(balancer.macs[&(0, first.server)]), is_eligible: false };
    balancer.lb.set_server(balancer.services[0], first.server, draining);
    let (server, number) = balancer.open(first.client);
    assert_ne!(server, first.server);
    assert!(number.is_some_and(|number| number != first.number));
    assert_eq!(balancer.lb.connections_in_use(), 52);
}

#[test]
fn connection_holds_one_entry_while_few_others_of_its_hash_open() {
    skip_if!(missing_bpf_rights());
    let mut rng = seeded_rng(117, 0);
    let (balancer, _) = balancer(4096, &mut rng);
    let first = balancer.open_with_entry(client(&mut rng));
    let set = balancer.hash(first.client).recent_set();
    for round in 1..=20 {
        let mut others = Vec::new();
        while others.len() < intf::RECENT_WAYS as usize - 1 {
            let other = client(&mut rng);
            if balancer.hash(other).recent_set() == set {
                others.push(balancer.open_with_entry(other));
            }
        }
        for again in others.iter().chain([&first]) {
            assert_eq!(balancer.open(again.client), (again.server, Some(again.number)), "round {round}");
        }
        assert_eq!(balancer.lb.connections_in_use(), 1 + round * others.len());
    }
}

#[test]
fn cookie_of_another_connection_is_unknown() {
    skip_if!(missing_bpf_rights());
    let mut rng = seeded_rng(104, 0);
    let options = Options {
        connection_table_size: TableSize::try_from(1024).unwrap(),
        broadcast_limits: [BroadcastRates::uniform(PacketRate { per_second: 1, burst: 3 });
            intf::LIMITED_KIND_COUNT as usize],
        ..Options::default()
    };
    let other_vip = (Ipv4Addr::new(10, 200, 0, 1), 443);
    let services = [(service(VIP), STATEFUL), (service(other_vip), STATEFUL)];
    let mut balancer = Balancer::with_limits(&services, options, &mut rng);
    let ids = balancer.replace_servers(0, 4, &mut rng);
    let table = random_table(PlacementRule::RoundRobin, 1, 1, &ids, &mut rng);
    balancer.install(0, &table);
    balancer.lb.set_owner_number(Some(own_number()));
    let opened = balancer.open_with_entry(client(&mut rng));
    let mut unknown = 0;
    let mut expect_unknown = |balancer: &Balancer, frame: &[u8]| {
        balancer.expect_broadcast_or(0, frame, Identification::Unchanged, "drop_unknown_cookie");
        unknown += 1;
        assert_eq!(balancer.events(0, "connection_unknown"), unknown);
    };
    // Packets of other tuples with this slot, and packets of this tuple with free slots. A FIN takes the slow path.
    for _ in 0..200 {
        expect_unknown(&balancer, &established(&balancer, client(&mut rng), opened.number));
    }
    for slot in (0..1024).filter(|slot| *slot != u32::from(opened.number) % 1024).step_by(7) {
        let number = encode_cookie_index(own_number(), slot);
        expect_unknown(&balancer, &established(&balancer, opened.client, number));
        expect_unknown(&balancer, &packet(&balancer.keys, opened.client, number, ACK | FIN).frame());
    }
    let entry = balancer.entry(opened.client).unwrap();
    assert_eq!((entry.packets, entry.is_closing), (1, false), "nothing of that was counted for it");
    // The same client at the other service is another connection.
    let tsecr = cookie::stamp_tsval(
        &balancer.keys,
        &support::TIME_KEY,
        &tuple(opened.client),
        Cookie::TableIndex(opened.number),
        5,
    );
    let mut elsewhere = Tcp { options: aligned_timestamp(1, tsecr), ..Tcp::new(opened.client, VIP) };
    elsewhere.destination.set_port(other_vip.1);
    let (_, _) = balancer.run(&elsewhere.frame());
    assert_eq!(balancer.entry(opened.client).unwrap().packets, 1);
    balancer.expect_by_index(&opened);

    // Packets to an unresolved server are dropped; packets to a removed server are broadcast.
    let index = balancer.services[0];
    balancer.lb.set_server(index, opened.server, Server { mac: None, is_eligible: true });
    let frame = established(&balancer, opened.client, opened.number);
    balancer.expect(&frame, XDP_DROP, 0, "drop_server_unresolved");
    balancer.lb.remove_server(index, opened.server);
    balancer.expect_broadcast_or(0, &frame, Identification::Unchanged, "drop_unknown_cookie");
    assert_eq!(balancer.events(0, "connection_unknown"), unknown);
}

#[test]
fn index_of_another_table_goes_to_its_owner_or_is_broadcast() {
    skip_if!(missing_bpf_rights());
    let mut rng = seeded_rng(105, 0);
    let mut broadcast_limits =
        [BroadcastRates::uniform(PacketRate { per_second: 1, burst: 1 }); intf::LIMITED_KIND_COUNT as usize];
    broadcast_limits[intf::LIMITED_OWNER_LOST as usize] =
        BroadcastRates::uniform(PacketRate { per_second: 1, burst: 40 });
    let options = Options { broadcast_limits, ..Options::default() };
    let mut balancer = Balancer::with_limits(&[(service(VIP), STATEFUL)], options, &mut rng);
    balancer.lb.set_owner_number(Some(own_number()));
    let (alive, lost, never) = (owner(9), owner(0), owner(15));
    let mac = MacAddress([2, 0, 0, 0, 9, 9]);
    balancer.lb.set_owner_mac(alive, Some(mac));
    balancer.lb.set_owner_mac(lost, None);
    let frame = |balancer: &Balancer, of, rng: &mut _| established(balancer, client(rng), encode_cookie_index(of, 77));
    for flags in [ACK, ACK | FIN] {
        for _ in 0..50 {
            let number = encode_cookie_index(alive, uniform_below(&mut rng, 1024));
            let frame = packet(&balancer.keys, client(&mut rng), number, flags).frame();
            balancer.expect_to(&frame, mac, "to_owner");
        }
    }
    // A packet that another load balancer has sent is broadcast, because a packet goes to an owner once only.
    let mut passed_on = frame(&balancer, alive, &mut rng);
    passed_on[6..12].copy_from_slice(&mac.0);
    balancer.expect_to(&passed_on, MacAddress::BROADCAST, "broadcast_owner_lost");

    // The burst is 40 packets, of which one is used; one more packet is allowed per second.
    let outcomes: Vec<i32> = (0..60).map(|_| balancer.run(&frame(&balancer, lost, &mut rng)).0).collect();
    let sent = outcomes.iter().filter(|verdict| **verdict == XDP_TX).count();
    assert!((39..=45).contains(&sent), "{sent} of 60 broadcast");
    // On a slow machine the bucket may have a new token: the first packets use it up.
    let expect_dropped = |balancer: &Balancer, of, name: &str, rng: &mut _| {
        let mut spend = (0..5).map(|_| balancer.run(&frame(balancer, of, rng)).0);
        assert!(spend.any(|verdict| verdict == XDP_DROP), "{name}: five of five are broadcast");
        balancer.expect(&frame(balancer, of, rng), XDP_DROP, 0, name);
    };
    expect_dropped(&balancer, lost, "drop_broadcast_rate_limited", &mut rng);
    // An owner number that was never in use has a burst of one packet.
    balancer.expect_to(&frame(&balancer, never, &mut rng), MacAddress::BROADCAST, "broadcast");
    expect_dropped(&balancer, never, "drop_unknown_cookie", &mut rng);
    assert_eq!(balancer.events(0, "connection_unknown"), 0, "our own table was not asked");
    balancer.lb.forget_owner(alive);
    expect_dropped(&balancer, alive, "drop_unknown_cookie", &mut rng);
}

#[test]
fn connections_without_an_owner_number_are_stateless() {
    skip_if!(missing_bpf_rights());
    let mut rng = seeded_rng(106, 0);
    let (mut balancer, ids) = balancer(1024, &mut rng);
    balancer.lb.tick(Duration::from_secs(9));
    assert_eq!(balancer.lb.owner_number(), Some(own_number()));
    balancer.lb.set_owner_number(None);
    assert_eq!((balancer.lb.owner_number(), balancer.lb.clock()), (None, ClockTicks(90)));
    for _ in 0..20 {
        let client = client(&mut rng);
        let (server, number) = balancer.open(client);
        assert_eq!(number, None);
        // A TSecr that only a load balancer may write is not accepted from a client.
        let forged = syn_with_tsecr(client, encode_syn_tsecr(own_number(), 3)).frame();
        let (_, forwarded) = balancer.run_expecting_counter(&forged, Some(0), "new_connection");
        assert_eq!((tsecr_of(&forwarded), tcp_sum(&forwarded)), (0, 0xffff));
        let tsecr = cookie::stamp_tsval(&balancer.keys, &support::TIME_KEY, &tuple(client), Cookie::Server(server), 5);
        let frame = Tcp { options: aligned_timestamp(1, tsecr), ..Tcp::new(client, VIP) }.frame();
        balancer.expect_sent_to(0, &frame, server, "established");
    }
    assert_eq!(balancer.lb.connections_in_use(), 0);
    // A connection without timestamps gets no entry either.
    balancer.lb.set_owner_number(Some(own_number()));
    let plain = Tcp { flags: SYN, ..Tcp::new(client(&mut rng), VIP) }.frame();
    balancer.run_expecting_counter(&plain, Some(0), "bucket_hash");
    assert_eq!(balancer.lb.connections_in_use(), 0);
    assert!(ids.len() > 1);
}

#[test]
fn syn_flood_fills_the_table_and_keeps_established_connections() {
    skip_if!(missing_bpf_rights());
    let mut rng = seeded_rng(107, 0);
    let (mut balancer, _) = balancer(2048, &mut rng);
    let real: Vec<_> = (0..700).map(|_| balancer.open_with_entry(client(&mut rng))).collect();
    real.iter().for_each(|opened| balancer.expect_by_index(opened));
    let before: BTreeMap<_, _> =
        real.iter().map(|opened| (opened.client, balancer.entry(opened.client).unwrap().identity)).collect();

    let mut refused = 0;
    for _ in 0..5000 {
        let (verdict, forwarded) = balancer.run(&syn(client(&mut rng)));
        assert_eq!(verdict, XDP_TX);
        refused += u64::from(tsecr_of(&forwarded) == 0);
    }
    assert_eq!(refused, 5000 - (2048 - 700));
    assert_eq!(balancer.lb.connections_in_use(), 2048, "every partition is full");
    assert_eq!(balancer.events(0, "connection_table_full"), refused);
    for opened in &real {
        assert_eq!(balancer.entry(opened.client).unwrap().identity, before[&opened.client]);
        balancer.expect_by_index(opened);
    }
    // A genuine connection during the flood gets a stateless cookie, and works.
    let late = client(&mut rng);
    let (server, number) = balancer.open(late);
    assert_eq!(number, None);
    let tsecr = cookie::stamp_tsval(&balancer.keys, &support::TIME_KEY, &tuple(late), Cookie::Server(server), 5);
    let frame = Tcp { options: aligned_timestamp(1, tsecr), ..Tcp::new(late, VIP) }.frame();
    balancer.expect_sent_to(0, &frame, server, "established");

    // After ten seconds the flood's entries are due, without a query to an agent.
    balancer.lb.tick(Duration::from_millis(9_900));
    assert_eq!(balancer.lb.due_connections(&Timeouts::default(), 2048), []);
    balancer.lb.tick(Duration::from_secs(10));
    let mut freed = 0;
    for _ in 0..2 {
        let due = balancer.lb.due_connections(&Timeouts::default(), 1024);
        assert!(due.iter().all(|(connection, due)| *due == ExpiryReason::HalfOpen && connection.packets == 1));
        let connections: Vec<_> = due.into_iter().map(|(connection, _)| connection).collect();
        freed += balancer.lb.free_connections(&connections).unwrap();
    }
    assert_eq!((freed, balancer.lb.connections_in_use()), (2048 - 700, 700));
    real.iter().for_each(|opened| balancer.expect_by_index(opened));
    balancer.open_with_entry(client(&mut rng));
}

#[test]
fn entry_is_freed_once_and_only_if_unchanged() {
    skip_if!(missing_bpf_rights());
    let mut rng = seeded_rng(108, 0);
    let (mut balancer, _) = balancer(1024, &mut rng);
    let opened: Vec<_> = (0..1024).map(|_| balancer.open_with_entry(client(&mut rng))).collect();
    let (first, second) = (opened[0], opened[1]);
    let seen = [first, second].map(|opened| balancer.entry(opened.client).unwrap());
    // The second connection has a packet after its entry was read.
    balancer.expect_by_index(&second);
    assert_eq!(balancer.lb.free_connections(&[seen[0], seen[1], seen[0]]).unwrap(), 1);
    assert_eq!(balancer.lb.free_connections(&seen).unwrap(), 0);
    balancer.expect_by_index(&second);
    let frame = established(&balancer, first.client, first.number);
    balancer.expect_broadcast_or(0, &frame, Identification::Unchanged, "drop_unknown_cookie");
    assert_eq!(balancer.events(0, "connection_unknown"), 1);

    // The next connection gets the only free slot, with the next generation.
    let next = balancer.open_with_entry(client(&mut rng));
    let entry = balancer.entry(next.client).unwrap();
    assert_eq!((entry.index, entry.identity.generation), (seen[0].index, seen[0].identity.generation + 1));
    balancer.expect_broadcast_or(0, &frame, Identification::Unchanged, "drop_unknown_cookie");
    balancer.expect_by_index(&next);
    assert_eq!(balancer.lb.free_connections(&seen).unwrap(), 0);
    assert_eq!(balancer.entry(next.client).unwrap().packets, 2);
}

#[test]
fn entries_are_due_by_their_timers_or_when_their_server_is_gone() {
    skip_if!(missing_bpf_rights());
    let mut rng = seeded_rng(109, 0);
    let (mut balancer, _) = balancer(4096, &mut rng);
    balancer.lb.tick(Duration::ZERO);
    let [half_open, closing, idle] = [(); 3].map(|()| balancer.open_with_entry(client(&mut rng)));
    balancer.expect_by_index(&idle);
    let fin = packet(&balancer.keys, closing.client, closing.number, ACK | FIN).frame();
    balancer.expect_sent_to(0, &fin, closing.server, "connection_table");
    let due = |balancer: &mut Balancer, seconds| -> BTreeMap<_, ExpiryReason> {
        balancer.lb.tick(Duration::from_secs(seconds));
        let due = balancer.lb.due_connections(&Timeouts::default(), 4096);
        due.iter().map(|(connection, due)| (ipv4_client(connection), *due)).collect()
    };
    let set = |connections: &[_]| connections.iter().copied().collect::<BTreeMap<_, ExpiryReason>>();
    let (half_open, closing, idle_due) = (
        (half_open.client, ExpiryReason::HalfOpen),
        (closing.client, ExpiryReason::Closing),
        (idle.client, ExpiryReason::Idle),
    );
    assert_eq!(due(&mut balancer, 9), set(&[]));
    assert_eq!(due(&mut balancer, 10), set(&[half_open]));
    assert_eq!(due(&mut balancer, 60), set(&[half_open, closing]));
    assert_eq!(due(&mut balancer, 300), set(&[half_open, closing, idle_due]));
    balancer.expect_by_index(&idle);
    assert_eq!(due(&mut balancer, 300), set(&[half_open, closing]));
    balancer.lb.remove_server(balancer.services[0], idle.server);
    assert_eq!(due(&mut balancer, 300)[&idle.client], ExpiryReason::ServerGone);
}

#[test]
fn removed_service_leaves_no_entries() {
    skip_if!(missing_bpf_rights());
    let mut rng = seeded_rng(110, 0);
    for after in [vec![], vec![(service(VIP), ServiceMode::default())]] {
        let (mut balancer, _) = balancer(1024, &mut rng);
        for _ in 0..100 {
            balancer.open_with_entry(client(&mut rng));
        }
        assert_eq!(balancer.lb.connections_in_use(), 100);
        balancer.lb.set_services(&[(service(VIP), STATEFUL)]).unwrap();
        assert_eq!(balancer.lb.connections_in_use(), 100);
        balancer.lb.set_services(&after).unwrap();
        assert_eq!(balancer.lb.connections_in_use(), 0);
    }
}
