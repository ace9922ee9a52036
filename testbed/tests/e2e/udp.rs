//! UDP through the load balancer: by flow each socket's datagrams keep their server while servers come and go, by packet
//! each datagram goes where the policy says.

use std::collections::BTreeSet;
use std::net::UdpSocket;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use anyhow::Context as _;
use coreward_testbed::fleet::{FleetOptions, Standing};
use coreward_testbed::topology::{SERVICE, VIP};
use coreward_testbed::{Testbed, TestbedOptions, skip_without_privilege};

use crate::support::{Site, eventually};

/// A UDP service beside the TCP service, at the same address and port.
fn service(udp: &str, policy: &str) -> String {
    format!(
        "\n[[service]]\nname = \"datagrams\"\nvip = \"{SERVICE}\"\nprotocol = \"udp\"\nudp = \"{udp}\"\n\
         policy = \"{policy}\"\n"
    )
}

fn site(instance: &str, udp: &str, policy: &str) -> Site {
    let options = TestbedOptions { instance: instance.to_owned(), servers: 4, ..TestbedOptions::default() };
    Site::start(options, FleetOptions { more: service(udp, policy), ..FleetOptions::default() })
}

/// On every server a thread that answers each datagram with the server's number and the datagram, until this is dropped.
struct Echoes(Arc<AtomicBool>);

impl Echoes {
    fn start(testbed: &Testbed) -> Self {
        let done = Arc::new(AtomicBool::new(false));
        for number in testbed.server_numbers() {
            let socket =
                testbed.server(number).unwrap().within(|| Ok(UdpSocket::bind((VIP, SERVICE.port()))?)).unwrap();
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

impl Drop for Echoes {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

/// A client's socket.
struct Flow(UdpSocket);

impl Flow {
    fn open() -> Self {
        let socket = UdpSocket::bind("0.0.0.0:0").unwrap();
        socket.set_read_timeout(Some(Duration::from_secs(3))).unwrap();
        socket.connect(SERVICE).unwrap();
        Self(socket)
    }

    /// Sends `length` bytes; which server they came back from.
    fn ask(&self, length: usize) -> anyhow::Result<u16> {
        let sent: Vec<u8> = (0..length).map(|index| (index % 251) as u8).collect();
        self.0.send(&sent)?;
        let mut buffer = vec![0; 65_536];
        let received = self.0.recv(&mut buffer).with_context(|| format!("no answer to {length} bytes"))?;
        anyhow::ensure!(buffer[1..received] == sent[..], "{length} bytes came back as others");
        Ok(buffer[0].into())
    }
}

#[test]
fn datagrams_of_a_flow_stay_with_their_server() {
    if skip_without_privilege("datagrams_of_a_flow_stay_with_their_server") {
        return;
    }
    let mut site = site("udpflow", "flow", "rr");
    let _echoes = Echoes::start(&site.testbed);
    let client = site.testbed.client().clone();
    client
        .within(|| {
            let flows: Vec<(Flow, u16)> = (0..64)
                .map(|_| {
                    let flow = Flow::open();
                    let server = flow.ask(10).unwrap();
                    (flow, server)
                })
                .collect();
            let used: BTreeSet<u16> = flows.iter().map(|(_, server)| *server).collect();
            assert_eq!(used.len(), 4, "64 flows at servers {used:?}: once in 10^7 runs were it by lot");
            let all_stay = || flows.iter().for_each(|(flow, server)| assert_eq!(flow.ask(100).unwrap(), *server));
            all_stay();
            // What is longer than a frame comes in fragments, the later ones without ports.
            flows.iter().for_each(|(flow, server)| assert_eq!(flow.ask(5_000).unwrap(), *server));
            site.set(1, Some(Standing::Draining));
            eventually(Duration::from_secs(15), "server 1 drains", || {
                (0..8).all(|_| Flow::open().ask(1).unwrap() != 1)
            });
            all_stay();
            site.set(2, None);
            eventually(Duration::from_secs(15), "server 2 goes", || (0..8).all(|_| Flow::open().ask(1).unwrap() > 2));
            all_stay();
            Ok(())
        })
        .unwrap();
}

#[test]
fn datagrams_by_packet_go_where_the_policy_says() {
    if skip_without_privilege("datagrams_by_packet_go_where_the_policy_says") {
        return;
    }
    let site = site("udppacket", "packet", "rr");
    let _echoes = Echoes::start(&site.testbed);
    let answered: Vec<u16> = site
        .testbed
        .client()
        .within(|| {
            let flow = Flow::open();
            // Faster than tables change: the same addresses and ports take turns all the same.
            (0..80).map(|_| flow.ask(10)).collect()
        })
        .unwrap();
    let used: BTreeSet<u16> = answered.iter().copied().collect();
    assert_eq!(used, BTreeSet::from([1, 2, 3, 4]), "{answered:?}");
}
