//! Connections of health checks as a server sees them. Each is reset at the address to which it was opened.

use std::collections::BTreeMap;
use std::fs;
use std::io::Read as _;
use std::net::Ipv4Addr;
use std::process::{Command, Stdio};
use std::sync::mpsc::{self, Receiver};
use std::time::Instant;

use coreward_testbed::addresses::{FIRST_IPV4_VIP, load_balancer_address, server_address};
use coreward_testbed::fleet::{
    Fleet, TestbedFleetOptions, certificate_directory, credential_file_paths, issue_certificate,
};
use coreward_testbed::{
    DEFAULT_WAIT_TIMEOUT, NetworkNamespace, Testbed, TestbedOptions, TestbedProcess, find_missing_testbed_rights,
    skip_if,
};
use coreward_tls::authority::{CertificateAuthority, CertificateValidity, DAY};
use coreward_tls::{FleetRole, TlsCredentialFiles};
use socket2::{Domain, Protocol, Socket, Type};

use crate::support::{assert_eventually, sleep_ms};

/// Ports with health checks, as (port of the server, kind of check, whether the server answers).
const HEALTH_CHECKED_PORTS: [(u16, &str, bool); 5] = [
    (8001, "check = \"tcp\"", true),
    (8002, "check = \"http\"", true),
    (8003, "check = \"https\"\nverify = false", true),
    (8004, "check = \"http\"", false),
    (8005, "check = \"https\"\nverify = false", false),
];
/// Difference between the port of a check at the VIP and the port of the same check at the server's own address.
const SERVER_TO_VIP_PORT_OFFSET: u16 = 100;
const CHECKS_PER_PORT: usize = 4;

/// TCP segment that the server received from the load balancer.
struct TcpSegment {
    destination: Ipv4Addr,
    /// Source port (of the load balancer) and destination port (of the server).
    port_pair: (u16, u16),
    is_syn: bool,
    is_rst: bool,
}

/// Destination addresses of the SYN and of the RST of a health check's connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct HealthCheckConnection {
    syn_destination: Ipv4Addr,
    reset_destination: Option<Ipv4Addr>,
}

/// Receiver of a copy of each TCP segment from the load balancer to the server.
struct SegmentSniffer {
    segments: Receiver<TcpSegment>,
    /// Connections of health checks, by the server's port and in the order of their SYNs. Each is a pair (load
    /// balancer's port, connection).
    connections_by_port: BTreeMap<u16, Vec<(u16, HealthCheckConnection)>>,
}

impl SegmentSniffer {
    fn start(server: &NetworkNamespace) -> Self {
        let open_raw_socket = || Ok(Socket::new(Domain::IPV4, Type::RAW, Some(Protocol::TCP))?);
        let mut socket = server.run_within(open_raw_socket).unwrap();
        socket.set_recv_buffer_size(1 << 20).unwrap();
        let (sender, segments) = mpsc::channel();
        std::thread::spawn(move || {
            let mut buffer = [0; 2048];
            loop {
                let length = socket.read(&mut buffer).unwrap();
                if let Some(segment) = parse_segment(&buffer[..length])
                    && sender.send(segment).is_err()
                {
                    return;
                }
            }
        });
        Self { segments, connections_by_port: BTreeMap::new() }
    }

    fn read_segments(&mut self) {
        for segment in self.segments.try_iter() {
            let (own_port, port) = segment.port_pair;
            let connections = self.connections_by_port.entry(port).or_default();
            let matching_connection = connections.iter_mut().rfind(|(connection_port, _)| *connection_port == own_port);
            let open_connection = matching_connection
                .map(|(_, connection)| connection)
                .filter(|connection| !segment.is_syn || connection.reset_destination.is_none());
            match open_connection {
                Some(connection) => {
                    connection.reset_destination =
                        connection.reset_destination.or(segment.is_rst.then_some(segment.destination))
                }
                None => connections.push((
                    own_port,
                    HealthCheckConnection { syn_destination: segment.destination, reset_destination: None },
                )),
            }
        }
    }

    fn connections_to_port(&self, port: u16) -> Vec<HealthCheckConnection> {
        self.connections_by_port.get(&port).into_iter().flatten().map(|(_, connection)| *connection).collect()
    }
}

