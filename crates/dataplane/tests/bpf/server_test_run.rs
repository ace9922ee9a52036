//! Comparison of `bpf/server/server.bpf.c` with `coreward_model::cookie`, packet by packet (`BPF_PROG_TEST_RUN`).

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};

use coreward_dataplane::server::ServerPrograms;
use coreward_dataplane::tc::Direction;
use coreward_dataplane::test_run;
use coreward_intf as intf;
use coreward_model::consistency::ServiceMode;
use coreward_model::cookie::{self, Cookie, CookieKey, FleetKeys, KeyIndex};
use coreward_model::rss::{seeded_rng, uniform_below};
use coreward_model::tuple::Protocol;
use coreward_model::{FourTuple, ServerId, ServiceAddress};
use rand::Rng as _;
use rand_xoshiro::Xoshiro256PlusPlus;

use crate::support::{
    self, ACK, Family, RST, SYN, Tcp, aligned_timestamp, missing_bpf_rights, now_ms, skip_if, tcp_sum, timestamp,
    timestamp_offset, word,
};

/// Return values of tc programs (linux/pkt_cls.h).
const TC_ACT_UNSPEC: i32 = -1;
const TC_ACT_SHOT: i32 = 2;

fn vip(family: Family) -> SocketAddr {
    let address = match family {
        Family::Ipv4 => IpAddr::from(Ipv4Addr::new(10, 200, 0, 1)),
        Family::Ipv6 => Ipv6Addr::new(0x2001, 0xdb8, 0, 0, 0, 0, 0xc8, 1).into(),
    };
    (address, 80).into()
}

fn some_client(family: Family) -> SocketAddr {
    let address = match family {
        Family::Ipv4 => IpAddr::from(Ipv4Addr::new(10, 1, 0, 7)),
        Family::Ipv6 => Ipv6Addr::new(0x2001, 0xdb8, 7, 0, 0x1234, 0, 0, 7).into(),
    };
    (address, 40312).into()
}

/// Returns the 4-tuple from a client to the service of the client's address family.
fn tuple_of(client: SocketAddr) -> FourTuple {
    FourTuple::new(client, vip(family_of(client))).unwrap()
}

fn family_of(address: SocketAddr) -> Family {
    if address.is_ipv4() { Family::Ipv4 } else { Family::Ipv6 }
}

struct Server {
    programs: ServerPrograms,
    keys: FleetKeys,
    /// TSval from which packets are stamped with the current key.
    switch_ms: u32,
    id: ServerId,
}

impl Server {
    fn new(rng: &mut Xoshiro256PlusPlus) -> Self {
        let mut key = || CookieKey { k0: rng.next_u64(), k1: rng.next_u64() };
        let keys = [key(), key()];
        let current = if rng.next_u32() & 1 == 0 { KeyIndex::First } else { KeyIndex::Second };
        let mut server = Self {
            programs: ServerPrograms::load_only(false).unwrap(),
            keys: FleetKeys { keys, current },
            switch_ms: now_ms() - 500,
            id: ServerId::try_from(u64::from(rng.next_u32() & intf::COOKIE_ID_MASK)).unwrap(),
        };
        server.programs.set_keys(&server.keys, server.switch_ms);
        server.set_services();
        server
    }

    /// Configures one IPv4 and one IPv6 service.
    fn set_services(&mut self) {
        let service = |family| ServiceAddress { socket: vip(family), protocol: Protocol::Tcp };
        let services = Family::BOTH.map(|family| (service(family), self.id, ServiceMode::default()));
        self.programs.set_services(&services).unwrap();
    }

    /// Returns the TSval that the program must send if the server's own TSval is `milliseconds`.
    fn stamp(&self, tuple: &FourTuple, cookie: Cookie, milliseconds: u32) -> u32 {
        let keys = self.keys.at_tsval(milliseconds, self.switch_ms);
        cookie::stamp_tsval(&keys, &self.programs.time_key(), tuple, cookie, milliseconds)
    }

