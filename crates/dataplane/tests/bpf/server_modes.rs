//! Tests of `bpf/server/server.bpf.c` beyond stateless stamping: table indexes, daisy chaining, broadcasts, ICMP
//! errors, stalls.

use std::io::{Read as _, Write as _};
use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr, TcpListener};
use std::time::{Duration, Instant};

use coreward_dataplane::mac::MacAddress;
use coreward_dataplane::sockets::counts::connection_counts;
use coreward_dataplane::sockets::have_sockets;
use coreward_dataplane::tc::Direction;
use coreward_dataplane::test_run;
use coreward_intf as intf;
use coreward_model::consistency::{Consistency, ServiceMode, Timestamps};
use coreward_model::cookie::{self, Cookie};
use coreward_model::forwarding::Forwarding;
use coreward_model::{FourTuple, ServerId};

use crate::support::hand_client::{RawTcpClient, set_broadcast_mac, set_previous_server, syn_tsecr};
use crate::support::network::VIP;
use crate::support::server_env::{PORT, TIMEOUT, TestEnv, client, flags, id, keys, vip};
use crate::support::{
    self, ACK, Family, RST, SYN, Tcp, aligned_timestamp, is_ipv6, missing_bpf_rights, now_ms, ones_complement_sum,
    skip_if, timestamp_offset, word,
};

const INDEX: u16 = 0x2abc;
const STATEFUL: ServiceMode = mode(Consistency::Stateful, Timestamps::Server);
const BEAMER: ServiceMode = mode(Consistency::Beamer, Timestamps::Server);

const fn mode(consistency: Consistency, timestamps: Timestamps) -> ServiceMode {
    ServiceMode { consistency, timestamps, migration: None, forwarding: Forwarding::L2 }
}

fn cookies_of(client: &RawTcpClient<'_>, frames: &[Vec<u8>]) -> Vec<Cookie> {
    let address = client.address();
    let family = if address.is_ipv4() { Family::Ipv4 } else { Family::Ipv6 };
    let tuple = FourTuple::new(address, vip(family)).unwrap();
    let value = |frame: &Vec<u8>| word(frame, timestamp_offset(frame).expect("a timestamp"));
    frames.iter().map(|frame| cookie::decode_cookie(&keys(), &tuple, value(frame))).collect()
}

fn cookie_of(client: &RawTcpClient<'_>, frame: &[u8]) -> Cookie {
    cookies_of(client, &[frame.to_vec()])[0]
}

fn unchanged(_: &mut Vec<u8>) {}

#[test]
fn index_in_the_syn_is_hidden_from_the_kernel() {
    skip_if!(missing_bpf_rights());
    Family::BOTH.into_iter().for_each(expect_index_stamped);
}

fn expect_index_stamped(family: Family) {
    for syn_cookies in ["1", "2"] {
        let env = TestEnv::of(family, STATEFUL);
        env.pair.server.set_sysctl("ipv4/tcp_syncookies", syn_cookies);
        let listener = env.listen();
        let mut client = RawTcpClient::new(&env, 4001, true);
        let answer = client.open(syn_tsecr(INDEX));
        assert_eq!(env.counter(intf::SERVER_COUNTER_INDEX_LEARNT), 1);
        assert_eq!(cookie_of(&client, &answer), Cookie::TableIndex(INDEX));
        let returned = word(&answer, timestamp_offset(&answer).unwrap() + 4);
        assert_eq!(returned, 1, "the client's own TSval");
        client.acknowledge();
        let (mut server, _) = listener.accept().unwrap();
        server.set_read_timeout(Some(TIMEOUT)).unwrap();
        for _ in 0..3 {
            let answers = client.exchange(b"request", unchanged);
            assert!(!answers.is_empty());
            assert!(cookies_of(&client, &answers).iter().all(|cookie| *cookie == Cookie::TableIndex(INDEX)));
            server.read_exact(&mut [0; 7]).unwrap();
        }
        assert_eq!(env.counter(intf::SERVER_COUNTER_INDEX_UNKNOWN), 0);
        assert_eq!(env.counter(intf::SERVER_COUNTER_INGRESS_OTHER_COOKIE), 0);
        env.assert_no_errors();
    }
}

