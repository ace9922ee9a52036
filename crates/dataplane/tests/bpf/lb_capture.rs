//! Tests of `coreward capture` at a load balancer in operation.

use std::net::{Ipv4Addr, SocketAddr};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use coreward_dataplane::lb::capture::{self, Capture, CapturedPacket, Destination};
use coreward_dataplane::lb::{LoadBalancer, Options, Server, XdpMode};
use coreward_dataplane::mac::MacAddress;
use coreward_model::consistency::{Consistency, ServiceMode};
use coreward_model::cookie::{self, Cookie, CookieKey, FleetKeys, KeyIndex};
use coreward_model::placement::PlacementRule;
use coreward_model::rss::seeded_rng;
use coreward_model::{FourTuple, ServiceAddress};

use crate::support::balancer::{CLIENT, VIP, id, random_table, service};
use crate::support::network::{PinDirectory, VethPair, mac_address, pin_to_one_cpu};
use crate::support::packet_socket::PacketSocket;
use crate::support::tunnel::{client, vip};
use crate::support::{self, Family, RST, SYN, Tcp, aligned_timestamp, missing_bpf_rights, skip_if};

const OTHER: (Ipv4Addr, u16) = (Ipv4Addr::new(10, 200, 0, 1), 81);
const SERVER_MAC: MacAddress = MacAddress([2, 0, 0, 0, 0, 9]);

fn keys() -> FleetKeys {
    FleetKeys { keys: [CookieKey { k0: 1, k1: 2 }, CookieKey { k0: 3, k1: 4 }], current: KeyIndex::First }
}

/// Collects captured packets until there are `count` of them, or 30 s have passed.
fn collect(capture: &mut Capture, count: usize) -> Vec<CapturedPacket> {
    let mut captured = Vec::new();
    let limit = Instant::now() + Duration::from_secs(30);
    while captured.len() < count && Instant::now() < limit {
        capture.poll(Duration::from_millis(50), &mut |packet| captured.push(packet)).unwrap();
    }
    captured
}

/// Timeout of a wait that is to be ended earlier by a signal.
const LONG_WAIT: Duration = Duration::from_secs(30);

/// Sends signals until `wait` returns, as Ctrl-C does to `coreward capture`. A signal before the wait has no effect.
fn interrupt(wait: impl FnOnce()) {
    extern "C" fn nothing(_: libc::c_int) {}
    let handler = nix::sys::signal::SigHandler::Handler(nothing);
    // SAFETY: the handler does nothing.
    unsafe { nix::sys::signal::signal(nix::sys::signal::Signal::SIGUSR1, handler) }.unwrap();
    // SAFETY: takes nothing.
    let waiting = unsafe { libc::pthread_self() };
    let (began, is_over) = (Instant::now(), AtomicBool::new(false));
    let took = std::thread::scope(|scope| {
        scope.spawn(|| {
            while !is_over.load(Ordering::Relaxed) && began.elapsed() < 2 * LONG_WAIT {
                std::thread::sleep(Duration::from_millis(20));
                // SAFETY: the thread lives longer than this one.
                unsafe { libc::pthread_kill(waiting, libc::SIGUSR1) };
            }
        });
        wait();
        is_over.store(true, Ordering::Relaxed);
        began.elapsed()
    });
    assert!(took < LONG_WAIT, "the wait was not interrupted");
}

