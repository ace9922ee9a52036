//! Tests of `bpf/server/decap.bpf.c` (`BPF_PROG_TEST_RUN`), which removes outer headers at a server.

use std::net::{IpAddr, SocketAddr};

use coreward_dataplane::decap::{COUNTER_NAMES, Decapsulation};
use coreward_dataplane::lb::{Options, Tunnel};
use coreward_dataplane::test_run;
use coreward_intf as intf;
use coreward_model::consistency::ServiceMode;
use coreward_model::forwarding::Forwarding;
use coreward_model::placement::PlacementRule;
use coreward_model::rss::seeded_rng;

use crate::support::balancer::{Balancer, XDP_DROP, XDP_PASS, XDP_TX, id, random_table, service};
use crate::support::tunnel::{
    ETHERNET, OWN_ADDRESSES, TunnelForm, client, ip_header, own_address, server_address, set_traffic_class, vip,
};
use crate::support::{
    ExtensionHeader, Family, MORE_FRAGMENTS, SYN, Tcp, aligned_timestamp, ipv4_frame, ipv6_frame, missing_bpf_rights,
    skip_if,
};

const CONGESTION_EXPERIENCED: u8 = 3;
const UDP: u8 = 17;
const FRAGMENT_HEADER: u8 = 44;

fn loaded() -> Decapsulation {
    let decapsulation = Decapsulation::load_only().unwrap();
    decapsulation.set_sources(&Family::BOTH.map(own_address)).unwrap();
    decapsulation.set_vips(&Family::BOTH.map(|family| vip(family).ip())).unwrap();
    decapsulation
}

fn client_packet(family: Family) -> Vec<u8> {
    Tcp::between(client(family), vip(family)).frame()
}

/// Returns a frame from `source` to `destination` with `transport` after its IP headers.
fn packet(source: IpAddr, destination: IpAddr, protocol: u8, fragment: u16, transport: &[u8]) -> Vec<u8> {
    match (source, destination) {
        (IpAddr::V4(source), IpAddr::V4(destination)) => {
            ipv4_frame(protocol, [source, destination], &[], [0, fragment], transport)
        }
        (IpAddr::V6(source), IpAddr::V6(destination)) => ipv6_frame([source, destination], &[], protocol, transport),
        other => panic!("{other:?}"),
    }
}

/// Returns a frame with a UDP datagram from a client's `port` to the VIP.
fn datagram(family: Family, port: u16) -> Vec<u8> {
    let transport = [&40_000u16.to_be_bytes()[..], &port.to_be_bytes(), &[0, 12, 0, 0], b"data"].concat();
    packet(client(family).ip(), vip(family).ip(), UDP, 0, &transport)
}

/// Returns `frame` as a load balancer encapsulates it, with an outer header of this form.
fn encapsulated(form: TunnelForm, frame: &[u8]) -> Vec<u8> {
    let inner = &frame[ETHERNET..];
    let mut transport = Vec::new();
    if form.forwarding == Forwarding::Gue {
        for word in [50_000, intf::GUE_PORT as u16, (inner.len() + 8) as u16, 0] {
            transport.extend(word.to_be_bytes());
        }
    }
    transport.extend(inner);
    packet(own_address(form.outer), server_address(form.outer, id(1)), form.protocol(), 0x4000, &transport)
}

/// Runs the program on `frame`. Asserts that exactly `counter` has increased; `None`: that no counter has.
fn run(decapsulation: &Decapsulation, frame: &[u8], counter: Option<&str>) -> (i32, Vec<u8>) {
    let before = decapsulation.counters().unwrap();
    let outcome = test_run::run(decapsulation.program(), frame, 1).unwrap();
    let after = decapsulation.counters().unwrap();
    let risen: Vec<_> =
        (0..COUNTER_NAMES.len()).filter(|at| after[*at] != before[*at]).map(|at| COUNTER_NAMES[at]).collect();
    assert_eq!(risen, Vec::from_iter(counter));
    (outcome.verdict, outcome.packet)
}

/// Asserts that an encapsulated packet of each form that `change` has changed is dropped, and counted as `counter`.
fn expect_drop(counter: &str, change: impl Fn(&mut Vec<u8>, TunnelForm)) {
    skip_if!(missing_bpf_rights());
    let decapsulation = loaded();
    for form in TunnelForm::all() {
        let mut frame = encapsulated(form, &client_packet(form.inner));
        change(&mut frame, form);
        assert_eq!(run(&decapsulation, &frame, Some(counter)).0, XDP_DROP, "{form:?}");
    }
}

