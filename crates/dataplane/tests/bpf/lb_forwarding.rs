//! Tests of `bpf/lb/encapsulate.h` (`BPF_PROG_TEST_RUN`): outer headers of packets to servers behind routers.

use coreward_dataplane::lb::{BroadcastRates, Options, PacketRate, Tunnel};
use coreward_intf as intf;
use coreward_model::consistency::{Consistency, ServiceMode};
use coreward_model::cookie::{self, Cookie};
use coreward_model::forwarding::{Forwarding, flow_port};
use coreward_model::placement::{PlacementRule, PlacementTable};
use coreward_model::rss::seeded_rng;
use coreward_model::{FourTuple, ServerId};
use rand::Rng;

use crate::support::balancer::{Balancer, OWN_MAC, XDP_DROP, XDP_TX, id, random_table, service};
use crate::support::tunnel::{
    ETHERNET, OWN_ADDRESSES, TunnelForm, client, ip_header, octets, own_address, server_address, set_traffic_class, vip,
};
use crate::support::{
    ACK, Family, RST, SYN, TIME_KEY, Tcp, aligned_timestamp, missing_bpf_rights, ones_complement_sum, skip_if,
};

const MTU: usize = 1500;

fn mode(form: TunnelForm) -> ServiceMode {
    ServiceMode { forwarding: form.forwarding, ..ServiceMode::default() }
}

fn balancer(form: TunnelForm) -> (Balancer, PlacementTable) {
    balancer_with(form, mode(form), MTU)
}

fn balancer_with(form: TunnelForm, mode: ServiceMode, mtu: usize) -> (Balancer, PlacementTable) {
    let mut rng = seeded_rng(32, 0);
    let balancer = Balancer::with(&[(service(vip(form.inner)), mode)], Options::default(), &mut rng);
    set_up(balancer, form, mtu, &mut rng)
}

fn set_up(mut balancer: Balancer, form: TunnelForm, mtu: usize, rng: &mut impl Rng) -> (Balancer, PlacementTable) {
    balancer.lb.set_outer_header(OWN_ADDRESSES, mtu as u32);
    let ids = balancer.replace_servers(0, 9, rng);
    for id in &ids {
        set_tunnel(&mut balancer, form.outer, *id, None);
    }
    let table = random_table(PlacementRule::Table, 1, 1, &ids, rng);
    balancer.install(0, &table);
    (balancer, table)
}

fn set_tunnel(balancer: &mut Balancer, outer: Family, server: ServerId, source_port: Option<u16>) {
    let address = server_address(outer, server);
    balancer.lb.set_tunnel(server, Tunnel { address, source_port }).unwrap();
}

fn chosen(family: Family, table: &PlacementTable) -> ServerId {
    let mut state = coreward_model::placement::PlacementState::for_table(table);
    table.choose(&mut state, &FourTuple::new(client(family), vip(family)).unwrap()).unwrap()
}

fn syn(family: Family) -> Tcp {
    Tcp { flags: SYN, options: aligned_timestamp(7, 0), ..Tcp::between(client(family), vip(family)) }
}

/// Returns the expected source port (and flow label) of outer headers, a hash of the client's flow.
fn flow(family: Family) -> u16 {
    let [[a, b], [c, d]] = [client(family).port(), vip(family).port()].map(u16::to_be_bytes);
    flow_port(client(family).ip(), [a, b, c, d])
}

fn read_u16(bytes: &[u8], at: usize) -> u16 {
    u16::from_be_bytes([bytes[at], bytes[at + 1]])
}

fn check_outer_ipv4(outer: &[u8], form: TunnelForm, server: ServerId, class: u8) {
    assert_eq!(ones_complement_sum(&outer[..20]), 0xffff, "checksum of the outer header");
    assert_eq!((outer[0], outer[1], usize::from(read_u16(outer, 2))), (0x45, class, outer.len()));
    assert_eq!(outer[4..10], [0, 0, 0x40, 0, 64, form.protocol()], "identification 0, DF, TTL 64");
    let addresses = [octets(own_address(form.outer)), octets(server_address(form.outer, server))];
    assert_eq!(outer[12..20], addresses.concat());
}