/// Parses an IPv4 header without options and a TCP header. Returns `None` if the packet is not from the load balancer.
fn parse_segment(packet: &[u8]) -> Option<TcpSegment> {
    let read_address_at =
        |offset: usize| Some(Ipv4Addr::from(<[u8; 4]>::try_from(packet.get(offset..offset + 4)?).ok()?));
    let read_port_at = |offset: usize| Some(u16::from_be_bytes(packet.get(offset..offset + 2)?.try_into().ok()?));
    let flags = packet.get(33)?;
    let is_from_load_balancer = read_address_at(12)? == load_balancer_address(1);
    let (is_syn, is_rst) = (flags & 0x12 == 0x02, flags & 0x04 != 0);
    is_from_load_balancer.then_some(TcpSegment {
        destination: read_address_at(16)?,
        port_pair: (read_port_at(20)?, read_port_at(22)?),
        is_syn,
        is_rst,
    })
}

/// Starts nginx on those checked ports where the server answers.
fn start_nginx(testbed: &Testbed) -> TestbedProcess {
    let directory = testbed.directory().join("probed");
    fs::create_dir_all(&directory).unwrap();
    let fleet_name = "probed".parse().unwrap();
    CertificateAuthority::init(&certificate_directory(testbed), &fleet_name, 30 * DAY).unwrap();
    issue_certificate(testbed, FleetRole::Agent, "s1", &fleet_name, CertificateValidity::from_now(DAY)).unwrap();
    let TlsCredentialFiles { certificate_path: certificate, key_path: key, .. } =
        credential_file_paths(testbed, FleetRole::Agent, "s1");
    let build_listen_lines = |port: u16, listen_flags: &str| {
        format!("listen {port}{listen_flags}; listen {}{listen_flags}; ", port + SERVER_TO_VIP_PORT_OFFSET)
    };
    let all_listen_lines =
        [build_listen_lines(8001, ""), build_listen_lines(8002, ""), build_listen_lines(8003, " ssl")].concat();
    let configuration_path = directory.join("nginx.conf");
    let (error_log_path, pid_path) = (directory.join("start.log"), directory.join("pid"));
    let (directory, key, certificate) = (directory.display(), key.display(), certificate.display());
    let nginx_config = format!(
        "user root; daemon off; master_process off; pid {directory}/pid; error_log {directory}/error.log;\n\
         events {{}}\nhttp {{ access_log off; client_body_temp_path {directory}/body;\n\
         proxy_temp_path {directory}/p; fastcgi_temp_path {directory}/f; uwsgi_temp_path {directory}/u;\n\
         scgi_temp_path {directory}/s; ssl_certificate {certificate}; ssl_certificate_key {key};\n\
         server {{ {all_listen_lines} return 204; }} }}\n"
    );
    fs::write(&configuration_path, nginx_config).unwrap();
    let mut nginx_command = Command::new("nginx");
    nginx_command.arg("-c").arg(configuration_path).arg("-e").arg(error_log_path);
    nginx_command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
    let mut nginx_process = testbed.spawn(testbed.server(1).unwrap(), nginx_command).unwrap();
    nginx_process.wait_for_file("nginx", &pid_path).unwrap();
    nginx_process
}

fn listen_without_accepting(testbed: &Testbed) -> Vec<Socket> {
    let silent_ports = HEALTH_CHECKED_PORTS.iter().filter(|(_, _, answers)| !answers);
    let ports = silent_ports.flat_map(|(port, _, _)| [*port, port + SERVER_TO_VIP_PORT_OFFSET]);
    let open_listener = |port: u16| {
        let socket = Socket::new(Domain::IPV4, Type::STREAM, None)?;
        socket.bind(&std::net::SocketAddr::from(([0, 0, 0, 0], port)).into())?;
        socket.listen(1024)?;
        Ok(socket)
    };
    testbed.server(1).unwrap().run_within(|| ports.map(open_listener).collect()).unwrap()
}

/// Returns the configuration of a service for each checked port and each address at which it is checked.
fn service_configs_text() -> String {
    let build_service_config = |port: u16, check: &str, check_address: &str| {
        format!(
            "\n[[service]]\nname = \"s{port}\"\nvip = \"{FIRST_IPV4_VIP}:{port}\"\npolicy = \
             \"rr\"\n[service.health]\n{check}\n\
             at = \"{check_address}\"\ninterval = \"100ms\"\ntimeout = \"500ms\"\n"
        )
    };
    let configs_of_port = |(port, check, _): (u16, &str, bool)| {
        build_service_config(port, check, "vip")
            + &build_service_config(port + SERVER_TO_VIP_PORT_OFFSET, check, "server")
    };
    HEALTH_CHECKED_PORTS.map(configs_of_port).concat()
}

