//! Comparison of `bpf/server/server.bpf.c` with `coreward_model::cookie` for each packet (`BPF_PROG_TEST_RUN`).

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};

use coreward_dataplane::server::ServerPrograms;
use coreward_dataplane::tc::PacketDirection;
use coreward_dataplane::test_run;
use coreward_intf as intf;
use coreward_model::consistency::ServiceSettings;
use coreward_model::cookie::{self, Cookie, CookieKey, CookieKeyIndex, FleetCookieKeys};
use coreward_model::rss::{seeded_rng, uniform_below};
use coreward_model::tuple::TransportProtocol;
use coreward_model::{FourTuple, ServerId, ServiceAddress};
use rand::Rng as _;
use rand_xoshiro::Xoshiro256PlusPlus;

use crate::support::{
    self, ACK, AddressFamily, RST, SYN, TcpPacket, aligned_timestamp_option, missing_bpf_rights, read_u32, skip_if,
    tcp_segment_sum, timestamp_option, tsval_clock_ms, tsval_offset,
};

/// Verdict of a tc program that leaves the decision to the next program (linux/pkt_cls.h).
const TC_ACT_UNSPEC: i32 = -1;
const TC_ACT_SHOT: i32 = 2;

fn vip_of_family(family: AddressFamily) -> SocketAddr {
    let address = match family {
        AddressFamily::Ipv4 => IpAddr::from(Ipv4Addr::new(10, 200, 0, 1)),
        AddressFamily::Ipv6 => Ipv6Addr::new(0x2001, 0xdb8, 0, 0, 0, 0, 0xc8, 1).into(),
    };
    (address, 80).into()
}

fn fixed_client_address(family: AddressFamily) -> SocketAddr {
    let address = match family {
        AddressFamily::Ipv4 => IpAddr::from(Ipv4Addr::new(10, 1, 0, 7)),
        AddressFamily::Ipv6 => Ipv6Addr::new(0x2001, 0xdb8, 7, 0, 0x1234, 0, 0, 7).into(),
    };
    (address, 40312).into()
}

fn four_tuple_to_vip(client: SocketAddr) -> FourTuple {
    FourTuple::new(client, vip_of_family(address_family(client))).unwrap()
}

fn address_family(address: SocketAddr) -> AddressFamily {
    if address.is_ipv4() { AddressFamily::Ipv4 } else { AddressFamily::Ipv6 }
}

struct TestServerPrograms {
    programs: ServerPrograms,
    keys: FleetCookieKeys,
    /// TSval of the server's kernel (in ms) from which the programs stamp packets with the current key.
    key_switch_ms: u32,
    id: ServerId,
}

impl TestServerPrograms {
    fn new(rng: &mut Xoshiro256PlusPlus) -> Self {
        let mut draw_random_key = || CookieKey { k0: rng.next_u64(), k1: rng.next_u64() };
        let keys = [draw_random_key(), draw_random_key()];
        let current_key = if rng.next_u32() & 1 == 0 { CookieKeyIndex::First } else { CookieKeyIndex::Second };
        let mut server = Self {
            programs: ServerPrograms::load_unattached(false).unwrap(),
            keys: FleetCookieKeys { keys, current_key_index: current_key },
            key_switch_ms: tsval_clock_ms() - 500,
            id: ServerId::try_from(u64::from(rng.next_u32() & intf::COOKIE_ID_MASK)).unwrap(),
        };
        server.programs.set_cookie_keys(&server.keys, server.key_switch_ms);
        server.set_dual_stack_services();
        server
    }

    fn set_dual_stack_services(&mut self) {
        let service_address_of_family =
            |family| ServiceAddress { vip_and_port: vip_of_family(family), protocol: TransportProtocol::Tcp };
        let services =
            AddressFamily::BOTH.map(|family| (service_address_of_family(family), self.id, ServiceSettings::default()));
        self.programs.set_services(&services).unwrap();
    }

