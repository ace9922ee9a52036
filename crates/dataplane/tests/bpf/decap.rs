//! `bpf/server/decap.bpf.c` (`BPF_PROG_TEST_RUN`): outer headers at a server.

use std::net::Ipv4Addr;

use coreward_dataplane::decap::{COUNTER_NAMES, Decapsulation};
use coreward_dataplane::lb::{Options, Tunnel};
use coreward_dataplane::test_run;
use coreward_intf as intf;
use coreward_model::consistency::ServiceMode;
use coreward_model::forwarding::Forwarding;
use coreward_model::placement::Rule;
use coreward_model::rss::seeded_rng;

use crate::support::balancer::{Balancer, XDP_DROP, XDP_PASS, XDP_TX, random_table, service};
use crate::support::{MORE, SYN, Tcp, Udp, aligned_timestamp, may_load_bpf, ones_complement_sum};

const VIP: (Ipv4Addr, u16) = (Ipv4Addr::new(10, 200, 0, 1), 80);
const CLIENT: (Ipv4Addr, u16) = (Ipv4Addr::new(192, 0, 2, 7), 40_000);
const LOAD_BALANCER: Ipv4Addr = Ipv4Addr::new(10, 2, 0, 1);
const SERVER: Ipv4Addr = Ipv4Addr::new(10, 9, 0, 1);
const ETHERNET: usize = 14;
const KINDS: [Forwarding; 2] = [Forwarding::Ipip, Forwarding::Gue];
const CONGESTION_EXPERIENCED: u8 = 3;

fn loaded() -> Decapsulation {
    let decapsulation = Decapsulation::load_only().unwrap();
    decapsulation.set_sources(&[LOAD_BALANCER]).unwrap();
    decapsulation.set_vips(&[VIP.0]).unwrap();
    decapsulation
}

fn client_packet() -> Vec<u8> {
    Tcp::new(CLIENT, VIP).frame()
}

/// `frame` behind an outer header from `source`.
fn encapsulated(forwarding: Forwarding, source: Ipv4Addr, frame: &[u8]) -> Vec<u8> {
    let inner = &frame[ETHERNET..];
    let length = inner.len() + forwarding.overhead();
    let mut outer = vec![0x45, 0];
    outer.extend((length as u16).to_be_bytes());
    outer.extend([0, 0, 0x40, 0, 64, if forwarding == Forwarding::Ipip { 4 } else { 17 }, 0, 0]);
    outer.extend([source.octets(), SERVER.octets()].concat());
    let checksum = !ones_complement_sum(&outer);
    outer[10..12].copy_from_slice(&checksum.to_be_bytes());
    if forwarding == Forwarding::Gue {
        for word in [50_000, intf::GUE_PORT as u16, (length - 20) as u16, 0] {
            outer.extend(word.to_be_bytes());
        }
    }
    [&frame[..ETHERNET], &outer, inner].concat()
}

/// Runs the program on `frame`, of which the one counter that has risen must be `counter`; `None`: none has.
fn run(decapsulation: &Decapsulation, frame: &[u8], counter: Option<&str>) -> (i32, Vec<u8>) {
    let before = decapsulation.counters().unwrap();
    let outcome = test_run::run(decapsulation.program(), frame, 1).unwrap();
    let after = decapsulation.counters().unwrap();
    let risen: Vec<_> =
        (0..COUNTER_NAMES.len()).filter(|at| after[*at] != before[*at]).map(|at| COUNTER_NAMES[at]).collect();
    assert_eq!(risen, Vec::from_iter(counter));
    (outcome.verdict, outcome.packet)
}

/// Each kind's encapsulated packet of a client, changed by `change`, is dropped and counted as `counter`.
fn expect_drop(counter: &str, change: impl Fn(&mut Vec<u8>, Forwarding)) {
    if !may_load_bpf(std::thread::current().name().unwrap_or(counter)) {
        return;
    }
    let decapsulation = loaded();
    for forwarding in KINDS {
        let mut frame = encapsulated(forwarding, LOAD_BALANCER, &client_packet());
        change(&mut frame, forwarding);
        assert_eq!(run(&decapsulation, &frame, Some(counter)).0, XDP_DROP, "{}", forwarding.name());
    }
}

