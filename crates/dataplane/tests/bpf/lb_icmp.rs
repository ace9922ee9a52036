//! Tests of `bpf/lb/lb.bpf.c` with ICMP errors to a VIP (`BPF_PROG_TEST_RUN`), which go to the server whose packet they
//! quote.

use std::net::Ipv4Addr;

use coreward_dataplane::lb::{Options, Server};
use coreward_model::consistency::{Consistency, ServiceMode, Timestamps};
use coreward_model::cookie::{self, Cookie};
use coreward_model::placement::PlacementRule;
use coreward_model::rss::{seeded_rng, uniform_below};
use coreward_model::tuple::Protocol;
use coreward_model::{FourTuple, ServerId, ServiceAddress};
use rand::Rng as _;

use crate::support::balancer::{Balancer, CLIENT, Identification, VIP, XDP_DROP, random_table, service};
use crate::support::{self, ACK, SYN, Tcp, Udp, aligned_timestamp, ipv4_frame, missing_bpf_rights, skip_if, timestamp};

/// Address of a router between client and VIP, from which ICMP errors come.
const ROUTER: Ipv4Addr = Ipv4Addr::new(192, 0, 2, 1);

/// Offsets of headers in a frame with an IP header of 20 bytes, in bytes.
const IP: usize = 14;
const ICMP: usize = IP + 20;
const QUOTE: usize = ICMP + 8;

const UNCHANGED: Identification = Identification::Unchanged;

/// Returns the IP packet in a frame.
fn packet_of(frame: &[u8]) -> Vec<u8> {
    frame[14..].to_vec()
}

/// Returns an IP packet from a server to the client, which an ICMP error can quote.
fn answer(options: Vec<u8>, ip_options: Vec<u8>) -> Vec<u8> {
    packet_of(&Tcp { options, ip_options, payload: vec![9; 64], ..Tcp::new(VIP, CLIENT) }.frame())
}

/// Returns an ICMP error of type `kind` and code 4 that quotes `quoted`. With type 3 it is "fragmentation needed".
fn error(kind: u8, quoted: &[u8]) -> Vec<u8> {
    let message = [&[kind, 4, 0, 0, 0, 0, 5, 0][..], quoted].concat();
    ipv4_frame(1, [ROUTER, VIP.0], &[], [0x77, 0], &message)
}

fn balancer(mode: ServiceMode) -> (Balancer, Vec<ServerId>) {
    let mut rng = seeded_rng(71, 0);
    let mut balancer = Balancer::with(&[(service(VIP), mode)], Options::default(), &mut rng);
    let ids = balancer.replace_servers(0, 5, &mut rng);
    balancer.install(0, &random_table(PlacementRule::Table, 1, 1, &ids, &mut rng));
    (balancer, ids)
}

fn tuple() -> FourTuple {
    FourTuple::ipv4(CLIENT, VIP)
}

fn stamped(balancer: &Balancer, server: ServerId) -> u32 {
    cookie::stamp_tsval(&balancer.keys, &support::TIME_KEY, &tuple(), Cookie::Server(server), 12_345)
}

#[test]
fn quoted_timestamp_names_the_server() {
    skip_if!(missing_bpf_rights());
    let (mut balancer, ids) = balancer(ServiceMode::default());
    let value = stamped(&balancer, ids[3]);
    let usual = aligned_timestamp(value, 7);
    let odd = [&[1][..], &timestamp(value, 7), &[0]].concat();
    let syn_ack = [&[2, 4, 5, 0xb4, 4, 2][..], &timestamp(value, 7), &[1, 3, 3, 7]].concat();
    for kind in [3, 11, 12] {
        for options in [&usual, &odd, &syn_ack] {
            for ip_options in [vec![], vec![1; 40]] {
                let quoted = answer(options.clone(), ip_options);
                balancer.expect_sent_to(0, &error(kind, &quoted), ids[3], "icmp_error");
            }
        }
    }
    // The server is also found with options in the outer IP header, and with a quote that ends at the timestamp.
    let quoted = answer(usual.clone(), vec![]);
    let message = [&[3, 4, 0, 0, 0, 0, 5, 0][..], &quoted].concat();
    let frame = ipv4_frame(1, [ROUTER, VIP.0], &[1; 8], [0x77, 0], &message);
    balancer.expect_sent_to(0, &frame, ids[3], "icmp_error");
    balancer.expect_sent_to(0, &error(3, &quoted[..20 + 32]), ids[3], "icmp_error");

    balancer.lb.set_server(balancer.services[0], ids[3], Server { mac: None, is_eligible: true });
    balancer.expect(&error(3, &quoted), XDP_DROP, 0, "drop_server_unresolved");
    balancer.lb.remove_server(balancer.services[0], ids[3]);
    balancer.expect_broadcast_or(0, &error(3, &quoted), UNCHANGED, "drop_broadcast_rate_limited");
}