    /// Returns the TSval that the program must send if the TSval of the server's kernel is `own_tsval`.
    fn expected_tsval(&self, tuple: &FourTuple, cookie: Cookie, own_tsval: u32) -> u32 {
        let keys_at_time = self.keys.keys_for_tsval(own_tsval, self.key_switch_ms);
        cookie::stamp_tsval(&keys_at_time, &self.programs.time_key(), tuple, cookie, own_tsval)
    }

    fn run_program(&self, direction: PacketDirection, frame: &[u8]) -> (i32, Vec<u8>) {
        let outcome = test_run::run_program(self.programs.program_for_direction(direction), frame, 1).unwrap();
        (outcome.verdict, outcome.packet)
    }

    /// Runs a program on `frame`. Returns the verdict, the packet, and the names of the counters that have increased.
    fn run_and_list_counters(&self, direction: PacketDirection, frame: &[u8]) -> (i32, Vec<u8>, Vec<&'static str>) {
        let counters_before = self.programs.counters();
        let (tc_action, packet) = self.run_program(direction, frame);
        let counters_after = self.programs.counters();
        let mut increased_counters = vec![];
        for ((after, before), name) in counters_after.into_iter().zip(counters_before).zip(intf::SERVER_COUNTER_NAMES) {
            increased_counters.extend(std::iter::repeat_n(name, (after - before) as usize));
        }
        (tc_action, packet, increased_counters)
    }
}

fn random_client(family: AddressFamily, rng: &mut Xoshiro256PlusPlus) -> SocketAddr {
    let address = match family {
        AddressFamily::Ipv4 => IpAddr::from(Ipv4Addr::from(rng.next_u32())),
        AddressFamily::Ipv6 => Ipv6Addr::from(u128::from(rng.next_u64()) << 64 | u128::from(rng.next_u64())).into(),
    };
    (address, rng.next_u32() as u16).into()
}

/// Adds a random number of IP options or extension headers, which the programs skip.
fn add_skippable_headers(packet: &mut TcpPacket, rng: &mut Xoshiro256PlusPlus) {
    packet.ip_options = vec![1; uniform_below(rng, 41) as usize];
    let new_options_header = |number| (number, vec![0, 0, 1, 4, 0, 0, 0, 0]);
    let atomic_fragment_header = (44, vec![0, 0, 0, 0, 1, 2, 3, 4]);
    let authentication_header = (51, [&[0, 4][..], &[0; 22]].concat());
    let routing_header = (43, [&[0, 2][..], &[0; 22]].concat());
    packet.extension_headers =
        [new_options_header(0), routing_header, atomic_fragment_header, authentication_header, new_options_header(60)]
            .into_iter()
            .filter(|_| uniform_below(rng, 3) == 0)
            .collect();
}

fn replace_word_and_checksum(frame: &[u8], offset: usize, new_word: u32) -> Vec<u8> {
    let mut changed_frame = frame.to_vec();
    changed_frame[offset..offset + 4].copy_from_slice(&new_word.to_be_bytes());
    let checksum_offset = support::tcp_header_offset(frame) + 16;
    changed_frame[checksum_offset..checksum_offset + 2].fill(0);
    let checksum = !tcp_segment_sum(&changed_frame);
    changed_frame[checksum_offset..checksum_offset + 2].copy_from_slice(&checksum.to_be_bytes());
    changed_frame
}

/// Returns TCP options that end with `timestamp` at a random even or odd offset.
fn options_ending_in_timestamp(rng: &mut Xoshiro256PlusPlus, timestamp: Vec<u8>) -> Vec<u8> {
    let mut tcp_options = vec![];
    while tcp_options.len() < 26 && uniform_below(rng, 4) > 0 {
        match uniform_below(rng, 4) {
            0 => tcp_options.push(1),
            1 => tcp_options.extend([2, 4, 5, 0xb4]),
            2 => tcp_options.extend([4, 2]),
            _ => tcp_options.extend([253, 3, 7]),
        }
    }
    tcp_options.extend(timestamp);
    tcp_options
}

