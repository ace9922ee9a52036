//! Tests of the functions of `bpf/server/server.bpf.c` other than stateless stamping: table indexes, daisy chaining,
//! broadcasts, ICMP errors and stalls.

use std::io::{Read as _, Write as _};
use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr, TcpListener};
use std::time::{Duration, Instant};

use coreward_dataplane::mac::MacAddress;
use coreward_dataplane::sockets::counts::count_connections;
use coreward_dataplane::sockets::query_open_sockets;
use coreward_dataplane::tc::PacketDirection;
use coreward_dataplane::test_run;
use coreward_intf as intf;
use coreward_model::consistency::{ConsistencyMode, CookieStamper, ServiceSettings};
use coreward_model::cookie::{self, Cookie};
use coreward_model::forwarding::ForwardingMode;
use coreward_model::{FourTuple, ServerId};

use crate::support::network::VIP;
use crate::support::raw_tcp_client::{
    RawTcpClient, set_broadcast_destination_mac, tsecr_with_table_index, write_previous_server_id,
};
use crate::support::server_env::{
    SERVICE_PORT, SOCKET_TIMEOUT, ServerTestEnv, client_address, fleet_keys, read_tcp_flags, test_server_id,
    vip_address,
};
use crate::support::{
    self, ACK, AddressFamily, RST, SYN, TcpPacket, aligned_timestamp_option, is_ipv6, missing_bpf_rights,
    ones_complement_sum, read_u32, skip_if, tsval_clock_ms, tsval_offset,
};

const CONNECTION_TABLE_INDEX: u16 = 0x2abc;
const STATEFUL_SERVICE_SETTINGS: ServiceSettings =
    new_service_settings(ConsistencyMode::Stateful, CookieStamper::Server);
const BEAMER_SERVICE_SETTINGS: ServiceSettings = new_service_settings(ConsistencyMode::Beamer, CookieStamper::Server);

const fn new_service_settings(consistency: ConsistencyMode, timestamps: CookieStamper) -> ServiceSettings {
    ServiceSettings { consistency, timestamps, migration: None, forwarding: ForwardingMode::L2 }
}

fn cookies_in_frames(client: &RawTcpClient<'_>, frames: &[Vec<u8>]) -> Vec<Cookie> {
    let client_address = client.address();
    let family = if client_address.is_ipv4() { AddressFamily::Ipv4 } else { AddressFamily::Ipv6 };
    let tuple = FourTuple::new(client_address, vip_address(family)).unwrap();
    let read_tsval = |frame: &Vec<u8>| read_u32(frame, tsval_offset(frame).expect("a timestamp"));
    frames.iter().map(|frame| cookie::decode_cookie(&fleet_keys(), &tuple, read_tsval(frame))).collect()
}

fn cookie_in_frame(client: &RawTcpClient<'_>, frame: &[u8]) -> Cookie {
    cookies_in_frames(client, &[frame.to_vec()])[0]
}

fn leave_frame_unchanged(_: &mut Vec<u8>) {}

#[test]
fn table_index_in_syn_is_hidden_from_the_kernel() {
    skip_if!(missing_bpf_rights());
    AddressFamily::BOTH.into_iter().for_each(expect_table_index_in_cookies);
}

fn expect_table_index_in_cookies(family: AddressFamily) {
    for syn_cookies in ["1", "2"] {
        let env = ServerTestEnv::start_for_family(family, STATEFUL_SERVICE_SETTINGS);
        env.veth_pair.server.set_sysctl("ipv4/tcp_syncookies", syn_cookies);
        let listener = env.listen_at_vip();
        let mut client = RawTcpClient::new(&env, 4001, true);
        let syn_ack = client.open_connection(tsecr_with_table_index(CONNECTION_TABLE_INDEX));
        assert_eq!(env.server_counter(intf::SERVER_COUNTER_INDEX_LEARNT), 1);
        assert_eq!(cookie_in_frame(&client, &syn_ack), Cookie::TableIndex(CONNECTION_TABLE_INDEX));
        let returned_tsecr = read_u32(&syn_ack, tsval_offset(&syn_ack).unwrap() + 4);
        assert_eq!(returned_tsecr, 1, "the client's own TSval");
        client.send_final_ack();
        let (mut server, _) = listener.accept().unwrap();
        server.set_read_timeout(Some(SOCKET_TIMEOUT)).unwrap();
        for _ in 0..3 {
            let replies = client.send_payload(b"request", leave_frame_unchanged);
            assert!(!replies.is_empty());
            assert!(
                cookies_in_frames(&client, &replies)
                    .iter()
                    .all(|cookie| *cookie == Cookie::TableIndex(CONNECTION_TABLE_INDEX))
            );
            server.read_exact(&mut [0; 7]).unwrap();
        }
        assert_eq!(env.server_counter(intf::SERVER_COUNTER_INDEX_UNKNOWN), 0);
        assert_eq!(env.server_counter(intf::SERVER_COUNTER_INGRESS_OTHER_COOKIE), 0);
        env.assert_no_kernel_errors();
    }
}