fn check_outer_ipv6(outer: &[u8], form: TunnelForm, server: ServerId, class: u8) {
    let [a, b] = flow(form.inner).to_be_bytes();
    assert_eq!(outer[..4], [0x60 | class >> 4, class << 4, a, b]);
    assert_eq!((usize::from(read_u16(outer, 4)), outer[6], outer[7]), (outer.len() - 40, form.protocol(), 64));
    let addresses = [octets(own_address(form.outer)), octets(server_address(form.outer, server))];
    assert_eq!(outer[8..40], addresses.concat());
}

/// Checks the outer header of `packet`, and returns the packet inside.
fn strip_outer_header(packet: &[u8], form: TunnelForm, server: ServerId, class: u8) -> Vec<u8> {
    let outer = &packet[ETHERNET..];
    match form.outer {
        Family::Ipv4 => check_outer_ipv4(outer, form, server, class),
        Family::Ipv6 => check_outer_ipv6(outer, form, server, class),
    }
    if form.forwarding == Forwarding::Gue {
        let header = &outer[ip_header(form.outer)..];
        let expected = (flow(form.inner), 6080, header.len(), 0);
        assert_eq!(
            (read_u16(header, 0), read_u16(header, 2), usize::from(read_u16(header, 4)), read_u16(header, 6)),
            expected
        );
    }
    outer[form.overhead()..].to_vec()
}

fn ethertype(family: Family) -> [u8; 2] {
    if family == Family::Ipv4 { [8, 0] } else { [0x86, 0xdd] }
}

#[test]
fn packets_to_servers_get_an_outer_header_and_are_otherwise_unchanged() {
    skip_if!(missing_bpf_rights());
    for form in TunnelForm::all() {
        let (balancer, table) = balancer(form);
        let server = chosen(form.inner, &table);
        let mut frame = syn(form.inner).frame();
        // DSCP 46 and ECT(0).
        set_traffic_class(&mut frame, 0xba);
        let (verdict, packet) = balancer.run_expecting_counter(&frame, Some(0), "new_connection");
        assert_eq!(verdict, XDP_TX, "{form:?}");
        assert_eq!(packet[..6], balancer.macs[&(0, server)].0);
        assert_eq!(packet[6..14], [&OWN_MAC.0[..], &ethertype(form.outer)].concat());
        assert_eq!(strip_outer_header(&packet, form, server, 0xba), frame[ETHERNET..], "{form:?}");
    }
}

#[test]
fn established_packets_of_the_fast_path_get_the_same_outer_header() {
    skip_if!(missing_bpf_rights());
    for form in TunnelForm::all() {
        let (balancer, table) = balancer(form);
        let server = chosen(form.inner, &table);
        let tuple = FourTuple::new(client(form.inner), vip(form.inner)).unwrap();
        let cookie = cookie::stamp_tsval(&balancer.keys, &TIME_KEY, &tuple, Cookie::Server(server), 9);
        let frame =
            Tcp { options: aligned_timestamp(7, cookie), ..Tcp::between(client(form.inner), vip(form.inner)) }.frame();
        let (verdict, packet) = balancer.run_expecting_counter(&frame, Some(0), "established");
        assert_eq!(verdict, XDP_TX, "{form:?}");
        assert_eq!(strip_outer_header(&packet, form, server, 0), frame[ETHERNET..], "{form:?}");
    }
}

#[test]
fn source_port_is_that_of_the_flow_or_of_the_server() {
    skip_if!(missing_bpf_rights());
    for form in TunnelForm::all().filter(|form| form.forwarding == Forwarding::Gue) {
        let (mut balancer, table) = balancer(form);
        let server = chosen(form.inner, &table);
        let source_port =
            |balancer: &Balancer| read_u16(&balancer.run(&syn(form.inner).frame()).1, ETHERNET + ip_header(form.outer));
        assert_eq!(source_port(&balancer), flow(form.inner));
        set_tunnel(&mut balancer, form.outer, server, Some(50_123));
        assert_eq!(source_port(&balancer), 50_123);
    }
}