#[test]
fn egress_stamping_equals_the_reference_model() {
    skip_if!(missing_bpf_rights());
    let mut rng = seeded_rng(1, 0);
    let server = TestServerPrograms::new(&mut rng);
    let mut late_run_count = 0;
    for family in (0..3000).map(|round| AddressFamily::BOTH[round % 2]) {
        let client = random_client(family, &mut rng);
        let own_tsval = tsval_clock_ms() - uniform_below(&mut rng, 900);
        let mut packet = TcpPacket::between(vip_of_family(family), client);
        packet.flags = [ACK, SYN | ACK, RST | ACK][uniform_below(&mut rng, 3) as usize];
        let tsecr = rng.next_u32();
        packet.tcp_options = options_ending_in_timestamp(&mut rng, timestamp_option(own_tsval, tsecr));
        add_skippable_headers(&mut packet, &mut rng);
        let frame = packet.to_frame();
        let timestamp_offset = tsval_offset(&frame).unwrap();
        let expected_tsval = server.expected_tsval(&four_tuple_to_vip(client), Cookie::Server(server.id), own_tsval);
        let (tc_action, stamped_frame) = server.run_program(PacketDirection::Egress, &frame);
        assert_eq!(tc_action, TC_ACT_UNSPEC);
        if tsval_clock_ms() - own_tsval > 950 {
            // On a slow machine, the program may have taken the late TSval for that of another clock.
            late_run_count += 1;
            continue;
        }
        assert_eq!(stamped_frame, replace_word_and_checksum(&frame, timestamp_offset, expected_tsval), "{packet:?}");
    }
    assert!(late_run_count < 300, "{late_run_count} of 3000 were run late");
    assert!(server.programs.counter(intf::SERVER_COUNTER_STAMPED) >= 3000 - late_run_count);
}

#[test]
fn tsecr_of_client_packets_is_restored() {
    skip_if!(missing_bpf_rights());
    let mut rng = seeded_rng(2, 0);
    let server = TestServerPrograms::new(&mut rng);
    for family in (0..3000).map(|round| AddressFamily::BOTH[round % 2]) {
        let client = random_client(family, &mut rng);
        let tuple = four_tuple_to_vip(client);
        // A TSecr may be stamped with the former key, be up to a minute old, or be a little ahead of the clock.
        let current_key = if rng.next_u32() & 1 == 0 { CookieKeyIndex::First } else { CookieKeyIndex::Second };
        let keys = FleetCookieKeys { current_key_index: current_key, ..server.keys };
        let original_tsval = tsval_clock_ms().wrapping_sub(uniform_below(&mut rng, 60_000)).wrapping_add(10);
        let tsecr =
            cookie::stamp_tsval(&keys, &server.programs.time_key(), &tuple, Cookie::Server(server.id), original_tsval);
        let mut packet = TcpPacket::between(client, vip_of_family(family));
        let client_tsval = rng.next_u32();
        packet.tcp_options = options_ending_in_timestamp(&mut rng, timestamp_option(client_tsval, tsecr));
        add_skippable_headers(&mut packet, &mut rng);
        let frame = packet.to_frame();
        let tsecr_offset = tsval_offset(&frame).unwrap() + 4;
        let (tc_action, restored_frame) = server.run_program(PacketDirection::Ingress, &frame);
        assert_eq!(tc_action, TC_ACT_UNSPEC);
        assert_eq!(restored_frame, replace_word_and_checksum(&frame, tsecr_offset, original_tsval), "{packet:?}");
    }
    assert_eq!(server.programs.counter(intf::SERVER_COUNTER_RESTORED), 3000);
}

#[test]
fn tsval_zero_is_never_sent() {
    skip_if!(missing_bpf_rights());
    AddressFamily::BOTH.into_iter().for_each(expect_no_zero_tsval);
}