    fn run(&self, direction: Direction, frame: &[u8]) -> (i32, Vec<u8>) {
        let outcome = test_run::run(self.programs.program(direction), frame, 1).unwrap();
        (outcome.verdict, outcome.packet)
    }

    /// Runs a program on `frame`. Returns the verdict, the packet, and the names of the counters that have increased.
    fn counted(&self, direction: Direction, frame: &[u8]) -> (i32, Vec<u8>, Vec<&'static str>) {
        let before = self.programs.counters();
        let (verdict, packet) = self.run(direction, frame);
        let after = self.programs.counters();
        let mut grown = vec![];
        for ((after, before), name) in after.into_iter().zip(before).zip(intf::SERVER_COUNTER_NAMES) {
            grown.extend(std::iter::repeat_n(name, (after - before) as usize));
        }
        (verdict, packet, grown)
    }
}

fn client(family: Family, rng: &mut Xoshiro256PlusPlus) -> SocketAddr {
    let address = match family {
        Family::Ipv4 => IpAddr::from(Ipv4Addr::from(rng.next_u32())),
        Family::Ipv6 => Ipv6Addr::from(u128::from(rng.next_u64()) << 64 | u128::from(rng.next_u64())).into(),
    };
    (address, rng.next_u32() as u16).into()
}

/// Adds a random number of IP options, or of extension headers, that the programs skip.
fn add_ip_options(packet: &mut Tcp, rng: &mut Xoshiro256PlusPlus) {
    packet.ip_options = vec![1; uniform_below(rng, 41) as usize];
    let options = |number| (number, vec![0, 0, 1, 4, 0, 0, 0, 0]);
    let atomic_fragment = (44, vec![0, 0, 0, 0, 1, 2, 3, 4]);
    let authentication = (51, [&[0, 4][..], &[0; 22]].concat());
    let routing = (43, [&[0, 2][..], &[0; 22]].concat());
    packet.extension_headers = [options(0), routing, atomic_fragment, authentication, options(60)]
        .into_iter()
        .filter(|_| uniform_below(rng, 3) == 0)
        .collect();
}

/// Returns the frame with the word at `offset` replaced by `new`, and with a correct TCP checksum.
fn with_word(frame: &[u8], offset: usize, new: u32) -> Vec<u8> {
    let mut expected = frame.to_vec();
    expected[offset..offset + 4].copy_from_slice(&new.to_be_bytes());
    let checksum = support::tcp_offset(frame) + 16;
    expected[checksum..checksum + 2].fill(0);
    let sum = !tcp_sum(&expected);
    expected[checksum..checksum + 2].copy_from_slice(&sum.to_be_bytes());
    expected
}

/// Returns TCP options of which `timestamp` is the last, at a random even or odd offset.
fn options(rng: &mut Xoshiro256PlusPlus, timestamp: Vec<u8>) -> Vec<u8> {
    let mut options = vec![];
    while options.len() < 26 && uniform_below(rng, 4) > 0 {
        match uniform_below(rng, 4) {
            0 => options.push(1),
            1 => options.extend([2, 4, 5, 0xb4]),
            2 => options.extend([4, 2]),
            _ => options.extend([253, 3, 7]),
        }
    }
    options.extend(timestamp);
    options
}

#[test]
fn egress_stamping_equals_the_reference_model() {
    skip_if!(missing_bpf_rights());
    let mut rng = seeded_rng(1, 0);
    let server = Server::new(&mut rng);
    let mut late = 0;
    for family in (0..3000).map(|round| Family::BOTH[round % 2]) {
        let client = client(family, &mut rng);
        let milliseconds = now_ms() - uniform_below(&mut rng, 900);
        let mut packet = Tcp::between(vip(family), client);
        packet.flags = [ACK, SYN | ACK, RST | ACK][uniform_below(&mut rng, 3) as usize];
        let tsecr = rng.next_u32();
        packet.options = options(&mut rng, timestamp(milliseconds, tsecr));
        add_ip_options(&mut packet, &mut rng);
        let frame = packet.frame();
        let at = timestamp_offset(&frame).unwrap();
        let expected = server.stamp(&tuple_of(client), Cookie::Server(server.id), milliseconds);
        let (verdict, stamped) = server.run(Direction::Egress, &frame);
        assert_eq!(verdict, TC_ACT_UNSPEC);
        if now_ms() - milliseconds > 950 {
            // On a slow machine the program may have taken the late TSval for one of another clock.
            late += 1;
            continue;
        }
        assert_eq!(stamped, with_word(&frame, at, expected), "{packet:?}");
    }
    assert!(late < 300, "{late} of 3000 were run late");
    assert!(server.programs.counter(intf::SERVER_COUNTER_STAMPED) >= 3000 - late);
}

