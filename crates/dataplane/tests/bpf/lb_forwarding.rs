//! `bpf/lb/emit.h` (`BPF_PROG_TEST_RUN`): outer headers of packets to servers behind routers.

use std::net::Ipv4Addr;

use coreward_dataplane::lb::{BroadcastRates, Options, PacketRate, Tunnel};
use coreward_intf as intf;
use coreward_model::consistency::{Consistency, ServiceMode};
use coreward_model::forwarding::{Forwarding, flow_port};
use coreward_model::placement::{PlacementTable, Rule};
use coreward_model::rss::seeded_rng;
use coreward_model::{FourTuple, ServerId};

use crate::support::balancer::{Balancer, OWN_MAC, XDP_DROP, XDP_TX, id, random_table, service};
use crate::support::{ACK, RST, SYN, Tcp, aligned_timestamp, may_load_bpf, ones_complement_sum};

const VIP: (Ipv4Addr, u16) = (Ipv4Addr::new(10, 200, 0, 1), 80);
const CLIENT: (Ipv4Addr, u16) = (Ipv4Addr::new(192, 0, 2, 7), 40_000);
const OWN: Ipv4Addr = Ipv4Addr::new(10, 2, 0, 1);
const ETHERNET: usize = 14;

fn outer_address(server: ServerId) -> Ipv4Addr {
    let [high, low] = server.get().to_be_bytes();
    Ipv4Addr::new(10, 9, high, low)
}

fn balancer(mode: ServiceMode, mtu: u32) -> (Balancer, PlacementTable) {
    balancer_with(mode, mtu, Options::default())
}

fn balancer_with(mode: ServiceMode, mtu: u32, options: Options) -> (Balancer, PlacementTable) {
    let mut rng = seeded_rng(32, 0);
    let mut balancer = Balancer::with(&[(service(VIP), mode)], options, &mut rng);
    balancer.lb.set_outer(OWN, mtu);
    let ids = balancer.replace_servers(0, 9, &mut rng);
    for id in &ids {
        balancer.lb.set_tunnel(*id, Tunnel { address: outer_address(*id), source_port: None });
    }
    let table = random_table(Rule::Table, 1, 1, &ids, &mut rng);
    balancer.install(0, &table);
    (balancer, table)
}

fn chosen(table: &PlacementTable) -> ServerId {
    let mut state = coreward_model::placement::PlacementState::for_table(table);
    table.choose(&mut state, &FourTuple::ipv4(CLIENT, VIP)).unwrap()
}

fn syn() -> Vec<u8> {
    Tcp { flags: SYN, options: aligned_timestamp(7, 0), ..Tcp::new(CLIENT, VIP) }.frame()
}

/// The inner packet of `packet`, whose outer header is checked.
fn inner(packet: &[u8], forwarding: Forwarding, server: ServerId, type_of_service: u8) -> Vec<u8> {
    let outer = &packet[ETHERNET..];
    assert_eq!(ones_complement_sum(&outer[..20]), 0xffff, "checksum of the outer header");
    assert_eq!((outer[0], outer[1]), (0x45, type_of_service));
    assert_eq!(usize::from(u16::from_be_bytes([outer[2], outer[3]])), outer.len());
    assert_eq!(outer[4..9], [0, 0, 0x40, 0, 64], "identification 0, DF, TTL 64");
    assert_eq!((&outer[12..16], &outer[16..20]), (&OWN.octets()[..], &outer_address(server).octets()[..]));
    match forwarding {
        Forwarding::Ipip => assert_eq!(outer[9], 4),
        _ => {
            assert_eq!(outer[9], 17);
            let word = |at: usize| u16::from_be_bytes([outer[at], outer[at + 1]]);
            assert_eq!((word(22), usize::from(word(24)), word(26)), (6080, outer.len() - 20, 0));
        }
    }
    outer[forwarding.overhead()..].to_vec()
}

#[test]
fn packets_to_servers_get_an_outer_header_and_are_otherwise_unchanged() {
    if !may_load_bpf("packets_to_servers_get_an_outer_header_and_are_otherwise_unchanged") {
        return;
    }
    for forwarding in [Forwarding::Ipip, Forwarding::Gue] {
        let (balancer, table) = balancer(ServiceMode { forwarding, ..ServiceMode::default() }, 1500);
        let server = chosen(&table);
        let mut frame = syn();
        // DSCP 46 and ECT(0).
        frame[ETHERNET + 1] = 0xba;
        let (verdict, packet) = balancer.counted(&frame, Some(0), "new_connection");
        assert_eq!(verdict, XDP_TX);
        assert_eq!(packet[..6], balancer.macs[&(0, server)].0);
        assert_eq!(packet[6..14], [&OWN_MAC.0[..], &[8, 0]].concat());
        assert_eq!(inner(&packet, forwarding, server, 0xba), frame[ETHERNET..]);
    }
}

#[test]
fn source_port_is_that_of_the_flow_or_of_the_server() {
    if !may_load_bpf("source_port_is_that_of_the_flow_or_of_the_server") {
        return;
    }
    let mode = ServiceMode { forwarding: Forwarding::Gue, ..ServiceMode::default() };
    let (mut balancer, table) = balancer(mode, 1500);
    let server = chosen(&table);
    let source_port = |balancer: &Balancer| {
        let packet = balancer.run(&syn()).1;
        u16::from_be_bytes([packet[ETHERNET + 20], packet[ETHERNET + 21]])
    };
    let [[a, b], [c, d]] = [CLIENT.1, VIP.1].map(u16::to_be_bytes);
    assert_eq!(source_port(&balancer), flow_port(CLIENT.0, [a, b, c, d]));
    balancer.lb.set_tunnel(server, Tunnel { address: outer_address(server), source_port: Some(50_123) });
    assert_eq!(source_port(&balancer), 50_123);
}

