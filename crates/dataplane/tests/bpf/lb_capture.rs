//! Tests of `coreward capture` at a load balancer in operation.

use std::net::{Ipv4Addr, SocketAddr};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use coreward_dataplane::lb::capture::{self, CapturedPacket, CapturedPacketDestination, PacketCapture};
use coreward_dataplane::lb::{LoadBalancer, LoadBalancerOptions, Server, XdpMode};
use coreward_dataplane::mac::MacAddress;
use coreward_model::consistency::{ConsistencyMode, ServiceSettings};
use coreward_model::cookie::{self, Cookie, CookieKey, CookieKeyIndex, FleetCookieKeys};
use coreward_model::placement::PlacementRule;
use coreward_model::rss::seeded_rng;
use coreward_model::{FourTuple, ServiceAddress};

use crate::support::balancer::{CLIENT_ENDPOINT, VIP, random_placement_table, server_id_from_number, service_address};
use crate::support::network::{PinDirectory, VethPair, interface_mac, pin_thread_to_one_cpu};
use crate::support::packet_socket::PacketSocket;
use crate::support::tunnel::{client_socket_address, service_vip};
use crate::support::{self, AddressFamily, RST, SYN, TcpPacket, aligned_timestamp_option, missing_bpf_rights, skip_if};

const OTHER_VIP: (Ipv4Addr, u16) = (Ipv4Addr::new(10, 200, 0, 1), 81);
const SERVER_MAC: MacAddress = MacAddress([2, 0, 0, 0, 0, 9]);

fn fleet_keys() -> FleetCookieKeys {
    FleetCookieKeys {
        keys: [CookieKey { k0: 1, k1: 2 }, CookieKey { k0: 3, k1: 4 }],
        current_key_index: CookieKeyIndex::First,
    }
}

/// Collects captured packets until there are `packet_count` packets, or 30 s have passed.
fn collect_packets(capture: &mut PacketCapture, packet_count: usize) -> Vec<CapturedPacket> {
    let mut captured_packets = Vec::new();
    let deadline = Instant::now() + Duration::from_secs(30);
    while captured_packets.len() < packet_count && Instant::now() < deadline {
        capture.poll(Duration::from_millis(50), &mut |packet| captured_packets.push(packet)).unwrap();
    }
    captured_packets
}

/// Timeout of a wait that a signal should end earlier.
const INTERRUPTED_WAIT_TIMEOUT: Duration = Duration::from_secs(30);

/// Calls `wait`, and sends signals until it returns, as Ctrl-C does to `coreward capture`. Signals are repeated because
/// a signal before the wait has no effect.
fn assert_signals_end_wait(wait: impl FnOnce()) {
    extern "C" fn ignore_signal(_: libc::c_int) {}
    let signal_handler = nix::sys::signal::SigHandler::Handler(ignore_signal);
    // SAFETY: the handler does nothing.
    unsafe { nix::sys::signal::signal(nix::sys::signal::Signal::SIGUSR1, signal_handler) }.unwrap();
    // SAFETY: takes nothing.
    let waiting_thread = unsafe { libc::pthread_self() };
    let (start_time, is_over) = (Instant::now(), AtomicBool::new(false));
    let wait_duration = std::thread::scope(|scope| {
        scope.spawn(|| {
            while !is_over.load(Ordering::Relaxed) && start_time.elapsed() < 2 * INTERRUPTED_WAIT_TIMEOUT {
                std::thread::sleep(Duration::from_millis(20));
                // SAFETY: the thread lives longer than this one.
                unsafe { libc::pthread_kill(waiting_thread, libc::SIGUSR1) };
            }
        });
        wait();
        is_over.store(true, Ordering::Relaxed);
        start_time.elapsed()
    });
    assert!(wait_duration < INTERRUPTED_WAIT_TIMEOUT, "the wait was not interrupted");
}