#[test]
fn server_id_is_stamped_if_syn_has_no_table_index() {
    skip_if!(missing_bpf_rights());
    AddressFamily::BOTH.into_iter().for_each(expect_server_id_without_table_index);
}

fn expect_server_id_without_table_index(family: AddressFamily) {
    let env = ServerTestEnv::start_for_family(family, STATEFUL_SERVICE_SETTINGS);
    let listener = env.listen_at_vip();
    // A former connection with the same 4-tuple had an index, which the server forgets when the new SYN arrives.
    let mut first_client = RawTcpClient::new(&env, 4002, true);
    first_client.open_connection(tsecr_with_table_index(CONNECTION_TABLE_INDEX));
    let rst_frame = first_client.build_next_frame(RST | ACK, first_client.server_tsval, b"");
    first_client.send_frame(&rst_frame);
    first_client.collect_all_frames();
    let mut client = RawTcpClient::new(&env, 4002, true);
    let syn_ack = client.open_connection(0);
    assert_eq!(cookie_in_frame(&client, &syn_ack), Cookie::Server(test_server_id()));
    client.send_final_ack();
    let _server_stream = listener.accept().unwrap();
    let replies = client.send_payload(b"request", leave_frame_unchanged);
    assert!(
        cookies_in_frames(&client, &replies).iter().all(|cookie| *cookie == Cookie::Server(test_server_id())),
        "{replies:02x?}"
    );
    assert!(env.server_counter(intf::SERVER_COUNTER_INDEX_UNKNOWN) >= 2);
    // A cookie with an index is ignored if no SYN brought that index, and the kernels count no error.
    env.assert_no_kernel_errors();
}

#[test]
fn connections_continue_with_the_server_id_after_table_loss() {
    skip_if!(missing_bpf_rights());
    AddressFamily::BOTH.into_iter().for_each(expect_server_id_after_table_loss);
}

fn expect_server_id_after_table_loss(family: AddressFamily) {
    let env = ServerTestEnv::start_for_family(family, STATEFUL_SERVICE_SETTINGS);
    let listener = env.listen_at_vip();
    let mut client = RawTcpClient::new(&env, 4003, true);
    client.open_connection(tsecr_with_table_index(CONNECTION_TABLE_INDEX));
    client.send_final_ack();
    let (mut server, _) = listener.accept().unwrap();
    let replies_with_index = client.send_payload(b"request", leave_frame_unchanged);
    assert_eq!(cookie_in_frame(&client, &replies_with_index[0]), Cookie::TableIndex(CONNECTION_TABLE_INDEX));
    // After one broadcast round trip the server stamps its id. TSecr values with the index are still restored.
    let replies_after_loss = client.send_payload(b"request", |frame| set_broadcast_destination_mac(frame));
    assert_eq!(env.server_counter(intf::SERVER_COUNTER_BROADCAST_ACCEPTED), 1);
    assert_eq!(env.server_counter(intf::SERVER_COUNTER_INDEX_GIVEN_UP), 1);
    assert_eq!(cookie_in_frame(&client, replies_after_loss.last().unwrap()), Cookie::Server(test_server_id()));
    let tsval_step = client
        .server_tsval
        .wrapping_sub(read_u32(&replies_with_index[0], tsval_offset(&replies_with_index[0]).unwrap()));
    assert!(tsval_step < 1 << 31, "TSval does not step back");
    let later_replies = client.send_payload(b"request", leave_frame_unchanged);
    assert_eq!(cookie_in_frame(&client, &later_replies[0]), Cookie::Server(test_server_id()));
    server.set_read_timeout(Some(SOCKET_TIMEOUT)).unwrap();
    server.read_exact(&mut [0; 21]).unwrap();
    assert_eq!(env.server_counter(intf::SERVER_COUNTER_INGRESS_OTHER_COOKIE), 0);
    env.assert_no_kernel_errors();
}

