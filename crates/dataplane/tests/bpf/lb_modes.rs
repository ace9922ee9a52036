//! Tests of `bpf/lb/lb.bpf.c` in each consistency mode (`BPF_PROG_TEST_RUN`): look-up of the server, flow table
//! entries, counters.

use std::net::Ipv4Addr;

use coreward_dataplane::lb::{Options, Server};
use coreward_intf as intf;
use coreward_model::consistency::{Consistency, ServiceMode, Timestamps};
use coreward_model::cookie::{self, Cookie};
use coreward_model::lb::ServerTraffic;
use coreward_model::placement::{PlacementRule, PlacementState, PlacementTable};
use coreward_model::rss::{seeded_rng, uniform_below};
use coreward_model::tuple::Protocol;
use coreward_model::{FourTuple, ServerId, ServiceAddress};

use crate::support::balancer::{
    Balancer, Identification, VIP, XDP_DROP, XDP_TX, client, previous_server, random_table, service, tuple,
};
use crate::support::{self, ACK, FIN, RST, SYN, Tcp, aligned_timestamp, missing_bpf_rights, skip_if};

fn mode(consistency: Consistency) -> ServiceMode {
    ServiceMode { consistency, ..ServiceMode::default() }
}

fn balancer(
    mode: ServiceMode,
    rule: PlacementRule,
    rng: &mut impl rand::Rng,
) -> (Balancer, Vec<ServerId>, PlacementTable) {
    let mut balancer = Balancer::with(&[(service(VIP), mode)], Options::default(), rng);
    let ids = balancer.replace_servers(0, 9, rng);
    let table = random_table(rule, 1, 2, &ids, rng);
    balancer.install(0, &table);
    (balancer, ids, table)
}

/// Returns a client's packet. `options` is 0 for no timestamp, 1 for an aligned timestamp, 2 for one at another offset.
fn packet(client: (Ipv4Addr, u16), flags: u8, options: u32) -> Vec<u8> {
    let options = match options {
        0 => vec![],
        1 => aligned_timestamp(7, if flags & SYN == 0 { 0x1234_5678 } else { 0 }),
        _ => [&[2, 4, 5, 0xb4][..], &aligned_timestamp(7, 99)].concat(),
    };
    Tcp { flags, options, ..Tcp::new(client, VIP) }.frame()
}

#[test]
fn without_consistency_every_packet_follows_the_rule() {
    skip_if!(missing_bpf_rights());
    let mut rng = seeded_rng(41, 0);
    let (mut balancer, ids, mut table) = balancer(mode(Consistency::None), PlacementRule::Table, &mut rng);
    for generation in 2..8 {
        let mut state = PlacementState::for_table(&table);
        for _ in 0..100 {
            let client = client(&mut rng);
            for (flags, name) in
                [(SYN, "new_connection"), (ACK, "per_packet"), (ACK | FIN, "per_packet"), (RST, "per_packet")]
            {
                let frame = packet(client, flags, uniform_below(&mut rng, 3));
                let chosen = table.choose(&mut state, &tuple(client)).unwrap();
                balancer.expect_sent_to(0, &frame, chosen, name);
            }
        }
        table = random_table(PlacementRule::PowerOfTwo, generation, 1, &ids, &mut rng);
        balancer.install(0, &table);
    }
    assert_eq!(balancer.events(0, "flow_inserted"), 0);
}

#[test]
fn hash_table_stores_the_rules_choice() {
    skip_if!(missing_bpf_rights());
    let mut rng = seeded_rng(42, 0);
    let (mut balancer, ids, table) = balancer(mode(Consistency::HashTable), PlacementRule::Table, &mut rng);
    let mut state = PlacementState::for_table(&table);
    let mut connections = Vec::new();
    for _ in 0..100 {
        let client = client(&mut rng);
        let chosen = table.choose(&mut state, &tuple(client)).unwrap();
        // A packet of an unknown connection that is no SYN is placed by the rule, and gets no flow table entry.
        balancer.expect_sent_to(0, &packet(client, ACK, uniform_below(&mut rng, 3)), chosen, "per_packet");
        balancer.expect_sent_to(0, &packet(client, SYN, uniform_below(&mut rng, 3)), chosen, "new_connection");
        connections.push((client, chosen));
    }
    assert_eq!(balancer.events(0, "flow_inserted"), 100);
    let other = random_table(PlacementRule::RoundRobin, 2, 1, &ids[1..], &mut rng);
    balancer.install(0, &other);
    for (client, chosen) in &connections {
        for flags in [ACK, ACK | FIN, RST] {
            balancer.expect_sent_to(0, &packet(*client, flags, uniform_below(&mut rng, 3)), *chosen, "flow_table");
        }
    }
    // An unresolved server keeps its connections; the connections of a removed server are placed by the rule.
    let (client, chosen) = connections[0];
    balancer.lb.set_server(balancer.services[0], chosen, Server { mac: None, is_eligible: true });
    balancer.expect(&packet(client, ACK, 1), XDP_DROP, 0, "drop_server_unresolved");
    balancer.lb.remove_server(balancer.services[0], chosen);
    let (verdict, _) = balancer.run_expecting_counter(&packet(client, ACK, 1), Some(0), "per_packet");
    assert_eq!(verdict, XDP_TX);
}

