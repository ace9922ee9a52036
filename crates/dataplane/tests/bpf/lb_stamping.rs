//! Tests of `timestamps = "lb"` with the kernels' TCP: servers have no coreward program, and their replies pass the
//! load balancer.

use std::io::{Read as _, Write as _};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::time::{Duration, Instant};

use coreward_dataplane::lb::{ClockState, LoadBalancer, Options, Server, ServerClock, ServiceIndex, XdpMode};
use coreward_intf as intf;
use coreward_model::consistency::{ServiceMode, Timestamps};
use coreward_model::cookie::{CookieKey, FleetKeys, KeyIndex};
use coreward_model::placement::PlacementRule;
use coreward_model::rss::seeded_rng;

use crate::support::balancer::{id, random_table, service};
use crate::support::network::{PinDirectory, Segment, VIP, mac_address, pin_to_one_cpu};
use crate::support::{missing_bpf_rights, skip_if};

const PORT: u16 = 80;
const TIMEOUT: Duration = Duration::from_secs(30);
const SERVER_COUNT: u8 = 3;

fn keys(current: KeyIndex) -> FleetKeys {
    FleetKeys { keys: [CookieKey { k0: 1, k1: 2 }, CookieKey { k0: 3, k1: 4 }], current }
}

struct TestEnv {
    lb: LoadBalancer,
    service: ServiceIndex,
    listeners: Vec<TcpListener>,
    segment: Segment,
    _pins: PinDirectory,
}

impl TestEnv {
    fn new() -> Self {
        let (segment, pins) = (Segment::new(SERVER_COUNT), PinDirectory::new());
        let options = Options { pin_directory: Some(pins.path()), ..Options::default() };
        let mut lb = LoadBalancer::load(options).unwrap();
        segment.load_balancer.run_inside(|| lb.attach("eth0", XdpMode::Generic)).unwrap();
        let mode = ServiceMode { timestamps: Timestamps::LoadBalancer, ..ServiceMode::default() };
        let index = lb.set_services(&[(service((VIP, PORT)), mode)]).unwrap()[0];
        lb.set_keys(&keys(KeyIndex::First));
        lb.set_time_key(index, CookieKey { k0: 77, k1: 88 });
        let ids: Vec<_> = (0..SERVER_COUNT).map(|number| id(u64::from(number) + 5)).collect();
        for (server, host) in ids.iter().zip(&segment.servers) {
            let mac = host.run_inside(|| mac_address("eth0"));
            lb.set_server(index, *server, Server { mac: Some(mac), is_eligible: true });
        }
        // Round robin gives every server the same number of connections.
        lb.install_table(index, &random_table(PlacementRule::RoundRobin, 1, 1, &ids, &mut seeded_rng(3, 0))).unwrap();
        let listen = || TcpListener::bind((VIP, PORT)).unwrap();
        let listeners = segment.servers.iter().map(|host| host.run_inside(listen)).collect();
        Self { lb, service: index, listeners, segment, _pins: pins }
    }

    fn connect(&self) -> TcpStream {
        let address = SocketAddr::from((VIP, PORT));
        let stream = self.segment.client.run_inside(|| TcpStream::connect_timeout(&address, TIMEOUT)).unwrap();
        stream.set_read_timeout(Some(TIMEOUT)).unwrap();
        stream
    }