#[test]
fn quotes_without_a_cookie_follow_the_flow_table_or_are_broadcast() {
    skip_if!(missing_bpf_rights());
    let (balancer, ids) = balancer(ServiceMode::default());
    let value = stamped(&balancer, ids[2]);
    let whole = answer(aligned_timestamp(value, 7), vec![]);
    let without = answer(vec![], vec![]);
    let bad_options = answer(vec![3, 1, 0, 0], vec![]);
    // Quotes without the timestamp: down to IP header and 8 bytes, as RFC 792 requires.
    let cut: Vec<Vec<u8>> = (28..52).map(|length| whole[..length].to_vec()).collect();
    let mut bad_data_offset = whole.clone();
    bad_data_offset[20 + 12] = 0x40;
    let quotes: Vec<_> = cut.into_iter().chain([without, bad_options, bad_data_offset]).collect();
    for quoted in &quotes {
        balancer.expect_broadcast_or(0, &error(3, quoted), UNCHANGED, "drop_broadcast_rate_limited");
    }
    // After a packet of the connection, the flow table has its server.
    let chosen = balancer.newest_table.as_ref().unwrap().choose_consistent(&tuple()).unwrap();
    balancer.run_expecting_counter(&Tcp { flags: ACK, ..Tcp::new(CLIENT, VIP) }.frame(), Some(0), "bucket_hash");
    for quoted in &quotes {
        balancer.expect_sent_to(0, &error(3, quoted), chosen, "icmp_error");
    }
    balancer.expect_sent_to(0, &error(3, &whole), ids[2], "icmp_error");
}

#[test]
fn random_quoted_timestamps_reach_a_known_server_or_are_broadcast() {
    skip_if!(missing_bpf_rights());
    let (mut balancer, _) = balancer(ServiceMode::default());
    let mut rng = seeded_rng(72, 0);
    let ids = balancer.replace_servers(0, 8192, &mut rng);
    let mut seen = [0; 2];
    for _ in 0..500 {
        let value = rng.next_u32();
        let frame = error(3, &answer(aligned_timestamp(value, 7), vec![]));
        match cookie::decode_cookie(&balancer.keys, &tuple(), value) {
            Cookie::Server(server) if ids.contains(&server) => {
                seen[0] += 1;
                balancer.expect_sent_to(0, &frame, server, "icmp_error");
            }
            _ => {
                seen[1] += 1;
                balancer.expect_broadcast_or(0, &frame, UNCHANGED, "drop_broadcast_rate_limited");
            }
        }
    }
    assert!(seen.iter().all(|count| *count > 50), "{seen:?}");
}

#[test]
fn icmp_errors_without_cookies_follow_the_modes_table() {
    skip_if!(missing_bpf_rights());
    let off = ServiceMode { timestamps: Timestamps::Off, ..ServiceMode::default() };
    let others = [Consistency::None, Consistency::HashTable, Consistency::Beamer];
    let modes = others.map(|consistency| ServiceMode { consistency, ..ServiceMode::default() });
    for mode in modes.into_iter().chain([off]) {
        let (balancer, ids) = balancer(mode);
        let frame = error(3, &answer(aligned_timestamp(stamped(&balancer, ids[1]), 7), vec![]));
        balancer.expect_broadcast_or(0, &frame, UNCHANGED, "drop_broadcast_rate_limited");
        // Only a connection with an entry in the flow table is found, not one that rule or bucket place.
        let packet = Tcp { options: aligned_timestamp(1, 2), ..Tcp::new(CLIENT, VIP) };
        balancer.run(&Tcp { flags: SYN, ..packet.clone() }.frame());
        let destination = balancer.destination(&packet.frame());
        let remembered = mode == off || mode.consistency == Consistency::HashTable;
        if remembered {
            let server = *ids.iter().find(|id| balancer.macs[&(0, **id)] == destination).unwrap();
            balancer.expect_sent_to(0, &frame, server, "icmp_error");
        } else {
            balancer.expect_broadcast_or(0, &frame, UNCHANGED, "drop_broadcast_rate_limited");
        }
    }
}