/// Runs the server's programs on a SYN of client `client_number` with a connection table index, and on the SYN-ACK.
fn run_flood_handshake(env: &ServerTestEnv, client_number: u32) {
    let mut flood_syn = TcpPacket::new((Ipv4Addr::from(0x0b00_0000 + client_number), 5), (VIP, SERVICE_PORT));
    flood_syn.flags = SYN;
    flood_syn.payload.clear();
    flood_syn.tcp_options = aligned_timestamp_option(1, tsecr_with_table_index(7));
    test_run::run_program(env.programs.program_for_direction(PacketDirection::Ingress), &flood_syn.to_frame(), 1)
        .unwrap();
    let mut flood_syn_ack = TcpPacket::new((VIP, SERVICE_PORT), (*flood_syn.source.ip(), 5));
    flood_syn_ack.flags = SYN | ACK;
    flood_syn_ack.payload.clear();
    flood_syn_ack.tcp_options = aligned_timestamp_option(tsval_clock_ms(), 1);
    test_run::run_program(env.programs.program_for_direction(PacketDirection::Egress), &flood_syn_ack.to_frame(), 1)
        .unwrap();
}

#[test]
fn syn_flood_evicts_table_indexes_without_breaking_connections() {
    skip_if!(missing_bpf_rights());
    let env = ServerTestEnv::start_with_settings(STATEFUL_SERVICE_SETTINGS);
    let listener = env.listen_at_vip();
    let (mut established_client, mut half_open_client) =
        (RawTcpClient::new(&env, 4004, true), RawTcpClient::new(&env, 4005, true));
    established_client.open_connection(tsecr_with_table_index(CONNECTION_TABLE_INDEX));
    established_client.send_final_ack();
    let _first_stream = listener.accept().unwrap();
    assert!(!established_client.send_payload(b"request", leave_frame_unchanged).is_empty());
    let syn_ack = half_open_client.open_connection(tsecr_with_table_index(CONNECTION_TABLE_INDEX + 1));
    assert_eq!(cookie_in_frame(&half_open_client, &syn_ack), Cookie::TableIndex(CONNECTION_TABLE_INDEX + 1));

    // SYNs with an index come from twice as many clients as the map has entries, and each gets a SYN-ACK.
    for n in 0..2 * intf::MAX_HALF_OPEN_INDEXES {
        run_flood_handshake(&env, n);
    }
    assert_eq!(env.server_counter(intf::SERVER_COUNTER_INDEX_LEARNT), u64::from(2 * intf::MAX_HALF_OPEN_INDEXES) + 2);
    // The kernel's LRU map selects the entries that stay. A SYN without an index removes this client's entry.
    let mut conflicting_syn = half_open_client.build_next_frame(SYN, 0, b"");
    // Packets of test runs arrive at the loopback device, whose MAC address is 0.
    conflicting_syn[..6].fill(0);
    test_run::run_program(env.programs.program_for_direction(PacketDirection::Ingress), &conflicting_syn, 1).unwrap();
    // Reads the SYN-ACKs that the server has retransmitted.
    half_open_client.receive_replies();
    half_open_client.send_final_ack();
    let _second_stream = listener.accept().unwrap();
    let replies = half_open_client.send_payload(b"request", leave_frame_unchanged);
    assert_eq!(cookie_in_frame(&half_open_client, &replies[0]), Cookie::Server(test_server_id()));
    let replies = established_client.send_payload(b"request", leave_frame_unchanged);
    assert_eq!(cookie_in_frame(&established_client, &replies[0]), Cookie::TableIndex(CONNECTION_TABLE_INDEX));
    env.assert_no_kernel_errors();
}