#[test]
fn server_id_is_stamped_without_an_index() {
    skip_if!(missing_bpf_rights());
    Family::BOTH.into_iter().for_each(expect_id_without_index);
}

fn expect_id_without_index(family: Family) {
    let env = TestEnv::of(family, STATEFUL);
    let listener = env.listen();
    // A former connection of the same 4-tuple had an index, which the server forgets at the new SYN.
    let mut first = RawTcpClient::new(&env, 4002, true);
    first.open(syn_tsecr(INDEX));
    let reset = first.frame(RST | ACK, first.server_tsval, b"");
    first.send(&reset);
    first.collect_all();
    let mut client = RawTcpClient::new(&env, 4002, true);
    let answer = client.open(0);
    assert_eq!(cookie_of(&client, &answer), Cookie::Server(id()));
    client.acknowledge();
    let _server = listener.accept().unwrap();
    let answers = client.exchange(b"request", unchanged);
    assert!(cookies_of(&client, &answers).iter().all(|cookie| *cookie == Cookie::Server(id())), "{answers:02x?}");
    assert!(env.counter(intf::SERVER_COUNTER_INDEX_UNKNOWN) >= 2);
    // A cookie with an index that came without a SYN is ignored, and the kernels count no error.
    env.assert_no_errors();
}

#[test]
fn connections_continue_with_the_server_id_after_table_loss() {
    skip_if!(missing_bpf_rights());
    Family::BOTH.into_iter().for_each(expect_id_after_lost_table);
}

fn expect_id_after_lost_table(family: Family) {
    let env = TestEnv::of(family, STATEFUL);
    let listener = env.listen();
    let mut client = RawTcpClient::new(&env, 4003, true);
    client.open(syn_tsecr(INDEX));
    client.acknowledge();
    let (mut server, _) = listener.accept().unwrap();
    let with_index = client.exchange(b"request", unchanged);
    assert_eq!(cookie_of(&client, &with_index[0]), Cookie::TableIndex(INDEX));
    // After one broadcast round trip the server stamps its id. TSecr values with the index are still restored.
    let after = client.exchange(b"request", |frame| set_broadcast_mac(frame));
    assert_eq!(env.counter(intf::SERVER_COUNTER_BROADCAST_ACCEPTED), 1);
    assert_eq!(env.counter(intf::SERVER_COUNTER_INDEX_GIVEN_UP), 1);
    assert_eq!(cookie_of(&client, after.last().unwrap()), Cookie::Server(id()));
    let step = client.server_tsval.wrapping_sub(word(&with_index[0], timestamp_offset(&with_index[0]).unwrap()));
    assert!(step < 1 << 31, "TSval does not step back");
    let later = client.exchange(b"request", unchanged);
    assert_eq!(cookie_of(&client, &later[0]), Cookie::Server(id()));
    server.set_read_timeout(Some(TIMEOUT)).unwrap();
    server.read_exact(&mut [0; 21]).unwrap();
    assert_eq!(env.counter(intf::SERVER_COUNTER_INGRESS_OTHER_COOKIE), 0);
    env.assert_no_errors();
}

