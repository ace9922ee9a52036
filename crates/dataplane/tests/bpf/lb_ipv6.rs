//! Comparison of `bpf/lb/lb.bpf.c` for IPv6 VIPs with the model's tables and cookies.

use std::net::{Ipv4Addr, Ipv6Addr};

use coreward_dataplane::lb::{Options, Server};
use coreward_dataplane::mac::MacAddress;
use coreward_intf as intf;
use coreward_model::connection_table::TableSize;
use coreward_model::consistency::{Consistency, ServiceMigration, ServiceMode};
use coreward_model::cookie::{self, Cookie, FleetKeys, KeyIndex};
use coreward_model::placement::{PlacementRule, PlacementState};
use coreward_model::rss::{seeded_rng, uniform_below};
use coreward_model::tuple::Protocol;
use coreward_model::{FourTuple, ServerId, ServiceAddress};
use rand::Rng as _;

use crate::support::balancer::{Balancer, Identification, XDP_DROP, id, previous_server, random_table, service};
use crate::support::stateful::{STATEFUL, number_of, own_number};
use crate::support::{
    self, ACK, FIN, RST, SYN, Tcp, aligned_timestamp, ipv6_frame, missing_bpf_rights, skip_if, timestamp,
};

const VIP: (Ipv6Addr, u16) = (Ipv6Addr::new(0x2001, 0xdb8, 0, 0, 0, 0, 0xc8, 1), 80);
const IPV4_VIP: (Ipv4Addr, u16) = (Ipv4Addr::new(10, 200, 0, 1), 80);

fn client(rng: &mut impl rand::Rng) -> (Ipv6Addr, u16) {
    (Ipv6Addr::from(u128::from(rng.next_u64()) << 64 | u128::from(rng.next_u64())), rng.next_u32() as u16)
}

fn tuple(client: (Ipv6Addr, u16)) -> FourTuple {
    FourTuple::ipv6(client, VIP)
}

/// Returns a frame from the client with a TCP segment after these extension headers.
fn frame_behind(headers: &[(u8, Vec<u8>)], client: (Ipv6Addr, u16), flags: u8, options: Vec<u8>) -> Vec<u8> {
    let ports_of = ((Ipv4Addr::UNSPECIFIED, client.1), (Ipv4Addr::UNSPECIFIED, VIP.1));
    Tcp { flags, options, ..Tcp::new(ports_of.0, ports_of.1) }.ipv6_frame(client.0, VIP.0, headers)
}

fn frame(client: (Ipv6Addr, u16), flags: u8, options: Vec<u8>) -> Vec<u8> {
    frame_behind(&[], client, flags, options)
}

fn syn(client: (Ipv6Addr, u16)) -> Vec<u8> {
    frame(client, SYN, [&[2, 4, 5, 0xa0, 4, 2][..], &timestamp(77, 0), &[1, 3, 3, 7]].concat())
}

/// Returns a balancer with an IPv6 and an IPv4 service; service 0 has the IPv6 VIP.
fn balancer(rng: &mut impl rand::Rng) -> Balancer {
    let services = [service(VIP), service(IPV4_VIP)].map(|service| (service, ServiceMode::default()));
    Balancer::with(&services, Options::default(), rng)
}

/// Returns lists of extension headers, each of which the program skips to find the TCP header.
fn extension_headers() -> [Vec<(u8, Vec<u8>)>; 4] {
    let options = |number| (number, vec![0, 0, 1, 4, 0, 0, 0, 0]);
    // An atomic fragment, which is the whole packet (RFC 6946), and an authentication header of 24 bytes.
    let atomic = (44, vec![0, 0, 0, 0, 1, 2, 3, 4]);
    let authentication = (51, [&[0, 4][..], &[0; 22]].concat());
    [vec![options(0)], vec![options(60)], vec![options(0), options(43), atomic], vec![authentication]]
}

#[test]
fn ipv6_new_connections_go_to_the_models_server() {
    skip_if!(missing_bpf_rights());
    let mut rng = seeded_rng(61, 0);
    let mut balancer = balancer(&mut rng);
    // Rules in the outer loop, because another rule needs another variant of the program.
    for rule in PlacementRule::ALL {
        for (generation, groups) in [1, 2, 4].into_iter().enumerate() {
            let ids = balancer.replace_servers(0, 30, &mut rng);
            let table = random_table(rule, generation as u64 + 1, groups, &ids, &mut rng);
            let mut state = PlacementState::for_table(&table);
            state.round_robin_counter = balancer.turns;
            balancer.install(0, &table);
            for _ in 0..200 {
                let client = client(&mut rng);
                let chosen = table.choose(&mut state, &tuple(client)).expect("there are members");
                balancer.expect_sent_to(0, &syn(client), chosen, "new_connection");
            }
            balancer.turns = state.round_robin_counter;
        }
    }
}