#[test]
fn server_with_another_address_gets_its_packets_there() {
    skip_if!(missing_bpf_rights());
    let form = TunnelForm { forwarding: Forwarding::Ipip, inner: Family::Ipv4, outer: Family::Ipv6 };
    let (mut balancer, table) = balancer(form);
    let server = chosen(form.inner, &table);
    let other = id(u64::from(server.get() ^ 1));
    for (outer, other) in [(Family::Ipv6, other), (Family::Ipv4, server), (Family::Ipv6, server)] {
        let tunnel = Tunnel { address: server_address(outer, other), source_port: None };
        balancer.lb.set_tunnel(server, tunnel).unwrap();
        let packet = balancer.run(&syn(form.inner).frame()).1;
        strip_outer_header(&packet, TunnelForm { outer, ..form }, other, 0);
    }
}

/// Returns a SYN whose IP packet has `length` bytes.
fn syn_of(family: Family, length: usize) -> Vec<u8> {
    let headers = syn(family).frame().len() - ETHERNET - b"payload".len();
    Tcp { payload: vec![7; length - headers], ..syn(family) }.frame()
}

/// Checks the headers of `packet`, an ICMP error about `frame`, and returns the ICMP message.
fn error_to<'a>(packet: &'a [u8], frame: &[u8], family: Family) -> &'a [u8] {
    assert_eq!(packet[..14], [&frame[6..12], &OWN_MAC.0, &ethertype(family)].concat());
    let (header, message) = packet[ETHERNET..].split_at(ip_header(family));
    let addresses = [octets(vip(family).ip()), octets(client(family).ip())].concat();
    match family {
        Family::Ipv4 => {
            assert_eq!(header[..10], [0x45, 0xc0, 0, 96, 0, 0, 0x40, 0, 64, 1]);
            assert_eq!(header[12..], addresses);
            assert_eq!((ones_complement_sum(header), ones_complement_sum(message)), (0xffff, 0xffff));
            assert_eq!((&message[..2], &message[8..]), (&[3, 4][..], &frame[ETHERNET..][..68]));
        }
        Family::Ipv6 => {
            let length = (message.len() as u16).to_be_bytes();
            assert_eq!(header[..8], [0x6c, 0, 0, 0, length[0], length[1], 58, 64]);
            assert_eq!(header[8..], addresses);
            let pseudo_header = [&addresses[..], &[0, 0], &length, &[0, 0, 0, 58]].concat();
            assert_eq!(ones_complement_sum(&[&pseudo_header, message].concat()), 0xffff);
            assert_eq!((&message[..2], &message[8..]), (&[2, 0][..], &frame[ETHERNET..][..504]));
        }
    }
    message
}

#[test]
fn packet_too_long_to_encapsulate_is_answered_with_the_mtu() {
    skip_if!(missing_bpf_rights());
    for form in TunnelForm::all() {
        let (balancer, _) = balancer(form);
        let mtu = MTU - form.overhead();
        assert_eq!(balancer.run_expecting_counter(&syn_of(form.inner, mtu), Some(0), "new_connection").0, XDP_TX);
        let frame = syn_of(form.inner, mtu + 1);
        let (verdict, packet) = balancer.run_expecting_counter(&frame, Some(0), "drop_fragmentation_needed");
        assert_eq!(verdict, XDP_TX, "{form:?}");
        let [high, low] = (mtu as u16).to_be_bytes();
        assert_eq!(error_to(&packet, &frame, form.inner)[4..8], [0, 0, high, low]);
    }
}

#[test]
fn ipv6_packet_of_1280_bytes_gets_no_error() {
    skip_if!(missing_bpf_rights());
    let form = TunnelForm { forwarding: Forwarding::Gue, inner: Family::Ipv6, outer: Family::Ipv6 };
    let (balancer, _) = balancer_with(form, mode(form), 1300);
    assert_eq!(balancer.run_expecting_counter(&syn_of(form.inner, 1280), Some(0), "drop_exceeds_mtu").0, XDP_DROP);
    let frame = syn_of(form.inner, 1281);
    let (_, packet) = balancer.run_expecting_counter(&frame, Some(0), "drop_fragmentation_needed");
    assert_eq!(error_to(&packet, &frame, form.inner)[4..8], 1280u32.to_be_bytes());
}