#[test]
fn syn_flood_evicts_indexes_and_breaks_no_connection() {
    skip_if!(missing_bpf_rights());
    let env = TestEnv::with(STATEFUL);
    let listener = env.listen();
    let (mut established, mut half_open) = (RawTcpClient::new(&env, 4004, true), RawTcpClient::new(&env, 4005, true));
    established.open(syn_tsecr(INDEX));
    established.acknowledge();
    let _first = listener.accept().unwrap();
    assert!(!established.exchange(b"request", unchanged).is_empty());
    let answer = half_open.open(syn_tsecr(INDEX + 1));
    assert_eq!(cookie_of(&half_open, &answer), Cookie::TableIndex(INDEX + 1));

    // SYNs with an index come from twice as many clients as the map has entries, and each gets a SYN-ACK.
    for n in 0..2 * intf::MAX_HALF_OPEN_INDEXES {
        let mut syn = Tcp::new((Ipv4Addr::from(0x0b00_0000 + n), 5), (VIP, PORT));
        syn.flags = SYN;
        syn.payload.clear();
        syn.options = aligned_timestamp(1, syn_tsecr(7));
        test_run::run(env.programs.program(Direction::Ingress), &syn.frame(), 1).unwrap();
        let mut answer = Tcp::new((VIP, PORT), (*syn.source.ip(), 5));
        answer.flags = SYN | ACK;
        answer.payload.clear();
        answer.options = aligned_timestamp(now_ms(), 1);
        test_run::run(env.programs.program(Direction::Egress), &answer.frame(), 1).unwrap();
    }
    assert_eq!(env.counter(intf::SERVER_COUNTER_INDEX_LEARNT), u64::from(2 * intf::MAX_HALF_OPEN_INDEXES) + 2);
    // The kernel's LRU map selects the entries that stay; a SYN without index removes this client's entry.
    let mut forgets = half_open.frame(SYN, 0, b"");
    // Packets of test runs arrive at the loopback device, whose MAC address is 0.
    forgets[..6].fill(0);
    test_run::run(env.programs.program(Direction::Ingress), &forgets, 1).unwrap();
    // This reads SYN-ACKs that the server has retransmitted.
    half_open.receive();
    half_open.acknowledge();
    let _second = listener.accept().unwrap();
    let answers = half_open.exchange(b"request", unchanged);
    assert_eq!(cookie_of(&half_open, &answers[0]), Cookie::Server(id()));
    let answers = established.exchange(b"request", unchanged);
    assert_eq!(cookie_of(&established, &answers[0]), Cookie::TableIndex(INDEX));
    env.assert_no_errors();
}

const PREVIOUS_SERVER_ID: u16 = 0x0abc;
const PREVIOUS_SERVER_MAC: MacAddress = MacAddress([2, 0, 0, 0, 0xab, 0xcd]);

fn previous_server() -> ServerId {
    ServerId::try_from(u64::from(PREVIOUS_SERVER_ID)).unwrap()
}

/// Sends `frame` with `identification` as the id of its previous server. Returns whether the server forwarded it there.
fn send_and_check_forwarded(client: &mut RawTcpClient<'_>, frame: &[u8], identification: u16) -> bool {
    let mut frame = frame.to_vec();
    set_previous_server(&mut frame, identification);
    client.collect_all();
    client.send(&frame);
    let overheard = client.collect_all();
    let Some(found) = overheard.iter().find(|seen| seen[..6] == PREVIOUS_SERVER_MAC.0) else { return false };
    let mut expected = frame.clone();
    expected[6..12].copy_from_slice(&frame[..6]);
    expected[..6].copy_from_slice(&PREVIOUS_SERVER_MAC.0);
    set_previous_server(&mut expected, intf::NO_SERVER as u16);
    assert_eq!(found[..expected.len()], expected[..]);
    assert!(is_ipv6(&frame) || ones_complement_sum(&found[14..34]) == 0xffff);
    true
}

/// Sends `frame` with `identification` as the id of its previous server. Returns whether the client got an RST.
fn send_and_check_reply(client: &mut RawTcpClient<'_>, frame: &[u8], identification: u16) -> bool {
    let mut frame = frame.to_vec();
    set_previous_server(&mut frame, identification);
    client.collect_all();
    client.send(&frame);
    let (sources, destinations) = if is_ipv6(&frame) { (22..38, 38..54) } else { (26..30, 30..34) };
    let is_answer = |seen: &Vec<u8>| {
        seen[sources.clone()] == frame[destinations.clone()] && seen[destinations.clone()] == frame[sources.clone()]
    };
    client.collect_all().iter().any(is_answer)
}

#[test]
fn packet_without_a_socket_is_forwarded_to_the_previous_server() {
    skip_if!(missing_bpf_rights());
    Family::BOTH.into_iter().for_each(expect_forwarded_to_previous);
}

