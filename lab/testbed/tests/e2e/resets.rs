//! When clients abort connections, the server must get the RST, with and without a timestamp, and keep no socket.

use std::io::{Read as _, Write as _};
use std::net::{SocketAddr, TcpStream};
use std::time::Duration;

use coreward_testbed::addresses::SERVICE_ADDRESS;
use coreward_testbed::fleet::{ServerAdminState, TestbedFleetOptions};
use coreward_testbed::stream_connections::StreamRequest;
use coreward_testbed::{Testbed, TestbedOptions, find_missing_testbed_rights, skip_if};
use socket2::SockRef;
use zerocopy::IntoBytes as _;

use crate::support::{FleetTestEnv, assert_eventually, sleep_ms};

const SOCKET_TIMEOUT: Duration = Duration::from_secs(60);

/// Opens a connection on which the server sends a packet every 100 ms for ten minutes. Waits for the first packet.
fn open_long_stream() -> TcpStream {
    let mut stream = TcpStream::connect_timeout(&SocketAddr::V4(SERVICE_ADDRESS), SOCKET_TIMEOUT).unwrap();
    stream.set_read_timeout(Some(SOCKET_TIMEOUT)).unwrap();
    let request = StreamRequest { content_seed: 1.into(), packet_count: 6_000.into(), duration_us: 600_000_000.into() };
    stream.write_all(request.as_bytes()).unwrap();
    stream.read_exact(&mut [0; 125]).unwrap();
    stream
}

/// Closes a connection without sending a packet to the peer. The peer's next packet then finds no socket, and the RST
/// in answer has no timestamp (tcp_v4_send_reset() in net/ipv4/tcp_ipv4.c).
fn close_silently(stream: TcpStream) {
    use std::os::fd::AsRawFd as _;
    let repair_flag: libc::c_int = 1;
    // SAFETY: the descriptor is open, and the option is an int that outlives the call.
    let repair_result = unsafe {
        libc::setsockopt(
            stream.as_raw_fd(),
            libc::IPPROTO_TCP,
            libc::TCP_REPAIR,
            (&raw const repair_flag).cast(),
            size_of::<libc::c_int>() as libc::socklen_t,
        )
    };
    assert_eq!(repair_result, 0, "TCP_REPAIR: {}", std::io::Error::last_os_error());
}

/// Returns the number of the service's TCP sockets on all servers, except listening sockets.
fn count_connected_sockets(testbed: &Testbed) -> usize {
    // State 0A is LISTEN (include/net/tcp_states.h). Other sockets of the service have its port as their local port.
    let port_column = format!(":{:04X} ", SERVICE_ADDRESS.port());
    let sockets_of_server = |number| {
        testbed.server(number).unwrap().run_within(|| {
            let socket_table = std::fs::read_to_string("/proc/thread-self/net/tcp")?;
            let is_connected_socket = |line: &&str| line.contains(&port_column) && !line.contains(" 0A ");
            Ok(socket_table.lines().filter(is_connected_socket).count())
        })
    };
    testbed.server_numbers().into_iter().map(|number| sockets_of_server(number).unwrap()).sum()
}

#[test]
fn resets_of_aborted_connections_reach_their_servers() {
    skip_if!(find_missing_testbed_rights());
    let options = TestbedOptions { instance_name: "resets".to_owned(), server_count: 4, ..TestbedOptions::default() };
    let mut env = FleetTestEnv::start(
        options,
        TestbedFleetOptions { policy_name: "rr".to_owned(), ..TestbedFleetOptions::default() },
    );
    let client = env.testbed.client().clone();
    client
        .run_within(|| {
            let mut open_streams: Vec<TcpStream> = (0..24).map(|_| open_long_stream()).collect();
            // Wait, because the server has its socket only after the handshake's last packet has arrived.
            assert_eventually(SOCKET_TIMEOUT, "24 connections are open", || {
                count_connected_sockets(&env.testbed) == 24
            });
            env.set_admin_state(1, Some(ServerAdminState::Draining));
            sleep_ms(500);
            // After an active close, the RST has a timestamp, and so the cookie.
            for stream in open_streams.split_off(12) {
                SockRef::from(&stream).set_linger(Some(Duration::ZERO))?;
            }
            assert_eventually(SOCKET_TIMEOUT, "12 connections are reset", || {
                count_connected_sockets(&env.testbed) == 12
            });
            open_streams.into_iter().for_each(close_silently);
            assert_eventually(SOCKET_TIMEOUT, "24 connections are reset", || {
                count_connected_sockets(&env.testbed) == 0
            });
            Ok(())
        })
        .unwrap();
    assert_eventually(SOCKET_TIMEOUT, "the load balancer counts", || env.sum_lb_counter("broadcast") >= 12);
}
