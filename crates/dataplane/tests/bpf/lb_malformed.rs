//! Tests of `bpf/lb/lb.bpf.c` with packets for the kernel, and with truncated and malformed packets: the verdict and
//! the counted reason are those in its comments, and the frame is unchanged.

use coreward_model::cookie::{self, Cookie};
use coreward_model::placement::PlacementRule;
use coreward_model::rss::{seeded_rng, uniform_below};
use coreward_model::{FourTuple, ServerId};
use rand::Rng as _;

use crate::support::balancer::{
    Balancer, CLIENT, Identification, VIP, XDP_DROP, XDP_PASS, XDP_TX, previous_server, random_table,
};
use crate::support::{
    self, ACK, FIN, RST, SYN, Tcp, aligned_timestamp, missing_bpf_rights, ones_complement_sum, skip_if, tcp_offset,
    timestamp,
};

/// Offsets of headers in a frame with an IP header of 20 bytes, in bytes.
const IP: usize = 14;
const TCP: usize = IP + 20;
const OPTIONS: usize = TCP + 20;

/// Returns a balancer with one service, one of its servers, and a packet of a connection established to that server.
fn balancer() -> (Balancer, ServerId, Tcp) {
    let mut rng = seeded_rng(21, 0);
    let mut balancer = Balancer::new(&[VIP], &mut rng);
    let ids = balancer.replace_servers(0, 5, &mut rng);
    balancer.install(0, &random_table(PlacementRule::Table, 1, 1, &ids, &mut rng));
    let tsecr = cookie::stamp_tsval(
        &balancer.keys,
        &support::TIME_KEY,
        &FourTuple::ipv4(CLIENT, VIP),
        Cookie::Server(ids[2]),
        12_345,
    );
    let packet = Tcp { options: aligned_timestamp(1, tsecr), ..Tcp::new(CLIENT, VIP) };
    (balancer, ids[2], packet)
}

fn with(frame: &[u8], offset: usize, bytes: &[u8]) -> Vec<u8> {
    let mut frame = frame.to_vec();
    frame[offset..offset + bytes.len()].copy_from_slice(bytes);
    frame
}

#[test]
fn packet_of_no_service_passes_unchanged() {
    skip_if!(missing_bpf_rights());
    let (balancer, _, packet) = balancer();
    let frame = packet.frame();
    let mut others = vec![
        ("ARP", with(&frame, 12, &[8, 6])),
        ("IPv6", with(&frame, 12, &[0x86, 0xdd])),
        ("VLAN-tagged", [&frame[..12], &[0x81, 0, 0, 5], &frame[12..]].concat()),
        ("UDP", with(&frame, IP + 9, &[17])),
        ("ICMP", with(&frame, IP + 9, &[1])),
        ("another address", with(&frame, IP + 16, &[10, 200, 0, 2])),
        ("another port", with(&frame, TCP + 2, &[0, 81])),
        ("port 0", with(&frame, TCP + 2, &[0, 0])),
        ("the broadcast MAC address", with(&frame, 0, &[0xff; 6])),
        ("another MAC address", with(&frame, 0, &[0, 0, 0, 0, 0, 1])),
        ("a fragment to another address", with(&with(&frame, IP + 16, &[10, 200, 0, 2]), IP + 6, &[0x20, 0])),
        ("a bad header length to another address", with(&with(&frame, IP + 16, &[1, 2, 3, 4]), IP, &[0x41])),
    ];
    // Frames that end before the destination address have no service.
    others.extend((14..IP + 20).map(|length| ("cut in the IP header", frame[..length].to_vec())));
    let syn = Tcp { flags: SYN, ..packet.clone() }.frame();
    others.push(("SYN to another port", with(&syn, TCP + 2, &[1, 187])));
    others.push(("SYN to port 0", with(&syn, TCP + 2, &[0, 0])));
    for (what, frame) in others {
        println!("{what}");
        balancer.expect_passed(&frame);
    }
}

#[test]
fn frames_cut_short_are_dropped_with_a_reason() {
    skip_if!(missing_bpf_rights());
    let (balancer, _, packet) = balancer();
    let frames = [packet.clone(), Tcp { flags: SYN, ..packet.clone() }, Tcp { ip_options: vec![1; 8], ..packet }];
    for frame in frames.map(|packet| packet.frame()) {
        // The total length in the IP header exceeds the frame.
        for length in IP + 20..frame.len() {
            balancer.expect_without_service(&frame[..length], XDP_DROP, "drop_malformed_ipv4");
        }
    }
}

