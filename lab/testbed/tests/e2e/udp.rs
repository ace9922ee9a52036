//! UDP through the load balancer. With affinity by flow, each socket's datagrams keep their server while servers come
//! and go. With placement by packet, each datagram follows the policy.

use std::cell::Cell;
use std::collections::BTreeSet;
use std::io::ErrorKind;
use std::net::UdpSocket;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use coreward_testbed::addresses::{FIRST_IPV4_VIP, SERVICE_ADDRESS};
use coreward_testbed::fleet::{ServerAdminState, TestbedFleetOptions};
use coreward_testbed::{DEFAULT_WAIT_TIMEOUT, Testbed, TestbedOptions, find_missing_testbed_rights, skip_if};

use crate::support::{FleetTestEnv, assert_eventually};

/// Returns the configuration of a UDP service that has the address and port of the TCP service.
fn build_udp_service_config(udp_mode: &str, policy: &str) -> String {
    format!(
        "\n[[service]]\nname = \"datagrams\"\nvip = \"{SERVICE_ADDRESS}\"\nprotocol = \"udp\"\nudp = \"{udp_mode}\"\n\
         policy = \"{policy}\"\n"
    )
}

fn start_env(instance: &str, udp_mode: &str, policy: &str) -> FleetTestEnv {
    let options = TestbedOptions { instance_name: instance.to_owned(), server_count: 4, ..TestbedOptions::default() };
    FleetTestEnv::start(
        options,
        TestbedFleetOptions {
            extra_fleet_text: build_udp_service_config(udp_mode, policy),
            ..TestbedFleetOptions::default()
        },
    )
}

/// Echo servers, with one thread on every server of the testbed, until this value is dropped. They answer each datagram
/// with the server's number and the datagram.
struct DatagramEchoServers(Arc<AtomicBool>);

impl DatagramEchoServers {
    fn start(testbed: &Testbed) -> Self {
        let stop_flag = Arc::new(AtomicBool::new(false));
        for number in testbed.server_numbers() {
            let socket = testbed
                .server(number)
                .unwrap()
                .run_within(|| Ok(UdpSocket::bind((FIRST_IPV4_VIP, SERVICE_ADDRESS.port()))?))
                .unwrap();
            socket.set_read_timeout(Some(Duration::from_millis(100))).unwrap();
            let thread_stop_flag = Arc::clone(&stop_flag);
            std::thread::spawn(move || {
                let mut buffer = vec![0; 65_536];
                buffer[0] = number as u8;
                while !thread_stop_flag.load(Ordering::Relaxed) {
                    if let Ok((length, client)) = socket.recv_from(&mut buffer[1..]) {
                        socket.send_to(&buffer[..=length], client).expect("an answer can be sent");
                    }
                }
            });
        }
        Self(stop_flag)
    }
}

impl Drop for DatagramEchoServers {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

/// Time without an answer after which a client repeats a request.
const REQUEST_RETRY_INTERVAL: Duration = Duration::from_secs(1);

/// Client socket, whose datagrams belong to one flow.
struct ClientUdpFlow {
    socket: UdpSocket,
    newest_request_id: Cell<u32>,
    repeated_request_count: Cell<u32>,
    duplicate_answer_count: Cell<u32>,
}

impl ClientUdpFlow {
    fn open() -> Self {
        let socket = UdpSocket::bind("0.0.0.0:0").unwrap();
        socket.set_read_timeout(Some(REQUEST_RETRY_INTERVAL)).unwrap();
        socket.connect(SERVICE_ADDRESS).unwrap();
        Self {
            socket,
            newest_request_id: Cell::new(0),
            repeated_request_count: Cell::new(0),
            duplicate_answer_count: Cell::new(0),
        }
    }