fn expect_forwarded_to_previous(family: Family) {
    let mut env = TestEnv::of(family, ServiceMode::default());
    env.programs.set_server_mac(previous_server(), Some(PREVIOUS_SERVER_MAC));
    let env = env;
    let listener = env.listen();
    let mut client = RawTcpClient::new(&env, 4006, false);
    let (stray, syn) = (client.frame(ACK, 0, b"stray"), client.frame(SYN, 0, b""));
    assert!(send_and_check_forwarded(&mut client, &stray, PREVIOUS_SERVER_ID));
    assert_eq!(env.counter(intf::SERVER_COUNTER_CHAINED), 1);
    for identification in [intf::NO_SERVER as u16, id().get(), 0x7000] {
        assert!(!send_and_check_forwarded(&mut client, &stray, identification), "{identification:#x}");
    }
    // A packet that may belong to the previous server's connection is dropped without an RST while that server's MAC
    // address is unknown: the client retransmits the packet.
    assert_eq!(env.counter(intf::SERVER_COUNTER_DROP_CHAIN_UNRESOLVED), 0);
    assert!(!send_and_check_reply(&mut client, &stray, PREVIOUS_SERVER_ID + 1));
    assert_eq!(env.counter(intf::SERVER_COUNTER_DROP_CHAIN_UNRESOLVED), 1);
    assert!(send_and_check_reply(&mut client, &stray, intf::NO_SERVER as u16), "an unknown connection is refused");
    assert!(!send_and_check_forwarded(&mut client, &syn, PREVIOUS_SERVER_ID), "a connection begins here");
    // With timestamps the cookie names this server.
    let mut with_timestamps = RawTcpClient::new(&env, 4007, true);
    let frame = with_timestamps.frame(ACK, 5, b"stray");
    assert!(!send_and_check_forwarded(&mut with_timestamps, &frame, PREVIOUS_SERVER_ID));

    // Packets are not forwarded from the end of the handshake on, with or without a SYN cookie.
    for (port, syn_cookies) in [(4010, "1"), (4011, "2")] {
        env.pair.server.set_sysctl("ipv4/tcp_syncookies", syn_cookies);
        let mut client = RawTcpClient::new(&env, port, false);
        client.open(0);
        let ack = client.frame(ACK, 0, b"");
        assert!(!send_and_check_forwarded(&mut client, &ack, PREVIOUS_SERVER_ID), "SYN cookies {syn_cookies}");
        let (mut server, _) = listener.accept().unwrap();
        server.set_read_timeout(Some(TIMEOUT)).unwrap();
        client.exchange(b"request", |frame| set_previous_server(frame, PREVIOUS_SERVER_ID));
        server.read_exact(&mut [0; 7]).unwrap();
    }
    assert_eq!(env.counter(intf::SERVER_COUNTER_CHAINED), 1);
}

#[test]
fn packets_with_timestamps_are_forwarded_if_all_name_the_previous_server() {
    skip_if!(missing_bpf_rights());
    Family::BOTH.into_iter().for_each(expect_chain_of_all_packets);
}

fn expect_chain_of_all_packets(family: Family) {
    let off = mode(Consistency::Stateless, Timestamps::Off);
    for (mode, chained) in
        [(BEAMER, true), (off, true), (ServiceMode { consistency: Consistency::HashTable, ..off }, false)]
    {
        let mut env = TestEnv::of(family, mode);
        env.programs.set_server_mac(previous_server(), Some(PREVIOUS_SERVER_MAC));
        let env = env;
        let listener = env.listen();
        let mut client = RawTcpClient::new(&env, 4008, true);
        let stray = client.frame(ACK, 5, b"stray");
        assert_eq!(send_and_check_forwarded(&mut client, &stray, PREVIOUS_SERVER_ID), chained, "{mode:?}");
        // Packets are neither stamped nor restored.
        let (mut at_client, mut at_server) = env.connection(&listener);
        support::server_env::send_and_receive(&mut at_client, &mut at_server, b"request");
        support::server_env::send_and_receive(&mut at_server, &mut at_client, b"answer");
        for counter in [intf::SERVER_COUNTER_STAMPED, intf::SERVER_COUNTER_RESTORED] {
            assert_eq!(env.counter(counter), 0, "{mode:?}");
        }
        env.assert_no_errors();
    }
}