#[test]
fn packet_of_a_load_balancer_loses_its_outer_header() {
    skip_if!(missing_bpf_rights());
    let decapsulation = loaded();
    for form in TunnelForm::all() {
        let (client, vip) = (client(form.inner), vip(form.inner));
        let fragment = packet(client.ip(), vip.ip(), UDP, MORE_FRAGMENTS, &datagram(form.inner, 53)[ETHERNET + 20..]);
        let mut inner = vec![client_packet(form.inner), fragment];
        match (client, vip) {
            (SocketAddr::V4(_), _) => {
                inner.push(Tcp { ip_options: vec![1, 1, 1, 0], ..Tcp::between(client, vip) }.frame());
            }
            _ => {
                let headers: Vec<ExtensionHeader> = vec![(60, vec![0, 0, 1, 4, 0, 0, 0, 0])];
                inner.push(Tcp { extension_headers: headers, ..Tcp::between(client, vip) }.frame());
            }
        }
        for inner in inner {
            let frame = encapsulated(form, &inner);
            assert_eq!(run(&decapsulation, &frame, Some("decapsulated")), (XDP_PASS, inner), "{form:?}");
        }
    }
}

#[test]
fn padding_behind_the_outer_packet_is_no_error() {
    skip_if!(missing_bpf_rights());
    for form in TunnelForm::all() {
        let inner = client_packet(form.inner);
        let frame = [encapsulated(form, &inner), vec![0; 9]].concat();
        assert_eq!(run(&loaded(), &frame, Some("decapsulated")), (XDP_PASS, [inner, vec![0; 9]].concat()));
    }
}

#[test]
fn foreign_packets_pass_unchanged() {
    skip_if!(missing_bpf_rights());
    let decapsulation = loaded();
    let mut frames = vec![vec![0; 60]];
    for form in TunnelForm::all() {
        let mut other_family = encapsulated(form, &client_packet(form.inner));
        other_family[12..14].copy_from_slice(if form.outer == Family::Ipv4 { &[0x86, 0xdd] } else { &[8, 0] });
        frames.extend([client_packet(form.inner), datagram(form.inner, 6081), other_family]);
    }
    let gue = TunnelForm { forwarding: Forwarding::Gue, inner: Family::Ipv4, outer: Family::Ipv4 };
    let mut later_fragment = encapsulated(gue, &client_packet(gue.inner));
    later_fragment[ETHERNET + 7] = 5;
    let of_ipv6 = TunnelForm { outer: Family::Ipv6, ..gue };
    let mut fragment = encapsulated(of_ipv6, &client_packet(gue.inner));
    fragment[ETHERNET + 6] = FRAGMENT_HEADER;
    for frame in frames.into_iter().chain([later_fragment, fragment]) {
        assert_eq!(run(&decapsulation, &frame, None), (XDP_PASS, frame));
    }
}

#[test]
fn source_that_is_no_load_balancer_is_dropped() {
    expect_drop("drop_decap_foreign_source", |frame, form| {
        frame[ETHERNET + if form.outer == Family::Ipv4 { 15 } else { 23 }] ^= 1;
    });
}

#[test]
fn inner_destination_that_is_no_vip_is_dropped() {
    expect_drop("drop_decap_foreign_destination", |frame, form| {
        frame[ETHERNET + form.overhead() + ip_header(form.inner) - 1] ^= 1
    });
}

#[test]
fn fragment_of_an_encapsulated_ipv4_packet_is_dropped() {
    skip_if!(missing_bpf_rights());
    let decapsulation = loaded();
    for form in TunnelForm::all().filter(|form| form.outer == Family::Ipv4) {
        let mut first = encapsulated(form, &client_packet(form.inner));
        first[ETHERNET + 6] = 0x20;
        let mut later = encapsulated(form, &client_packet(form.inner));
        later[ETHERNET + 7] = 5;
        // A later fragment has no ports, so the program cannot recognise it as GUE.
        let fragments = if form.forwarding == Forwarding::Ipip { vec![first, later] } else { vec![first] };
        for frame in fragments {
            assert_eq!(run(&decapsulation, &frame, Some("drop_decap_fragment")).0, XDP_DROP);
        }
    }
}

#[test]
fn tunnel_inside_is_dropped() {
    for protocol in [4, 41, 47] {
        expect_drop("drop_decap_nested", |frame, form| {
            let inner = packet(client(form.inner).ip(), vip(form.inner).ip(), protocol, 0, b"packet");
            *frame = encapsulated(form, &inner);
        });
    }
    expect_drop("drop_decap_nested", |frame, form| {
        *frame = encapsulated(form, &datagram(form.inner, intf::GUE_PORT as u16));
    });
}

#[test]
fn tunnel_behind_extension_headers_is_dropped() {
    expect_drop("drop_decap_nested", |frame, form| {
        let form = TunnelForm { inner: Family::Ipv6, ..form };
        let (IpAddr::V6(client), IpAddr::V6(vip)) = (client(form.inner).ip(), vip(form.inner).ip()) else { panic!() };
        let headers: Vec<ExtensionHeader> = vec![(0, vec![0, 0, 1, 4, 0, 0, 0, 0]), (60, vec![0, 0, 1, 4, 0, 0, 0, 0])];
        *frame = encapsulated(form, &ipv6_frame([client, vip], &headers, 4, b"packet"));
    });
}