#[test]
fn beamer_follows_the_bucket_and_marks_the_previous_server() {
    skip_if!(missing_bpf_rights());
    let mut rng = seeded_rng(43, 0);
    let (balancer, _, table) = balancer(mode(Consistency::Beamer), PlacementRule::LeastAssigned, &mut rng);
    let mut named = 0;
    for _ in 0..200 {
        let client = client(&mut rng);
        let before = previous_server(&table, &tuple(client));
        named += usize::from(before.is_some());
        let chosen = table.choose_consistent(&tuple(client)).unwrap();
        for flags in [SYN, ACK, ACK | FIN, RST] {
            let frame = packet(client, flags, uniform_below(&mut rng, 3));
            balancer.expect_sent(0, &frame, chosen, Identification::Before(before), "bucket_hash");
        }
    }
    assert!((50..180).contains(&named), "{named} of 200 with a server before");
    assert_eq!(balancer.events(0, "flow_inserted"), 0);
}

/// Without a controller, the table keeps a server that takes no new connections: then the load balancer must avoid it.
#[test]
fn beamer_syn_leaves_a_bucket_whose_server_takes_no_new_connections() {
    skip_if!(missing_bpf_rights());
    let mut rng = seeded_rng(50, 0);
    for (name, is_down) in [("drains", false), ("is down by the load balancer's own checks", true)] {
        let (mut balancer, ids, table) = balancer(mode(Consistency::Beamer), PlacementRule::LeastAssigned, &mut rng);
        let left = table.consistent_servers[0];
        let place = balancer.services[0];
        let clients: Vec<_> = std::iter::repeat_with(|| client(&mut rng))
            .filter(|client| table.choose_consistent(&tuple(*client)) == Some(left))
            .take(50)
            .collect();
        // Returns the server to which a packet was sent, and the previous server in its IP identification.
        let sent = |balancer: &Balancer, client, flags| {
            let (verdict, frame) = balancer.run(&packet(client, flags, 1));
            assert_eq!(verdict, XDP_TX, "{name}: flags {flags:#x}");
            let to = ids.iter().copied().find(|id| frame[..6] == balancer.macs[&(0, *id)].0).unwrap();
            (to, u16::from_be_bytes([frame[18], frame[19]]))
        };
        let mac = Some(balancer.macs[&(0, left)]);
        balancer.lb.set_server(place, left, Server { mac, is_eligible: false });
        balancer.lb.set_masked(place, left, is_down);
        // An established connection stays at the server of its bucket.
        let (open, clients) = clients.split_last().unwrap();
        assert_eq!(sent(&balancer, *open, ACK).0, left, "{name}");
        let opened: Vec<_> = clients.iter().map(|client| sent(&balancer, *client, SYN)).collect();
        for (client, opened) in clients.iter().zip(&opened) {
            assert!(opened.0 != left && opened.1 == left.get(), "{name}: {opened:?}, and {left} is the server before");
            for flags in [SYN, ACK, RST] {
                assert_eq!(sent(&balancer, *client, flags), *opened, "{name}");
            }
        }
        assert_eq!(sent(&balancer, *open, RST).0, left, "{name}");
        // The server takes new connections again. Connections that were opened at other servers stay there.
        balancer.lb.set_server(place, left, Server { mac, is_eligible: true });
        balancer.lb.set_masked(place, left, false);
        for (client, opened) in clients.iter().zip(&opened) {
            assert_eq!(sent(&balancer, *client, ACK), *opened, "{name}, and returned");
        }
        assert_eq!(sent(&balancer, *open, SYN).0, left, "{name}, and returned");
        assert_eq!(balancer.events(0, "flow_inserted"), 49, "{name}");
    }
}