/// Returns a broadcast ICMP error, "fragmentation needed" or "packet too big", about a packet between these addresses.
fn icmp_error(client: &RawTcpClient<'_>, quoted_source: SocketAddr, quoted_destination: SocketAddr) -> Vec<u8> {
    let quoted = Tcp::between(quoted_source, quoted_destination).frame();
    let mut frame = client.frame(ACK, 0, b"");
    if is_ipv6(&frame) {
        icmpv6_error(&mut frame, &quoted[14..]);
    } else {
        frame.truncate(34);
        frame[16..18].copy_from_slice(&56u16.to_be_bytes());
        frame[23] = 1;
        frame.extend([3, 4, 0, 0, 0, 0, 2, 0]);
        frame.extend(&quoted[14..42]);
        let checksum = !ones_complement_sum(&frame[34..]);
        frame[36..38].copy_from_slice(&checksum.to_be_bytes());
    }
    set_previous_server(&mut frame, 1);
    set_broadcast_mac(&mut frame);
    frame
}

/// Replaces the frame's TCP segment by a "packet too big" (RFC 4443, Sect. 3.2) with an MTU of 1,280 bytes.
fn icmpv6_error(frame: &mut Vec<u8>, quoted: &[u8]) {
    frame.truncate(14 + 40);
    frame.extend([2, 0, 0, 0, 0, 0, 5, 0]);
    frame.extend(quoted);
    let length = (frame.len() - 54) as u16;
    frame[18..20].copy_from_slice(&length.to_be_bytes());
    frame[20] = 58;
    let pseudo_header = [&frame[22..54], &length.to_be_bytes(), &[0, 58]].concat();
    let checksum = !ones_complement_sum(&[&pseudo_header[..], &frame[54..]].concat());
    frame[56..58].copy_from_slice(&checksum.to_be_bytes());
}

#[test]
fn broadcast_icmp_error_is_accepted_by_the_connections_server() {
    skip_if!(missing_bpf_rights());
    Family::BOTH.into_iter().for_each(expect_broadcast_errors_at_connection);
}

fn expect_broadcast_errors_at_connection(family: Family) {
    let env = TestEnv::of(family, ServiceMode::default());
    let listener = env.listen();
    let (stream, _server) = env.connection(&listener);
    let port = stream.local_addr().unwrap().port();
    let mut client = RawTcpClient::new(&env, 4009, true);
    let counted = || {
        let counter = |counter| env.counter(counter);
        (counter(intf::SERVER_COUNTER_ICMP_BROADCAST_ACCEPTED), counter(intf::SERVER_COUNTER_ICMP_BROADCAST_IGNORED))
    };
    let cases = [
        (vip(family), self::client(family, port), (1, 0)),
        (vip(family), self::client(family, port ^ 1), (1, 1)),
        // A quote from another port is of no service, and passes to the kernel.
        ((vip(family).ip(), PORT + 1).into(), self::client(family, port), (1, 1)),
    ];
    for (source, destination, expected) in cases {
        let frame = icmp_error(&client, source, destination);
        client.send(&frame);
        client.collect_all();
        assert_eq!(counted(), expected, "{source:?} {destination:?}");
    }
    let mut to_one = icmp_error(&client, vip(family), self::client(family, port));
    to_one[..6].copy_from_slice(&client.frame(ACK, 0, b"")[..6]);
    client.send(&to_one);
    client.collect_all();
    assert_eq!(counted(), (1, 1), "not broadcast");
    // The kernel counts an ICMP error as IcmpInErrors if it finds no socket, as for the other port.
    if family == Family::Ipv4 {
        for (kernel, expected) in [("IcmpInMsgs", 3), ("IcmpInErrors", 1), ("IcmpInCsumErrors", 0)] {
            assert_eq!(env.pair.server.kernel_counter(kernel), expected, "{kernel}");
        }
    }
}