#[test]
fn packets_that_end_before_their_headers_are_dropped_with_a_reason() {
    skip_if!(missing_bpf_rights());
    let (balancer, server, packet) = balancer();
    for packet in [packet.clone(), Tcp { flags: SYN, ..packet }] {
        let frame = packet.frame();
        let headers = 20 + 20 + 12;
        for total in 0..headers as u16 {
            // The frame has all bytes (Ethernet pads short frames), but the total length in the IP header is smaller.
            let frame = with(&frame, IP + 2, &total.to_be_bytes());
            match total {
                0..20 => balancer.expect_without_service(&frame, XDP_DROP, "drop_malformed_ipv4"),
                20..24 => balancer.expect_without_service(&frame, XDP_DROP, "drop_malformed_tcp"),
                _ => balancer.expect(&frame, XDP_DROP, 0, "drop_malformed_tcp"),
            }
        }
        let whole = with(&frame, IP + 2, &(headers as u16).to_be_bytes());
        if packet.flags == SYN {
            assert_eq!(balancer.run(&whole).0, XDP_TX);
        } else {
            balancer.expect_sent_to(0, &whole, server, "established");
        }
    }
}

#[test]
fn bad_ip_headers_and_fragments_are_dropped_with_a_reason() {
    skip_if!(missing_bpf_rights());
    let (balancer, server, packet) = balancer();
    let frame = packet.frame();
    for version_and_length in 0..=255u8 {
        let (version, words) = (version_and_length >> 4, version_and_length & 0xf);
        if version_and_length == 0x45 {
            continue;
        }
        let frame = with(&frame, IP, &[version_and_length]);
        if version != 4 || words < 5 || 4 * usize::from(words) > frame.len() - IP {
            balancer.expect_without_service(&frame, XDP_DROP, "drop_malformed_ipv4");
        } else {
            // The longer header covers the ports. Other bytes are read as ports, and some of them are port 80.
            let (verdict, after) = balancer.run(&frame);
            assert!(verdict == XDP_PASS || verdict == XDP_DROP, "{words} words: {verdict}");
            assert_eq!(after, frame);
        }
    }
    for fragment in 0..=0xffffu16 {
        if fragment % 257 != 0 && fragment.count_ones() != 1 {
            continue;
        }
        let frame = with(&frame, IP + 6, &fragment.to_be_bytes());
        // A packet is a fragment if any bit is set except the reserved bit and "don't fragment".
        if fragment & 0x3fff != 0 {
            balancer.expect_without_service(&frame, XDP_DROP, "drop_fragment");
        } else {
            balancer.expect_sent_to(0, &frame, server, "established");
        }
    }
    // A later fragment has payload in place of the ports.
    let later = with(&with(&frame, IP + 6, &[0, 185]), TCP, &[0xaa; 8]);
    balancer.expect_without_service(&later, XDP_DROP, "drop_fragment");
}

#[test]
fn invalid_data_offsets_are_dropped_with_a_reason() {
    skip_if!(missing_bpf_rights());
    let (balancer, server, packet) = balancer();
    for flags in [ACK, SYN] {
        let packet = Tcp { flags, payload: vec![0; 4], ..packet.clone() };
        let frame = packet.frame();
        for words in 0..16u8 {
            let frame = with(&frame, TCP + 12, &[words << 4]);
            let expected = match (words, flags) {
                // The segment has 32 bytes of header and 4 of payload.
                (0..5 | 10.., _) => "drop_malformed_tcp",
                // The timestamp is outside the header: no options at all, only NOPs, or a cut option.
                (5, _) => "bucket_hash",
                (6 | 7, _) => "drop_malformed_tcp",
                (_, SYN) => "new_connection",
                (_, _) => "established",
            };
            match expected {
                "drop_malformed_tcp" => balancer.expect(&frame, XDP_DROP, 0, expected),
                "established" => balancer.expect_sent_to(0, &frame, server, expected),
                _ => assert_eq!(balancer.run(&frame).0, XDP_TX, "{words} words, flags {flags:#x}"),
            }
        }
    }
}

#[test]
fn malformed_options_are_dropped_with_a_reason() {
    skip_if!(missing_bpf_rights());
    let (balancer, server, packet) = balancer();
    let tsecr = u32::from_be_bytes(packet.options[8..12].try_into().unwrap());
    let time = timestamp(1, tsecr);
    let bad: Vec<(&str, Vec<u8>)> = vec![
        ("length 0", vec![3, 0, 0, 0]),
        ("length 1", vec![3, 1, 0, 0]),
        ("beyond the header", vec![3, 5, 0, 0]),
        ("far beyond the header", vec![1, 1, 1, 254, 255, 0, 0, 0]),
        ("a kind without its length", vec![1, 1, 1, 3]),
        ("a timestamp of 0 bytes", vec![8, 0, 0, 0]),
        ("a timestamp cut short", vec![1, 1, 8, 10, 1, 2, 3, 4]),
        ("length 1 before a good timestamp", [&[254, 1][..], &time].concat()),
        ("length 0 at the very end", [&[1; 38][..], &[254, 0]].concat()),
    ];
    for flags in [ACK, SYN, RST, ACK | FIN] {
        for (what, options) in &bad {
            println!("{what}, flags {flags:#x}");
            let frame = Tcp { flags, options: options.clone(), ..packet.clone() }.frame();
            balancer.expect(&frame, XDP_DROP, 0, "drop_malformed_tcp");
        }
    }
    // The program finds a timestamp at every offset, and ignores malformed options after it.
    for before in 0..=28 {
        let after = [254, 0, 7, 7];
        for fill in [vec![1; before], other_options(before)] {
            let mut options = [&fill[..], &time].concat();
            options.extend(&after[..4.min(40 - options.len()).min(2)]);
            let frame = Tcp { options, ..packet.clone() }.frame();
            balancer.expect_sent_to(0, &frame, server, "established");
        }
    }
    // A timestamp after the end of options, or with another length, is ignored, as by Linux (tcp_parse_options()).
    let none = [
        [&[0, 0][..], &time].concat(),
        [&[8, 9][..], &time[2..9]].concat(),
        [&[8, 12][..], &time[2..], &[0, 0]].concat(),
    ];
    let table = balancer.newest_table.as_ref().unwrap();
    for (port, options) in (1..).zip(none) {
        let tuple = FourTuple::ipv4((CLIENT.0, port), VIP);
        let (consistent, previous_server) = (table.choose_consistent(&tuple).unwrap(), previous_server(table, &tuple));
        let frame = Tcp { options, ..Tcp::new((CLIENT.0, port), VIP) }.frame();
        balancer.expect_sent(0, &frame, consistent, Identification::Before(previous_server), "bucket_hash");
    }
}

