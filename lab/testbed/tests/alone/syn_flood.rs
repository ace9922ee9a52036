//! Flood of SYNs from addresses that do not answer, with SYN cookies at the servers. Meanwhile connections of real
//! clients open, and established ones continue.

use std::net::Ipv4Addr;
use std::os::fd::{AsRawFd as _, FromRawFd as _, OwnedFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use coreward_model::consistency::Consistency;
use coreward_model::rss::{seeded_rng, uniform_below};
use coreward_testbed::addresses::SERVICE_ADDRESS;
use coreward_testbed::fleet::{AdminState, FleetOptions};
use coreward_testbed::{Namespace, TestbedOptions, counters, missing_testbed_rights, skip_if};

use crate::support::{TestEnv, assert_unbroken, pause};

/// Prefix and first address of the spoofed sources: 10.2.128.0/17, unused and behind the router.
const SPOOFED_SOURCES: (&str, u32) = ("10.2.128.0/17", 0x0a02_8000);
const SYNS_PER_BURST: u32 = 40;
const BURST_INTERVAL: Duration = Duration::from_millis(2);

/// Returns the Internet checksum of the bytes (RFC 1071).
fn checksum(bytes: &[u8]) -> u16 {
    let words = bytes.chunks(2).map(|pair| u32::from(u16::from_be_bytes([pair[0], *pair.get(1).unwrap_or(&0)])));
    let sum: u32 = words.sum();
    let folded = (sum & 0xffff) + (sum >> 16);
    !((folded & 0xffff) + (folded >> 16)) as u16
}

/// Returns an IPv4 packet with a SYN to the service as Linux sends it: MSS, SACK permitted, timestamps, window scale.
fn syn(source: Ipv4Addr, port: u16, sequence: u32) -> Vec<u8> {
    let mut tcp = Vec::new();
    tcp.extend(port.to_be_bytes());
    tcp.extend(SERVICE_ADDRESS.port().to_be_bytes());
    tcp.extend(sequence.to_be_bytes());
    tcp.extend([0; 4]);
    tcp.extend([10 << 4, 2, 0xfa, 0xf0, 0, 0, 0, 0]);
    tcp.extend([2, 4, 5, 0xb4, 4, 2, 8, 10]);
    tcp.extend(sequence.to_be_bytes());
    tcp.extend([0, 0, 0, 0, 1, 3, 3, 7]);
    let addresses = [source.octets(), SERVICE_ADDRESS.ip().octets()].concat();
    let pseudo = [&addresses[..], &[0, libc::IPPROTO_TCP as u8, 0, tcp.len() as u8], &tcp].concat();
    let sum = checksum(&pseudo);
    tcp[16..18].copy_from_slice(&sum.to_be_bytes());
    let mut ip = vec![0x45, 0, 0, 20 + tcp.len() as u8, 0, 0, 0x40, 0, 64, libc::IPPROTO_TCP as u8, 0, 0];
    ip.extend(&addresses);
    let sum = checksum(&ip);
    ip[10..12].copy_from_slice(&sum.to_be_bytes());
    [ip, tcp].concat()
}

/// Sends SYNs from spoofed sources until `done`, and returns the number of SYNs sent.
fn flood(client: &Namespace, done: &AtomicBool) -> anyhow::Result<u64> {
    client.within(|| {
        // SAFETY: takes integers, returns a new descriptor or -1.
        let raw = unsafe { libc::socket(libc::AF_INET, libc::SOCK_RAW | libc::SOCK_CLOEXEC, libc::IPPROTO_RAW) };
        anyhow::ensure!(raw >= 0, "a raw socket: {}", std::io::Error::last_os_error());
        // SAFETY: the descriptor is new and has no other owner.
        let socket = unsafe { OwnedFd::from_raw_fd(raw) };
        let to = nix::sys::socket::SockaddrIn::from(SERVICE_ADDRESS);
        let mut rng = seeded_rng(1, 99);
        let mut sent = 0;
        while !done.load(Ordering::Relaxed) {
            for _ in 0..SYNS_PER_BURST {
                let source = Ipv4Addr::from_bits(SPOOFED_SOURCES.1 + uniform_below(&mut rng, 1 << 15));
                let port = 1024 + uniform_below(&mut rng, 60_000) as u16;
                let packet = syn(source, port, uniform_below(&mut rng, u32::MAX));
                let flags = nix::sys::socket::MsgFlags::empty();
                sent += u64::from(nix::sys::socket::sendto(socket.as_raw_fd(), &packet, &to, flags).is_ok());
            }
            std::thread::sleep(BURST_INTERVAL);
        }
        Ok(sent)
    })
}

fn connections_survive_flood(instance: &str, consistency: Consistency) {
    let options = TestbedOptions {
        instance: instance.to_owned(),
        servers: 3,
        router_mtu: Some(1500),
        ..TestbedOptions::default()
    };
    let mut env = TestEnv::start(options, FleetOptions { consistency, policy: "rr".to_owned(), ..Default::default() });
    // The route keeps the router from sending an ARP request for each spoofed address.
    let mut ip = std::process::Command::new("ip");
    ip.args(["route", "add", "blackhole", SPOOFED_SOURCES.0]);
    env.testbed.run(env.testbed.router().unwrap(), ip).unwrap();
    let (done, client) = (AtomicBool::new(false), env.testbed.client().clone());
    std::thread::scope(|scope| {
        let flood = scope.spawn(|| flood(&client, &done));
        let streams = env.start_streams(100.0);
        pause(3_000);
        env.set_admin_state(1, Some(AdminState::Draining));
        pause(2_000);
        assert_unbroken(streams);
        done.store(true, Ordering::Relaxed);
        let sent = flood.join().unwrap().unwrap();
        println!("{sent} SYNs");
        assert!(sent > 20_000, "{sent} SYNs are no flood");
    });
    let read = |number| counters::read(env.testbed.server(number).unwrap()).unwrap();
    let of_servers: Vec<_> = [2, 3].map(read).into();
    for name in ["TcpExtSyncookiesSent", "TcpExtSyncookiesRecv"] {
        assert!(
            counters::total_over_namespaces(&of_servers, name) > 0,
            "{name}: the flood did not fill the servers' queues"
        );
    }
}

#[test]
fn connections_open_and_last_during_a_syn_flood() {
    skip_if!(missing_testbed_rights());
    connections_survive_flood("flood", Consistency::Stateless);
}

#[test]
fn stateful_connections_open_and_last_during_a_syn_flood() {
    skip_if!(missing_testbed_rights());
    connections_survive_flood("floodfull", Consistency::Stateful);
}