#[test]
fn tsecr_is_restored() {
    skip_if!(missing_bpf_rights());
    let mut rng = seeded_rng(2, 0);
    let server = Server::new(&mut rng);
    for family in (0..3000).map(|round| Family::BOTH[round % 2]) {
        let client = client(family, &mut rng);
        let tuple = tuple_of(client);
        // A TSecr may be stamped with the former key, up to a minute old, or a little ahead of the clock.
        let current = if rng.next_u32() & 1 == 0 { KeyIndex::First } else { KeyIndex::Second };
        let keys = FleetKeys { current, ..server.keys };
        let original = now_ms().wrapping_sub(uniform_below(&mut rng, 60_000)).wrapping_add(10);
        let tsecr =
            cookie::stamp_tsval(&keys, &server.programs.time_key(), &tuple, Cookie::Server(server.id), original);
        let mut packet = Tcp::between(client, vip(family));
        let value = rng.next_u32();
        packet.options = options(&mut rng, timestamp(value, tsecr));
        add_ip_options(&mut packet, &mut rng);
        let frame = packet.frame();
        let at = timestamp_offset(&frame).unwrap() + 4;
        let (verdict, restored) = server.run(Direction::Ingress, &frame);
        assert_eq!(verdict, TC_ACT_UNSPEC);
        assert_eq!(restored, with_word(&frame, at, original), "{packet:?}");
    }
    assert_eq!(server.programs.counter(intf::SERVER_COUNTER_RESTORED), 3000);
}

#[test]
fn tsval_zero_is_never_sent() {
    skip_if!(missing_bpf_rights());
    Family::BOTH.into_iter().for_each(expect_no_zero);
}

fn expect_no_zero(family: Family) {
    let mut rng = seeded_rng(3, 0);
    let mut server = Server::new(&mut rng);
    server.keys.current = KeyIndex::First;
    server.switch_ms = now_ms() - 1000;
    server.programs.set_keys(&server.keys, server.switch_ms);
    // Searches a client for which the stamp of a server's id and a time of this second is 0.
    let (client, milliseconds) = loop {
        let client = client(family, &mut rng);
        let tuple = tuple_of(client);
        let time_mask = cookie::time_addend(&server.programs.time_key(), &tuple);
        let now = now_ms();
        let behind = (now as u16).wrapping_sub(time_mask.wrapping_neg());
        if let (Cookie::Server(id), true) = (cookie::decode_cookie(&server.keys, &tuple, 0), behind < 500) {
            server.id = id;
            break (client, now - u32::from(behind));
        }
    };
    server.set_services();
    let mut packet = Tcp::between(vip(family), client);
    packet.options = aligned_timestamp(milliseconds, 0);
    let frame = packet.frame();
    let (_, stamped) = server.run(Direction::Egress, &frame);
    assert_eq!(word(&stamped, timestamp_offset(&frame).unwrap()), 1 << 16);
}

#[test]
fn foreign_packet_is_unchanged() {
    skip_if!(missing_bpf_rights());
    let mut rng = seeded_rng(4, 0);
    let server = Server::new(&mut rng);
    for family in Family::BOTH {
        expect_foreign_packets_unchanged(&server, family);
    }
}