fn expect_no_zero_tsval(family: AddressFamily) {
    let mut rng = seeded_rng(3, 0);
    let mut server = TestServerPrograms::new(&mut rng);
    server.keys.current_key_index = CookieKeyIndex::First;
    server.key_switch_ms = tsval_clock_ms() - 1000;
    server.programs.set_cookie_keys(&server.keys, server.key_switch_ms);
    // Searches for a client for which the stamp with a server's id and a time in this second is 0.
    let (client, own_tsval) = loop {
        let client = random_client(family, &mut rng);
        let tuple = four_tuple_to_vip(client);
        let time_addend = cookie::time_part_addend(&server.programs.time_key(), &tuple);
        let now_ms = tsval_clock_ms();
        let ms_since_zero_tsval = (now_ms as u16).wrapping_sub(time_addend.wrapping_neg());
        if let (Cookie::Server(id), true) = (cookie::decode_cookie(&server.keys, &tuple, 0), ms_since_zero_tsval < 500)
        {
            server.id = id;
            break (client, now_ms - u32::from(ms_since_zero_tsval));
        }
    };
    server.set_dual_stack_services();
    let mut packet = TcpPacket::between(vip_of_family(family), client);
    packet.tcp_options = aligned_timestamp_option(own_tsval, 0);
    let frame = packet.to_frame();
    let (_, stamped_frame) = server.run_program(PacketDirection::Egress, &frame);
    assert_eq!(read_u32(&stamped_frame, tsval_offset(&frame).unwrap()), 1 << 16);
}

#[test]
fn packets_not_to_be_stamped_or_restored_are_unchanged() {
    skip_if!(missing_bpf_rights());
    let mut rng = seeded_rng(4, 0);
    let server = TestServerPrograms::new(&mut rng);
    for family in AddressFamily::BOTH {
        expect_unstamped_egress_packets_unchanged(&server, family);
        expect_unrestored_ingress_packets_unchanged(&server, family);
    }
}

/// Asserts that the program passes `packet` unchanged and increases `expected_counters`.
fn expect_packet_unchanged(
    server: &TestServerPrograms,
    direction: PacketDirection,
    packet: &TcpPacket,
    expected_counters: &[&str],
) {
    let frame = packet.to_frame();
    assert_eq!(
        server.run_and_list_counters(direction, &frame),
        (TC_ACT_UNSPEC, frame, expected_counters.to_vec()),
        "{packet:?}"
    );
}

fn expect_unstamped_egress_packets_unchanged(server: &TestServerPrograms, family: AddressFamily) {
    let (client, vip) = (fixed_client_address(family), vip_of_family(family));
    let build_egress_packet = |change: fn(&mut TcpPacket)| {
        let mut packet = TcpPacket::between(vip, client);
        packet.tcp_options = aligned_timestamp_option(tsval_clock_ms(), 1);
        change(&mut packet);
        packet
    };
    expect_packet_unchanged(server, PacketDirection::Egress, &build_egress_packet(|p| p.source.set_port(81)), &[]);
    let set_other_vip = |p: &mut TcpPacket| match &mut p.ipv6_source_and_destination {
        Some([source, _]) => *source = Ipv6Addr::new(0x2001, 0xdb8, 0, 0, 1, 0, 0xc8, 1),
        None => p.source.set_ip(Ipv4Addr::new(10, 200, 0, 2)),
    };
    expect_packet_unchanged(server, PacketDirection::Egress, &build_egress_packet(set_other_vip), &[]);
    expect_packet_unchanged(
        server,
        PacketDirection::Egress,
        &build_egress_packet(|p| p.tcp_options.clear()),
        &["egress_without_timestamp"],
    );
    // A TSval with a random offset per connection or in microseconds is from another clock and could not be restored.
    expect_packet_unchanged(
        server,
        PacketDirection::Egress,
        &build_egress_packet(|p| p.tcp_options = aligned_timestamp_option(tsval_clock_ms().wrapping_add(5000), 1)),
        &["egress_other_clock"],
    );
}