    /// Sends a request of `length` bytes, including its id (4 bytes), until an answer arrives. Returns the answering
    /// server's number.
    fn query_server_number(&self, length: usize) -> anyhow::Result<u16> {
        let request_id = self.newest_request_id.get() + 1;
        self.newest_request_id.set(request_id);
        let mut sent_datagram: Vec<u8> = (0..length).map(|index| (index % 251) as u8).collect();
        sent_datagram[..4].copy_from_slice(&request_id.to_be_bytes());
        let deadline = Instant::now() + *DEFAULT_WAIT_TIMEOUT;
        self.socket.send(&sent_datagram)?;
        let mut buffer = vec![0; 65_536];
        loop {
            match self.socket.recv(&mut buffer) {
                Ok(received_length) if buffer[1..received_length] == sent_datagram[..] => return Ok(buffer[0].into()),
                Ok(received_length) => self.count_duplicate_answer(&buffer[1..received_length])?,
                // Repeat the request, because the kernel drops datagrams when its backlog, which all tests share, is
                // full.
                Err(error) if error.kind() == ErrorKind::WouldBlock => {
                    anyhow::ensure!(Instant::now() < deadline, "no answer to {length} bytes");
                    self.socket.send(&sent_datagram)?;
                    self.repeated_request_count.set(self.repeated_request_count.get() + 1);
                }
                Err(error) => return Err(error.into()),
            }
        }
    }

    /// Counts an answer to a request that has already been answered. Fails if the request was sent only once.
    fn count_duplicate_answer(&self, answer: &[u8]) -> anyhow::Result<()> {
        let id = answer.first_chunk().map(|id| u32::from_be_bytes(*id));
        anyhow::ensure!(
            id.is_some_and(|id| (1..self.newest_request_id.get()).contains(&id)),
            "question {id:?} came back"
        );
        self.duplicate_answer_count.set(self.duplicate_answer_count.get() + 1);
        let (duplicates, repeats) = (self.duplicate_answer_count.get(), self.repeated_request_count.get());
        anyhow::ensure!(duplicates <= repeats, "{duplicates} duplicates of {repeats} questions sent again");
        Ok(())
    }
}

#[test]
fn datagrams_of_a_flow_reach_the_same_server() {
    skip_if!(find_missing_testbed_rights());
    let mut env = start_env("udpflow", "flow", "rr");
    let _echo_servers = DatagramEchoServers::start(&env.testbed);
    let client = env.testbed.client().clone();
    client
        .run_within(|| {
            let flows_and_servers: Vec<(ClientUdpFlow, u16)> = (0..64)
                .map(|_| {
                    let client_flow = ClientUdpFlow::open();
                    let server = client_flow.query_server_number(10).unwrap();
                    (client_flow, server)
                })
                .collect();
            let used_servers: BTreeSet<u16> = flows_and_servers.iter().map(|(_, server)| *server).collect();
            assert_eq!(used_servers.len(), 4, "64 flows at servers {used_servers:?}: once in 10^7 runs were it by lot");
            let assert_flows_stay_at_servers = || {
                flows_and_servers
                    .iter()
                    .for_each(|(flow, server)| assert_eq!(flow.query_server_number(100).unwrap(), *server))
            };
            assert_flows_stay_at_servers();
            // Datagrams longer than a frame come in fragments, of which only the first has ports.
            flows_and_servers
                .iter()
                .for_each(|(flow, server)| assert_eq!(flow.query_server_number(5_000).unwrap(), *server));
            env.set_admin_state(1, Some(ServerAdminState::Draining));
            assert_eventually(*DEFAULT_WAIT_TIMEOUT, "server 1 drains", || {
                (0..8).all(|_| ClientUdpFlow::open().query_server_number(10).unwrap() != 1)
            });
            assert_flows_stay_at_servers();
            env.set_admin_state(2, None);
            assert_eventually(*DEFAULT_WAIT_TIMEOUT, "server 2 goes", || {
                (0..8).all(|_| ClientUdpFlow::open().query_server_number(10).unwrap() > 2)
            });
            assert_flows_stay_at_servers();
            Ok(())
        })
        .unwrap();
}

#[test]
fn datagrams_balanced_per_packet_follow_the_policy() {
    skip_if!(find_missing_testbed_rights());
    let env = start_env("udppacket", "packet", "rr");
    let _echo_servers = DatagramEchoServers::start(&env.testbed);
    let answering_servers: Vec<u16> = env
        .testbed
        .client()
        .run_within(|| {
            let client_flow = ClientUdpFlow::open();
            // The requests come faster than tables change. Still, packets with the same addresses and ports must
            // alternate between servers.
            (0..80).map(|_| client_flow.query_server_number(10)).collect()
        })
        .unwrap();
    let used_servers: BTreeSet<u16> = answering_servers.iter().copied().collect();
    assert_eq!(used_servers, BTreeSet::from([1, 2, 3, 4]), "{answering_servers:?}");
}
