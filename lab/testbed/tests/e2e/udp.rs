//! UDP through the load balancer. With affinity by flow, each socket's datagrams keep their server while servers come
//! and go. With placement by packet, each datagram follows the policy.

use std::cell::Cell;
use std::collections::BTreeSet;
use std::io::ErrorKind;
use std::net::UdpSocket;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use coreward_testbed::addresses::{SERVICE_ADDRESS, VIP};
use coreward_testbed::fleet::{AdminState, FleetOptions};
use coreward_testbed::{TIMEOUT, Testbed, TestbedOptions, missing_testbed_rights, skip_if};

use crate::support::{TestEnv, eventually};

/// Returns the configuration of a UDP service at the address and port of the TCP service.
fn service(udp: &str, policy: &str) -> String {
    format!(
        "\n[[service]]\nname = \"datagrams\"\nvip = \"{SERVICE_ADDRESS}\"\nprotocol = \"udp\"\nudp = \"{udp}\"\n\
         policy = \"{policy}\"\n"
    )
}

fn start_env(instance: &str, udp: &str, policy: &str) -> TestEnv {
    let options = TestbedOptions { instance: instance.to_owned(), servers: 4, ..TestbedOptions::default() };
    TestEnv::start(options, FleetOptions { fleet_text: service(udp, policy), ..FleetOptions::default() })
}

/// Threads, one on every server, that answer each datagram with the server's number and the datagram, until this value
/// is dropped.
struct EchoServers(Arc<AtomicBool>);

impl EchoServers {
    fn start(testbed: &Testbed) -> Self {
        let done = Arc::new(AtomicBool::new(false));
        for number in testbed.server_numbers() {
            let socket =
                testbed.server(number).unwrap().within(|| Ok(UdpSocket::bind((VIP, SERVICE_ADDRESS.port()))?)).unwrap();
            socket.set_read_timeout(Some(Duration::from_millis(100))).unwrap();
            let done = Arc::clone(&done);
            std::thread::spawn(move || {
                let mut buffer = vec![0; 65_536];
                buffer[0] = number as u8;
                while !done.load(Ordering::Relaxed) {
                    if let Ok((length, client)) = socket.recv_from(&mut buffer[1..]) {
                        socket.send_to(&buffer[..=length], client).expect("an answer can be sent");
                    }
                }
            });
        }
        Self(done)
    }
}

impl Drop for EchoServers {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

/// Time without an answer after which a client repeats a request.
const RETRY_INTERVAL: Duration = Duration::from_secs(1);

/// Client socket, whose datagrams form a flow.
struct Flow {
    socket: UdpSocket,
    /// Id of the newest request.
    newest: Cell<u32>,
    repeats: Cell<u32>,
    duplicates: Cell<u32>,
}

impl Flow {
    fn open() -> Self {
        let socket = UdpSocket::bind("0.0.0.0:0").unwrap();
        socket.set_read_timeout(Some(RETRY_INTERVAL)).unwrap();
        socket.connect(SERVICE_ADDRESS).unwrap();
        Self { socket, newest: Cell::new(0), repeats: Cell::new(0), duplicates: Cell::new(0) }
    }

    /// Sends a request of `length` bytes, of which 4 are its id, until an answer comes. Returns the answering server.
    fn exchange(&self, length: usize) -> anyhow::Result<u16> {
        let newest = self.newest.get() + 1;
        self.newest.set(newest);
        let mut sent: Vec<u8> = (0..length).map(|index| (index % 251) as u8).collect();
        sent[..4].copy_from_slice(&newest.to_be_bytes());
        let end = Instant::now() + *TIMEOUT;
        self.socket.send(&sent)?;
        let mut buffer = vec![0; 65_536];
        loop {
            match self.socket.recv(&mut buffer) {
                Ok(received) if buffer[1..received] == sent[..] => return Ok(buffer[0].into()),
                Ok(received) => self.count_duplicate(&buffer[1..received])?,
                // The kernel drops datagrams when its backlog, which all tests share, is full.
                Err(error) if error.kind() == ErrorKind::WouldBlock => {
                    anyhow::ensure!(Instant::now() < end, "no answer to {length} bytes");
                    self.socket.send(&sent)?;
                    self.repeats.set(self.repeats.get() + 1);
                }
                Err(error) => return Err(error.into()),
            }
        }
    }

    /// Counts a second answer to a request. Fails if the request was not repeated.
    fn count_duplicate(&self, answer: &[u8]) -> anyhow::Result<()> {
        let id = answer.first_chunk().map(|id| u32::from_be_bytes(*id));
        anyhow::ensure!(id.is_some_and(|id| (1..self.newest.get()).contains(&id)), "question {id:?} came back");
        self.duplicates.set(self.duplicates.get() + 1);
        let (duplicates, repeats) = (self.duplicates.get(), self.repeats.get());
        anyhow::ensure!(duplicates <= repeats, "{duplicates} duplicates of {repeats} questions sent again");
        Ok(())
    }
}

#[test]
fn datagrams_of_a_flow_stay_with_their_server() {
    skip_if!(missing_testbed_rights());
    let mut env = start_env("udpflow", "flow", "rr");
    let _echoes = EchoServers::start(&env.testbed);
    let client = env.testbed.client().clone();
    client
        .within(|| {
            let flows: Vec<(Flow, u16)> = (0..64)
                .map(|_| {
                    let flow = Flow::open();
                    let server = flow.exchange(10).unwrap();
                    (flow, server)
                })
                .collect();
            let used: BTreeSet<u16> = flows.iter().map(|(_, server)| *server).collect();
            assert_eq!(used.len(), 4, "64 flows at servers {used:?}: once in 10^7 runs were it by lot");
            let all_stay = || flows.iter().for_each(|(flow, server)| assert_eq!(flow.exchange(100).unwrap(), *server));
            all_stay();
            // Datagrams longer than a frame come in fragments, the later ones without ports.
            flows.iter().for_each(|(flow, server)| assert_eq!(flow.exchange(5_000).unwrap(), *server));
            env.set_admin_state(1, Some(AdminState::Draining));
            eventually(*TIMEOUT, "server 1 drains", || (0..8).all(|_| Flow::open().exchange(10).unwrap() != 1));
            all_stay();
            env.set_admin_state(2, None);
            eventually(*TIMEOUT, "server 2 goes", || (0..8).all(|_| Flow::open().exchange(10).unwrap() > 2));
            all_stay();
            Ok(())
        })
        .unwrap();
}

#[test]
fn datagrams_by_packet_follow_the_policy() {
    skip_if!(missing_testbed_rights());
    let env = start_env("udppacket", "packet", "rr");
    let _echoes = EchoServers::start(&env.testbed);
    let answered: Vec<u16> = env
        .testbed
        .client()
        .within(|| {
            let flow = Flow::open();
            // The requests come faster than tables change. Still, packets of the same addresses and ports alternate
            // between servers.
            (0..80).map(|_| flow.exchange(10)).collect()
        })
        .unwrap();
    let used: BTreeSet<u16> = answered.iter().copied().collect();
    assert_eq!(used, BTreeSet::from([1, 2, 3, 4]), "{answered:?}");
}