#[test]
fn with_timestamps_off_connections_use_the_flow_table() {
    skip_if!(missing_bpf_rights());
    let mut rng = seeded_rng(44, 0);
    let off = ServiceMode { timestamps: Timestamps::Off, ..ServiceMode::default() };
    let (mut balancer, ids, table) = balancer(off, PlacementRule::Table, &mut rng);
    let mut connections = Vec::new();
    for _ in 0..100 {
        let client = client(&mut rng);
        let chosen = table.choose_consistent(&tuple(client)).unwrap();
        let before = previous_server(&table, &tuple(client));
        for (flags, name) in [(SYN, "bucket_hash"), (ACK, "bucket_hash"), (ACK, "flow_table")] {
            let frame = packet(client, flags, uniform_below(&mut rng, 3));
            balancer.expect_sent(0, &frame, chosen, Identification::Before(before), name);
        }
        // With `timestamps = "off"` the program ignores cookies.
        let other = ids[uniform_below(&mut rng, ids.len() as u32) as usize];
        let tsecr = cookie::stamp_tsval(&balancer.keys, &support::TIME_KEY, &tuple(client), Cookie::Server(other), 5);
        let frame = Tcp { options: aligned_timestamp(1, tsecr), ..Tcp::new(client, VIP) }.frame();
        balancer.expect_sent(0, &frame, chosen, Identification::Before(before), "flow_table");
        connections.push((client, chosen, before));
    }
    // With another pool, connections in the flow table keep their server and their previous server.
    let next = random_table(PlacementRule::Table, 2, 1, &ids[3..], &mut rng);
    balancer.install(0, &next);
    for (client, chosen, before) in connections {
        let frame = packet(client, ACK | FIN, 1);
        balancer.expect_sent(0, &frame, chosen, Identification::Before(before), "flow_table");
    }
    // The server of a connection without an entry in the flow table is unknown, so its resets are broadcast.
    let nobody = Identification::Before(None);
    for options in 0..3 {
        let reset = packet(client(&mut rng), RST, options);
        balancer.expect_broadcast_or(0, &reset, nobody, "drop_broadcast_rate_limited");
    }
}

#[test]
fn flow_of_a_removed_server_follows_the_bucket() {
    skip_if!(missing_bpf_rights());
    let mut rng = seeded_rng(45, 0);
    let (mut balancer, ids, table) = balancer(ServiceMode::default(), PlacementRule::Table, &mut rng);
    let from = std::iter::repeat_with(|| client(&mut rng))
        .find(|client| table.choose_consistent(&tuple(*client)) == Some(ids[0]))
        .unwrap();
    let frame = packet(from, ACK, 0);
    let of = |table: &PlacementTable| Identification::Before(previous_server(table, &tuple(from)));
    balancer.expect_sent(0, &frame, ids[0], of(&table), "bucket_hash");
    balancer.expect_sent(0, &frame, ids[0], of(&table), "flow_table");
    balancer.lb.set_server(balancer.services[0], ids[0], Server { mac: None, is_eligible: false });
    balancer.expect(&frame, XDP_DROP, 0, "drop_server_unresolved");
    balancer.lb.remove_server(balancer.services[0], ids[0]);
    balancer.expect(&frame, XDP_DROP, 0, "drop_no_eligible_server");
    let next = random_table(PlacementRule::Table, 2, 1, &ids[1..], &mut rng);
    balancer.install(0, &next);
    let chosen = next.choose_consistent(&tuple(from)).unwrap();
    balancer.expect_sent(0, &frame, chosen, of(&next), "bucket_hash");
    balancer.expect_sent(0, &frame, chosen, of(&next), "flow_table");
}

