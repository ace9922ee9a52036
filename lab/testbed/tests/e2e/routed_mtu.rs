//! Servers behind a router, and clients whose links have another MTU than the load balancer's. The test transfers 1 MB
//! each way by TCP and by UDP. Packets do not fit with their outer header until the client has learned a smaller MTU.

use std::io::{ErrorKind, Read as _, Write as _};
use std::net::{SocketAddr, TcpListener, TcpStream, UdpSocket};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use coreward_model::forwarding::ForwardingMode;
use coreward_testbed::addresses::{AddressFamily, HOST_DEVICE, server_address};
use coreward_testbed::fleet::{Fleet, TestbedFleetOptions};
use coreward_testbed::uplink::CLIENT_SIDE_DEVICE;
use coreward_testbed::{DEFAULT_WAIT_TIMEOUT, Testbed, TestbedOptions, find_missing_testbed_rights, skip_if};

use crate::support::{assert_eventually, run_command_line};

const MEGABYTE: usize = 1_000_000;
const ETHERNET_MTU: usize = 1500;
/// Lengths of test datagrams (bytes). A datagram of the first length is sent without DF in several fragments, and one
/// of the second length with DF in one packet.
const TEST_DATAGRAM_BYTES: [usize; 2] = [8_000, 1_400];
/// Time without an answer after which a client repeats a datagram.
const DATAGRAM_RETRY_INTERVAL: Duration = Duration::from_millis(500);

/// Echo servers on every server of the testbed. They return 1 MB per TCP connection and each datagram until this value
/// is dropped.
struct EchoServers(Arc<AtomicBool>);

impl EchoServers {
    fn start(testbed: &Testbed) -> Self {
        let stop_flag = Arc::new(AtomicBool::new(false));
        for number in testbed.server_numbers() {
            let service = testbed.service_address();
            let bind_sockets = || Ok((TcpListener::bind(service)?, UdpSocket::bind(service)?));
            let (listener, socket) = testbed.server(number).unwrap().run_within(bind_sockets).unwrap();
            listener.set_nonblocking(true).unwrap();
            socket.set_read_timeout(Some(Duration::from_millis(100))).unwrap();
            let (tcp_stop_flag, udp_stop_flag) = (Arc::clone(&stop_flag), Arc::clone(&stop_flag));
            std::thread::spawn(move || echo_connections(&listener, &tcp_stop_flag));
            std::thread::spawn(move || echo_datagrams(&socket, &udp_stop_flag));
        }
        Self(stop_flag)
    }
}