#[test]
fn ipv6_established_packets_follow_the_cookie() {
    skip_if!(missing_bpf_rights());
    let mut rng = seeded_rng(62, 0);
    let mut balancer = balancer(&mut rng);
    let ids = balancer.replace_servers(0, 300, &mut rng);
    for round in 0..1000 {
        if round % 250 == 0 {
            balancer.new_keys(&mut rng);
        }
        let client = client(&mut rng);
        let server = ids[uniform_below(&mut rng, ids.len() as u32) as usize];
        let current = if rng.next_u32() & 1 == 0 { KeyIndex::First } else { KeyIndex::Second };
        let keys = FleetKeys { current, ..balancer.keys };
        let tsecr =
            cookie::stamp_tsval(&keys, &support::TIME_KEY, &tuple(client), Cookie::Server(server), rng.next_u32());
        let odd = [&[1][..], &timestamp(1, tsecr), &[0]].concat();
        let flags = [ACK, ACK | FIN, ACK | RST, RST][uniform_below(&mut rng, 4) as usize];
        for options in [aligned_timestamp(1, tsecr), odd] {
            balancer.expect_sent_to(0, &frame(client, flags, options.clone()), server, "established");
            for headers in extension_headers() {
                let behind = frame_behind(&headers, client, flags, options.clone());
                balancer.expect_sent_to(0, &behind, server, "established");
            }
        }
    }
}

#[test]
fn ipv6_without_timestamps_stays_and_names_the_previous_server() {
    skip_if!(missing_bpf_rights());
    let mut rng = seeded_rng(63, 0);
    let mut balancer = balancer(&mut rng);
    let ids = balancer.replace_servers(0, 7, &mut rng);
    let table = random_table(PlacementRule::Table, 1, 2, &ids, &mut rng);
    balancer.install(0, &table);
    for _ in 0..300 {
        let client = client(&mut rng);
        let chosen = table.choose_consistent(&tuple(client)).expect("one per bucket");
        let previous = Identification::Before(previous_server(&table, &tuple(client)));
        for (flags, name) in [(SYN, "bucket_hash"), (ACK, "bucket_hash"), (ACK | FIN, "flow_table")] {
            balancer.expect_sent(0, &frame(client, flags, vec![]), chosen, previous, name);
        }
    }
}

#[test]
fn dual_stack_balancer_separates_families() {
    skip_if!(missing_bpf_rights());
    let mut rng = seeded_rng(64, 0);
    let mut balancer = balancer(&mut rng);
    let (ipv6, ipv4) = (balancer.replace_servers(0, 1, &mut rng), balancer.replace_servers(1, 1, &mut rng));
    balancer.install(0, &random_table(PlacementRule::Table, 1, 1, &ipv6, &mut rng));
    balancer.install(1, &random_table(PlacementRule::Table, 1, 1, &ipv4, &mut rng));
    balancer.expect_sent_to(0, &syn(client(&mut rng)), ipv6[0], "new_connection");
    let of_ipv4 = Tcp { flags: SYN, options: timestamp(1, 0), ..Tcp::new((Ipv4Addr::new(10, 1, 0, 7), 1), IPV4_VIP) };
    balancer.expect_sent_to(1, &of_ipv4.frame(), ipv4[0], "new_connection");
}