/// Returns `length` bytes of TCP options other than timestamp and end of options; a single byte is a no-operation.
fn other_options(length: usize) -> Vec<u8> {
    match length {
        0 => vec![],
        1 => vec![1],
        3 => vec![253, 3, 8],
        _ => [&[253, 2][..], &other_options(length - 2)].concat(),
    }
}

#[test]
fn flags_that_no_connection_has_are_dropped_with_a_reason() {
    skip_if!(missing_bpf_rights());
    let (balancer, server, packet) = balancer();
    for flags in 0..=255u8 {
        let frame = Tcp { flags, ..packet.clone() }.frame();
        let without = Tcp { flags, options: vec![], ..packet.clone() }.frame();
        let nonsense = if flags & SYN != 0 { flags & (ACK | FIN | RST) != 0 } else { flags & (ACK | RST) == 0 };
        if nonsense {
            balancer.expect(&frame, XDP_DROP, 0, "drop_malformed_tcp");
            balancer.expect(&without, XDP_DROP, 0, "drop_malformed_tcp");
        } else if flags & SYN != 0 {
            assert_eq!(balancer.run(&frame).0, XDP_TX, "flags {flags:#x}");
        } else {
            balancer.expect_sent_to(0, &frame, server, "established");
            if flags & RST != 0 {
                let without = Tcp { flags, options: vec![], ..Tcp::new((CLIENT.0, 1), VIP) }.frame();
                let nobody = Identification::Before(None);
                balancer.expect_broadcast_or(0, &without, nobody, "drop_broadcast_rate_limited");
            }
        }
    }
}

/// Tests random frames, and valid packets with random bytes. Each has exactly one outcome, and the program changes only
/// the MAC addresses and the IP identification.
#[test]
fn random_frames_get_one_outcome_and_stay_unchanged() {
    skip_if!(missing_bpf_rights());
    let (balancer, _, packet) = balancer();
    let mut rng = seeded_rng(22, 0);
    let total = |balancer: &Balancer| -> u64 {
        let service = balancer.lb.counters(balancer.services[0]).packets;
        service.iter().chain(&balancer.lb.counters_without_service().packets).sum()
    };
    for round in 0..20_000u64 {
        let mut frame = Tcp {
            flags: [ACK, SYN, RST][uniform_below(&mut rng, 3) as usize],
            ip_options: vec![1; 4 * uniform_below(&mut rng, 3) as usize],
            ..packet.clone()
        }
        .frame();
        for _ in 0..=uniform_below(&mut rng, 4) {
            let offset = IP + uniform_below(&mut rng, (OPTIONS + 12 - IP) as u32) as usize;
            frame[offset] = rng.next_u32() as u8;
        }
        if round % 5 == 0 {
            frame.truncate(14 + uniform_below(&mut rng, frame.len() as u32 - 13) as usize);
        }
        if round % 7 == 0 {
            rng.fill_bytes(&mut frame[14..]);
        }
        let (verdict, after) = balancer.run(&frame);
        match verdict {
            XDP_TX => {
                assert_eq!(after[12..18], frame[12..18]);
                assert_eq!(after[20..24], frame[20..24]);
                assert_eq!(after[26..], frame[26..]);
                // Identification and checksum change together, so that the header's sum stays the same, right or wrong.
                let sum = |frame: &[u8]| ones_complement_sum(&frame[IP..tcp_offset(frame)]) % 0xffff;
                assert_eq!(sum(&after), sum(&frame));
            }
            XDP_PASS | XDP_DROP => assert_eq!(after, frame),
            other => panic!("verdict {other}"),
        }
        if round % 1000 == 0 {
            assert_eq!(total(&balancer), round + 1);
        }
    }
    let internal = coreward_intf::LB_COUNTER_DROP_INTERNAL as usize;
    assert_eq!(balancer.lb.counters(balancer.services[0]).packets[internal], 0);
}
