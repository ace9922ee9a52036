//! What `coreward capture` sees of a load balancer at work.

mod support;

use std::net::Ipv4Addr;
use std::time::{Duration, Instant};

use coreward_dataplane::lb::capture::{self, Capture, Captured, Destination};
use coreward_dataplane::lb::{LoadBalancer, Options, Server, XdpMode};
use coreward_dataplane::mac::MacAddress;
use coreward_model::consistency::{Consistency, ServiceMode};
use coreward_model::cookie::{self, Cookie, CookieKey, FleetKeys, KeyIndex};
use coreward_model::placement::Rule;
use coreward_model::rss::seeded_rng;
use coreward_model::{FourTuple, ServiceAddress};
use support::balancer::{id, random_table, service};
use support::network::{Pair, PinDirectory, on_one_cpu};
use support::packet_socket::PacketSocket;
use support::{RST, SYN, Tcp, may_load_bpf, usual_timestamp};

const VIP: (Ipv4Addr, u16) = (Ipv4Addr::new(10, 200, 0, 1), 80);
const OTHER: (Ipv4Addr, u16) = (Ipv4Addr::new(10, 200, 0, 1), 81);
const CLIENT: (Ipv4Addr, u16) = (Ipv4Addr::new(10, 1, 0, 7), 40312);
const SERVER_MAC: MacAddress = MacAddress([2, 0, 0, 0, 0, 9]);

fn keys() -> FleetKeys {
    FleetKeys { keys: [CookieKey { k0: 1, k1: 2 }, CookieKey { k0: 3, k1: 4 }], current: KeyIndex::First }
}

fn device_mac() -> [u8; 6] {
    let mut addresses = nix::ifaddrs::getifaddrs().unwrap().filter(|entry| entry.interface_name == "eth0");
    addresses.find_map(|entry| entry.address?.as_link_addr()?.addr()).unwrap()
}

/// Everything captured until `count` packets are there (30 s at most).
fn collect(capture: &mut Capture, count: usize) -> Vec<Captured> {
    let mut captured = Vec::new();
    let limit = Instant::now() + Duration::from_secs(30);
    while captured.len() < count && Instant::now() < limit {
        capture.poll(Duration::from_millis(50), &mut |packet| captured.push(packet)).unwrap();
    }
    captured
}

/// A signal, as Ctrl-C sends it to `coreward capture`, comes while it waits.
fn interrupt(wait: impl FnOnce()) {
    extern "C" fn nothing(_: libc::c_int) {}
    let handler = nix::sys::signal::SigHandler::Handler(nothing);
    // SAFETY: the handler does nothing.
    unsafe { nix::sys::signal::signal(nix::sys::signal::Signal::SIGUSR1, handler) }.unwrap();
    // SAFETY: takes nothing.
    let waiting = unsafe { libc::pthread_self() };
    let began = Instant::now();
    std::thread::scope(|scope| {
        scope.spawn(move || {
            std::thread::sleep(Duration::from_millis(100));
            // SAFETY: the thread lives longer than this one.
            unsafe { libc::pthread_kill(waiting, libc::SIGUSR1) }
        });
        wait();
    });
    assert!(began.elapsed() < Duration::from_secs(5), "the wait was not interrupted");
}

#[test]
fn every_packet_of_the_service_is_seen_as_it_came_and_with_what_was_decided() {
    if !may_load_bpf("every_packet_of_the_service_is_seen_as_it_came_and_with_what_was_decided") {
        return;
    }
    // What is sent one after the other arrives so.
    on_one_cpu();
    let (pair, pins) = (Pair::new(), PinDirectory::new());
    let options = Options { pin_directory: Some(pins.path()), ..Options::default() };
    let mut lb = LoadBalancer::load(options).unwrap();
    pair.server.within(|| lb.attach("eth0", XdpMode::Auto)).unwrap();
    let mac = pair.server.within(device_mac);
    let stateless = |vip| (service(vip), ServiceMode::default());
    let indexes = lb.set_services(&[stateless(VIP), stateless(OTHER)]).unwrap();
    lb.set_service_name(indexes[0], "web");
    lb.set_keys(&keys());
    for index in &indexes {
        lb.set_server(*index, id(7), Server { mac: Some(SERVER_MAC), eligible: true });
        lb.install_table(*index, &random_table(Rule::Table, 1, 1, &[id(7)], &mut seeded_rng(1, 0))).unwrap();
    }
    let named: Vec<(ServiceAddress, String)> = capture::services(&pins.path()).unwrap();
    assert_eq!(named, [(service(VIP), "web".to_owned()), (service(OTHER), String::new())]);

    let options = capture::Options { pin_directory: pins.path(), service: service(VIP), capture_length: 200 };
    let mut capture = Capture::start(options.clone()).unwrap();
    let echo = cookie::stamp(&keys(), &support::TIME_KEY, &FourTuple::ipv4(CLIENT, VIP), Cookie::Server(id(7)), 12_345);
    let established = Tcp { destination_mac: mac, options: usual_timestamp(1, echo), ..Tcp::new(CLIENT, VIP) };
    let mut malformed = established.frame();
    malformed[14] = 0x41;
    let frames = [
        established.frame(),
        Tcp { flags: SYN, options: usual_timestamp(1, 0), ..established.clone() }.frame(),
        Tcp { flags: RST, options: vec![], ..established.clone() }.frame(),
        malformed,
        // Another service's: not seen.
        Tcp { destination_mac: mac, ..Tcp::new(CLIENT, OTHER) }.frame(),
    ];
    let send = |frames: &[Vec<u8>]| {
        pair.client.within(|| frames.iter().for_each(|frame| PacketSocket::open("eth0").send(frame)));
    };
    send(&frames);
    let captured = collect(&mut capture, 4);
    let seen: Vec<_> = captured.iter().map(|packet| (packet.outcome, packet.destination.clone())).collect();
    let server = Destination::Server(SERVER_MAC, vec![id(7)]);
    assert_eq!(
        seen,
        [
            ("established", server.clone()),
            ("first", server.clone()),
            ("to_all", Destination::AllServers),
            ("drop_malformed_ipv4", Destination::Dropped),
        ]
    );
    for (packet, frame) in captured.iter().zip(&frames) {
        assert_eq!(packet.arrived, frame[..frame.len().min(200)]);
        assert_eq!(packet.length as usize, frame.len());
    }
    assert_eq!(captured[0].left[..6], SERVER_MAC.0);

    interrupt(|| capture.poll(Duration::from_secs(5), &mut |_| {}).unwrap());

    // Another variant of the program takes its place: the capture follows it.
    let flows = ServiceMode { consistency: Consistency::HashTable, ..ServiceMode::default() };
    lb.set_services(&[(service(VIP), flows)]).unwrap();
    std::thread::sleep(Duration::from_millis(600));
    collect(&mut capture, 0);
    capture.poll(Duration::ZERO, &mut |_| {}).unwrap();
    send(&frames[1..2]);
    let captured = collect(&mut capture, 1);
    assert_eq!((captured.len(), captured[0].outcome), (1, "first"));
    assert_eq!(capture.lost(), 0);

    let unknown = capture::Options { service: service((VIP.0, 443)), ..options };
    let error = Capture::start(unknown).err().map(|error| error.to_string());
    assert_eq!(error.as_deref(), Some("no service 10.200.0.1:443/tcp: expected one of 10.200.0.1:80/tcp"));
    drop(capture);
    lb.detach().unwrap();
}