impl Drop for EchoServers {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

fn echo_connections(listener: &TcpListener, stop_flag: &AtomicBool) {
    while !stop_flag.load(Ordering::Relaxed) {
        match listener.accept() {
            Ok((mut stream, _)) => drop(std::thread::spawn(move || {
                stream.set_nonblocking(false)?;
                let mut received_bytes = vec![0; MEGABYTE];
                stream.read_exact(&mut received_bytes)?;
                stream.write_all(&received_bytes)
            })),
            Err(_) => std::thread::sleep(Duration::from_millis(10)),
        }
    }
}

fn echo_datagrams(socket: &UdpSocket, stop_flag: &AtomicBool) {
    let mut buffer = vec![0; 65_536];
    while !stop_flag.load(Ordering::Relaxed) {
        if let Ok((length, client)) = socket.recv_from(&mut buffer) {
            // Ignore an error, because the kernel reports an ICMP error about an earlier answer once, and the client
            // sends its datagram again.
            let _ = socket.send_to(&buffer[..length], client);
        }
    }
}

/// Sends 1 MB to the service over one TCP connection, and receives it back.
fn exchange_megabyte_by_tcp(service: SocketAddr) -> anyhow::Result<()> {
    let mut stream = TcpStream::connect_timeout(&service, *DEFAULT_WAIT_TIMEOUT)?;
    stream.set_read_timeout(Some(*DEFAULT_WAIT_TIMEOUT))?;
    stream.set_write_timeout(Some(*DEFAULT_WAIT_TIMEOUT))?;
    let sent_bytes: Vec<u8> = (0..MEGABYTE).map(|index| (index % 251) as u8).collect();
    stream.write_all(&sent_bytes)?;
    let mut received_bytes = vec![0; MEGABYTE];
    stream.read_exact(&mut received_bytes)?;
    anyhow::ensure!(sent_bytes == received_bytes, "other bytes came back");
    Ok(())
}

/// Returns whether the error is due to an ICMP error for a long packet. After such an error, the kernel sends shorter
/// fragments.
fn is_message_too_long(error: &std::io::Error) -> bool {
    error.raw_os_error() == Some(libc::EMSGSIZE)
}

/// Sends 1 MB to the service and back in datagrams of `length`, one by one. Returns the number of repeated datagrams.
fn exchange_megabyte_by_udp(service: SocketAddr, length: usize) -> anyhow::Result<usize> {
    let socket = UdpSocket::bind(if service.is_ipv4() { "0.0.0.0:0" } else { "[::]:0" })?;
    socket.connect(service)?;
    socket.set_read_timeout(Some(DATAGRAM_RETRY_INTERVAL))?;
    let (mut repeat_count, mut buffer) = (0, vec![0; 65_536]);
    for number in 0..MEGABYTE / length {
        let sent_datagram = vec![number as u8; length];
        let deadline = Instant::now() + *DEFAULT_WAIT_TIMEOUT;
        socket.send(&sent_datagram)?;
        loop {
            match socket.recv(&mut buffer) {
                Ok(received_length) if buffer[..received_length] == sent_datagram[..] => break,
                // This answers a datagram that was sent again.
                Ok(_) => {}
                Err(error) if error.kind() == ErrorKind::WouldBlock || is_message_too_long(&error) => {
                    anyhow::ensure!(Instant::now() < deadline, "no answer to datagram {number} of {length} bytes");
                    socket.send(&sent_datagram)?;
                    repeat_count += 1;
                }
                Err(error) => return Err(error.into()),
            }
        }
    }
    Ok(repeat_count)
}

/// Returns the MTU towards the service that the client's kernel has learned, or `None` if it has learned none.
fn read_learned_mtu(testbed: &Testbed) -> Option<usize> {
    let route_text =
        run_command_line(testbed, testbed.client(), &format!("ip route get {}", testbed.service_address().ip()));
    let mut tokens_from_mtu = route_text.split_whitespace().skip_while(|token| *token != "mtu");
    tokens_from_mtu.nth(1).map(|mtu| mtu.parse().unwrap())
}

/// Kind of tunnel, as (encapsulation, address family of the service, address family of the servers).
type TunnelKind = (ForwardingMode, AddressFamily, AddressFamily);

fn start_env(instance: &str, (forwarding, family, servers_family): TunnelKind) -> (Fleet, EchoServers, Testbed) {
    let testbed = Testbed::create(TestbedOptions {
        instance_name: instance.to_owned(),
        family,
        server_count: 2,
        has_server_router: true,
        router_mtu: Some(ETHERNET_MTU as u16),
        ..TestbedOptions::default()
    })
    .unwrap();
    let echo_servers = EchoServers::start(&testbed);
    let udp_service_config = format!(
        "\n[[service]]\nname = \"datagrams\"\nvip = \"{}\"\nprotocol = \"udp\"\npolicy = \"rr\"\n\
         forwarding = \"{}\"\n",
        testbed.service_address(),
        forwarding.name()
    );
    let policy = "rr".to_owned();
    let options = TestbedFleetOptions {
        forwarding,
        server_address_family: servers_family,
        policy_name: policy,
        extra_fleet_text: udp_service_config,
        ..TestbedFleetOptions::default()
    };
    (Fleet::start(&testbed, options).unwrap(), echo_servers, testbed)
}

fn query_lb_counter(fleet: &Fleet, testbed: &Testbed, name: &str) -> u64 {
    let status = fleet.query_status(testbed).unwrap();
    status["load_balancers"][0]["state"]["counters"][name].as_u64().unwrap_or(0)
}

/// Asserts that 1 MB passes to the service and back by TCP and by UDP. `client_mtu` is the MTU of the client's link at
/// both ends, or only at the router's end if `is_mtu_only_at_router` is true.
fn assert_megabytes_pass(instance: &str, tunnel: TunnelKind, client_mtu: u16, is_mtu_only_at_router: bool) {
    let (fleet, _echoes, testbed) = start_env(instance, tunnel);
    let router = testbed.client_router().unwrap();
    if is_mtu_only_at_router {
        let client_prefix = if tunnel.1 == AddressFamily::Ipv4 { "10.2.0.0/16" } else { "2001:db8::a02:0/112" };
        run_command_line(
            &testbed,
            router,
            &format!("ip route replace {client_prefix} dev {CLIENT_SIDE_DEVICE} mtu {client_mtu}"),
        );
    } else {
        run_command_line(&testbed, testbed.client(), &format!("ip link set {HOST_DEVICE} mtu {client_mtu}"));
        run_command_line(&testbed, router, &format!("ip link set {CLIENT_SIDE_DEVICE} mtu {client_mtu}"));
    }
    let max_inner_length =
        ETHERNET_MTU - tunnel.0.encapsulation_overhead_bytes(tunnel.2.host_address(server_address(1)));
    let max_client_packet_length = if is_mtu_only_at_router { ETHERNET_MTU } else { client_mtu.into() };
    let service_address = testbed.service_address();
    testbed
        .client()
        .run_within(|| {
            (0..4).try_for_each(|_| exchange_megabyte_by_tcp(service_address))?;
            for length in TEST_DATAGRAM_BYTES {
                let repeated_datagram_count = exchange_megabyte_by_udp(service_address, length)?;
                println!("{length} bytes: {repeated_datagram_count} sent again");
                anyhow::ensure!(
                    repeated_datagram_count <= 10,
                    "{repeated_datagram_count} of {} sent again",
                    MEGABYTE / length
                );
            }
            Ok(())
        })
        .unwrap();
    // The kernel stores an MTU for each destination.
    assert_eq!(read_learned_mtu(&testbed), (max_client_packet_length > max_inner_length).then_some(max_inner_length));
    if max_client_packet_length > max_inner_length {
        let fragmentation_needed_count = || query_lb_counter(&fleet, &testbed, "drop_fragmentation_needed");
        assert_eventually(*DEFAULT_WAIT_TIMEOUT, "the load balancer reports its ICMP errors", || {
            fragmentation_needed_count() > 0
        });
    }
}

#[test]
fn ipip_delivers_megabytes_to_client_behind_mtu_1280() {
    skip_if!(find_missing_testbed_rights());
    assert_megabytes_pass(
        "mtuipipsmall",
        (ForwardingMode::Ipip, AddressFamily::Ipv4, AddressFamily::Ipv4),
        1_280,
        true,
    );
}

#[test]
fn gue_delivers_megabytes_to_client_behind_mtu_1280() {
    skip_if!(find_missing_testbed_rights());
    assert_megabytes_pass("mtuguesmall", (ForwardingMode::Gue, AddressFamily::Ipv4, AddressFamily::Ipv4), 1_280, true);
}

#[test]
fn ipip_delivers_megabytes_from_client_with_mtu_9000() {
    skip_if!(find_missing_testbed_rights());
    assert_megabytes_pass(
        "mtuipiplarge",
        (ForwardingMode::Ipip, AddressFamily::Ipv4, AddressFamily::Ipv4),
        9_000,
        false,
    );
}

#[test]
fn gue_delivers_megabytes_from_client_with_mtu_9000() {
    skip_if!(find_missing_testbed_rights());
    assert_megabytes_pass("mtuguelarge", (ForwardingMode::Gue, AddressFamily::Ipv4, AddressFamily::Ipv4), 9_000, false);
}

#[test]
fn gue_delivers_megabytes_from_client_with_mtu_1280() {
    skip_if!(find_missing_testbed_rights());
    assert_megabytes_pass(
        "mtugueclient",
        (ForwardingMode::Gue, AddressFamily::Ipv4, AddressFamily::Ipv4),
        1_280,
        false,
    );
}

#[test]
fn gue_delivers_ipv6_megabytes_to_client_behind_mtu_1280() {
    skip_if!(find_missing_testbed_rights());
    assert_megabytes_pass(
        "mtugue66small",
        (ForwardingMode::Gue, AddressFamily::Ipv6, AddressFamily::Ipv6),
        1_280,
        true,
    );
}

#[test]
fn gue_delivers_ipv6_megabytes_from_client_with_mtu_9000() {
    skip_if!(find_missing_testbed_rights());
    assert_megabytes_pass(
        "mtugue66large",
        (ForwardingMode::Gue, AddressFamily::Ipv6, AddressFamily::Ipv6),
        9_000,
        false,
    );
}

#[test]
fn ipip_over_ipv4_delivers_ipv6_megabytes_with_mtu_9000() {
    skip_if!(find_missing_testbed_rights());
    assert_megabytes_pass(
        "mtuipip64large",
        (ForwardingMode::Ipip, AddressFamily::Ipv6, AddressFamily::Ipv4),
        9_000,
        false,
    );
}

#[test]
fn ipip_over_ipv6_delivers_ipv4_megabytes_with_mtu_9000() {
    skip_if!(find_missing_testbed_rights());
    assert_megabytes_pass(
        "mtuipip46large",
        (ForwardingMode::Ipip, AddressFamily::Ipv4, AddressFamily::Ipv6),
        9_000,
        false,
    );
}