#[test]
fn malformed_ipv6_is_counted_and_foreign_packets_pass() {
    skip_if!(missing_bpf_rights());
    let mut rng = seeded_rng(65, 0);
    let mut balancer = balancer(&mut rng);
    let ids = balancer.replace_servers(0, 3, &mut rng);
    balancer.install(0, &random_table(PlacementRule::Table, 1, 1, &ids, &mut rng));
    let client = client(&mut rng);
    let whole = syn(client);
    let with = |at: usize, bytes: &[u8]| {
        let mut frame = whole.clone();
        frame[at..at + bytes.len()].copy_from_slice(bytes);
        frame
    };
    let drop = |frame: &[u8], name| balancer.expect_without_service(frame, XDP_DROP, name);
    drop(&with(14, &[0x50]), "drop_malformed_ipv6");
    drop(&with(18, &[0x7f, 0xff]), "drop_malformed_ipv6");
    // The chain of extension headers ends beyond the packet, or beyond the bytes that the program reads.
    drop(&ipv6_frame([client.0, VIP.0], &[(0, vec![0, 0])], 6, &[]), "drop_malformed_ipv6");
    // The header of a later fragment ends after the packet, in the frame's padding.
    let mut fragment = ipv6_frame([client.0, VIP.0], &[(44, vec![0, 0, 0, 8, 0, 0, 0, 7])], 17, &[0; 8]);
    fragment[18..20].copy_from_slice(&7u16.to_be_bytes());
    drop(&fragment, "drop_malformed_ipv6");
    let long = (60, [&[0, 9][..], &[0; 78]].concat());
    drop(&frame_behind(&[long], client, ACK, vec![]), "drop_extension_headers");
    // The program skips six extension headers; a seventh counts as an unknown protocol.
    let option = |number| (number, vec![0, 0, 1, 4, 0, 0, 0, 0]);
    balancer.expect_passed(&frame_behind(&[0, 60, 43, 60, 60, 60, 60].map(option), client, ACK, vec![]));
    let fragment = (44, vec![0, 0, 0, 1, 1, 2, 3, 4]);
    drop(&frame_behind(&[fragment], client, ACK, vec![]), "drop_fragment");
    balancer.expect(&with(54 + 12, &[0x40]), XDP_DROP, 0, "drop_malformed_tcp");
    balancer.expect(&with(54 + 13, &[SYN | FIN]), XDP_DROP, 0, "drop_malformed_tcp");
    // Packets for the kernel: another VIP, another port, a multicast MAC address, an echo request.
    balancer.expect_passed(&with(39, &[7]));
    balancer.expect_passed(&with(56, &[7]));
    balancer.expect_passed(&with(0, &[0x33, 0x33]));
    balancer.expect_passed(&ipv6_frame([client.0, VIP.0], &[], 58, &[128, 0, 0, 0, 0, 0, 0, 0]));
}

/// Returns an ICMPv6 error from `router` to the VIP that quotes `quoted` bytes of a packet from the VIP.
fn error(kind: u8, router: Ipv6Addr, client: (Ipv6Addr, u16), options: Vec<u8>, quoted: usize) -> Vec<u8> {
    let ports = ((Ipv4Addr::UNSPECIFIED, VIP.1), (Ipv4Addr::UNSPECIFIED, client.1));
    let segment = Tcp { options, ..Tcp::new(ports.0, ports.1) }.ipv6_frame(VIP.0, client.0, &[]);
    let quote = &segment[14..];
    let icmp = [&[kind, 0, 0, 0, 0, 0, 5, 0][..], &quote[..quoted.min(quote.len())]].concat();
    ipv6_frame([router, VIP.0], &[], 58, &icmp)
}

#[test]
fn icmpv6_errors_reach_the_server_that_the_quoted_timestamp_names() {
    skip_if!(missing_bpf_rights());
    let mut rng = seeded_rng(68, 0);
    let mut balancer = balancer(&mut rng);
    let ids = balancer.replace_servers(0, 300, &mut rng);
    let router = Ipv6Addr::new(0x2001, 0xdb8, 1, 0, 0, 0, 0, 1);
    for kind in 1..=4 {
        let client = client(&mut rng);
        let server = ids[uniform_below(&mut rng, 300) as usize];
        let value = cookie::stamp_tsval(
            &balancer.keys,
            &support::TIME_KEY,
            &tuple(client),
            Cookie::Server(server),
            rng.next_u32(),
        );
        let whole = error(kind, router, client, aligned_timestamp(value, 7), usize::MAX);
        balancer.expect_sent_to(0, &whole, server, "icmp_error");
        // An error whose quote lacks the timestamp is broadcast.
        let short = error(kind, router, client, aligned_timestamp(value, 7), 48);
        balancer.expect_broadcast_or(0, &short, Identification::Unchanged, "drop_broadcast_rate_limited");
    }
    let whole = error(2, router, client(&mut rng), vec![], usize::MAX);
    balancer.expect_without_service(&error(2, router, client(&mut rng), vec![], 47), XDP_DROP, "drop_malformed_icmp");
    // Messages for the kernel: an echo request, a quote from another VIP, a quote with extension headers.
    let with = |at: usize, byte: u8| {
        let mut frame = whole.clone();
        frame[at] = byte;
        frame
    };
    balancer.expect_passed(&with(54, 128));
    balancer.expect_passed(&with(62 + 8 + 15, 99));
    balancer.expect_passed(&with(62 + 6, 60));
    balancer.expect_without_service(&with(62, 0x40), XDP_DROP, "drop_malformed_icmp");
    balancer.expect_without_service(&with(18, 0x40), XDP_DROP, "drop_malformed_ipv6");
}