#[test]
fn packet_of_a_load_balancer_loses_its_outer_header() {
    if !may_load_bpf("packet_of_a_load_balancer_loses_its_outer_header") {
        return;
    }
    let decapsulation = loaded();
    let with_options = Tcp { ip_options: vec![1, 1, 1, 0], ..Tcp::new(CLIENT, VIP) }.frame();
    let fragment = Udp { fragment: MORE, ..Udp::new(CLIENT, VIP) }.frame();
    for forwarding in KINDS {
        for inner in [&client_packet(), &with_options, &fragment] {
            let frame = encapsulated(forwarding, LOAD_BALANCER, inner);
            assert_eq!(run(&decapsulation, &frame, Some("decapsulated")), (XDP_PASS, inner.clone()));
        }
    }
}

#[test]
fn padding_behind_the_outer_packet_is_no_error() {
    if !may_load_bpf("padding_behind_the_outer_packet_is_no_error") {
        return;
    }
    let inner = client_packet();
    let frame = [encapsulated(Forwarding::Gue, LOAD_BALANCER, &inner), vec![0; 9]].concat();
    assert_eq!(run(&loaded(), &frame, Some("decapsulated")), (XDP_PASS, [inner, vec![0; 9]].concat()));
}

#[test]
fn other_packets_pass_unchanged() {
    if !may_load_bpf("other_packets_pass_unchanged") {
        return;
    }
    let decapsulation = loaded();
    let mut ipv6 = encapsulated(Forwarding::Ipip, LOAD_BALANCER, &client_packet());
    ipv6[12..14].copy_from_slice(&[0x86, 0xdd]);
    let mut later_fragment = encapsulated(Forwarding::Gue, LOAD_BALANCER, &client_packet());
    later_fragment[ETHERNET + 7] = 5;
    let other_port = Udp::new((LOAD_BALANCER, 53), (SERVER, 6081)).frame();
    for frame in [client_packet(), ipv6, later_fragment, other_port, vec![0; 60]] {
        assert_eq!(run(&decapsulation, &frame, None), (XDP_PASS, frame));
    }
}

#[test]
fn source_that_is_no_load_balancer_is_dropped() {
    expect_drop("drop_decap_foreign_source", |frame, _| frame[ETHERNET + 15] ^= 1);
}

#[test]
fn inner_destination_that_is_no_vip_is_dropped() {
    expect_drop("drop_decap_foreign_destination", |frame, forwarding| {
        frame[ETHERNET + forwarding.overhead() + 19] ^= 1
    });
}

#[test]
fn fragment_of_an_encapsulated_packet_is_dropped() {
    expect_drop("drop_decap_fragment", |frame, _| frame[ETHERNET + 6] = 0x20);
}

#[test]
fn later_fragment_of_ip_in_ip_is_dropped() {
    if !may_load_bpf("later_fragment_of_ip_in_ip_is_dropped") {
        return;
    }
    let mut frame = encapsulated(Forwarding::Ipip, LOAD_BALANCER, &client_packet());
    frame[ETHERNET + 7] = 5;
    assert_eq!(run(&loaded(), &frame, Some("drop_decap_fragment")).0, XDP_DROP);
}

#[test]
fn tunnel_inside_is_dropped() {
    for protocol in [4, 41, 47] {
        expect_drop("drop_decap_nested", |frame, forwarding| frame[ETHERNET + forwarding.overhead() + 9] = protocol);
    }
    expect_drop("drop_decap_nested", |frame, forwarding| {
        let nested = Udp::new(CLIENT, (VIP.0, intf::GUE_PORT as u16)).frame();
        *frame = encapsulated(forwarding, LOAD_BALANCER, &nested);
    });
}

#[test]
fn contradicting_lengths_are_dropped() {
    // Each change alone: total lengths of both headers, header length and version of the inner one.
    let changes: [(bool, usize, u8); 4] = [(false, 3, 1), (true, 3, 1), (true, 0, 0x01), (true, 0, 0x20)];
    for (is_inner, at, flipped) in changes {
        expect_drop("drop_decap_truncated", |frame, forwarding| {
            frame[ETHERNET + at + if is_inner { forwarding.overhead() } else { 0 }] ^= flipped;
        });
    }
    expect_drop("drop_decap_truncated", |frame, _| frame.truncate(frame.len() - 1));
    expect_drop("drop_decap_truncated", |frame, forwarding| frame.truncate(ETHERNET + forwarding.overhead() + 19));
}