const PREVIOUS_SERVER_ID: u16 = 0x0abc;
const PREVIOUS_SERVER_MAC: MacAddress = MacAddress([2, 0, 0, 0, 0xab, 0xcd]);

fn previous_server_id() -> ServerId {
    ServerId::try_from(u64::from(PREVIOUS_SERVER_ID)).unwrap()
}

/// Sends `frame` with `identification` as the previous server's id. Returns whether the receiving server forwarded
/// `frame` to the previous server.
fn send_and_check_if_forwarded(client: &mut RawTcpClient<'_>, frame: &[u8], identification: u16) -> bool {
    let mut frame = frame.to_vec();
    write_previous_server_id(&mut frame, identification);
    client.collect_all_frames();
    client.send_frame(&frame);
    let received_frames = client.collect_all_frames();
    let Some(forwarded_frame) =
        received_frames.iter().find(|received_frame| received_frame[..6] == PREVIOUS_SERVER_MAC.0)
    else {
        return false;
    };
    let mut expected_frame = frame.clone();
    expected_frame[6..12].copy_from_slice(&frame[..6]);
    expected_frame[..6].copy_from_slice(&PREVIOUS_SERVER_MAC.0);
    write_previous_server_id(&mut expected_frame, intf::NO_SERVER as u16);
    assert_eq!(forwarded_frame[..expected_frame.len()], expected_frame[..]);
    assert!(is_ipv6(&frame) || ones_complement_sum(&forwarded_frame[14..34]) == 0xffff);
    true
}

/// Sends `frame` with `identification` as the previous server's id. Returns whether the client received a reply.
fn send_and_check_if_answered(client: &mut RawTcpClient<'_>, frame: &[u8], identification: u16) -> bool {
    let mut frame = frame.to_vec();
    write_previous_server_id(&mut frame, identification);
    client.collect_all_frames();
    client.send_frame(&frame);
    let (sources, destinations) = if is_ipv6(&frame) { (22..38, 38..54) } else { (26..30, 30..34) };
    let is_reply = |received_frame: &Vec<u8>| {
        received_frame[sources.clone()] == frame[destinations.clone()]
            && received_frame[destinations.clone()] == frame[sources.clone()]
    };
    client.collect_all_frames().iter().any(is_reply)
}

#[test]
fn packet_without_a_socket_is_forwarded_to_the_previous_server() {
    skip_if!(missing_bpf_rights());
    AddressFamily::BOTH.into_iter().for_each(expect_forwarded_to_previous_server);
}

/// Asserts that a server keeps the packets of a connection after the handshake, although they name a previous server.
/// `syn_cookies` is the value of the sysctl tcp_syncookies.
fn expect_unforwarded_after_handshake(env: &ServerTestEnv, listener: &TcpListener, port: u16, syn_cookies: &str) {
    env.veth_pair.server.set_sysctl("ipv4/tcp_syncookies", syn_cookies);
    let mut client = RawTcpClient::new(env, port, false);
    client.open_connection(0);
    let ack_frame = client.build_next_frame(ACK, 0, b"");
    assert!(!send_and_check_if_forwarded(&mut client, &ack_frame, PREVIOUS_SERVER_ID), "SYN cookies {syn_cookies}");
    let (mut server, _) = listener.accept().unwrap();
    server.set_read_timeout(Some(SOCKET_TIMEOUT)).unwrap();
    client.send_payload(b"request", |frame| write_previous_server_id(frame, PREVIOUS_SERVER_ID));
    server.read_exact(&mut [0; 7]).unwrap();
}