#[test]
fn capture_contains_unchanged_packets_and_decisions() {
    skip_if!(missing_bpf_rights());
    // On one CPU, packets keep their order.
    pin_thread_to_one_cpu();
    let (veth_pair, pins) = (VethPair::new(), PinDirectory::new());
    let options = LoadBalancerOptions { pin_directory: Some(pins.path()), ..LoadBalancerOptions::default() };
    let mut lb = LoadBalancer::load(options).unwrap();
    veth_pair.server.run_in_namespace(|| lb.attach("eth0", XdpMode::Auto)).unwrap();
    let device_mac = veth_pair.server.run_in_namespace(|| interface_mac("eth0").0);
    let new_stateless_service = |vip| (service_address(vip), ServiceSettings::default());
    let service_indexes = lb.set_services(&[new_stateless_service(VIP), new_stateless_service(OTHER_VIP)]).unwrap();
    lb.set_service_name(service_indexes[0], "web");
    lb.set_cookie_keys(&fleet_keys());
    for index in &service_indexes {
        lb.set_server(*index, server_id_from_number(7), Server { mac: Some(SERVER_MAC), is_eligible: true });
        lb.install_table(
            *index,
            &random_placement_table(PlacementRule::Table, 1, 1, &[server_id_from_number(7)], &mut seeded_rng(1, 0)),
        )
        .unwrap();
    }
    let services_with_names: Vec<(ServiceAddress, String)> = capture::pinned_services_with_names(&pins.path()).unwrap();
    assert_eq!(
        services_with_names,
        [(service_address(VIP), "web".to_owned()), (service_address(OTHER_VIP), String::new())]
    );

    let options = capture::PacketCaptureOptions {
        pin_directory: pins.path(),
        service: service_address(VIP),
        max_bytes_per_packet: 200,
    };
    let mut capture = PacketCapture::start(options.clone()).unwrap();
    let cookie_tsecr = cookie::stamp_tsval(
        &fleet_keys(),
        &support::FOREIGN_TIME_KEY,
        &FourTuple::ipv4(CLIENT_ENDPOINT, VIP),
        Cookie::Server(server_id_from_number(7)),
        12_345,
    );
    let established_packet = TcpPacket {
        destination_mac: device_mac,
        tcp_options: aligned_timestamp_option(1, cookie_tsecr),
        ..TcpPacket::new(CLIENT_ENDPOINT, VIP)
    };
    let mut malformed_frame = established_packet.to_frame();
    malformed_frame[14] = 0x41;
    let sent_frames = [
        established_packet.to_frame(),
        TcpPacket { flags: SYN, tcp_options: aligned_timestamp_option(1, 0), ..established_packet.clone() }.to_frame(),
        TcpPacket { flags: RST, tcp_options: vec![], ..established_packet.clone() }.to_frame(),
        malformed_frame,
        // A packet of another service is not captured.
        TcpPacket { destination_mac: device_mac, ..TcpPacket::new(CLIENT_ENDPOINT, OTHER_VIP) }.to_frame(),
    ];
    let send_frames = |frames: &[Vec<u8>]| {
        veth_pair
            .client
            .run_in_namespace(|| frames.iter().for_each(|frame| PacketSocket::open("eth0").send_frame(frame)));
    };
    send_frames(&sent_frames);
    let captured_packets = collect_packets(&mut capture, 4);
    let decisions: Vec<_> =
        captured_packets.iter().map(|packet| (packet.outcome, packet.destination.clone())).collect();
    let expected_server = CapturedPacketDestination::Server { mac: SERVER_MAC, ids: vec![server_id_from_number(7)] };
    assert_eq!(
        decisions,
        [
            ("established", expected_server.clone()),
            ("new_connection", expected_server.clone()),
            ("broadcast", CapturedPacketDestination::Broadcast),
            ("drop_malformed_ipv4", CapturedPacketDestination::Dropped),
        ]
    );
    for (packet, frame) in captured_packets.iter().zip(&sent_frames) {
        assert_eq!(packet.received_frame, frame[..frame.len().min(200)]);
        assert_eq!(packet.frame_length as usize, frame.len());
    }
    assert_eq!(captured_packets[0].processed_frame[..6], SERVER_MAC.0);

    assert_signals_end_wait(|| capture.poll(INTERRUPTED_WAIT_TIMEOUT, &mut |_| {}).unwrap());

    // The daemon replaces the capturing program by another variant, and the capture continues with that variant.
    let hash_table_mode = ServiceSettings { consistency: ConsistencyMode::HashTable, ..ServiceSettings::default() };
    lb.set_services(&[(service_address(VIP), hash_table_mode)]).unwrap();
    let (mut later_packets, deadline) = (Vec::new(), Instant::now() + INTERRUPTED_WAIT_TIMEOUT);
    for port in CLIENT_ENDPOINT.1 + 1.. {
        let syn_packet =
            TcpPacket { destination_mac: device_mac, flags: SYN, ..TcpPacket::new((CLIENT_ENDPOINT.0, port), VIP) };
        send_frames(&[TcpPacket { tcp_options: aligned_timestamp_option(1, 0), ..syn_packet }.to_frame()]);
        capture.poll(Duration::from_millis(50), &mut |packet| later_packets.push(packet)).unwrap();
        if !later_packets.is_empty() || Instant::now() > deadline {
            break;
        }
    }
    assert!(!later_packets.is_empty() && later_packets.iter().all(|packet| packet.outcome == "new_connection"));
    assert_eq!(capture.lost_record_count(), 0);

    let unknown_service = capture::PacketCaptureOptions { service: service_address((VIP.0, 443)), ..options };
    let error = PacketCapture::start(unknown_service).err().map(|error| error.to_string());
    assert_eq!(error.as_deref(), Some("no service 10.200.0.1:443/tcp: expected one of 10.200.0.1:80/tcp"));
    drop(capture);
    lb.detach().unwrap();
}