#[test]
fn ipv6_stateful_connections_find_their_entry() {
    skip_if!(missing_bpf_rights());
    let mut rng = seeded_rng(69, 0);
    let options = Options { connection_table_size: TableSize::try_from(4096).unwrap(), ..Options::default() };
    let mut balancer = Balancer::with(&[(service(VIP), STATEFUL)], options, &mut rng);
    let ids = balancer.replace_servers(0, 9, &mut rng);
    balancer.install(0, &random_table(PlacementRule::RoundRobin, 1, 1, &ids, &mut rng));
    balancer.lb.set_owner_number(Some(own_number()));
    for _ in 0..300 {
        let client = client(&mut rng);
        let (_, sent) = balancer.run_expecting_counter(&syn(client), Some(0), "new_connection");
        let number = number_of(&sent).expect("an entry");
        let mut found = balancer.lb.connections(balancer.services[0]).filter(|entry| entry.client == client.into());
        let server = found.next().expect("an entry of that client").identity.server;
        drop(found);
        // The retransmitted SYN, and packets on the fast and the slow path.
        let (_, again) = balancer.run_expecting_counter(&syn(client), Some(0), "new_connection");
        assert_eq!((&sent[..6], number_of(&again)), (&balancer.macs[&(0, server)].0[..], Some(number)));
        let stamped = Cookie::TableIndex(number);
        let tsecr = cookie::stamp_tsval(&balancer.keys, &support::TIME_KEY, &tuple(client), stamped, 4711);
        for flags in [ACK, ACK | FIN] {
            let packet = frame(client, flags, aligned_timestamp(1, tsecr));
            balancer.expect_sent_to(0, &packet, server, "connection_table");
        }
    }
    assert_eq!(balancer.lb.connections_in_use(), 300);
}

/// All addresses of a /64 count as one source prefix.
#[test]
fn ipv6_prefix_holds_a_quarter_of_the_table_at_most() {
    skip_if!(missing_bpf_rights());
    let mut rng = seeded_rng(70, 0);
    let options = Options { connection_table_size: TableSize::try_from(4096).unwrap(), ..Options::default() };
    let mut balancer = Balancer::with(&[(service(VIP), STATEFUL)], options, &mut rng);
    let ids = balancer.replace_servers(0, 9, &mut rng);
    balancer.install(0, &random_table(PlacementRule::RoundRobin, 1, 1, &ids, &mut rng));
    balancer.lb.set_owner_number(Some(own_number()));
    balancer.lb.guard_connection_table();
    for number in 0..2000u128 {
        balancer.run(&syn((Ipv6Addr::from(0x2001_0db8 << 96 | number), 1024)));
    }
    assert_eq!(balancer.lb.connections_in_use(), 1024, "a quarter of the table");
    assert_eq!(balancer.events(0, "connection_source_limited"), 2000 - 1024);
    balancer.run_expecting_counter(&syn((Ipv6Addr::from(0x2001_0db9 << 96), 1024)), Some(0), "new_connection");
    assert_eq!(balancer.lb.connections_in_use(), 1025);
}

/// Unknown packets go to the other load balancer, with a flow label that keeps servers from forwarding them. Packets to
/// a server name the other load balancer in the flow label.
#[test]
fn migrating_ipv6_service_forwards_unknown_packets() {
    skip_if!(missing_bpf_rights());
    let mut rng = seeded_rng(66, 0);
    let other = id(intf::SERVER_ID_COUNT as u64 - 1);
    let nobody = Identification::Before(None);
    for transfer in [ServiceMigration::AdoptedFrom(other), ServiceMigration::HandedOverTo(other)] {
        let mode = ServiceMode { migration: Some(transfer), ..ServiceMode::default() };
        let mut balancer = Balancer::with(&[(service(VIP), mode)], Options::default(), &mut rng);
        let ids = balancer.replace_servers(0, 5, &mut rng);
        let mac = MacAddress([2, 0, 0, 0, 0, 0x77]);
        balancer.lb.set_server(balancer.services[0], other, Server { mac: Some(mac), is_eligible: false });
        balancer.macs.insert((0, other), mac);
        let table = random_table(PlacementRule::Table, 1, 1, &ids, &mut rng);
        let mut state = PlacementState::for_table(&table);
        balancer.install(0, &table);
        for _ in 0..50 {
            let client = client(&mut rng);
            let chosen = table.choose(&mut state, &tuple(client)).expect("there are members");
            let stamped = |server| {
                let cookie = Cookie::Server(server);
                aligned_timestamp(1, cookie::stamp_tsval(&balancer.keys, &support::TIME_KEY, &tuple(client), cookie, 5))
            };
            if transfer == ServiceMigration::AdoptedFrom(other) {
                balancer.expect_sent_to(0, &syn(client), chosen, "new_connection");
            } else {
                balancer.expect_sent(0, &syn(client), other, nobody, "to_other_balancer");
            }
            let named = Identification::Before(Some(other));
            balancer.expect_sent(0, &frame(client, ACK, stamped(chosen)), chosen, named, "established");
            let unknown = (0..).map(id).find(|id| !ids.contains(id)).expect("five of 16,384 are known");
            balancer.expect_sent(0, &frame(client, ACK, stamped(unknown)), other, nobody, "to_other_balancer");
        }
    }
}