fn expect_forwarded_to_previous_server(family: AddressFamily) {
    let mut env = ServerTestEnv::start_for_family(family, ServiceSettings::default());
    env.programs.set_other_server_mac(previous_server_id(), Some(PREVIOUS_SERVER_MAC));
    let env = env;
    let listener = env.listen_at_vip();
    let mut client = RawTcpClient::new(&env, 4006, false);
    let (stray_frame, syn_frame) = (client.build_next_frame(ACK, 0, b"stray"), client.build_next_frame(SYN, 0, b""));
    assert!(send_and_check_if_forwarded(&mut client, &stray_frame, PREVIOUS_SERVER_ID));
    assert_eq!(env.server_counter(intf::SERVER_COUNTER_CHAINED), 1);
    for identification in [intf::NO_SERVER as u16, test_server_id().get(), 0x7000] {
        assert!(!send_and_check_if_forwarded(&mut client, &stray_frame, identification), "{identification:#x}");
    }
    // While the previous server's MAC address is unknown, a packet that may belong to that server's connection is
    // dropped. The server sends no RST, so the client retransmits the packet.
    assert_eq!(env.server_counter(intf::SERVER_COUNTER_DROP_CHAIN_UNRESOLVED), 0);
    assert!(!send_and_check_if_answered(&mut client, &stray_frame, PREVIOUS_SERVER_ID + 1));
    assert_eq!(env.server_counter(intf::SERVER_COUNTER_DROP_CHAIN_UNRESOLVED), 1);
    assert!(
        send_and_check_if_answered(&mut client, &stray_frame, intf::NO_SERVER as u16),
        "an unknown connection is refused"
    );
    assert!(!send_and_check_if_forwarded(&mut client, &syn_frame, PREVIOUS_SERVER_ID), "a connection begins here");
    // The cookie in a timestamp names this server.
    let mut timestamp_client = RawTcpClient::new(&env, 4007, true);
    let frame = timestamp_client.build_next_frame(ACK, 5, b"stray");
    assert!(!send_and_check_if_forwarded(&mut timestamp_client, &frame, PREVIOUS_SERVER_ID));

    for (port, syn_cookies) in [(4010, "1"), (4011, "2")] {
        expect_unforwarded_after_handshake(&env, &listener, port, syn_cookies);
    }
    assert_eq!(env.server_counter(intf::SERVER_COUNTER_CHAINED), 1);
}

#[test]
fn packets_with_timestamps_are_forwarded_if_they_name_the_previous_server() {
    skip_if!(missing_bpf_rights());
    AddressFamily::BOTH.into_iter().for_each(expect_all_packets_forwarded);
}

fn expect_all_packets_forwarded(family: AddressFamily) {
    let timestamps_off_mode = new_service_settings(ConsistencyMode::Stateless, CookieStamper::Off);
    for (mode, chained) in [
        (BEAMER_SERVICE_SETTINGS, true),
        (timestamps_off_mode, true),
        (ServiceSettings { consistency: ConsistencyMode::HashTable, ..timestamps_off_mode }, false),
    ] {
        let mut env = ServerTestEnv::start_for_family(family, mode);
        env.programs.set_other_server_mac(previous_server_id(), Some(PREVIOUS_SERVER_MAC));
        let env = env;
        let listener = env.listen_at_vip();
        let mut client = RawTcpClient::new(&env, 4008, true);
        let stray_frame = client.build_next_frame(ACK, 5, b"stray");
        assert_eq!(send_and_check_if_forwarded(&mut client, &stray_frame, PREVIOUS_SERVER_ID), chained, "{mode:?}");
        // Packets are neither stamped nor restored.
        let (mut client_stream, mut server_stream) = env.open_connection(&listener);
        support::server_env::send_and_receive(&mut client_stream, &mut server_stream, b"request");
        support::server_env::send_and_receive(&mut server_stream, &mut client_stream, b"answer");
        for counter in [intf::SERVER_COUNTER_STAMPED, intf::SERVER_COUNTER_RESTORED] {
            assert_eq!(env.server_counter(counter), 0, "{mode:?}");
        }
        env.assert_no_kernel_errors();
    }
}

/// Returns a broadcast ICMP error ("fragmentation needed" or "packet too big") that quotes a packet from
/// `quoted_source` to `quoted_destination`.
fn broadcast_icmp_error_frame(
    client: &RawTcpClient<'_>,
    quoted_source: SocketAddr,
    quoted_destination: SocketAddr,
) -> Vec<u8> {
    let quoted_packet = TcpPacket::between(quoted_source, quoted_destination).to_frame();
    let mut frame = client.build_next_frame(ACK, 0, b"");
    if is_ipv6(&frame) {
        replace_segment_by_icmpv6_error(&mut frame, &quoted_packet[14..]);
    } else {
        frame.truncate(34);
        frame[16..18].copy_from_slice(&56u16.to_be_bytes());
        frame[23] = 1;
        frame.extend([3, 4, 0, 0, 0, 0, 2, 0]);
        frame.extend(&quoted_packet[14..42]);
        let checksum = !ones_complement_sum(&frame[34..]);
        frame[36..38].copy_from_slice(&checksum.to_be_bytes());
    }
    write_previous_server_id(&mut frame, 1);
    set_broadcast_destination_mac(&mut frame);
    frame
}

