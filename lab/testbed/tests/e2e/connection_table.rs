//! Connections leave a load balancer's connection table when they have ended, but not when they are only idle.

use std::io::{Read as _, Write as _};
use std::net::{Ipv4Addr, SocketAddrV4, TcpStream};

use coreward_model::consistency::ConsistencyMode;
use coreward_testbed::addresses::SERVICE_ADDRESS;
use coreward_testbed::fleet::TestbedFleetOptions;
use coreward_testbed::stream_connections::{STREAM_PACKET_BYTES, StreamRequest, stream_content_byte};
use coreward_testbed::{DEFAULT_WAIT_TIMEOUT, NetworkNamespace, TestbedOptions, find_missing_testbed_rights, skip_if};
use socket2::{Domain, Socket, Type};
use zerocopy::IntoBytes as _;

use crate::support::{FleetTestEnv, assert_eventually, sleep_ms};

fn start_env(instance: &str) -> FleetTestEnv {
    let options = TestbedOptions { instance_name: instance.to_owned(), server_count: 2, ..TestbedOptions::default() };
    let fleet_options = TestbedFleetOptions {
        consistency: ConsistencyMode::Stateful,
        policy_name: "rr".to_owned(),
        extra_load_balancer_text: "connection_timers = { idle = \"2s\", closing = \"1s\" }\n".to_owned(),
        ..TestbedFleetOptions::default()
    };
    FleetTestEnv::start(options, fleet_options)
}

fn open_connection(env: &FleetTestEnv) -> TcpStream {
    env.testbed.client().run_within(|| Ok(TcpStream::connect(SERVICE_ADDRESS)?)).unwrap()
}

/// Returns the number of connections that `coreward connections` shows.
fn count_table_connections(env: &FleetTestEnv) -> usize {
    let directory = env.testbed.load_balancer_pin_directory(1);
    let mut command = std::process::Command::new(coreward_testbed::fleet::coreward_binary_path().unwrap());
    command.args(["connections", "--service", "web0", "--pin-directory"]).arg(directory);
    let connections_output = env.testbed.run_command(env.testbed.load_balancer(1).unwrap(), command).unwrap().stdout;
    let connections_output = String::from_utf8(connections_output).unwrap();
    let connection_count =
        connections_output.split_once(": ").and_then(|(_, count_text)| count_text.split(' ').next()?.parse().ok());
    connection_count.unwrap_or_else(|| panic!("no count in {connections_output}"))
}

#[test]
fn silent_connection_is_kept_and_closed_connections_are_freed() {
    skip_if!(find_missing_testbed_rights());
    let env = start_env("silent");
    let mut silent_connection = open_connection(&env);
    let closed_connections: Vec<TcpStream> = (0..5).map(|_| open_connection(&env)).collect();
    assert_eventually(*DEFAULT_WAIT_TIMEOUT, "six connections", || count_table_connections(&env) == 6);
    drop(closed_connections);
    assert_eventually(*DEFAULT_WAIT_TIMEOUT, "the closed ones are freed", || count_table_connections(&env) == 1);
    // The connection has been idle for several times `idle`, but its server was queried and still has the connection.
    sleep_ms(5_000);
    assert_eq!(count_table_connections(&env), 1);
    let table_hit_packet_count = env.query_load_balancer_counter("lb1", "connection_table");
    // The client closes while the server still sends, so that the client has the socket in TIME-WAIT. At the server,
    // TIME-WAIT would keep the entry for a minute.
    let request = StreamRequest { content_seed: 7.into(), packet_count: 4_000.into(), duration_us: 4_000_000.into() };
    silent_connection.set_read_timeout(Some(*DEFAULT_WAIT_TIMEOUT)).unwrap();
    silent_connection.write_all(request.as_bytes()).unwrap();
    let mut response_bytes = vec![0; 4 * STREAM_PACKET_BYTES];
    silent_connection.read_exact(&mut response_bytes).unwrap();
    assert!((0..).zip(&response_bytes).all(|(position, byte)| stream_content_byte(7, position) == *byte));
    assert_eventually(*DEFAULT_WAIT_TIMEOUT, "its packets go by the table", || {
        env.query_load_balancer_counter("lb1", "connection_table") > table_hit_packet_count
    });
    drop(silent_connection);
    assert_eventually(*DEFAULT_WAIT_TIMEOUT, "nothing is left", || count_table_connections(&env) == 0);
}

/// Client address that gets no answers, because no machine has a route to it.
const UNREACHABLE_CLIENT_ADDRESS: SocketAddrV4 = SocketAddrV4::new(Ipv4Addr::new(10, 9, 9, 9), 0);

/// Sends a SYN to the service, without completing the handshake.
fn send_lone_syn(client: &NetworkNamespace) {
    let send_result = client.run_within(|| {
        let socket = Socket::new(Domain::IPV4, Type::STREAM, None)?;
        // Transparent mode is necessary, because no device has the address.
        socket.set_ip_transparent_v4(true)?;
        socket.set_nonblocking(true)?;
        socket.bind(&UNREACHABLE_CLIENT_ADDRESS.into())?;
        Ok(socket.connect(&SERVICE_ADDRESS.into()))
    });
    assert_eq!(send_result.unwrap().unwrap_err().raw_os_error(), Some(libc::EINPROGRESS));
}

#[test]
fn half_open_connections_are_freed_without_a_controller() {
    skip_if!(find_missing_testbed_rights());
    let mut env = start_env("halves");
    let _open_connection = open_connection(&env);
    assert_eventually(*DEFAULT_WAIT_TIMEOUT, "a connection", || count_table_connections(&env) == 1);
    env.fleet.kill_daemon("controller").unwrap();
    (0..20).for_each(|_| send_lone_syn(env.testbed.client()));
    assert_eventually(*DEFAULT_WAIT_TIMEOUT, "twenty half-open ones", || count_table_connections(&env) == 21);
    assert_eventually(*DEFAULT_WAIT_TIMEOUT, "they are freed, and no other", || count_table_connections(&env) == 1);
}