#[test]
fn flow_table_is_bounded_and_drops_removed_services() {
    skip_if!(missing_bpf_rights());
    let mut rng = seeded_rng(46, 0);
    let other = (Ipv4Addr::new(10, 200, 0, 1), 443);
    let services = [VIP, other].map(|vip| (service(vip), mode(Consistency::HashTable)));
    let options = Options { flow_table_entries: 4096, ..Options::default() };
    let mut balancer = Balancer::with(&services, options, &mut rng);
    let fill = |balancer: &mut Balancer, rng: &mut rand_xoshiro::Xoshiro256PlusPlus| {
        for position in 0..2 {
            let ids = balancer.replace_servers(position, 2, rng);
            balancer.install(position, &random_table(PlacementRule::Table, 1, 1, &ids, rng));
        }
    };
    fill(&mut balancer, &mut rng);
    let clients: Vec<_> = (0..20_000).map(|_| client(&mut rng)).collect();
    let known = |balancer: &Balancer, position: usize| {
        let flow = intf::LB_COUNTER_FLOW_TABLE as usize;
        let counted = || balancer.lb.counters(balancer.services[position]).packets[flow];
        let before = counted();
        for client in &clients {
            balancer.run(&Tcp::new(*client, [VIP, other][position]).frame());
        }
        counted() - before
    };
    for client in &clients {
        balancer.run(&Tcp { flags: SYN, ..Tcp::new(*client, VIP) }.frame());
    }
    let remembered = known(&balancer, 0);
    assert!((1..=4096).contains(&remembered), "{remembered} of 20,000 remembered");

    // A new service reuses the index of a removed service, but not its flow table entries.
    balancer.services = balancer.lb.set_services(&services[1..]).unwrap();
    balancer.services = balancer.lb.set_services(&services).unwrap();
    fill(&mut balancer, &mut rng);
    assert_eq!(known(&balancer, 0), 0);

    for entries in [0, coreward_dataplane::lb::MAX_FLOW_TABLE_ENTRIES + 1] {
        let options = Options { flow_table_entries: entries, ..Options::default() };
        let error = coreward_dataplane::lb::LoadBalancer::load(options).unwrap_err().to_string();
        assert_eq!(error, format!("a flow table of {entries} entries: expected 1 to 16777216"));
    }
}

#[test]
fn traffic_is_counted_by_server() {
    skip_if!(missing_bpf_rights());
    let mut rng = seeded_rng(47, 0);
    let (mut balancer, ids, table) = balancer(ServiceMode::default(), PlacementRule::Table, &mut rng);
    let from = client(&mut rng);
    let server = table.choose(&mut PlacementState::for_table(&table), &tuple(from)).unwrap();
    let tsecr = cookie::stamp_tsval(&balancer.keys, &support::TIME_KEY, &tuple(from), Cookie::Server(server), 5);
    let with_cookie = |flags| Tcp { flags, options: aligned_timestamp(1, tsecr), ..Tcp::new(from, VIP) }.frame();
    let frames = [packet(from, SYN, 1), with_cookie(ACK), with_cookie(ACK | FIN), with_cookie(RST)];
    for frame in &frames {
        balancer.destination(frame);
    }
    let counted = balancer.lb.traffic(server);
    assert_eq!(counted, ServerTraffic { opened: 1, closed: 2, packets: 0, bytes: 0 });
    balancer.lb.count_traffic(true).unwrap();
    for frame in &frames {
        balancer.destination(frame);
    }
    let bytes = frames.iter().map(|frame| frame.len() as u64).sum();
    let counted = balancer.lb.traffic(server);
    assert_eq!(counted, ServerTraffic { opened: 2, closed: 4, packets: 4, bytes });
    // Broadcast and dropped packets count for no server.
    balancer.run(&packet(client(&mut rng), RST, 0));
    balancer.lb.set_server(balancer.services[0], server, Server { mac: None, is_eligible: true });
    balancer.expect(&with_cookie(ACK), XDP_DROP, 0, "drop_server_unresolved");
    let all: Vec<u64> = ids.iter().map(|id| balancer.lb.traffic(*id).packets).collect();
    assert_eq!(all.iter().sum::<u64>(), 4, "{all:?}");
    balancer.lb.count_traffic(false).unwrap();
    assert_eq!(balancer.lb.traffic(server).packets, 4);
}

/// An attacker may send such packets to one server repeatedly.
#[test]
fn forged_packets_do_not_move_counts() {
    skip_if!(missing_bpf_rights());
    let mut rng = seeded_rng(49, 0);
    let off = ServiceMode { timestamps: Timestamps::Off, ..ServiceMode::default() };
    let modes = [Consistency::Stateless, Consistency::Stateful, Consistency::HashTable].map(mode);
    for mode in modes.into_iter().chain([off]) {
        let (balancer, ids, _) = balancer(mode, PlacementRule::Table, &mut rng);
        let sum = |of: fn(&ServerTraffic) -> u64| ids.iter().map(|id| of(&balancer.lb.traffic(*id))).sum::<u64>();
        let from = client(&mut rng);
        // An ACK stores a hint in the flow table; a SYN of a hash-table service stores an entry.
        for flags in [&[ACK | FIN; 200][..], &[ACK, ACK | FIN, RST], &[SYN; 200], &[ACK | FIN; 200]].concat() {
            balancer.run(&packet(from, flags, 0));
        }
        let is_placed = mode.consistency == Consistency::HashTable;
        assert_eq!((sum(|of| of.opened), sum(|of| of.closed)), (u64::from(is_placed), 0), "{mode:?}");
    }
}

