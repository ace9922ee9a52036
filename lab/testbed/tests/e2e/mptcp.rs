//! Multipath TCP of stock kernels (RFC 8684). The policy places the first subflow. The server signals another port,
//! which is a separate service, so that further subflows reach the same server.
//!
//! The server's kernel draws the token in MP_JOIN, so no load balancer can find the connection by it. So servers refuse
//! joins to the first address and port (`allow_join_initial_addr_port = 0`).

use std::fmt::Write as _;
use std::io::{Read as _, Write as _};
use std::net::{SocketAddr, SocketAddrV4, TcpListener, TcpStream};
use std::process::Command;
use std::time::Duration;

use coreward_testbed::addresses::{FIRST_IPV4_VIP, SERVICE_ADDRESS};
use coreward_testbed::fleet::{Fleet, ServerAdminState, TestbedFleetOptions};
use coreward_testbed::{DEFAULT_WAIT_TIMEOUT, Testbed, TestbedOptions, counters, find_missing_testbed_rights, skip_if};
use socket2::{Domain, Protocol, Socket, Type};

use crate::support::{assert_eventually, run_command_line, sleep_ms};

const SERVER_COUNT: u16 = 3;
/// Number of connections in the test. With random placement, a server gets no connection in only one of 10^6 runs.
const CONNECTION_COUNT: u64 = 36;
const TRANSFER_BYTES: usize = 100_000;
/// Port of the VIP for subflows that join connections to server 0. Server K uses this port plus K.
const FIRST_JOIN_PORT: u16 = 8000;

fn missing_mptcp_reason() -> Option<String> {
    if let Some(rights) = find_missing_testbed_rights() {
        return Some(rights);
    }
    let enabled_setting = std::fs::read_to_string("/proc/sys/net/mptcp/enabled").unwrap_or_default();
    let has_ip_mptcp =
        Command::new("ip").args(["mptcp", "limits"]).output().is_ok_and(|output| output.status.success());
    match (enabled_setting.trim(), has_ip_mptcp) {
        ("1", true) => None,
        ("1", false) => Some("`ip mptcp` does not work here".to_owned()),
        _ => Some("the kernel has no MPTCP (net.mptcp.enabled is not 1)".to_owned()),
    }
}

fn open_mptcp_socket() -> Socket {
    Socket::new(Domain::IPV4, Type::STREAM, Some(Protocol::from(libc::IPPROTO_MPTCP))).unwrap()
}

fn build_mptcp_join_service_configs() -> String {
    (1..=SERVER_COUNT).fold(String::new(), |mut text, number| {
        let join_port = FIRST_JOIN_PORT + number;
        write!(
            text,
            "\n[[service]]\nname = \"join{number}\"\nvip = \"{FIRST_IPV4_VIP}:{join_port}\"\npolicy = \
             \"hash\"\nservers = [\"s{number}\"]\n"
        )
        .unwrap();
        text
    })
}

/// Starts a listener whose threads answer each byte on a connection with the server's number. Each thread ends with its
/// connection.
fn start_server_number_listener(testbed: &Testbed, number: u16) {
    let listener: TcpListener = testbed
        .server(number)
        .unwrap()
        .run_within(|| {
            let listening_socket = open_mptcp_socket();
            listening_socket.set_reuse_address(true)?;
            listening_socket.bind(&SERVICE_ADDRESS.into())?;
            listening_socket.listen(64)?;
            Ok(listening_socket.into())
        })
        .unwrap();
    let answer_connection = move |mut stream: TcpStream| {
        let mut buffer = [0; 16_384];
        while let Ok(length @ 1..) = stream.read(&mut buffer) {
            buffer[..length].fill(number as u8);
            if stream.write_all(&buffer[..length]).is_err() {
                break;
            }
        }
    };
    // The thread ends with the test's process.
    std::thread::spawn(move || {
        while let Ok((stream, _)) = listener.accept() {
            std::thread::spawn(move || answer_connection(stream));
        }
    });
}

fn connect_to_service() -> TcpStream {
    let socket = open_mptcp_socket();
    socket.connect_timeout(&SocketAddr::V4(SERVICE_ADDRESS).into(), *DEFAULT_WAIT_TIMEOUT).unwrap();
    socket.set_read_timeout(Some(*DEFAULT_WAIT_TIMEOUT)).unwrap();
    socket.into()
}

/// Sends `length` bytes and returns the number of the server that answered all of them.
fn query_server_number(stream: &mut TcpStream, length: usize) -> u16 {
    let mut answering_server = 0;
    let mut remaining_bytes = length;
    let mut buffer = vec![0; 16_384];
    while remaining_bytes > 0 {
        let chunk_length = remaining_bytes.min(buffer.len());
        stream.write_all(&buffer[..chunk_length]).unwrap();
        stream.read_exact(&mut buffer[..chunk_length]).unwrap();
        answering_server = buffer[0].into();
        assert!(buffer[..chunk_length].iter().all(|byte| u16::from(*byte) == answering_server), "bytes of two servers");
        remaining_bytes -= chunk_length;
    }
    answering_server
}