/// Replaces the frame's TCP segment by the ICMPv6 error "packet too big" (RFC 4443, Sect. 3.2), which quotes
/// `quoted_packet` and reports an MTU of 1,280 bytes.
fn replace_segment_by_icmpv6_error(frame: &mut Vec<u8>, quoted_packet: &[u8]) {
    frame.truncate(14 + 40);
    frame.extend([2, 0, 0, 0, 0, 0, 5, 0]);
    frame.extend(quoted_packet);
    let icmp_length = (frame.len() - 54) as u16;
    frame[18..20].copy_from_slice(&icmp_length.to_be_bytes());
    frame[20] = 58;
    let pseudo_header = [&frame[22..54], &icmp_length.to_be_bytes(), &[0, 58]].concat();
    let checksum = !ones_complement_sum(&[&pseudo_header[..], &frame[54..]].concat());
    frame[56..58].copy_from_slice(&checksum.to_be_bytes());
}

#[test]
fn broadcast_icmp_error_is_accepted_by_the_connections_server() {
    skip_if!(missing_bpf_rights());
    AddressFamily::BOTH.into_iter().for_each(expect_broadcast_errors_accepted_by_connection);
}

fn expect_broadcast_errors_accepted_by_connection(family: AddressFamily) {
    let env = ServerTestEnv::start_for_family(family, ServiceSettings::default());
    let listener = env.listen_at_vip();
    let (stream, _server) = env.open_connection(&listener);
    let client_port = stream.local_addr().unwrap().port();
    let mut client = RawTcpClient::new(&env, 4009, true);
    let read_counters = || {
        let read_counter = |counter| env.server_counter(counter);
        (
            read_counter(intf::SERVER_COUNTER_ICMP_BROADCAST_ACCEPTED),
            read_counter(intf::SERVER_COUNTER_ICMP_BROADCAST_IGNORED),
        )
    };
    let quotes_with_counters = [
        (vip_address(family), self::client_address(family, client_port), (1, 0)),
        (vip_address(family), self::client_address(family, client_port ^ 1), (1, 1)),
        // A quote from another port belongs to no service, so the error passes to the kernel.
        ((vip_address(family).ip(), SERVICE_PORT + 1).into(), self::client_address(family, client_port), (1, 1)),
    ];
    for (source, destination, expected) in quotes_with_counters {
        let frame = broadcast_icmp_error_frame(&client, source, destination);
        client.send_frame(&frame);
        client.collect_all_frames();
        assert_eq!(read_counters(), expected, "{source:?} {destination:?}");
    }
    let mut unicast_error =
        broadcast_icmp_error_frame(&client, vip_address(family), self::client_address(family, client_port));
    unicast_error[..6].copy_from_slice(&client.build_next_frame(ACK, 0, b"")[..6]);
    client.send_frame(&unicast_error);
    client.collect_all_frames();
    assert_eq!(read_counters(), (1, 1), "not broadcast");
    // The kernel counts an ICMP error as IcmpInErrors if it finds no socket, as for the other port.
    if family == AddressFamily::Ipv4 {
        for (counter_name, expected) in [("IcmpInMsgs", 3), ("IcmpInErrors", 1), ("IcmpInCsumErrors", 0)] {
            assert_eq!(env.veth_pair.server.kernel_counter(counter_name), expected, "{counter_name}");
        }
    }
}