#[test]
fn stalled_handshakes_and_connections_are_counted_once() {
    skip_if!(missing_bpf_rights());
    let env = TestEnv::new();
    let listener = env.listen();
    // Without an ACK the SYN-ACK is sent after 0, 1, 3, 7 s, and data is retransmitted after 0.2, 0.6, 1.4, 3 s.
    let (mut silent, mut deaf) = (RawTcpClient::new(&env, 4012, true), RawTcpClient::new(&env, 4013, true));
    silent.open(0);
    deaf.open(0);
    deaf.acknowledge();
    let (mut server, _) = listener.accept().unwrap();
    server.write_all(b"answer").unwrap();
    let new_syn_acks = || silent.received().iter().filter(|frame| flags(frame) == SYN | ACK).count();
    let (mut syn_acks, end) = (1, Instant::now() + TIMEOUT);
    while syn_acks < 4 {
        std::thread::sleep(Duration::from_millis(20));
        let stalled = env.counter(intf::SERVER_COUNTER_HANDSHAKE_STALLED);
        // The fourth SYN-ACK is counted as a stall before it is sent.
        syn_acks += new_syn_acks();
        assert!(stalled == 0 || syn_acks == 4, "counted after {syn_acks} SYN-ACKs");
        assert!(Instant::now() < end, "{syn_acks} SYN-ACKs");
    }
    assert_eq!(env.counter(intf::SERVER_COUNTER_HANDSHAKE_STALLED), 1);
    assert_eq!(env.counter(intf::SERVER_COUNTER_CONNECTION_STALLED), 1);
    assert_eq!(env.counter(intf::SERVER_COUNTER_HANDSHAKE), 3, "two SYN-ACKs, and one again");
}

#[test]
fn open_sockets_are_found() {
    skip_if!(missing_bpf_rights());
    for family in Family::BOTH {
        let env = TestEnv::of(family, ServiceMode::default());
        expect_sockets_of_connections(&env, &env.listen());
        // IPv4 connections of a dual-stack socket have IPv4-mapped addresses.
        let env = TestEnv::of(family, ServiceMode::default());
        let of_both = env.pair.server.run_inside(|| TcpListener::bind((Ipv6Addr::UNSPECIFIED, PORT)).unwrap());
        expect_sockets_of_connections(&env, &of_both);
    }
}

fn expect_sockets_of_connections(env: &TestEnv, listener: &TcpListener) {
    let service = vip(env.family);
    let open: Vec<_> = (0..100).map(|_| env.connection(listener)).collect();
    let mut half_open = RawTcpClient::new(env, 4014, true);
    half_open.open(0);
    let tuple = |client, vip| FourTuple::new(client, vip).unwrap();
    let mut asked = vec![(tuple(half_open.address(), service), true)];
    for (client, _) in &open {
        let client = client.local_addr().unwrap();
        asked.push((tuple(client, service), true));
        // The look-up of an unused tuple finds only the listening socket, which does not count.
        asked.push((tuple((half_open.address().ip(), client.port()).into(), service), false));
        asked.push((tuple(client, (service.ip(), PORT + 1).into()), false));
    }
    let tuples: Vec<FourTuple> = asked.iter().map(|(tuple, _)| *tuple).collect();
    let found = env.pair.server.run_inside(|| have_sockets(&tuples).unwrap());
    for ((tuple, expected), found) in asked.iter().zip(found) {
        assert_eq!(found, *expected, "{tuple:?}");
    }
    assert_eq!(env.pair.server.run_inside(|| have_sockets(&[]).unwrap()), [] as [bool; 0]);
    let other_family = vip(if env.family == Family::Ipv4 { Family::Ipv6 } else { Family::Ipv4 });
    let counts = env.pair.server.run_inside(|| connection_counts(&[service, other_family]).unwrap());
    assert_eq!(counts, [101, 0]);
}