#[test]
fn length_of_the_datagram_must_fit_that_of_the_packet() {
    if !may_load_bpf("length_of_the_datagram_must_fit_that_of_the_packet") {
        return;
    }
    let mut frame = encapsulated(Forwarding::Gue, LOAD_BALANCER, &client_packet());
    frame[ETHERNET + 25] -= 1;
    assert_eq!(run(&loaded(), &frame, Some("drop_decap_truncated")).0, XDP_DROP);
}

#[test]
fn congestion_mark_goes_to_the_inner_packet_or_drops_it() {
    if !may_load_bpf("congestion_mark_goes_to_the_inner_packet_or_drops_it") {
        return;
    }
    let decapsulation = loaded();
    for (forwarding, inner_ecn) in KINDS.into_iter().flat_map(|kind| [1, 2, 3].map(|ecn| (kind, ecn))) {
        let mut inner = client_packet();
        // DSCP 46.
        inner[ETHERNET + 1] = 0xb8 | inner_ecn;
        inner[ETHERNET + 10..ETHERNET + 12].fill(0);
        let checksum = !ones_complement_sum(&inner[ETHERNET..ETHERNET + 20]);
        inner[ETHERNET + 10..ETHERNET + 12].copy_from_slice(&checksum.to_be_bytes());
        let mut frame = encapsulated(forwarding, LOAD_BALANCER, &inner);
        frame[ETHERNET + 1] = CONGESTION_EXPERIENCED;
        let (verdict, packet) = run(&decapsulation, &frame, Some("decapsulated"));
        assert_eq!((verdict, packet[ETHERNET + 1]), (XDP_PASS, 0xb8 | CONGESTION_EXPERIENCED));
        assert_eq!(ones_complement_sum(&packet[ETHERNET..ETHERNET + 20]), 0xffff, "checksum of the inner header");
    }
    expect_drop("drop_decap_congestion", |frame, _| frame[ETHERNET + 1] = CONGESTION_EXPERIENCED);
}

#[test]
fn removed_sources_and_vips_are_foreign() {
    if !may_load_bpf("removed_sources_and_vips_are_foreign") {
        return;
    }
    let decapsulation = loaded();
    let frame = encapsulated(Forwarding::Gue, LOAD_BALANCER, &client_packet());
    decapsulation.set_vips(&[Ipv4Addr::new(10, 200, 0, 2)]).unwrap();
    assert_eq!(run(&decapsulation, &frame, Some("drop_decap_foreign_destination")).0, XDP_DROP);
    decapsulation.set_vips(&[VIP.0]).unwrap();
    decapsulation.set_sources(&[]).unwrap();
    assert_eq!(run(&decapsulation, &frame, Some("drop_decap_foreign_source")).0, XDP_DROP);
}

#[test]
fn packet_that_a_load_balancer_encapsulated_arrives_as_it_was() {
    if !may_load_bpf("packet_that_a_load_balancer_encapsulated_arrives_as_it_was") {
        return;
    }
    let mut rng = seeded_rng(35, 0);
    for forwarding in KINDS {
        let mode = ServiceMode { forwarding, ..ServiceMode::default() };
        let mut balancer = Balancer::with(&[(service(VIP), mode)], Options::default(), &mut rng);
        balancer.lb.set_outer(LOAD_BALANCER, 1500);
        let servers = balancer.replace_servers(0, 1, &mut rng);
        balancer.lb.set_tunnel(servers[0], Tunnel { address: SERVER, source_port: None });
        balancer.install(0, &random_table(Rule::Table, 1, 1, &servers, &mut rng));
        let syn = Tcp { flags: SYN, options: aligned_timestamp(7, 0), ..Tcp::new(CLIENT, VIP) }.frame();
        let (verdict, packet) = balancer.run(&syn);
        assert_eq!(verdict, XDP_TX);
        let arrived = run(&loaded(), &packet, Some("decapsulated"));
        assert_eq!(arrived, (XDP_PASS, [&packet[..ETHERNET], &syn[ETHERNET..]].concat()));
    }
}