#[test]
fn source_other_than_a_host_gets_no_error() {
    skip_if!(missing_bpf_rights());
    for (inner, sources) in [
        (Family::Ipv4, vec![vec![239, 0, 2, 7], vec![0; 4]]),
        (Family::Ipv6, vec![[&[0xff, 2][..], &[0; 13], &[1]].concat(), vec![0; 16]]),
    ] {
        let form = TunnelForm { forwarding: Forwarding::Gue, inner, outer: Family::Ipv4 };
        let (balancer, _) = balancer(form);
        let at = ETHERNET + if inner == Family::Ipv4 { 12 } else { 8 };
        for source in sources {
            let mut frame = syn_of(inner, MTU);
            frame[at..at + source.len()].copy_from_slice(&source);
            assert_eq!(balancer.run_expecting_counter(&frame, Some(0), "drop_exceeds_mtu").0, XDP_DROP, "{source:?}");
        }
    }
}

#[test]
fn errors_to_a_flood_of_long_packets_are_limited() {
    skip_if!(missing_bpf_rights());
    for inner in Family::BOTH {
        let rates = BroadcastRates::uniform(PacketRate { per_second: 1, burst: 8 });
        let options = Options { broadcast_limits: [rates; intf::LIMITED_KIND_COUNT as usize], ..Options::default() };
        let form = TunnelForm { forwarding: Forwarding::Ipip, inner, outer: Family::Ipv4 };
        let mut rng = seeded_rng(34, 0);
        let balancer = Balancer::with_limits(&[(service(vip(inner)), mode(form))], options, &mut rng);
        let (balancer, _) = set_up(balancer, form, MTU, &mut rng);
        let frame = syn_of(inner, MTU);
        let answered = (0..100).filter(|_| balancer.run(&frame).0 == XDP_TX).count();
        assert!((8..=11).contains(&answered), "{answered}");
        balancer.run_expecting_counter(&frame, Some(0), "drop_exceeds_mtu");
    }
}

#[test]
fn nothing_is_broadcast_to_servers_behind_routers() {
    skip_if!(missing_bpf_rights());
    for consistency in [Consistency::Stateless, Consistency::Stateful] {
        for form in TunnelForm::all() {
            let mode = ServiceMode { consistency, ..mode(form) };
            let (balancer, _) = balancer_with(form, mode, MTU);
            let reset = Tcp { flags: RST, options: vec![], ..syn(form.inner) }.frame();
            let (verdict, _) = balancer.run_expecting_counter(&reset, Some(0), "drop_not_broadcast");
            assert_eq!(verdict, XDP_DROP);
        }
    }
}

#[test]
fn services_of_all_kinds_share_a_program_and_servers() {
    skip_if!(missing_bpf_rights());
    let mut rng = seeded_rng(33, 0);
    let kinds: Vec<(Forwarding, Family)> =
        Forwarding::ALL.into_iter().flat_map(|kind| Family::BOTH.map(|family| (kind, family))).collect();
    let vip_of = |(forwarding, family): (Forwarding, Family)| {
        let mut vip = vip(family);
        vip.set_port(80 + forwarding.number() as u16);
        vip
    };
    let services: Vec<_> = kinds
        .iter()
        .map(|kind| {
            let mode =
                ServiceMode { consistency: Consistency::HashTable, forwarding: kind.0, ..ServiceMode::default() };
            (service(vip_of(*kind)), mode)
        })
        .collect();
    let mut balancer = Balancer::with(&services, Options::default(), &mut rng);
    balancer.lb.set_outer_header(OWN_ADDRESSES, MTU as u32);
    let server = id(7);
    let known = coreward_dataplane::lb::Server { mac: Some(OWN_MAC), is_eligible: true };
    set_tunnel(&mut balancer, Family::Ipv6, server, None);
    for (place, kind) in kinds.into_iter().enumerate() {
        balancer.lb.set_server(balancer.services[place], server, known);
        balancer.install(place, &random_table(PlacementRule::Table, 1, 1, &[server], &mut rng));
        for flags in [SYN, ACK] {
            let frame = Tcp { flags, options: vec![], ..Tcp::between(client(kind.1), vip_of(kind)) }.frame();
            let (verdict, packet) = balancer.run(&frame);
            let overhead = kind.0.overhead(own_address(Family::Ipv6));
            assert_eq!((verdict, packet.len()), (XDP_TX, frame.len() + overhead), "{kind:?}");
        }
    }
}