fn create_testbed() -> Testbed {
    let options = TestbedOptions {
        instance_name: "mptcp".to_owned(),
        server_count: SERVER_COUNT,
        core_count: 1,
        load_balancer_count: 2,
        ..TestbedOptions::default()
    };
    Testbed::create(options).unwrap()
}

/// Starts servers, each of which announces its own port of the VIP for additional subflows.
fn start_mptcp_servers(testbed: &Testbed) {
    for number in 1..=SERVER_COUNT {
        let server = testbed.server(number).unwrap();
        server.run_within(|| Ok(std::fs::write("/proc/sys/net/mptcp/allow_join_initial_addr_port", "0")?)).unwrap();
        run_command_line(testbed, server, "ip mptcp limits set subflows 4 add_addr_accepted 0");
        run_command_line(
            testbed,
            server,
            &format!("ip mptcp endpoint add {FIRST_IPV4_VIP} port {} id 1 signal", FIRST_JOIN_PORT + number),
        );
        start_server_number_listener(testbed, number);
    }
}

/// Opens connections to the service, and returns them with the numbers of their servers.
fn open_streams(client: &coreward_testbed::NetworkNamespace) -> Vec<(TcpStream, u16)> {
    client
        .run_within(|| {
            let open_stream = |_| {
                let mut stream = connect_to_service();
                let server = query_server_number(&mut stream, 100);
                (stream, server)
            };
            Ok((0..CONNECTION_COUNT).map(open_stream).collect())
        })
        .unwrap()
}

/// Waits until every connection has a second subflow, and asserts that none has fallen back to TCP.
fn assert_all_connections_are_joined(client: &coreward_testbed::NetworkNamespace) {
    let read_client_counter =
        |name: &str| counters::read_kernel_counters(client).unwrap().get(name).copied().unwrap_or(0);
    assert_eventually(*DEFAULT_WAIT_TIMEOUT, "every connection has a second subflow", || {
        read_client_counter("MPTcpExtMPJoinSynAckRx") >= CONNECTION_COUNT
    });
    assert_eq!(read_client_counter("MPTcpExtMPJoinSynAckHMacFailure"), 0);
    assert_eq!(
        read_client_counter("MPTcpExtMPCapableFallbackSYNACK") + read_client_counter("MPTcpExtMPCapableFallbackACK"),
        0
    );
}

fn abort_first_subflows(testbed: &Testbed, client: &coreward_testbed::NetworkNamespace) {
    let mut ss = Command::new("ss");
    ss.args([
        "--kill",
        "--tcp",
        "state",
        "established",
        "dst",
        &SocketAddrV4::new(FIRST_IPV4_VIP, SERVICE_ADDRESS.port()).to_string(),
    ]);
    testbed.run_command(client, ss).unwrap();
}

#[test]
fn mptcp_subflows_reach_the_server_of_the_first_subflow() {
    skip_if!(missing_mptcp_reason());
    let mut testbed = create_testbed();
    start_mptcp_servers(&testbed);
    run_command_line(&testbed, testbed.client(), "ip mptcp limits set subflows 4 add_addr_accepted 4");
    let fleet_options = TestbedFleetOptions {
        policy_name: "rr".to_owned(),
        extra_fleet_text: build_mptcp_join_service_configs(),
        steers_connections: false,
        ..Default::default()
    };
    let mut fleet = Fleet::start(&testbed, fleet_options).unwrap();

    let client = testbed.client().clone();
    let mut streams_and_servers = open_streams(&client);
    assert!((1..=SERVER_COUNT).all(|number| streams_and_servers.iter().any(|(_, server)| *server == number)));
    assert_all_connections_are_joined(&client);

    let mut assert_connections_stay_at_servers = || {
        streams_and_servers
            .iter_mut()
            .for_each(|(stream, server)| assert_eq!(query_server_number(stream, TRANSFER_BYTES), *server))
    };
    assert_connections_stay_at_servers();
    let mut pool = fleet.server_pool().clone();
    pool.insert(1, ServerAdminState::Draining);
    fleet.set_server_pool(&testbed, pool).unwrap();
    fleet.kill_load_balancer(&mut testbed, 1, Duration::from_millis(150)).unwrap();
    sleep_ms(500);
    assert_connections_stay_at_servers();
    // Abort the first subflows, so that data in flight must continue on the joined subflows.
    abort_first_subflows(&testbed, &client);
    assert_connections_stay_at_servers();
}