#[test]
fn capture_has_every_unchanged_packet_and_its_decision() {
    skip_if!(missing_bpf_rights());
    // One CPU keeps the order of the packets.
    pin_to_one_cpu();
    let (pair, pins) = (VethPair::new(), PinDirectory::new());
    let options = Options { pin_directory: Some(pins.path()), ..Options::default() };
    let mut lb = LoadBalancer::load(options).unwrap();
    pair.server.run_inside(|| lb.attach("eth0", XdpMode::Auto)).unwrap();
    let mac = pair.server.run_inside(|| mac_address("eth0").0);
    let stateless = |vip| (service(vip), ServiceMode::default());
    let indexes = lb.set_services(&[stateless(VIP), stateless(OTHER)]).unwrap();
    lb.set_service_name(indexes[0], "web");
    lb.set_keys(&keys());
    for index in &indexes {
        lb.set_server(*index, id(7), Server { mac: Some(SERVER_MAC), is_eligible: true });
        lb.install_table(*index, &random_table(PlacementRule::Table, 1, 1, &[id(7)], &mut seeded_rng(1, 0))).unwrap();
    }
    let named: Vec<(ServiceAddress, String)> = capture::services(&pins.path()).unwrap();
    assert_eq!(named, [(service(VIP), "web".to_owned()), (service(OTHER), String::new())]);

    let options = capture::Options { pin_directory: pins.path(), service: service(VIP), capture_length: 200 };
    let mut capture = Capture::start(options.clone()).unwrap();
    let tsecr =
        cookie::stamp_tsval(&keys(), &support::TIME_KEY, &FourTuple::ipv4(CLIENT, VIP), Cookie::Server(id(7)), 12_345);
    let established = Tcp { destination_mac: mac, options: aligned_timestamp(1, tsecr), ..Tcp::new(CLIENT, VIP) };
    let mut malformed = established.frame();
    malformed[14] = 0x41;
    let frames = [
        established.frame(),
        Tcp { flags: SYN, options: aligned_timestamp(1, 0), ..established.clone() }.frame(),
        Tcp { flags: RST, options: vec![], ..established.clone() }.frame(),
        malformed,
        // A packet of another service is not captured.
        Tcp { destination_mac: mac, ..Tcp::new(CLIENT, OTHER) }.frame(),
    ];
    let send = |frames: &[Vec<u8>]| {
        pair.client.run_inside(|| frames.iter().for_each(|frame| PacketSocket::open("eth0").send(frame)));
    };
    send(&frames);
    let captured = collect(&mut capture, 4);
    let seen: Vec<_> = captured.iter().map(|packet| (packet.outcome, packet.destination.clone())).collect();
    let server = Destination::Server(SERVER_MAC, vec![id(7)]);
    assert_eq!(
        seen,
        [
            ("established", server.clone()),
            ("new_connection", server.clone()),
            ("broadcast", Destination::AllServers),
            ("drop_malformed_ipv4", Destination::Dropped),
        ]
    );
    for (packet, frame) in captured.iter().zip(&frames) {
        assert_eq!(packet.frame_in, frame[..frame.len().min(200)]);
        assert_eq!(packet.length as usize, frame.len());
    }
    assert_eq!(captured[0].frame_out[..6], SERVER_MAC.0);

    interrupt(|| capture.poll(LONG_WAIT, &mut |_| {}).unwrap());

    // The daemon replaces the capturing program by another variant: the capture continues with that variant.
    let flows = ServiceMode { consistency: Consistency::HashTable, ..ServiceMode::default() };
    lb.set_services(&[(service(VIP), flows)]).unwrap();
    let (mut captured, limit) = (Vec::new(), Instant::now() + LONG_WAIT);
    for port in CLIENT.1 + 1.. {
        let begins = Tcp { destination_mac: mac, flags: SYN, ..Tcp::new((CLIENT.0, port), VIP) };
        send(&[Tcp { options: aligned_timestamp(1, 0), ..begins }.frame()]);
        capture.poll(Duration::from_millis(50), &mut |packet| captured.push(packet)).unwrap();
        if !captured.is_empty() || Instant::now() > limit {
            break;
        }
    }
    assert!(!captured.is_empty() && captured.iter().all(|packet| packet.outcome == "new_connection"));
    assert_eq!(capture.lost_records(), 0);

    let unknown = capture::Options { service: service((VIP.0, 443)), ..options };
    let error = Capture::start(unknown).err().map(|error| error.to_string());
    assert_eq!(error.as_deref(), Some("no service 10.200.0.1:443/tcp: expected one of 10.200.0.1:80/tcp"));
    drop(capture);
    lb.detach().unwrap();
}

#[test]
fn ipv6_packets_of_the_service_are_captured() {
    skip_if!(missing_bpf_rights());
    let (pair, pins) = (VethPair::new(), PinDirectory::new());
    let options = Options { pin_directory: Some(pins.path()), ..Options::default() };
    let mut lb = LoadBalancer::load(options).unwrap();
    pair.server.run_inside(|| lb.attach("eth0", XdpMode::Auto)).unwrap();
    let mac = pair.server.run_inside(|| mac_address("eth0").0);
    let (watched, other) = (vip(Family::Ipv6), SocketAddr::new(vip(Family::Ipv6).ip(), 81));
    let services = [watched, other].map(|vip| (service(vip), ServiceMode::default()));
    for index in lb.set_services(&services).unwrap() {
        lb.set_server(index, id(7), Server { mac: Some(SERVER_MAC), is_eligible: true });
        lb.install_table(index, &random_table(PlacementRule::Table, 1, 1, &[id(7)], &mut seeded_rng(1, 0))).unwrap();
    }
    let options = capture::Options { pin_directory: pins.path(), service: service(watched), capture_length: 200 };
    let mut capture = Capture::start(options).unwrap();
    let syn = |vip| {
        let tcp = Tcp { destination_mac: mac, flags: SYN, ..Tcp::between(client(Family::Ipv6), vip) };
        Tcp { options: aligned_timestamp(1, 0), ..tcp }.frame()
    };
    // One receive queue keeps the order of both packets.
    let frames = [syn(other), syn(watched)];
    pair.client.run_inside(|| frames.iter().for_each(|frame| PacketSocket::open("eth0").send(frame)));
    let captured = collect(&mut capture, 1);
    let seen: Vec<_> = captured.iter().map(|packet| (packet.outcome, &packet.frame_in)).collect();
    assert_eq!(seen, [("new_connection", &frames[1])]);
    drop(capture);
    lb.detach().unwrap();
}
