//! Connections leave a load balancer's connection table when they have ended, and never when they are only idle.

use std::io::{Read as _, Write as _};
use std::net::{Ipv4Addr, SocketAddrV4, TcpStream};

use coreward_model::consistency::Consistency;
use coreward_testbed::addresses::SERVICE_ADDRESS;
use coreward_testbed::fleet::FleetOptions;
use coreward_testbed::stream::{PACKET_BYTES, Request, content};
use coreward_testbed::{Namespace, TIMEOUT, TestbedOptions, missing_testbed_rights, skip_if};
use socket2::{Domain, Socket, Type};
use zerocopy::IntoBytes as _;

use crate::support::{TestEnv, eventually, pause};

fn start_env(instance: &str) -> TestEnv {
    let options = TestbedOptions { instance: instance.to_owned(), servers: 2, ..TestbedOptions::default() };
    let fleet = FleetOptions {
        consistency: Consistency::Stateful,
        policy: "rr".to_owned(),
        load_balancer_text: "connection_timers = { idle = \"2s\", closing = \"1s\" }\n".to_owned(),
        ..FleetOptions::default()
    };
    TestEnv::start(options, fleet)
}

fn connect(env: &TestEnv) -> TcpStream {
    env.testbed.client().within(|| Ok(TcpStream::connect(SERVICE_ADDRESS)?)).unwrap()
}

/// Returns the number of connections that `coreward connections` shows.
fn count_connections(env: &TestEnv) -> usize {
    let directory = env.testbed.load_balancer_pin_directory(1);
    let mut command = std::process::Command::new(coreward_testbed::fleet::coreward_command().unwrap());
    command.args(["connections", "--service", "web0", "--pin-directory"]).arg(directory);
    let shown = env.testbed.run(env.testbed.load_balancer(1).unwrap(), command).unwrap().stdout;
    let shown = String::from_utf8(shown).unwrap();
    let count = shown.split_once(": ").and_then(|(_, rest)| rest.split(' ').next()?.parse().ok());
    count.unwrap_or_else(|| panic!("no count in {shown}"))
}

#[test]
fn silent_connection_stays_and_ended_ones_are_freed() {
    skip_if!(missing_testbed_rights());
    let env = start_env("silent");
    let mut silent = connect(&env);
    let closed: Vec<TcpStream> = (0..5).map(|_| connect(&env)).collect();
    eventually(*TIMEOUT, "six connections", || count_connections(&env) == 6);
    drop(closed);
    eventually(*TIMEOUT, "the closed ones are freed", || count_connections(&env) == 1);
    // The connection is idle for several times `idle`; its server was queried and still has it.
    pause(5_000);
    assert_eq!(count_connections(&env), 1);
    let by_table = env.counter("lb1", "connection_table");
    // The server still sends when the client closes. The side that closes first has the socket in TIME-WAIT; at the
    // server, TIME-WAIT would keep the entry for a minute.
    let request = Request { seed: 7.into(), packets: 4_000.into(), duration_us: 4_000_000.into() };
    silent.set_read_timeout(Some(*TIMEOUT)).unwrap();
    silent.write_all(request.as_bytes()).unwrap();
    let mut answer = vec![0; 4 * PACKET_BYTES];
    silent.read_exact(&mut answer).unwrap();
    assert!((0..).zip(&answer).all(|(position, byte)| content(7, position) == *byte));
    eventually(*TIMEOUT, "its packets go by the table", || env.counter("lb1", "connection_table") > by_table);
    drop(silent);
    eventually(*TIMEOUT, "nothing is left", || count_connections(&env) == 0);
}

/// Address of a client that gets no answers, because no machine has a route to it.
const UNREACHABLE: SocketAddrV4 = SocketAddrV4::new(Ipv4Addr::new(10, 9, 9, 9), 0);

/// Sends a SYN to the service, and nothing after it.
fn half_open(client: &Namespace) {
    let sent = client.within(|| {
        let socket = Socket::new(Domain::IPV4, Type::STREAM, None)?;
        // No device has the address.
        socket.set_ip_transparent_v4(true)?;
        socket.set_nonblocking(true)?;
        socket.bind(&UNREACHABLE.into())?;
        Ok(socket.connect(&SERVICE_ADDRESS.into()))
    });
    assert_eq!(sent.unwrap().unwrap_err().raw_os_error(), Some(libc::EINPROGRESS));
}

#[test]
fn half_open_entries_are_freed_without_a_controller() {
    skip_if!(missing_testbed_rights());
    let mut env = start_env("halves");
    let _open = connect(&env);
    eventually(*TIMEOUT, "a connection", || count_connections(&env) == 1);
    env.fleet.kill("controller").unwrap();
    (0..20).for_each(|_| half_open(env.testbed.client()));
    eventually(*TIMEOUT, "twenty half-open ones", || count_connections(&env) == 21);
    eventually(*TIMEOUT, "they are freed, and no other", || count_connections(&env) == 1);
}