fn expect_foreign_packets_unchanged(server: &Server, family: Family) {
    let (client, vip) = (some_client(family), vip(family));
    let passes = |direction, packet: &Tcp, counted: &[&str]| {
        let frame = packet.frame();
        assert_eq!(server.counted(direction, &frame), (TC_ACT_UNSPEC, frame, counted.to_vec()), "{packet:?}");
    };
    let egress = |change: fn(&mut Tcp)| {
        let mut packet = Tcp::between(vip, client);
        packet.options = aligned_timestamp(now_ms(), 1);
        change(&mut packet);
        packet
    };
    passes(Direction::Egress, &egress(|p| p.source.set_port(81)), &[]);
    let other_vip = |p: &mut Tcp| match &mut p.ipv6 {
        Some([source, _]) => *source = Ipv6Addr::new(0x2001, 0xdb8, 0, 0, 1, 0, 0xc8, 1),
        None => p.source.set_ip(Ipv4Addr::new(10, 200, 0, 2)),
    };
    passes(Direction::Egress, &egress(other_vip), &[]);
    passes(Direction::Egress, &egress(|p| p.options.clear()), &["egress_without_timestamp"]);
    // A TSval with a random offset per connection, or in microseconds, is of another clock, and could not be restored.
    passes(
        Direction::Egress,
        &egress(|p| p.options = aligned_timestamp(now_ms().wrapping_add(5000), 1)),
        &["egress_other_clock"],
    );

    let tuple = tuple_of(client);
    let other_id = ServerId::try_from(u64::from(server.id.get() ^ 1)).unwrap();
    let stamp = |cookie| server.stamp(&tuple, cookie, now_ms());
    let ingress = |tsecr, flags| {
        let mut packet = Tcp::between(client, vip);
        packet.options = aligned_timestamp(1, tsecr);
        packet.flags = flags;
        packet
    };
    let other_cookie = ["ingress_other_cookie", "ingress_established"];
    passes(Direction::Ingress, &ingress(stamp(Cookie::Server(other_id)), ACK), &other_cookie);
    passes(Direction::Ingress, &ingress(stamp(Cookie::TableIndex(server.id.get())), ACK), &other_cookie);
    passes(Direction::Ingress, &ingress(0, ACK), &["ingress_without_tsecr", "ingress_established"]);
    // Test runs record no receive queue, so the prediction cannot be compared.
    passes(Direction::Ingress, &ingress(0, SYN), &["ingress_without_tsecr", "rss_unpredicted"]);
    let mut other_host = ingress(stamp(Cookie::Server(server.id)), ACK);
    other_host.destination_mac = [2, 0, 0, 0, 0, 1];
    passes(Direction::Ingress, &other_host, &[]);
}

#[test]
fn broadcast_without_a_socket_is_dropped() {
    skip_if!(missing_bpf_rights());
    let server = Server::new(&mut seeded_rng(5, 0));
    for family in Family::BOTH {
        let mut packet = Tcp::between(some_client(family), vip(family));
        packet.destination_mac = [0xff; 6];
        packet.flags = RST;
        let (verdict, _, counted) = server.counted(Direction::Ingress, &packet.frame());
        assert_eq!((verdict, counted), (TC_ACT_SHOT, vec!["broadcast_ignored"]));
    }
}

#[test]
fn ipv6_fragment_and_long_extension_headers_pass_unchanged() {
    skip_if!(missing_bpf_rights());
    let server = Server::new(&mut seeded_rng(7, 0));
    let client = some_client(Family::Ipv6);
    let tsecr = server.stamp(&tuple_of(client), Cookie::Server(server.id), now_ms());
    let first_fragment = (44, vec![0, 0, 0, 1, 1, 2, 3, 4]);
    let later_fragment = (44, vec![0, 0, 0, 8, 1, 2, 3, 4]);
    let long_options = (60, [&[0, 9][..], &[0; 78]].concat());
    for header in [first_fragment, later_fragment, long_options] {
        let mut packet = Tcp::between(client, vip(Family::Ipv6));
        packet.options = aligned_timestamp(1, tsecr);
        let (_, _, counted) = server.counted(Direction::Ingress, &packet.frame());
        assert!(counted.contains(&"restored"), "{counted:?}");
        packet.extension_headers = vec![header];
        let frame = packet.frame();
        assert_eq!(server.counted(Direction::Ingress, &frame), (TC_ACT_UNSPEC, frame, vec![]), "{packet:?}");
    }
}

