//! Flood of SYNs from addresses that do not answer, with SYN cookies at the servers. Connections of real clients must
//! still open meanwhile, and established ones must continue.

use std::net::Ipv4Addr;
use std::os::fd::{AsRawFd as _, FromRawFd as _, OwnedFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use coreward_model::consistency::ConsistencyMode;
use coreward_model::rss::{seeded_rng, uniform_below};
use coreward_testbed::addresses::SERVICE_ADDRESS;
use coreward_testbed::fleet::{ServerAdminState, TestbedFleetOptions};
use coreward_testbed::{NetworkNamespace, TestbedOptions, counters, find_missing_testbed_rights, skip_if};

use crate::support::{FleetTestEnv, assert_streams_unbroken, sleep_ms};

/// Prefix of the spoofed source addresses, and the first of these addresses as a number. No host behind the router uses
/// this prefix.
const SPOOFED_SOURCE_PREFIX: (&str, u32) = ("10.2.128.0/17", 0x0a02_8000);
const SYNS_PER_BURST: u32 = 40;
const SYN_BURST_INTERVAL: Duration = Duration::from_millis(2);

/// Returns the Internet checksum of the bytes (RFC 1071).
fn internet_checksum(bytes: &[u8]) -> u16 {
    let words =
        bytes.chunks(2).map(|byte_pair| u32::from(u16::from_be_bytes([byte_pair[0], *byte_pair.get(1).unwrap_or(&0)])));
    let sum: u32 = words.sum();
    let folded_sum = (sum & 0xffff) + (sum >> 16);
    !((folded_sum & 0xffff) + (folded_sum >> 16)) as u16
}

/// Returns an IPv4 packet with a SYN to the service. It has the same options as Linux's SYNs (MSS, SACK permitted,
/// timestamps and window scale).
fn build_syn_packet(source: Ipv4Addr, port: u16, sequence: u32) -> Vec<u8> {
    let mut tcp_segment = Vec::new();
    tcp_segment.extend(port.to_be_bytes());
    tcp_segment.extend(SERVICE_ADDRESS.port().to_be_bytes());
    tcp_segment.extend(sequence.to_be_bytes());
    tcp_segment.extend([0; 4]);
    tcp_segment.extend([10 << 4, 2, 0xfa, 0xf0, 0, 0, 0, 0]);
    tcp_segment.extend([2, 4, 5, 0xb4, 4, 2, 8, 10]);
    tcp_segment.extend(sequence.to_be_bytes());
    tcp_segment.extend([0, 0, 0, 0, 1, 3, 3, 7]);
    let addresses = [source.octets(), SERVICE_ADDRESS.ip().octets()].concat();
    let checksummed_bytes =
        [&addresses[..], &[0, libc::IPPROTO_TCP as u8, 0, tcp_segment.len() as u8], &tcp_segment].concat();
    let tcp_checksum = internet_checksum(&checksummed_bytes);
    tcp_segment[16..18].copy_from_slice(&tcp_checksum.to_be_bytes());
    let mut ip_header =
        vec![0x45, 0, 0, 20 + tcp_segment.len() as u8, 0, 0, 0x40, 0, 64, libc::IPPROTO_TCP as u8, 0, 0];
    ip_header.extend(&addresses);
    let ip_checksum = internet_checksum(&ip_header);
    ip_header[10..12].copy_from_slice(&ip_checksum.to_be_bytes());
    [ip_header, tcp_segment].concat()
}

/// Sends SYNs from spoofed sources until `stop_flag` is set, and returns the number of SYNs sent.
fn flood_with_syns(client: &NetworkNamespace, stop_flag: &AtomicBool) -> anyhow::Result<u64> {
    client.run_within(|| {
        // SAFETY: takes integers, returns a new descriptor or -1.
        let socket_fd = unsafe { libc::socket(libc::AF_INET, libc::SOCK_RAW | libc::SOCK_CLOEXEC, libc::IPPROTO_RAW) };
        anyhow::ensure!(socket_fd >= 0, "a raw socket: {}", std::io::Error::last_os_error());
        // SAFETY: the descriptor is new and has no other owner.
        let socket = unsafe { OwnedFd::from_raw_fd(socket_fd) };
        let destination = nix::sys::socket::SockaddrIn::from(SERVICE_ADDRESS);
        let mut rng = seeded_rng(1, 99);
        let mut sent_syn_count = 0;
        while !stop_flag.load(Ordering::Relaxed) {
            for _ in 0..SYNS_PER_BURST {
                let source_address = Ipv4Addr::from_bits(SPOOFED_SOURCE_PREFIX.1 + uniform_below(&mut rng, 1 << 15));
                let source_port = 1024 + uniform_below(&mut rng, 60_000) as u16;
                let packet = build_syn_packet(source_address, source_port, uniform_below(&mut rng, u32::MAX));
                let flags = nix::sys::socket::MsgFlags::empty();
                sent_syn_count +=
                    u64::from(nix::sys::socket::sendto(socket.as_raw_fd(), &packet, &destination, flags).is_ok());
            }
            std::thread::sleep(SYN_BURST_INTERVAL);
        }
        Ok(sent_syn_count)
    })
}

fn assert_connections_survive_syn_flood(instance: &str, consistency: ConsistencyMode) {
    let options = TestbedOptions {
        instance_name: instance.to_owned(),
        server_count: 3,
        router_mtu: Some(1500),
        ..TestbedOptions::default()
    };
    let mut env = FleetTestEnv::start(
        options,
        TestbedFleetOptions { consistency, policy_name: "rr".to_owned(), ..Default::default() },
    );
    // This route keeps the router from sending an ARP request for each spoofed address.
    let mut ip_command = std::process::Command::new("ip");
    ip_command.args(["route", "add", "blackhole", SPOOFED_SOURCE_PREFIX.0]);
    env.testbed.run_command(env.testbed.client_router().unwrap(), ip_command).unwrap();
    let (stop_flag, client) = (AtomicBool::new(false), env.testbed.client().clone());
    std::thread::scope(|scope| {
        let flood_thread = scope.spawn(|| flood_with_syns(&client, &stop_flag));
        let stream_client = env.start_streams(100.0);
        sleep_ms(3_000);
        env.set_admin_state(1, Some(ServerAdminState::Draining));
        sleep_ms(2_000);
        assert_streams_unbroken(stream_client);
        stop_flag.store(true, Ordering::Relaxed);
        let sent_syn_count = flood_thread.join().unwrap().unwrap();
        println!("{sent_syn_count} SYNs");
        assert!(sent_syn_count > 20_000, "{sent_syn_count} SYNs are no flood");
    });
    let read_counters = |number| counters::read_kernel_counters(env.testbed.server(number).unwrap()).unwrap();
    let server_counters: Vec<_> = [2, 3].map(read_counters).into();
    for name in ["TcpExtSyncookiesSent", "TcpExtSyncookiesRecv"] {
        assert!(
            counters::sum_counter_over_namespaces(&server_counters, name) > 0,
            "{name}: the flood did not fill the servers' queues"
        );
    }
}

#[test]
fn connections_open_and_persist_during_a_syn_flood() {
    skip_if!(find_missing_testbed_rights());
    assert_connections_survive_syn_flood("flood", ConsistencyMode::Stateless);
}

#[test]
fn stateful_connections_open_and_persist_during_a_syn_flood() {
    skip_if!(find_missing_testbed_rights());
    assert_connections_survive_syn_flood("floodfull", ConsistencyMode::Stateful);
}