    /// Opens a connection. Returns its client end, its server end, and the index of the server.
    fn connection(&self) -> (TcpStream, TcpStream, usize) {
        let client = self.connect();
        let end = Instant::now() + TIMEOUT;
        loop {
            for (number, listener) in self.listeners.iter().enumerate() {
                listener.set_nonblocking(true).unwrap();
                if let Ok((server, _)) = listener.accept() {
                    server.set_nonblocking(false).unwrap();
                    server.set_read_timeout(Some(TIMEOUT)).unwrap();
                    return (client, server, number);
                }
            }
            assert!(Instant::now() < end, "no server accepted the connection");
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    fn count(&self, counter: intf::lb_counter) -> u64 {
        self.lb.counters(self.service).packets[counter as usize]
    }

    fn clocks(&self) -> Vec<ServerClock> {
        self.lb.server_clocks(self.service).unwrap().into_iter().map(|(_, clock)| clock).collect()
    }
}

/// Sends 200 kB from the client to the server, and 200 kB from the server to the client.
fn exchange(client: &mut TcpStream, server: &mut TcpStream) {
    let sent: Vec<u8> = (0..200_000u32).map(|n| ((n * 7) >> 3) as u8).collect();
    let send = |from: &mut TcpStream, to: &mut TcpStream| {
        let mut received = vec![0; sent.len()];
        std::thread::scope(|scope| {
            scope.spawn(|| from.write_all(&sent).unwrap());
            to.read_exact(&mut received).unwrap();
        });
        assert_eq!(sent, received);
    };
    send(client, server);
    send(server, client);
}

#[test]
fn servers_with_one_clock_are_stamped_and_keep_connections() {
    skip_if!(missing_bpf_rights());
    pin_to_one_cpu();
    let env = TestEnv::new();
    // Until the servers' clocks are known, connections are not stamped, and have entries in the flow table.
    let mut plain: Vec<_> = (0..SERVER_COUNT).map(|_| env.connection()).collect();
    for (client, server, _) in &mut plain {
        exchange(client, server);
    }
    assert_eq!(env.count(intf::LB_COUNTER_REPLY_STAMPED), 0);
    while env.clocks().iter().any(|clock| clock.state() != ClockState::Known) {
        plain.push(env.connection());
        assert!(plain.len() < 400, "{:?}", env.clocks());
    }
    let mut stamped: Vec<_> = (0..2 * SERVER_COUNT).map(|_| env.connection()).collect();
    let by_cookie = env.count(intf::LB_COUNTER_ESTABLISHED);
    for (client, server, _) in stamped.iter_mut().chain(&mut plain) {
        exchange(client, server);
    }
    assert!(env.count(intf::LB_COUNTER_REPLY_STAMPED) > 100);
    assert!(env.count(intf::LB_COUNTER_ESTABLISHED) > by_cookie + 100);

    change_keys_and_close(env, stamped.into_iter().chain(plain).collect());
}

#[test]
fn servers_with_a_clock_per_connection_are_stamped_and_keep_connections() {
    skip_if!(missing_bpf_rights());
    pin_to_one_cpu();
    let env = TestEnv::new();
    for host in &env.segment.servers {
        host.set_sysctl("ipv4/tcp_timestamps", "1");
    }
    // Open connections show the rate of the servers' clocks.
    let mut plain: Vec<_> = (0..2 * SERVER_COUNT).map(|_| env.connection()).collect();
    let end = Instant::now() + TIMEOUT;
    while env.clocks().iter().any(|clock| clock.state() != ClockState::PerConnection) {
        plain.iter_mut().for_each(|(client, server, _)| exchange(client, server));
        assert!(Instant::now() < end, "{:?}", env.clocks());
    }
    assert_eq!(env.count(intf::LB_COUNTER_REPLY_STAMPED), 0);
    let mut stamped: Vec<_> = (0..4 * SERVER_COUNT).map(|_| env.connection()).collect();
    let by_flow = env.count(intf::LB_COUNTER_FLOW_TABLE);
    for (client, server, _) in &mut stamped {
        exchange(client, server);
    }
    // Each unstamped connection may still send one delayed acknowledgement.
    assert!(env.count(intf::LB_COUNTER_FLOW_TABLE) <= by_flow + plain.len() as u64);
    assert!(env.count(intf::LB_COUNTER_REPLY_STAMPED) > 100 && env.count(intf::LB_COUNTER_ESTABLISHED) > 100);
    for clock in env.clocks() {
        assert!(clock.disagreeing_replies > 0 && clock.problem().is_none(), "{clock:?}");
    }
    change_keys_and_close(env, stamped.into_iter().chain(plain).collect());
}

/// Asserts that stamped and unstamped connections continue while keys change and no server is eligible. Then closes
/// them.
fn change_keys_and_close(mut env: TestEnv, mut connections: Vec<(TcpStream, TcpStream, usize)>) {
    for current in [KeyIndex::Second, KeyIndex::First] {
        env.lb.set_keys(&keys(current));
        std::thread::sleep(Duration::from_millis(1100));
        for (client, server, _) in &mut connections {
            exchange(client, server);
        }
    }
    // Half of the connections are closed by the client first, the others by the server.
    for (number, (mut client, mut server, _)) in connections.into_iter().enumerate() {
        let (closing, waiting) = if number % 2 == 0 { (client, &mut server) } else { (server, &mut client) };
        drop(closing);
        assert_eq!(waiting.read(&mut [0]).unwrap(), 0);
    }
    for host in env.segment.servers.iter().chain([&env.segment.client]) {
        for counter in ["TcpExtPAWSEstab", "TcpExtPAWSActive", "TcpExtTSEcrRejected", "TcpInErrs", "TcpInCsumErrors"] {
            assert_eq!(host.kernel_counter(counter), 0, "{counter}");
        }
    }
}