/// Returns the server's connections with the load balancer as `ss` prints them. Listening sockets and those in
/// TIME-WAIT are omitted.
fn list_connections_at_server(testbed: &Testbed) -> Vec<String> {
    let mut ss = Command::new("ss");
    let load_balancer_ip = load_balancer_address(1).to_string();
    ss.args(["-Htan", "exclude", "time-wait", "exclude", "listening", "dst", &load_balancer_ip]);
    let output = testbed.run_command(testbed.server(1).unwrap(), ss).unwrap();
    String::from_utf8(output.stdout).unwrap().lines().map(str::to_owned).collect()
}

/// Returns every checked port, with the address at which it is checked.
fn checked_ports_and_addresses() -> impl Iterator<Item = (u16, Ipv4Addr)> {
    HEALTH_CHECKED_PORTS
        .into_iter()
        .flat_map(|(port, _, _)| [(port, FIRST_IPV4_VIP), (port + SERVER_TO_VIP_PORT_OFFSET, server_address(1))])
}

/// Waits until every checked port has had [`CHECKS_PER_PORT`] more connections, successful or not.
fn wait_for_health_checks(sniffer: &mut SegmentSniffer) {
    sniffer.read_segments();
    let counts_before: BTreeMap<u16, usize> =
        checked_ports_and_addresses().map(|(port, _)| (port, sniffer.connections_to_port(port).len())).collect();
    assert_eventually(*DEFAULT_WAIT_TIMEOUT, "every port is checked", || {
        sniffer.read_segments();
        checked_ports_and_addresses()
            .all(|(port, _)| sniffer.connections_to_port(port).len() >= counts_before[&port] + CHECKS_PER_PORT)
    });
}

/// Asserts that all connections of health checks were reset at the address to which they were opened. The checks must
/// have ended.
fn assert_all_connections_were_reset(testbed: &Testbed, sniffer: &mut SegmentSniffer, description: &str) {
    let deadline = Instant::now() + *DEFAULT_WAIT_TIMEOUT / 4;
    loop {
        let open_connections = list_connections_at_server(testbed);
        if open_connections.is_empty() {
            break;
        }
        assert!(
            Instant::now() < deadline,
            "{description}: {} are open at the server: {open_connections:#?}",
            open_connections.len()
        );
        sleep_ms(50);
    }
    sniffer.read_segments();
    for (port, address) in checked_ports_and_addresses() {
        let port_connections = sniffer.connections_to_port(port);
        // The server may send a reset itself, as its answer to TLS's last record after it has closed its end.
        let server_may_reset = port % SERVER_TO_VIP_PORT_OFFSET == 3;
        let was_reset = |connection: &HealthCheckConnection| {
            connection.reset_destination == Some(address) || connection.reset_destination.is_none() && server_may_reset
        };
        let wrongly_closed_connections: Vec<&HealthCheckConnection> = port_connections
            .iter()
            .filter(|connection| connection.syn_destination != address || !was_reset(connection))
            .collect();
        assert!(
            wrongly_closed_connections.is_empty(),
            "{description}: port {port}: {} of {}: {wrongly_closed_connections:?}",
            wrongly_closed_connections.len(),
            port_connections.len()
        );
    }
}

#[test]
fn connections_of_health_checks_are_closed_at_the_server() {
    skip_if!(find_missing_testbed_rights());
    let options =
        TestbedOptions { instance_name: "probed".to_owned(), server_count: 1, core_count: 1, ..Default::default() };
    let testbed = Testbed::create(options).unwrap();
    let _nginx_process = start_nginx(&testbed);
    let _silent_listeners = listen_without_accepting(&testbed);
    let mut segment_sniffer = SegmentSniffer::start(testbed.server(1).unwrap());
    let options = TestbedFleetOptions {
        policy_name: "rr".to_owned(),
        extra_fleet_text: service_configs_text(),
        runs_agents: false,
        ..Default::default()
    };
    let mut fleet = Fleet::start(&testbed, options).unwrap();

    wait_for_health_checks(&mut segment_sniffer);
    fleet.set_extra_fleet_text(&testbed, "").unwrap();
    assert_all_connections_were_reset(&testbed, &mut segment_sniffer, "checks are removed");

    fleet.set_extra_fleet_text(&testbed, &service_configs_text()).unwrap();
    wait_for_health_checks(&mut segment_sniffer);
    fleet.daemon_process("lb1").unwrap().terminate(*DEFAULT_WAIT_TIMEOUT).unwrap();
    assert_all_connections_were_reset(&testbed, &mut segment_sniffer, "the load balancer's daemon ends");
}