/// The program compiled for all modes treats each service like a program compiled for that service's mode alone.
#[test]
fn services_of_different_modes_coexist_and_change() {
    skip_if!(missing_bpf_rights());
    let mut rng = seeded_rng(48, 0);
    let vip = |position: usize| (VIP.0, 80 + position as u16);
    let mut modes: Vec<ServiceMode> = Consistency::ALL.into_iter().map(mode).collect();
    modes.push(ServiceMode { timestamps: Timestamps::Off, ..ServiceMode::default() });
    let services = |modes: &[ServiceMode]| -> Vec<(ServiceAddress, ServiceMode)> {
        modes.iter().enumerate().map(|(position, mode)| (service(vip(position)), *mode)).collect()
    };
    let mut balancer = Balancer::with(&services(&modes), Options::default(), &mut rng);
    let mut tables = Vec::new();
    for position in 0..modes.len() {
        let ids = balancer.replace_servers(position, 5, &mut rng);
        tables.push(random_table(PlacementRule::Table, 1, 1, &ids, &mut rng));
        balancer.install(position, &tables[position]);
    }
    for round in 0..modes.len() {
        for (position, mode) in modes.iter().enumerate() {
            for _ in 0..20 {
                let client = client(&mut rng);
                let tuple = FourTuple::ipv4(client, vip(position));
                let table = &tables[position];
                let by_rule = table.choose(&mut PlacementState::for_table(table), &tuple).unwrap();
                let by_bucket = table.choose_consistent(&tuple).unwrap();
                let tsecr = cookie::stamp_tsval(&balancer.keys, &support::TIME_KEY, &tuple, Cookie::Server(by_rule), 5);
                let syn = Tcp { flags: SYN, options: aligned_timestamp(1, 0), ..Tcp::new(client, vip(position)) };
                let ack = Tcp { flags: ACK, options: aligned_timestamp(2, tsecr), ..syn.clone() };
                let before = Identification::Before(previous_server(table, &tuple));
                let kept = Identification::Unchanged;
                let (server, identification, names) = match (mode.timestamps, mode.consistency) {
                    (Timestamps::Off, _) => (by_bucket, before, ["bucket_hash", "bucket_hash", "flow_table"]),
                    (_, Consistency::Beamer) => (by_bucket, before, ["bucket_hash"; 3]),
                    (_, Consistency::None) => (by_rule, kept, ["new_connection", "per_packet", "per_packet"]),
                    (_, Consistency::HashTable) => (by_rule, kept, ["new_connection", "flow_table", "flow_table"]),
                    _ => (by_rule, kept, ["new_connection", "established", "established"]),
                };
                for (frame, name) in [&syn, &ack, &ack].into_iter().zip(names) {
                    balancer.expect_sent(position, &frame.frame(), server, identification, name);
                }
            }
        }
        // Each service gets the mode of the next service; indexes, servers and tables stay.
        modes.rotate_left(1);
        let places = balancer.lb.set_services(&services(&modes)).unwrap();
        assert_eq!(places, balancer.services, "round {round}");
    }
}

#[test]
fn invalid_modes_are_rejected_and_change_nothing() {
    skip_if!(missing_bpf_rights());
    let mut rng = seeded_rng(49, 0);
    let (mut balancer, _, _) = balancer(mode(Consistency::Beamer), PlacementRule::Table, &mut rng);
    let udp = ServiceAddress { protocol: Protocol::Udp, ..service(VIP) };
    let mut refused = |service| balancer.lb.set_services(&[service]).unwrap_err().to_string();
    assert_eq!(
        refused((udp, mode(Consistency::Beamer))),
        "service 10.200.0.1:80/udp: consistency \"beamer\" needs TCP: expected \"hash-table\" or \"none\""
    );
    let by_load_balancer = ServiceMode { timestamps: Timestamps::LoadBalancer, ..mode(Consistency::Beamer) };
    assert_eq!(
        refused((service(VIP), by_load_balancer)),
        "service 10.200.0.1:80/tcp: timestamps by the load balancer need consistency \"stateless\" and TCP"
    );
    let (verdict, _) = balancer.run_expecting_counter(&packet(client(&mut rng), ACK, 1), Some(0), "bucket_hash");
    assert_eq!(verdict, XDP_TX);
}