#[test]
fn each_stalled_handshake_or_connection_is_counted_once() {
    skip_if!(missing_bpf_rights());
    let env = ServerTestEnv::new();
    let listener = env.listen_at_vip();
    // Without an ACK, the SYN-ACK is sent after 0, 1, 3 and 7 s, and data is retransmitted after 0.2, 0.6, 1.4 and 3 s.
    let (mut silent_client, mut deaf_client) =
        (RawTcpClient::new(&env, 4012, true), RawTcpClient::new(&env, 4013, true));
    silent_client.open_connection(0);
    deaf_client.open_connection(0);
    deaf_client.send_final_ack();
    let (mut server, _) = listener.accept().unwrap();
    server.write_all(b"answer").unwrap();
    let count_syn_acks = || {
        silent_client.collect_frames_to_this_client().iter().filter(|frame| read_tcp_flags(frame) == SYN | ACK).count()
    };
    let (mut syn_ack_count, deadline) = (1, Instant::now() + SOCKET_TIMEOUT);
    while syn_ack_count < 4 {
        std::thread::sleep(Duration::from_millis(20));
        let stalled_count = env.server_counter(intf::SERVER_COUNTER_HANDSHAKE_STALLED);
        // The fourth SYN-ACK is counted as a stall before it is sent.
        syn_ack_count += count_syn_acks();
        assert!(stalled_count == 0 || syn_ack_count == 4, "counted after {syn_ack_count} SYN-ACKs");
        assert!(Instant::now() < deadline, "{syn_ack_count} SYN-ACKs");
    }
    assert_eq!(env.server_counter(intf::SERVER_COUNTER_HANDSHAKE_STALLED), 1);
    assert_eq!(env.server_counter(intf::SERVER_COUNTER_CONNECTION_STALLED), 1);
    assert_eq!(env.server_counter(intf::SERVER_COUNTER_HANDSHAKE), 3, "two SYN-ACKs, and one again");
}

#[test]
fn sockets_of_open_connections_are_found() {
    skip_if!(missing_bpf_rights());
    for family in AddressFamily::BOTH {
        let env = ServerTestEnv::start_for_family(family, ServiceSettings::default());
        expect_sockets_of_connections(&env, &env.listen_at_vip());
        // IPv4 connections of a dual-stack socket have IPv4-mapped addresses.
        let env = ServerTestEnv::start_for_family(family, ServiceSettings::default());
        let dual_stack_listener =
            env.veth_pair.server.run_in_namespace(|| TcpListener::bind((Ipv6Addr::UNSPECIFIED, SERVICE_PORT)).unwrap());
        expect_sockets_of_connections(&env, &dual_stack_listener);
    }
}

fn expect_sockets_of_connections(env: &ServerTestEnv, listener: &TcpListener) {
    let service_address = vip_address(env.family);
    let open_connections: Vec<_> = (0..100).map(|_| env.open_connection(listener)).collect();
    let mut half_open_client = RawTcpClient::new(env, 4014, true);
    half_open_client.open_connection(0);
    let new_four_tuple = |client, vip| FourTuple::new(client, vip).unwrap();
    let mut expected_sockets = vec![(new_four_tuple(half_open_client.address(), service_address), true)];
    for (client, _) in &open_connections {
        let client = client.local_addr().unwrap();
        expected_sockets.push((new_four_tuple(client, service_address), true));
        // The look-up of an unused tuple finds only the listening socket, which does not count.
        expected_sockets
            .push((new_four_tuple((half_open_client.address().ip(), client.port()).into(), service_address), false));
        expected_sockets.push((new_four_tuple(client, (service_address.ip(), SERVICE_PORT + 1).into()), false));
    }
    let tuples: Vec<FourTuple> = expected_sockets.iter().map(|(tuple, _)| *tuple).collect();
    let open_socket_flags = env.veth_pair.server.run_in_namespace(|| query_open_sockets(&tuples).unwrap());
    for ((tuple, expected), has_socket) in expected_sockets.iter().zip(open_socket_flags) {
        assert_eq!(has_socket, *expected, "{tuple:?}");
    }
    assert_eq!(env.veth_pair.server.run_in_namespace(|| query_open_sockets(&[]).unwrap()), [] as [bool; 0]);
    let other_family_vip =
        vip_address(if env.family == AddressFamily::Ipv4 { AddressFamily::Ipv6 } else { AddressFamily::Ipv4 });
    let connection_counts_by_vip =
        env.veth_pair.server.run_in_namespace(|| count_connections(&[service_address, other_family_vip]).unwrap());
    assert_eq!(connection_counts_by_vip, [101, 0]);
}