#[test]
fn ipv6_packets_of_the_service_are_captured() {
    skip_if!(missing_bpf_rights());
    let (veth_pair, pins) = (VethPair::new(), PinDirectory::new());
    let options = LoadBalancerOptions { pin_directory: Some(pins.path()), ..LoadBalancerOptions::default() };
    let mut lb = LoadBalancer::load(options).unwrap();
    veth_pair.server.run_in_namespace(|| lb.attach("eth0", XdpMode::Auto)).unwrap();
    let device_mac = veth_pair.server.run_in_namespace(|| interface_mac("eth0").0);
    let (captured_vip, other_vip) =
        (service_vip(AddressFamily::Ipv6), SocketAddr::new(service_vip(AddressFamily::Ipv6).ip(), 81));
    let services = [captured_vip, other_vip].map(|vip| (service_address(vip), ServiceSettings::default()));
    for index in lb.set_services(&services).unwrap() {
        lb.set_server(index, server_id_from_number(7), Server { mac: Some(SERVER_MAC), is_eligible: true });
        lb.install_table(
            index,
            &random_placement_table(PlacementRule::Table, 1, 1, &[server_id_from_number(7)], &mut seeded_rng(1, 0)),
        )
        .unwrap();
    }
    let options = capture::PacketCaptureOptions {
        pin_directory: pins.path(),
        service: service_address(captured_vip),
        max_bytes_per_packet: 200,
    };
    let mut capture = PacketCapture::start(options).unwrap();
    let syn_frame = |vip| {
        let tcp = TcpPacket {
            destination_mac: device_mac,
            flags: SYN,
            ..TcpPacket::between(client_socket_address(AddressFamily::Ipv6), vip)
        };
        TcpPacket { tcp_options: aligned_timestamp_option(1, 0), ..tcp }.to_frame()
    };
    // One receive queue keeps the order of both packets.
    let frames = [syn_frame(other_vip), syn_frame(captured_vip)];
    veth_pair.client.run_in_namespace(|| frames.iter().for_each(|frame| PacketSocket::open("eth0").send_frame(frame)));
    let captured_packets = collect_packets(&mut capture, 1);
    let outcomes_and_frames: Vec<_> =
        captured_packets.iter().map(|packet| (packet.outcome, &packet.received_frame)).collect();
    assert_eq!(outcomes_and_frames, [("new_connection", &frames[1])]);
    drop(capture);
    lb.detach().unwrap();
}