#[test]
fn errors_about_datagrams_follow_their_flow() {
    skip_if!(missing_bpf_rights());
    let mut rng = seeded_rng(73, 0);
    let udp = ServiceAddress { protocol: Protocol::Udp, ..service(VIP) };
    for consistency in [Consistency::HashTable, Consistency::None] {
        let mode = ServiceMode { consistency, ..ServiceMode::default_for(Protocol::Udp) };
        let mut balancer = Balancer::with(&[(udp, mode)], Options::default(), &mut rng);
        let ids = balancer.replace_servers(0, 5, &mut rng);
        balancer.install(0, &random_table(PlacementRule::Table, 1, 1, &ids, &mut rng));
        let frame = error(3, &packet_of(&Udp::new(VIP, CLIENT).frame()));
        balancer.expect_broadcast_or(0, &frame, UNCHANGED, "drop_broadcast_rate_limited");
        let destination = balancer.destination(&Udp::new(CLIENT, VIP).frame());
        if consistency == Consistency::HashTable {
            let server = *ids.iter().find(|id| balancer.macs[&(0, **id)] == destination).unwrap();
            balancer.expect_sent_to(0, &frame, server, "icmp_error");
        } else {
            balancer.expect_broadcast_or(0, &frame, UNCHANGED, "drop_broadcast_rate_limited");
        }
        // The same port of TCP is no service.
        balancer.expect_passed(&error(3, &answer(vec![], vec![])));
    }
}

#[test]
fn icmp_error_of_no_service_passes() {
    skip_if!(missing_bpf_rights());
    let (balancer, ids) = balancer(ServiceMode::default());
    let quoted = answer(aligned_timestamp(stamped(&balancer, ids[0]), 7), vec![]);
    let good = error(3, &quoted);
    balancer.expect_sent_to(0, &good, ids[0], "icmp_error");
    let with = |offset: usize, bytes: &[u8]| {
        let mut frame = good.clone();
        frame[offset..offset + bytes.len()].copy_from_slice(bytes);
        frame
    };
    let mut others = vec![
        ("about another address", with(QUOTE + 12, &[10, 200, 0, 2])),
        ("about another port", with(QUOTE + 20, &[0, 81])),
        ("about another protocol", with(QUOTE + 9, &[47])),
        ("about UDP", with(QUOTE + 9, &[17])),
        ("about a later fragment", with(QUOTE + 6, &[0, 1])),
        ("to another address", with(IP + 16, &[10, 200, 0, 2])),
        ("a fragment itself", with(IP + 6, &[0x20, 0])),
        ("a later fragment itself", with(IP + 6, &[0, 3])),
    ];
    // An error about a first fragment, which has the ports, is forwarded.
    balancer.expect_sent_to(0, &with(QUOTE + 6, &[0x20, 0]), ids[0], "icmp_error");
    others.extend(
        (0..=255u8).filter(|kind| ![3, 11, 12].contains(kind)).map(|kind| ("another type", with(ICMP, &[kind]))),
    );
    for (what, frame) in others {
        println!("{what}");
        balancer.expect_passed(&frame);
    }
}

#[test]
fn malformed_icmp_errors_are_dropped_with_a_reason() {
    skip_if!(missing_bpf_rights());
    let (balancer, ids) = balancer(ServiceMode::default());
    let quoted = answer(aligned_timestamp(stamped(&balancer, ids[0]), 7), vec![]);
    let good = error(3, &quoted);
    let mut rng = seeded_rng(74, 0);
    // The outer IP packet ends before the quote has 8 bytes after its IP header.
    for total in 0..20 + 8 + 28u16 {
        let mut frame = good.clone();
        frame[IP + 2..IP + 4].copy_from_slice(&total.to_be_bytes());
        let name = if total < 20 { "drop_malformed_ipv4" } else { "drop_malformed_icmp" };
        balancer.expect_without_service(&frame, XDP_DROP, name);
    }
    for cut in IP + 20..good.len() {
        balancer.expect_without_service(&good[..cut], XDP_DROP, "drop_malformed_ipv4");
    }
    for version_and_length in (0..=255u8).filter(|byte| *byte != 0x45) {
        let mut frame = good.clone();
        frame[QUOTE] = version_and_length;
        let words = usize::from(version_and_length & 0xf);
        if version_and_length >> 4 != 4 || words < 5 {
            balancer.expect_without_service(&frame, XDP_DROP, "drop_malformed_icmp");
        } else {
            // The longer IP header covers the ports, so no service is found.
            balancer.expect_passed(&frame);
        }
    }
    // The quoted IP header is longer than the quote.
    let short = &answer(vec![], vec![])[..28];
    let mut frame = error(3, short);
    frame[QUOTE] = 0x46;
    balancer.expect_without_service(&frame, XDP_DROP, "drop_malformed_icmp");
    // Random bytes in the quote have exactly one outcome, and the program does not change them.
    for _ in 0..5_000 {
        let mut frame = good.clone();
        for _ in 0..=uniform_below(&mut rng, 4) {
            let offset = ICMP + uniform_below(&mut rng, (frame.len() - ICMP) as u32) as usize;
            frame[offset] = rng.next_u32() as u8;
        }
        let (_, after) = balancer.run(&frame);
        assert_eq!(after[12..], frame[12..]);
    }
    let internal = coreward_intf::LB_COUNTER_DROP_INTERNAL as usize;
    assert_eq!(balancer.lb.counters(balancer.services[0]).packets[internal], 0);
}