#[test]
fn ipv6_datagrams_keep_their_server() {
    skip_if!(missing_bpf_rights());
    let mut rng = seeded_rng(67, 0);
    let service = ServiceAddress { socket: VIP.into(), protocol: Protocol::Udp };
    let mode = ServiceMode { consistency: Consistency::HashTable, ..ServiceMode::default() };
    let mut balancer = Balancer::with(&[(service, mode)], Options::default(), &mut rng);
    let ids = balancer.replace_servers(0, 20, &mut rng);
    let datagram = |client: (Ipv6Addr, u16), length: u16| {
        let header = [client.1, VIP.1, 8 + length, 0].map(u16::to_be_bytes).concat();
        ipv6_frame([client.0, VIP.0], &[], 17, &[&header[..], b"datagram"].concat())
    };
    let mut placed: Vec<((Ipv6Addr, u16), ServerId)> = Vec::new();
    for generation in 1..3 {
        let table = random_table(PlacementRule::Table, generation, 1, &ids, &mut rng);
        let mut state = PlacementState::for_table(&table);
        balancer.install(0, &table);
        for (client, server) in &placed {
            balancer.expect_sent_to(0, &datagram(*client, 8), *server, "flow_table");
        }
        for client in std::iter::repeat_with(|| client(&mut rng)).take(200) {
            let chosen = table.choose(&mut state, &tuple(client)).expect("there are members");
            balancer.expect_sent_to(0, &datagram(client, 8), chosen, "new_connection");
            placed.push((client, chosen));
        }
    }
    let client = client(&mut rng);
    balancer.expect(&datagram(client, 9), XDP_DROP, 0, "drop_malformed_udp");
}

#[test]
fn ipv6_fragments_follow_the_first_one() {
    skip_if!(missing_bpf_rights());
    let mut rng = seeded_rng(71, 0);
    let service = ServiceAddress { socket: VIP.into(), protocol: Protocol::Udp };
    let mode = ServiceMode { consistency: Consistency::HashTable, ..ServiceMode::default() };
    let mut balancer = Balancer::with(&[(service, mode)], Options::default(), &mut rng);
    let ids = balancer.replace_servers(0, 20, &mut rng);
    let table = random_table(PlacementRule::Table, 1, 1, &ids, &mut rng);
    let mut state = PlacementState::for_table(&table);
    balancer.install(0, &table);
    let fragment = |client: (Ipv6Addr, u16), identification: u32, field: u16, payload: &[u8]| {
        let header = [&[0, 0][..], &field.to_be_bytes(), &identification.to_be_bytes()].concat();
        ipv6_frame([client.0, VIP.0], &[(44, header)], 17, payload)
    };
    for identification in 0..200 {
        let client = client(&mut rng);
        let chosen = table.choose(&mut state, &tuple(client)).expect("there are members");
        let header = [client.1, VIP.1, 2008, 0].map(u16::to_be_bytes).concat();
        let later = fragment(client, identification, 1000 | 1, b"more");
        balancer.expect_without_service(&later, XDP_DROP, "drop_fragment");
        balancer.expect_sent_to(0, &fragment(client, identification, 1, &header), chosen, "new_connection");
        balancer.expect_sent_to(0, &later, chosen, "fragment");
        balancer.expect_sent_to(0, &fragment(client, identification, 2000, b"last"), chosen, "fragment");
        let other = fragment(client, identification + 1000, 1000, b"another datagram");
        balancer.expect_without_service(&other, XDP_DROP, "drop_fragment");
    }
}