fn expect_unrestored_ingress_packets_unchanged(server: &TestServerPrograms, family: AddressFamily) {
    let (client, vip) = (fixed_client_address(family), vip_of_family(family));
    let expect_unchanged_ingress = |packet: &TcpPacket, counters: &[&str]| {
        expect_packet_unchanged(server, PacketDirection::Ingress, packet, counters)
    };
    let tuple = four_tuple_to_vip(client);
    let other_id = ServerId::try_from(u64::from(server.id.get() ^ 1)).unwrap();
    let stamped_tsval = |cookie| server.expected_tsval(&tuple, cookie, tsval_clock_ms());
    let build_ingress_packet = |tsecr, flags| {
        let mut packet = TcpPacket::between(client, vip);
        packet.tcp_options = aligned_timestamp_option(1, tsecr);
        packet.flags = flags;
        packet
    };
    let other_cookie_counter_names = ["ingress_other_cookie", "ingress_established"];
    expect_unchanged_ingress(
        &build_ingress_packet(stamped_tsval(Cookie::Server(other_id)), ACK),
        &other_cookie_counter_names,
    );
    expect_unchanged_ingress(
        &build_ingress_packet(stamped_tsval(Cookie::TableIndex(server.id.get())), ACK),
        &other_cookie_counter_names,
    );
    expect_unchanged_ingress(&build_ingress_packet(0, ACK), &["ingress_without_tsecr", "ingress_established"]);
    // Test runs record no receive queue, so the prediction cannot be compared.
    expect_unchanged_ingress(&build_ingress_packet(0, SYN), &["ingress_without_tsecr", "rss_unpredicted"]);
    let mut packet_to_other_host = build_ingress_packet(stamped_tsval(Cookie::Server(server.id)), ACK);
    packet_to_other_host.destination_mac = [2, 0, 0, 0, 0, 1];
    expect_unchanged_ingress(&packet_to_other_host, &[]);
}

#[test]
fn broadcast_packet_without_a_socket_is_dropped() {
    skip_if!(missing_bpf_rights());
    let server = TestServerPrograms::new(&mut seeded_rng(5, 0));
    for family in AddressFamily::BOTH {
        let mut packet = TcpPacket::between(fixed_client_address(family), vip_of_family(family));
        packet.destination_mac = [0xff; 6];
        packet.flags = RST;
        let (tc_action, _, increased_counters) =
            server.run_and_list_counters(PacketDirection::Ingress, &packet.to_frame());
        assert_eq!((tc_action, increased_counters), (TC_ACT_SHOT, vec!["broadcast_ignored"]));
    }
}

#[test]
fn ipv6_packets_with_fragment_or_long_headers_pass_unchanged() {
    skip_if!(missing_bpf_rights());
    let server = TestServerPrograms::new(&mut seeded_rng(7, 0));
    let client = fixed_client_address(AddressFamily::Ipv6);
    let tsecr = server.expected_tsval(&four_tuple_to_vip(client), Cookie::Server(server.id), tsval_clock_ms());
    let first_fragment = (44, vec![0, 0, 0, 1, 1, 2, 3, 4]);
    let later_fragment = (44, vec![0, 0, 0, 8, 1, 2, 3, 4]);
    let long_options = (60, [&[0, 9][..], &[0; 78]].concat());
    for header in [first_fragment, later_fragment, long_options] {
        let mut packet = TcpPacket::between(client, vip_of_family(AddressFamily::Ipv6));
        packet.tcp_options = aligned_timestamp_option(1, tsecr);
        let (_, _, increased_counters) = server.run_and_list_counters(PacketDirection::Ingress, &packet.to_frame());
        assert!(increased_counters.contains(&"restored"), "{increased_counters:?}");
        packet.extension_headers = vec![header];
        let frame = packet.to_frame();
        assert_eq!(
            server.run_and_list_counters(PacketDirection::Ingress, &frame),
            (TC_ACT_UNSPEC, frame, vec![]),
            "{packet:?}"
        );
    }
}