#[test]
fn contradicting_lengths_are_dropped() {
    let low_length = |family| if family == Family::Ipv4 { 3 } else { 5 };
    expect_drop("drop_decap_truncated", |frame, form| frame[ETHERNET + low_length(form.outer)] ^= 1);
    expect_drop("drop_decap_truncated", |frame, form| {
        frame[ETHERNET + form.overhead() + low_length(form.inner)] ^= 1;
    });
    // The flipped bits give the other IP version, and an unknown version.
    for flipped in [0x20, 0x80] {
        expect_drop("drop_decap_truncated", |frame, form| frame[ETHERNET + form.overhead()] ^= flipped);
    }
    expect_drop("drop_decap_truncated", |frame, _| frame.truncate(frame.len() - 1));
    expect_drop("drop_decap_truncated", |frame, form| {
        frame.truncate(ETHERNET + form.overhead() + ip_header(form.inner) - 1);
    });
    expect_drop("drop_decap_truncated", |frame, form| match form.inner {
        // The IP header's length becomes four words, which is too short.
        Family::Ipv4 => frame[ETHERNET + form.overhead()] ^= 1,
        Family::Ipv6 => frame.truncate(ETHERNET + form.overhead()),
    });
}

#[test]
fn length_of_the_datagram_must_fit_that_of_the_packet() {
    skip_if!(missing_bpf_rights());
    for form in TunnelForm::all().filter(|form| form.forwarding == Forwarding::Gue) {
        let mut frame = encapsulated(form, &client_packet(form.inner));
        frame[ETHERNET + ip_header(form.outer) + 5] -= 1;
        assert_eq!(run(&loaded(), &frame, Some("drop_decap_truncated")).0, XDP_DROP);
    }
}

#[test]
fn congestion_mark_goes_to_the_inner_packet_or_drops_it() {
    skip_if!(missing_bpf_rights());
    let decapsulation = loaded();
    for (form, inner_ecn) in TunnelForm::all().flat_map(|form| [1, 2, 3].map(|ecn| (form, ecn))) {
        let mut inner = client_packet(form.inner);
        // DSCP 46.
        set_traffic_class(&mut inner, 0xb8 | inner_ecn);
        let mut frame = encapsulated(form, &inner);
        set_traffic_class(&mut frame, CONGESTION_EXPERIENCED);
        set_traffic_class(&mut inner, 0xb8 | CONGESTION_EXPERIENCED);
        assert_eq!(run(&decapsulation, &frame, Some("decapsulated")), (XDP_PASS, inner), "{form:?} {inner_ecn}");
    }
    expect_drop("drop_decap_congestion", |frame, _| set_traffic_class(frame, CONGESTION_EXPERIENCED));
}

#[test]
fn removed_sources_and_vips_are_foreign() {
    skip_if!(missing_bpf_rights());
    for form in TunnelForm::all() {
        let decapsulation = loaded();
        let frame = encapsulated(form, &client_packet(form.inner));
        let (other_family, of_form) = Family::BOTH.into_iter().partition::<Vec<_>, _>(|family| *family != form.inner);
        assert_eq!(of_form, [form.inner]);
        decapsulation.set_vips(&other_family.iter().map(|family| vip(*family).ip()).collect::<Vec<_>>()).unwrap();
        assert_eq!(run(&decapsulation, &frame, Some("drop_decap_foreign_destination")).0, XDP_DROP);
        decapsulation.set_vips(&[vip(form.inner).ip()]).unwrap();
        assert_eq!(run(&decapsulation, &frame, Some("decapsulated")).0, XDP_PASS);
        decapsulation.set_sources(&[]).unwrap();
        assert_eq!(run(&decapsulation, &frame, Some("drop_decap_foreign_source")).0, XDP_DROP);
    }
}

#[test]
fn encapsulated_packet_arrives_unchanged() {
    skip_if!(missing_bpf_rights());
    let mut rng = seeded_rng(35, 0);
    for form in TunnelForm::all() {
        let mode = ServiceMode { forwarding: form.forwarding, ..ServiceMode::default() };
        let mut balancer = Balancer::with(&[(service(vip(form.inner)), mode)], Options::default(), &mut rng);
        balancer.lb.set_outer_header(OWN_ADDRESSES, 1500);
        let servers = balancer.replace_servers(0, 1, &mut rng);
        let address = server_address(form.outer, servers[0]);
        balancer.lb.set_tunnel(servers[0], Tunnel { address, source_port: None }).unwrap();
        balancer.install(0, &random_table(PlacementRule::Table, 1, 1, &servers, &mut rng));
        let options = aligned_timestamp(7, 0);
        let syn = Tcp { flags: SYN, options, ..Tcp::between(client(form.inner), vip(form.inner)) }.frame();
        let (verdict, packet) = balancer.run(&syn);
        assert_eq!(verdict, XDP_TX);
        let arrived = run(&loaded(), &packet, Some("decapsulated"));
        assert_eq!(arrived, (XDP_PASS, [&packet[..ETHERNET - 2], &syn[ETHERNET - 2..]].concat()), "{form:?}");
    }
}