/// Damages `frame` in such a way that the program still parses it as a TCP packet of the service.
fn damage(rng: &mut Xoshiro256PlusPlus, frame: &mut Vec<u8>) {
    let tcp = support::tcp_offset(frame);
    for _ in 0..=uniform_below(rng, 3) {
        match uniform_below(rng, 3) {
            0 => frame.truncate(14 + uniform_below(rng, frame.len() as u32 - 13) as usize),
            1 if frame.len() > tcp + 12 => frame[tcp + 12] = rng.next_u32() as u8,
            _ => {
                let at = uniform_below(rng, 60) as usize + tcp + 12;
                if at < frame.len() {
                    frame[at] = rng.next_u32() as u8;
                }
            }
        }
    }
}

#[test]
fn malformed_packets_pass_unchanged_or_are_dropped() {
    skip_if!(missing_bpf_rights());
    let mut rng = seeded_rng(6, 0);
    let server = Server::new(&mut rng);
    let (mut dropped, mut rewritten, mut passed) = (0, 0, 0);
    for round in 0..6000 {
        let direction = if round % 2 == 0 { Direction::Egress } else { Direction::Ingress };
        let family = Family::BOTH[round / 2 % 2];
        let (client, vip) = (some_client(family), vip(family));
        let tsecr = server.stamp(&tuple_of(client), Cookie::Server(server.id), now_ms());
        let mut packet = match direction {
            Direction::Egress => Tcp::between(vip, client),
            Direction::Ingress => Tcp::between(client, vip),
        };
        packet.options = options(&mut rng, timestamp(now_ms(), tsecr));
        add_ip_options(&mut packet, &mut rng);
        let mut frame = packet.frame();
        damage(&mut rng, &mut frame);
        let Ok(outcome) = test_run::run(server.programs.program(direction), &frame, 1) else {
            assert!(frame.len() < 14 + 40, "the kernel refuses to run {frame:02x?}");
            continue;
        };
        match outcome.verdict {
            TC_ACT_SHOT => dropped += 1,
            TC_ACT_UNSPEC if outcome.packet == frame => passed += 1,
            TC_ACT_UNSPEC => {
                // The program has found a timestamp, and may have changed only the timestamp and the checksum.
                rewritten += 1;
                let at = timestamp_offset(&frame).unwrap() + if direction == Direction::Egress { 0 } else { 4 };
                let checksum = support::tcp_offset(&frame) + 16;
                for (index, (before, after)) in frame.iter().zip(&outcome.packet).enumerate() {
                    let may_change = (at..at + 4).contains(&index) || (checksum..checksum + 2).contains(&index);
                    assert!(before == after || may_change, "byte {index} of {frame:02x?}");
                }
                assert_eq!(tcp_sum(&frame), tcp_sum(&outcome.packet), "the checksum is as right or wrong as before");
            }
            other => panic!("verdict {other} for {frame:02x?}"),
        }
    }
    assert!(dropped > 100 && rewritten > 100 && passed > 100, "{dropped} dropped, {rewritten}, {passed} passed");
    // A frame without timestamp may have a previous server in its IP identification, whose MAC address is unknown.
    let reasons = [intf::SERVER_COUNTER_DROP_MALFORMED_TCP, intf::SERVER_COUNTER_DROP_CHAIN_UNRESOLVED];
    let counted = reasons.map(|reason| server.programs.counter(reason));
    assert!(counted.iter().all(|packets| *packets > 100), "{counted:?}");
    assert_eq!(counted.iter().sum::<u64>(), dropped, "every drop has its reason");
}