/// Damages `frame` in such a way that the program still parses it as a TCP packet of the service.
fn damage_frame(rng: &mut Xoshiro256PlusPlus, frame: &mut Vec<u8>) {
    let tcp_start = support::tcp_header_offset(frame);
    for _ in 0..=uniform_below(rng, 3) {
        match uniform_below(rng, 3) {
            0 => frame.truncate(14 + uniform_below(rng, frame.len() as u32 - 13) as usize),
            1 if frame.len() > tcp_start + 12 => frame[tcp_start + 12] = rng.next_u32() as u8,
            _ => {
                let damaged_offset = uniform_below(rng, 60) as usize + tcp_start + 12;
                if damaged_offset < frame.len() {
                    frame[damaged_offset] = rng.next_u32() as u8;
                }
            }
        }
    }
}

/// Asserts that `output_frame` differs from `frame` at most in the stamped part of its timestamp and in its checksum.
fn expect_only_timestamp_changed(direction: PacketDirection, frame: &[u8], output_frame: &[u8]) {
    let changed_offset = tsval_offset(frame).unwrap() + if direction == PacketDirection::Egress { 0 } else { 4 };
    let checksum_offset = support::tcp_header_offset(frame) + 16;
    for (index, (before, after)) in frame.iter().zip(output_frame).enumerate() {
        let may_change = (changed_offset..changed_offset + 4).contains(&index)
            || (checksum_offset..checksum_offset + 2).contains(&index);
        assert!(before == after || may_change, "byte {index} of {frame:02x?}");
    }
    assert_eq!(tcp_segment_sum(frame), tcp_segment_sum(output_frame), "the checksum is as right or wrong as before");
}

#[test]
fn malformed_packets_change_only_in_timestamp_and_checksum() {
    skip_if!(missing_bpf_rights());
    let mut rng = seeded_rng(6, 0);
    let server = TestServerPrograms::new(&mut rng);
    let (mut dropped_count, mut rewritten_count, mut passed_count) = (0, 0, 0);
    for round in 0..6000 {
        let direction = if round % 2 == 0 { PacketDirection::Egress } else { PacketDirection::Ingress };
        let family = AddressFamily::BOTH[round / 2 % 2];
        let (client, vip) = (fixed_client_address(family), vip_of_family(family));
        let tsecr = server.expected_tsval(&four_tuple_to_vip(client), Cookie::Server(server.id), tsval_clock_ms());
        let (source, destination) = if direction == PacketDirection::Egress { (vip, client) } else { (client, vip) };
        let mut packet = TcpPacket::between(source, destination);
        packet.tcp_options = options_ending_in_timestamp(&mut rng, timestamp_option(tsval_clock_ms(), tsecr));
        add_skippable_headers(&mut packet, &mut rng);
        let mut frame = packet.to_frame();
        damage_frame(&mut rng, &mut frame);
        let Ok(outcome) = test_run::run_program(server.programs.program_for_direction(direction), &frame, 1) else {
            assert!(frame.len() < 14 + 40, "the kernel refuses to run {frame:02x?}");
            continue;
        };
        match outcome.verdict {
            TC_ACT_SHOT => dropped_count += 1,
            TC_ACT_UNSPEC if outcome.packet == frame => passed_count += 1,
            TC_ACT_UNSPEC => {
                rewritten_count += 1;
                expect_only_timestamp_changed(direction, &frame, &outcome.packet);
            }
            other => panic!("verdict {other} for {frame:02x?}"),
        }
    }
    assert!(
        dropped_count > 100 && rewritten_count > 100 && passed_count > 100,
        "{dropped_count} dropped, {rewritten_count}, {passed_count} passed"
    );
    // A frame without a timestamp may have a previous server in its IP identification, whose MAC address is unknown.
    let drop_counters = [intf::SERVER_COUNTER_DROP_MALFORMED_TCP, intf::SERVER_COUNTER_DROP_CHAIN_UNRESOLVED];
    let drop_counts = drop_counters.map(|reason| server.programs.counter(reason));
    assert!(drop_counts.iter().all(|packets| *packets > 100), "{drop_counts:?}");
    assert_eq!(drop_counts.iter().sum::<u64>(), dropped_count, "every drop has its reason");
}