/// A SYN of `length` bytes in IP.
fn syn_of(length: usize) -> Vec<u8> {
    let payload = vec![7; length - (syn().len() - ETHERNET - b"payload".len())];
    Tcp { flags: SYN, options: aligned_timestamp(7, 0), payload, ..Tcp::new(CLIENT, VIP) }.frame()
}

fn longest(forwarding: Forwarding) -> usize {
    1500 - forwarding.overhead()
}

#[test]
fn packet_too_long_with_its_outer_header_is_answered_by_fragmentation_needed() {
    if !may_load_bpf("packet_too_long_with_its_outer_header_is_answered_by_fragmentation_needed") {
        return;
    }
    for forwarding in [Forwarding::Ipip, Forwarding::Gue] {
        let (balancer, _) = balancer(ServiceMode { forwarding, ..ServiceMode::default() }, 1500);
        let mtu = longest(forwarding);
        assert_eq!(balancer.counted(&syn_of(mtu), Some(0), "new_connection").0, XDP_TX);
        let frame = syn_of(mtu + 1);
        let (verdict, packet) = balancer.counted(&frame, Some(0), "drop_fragmentation_needed");
        assert_eq!(verdict, XDP_TX);
        assert_eq!(packet[..14], [&frame[6..12], &OWN_MAC.0, &[8, 0]].concat());
        let (header, message) = packet[ETHERNET..].split_at(20);
        assert_eq!(header[..10], [0x45, 0xc0, 0, 96, 0, 0, 0x40, 0, 64, 1]);
        assert_eq!(header[12..], [VIP.0.octets(), CLIENT.0.octets()].concat());
        assert_eq!((ones_complement_sum(header), ones_complement_sum(message)), (0xffff, 0xffff));
        let [high, low] = (mtu as u16).to_be_bytes();
        assert_eq!((&message[..2], &message[4..8]), (&[3, 4][..], &[0, 0, high, low][..]));
        assert_eq!(message[8..], frame[ETHERNET..][..68]);
    }
}

#[test]
fn source_that_is_no_host_gets_no_error() {
    if !may_load_bpf("source_that_is_no_host_gets_no_error") {
        return;
    }
    let forwarding = Forwarding::Gue;
    let (balancer, _) = balancer(ServiceMode { forwarding, ..ServiceMode::default() }, 1500);
    let mut multicast = syn_of(longest(forwarding) + 1);
    multicast[ETHERNET + 12] = 239;
    assert_eq!(balancer.counted(&multicast, Some(0), "drop_exceeds_mtu").0, XDP_DROP);
}

#[test]
fn errors_to_a_flood_of_long_packets_are_limited() {
    if !may_load_bpf("errors_to_a_flood_of_long_packets_are_limited") {
        return;
    }
    let rates = BroadcastRates::uniform(PacketRate { per_second: 1, burst: 8 });
    let options = Options { broadcast: [rates; intf::BROADCAST_REASON_COUNT as usize], ..Options::default() };
    let mode = ServiceMode { forwarding: Forwarding::Ipip, ..ServiceMode::default() };
    let (balancer, _) = balancer_with(mode, 1500, options);
    let frame = syn_of(1500);
    let answered = (0..100).filter(|_| balancer.run(&frame).0 == XDP_TX).count();
    assert!((8..=11).contains(&answered), "{answered}");
    balancer.counted(&frame, Some(0), "drop_exceeds_mtu");
}

#[test]
fn nothing_is_broadcast_to_servers_behind_routers() {
    if !may_load_bpf("nothing_is_broadcast_to_servers_behind_routers") {
        return;
    }
    for consistency in [Consistency::Stateless, Consistency::Stateful] {
        let mode = ServiceMode { forwarding: Forwarding::Gue, consistency, ..ServiceMode::default() };
        let (balancer, _) = balancer(mode, 1500);
        let reset = Tcp { flags: RST, options: vec![], ..Tcp::new(CLIENT, VIP) }.frame();
        let (verdict, _) = balancer.counted(&reset, Some(0), "drop_not_broadcast");
        assert_eq!(verdict, XDP_DROP);
    }
}

#[test]
fn services_of_all_kinds_share_a_program_and_servers() {
    if !may_load_bpf("services_of_all_kinds_share_a_program_and_servers") {
        return;
    }
    let mut rng = seeded_rng(33, 0);
    let services: Vec<_> = Forwarding::ALL
        .into_iter()
        .map(|forwarding| {
            let mode = ServiceMode { consistency: Consistency::HashTable, forwarding, ..ServiceMode::default() };
            (service((VIP.0, 80 + forwarding.number() as u16)), mode)
        })
        .collect();
    let mut balancer = Balancer::with(&services, Options::default(), &mut rng);
    balancer.lb.set_outer(OWN, 1500);
    let server = id(7);
    let known = coreward_dataplane::lb::Server { mac: Some(OWN_MAC), eligible: true };
    balancer.lb.set_tunnel(server, Tunnel { address: outer_address(server), source_port: None });
    for (place, forwarding) in Forwarding::ALL.into_iter().enumerate() {
        balancer.lb.set_server(balancer.services[place], server, known);
        balancer.install(place, &random_table(Rule::Table, 1, 1, &[server], &mut rng));
        for flags in [SYN, ACK] {
            let vip = (VIP.0, 80 + forwarding.number() as u16);
            let frame = Tcp { flags, options: vec![], ..Tcp::new(CLIENT, vip) }.frame();
            let (verdict, packet) = balancer.run(&frame);
            assert_eq!((verdict, packet.len()), (XDP_TX, frame.len() + forwarding.overhead()), "{forwarding:?}");
        }
    }
}
